"""Options that look-ups share: which rows are asked for, and the form of the answer."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from spark.commands.answers import LIMIT, SUFFIXES, Form
from spark.desk.asked import Asked, microseconds, parsed_span, parsed_time, parsed_zone

Command = TypeVar("Command", bound=Callable[..., Any])


class ZoneType(click.ParamType[tzinfo]):
    name = "zone"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tzinfo:
        if isinstance(value, tzinfo):
            return value
        try:
            return parsed_zone(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TimeType(click.ParamType[datetime]):
    """A date or a time in ISO 8601. Without a zone of its own, it is in the zone of --zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return parsed_time(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class LastType(click.ParamType[timedelta]):
    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            return parsed_span(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TIME = TimeType()


def zone_option(also: str) -> Callable[[Command], Command]:
    """The option --zone. `also` names the options whose times are in that zone, too."""
    return click.option(
        "--zone",
        type=ZoneType(),
        default="UTC",
        show_default=True,
        metavar="ZONE",
        help=f"Show times as clocks there show them: Europe/Berlin. {also} in this zone, too.",
    )


_LIMITS = {
    "device": [click.option("--device", help="Show this device only.")],
    "site": [click.option("--site", help="Show this site of the registry only: devices while they were there.")],
    "stream": [click.option("--stream", help="Show this stream only.")],
    "metric": [click.option("--metric", help="Show this metric only.")],
    "span": [
        click.option("--since", type=TIME, metavar="TIME", help="Show times from then on: 2026-03-14T12:00."),
        click.option("--until", type=TIME, metavar="TIME", help="Show times before then."),
        click.option("--last", type=LastType(), metavar="SPAN", help="Show times from so long ago on: 30min, 2h, 7d."),
    ],
}
_FORM = [
    click.option(
        "--limit",
        type=click.IntRange(1, 1_000_000),
        help=f"Most rows. A note says if there are more. Default: {LIMIT}, and all with --csv and --out.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line."),
    click.option("--csv", "as_csv", is_flag=True, help="Print CSV."),
    click.option(
        "--out",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help=f"Write the rows to a file, which ends in {' or '.join(SUFFIXES)}.",
    ),
    zone_option("--since and --until are"),
]


def limited(*limits: str) -> Callable[[Command], Command]:
    """Add the options of these limits to a command, which gets them as `asked`, and --zone as `zone`."""

    def with_options(command: Command) -> Command:
        @wraps(command)
        def run(*arguments: Any, zone: tzinfo, **options: Any) -> Any:
            return command(*arguments, asked=_asked(limits, zone, options), zone=zone, **options)

        found: Command = _with_options(run, [*(each for name in limits for each in _LIMITS[name]), *_FORM[-1:]])
        return found

    return with_options


def asks(*limits: str) -> Callable[[Command], Command]:
    """Add the options of these limits to a command, which gets them as `asked`, and the form as `form`."""

    def with_options(command: Command) -> Command:
        @wraps(command)
        def run(
            *arguments: Any,
            limit: int | None,
            as_json: bool,
            as_csv: bool,
            out: Path | None,
            zone: tzinfo,
            **options: Any,
        ) -> Any:
            asked = _asked(limits, zone, options)
            form = _form(limit, out, zone, as_json=as_json, as_csv=as_csv)
            return command(*arguments, asked=asked, form=form, **options)

        found: Command = _with_options(run, [*(each for name in limits for each in _LIMITS[name]), *_FORM])
        return found

    return with_options


def _with_options(run: Any, options: list[Callable[[Any], Any]]) -> Any:
    for option in reversed(options):
        run = option(run)
    return run


def _asked(limits: tuple[str, ...], zone: tzinfo, options: dict[str, Any]) -> Asked:
    """Take the limits out of a command's options."""
    told: dict[str, Any] = {
        name: options.pop(name) for name in ("device", "site", "stream", "metric") if name in limits
    }
    if "span" in limits:
        told |= _span(zone, *(options.pop(name) for name in ("since", "until", "last")))
    return Asked(**told)


def _span(
    zone: tzinfo, since: datetime | None, until: datetime | None, last: timedelta | None
) -> dict[str, int | None]:
    if last is not None and (since is not None or until is not None):
        raise click.UsageError("--last says by itself from when; leave out --since and --until")
    if last is not None:
        since = datetime.now(UTC) - last
    since_us, until_us = (None if time is None else microseconds(time, zone) for time in (since, until))
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise click.UsageError("--since is not before --until")
    return {"since_us": since_us, "until_us": until_us}


def _form(limit: int | None, out: Path | None, zone: tzinfo, *, as_json: bool, as_csv: bool) -> Form:
    if as_json + as_csv + (out is not None) > 1:
        raise click.UsageError("--json, --csv and --out are three forms of an answer; give one of them")
    if out is not None and out.suffix not in SUFFIXES:
        raise click.BadParameter(f"{out} has none of the endings {', '.join(SUFFIXES)}", param_hint="--out")
    shown = limit if limit is not None or as_csv or out is not None else LIMIT
    return Form(shown, as_json, as_csv, out, zone)
