"""A sensor's clock: the true time lies within the bound, whatever the drift and the delays."""

import math
import random
from copy import deepcopy
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.clock.arrival_buckets import BUCKET_ARRIVALS, BUCKET_US_MAX, LEAST_DELAY_US
from gateway.clock.oscillators import Kind
from gateway.clock.sensor_clock import SAVED_MAX, DeviceClock
from gateway.clock.sensor_fit import OBSERVATIONS_MAX
from gateway.clock.slews import Slews
from gateway.clock.tick_counter import TICK_US_MODULUS
from tests.support.clock_world import (
    HOUR_US,
    SECOND_US,
    Judged,
    Network,
    Oscillator,
    SerialLine,
    UnkindNetwork,
    oscillator,
    probed_readings,
    restless,
    sent_readings,
)
from tests.support.sizes import size

KINDS: dict[Kind, float] = {"rc": 10_000, "ceramic": 5_000, "crystal": 50}


@dataclass
class Probed:
    """A clock and its sensor, on a line without delays of its own."""

    quartz: Oscillator
    clock: DeviceClock

    def probe(self, true_us: int, out_us: int = 3_500, back_us: int = 3_500) -> bool:
        return self.clock.probed(true_us - out_us, true_us + back_us, *self.quartz.tick(true_us))

    def judge(self, true_us: int, now_us: int) -> Judged:
        estimate = self.clock.estimate(self.quartz.tick(true_us)[0], now_us)
        assert estimate is not None
        return Judged(true_us, *estimate)


def probed(ppm: float, probes: int, kind: Kind = "rc", *, counter_us: int = 5_000_000_000) -> tuple[Probed, int]:
    """Probed every ten seconds; the time of the last."""
    made = Probed(Oscillator(ppm, counter_us=counter_us), DeviceClock(kind))
    for number in range(probes):
        assert made.probe(10_000_000 * (number + 1))
    return made, 10_000_000 * probes


# -- the law ------------------------------------------------------------------------------------


