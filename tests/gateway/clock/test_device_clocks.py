"""The clocks of all sensors: bounded, kept with readings, and gone on with after a restart of the daemon."""

import msgspec
import pytest

from gateway.clock.sensor_clock import DeviceClock
from gateway.clock.sensor_clocks import (
    SAVE_INTERVAL_US,
    SAVED_AGAIN_US,
    SAVED_AT_ONCE_MAX,
    SENSOR_CLOCK_MARKS,
    DeviceClocks,
)
from gateway.reading import Mark


def learn(clock: DeviceClock, now_us: int) -> None:
    assert clock.probed(now_us, now_us + 1_000, now_us // 1000, 0)


def kept(marks: list[Mark]) -> dict[str, bytes]:
    return {mark.key: mark.value for mark in marks if mark.value is not None}


@pytest.fixture
def clocks() -> DeviceClocks:
    return DeviceClocks("boot")


def test_a_run_has_one_clock(clocks: DeviceClocks) -> None:
    assert clocks.of("attic", "7-1a2b3c4d") is clocks.of("attic", "7-1a2b3c4d")
    assert clocks.of("attic", "8-1a2b3c4d") is not clocks.of("attic", "7-1a2b3c4d")
    assert clocks.find("cellar", "1") is None


def test_streams_that_count_by_themselves_have_clocks_by_themselves(clocks: DeviceClocks) -> None:
    learn(clocks.of("attic", "7", "rc", "device/attic/thermo"), 1_000_000)
    learn(clocks.of("attic", "7", "rc", "device/attic/hygro"), 1_000_000)
    marks = kept(clocks.marks(2_000_000))
    assert len(marks) == 2
    again = DeviceClocks("boot")
    again.restore(marks)
    assert again.find("attic", "7", "device/attic/hygro") is not None
    assert again.find("attic", "7") is None


def test_another_oscillator_in_the_settings_is_another_clock(clocks: DeviceClocks) -> None:
    learn(clocks.of("attic", "7"), 1_000_000)
    assert clocks.of("attic", "7", "crystal").fit.observed_us is None


def test_those_that_were_used_least_lately_go_first() -> None:
    clocks = DeviceClocks("boot", runs_max=3)
    for device in ("a", "b", "c"):
        learn(clocks.of(device, "1"), 1_000_000)
    clocks.of("a", "1")
    clocks.of("d", "1")
    assert [run.device for run in clocks.runs()] == ["c", "a", "d"]


def test_what_was_learnt_is_kept_once_and_gone_on_with(clocks: DeviceClocks) -> None:
    learn(clocks.of("attic", "7", "crystal"), 1_000_000)
    clocks.of("cellar", "1")
    marks = clocks.marks(2_000_000)
    assert [mark.key for mark in marks] == [f"{SENSOR_CLOCK_MARKS}attic/"], "of the other nothing is known"
    assert clocks.save_due_us == 2_000_000 + SAVE_INTERVAL_US
    assert clocks.marks(clocks.save_due_us) == []
    again = DeviceClocks("boot")
    assert again.restore(kept(marks)) == []
    clock = again.find("attic", "7")
    assert clock is not None
    assert clock.estimate(1_000, 1_002_000) is not None
    assert again.of("attic", "7", "crystal") is clock
    assert again.marks(3_000_000) == []


def test_one_clock_is_not_written_at_each_reading(clocks: DeviceClocks) -> None:
    learn(clocks.of("attic", "7"), 1_000_000)
    assert len(clocks.marks(1_000_000)) == 1
    learn(clocks.of("attic", "7"), 20_000_000)
    assert clocks.marks(20_000_000) == []
    assert len(clocks.marks(1_000_000 + SAVED_AGAIN_US)) == 1
    learn(clocks.of("attic", "7"), 400_000_000)
    assert len(clocks.marks(400_000_000, all_of_them=True)) == 1, "at the end, whatever is new"


def test_many_clocks_are_written_some_at_a_time_and_all_in_the_end(clocks: DeviceClocks) -> None:
    names = [f"d{number}" for number in range(3 * SAVED_AT_ONCE_MAX)]
    for name in names:
        learn(clocks.of(name, "1"), 1_000_000)
    written: list[str] = []
    for _ in range(3):
        marks = clocks.marks(clocks.save_due_us)
        assert len(marks) == SAVED_AT_ONCE_MAX
        written += [mark.key.removeprefix(SENSOR_CLOCK_MARKS).removesuffix("/") for mark in marks]
    assert sorted(written) == sorted(names)


def test_only_the_newest_run_of_a_device_is_kept(clocks: DeviceClocks) -> None:
    learn(clocks.of("attic", "7"), 1_000_000)
    learn(clocks.of("attic", "8"), 2_000_000)
    again = DeviceClocks("boot")
    again.restore(kept(clocks.marks(2_000_000)))
    assert again.find("attic", "7") is None
    assert again.find("attic", "8") is not None


def test_after_a_restart_of_the_box_it_is_void(clocks: DeviceClocks) -> None:
    learn(clocks.of("attic", "7"), 1_000_000)
    marks = kept(clocks.marks(1_000_000))
    later = DeviceClocks("another")
    assert later.restore(marks) == [Mark(f"{SENSOR_CLOCK_MARKS}attic/", None)]
    assert later.find("attic", "7") is None


def test_a_mark_that_is_none_is_forgotten_and_costs_nothing_else(clocks: DeviceClocks) -> None:
    learn(clocks.of("attic", "7"), 1_000_000)
    marks = kept(clocks.marks(1_000_000)) | {
        f"{SENSOR_CLOCK_MARKS}cellar/": b"\xff\x00",
        f"{SENSOR_CLOCK_MARKS}roof/": b"",
    }
    again = DeviceClocks("boot")
    assert again.restore(marks) == [
        Mark(f"{SENSOR_CLOCK_MARKS}cellar/", None),
        Mark(f"{SENSOR_CLOCK_MARKS}roof/", None),
    ]
    assert again.find("attic", "7") is not None


def test_what_was_kept_is_looked_into_when_it_is_needed(clocks: DeviceClocks) -> None:
    learn(clocks.of("attic", "7"), 1_000_000)
    marks = kept(clocks.marks(1_000_000))
    (key,) = marks
    # The envelope is whole, and the clock in it is none.
    saved = msgspec.msgpack.decode(marks[key])
    broken = {key: msgspec.msgpack.encode([*saved[:-1], b"\xff"])}
    again = DeviceClocks("boot")
    assert again.restore(broken) == []
    assert again.of("attic", "7").fit.observed_us is None, "it is learnt anew, and nothing else is lost"
    learn(again.of("attic", "7"), 2_000_000)
    assert list(kept(again.marks(2_000_000))) == [key]


def test_a_clock_that_is_known_no_more_is_forgotten_on_disk_too() -> None:
    clocks = DeviceClocks("boot", runs_max=2)
    learn(clocks.of("a", "1"), 1_000_000)
    learn(clocks.of("b", "1"), 1_000_000)
    on_disk = kept(clocks.marks(1_000_000))
    assert len(on_disk) == 2
    for name in "cdef":
        learn(clocks.of(name, "1"), 2_000_000)
        now_us = clocks.save_due_us
        for mark in clocks.marks(now_us):
            if mark.value is None:
                del on_disk[mark.key]
            else:
                on_disk[mark.key] = mark.value
        assert {key.removeprefix(SENSOR_CLOCK_MARKS).partition("/")[0] for key in on_disk} == {
            run.device for run in clocks.runs()
        }


def test_a_boot_that_follows_takes_the_place_of_the_one_before_on_disk() -> None:
    clocks = DeviceClocks("boot", runs_max=2)
    learn(clocks.of("a", "1"), 1_000_000)
    (first,) = clocks.marks(1_000_000)
    learn(clocks.of("a", "2"), 2_000_000)
    (second,) = clocks.marks(clocks.save_due_us)
    assert first.key == second.key
    clocks.of("b", "1")
    assert clocks.marks(clocks.save_due_us) == [], "the mark is of the newer one, which is known still"


def test_more_than_is_kept_in_memory_is_not_kept_on_disk_either(clocks: DeviceClocks) -> None:
    for name in "abc":
        learn(clocks.of(name, "1"), 1_000_000)
    again = DeviceClocks("boot", runs_max=2)
    assert again.restore(kept(clocks.marks(1_000_000))) == [Mark(f"{SENSOR_CLOCK_MARKS}c/", None)]
    assert [run.device for run in again.runs()] == ["a", "b"]
