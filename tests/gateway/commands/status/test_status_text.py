"""The words of `sluice status` for an installer, with an uplink that is up, down, used up or in part unwell."""

import dataclasses
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime, timedelta, timezone
from functools import reduce
from operator import getitem
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.buffer.status import BufferStatus, DeviceStatus, Moment, Now
from gateway.commands.buffer_commands import RoomLeft
from gateway.commands.status.watch import with_rates
from gateway.commands.status.words import DEVICES_MAX, INDENT, Glance, facts_of, status_lines
from gateway.config import running_settings
from gateway.health.conditions import conditions
from gateway.host.last_update import Before, LastUpdate
from gateway.host.our_image import OurImage
from gateway.settings import (
    NO_SOURCE,
    BrokerSettings,
    BufferSettings,
    GatewaySettings,
    KafkaSettings,
    ListenerSettings,
    SerialSettings,
    SerialTextSettings,
    Settings,
)
from gateway.uplink.state import ONE_REPLICA, UplinkState
from tests.gateway.commands.test_terminal_output import STATE

MAY_BE_NULL = {
    *("error", "failing", "device", "kind", "used_s", "trouble", "rivals", "shared", "refused_last", "fault", "user"),
    *("told_us", "received_us"),
}
"""Members that are null somewhere in a true answer, and two that nobody reads."""
TODAY = datetime(2026, 3, 14, 12, 0, tzinfo=UTC).timestamp()
BOOTED = TODAY - 40 * 86_400
DOWN = {"up": False, "error": "the name kafka.example does not resolve: DNS knows no such name"}
SETTINGS = Settings(GatewaySettings("gw1"), KafkaSettings(("kafka.example:9092",)))


def clock(hour: int, minute: int, day: int = 14) -> float:
    return datetime(2026, 3, day, hour, minute, tzinfo=UTC).timestamp()


def glance(uplink: dict[str, Any] | None, *, rows: int = 18_204, running: bool = True, **changes: object) -> Glance:
    """A gateway that has run for forty days, with readings that wait; at noon, read in UTC."""
    oldest = Moment("boot", 1, None, None) if rows else None
    found = BufferStatus("b" * 16, running, rows, 1_000, oldest, None, False, 1, 0, {}, {}, (), ())
    answer = {"buffer": {"full": False, "failing": None}, "uplink": uplink} if uplink is not None else None
    now = Now("boot", round((TODAY - BOOTED) * 1e6), round(TODAY * 1e6))
    room = RoomLeft(999_000_000, 41 * 24 + 3.0, 86_400.0)
    seen = Glance(SETTINGS, found, answer, "", room, 0, now, TODAY, UTC)
    return dataclasses.replace(seen, **changes)  # type: ignore[arg-type]


def uplink(seen: Glance) -> list[str]:
    """Lines on the uplink: the first one without its label, then those that continue it."""
    lines = [*status_lines(seen)]
    begin = next(number for number, line in enumerate(lines) if line.startswith("uplink"))
    end = next(number for number, line in enumerate(lines) if line.startswith("buffer"))
    return [line[INDENT:] for line in lines[begin:end]]


def test_what_the_daemon_says_of_its_uplink_is_read_whole() -> None:
    said = UplinkState(error="why", parked={"a/1": "x"}, quota_until=1.5, live_oldest_us=7)
    assert facts_of(glance(msgspec.to_builtins(said))).uplink == said
    assert facts_of(glance({"up": "an answer of another version"})).uplink == UplinkState(up=True)


def test_each_member_of_another_versions_answer_is_read_by_itself() -> None:
    answer = {
        "buffer": {"full": True, "failing": 7},
        "clock": {"synced": False},
        "counts": {"time-missing": 2},
        "settings": {"digest": "another"},
        "uplink": {"up": False, "error": "no way", "since": None},
        "up_s": "long",
    }
    seen = glance(None, answer=answer)
    found = {each.code: each.words for each in conditions(facts_of(seen))}
    assert found.keys() == {"buffer-full", "clock-unsynced", "kafka-unreached", "settings-changed"} | {
        "no-source",
        "time-missing",
    }
    assert found["clock-unsynced"] == "This box's clock has not been synced."
    assert next(status_lines(seen)) == "gateway     gw1, running"