@pytest.mark.campaign(seconds=3)
@settings(max_examples=size(30, 60))
@given(
    st.integers(0, 2**32),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([10.0, 60.0]),
    st.sampled_from([1_000, 16_000]),
)
def test_on_a_serial_line_the_true_time_lies_within_the_bound(
    seed: int, kind: Kind, probe_s: float, latency_us: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 - a simulation
    clock = DeviceClock(kind)
    quartz = oscillator(chance, KINDS[kind], counter_us=chance.randrange(TICK_US_MODULUS))
    judged = probed_readings(chance, clock, quartz, SerialLine(latency_us), probe_s=probe_s, hours=0.5)
    assert [each for each in judged if each is None] == []
    assert [each for each in judged if each is not None and not each.is_within] == []


@pytest.mark.campaign(seconds=3)
@settings(max_examples=size(30, 60))
@given(
    st.integers(0, 2**32),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.sampled_from([0.0, 0.4]),
)
def test_over_a_network_the_true_time_lies_within_the_bound_where_one_of_many_is_quick(
    seed: int, kind: Kind, sample_s: float, away: float
) -> None:
    check_bounds_over_a_network(seed, kind, sample_s, away)


def test_an_rc_sensor_that_comes_back_is_within_its_bound() -> None:
    """A reading that was under way for 53 ms is the quickest of its sixteen, if the clock was as fast as it may be."""
    check_bounds_over_a_network(53, "rc", 10.0, 0.4)


@pytest.mark.campaign(seconds=60)
@settings(max_examples=size(20, 200), deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([0.1, 1.0, 10.0, 60.0, 600.0]),
    st.sampled_from(["heard", "away", "restarted"]),
)
def test_whichever_of_sixteen_was_the_quick_one_the_true_time_lies_within_the_bound(
    seed: int, kind: Kind, sample_s: float, fate: str
) -> None:
    """The worst clock of its kind, and the worst network that is assumed; its counter wraps meanwhile."""
    chance = random.Random(seed)  # noqa: S311 - a simulation
    hours = 500 * sample_s / 3_600
    away_us = (0.3 * hours * HOUR_US, 0.6 * hours * HOUR_US) if fate == "away" else (0.0, 0.0)
    counter_us = TICK_US_MODULUS - round(chance.uniform(0, hours) * HOUR_US)
    live, late = sent_readings(
        chance,
        Restarted(kind) if fate == "restarted" else DeviceClock(kind),
        restless(chance, kind, 2 * hours, counter_us=counter_us),
        UnkindNetwork(sample_s=sample_s),
        hours=hours,
        sample_s=sample_s,
        away_us=away_us,
        drained_per_s=5 / sample_s,
    )
    assert [each for each in (*live, *late) if each is not None and not each.is_within] == []
    assert [each for each in live if each is not None]


class Restarted(DeviceClock):
    """The clock of a gateway whose daemon is started anew after each two hundredth reading."""

    __slots__ = ()

    def stamp(self, received_us: int, tick_ms: int, sequence: int) -> tuple[int, int] | None:
        if sequence % 200 == 199:
            kept = DeviceClock.from_bytes(self.to_bytes(), self.kind)
            self.fit, self._counter, self._buckets = kept.fit, kept._counter, kept._buckets
        return super().stamp(received_us, tick_ms, sequence)


def check_bounds_over_a_network(seed: int, kind: Kind, sample_s: float, away: float) -> None:
    chance = random.Random(seed)  # noqa: S311 - a simulation
    clock = DeviceClock(kind)
    quartz = oscillator(chance, KINDS[kind], counter_us=chance.randrange(TICK_US_MODULUS))
    hours = sample_s / 4
    away_us = (0.2 * hours * HOUR_US, (0.2 + away) * hours * HOUR_US) if away else (0.0, 0.0)
    # One of sixteen is under way for less than 50 ms, as the bound assumes.
    network = Network(least_us=4_000, jitter_us=60_000, lost=0.02)
    live, late = sent_readings(
        chance,
        clock,
        quartz,
        network,
        hours=hours,
        sample_s=sample_s,
        away_us=away_us,
        drained_per_s=5 / sample_s,
    )
    assert [each for each in (*live, *late) if each is not None and not each.is_within] == []
    known = [each for each in live if each is not None]
    # The first bucket of a clock that is not known, at its beginning and after it was away.
    assert len(live) - len(known) <= 2 * (BUCKET_ARRIVALS + 15 / sample_s)


@given(
    st.lists(st.tuples(st.integers(1_000, 30_000_000), st.integers(0, 300_000), st.integers(0, 300_000)), max_size=60),
    st.floats(-9_900, 9_900),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.integers(0, 60_000_000),
)
def test_samples_of_any_age_are_within_the_bound_whatever_the_round_trips(
    probes: list[tuple[int, int, int]], ppm: float, ages: list[float], held_us: int
) -> None:
    made = Probed(Oscillator(ppm, counter_us=TICK_US_MODULUS - 100_000_000), DeviceClock())
    now_us = 1_000_000
    assert made.probe(now_us)
    for step_us, out_us, back_us in probes:
        now_us += step_us + out_us + back_us
        assert made.probe(now_us - back_us, out_us, back_us)
    now_us += 3_500 + held_us
    for age in ages:
        judged = made.judge(int(age * now_us), now_us)
        assert judged.is_within


# -- round trips --------------------------------------------------------------------------------


def test_without_an_observation_there_is_no_time() -> None:
    clock = DeviceClock()
    assert clock.estimate(1234, 1_000_000) is None
    assert (clock.fit.drift_ppm, clock.fit.error_us, clock.fit.observed_us) == (None, None, None)


def test_one_observation_gives_a_time_whose_bound_grows_by_one_percent() -> None:
    made, now_us = probed(ppm=0, probes=1)
    judged = made.judge(now_us - 5_000_000, now_us)
    # Half the round trip of 7 ms, half a tick, and 5 s at somewhat over 10,000 ppm.
    assert 3_500 + 500 + 50_000 <= judged.error_us <= 3_500 + 500 + 53_000


def test_a_crystal_is_trusted_further_than_an_rc_oscillator() -> None:
    made, now_us = probed(ppm=0, probes=1, kind="crystal")
    assert made.judge(now_us - 5_000_000, now_us).error_us <= 3_500 + 500 + 1_100


@pytest.mark.parametrize("ppm", [-10_000, -8_000, 0, 50, 8_000, 10_000])
def test_it_is_near_the_truth_and_knows_the_drift(ppm: float) -> None:
    made, now_us = probed(ppm, probes=30)
    for age_us in (0, 3_000_000, 60_000_000):
        judged = made.judge(now_us - age_us, now_us + 10_000)
        assert judged.off_us <= 1_000
        assert judged.error_us <= 3_500 + 500 + 1_500
    assert made.clock.fit.drift_ppm is not None
    slowest, fastest = made.clock.fit.drift_ppm
    assert slowest <= ppm <= fastest
    assert fastest - slowest < 400
    assert made.clock.fit.observed_us == now_us + 3_500


def test_a_round_trip_that_waited_changes_little() -> None:
    made, now_us = probed(ppm=50, probes=20)
    before = made.judge(now_us, now_us + 10_000)
    assert made.probe(now_us + 10_000_000, 3_500, 400_000)
    after = made.judge(now_us, now_us + 10_000_000)
    assert abs(after.event_us - before.event_us) <= 10
    assert after.error_us <= before.error_us


def test_each_side_is_taken_from_the_round_trip_that_was_quickest_there() -> None:
    made = Probed(Oscillator(50), DeviceClock("crystal"))
    for number in range(1, 21):
        out_us, back_us = (100, 20_000) if number % 2 else (20_000, 100)
        assert made.probe(number * 10_000_000, out_us, back_us)
    # No round trip was under 20 ms, and no filter for short ones would know better than 10.
    judged = made.judge(200_000_000, 200_010_000)
    assert judged.off_us <= 500
    assert judged.error_us <= 100 + 500 + 500


def test_a_tick_that_wraps_goes_on() -> None:
    made = Probed(Oscillator(0, counter_us=TICK_US_MODULUS - 15_000_000), DeviceClock())
    for second in (10, 20, 30):
        assert made.probe(second * 1_000_000)
    for second in (14, 16):
        assert made.judge(second * 1_000_000, 30_000_000).off_us <= 1_000


def test_between_two_probes_hours_apart_both_are_used() -> None:
    made = Probed(Oscillator(40), DeviceClock("crystal"))
    for minutes in (*range(1, 11), *range(190, 200)):
        assert made.probe(minutes * 60_000_000)
    judged = made.judge(100 * 60_000_000, 199 * 60_000_000)
    assert judged.is_within
    assert judged.error_us <= 180_000, "an hour and a half at 60 ppm, from one end alone, would be 320 ms"


def test_a_tick_that_began_anew_is_told_and_has_no_time_until_it_is_confirmed() -> None:
    made, now_us = probed(ppm=0, probes=10)
    anew = Probed(Oscillator(0, started_us=now_us + 5_000_000), made.clock)
    assert not anew.probe(now_us + 10_000_000)
    assert made.clock.estimate(4_000, now_us + 10_000_000) is None
    assert anew.probe(now_us + 11_000_000)
    judged = anew.judge(now_us + 10_500_000, now_us + 11_000_000)
    assert judged.is_within
    assert judged.error_us <= 15_000


def test_one_tick_that_was_read_wrongly_costs_nothing_once_the_next_is_right() -> None:
    made, now_us = probed(ppm=8000, probes=10)
    before = made.judge(now_us, now_us + 10_000)
    tick_ms, tick_us = made.quartz.tick(now_us + 10_000_000)
    assert not made.clock.probed(now_us + 9_996_500, now_us + 10_003_500, tick_ms ^ 0x4000_0000, tick_us)
    assert made.clock.estimate(tick_ms, now_us + 10_010_000) is None
    assert made.probe(now_us + 20_000_000)
    after = made.judge(now_us, now_us + 20_010_000)
    assert after.is_within
    assert after.error_us <= before.error_us


def test_a_clock_that_changes_more_than_its_kind_should_is_believed_less() -> None:
    sway = ((20.0, 600.0 * SECOND_US, 0.0),)
    swaying = Probed(Oscillator(0, sway), DeviceClock("crystal"))
    calm = Probed(Oscillator(0), DeviceClock("crystal"))
    now_us = 0
    for _ in range(200):
        now_us += 10_000_000
        for each in (swaying, calm):
            each.probe(now_us, 100, 100)
    in_a_minute = [each.judge(now_us + 60_000_000, now_us + 60_010_000) for each in (swaying, calm)]
    assert all(judged.is_within for judged in in_a_minute)
    assert in_a_minute[0].error_us > 1.3 * in_a_minute[1].error_us


def test_a_clock_that_is_worse_than_was_said_is_taken_for_one_of_a_worse_oscillator() -> None:
    made = Probed(Oscillator(-8_000), DeviceClock("crystal"))
    outcomes = [made.probe(number * 10_000_000) for number in range(1, 20)]
    assert outcomes[1:4] == [False] * 3
    assert outcomes[-10:] == [True] * 10
    assert (made.clock.kind, made.clock.fit.paced_by) == ("crystal", "rc")
    assert made.judge(190_000_000, 190_010_000).is_within


def test_a_sample_of_a_time_to_come_has_none() -> None:
    made, now_us = probed(ppm=0, probes=5)
    tick_ms, _ = made.quartz.tick(now_us + 60_000_000)
    assert made.clock.estimate(tick_ms, now_us) is None


def test_samples_out_of_order_betray_a_counter_that_began_anew() -> None:
    made, now_us = probed(ppm=0, probes=5)
    tick_ms, _ = made.quartz.tick(now_us)
    assert made.clock.check_order(100, tick_ms, now_us)
    assert made.clock.check_order(99, tick_ms - 60_000, now_us), "sent again, or late"
    assert made.clock.check_order(101, tick_ms - 900, now_us), "two tasks of one sensor"
    assert not made.clock.check_order(102, 50, now_us + 1_000)
    assert made.clock.estimate(60, now_us + 1_000) is None


def test_memory_is_bounded() -> None:
    made, _ = probed(ppm=0, probes=OBSERVATIONS_MAX * 3)
    assert len(made.clock.fit.observations) == OBSERVATIONS_MAX
    ticks = [seen.tick_us for seen in made.clock.fit.observations]
    assert ticks == sorted(ticks)
    assert ticks[0] == 5_000_000_000 + 10_000_000, "the first one says most of the rate"


# -- arrivals -----------------------------------------------------------------------------------


def arrivals(
    clock: DeviceClock, quartz: Oscillator, times: list[tuple[int, int]], first: int = 0
) -> list[Judged | None]:
    """Samples by when they were taken and when they arrived."""
    judged = []
    for sequence, (true_us, received_us) in enumerate(times, first):
        stamped = clock.stamp(received_us, quartz.tick(true_us)[0], sequence)
        judged.append(None if stamped is None else Judged(true_us, *stamped))
    return judged


def test_arrivals_that_keep_pace_give_a_time_after_ten_seconds() -> None:
    clock, quartz = DeviceClock("crystal"), Oscillator(0)
    judged = arrivals(clock, quartz, [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, 200)])
    assert judged[:10] == [None] * 10
    known = [each for each in judged if each is not None]
    assert len(known) == len(judged) - 10
    assert all(each.is_within for each in known)
    assert known[-1].error_us <= LEAST_DELAY_US / 2 + 8_000
    assert clock.fit.drift_ppm is not None


