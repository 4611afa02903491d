"""Sites that Hypothesis draws, many in one run of the job: the tables equal the oracle's."""

import random
import shutil
import statistics
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal
from math import ceil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_declarations import NO_STREAMS, Windows
from spark.views.windows_view import open_windows
from tests.support import spark_oracle
from tests.support.device_folds import fold_all_devices
from tests.support.sizes import size
from tests.support.spark_oracle import EPOCH, TIME_ERROR_UNKNOWN_US, KafkaRecord, WindowKey
from tests.support.spark_scenarios import batches_of, sites
from tests.support.spark_warehouse import Warehouse, at

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.usefixtures("interpreted")]

SITES = size(6, 16)
BATCHES_MAX = size(2, 3)
SAVED_SHARE = 0.5
HOUR_S = 3_600


@pytest.mark.campaign(seconds=60)
# Without shrinking: each try takes half a minute. The blob that is printed brings back one that failed.
@settings(
    max_examples=size(1, 3),
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
    # Hypothesis begins with the simplest: one device that measures again and again.
    assume(len({record.key for record in records}) > 1)
    warehouse = Warehouse(spark, shutil.copytree(empty_warehouse, tmp_path_factory.mktemp("sites") / "warehouse"))
    for number, batch in enumerate(batches_of(rng, records, rng.randint(1, BATCHES_MAX))):
        warehouse.take(number, batch)
        if rng.random() < SAVED_SHARE:
            warehouse.job.save()
            fold_all_devices(spark, warehouse.job.tables)
    assert warehouse.tables() == spark_oracle.tables(records)
    check_hours(warehouse, records)


def check_hours(warehouse: Warehouse, records: list[KafkaRecord]) -> None:
    """Check the figures of windows that other windows add up to."""
    expected = spark_oracle.tables(records, replace(NO_STREAMS, windows=Windows(sizes=(HOUR_S,))))
    values: dict[WindowKey, list[Decimal]] = defaultdict(list)
    for namespace, device, stream, metric, time, value, _, error_us, _, _ in expected.readings:
        if error_us != TIME_ERROR_UNKNOWN_US:
            start = time - (time - EPOCH) % timedelta(seconds=HOUR_S)
            values[namespace, device, stream, metric, start].append(value)
    view = open_windows(warehouse.spark, warehouse.path, HOUR_S)
    rows = view.withColumn("start_us", F.unix_micros("window_start")).drop("window_start", "window_end").collect()
    assert len(rows) == len(expected.windows)
    for row in rows:
        key = (row.namespace, row.device, row.stream, row.metric, at(row.start_us))
        ranked = sorted(values[key])
        assert expected.windows[key] == spark_oracle.WindowRow(
            row.n, row["min"], row["max"], row["sum"], row["first"], row["last"]
        )
        assert [row.p50, row.p99] == [ranked[ceil(len(ranked) * share) - 1] for share in (0.5, 0.99)]
        assert row.mean == (row["sum"] / row.n).quantize(Decimal("1e-6"), ROUND_HALF_UP)
        deviation = statistics.stdev(ranked) if len(ranked) > 1 else None
        assert row.deviation == (None if deviation is None else pytest.approx(float(deviation)))
