"""The trial of a new image: what good means, and that a box ends on a good slot whatever happens to the new one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.commands.update import trial
from gateway.commands.update.trial import FED_S, TRIAL_S, Seen, missing, why_not_running
from gateway.host import boot_slots, last_update, service
from gateway.host.boot_slots import Slot, SlotState, put_on_trial
from gateway.host.last_update import Before, LastUpdate

ALL = Before(service=True, readings=True, kafka=True)
WELL = Seen(active=True, fed_s=FED_S, readings=1, kafka=True)
UPDATE = LastUpdate("1", "1.0", "1.1", "b", ALL)


def test_a_version_is_good_if_it_does_what_the_one_before_did() -> None:
    assert list(missing(ALL, WELL)) == []
    assert list(missing(Before(), Seen())) == [], "nothing was set up before"
    assert list(missing(Before(service=True), replace(WELL, readings=0, kafka=False))) == [], "silent before too"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(WELL, active=False), "its service does not run"),
        (replace(WELL, fed_s=FED_S - 1), "its service has not run for 60 s without a restart"),
        (replace(WELL, readings=0), "no reading came in, although sensors sent before"),
        (replace(WELL, kafka=False), "Kafka is not reached, and was before"),
    ],
)
def test_what_a_version_lacks_is_told(seen: Seen, words: str) -> None:
    assert list(missing(ALL, seen)) == [words]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (SlotState(trial="b", tries=0), "started 3 times"),
        (SlotState(trial="b", tries=2), "its kernel cannot be loaded"),
        (SlotState(trial="b", tries=3), "could not be counted"),
        (SlotState(), "not written to its end"),
    ],
)
def test_why_the_new_version_does_not_run_follows_from_the_tries(state: SlotState, words: str) -> None:
    told = why_not_running(state, "a", UPDATE)
    assert told is not None
    assert words in told
    assert why_not_running(state, "b", UPDATE) is None


@dataclass
class PlainBox:
    """A box as far as its slots go: a boot loader, and versions that are good, bad or hang."""

    folder: Path
    seen: Seen = WELL
    now_s: float = 0.0
    reboots: int = 0
    said: list[str] = field(default_factory=list)

    def power_on(self) -> Slot:
        """What `image/boot.cmd` does."""
        state = boot_slots.read(self.folder)
        if state.trial is not None and state.tries:
            boot_slots.write(self.folder, replace(state, tries=state.tries - 1))
        return state.next_start


def boxed(folder: Path, patched: pytest.MonkeyPatch) -> PlainBox:
    box = PlainBox(folder)
    patched.setattr(boot_slots, "BOOT_FOLDER", folder)
    patched.setattr(last_update, "FILE", folder / "last.json")
    patched.setattr(trial, "seen_now", lambda: box.seen)
    patched.setattr(trial.time, "monotonic", lambda: box.now_s)  # type: ignore[attr-defined]
    patched.setattr(trial, "say", lambda words, **_: box.said.append(words))

    def sleep(seconds: float) -> None:
        box.now_s += seconds

    def reboot() -> None:
        box.reboots += 1

    patched.setattr(trial.time, "sleep", sleep)  # type: ignore[attr-defined]
    patched.setattr(service, "reboot", reboot)
    return box


def start(box: PlainBox, patched: pytest.MonkeyPatch, seen: Seen | None) -> Slot:
    """One start of the box; with None it hangs before anybody can judge. Returns the slot."""
    slot = box.power_on()
    if seen is not None or slot == "a":
        box.seen = seen or WELL
        patched.setattr(boot_slots, "running_slot", lambda: slot)
        trial.main()
    return slot


@given(starts=st.lists(st.sampled_from([WELL, replace(WELL, readings=0), Seen(), None]), min_size=4, max_size=6))
def test_a_box_ends_on_a_good_slot_and_says_why(
    tmp_path_factory: pytest.TempPathFactory, starts: Sequence[Seen | None]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        box = boxed(tmp_path_factory.mktemp("boot"), patched)
        boot_slots.write(box.folder, put_on_trial(SlotState(), "b"))
        last_update.write(UPDATE)
        slots = [start(box, patched, seen) for seen in starts]
        hangs = next((number for number, seen in enumerate(starts) if seen is not None), len(starts))
        judged_good = hangs < boot_slots.TRIES and starts[hangs] == WELL
        expected: Slot = "b" if judged_good else "a"
        state, update = boot_slots.read(box.folder), last_update.read()
        assert (state.good, state.trial) == (expected, None)
        assert slots[-1] == state.next_start == expected
        assert slots.count("b") <= boot_slots.TRIES or judged_good
        assert update is not None
        assert update.result == ("good" if judged_good else "went-back")
        assert bool(update.reason) == (not judged_good)
        assert box.reboots == (hangs < boot_slots.TRIES and not judged_good)


def test_a_version_has_five_minutes_and_not_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = boxed(tmp_path, monkeypatch)
    boot_slots.write(tmp_path, put_on_trial(SlotState(), "b"))
    last_update.write(UPDATE)
    monkeypatch.setattr(trial, "seen_now", lambda: WELL if box.now_s >= TRIAL_S - 1 else replace(WELL, kafka=False))
    assert start(box, monkeypatch, WELL) == "b"
    assert boot_slots.read(tmp_path).good == "b"
    boot_slots.write(tmp_path, put_on_trial(SlotState(good="a"), "b"))
    monkeypatch.setattr(trial, "seen_now", lambda: replace(WELL, kafka=False))
    begun_s = box.now_s
    assert start(box, monkeypatch, WELL) == "b"
    assert TRIAL_S < box.now_s - begun_s < TRIAL_S + 10
    assert box.said[-1].endswith("1.0 runs again: within 5 minutes Kafka is not reached, and was before")


def test_a_box_without_slots_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = boxed(tmp_path, monkeypatch)
    monkeypatch.setattr(boot_slots, "running_slot", lambda: None)
    trial.main()
    assert (box.said, list(tmp_path.iterdir())) == ([], [])


def test_a_version_that_somebody_called_good_by_hand_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = boxed(tmp_path, monkeypatch)
    boot_slots.write(tmp_path, SlotState(good="b"))
    last_update.write(UPDATE)
    for _ in range(2):
        assert start(box, monkeypatch, Seen()) == "b"
    assert last_update.read() == replace(UPDATE, result="good")
    assert len(box.said) == 1


def test_a_card_that_takes_no_state_is_left_by_a_restart_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = boxed(tmp_path, monkeypatch)
    boot_slots.write(tmp_path, put_on_trial(SlotState(), "b"))
    slot = box.power_on()
    monkeypatch.setattr(boot_slots, "running_slot", lambda: slot)
    last_update.write(UPDATE)

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(boot_slots, "write", fail)
    monkeypatch.setattr(last_update, "write", fail)
    box.seen = Seen()
    with pytest.raises(OSError, match="Read-only"):
        trial.main()
    assert box.reboots == 1
    assert box.said == ["what became of the update cannot be kept: Read-only file system"]


def test_systemds_words_on_the_service_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(told: str) -> None:
        monkeypatch.setattr(service, "_systemctl", lambda *_: (0, told))

    say("ActiveState=active\nActiveEnterTimestampMonotonic=5000000\nWatchdogTimestampMonotonic=71000000\n")
    assert service.fed_s() == (True, 66.0)
    say("ActiveState=activating\nActiveEnterTimestampMonotonic=0\nWatchdogTimestampMonotonic=0\n")
    assert service.fed_s() == (False, 0.0)
    say("Failed to connect to bus\n")
    assert service.fed_s() == (False, 0.0)
