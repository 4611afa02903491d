"""Calibration and site on read, against the oracle: by event time, exact, windows split where a span ends."""

import math
import statistics
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.registry.calibrated_windows import WindowColumnsError, calibrated_windows
from spark.registry.calibration import calibrated, with_site
from spark.registry.registry import Calibration, Device, Gateway, Registry
from spark.registry.registry_table import (
    calibrations_frame,
    devices_frame,
    load_registry,
    open_calibrations,
    open_devices,
    open_gateway_registry,
    retired_gateways,
    table_path,
)
from spark.windows.window_sizes import WINDOW_S
from spark.windows.windows_table import folded, parts, shown, windowed
from tests.support import oracle_joins
from tests.support.join_frames import (
    MINUTE_US,
    NOON,
    NOON_US,
    SECOND_US,
    decimal,
    millionths,
    packed,
    reading,
    readings_frame,
    windows_frame,
)
from tests.support.oracle_joins import EXACT, UNKNOWN_ERROR_US, Figures, PartKey, Reading

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


def found_parts(frame: DataFrame) -> dict[PartKey, Row]:
    times = {f"{name}_us": F.unix_micros(name) for name in ("window_start", "window_end", "span_from", "span_to")}
    rows = frame.withColumns(times).drop("window_start", "window_end", "span_from", "span_to").collect()
    found = {
        (
            (row.namespace, row.device, row.stream, row.metric),
            row.window_start_us,
            row.span_from_us,
            row.span_to_us,
        ): row
        for row in rows
    }
    assert len(found) == len(rows), "a part of a window stands twice"
    return found


def found_figures(row: Row) -> Figures:
    return Figures(
        *(row.n, row["min"], row["max"], row["sum"], row.sum_of_squares, row.mean),
        *(row["first"], row["last"], tuple(row["values"]), row.p50, row.p99_9),
    )


def calibration(begins_s: float | None, ends_s: float | None, scale: str, offset: str = "0") -> Calibration:
    begins, ends = (None if s is None else NOON + timedelta(seconds=s) for s in (begins_s, ends_s))
    return Calibration("plant", "42", "temperature", None, Decimal(scale), Decimal(offset), begins, ends)


def test_a_reading_gets_the_calibration_of_its_event_time(spark: SparkSession) -> None:
    registry = Registry(calibrations=(calibration(0, 60, "1.5", "-0.25"), calibration(60, None, "-2")))
    times = (-0.000001, 0, 59.999999, 60)
    frame = readings_frame(spark, [reading(second, 10, n, error_us=0) for n, second in enumerate(times)])

    rows = calibrated(frame, calibrations_frame(spark, registry)).orderBy("lane_sequence").collect()

    assert [row.calibrated_value for row in rows] == [Decimal(10), Decimal("14.75"), Decimal("14.75"), Decimal(-20)]
    assert [row.calibration and row.calibration.scale for row in rows] == [None, Decimal("1.5"), Decimal("1.5"), -2]
    assert all(row.calibration_certain for row in rows)


def test_a_calibration_is_not_certain_where_another_may_be_the_right_one(spark: SparkSession) -> None:
    registry = Registry(calibrations=(calibration(60, None, "2"),))
    bounds = [(10, 50_000_000), (10, 49_999_999), (60, 0), (70, 10_000_000), (70, 10_000_001), (70, UNKNOWN_ERROR_US)]
    readings = [reading(second, 1, n, error_us=error_us) for n, (second, error_us) in enumerate(bounds)]
    # A time that cannot be right belongs to no span, whatever its bound.
    readings.append(replace(readings[2], sequence=9, plausible=False))
    rows = calibrated(readings_frame(spark, readings), calibrations_frame(spark, registry)).orderBy("lane_sequence")
    assert [row.calibration_certain for row in rows.collect()] == [False, True, True, True, False, False, False]
    # Without a border there is nothing to be mistaken for.
    always = Registry(calibrations=(calibration(None, None, "2"),))
    rows = calibrated(readings_frame(spark, readings), calibrations_frame(spark, always))
    assert all(row.calibration_certain and row.calibrated_value == 2 for row in rows.collect())