def test_readings_from_before_any_knowledge_of_the_clock_get_no_time() -> None:
    clock, quartz = DeviceClock(), Oscillator(0)
    hour_us = HOUR_US
    drained = [(place * SECOND_US, hour_us + place * 20_000) for place in range(3_600)]
    live = [(hour_us + place * SECOND_US, hour_us + place * SECOND_US + 8_000) for place in range(73, 200)]
    assert arrivals(clock, quartz, drained) == [None] * 3_600
    judged = arrivals(clock, quartz, live, 3_600)
    known = [each for each in judged if each is not None]
    assert len(known) > 100
    assert all(each.is_within for each in known)


def test_what_waits_while_the_clock_is_known_gets_its_time() -> None:
    clock, quartz = DeviceClock("crystal"), Oscillator(30)
    before = [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, 600)]
    hour_us = HOUR_US
    drained = [(place * SECOND_US, hour_us + place * 10_000) for place in range(600, 3_600)]
    arrivals(clock, quartz, before)
    judged = arrivals(clock, quartz, drained, 600)
    assert all(each is not None and each.is_within for each in judged)


def test_a_sensor_that_sends_each_ten_minutes_has_a_time_from_its_second_reading_on() -> None:
    clock, quartz = DeviceClock("crystal"), Oscillator(0)
    times = [(place * BUCKET_US_MAX, place * BUCKET_US_MAX + 8_000) for place in range(1, 20)]
    judged = arrivals(clock, quartz, times)
    assert judged[0] is None
    known = [each for each in judged if each is not None]
    assert len(known) == 18
    assert all(each.is_within for each in known)
    assert known[0].error_us >= LEAST_DELAY_US * BUCKET_ARRIVALS / 2 / 2, "two arrivals vouch for less than sixteen"


