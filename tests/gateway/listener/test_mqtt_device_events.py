"""Reports on MQTT devices: bounded at once and in all, and never less than the truth."""

from collections import Counter

import msgspec
import pytest

from gateway.listener.device_events import (
    END_BYTES_MAX,
    END_EVENT_BYTES_MAX,
    PUT_OFF_BYTES_MAX,
    TURN_BYTES_MAX,
    DeviceEvents,
    ReportedWill,
    reported,
)
from gateway.mqtt.protocol import Will
from tests.support.mqtt_peers import RecordingIntake

GONE = ReportedWill("status", b"gone", 4)


def devices(devices_max: int = 10_000) -> tuple[DeviceEvents, RecordingIntake]:
    intake = RecordingIntake()
    return DeviceEvents(intake, devices_max, Counter(), {"shutdown"}), intake


def end(events: DeviceEvents, device: str, now_s: float, cause: str = "connection-lost") -> None:
    events.appeared(device, "peer")
    events.ended(device, cause, "peer", GONE, now_s)
    events.left(device)


def test_a_will_is_cut_to_what_a_report_repeats() -> None:
    cut = reported(Will("t" * 60_000, b"x" * 60_000, 1))
    assert (len(cut.topic), len(cut.payload), cut.payload_bytes) == (256, 4_096, 60_000)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_burst_of_wills_is_told_a_few_at_a_time_and_whole(at_the_end: bool) -> None:  # noqa: FBT001
    """5,000 devices end at once: the buffer has room for a part of their events only."""
    events, intake = devices()
    names = [f"m{number:04}" for number in range(5_000)]
    for name in names:
        events.appeared(name, "peer")
    while len(intake.events) < 5_000:
        events.flush(0.0)
    intake.events.clear()
    events.flush(0.0)
    for name in names:
        events.ended(name, "shutdown", "peer", GONE, 0.0)
        events.left(name)
    turn = len(intake.events)
    assert 100 < turn <= TURN_BYTES_MAX / 400 + 1
    if at_the_end:
        events.finish(0.0)
        assert len(intake.events) < 2 * turn + END_BYTES_MAX // END_EVENT_BYTES_MAX + 2
        assert max(len(msgspec.json.encode(details)) for _, _, details in intake.events) < 2 * END_EVENT_BYTES_MAX
        assert sum(len(msgspec.json.encode(details)) for _, _, details in intake.events) < 950_000
    else:
        while len(intake.events) < 5_000:
            events.flush(0.0)
    told: list[object] = []
    for kind, device, details in intake.events:
        assert kind == "device-will"
        listed = details.get("devices")
        told += [device] if listed is None else [one["device"] for one in listed]  # type: ignore[attr-defined]
    assert sorted(map(str, told)) == names
    assert intake.losses == []


def test_a_burst_of_appearances_is_told_a_few_at_a_time() -> None:
    events, intake = devices()
    for number in range(1_000):
        events.appeared(f"m{number}", "peer")
    assert len(intake.events) <= TURN_BYTES_MAX / 400 + 1
    for _ in range(10):
        events.flush(0.0)
    assert len(intake.events) == 1_000


def test_wills_that_are_too_much_to_be_put_off_are_counted_as_lost() -> None:
    events, intake = devices()
    will = reported(Will("status", b"x" * 4_096, 1))
    for number in range(2_000):
        events.appeared(f"m{number}", "peer")
        events.ended(f"m{number}", "connection-lost", "peer", will, 0.0)
        events.left(f"m{number}")
    lost = sum(count for _, reason, count in intake.losses if reason == "will-not-reported")
    assert lost * 5_000 > 2_000 * 4_096 - PUT_OFF_BYTES_MAX
    events.finish(0.0)
    told = [details for kind, _, details in intake.events if kind == "device-died"]
    lists = [details["devices"] for details in told if "devices" in details]
    listed = sum(len(listed) for listed in lists if isinstance(listed, list))
    lost = sum(count for _, _, count in intake.losses)
    assert listed + len(told) - len(lists) + lost == 2_000, "each is told, or counted"


def test_ends_within_a_minute_are_one_report_that_counts_what_it_leaves_out() -> None:
    events, intake = devices()
    for now_s in (0.0, 10.0, 20.0, 30.0):
        end(events, "m001", now_s)
    events.flush(59.0)
    assert [kind for kind, _, _ in intake.events] == ["device-appeared", "device-died"]
    events.flush(60.0)
    _, _, details = intake.events[-1]
    assert (details["ends"], details["wills_dropped"]) == (3, 2)


def test_the_device_that_was_away_for_longest_is_forgotten_first() -> None:
    events, intake = devices(devices_max=2)
    events.appeared("stays", "peer")
    for name in ("m1", "m2", "m3"):
        end(events, name, 0.0)
    appeared = [device for kind, device, _ in intake.events if kind == "device-appeared"]
    died = [device for kind, device, _ in intake.events if kind == "device-died"]
    assert appeared == ["stays", "m1", "m2", "m3"]
    assert died == ["m1", "m2", "m3"], "those that come later are told of as well"
    events.appeared("stays", "peer")
    events.appeared("m3", "peer")
    assert len([kind for kind, _, _ in intake.events if kind == "device-appeared"]) == 4


def test_clients_that_name_no_device_count_as_one() -> None:
    events, intake = devices()
    for number in range(3):
        events.ended(None, "connection-lost", f"peer {number}", GONE, 0.0)
    events.ended(None, "connection-lost", "peer", None, 0.0)
    events.finish(0.0)
    assert [(kind, device, details["peer"]) for kind, device, details in intake.events] == [
        ("device-died", None, "peer 0"),
        ("device-died", None, "peer 2"),
    ]
    assert intake.events[1][2]["wills_dropped"] == 1