@pytest.mark.long(seconds=10)
def test_a_window_that_a_calibration_cuts_is_two_rows(spark: SparkSession) -> None:
    readings = [reading(second, second, second) for second in (0, 10, 20, 30, 60)]
    registry = Registry(
        (Device("plant", "42", "hall-1", (("floor", "2"),)),),
        (calibration(None, 15, "2"), calibration(15, 60, "-1", "0.5")),
    )
    view = calibrated_windows(
        windows_frame(spark, readings),
        readings_frame(spark, readings),
        calibrations_frame(spark, registry),
        devices_frame(spark, registry),
    )
    rows = view.orderBy("span_from").collect()

    assert [(row.n, row["min"], row["max"], row["sum"]) for row in rows] == [
        (2, 0, 20, 20),
        (2, Decimal("-29.5"), Decimal("-19.5"), -49),
        (1, 60, 60, 60),
    ]
    assert [row.scale for row in rows] == [2, -1, None]
    seconds = view.orderBy("span_from").select(*(F.second(name) for name in ("window_start", "span_from", "span_to")))
    assert [tuple(row) for row in seconds.collect()] == [(0, 0, 15), (0, 15, 0), (0, 0, 0)]
    assert [row.status for row in rows] == ["complete"] * 3
    assert {(row.site, row.labels["floor"]) for row in rows} == {("hall-1", "2")}


@pytest.mark.parametrize(
    ("base", "step"), [pytest.param("0", "1", marks=pytest.mark.long(seconds=8)), ("1234567.8", "0.01")]
)
def test_the_jobs_own_windows_are_calibrated_with_their_deviation_and_percentiles(
    spark: SparkSession, base: str, step: str
) -> None:
    registry = Registry(calibrations=(calibration(None, 75, "-1.5", "7"), calibration(75, None, "3")))
    values = {second: Decimal(base) + Decimal(step) * ((second * 37) % 50) for second in range(0, 120, 5)}
    readings = [reading(second, str(value), second) for second, value in values.items()]
    frame = readings_frame(spark, readings).withColumn("kafka_timestamp", F.col("event_time"))
    windows = shown(folded(parts(windowed(frame), ordinal=0)), WINDOW_S)

    view = calibrated_windows(windows, frame, calibrations_frame(spark, registry))

    assert view.columns[: len(windows.columns)] == windows.columns
    found = found_parts(view)
    expected = oracle_joins.calibrated_windows(readings, registry, MINUTE_US)
    assert found.keys() == expected.keys()
    for key, part in expected.items():
        row, ranked = found[key], part.figures.values
        assert (row["values"], row["min"], row["max"], row["sum"], row.mean) == (
            *(list(ranked), ranked[0], ranked[-1], part.figures.sum, part.figures.mean),
        )
        assert (row["first"], row["last"], row.p50) == (part.figures.first, part.figures.last, part.figures.p50)
        assert (row.p95, row.p99) == (ranked[math.ceil(len(ranked) * 0.95) - 1], ranked[-1])
        assert row.deviation == pytest.approx(float(statistics.stdev(ranked)))


