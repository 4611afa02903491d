"""Counts rows of `log` for the driver, by columns. Executors import this module.

`spark.ingest.census` says what the figures are, and puts those of all pieces together.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gateway.record_contract import READING_TYPE
from spark.arrow_pass.decimal_columns import Numbers
from spark.arrow_pass.groups import begins_of, group_numbers, ranks_of
from spark.arrow_pass.pieces import pieces
from spark.arrow_pass.plan import COUNTED_COLUMNS, UNDECLARED_NAMES_MAX
from spark.arrow_pass.usual_rows import Mask, Rows
from spark.decode.correction_records import CORRECTION_TYPE
from spark.decode.loss_bodies import LOSS_TYPE
from spark.decode.record_types import EVENT_TYPES
from spark.log.verdicts import CONFLICT, DELETED, IMPLAUSIBLE_DAY, RETRY

_NEVER = -(2**63)
_SERVED = ("namespace", "device", "stream", "gateway")
_RUN = ("namespace", "device", "stream", "device_counter", "device_boot")
_EDGE = (
    *("event_time", "time_error_us", "time_quality", "gateway", "gateway_boot", "boot_time_us", "boot_time_error_us"),
)
"""Columns of an `Edge`, in its order."""


class Counts(NamedTuple):
    """The figures of some rows, in JSON's types."""

    sums: Sequence[int]
    """The figures of `plan.SUMS`."""
    topics: Sequence[tuple[str, int, str | None, int | None, int, Sequence[str]]]
    """Topic, partition, topic id, next offset, newest time of Kafka's, and names that are not declared."""
    lanes: Sequence[tuple[str, str, Sequence[int], Sequence[int]]]
    """Buffer and lane, numbers of records that may be copies, and numbers of rejects, in order."""
    heard: Sequence[tuple[str, str, str, str, int | None]]
    """Namespace, device, stream, gateway, and the time of the last reading with a plausible one."""
    runs: Sequence[tuple[Sequence[str], bool, Sequence[tuple[int, int, Sequence[Any], Sequence[Any]]]]]
    """Key of each run, whether a number came more than once, and its islands: first, last, and the times of both."""


def counts_of(rows: pa.Table, days: Numbers) -> str:
    """Count rows, as JSON of `Counts`. `days` has the date of each row."""
    counted = _Rows({name: rows[name].combine_chunks() for name in COUNTED_COLUMNS}, days != IMPLAUSIBLE_DAY)
    counts = Counts(counted.sums(), [*counted.topics()], [*counted.lanes()], counted.heard(), [*counted.runs()])
    return json.dumps(counts)