def test_an_arrival_that_is_quicker_than_all_before_is_believed() -> None:
    clock, quartz = DeviceClock("crystal"), Oscillator(0)
    slow = [(second * SECOND_US, second * SECOND_US + 400_000) for second in range(1, 100)]
    quick = [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(100, 300)]
    arrivals(clock, quartz, slow)
    judged = arrivals(clock, quartz, quick, 100)
    known = [each for each in judged if each is not None]
    assert len(known) > 150
    assert all(each.is_within for each in known)


def test_a_network_that_is_never_quick_needs_it_said() -> None:
    quartz = Oscillator(20)
    times = [(second * SECOND_US, second * SECOND_US + 600_000 + second % 7 * 30_000) for second in range(1, 600)]
    outside = {}
    for least_delay_us in (LEAST_DELAY_US, 700_000):
        clock = DeviceClock("crystal")
        clock.least_delay_us = least_delay_us
        known = [each for each in arrivals(clock, quartz, times) if each is not None]
        outside[least_delay_us] = [each for each in known if not each.is_within]
        assert len(known) > 500
    assert outside[700_000] == []
    assert outside[LEAST_DELAY_US], "what it assumes does not hold here"


def test_a_clock_that_is_worse_than_was_said_is_noticed_by_arrivals() -> None:
    clock, quartz = DeviceClock("crystal"), Oscillator(8_000)
    times = [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, 1_500)]
    judged = arrivals(clock, quartz, times)
    assert clock.fit.paced_by == "rc"
    assert all(each is None or each.is_within for each in judged[-300:])
    assert [each for each in judged[-300:] if each is not None]


