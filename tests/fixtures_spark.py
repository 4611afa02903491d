"""The one Spark session that all tests share: starting it costs more than most of them."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from spark.session import SHORT_LIVED, open_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session, as the jobs build it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLUICE_SPARK_JAVA_OPTIONS", SHORT_LIVED)
        session = open_session("sluice-tests", master="local[2]")
    yield session
    session.stop()
