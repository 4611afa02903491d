"""The one Spark session that all tests of a process share: starting it costs more than most of them."""

import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark.engine.delta_staging import jvm_of
from spark.engine.session import open_session

CODE_CACHE = "-XX:ReservedCodeCacheSize=512m"
"""The code of all tests is more than a brief session keeps."""
ROOM = "-Xms3g -XX:MetaspaceSize=512m -XX:ParallelGCThreads=1"
"""Memory from the start: to grow it, Java would look through all of it each time. Two threads that collect garbage wait
for each other on busy cores."""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session, as the jobs build it. The optimising compiler would take a third of its time."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLUICE_SPARK_JAVA_OPTIONS", f"{CODE_CACHE} {ROOM}")
        # All tests in one: what Spark keeps of plans adds up, to half a gigabyte after a third of them.
        environment.setenv("SPARK_DRIVER_MEMORY", "4g")
        session = open_session("sluice-tests", master="local[2]", is_brief=True)
    yield session
    session.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the run where Spark's Java has died: all tests after it would fail, and say nothing of why."""
    result = yield
    # To ask for the active one would ask Java.
    session = SparkSession._instantiatedSession
    if session is not None:
        try:
            jvm_of(session).java.lang.System.nanoTime()
        except Exception:  # noqa: BLE001 - whichever way Py4J says that nobody answers
            pytest.exit(f"Spark's Java has died in {item.nodeid}", returncode=1)
    return result


@pytest.fixture(scope="session")
def empty_warehouse(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse without batches, to be copied and left as it is: making one takes longer than most tests."""
    from spark.batch_job import BatchJob

    path = tmp_path_factory.mktemp("empty") / "warehouse"
    BatchJob(spark, str(path))
    return path


@pytest.fixture
def new_warehouse(empty_warehouse: Path, tmp_path: Path) -> str:
    """The path of an empty warehouse of the test's own."""
    return str(shutil.copytree(empty_warehouse, tmp_path / "warehouse"))


@pytest.fixture
def interpreted(spark: SparkSession) -> Iterator[None]:
    """For tests of a few rows: compiling views takes longer than reading what little is in them."""
    from spark.engine.interpreted_queries import interpreted_if

    with interpreted_if(spark, small=True):
        yield


@pytest.fixture(scope="session")
def scene_warehouse(spark: SparkSession, empty_warehouse: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The warehouse of `desk_scene`, to be read only."""
    from tests.support.desk_scene import made

    path = str(shutil.copytree(empty_warehouse, tmp_path_factory.mktemp("scene") / "warehouse"))
    made(spark, path)
    return path
