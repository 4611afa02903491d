"""Runs the pass on executors, and brings the files that its tasks made to the driver."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Row

from spark.arrow_pass.plan import BatchNumbers, ChangesPlan, TableFolder, WindowRules
from spark.decode.codec_declarations import Streams
from spark.decode.record_frames import Rule, with_bounded_values
from spark.engine.arrow_map import map_in_arrow
from spark.engine.made_file import MadeFile
from spark.engine.warehouse_folder import is_local
from spark.log import device_parts
from spark.log.device_parts import device_parts_path
from spark.log.lane_sequences import Lane, LowNumbers
from spark.log.log_table import LOG_PARTITION, SKIPPING_COLUMNS, BatchId, BatchIds, log_path
from spark.log.record_verdicts import Verdicts
from spark.windows import windows_table
from spark.windows.windows_table import WINDOW_PARTITION, windows_path

if TYPE_CHECKING:
    import pyarrow as pa

MADE_SCHEMA = """
    of string, action string, name string, content binary,
    devices array<bigint>, counts array<string>, late bigint, revised bigint, set_aside bigint, of_senders array<string>
"""
"""A row for each file, and one with the figures of a task."""
TABLES = ("log", "aside", "parts", "device_parts", "changes")
"""Tables that a pass makes files of. `aside` has rows of `log`."""


@dataclass(frozen=True, slots=True)
class MadeFiles:
    """The files of a batch, and its figures."""

    log: list[MadeFile]
    aside: list[MadeFile]
    """Rows of `log` whose numbers came before, in no part."""
    parts: list[MadeFile]
    device_parts: list[MadeFile]
    changes: list[MadeFile]
    """Rows of `window_changes`, one for each part."""
    is_split: bool
    """True if two tasks may have made parts of one window."""
    counts: list[str]
    """The figures of the rows of `log`, as `row_counts` has them."""
    late: int
    """Values that came late."""
    revised: int
    """Parts with such values."""
    set_aside: int
    """Rows in `aside`."""
    of_senders: set[str]
    """Topics whose records have the time of their sender, not Kafka's."""


@dataclass(frozen=True, slots=True)
class BatchPass:
    """The pass over one batch."""

    tables: str
    ordinal: int
    verdicts: Verdicts
    windows: WindowRules
    changes: ChangesPlan | None
    """None if nothing is written to `window_changes`."""
    seen: Mapping[Lane, LowNumbers]
    """Numbers that came in earlier batches."""

    def over(self, records: DataFrame, batch: BatchId | BatchIds, *, are_judged: bool = False) -> MadeFiles:
        """Make the files of a batch's rows of `log`, none marked as a duplicate, and of the parts of their windows.

        `records` have `topic_id`. They come from Spark's Kafka source, or are typed, or `are_judged` already.
        """
        rules = judging(self.verdicts)
        verdicts = self.verdicts
        log = table_folder(log_path(self.tables), LOG_PARTITION, SKIPPING_COLUMNS)
        parts = table_folder(windows_path(self.tables), WINDOW_PARTITION, windows_table.SKIPPING_COLUMNS)
        devices = table_folder(device_parts_path(self.tables), "", device_parts.SKIPPING_COLUMNS)
        numbers, windows = _numbers(batch, self.ordinal, verdicts.streams), self.windows
        changes, seen = self.changes, self.seen

        def task(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
            import pyarrow as pa  # noqa: PLC0415 - executors have it

            from spark.arrow_pass.partition_pass import PartitionPass  # noqa: PLC0415

            over = PartitionPass(log, parts, devices, numbers, verdicts, windows, changes, seen)
            made = over.over(batches, () if are_judged else rules())
            schema = pa.schema(
                [
                    *(("of", pa.string()), ("action", pa.string()), ("name", pa.string())),
                    *(("content", pa.binary()), ("devices", pa.list_(pa.int64())), ("counts", pa.list_(pa.string()))),
                    *(
                        ("late", pa.int64()),
                        ("revised", pa.int64()),
                        ("set_aside", pa.int64()),
                        ("of_senders", pa.list_(pa.string())),
                    ),
                ]
            )
            rows = [file._asdict() | {"of": name} for name in TABLES for file in getattr(made, name)]
            figures = {name: getattr(made, name) for name in ("devices", "counts", "late", "revised", "set_aside")}
            figures["of_senders"] = sorted(made.of_senders)
            yield pa.RecordBatch.from_pylist([*rows, figures], schema=schema)

        made = map_in_arrow(with_bounded_values(records), task, MADE_SCHEMA).collect()
        figures = [row for row in made if row.of is None]
        with_parts = [device for task in figures for device in task.devices]
        return MadeFiles(
            **{name: [made_file(row) for row in made if row.of == name] for name in TABLES},
            is_split=len(set(with_parts)) < len(with_parts),
            counts=[count for task in figures for count in task.counts],
            late=sum(task.late for task in figures),
            revised=sum(task.revised for task in figures),
            set_aside=sum(task.set_aside for task in figures),
            of_senders={topic for task in figures for topic in task.of_senders},
        )


def judging(verdicts: Verdicts) -> Callable[[], tuple[Rule, ...]]:
    """Return a function that makes the rules of typed records. Each task calls it once."""
    return lambda: (verdicts.judge().judge,)


def table_folder(path: str, partition: str, statistics: str) -> TableFolder:
    """The folder of a table. `statistics` names the columns with statistics."""
    return TableFolder(path if is_local(path) else None, partition, tuple(statistics.split(",")))


def _numbers(batch: BatchId | BatchIds, ordinal: int, streams: Streams) -> BatchNumbers:
    ingest, number = (batch.ingest, batch.number) if isinstance(batch, BatchId) else (None, None)
    return BatchNumbers(ordinal, version("sluice"), streams.version, ingest, number)


def made_file(row: Row) -> MadeFile:
    """Return the file of a row that a task yielded."""
    return MadeFile(row.action, row.name, None if row.content is None else bytes(row.content))
