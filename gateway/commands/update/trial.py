"""The judge of an update: is the version on trial good? If not, the box goes back and says why.

`/usr/lib/sluice/update-trial` runs it once after each start of a box with our image, as root. Good means, within
`TRIAL_S`: the service is up and has fed its watchdog for a minute, a reading came in if sensors sent before, and Kafka
is reached if it was before.
"""

import time
from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.config import config_file
from gateway.daemon import control
from gateway.health.facts import told_facts
from gateway.host import boot_slots, last_update, service
from gateway.host.boot_slots import Slot, SlotState
from gateway.host.last_update import Before, LastUpdate
from gateway.host.terminal import say
from gateway.settings import DEFAULT_CONFIG, Settings
from gateway.toml_files.mistakes import ConfigError

TRIAL_S: Final = 300.0
"""Seconds from the start of this program, by the monotonic clock, within which a version has to be found good."""
CUTS_MAX: Final = 3
"""How often in a row a version's writing may be cut off before the version counts as given up."""
FED_S: Final = 60.0
"""Seconds for which the service has to run and feed its watchdog."""
LOOK_S: Final = 2.0
_UNKNOWN: Final = "?"


class Seen(Struct, frozen=True):
    """The gateway at one moment."""

    active: bool = False
    fed_s: float = 0.0
    """Seconds from the service's start to the last feed of its watchdog."""
    readings: int = 0
    """Readings since its start."""
    kafka: bool = False


def missing(before: Before, seen: Seen) -> Iterator[str]:
    """Say what a version lacks to be good."""
    if before.service and not seen.active:
        yield "its service does not run"
    elif before.service and seen.fed_s < FED_S:
        yield f"its service has not run for {FED_S:.0f} s without a restart"
    if before.readings and not seen.readings:
        yield "no reading came in, although sensors sent before"
    if before.kafka and not seen.kafka:
        yield "Kafka is not reached, and was before"


def why_not_running(state: SlotState, running: Slot, update: LastUpdate | None) -> str | None:
    """Say why the new version does not run; None if it does, or if there is none."""
    if state.trial is None:
        # RAUC puts a slot on trial as its last step.
        is_cut = update is not None and update.result == "on-trial" and update.slot != running
        return "it was not written to its end: the power went, or the update was stopped" if is_cut else None
    if state.trial == running:
        return None
    if state.tries == 0:
        return (
            f"it was started {boot_slots.TRIES} times, and each time it ended before it was found good: its kernel "
            "failed, it hung, or the power went"
        )
    if state.tries < boot_slots.TRIES:
        return "its kernel cannot be loaded"
    return "its start could not be counted: the card takes no writes from the boot loader"


def own_settings() -> Settings | None:
    """Settings of this box's service; None if there are none, or wrong ones."""
    try:
        return config_file.load(DEFAULT_CONFIG)
    except (ConfigError, OSError):
        return None


def seen_now() -> Seen:
    """Look at the service and ask the daemon."""
    active, fed_s = service.fed_s()
    settings = own_settings()
    if not active or settings is None:
        return Seen(active, fed_s)
    facts = told_facts(settings, control.state_of(settings.buffer.path), 0, 0.0)
    return Seen(active, fed_s, facts.counts.get("readings", 0), facts.uplink.up and "uplink" not in facts.unknown)


def main() -> None:
    """Judge the version on trial, if one is."""
    running = boot_slots.running_slot()
    if running is None:
        return
    state, update = boot_slots.read(boot_slots.BOOT_FOLDER), last_update.read()
    reason = why_not_running(state, running, update)
    if state.trial == running:
        _judge(state, running, update)
    elif reason is not None:
        _end(state, running, update, reason)
    elif update is not None and update.result == "on-trial":
        # Somebody called it good by hand: rauc status mark-good.
        _end(state, running, update)


def _judge(state: SlotState, running: Slot, update: LastUpdate | None) -> None:
    before = Before() if update is None else update.before
    until_s = time.monotonic() + TRIAL_S
    while lacks := list(missing(before, seen_now())):
        if time.monotonic() > until_s:
            try:
                _end(state, boot_slots.other(running), update, f"within {TRIAL_S / 60:.0f} minutes {'; '.join(lacks)}")
            finally:
                # If the card takes no state, the boot loader begins no other trial.
                service.reboot()
            return
        time.sleep(LOOK_S)
    _end(state, running, update)


def _end(state: SlotState, good: Slot, update: LastUpdate | None, reason: str = "") -> None:
    """End the trial, and keep what became of it: first the words, for without the trial nobody would write them."""
    slot = state.trial or boot_slots.other(good)
    update = update or LastUpdate(_UNKNOWN, _UNKNOWN, _UNKNOWN, slot, Before())
    # Without a trial it was not written to its end, so nobody knows whether it is good.
    cuts = update.cuts + 1 if reason and state.trial is None else 0
    given_up = update.new if reason and (not cuts or cuts >= CUTS_MAX) else update.given_up
    ended = replace(update, result="went-back" if reason else "good", reason=reason, given_up=given_up, cuts=cuts)
    try:
        last_update.write(ended)
    except OSError as error:
        say(f"what became of the update cannot be kept: {error.strerror}", err=True)
    boot_slots.write(boot_slots.BOOT_FOLDER, boot_slots.settle(state, good))
    say(ended.words)