@pytest.mark.parametrize("kind", ["rc", "crystal"])
def test_a_sequence_and_a_tick_that_begin_anew_together_place_nothing_in_the_former_life(kind: Kind) -> None:
    """Once its sequence has passed the former one, all looks like readings that wait for as long as that life was."""
    clock, life_s = DeviceClock(kind), 200
    before = Oscillator(20)
    arrivals(clock, before, [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, life_s)])
    anew = Oscillator(20, started_us=life_s * SECOND_US)
    judged = arrivals(
        clock, anew, [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(life_s + 1, 4 * life_s)]
    )
    known = [each for each in judged if each is not None]
    assert [each for each in known if not each.is_within] == []
    assert known[-1].error_us < 300_000, "it is learnt anew"


def test_kept_readings_after_newer_ones_make_no_other_clock() -> None:
    clock, quartz = DeviceClock(), Oscillator(3_000)
    arrivals(clock, quartz, [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, 600)])
    clock.stamp(660 * SECOND_US, quartz.tick(659 * SECOND_US)[0], 700)
    assert clock.stamp(661 * SECOND_US, quartz.tick(605 * SECOND_US)[0], 605) is not None
    stamped = clock.stamp(662 * SECOND_US, quartz.tick(661_900_000)[0], 701)
    assert stamped is not None
    assert stamped[1] < 300_000


@pytest.mark.parametrize("kind", ["rc", "crystal"])
@pytest.mark.parametrize("share", [0.95, 0.98])
def test_kept_readings_that_come_hardly_faster_than_they_are_taken_claim_nothing(kind: Kind, share: float) -> None:
    """Ten minutes of readings waited; each is under way for a little less than the one before."""
    clock, quartz = DeviceClock(kind), Oscillator(20)
    times = [(second * SECOND_US, round((600 + second * share) * SECOND_US)) for second in range(1, 10_000)]
    judged = arrivals(
        clock, quartz, [(true_us, received_us) for true_us, received_us in times if received_us > true_us]
    )
    assert [each for each in judged if each is not None and not each.is_within] == []


def test_one_slow_reading_and_one_that_waited_for_hours_are_no_clock() -> None:
    clock, quartz = DeviceClock(), Oscillator(9_000)
    times = [(47 * SECOND_US, 50 * SECOND_US)]
    times += [(47 * number * SECOND_US, 7_000 * SECOND_US + number * 30_000) for number in range(2, 140)]
    judged = arrivals(clock, quartz, times)
    assert [each for each in judged if each is not None and not each.is_within] == []


def test_a_tick_that_began_anew_under_the_same_boot_is_noticed_by_the_sequence() -> None:
    clock, quartz = DeviceClock(), Oscillator(0)
    arrivals(clock, quartz, [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, 100)])
    anew = Oscillator(0, started_us=100 * SECOND_US)
    assert not clock.arrived(101 * SECOND_US + 8_000, anew.tick(101 * SECOND_US)[0], 100)
    later = arrivals(clock, anew, [(s * SECOND_US, s * SECOND_US + 8_000) for s in range(102, 200)], 101)
    known = [each for each in later if each is not None]
    assert len(known) > 80
    assert all(each.is_within for each in known)


