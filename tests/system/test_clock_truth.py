"""The whole of event time on a simulated site: the true time of each reading lies within the bound that is told.

Sensors drift, restart, wrap and send late; the gateway reboots, is without sync for days, has its wall clock set by
hand, and goes through a leap second. What is told at the end, when all clocks are known as well as they ever will be,
is compared with true time.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.clock.gateway_clock import BootClock, BootTimes, Look, bounded_between
from gateway.clock.oscillators import Kind
from gateway.clock.sensor_clock import DeviceClock
from gateway.clock.tick_counter import TICK_US_MODULUS
from tests.support.clock_world import DAY_US, HOUR_US, SECOND_US, Network, Oscillator, SerialLine, oscillator, share
from tests.support.sizes import size

LEAP_US = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * SECOND_US
"""A second is put in before this midnight."""
BEGIN_US = LEAP_US - DAY_US
RELEASED_US = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * SECOND_US
PPM = 100.0
LOOK_US = 60 * SECOND_US
SAMPLE_S = 151.3


def utc_us(real_us: float) -> float:
    """UTC of a moment, as POSIX counts it: an inserted second has the name of the one before."""
    return real_us - (SECOND_US if real_us >= LEAP_US else 0)


@dataclass
class Boot:
    """One boot of the gateway: its crystal, and what it knows of wall time."""

    crystal: Oscillator
    """Its count is CLOCK_BOOTTIME."""
    until_us: float
    sync: str
    """`kept`: NTP answers all the time. `late`, `lost`: from some time on, or until then. `never`."""
    clock: BootClock = field(default_factory=lambda: BootClock("unknown", PPM))
    missed_us: int = 0
    """A leap second while nothing kept the wall clock: no bound can know of it."""
    offset_us: float = 0.0

    def boottime_us(self, real_us: float) -> int:
        return int(self.crystal.elapsed_us(real_us))

    def look(self, real_us: float, error_us: int | None) -> None:
        self.clock = self.clock.looked(Look(self.boottime_us(real_us), round(self.offset_us), error_us))

    def set_wall_clock(self, real_us: float, wall_us: float) -> None:
        self.offset_us = wall_us - self.crystal.elapsed_us(real_us)


@dataclass(frozen=True)
class Told:
    """One reading: when it was taken, and its time and bound as the gateway keeps them, in CLOCK_BOOTTIME."""

    kind: str
    real_us: float
    boot: int
    event_us: int
    error_us: int


def keep_wall_clock(chance: random.Random, boot: Boot) -> None:
    """One boot's life of its wall clock: NTP, hands that set it, and a look each minute and at each change."""
    begin_us, end_us = float(boot.crystal.started_us), boot.until_us
    sync_from_us, sync_until_us = begin_us + 30 * SECOND_US, end_us
    turn_us = chance.uniform(begin_us + HOUR_US / 4, end_us)
    if boot.sync == "late":
        sync_from_us = turn_us
    elif boot.sync == "lost":
        sync_until_us = turn_us
    elif boot.sync == "never":
        sync_from_us = math.inf
    polls = list(_polls(chance, sync_from_us, min(sync_until_us, end_us)))
    hands = [chance.uniform(begin_us, end_us) for _ in range(chance.randrange(3))]
    looks = [begin_us + LOOK_US * place for place in range(1, int((end_us - begin_us) // LOOK_US))]
    steps = sorted(
        [(at, "poll") for at in polls] + [(at, "hand") for at in hands] + [(at, "look") for at in looks]
        + ([(float(LEAP_US), "leap")] if begin_us < LEAP_US < end_us else [])
    )  # fmt: skip
    # As it was left by whoever made the image, or by fake-hwclock.
    boot.set_wall_clock(begin_us, chance.choice((946_684_800 * SECOND_US, begin_us - chance.uniform(0, DAY_US))))
    error_us, vouched_us = None, 0.0
    for at_us, what in steps:
        if what == "poll":
            error_us, vouched_us = chance.randrange(2_000, 50_000), at_us
            boot.set_wall_clock(at_us, utc_us(at_us) + chance.uniform(-1, 1) * error_us)
        elif what == "hand":
            # `date -s`: the kernel says at once that nobody vouches for it.
            error_us = None
            boot.set_wall_clock(at_us, utc_us(at_us) + chance.choice((-1, 1)) * 10 ** chance.uniform(5, 15))
        elif what == "leap" and error_us is not None:
            boot.offset_us -= SECOND_US
        elif what == "leap":
            boot.missed_us = SECOND_US
        if error_us is not None and (at_us - vouched_us > 3 * HOUR_US):
            error_us = None
        # The kernel's bound grows by 500 ppm until the next update.
        boot.look(at_us, None if error_us is None else error_us + math.ceil((at_us - vouched_us) * 500e-6))


def _polls(chance: random.Random, from_us: float, until_us: float) -> Iterator[float]:
    at_us = from_us
    while at_us < until_us:
        yield at_us
        at_us += chance.uniform(64, 2_048) * SECOND_US


def boots_of(chance: random.Random, days: float) -> list[Boot]:
    """The gateway's boots, some minutes without power between them."""
    boots: list[Boot] = []
    at_us, end_us = float(BEGIN_US), BEGIN_US + days * DAY_US
    while at_us < end_us:
        until_us = min(at_us + chance.uniform(1.0, 20.0) * HOUR_US, end_us)
        sway = (chance.uniform(0, 4), DAY_US, chance.uniform(0, 6))
        crystal = Oscillator(chance.choice((-1, 1)) * chance.uniform(10, 95), (sway,), int(at_us))
        boots.append(Boot(crystal, until_us, chance.choice(("kept", "late", "lost", "never"))))
        at_us = until_us + chance.uniform(20, 7_200) * SECOND_US
    for boot in boots:
        keep_wall_clock(chance, boot)
    return boots


def serial_readings(chance: random.Random, boots: Sequence[Boot], probe_s: float, latency_us: int) -> Iterator[Told]:
    """A sensor with an RC oscillator on a serial line; it restarts now and then, and its counter wraps."""
    line = SerialLine(latency_us)
    quartz = oscillator(chance, 10_000, counter_us=TICK_US_MODULUS - HOUR_US, started_us=int(BEGIN_US))
    for number, boot in enumerate(boots):
        clock = DeviceClock("rc")
        begin_us = boot.crystal.started_us + 20.0 * SECOND_US
        probes = [begin_us + place * 700_000 for place in range(5)]
        while probes[-1] < boot.until_us:
            probes.append(probes[-1] + probe_s * SECOND_US)
        count = int((boot.until_us - begin_us) // (SAMPLE_S * SECOND_US))
        samples = [begin_us + place * SAMPLE_S * SECOND_US for place in range(count)]
        restart_us = chance.uniform(begin_us, boot.until_us) if chance.random() < 0.5 else math.inf
        for at_us, is_probe in sorted([(at, True) for at in probes] + [(at, False) for at in samples]):
            if at_us >= restart_us:
                # Its boot counter tells: another run.
                quartz, clock = oscillator(chance, 10_000, started_us=int(at_us) - 1), DeviceClock("rc")
                restart_us = math.inf
            if is_probe:
                read_us = at_us + line.out_us(chance)
                sent, received = boot.boottime_us(at_us), boot.boottime_us(read_us + line.back_us(chance)) + 1
                clock.probed(sent, received, *quartz.tick(read_us))
                continue
            estimate = clock.estimate(quartz.tick(at_us)[0], boot.boottime_us(at_us + line.back_us(chance)) + 1)
            if estimate is not None:
                yield Told("serial", at_us, number, *estimate)


def wireless_readings(chance: random.Random, boots: Sequence[Boot], kind: Kind, ppm: float) -> Iterator[Told]:
    """A sensor over Wi-Fi: what it takes while the gateway is off, or its network away, it sends afterwards."""
    network = Network(jitter_us=120_000)
    quartz = oscillator(chance, ppm, counter_us=chance.randrange(TICK_US_MODULUS), started_us=int(BEGIN_US))
    sequence, at_us, arrived_us = 0, float(BEGIN_US), float(BEGIN_US)
    away = [(before.until_us, float(after.crystal.started_us)) for before, after in pairwise(boots)]
    for _ in range(3):
        from_us = chance.uniform(BEGIN_US, boots[-1].until_us)
        away.append((from_us, from_us + chance.uniform(60, 10_800) * SECOND_US))
    clocks: dict[int, DeviceClock] = {}
    while at_us < boots[-1].until_us - 120 * SECOND_US:
        at_us += 47.0 * SECOND_US
        arrived_us = max(arrived_us + 30_000, at_us + network.delay_us(chance))
        for from_us, until_us in sorted(away):
            if from_us <= arrived_us < until_us + 15 * SECOND_US:
                arrived_us = until_us + 15 * SECOND_US + network.delay_us(chance)
        number = max((place for place, boot in enumerate(boots) if boot.crystal.started_us <= arrived_us), default=0)
        if arrived_us > boots[number].until_us:
            return
        clock = clocks.setdefault(number, DeviceClock(kind))
        stamped = clock.stamp(boots[number].boottime_us(arrived_us) + 1, quartz.tick(at_us)[0], sequence)
        sequence += 1
        if stamped is not None:
            yield Told("wireless", at_us, number, *stamped)


def known_clocks(boots: Sequence[Boot]) -> list[BootClock]:
    """Clocks that are known in the end. Boots that were never synced lie between those that were."""
    clocks = [boot.clock for boot in boots]
    seen_us = [boot.boottime_us(boot.until_us) for boot in boots]
    place = 0
    while place < len(boots):
        end = place
        while end < len(boots) and not clocks[end].synced:
            end += 1
        if end > place and end < len(boots):
            before = (clocks[place - 1], seen_us[place - 1]) if place else None
            clocks[place:end] = bounded_between(before, seen_us[place:end], clocks[end], RELEASED_US)
        place = end + 1
    return clocks


@dataclass(frozen=True)
class Verdict:
    """One reading's time in the end."""

    told: Told
    quality: str
    off_us: float
    """Microseconds between the reported time and UTC."""
    error_us: int
    """The bound that is told with it."""
    sensor_off_us: float
    """The sensor's part of this distance: from the gateway's clock. Its bound is `told.error_us`."""


def verdicts(seed: int, days: float = 1.6) -> list[Verdict]:
    """One site's life, and what became of its readings' times."""
    chance = random.Random(seed)  # noqa: S311 - a simulation
    boots = boots_of(chance, days)
    told = [
        *serial_readings(chance, boots, 60.0, 16_000),
        *serial_readings(chance, boots, 30.0, 1_000),
        *wireless_readings(chance, boots, "crystal", 50),
        *wireless_readings(chance, boots, "rc", 10_000),
    ]
    clocks = known_clocks(boots)
    times = [BootTimes(clock) for clock in clocks]
    found = []
    for each in told:
        around = times[each.boot].around(each.event_us)
        if around.error_us is None:
            continue
        off_us = abs(around.at(each.event_us) - utc_us(each.real_us))
        sensor_off_us = abs(each.event_us - boots[each.boot].crystal.elapsed_us(each.real_us))
        error_us = around.error_us + each.error_us + boots[each.boot].missed_us
        found.append(Verdict(each, clocks[each.boot].quality, off_us, error_us, sensor_off_us))
    return found


@pytest.mark.campaign(seconds=90)
@given(st.integers(0, 2**32))
@settings(max_examples=size(2, 24), deadline=None)
def test_true_time_lies_within_the_bound_whatever_happened_on_the_site(seed: int) -> None:
    found = verdicts(seed)
    outside = [each for each in found if each.off_us > each.error_us + 2]
    assert len(outside) <= len(found) / 1_000, outside[:5]


@pytest.mark.campaign(seconds=30)
def test_bounds_are_not_idle() -> None:
    found = [each for seed in range(size(2, 10)) for each in verdicts(seed)]
    assert sum(each.off_us > each.error_us + 2 for each in found) <= len(found) / 1_000
    assert len([each for each in found if each.quality == "bounded"]) > size(400, 2_000)
    # Of sensors' clocks, which are learnt; how good the gateway's is, is NTP's to say.
    errors, bounds = sorted(each.sensor_off_us for each in found), sorted(each.told.error_us for each in found)
    assert share(bounds, 0.5) <= 3 * share(errors, 0.5)
    probed_each_minute = sorted(each.told.error_us for each in found if each.told.kind == "serial")
    assert share(probed_each_minute, 0.5) <= 50_000


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_readings_of_a_probed_sensor_keep_their_order_across_boots_that_were_never_synced(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - a simulation
    boots = boots_of(chance, 1.6)
    for boot in boots[1:-1]:
        boot.clock = BootClock("unknown", PPM)
    clocks = known_clocks(boots)
    received = [
        (number, clocks[number].around(boot.boottime_us(at_us)).at(boot.boottime_us(at_us)))
        for number, boot in enumerate(boots)
        for at_us in (boot.crystal.started_us + SECOND_US, (boot.crystal.started_us + boot.until_us) / 2, boot.until_us)
        if clocks[number].quality == "bounded"
    ]
    assert [wall for _, wall in received] == sorted(wall for _, wall in received)