@pytest.mark.long(seconds=5)
def test_ends_of_the_calendar_may_stand_for_open_ends(spark: SparkSession) -> None:
    first, last = datetime(1, 1, 1, 0, 0, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    registry = Registry(calibrations=(replace(calibration(None, None, "2"), valid_from=first, valid_to=last),))
    readings = [reading(0, 1)]
    frame, calibrations = readings_frame(spark, readings), calibrations_frame(spark, registry)
    ((value, certain),) = calibrated(frame, calibrations).select("calibrated_value", "calibration_certain").collect()
    assert (value, certain) == (2, True)
    (row,) = calibrated_windows(windows_frame(spark, readings), frame, calibrations).select("sum").collect()
    assert row["sum"] == 2


def test_a_number_that_does_not_fit_is_null_and_told(spark: SparkSession) -> None:
    readings = [reading(n, "999999999999.999999", n) for n in range(3)]
    registry = Registry(calibrations=(calibration(None, None, "999999.999999", "999999.999999"),))
    whole = windows_frame(spark, readings)
    (row,) = calibrated_windows(whole, readings_frame(spark, []), calibrations_frame(spark, registry)).collect()
    value = oracle_joins.calibrated(readings[0], registry)
    # The value and the sum fit, its square does not.
    assert (row["max"], row["sum"]) == (value, EXACT.multiply(value, Decimal(3)))
    assert (row.sum_of_squares, row.calibration_overflow) == (None, True)
    wide = whole.withColumn("sum", F.col("sum") * 10_000_000)
    (row,) = calibrated_windows(wide, readings_frame(spark, []), calibrations_frame(spark, registry)).collect()
    assert (row["sum"], row.mean, row.calibration_overflow) == (None, None, True)
    (row,) = calibrated_windows(
        whole, readings_frame(spark, []), calibrations_frame(spark, registry).where("false")
    ).collect()
    assert row.calibration_overflow is False


def test_percentiles_need_the_values(spark: SparkSession) -> None:
    windows = windows_frame(spark, [reading(0, 1)])
    readings, calibrations = readings_frame(spark, []), calibrations_frame(spark, Registry())
    with pytest.raises(WindowColumnsError, match=r"the windows have p50, p99_9 and not values"):
        calibrated_windows(windows.drop("values"), readings, calibrations)
    few = windows.drop("values", "p50", "p99_9", "sum_of_squares", "deviation", "mean")
    assert calibrated_windows(few, readings, calibrations).columns == [
        *few.columns,
        *("span_from", "span_to", "scale", "offset", "calibration_overflow"),
    ]


def test_a_changed_registry_shows_at_once(spark: SparkSession, tmp_path: Path) -> None:
    warehouse = str(tmp_path / "warehouse")
    readings = readings_frame(spark, [reading(0, 10)])

    def now() -> tuple[Decimal, str | None]:
        rows = with_site(calibrated(readings, open_calibrations(spark, warehouse)), open_devices(spark, warehouse))
        ((value, site),) = rows.select("calibrated_value", "site").collect()
        return value, site

    assert now() == (Decimal(10), None)
    registry = Registry((Device("plant", "42", "hall-1"),), (calibration(None, None, "2"),))
    load_registry(spark, warehouse, registry)
    assert now() == (Decimal(20), "hall-1")
    gateways = (Gateway("plant", "gw-1", None, NOON), Gateway("plant", "gw-2", "hall-1", None))
    other = Registry((Device("plant", "42", "hall-2", (), NOON),), (calibration(None, None, "3"),), gateways)
    assert load_registry(spark, warehouse, other) == other.version != registry.version
    assert now() == (Decimal(30), "hall-2")

    for view in (open_calibrations, open_devices, open_gateway_registry):
        assert {row.registry_version for row in view(spark, warehouse).collect()} == {other.version}
    retired = retired_gateways(open_gateway_registry(spark, warehouse)).collect()
    assert [tuple(row) for row in retired] == [("plant", "gw-1", NOON_US)]
    history = spark.sql(f"DESCRIBE HISTORY delta.`{table_path(warehouse, 'devices')}`").collect()
    assert [row.userMetadata for row in history] == [f"registry {other.version}", f"registry {registry.version}"]


# -- drawn scenarios --------------------------------------------------------------------------------------------------

SCENARIOS = 20
seconds = st.one_of(
    st.integers(0, 24).map(lambda tens: tens * 10 * SECOND_US),
    st.tuples(st.integers(0, 24), st.sampled_from([-1, 1])).map(lambda each: each[0] * 10 * SECOND_US + each[1]),
)
"""Microseconds from noon on: the same few times for readings and for borders, and those just beside them."""
factors = st.one_of(
    st.sampled_from([0, 1_000_000, -1_000_000, 1, -1]),
    st.integers(-3_000_000, 3_000_000),
    st.integers(-999_999_999_999, 999_999_999_999),
)


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[datetime | None, datetime | None]]:
    """Spans that do not overlap, with gaps between some of them."""
    limits = sorted(draw(st.sets(seconds, max_size=4)))
    ends = [None, *(NOON + timedelta(microseconds=limit) for limit in limits), None]
    return [span for span in pairwise(ends) if draw(st.integers(0, 3))]


