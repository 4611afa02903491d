"""What the daemon tells of its clock: synced since when, set how often."""

from gateway.clock_gateway import WallClock
from gateway.clock_report import ClockReport, ClockView

UNSYNCED = WallClock(1_000_000_000, None)
SYNCED = WallClock(5_000_000_000, 20_000)
STEP_US = 3_200_000


def test_synced_since_when() -> None:
    report = ClockReport(UNSYNCED, 10)
    report.looked(UNSYNCED, UNSYNCED, 20)
    assert report.view() == ClockView(synced=False, error_us=None, since_us=10)
    report.looked(UNSYNCED, SYNCED, 30)
    report.looked(SYNCED, SYNCED, 40)
    assert report.view() == ClockView(synced=True, error_us=20_000, since_us=30), "the first sync is no step"


def test_steps_are_what_bounds_do_not_explain() -> None:
    report = ClockReport(SYNCED, 10)
    slewed = WallClock(SYNCED.offset_us + 130_000, 20_000)
    report.looked(SYNCED, slewed, 20)
    assert report.view().steps == 0
    back = WallClock(SYNCED.offset_us - STEP_US, 20_000)
    report.looked(SYNCED, back, 30)
    report.looked(back, SYNCED, 40)
    view = report.view()
    assert (view.steps, view.stepped_us, view.stepped_by_us, view.since_us) == (2, 40, STEP_US, 10)


def test_a_date_that_is_set_by_hand_is_a_step_too() -> None:
    report = ClockReport(UNSYNCED, 10)
    report.looked(UNSYNCED, WallClock(UNSYNCED.offset_us + STEP_US, None), 20)
    assert (report.view().steps, report.view().synced) == (1, False)