def test_what_became_of_an_update_of_the_image_has_a_line() -> None:
    good = LastUpdate("1", "1.0", "1.1\x1b", "b", Before(), "good")
    lines = [*status_lines(glance({"up": True}, update=good))]
    assert "update      version 1.1\\x1b was found good, and is used from now on; before it 1.0" in lines
    back = structs.replace(good, result="went-back", reason="Kafka is not reached, and was before")
    (told,) = (line for line in status_lines(glance({"up": True}, update=back)) if line.startswith("update"))
    assert told.startswith("update      warn: Version 1.1\\x1b was given up, and 1.0 runs again: Kafka is not reached")
    assert not [line for line in status_lines(glance({"up": True})) if line.startswith("update")]


def test_a_box_with_our_image_says_which_one_and_how_full_its_partitions_are() -> None:
    image = OurImage("1.1\x1b", "b", {"boot partition": 0.234, "data partition": 1.0})
    assert (
        "image       version 1.1\\x1b runs from slot b; the boot partition is 23% full; the data partition is 100% full"
        in [*status_lines(glance({"up": True}, image=image))]
    )
    assert not [line for line in status_lines(glance({"up": True})) if line.startswith("image")]


@pytest.mark.parametrize("part", [{}, {"up": 7}, {"synced": "so so"}, "well"])
def test_what_cannot_be_read_is_not_said_to_be_well(part: object) -> None:
    lines = [*status_lines(glance(None, answer={"uplink": part, "clock": part}))]
    assert not any(line.startswith(("uplink", "clock")) for line in lines)
    assert lines[1][INDENT:].startswith("not known: clock, uplink; the gateway that runs may be of another version")
    (told,) = (line for line in status_lines(glance({"up": True, "since": None})) if "not known" in line)
    assert told[INDENT:].startswith("not known: uplink.since; ")


