"""The look-ups: which columns of a view they show, in which order, and the latest rows first."""

from collections.abc import Sequence
from dataclasses import dataclass

STREAM = ("namespace", "device", "stream", "metric")
UNASKED = ("values", "sum_of_squares", "ordinal", "window_date")
"""Columns of windows that are shown only where all are asked for."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """How rows of one view are shown."""

    columns: tuple[str, ...]
    """Columns of a table on a terminal; a program gets `more` as well."""
    time: str | None
    """The time that a span limits, and by which the latest rows come first; None if rows have none."""
    then: tuple[str, ...]
    """Order of rows of one time."""
    more: tuple[str, ...] = ()
    has_others: bool = False
    """True if a program gets all other columns too, but for those of UNASKED."""

    def shown(self, names: Sequence[str], *, full: bool = False) -> tuple[str, ...]:
        """Return the columns that a program gets of a view that has these."""
        first = self.columns + self.more
        if not self.has_others:
            return first
        return first + tuple(name for name in names if name not in first and (full or name not in UNASKED))

    def ordered(self, rows: str, *, oldest_first: bool = False) -> str:
        """Return a SELECT of rows in order."""
        newest = f"{self.time} {'ASC' if oldest_first else 'DESC'} NULLS LAST"
        order = self.then if self.time is None else (newest, *self.then)
        return f"SELECT * FROM ({rows}) ORDER BY {', '.join(order)}"


READINGS = LookUp(
    columns=("event_time", "namespace", "device", "stream", "metric", "value", "time_error_us", "time_quality"),
    more=(
        *("device_boot", "device_sequence", "device_counter", "doubt", "ce_id"),
        *("sent_event_time", "sent_time_error_us", "sent_time_quality", "correction_version"),
    ),
    time="event_time",
    then=STREAM,
)
WINDOWS = LookUp(
    columns=(
        *("window_start", "window_end", "namespace", "device", "stream", "metric", "n", "min", "max", "mean"),
        *("sum", "first", "last", "status", "basis", "late", "why"),
    ),
    time="window_start",
    then=STREAM,
    has_others=True,
)
GAPS = LookUp(
    columns=(
        *("after_time", "before_time", "namespace", "device", "stream", "device_boot", "first", "last", "count"),
        *("explained", "reasons", "device_counter"),
    ),
    time="before_time",
    then=("namespace", "device", "device_boot", "first", "reasons"),
)
LOSSES = LookUp(
    columns=(
        *("from_time", "to_time", "namespace", "gateway", "device", "reason", "count", "first_sequence"),
        *("last_sequence", "device_boot", "told_time"),
    ),
    time="to_time",
    then=("namespace", "gateway", "device", "reason", "first_sequence"),
)
GATEWAYS = LookUp(
    columns=(
        *("namespace", "gateway", "site", "heartbeat_time", "complete_to_time", "depth_rows", "oldest_age_s"),
        *("pending", "waiting", "unread_topics", "retired_from_time", "buffer"),
    ),
    time=None,
    then=("namespace", "gateway", "buffer"),
    has_others=True,
)
TROUBLE = ("namespace", "gateway", "site", "level", "code", "means", "todo", "heard_time")
"""Columns of gateways in trouble, which have an order of their own."""
QUARANTINE = LookUp(
    columns=("kafka_timestamp", "topic", "partition", "offset", "device", "retried", "reason"),
    time="kafka_timestamp",
    then=("topic", "partition", '"offset"'),
)
