"""`kill -9` at random points of the real job, again and again: the tables end as if nothing had happened."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker
from spark.engine.session import SHORT_LIVED
from spark.ingest_job import IngestSettings, Listener, run_ingest
from spark.log.log_table import open_log
from spark.source.kafka_source import KafkaSource
from tests.support import spark_oracle
from tests.support.sizes import SEED
from tests.support.spark_kafka_feed import send
from tests.support.spark_records import drawn_records
from tests.support.spark_warehouse import Warehouse

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(1_500)]

TOPICS = "(device|gateway)-.*-kills"
KILLS = 10
RECORDS = 400
BATCH_RECORDS = 40
WORK_S_MAX = 12.0
"""Most seconds from the beginning of reading until the job dies: a few batches."""
START_S_MAX = 20.0
"""Most seconds from its start until the job dies, every other time. It may then still finish another life's work."""
EAGER = """
from spark.engine import delta_upkeep
from spark.upkeep import table_upkeep
from spark.cli import main
table_upkeep.LOOK_BATCHES, table_upkeep.FILES_NEW_MIN = 1, 4
delta_upkeep.FILES_MIN, delta_upkeep.GROWTH_MIN = 4, 1
main()
"""
"""`sluice-cloud` with tables that are put in order every few batches, so that kills meet that too."""


@pytest.mark.long(seconds=240)
def test_kills_at_random_points_change_nothing(kafka: Broker, spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(SEED)  # noqa: S311
    records = [replace(record, topic=f"{record.topic}-kills") for record in drawn_records(rng, RECORDS)]
    asyncio.run(send(kafka, records))
    warehouse = str(tmp_path / "warehouse")
    for life in range(KILLS):
        with ingest(kafka, warehouse, "--interval-s", "0", "--batch-records-max", str(BATCH_RECORDS)) as process:
            if life % 2 == 0:
                assert process.stdout is not None
                assert json.loads(process.stdout.readline())["state"] == "ready"
                time.sleep(rng.uniform(0, WORK_S_MAX))
            else:
                time.sleep(rng.uniform(0, START_S_MAX))
            # Python and its JVM alike.
            os.killpg(process.pid, signal.SIGKILL)
    source = KafkaSource(kafka.bootstrap, TOPICS)
    settings = IngestSettings(source, warehouse, f"{warehouse}/_checkpoint", once=True)
    run_ingest(spark, settings, threading.Event(), Listener())

    # Each record was read, and none twice.
    places = [(r.topic, r.partition, r.offset) for r in open_log(spark, warehouse).collect()]
    assert sorted(places) == sorted((r.topic, r.partition, r.offset) for r in records)
    assert Warehouse(spark, Path(warehouse)).tables() == spark_oracle.tables(records)


@contextmanager
def ingest(broker: Broker, warehouse: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`sluice-cloud ingest` in a group of its own, for the length of a `with`."""
    command = [sys.executable, "-c", EAGER, "ingest", "--bootstrap", broker.bootstrap, "--json", *options]
    command += ["--warehouse", warehouse, "--topics", TOPICS]
    environment = os.environ | {"SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
