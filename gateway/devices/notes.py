"""Says why nothing is known of a device's clock, or what is wrong with the device's readings. Does no I/O."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.clock.oscillators import Kind
from gateway.daemon.device_states import ClockState, HeardState
from gateway.host.terminal_text import span
from gateway.intake.devices_heard import STRETCH_US, FaultKind, ToldDate

SETTLED_READINGS = 5
SETTLED_US = 60_000_000
"""Readings with a tick, and the microseconds that they span, after which a clock should be known."""
SHORT_BOOTS = 3
"""Boots in a row, each over within a minute, after which a sensor is one that restarts for its readings."""
RECENT_US = 600_000_000
"""Microseconds before the last reading within which the fault of a reading is told."""
PACE_ERROR_MAX = 0.02
"""Twice the error of any oscillator: beyond it a tick has another unit, or stands still at times."""
UNIT_ERROR_MAX = 0.05
"""Error within which a pace is that of another unit: a minute has sixty seconds, more or less one at each end."""
STILL_BELOW = 1e-4
"""Pace below which a tick stands still, as far as anybody can see within minutes."""
_A: dict[Kind, str] = {"rc": "an RC oscillator", "ceramic": "a ceramic resonator", "crystal": "a crystal"}

NO_ANSWER = "no answer to a PROBE yet"
NEVER_ANSWERED = (
    "readings come with a tick, but no PROBE is answered: no time until one is; compare the firmware with "
    "docs/frames.md"
)
LEARNING = "the clock is being learnt: that takes some readings of one boot; look again after a minute"
NO_CLOCK = (
    "a tick comes, but no clock follows from it: it must count milliseconds from the sensor's start, and begin anew "
    "only where its boot does"
)
STANDS_STILL = (
    "the tick stands still, or begins anew with each reading: it must count milliseconds from the sensor's start, and "
    "where the sensor restarts, its boot must be another"
)
BEGINS_ANEW = (
    "the tick began anew although the boot did not change: readings after that have wide bounds, or none, until its "
    "clock is learnt again; the sensor must send another boot after each start"
)
RESTARTS = (
    "the sensor restarts within a minute, again and again (deep sleep?): in so short a boot no clock is learnt, and no "
    'reading has a time with a bound; time = "receipt" in its route gives them that of their receipt, with its bound'
)
UNREADABLE_TICK = (
    "the tick cannot be read, and its readings have the time of their receipt: it must be an integer from 0 to "
    "4294967295, without quotes or fraction"
)
NO_IDENTITY = (
    "the boot and seq that its route is to find (identity) are not in its payload: {}; its readings are stored, but "
    "twice if they are sent again: correct what the sensor sends"
)
NOT_JSON = (
    "its payload is not the JSON that its route declares (content_type): {}; it is sent on unchanged, as "
    "application/octet-stream: correct what the sensor sends, or content_type"
)
JUMPED = "the tick has jumped: the next PROBE shows whether that lasts"
RESTARTED = "the clock is learnt anew at the next reading: this box has been restarted since"
OWN_TIMES = "the payload tells the time: no clock is learnt"
NO_TICK = "nothing that the route reads tells a time: readings have that of their receipt"
NOT_HEARD = "not heard since sluice was started"
HEARD_BEFORE = "heard before sluice was started, not since"
NO_LOG_IN = "no log-in (revoked?): it is let in no more; sluice devices add makes it a secret"


class Note(NamedTuple):
    """Words on a device."""

    words: str
    is_finding: bool = False
    """Whether it is something to mend."""


def note_on(
    heard: HeardState | None, clocks: Sequence[ClockState], *, has_probes: bool, was_heard: bool = False
) -> Note | None:
    """Judge a device of a running gateway.

    `has_probes`: its port speaks Sluice's own frames. `was_heard`: the buffer knows when it was heard.
    """
    wrong = None if heard is None else _wrong_with_readings(heard)
    if wrong is not None:
        return Note(wrong, is_finding=True)
    if any(clock.error_us is not None for clock in clocks):
        return note_on_clocks(clocks)
    if heard is None:
        return Note(NO_ANSWER if has_probes else HEARD_BEFORE if was_heard else NOT_HEARD)
    if heard.tells != "tick":
        return Note(OWN_TIMES if heard.tells == "time" else NO_TICK)
    return _note_on_tick(heard, has_jumped=any(clock.has_jumped for clock in clocks), has_probes=has_probes)


def _note_on_tick(heard: HeardState, *, has_jumped: bool, has_probes: bool) -> Note:
    """Judge a device that sends a tick, and whose clock is not known."""
    is_settled = heard.readings >= SETTLED_READINGS and heard.received_us - heard.since_us >= SETTLED_US
    finding = _pace_words(heard.paces) if is_settled else None
    # For Sluice's own frames `time` in the route says nothing.
    if finding is None and not has_probes and _is_ever_restarting(heard):
        finding = RESTARTS
    if finding is None and has_jumped:
        return Note(JUMPED)
    if finding is None and not is_settled:
        return Note(NO_ANSWER if has_probes else LEARNING)
    return Note(finding or (NEVER_ANSWERED if has_probes else NO_CLOCK), is_finding=True)


def note_on_clocks(clocks: Sequence[ClockState]) -> Note | None:
    """Judge a device's clocks; None if nothing is known of them, or if they are as declared."""
    for clock in clocks:
        if clock.error_us is not None and clock.paced_by != clock.kind:
            worse = f'the clock is worse than {_A[clock.kind]}: set oscillator = "{clock.paced_by}"'
            return Note(worse, is_finding=True)
    return None


