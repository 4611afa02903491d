"""`readings` in Spark: a condition on times skips files, though corrections and packs move some of them."""

import re
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.engine.delta_staging import java_frame
from spark.log.log_table import BatchId
from spark.log.readings_view import open_readings
from tests.support.spark_records import NOON, correction, kafka_frame, reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

PUSHED = {
    "event_date = DATE '2026-03-14'": r"PartitionFilters: \[[^\]]*event_date#\d+ = 2026-03-14",
    "event_time >= TIMESTAMP '2026-03-14 12:00:30'": r"PushedFilters: \[[^\]]*GreaterThanOrEqual\(event_time,",
    "device = '42'": r"PushedFilters: \[[^\]]*EqualTo\(device,42\)",
}
"""Conditions, and their form in the plan of a query where they choose files."""


def test_a_condition_on_readings_reaches_the_files(spark: SparkSession, new_warehouse: str) -> None:
    records = [reading(headers=reading_headers(number, time=NOON + timedelta(days=number))) for number in range(2)]
    told = correction(7, {"boottime_us": 0, "error_us": 1}, offset=0)
    BatchJob(spark, new_warehouse).take(kafka_frame(spark, [*records, told]), BatchId("query", 0), {})
    readings = open_readings(spark, new_warehouse)
    before = str(spark.conf.get("spark.sql.maxMetadataStringLength"))
    spark.conf.set("spark.sql.maxMetadataStringLength", "10000")
    try:
        for condition, pushed in PUSHED.items():
            plan = str(java_frame(readings.where(condition)).queryExecution().executedPlan().toString())
            assert re.search(pushed, plan), plan
    finally:
        spark.conf.set("spark.sql.maxMetadataStringLength", before)
