"""`readings` in Spark: a condition on times skips files, though corrections and packs move some of them."""

import re

import duckdb
import pytest
from pyspark.sql import SparkSession

from spark.engine.delta_staging import java_frame
from spark.log.readings_view import open_readings
from spark.log.time_corrections import corrections_path, corrections_schema
from spark.log.warehouse_version import folder_of, versions_path
from tests.support.spark_records import BOOTS

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

PUSHED = {
    "event_date = DATE '2026-03-14'": r"PartitionFilters: \[[^\]]*event_date#\d+ = 2026-03-14",
    "event_time >= TIMESTAMP '2026-03-14 12:00:30'": r"PushedFilters: \[[^\]]*GreaterThanOrEqual\(event_time,",
    "device = '42'": r"PushedFilters: \[[^\]]*EqualTo\(device,42\)",
}
"""Conditions, and their form in the plan of a query where they choose files."""


def test_a_condition_on_readings_reaches_the_files(spark: SparkSession, new_warehouse: str) -> None:
    told = {"namespace": "plant", "gateway": "gw-1", "gateway_boot": BOOTS[0], "told_us": 1, "version": 1}
    told |= {"quality": "synced", "supersedes": True}
    corrections = spark.createDataFrame([told], corrections_schema()).coalesce(1)
    corrections.write.format("delta").mode("append").save(corrections_path(folder_of(new_warehouse, 1)))
    readings = open_readings(spark, new_warehouse)
    before = str(spark.conf.get("spark.sql.maxMetadataStringLength"))
    spark.conf.set("spark.sql.maxMetadataStringLength", "10000")
    try:
        for condition, pushed in PUSHED.items():
            plan = str(java_frame(readings.where(condition)).queryExecution().executedPlan().toString())
            assert re.search(pushed, plan), plan
    finally:
        spark.conf.set("spark.sql.maxMetadataStringLength", before)


def test_times_are_written_with_statistics(new_warehouse: str) -> None:
    with duckdb.connect() as db:
        files = f"{versions_path(new_warehouse)}/*.parquet"
        found = db.execute("SELECT stats_min IS NOT NULL FROM parquet_metadata(?) WHERE path_in_schema = 'at'", [files])
        assert set(found.fetchall()) == {(True,)}
