"""The daemon's report on its clock: since when it is synced, and how often it was set."""

from gateway.clock.gateway_clock import BootClock, Look
from gateway.clock.report import ClockReport, ClockView

SECOND_US = 1_000_000
OFFSET_US = 1_000_000_000
STEP_US = 3_200_000


def test_synced_since_when() -> None:
    unsynced = BootClock("unknown", 100.0).looked(Look(10 * SECOND_US, OFFSET_US, None))
    report = ClockReport(unsynced, 10 * SECOND_US)
    again = unsynced.looked(Look(20 * SECOND_US, OFFSET_US, None))
    report.looked(unsynced, again, 20 * SECOND_US)
    assert report.view() == ClockView(synced=False, error_us=None, since_us=10 * SECOND_US)
    synced = again.looked(Look(30 * SECOND_US, 5 * OFFSET_US, 20_000))
    report.looked(again, synced, 30 * SECOND_US)
    view = ClockView(synced=True, error_us=20_000, since_us=30 * SECOND_US)
    assert report.view() == view, "the first sync is no step"


def test_steps_are_told_whoever_made_them() -> None:
    clock = BootClock("unknown", 100.0).looked(Look(10 * SECOND_US, OFFSET_US, 20_000))
    report = ClockReport(clock, 10 * SECOND_US)
    # A person sets the date, which the kernel does not vouch for; then NTP sets it right.
    for second, offset_us, error_us in (
        (11, OFFSET_US + 10_000, 20_000),
        (12, OFFSET_US - STEP_US, None),
        (13, OFFSET_US - STEP_US, None),
        (14, OFFSET_US, 20_000),
    ):
        before, clock = clock, clock.looked(Look(second * SECOND_US, offset_us, error_us))
        report.looked(before, clock, second * SECOND_US)
    view = report.view()
    assert (view.steps, view.stepped_us, view.stepped_by_us) == (2, 14 * SECOND_US, STEP_US)
    assert (view.synced, view.since_us) == (True, 10 * SECOND_US), "what was known is held on to"


def test_a_leap_second_is_no_step() -> None:
    new_year_us = 1_798_761_600 * SECOND_US
    clock = BootClock("unknown", 100.0).looked(Look(100 * SECOND_US, new_year_us - 101 * SECOND_US, 1_000))
    report = ClockReport(clock, 100 * SECOND_US)
    later = clock.looked(Look(102 * SECOND_US, new_year_us - 102 * SECOND_US, 1_000))
    assert later.leaps
    report.looked(clock, later, 102 * SECOND_US)
    assert report.view().steps == 0
