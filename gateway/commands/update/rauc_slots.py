"""RAUC's question which slot starts, answered from the slots' state: its custom boot loader back end.

RAUC calls `/usr/lib/sluice/rauc-slots` with these words: `get-primary`, `set-primary SLOT`, `get-state SLOT`,
`set-state SLOT good|bad` and `get-current` (RAUC's manual, "Custom Bootloader Backend Interface").
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from gateway.host import boot_slots
from gateway.host.boot_slots import Slot, SlotState
from gateway.host.terminal import say


class RefusedError(Exception):
    """The state must not become that; the message says why."""


def main(words: Sequence[str], folder: Path = boot_slots.BOOT_FOLDER) -> None:
    """Answer, or change the state. Ends the program with a message if that cannot be."""
    running = boot_slots.running_slot()
    if running is None:
        sys.exit("this box was not started from a slot: its kernel's command line has no rauc.slot=")
    state = boot_slots.read(folder)
    try:
        answer = answered(words, state, running)
        if answer is not None:
            say(answer)
            return
        wanted = changed(words, state, running)
        if wanted != state:
            boot_slots.write(folder, wanted)
    except (RefusedError, OSError) as error:
        sys.exit(str(error))


def answered(words: Sequence[str], state: SlotState, running: Slot) -> str | None:
    """Answer a question; None if it is none."""
    match words:
        case ["get-primary"]:
            return state.next_start
        case ["get-current"]:
            return running
        case ["get-state", slot]:
            return "bad" if slot == state.trial and not state.tries and slot != running else "good"
    return None


def changed(words: Sequence[str], state: SlotState, running: Slot) -> SlotState:
    """Return the state that RAUC asks for. Raises RefusedError."""
    match words:
        case ["set-state", slot, "good"] if slot == running:
            return boot_slots.settle(state, running)
        case ["set-state", slot, "bad"] if slot != running:
            # RAUC is about to write into it, so the slot that runs must be the one that starts.
            if state.trial == running:
                raise RefusedError(f"slot {running} is on trial, and would have nothing to go back to")
            return boot_slots.settle(state, running)
        case ["set-primary", "a" | "b" as slot]:
            settled = boot_slots.settle(state, running)
            return settled if slot == running else boot_slots.put_on_trial(settled, slot)
    raise RefusedError(f"{' '.join(words)}: slot {running} runs, and this cannot be done to it")
