"""The job under `spark-submit`, with executors that are processes of their own and have nothing but Spark."""

import asyncio
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from shutil import rmtree

import cbor2
import pyspark
import pytest
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker
from spark.engine.session import SHORT_LIVED, connector_jars
from spark.log.readings_view import open_readings
from spark.views.windows_view import open_windows
from tests.spark.test_spark_ingest import send
from tests.support.spark_records import reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

PROJECT = Path(__file__).parents[3]
DECLARED = """
[streams.device-cluster]
codec = "cbor"
[streams.device-cluster.metrics.celsius]
from = "t"
decimals = 1
"""


def test_executors_of_their_own_read_what_python_decodes(
    kafka: Broker, spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    now = datetime.now(UTC)
    records = [
        replace(
            reading(cbor2.dumps({"t": sequence}), reading_headers(sequence, time=now, content_type="application/cbor")),
            topic="device-cluster",
            partition=sequence % 2,
        )
        for sequence in range(40)
    ]
    asyncio.run(send(kafka, {"device-cluster"}, records))
    package, streams, warehouse = tmp_path / "sluice.zip", tmp_path / "streams.toml", tmp_path / "warehouse"
    streams.write_text(DECLARED)
    with zipfile.ZipFile(package, "w") as archive:
        for file in sorted((PROJECT / "spark").rglob("*.py")):
            archive.write(file, file.relative_to(PROJECT))
    settings = {
        # The interpreter that this environment was made of: neither the project nor what it needs is installed in it.
        "spark.pyspark.python": str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"),
        "spark.pyspark.driver.python": sys.executable,
        "spark.executor.memory": "700m",
        "spark.executor.extraJavaOptions": SHORT_LIVED,
        "spark.sql.shuffle.partitions": "3",
    }
    command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local-cluster[2,1,800]"]
    command += ["--jars", ",".join(map(str, connector_jars())), "--py-files", str(package)]
    command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    command += [str(PROJECT / "spark" / "cli.py"), "ingest", "--once", "--json", "--bootstrap", kafka.bootstrap]
    command += ["--warehouse", str(warehouse), "--topics", "device-cluster", "--streams", str(streams)]
    home = Path(pyspark.__file__).parent
    environment = os.environ | {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    # Spark's workers leave there what they ran, and it is not to be had elsewhere.
    apps = home / "work"
    rmtree(apps, ignore_errors=True)
    request.addfinalizer(lambda: rmtree(apps, ignore_errors=True))

    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=400, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    assert '"rows": 40' in done.stdout
    path = str(warehouse)
    found = sorted(row.value for row in open_readings(spark, path).select("value").collect())
    assert found == [Decimal(number) for number in range(40)]
    assert open_windows(spark, path).agg({"n": "sum"}).collect()[0][0] == 40
    # Each of the two had some of it to do: it fetched what decodes.
    assert len(list(apps.glob("*/*/sluice.zip"))) == 2
