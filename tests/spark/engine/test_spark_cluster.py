"""The job under `spark-submit`, with executors that are processes of their own, and have little but Spark."""

import asyncio
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from shutil import rmtree

import cbor2
import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker
from spark.engine.executor_python import NEEDED
from spark.engine.session import SHORT_LIVED, connector_jars
from spark.log.readings_view import open_readings
from spark.views.windows_view import open_windows
from tests.spark.test_spark_ingest import send
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import reading, reading_headers
from tests.support.waiting import patience

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

PROJECT = Path(__file__).parents[3]
DECLARED = """
[streams.device-cluster]
codec = "cbor"
[streams.device-cluster.metrics.celsius]
from = "t"
decimals = 1
"""
DECODING = """\
import json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from spark.arrow_pass.tasks import judging
from spark.decode.record_frames import READ_SCHEMA, through_rules
from spark.decode.streams_file import parse_streams
from spark.decode.topic_speakers import TopicOwners
from spark.engine.interpreted_queries import interpreted_if
from spark.engine.session import open_session
from spark.log.record_verdicts import Verdicts
from tests.spark.engine.test_spark_cluster import DECLARED, drawn
from tests.support.spark_records import kafka_frame

spark = open_session("decoding")
verdicts = Verdicts(parse_streams(DECLARED, Path("streams.toml")), TopicOwners(), {})
found = through_rules(kafka_frame(spark, drawn()), READ_SCHEMA, judging(verdicts))
with interpreted_if(spark, small=True):
    rows = found.collect()
print(json.dumps(sorted(int(row.metrics[0].value) for row in rows)))
"""
"""Program that does the job's work in Python, without Kafka and tables. Only the driver has the project."""
BEGINNING = """\
import sys
sys.path.append(sys.argv[1])
from spark.batch_job import BatchJob
from spark.engine.executor_python import PackagesMissingError
from spark.engine.session import open_session

try:
    BatchJob(open_session("beginning"), sys.argv[2])
except PackagesMissingError as error:
    print(error)
"""
"""Program that begins as each job does."""
RECORDS = 40


def drawn() -> list[KafkaRecord]:
    """Records of two partitions."""
    now = datetime.now(UTC)
    return [
        replace(
            reading(cbor2.dumps({"t": sequence}), reading_headers(sequence, time=now, content_type="application/cbor")),
            topic="device-cluster",
            partition=sequence % 2,
        )
        for sequence in range(RECORDS)
    ]


@pytest.fixture
def ran() -> Iterator[Path]:
    """Folder where Spark's workers leave a folder for each executor. It shows which programs they ran."""
    apps = Path(pyspark.__file__).parent / "work"
    rmtree(apps, ignore_errors=True)
    yield apps
    rmtree(apps, ignore_errors=True)


def submit(folder: Path, *program: str, has_packages: bool = True) -> str:
    """Run a program with two executors, with the packages that they need or without. Returns its output."""
    done = submitted(folder, *program, has_packages=has_packages)
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    return done.stdout


def submitted(folder: Path, *program: str, has_packages: bool) -> "subprocess.CompletedProcess[str]":
    package = folder / "sluice.zip"
    with zipfile.ZipFile(package, "w") as archive:
        for file in sorted([*(PROJECT / "spark").rglob("*.py"), *(PROJECT / "gateway").rglob("*.py")]):
            archive.write(file, file.relative_to(PROJECT))
    packages = folder / "packages"
    if has_packages and not packages.exists():
        packages.mkdir()
        for name in (*NEEDED, "numpy.libs"):
            (packages / name).symlink_to(Path(pa.__file__).parents[1] / name)
    settings = {
        # The interpreter that this environment was made of. Neither the project nor its dependencies are installed in
        # it. What executors need of them is sent along, as a packed environment would be.
        "spark.pyspark.python": str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"),
        "spark.pyspark.driver.python": sys.executable,
        **({"spark.executorEnv.PYTHONPATH": str(packages)} if has_packages else {}),
        "spark.driver.defaultJavaOptions": SHORT_LIVED,
        "spark.executor.memory": "700m",
        "spark.executor.extraJavaOptions": SHORT_LIVED,
        "spark.sql.shuffle.partitions": "3",
        # Else the first executor does all there is before the second has started.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
    }
    command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local-cluster[2,1,800]"]
    command += ["--jars", ",".join(map(str, connector_jars())), "--py-files", str(package)]
    command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    home = Path(pyspark.__file__).parent
    environment = os.environ | {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    return subprocess.run(
        [*command, *program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=patience(500),
        check=False,
    )


@pytest.mark.long(seconds=60)
def test_executors_of_their_own_read_what_python_decodes(tmp_path: Path, ran: Path) -> None:
    program = tmp_path / "decoding.py"
    program.write_text(DECODING)
    assert json.loads(submit(tmp_path, str(program), str(PROJECT))) == list(range(RECORDS))
    # Each of the two had a part of the work: it fetched the decoders.
    assert len(list(ran.glob("*/*/sluice.zip"))) == 2


@pytest.mark.long(seconds=60)
def test_executors_without_the_packages_are_told_of_in_words(tmp_path: Path) -> None:
    program = tmp_path / "beginning.py"
    program.write_text(BEGINNING)

    done = submitted(tmp_path, str(program), str(PROJECT), str(tmp_path / "warehouse"), has_packages=False)

    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout.startswith("The Python of Spark's executors lacks numpy and pyarrow")
    assert not (tmp_path / "warehouse").exists()


@pytest.mark.kafka
@pytest.mark.long(seconds=80)
def test_the_job_fills_its_tables_with_executors_of_their_own(
    kafka: Broker, spark: SparkSession, tmp_path: Path, ran: Path
) -> None:
    asyncio.run(send(kafka, {"device-cluster"}, drawn()))
    streams, warehouse = tmp_path / "streams.toml", tmp_path / "warehouse"
    streams.write_text(DECLARED)
    job = [str(PROJECT / "spark" / "cli.py"), "ingest", "--once", "--json", "--bootstrap", kafka.bootstrap]
    job += ["--warehouse", str(warehouse), "--topics", "device-cluster", "--streams", str(streams)]

    assert f'"rows": {RECORDS}' in submit(tmp_path, *job)

    path = str(warehouse)
    found = sorted(row.value for row in open_readings(spark, path).select("value").collect())
    assert found == [Decimal(number) for number in range(RECORDS)]
    assert open_windows(spark, path).agg({"n": "sum"}).collect()[0][0] == RECORDS
    assert len(list(ran.glob("*/*/sluice.zip"))) == 2
