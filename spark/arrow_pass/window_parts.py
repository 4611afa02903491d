"""Computes what records add to their windows, one record at a time. Executors import this module.

`windows_table.parts` says what a part is. Numbers are counted in millionths, so that all sums are exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gateway.record_contract import READING_TYPE
from spark.arrow_pass.decimal_columns import Numbers, decimals_of
from spark.arrow_pass.plan import ChangesPlan, WindowRules
from spark.decode.record_columns import TIME, VALUE
from spark.decode.record_rules import Record
from spark.decode.record_times import DAY_US
from spark.log.edge_times import EARLIEST_US
from spark.log.edges import Edge
from spark.log.record_verdicts import EventDays
from spark.log.verdicts import IMPLAUSIBLE_DAY
from spark.windows.window_sizes import LATE_S

Order = tuple[int, str, str, int]
"""Time, buffer, lane and number of a reading. By it, readings are in order."""
Key = tuple[str, str, str, str, int]
"""Namespace, device, stream, metric, and start of the window."""

_MILLIONTHS = 6
SUM = pa.decimal128(38, _MILLIONTHS)
SQUARES = pa.decimal128(38, 2 * _MILLIONTHS)
ORDER = pa.struct([("time", TIME), ("buffer", pa.string()), ("lane", pa.string()), ("lane_sequence", pa.int64())])


@dataclass(slots=True)
class Part:
    """What some readings add to a window."""

    first: tuple[Order, int]
    last: tuple[Order, int]
    values: list[int] = field(default_factory=list)
    late: int = 0

    def add(self, order: Order, value: int, *, is_late: bool) -> None:
        """Add a value, in millionths."""
        self.first = min(self.first, (order, value))
        self.last = max(self.last, (order, value))
        self.values.append(value)
        self.late += is_late


class Parts:
    """The parts of some records."""

    def __init__(self, rules: WindowRules) -> None:
        self._window_us = rules.window_s * 1_000_000
        self._late_us = late_us(rules.window_s)
        self._open_from_us = rules.open_from_us
        self._clocks = rules.clocks
        self._days = EventDays(rules.times)
        self.parts: dict[Key, Part] = {}

    def add(self, record: Record) -> None:
        """Add a judged record's values to their windows."""
        if record.ce_type != READING_TYPE or record.metrics is None:
            return
        moment_us, error_us = record.event_us, record.time_error_us
        if self._clocks.corrections and record.namespace is not None:
            moment_us, error_us = self._clocks.of(record.namespace, edge_of(record))
        if moment_us is None or self._days.day_of(moment_us, error_us, record.kafka_us) == IMPLAUSIBLE_DAY:
            return
        for name, value, ago_us in record.metrics:
            taken_us = max(moment_us - (ago_us or 0), EARLIEST_US)
            start_us = taken_us - taken_us % self._window_us
            if self._open_from_us is not None and start_us < self._open_from_us:
                continue
            key: Any = (record.namespace, record.device, record.stream, name, start_us)
            order: Any = (taken_us, record.buffer, record.lane, record.lane_sequence)
            millionths = int(value.scaleb(_MILLIONTHS))
            part = self.parts.get(key)
            if part is None:
                part = self.parts[key] = Part((order, millionths), (order, millionths))
            part.add(order, millionths, is_late=record.kafka_us > start_us + self._late_us)


def late_us(window_s: int) -> int:
    """Microseconds after the start of its window from which a reading that reaches Kafka is late."""
    return (window_s + LATE_S) * 1_000_000


def edge_of(record: Record) -> Edge:
    """The time of a sound record, with all that a later correction needs."""
    # Of a sound record none is null.
    times: Any = (record.event_us, record.time_error_us, record.time_quality)
    boot: Any = (record.gateway, record.gateway_boot, record.boot_time_us, record.boot_time_error_us)
    return Edge(*times, *boot)


def parts_table(parts: dict[Key, Part], ordinal: int) -> tuple[pa.Table, Numbers]:
    """Return parts as rows of `window_parts` without their partition, and the date of each in days since 1970."""
    keys, each = list(parts), list(parts.values())
    values = [sorted(part.values) for part in each]
    columns: dict[str, pa.Array] = {
        name: pa.array([key[place] for key in keys], pa.string())
        for place, name in enumerate(("namespace", "device", "stream", "metric"))
    }
    columns |= {
        "window_start": pa.array([key[-1] for key in keys], pa.int64()).cast(TIME),
        "n": pa.array(map(len, values), pa.int64()),
        "min": decimals_of([of_part[0] for of_part in values], VALUE),
        "max": decimals_of([of_part[-1] for of_part in values], VALUE),
        "sum": decimals_of(map(sum, values), SUM),
        "sum_of_squares": decimals_of([sum(value * value for value in of_part) for of_part in values], SQUARES),
        "first": decimals_of([part.first[1] for part in each], VALUE),
        "first_at": _orders([part.first[0] for part in each]),
        "last": decimals_of([part.last[1] for part in each], VALUE),
        "last_at": _orders([part.last[0] for part in each]),
        "values": _lists(values),
        "late": pa.array([part.late for part in each], pa.int64()),
        "ordinal": pa.repeat(pa.scalar(ordinal, pa.int64()), len(keys)),
    }
    return pa.table(columns), np.array([key[-1] // DAY_US for key in keys], dtype=np.int64)


def changes_table(parts: pa.Table, plan: ChangesPlan) -> tuple[pa.Table, Numbers]:
    """Return parts as rows of `window_changes` without their partition, and the date of each in days since 1970."""
    at = pa.scalar(plan.at_us, pa.int64()).cast(TIME)
    told = {"cause": pa.scalar(plan.cause), "version": pa.scalar(plan.version, pa.int32()), "at": at}
    constant = {name: pa.repeat(value, len(parts)) for name, value in told.items()}
    rows = pa.table({name: parts[name] for name in plan.columns} | constant)
    return rows, np.full(len(parts), plan.at_us // DAY_US, dtype=np.int64)


def devices_of(parts: pa.Table) -> list[int]:
    """Numbers that stand for the devices' streams of some parts. Different streams nearly always differ."""
    names = [parts[name] for name in ("namespace", "device", "stream")]
    streams = pc.unique(pc.binary_join_element_wise(*names, "\0")).to_pylist()
    return [int.from_bytes(blake2b(each.encode(), digest_size=8).digest(), signed=True) for each in streams]


def _lists(values: Sequence[Sequence[int]]) -> pa.Array:
    ends = [0]
    for of_part in values:
        ends.append(ends[-1] + len(of_part))
    flat: Iterator[int] = (value for of_part in values for value in of_part)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), decimals_of(flat, VALUE))


def _orders(orders: Sequence[Order]) -> pa.Array:
    times = pa.array([order[0] for order in orders], pa.int64()).cast(TIME)
    names = [pa.array([order[place] for order in orders], ORDER.field(place).type) for place in (1, 2, 3)]
    return pa.StructArray.from_arrays([times, *names], fields=list(ORDER))
