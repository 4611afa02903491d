"""What the order of `log`'s files costs and gives: CPU of upkeep beside the whole of `ingest`, bytes a reading."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from demo.kafka_broker import kafka_broker
from spark.batch_job import BatchJob
from spark.engine.delta_staging import jvm_of
from spark.log.log_table import BatchId, log_path
from spark.upkeep.table_upkeep import Upkeep
from tests.bench import spark_kafka
from tests.bench.cold import asked
from tests.bench.context import Bench, say
from tests.bench.report import Result
from tests.bench.spark_feed import Feed, fill, topics
from tests.bench.spark_job import INGEST, declared, session
from tests.bench.spark_scenario import DAY_S, Scenario

TICKS = os.sysconf("SC_CLK_TCK")
WARM = 12
"""Batches until Java's compiler has little left to do."""
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Load:
    """Records that come in, and how many of them in a batch. They end after midnight, so that a day is over."""

    suffix: str
    scenario: Scenario
    batch: int
    about: str


BACKLOG = Load(
    "",
    Scenario("device-layout", 1_000, 2 * DAY_S - 4 * HOUR_S, interval_s=30.0, heartbeat_s=60.0),
    100_000,
    "a backlog in batches of 100,000 records",
)
LIVE = Load(
    "_live",
    Scenario("device-layout-live", 100, DAY_S - 4 * HOUR_S, interval_s=60.0, heartbeat_s=60.0),
    1_000,
    "batches of 1,000 records, as of a site whose readings come as they are measured",
)
"""Scenarios begin at six in the morning."""
QUICK = Scenario("device-layout", 20, 20 * HOUR_S, interval_s=300.0, heartbeat_s=600.0)


class UpkeepInTurn(Upkeep):
    """Upkeep that is done when `after_batch` returns, and counts the seconds of CPU for `log`."""

    def __init__(self, job: BatchJob, cpu_s: Callable[[], float], begins: date) -> None:
        """`begins` is the day of the first readings: the warehouse is as if it had been made then."""
        super().__init__(job, say)
        self._day = begins
        self._cpu_s = cpu_s
        self.log_s = 0.0

    def after_batch(self, newest_us: int | None) -> None:
        super().after_batch(newest_us)
        self.wait()

    def _tidy(self, spark: SparkSession, kept: Any) -> None:
        begun = self._cpu_s()
        super()._tidy(spark, kept)
        if kept.path == log_path(self._job.tables):
            self.log_s += self._cpu_s() - begun


@dataclass(slots=True)
class Used:
    """Seconds of CPU."""

    batches_s: float = 0.0
    upkeep_s: float = 0.0
    log_s: float = 0.0
    records: int = 0


async def layout(bench: Bench) -> list[Result]:
    """CPU of the upkeep of `log` beside the whole of `ingest`, and bytes a reading, of a backlog."""
    return await _measured(bench, BACKLOG)


async def layout_live(bench: Bench) -> list[Result]:
    """The same of readings that come as they are measured."""
    return await _measured(bench, LIVE)


async def _measured(bench: Bench, load: Load) -> list[Result]:
    load = replace(load, scenario=QUICK, batch=150) if bench.quick else load
    folder = bench.directory / f"layout{load.suffix}"
    with kafka_broker(folder / "kafka") as kafka:
        async with topics(kafka.bootstrap, load.scenario.partitions_of):
            feed = await fill(kafka.bootstrap, load.scenario, with_ledger=False)
            say(f"layout: {feed.records:,} records are in Kafka")
            with session() as spark:
                return _ingested(spark, kafka.bootstrap, load, feed, folder / "warehouse")


