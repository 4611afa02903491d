"""Plain values that a pass takes along to executors. It needs neither Arrow nor Spark."""

from dataclasses import dataclass, field

from spark.decode.codec_declarations import Times
from spark.log.edge_times import Clocks

COUNTED_COLUMNS = (
    *("topic_id", "topic", "partition", "offset", "kafka_timestamp", "value", "namespace", "gateway", "device"),
    *("stream", "buffer", "lane", "lane_sequence", "ce_id", "ce_type", "event_time", "time_error_us", "time_quality"),
    *("gateway_boot", "boot_time_us", "boot_time_error_us", "device_boot", "device_sequence", "device_counter"),
    *("undeclared", "duplicate", "reject_reason", "ingest"),
)
"""Columns of `log` that are counted for the driver, beside the date. Of `value`, only that of events matters."""
SUMS = ("rows", "rejected", "deleted", "corrections", "events", "event_bytes", "losses", "unwindowed", "counted")
"""Figures of rows that are sums. `spark.ingest.census` explains them."""
UNDECLARED_NAMES_MAX = 100
"""Undeclared members that are kept of one stream. A program that makes up names would fill any list."""


@dataclass(frozen=True, slots=True)
class TableFolder:
    """The folder of a Delta table."""

    path: str | None
    """None if the folder is not local."""
    partition: str
    """Column of the date; empty if the table is not partitioned."""
    statistics: tuple[str, ...]
    """Columns with statistics."""


@dataclass(frozen=True, slots=True)
class BatchNumbers:
    """The columns of `log` that tell of the batch."""

    ordinal: int
    code_version: str
    declarations: str
    ingest: str | None
    """None if each record brings its own `ingest` and `batch`."""
    batch: int | None


@dataclass(frozen=True, slots=True)
class WindowRules:
    """All that decides on the windows of readings beside the readings themselves."""

    window_s: int
    times: Times
    clocks: Clocks = field(default_factory=Clocks)
    """Corrections of gateways' clocks, as they are known now."""
    open_from_us: int | None = None
    """Start of the first window that may change; None if all may."""


@dataclass(frozen=True, slots=True)
class ChangesPlan:
    """All that makes rows of `window_changes` from parts."""

    folder: TableFolder
    columns: tuple[str, ...]
    """Columns that are those of the parts."""
    cause: str
    version: int
    at_us: int
