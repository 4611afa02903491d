"""Measures what devices cost that are known already: batches, memory of the driver, and starts."""

import gc
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.delta_staging import AppendTable, jvm_of
from spark.log.device_parts import device_parts_path, device_parts_schema
from spark.log.lane_sequences import Lane, SeenLane
from tests.bench import spark_kafka, spark_rounds
from tests.bench.context import Bench, say
from tests.bench.report import Result
from tests.bench.spark_feed import NAMESPACE, Feed, fill, topics
from tests.bench.spark_job import Job, session
from tests.bench.spark_scenario import Scenario

HEARD, HEARD_QUICK = 10_000, 100
"""Devices in the batches. One of two warehouses knows these alone."""
KNOWN, KNOWN_QUICK = 2_000_000, 1_000
"""Devices that the other one knows."""
BATCH, BATCH_QUICK = 100_000, 2_000
ROUNDS, ROUNDS_QUICK = 9, 1
WARM, WARM_QUICK = 3, 1
LANES, LANE_BATCHES = 1_000, 200
FILES = 8
"""Files of `device_parts` with the devices that are in no batch, as a fold leaves them."""


async def known(bench: Bench) -> list[Result]:
    """Equal batches into a warehouse that knows their devices, and into one that knows many more, in turns."""
    devices, batches = bench.pick(HEARD, HEARD_QUICK), 1 + bench.pick(WARM + ROUNDS, WARM_QUICK + ROUNDS_QUICK) + 1
    seconds = batches * bench.pick(BATCH, BATCH_QUICK) / devices * 10.0
    scenario = Scenario("device-known", devices, seconds, interval_s=10.0, counted_share=1.0)
    async with topics(bench.kafka.bootstrap, scenario.partitions_of):
        feed = await fill(bench.kafka.bootstrap, scenario, with_ledger=False)
        with session() as spark:
            return [*_of_devices(bench, spark, feed, batches), _of_lanes()]


def _of_devices(bench: Bench, spark: SparkSession, feed: Feed, batches: int) -> list[Result]:
    heard, every = bench.pick(HEARD, HEARD_QUICK), bench.pick(KNOWN, KNOWN_QUICK)
    parts = spark_kafka.slices(feed.ends, batches)
    paths = {name: bench.directory / "known" / name for name in ("few", "many")}
    jobs: dict[str, Job] = {}

    def into(name: str) -> spark_rounds.Way:
        return lambda number: jobs[name].take(spark_kafka.batch(spark, bench.kafka.bootstrap, *parts[number]), number)

    for name, path in paths.items():
        jobs[name] = Job(spark, path)
        into(name)(0)
    know(spark, paths["many"], every - heard)
    say(f"known: {every:,} devices are in the tables")
    ways = {name: into(name) for name in paths}
    seconds = spark_rounds.interleaved(ways, range(1, batches - 1), bench.pick(WARM, WARM_QUICK))
    # A new job for each, and nothing of the former one: it was not saved, as if it had been killed.
    for job in jobs.values():
        job.end()
    jobs.clear()
    grown: dict[str, int] = {}
    begun_s: dict[str, float] = {}
    for name, path in paths.items():
        before = _driver_bytes(spark)
        begun = time.monotonic()
        jobs[name] = Job(spark, path)
        begun_s[name] = time.monotonic() - begun
        into(name)(batches - 1)
        grown[name] = _driver_bytes(spark) - before
    saved_s, maintained_s = _timed(jobs["many"].save), _timed(jobs["few"].maintain)
    size = sum(file.stat().st_size for file in paths["few"].rglob("*") if file.is_file())
    note = f"{every:,} devices known against {heard:,}, batches of {feed.records / len(parts):,.0f} records"
    more = grown["many"] - grown["few"]
    return [
        Result("devices_2m_batch_s", median(seconds["many"]), "s"),
        Result("devices_2m_batch_ratio", spark_rounds.ratio(seconds["many"], seconds["few"]), "times", "<= 1.5", note),
        Result("driver_bytes_2m_devices", more, "bytes", "<= 67108864", f"of a start and a batch; {note}"),
        Result("start_after_kill_s", begun_s["many"], "s", "<= 30", f"beside Spark's own start; {every:,} devices"),
        Result("state_save_s", saved_s, "s", note="lanes, topics and gateways: nothing of devices is saved"),
        Result("maintain_s_small", maintained_s, "s", "<= 10", f"a warehouse of {size / 1e6:.0f} MB"),
    ]


def know(spark: SparkSession, warehouse: Path, count: int) -> None:
    """Let a warehouse know devices that nothing comes of any more, as folds leave them."""
    path = device_parts_path(f"{warehouse}/v1")
    schema = device_parts_schema()
    edge = """named_struct('event_us', 0L, 'time_error_us', 1L, 'time_quality', 'estimated', 'gateway', 'g0',
        'gateway_boot', '5d0a1f7e', 'boot_time_us', 0L, 'boot_time_error_us', CAST(NULL AS BIGINT))"""
    columns = {
        "namespace": f"'{NAMESPACE}'",
        "device": "printf('k%07d', id)",
        "stream": "'device-known'",
        "device_counter": "''",
        "device_boot": "'7-1a2b3c4d'",
        "run": "xxhash64(id)",
        "first": "0L",
        "last": "999L",
        "islands": f"array(named_struct('first', 0L, 'last', 999L, 'first_edge', {edge}, 'last_edge', {edge}))",
        "gateways": "array('g0')",
        "last_us": "0L",
        "batch_first": "0L",
        "batch_last": "0L",
    }
    rows = spark.range(0, count, 1, FILES).select(*(F.expr(columns[name]).alias(name) for name in schema.names))
    staged = AppendTable(spark, path, schema).begin()
    staged.write(rows)
    staged.commit({})


def _of_lanes() -> Result:
    note = f"Python's memory of {LANES:,} lanes, each with readings in {LANE_BATCHES} batches, one after the other"
    return Result("driver_bytes_per_lane", lane_bytes(LANES, LANE_BATCHES), "bytes", "<= 2048", note)


def lane_bytes(lanes: int, batches: int) -> float:
    """Bytes of a lane in the driver's memory, with its name."""
    states: dict[Lane, SeenLane] = {}
    tracemalloc.start()
    try:
        for lane in range(lanes):
            states[f"{lane:016x}", f"{lane:012x}"] = seen = SeenLane()
            # Their spans are joined at different times.
            for batch in range(batches - lane % 32):
                seen.add(range(100 * batch, 100 * batch + 100), batch)
        return tracemalloc.get_traced_memory()[0] / lanes
    finally:
        tracemalloc.stop()


def _driver_bytes(spark: SparkSession) -> int:
    """Bytes that Python and Java hold, without garbage."""
    gc.collect()
    java = jvm_of(spark).java.lang
    java.System.gc()
    running = java.Runtime.getRuntime()
    of_python = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return of_python + int(running.totalMemory() - running.freeMemory())


def _timed(do: Callable[[], object]) -> float:
    begun = time.monotonic()
    do()
    return time.monotonic() - begun
