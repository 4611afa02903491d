"""Measures the time until a live reading can be read in `windows`: alone, and beside a backlog."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from math import inf

from tests.bench.context import Bench, say
from tests.bench.report import Result
from tests.bench.spark_feed import Feed, Place, send, topics
from tests.bench.spark_job import BACKLOG_OPTIONS, Ingest, Reported, ingesting
from tests.bench.spark_rounds import percentile
from tests.bench.spark_scenario import DAY_S, Scenario

READINGS_PER_S, READINGS_PER_S_QUICK = 2_000, 200
BACKLOG, BACKLOG_QUICK = 2_000_000, 10_000
WARM_S, WARM_QUICK_S = 90, 20
ALONE_S, ALONE_QUICK_S = 90, 15
"""Before the backlog comes, and once more after it was worked off."""
GAP_S = 15.0
"""Seconds before the backlog in which readings do not count: they may have waited for a batch with it."""
DRAIN_S_MAX = 1_200.0
CATCH_UP_S_MAX = 120.0
FLUSH_S = 0.1
"""Seconds that a reading waits in its gateway for others."""
LEAD_S = 2.0
TOPIC = "device-fresh"
RATIO_MAX = 2.0

Span = tuple[float, float]
"""UNIX times; the second is not in it."""


async def freshness(bench: Bench) -> list[Result]:
    """From the event until its window can be read: live readings, alone and beside a backlog on its own topic."""
    rate = bench.pick(READINGS_PER_S, READINGS_PER_S_QUICK)
    live = Scenario(TOPIC, rate, DAY_S, interval_s=1.0, gateways=20, disorder_s=0.0)
    backlog = Feed(_backlog(bench.pick(BACKLOG, BACKLOG_QUICK), rate), with_ledger=False)
    built = [sending.built() for sending in backlog.sendings()]
    directory = bench.directory / "freshness"
    pattern = f"{TOPIC}.*|{live.events_topic}.*"
    async with (
        topics(bench.kafka.bootstrap, live.partitions_of | backlog.scenario.partitions_of),
        ingesting(bench.kafka.bootstrap, directory, pattern, BACKLOG_OPTIONS) as ingest,
        feeding(bench, live) as feed,
    ):
        await asyncio.sleep(bench.pick(WARM_S, WARM_QUICK_S))
        before = await _alone(bench)
        await asyncio.sleep(GAP_S)
        filling_s = time.time()
        await send(bench.kafka.bootstrap, built)
        say(f"freshness: the backlog of {backlog.records:,} is in Kafka, after {time.time() - filling_s:.0f} s")
        drained_s = await ingest.until(backlog.ends, DRAIN_S_MAX)
        say(f"freshness: and in the tables, after {drained_s - filling_s:.0f} s")
        await asyncio.sleep(GAP_S)
        after = await _alone(bench)
        await ingest.until(feed.ends, CATCH_UP_S_MAX)
    # Whatever else this machine does only adds to it: the quieter of two must not flatter the ratio.
    alone = min((waited(feed, ingest, span) for span in (before, after)), key=lambda each: percentile(each, 0.99))
    beside = waited(feed, ingest, (filling_s, drained_s))
    p99_alone, p99_beside = percentile(alone, 0.99), percentile(beside, 0.99)
    note = f"{len(alone):,} readings, {rate:,} a second, which leave their gateways each {FLUSH_S} s"
    return [
        Result("freshness_s_p50_live", percentile(alone, 0.5), "s", None, note),
        Result("freshness_s_p99_live", p99_alone, "s"),
        Result("freshness_s_p50_while_draining", percentile(beside, 0.5), "s", None, f"{len(beside):,} readings"),
        Result("freshness_s_p99_while_draining", p99_beside, "s"),
        Result("freshness_ratio", p99_beside / p99_alone, "times", f"<= {RATIO_MAX}", "of both p99"),
        Result(
            "freshness_drain_rows_per_s",
            backlog.records / (drained_s - filling_s),
            "1/s",
            None,
            f"a backlog of {backlog.records:,} beside live readings",
        ),
    ]


def _backlog(readings: int, devices: int) -> Scenario:
    """Readings that as many devices measured three days ago."""
    ticks = readings // devices
    began_us = round((time.time() - 3 * DAY_S) * 1e6)
    return Scenario(f"{TOPIC}.backlog", devices, ticks, interval_s=1.0, gateways=20, begin_us=began_us, seed=2)


async def _alone(bench: Bench) -> Span:
    begin_s = time.time()
    await asyncio.sleep(bench.pick(ALONE_S, ALONE_QUICK_S))
    return begin_s, time.time()


@asynccontextmanager
async def feeding(bench: Bench, scenario: Scenario) -> AsyncIterator[Feed]:
    """A scenario's readings as they are taken, from now on, for the length of a block."""
    begin_s = time.time() + LEAD_S
    feed = Feed(replace(scenario, begin_us=round(begin_s * 1e6)), with_ledger=False)
    sending = asyncio.create_task(send(bench.kafka.bootstrap, feed.sendings(FLUSH_S), begin_s), name="live readings")
    try:
        yield feed
    finally:
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending


def waited(feed: Feed, ingest: Ingest, span: Span) -> list[float]:
    """Seconds that each reading of a span waited until its batch was reported; infinite if that never came."""
    return [
        seconds
        for place, times in feed.event_us.items()
        if place[0] == feed.scenario.topic
        for seconds in waited_in(times, place, ingest.reports, span)
    ]


def waited_in(times: Sequence[int], place: Place, reports: Sequence[Reported], span: Span) -> Iterable[float]:
    """`waited` for one partition. `times` are event times by offset; those of live readings never fall."""
    ends = [_end(report.ends, place) for report in reports]
    first, last = (bisect_left(times, round(at_s * 1e6)) for at_s in span)
    batch = 0
    for offset in range(first, last):
        while batch < len(ends) and ends[batch] <= offset:
            batch += 1
        yield reports[batch].at_s - times[offset] / 1e6 if batch < len(ends) else inf


def _end(ends: Mapping[Place, int], place: Place) -> int:
    return ends.get(place, 0)
