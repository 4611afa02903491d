"""True time, and what a gateway sees of sensors' clocks in it: oscillators, delays, counters that wrap. Seeded.

All times are in microseconds; the gateway's CLOCK_BOOTTIME is true time here (its own error is the matter of
`gateway.clock.gateway_clock`), and a sensor's tick is what its oscillator made of true time since it was switched on.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.clock.arrival_buckets import BUCKET_ARRIVALS, LEAST_DELAY_US
from gateway.clock.oscillators import OSCILLATORS, Kind

SECOND_US = 1_000_000
HOUR_US = 3_600 * SECOND_US
DAY_US = 24 * HOUR_US


@dataclass(frozen=True)
class Oscillator:
    """A clock that runs by `ppm` too fast, and sways with the temperature: so much ppm, in so long a period."""

    ppm: float
    sways: tuple[tuple[float, float, float], ...] = ()
    """Amplitude in ppm, period in microseconds, phase in radians."""
    started_us: int = 0
    counter_us: int = 0
    """State of its counter at that time."""

    def elapsed_us(self, true_us: float) -> float:
        """Microseconds that it counted since its start."""
        time_us = true_us - self.started_us
        elapsed = time_us * (1 + self.ppm / 1e6)
        for amplitude, period_us, phase in self.sways:
            turn = 2 * math.pi / period_us
            elapsed += amplitude / 1e6 * (math.cos(phase) - math.cos(turn * time_us + phase)) / turn
        return elapsed

    def tick(self, true_us: float) -> tuple[int, int]:
        """The shown time: milliseconds in 32 bits, and the microseconds below, in steps of four as our firmware's."""
        counter = self.counter_us + int(self.elapsed_us(true_us))
        return counter // 1000 % 2**32, counter % 1000 // 4 * 4


def oscillator(chance: random.Random, ppm_max: float, *, counter_us: int = 0, started_us: int = 0) -> Oscillator:
    """An RC oscillator (10,000 ppm), a ceramic (5,000) or a crystal (50), through days and through heaters."""
    daily = ppm_max * chance.uniform(0.0, 0.1)
    hourly = ppm_max * chance.uniform(0.0, 0.01)
    return Oscillator(
        chance.choice((-1, 1)) * (ppm_max - daily - hourly) * chance.uniform(0.5, 1.0),
        (
            (daily, DAY_US, chance.uniform(0, 2 * math.pi)),
            (hourly, chance.uniform(0.4, 2.0) * HOUR_US, chance.uniform(0, 2 * math.pi)),
        ),
        started_us,
        counter_us,
    )


@dataclass(frozen=True)
class Restless(Oscillator):
    """A clock whose rate goes from one value to the next, as straight as time goes on."""

    turns: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),)
    """Microseconds since it was started, what it counted until then, and by how many ppm it was too fast then."""

    def elapsed_us(self, true_us: float) -> float:
        time_us = true_us - self.started_us
        place = min(bisect_right(self.turns, (time_us, math.inf)), len(self.turns) - 1)
        (from_us, counted_us, from_ppm), (until_us, _, until_ppm) = self.turns[place - 1 : place + 1]
        since_us = time_us - from_us
        ppm = from_ppm + (until_ppm - from_ppm) * since_us / (until_us - from_us) / 2
        return counted_us + since_us * (1 + ppm / 1e6)


