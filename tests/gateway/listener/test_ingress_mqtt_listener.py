"""The MQTT listener: acknowledgements after the commit, bad input, its ports, and its end."""

import asyncio
import contextlib

import pytest

from gateway.listener.listener import ListenError, MqttListener
from gateway.settings import ListenerSettings
from tests.support.buffers import reading_of
from tests.support.gateways import free_port
from tests.support.mqtt_peers import (
    ACCEPTED,
    DISCONNECT,
    Peer,
    RecordingIntake,
    connect,
    connected,
    listening,
    puback,
    publish,
)
from tests.support.waiting import until


async def test_a_puback_comes_only_after_the_commit(intake: RecordingIntake) -> None:
    intake.outcome = None
    async with listening(intake) as listener, connected(listener) as peer:
        peer.writer.write(publish("21.5", 7))
        await until(lambda: intake.batches)
        assert await peer.silent()
        intake.decide(True)
        assert await peer.read(4) == puback(7)
    assert intake.stored == [reading_of("device/m001/thermo", b"21.5", 123_456)]


async def test_what_one_read_brought_is_one_batch_acknowledged_in_order(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected(listener) as peer:
        intake.outcome = None
        peer.writer.write(publish("a", 9) + publish("b") + publish("c", 3) + publish("d", 5))
        await until(lambda: intake.batches)
        ((readings, _),) = intake.batches
        assert [reading.datum.payload for reading in readings] == [b"a", b"b", b"c", b"d"]
        intake.decide(True)
        assert await peer.read(12) == puback(9, 3, 5)


async def test_a_connect_its_readings_and_the_end_may_come_at_once(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected(listener, connect() + publish("a") + DISCONNECT) as peer:
        assert await peer.read_to_end() == ACCEPTED
        await until(lambda: intake.stored)
    assert listener.counts["disconnected"] == 1


async def test_a_reading_that_is_not_stored_is_not_acknowledged_and_the_client_must_come_again(
    intake: RecordingIntake,
) -> None:
    intake.outcome = False
    async with listening(intake) as listener, connected(listener) as peer:
        peer.writer.write(publish("a", 1) + publish("b") + publish("c", 2))
        assert await peer.read_to_end() == b""
        assert intake.losses == [("m001", "refused-qos0", 1)]
        assert listener.counts["intake-refused"] == 1
        assert [kind for kind, _, _ in intake.events] == ["device-appeared"]


async def test_qos_0_alone_is_counted_as_lost_and_the_connection_stays(intake: RecordingIntake) -> None:
    intake.outcome = False
    async with listening(intake) as listener, connected(listener) as peer:
        peer.writer.write(publish("a") + publish("b"))
        await until(lambda: intake.losses)
        intake.outcome = True
        peer.writer.write(publish("c", 1))
        assert await peer.read(4) == puback(1)
    assert intake.losses == [("m001", "refused-qos0", 2)]


@pytest.mark.parametrize(
    ("data", "reason", "answer"),
    [
        (connect() + publish("a", 1, "device/+/thermo"), "wildcard-in-topic-name", ACCEPTED),
        (connect() + b"\x36\x05\x00\x01t\x00\x01", "qos-3", ACCEPTED),
        (connect() + b"\x60\x02\x00\x01", "reserved-flags", ACCEPTED),
        (connect() + b"\x50\x02\x00\x01", "unexpected-packet", ACCEPTED),
        (connect() + connect(), "second-connect", ACCEPTED),
        (connect() + b"\x30\xff\xff\xff\x7f", "packet-too-large", ACCEPTED),
        (b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n", "http-on-mqtt-port", b""),
    ],
)
async def test_bad_input_is_counted_and_closes_only_its_own_connection(data: bytes, reason: str, answer: bytes) -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, connect("m002"), ACCEPTED) as other:
        async with connected(listener, data) as peer:
            # A close with bytes unread resets the connection, and may take the CONNACK with it.
            assert await peer.read_to_end() in {answer, b""}
        assert listener.counts[reason] == 1
        other.writer.write(publish("a", 1))
        assert await other.read(4) == puback(1)


async def test_a_taken_port_is_named_with_the_setting_to_change() -> None:
    async with listening(RecordingIntake()) as listener:
        other = MqttListener(listener.settings, RecordingIntake(), lambda: 0)
        with pytest.raises(ListenError, match=r"port is taken.*mqtt_listener\.port"):
            await other.run()


async def test_an_address_of_another_machine_is_named_with_the_setting_to_change() -> None:
    settings = ListenerSettings(host="192.0.2.1", port=free_port())
    with pytest.raises(ListenError, match=r"no such address.*mqtt_listener\.host"):
        await MqttListener(settings, RecordingIntake(), lambda: 0).run()


async def test_the_end_of_the_listener_closes_every_connection(intake: RecordingIntake) -> None:
    intake.outcome = None
    async with listening(intake) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(connect() + publish("a", 1))
        await until(lambda: intake.batches)
    intake.decide(True)  # a commit that ends after the connection is of no use to it, and no harm
    assert await Peer(reader, writer).read_to_end() in {ACCEPTED, b""}
    writer.close()
    assert [kind for kind, _, _ in intake.events] == ["device-appeared"]


async def test_a_clean_stop_acknowledges_what_is_being_stored(intake: RecordingIntake) -> None:
    """After a restart, nothing then comes twice without need."""
    intake.outcome = None
    async with contextlib.AsyncExitStack() as stack:
        async with listening(intake) as listener:
            peer = await stack.enter_async_context(connected(listener))
            peer.writer.write(publish("a", 1))
            await until(lambda: intake.batches)
            asyncio.get_running_loop().call_later(0.2, intake.decide, True)
            # Comes while the listener ends: not taken, and no obstacle to the answer of the first.
            asyncio.get_running_loop().call_later(0.1, peer.writer.write, publish("b", 2))
        assert await peer.read_to_end() == puback(1)
    assert [reading.datum.payload for reading in intake.stored] == [b"a"]
