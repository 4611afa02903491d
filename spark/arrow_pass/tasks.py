"""Runs the pass on executors, and brings the files that its tasks made to the driver."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Row

from spark.arrow_pass.plan import BatchNumbers, TableFolder, WindowRules
from spark.decode.codec_declarations import Streams
from spark.decode.record_frames import Rule, with_bounded_values
from spark.engine.arrow_map import map_in_arrow
from spark.engine.made_file import MadeFile
from spark.engine.warehouse_folder import is_local
from spark.log.log_table import LOG_PARTITION, SKIPPING_COLUMNS, BatchId, BatchIds, log_path
from spark.log.record_verdicts import Verdicts
from spark.windows import windows_table
from spark.windows.windows_table import WINDOW_PARTITION, windows_path

if TYPE_CHECKING:
    import pyarrow as pa

MADE_SCHEMA = "is_of_log boolean, action string, name string, content binary, devices array<bigint>"
"""A row for each file, and one with the devices of a task's parts."""


@dataclass(frozen=True, slots=True)
class MadeFiles:
    """The files of a batch."""

    log: list[MadeFile]
    parts: list[MadeFile]
    is_split: bool
    """True if two tasks may have made parts of one window."""


@dataclass(frozen=True, slots=True)
class BatchPass:
    """The pass over one batch."""

    tables: str
    ordinal: int
    verdicts: Verdicts
    windows: WindowRules

    def over(self, records: DataFrame, batch: BatchId | BatchIds, *, are_judged: bool = False) -> MadeFiles:
        """Make the files of a batch's rows of `log`, none marked as a duplicate, and of the parts of their windows.

        `records` have `topic_id`. They come from Spark's Kafka source, or are typed, or `are_judged` already.
        """
        rules = judging(self.verdicts)
        verdicts = self.verdicts
        log = _folder(log_path(self.tables), LOG_PARTITION, SKIPPING_COLUMNS)
        parts = _folder(windows_path(self.tables), WINDOW_PARTITION, windows_table.SKIPPING_COLUMNS)
        numbers, windows = _numbers(batch, self.ordinal, verdicts.streams), self.windows

        def task(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
            import pyarrow as pa  # noqa: PLC0415 - executors have it

            from spark.arrow_pass.partition_pass import PartitionPass  # noqa: PLC0415

            made = PartitionPass(log, parts, numbers, verdicts, windows).over(batches, () if are_judged else rules())
            rows = [(True, *file, None) for file in made.log] + [(False, *file, None) for file in made.parts]
            columns = zip(*rows, (None, None, None, None, made.devices), strict=True)
            kinds = (pa.bool_(), pa.string(), pa.string(), pa.binary(), pa.list_(pa.int64()))
            names = ["is_of_log", "action", "name", "content", "devices"]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, names=names)

        made = map_in_arrow(with_bounded_values(records), task, MADE_SCHEMA).collect()
        devices = [device for row in made for device in row.devices or ()]
        return MadeFiles(
            [_file(row) for row in made if row.is_of_log],
            [_file(row) for row in made if row.is_of_log is False],
            is_split=len(set(devices)) < len(devices),
        )


def judging(verdicts: Verdicts) -> Callable[[], tuple[Rule, ...]]:
    """Return a function that makes the rules of typed records. Each task calls it once."""
    return lambda: (verdicts.judge().judge,)


def _folder(path: str, partition: str, statistics: str) -> TableFolder:
    return TableFolder(path if is_local(path) else None, partition, tuple(statistics.split(",")))


def _numbers(batch: BatchId | BatchIds, ordinal: int, streams: Streams) -> BatchNumbers:
    ingest, number = (batch.ingest, batch.number) if isinstance(batch, BatchId) else (None, None)
    return BatchNumbers(ordinal, version("sluice"), streams.version, ingest, number)


def _file(row: Row) -> MadeFile:
    return MadeFile(row.action, row.name, None if row.content is None else bytes(row.content))
