"""Joins with history and between devices, against the oracle, and under lateness."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.registry.as_of_join import as_of
from spark.registry.history_join import HISTORY, history_touched, with_history, with_same_hour
from tests.support import oracle_joins
from tests.support.join_frames import (
    HOUR_US,
    MINUTE_US,
    NOON,
    NOON_US,
    SECOND_US,
    THERMO,
    decimal,
    millionths,
    packed,
    reading,
    readings_frame,
    windows_frame,
)
from tests.support.oracle_joins import DAY_US, UNKNOWN_ERROR_US, Direction, Match, Metric, Past, Reading, WindowKey

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

DAY_S = 86_400
PAIRS_SCHEMA = """
    namespace string, device string, stream string, metric string,
    other_namespace string, other_device string, other_stream string, other_metric string
"""
HUMID: Metric = ("plant", "7", "device-hygro", "humidity")


def found_history(frame: DataFrame) -> dict[WindowKey, Past]:
    rows = frame.withColumn("start_us", F.unix_micros("window_start")).collect()
    found = {
        ((row.namespace, row.device, row.stream, row.metric), row.start_us): Past(*(row[name] for name in HISTORY))
        for row in rows
    }
    assert len(found) == len(rows), "a window stands twice"
    return found


def pairs_frame(spark: SparkSession, pairs: list[tuple[Metric, Metric]]) -> DataFrame:
    return spark.createDataFrame([(*one, *other) for one, other in pairs], PAIRS_SCHEMA)


# -- history ----------------------------------------------------------------------------------------------------------


def test_a_window_stands_beside_its_time_of_day_on_the_past_days(spark: SparkSession) -> None:
    values = {0: 10, -1: 1, -2: 2, -4: 4, 1: 99}
    readings = [reading(day * DAY_S + 30, value, n) for n, (day, value) in enumerate(values.items())]
    # Two on one day: their mean counts by how many they are. And one a minute off.
    readings += [reading(-2 * DAY_S + 40, 3, 10), reading(-DAY_S + 60, 1_000, 11)]

    view = with_history(windows_frame(spark, readings), days=3)

    (row,) = view.where(F.col("window_start") == F.lit(NOON)).collect()
    assert (row.n, row.sum, row.status) == (1, 10, "complete")
    assert [row[name] for name in HISTORY] == [2, 3, 1, 3, 6, 2]
    assert row.history_provisional == 0
    earliest = view.orderBy("window_start").first()
    assert earliest is not None
    assert [earliest[name] for name in HISTORY] == [0, 0, None, None, None, None]


def test_what_is_not_final_in_history_is_counted(spark: SparkSession) -> None:
    windows = windows_frame(spark, [reading(day * DAY_S, 1, day) for day in range(4)])
    recent = F.col("window_start") > F.lit(NOON)
    view = with_history(windows.withColumn("status", F.when(recent, "provisional").otherwise("complete")), days=2)
    assert [row.history_provisional for row in view.orderBy("window_start").collect()] == [0, 0, 1, 2]


def test_a_sum_that_is_not_known_makes_none_of_what_is(spark: SparkSession) -> None:
    windows = windows_frame(spark, [reading(day * DAY_S, 1, day) for day in range(3)])
    unknown = F.when(F.col("window_start") != F.lit(NOON), F.col("sum"))
    (row,) = with_history(windows.withColumn("sum", unknown), 2).orderBy(F.desc("window_start")).limit(1).collect()
    assert [row[name] for name in HISTORY] == [2, 2, 1, 1, None, None]


def test_a_reading_stands_beside_the_same_hour_of_the_past_days(spark: SparkSession) -> None:
    readings = [reading(120, 5, 0), reading(3_599 - DAY_S, 1, 1), reading(-DAY_S, 2, 2), reading(3_600 - DAY_S, 99, 3)]
    unknown = Reading(THERMO, NOON_US, 4, Decimal(7), UNKNOWN_ERROR_US, plausible=False)
    rows = with_same_hour(readings_frame(spark, [*readings, unknown]), 7).orderBy("lane_sequence").collect()
    assert len(rows) == 5
    assert [rows[0][name] for name in HISTORY] == [1, 2, 1, 2, 3, Decimal("1.5")]
    assert [rows[4][name] for name in HISTORY] == [None] * 6


@pytest.mark.parametrize("days", [0, 3_661])
def test_days_have_bounds(spark: SparkSession, days: int) -> None:
    with pytest.raises(ValueError, match="cannot be looked back"):
        with_history(windows_frame(spark, []), days)


@st.composite
def past_readings(draw: st.DrawFn) -> list[Reading]:
    """Readings of twelve devices, on few days at few times. Some come in days later than others."""
    drawn = draw(
        st.lists(
            st.tuples(
                st.integers(0, 11),
                st.sampled_from([0, 1, 2, 3, 4, 8, 9]),
                st.sampled_from([0, 59_999_999, 60_000_000, HOUR_US, -1]),
                millionths,
            ),
            min_size=60,
            max_size=200,
        )
    )
    return [
        Reading(("plant", str(device), "a", "t"), NOON_US - day * DAY_US + time_us, n, decimal(value))
        for n, (device, day, time_us, value) in enumerate(drawn)
    ]


@pytest.mark.campaign(seconds=20)
@packed
@given(readings=past_readings(), days=st.integers(1, 9), share=st.floats(0.1, 0.9))
def test_history_is_what_the_oracle_says_and_what_is_late_touches_what_is_told(
    spark: SparkSession, readings: list[Reading], days: int, share: float
) -> None:
    before = readings[: round(len(readings) * share)]
    late = readings[len(before) :]
    found = found_history(with_history(windows_frame(spark, before), days))
    assert found == oracle_joins.history(before, MINUTE_US, days)

    # A job that keeps the results, and learns the changes, has the same results as a job that computes them all anew.
    windows = windows_frame(spark, readings)
    touched = history_touched(windows_frame(spark, late), days).cache()
    assert touched.count() == touched.dropDuplicates().count()
    fresh = windows.join(touched, touched.columns, "left_semi")
    found |= found_history(with_history(fresh, days, history=windows))
    assert found == oracle_joins.history(readings, MINUTE_US, days)
    # Nothing is named for nothing: the rest may stay as it is.
    assert touched.count() <= len({(each.metric, each.time_us // MINUTE_US) for each in late}) * (days + 1)
    touched.unpersist()


# -- as-of ------------------------------------------------------------------------------------------------------------


def humid(second: float, value: int, sequence: int, *, error_us: int = 1_000) -> Reading:
    return Reading(HUMID, NOON_US + round(second * SECOND_US), sequence, Decimal(value), error_us)


def matched(
    spark: SparkSession,
    readings: list[Reading],
    pairs: list[tuple[Metric, Metric]],
    tolerance_s: Decimal | float,
    direction: Direction = "nearest",
) -> dict[tuple[Reading, Metric], Match]:
    """The join of readings with themselves, as the oracle has it."""
    frame = readings_frame(spark, readings)
    rows = as_of(frame, frame, pairs_frame(spark, pairs), tolerance_s, direction).collect()
    known = {(each.metric, each.sequence): each for each in readings}
    found: dict[tuple[Reading, Metric], Match] = {}
    for row in rows:
        one = known[(row.namespace, row.device, row.stream, row.metric), row.lane_sequence]
        other = (row.other_namespace, row.other_device, row.other_stream, row.other_metric)
        answer = None if row.other_ce_id is None else known[other, int(row.other_ce_id.rpartition("-")[2])]
        if answer is not None:
            assert (row.other_value, row.other_time_error_us) == (answer.value, answer.error_us)
            assert row.distance_us == answer.time_us - one.time_us
        found[one, other] = answer, row.certain
    assert len(found) == len(rows), "a reading stands twice"
    return found


def test_each_reading_gets_the_nearest_of_the_other_device(spark: SparkSession) -> None:
    temperatures = [reading(second, 20, n) for n, second in enumerate((0, 10, 20, 60))]
    humidities = [humid(second, n, n) for n, second in enumerate((-9, 4, 15.5, 15.5, 24, 71))]
    # The middle one has two at one time: that with the lesser ce_id. At 20 s the later one is nearer.
    found = matched(spark, temperatures + humidities, [(THERMO, HUMID)], 10)
    assert [found[each, HUMID][0] for each in temperatures] == [humidities[n] for n in (1, 2, 4)] + [None]


def test_backward_and_forward_take_what_is_at_that_very_time(spark: SparkSession) -> None:
    temperatures = [reading(0, 20), reading(10, 20, 1)]
    humidities = [humid(0, 1, 0), humid(9, 2, 1), humid(12.5, 3, 2)]
    pairs = [(THERMO, HUMID)]
    back = matched(spark, temperatures + humidities, pairs, Decimal("2.5"), "backward")
    assert [back[each, HUMID][0] for each in temperatures] == humidities[:2]
    ahead = matched(spark, temperatures + humidities, pairs, Decimal("2.5"), "forward")
    assert [ahead[each, HUMID][0] for each in temperatures] == [humidities[0], humidities[2]]
    assert matched(spark, temperatures + humidities, pairs, 0)[temperatures[1], HUMID] == (None, None)


def test_a_distance_is_certain_where_both_bounds_leave_no_doubt(spark: SparkSession) -> None:
    bounds = [(500_000, 500_000), (500_000, 500_001), (UNKNOWN_ERROR_US, UNKNOWN_ERROR_US)]
    temperatures = [reading(n * 100, 1, n, error_us=error_us) for n, (error_us, _) in enumerate(bounds)]
    humidities = [humid(n * 100 + 9, 1, n, error_us=error_us) for n, (_, error_us) in enumerate(bounds)]
    found = matched(spark, temperatures + humidities, [(THERMO, HUMID)], 10)
    assert [found[each, HUMID] for each in temperatures] == list(zip(humidities, [True, False, False], strict=True))


def test_many_within_one_tolerance_are_as_good_as_few(spark: SparkSession) -> None:
    """A day in which every reading lies within the tolerance of every other: a product would be a billion rows."""
    n = 30_000
    frame = spark.range(n).select(
        F.lit("plant").alias("namespace"),
        F.lit("42").alias("device"),
        F.lit("s").alias("stream"),
        F.lit("t").alias("metric"),
        F.col("id").cast("decimal(18,6)").alias("value"),
        F.timestamp_micros(F.lit(NOON_US) + F.col("id") * SECOND_US).alias("event_time"),
        F.lit(0).cast("bigint").alias("time_error_us"),
        F.format_string("%09d", "id").alias("ce_id"),
        F.lit(NOON.date()).alias("event_date"),
    )
    other = frame.withColumns(
        {"device": F.lit("7"), "event_time": F.timestamp_micros(F.unix_micros("event_time") + 400_000)}
    )
    pairs = pairs_frame(spark, [(("plant", "42", "s", "t"), ("plant", "7", "s", "t"))])
    joined = as_of(frame, other, pairs, DAY_S)
    (row,) = joined.agg(
        F.count("*").alias("rows"),
        F.count_if((F.col("value") == F.col("other_value")) & (F.col("distance_us") == 400_000)).alias("right"),
    ).collect()
    assert (row.rows, row.right) == (n, n)


def test_a_tolerance_has_bounds(spark: SparkSession) -> None:
    frame = readings_frame(spark, [])
    for tolerance_s in (-1, 367 * DAY_S):
        with pytest.raises(ValueError, match="cannot be used: from 0 to"):
            as_of(frame, frame, pairs_frame(spark, []), tolerance_s)


@st.composite
def several_devices(draw: st.DrawFn) -> tuple[list[Reading], list[tuple[Metric, Metric]]]:
    """Independent sites of three devices each, near a border between two hours."""
    readings: list[Reading] = []
    pairs: list[tuple[Metric, Metric]] = []
    times = st.one_of(st.integers(-8, 8).map(lambda each: each * SECOND_US), st.integers(-5, 5), st.just(HOUR_US))
    for site in range(15):
        metrics: list[Metric] = [(f"site-{site}", device, "s", "t") for device in "abc"]
        drawn = draw(
            st.lists(
                st.tuples(st.sampled_from(metrics), times, st.sampled_from([0, 0, 1, SECOND_US, UNKNOWN_ERROR_US])),
                max_size=12,
            )
        )
        readings += [
            Reading(metric, NOON_US + time_us, n, Decimal(n), error_us, error_us != UNKNOWN_ERROR_US)
            for n, (metric, time_us, error_us) in enumerate(drawn)
        ]
        pairs += draw(st.lists(st.tuples(st.sampled_from(metrics), st.sampled_from(metrics)), max_size=3))
    return readings, pairs


@pytest.mark.campaign(seconds=20)
@packed
@given(
    drawn=several_devices(),
    tolerance_us=st.sampled_from([0, 1, SECOND_US, 3 * SECOND_US, HOUR_US, 5 * HOUR_US]),
    direction=st.sampled_from(["nearest", "backward", "forward"]),
    share=st.floats(0.2, 0.8),
)
def test_as_of_is_what_the_oracle_says_before_and_after_what_is_late(
    spark: SparkSession,
    drawn: tuple[list[Reading], list[tuple[Metric, Metric]]],
    tolerance_us: int,
    direction: Direction,
    share: float,
) -> None:
    readings, pairs = drawn
    early = [each for each in readings if each.sequence < 12 * share]
    for known in (early, readings):
        found = matched(spark, known, pairs, Decimal(tolerance_us).scaleb(-6), direction)
        assert found == oracle_joins.as_of(known, pairs, tolerance_us, direction)
