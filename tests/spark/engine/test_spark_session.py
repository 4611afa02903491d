"""A session on a machine that is not set up for Spark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark.engine.session import CLASSES, SHORT_LIVED, connector_jars

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process another host name: run as root"),
]

PROGRAM = """
from pyspark.sql.functions import udf
from spark.engine.session import open_session

spark = open_session("session")
print(spark.range(40, 41).select(udf(lambda number: number + 2, "long")("id")).first()[0])
"""


@pytest.mark.long(seconds=30)
def test_it_needs_no_host_name_that_resolves_no_python_on_the_path_and_no_class_archive(tmp_path: Path) -> None:
    jars = tmp_path / "jars"
    jars.mkdir()
    for jar in connector_jars():
        (jars / jar.name).symlink_to(jar)
    (jars / CLASSES).write_bytes(b"of another Java" * 1_000)
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho this is another Python >&2\nexit 1\n")
    other.chmod(0o755)
    left_out = {"SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME", "PYSPARK_PYTHON"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    environment |= {"SLUICE_SPARK_JARS": str(jars), "SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED}
    renamed = ["unshare", "--uts", "sh", "-ec", 'hostname sluice.invalid; exec "$@"', "sh"]

    done = subprocess.run(
        [*renamed, sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False
    )

    assert done.stdout == "42\n", done.stderr
