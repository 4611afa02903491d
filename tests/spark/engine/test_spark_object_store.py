"""The whole job with its tables and its checkpoint on an object store, by S3's protocol."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from demo.kafka_broker import Broker
from spark.engine.session import SHORT_LIVED
from tests.spark.test_spark_ingest import send
from tests.support.object_store import ObjectStore, object_store
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import reading, reading_headers

# The time that all its starts of Spark take on a busy machine.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

BEGUN = datetime.now(UTC) - timedelta(hours=1)
COUNTED = "SELECT count(*) AS readings, count(DISTINCT value) AS values FROM readings"
COUNT = ["sql", "--engine", "spark", COUNTED, "--json"]
# One Spark for several commands: starting it costs more than most of them.
RUN = """\
import json, sys
from spark.cli import main
from spark.engine.session import open_session
open_session("sluice-tests")
for command in json.loads(sys.argv[1]):
    main(command, standalone_mode=False)
"""


APPEND = """\
import sys
from spark.engine.delta_staging import AppendTable
from spark.engine.interpreted_queries import interpreted_if
from spark.engine.session import open_session

spark = open_session("append")
path = sys.argv[1]
with interpreted_if(spark, small=True):
    rows = spark.createDataFrame([(1,), (2,)], "n long")
    rows.limit(0).write.format("delta").save(path)
    # The second time by one who has to look who came before.
    for _ in range(2):
        AppendTable(spark, path, rows.schema).append(rows, {"batch": 0})
    print(sorted(row.n for row in spark.read.format("delta").load(path).collect()))
"""
"""A table as the job appends to all of its own."""


def run_program(store: ObjectStore, *program: str) -> str:
    """Run a program with Spark and access to the store. Returns its output."""
    environment = os.environ | {
        "SPARK_CONF_DIR": str(store.spark_conf),
        "SLUICE_SPARK_JARS": str(store.jars),
        "SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED,
    }
    done = subprocess.run(
        [sys.executable, "-c", *program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    return done.stdout


def run(store: ObjectStore, *commands: list[str]) -> list[str]:
    """Run commands of `sluice-cloud` on the store's warehouse. Returns their lines."""
    given = [[*command, "--warehouse", f"{store.url}/warehouse"] for command in commands]
    return run_program(store, RUN, json.dumps(given)).splitlines()


def sent(topic: str, *sequences: int) -> list[KafkaRecord]:
    return [
        replace(
            reading(f'{{"t": {each}}}'.encode(), reading_headers(each, time=BEGUN + timedelta(seconds=each))),
            topic=topic,
            partition=each % 2,
        )
        for each in sequences
    ]


def ingest(kafka: Broker, topic: str) -> list[str]:
    return ["ingest", "--once", "--json", "--bootstrap", kafka.bootstrap, "--topics", topic]


@pytest.mark.long(seconds=60)
def test_a_table_on_an_object_store_is_appended_to_once(tmp_path: Path) -> None:
    with object_store(tmp_path) as store:
        assert run_program(store, APPEND, f"{store.url}/table") == "[1, 2]\n"


@pytest.mark.kafka
@pytest.mark.long(seconds=200)
def test_a_warehouse_on_an_object_store_is_filled_replayed_and_kept_in_order(kafka: Broker, tmp_path: Path) -> None:
    topic = "device-on-s3"
    with object_store(tmp_path) as store:
        asyncio.run(send(kafka, {topic}, sent(topic, *range(60), *range(50, 60))))
        assert '"duplicates": 10' in run(store, ingest(kafka, topic))[-1]

        asyncio.run(send(kafka, set(), sent(topic, *range(55, 70))))
        upkeep = ["maintain", "--keep-days", "0", "--old-versions"]
        lines = run(store, ingest(kafka, topic), ["replay"], upkeep, COUNT)
        assert '"duplicates": 5' in lines[1]
        assert json.loads(lines[-1]) == {"readings": 70, "values": 70}
