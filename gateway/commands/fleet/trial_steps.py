"""A change on trial: applied, judged by the rule of an image's trial, and taken back by itself if it is not good.

Each step is on the disk before the next one begins, so a power cut between any two leaves the old state or the new one.

1. The way back is kept (`Change`).
2. The report says `on-trial`.
3. The change is applied, by one renaming or by dpkg. The judge looks.
4. If it is good, the report says `good`.
5. Else the report says `going-back` with the reason, the former state is put back, and the report says `went-back`.

`resume` goes on after a cut, by what the report says and by what stands on the disk.
"""

import time
from typing import Final, Literal, Protocol

from msgspec.structs import replace

from gateway.commands.update.trial import LOOK_S, TRIAL_S, missing, seen_now
from gateway.host import fleet_report
from gateway.host.fleet_report import FleetReport, Result, Trial

STARTS_MAX: Final = 3
"""Starts of the judge that a change has. A hang or a power cut takes one."""
BY_HAND: Final = "it was changed by hand meanwhile, and stays as it is"
CUT_OFF: Final = "the power went, or the look was stopped, before it was in place"
Stand = Literal["old", "new", "half", "other"]
"""What is in place: `half` of a package, or something that is neither old nor new."""


class ChangeError(Exception):
    """A step was not done. The message says why."""


class Change(Protocol):
    """Something that can be changed and put back. Its way back is kept before a trial begins."""

    def stands(self) -> Stand:
        """What is in place now."""

    def apply(self) -> None:
        """Put the new state in place. Raises ChangeError."""

    def go_on(self) -> None:
        """Have the service run with what is in place, after a cut."""

    def go_back(self) -> None:
        """Put the old state in place, also after a cut in this. Raises ChangeError."""

    def forget(self) -> None:
        """Remove the way back."""


def begin(report: FleetReport, trial: Trial, change: Change) -> FleetReport:
    """Apply a change whose way back is kept, and judge it."""
    report = kept(replace(report, result="on-trial", reason="", trial=trial))
    try:
        change.apply()
    except ChangeError as error:
        if change.stands() == "old":
            return _ended(report, change, "refused", str(error))
        if change.stands() != "new":
            return _go_back(report, change, str(error))
    return _judge(report, trial, change)


def resume(report: FleetReport, trial: Trial, change: Change) -> FleetReport:
    """Go on with a trial that was cut off."""
    if report.result == "going-back":
        return _go_back(report, change, report.reason)
    match change.stands():
        case "old":
            return _ended(report, change, "waits", CUT_OFF)
        case "other":
            return _ended(report, change, "went-back", BY_HAND)
        case "half":
            # Not given up: the cut says nothing of the version.
            return _go_back(report, change, CUT_OFF, "waits")
        case "new" if trial.starts >= STARTS_MAX:
            words = f"its trial was begun {trial.starts} times, and each time the power went, or the box hung"
            return _go_back(report, change, words)
        case "new":
            change.go_on()
            return _judge(report, trial, change)


def kept(report: FleetReport) -> FleetReport:
    """Store a report if it says anything new, and return it. Raises OSError."""
    if report != fleet_report.read():
        fleet_report.write(report)
    return report


def _judge(report: FleetReport, trial: Trial, change: Change) -> FleetReport:
    report = kept(replace(report, trial=replace(trial, starts=trial.starts + 1)))
    until_s = time.monotonic() + TRIAL_S
    while lacks := list(missing(trial.before, seen_now())):
        if time.monotonic() > until_s:
            return _go_back(report, change, f"within {TRIAL_S / 60:.0f} minutes {'; '.join(lacks)}")
        time.sleep(LOOK_S)
    return _ended(report, change, "good", "")


def _go_back(report: FleetReport, change: Change, reason: str, result: Result = "went-back") -> FleetReport:
    # The words first: without them, a cut would begin another trial.
    report = kept(replace(report, result="going-back", reason=reason))
    if change.stands() == "other":
        return _ended(report, change, "went-back", f"{reason}; {BY_HAND}")
    try:
        change.go_back()
    except ChangeError as error:
        # The next look goes on with it.
        return kept(replace(report, trouble=str(error)))
    return _ended(report, change, result, reason)


def _ended(report: FleetReport, change: Change, result: Result, reason: str) -> FleetReport:
    given_up = report.wish if result == "went-back" else report.given_up
    ended = replace(report, result=result, reason=reason, given_up=given_up, trouble="", trial=None)
    kept(ended)
    # Last: until then a cut needs it.
    change.forget()
    return ended
