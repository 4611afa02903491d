"""Measures a batch while the tables grow a hundredfold: by history, and by devices."""

import os
from statistics import median

from pyspark.sql import SparkSession

from tests.bench import spark_kafka, spark_rounds
from tests.bench.context import Bench, say
from tests.bench.report import Result
from tests.bench.spark_feed import Feed, fill, topics
from tests.bench.spark_job import Job, session
from tests.bench.spark_scenario import Scenario

BATCH, BATCH_QUICK = 50_000, 2_000
HISTORY, HISTORY_QUICK = 200, 4
"""Batches that the older of two warehouses has taken; BENCH_HISTORY=1000 makes it 50 million records."""
TIMES = 100
"""Length of the older history, as a multiple of the younger one's."""
INTERVAL_S = 30.0
"""10 million records of 1,000 devices are three and a half days then."""
ROUNDS, ROUNDS_QUICK = 9, 1
WARM, WARM_QUICK = 3, 1
SOME_DEVICES = ((100, 10_000), (1_000, 100_000))
SOME_DEVICES_QUICK = ((10, 200),)
RATIO_MAX = 1.3


async def history(bench: Bench) -> list[Result]:
    """Equal live batches into a warehouse and into one with a hundred times its history, in turns."""
    batches = int(os.environ.get("BENCH_HISTORY", bench.pick(HISTORY, HISTORY_QUICK)))
    live = bench.pick(WARM + ROUNDS, WARM_QUICK + ROUNDS_QUICK)
    devices = bench.pick(1_000, 100)
    ticks = (batches + live) * bench.pick(BATCH, BATCH_QUICK) // devices
    # Some are days late, so that old windows change too.
    scenario = Scenario("device-history", devices, ticks * INTERVAL_S, interval_s=INTERVAL_S, late_gateways=1)
    async with topics(bench.kafka.bootstrap, scenario.partitions_of):
        feed = await fill(bench.kafka.bootstrap, scenario, with_ledger=False)
        say(f"history: {feed.records:,} records are in Kafka")
        with session() as spark:
            return _with_history(bench, spark, feed, batches, live)


def _with_history(bench: Bench, spark: SparkSession, feed: Feed, batches: int, live: int) -> list[Result]:
    folder = bench.directory / "history"
    parts = spark_kafka.slices(feed.ends, batches + live)
    old, young = Job(spark, folder / "old"), Job(spark, folder / "young")
    young_batches = max(1, batches // TIMES)

    def into(job: Job, number: int) -> None:
        job.take(spark_kafka.batch(spark, bench.kafka.bootstrap, *parts[number]), number)

    for number in range(batches):
        into(old, number)
        if number >= batches - young_batches:
            into(young, number)
        if number % 20 == 19:
            say(f"history: {number + 1} of {batches} batches are in the tables")
    ways: dict[str, spark_rounds.Way] = {
        "young": lambda number: into(young, number),
        "old": lambda number: into(old, number),
    }
    seconds = spark_rounds.interleaved(ways, range(batches, batches + live), bench.pick(WARM, WARM_QUICK))
    per_batch = feed.records / len(parts)
    note = (
        f"{batches} batches against {young_batches}, of {per_batch:,.0f} records; "
        f"median of {len(seconds['old'])} live batches"
    )
    return [
        Result("history_1x_batch_s", median(seconds["young"]), "s"),
        Result("history_100x_batch_s", median(seconds["old"]), "s"),
        Result(
            "history_100x_batch_ratio",
            spark_rounds.ratio(seconds["old"], seconds["young"]),
            "times",
            f"<= {RATIO_MAX}",
            note,
        ),
    ]


async def devices(bench: Bench) -> list[Result]:
    """Batches of as many records from a hundred times as many devices, in turns."""
    results = []
    for few, many in SOME_DEVICES_QUICK if bench.quick else SOME_DEVICES:
        results += await _with_devices(bench, few, many)
    return results


async def _with_devices(bench: Bench, few: int, many: int) -> list[Result]:
    batches = bench.pick(WARM + ROUNDS, WARM_QUICK + ROUNDS_QUICK)
    readings = batches * bench.pick(2 * BATCH, BATCH_QUICK)
    feeds: dict[int, Feed] = {}
    scenarios = {
        count: Scenario(f"device-of-{count}", count, seconds=readings / count * 10.0, interval_s=10.0)
        for count in (few, many)
    }
    names = {topic: count for each in scenarios.values() for topic, count in each.partitions_of.items()}
    async with topics(bench.kafka.bootstrap, names):
        for count, scenario in scenarios.items():
            feeds[count] = await fill(bench.kafka.bootstrap, scenario, with_ledger=False)
        with session() as spark:
            ways = {str(count): _of_devices(bench, spark, feed, count, batches) for count, feed in feeds.items()}
            seconds = spark_rounds.interleaved(ways, range(batches), bench.pick(WARM, WARM_QUICK))
    ratio = spark_rounds.ratio(seconds[str(many)], seconds[str(few)])
    say(f"devices: {median(seconds[str(few)]):.2f} s of {few:,}, {median(seconds[str(many)]):.2f} s of {many:,}")
    name = "devices_100x_batch_ratio" + ("" if few == SOME_DEVICES[0][0] else f"_of_{many}")
    note = f"{many:,} devices against {few:,}, {readings // batches:,} readings in each batch; 100 would be linear"
    return [Result(name, ratio, "times", "<= 100", note)]


def _of_devices(bench: Bench, spark: SparkSession, feed: Feed, count: int, batches: int) -> spark_rounds.Way:
    job = Job(spark, bench.directory / "devices" / str(count))
    parts = spark_kafka.slices(feed.ends, batches)
    return lambda number: job.take(spark_kafka.batch(spark, bench.kafka.bootstrap, *parts[number]), number)