def restless(chance: random.Random, kind: Kind, hours: float, *, counter_us: int = 0) -> Restless:
    """A clock that is as bad as its kind may be: as far off, with as much wander, and as quickly."""
    error_ppm, wander_ppm_per_s, spread_ppm = OSCILLATORS[kind]
    least_ppm = chance.choice((-error_ppm, error_ppm - spread_ppm, chance.uniform(-error_ppm, error_ppm - spread_ppm)))
    ppm = least_ppm + spread_ppm * chance.choice((0, 1, chance.random()))
    turns = [(0.0, 0.0, ppm)]
    while turns[-1][0] < hours * HOUR_US:
        at_us, counted_us, ppm = turns[-1]
        to_ppm = least_ppm + spread_ppm * chance.choice((0, 1, chance.random()))
        lasts_us = (abs(to_ppm - ppm) / wander_ppm_per_s + 0.001) * SECOND_US
        if chance.random() < 0.5:
            to_ppm, lasts_us = ppm, chance.expovariate(wander_ppm_per_s / spread_ppm) * SECOND_US + 1_000
        turns.append((at_us + lasts_us, counted_us + lasts_us * (1 + (ppm + to_ppm) / 2e6), to_ppm))
    return Restless(ppm, (), 0, counter_us, tuple(turns))


@dataclass(frozen=True)
class SerialLine:
    """The delays of a round trip beside what the bytes take on the wire."""

    latency_us: float
    """Time that the adapter waits for more bytes before it hands them over: 16 ms for many adapters, 1 ms for
    others."""
    busy: float = 0.3
    """Share of REPLYs that wait behind a frame that is being sent."""
    stalled: float = 0.02
    """Share of times at which this box is busy with something else."""

    def out_us(self, chance: random.Random) -> float:
        return chance.uniform(0, SECOND_US / 1000) + self._stall_us(chance)

    def back_us(self, chance: random.Random) -> float:
        waiting = chance.uniform(0, 12_000) if chance.random() < self.busy else 0.0
        return chance.uniform(100, 1_000) + waiting + chance.uniform(0, self.latency_us) + self._stall_us(chance)

    def _stall_us(self, chance: random.Random) -> float:
        return chance.expovariate(1 / 300) + (chance.uniform(0, 50_000) if chance.random() < self.stalled else 0.0)


@dataclass(frozen=True)
class Network:
    """Delays of readings: the least delay, jitter, and now and then a retransmission."""

    least_us: float = 4_000
    jitter_us: float = 200_000
    lost: float = 0.02

    def delay_us(self, chance: random.Random) -> float:
        again = chance.uniform(200_000, 3_000_000) if chance.random() < self.lost else 0.0
        return self.least_us + chance.uniform(0, self.jitter_us) * chance.random() + again


@dataclass(frozen=True)
class UnkindNetwork(Network):
    """One of 16 readings in a row takes less than 50 ms, one of 8 less than 100, one of 2 less than 400.

    That is all that is assumed of a network; no reading is sooner than that asks for but by chance.
    """

    sample_s: float = 1.0
    drawn: list[float] = field(default_factory=list)

    def delay_us(self, chance: random.Random) -> float:
        if not self.drawn:
            self.drawn.extend(self._delays_us(chance))
        return self.drawn.pop()

    def _delays_us(self, chance: random.Random) -> Iterator[float]:
        """A thousand, the last first."""
        count, most_us, part = 1_000, chance.choice((60_000, 300_000, 3_000_000)), chance.random()
        period, is_swaying = chance.choice((16, 40, 300)), chance.random() < 0.5
        delays = [most_us * (0.5 + 0.5 * math.sin(place / period * 6)) for place in range(count)]
        if not is_swaying:
            delays = [most_us * chance.uniform(part, 1) for _ in delays]
        for arrivals in range(2, BUCKET_ARRIVALS + 1):
            place = 0
            while place < count:
                quick_us = LEAST_DELAY_US * BUCKET_ARRIVALS / arrivals - 1_000
                delays[place] = min(delays[place], quick_us * chance.choice((1, chance.random())))
                place += arrivals if chance.random() < part else chance.randrange(1, arrivals + 1)
        later_us = math.inf
        for delay_us in reversed(delays):
            # Those that come behind it do not have to wait.
            later_us = min(delay_us, later_us + self.sample_s * SECOND_US - 200)
            yield max(later_us, 1_000)


