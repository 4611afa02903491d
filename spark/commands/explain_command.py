"""`sluice-cloud explain`: one window, the readings behind it, its history, and what it lacks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any

import click

from gateway.host.terminal import say
from gateway.host.terminal_text import counted, escaped, hanging
from spark.commands.answers import LIMIT, Form, print_found, say_json
from spark.commands.asked_options import TIME, zone_option
from spark.commands.cli_options import json_option, warehouse_option
from spark.commands.desk_session import asking, explain_nothing
from spark.commands.table_text import cell_text
from spark.desk.asked import Asked, microseconds
from spark.desk.row_text import json_row, time_text

if TYPE_CHECKING:
    from spark.desk.explain import Explanation, Standing
    from spark.desk.tables import Tables

TIMES = frozenset(
    {
        *("window_start", "window_end", "event_time", "received_time", "kafka_timestamp", "sent_event_time", "at"),
        *("last_kafka_timestamp", "after_time", "before_time", "heartbeat_time", "complete_to_time"),
        "retired_from_time",
    }
)
"""Columns that hold times."""
SHOWN: Mapping[str, Sequence[str]] = {
    "readings": (
        *("event_time", "value", "time_error_us", "time_quality", "device_boot", "device_sequence", "doubt"),
        *("gateway", "topic", "partition", "offset", "kafka_timestamp"),
    ),
    "places": ("gateway", "topic", "partition", "first_offset", "last_offset", "readings", "last_kafka_timestamp"),
    "missing": ("after_time", "before_time", "device_boot", "first", "last", "count", "explained", "reasons"),
    "gateways": (
        *("gateway", "readings", "heartbeat_time", "complete_to_time", "depth_rows", "oldest_age_s", "pending"),
        *("quarantined", "waiting", "retired_from_time", "waits"),
    ),
    "changes": ("at", "window_start", "cause", "n", "min", "max", "sum", "late", "n_then", "sum_then"),
}
"""Columns of each part in a terminal."""
SPARE: Mapping[str, Sequence[str]] = {
    "readings": ("doubt", "time_quality", "device_boot", "kafka_timestamp", "gateway"),
    "missing": ("device_boot",),
    "gateways": ("oldest_age_s", "waiting", "retired_from_time", "quarantined"),
    "changes": ("late", "min", "max", "sum"),
}
ABOUT = ("window_start", "window_end", "namespace", "device", "stream", "metric", "status", "basis", "why")
"""Columns of `windows` that are told in words."""


@click.command(short_help="One window: its readings, its history, and what it lacks.")
@warehouse_option
@click.option("--device", required=True, help="The window's device.")
@click.option("--metric", help="The window's metric. Needed if the device has several.")
@click.option("--window", "at", required=True, type=TIME, metavar="TIME", help="A time within it: 2026-03-14T12:00.")
@click.option("--stream", help="The window's stream. Needed if the device has several.")
@click.option("--namespace", help="The device's namespace. Needed if several have such a device.")
@click.option(
    "--size",
    "size_s",
    type=click.IntRange(1, 86_400),
    metavar="SECONDS",
    help="Length of the window. Default: as the table holds them.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=LIMIT,
    show_default=True,
    help="Most readings that are listed.",
)
@json_option
@zone_option("--window is")
def explain(  # noqa: PLR0913, PLR0917 - options
    warehouse: str,
    device: str,
    metric: str | None,
    at: datetime,
    stream: str | None,
    namespace: str | None,
    size_s: int | None,
    limit: int,
    as_json: bool,  # noqa: FBT001 - a flag
    zone: tzinfo,
) -> None:
    """Explain one window: how final it is, and why.

    It shows the readings behind the window and their places in Kafka, the changes of the window, what is missing of
    about that time, and what each gateway of the device told last. If no window holds that time, it says where the
    nearest ones are.
    """
    from spark.windows.window_sizes import WindowSizeError  # noqa: PLC0415

    form = Form(None, as_json, zone=zone)
    asked = Asked(device, None, stream, metric)
    with asking(warehouse) as tables:
        from spark.desk import explain as desk  # noqa: PLC0415 - as `asking` says

        try:
            found = desk.explain(
                tables,
                device,
                microseconds(at, zone),
                metric=metric,
                stream=stream,
                namespace=namespace,
                size_s=size_s,
                readings_max=limit,
            )
        except WindowSizeError as error:
            raise click.BadParameter(str(error), param_hint="--size") from error
        except desk.SeveralSeriesError as error:
            raise click.UsageError(str(error)) from error
        except desk.NoWindowError:
            _expect_known(tables, asked, form)
            raise
    _print(found, form)
    if found.figures is None and not found.missing:
        raise click.ClickException(f"{_title(found, zone)}: no such window; {_nearest(found, zone)}")


def _expect_known(tables: "Tables", asked: Asked, form: Form) -> None:
    """Raise click.BadParameter for a name that nobody knows."""
    explain_nothing(tables, asked, form, None, lambda _: "")


def _print(found: "Explanation", form: Form) -> None:
    parts: dict[str, list[dict[str, Any]]] = {
        "readings": [asdict(each) for each in found.readings],
        "places": [asdict(each) for each in found.places],
        "missing": [asdict(each) for each in found.missing],
        "gateways": [_standing(each) for each in found.gateways],
        "changes": [asdict(each) for each in found.revisions],
    }
    if form.as_json:
        told = {
            **json_row({"window_start": found.from_us, "window_end": found.until_us}, TIMES, form.zone),
            **found.series._asdict(),
            "window": None if found.figures is None else json_row(found.figures, TIMES, form.zone),
            "readings_count": found.readings_count,
            "unbounded": found.unbounded,
            "rejected": found.rejected,
        }
        say_json(told | {name: [json_row(row, TIMES, form.zone) for row in rows] for name, rows in parts.items()})
        return
    title = _title(found, form.zone)
    say(title, bold=len(title))
    say(hanging(_verdict(found), 0))
    if found.figures is not None:
        figures = {name: value for name, value in found.figures.items() if name not in ABOUT}
        say(hanging(", ".join(f"{name} {cell_text(name, value)}" for name, value in figures.items()), 0))
    _part("Readings", _readings_words(found), parts["readings"], "readings", form)
    if len(found.places) > 1 or found.readings_count > len(found.readings):
        _part("Places in Kafka", "", parts["places"], "places", form)
    _part("Missing", _missing_words(found), parts["missing"], "missing", form)
    _part(
        "Gateways", "" if found.gateways else "none is known to serve the device", parts["gateways"], "gateways", form
    )
    _part("Changes", "" if found.revisions else "none are kept", parts["changes"], "changes", form)


def _part(title: str, words: str, rows: list[dict[str, Any]], name: str, form: Form) -> None:
    say()
    say(f"{title}: {words}" if words else title, bold=len(title))
    if rows:
        # Only a window that is longer than the table's has several.
        is_one = len({row.get("window_start") for row in rows}) == 1
        shown = [each for each in SHOWN[name] if each != "window_start" or not is_one]
        print_found(rows, shown, [each for each in shown if each in TIMES], form, spare=SPARE.get(name, ()))


def _title(found: "Explanation", zone: tzinfo) -> str:
    namespace, device, stream, metric = map(escaped, found.series)
    where = f"{metric} of device {device} ({namespace}, stream {stream})"
    return f"{where}, {time_text(found.from_us, zone)} to {time_text(found.until_us, zone)}"


def _verdict(found: "Explanation") -> str:
    if found.figures is None:
        return "no window: no reading of that time is here"
    basis = f" by {found.basis}" if found.basis else ""
    return f"{found.status}{basis}" + (f": {found.why}" if found.why else "")


def _readings_words(found: "Explanation") -> str:
    words = counted(found.readings_count, "value")
    if found.readings_count > len(found.readings):
        words += f", of which these are the first {len(found.readings)} (--limit N shows N)"
    n = 0 if found.figures is None else found.figures["n"]
    if n != found.readings_count:
        words += f"; the window has {n}, for `log` does not hold the same readings any more, or not yet"
    if found.unbounded:
        words += f"; {found.unbounded} more are in no window, for nothing bounds their time"
    return words


def _missing_words(found: "Explanation") -> str:
    rejected = f"{counted(found.rejected, 'record')} of that time in the quarantine" if found.rejected else ""
    return rejected or ("" if found.missing else "nothing of about that time")


def _standing(each: "Standing") -> dict[str, Any]:
    told = each.told
    names = ("depth_rows", "oldest_age_s", "pending", "quarantined", "waiting", "unread_topics", "buffer", "site")
    times = ("heartbeat", "complete_to", "retired_from")
    return {
        "gateway": each.gateway,
        "readings": each.readings,
        "waits": each.waits,
        **{f"{name}_time": None if told is None else getattr(told, f"{name}_us") for name in times},
        "heartbeat_error_us": None if told is None else told.heartbeat_error_us,
        **{name: None if told is None else getattr(told, name) for name in names},
    }


def _nearest(found: "Explanation", zone: tzinfo) -> str:
    before_us, after_us = found.nearest_us
    near = [
        f"the {words} it begins at {time_text(us, zone)}"
        for us, words in ((before_us, "nearest before"), (after_us, "nearest after"))
        if us is not None
    ]
    return "; ".join(near) if near else "there is none at any other time"
