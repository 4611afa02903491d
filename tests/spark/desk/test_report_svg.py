"""Axes of a report's drawings."""

import pytest

from spark.desk.report_svg import SPANS_US, durations


@pytest.mark.parametrize("us", [0.0, 1.0, 90e6, *SPANS_US[-2:], 1e18])
def test_an_axis_of_spans_of_time_has_a_height(us: float) -> None:
    axis = durations([us], 80)
    assert axis.y(axis.low) - axis.y(axis.high) == 80
    assert axis.y(axis.high) <= axis.y(us) <= axis.y(axis.low)
