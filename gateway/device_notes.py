"""What there is to say of a device's clock: why nothing is known of it, or what is wrong with it. No I/O."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.clock_device import Kind
from gateway.device_states import ClockState, HeardState

SETTLED_READINGS = 5
SETTLED_US = 60_000_000
"""After so many readings with a tick, and so long, a clock is to be known."""
_A: dict[Kind, str] = {"rc": "an RC oscillator", "ceramic": "a ceramic resonator", "crystal": "a crystal"}

NO_ANSWER = "no answer to a PROBE yet"
NEVER_ANSWERED = (
    "readings come with a tick, but no PROBE is answered: no time until one is; compare the firmware with "
    "firmware-sim/FRAMES.md"
)
LEARNING = "the clock is being learnt: that takes some readings of one boot"
NO_CLOCK = (
    "a tick comes, but no clock follows from it: it must count milliseconds from the sensor's start, and begin anew "
    "only where its boot does"
)
JUMPED = "the tick is not what it was to be: the next PROBE says what holds"
RESTARTED = "the clock is learnt anew at the next reading: this box has been restarted since"
OWN_TIMES = "the payload tells the time: no clock is learnt"
NO_TICK = "nothing that the route reads tells a time: readings have that of their receipt"
NOT_HEARD = "not heard since sluice was started"


class Note(NamedTuple):
    """What there is to say."""

    words: str
    is_finding: bool = False
    """Whether it is something to be mended."""


def note_on(heard: HeardState | None, clocks: Sequence[ClockState], *, has_probes: bool) -> Note | None:
    """On a device of a gateway that runs; `has_probes`: it is on a port where our frames are spoken."""
    if any(clock.error_us is not None for clock in clocks):
        return note_on_clocks(clocks)
    if heard is None:
        return Note(NO_ANSWER if has_probes else NOT_HEARD)
    if heard.tells != "tick":
        return Note(OWN_TIMES if heard.tells == "time" else NO_TICK)
    if any(clock.has_jumped for clock in clocks):
        return Note(JUMPED)
    if heard.readings < SETTLED_READINGS or heard.received_us - heard.since_us < SETTLED_US:
        return Note(NO_ANSWER if heard.is_serial else LEARNING)
    return Note(NEVER_ANSWERED if heard.is_serial else NO_CLOCK, is_finding=True)


def note_on_clocks(clocks: Sequence[ClockState]) -> Note | None:
    """On what is known of a device's clocks; None where that is nothing, or as it was said to be."""
    for clock in clocks:
        if clock.error_us is not None and clock.paced_by != clock.kind:
            worse = f'the clock is worse than {_A[clock.kind]}: set oscillator = "{clock.paced_by}"'
            return Note(worse, is_finding=True)
    return None
