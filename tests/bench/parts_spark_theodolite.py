"""Theodolite's UC2 and UC4 with a group's outage in each run: right sums, and the highest load that holds."""

import asyncio
import re
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import inf, log
from pathlib import Path
from statistics import median

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from tests.bench import spark_kafka
from tests.bench.context import Bench, say
from tests.bench.parts_spark_rate import judged
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.bench.spark_feed import Feed, fill, send, topics
from tests.bench.spark_job import Ingest, Job, ingesting, session, windows
from tests.bench.spark_kafka import Tables
from tests.bench.spark_ledger import Ledger
from tests.bench.spark_scenario import Outage, Scenario
from tests.bench.spark_stock import WATERMARKS, Stock
from tests.bench.spark_theodolite import (
    CHILDREN,
    LAG_GROWTH_MAX,
    METRIC,
    REPORTS_MIN,
    collected,
    group_sums,
    plain_group_sums,
    trend,
)

LEVELS = 4
"""256 sensors, in 85 groups."""
EXACT_S = 2_400.0
EXACT_OUTAGE = Outage(1, 300.0, 1_500.0)
"""Outage of the first of four groups for twenty minutes, which is longer than the shorter of stock's watermarks."""
BATCH, BATCH_QUICK = 20_000, 1_000
"""Records of a batch. They are of 80 s, as when a stream is read nearly live. In larger batches stock's watermark would
hardly move, and late readings would pass."""

SENSORS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
SENSORS_QUICK = (50,)
SENSORS_IN_GROUPS = tuple(CHILDREN**levels for levels in (4, 5, 6, 7))
SENSORS_IN_GROUPS_QUICK = (CHILDREN**3,)
GATEWAYS = 16
STEP_S, STEP_QUICK_S = 120, 30
WARM_SHARE = 1 / 3
AWAY_FROM, AWAY_UNTIL = 0.5, 0.65
"""When a quarter of the sensors has no uplink, as shares of a step. It lies around the middle of what is looked at: at
one end, the outage itself would look like a trend."""
ENCODE_S_PER_READING = 30e-6
"""Most seconds that making a reading's record takes. All records are made before a step begins."""
LEAD_S = 5.0
EMIT_S = 5.0
SHOWN_S = 180
"""Seconds back from now whose windows get their sums printed each time."""
FLUSH_S = 0.1
CATCH_UP_S_MAX = 300.0


async def theodolite(bench: Bench) -> list[Result]:
    """UC2 and UC4: exact in spite of a group's outage, and the highest load at which the lag does not grow."""
    exact = await _exactness(bench)
    uc2 = await _highest(bench, "uc2", SENSORS_QUICK if bench.quick else SENSORS)
    uc4 = await _highest(bench, "uc4", SENSORS_IN_GROUPS_QUICK if bench.quick else SENSORS_IN_GROUPS)
    return [*exact, *uc2, *uc4]


def _scenario(topic: str, sensors: int, seconds: float, gateways: int, outage: Outage) -> Scenario:
    return Scenario(
        topic, sensors, seconds, interval_s=1.0, gateways=gateways, metrics=(METRIC,), outage=outage, disorder_s=0.5
    )


# -- exactness ------------------------------------------------------------------------------------


async def _exactness(bench: Bench) -> list[Result]:
    levels = bench.pick(LEVELS, 2)
    scenario = _scenario("device-theodolite", CHILDREN**levels, EXACT_S, CHILDREN, EXACT_OUTAGE)
    if bench.quick:
        scenario = replace(scenario, interval_s=10.0)
    folder = bench.directory / "theodolite"
    async with topics(bench.kafka.bootstrap, scenario.partitions_of):
        feed = await fill(bench.kafka.bootstrap, scenario)
        with session() as spark:
            job = _results(bench, feed, spark, folder / "job", "", lambda path: Job(spark, path), levels)
            stock = partial(Stock, spark, WATERMARKS[0])
            return job + _results(bench, feed, spark, folder / "stock", "_stock", stock, levels)


def _results(  # noqa: PLR0913, PLR0917 - what is run, on what, and under which name
    bench: Bench,
    feed: Feed,
    spark: SparkSession,
    folder: Path,
    suffix: str,
    made: Callable[[Path], Tables],
    levels: int,
) -> list[Result]:
    tables = made(folder)
    records = spark_kafka.stream(
        spark, bench.kafka.bootstrap, feed.scenario.partitions_of, bench.pick(BATCH, BATCH_QUICK)
    )
    spark_kafka.drain(tables.writer(records), folder / "checkpoint")
    verdict = judged(feed, tables.windows())
    expected = plain_group_sums((feed.ledger or Ledger(())).rows(), levels)
    found = collected(group_sums(tables.windows(), levels))
    wrong = len({(group, start_us) for group, start_us, *_ in expected ^ found})
    say(f"theodolite{suffix}: {verdict}; {wrong} of {len(expected)} group sums are wrong")
    target = None if suffix else "= 0"
    note = f"of {verdict.expected:,}; a quarter of the sensors is away for 20 minutes"
    return [
        Result(f"theodolite_uc2_lost{suffix}", verdict.lost, "readings", target, note),
        Result(f"theodolite_uc2_wrong{suffix}", verdict.wrong, "windows", target),
        Result(f"theodolite_uc4_wrong{suffix}", wrong, "sums", target, f"of {len(expected):,}, by group and window"),
    ]


