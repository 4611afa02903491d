"""Answers questions of a newcomer about the plot of times and bounds: a sentence for each that the run raises."""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from demo.audit import TableReading
from demo.time_audit import UNBOUNDED_US, TimeAudit, one_each

EDGE_SHARE = 0.75
"""Share of its bound beyond which a time that is off lies near the bound's edge."""
STEP_SHARE = 0.75
"""Share of its old value to which a bound falls, or below, in a step."""


def time_notes(readings: Iterable[TableReading], times: TimeAudit, serial: Collection[str]) -> list[str]:
    """Write the sentences. `serial` has the devices on serial lines; the others speak MQTT."""
    rows = sorted(one_each(readings), key=lambda row: (row.device, row.boot, row.sequence))
    bound = [row for row in rows if row.error_us != UNBOUNDED_US]
    notes = [_edge(bound, times, serial), _bounded(bound), _unbounded(rows), _steps(bound, serial)]
    return [note for note in notes if note]


def _edge(bound: Sequence[TableReading], times: TimeAudit, serial: Collection[str]) -> str:
    """Explain why the times of MQTT sensors lie at the edge of their bounds, if most of them do."""
    estimated = [
        row for row in bound if row.quality == "estimated" and row.device not in serial and row.identity in times.off_us
    ]
    near = [row for row in estimated if abs(times.off_us[row.identity]) > EDGE_SHARE * row.error_us]
    if not near or 2 * len(near) < len(estimated):
        return ""
    early = sum(times.off_us[row.identity] < 0 for row in near)
    late = len(near) - early
    lean = (
        f"arrivals are quick, as here, it lies near the end, and the estimate is too early ({early:,} of these)"
        if early >= late
        else f"arrivals are slow, as here, it lies near the beginning, and the estimate is too late ({late:,} of these)"
    )
    return (
        f"Grey dots that all but touch their bound: {len(near):,} of {len(estimated):,} estimated times of MQTT "
        f"sensors are off by more than {100 * EDGE_SHARE:.0f} % of it, for arrivals only tell a span in which a "
        f"reading was taken, the true time may lie anywhere in it, and the estimate is its middle; where {lean}."
    )


def _bounded(bound: Sequence[TableReading]) -> str:
    """Explain the series `bounded`, if it is drawn."""
    count = sum(row.quality == "bounded" for row in bound)
    if not count:
        return ""
    return (
        f"Violet, `bounded`: {_readings(count)} with only a span of time; the time in the table is the span's middle, "
        "and the bound is half its length."
    )


def _unbounded(rows: Sequence[TableReading]) -> str:
    """Explain which readings are not in the plot. The demo's gateway knows its own clock: it lacks a sensor's."""
    qualities = [row.quality for row in rows if row.error_us == UNBOUNDED_US]
    if not (count := len(qualities)):
        return ""
    names = ", ".join(f"`{name}`" for name in sorted(set(qualities)))
    return (
        f"{_readings(count)} {'has' if count == 1 else 'have'} no bound ({names} in the table below): "
        "too little had come from the sensor to know its clock, so the time is that of the receipt; such a reading is "
        "not drawn, and stands in no window."
    )


def _steps(bound: Sequence[TableReading], serial: Collection[str]) -> str:
    """Explain why bounds fall all at once, if some do."""
    falls = [row.device for _, run in groupby(bound, key=lambda row: (row.device, row.boot)) for row in _falls([*run])]
    by_serial = sum(device in serial for device in falls)
    sources = (
        (len(falls) - by_serial, "of MQTT sensors, by some arrivals taken together"),
        (by_serial, "of boards on serial lines, by a round trip"),
    )
    told = [f"{count:,} {words}" for count, words in sources if count]
    if not told:
        return ""
    return (
        "Where bounds fall all at once, the gateway has just learnt more of sensors' clocks "
        f"({'; '.join(told)}); until then they grow, for a clock may drift."
    )


def _falls(run: Sequence[TableReading]) -> list[TableReading]:
    """Find the readings after which a boot's bound is smaller: two on each side, because one may have been delayed."""
    return [
        run[place]
        for place in range(2, len(run) - 1)
        if max(row.error_us for row in run[place : place + 2])
        <= STEP_SHARE * min(row.error_us for row in run[place - 2 : place])
    ]


def _readings(count: int) -> str:
    return f"{count:,} reading{'' if count == 1 else 's'}"
