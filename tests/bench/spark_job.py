"""The bench's only contact with the job: a batch, the table of windows, `sluice-cloud ingest`."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from demo.child_process import log_tail
from spark.batch_job import BatchJob
from spark.decode.codec_declarations import Metric, Stream, Streams
from spark.engine.session import open_session
from spark.log.log_table import BatchId
from spark.upkeep.table_upkeep import Upkeep, maintain
from spark.views.windows_view import open_windows
from tests.bench.context import say
from tests.bench.processes import Measured, NotMeasuredError, spawn, stop
from tests.bench.spark_feed import Place
from tests.bench.spark_scenario import Scenario

SLUICE_CLOUD = Path(sys.executable).with_name("sluice-cloud")
INGEST = "bench"
"""The streaming query's id where there is none."""
BACKLOG_OPTIONS = ("--backlog-topics", r".*[.]backlog")
"""Options of `ingest` for a topic with a backlog, whose name ends in `.backlog`."""
READY_S_MAX = 120.0
LOOK_S = 0.02
"""Seconds of uncertainty in the time when a batch was reported."""


# -- in this process ----------------------------------------------------------------------------


@contextmanager
def session() -> Iterator[SparkSession]:
    """Spark as the job has it, with the compiler that optimises. Its JVM lives on, and stays warm."""
    os.environ.pop("SLUICE_SPARK_JAVA_OPTIONS", None)
    spark = open_session("sluice-bench")
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def declared(scenario: Scenario) -> Streams:
    """Declarations of a feed's readings, as `streams.toml` would have them."""
    metrics = tuple(Metric(name, (name,), decimals=2) for name in sorted(scenario.metrics))
    return Streams((Stream(scenario.topic, "json", metrics=metrics),))


class Job:
    """The job on one warehouse, batch by batch."""

    def __init__(self, spark: SparkSession, warehouse: Path, streams: Streams | None = None) -> None:
        self._spark = spark
        self._warehouse = str(warehouse)
        self._job = BatchJob(spark, self._warehouse, streams)
        self._upkeep = Upkeep(self._job, say)

    def take(self, records: DataFrame, number: int) -> None:
        """Take a batch of Spark's Kafka source (`includeHeaders`) into all tables, and do their upkeep."""
        counts = self._job.take(records, BatchId(INGEST, number), {})
        self._upkeep.after_batch(max(counts.newest_us.values(), default=None))

    def save(self) -> None:
        """Save the state of the driver."""
        self._job.save()

    def maintain(self) -> None:
        """Do the daily upkeep."""
        maintain(self._job, datetime.now(UTC).date())

    def end(self) -> None:
        """End the work beside the batches. The state is not saved."""
        self._upkeep.end()

    def writer(self, records: DataFrame) -> DataStreamWriter:
        return records.writeStream.foreachBatch(self.take)

    def windows(self) -> DataFrame:
        return windows(self._spark, Path(self._warehouse))


def windows(spark: SparkSession, warehouse: Path) -> DataFrame:
    """Windows of a minute as an analyst reads them: `device`, `metric`, `window_start`, `n`, `sum`."""
    return open_windows(spark, str(warehouse))


# -- as a process -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reported:
    """A batch whose windows can be read."""

    at_s: float
    """UNIX time at which the job said so."""
    ends: dict[Place, int]
    """The next offset of each partition."""

    def taken(self, places: Iterable[Place]) -> int:
        """Records of these partitions that are in the tables."""
        return sum(self.ends.get(place, 0) for place in places)

    def holds(self, ends: Mapping[Place, int]) -> bool:
        return all(self.ends.get(place, 0) >= end for place, end in ends.items())


@dataclass(slots=True)
class Ingest:
    """A running `sluice-cloud ingest`."""

    is_ready: bool = False
    reports: list[Reported] = field(default_factory=list)
    trouble: str = ""
    """Why it ended by itself."""

    def note(self, line: dict[str, Any]) -> None:
        """One line of its output."""
        if "state" in line:
            self.is_ready = True
            return
        ends = {
            (topic, int(number)): end
            for topic, partitions in line["end_offsets"].items()
            for number, end in partitions.items()
        }
        self.reports.append(Reported(time.time(), ends))

    async def until(self, ends: Mapping[Place, int], patience_s: float) -> float:
        """Wait until all before these offsets is in the tables; give the UNIX time. Raises NotMeasuredError."""
        deadline = time.time() + patience_s
        while not self.reports or not self.reports[-1].holds(ends):
            await self._wait(deadline, f"{sum(ends.values()):,} records are not in the tables in {patience_s:.0f} s")
        return next(report.at_s for report in self.reports if report.holds(ends))

    async def until_ready(self) -> None:
        deadline = time.time() + READY_S_MAX
        while not self.is_ready:
            await self._wait(deadline, "it does not read Kafka")

    async def _wait(self, deadline: float, trouble: str) -> None:
        if self.trouble or time.time() > deadline:
            raise NotMeasuredError(f"sluice-cloud ingest: {self.trouble or trouble}")
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def ingesting(bootstrap: str, directory: Path, topics: str, options: Sequence[str] = ()) -> AsyncIterator[Ingest]:
    """`sluice-cloud ingest` for the length of a block, once it reads Kafka; into `directory`/warehouse."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ.pop("SLUICE_SPARK_JAVA_OPTIONS", None)
    command: list[str | Path] = [SLUICE_CLOUD, "ingest", "--json", "--bootstrap", bootstrap, "--topics", topics]
    command += ["--warehouse", directory / "warehouse", *options]
    process = spawn(command, directory, 0, "ingest.log")
    ingest = Ingest()
    following = asyncio.create_task(_follow(process, ingest), name="follow ingest")
    try:
        await ingest.until_ready()
        yield ingest
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        stop(process)


async def _follow(process: Measured, ingest: Ingest) -> None:
    """Record each line as it is written. Lines that are no JSON are for people."""
    with process.log.open() as log:
        rest = ""
        while True:
            ended = process.process.poll() is not None
            *lines, rest = (rest + log.read()).split("\n")
            for line in lines:
                if line.startswith("{"):
                    ingest.note(json.loads(line))
            if ended:
                ingest.trouble = f"it has ended:\n{log_tail(process.log)}"
                return
            await asyncio.sleep(LOOK_S)