def _wrong_with_readings(heard: HeardState) -> str | None:
    """Find a fault to mend in the readings, whatever is known of the clock."""
    cause = _recent_cause(heard, "identity-missing")
    if cause is not None:
        return NO_IDENTITY.format(cause)
    date = heard.odd_date
    if date is not None and heard.received_us - date.received_us <= RECENT_US:
        return _date_words(date)
    if heard.unreadable_us is not None and heard.received_us - heard.unreadable_us <= RECENT_US:
        return UNREADABLE_TICK
    if heard.tick_restarts:
        return BEGINS_ANEW
    cause = _recent_cause(heard, "payload-not-json")
    return None if cause is None else NOT_JSON.format(cause)


def _recent_cause(heard: HeardState, kind: FaultKind) -> str | None:
    fault = (heard.faults or {}).get(kind)
    return None if fault is None or heard.received_us - fault.received_us > RECENT_US else fault.cause


def _date_words(date: ToldDate) -> str:
    """Say how far a time that cannot be right is off, and what its sensor has to do."""
    if date.off_us is None:
        off = f"cannot be right, the last is {date.told}"
    else:
        side = "after" if date.off_us > 0 else "before"
        off = f"cannot be right, the last is {span(abs(date.off_us) / 1e6)} {side} its receipt ({date.told})"
    return f"the times that it sends {off}: set its clock, and see that it sends the unit that its route is to find"


def _is_ever_restarting(heard: HeardState) -> bool:
    return (
        heard.short_boots >= SHORT_BOOTS
        and heard.received_us - heard.since_us < STRETCH_US
        and heard.received_us - heard.short_since_us >= SETTLED_US
    )


def _pace_words(paces: Sequence[float]) -> str | None:
    """Say what a tick counts if it does not count milliseconds; None if it may, or if nothing is known."""
    if not paces:
        return None
    # Readings that had waited come faster, and the first after a pause are late: the pace nearest to right is believed.
    pace = max(paces, key=lambda each: min(each, 1 / each) if each else 0.0)
    if abs(pace - 1) <= PACE_ERROR_MAX:
        return None
    if pace < STILL_BELOW:
        return STANDS_STILL
    is_slow = pace < 1
    times = 1 / pace if is_slow else pace
    if abs(times / 1_000 - 1) <= UNIT_ERROR_MAX:
        counts = "too slow: it counts seconds" if is_slow else "too fast: it counts microseconds"
        return f"the tick runs 1,000 times {counts}, and must count milliseconds"
    much = f"{_two_digits(times)} times" if times >= 2 else f"about {(times - 1) * 100:.0f} %"
    if is_slow:
        return f"the tick runs {much} too slow: it must count milliseconds, also while the sensor sleeps"
    return f"the tick runs {much} too fast, unless the sensor is sending kept readings: it must count milliseconds"


def _two_digits(number: float) -> str:
    """Write a number with two digits: `1.5`, `24`, `1,000`."""
    return f"{float(f'{number:.2g}'):,g}"
