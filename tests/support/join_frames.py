"""Readings and windows as DataFrames, and how the tests of joins draw them: many scenarios for one run of Spark."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from tests.support import oracle_joins
from tests.support.oracle_joins import EPOCH, Metric, Reading, us
from tests.support.sizes import size

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)
NOON_US = us(NOON)
SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
HOUR_US = 60 * MINUTE_US
THERMO: Metric = ("plant", "42", "device-thermo", "temperature")
READINGS_SCHEMA = """
    namespace string, device string, stream string, metric string, value decimal(18,6), event_time timestamp,
    time_error_us bigint, ce_id string, buffer string, lane string, lane_sequence bigint, event_date date
"""
WINDOWS_SCHEMA = """
    namespace string, device string, stream string, metric string, window_start timestamp, window_end timestamp,
    n bigint, min decimal(18,6), max decimal(18,6), sum decimal(38,6), sum_of_squares decimal(38,12),
    mean decimal(38,12), deviation double, first decimal(18,6), last decimal(18,6), p50 decimal(18,6),
    p99_9 decimal(18,6), values array<decimal(18,6)>, status string
"""


def at(time_us: int) -> datetime:
    return EPOCH + timedelta(microseconds=time_us)


def readings_frame(spark: SparkSession, readings: Iterable[Reading]) -> DataFrame:
    rows = [
        (
            *(*each.metric, each.value, at(each.time_us), each.error_us, each.ce_id),
            *("buffer", "lane", each.sequence, each.event_date),
        )
        for each in readings
    ]
    return spark.createDataFrame(rows, READINGS_SCHEMA)


def windows_frame(spark: SparkSession, readings: Iterable[Reading], window_us: int = MINUTE_US) -> DataFrame:
    """The windows of readings as the table has them."""
    rows = [
        (
            *(*metric, at(start), at(start + window_us), each.n, each.min, each.max, each.sum, each.sum_of_squares),
            *(each.mean, 2.0, each.first, each.last, each.p50, each.p99_9, list(each.values), "complete"),
        )
        for (metric, start), each in oracle_joins.windows(readings, window_us).items()
    ]
    return spark.createDataFrame(rows, WINDOWS_SCHEMA)


def reading(second: float, value: str | int, sequence: int = 0, *, error_us: int = 1_000) -> Reading:
    return Reading(THERMO, NOON_US + round(second * SECOND_US), sequence, Decimal(value), error_us)


# Tests of these have the mark `campaign`.
packed = settings(
    # The first of them is the simplest that there is.
    max_examples=size(2, 5),
    # Each example is a run of Spark: to shrink one takes longer than to read it.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
millionths = st.one_of(
    st.integers(-3_000_000, 3_000_000),
    st.integers(-100_000_000_000, 100_000_000_000),
    st.integers(-999_999_999_999_999_999, 999_999_999_999_999_999),
)


def decimal(number: int) -> Decimal:
    return Decimal(number).scaleb(-6)
