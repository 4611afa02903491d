"""The simulated sensors whose times `make bench-clock` judges: by drift, and by the delays of their readings."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.clock.arrival_buckets import LEAST_DELAY_US
from gateway.clock.oscillators import OSCILLATORS, Kind
from gateway.clock.sensor_clock import DeviceClock
from tests.bench.simple_clocks import WINDOW_US, LastOffset, LeastSquares, Receipt
from tests.support.clock_world import (
    HOUR_US,
    SECOND_US,
    Judged,
    Network,
    Oscillator,
    SerialLine,
    TickClock,
    oscillator,
    probed_readings,
    sent_readings,
)

DRIFTS_PPM: dict[int, Kind] = {50: "crystal", 5_000: "ceramic", 10_000: "rc"}
LATENCIES_MS = (1, 16)
PROBES_S = (10, 60)
SAMPLE_S = 5.0
LIVE_HOURS = 2.0
"""Hours for which a sensor is listened to. With an outage, as many before it as after it."""
AWAY_HOURS = 3.0
DRAINED_PER_S = 20.0
UNTOLD_PPM = 50
WIFI = Network()
BEYOND = "beyond_"
"""Prefix of the names of scenarios in which an assumption of `gateway.clock.sensor_clock` does not hold."""
SLOW_NETWORK = Network(least_us=80_000)
HEATED_PPM, HEATED_PERIOD_S = 300.0, 240.0

OURS = "ours"
SIMPLE_WAYS: dict[str, Callable[[], TickClock]] = {
    "receipt": Receipt,
    "last_offset": LastOffset,
    "least_squares": LeastSquares,
}

Readings = Sequence[Judged | None]
"""The times that a clock gave, in the order in which the readings were taken; None where it gave none."""
Run = Callable[[random.Random, Oscillator, TickClock], tuple[Readings, Readings]]
"""Some hours of one sensor, as a clock sees them: the readings that were sent at once, and those that had waited."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sensors of one kind, all of them on lines of one kind."""

    name: str
    ppm: int
    told: Kind
    """Oscillator that the gateway believes the sensors to have."""
    run: Run


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of all clocks from the same readings."""

    name: str
    by_way: Mapping[str, Readings]
    """A time at the same place is of the same reading."""

    @property
    def timed(self) -> list[Judged]:
        """Our times, of readings that have one."""
        return [each for each in self.by_way[OURS] if each is not None]

    @property
    def without_time(self) -> int:
        return sum(each is None for each in self.by_way[OURS])

    def simply_timed(self, way: str) -> list[Judged]:
        """A simple way's times of the readings that have one by ours; of all, where none has one by ours."""
        pairs = list(zip(self.by_way[OURS], self.by_way[way], strict=True))
        is_comparable = any(mine is not None for mine, _ in pairs)
        return [each for mine, each in pairs if each is not None and (mine is not None or not is_comparable)]


def scenarios() -> Iterator[Scenario]:
    """All of them: a serial line, a network, and one that was away, by drift."""
    for ppm, kind in DRIFTS_PPM.items():
        for probe_s in PROBES_S:
            for latency_ms in LATENCIES_MS:
                name = f"serial_{ppm}ppm_probe_{probe_s}s_adapter_{latency_ms}ms"
                yield Scenario(name, ppm, kind, partial(_serial, latency_ms, probe_s))
    # If the settings do not tell the kind, it is taken for the worst one.
    yield Scenario(f"serial_{UNTOLD_PPM}ppm_untold_probe_60s_adapter_16ms", UNTOLD_PPM, "rc", partial(_serial, 16, 60))
    for ppm, kind in DRIFTS_PPM.items():
        yield Scenario(f"wifi_{ppm}ppm", ppm, kind, partial(_networked, WIFI))
    yield Scenario(f"wifi_{UNTOLD_PPM}ppm_untold", UNTOLD_PPM, "rc", partial(_networked, WIFI))
    for ppm, kind in DRIFTS_PPM.items():
        yield Scenario(f"backlog_{ppm}ppm", ppm, kind, partial(_away, LIVE_HOURS))
    for ppm, kind in DRIFTS_PPM.items():
        yield Scenario(f"unheard_{ppm}ppm", ppm, kind, partial(_away, 0.0))
    for ppm, kind in DRIFTS_PPM.items():
        yield Scenario(f"{BEYOND}slow_network_{ppm}ppm", ppm, kind, partial(_networked, SLOW_NETWORK))
    yield Scenario(f"{BEYOND}heater_10000ppm_probe_60s_adapter_16ms", 10_000, "rc", _heated)


