"""Computes what usual readings add to their windows, by columns: a fast way to what `window_parts` says.

Executors import this module.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark.arrow_pass.decimal_columns import Numbers, decimals_of, decimals_of_64_bits
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


def usual_parts(found: Sequence[Usual], rules: WindowRules, ordinal: int) -> tuple[pa.Table, Numbers] | None:
    """Return parts as `window_parts.parts_table` does, one for each window; None if there are none.

    No time correction moves these readings.
    """
    values = _Values.of(found, rules)
    return None if values is None else values.parts(rules, ordinal)


class _Values:
    """Values of readings, one behind the other."""

    def __init__(self, columns: dict[str, pa.Array], metrics: pa.Array, numbers: dict[str, Numbers]) -> None:
        self._columns = columns
        self._metrics = metrics
        self._numbers = numbers

    @classmethod
    def of(cls, found: Sequence[Usual], rules: WindowRules) -> "_Values | None":
        """Take the values that belong to windows that may change; None if there are none."""
        columns: dict[str, list[pa.Array]] = {name: [] for name in (*_SERIES, *_PLACE)}
        metrics: list[pa.Array] = []
        numbers: dict[str, list[Numbers]] = {name: [] for name in ("value", "event_us", "kafka_us", "start_us")}
        days = EventDays(rules.times)
        window_us = rules.window_s * 1_000_000
        for each in found:
            taken_us = np.maximum(each.event_us, EARLIEST_US)
            start_us = taken_us - taken_us % window_us
            error_us = each.columns["time_error_us"].to_numpy()
            counts = days.is_plausible(each.event_us, error_us, each.kafka_us)
            if rules.open_from_us is not None:
                counts &= start_us >= rules.open_from_us
            readings, places = np.nonzero(each.there & counts[:, None])
            if not len(readings):
                continue
            taken = pa.array(readings)
            for name, parts in columns.items():
                parts.append(each.columns[name].take(taken))
            metrics.append(pa.array(each.names, pa.string()).take(pa.array(places)))
            for name, column in (("event_us", taken_us), ("kafka_us", each.kafka_us), ("start_us", start_us)):
                numbers[name].append(column[readings])
            numbers["value"].append(each.values[readings, places])
        if not metrics:
            return None
        together = {name: pa.concat_arrays(parts) for name, parts in columns.items()}
        return cls(
            together,
            pa.concat_arrays(metrics),
            {name: np.concatenate(parts) for name, parts in numbers.items()},
        )

    def parts(self, rules: WindowRules, ordinal: int) -> tuple[pa.Table, Numbers]:
        start_us, value = self._numbers["start_us"], self._numbers["value"]
        series = self._series()
        # The values of a window stand one behind the other, the least first.
        by_value = np.lexsort((value, start_us, series))
        is_first = np.empty(len(value), dtype=np.bool_)
        is_first[0] = True
        of_window = series[by_value], start_us[by_value]
        is_first[1:] = (of_window[0][1:] != of_window[0][:-1]) | (of_window[1][1:] != of_window[1][:-1])
        begins = np.flatnonzero(is_first)
        ends = np.append(begins[1:], len(value))
        place = [_ranks(self._columns[name]) for name in ("lane", "buffer")]
        number = self._columns["lane_sequence"].to_numpy()
        by_order = np.lexsort((value, number, *place, self._numbers["event_us"], start_us, series))
        firsts, lasts = by_order[begins], by_order[ends - 1]
        late = self._numbers["kafka_us"] > start_us + late_us(rules.window_s)
        in_order, one = value[by_value], by_value[begins]
        columns: dict[str, pa.Array] = {name: self._columns[name].take(pa.array(one)) for name in _SERIES}
        columns |= {
            "metric": self._metrics.take(pa.array(one)),
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
            "late": pa.array(np.add.reduceat(late[by_value].astype(np.int64), begins)),
            "ordinal": pa.repeat(pa.scalar(ordinal, pa.int64()), len(begins)),
        }
        return pa.table(columns), start_us[one] // DAY_US

    def _series(self) -> Numbers:
        """A number for each value's namespace, device, stream and metric."""
        series = np.zeros(len(self._metrics), dtype=np.int64)
        for column in (*(self._columns[name] for name in _SERIES), self._metrics):
            encoded = column.dictionary_encode()
            series = series * len(encoded.dictionary) + encoded.indices.to_numpy()
            # So that the numbers stay small, however many columns there are.
            _, series = np.unique(series, return_inverse=True)
        return series

    def _orders(self, places: Numbers) -> pa.Array:
        taken = pa.array(places)
        time = pa.array(self._numbers["event_us"][places]).cast(TIME)
        others = [self._columns[name].take(taken) for name in _PLACE]
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


def _ranks(texts: pa.Array) -> Numbers:
    """The place of each text among all of them, in order."""
    encoded = texts.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    found: Numbers = ranks[encoded.indices.to_numpy()]
    return found
