"""RAUC's boot loader back end: its questions and its changes, by the slots' state."""

from pathlib import Path

import pytest

from gateway.commands.update import rauc_slots
from gateway.commands.update.rauc_slots import RefusedError, answered, changed
from gateway.host import boot_slots
from gateway.host.boot_slots import SlotState, put_on_trial, settle

ON_TRIAL = put_on_trial(SlotState(4, "a"), "b")
USED_UP = SlotState(7, "a", "b", 0)


@pytest.mark.parametrize(
    ("words", "state", "answer"),
    [
        (["get-primary"], ON_TRIAL, "b"),
        (["get-primary"], USED_UP, "a"),
        (["get-current"], ON_TRIAL, "a"),
        (["get-state", "a"], ON_TRIAL, "good"),
        (["get-state", "b"], ON_TRIAL, "good"),
        (["get-state", "b"], USED_UP, "bad"),
        (["set-primary", "b"], SlotState(), None),
    ],
)
def test_questions_are_answered_from_the_state(words: list[str], state: SlotState, answer: str | None) -> None:
    assert answered(words, state, "a") == answer


def test_an_installation_puts_the_other_slot_on_trial() -> None:
    before = SlotState(3, "b")
    # Here b's kernel could not be loaded, so a runs although b was the good one.
    writing = changed(["set-state", "b", "bad"], before, "a")
    assert writing == settle(before, "a"), "b is not to be started while it is written"
    assert changed(["set-primary", "b"], writing, "a") == put_on_trial(writing, "b")


def test_a_slot_that_runs_can_be_called_good_or_the_next_one() -> None:
    assert changed(["set-state", "b", "good"], ON_TRIAL, "b") == settle(ON_TRIAL, "b")
    assert changed(["set-primary", "a"], ON_TRIAL, "a") == settle(ON_TRIAL, "a")


@pytest.mark.parametrize(
    ("words", "running"),
    [
        (["set-state", "a", "bad"], "b"),
        (["set-state", "b", "bad"], "b"),
        (["set-state", "a", "good"], "b"),
        (["set-primary", "c"], "b"),
        (["other"], "a"),
        ([], "a"),
    ],
    ids=["the way back", "what runs", "what does not run", "no slot", "no word of RAUC's", "no word"],
)
def test_what_would_leave_no_good_slot_is_refused(words: list[str], running: boot_slots.Slot) -> None:
    with pytest.raises(RefusedError):
        changed(words, ON_TRIAL, running)


def test_the_program_answers_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boot_slots, "running_slot", lambda: "a")
    rauc_slots.main(["set-primary", "b"], tmp_path)
    rauc_slots.main(["get-primary"], tmp_path)
    assert capsys.readouterr().out == "b\n"
    assert boot_slots.read(tmp_path) == SlotState(1, "a", "b", 3)
    with pytest.raises(SystemExit, match="cannot be done"):
        rauc_slots.main(["set-state", "a", "bad"], tmp_path)
    monkeypatch.setattr(boot_slots, "running_slot", lambda: None)
    with pytest.raises(SystemExit, match="not started from a slot"):
        rauc_slots.main(["get-primary"], tmp_path)


def test_the_slot_that_runs_stands_in_the_kernels_command_line(tmp_path: Path) -> None:
    line = tmp_path / "cmdline"
    line.write_text("root=PARTUUID=5711ce00-03 ro rauc.slot=b console=ttyAMA0\n")
    assert boot_slots.running_slot(line) == "b"
    line.write_text("root=/dev/sda1 rauc.slot=c\n")
    assert boot_slots.running_slot(line) is None
