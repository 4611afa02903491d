"""Compares the rate of the whole job with plain Kafka → Delta, and with the stock recipe, which loses late readings."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame, SparkSession

from tests.bench import spark_kafka, spark_rounds
from tests.bench.context import Bench, say
from tests.bench.report import Result
from tests.bench.spark_feed import Feed, fill, topics
from tests.bench.spark_job import Job, declared, session
from tests.bench.spark_kafka import Tables
from tests.bench.spark_ledger import Verdict
from tests.bench.spark_scenario import Scenario
from tests.bench.spark_stock import WATERMARKS, Stock

BATCH, BATCH_QUICK = 100_000, 2_000
ROUNDS, ROUNDS_QUICK = 9, 1
WARM, WARM_QUICK = 12, 1
"""Batches until Java's compiler has little left to do. After three, the job ran at half its rate."""
STREAM_BATCHES = 6
STREAM_BATCH_QUICK = 4_000
STREAM_ROUNDS = 3
HOURS = 2
RESENT = "_with_resends"
"""A batch in which something came twice must be judged anew; most batches of most sites have nothing of the kind."""


def days_late(topic: str, readings: int, seconds: float) -> Scenario:
    """1,000 devices over ten gateways. One gateway comes back after three days while the others are live."""
    devices = min(1_000, readings // 10)
    return Scenario(topic, devices, seconds, interval_s=seconds * devices / readings, late_gateways=1)


async def append(bench: Bench) -> list[Result]:
    """The whole job beside a plain append of the same records, batch by batch in turns."""
    warm, rounds = bench.pick(WARM, WARM_QUICK), bench.pick(ROUNDS, ROUNDS_QUICK)
    readings = (warm + rounds) * bench.pick(BATCH, BATCH_QUICK)
    scenario = days_late("device-append", readings, readings / 100)
    results: list[Result] = []
    for suffix, resent_share in (("", 0.0), (RESENT, 0.01)):
        fed = replace(scenario, topic=scenario.topic + suffix, resent_share=resent_share)
        async with topics(bench.kafka.bootstrap, fed.partitions_of):
            feed = await fill(bench.kafka.bootstrap, fed, with_ledger=False)
            say(f"append{suffix}: {feed.records:,} records are in Kafka, {feed.resent:,} of them a second time")
            with session() as spark:
                results += _shares(bench, spark, feed, suffix, warm)
    return results


def _shares(bench: Bench, spark: SparkSession, feed: Feed, suffix: str, warm: int) -> list[Result]:
    folder = bench.directory / "append" / f"tables{suffix}"
    job = Job(spark, folder / "job", declared(feed.scenario))
    rounds = spark_rounds.Rounds(warm)

    def both(records: DataFrame, number: int) -> None:
        append = records.write.format("delta").mode("append")
        rounds.take({"append": lambda: append.save(str(folder / "append")), "job": lambda: job.take(records, number)})

    # So that something is left over for a last batch, which is smaller, and does not count.
    size = feed.records // (feed.records // bench.pick(BATCH, BATCH_QUICK)) - 1
    stream = spark_kafka.stream(spark, bench.kafka.bootstrap, feed.scenario.partitions_of, size)
    spark_kafka.drain(stream.writeStream.foreachBatch(both), folder / "checkpoint")
    seconds = {name: each[:-1] for name, each in rounds.seconds.items()}
    rates = {name: size / median(each) for name, each in seconds.items()}
    share = spark_rounds.ratio(seconds["append"], seconds["job"])
    say(f"append{suffix}: plain {rates['append']:,.0f}/s, the job {rates['job']:,.0f}/s, a share of {share:.2f}")
    note = f"median of {len(seconds['job'])} batches of {size:,} records"
    words = "1 % of the records come twice, in every batch" if suffix else ""
    results = [
        Result(f"append_rows_per_s{suffix}", rates["append"], "1/s", None, note),
        Result(f"job_rows_per_s{suffix}", rates["job"], "1/s", None, note),
        Result(f"job_share_of_append{suffix}", share, "of append", None if suffix else ">= 0.6", words),
    ]
    if not suffix:
        rate = size / median(_as_delivered(bench, feed, folder / "as_delivered", size)[warm:-1])
        say(f"append: plain {rate:,.0f}/s in a Spark as it is delivered, alone")
        note = "the same plain append without the job's settings of Spark, in a process of its own, afterwards"
        results.append(Result("append_rows_per_s_as_delivered", rate, "1/s", None, note))
    return results


def _as_delivered(bench: Bench, feed: Feed, folder: Path, size: int) -> list[float]:
    """The seconds that plain appends take, batch by batch, in a process of their own."""
    command = [sys.executable, "-m", "tests.bench.spark_plain", "--bootstrap", bench.kafka.bootstrap]
    command += ["--size", str(size), "--folder", str(folder)]
    command += [f"--topic={topic}" for topic in feed.scenario.partitions_of]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    seconds: list[float] = json.loads(run.stdout)
    return seconds


async def stock(bench: Bench) -> list[Result]:
    """The job beside the stock recipe on one stream: hours of event time, 10 % of the devices days late, resends."""
    readings = STREAM_BATCHES * bench.pick(BATCH, BATCH_QUICK)
    seconds = HOURS * 3_600.0
    scenario = replace(
        days_late("device-stock", readings, seconds), late_arrives_s=seconds / STREAM_BATCHES, resent_share=0.02
    )
    async with topics(bench.kafka.bootstrap, scenario.partitions_of):
        feed = await fill(bench.kafka.bootstrap, scenario)
        say(f"stock: {feed.records:,} records are in Kafka, {feed.resent:,} of them a second time")
        with session() as spark:
            return _beside_stock(bench, spark, feed)


def _beside_stock(bench: Bench, spark: SparkSession, feed: Feed) -> list[Result]:
    folder = bench.directory / "stock" / "tables"
    tables: dict[str, Tables] = {}

    def way(name: str, made: Callable[[Path], Tables]) -> spark_rounds.Way:
        def run(_: int) -> None:
            shutil.rmtree(folder / name, ignore_errors=True)
            tables[name] = made(folder / name)
            records = spark_kafka.stream(
                spark, bench.kafka.bootstrap, feed.scenario.partitions_of, bench.pick(BATCH, STREAM_BATCH_QUICK)
            )
            spark_kafka.drain(tables[name].writer(records), folder / name / "checkpoint")

        return run

    ways = {"job": way("job", lambda path: Job(spark, path, declared(feed.scenario)))}
    ways |= {watermark: way(watermark, partial(Stock, spark, watermark)) for watermark in WATERMARKS}
    rounds = range(bench.pick(STREAM_ROUNDS + 1, 1))
    seconds = spark_rounds.interleaved(ways, rounds, bench.pick(1, 0))
    rates = {name: feed.records / median(each) for name, each in seconds.items()}
    verdicts = {name: judged(feed, each.windows()) for name, each in tables.items()}
    for name, verdict in verdicts.items():
        say(f"stock: {name}: {rates[name]:,.0f} records/s; {verdict}")
    job, (short, long) = verdicts["job"], (verdicts[watermark] for watermark in WATERMARKS)
    late = f"of {job.expected:,}; a tenth of the devices is three days late"
    ten_minutes, one_hour = WATERMARKS
    return [
        Result("stock_rows_per_s", rates[ten_minutes], "1/s", None, f"watermark of {ten_minutes}; it keeps no log"),
        Result("stock_rows_per_s_1_hour", rates[one_hour], "1/s", None, f"watermark of {one_hour}"),
        Result("stock_job_rows_per_s", rates["job"], "1/s", None, "the job on the same stream, log and all"),
        Result("stock_lost", short.lost, "readings", None, late),
        Result("stock_lost_1_hour", long.lost, "readings", None, late),
        Result("stock_doubled", short.doubled, "readings"),
        Result("job_lost", job.lost, "readings", "= 0", late),
        Result("job_doubled", job.doubled, "readings", "= 0", f"{feed.resent:,} records came twice"),
        Result("job_wrong_windows", job.wrong, "windows", "= 0", "another count or sum than the readings have"),
    ]


def judged(feed: Feed, windows: DataFrame) -> Verdict:
    """Compare a table of windows with a feed's readings."""
    if feed.ledger is None:
        raise ValueError("this feed was made without a ledger")
    return feed.ledger.judge(spark_kafka.counted(windows))