def test_a_tick_that_jumped_ahead_is_noticed_for_no_sample_is_of_after_its_arrival() -> None:
    clock, quartz = DeviceClock(), Oscillator(0)
    arrivals(clock, quartz, [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, 100)])
    ahead = Oscillator(0, counter_us=HOUR_US)
    assert not clock.arrived(101 * SECOND_US, ahead.tick(101 * SECOND_US)[0], 101)
    later = arrivals(clock, ahead, [(s * SECOND_US, s * SECOND_US + 8_000) for s in range(102, 200)], 102)
    known = [each for each in later if each is not None]
    assert len(known) > 80
    assert all(each.is_within for each in known)


@pytest.mark.parametrize("pace", [0.0, 0.001, 0.5, 0.9])
def test_a_tick_that_does_not_count_milliseconds_gives_no_time(pace: float) -> None:
    clock = DeviceClock()
    for second in range(1, 1_200):
        tick_ms = 17 + int(second * 1_000 * pace)
        assert clock.stamp(second * SECOND_US, tick_ms, second) is None


@pytest.mark.parametrize("sample_s", [0.01, 1, 60])
def test_a_tick_that_stands_still_from_some_time_on_is_noticed(sample_s: float) -> None:
    clock, quartz = DeviceClock("crystal"), Oscillator(0)
    step_us = int(sample_s * SECOND_US)
    times = [(at_us, at_us + 8_000) for at_us in range(step_us, 20 * 60 * SECOND_US + 20 * step_us, step_us)]
    assert arrivals(clock, quartz, times)[-1] is not None
    stuck_ms, _ = quartz.tick(times[-1][0])
    later_us = [times[-1][1] + step_us * place for place in range(1, int(40 * 60 / sample_s) + 20)]
    stamped = [clock.stamp(at_us, stuck_ms, len(times) + place) for place, at_us in enumerate(later_us)]
    assert stamped[-1] is None
    # Not at once: they might have waited. After three buckets, and that in which it began.
    known = sum(each is not None for each in stamped)
    assert known * sample_s <= (4.5 * BUCKET_US_MAX / SECOND_US if sample_s > 10 else 10 * 60)


def test_one_odd_tick_costs_its_reading_alone() -> None:
    clock, quartz = DeviceClock("crystal"), Oscillator(0)
    arrivals(clock, quartz, [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, 200)])
    for sequence, tick_ms in ((199, 7), (201, 2**31)):
        assert clock.stamp((sequence + 1) * SECOND_US, tick_ms, sequence) is None
        at_us = (sequence + 2) * SECOND_US
        after = clock.stamp(at_us + 8_000, quartz.tick(at_us)[0], sequence + 1)
        assert after is not None
        assert Judged(at_us, *after).is_within


def test_pauses_between_what_had_waited_do_not_make_it_fresh() -> None:
    clock, quartz = DeviceClock(), Oscillator(0)
    # Of an hour ago, taken each ten seconds, and twice with ten seconds between two arrivals.
    times = [(0, HOUR_US), (10 * SECOND_US, HOUR_US + 10 * SECOND_US), (20 * SECOND_US, HOUR_US + 11 * SECOND_US)]
    times += [(30 * SECOND_US, HOUR_US + 21 * SECOND_US), (40 * SECOND_US, HOUR_US + 22 * SECOND_US)]
    assert arrivals(clock, quartz, times) == [None] * 5


def test_an_old_sequence_may_be_a_late_reading_or_a_restart_that_nothing_told_of() -> None:
    clock, quartz = DeviceClock("crystal"), Oscillator(0)
    arrivals(clock, quartz, [(second * SECOND_US, second * SECOND_US + 8_000) for second in range(1, 200)])
    late = arrivals(clock, quartz, [(50 * SECOND_US, 200 * SECOND_US)], 49)
    anew = Oscillator(0, started_us=150 * SECOND_US)
    restarted = arrivals(clock, anew, [(200 * SECOND_US, 200 * SECOND_US + 8_000)], 49)
    assert all(each is not None and each.is_within for each in (*late, *restarted))


