"""Counts rows of `log` for the driver, by columns. Executors import this module.

`spark.ingest.census` says what the figures are, and puts those of all partitions together.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gateway.record_contract import READING_TYPE
from spark.arrow_pass.decimal_columns import Numbers
from spark.decode.correction_records import CORRECTION_TYPE
from spark.decode.loss_bodies import LOSS_TYPE
from spark.decode.record_types import EVENT_TYPES
from spark.log.edges import Edge
from spark.log.verdicts import CONFLICT, DELETED, RETRY

Mask = np.ndarray[Any, np.dtype[np.bool_]]

COLUMNS = (
    *("topic_id", "topic", "partition", "offset", "kafka_timestamp", "value", "namespace", "gateway", "device", "stream"),
    *("buffer", "lane", "lane_sequence", "ce_id", "ce_type", "event_time", "time_error_us", "time_quality"),
    *("gateway_boot", "boot_time_us", "boot_time_error_us", "device_boot", "device_sequence", "device_counter"),
    *("undeclared", "duplicate", "reject_reason", "ingest"),
)
"""Columns of `log` that are counted."""
UNDECLARED_NAMES_MAX = 100
"""Undeclared members that are kept of one stream. A program that makes up names would fill any list."""
RUN = ("namespace", "device", "stream", "device_counter", "device_boot")
EDGE = ("event_time", *Edge._fields[1:])


def census_of(rows: pa.Table, is_dated: Mask) -> dict[str, list[Any]]:
    """Count some rows. `is_dated` is true for rows with a plausible time."""
    counted = _Rows(rows, is_dated)
    return {
        "topics": list(counted.topics()),
        "lanes": list(counted.lanes()),
        "heard": list(counted.heard()),
        "runs": list(counted.runs()),
    }


class _Rows:
    def __init__(self, rows: pa.Table, is_dated: Mask) -> None:
        self._columns = {name: rows[name].combine_chunks() for name in COLUMNS}
        self._is_dated = is_dated
        reason = self._columns["reject_reason"]
        self._is_good = _mask(pc.is_null(reason))
        # Conflicts are counted as good, because the figures are there to find them.
        self._may_be_copy = self._is_there("ce_id") & (self._is_good | _mask(pc.starts_with(reason, CONFLICT)))
        self._is_reading = self._is("ce_type", READING_TYPE)

    def topics(self) -> Iterator[list[Any]]:
        """Yield the sums of each topic and partition."""
        is_deleted = self._is("reject_reason", DELETED)
        is_event = self._is_good & ~self._is_reading & self._is_there("ce_type")
        is_driver_event = self._is_good & _mask(pc.is_in(self._columns["ce_type"], pa.array(EVENT_TYPES)))
        size = pc.fill_null(pc.binary_length(self._columns["value"]), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        counts = (
            np.full(len(self._is_good), fill_value=True),
            ~self._is_good & ~is_deleted,
            is_deleted,
            self._is_good & self._is("ce_type", CORRECTION_TYPE),
            is_event,
            np.where(is_driver_event, size, 0),
            self._is_good & self._is("ce_type", LOSS_TYPE),
            self._is_good & self._is_reading & ~self._is("duplicate", value=True) & ~self._is_dated,
        )
        is_from_kafka = ~_mask(pc.starts_with(self._columns["ingest"], RETRY))
        offsets, times = self._integers("offset"), self._integers("kafka_timestamp")
        for places in self._groups(("topic", "partition")):
            topic, partition, topic_id = (self._at(name, places[0]) for name in ("topic", "partition", "topic_id"))
            read = places[is_from_kafka[places]]
            next_offset = int(offsets[read].max()) + 1 if len(read) else None
            sums = [int(count[places].sum()) for count in counts]
            undeclared = pc.unique(pc.list_flatten(self._columns["undeclared"].take(pa.array(places)))).to_pylist()
            names = sorted(undeclared)[: UNDECLARED_NAMES_MAX + 1]
            yield [topic, partition, topic_id, next_offset, int(times[places].max()), names, *sums]

    def lanes(self) -> Iterator[list[Any]]:
        """Yield the numbers of each lane, sorted, with repetitions, and those that came with rejects only."""
        numbers = self._integers("lane_sequence")
        for places in self._groups(("buffer", "lane"), self._is_there("ce_id")):
            came, copies = np.sort(numbers[places]), numbers[places[self._may_be_copy[places]]]
            rejects = np.setdiff1d(numbers[places], copies).tolist() if len(copies) < len(places) else []
            yield [self._at("buffer", places[0]), self._at("lane", places[0]), came.tolist(), rejects]

    def heard(self) -> Iterator[list[Any]]:
        """Yield who was heard, and the time of the last reading with a plausible time."""
        names = ("namespace", "device", "stream", "gateway")
        times = self._integers("event_time")
        for places in self._groups(names, self._is_reading & self._may_be_copy):
            dated = places[self._is_dated[places]]
            last_us = int(times[dated].max()) if len(dated) else None
            yield [*(self._at(name, places[0]) for name in names), last_us]

    def runs(self) -> Iterator[list[Any]]:
        """Yield the islands of each run of a device's numbers, and whether a number came more than once."""
        is_numbered = self._is_reading & self._may_be_copy
        for name in ("namespace", "device", "device_boot", "device_sequence"):
            is_numbered &= self._is_there(name)
        self._columns["device_counter"] = pc.fill_null(self._columns["device_counter"], "")
        numbers = self._integers("device_sequence")
        for places in self._groups(RUN, is_numbered, numbers):
            ordered = numbers[places]
            follows = ordered[1:] == ordered[:-1] + 1
            is_again = ordered[1:] == ordered[:-1]
            begins = np.flatnonzero(np.append(True, ~(follows | is_again)))
            ends = np.append(begins[1:], len(places)) - 1
            islands = [
                [int(ordered[begin]), int(ordered[end]), self._surest(places, ordered, begin), self._surest(places, ordered, end)]
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            ]
            yield [*(self._at(name, places[0]) for name in RUN), islands, bool(is_again.any())]

    def _surest(self, places: Numbers, ordered: Numbers, place: int) -> Edge:
        """The surest time of a number."""
        first, end = place, place + 1
        while first and ordered[first - 1] == ordered[place]:
            first -= 1
        while end < len(ordered) and ordered[end] == ordered[place]:
            end += 1
        return min((self._edge(int(each)) for each in places[first:end]), key=sureness)

    def _edge(self, place: int) -> Edge:
        event_us = int(self._integers("event_time")[place])
        return Edge(event_us, *(self._at(name, place) for name in EDGE[1:]))

    def _groups(
        self, names: Iterable[str], which: Mask | None = None, numbers: Numbers | None = None
    ) -> Iterator[Numbers]:
        """Yield the places of rows with the same values, in the order of `numbers`."""
        places = np.arange(len(self._is_good)) if which is None else np.flatnonzero(which)
        if not len(places):
            return
        group = np.zeros(len(places), dtype=np.int64)
        for name in names:
            encoded = self._columns[name].take(pa.array(places)).dictionary_encode(null_encoding="encode")
            group = group * len(encoded.dictionary) + encoded.indices.to_numpy()
            _, group = np.unique(group, return_inverse=True)
        order = np.lexsort((group,) if numbers is None else (numbers[places], group))
        borders = np.flatnonzero(np.diff(group[order])) + 1
        yield from np.split(places[order], borders)

    def _is(self, name: str, value: Any) -> Mask:
        return _mask(pc.equal(self._columns[name], value))

    def _is_there(self, name: str) -> Mask:
        return _mask(pc.is_valid(self._columns[name]))

    def _integers(self, name: str) -> Numbers:
        column = self._columns[name]
        if not pa.types.is_integer(column.type):
            column = column.cast(pa.int64())
        numbers: Numbers = pc.fill_null(column, 0).to_numpy()
        return numbers

    def _at(self, name: str, place: int) -> Any:
        return self._columns[name][int(place)].as_py()


def sureness(edge: Edge) -> tuple[Any, ...]:
    """Sort key of edges of one number. The least one is the surest."""
    # After the bound, any order will do that does not depend on which came first. None cannot be compared.
    return edge.time_error_us, *edge[:1], *edge[2:6], -1 if edge.boot_time_error_us is None else edge.boot_time_error_us


def _mask(truths: pa.Array) -> Mask:
    mask: Mask = pc.fill_null(truths, fill_value=False).to_numpy(zero_copy_only=False)
    return mask