@st.composite
def scenarios(draw: st.DrawFn, namespace: str) -> tuple[Registry, list[Reading]]:
    """Two devices of one namespace, two streams: calibrations of one stream, or of all."""
    devices = [
        Device(namespace, "42", draw(st.sampled_from(["hall-1", "hall-2"])), (), *span) for span in draw(spans())
    ]
    streams: list[str | None] = draw(st.sampled_from([[None], ["a"], ["a", "b"], []]))
    calibrations = [
        Calibration(namespace, "42", "t", stream, decimal(draw(factors)), decimal(draw(factors)), *span)
        for stream in streams
        for span in draw(spans())
    ]
    drawn = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["42", "42", "42", "43"]),
                st.sampled_from(["a", "a", "b"]),
                seconds,
                millionths,
                st.sampled_from([0, 1, 9_999_999, 10_000_000, 10_000_001, UNKNOWN_ERROR_US]),
            ),
            min_size=1,
            max_size=10,
        )
    )
    readings = [
        Reading((namespace, device, stream, "t"), NOON_US + time_us, n, decimal(value), error_us, error_us < 2**62)
        for n, (device, stream, time_us, value, error_us) in enumerate(drawn)
    ]
    return Registry(tuple(devices), tuple(calibrations)), readings


class Sites:
    """Independent scenarios, each in a namespace of its own."""

    def __init__(self, registry: Registry, readings: list[Reading]) -> None:
        self.registry = registry
        self.readings = readings

    def __repr__(self) -> str:
        return f"Sites of {len(self.readings)} readings"

    def told(self, namespace: str) -> str:
        """One of them, for a message."""
        entries: list[Device | Calibration] = [*self.registry.devices, *self.registry.calibrations]
        own: list[object] = [each for each in entries if each.namespace == namespace]
        own += [each for each in self.readings if each.metric[0] == namespace]
        return "\n".join(map(repr, own))


@st.composite
def many_scenarios(draw: st.DrawFn) -> Sites:
    """Many for one run of Spark."""
    each = [draw(scenarios(f"site-{number}")) for number in range(SCENARIOS)]
    registry = Registry(
        tuple(device for registry, _ in each for device in registry.devices),
        tuple(entry for registry, _ in each for entry in registry.calibrations),
    )
    return Sites(registry, [reading for _, readings in each for reading in readings])


@pytest.mark.campaign(seconds=20)
@packed
@given(many_scenarios())
def test_readings_are_calibrated_as_the_oracle_does(spark: SparkSession, drawn: Sites) -> None:
    registry, readings = drawn.registry, drawn.readings
    view = calibrated(readings_frame(spark, readings), calibrations_frame(spark, registry))
    rows = with_site(view, devices_frame(spark, registry)).collect()
    found = {
        (row.namespace, row.lane_sequence): (row.calibrated_value, row.calibration_certain, row.site) for row in rows
    }
    assert len(rows) == len(readings)
    assert found == {
        (each.metric[0], each.sequence): (
            oracle_joins.calibrated(each, registry),
            oracle_joins.certain(each, registry),
            oracle_joins.site_at(registry, each.metric, each.time_us),
        )
        for each in readings
    }


@pytest.mark.campaign(seconds=20)
@packed
@given(many_scenarios())
def test_windows_calibrated_by_their_figures_are_those_of_calibrated_readings(
    spark: SparkSession, drawn: Sites
) -> None:
    registry, readings = drawn.registry, drawn.readings
    found = found_parts(
        calibrated_windows(
            windows_frame(spark, readings),
            readings_frame(spark, readings),
            calibrations_frame(spark, registry),
            devices_frame(spark, registry),
        )
    )
    expected = oracle_joins.calibrated_windows(readings, registry, MINUTE_US)
    assert found.keys() == expected.keys()
    for key, part in expected.items():
        row = found[key]
        assert row.site == part.site, drawn.told(key[0][0])
        assert row.scale == (part.calibration and part.calibration.scale)
        figures = found_figures(row)
        if row.calibration_overflow:
            # Told, and not without cause.
            assert part.may_overflow, drawn.told(key[0][0])
            figures = replace(
                figures, **{name: getattr(part.figures, name) for name in ("sum", "sum_of_squares", "mean")}
            )
        assert figures == part.figures, drawn.told(key[0][0])