# -- on disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("learnt_from", ["probes", "arrivals"])
def test_what_was_kept_goes_on(learnt_from: str) -> None:
    chance, clock = random.Random(7), DeviceClock("crystal")  # noqa: S311 - a simulation
    quartz = oscillator(chance, 50)
    if learnt_from == "probes":
        probed_readings(chance, clock, quartz, SerialLine(1_000), probe_s=10)
    else:
        sent_readings(chance, clock, quartz, Network(jitter_us=50_000))
    kept = clock.to_bytes()
    assert len(kept) <= SAVED_MAX * 28 + 20
    restored = DeviceClock.from_bytes(kept, "crystal")
    true_us = 2 * HOUR_US + 60 * SECOND_US
    before, after = (each.estimate(quartz.tick(true_us)[0], true_us + 9_000) for each in (clock, restored))
    assert before is not None
    assert after is not None
    assert abs(after[0] - true_us) <= after[1]
    assert before[1] <= after[1] + 2 <= before[1] * 2
    assert restored.last_sequence == clock.last_sequence


def test_a_clock_that_proved_worse_than_was_said_is_kept_as_that() -> None:
    clock = DeviceClock("crystal")
    rc = Oscillator(5_000)
    for second in range(0, 200, 10):
        at_us = second * SECOND_US
        clock.probed(at_us, at_us + 1_000, *rc.tick(at_us + 500))
    assert clock.fit.paced_by != "crystal"
    assert DeviceClock.from_bytes(clock.to_bytes(), "crystal").fit.paced_by == clock.fit.paced_by
    assert DeviceClock.from_bytes(DeviceClock("ceramic").to_bytes(), "ceramic").fit.paced_by == "ceramic"


def test_the_bound_of_a_reading_taken_now_grows_until_the_next_probe() -> None:
    made, last_us = probed(ppm=4_000, probes=8)
    clock = made.clock
    bounds = [clock.fit.error_us_at(last_us + after_s * SECOND_US) for after_s in (0, 10, 60, 600)]
    assert None not in bounds
    assert bounds == sorted(bounds, key=lambda bound: bound or 0)
    assert bounds[0] == clock.fit.error_us or abs((bounds[0] or 0) - (clock.fit.error_us or 0)) <= 2
    # As a reading's is that is taken then and comes in a while later.
    at_us = last_us + 60 * SECOND_US
    estimate = clock.estimate(made.quartz.tick(at_us)[0], at_us + SECOND_US)
    assert estimate is not None
    assert bounds[2] is not None
    assert abs(estimate[1] - bounds[2]) <= 0.01 * bounds[2] + 2
    assert DeviceClock().fit.error_us_at(0) is None


def test_an_empty_clock_is_kept_as_one() -> None:
    restored = DeviceClock.from_bytes(DeviceClock().to_bytes())
    assert restored.estimate(0, 0) is None


@given(st.binary(max_size=200))
def test_what_is_no_clock_says_so(data: bytes) -> None:
    try:
        clock = DeviceClock.from_bytes(data)
    except ValueError:
        return
    clock.estimate(0, math.ceil(1e12))


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1))
def test_no_time_and_no_tick_raises(now_us: int, tick_ms: int, sequence: int) -> None:
    made, _ = probed(ppm=0, probes=3)
    made.clock.check_order(sequence, tick_ms, now_us)
    made.clock.estimate(tick_ms, now_us)
    made.clock.stamp(now_us, tick_ms, sequence)


# -- the quick way of an arrival ----------------------------------------------------------------


def thoroughly(clock: DeviceClock, received_us: int, tick_ms: int, sequence: int) -> tuple[int, int] | None:
    """`stamp`, with each arrival computed in full."""
    is_behind = sequence < clock.last_sequence
    known = clock.arrived(received_us, tick_ms, sequence)
    estimate = clock.estimate(tick_ms, received_us) if known else None
    if estimate is None or not is_behind:
        return estimate
    earliest_us = estimate[0] - estimate[1]
    return (earliest_us + received_us) // 2, (received_us - earliest_us) // 2 + 2


