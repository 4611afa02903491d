"""Counts rows of `log` for the driver, by columns. Executors import this module.

`spark.ingest.census` says what the figures are, and puts those of all pieces together.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gateway.record_contract import READING_TYPE
from spark.arrow_pass.decimal_columns import Numbers
from spark.arrow_pass.device_rows import READ_COLUMNS, Folded, device_rows
from spark.arrow_pass.groups import Mask, Rows, begins_of, group_numbers, integers_of, mask_of
from spark.arrow_pass.parquet_files import file_of
from spark.arrow_pass.pieces import pieces
from spark.arrow_pass.plan import COUNTED_COLUMNS, UNDECLARED_NAMES_MAX, TableFolder
from spark.decode.correction_records import CORRECTION_TYPE
from spark.decode.loss_bodies import LOSS_TYPE
from spark.decode.record_types import EVENT_TYPES
from spark.log.sequence_runs import RunNumbers
from spark.log.verdicts import CONFLICT, DELETED, IMPLAUSIBLE_DAY, RETRY

_COUNTED = pa.schema([*((name, pa.string()) for name in ("counts", "action", "name")), ("content", pa.binary())])


class Counts(NamedTuple):
    """The figures of some rows, in JSON's types."""

    sums: Sequence[int]
    """The figures of `plan.SUMS`."""
    topics: Sequence[tuple[str, int, str | None, int | None, int, Sequence[str]]]
    """Topic, partition, topic id, next offset, newest time of Kafka's, and names that are not declared."""
    lanes: Sequence[tuple[str, str, Sequence[int], Sequence[int]]]
    """Buffer and lane, numbers of records that may be copies, and numbers of rejects, in order."""
    repeated: Sequence[RunNumbers]
    """Devices' own numbers that came more than once."""


def counted(rows: pa.Table, days: Numbers, ordinal: int) -> tuple[str, pa.Table]:
    """Count rows, whose dates are `days`. Returns `Counts` as JSON, and what the rows add to `device_parts`."""
    found = _Rows({name: rows[name].combine_chunks() for name in COUNTED_COLUMNS}, days != IMPLAUSIBLE_DAY)
    devices = found.devices(ordinal)
    counts = Counts(found.sums(), [*found.topics()], [*found.lanes()], devices.repeated)
    return json.dumps(counts), devices.rows


def counting(
    devices: TableFolder | None = None, ordinal: int = 0
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that counts rows of `log` with their `event_date`. It yields a row for each piece.

    With the folder of `device_parts`, it also yields a row for the file of what a batch's rows add to this table.
    """

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        of_devices: list[pa.Table] = []
        for piece in pieces(batches):
            rows = pa.Table.from_batches(piece)
            counts, added = counted(rows, rows["event_date"].cast(pa.int32()).to_numpy(), ordinal)
            of_devices.append(added)
            yield pa.RecordBatch.from_pylist([{"counts": counts}], schema=_COUNTED)
        if devices is not None and any(map(len, of_devices)):
            file = file_of(devices, pa.concat_tables(of_devices))
            yield pa.RecordBatch.from_pylist([file._asdict()], schema=_COUNTED)

    return task


class _Rows:
    def __init__(self, columns: dict[str, pa.Array], is_dated: Mask) -> None:
        self._columns = columns
        self._is_dated = is_dated
        reason = columns["reject_reason"]
        self._is_good = mask_of(pc.is_null(reason))
        # Conflicts are counted as good, because the figures are there to find them.
        self._may_be_copy = self._is_there("ce_id") & (self._is_good | mask_of(pc.starts_with(reason, CONFLICT)))
        self._is_reading = mask_of(pc.equal(columns["ce_type"], READING_TYPE))

    def sums(self) -> list[int]:
        """The figures of `plan.SUMS`."""
        kind = self._columns["ce_type"]
        is_deleted = mask_of(pc.equal(self._columns["reject_reason"], DELETED))
        is_event = self._is_good & mask_of(pc.not_equal(kind, READING_TYPE))
        is_read = is_event & mask_of(pc.is_in(kind, pa.array(EVENT_TYPES)))
        values = self._columns["value"].take(pa.array(np.flatnonzero(is_read)))
        is_duplicate = mask_of(self._columns["duplicate"])
        return [
            len(self._is_good),
            int(np.sum(~self._is_good & ~is_deleted)),
            int(np.sum(is_deleted)),
            int(np.sum(self._is_good & mask_of(pc.equal(kind, CORRECTION_TYPE)))),
            int(np.sum(is_event)),
            pc.sum(pc.binary_length(values)).as_py() or 0,
            int(np.sum(self._is_good & mask_of(pc.equal(kind, LOSS_TYPE)))),
            int(np.sum(self._is_good & self._is_reading & ~is_duplicate & ~self._is_dated)),
            int(np.sum(self._is_reading & self._may_be_copy & self._is_there("device_sequence"))),
        ]

    def topics(self) -> Iterator[tuple[str, int, str | None, int | None, int, list[str]]]:
        # Records that were read again from `log` say nothing about Kafka.
        is_from_kafka = ~mask_of(pc.starts_with(self._columns["ingest"], RETRY))
        offsets, times = self._integers("offset"), self._integers("kafka_timestamp")
        order, begins = self._grouped(("topic", "partition"), np.full(len(self._is_good), fill_value=True))
        for places in np.split(order, begins[1:]) if len(order) else ():
            read = places[is_from_kafka[places]]
            taken = pa.array(places)
            undeclared = pc.unique(pc.list_flatten(self._columns["undeclared"].take(taken))).to_pylist()
            yield (
                self._columns["topic"][places[0]].as_py(),
                self._columns["partition"][places[0]].as_py(),
                pc.max(self._columns["topic_id"].take(pa.array(read))).as_py(),
                int(offsets[read].max()) + 1 if len(read) else None,
                int(times[places].max()),
                sorted(undeclared)[: UNDECLARED_NAMES_MAX + 1],
            )

    def lanes(self) -> Iterator[tuple[str, str, list[int], list[int]]]:
        numbers = self._integers("lane_sequence")
        order, begins = self._grouped(("buffer", "lane"), self._is_there("ce_id"), numbers)
        names = zip(*self._texts(("buffer", "lane"), order[begins]), strict=True)
        for (buffer, lane), places in zip(names, np.split(order, begins[1:]), strict=False):
            is_copy = self._may_be_copy[places]
            yield buffer, lane, numbers[places[is_copy]].tolist(), numbers[places[~is_copy]].tolist()

    def devices(self, ordinal: int) -> Folded:
        places = np.flatnonzero(self._is_reading & self._may_be_copy)
        taken = pa.array(places)
        readings = {name: self._columns[name].take(taken) for name in READ_COLUMNS}
        return device_rows(readings, self._is_dated[places], ordinal)

    def _texts(self, names: Iterable[str], places: Rows) -> list[list[str]]:
        taken = pa.array(places)
        return [self._columns[name].take(taken).to_pylist() for name in names]

    def _grouped(self, names: Sequence[str], which: Mask, *by: Numbers) -> tuple[Rows, Rows]:
        """Return places of rows, group by group and in these orders within it, and where each group begins."""
        places = np.flatnonzero(which)
        taken = pa.array(places)
        groups = group_numbers(self._columns[name].take(taken) for name in names)
        order = np.lexsort((*(each[places] for each in reversed(by)), groups))
        return places[order], begins_of(groups[order])

    def _is_there(self, name: str) -> Mask:
        return mask_of(pc.is_valid(self._columns[name]))

    def _integers(self, name: str) -> Numbers:
        return integers_of(self._columns[name])
