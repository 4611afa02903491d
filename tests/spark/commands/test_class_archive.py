"""Spark's classes in one file: a session takes them from there, and from jars where the file is no good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark.engine.session import CLASSES, SHORT_LIVED, connector_jars

pytestmark = pytest.mark.spark

PROGRAM = (
    "from spark.engine.session import open_session; print(open_session('classes').sql('SELECT 40 + 2').first()[0])"
)


def run(jars: Path, classes_told: Path) -> str:
    """Start Spark with these jars, and have Java print where it had each class from. Returns the output."""
    environment = os.environ | {
        "SLUICE_SPARK_JARS": str(jars),
        "SLUICE_SPARK_JAVA_OPTIONS": f"{SHORT_LIVED} -Xlog:class+load:file={classes_told}",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    return done.stdout


@pytest.fixture
def jars(tmp_path: Path) -> Path:
    """A folder of the jars, without an archive."""
    for jar in connector_jars():
        (tmp_path / jar.name).symlink_to(jar)
    return tmp_path


@pytest.mark.long(seconds=80)
def test_most_classes_come_from_the_archive(jars: Path) -> None:
    making = [sys.executable, "-m", "spark.commands.class_archive"]
    subprocess.run(making, check=True, env=os.environ | {"SLUICE_SPARK_JARS": str(jars)})
    assert run(jars, jars / "classes") == "42\n"
    # It is large, and pytest keeps what tests leave.
    (jars / CLASSES).unlink()
    told = (jars / "classes").read_text().splitlines()
    archived = sum("shared objects file (top)" in line for line in told)
    assert archived > len(told) / 2


@pytest.mark.long(seconds=15)
def test_an_archive_that_is_none_is_passed_over_without_a_word(jars: Path) -> None:
    (jars / CLASSES).write_bytes(b"of another Java" * 1_000)
    assert run(jars, jars / "classes") == "42\n"
    assert "shared objects file (top)" not in (jars / "classes").read_text()