@pytest.mark.slow
@pytest.mark.campaign(seconds=8)
@settings(max_examples=size(20, 60), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(KINDS)), st.sampled_from([0.1, 1.0, 15.0, 120.0]))
@example(694_812, "ceramic", 0.1)
def test_an_arrival_that_tells_nothing_new_has_the_time_that_it_would_have_if_it_did(
    seed: int, kind: Kind, pace_s: float
) -> None:
    """Sensors that send by fits and starts, restart and repeat themselves, while the gateway's clock is slewed."""
    rng = random.Random(seed)  # noqa: S311 - a scene, not a secret
    slews = Slews()
    clock = DeviceClock(kind, slews)
    now_us, adjusted_us, sequence = 10**9, 0, 0
    quartz = Oscillator(
        rng.choice([-0.3, 0.5]) * KINDS[kind], counter_us=rng.choice([0, TICK_US_MODULUS - 10**9 - 10**8])
    )
    former: list[tuple[int, int]] = []
    for _ in range(80):
        now_us += round(pace_s * SECOND_US * rng.choice([0.01, 0.5, 1, 1, 1, 3])) + 1_000
        now_us += rng.choice([70, 3_600]) * SECOND_US if rng.random() < 0.02 else 0
        if rng.random() < 0.03:
            adjusted_us += rng.choice([0, 0, 500])
            slews.looked(now_us, adjusted_us)
        delay_us = 5_000 + round(rng.expovariate(1 / rng.choice([500, 5_000, 50_000])))
        delay_us += rng.choice([2, 59, 61, 600]) * SECOND_US if rng.random() < 0.03 else 0
        tick_ms = quartz.tick(max(0, now_us - delay_us))[0]
        tick_ms = (tick_ms + (rng.choice([-100_000, -500, 5_000]) if rng.random() < 0.02 else 0)) % 2**32
        sequence = max(0, sequence + (rng.choice([-100, -5, 0]) if rng.random() < 0.03 else 1))
        twin = deepcopy(clock)
        found, expected = clock.stamp(now_us, tick_ms, sequence), thoroughly(twin, now_us, tick_ms, sequence)
        assert (found is None) == (expected is None)
        assert (clock.last_sequence, clock.fit.has_jumped) == (twin.last_sequence, twin.fit.has_jumped)
        assert clock.known_from_us is None or twin.known_from_us is not None, "what it would have learnt was learnt"
        # What an arrival tells beside that may be left for the next one that is looked at.
        if found is not None and expected is not None and clock.fit.version == twin.fit.version:
            assert abs(found[0] - expected[0]) <= 1_000
            assert abs(found[1] - expected[1]) <= 1_000
        former.append((tick_ms, now_us))
        place = rng.randrange(len(former))
        for of_former in former[place : place + 5]:
            expected, found = deepcopy(clock).estimate(*of_former), clock.estimate_earlier(*of_former)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                # Both hold the true time; how tight they are depends on where a stretch of ticks was begun.
                assert abs(found[0] - expected[0]) <= found[1] + expected[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(KINDS)), st.sampled_from([1, 40, 5_000]))
def test_readings_that_arrive_at_once_get_the_times_of_single_arrivals(seed: int, kind: Kind, apart_ms: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a scene, not a secret
    clock, twin = DeviceClock(kind), DeviceClock(kind)
    quartz = Oscillator(rng.choice([-0.3, 0.5]) * KINDS[kind], counter_us=TICK_US_MODULUS - rng.choice([10**7, 10**10]))
    now_us, sequence = 10**9, 0
    for _ in range(60):
        now_us += rng.choice([300_000, 3 * SECOND_US, 15 * SECOND_US])
        samples = []
        for place in reversed(range(rng.choice([1, 1, 2, 7, 30]))):
            # Some of one millisecond, some out of their order, some sent again.
            taken_us = now_us - 5_000 - rng.choice([0, 0, 20_000]) - place * apart_ms * rng.choice([0, 1_000])
            sequence = max(0, sequence + (rng.choice([-40, -1, 0]) if rng.random() < 0.03 else 1))
            samples.append((quartz.tick(max(0, taken_us))[0], sequence))
        found = clock.stamps(now_us, samples)
        assert found == [twin.stamp(now_us, *sample) for sample in samples]
        assert (clock.fit.version, clock.last_sequence, clock.known_from_us) == (
            twin.fit.version,
            twin.last_sequence,
            twin.known_from_us,
        )
    assert clock.to_bytes() == twin.to_bytes()


def test_a_sensor_that_becomes_quicker_is_known_as_soon_as_it_has_sent_enough() -> None:
    """The first two readings tell when the fourth may come; it may come sooner."""
    clock, quartz = DeviceClock(), Oscillator(0)
    judged = arrivals(
        clock, quartz, [(second * SECOND_US, second * SECOND_US + 8_000) for second in (1, 31, 32, 33, 34)]
    )
    assert [each is not None for each in judged] == [False, False, False, True, True]


def test_a_sensor_that_becomes_slower_is_waited_for_ten_minutes_at_the_most() -> None:
    clock, quartz = DeviceClock(), Oscillator(0)
    arrivals(clock, quartz, [(SECOND_US, SECOND_US + 8_000), (500 * SECOND_US, 500 * SECOND_US + 8_000)])
    assert clock.known_from_us == SECOND_US + 8_000 + BUCKET_US_MAX
