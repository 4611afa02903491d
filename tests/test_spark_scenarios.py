"""Sites that Hypothesis draws, many in one run of the job: the tables are what the oracle makes of all records."""

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests import spark_oracle
from tests.spark_oracle import KafkaRecord
from tests.spark_scenarios import batches_of, sites
from tests.spark_warehouse import Warehouse

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]

SITES = 16
BATCHES = 2


# Without shrinking: each try takes half a minute. The blob that is printed brings back one that failed.
@settings(
    max_examples=3,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(found=sites(SITES), rng=st.randoms(use_true_random=False))
def test_many_sites_at_once_are_what_the_oracle_says(
    spark: SparkSession,
    empty_warehouse: Path,
    tmp_path_factory: pytest.TempPathFactory,
    found: list[list[KafkaRecord]],
    rng: random.Random,
) -> None:
    records = [record for site in found for record in site]
    warehouse = Warehouse(spark, shutil.copytree(empty_warehouse, tmp_path_factory.mktemp("sites") / "warehouse"))
    for number, batch in enumerate(batches_of(rng, records, BATCHES)):
        warehouse.take(number, batch)
    assert warehouse.tables() == spark_oracle.tables(records)
