"""Computes what usual readings add to their windows, by columns: a fast way to what `window_parts` says.

Executors import this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spark.arrow_pass.decimal_columns import Numbers, decimals_of, decimals_of_64_bits
from spark.arrow_pass.groups import Mask, group_numbers, ranks_of
from spark.arrow_pass.plan import WindowRules
from spark.arrow_pass.usual_rows import Usual
from spark.arrow_pass.window_parts import ORDER, SQUARES, SUM, late_us
from spark.decode.record_columns import TIME, VALUE
from spark.decode.record_times import DAY_US
from spark.log.edge_times import EARLIEST_US
from spark.log.record_verdicts import EventDays

_SERIES = ("namespace", "device", "stream")
_PLACE = ("buffer", "lane", "lane_sequence")
_SAFE = 2**62
"""Sums of 64-bit numbers below this are exact."""


class UsualParts:
    """The parts of usual readings. No time correction moves these readings."""

    def __init__(self, rules: WindowRules) -> None:
        self._window_us = rules.window_s * 1_000_000
        self._late_us = late_us(rules.window_s)
        self._open_from_us = rules.open_from_us
        self._days = EventDays(rules.times)
        self._found: list[_Values] = []

    def add(self, usual: Usual, which: Mask) -> None:
        """Add the values of those readings for which `which` is true to their windows."""
        taken_us = np.maximum(usual.event_us, EARLIEST_US)
        start_us = taken_us - taken_us % self._window_us
        counts = self._days.is_plausible(usual.event_us, usual.columns["time_error_us"].to_numpy(), usual.kafka_us)
        counts &= which
        if self._open_from_us is not None:
            counts &= start_us >= self._open_from_us
        readings, places = np.nonzero(usual.there & counts[:, None])
        if len(readings):
            taken = pa.array(readings)
            columns = {name: usual.columns[name].take(taken) for name in (*_SERIES, *_PLACE)}
            columns["metric"] = pa.array(usual.names, pa.string()).take(pa.array(places))
            late = usual.kafka_us > start_us + self._late_us
            values = usual.values[readings, places]
            self._found.append(_Values(columns, values, taken_us[readings], start_us[readings], late[readings]))

    def table(self, ordinal: int) -> tuple[pa.Table, Numbers] | None:
        """Return parts as `window_parts.parts_table` does, one for each window; None if there are none."""
        return _Values.together(self._found).parts(ordinal) if self._found else None


@dataclass(frozen=True, slots=True)
class _Values:
    """Values of readings, one behind the other."""

    columns: dict[str, pa.Array]
    value: Numbers
    event_us: Numbers
    start_us: Numbers
    late: Mask

    @classmethod
    def together(cls, found: Sequence["_Values"]) -> "_Values":
        return cls(
            {name: pa.concat_arrays([each.columns[name] for each in found]) for name in found[0].columns},
            np.concatenate([each.value for each in found]),
            np.concatenate([each.event_us for each in found]),
            np.concatenate([each.start_us for each in found]),
            np.concatenate([each.late for each in found]),
        )

    def parts(self, ordinal: int) -> tuple[pa.Table, Numbers]:
        start_us, value = self.start_us, self.value
        series = group_numbers(self.columns[name] for name in (*_SERIES, "metric"))
        # The values of a window stand one behind the other, the least first.
        by_value = np.lexsort((value, start_us, series))
        is_first = np.diff(series[by_value], prepend=-1) != 0
        is_first[1:] |= np.diff(start_us[by_value]) != 0
        begins = np.flatnonzero(is_first)
        ends = np.append(begins[1:], len(value))
        place = [ranks_of(self.columns[name]) for name in ("lane", "buffer")]
        number = self.columns["lane_sequence"].to_numpy()
        by_order = np.lexsort((value, number, *place, self.event_us, start_us, series))
        firsts, lasts = by_order[begins], by_order[ends - 1]
        in_order, one = value[by_value], by_value[begins]
        columns: dict[str, pa.Array] = {name: self.columns[name].take(pa.array(one)) for name in (*_SERIES, "metric")}
        columns |= {
            "window_start": pa.array(start_us[one]).cast(TIME),
            "n": pa.array(ends - begins),
            "min": decimals_of_64_bits(in_order[begins], VALUE),
            "max": decimals_of_64_bits(in_order[ends - 1], VALUE),
            "sum": _sums(in_order, begins, ends, SUM),
            "sum_of_squares": _sums(in_order, begins, ends, SQUARES, power=2),
            "first": decimals_of_64_bits(value[firsts], VALUE),
            "first_at": self._orders(firsts),
            "last": decimals_of_64_bits(value[lasts], VALUE),
            "last_at": self._orders(lasts),
            "values": _lists(begins, in_order),
            "late": pa.array(np.add.reduceat(self.late[by_value].astype(np.int64), begins)),
            "ordinal": pa.repeat(pa.scalar(ordinal, pa.int64()), len(begins)),
        }
        return pa.table(columns), start_us[one] // DAY_US

    def _orders(self, places: Numbers) -> pa.Array:
        taken = pa.array(places)
        time = pa.array(self.event_us[places]).cast(TIME)
        others = [self.columns[name].take(taken) for name in _PLACE]
        return pa.StructArray.from_arrays([time, *others], fields=list(ORDER))


def _lists(begins: Numbers, in_order: Numbers) -> pa.Array:
    offsets = pa.array(np.append(begins, len(in_order)).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, decimals_of_64_bits(in_order, VALUE))


def _sums(values: Numbers, begins: Numbers, ends: Numbers, kind: pa.DataType, power: int = 1) -> pa.Array:
    """Sums of each window's values, or of their squares, exact; null if the type cannot hold one."""
    greatest = max(abs(int(values.max())), abs(int(values.min())))
    if greatest**power * int((ends - begins).max()) < _SAFE:
        return decimals_of_64_bits(np.add.reduceat(values**power, begins), kind)
    exact: Any = values.astype(object) ** power
    return decimals_of(np.add.reduceat(exact, begins).tolist(), kind)