def simulate(scenario: Scenario, sensors: int) -> list[Seen]:
    """Let all clocks see the same sensors. Readings that had waited are kept apart from the others."""
    at_once: dict[str, list[Judged | None]] = {}
    waited: dict[str, list[Judged | None]] = {}
    ours: dict[str, Callable[[], TickClock]] = {OURS: partial(DeviceClock, scenario.told)}
    for way, clock in (ours | SIMPLE_WAYS).items():
        for number in range(sensors):
            # The draws do not depend on the clock that is judged.
            chance = random.Random(f"{scenario.name} {number}")  # noqa: S311 - a simulation
            live, late = scenario.run(chance, oscillator(chance, scenario.ppm), clock())
            at_once.setdefault(way, []).extend(live)
            waited.setdefault(way, []).extend(late)
    if not waited[OURS]:
        return [Seen(scenario.name, at_once)]
    return [Seen(scenario.name, waited), Seen(f"{scenario.name}_sent_at_once", at_once)]


def world_in_words(sensors: int) -> str:
    """All parameters of the world."""
    line = SerialLine(0)
    kinds = ", ".join(
        f"{kind} up to {ppm:,} ppm (the gateway allows {OSCILLATORS[kind].error_ppm:,.0f})"
        for ppm, kind in DRIFTS_PPM.items()
    )
    heated_ppm_per_s = 2 * math.pi * HEATED_PPM / HEATED_PERIOD_S
    return (
        f"The world: {sensors} seeded sensors for each scenario, a reading each {SAMPLE_S:g} s, {LIVE_HOURS:g} h. "
        f"Oscillators: {kinds}, each off by half of that or more; a daily sway takes up to 10 % of it, one of 0.4 to "
        "2 h up to 1 %; 'untold' is a crystal of which the settings say nothing: the gateway allows for rc. "
        "Serial line: a PROBE is read within 1 ms; a REPLY or a reading is under way for 0.1 to 1 ms, for up to the "
        f"adapter's latency more, and {line.busy * 100:g} % of them for up to 12 ms more behind another frame; each "
        f"way this box adds 0.3 ms on average, and up to 50 ms to {line.stalled * 100:g} %; five probes to begin with. "
        f"Wi-Fi: {WIFI.least_us / 1000:g} ms and a jitter of up to {WIFI.jitter_us / 1000:g} ms, {WIFI.lost * 100:g} % "
        f"of the readings 0.2 to 3 s later, in their order. Backlog: the network is away for {AWAY_HOURS:g} h after "
        f"{LIVE_HOURS:g} h, what waited then comes at {DRAINED_PER_S:g}/s, oldest first; 'unheard': it was away from "
        "the beginning; 'sent_at_once': what these sensors had not to keep. 'beyond', which counts in no result of "
        f"all: a network that takes {SLOW_NETWORK.least_us / 1000:g} ms at least, where ours believes that some "
        f"readings take less than {LEAST_DELAY_US / 1000:g}; a heater that sways the rate by {HEATED_PPM:g} ppm either "
        f"way in {HEATED_PERIOD_S:g} s, {heated_ppm_per_s:.0f} ppm/s, where ours believes "
        f"{OSCILLATORS['rc'].wander_ppm_per_s:g}. Simple ways: the time of receipt; the offset of the newest round "
        "trip's middle, or of the arrival before; least squares through all middles or arrivals of the last "
        f"{WINDOW_US / 60 / SECOND_US:g} min; judged by the readings that have a time by ours ('unheard': by all)."
    )


def _serial(
    latency_ms: float, probe_s: float, chance: random.Random, quartz: Oscillator, clock: TickClock
) -> tuple[Readings, Readings]:
    line = SerialLine(latency_ms * 1000)
    return probed_readings(chance, clock, quartz, line, probe_s=probe_s, hours=LIVE_HOURS, sample_s=SAMPLE_S), []


def _heated(chance: random.Random, quartz: Oscillator, clock: TickClock) -> tuple[Readings, Readings]:
    heated = replace(quartz, sways=(*quartz.sways, (HEATED_PPM, HEATED_PERIOD_S * SECOND_US, 0.0)))
    return _serial(16, 60, chance, heated, clock)


def _networked(
    network: Network, chance: random.Random, quartz: Oscillator, clock: TickClock
) -> tuple[Readings, Readings]:
    return sent_readings(chance, clock, quartz, network, hours=LIVE_HOURS, sample_s=SAMPLE_S)


def _away(heard_hours: float, chance: random.Random, quartz: Oscillator, clock: TickClock) -> tuple[Readings, Readings]:
    """Readings over a network that goes away after `heard_hours`: live ones, then those that waited."""
    back_hours = heard_hours + AWAY_HOURS
    return sent_readings(
        chance,
        clock,
        quartz,
        WIFI,
        hours=back_hours + LIVE_HOURS,
        sample_s=SAMPLE_S,
        away_us=(heard_hours * HOUR_US, back_hours * HOUR_US),
        drained_per_s=DRAINED_PER_S,
    )
