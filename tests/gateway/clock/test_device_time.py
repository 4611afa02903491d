"""Absolute times that sensors send: believed where they can be right, and told of where not, without a flood."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.clock.floor import RELEASED_US
from gateway.clock.gateway_clock import WallClock
from gateway.clock.sensor_dates import DEFAULT_LIMITS, LATEST_US, TimeLimits, implausible, told_us
from gateway.intake.reading_times import EVENT_DEVICES_MAX, EVENT_INTERVAL_US, LOG_INTERVAL_US, ImplausibleTimes
from tests.support.buffers import changed, row_of

NOON_US = 1_800_000_000_000_000
CLOCK = WallClock(NOON_US, 2_000)
UNKNOWN = WallClock(0, None)
LIMITS = TimeLimits(ahead_us=60_000_000, behind_us=3_600_000_000)
ROOM_US = 1_002_000
"""Most microseconds by which clock and sensor together may be off."""


@pytest.mark.parametrize(
    ("after_us", "clock", "wrong"),
    [
        (0, CLOCK, None),
        (60_000_000 + ROOM_US, CLOCK, None),
        (60_000_001 + ROOM_US, CLOCK, "ahead"),
        (-3_600_000_000 - ROOM_US, CLOCK, None),
        (-3_600_000_001 - ROOM_US, CLOCK, "behind"),
        (-NOON_US, CLOCK, "behind"),
        (2**62, CLOCK, "ahead"),
        (-(2**62), CLOCK, "behind"),
        (RELEASED_US - NOON_US, UNKNOWN, None),
        (RELEASED_US - NOON_US - 1, UNKNOWN, "behind"),
        (LATEST_US - NOON_US, UNKNOWN, None),
        (LATEST_US - NOON_US + 1, UNKNOWN, "ahead"),
    ],
)
def test_how_far_a_sensors_time_may_be_from_its_readings_receipt(
    after_us: int, clock: WallClock, wrong: str | None
) -> None:
    assert implausible(NOON_US + after_us, 1_000_000, 0, clock, LIMITS) == wrong


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**40),
    st.integers(-(2**50), 2**50),
    st.sampled_from([CLOCK, UNKNOWN]),
)
def test_what_is_believed_is_near_the_receipt_whatever_is_sent(
    sent_us: int, error_us: int, received_us: int, clock: WallClock
) -> None:
    row = row_of(received_us=received_us, event_error_us=error_us, payload=b"", device_time_us=sent_us)
    believed = told_us(row.datum, clock, DEFAULT_LIMITS)
    if believed is None:
        return
    assert believed == sent_us
    if clock.synced:
        room_us = error_us + 2_000
        after_us = sent_us - clock.at(received_us)
        assert -DEFAULT_LIMITS.behind_us - room_us <= after_us <= DEFAULT_LIMITS.ahead_us + room_us
    else:
        assert RELEASED_US <= sent_us <= LATEST_US


def test_a_receipt_of_which_nothing_is_known_judges_nothing() -> None:
    """A tick beside a sensor's time: taken in again in another boot than that of its receipt, whose clock is lost."""
    row = row_of(received_us=-(10**15), event_error_us=1_000, tick_ms=0, payload=b"", device_time_us=NOON_US)
    assert told_us(row.datum, CLOCK, LIMITS) == NOON_US
    assert told_us(changed(row, tick_ms=None).datum, CLOCK, LIMITS) is None


def reports(met: Sequence[tuple[str, int]]) -> tuple[list[str], list[int]]:
    """The devices whose events were sent, and the readings that each line of the log tells of."""
    events: list[str] = []
    times = ImplausibleTimes(lambda device, _: events.append(device))
    with capture_logs() as lines:
        for device, at_us in met:
            times.met("ahead", device, "2106-01-01T00:00:00Z", None, at_us)
    return events, [line["readings"] for line in lines]


def test_one_line_a_minute_and_one_event_an_hour_tell_of_any_number() -> None:
    met = [("clock-7", 1_000_000 * second) for second in range(7_300)]
    events, lines = reports(met)
    assert events == ["clock-7"] * 3
    assert lines[:3] == [1, 60, 60]
    assert len(lines) == math.ceil(7_300 * 1_000_000 / LOG_INTERVAL_US)


def test_made_up_devices_make_no_flood_of_events() -> None:
    met = [(f"made-up-{number}", number) for number in range(10 * EVENT_DEVICES_MAX)]
    events, _ = reports([*met, ("made-up-999", EVENT_INTERVAL_US)])
    assert len(events) == EVENT_DEVICES_MAX + 1
    assert Counter(events).most_common(1)[0][1] == 1
    assert events[-1] == "made-up-999"