class TickClock(Protocol):
    """Gives readings their times by their ticks: a `DeviceClock`, or a simpler clock for comparison."""

    def probed(self, sent_us: int, received_us: int, tick_ms: int, tick_us: int, /) -> bool: ...

    def estimate(self, tick_ms: int, now_us: int, /) -> tuple[int, int] | None: ...

    def stamp(self, received_us: int, tick_ms: int, sequence: int, /) -> tuple[int, int] | None: ...


@dataclass(frozen=True)
class Judged:
    """One reading's time, and the truth."""

    true_us: float
    event_us: int
    error_us: int

    @property
    def off_us(self) -> float:
        return abs(self.event_us - self.true_us)

    @property
    def is_within(self) -> bool:
        return self.off_us <= self.error_us


def share(sorted_values: Sequence[float], part: float) -> float:
    """A percentile by nearest rank."""
    return sorted_values[min(len(sorted_values) - 1, math.ceil(part * len(sorted_values)) - 1)]


def probed_readings(  # noqa: PLR0913 - what a line may be like
    chance: random.Random,
    clock: TickClock,
    quartz: Oscillator,
    line: SerialLine,
    *,
    probe_s: float,
    hours: float = 2.0,
    sample_s: float = 5.0,
) -> list[Judged | None]:
    """The times of a sensor's readings on a serial line, as the gateway has them when they arrive; None where none."""
    begun_us, end_us = 10 * SECOND_US, hours * HOUR_US
    probes = [begun_us + place * 700_000 for place in range(5)]
    while probes[-1] < end_us:
        probes.append(probes[-1] + round(probe_s * SECOND_US))
    samples = [begun_us + 1.0]
    while samples[-1] < end_us:
        samples.append(samples[-1] + sample_s * SECOND_US * chance.uniform(0.9, 1.1))
    judged: list[Judged | None] = []
    for true_us, is_probe in sorted([(float(at), True) for at in probes] + [(at, False) for at in samples]):
        if is_probe:
            read_us = true_us + line.out_us(chance)
            assert clock.probed(int(true_us), math.ceil(read_us + line.back_us(chance)), *quartz.tick(read_us))
        else:
            received_us = math.ceil(true_us + line.back_us(chance))
            judged.append(judge(true_us, clock.estimate(quartz.tick(true_us)[0], received_us)))
    return judged


def sent_readings(  # noqa: PLR0913 - what a network may be like
    chance: random.Random,
    clock: TickClock,
    quartz: Oscillator,
    network: Network,
    *,
    hours: float = 2.0,
    sample_s: float = 5.0,
    away_us: tuple[float, float] = (0.0, 0.0),
    drained_per_s: float = 20.0,
) -> tuple[list[Judged | None], list[Judged | None]]:
    """Judge a sensor that sends over a network: readings that it sent at once, and readings that waited.

    Its network is away between two times: it keeps its readings, and sends them in order afterwards.
    """
    live: list[Judged | None] = []
    late: list[Judged | None] = []
    arrived_us, true_us, sequence = 0.0, 5.0 * SECOND_US, 0
    away_from_us, away_until_us = away_us
    while true_us < hours * HOUR_US:
        true_us += sample_s * SECOND_US
        waits_until_us = arrived_us + SECOND_US / drained_per_s * chance.uniform(0.5, 1.5)
        is_late = away_from_us <= true_us < away_until_us or (
            away_us != (0, 0) and waits_until_us > true_us > away_from_us
        )
        if is_late:
            arrived_us = max(waits_until_us, away_until_us + network.delay_us(chance))
        else:
            # TCP keeps the order.
            arrived_us = max(arrived_us + 100, true_us + network.delay_us(chance))
        stamped = clock.stamp(math.ceil(arrived_us), quartz.tick(true_us)[0], sequence)
        (late if is_late else live).append(judge(true_us, stamped))
        sequence += 1
    return live, late


def judge(true_us: float, estimate: tuple[int, int] | None) -> Judged | None:
    return None if estimate is None else Judged(true_us, *estimate)