def places(value: object, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all values in an answer."""
    within = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in within:
        yield (*at, name)
        yield from places(each, (*at, name))


@pytest.mark.parametrize("place", list(places(STATE)), ids=str)
def test_a_null_anywhere_in_the_answer_is_told_as_unknown(place: tuple[str | int, ...]) -> None:
    """Unless a null says something there, as that a port has no trouble."""
    answer = deepcopy(STATE)
    *way, last = place
    within: Any = reduce(getitem, way, cast("Any", answer))
    within[last] = None
    seen = with_rates(glance(None, answer=answer), deque())
    told = [line[INDENT:] for line in status_lines(seen) if line[INDENT:].startswith("not known: ")]
    part = str(place[0])
    assert all(f"not known: {part}" in line for line in told)
    assert told or last in MAY_BE_NULL


def test_losses_are_those_that_were_reported_and_those_that_were_not() -> None:
    found = structs.replace(
        glance(None).buffer_status,
        losses={"buffer-full": 3, "event-refused": 9},
        lost_us=glance(None).now.boottime_us - 10**7,
    )
    told = {"lost_told": 2, "lost_told_us": found.lost_us - 10**7}
    for answer, words in ((told, "5 readings are lost for good (some: buffer-full)"), ({}, "3 readings are lost for")):
        (condition,) = (
            each
            for each in conditions(facts_of(glance(None, buffer_status=found, answer=answer)))
            if each.code == "readings-lost"
        )
        assert condition.words.startswith(words)
        assert condition.words.endswith("the last 10 s ago.")


def test_devices_that_were_not_told_are_not_called_unheard() -> None:
    seen = glance({"up": True}, settings=structs.replace(SETTINGS, mqtt_listener=ListenerSettings()))
    assert seen.answer is not None
    seen.answer["up_s"] = 600.0
    for devices, codes in (((), {"devices-unheard"}), (None, set[str]())):
        facts = facts_of(dataclasses.replace(seen, devices=devices, unheard="no answer"))
        assert {each.code for each in conditions(facts)} == codes
    assert f"{' ' * INDENT}its devices are not known: no answer" in [
        *status_lines(dataclasses.replace(seen, unheard="no answer"))
    ]


@pytest.mark.parametrize("serial", [None, SerialSettings()])
def test_a_gateway_that_nothing_can_reach_is_told(serial: SerialSettings | None) -> None:
    line = f"sources     FAIL: {NO_SOURCE[0].upper()}{NO_SOURCE[1:]}."
    for seen in (glance({"up": True}), glance(None, running=False)):
        settings = structs.replace(SETTINGS, serial=serial)
        assert line in [*status_lines(dataclasses.replace(seen, settings=settings))]
        for change in (
            {"serial": SerialSettings(ports=("all",))},
            {"serial": SerialSettings(text=(SerialTextSettings("/dev/ttyUSB0", "scale", "json"),))},
            {"mqtt_listener": ListenerSettings()},
            {"mqtt_brokers": (BrokerSettings("b.example", ("#",)),)},
        ):
            settings = structs.replace(SETTINGS, **change)
            assert line not in [*status_lines(dataclasses.replace(seen, settings=settings))]


def test_a_gateway_that_runs_with_other_settings_goes_by_their_name() -> None:
    before = structs.replace(SETTINGS, gateway=GatewaySettings("barn-1"))
    told = msgspec.to_builtins(running_settings.of(before))
    first, second, *_ = status_lines(glance({"up": True}, answer={"settings": told}))
    assert first == "gateway     barn-1, running"
    assert second.strip() == (
        "warn: The settings were changed since the gateway was started. It goes on with those of before, as "
        "default/barn-1. Run sudo systemctl restart sluice."
    )
    told = msgspec.to_builtins(running_settings.of(SETTINGS))
    assert not any("settings were" in line for line in status_lines(glance({"up": True}, answer={"settings": told})))


def test_the_status_names_unheard_devices_and_how_to_start_a_stopped_gateway() -> None:
    lines = [*status_lines(glance({"up": True}, devices=[], not_heard=("42", "43")))]
    assert lines[-2:] == ["devices     not heard yet: 42, 43", f"{' ' * INDENT}none heard yet"]
    stopped = [*status_lines(glance(None, running=False, to_start="start it: sudo systemctl start sluice"))]
    assert stopped[:2] == [
        "gateway     gw1, not running",
        f"{' ' * INDENT}start it: sudo systemctl start sluice",
    ]


def test_a_broker_that_cannot_be_reached() -> None:
    state, told = uplink(
        glance(DOWN | {"since": clock(10, 2)}, answer={"up_s": 9e4, "uplink": DOWN | {"since": clock(10, 2)}})
    )
    assert state == "down since 10:02 UTC"
    assert told == (
        "warn: Kafka has not been reached for 1 h 58 min: the name kafka.example does not resolve: DNS knows no such "
        "name. 18,204 readings and events are safe on this box; its room lasts 41 days more. Check the network and the "
        "settings under [kafka]: sluice check goes through the way step by step."
    )


def test_commands_that_wait_and_the_ends_of_others_have_a_line() -> None:
    def line(waiting: int, **counts: int) -> str:
        told = {"topic": "gateway-commands.gw1", "waiting": waiting, "counts": {"read": 9, **counts}, "error": None}
        (found,) = [
            each[INDENT:]
            for each in status_lines(glance({"up": True}, answer={"commands": told}))
            if "since the" in each
        ]
        return found

    assert line(0) == "none waits; since the start none has ended"
    assert line(1, delivered=1_200, expired=2) == "1 command waits; since the start 1,200 delivered, 2 expired"
    assert line(2, **{"unknown-device": 1}) == "2 commands wait; since the start 1 for unknown devices"


def test_conditions_are_the_same_for_programs() -> None:
    codes = {each.code for each in conditions(facts_of(glance(DOWN | {"throttled_s": 1.0})))}
    assert codes == {"no-source", "kafka-unreached", "kafka-throttles"}


def test_names_from_outside_are_escaped() -> None:
    (line,) = (line for line in uplink(glance({"up": True, "beyond_topics": {"d\x1b1": 1_480}})) if "topics" in line)
    assert line.startswith(r"warn: d\x1b1 sends for more new topics than this gateway makes. They go to the quarantine")


def test_the_status_has_a_remedy_for_another_protocol_on_the_mqtt_port() -> None:
    counts = {"connected": 9, "mosquitto-bridge-level": 2, "http-on-mqtt-port": 1, "packet-too-large": 1}
    lines = [*status_lines(glance({"up": True}, answer={"mqtt_listener": counts}))]
    at = next(number for number, line in enumerate(lines) if line.startswith("listener"))
    assert lines[at].endswith("1 http-on-mqtt-port, 2 mosquitto-bridge-level, 1 packet-too-large")
    bridge, http, *others = [line.strip() for line in lines[at + 1 :]]
    assert bridge.startswith("mosquitto-bridge-level: a mosquitto bridge first asks for its own version")
    assert "try_private false" in bridge
    assert http.startswith("http-on-mqtt-port: a browser, or a client that is set to WebSocket")
    assert not any("packet-too-large:" in line for line in others)


@pytest.mark.parametrize("state", [{"up": True}, DOWN])
def test_a_quota_of_kafkas_is_told_whether_the_uplink_is_up_or_not(state: dict[str, Any]) -> None:
    (line,) = [each for each in uplink(glance(state | {"throttled_s": 0.04})) if "holds this gateway back" in each]
    assert "The last request waited for 1 s; nothing is lost." in line
    assert not any("holds this gateway back" in each for each in uplink(glance(state | {"throttled_s": 0.0})))


def test_by_what_certificates_are_judged_while_the_clock_is_not_known() -> None:
    lines = status_lines(glance({"up": True, "dates_passed": datetime(2026, 11, 22, 9, tzinfo=UTC).timestamp()}))
    assert any("certificates that ended before 2026-11-22 are refused" in line for line in lines)
    assert not any("certificates" in line for line in status_lines(glance({"up": True})))


def test_a_broker_that_is_reached_is_not_called_unreachable() -> None:
    why = "kafka.example:9092 refuses the log-in of user gw1: user or password is wrong"
    first, told = uplink(glance({"up": False, "error": why, "barred": True, "since": clock(10, 2)}))
    assert first == "down since 10:02 UTC"
    assert told.startswith(f"warn: Kafka cannot be used: {why}. 18,204 readings")


def test_what_ends_in_a_question_is_not_gone_on_with() -> None:
    _, told = uplink(glance(DOWN | {"error": "have the two been mixed up?"}))
    assert "reached: have the two been mixed up? 18,204 readings and events are safe on this box" in told


def test_the_oldest_is_told_once() -> None:
    oldest_us = glance({}).now.boottime_us - 9_000_000
    assert uplink(glance({"up": True, "live_oldest_us": oldest_us})) == ["up"]


def test_each_device_whose_payload_is_not_as_declared_is_named_with_the_cause() -> None:
    def fault(device: str, cause: str, readings: int) -> dict[str, Any]:
        return {"device": device, "cause": cause, "told_us": 1, "received_us": 1, "readings": readings}

    seen = glance({"up": True})
    assert seen.answer is not None
    seen.answer["counts"] = {"identity-missing": 1_200, "payload-not-json": 40, "device-time-ahead": 1}
    seen.answer["counted_last"] = {"identity-missing": "attic"}
    seen.answer["payload_faults"] = {
        "identity-missing": [fault("attic", "no `seq`", 12)],
        "payload-not-json": [fault(f"dht{number}", "`nan` at byte 32", 1) for number in range(30)],
    }
    lines = [*status_lines(seen)]
    first = next(number for number, line in enumerate(lines) if line.startswith("payloads"))
    identity, attic, json, *dht = (line[INDENT:] for line in lines[first : first + 3 + DEVICES_MAX])
    and_others, time = (line[INDENT:] for line in lines[first + 3 + DEVICES_MAX :][:2])
    assert attic == "attic: no `seq` (12 readings)"
    assert dht == [f"dht{number}: `nan` at byte 32 (1 reading)" for number in range(DEVICES_MAX)]
    assert and_others == "and others; sluice devices names them all"
    assert identity.startswith(
        "note: 1,200 readings since the start (the last: attic; sluice devices says more) came without the boot and seq"
    )
    assert json.startswith("note: 40 readings since the start came without the JSON that their routes declare")
    assert time.startswith("note: 1 reading since the start came with a time too far ahead of their receipt (gateway")


def test_what_was_sent_again_is_told_beside_what_came_in() -> None:
    seen = glance({"up": True, "sent": 1_197})
    assert seen.answer is not None
    for counts, words in (({}, ""), ({"duplicate": 3}, " (3 of them sent again: stored once)")):
        seen.answer["counts"] = {"readings": 1_200, **counts}
        (line,) = (line for line in status_lines(seen) if line.startswith("readings"))
        assert line == f"readings    since the start 1,200 came in{words}, 1,197 readings and events to Kafka"


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (
            RoomLeft(999_000_000, 5.5, 7_200),
            "room for 5 h 30 min at the rate of the last 2 h that sluice ran; when it is ",
        ),
        (RoomLeft(9, 24 * 365 * 30, 9e4), "room for 30.0 years at the rate of the last 1 d 1 h that sluice ran; "),
        (
            RoomLeft(999_000_000, None, 60),
            "room for 999.0 MB more; how long that lasts is shown after 10 min of running",
        ),
        (RoomLeft(5_000, None, 7_200), "room for 5.0 kB more; nothing came in during the last 2 h that sluice ran"),
        (RoomLeft(0, 0.0, 7_200), "no room for more; when it is full, sensors are asked to keep their readings"),
    ],
)
def test_room_is_told_as_far_as_it_is_known(room: RoomLeft, words: str) -> None:
    lines = [*status_lines(glance(DOWN, room=room))]
    at = next(number for number, line in enumerate(lines) if line.startswith("space"))
    assert lines[at + 1].strip().startswith(words)


@pytest.mark.parametrize(
    ("today", "words"),
    [
        ({"spared_today": 321}, "the card was spared 321 readings and events today (UTC)\n"),
        ({"spared_today": 1, "spared_about": True}, "the card was spared about 1 reading or event today (UTC)\n"),
        ({"spared_today": None}, "the card was spared 4,321 readings and events since the start\n"),
    ],
)
def test_it_says_what_the_card_was_spared_and_who_has_readings_first(today: dict[str, object], words: str) -> None:
    told = {"up": True, "direct_topics": 2, "disk_first": {"a\x1b[2J": ONE_REPLICA}, **today}
    seen = glance(told, answer={"buffer": {}, "uplink": told, "counts": {"readings": 5_000, "spared": 4_321}})
    lines = "\n".join(status_lines(seen))
    assert words in lines
    assert "Kafka has the readings of 2 topics first, and the disk is spared; the disk has those of a\\x1b[2J" in lines
    nothing = glance({**told, "spared_today": 0}, answer={"buffer": {}, "uplink": {**told, "spared_today": 0}})
    assert not any("the card was spared" in line for line in status_lines(nothing))


def test_what_happens_when_it_is_full_is_what_the_settings_say() -> None:
    dropping = Settings(SETTINGS.gateway, SETTINGS.kafka, BufferSettings(when_full="drop-oldest"))
    words = "when it is full, the oldest readings are dropped to make room"
    assert any(words in line for line in status_lines(glance(DOWN, settings=dropping)))


def test_a_full_buffer_is_told_once() -> None:
    lines = [*status_lines(glance(DOWN, answer={"buffer": {"full": True}, "uplink": DOWN}))]
    assert sum("Sensors are asked to keep" in line for line in lines) == 1
    assert any("safe on this box; there is no room for more." in line for line in lines)


def test_the_status_names_devices_with_more_than_their_share_of_the_buffer() -> None:
    above = [{"device": name, "bytes": 2_000_000, "readings": 7} for name in ("attic\x1b[2J", "", *"abcdef")][:6]
    answer = {"buffer": {"full": False, "above_share": above, "above_share_devices": 9}, "uplink": DOWN}
    (line,) = [line for line in status_lines(glance(DOWN, answer=answer)) if "More than their share" in line]
    assert r"attic\x1b[2J (2.0 MB), no known device (2.0 MB), a (2.0 MB) and 6 more. Their readings are refused" in line
    dropping = Settings(SETTINGS.gateway, SETTINGS.kafka, BufferSettings(when_full="drop-oldest"))
    lines = status_lines(glance(DOWN, answer=answer, settings=dropping))
    assert any("Their own oldest readings make room" in line for line in lines)


@pytest.mark.parametrize(
    ("since", "words"),
    [
        (clock(10, 2), "since 10:02 UTC"),
        (clock(10, 2, day=13), "since 2026-03-13 10:02 UTC"),
        (datetime(2000, 1, 1, tzinfo=UTC).timestamp(), "since before this box's clock was set"),
        (clock(10, 2, day=20), "since before this box's clock was set"),
        (1e300, "since before this box's clock was set"),
    ],
)
def test_since_when_by_a_clock_that_is_right_now(since: float, words: str) -> None:
    assert uplink(glance({"up": True, "since": since})) == [f"up {words}"]
    assert uplink(glance(DOWN | {"since": since}))[0] == f"down {words}"


def test_since_when_by_a_clock_that_may_be_wrong() -> None:
    seen = glance({"up": True, "since": clock(10, 2)}, now=Now("boot", round((TODAY - BOOTED) * 1e6), None))
    assert uplink(seen) == ["up since 10:02 UTC (by this box's clock, which is not synced)"]


def test_times_are_those_of_whoever_reads_them() -> None:
    there = timezone(timedelta(hours=13))
    assert uplink(glance({"up": True, "since": clock(11, 2)}, zone=there)) == ["up since 00:02 UTC+13:00"]
    assert uplink(glance({"up": True, "since": clock(10, 2)}, zone=there)) == ["up since 2026-03-14 23:02 UTC+13:00"]
    seen = glance({"up": True, "since": clock(10, 2)}, zone=timezone(timedelta(hours=1), "CET"))
    assert uplink(seen) == ["up since 11:02 CET"]


@pytest.mark.parametrize("seconds", [0.0, 29.9, 30.0, 31.0, 59.9])
def test_what_began_lies_never_in_the_future(seconds: float) -> None:
    assert uplink(glance({"up": True, "since": clock(11, 59) + seconds})) == ["up since 11:59 UTC"]
    assert uplink(glance(DOWN | {"since": clock(11, 59) + seconds}))[0] == "down since 11:59 UTC"


@pytest.mark.parametrize("until", [clock(0, 0, day=15), clock(0, 0, day=15) - 0.4, clock(0, 0, day=15) + 29])
def test_moments_around_midnight_are_told_as_the_one_that_they_are(until: float) -> None:
    _, told = uplink(glance({"up": False, "quota_used_up": True, "quota_until": until}))
    assert "Nothing is sent until 00:00 UTC: " in told


def test_an_uplink_that_is_well_is_one_line() -> None:
    state = {"up": True, "since": clock(10, 2), "bytes_per_s": 16_400, "live_oldest_us": glance({}).now.boottime_us}
    assert uplink(glance(state)) == ["up since 10:02 UTC; the link was seen to carry at least 16.4 kB/s"]
    metered = Settings(SETTINGS.gateway, KafkaSettings(SETTINGS.kafka.bootstrap, bytes_per_s_max=2_000))
    (line,) = uplink(glance(state, settings=metered))
    assert line.endswith("at least 16.4 kB/s; no more than 2.0 kB/s is used (kafka.bytes_per_s_max)")


@pytest.mark.parametrize(
    ("drain", "how"), [("live-first", "sent beside new ones"), ("oldest-first", "sent first, in their order")]
)
def test_a_backlog_that_drains(drain: str, how: str) -> None:
    kafka = KafkaSettings(("kafka.example:9092",), drain=drain)  # type: ignore[arg-type]
    oldest_us = glance({}).now.boottime_us - 12_000_000
    seen = glance({"up": True, "live_oldest_us": oldest_us}, backlog_rows=5_000_000)
    assert uplink(dataclasses.replace(seen, settings=Settings(SETTINGS.gateway, kafka))) == [
        "up",
        f"5,000,000 readings and events from earlier are still to go, {how} (kafka.drain)",
        "of the new readings, the oldest has waited for 12 s",
    ]


def test_readings_that_wait_for_the_clock_are_counted_down() -> None:
    until_us = glance({}).now.boottime_us + 7 * 60_000_000
    state = {"up": True, "waits_for_clock": True, "clock_until_us": until_us}
    unsynced = {"synced": False, "error_us": None, "since_us": until_us - 10 * 60_000_000}
    lines = [*status_lines(glance(state, answer={"uplink": state, "clock": unsynced}, backlog_rows=15))]
    assert "uplink      up" in lines
    (line,) = (line for line in lines if line.startswith("clock"))
    assert line.startswith(
        "clock       warn: This box's clock has not been synced for 3 min. Readings wait on this box for it, for 7 min "
        "more at most (gateway.hold_unsynced_s)."
    )
    assert not any("from earlier" in line for line in lines)


def test_what_is_written_a_day_is_told_once_enough_was_seen() -> None:
    young, old = RoomLeft(999_000_000, None, 599.0), RoomLeft(999_000_000, None, 601.0, 2.4e9)
    assert "disk        how much is written a day is not known yet" in status_lines(glance({"up": True}, room=young))
    assert "disk        2.4 GB a day are written" in status_lines(glance({"up": True}, room=old))


def test_a_quota_that_is_used_up() -> None:
    state = {"up": False, "error": "the quota of the day", "quota_used_up": True, "quota_until": clock(0, 0, day=15)}
    assert uplink(glance(state)) == [
        "waits",
        (
            "warn: Nothing is sent until 00:00 UTC: the quota of the day is used up (kafka.bytes_per_day_max). 18,204 "
            "readings and events are safe on this box; its room lasts 41 days more. Raise it if the contract with the "
            "network allows."
        ),
    ]
    _, dateless = uplink(glance(state | {"quota_until": None}, rows=0))
    assert dateless.startswith("warn: Nothing is sent until this day of the network's ends: ")


def test_the_first_attempt_is_not_called_an_outage() -> None:
    assert uplink(glance({"up": False, "error": None, "since": clock(11, 59)})) == [
        "no answer from Kafka yet: the first attempt is under way since 11:59 UTC"
    ]


def test_partitions_and_topics_that_take_nothing() -> None:
    flaw = "topic-compacted; compaction deletes readings: set cleanup.policy=delete"
    state = {"up": True, "parked": {"device-a/3": "has no leader"}, "refused_topics": {"device-b": flaw}}
    assert uplink(glance(state))[1:] == [
        (
            f"warn: Kafka's topic device-b is not written to: {flaw}. Its readings wait in the quarantine. Have the "
            "topic mended; they then go by themselves. sluice check has the command."
        ),
        (
            "warn: 1 partition of Kafka's takes nothing: device-a/3 (has no leader). Their readings wait on "
            "disk, others go on. See to the cluster's brokers."
        ),
    ]


def test_one_is_told_as_one() -> None:
    lines = [*status_lines(glance({"up": True}, rows=1, backlog_rows=1))]
    assert any(line.startswith("buffer      1 row safe on disk") for line in lines)
    assert any("1 reading or event from earlier is still to go" in line for line in lines)
    assert any(" 1 reading or event is safe on this box" in line for line in uplink(glance(DOWN, rows=1)))
    found = structs.replace(glance(None).buffer_status, devices=(DeviceStatus("42", "b", 1, None),))
    assert "devices     1 that sends a sequence of its own" in [*status_lines(glance(None, buffer_status=found))]


def device(name: str, age_s: float | None) -> DeviceStatus:
    now_us = glance(None).now.boottime_us
    seen = None if age_s is None else Moment("boot", now_us - round(age_s * 1e6), None, None)
    return DeviceStatus(name, "b", 1, seen)


def devices(*found: DeviceStatus, answer: dict[str, Any] | None = None) -> list[str]:
    """Lines on devices: the first one, then each further name with the words after it."""
    seen = glance(None, buffer_status=structs.replace(glance(None).buffer_status, devices=found), answer=answer)
    lines = [*status_lines(seen)]
    return lines[next(number for number, line in enumerate(lines) if line.startswith("devices")) :]


def test_the_status_lists_the_devices_that_are_silent_for_longest() -> None:
    few = [device(f"s{number:02}", number / 10) for number in range(DEVICES_MAX)]
    # All in the order of their names, where there is room for all.
    assert [line.split(",")[0].strip() for line in devices(*few)[1:]] == [each.device for each in few]
    first, *shown, rest = devices(*few, device("old", 900), device("unknown", None), device("new", 1.55))
    assert first.startswith("devices     23 that send")
    names = [line.split(",")[0].strip() for line in shown]
    assert len(names) == DEVICES_MAX
    assert names[:3] == ["unknown", "old", "s19"]
    assert rest == "            and 3 more, none older than 1 s (sluice status --json has all)"


def test_sensors_without_a_sequence_are_pointed_to() -> None:
    serial = {"ports": {"/dev/ttyUSB0": {"device": "scale", "acknowledges": False}}, "unopened": {}, "missing": []}
    (line,) = devices(answer={"serial": serial})
    assert line == "devices     none yet that send a sequence of their own (text, formats and Modbus are under serial)"
    (line,) = devices(answer={"serial": serial | {"ports": {"/dev/ttyUSB0": {"device": "attic"}}}})
    assert line == "devices     none yet that send a sequence of their own"


def test_of_a_stopped_gateway_nothing_is_said_of_the_uplink() -> None:
    lines = [*status_lines(glance(None, running=False))]
    assert lines[0] == "gateway     gw1, not running"
    assert any(line.startswith("buffer      18,204 rows safe on disk") for line in lines)
    assert not any("uplink" in line or "Kafka" in line or "room" in line for line in lines)


_texts = st.text(st.characters(), max_size=20)


@given(_texts, _texts, _texts, _texts, st.floats(allow_nan=False))
def test_nothing_that_comes_from_outside_acts_on_a_terminal(
    error: str, topic: str, words: str, reason: str, since: float
) -> None:
    for up in (True, False):
        state = {"up": up, "error": error, "since": since, "parked": {topic: words}, "refused_topics": {topic: words}}
        quota = {"quota_used_up": True, "quota_until": since}
        for each in (state, state | quota):
            seen = glance(each)
            assert seen.answer is not None
            seen.answer["mqtt_listener"] = {reason: 1}
            seen.answer["buffer"]["failing"] = words
            assert all(line.isprintable() for line in status_lines(seen))
