"""Options that look-ups share: which rows are asked for, and the form of the answer."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click

from spark.commands.answers import LIMIT, SUFFIXES, Form
from spark.desk.asked import Asked, microseconds

SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
"""Units of --last."""
_SPAN = re.compile(r"(\d{1,5})\s*([a-z]+)")
Command = TypeVar("Command", bound=Callable[..., Any])


class ZoneType(click.ParamType[tzinfo]):
    name = "zone"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tzinfo:
        if isinstance(value, tzinfo):
            return value
        if value == "UTC":
            # The default needs no table of zones on the machine.
            return UTC
        try:
            return ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            self.fail(f"{value!r} is no time zone; write one such as Europe/Berlin", param, ctx)


class TimeType(click.ParamType[datetime]):
    """A date or a time in ISO 8601. Without a zone of its own, it is in the zone of --zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time; write 2026-03-14 or 2026-03-14T12:00", param, ctx)


class LastType(click.ParamType[timedelta]):
    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        found = _SPAN.fullmatch(value)
        if found is None or found[2] not in SECONDS:
            self.fail(f"{value!r} is no span of time; write 30min, 2h, 7d or 4w", param, ctx)
        return timedelta(seconds=int(found[1]) * SECONDS[found[2]])


_LIMITS = {
    "device": [click.option("--device", help="Show this device only.")],
    "site": [click.option("--site", help="Show this site of the registry only: devices while they were there.")],
    "stream": [click.option("--stream", help="Show this stream only.")],
    "metric": [click.option("--metric", help="Show this metric only.")],
    "span": [
        click.option("--since", type=TimeType(), metavar="TIME", help="Show times from then on: 2026-03-14T12:00."),
        click.option("--until", type=TimeType(), metavar="TIME", help="Show times before then."),
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
    click.option(
        "--zone",
        type=ZoneType(),
        default="UTC",
        show_default=True,
        metavar="ZONE",
        help="Show times as clocks there show them: Europe/Berlin. --since and --until are in this zone, too.",
    ),
]


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
            told: dict[str, Any] = {
                name: options.pop(name) for name in ("device", "site", "stream", "metric") if name in limits
            }
            if "span" in limits:
                told |= _span(zone, *(options.pop(name) for name in ("since", "until", "last")))
            form = _form(limit, out, zone, as_json=as_json, as_csv=as_csv)
            return command(*arguments, asked=Asked(**told), form=form, **options)

        found: Any = run
        for option in reversed([*(each for name in limits for each in _LIMITS[name]), *_FORM]):
            found = option(found)
        return found  # type: ignore[no-any-return]

    return with_options


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