def _ingested(spark: SparkSession, bootstrap: str, load: Load, feed: Feed, folder: Path) -> list[Result]:
    scenario = load.scenario
    java = int(jvm_of(spark).java.lang.ProcessHandle.current().pid())
    parts = spark_kafka.slices(feed.ends, max(1, feed.records // load.batch))
    job = BatchJob(spark, str(folder), declared(scenario))
    day = datetime.fromtimestamp(scenario.begin_us / 1e6, UTC).date()
    upkeep = UpkeepInTurn(job, lambda: _cpu_s(java), day)
    used = Used()
    for number, part in enumerate(parts):
        until = datetime.fromtimestamp(scenario.begin_us / 1e6, UTC) + timedelta(
            seconds=scenario.seconds * (number + 1) / len(parts)
        )
        # As if Kafka had taken the batch in when its newest reading was measured.
        records = spark_kafka.batch(spark, bootstrap, *part).withColumn("timestamp", F.lit(until))
        begun = _cpu_s(java)
        counts = job.take(records, BatchId(INGEST, number), {})
        taken = _cpu_s(java)
        before = upkeep.log_s
        upkeep.after_batch(max(counts.newest_us.values(), default=None))
        if number >= min(WARM, len(parts) // 4):
            used.batches_s += taken - begun
            used.upkeep_s += _cpu_s(java) - taken
            used.log_s += upkeep.log_s - before
            used.records += counts.rows
        if number % 50 == 49:
            say(f"layout: {number + 1} of {len(parts)} batches are in the tables")
    all_s = used.batches_s + used.upkeep_s
    note = (
        f"{load.about}; of {all_s / used.records * 1e6:.0f} us of CPU a record: "
        f"{used.log_s / used.records * 1e6:.1f} for the upkeep of `log`, "
        f"{(used.upkeep_s - used.log_s) / used.records * 1e6:.1f} for that of other tables"
    )
    log = log_path(job.tables)
    before_bytes, after_bytes = _bytes_a_record(_written(Path(log)), day), _bytes_a_record(_now(log), day)
    call = f"readings(device='d000001', since='{day}T12:00', until='{day + timedelta(days=1)}')"
    found, rows, read_mb = asked(str(folder), call, 1)
    return [
        Result(f"ingest_cpu_share_of_layout{load.suffix}", used.log_s / all_s, "", "<= 0.05", note),
        Result(f"log_bytes_per_reading_before{load.suffix}", before_bytes, "bytes", None, "as batches write it"),
        Result(f"log_bytes_per_reading_after{load.suffix}", after_bytes, "bytes", None, "of a day that is over"),
        Result(
            f"device_day_mb_read_ingested{load.suffix}",
            read_mb,
            "MB",
            None,
            f"{rows:,} rows of a day that is over; {found.cpu_s:.2f} s of CPU",
        ),
    ]


def _cpu_s(java: int) -> float:
    """Seconds of CPU that this process, Java and its workers have used."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may end meanwhile.
        with suppress(OSError):
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    counted = {java}
    while found := {pid for pid, fields in stats.items() if int(fields[1]) in counted} - counted:
        counted |= found
    # User and system time of each, and of its children that have ended.
    ticks = sum(int(field) for pid in counted for field in stats[pid][11:15])
    return time.process_time() + ticks / TICKS


Size = tuple[str, int, int]
"""Date, bytes and records of a file."""


def _written(log: Path) -> Iterator[Size]:
    """The files that batches wrote."""
    for commit in sorted((log / "_delta_log").glob("*.json")):
        for line in commit.read_text().splitlines():
            added = json.loads(line).get("add")
            if added and added["dataChange"]:
                records = json.loads(added["stats"])["numRecords"]
                yield added["partitionValues"]["event_date"], added["size"], records


def _now(log: str) -> Iterator[Size]:
    """The files that the table has now."""
    files: Any = DeltaTable(log).get_add_actions(flatten=True)
    columns = [files.column(name).to_pylist() for name in ("partition.event_date", "size_bytes", "num_records")]
    for day, size, records in zip(*columns, strict=True):
        yield str(day), size, records


def _bytes_a_record(files: Iterator[Size], day: object) -> float:
    found = [(size, records) for date, size, records in files if date == str(day)]
    return sum(size for size, _ in found) / sum(records for _, records in found)