def counting(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Count rows of `log` with their `event_date`. Yields a row for each piece."""
    for piece in pieces(batches):
        rows = pa.Table.from_batches(piece)
        days = rows["event_date"].cast(pa.int32()).to_numpy()
        yield pa.RecordBatch.from_pydict({"counts": [counts_of(rows, days)]})


class _Rows:
    def __init__(self, columns: dict[str, pa.Array], is_dated: Mask) -> None:
        self._columns = columns
        self._is_dated = is_dated
        reason = columns["reject_reason"]
        self._is_good = _mask(pc.is_null(reason))
        # Conflicts are counted as good, because the figures are there to find them.
        self._may_be_copy = self._is_there("ce_id") & (self._is_good | _mask(pc.starts_with(reason, CONFLICT)))
        self._is_reading = _mask(pc.equal(columns["ce_type"], READING_TYPE))

    def sums(self) -> list[int]:
        """The figures of `plan.SUMS`."""
        kind = self._columns["ce_type"]
        is_deleted = _mask(pc.equal(self._columns["reject_reason"], DELETED))
        is_event = self._is_good & _mask(pc.not_equal(kind, READING_TYPE))
        is_read = is_event & _mask(pc.is_in(kind, pa.array(EVENT_TYPES)))
        values = self._columns["value"].take(pa.array(np.flatnonzero(is_read)))
        is_duplicate = _mask(self._columns["duplicate"])
        return [
            len(self._is_good),
            int(np.sum(~self._is_good & ~is_deleted)),
            int(np.sum(is_deleted)),
            int(np.sum(self._is_good & _mask(pc.equal(kind, CORRECTION_TYPE)))),
            int(np.sum(is_event)),
            pc.sum(pc.binary_length(values)).as_py() or 0,
            int(np.sum(self._is_good & _mask(pc.equal(kind, LOSS_TYPE)))),
            int(np.sum(self._is_good & self._is_reading & ~is_duplicate & ~self._is_dated)),
        ]

    def topics(self) -> Iterator[tuple[str, int, str | None, int | None, int, list[str]]]:
        # Records that were read again from `log` say nothing about Kafka.
        is_from_kafka = ~_mask(pc.starts_with(self._columns["ingest"], RETRY))
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

    def heard(self) -> list[tuple[Any, ...]]:
        order, begins = self._grouped(_SERVED, self._is_reading & self._may_be_copy)
        if not len(order):
            return []
        dated_us = np.where(self._is_dated[order], self._integers("event_time")[order], _NEVER)
        last_us = np.maximum.reduceat(dated_us, begins).tolist()
        return [
            *zip(*self._texts(_SERVED, order[begins]), [None if us == _NEVER else us for us in last_us], strict=True)
        ]

    def runs(self) -> Iterator[tuple[tuple[str, ...], bool, list[tuple[int, int, Any, Any]]]]:
        is_numbered = self._is_reading & self._may_be_copy
        for name in ("namespace", "device", "device_boot", "device_sequence"):
            is_numbered &= self._is_there(name)
        self._columns["device_counter"] = pc.fill_null(self._columns["device_counter"], "")
        numbers = self._integers("device_sequence")
        order, begins = self._grouped(_RUN, is_numbered, numbers)
        if not len(order):
            return
        ordered = numbers[order]
        is_again, follows = np.zeros(len(order), dtype=np.bool_), np.zeros(len(order), dtype=np.bool_)
        is_again[1:], follows[1:] = ordered[1:] == ordered[:-1], ordered[1:] == ordered[:-1] + 1
        is_again[begins] = follows[begins] = False
        if is_again.any():
            # Of one number, the surest time comes first.
            order, _ = self._grouped(_RUN, is_numbered, numbers, *self._sureness())
        surest = np.maximum.accumulate(np.where(is_again, 0, np.arange(len(order))))
        starts = np.flatnonzero(~(is_again | follows))
        ends = np.append(starts[1:], len(order)) - 1
        islands = [
            *zip(
                ordered[starts].tolist(),
                ordered[ends].tolist(),
                self._edges(order[starts]),
                self._edges(order[surest[ends]]),
                strict=True,
            )
        ]
        cuts = [*np.searchsorted(starts, begins).tolist(), len(islands)]
        repeated = np.logical_or.reduceat(is_again, begins).tolist()
        for place, key in enumerate(zip(*self._texts(_RUN, order[begins]), strict=True)):
            yield key, repeated[place], islands[cuts[place] : cuts[place + 1]]

    def _sureness(self) -> list[Numbers]:
        """Columns of edges by which the surest comes first, as `sequence_runs` has them."""
        boot_error_us = pc.fill_null(self._columns["boot_time_error_us"], -1).to_numpy()
        names = [pc.fill_null(self._columns[name], "") for name in ("time_quality", "gateway", "gateway_boot")]
        first = [self._integers("time_error_us"), self._integers("event_time")]
        return [*first, *map(ranks_of, names), self._integers("boot_time_us"), boot_error_us]

    def _edges(self, places: Rows) -> Iterator[tuple[Any, ...]]:
        taken = pa.array(places)
        times = self._integers("event_time")[places].tolist()
        return zip(times, *(self._columns[name].take(taken).to_pylist() for name in _EDGE[1:]), strict=True)

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
        return _mask(pc.is_valid(self._columns[name]))

    def _integers(self, name: str) -> Numbers:
        column = self._columns[name]
        numbers: Numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
        return numbers


def _mask(truths: pa.Array) -> Mask:
    mask: Mask = pc.fill_null(truths, fill_value=False).to_numpy(zero_copy_only=False)
    return mask
