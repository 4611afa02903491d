"""Measures the cost of learning a sensor's clock from each reading: in all, and by call."""

import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice

from gateway.clock.sensor_clock import DeviceClock
from tests.bench.context import Bench, say
from tests.bench.kafka_watch import KafkaTopic
from tests.bench.parts_rate import FlatOut, flat_out
from tests.bench.report import Result
from tests.support.clock_world import SECOND_US, Network, Oscillator, SerialLine, oscillator

TICKS = "tick"
NO_TICKS = "tock"
"""A name of equal length that the gateway does not know, so that payloads differ in nothing else."""
PATTERN = (NO_TICKS, TICKS, TICKS, NO_TICKS)
"""A machine that gets slower or faster by and by charges both the same."""
QUICK_S = 13
"""The shortest run: a clock that is learnt from arrivals says nothing for the first ten."""
LOOKED_AT = 1_000
"""Records of each partition whose headers are read."""
DRIFT_PPM = 10_000
KNOWN_S = 7_200
"""After that, a sensor's clock holds as many observations as it ever does."""
TIMED_AT_ONCE = 1_000
"""Calls between two looks at the clock, which cost something too."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """One run of the listener's load."""

    payload_name: str
    run: FlatOut
    estimated_share: float
    """Share of the last records whose time is from their tick."""


async def ingest(bench: Bench) -> list[Result]:
    """The listener's load with ticks and without, in turns, to Kafka: rate and CPU."""
    # As long as `make bench-gateway` publishes.
    seconds = float(os.environ.get("BENCH_SECONDS", bench.pick(60, QUICK_S)))
    ingested = []
    for number, name in enumerate(PATTERN * bench.pick(2, 1)):
        async with KafkaTopic(bench.kafka.bootstrap, f"clock-{number}-thermo") as topic:
            run = await flat_out(bench, topic, bench.directory / "ingest" / str(number), seconds, tick=name)
            qualities = [dict(record.headers)["ce_timequality"] for record in await topic.newest(LOOKED_AT)]
        ingested.append(Ingested(name, run, qualities.count(b"estimated") / len(qualities)))
        say(
            f"ingest, {name}: {run.count:,} readings, {run.readings_per_s:,.0f}/s, {run.cpu_us:.2f} µs of CPU each; "
            f"{ingested[-1].estimated_share:.0%} of the last ones have a time by their tick"
        )
    return compare(ingested)


def compare(ingested: Sequence[Ingested]) -> list[Result]:
    """Costs of ticks, from runs with and without them. There is no result if the gateway made no times from ticks."""
    with_ticks, without = ([each for each in ingested if each.payload_name == name] for name in (TICKS, NO_TICKS))
    missing = sum(each.run.done.acknowledged - each.run.count for each in ingested)
    estimated = statistics.fmean(each.estimated_share for each in with_ticks)
    cost_us, ratio, notes = None, None, ["not measured: no time came of a tick"] * 2
    if estimated:
        rates = [statistics.fmean(each.run.readings_per_s for each in runs) for runs in (with_ticks, without)]
        cpu_us = [statistics.fmean(each.run.cpu_us for each in runs) for runs in (with_ticks, without)]
        cost_us, ratio = cpu_us[0] - cpu_us[1], rates[0] / rates[1]
        notes = [
            f"CPU: {cpu_us[0]:.2f} with ticks, {cpu_us[1]:.2f} without; {len(with_ticks)} runs each",
            f"{rates[0]:,.0f}/s with ticks, {rates[1]:,.0f}/s without",
        ]
    return [
        Result("cost_us_per_reading", cost_us, "µs", None, notes[0]),
        Result("ingest_rate_ratio_with_ticks", ratio, "times", ">= 0.9", notes[1]),
        Result("ingest_estimated_share", estimated, "of readings", None, "with ticks, of the last ones"),
        Result("ingest_missing_in_kafka", missing, "readings", "= 0"),
    ]


async def calls(bench: Bench) -> list[Result]:
    """Single calls in this process: an arrival's time at two rates, a round trip."""
    known_s = bench.pick(KNOWN_S, 60)
    return [
        Result(
            "stamp_us_1_sensor_100hz",
            stamp_us(1, 100, known_s, bench.pick(3_600, 60)),
            "µs",
            None,
            "CPU for each reading",
        ),
        Result("stamp_us_1000_sensors_1hz", stamp_us(1_000, 1, known_s, bench.pick(600, 20)), "µs", None, "the same"),
        Result("probed_us", probed_us(bench.pick(2_000, 50)), "µs", None, "CPU for a round trip; one each 10 s"),
    ]


def stamp_us(sensors: int, hz: float, known_s: int, seconds: int) -> float:
    """CPU of `DeviceClock.stamp` for a reading, while `sensors` send over a Wi-Fi with 200 ms of jitter.

    They have been known for `known_s`: what a clock does depends on how much it has seen.
    """
    chance = random.Random(7)  # noqa: S311 - a simulation
    quartz = oscillator(chance, DRIFT_PPM)
    known = DeviceClock()
    for _, received_us, tick_ms, sequence in arrivals(chance, quartz, 1, hz, 0, known_s):
        known.stamp(received_us, tick_ms, sequence)
    clocks = [deepcopy(known) for _ in range(sensors)]
    spent_s, stamped = 0.0, 0
    arriving = arrivals(chance, quartz, sensors, hz, known_s, known_s + seconds)
    while some := [(clocks[each[0]].stamp, each) for each in islice(arriving, TIMED_AT_ONCE)]:
        begun_s = time.process_time()
        for stamp, (_, received_us, tick_ms, sequence) in some:
            stamp(received_us, tick_ms, sequence)
        spent_s += time.process_time() - begun_s
        stamped += len(some)
    return spent_s / stamped * 1e6


def arrivals(  # noqa: PLR0913, PLR0917 - what sensors send
    chance: random.Random, quartz: Oscillator, sensors: int, hz: float, begin_s: int, end_s: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the arrivals: sensor, time, tick and sequence. Each sensor's arrivals come in order."""
    network = Network()
    arrived_us = [0.0] * sensors
    for sequence in range(round(begin_s * hz), round(end_s * hz)):
        true_us = (sequence + 1) * SECOND_US / hz
        tick_ms, _ = quartz.tick(true_us)
        for sensor in range(sensors):
            arrived_us[sensor] = max(arrived_us[sensor] + 100, true_us + network.delay_us(chance))
            yield sensor, math.ceil(arrived_us[sensor]), tick_ms, sequence


def probed_us(probes: int) -> float:
    """CPU of `DeviceClock.probed`, for a sensor on a serial line that is probed each ten seconds."""
    chance, line, clock = random.Random(7), SerialLine(16_000), DeviceClock()  # noqa: S311 - a simulation
    quartz = oscillator(chance, DRIFT_PPM)
    round_trips = []
    for number in range(1, probes + 1):
        sent_us = number * 10 * SECOND_US
        read_us = sent_us + line.out_us(chance)
        round_trips.append((sent_us, math.ceil(read_us + line.back_us(chance)), *quartz.tick(read_us)))
    begun_s = time.process_time()
    for round_trip in round_trips:
        clock.probed(*round_trip)
    return (time.process_time() - begun_s) / probes * 1e6