# -- the highest load -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """A load, and whether it held."""

    sensors: int
    growth: float
    """Records a second by which the lag grows."""

    @property
    def held(self) -> bool:
        return self.growth <= LAG_GROWTH_MAX * self.sensors


async def _highest(bench: Bench, case: str, loads: Sequence[int]) -> list[Result]:
    """Raise the load until one does not hold. The job runs on from load to load, and so stays warm."""
    seconds = float(bench.pick(STEP_S, STEP_QUICK_S))
    outage = Outage(GATEWAYS // CHILDREN, AWAY_FROM * seconds, AWAY_UNTIL * seconds)
    scenarios = [_scenario(f"device-{case}-{load}", load, seconds, GATEWAYS, outage) for load in loads]
    names = {topic: count for each in scenarios for topic, count in each.partitions_of.items()}
    directory = bench.directory / "theodolite" / case
    steps: list[Step] = []
    emitted_s: list[float] = []
    async with (
        topics(bench.kafka.bootstrap, names),
        ingesting(bench.kafka.bootstrap, directory, "|".join(map(re.escape, names))) as ingest,
    ):
        with session() if case == "uc4" else nullcontext() as spark:
            for scenario in scenarios:
                async with _emitting(spark, scenario, directory / "warehouse", emitted_s):
                    step = await _step(bench, scenario, ingest)
                say(f"theodolite {case}: {step.sensors:,} sensors, the lag grows by {step.growth:,.0f}/s")
                steps.append(step)
                if not step.held:
                    break
    beyond = "the highest that was tried" if steps[-1].held else f"{steps[-1].sensors:,} did not hold"
    note = f"one message a second each; {beyond}; Kafka and the load are on the same machine"
    holding = max((step.sensors for step in steps if step.held), default=0)
    results = [Result(f"theodolite_{case}_sensors_max", holding, "sensors", None, note)]
    if emitted_s:
        note = f"the sums of the last minutes for all groups, asked for each {EMIT_S:.0f} s"
        results.append(Result("theodolite_uc4_emit_s", median(emitted_s), "s", None, note))
    return results


async def _step(bench: Bench, scenario: Scenario, ingest: Ingest) -> Step:
    begin_s = time.time() + LEAD_S + scenario.readings * ENCODE_S_PER_READING
    feed = Feed(replace(scenario, begin_us=round(begin_s * 1e6)), with_ledger=False)
    built = []
    for sending in feed.sendings(FLUSH_S):
        built.append(sending.built())
        await asyncio.sleep(0)  # what the job says is read meanwhile
    if time.time() > begin_s:
        raise NotMeasuredError("this machine is too slow to make the load: raise ENCODE_S_PER_READING")
    await send(bench.kafka.bootstrap, built, begin_s)
    sent_s = [begin_s + sending.at_s for sending in built]
    sent = list(accumulate((len(sending.batch.records) for sending in built), initial=0))
    points = [
        (report.at_s - begin_s, sent[bisect_right(sent_s, report.at_s)] - report.taken(feed.ends))
        for report in ingest.reports
        if begin_s + WARM_SHARE * scenario.seconds <= report.at_s <= begin_s + scenario.seconds
    ]
    growth = trend(points) if len(points) >= REPORTS_MIN else inf
    with suppress(NotMeasuredError):
        # The rest of this load must not burden the next one. After a load that does not hold, there is no next one.
        await ingest.until(feed.ends, CATCH_UP_S_MAX)
    return Step(scenario.devices, growth)


@asynccontextmanager
async def _emitting(
    spark: SparkSession | None, scenario: Scenario, warehouse: Path, seconds: list[float]
) -> AsyncIterator[None]:
    """Ask for the groups' latest sums, again and again, for the length of a block; note the seconds that each takes."""
    if spark is None:
        yield
        return
    levels = round(log(scenario.devices, CHILDREN))
    ended = asyncio.Event()

    def emit() -> None:
        since = F.current_timestamp() - F.expr(f"interval {SHOWN_S} seconds")
        of_load = (F.col("stream") == scenario.topic) & (F.col("window_start") >= since)
        group_sums(windows(spark, warehouse).where(of_load), levels).collect()

    async def again_and_again() -> None:
        while not ended.is_set():
            begun = time.monotonic()
            await asyncio.to_thread(emit)
            seconds.append(time.monotonic() - begun)
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(0.0, EMIT_S - seconds[-1]))

    emitting = asyncio.create_task(again_and_again(), name="give out group sums")
    try:
        yield
    finally:
        ended.set()
        await emitting
