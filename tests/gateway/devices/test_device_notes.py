"""Notes on a device's clock, and which of them are findings."""

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.daemon.device_states import ClockState, HeardState
from gateway.devices import notes
from gateway.devices.notes import SETTLED_READINGS, SETTLED_US, Note, note_on
from gateway.intake.devices_heard import ToldDate

CLOCK = ClockState("", "7-1", "crystal", "crystal", (-10.0, 10.0), 1_500, 1_000_000, has_jumped=False)
UNKNOWN = replace(CLOCK, drift_ppm=None, error_us=None, observed_us=None)
NEW = HeardState("device/42/thermo", False, "7-1", "tick", 1, 0, 0)
SETTLED = replace(NEW, readings=SETTLED_READINGS, received_us=SETTLED_US)
BEFORE_SYNC = ToldDate("behind", "1970-01-01T00:00:05.000000Z", None, SETTLED_US)
SLEEPER = replace(NEW, short_boots=notes.SHORT_BOOTS, short_since_us=-SETTLED_US)
ON_A_PORT = replace(SETTLED, is_serial=True, subject="/dev/ttyUSB0")


@dataclass
class Case:
    heard: HeardState | None
    clocks: tuple[ClockState, ...]
    words: str | None
    has_probes: bool = False
    is_finding: bool = False


@pytest.mark.parametrize(
    "case",
    [
        Case(SETTLED, (CLOCK,), None),
        Case(None, (CLOCK,), None),
        Case(None, (), notes.NOT_HEARD),
        Case(None, (UNKNOWN,), notes.NO_ANSWER, has_probes=True),
        Case(replace(ON_A_PORT, readings=1), (UNKNOWN,), notes.NO_ANSWER, has_probes=True),
        Case(ON_A_PORT, (UNKNOWN,), notes.NEVER_ANSWERED, has_probes=True, is_finding=True),
        Case(ON_A_PORT, (replace(UNKNOWN, has_jumped=True),), notes.JUMPED, has_probes=True),
        Case(NEW, (UNKNOWN,), notes.LEARNING),
        Case(replace(NEW, readings=1_000), (UNKNOWN,), notes.LEARNING),
        Case(replace(NEW, received_us=SETTLED_US), (UNKNOWN,), notes.LEARNING),
        Case(SETTLED, (UNKNOWN,), notes.NO_CLOCK, is_finding=True),
        Case(replace(SETTLED, paces=(0.6, 1.019)), (UNKNOWN,), notes.NO_CLOCK, is_finding=True),
        Case(replace(SETTLED, paces=(0.0,)), (UNKNOWN,), notes.STANDS_STILL, is_finding=True),
        Case(replace(SETTLED, paces=(0.0,)), (CLOCK,), None),
        Case(replace(NEW, paces=(0.0,)), (UNKNOWN,), notes.LEARNING),
        # Lines of text are asked nothing.
        Case(ON_A_PORT, (UNKNOWN,), notes.NO_CLOCK, is_finding=True),
        # Of a PROBE's answer too, it is what is to be mended.
        Case(
            replace(ON_A_PORT, paces=(0.0,)),
            (replace(UNKNOWN, has_jumped=True),),
            notes.STANDS_STILL,
            has_probes=True,
            is_finding=True,
        ),
        Case(SLEEPER, (UNKNOWN,), notes.RESTARTS, is_finding=True),
        Case(SLEEPER, (UNKNOWN,), notes.NO_ANSWER, has_probes=True),
        # Boots that a sensor had kept, and sends at once; and one that lasts.
        Case(replace(SLEEPER, short_since_us=-SETTLED_US + 1), (UNKNOWN,), notes.LEARNING),
        Case(replace(SLEEPER, received_us=SETTLED_US), (UNKNOWN,), notes.LEARNING),
        Case(replace(SETTLED, tick_restarts=1), (CLOCK,), notes.BEGINS_ANEW, is_finding=True),
        Case(
            replace(SETTLED, tells="time", odd_date=BEFORE_SYNC),
            (),
            "the times that it sends cannot be right, the last is 1970-01-01T00:00:05.000000Z: set its clock, and see "
            "that it sends the unit that its route is to find",
            is_finding=True,
        ),
        Case(replace(SETTLED, tells="nothing"), (), notes.NO_TICK),
        Case(replace(SETTLED, tells="time"), (), notes.OWN_TIMES),
        # One stream's clock is known, and the other's will be.
        Case(SETTLED, (UNKNOWN, CLOCK), None),
    ],
)
def test_why_there_is_no_clock(case: Case) -> None:
    expected = None if case.words is None else Note(case.words, case.is_finding)
    assert note_on(case.heard, case.clocks, has_probes=case.has_probes) == expected


@pytest.mark.parametrize("heard", [None, NEW, ON_A_PORT])
def test_a_clock_that_is_worse_than_was_said_is_a_finding(heard: Any) -> None:
    worse = replace(CLOCK, paced_by="ceramic")
    note = note_on(heard, (CLOCK, worse), has_probes=False)
    assert note == Note('the clock is worse than a crystal: set oscillator = "ceramic"', is_finding=True)
