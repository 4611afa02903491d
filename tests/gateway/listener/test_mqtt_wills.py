"""Last wills and deaths as the MQTT listener reports them."""

import base64

import pytest

from tests.support.mqtt_peers import (
    ACCEPTED,
    DISCONNECT,
    RecordingIntake,
    connect,
    connected,
    field,
    listening,
    publish,
)
from tests.support.waiting import until


async def test_a_device_appears_once_and_dies_with_its_will_but_not_by_disconnect(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        for number, last in enumerate((DISCONNECT, b"", b"", b"", DISCONNECT)):
            async with connected(listener, connect(will=f"gone {number}") + last) as peer:
                assert await peer.read(4) == ACCEPTED
            await until(lambda: not listener.shared.connections)
        assert len(intake.events) == 2
    # The deaths within a minute after one that was reported are one report: here at the end of the listener.
    assert [event[:2] for event in intake.events] == [("device-appeared", "m001"), *[("device-died", "m001")] * 2]
    died = {"source": "mqtt", "cause": "connection-lost", "will_topic": "status"}
    assert intake.events[1][2] == died | {"will_payload": "gone 1"}
    assert intake.events[2][2] == died | {"will_payload": "gone 3", "ends": 2, "wills_dropped": 1}


@pytest.mark.parametrize(
    ("last", "cause", "kind"),
    [
        (b"", "connection-lost", "device-died"),
        (b"\xc1", "reserved-flags", "device-died"),
        (connect(), "second-connect", "device-died"),
        (publish("x" * 100, 1, "device/#"), "wildcard-in-topic-name", "device-died"),
        (b"wait", "keep-alive-timeout", "device-died"),
        (b"take over", "taken-over", "device-will"),
        (b"refuse", "intake-refused", "device-will"),
        (b"stop", "shutdown", "device-will"),
    ],
)
async def test_a_will_is_published_on_every_end_without_disconnect(last: bytes, cause: str, kind: str) -> None:
    intake = RecordingIntake()
    async with (
        listening(intake) as listener,
        connected(listener, connect(will="gone", keep_alive_s=1), ACCEPTED) as peer,
    ):
        match last:
            case b"wait":
                await peer.read_to_end()
            case b"take over":
                async with connected(listener):
                    await peer.read_to_end()
                    await until(lambda: len(intake.events) > 1)
            case b"refuse":
                intake.outcome = False
                peer.writer.write(publish("a", 1))
                await peer.read_to_end()
            case b"stop":
                pass
            case b"":
                peer.vanish()
            case _:
                peer.writer.write(last)
        if last != b"stop":
            await until(lambda: len(intake.events) > 1)
    assert [(event[0], event[2]["cause"], event[2]["will_payload"]) for event in intake.events[1:2]] == [
        (kind, cause, "gone")
    ]


async def test_a_will_that_is_not_text_or_too_long_says_so(intake: RecordingIntake) -> None:
    will = b"\xff" * 5_000
    body = field("MQTT") + b"\x04\x06\x00\x3c" + field("m001") + field("status") + len(will).to_bytes(2, "big") + will
    first = b"\x10" + bytes((len(body) & 0x7F | 0x80, len(body) >> 7)) + body
    async with listening(intake) as listener:
        async with connected(listener, first) as peer:
            assert await peer.read(4) == ACCEPTED
        await until(lambda: len(intake.events) == 2)
    details = intake.events[1][2]
    assert details["will_bytes"] == 5_000
    assert base64.b64decode(str(details["will_payload_base64"])) == will[:4_096]


async def test_an_anonymous_client_without_an_identifier_has_a_will_too(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        async with connected(listener, connect("", will="gone"), ACCEPTED) as peer:
            peer.vanish()
        await until(lambda: intake.events)
    ((kind, device, details),) = intake.events
    assert (kind, device, details["will_payload"]) == ("device-died", None, "gone")
    assert str(details["peer"]).startswith("127.0.0.1:")
