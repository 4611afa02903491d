"""A change on trial: applied, judged by the rule of an image's trial, and taken back by itself if it is not good.

Each step is on the disk before the next one begins, so a power cut between any two leaves the old state or the new one.

1. The way back is kept (`Change`).
2. The report says `on-trial`.
3. The change is applied, by one renaming or by dpkg. The judge looks.
4. If it is good, the report says `good`.
5. Else the report says `going-back` with the reason, the former state is put back, and the report says `went-back`.

`resume` goes on after a cut, by what the report says and by what stands on the disk. Each start is counted before its
work begins: work that takes the box down is not begun without end.
"""

import time
from typing import Final, Literal, Protocol

from msgspec.structs import replace

from gateway.commands.fleet import box_now
from gateway.commands.update.trial import LOOK_S, TRIAL_S
from gateway.host import fleet_report, service
from gateway.host.fleet_report import FleetReport, Result, Trial
from gateway.host.service import ServiceError
from gateway.host.terminal_text import harmless, span

STARTS_MAX: Final = 3
"""Starts that a change has. A hang or a power cut takes one."""
WORDS_BYTES_MAX: Final = 2_000
"""Bytes of a reason or a trouble. Servers and programs write parts of them."""
BY_HAND: Final = "it was changed by hand meanwhile, and stays as it is"
CUT_OFF: Final = "the power went, or the look was stopped, before it was in place"
Stand = Literal["old", "new", "half", "other"]
"""What is in place: `half` of a package, or something that is neither old nor new."""


class ChangeError(Exception):
    """A step was not done. The message says why."""


class FetchError(Exception):
    """A file did not come from the folder. The message says why."""


class Change(Protocol):
    """Something that can be changed and put back. Its way back is kept before a trial begins."""

    def stands(self) -> Stand:
        """What is in place now."""

    def apply(self) -> None:
        """Put the new state in place. Raises ChangeError."""

    def go_on(self) -> None:
        """Have the service run anew with what is in place, after a cut. Raises ChangeError."""

    def go_back(self) -> None:
        """Put the old state in place, also after a cut in this. Raises ChangeError."""

    def forget(self) -> None:
        """Remove the way back."""


def begin(report: FleetReport, trial: Trial, change: Change) -> FleetReport:
    """Apply a change whose way back is kept, and judge it."""
    report = kept(replace(report, result="on-trial", reason="", trial=trial, starts=report.starts + 1))
    since_s = time.monotonic()
    why = ""
    try:
        change.apply()
    except ChangeError as error:
        why = str(error)
    stands = change.stands()
    if stands == "old":
        return _ended(report, change, "refused", why or "it was not put in place")
    if stands == "new" and not why:
        return _judge(report, trial, change, since_s)
    return _go_back(report, change, why or "it was not put in place as a whole")


def resume(report: FleetReport, trial: Trial, change: Change) -> FleetReport:
    """Go on with a trial that was cut off."""
    if report.result == "going-back":
        return _go_back(report, change, report.reason)
    stands = change.stands()
    if stands == "other":
        return _ended(report, change, "went-back", BY_HAND)
    is_last = report.starts >= STARTS_MAX
    words = f"it was begun {report.starts} times, and each time the power went, or the box hung" if is_last else CUT_OFF
    if stands == "old":
        return _ended(report, change, "went-back" if is_last else "waits", words)
    if stands == "half" or is_last:
        return _go_back(report, change, words)
    report = kept(replace(report, starts=report.starts + 1))
    since_s = time.monotonic()
    try:
        change.go_on()
    except ChangeError as error:
        return _go_back(report, change, str(error))
    return _judge(report, trial, change, since_s)


def restart() -> None:
    """Restart the service if it runs. Raises ChangeError."""
    try:
        service.restart()
    except ServiceError as error:
        raise ChangeError(str(error)) from error


def kept(report: FleetReport) -> FleetReport:
    """Store a report if it says anything new, and return it with its words as they are stored. Raises OSError."""
    report = replace(report, reason=_short(report.reason), trouble=_short(report.trouble))
    if report != fleet_report.read():
        fleet_report.write(report)
    return report


def _short(words: str) -> str:
    # A report that outgrows its file could not be read again. Control characters take six bytes each there.
    return harmless(words).encode(errors="replace")[:WORDS_BYTES_MAX].decode(errors="ignore")


def _judge(report: FleetReport, trial: Trial, change: Change, since_s: float) -> FleetReport:
    """Judge the service that was started since a moment of the monotonic clock: the one before says nothing."""
    until_s = time.monotonic() + TRIAL_S
    while lacks := list(box_now.lacking(trial.before, since_s)):
        if time.monotonic() > until_s:
            return _go_back(report, change, f"within {span(TRIAL_S)} {'; '.join(lacks)}")
        time.sleep(LOOK_S)
    if change.stands() != "new":
        # Also if somebody has put the former state back: nobody works against a person.
        return _ended(report, change, "went-back", BY_HAND)
    return _ended(report, change, "good", "")


def _go_back(report: FleetReport, change: Change, reason: str) -> FleetReport:
    # The words first: without them, a cut would begin another trial.
    report = kept(replace(report, result="going-back", reason=reason))
    if change.stands() == "other":
        return _ended(report, change, "went-back", f"{reason}; {BY_HAND}")
    try:
        change.go_back()
    except ChangeError as error:
        # The next look goes on with it.
        return kept(replace(report, trouble=str(error)))
    # A cut says nothing of the change, so it is not given up for one.
    return _ended(report, change, "waits" if reason == CUT_OFF else "went-back", reason)


def _ended(report: FleetReport, change: Change, result: Result, reason: str) -> FleetReport:
    given_up = report.wish if result == "went-back" else report.given_up
    starts = report.starts if result == "waits" else 0
    ended = kept(
        replace(report, result=result, reason=reason, given_up=given_up, trouble="", trial=None, starts=starts)
    )
    # Last: until then a cut needs it.
    change.forget()
    return ended
