"""The MQTT listener as sensors meet it: bare sockets for the rules, paho and mosquitto's clients as real peers."""

import asyncio
import contextlib
import hashlib
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from gateway import ingress_mqtt_listener
from gateway.ingress_mqtt_listener import ListenError, MqttListener
from gateway.reading import Reading
from gateway.settings import ListenerSettings

Done = Callable[[bool], None]
CODEWORD = "correct horse"
USERS = {name: hashlib.sha256(CODEWORD.encode()).hexdigest() for name in ("m001", "m002")}


class RecordingIntake:
    """An intake that stores in a list: at once, or when the test says so."""

    def __init__(self) -> None:
        self.stored: list[Reading] = []
        self.batches: list[tuple[Sequence[Reading], Done]] = []
        """Taken and not decided, while `outcome` is None."""
        self.outcome: bool | None = True
        self.losses: list[tuple[str | None, str, int]] = []
        self.events: list[tuple[str, str | None, dict[str, object]]] = []

    def take(self, readings: Sequence[Reading], done: Done) -> None:
        self.batches.append((readings, done))
        if self.outcome is not None:
            asyncio.get_running_loop().call_soon(self.decide, self.outcome)

    def decide(self, stored: bool) -> None:  # noqa: FBT001 - as `done` has it
        readings, done = self.batches.pop(0)
        if stored:
            self.stored += readings
        done(stored)

    def lost(self, device: str | None, reason: str, count: int = 1) -> None:
        self.losses.append((device, reason, count))

    def event(self, kind: str, device: str | None, **details: object) -> None:
        self.events.append((kind, device, details))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def listening(intake: RecordingIntake, port: int | None = None, **settings: Any) -> AsyncIterator[MqttListener]:
    settings.setdefault("anonymous", True)
    listener = MqttListener(ListenerSettings(port=port or free_port(), **settings), intake, lambda: 123_456)
    running = asyncio.create_task(listener.run())
    try:
        async with asyncio.timeout(5):
            await listener.listening.wait()
        yield listener
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert not listener.connections


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


class Peer:
    """A client that sends exactly the bytes it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(5):
            return await self.reader.readexactly(count)

    async def read_to_end(self) -> bytes:
        async with asyncio.timeout(5):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def silent(self, seconds: float = 0.05) -> bool:
        """Tell whether nothing comes for a while."""
        try:
            async with asyncio.timeout(seconds):
                await self.reader.read(1)
        except TimeoutError:
            return True
        return False


def field(text: str) -> bytes:
    return len(text.encode()).to_bytes(2, "big") + text.encode()


def connect(
    client_id: str = "m001", *, keep_alive_s: int = 60, login: tuple[str, str] | None = None, will: str = ""
) -> bytes:
    flags, payload = 0x02, field(client_id)
    if will:
        flags, payload = flags | 0x04, payload + field("status") + field(will)
    if login is not None:
        flags, payload = flags | 0xC0, payload + field(login[0]) + field(login[1])
    body = field("MQTT") + bytes((4, flags)) + keep_alive_s.to_bytes(2, "big") + payload
    return bytes((0x10, len(body))) + body


def publish(payload: str, packet_id: int = 0, topic: str = "device/m001/thermo") -> bytes:
    body = field(topic) + (packet_id.to_bytes(2, "big") if packet_id else b"") + payload.encode()
    return bytes((0x32 if packet_id else 0x30, len(body))) + body


def puback(*packet_ids: int) -> bytes:
    return b"".join(b"\x40\x02" + packet_id.to_bytes(2, "big") for packet_id in packet_ids)


ACCEPTED = b"\x20\x02\x00\x00"
UNAVAILABLE = b"\x20\x02\x00\x03"
PINGREQ, PINGRESP, DISCONNECT = b"\xc0\x00", b"\xd0\x00", b"\xe0\x00"


@contextlib.asynccontextmanager
async def connected(listener: MqttListener, first: bytes | None = None) -> AsyncIterator[Peer]:
    """Connect a socket and send `first`, a CONNECT that is accepted if none is given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    peer = Peer(reader, writer)
    try:
        writer.write(connect() if first is None else first)
        if first is None:
            assert await peer.read(4) == ACCEPTED
        yield peer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


# --- readings and acknowledgements ------------------------------------------------------------------------


async def test_a_puback_comes_only_after_the_commit() -> None:
    intake = RecordingIntake()
    intake.outcome = None
    async with listening(intake) as listener, connected(listener) as peer:
        peer.writer.write(publish("21.5", 7))
        await until(lambda: intake.batches)
        assert await peer.silent()
        intake.decide(True)
        assert await peer.read(4) == puback(7)
    assert intake.stored == [Reading("device/m001/thermo", "device/m001/thermo", b"21.5", 123_456)]


async def test_what_one_read_brought_is_one_batch_acknowledged_in_order() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener) as peer:
        intake.outcome = None
        peer.writer.write(publish("a", 9) + publish("b") + publish("c", 3) + publish("d", 5))
        await until(lambda: intake.batches)
        ((readings, _),) = intake.batches
        assert [reading.payload for reading in readings] == [b"a", b"b", b"c", b"d"]
        intake.decide(True)
        assert await peer.read(12) == puback(9, 3, 5)


async def test_a_connect_its_readings_and_the_end_may_come_at_once() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, connect() + publish("a") + DISCONNECT) as peer:
        assert await peer.read_to_end() == ACCEPTED
        await until(lambda: intake.stored)
    assert listener.counts["disconnected"] == 1


async def test_what_is_not_stored_is_not_acknowledged_and_the_client_must_come_again() -> None:
    intake = RecordingIntake()
    intake.outcome = False
    async with listening(intake) as listener, connected(listener) as peer:
        peer.writer.write(publish("a", 1) + publish("b") + publish("c", 2))
        assert await peer.read_to_end() == b""
        assert intake.losses == [("m001", "refused-qos0", 1)]
        assert listener.counts["intake-refused"] == 1
        assert [kind for kind, _, _ in intake.events] == ["device-appeared"]


async def test_qos_0_alone_is_counted_as_lost_and_the_connection_stays() -> None:
    intake = RecordingIntake()
    intake.outcome = False
    async with listening(intake) as listener, connected(listener) as peer:
        peer.writer.write(publish("a") + publish("b"))
        await until(lambda: intake.losses)
        intake.outcome = True
        peer.writer.write(publish("c", 1))
        assert await peer.read(4) == puback(1)
    assert intake.losses == [("m001", "refused-qos0", 2)]


async def test_while_the_intake_refuses_connack_3_answers_and_then_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingress_mqtt_listener, "REFUSAL_HOLD_S", 0.3)
    intake = RecordingIntake()
    intake.outcome = False
    async with listening(intake) as listener:
        async with connected(listener) as peer:
            peer.writer.write(publish("a", 1))
            await peer.read_to_end()
        async with connected(listener, connect()) as peer:
            assert await peer.read_to_end() == UNAVAILABLE
        intake.outcome = True
        await asyncio.sleep(0.3)
        async with connected(listener) as peer:
            peer.writer.write(publish("a", 1))
            assert await peer.read(4) == puback(1)


async def test_a_flood_waits_in_the_network_while_its_commit_takes_long() -> None:
    intake = RecordingIntake()
    intake.outcome = None
    one = publish("x" * 100)
    count = 100_000
    async with (
        listening(intake, inflight_bytes_max=100_000) as listener,
        connected(listener, connect(keep_alive_s=1)) as peer,
    ):
        assert await peer.read(4) == ACCEPTED
        peer.writer.write(one * count)
        await until(lambda: intake.batches)
        # Longer than 1.5 times the keep-alive: silence of our own making is not held against the client.
        await asyncio.sleep(1.8)
        assert listener.inflight_bytes < 100_000 + 262_144 * (1 + 200 / len(one))
        assert sum(len(readings) for readings, _ in intake.batches) < 10_000
        intake.outcome = True
        intake.decide(True)
        async with asyncio.timeout(20):
            while len(intake.stored) < count:
                while intake.batches:
                    intake.decide(True)
                await asyncio.sleep(0.005)
        assert listener.inflight_bytes == 0


async def test_a_peer_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_mqtt_listener, "WRITE_STALL_S", 0.3)
    async with listening(RecordingIntake()) as listener, connected(listener, connect(keep_alive_s=0)) as peer:
        transport = peer.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        with contextlib.suppress(ConnectionError):
            while not listener.counts["write-stall"]:
                peer.writer.write(PINGREQ * 50_000)
                await asyncio.wait_for(peer.writer.drain(), 5)
                await asyncio.sleep(0)
        await until(lambda: listener.counts["write-stall"] == 1)


# --- who may connect --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "answer", "reason"),
    [
        (connect(), b"\x20\x02\x00\x05", "no-credentials"),
        (connect(login=("m001", "wrong")), b"\x20\x02\x00\x04", "bad-credentials"),
        (connect(login=("m003", CODEWORD)), b"\x20\x02\x00\x04", "bad-credentials"),
        (connect(login=("m001", "")), b"\x20\x02\x00\x04", "bad-credentials"),
    ],
)
async def test_whoever_is_not_known_is_refused_and_nothing_of_theirs_is_taken(
    first: bytes, answer: bytes, reason: str
) -> None:
    intake = RecordingIntake()
    async with listening(intake, anonymous=False, users=USERS) as listener:
        async with connected(listener, first + publish("a", 1)) as peer:
            assert await peer.read_to_end() == answer
        assert listener.counts[reason] == 1
    assert not intake.stored
    assert not intake.events


async def test_a_reading_carries_the_device_that_its_sender_may_write_as() -> None:
    intake = RecordingIntake()
    async with (
        listening(intake, anonymous=False, users=USERS) as listener,
        connected(listener, connect("any", login=("m001", CODEWORD)) + publish("a", 1)) as peer,
    ):
        assert await peer.read(8) == ACCEPTED + puback(1)
    assert [reading.writer for reading in intake.stored] == ["m001"]


async def test_the_same_client_identifier_takes_the_connection_over() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener) as older, connected(listener) as newer:
        assert await older.read_to_end() == b""
        newer.writer.write(publish("a", 1))
        assert await newer.read(4) == puback(1)
        assert listener.counts["taken-over"] == 1
        assert [kind for kind, _, _ in intake.events] == ["device-appeared"]


async def test_nobody_takes_over_another_users_connection() -> None:
    async with (
        listening(RecordingIntake(), anonymous=False, users=USERS) as listener,
        connected(listener, connect("sensor", login=("m001", CODEWORD))) as one,
        connected(listener, connect("sensor", login=("m002", CODEWORD))) as other,
    ):
        assert await one.read(4) == ACCEPTED
        assert await other.read(4) == ACCEPTED
        one.writer.write(PINGREQ)
        assert await one.read(2) == PINGRESP


async def test_clients_without_an_identifier_do_not_disturb_each_other() -> None:
    async with (
        listening(RecordingIntake()) as listener,
        connected(listener, connect("")) as one,
        connected(listener, connect("")) as other,
    ):
        assert await one.read(4) == ACCEPTED
        assert await other.read(4) == ACCEPTED
        assert len(listener.sessions) == 2


async def test_beyond_connections_max_connack_3_but_a_known_client_may_come_again() -> None:
    async with listening(RecordingIntake(), connections_max=1) as listener, connected(listener):
        async with connected(listener, connect("m002")) as peer:
            assert await peer.read_to_end() == UNAVAILABLE
        assert listener.counts["too-many-connections"] == 1
        async with connected(listener) as again:
            again.writer.write(PINGREQ)
            assert await again.read(2) == PINGRESP


async def test_far_beyond_connections_max_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_mqtt_listener, "SPARE_CONNECTIONS", 0)
    async with (
        listening(RecordingIntake(), connections_max=1) as listener,
        connected(listener),
        connected(listener, connect("m002")) as peer,
    ):
        assert await peer.read_to_end() == b""


# --- time-outs, bad input, ends ---------------------------------------------------------------------------


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with (
        listening(RecordingIntake(), connect_timeout_s=0.1) as listener,
        connected(listener, b"\x10") as peer,
    ):
        assert await peer.read_to_end() == b""
        assert listener.counts["connect-timeout"] == 1


async def test_keep_alive_closes_the_silent_and_not_the_pinging() -> None:
    intake = RecordingIntake()
    async with (
        listening(intake) as listener,
        connected(listener, connect("silent", keep_alive_s=1)) as silent,
        connected(listener, connect("pinging", keep_alive_s=1)) as pinging,
        connected(listener, connect("unbound", keep_alive_s=0)) as unbound,
    ):
        for _ in range(4):
            await asyncio.sleep(0.5)
            pinging.writer.write(PINGREQ)
        assert await silent.read_to_end() == ACCEPTED
        assert await pinging.read(4 + 8) == ACCEPTED + 4 * PINGRESP
        unbound.writer.write(PINGREQ)
        assert await unbound.read(6) == ACCEPTED + PINGRESP
        assert listener.counts["keep-alive-timeout"] == 1
        assert [(kind, device) for kind, device, _ in intake.events][3:] == [("device-died", "silent")]


@pytest.mark.parametrize(
    ("data", "reason", "answer"),
    [
        (connect() + publish("a", 1, "device/+/thermo"), "wildcard-in-topic-name", ACCEPTED),
        (connect() + b"\x34\x05\x00\x01t\x00\x01", "qos2-unsupported", ACCEPTED),
        (connect() + connect(), "second-connect", ACCEPTED),
        (connect() + b"\x30\xff\xff\xff\x7f", "packet-too-large", ACCEPTED),
        (b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n", "first-packet-not-connect", b""),
    ],
)
async def test_bad_input_is_counted_and_closes_only_its_own_connection(data: bytes, reason: str, answer: bytes) -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, connect("m002")) as other:
        assert await other.read(4) == ACCEPTED
        async with connected(listener, data) as peer:
            # A close with bytes unread resets the connection, and may take the CONNACK with it.
            assert await peer.read_to_end() in {answer, b""}
        assert listener.counts[reason] == 1
        other.writer.write(publish("a", 1))
        assert await other.read(4) == puback(1)


async def test_there_is_nothing_to_subscribe_to() -> None:
    async with listening(RecordingIntake()) as listener, connected(listener) as peer:
        peer.writer.write(b"\x82\x0a\x00\x05\x00\x01a\x00\x00\x01b\x01")
        assert await peer.read(6) == b"\x90\x04\x00\x05\x80\x80"
        peer.writer.write(b"\xa2\x05\x00\x06\x00\x01a")
        assert await peer.read(4) == b"\xb0\x02\x00\x06"


async def test_a_device_appears_once_and_dies_with_its_will_but_not_by_disconnect() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        for last in (DISCONNECT, b"", b""):
            async with connected(listener, connect(will="gone") + last) as peer:
                assert await peer.read(4) == ACCEPTED
            await until(lambda: not listener.connections)
    (appeared, died) = intake.events  # a second death within a minute says nothing new
    assert appeared[:2] == ("device-appeared", "m001")
    assert died[:2] == ("device-died", "m001")
    assert died[2] == {
        "source": "mqtt",
        "cause": "connection-lost",
        "will_topic": "status",
        "will_payload": "gone",
    }
    assert listener.counts["death-not-reported"] == 1


async def test_devices_beyond_a_bound_are_counted_instead_of_reported() -> None:
    intake = RecordingIntake()
    async with listening(intake, connections_max=1) as listener:
        for number in range(4):
            async with connected(listener, connect(f"m{number}")) as peer:
                assert await peer.read(4) == ACCEPTED
            await until(lambda: not listener.connections)
    assert [device for kind, device, _ in intake.events if kind == "device-appeared"] == ["m0", "m1"]
    assert listener.counts["device-not-reported"] == 2


async def test_refusals_are_logged_once_and_then_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lines:
        def __init__(self) -> None:
            self.warnings: list[dict[str, object]] = []

        def info(self, line: str, **values: object) -> None:
            """Pass over what is not a refusal."""

        def warning(self, _line: str, **values: object) -> None:
            self.warnings.append(values)

    lines = Lines()
    monkeypatch.setattr(ingress_mqtt_listener, "_log", lines)
    monkeypatch.setattr(ingress_mqtt_listener, "REFUSALS_LOG_INTERVAL_S", 0.3)
    async with listening(RecordingIntake(), anonymous=False, users=USERS) as listener:
        for login in (("m001", "wrong"), ("m001", "wrong"), None):
            async with connected(listener, connect(login=login)) as peer:
                await peer.read_to_end()
        assert [line["reason"] for line in lines.warnings] == ["bad-credentials"]
        await until(lambda: len(lines.warnings) == 2)
        assert lines.warnings[1] == {"reasons": {"bad-credentials": 1, "no-credentials": 1}}


async def test_a_taken_port_is_named_with_the_setting_to_change() -> None:
    async with listening(RecordingIntake()) as listener:
        other = MqttListener(listener.settings, RecordingIntake(), lambda: 0)
        with pytest.raises(ListenError, match=r"port is taken.*mqtt_listener\.port"):
            await other.run()


async def test_an_address_of_another_machine_is_named_with_the_setting_to_change() -> None:
    settings = ListenerSettings(host="192.0.2.1", port=free_port())
    with pytest.raises(ListenError, match=r"no such address.*mqtt_listener\.host"):
        await MqttListener(settings, RecordingIntake(), lambda: 0).run()


async def test_the_end_of_the_listener_closes_every_connection() -> None:
    intake = RecordingIntake()
    intake.outcome = None
    async with listening(intake) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(connect() + publish("a", 1))
        await until(lambda: intake.batches)
    intake.decide(True)  # a commit that ends after the connection is of no use to it, and no harm
    assert await Peer(reader, writer).read_to_end() in {ACCEPTED, b""}
    writer.close()
    assert [kind for kind, _, _ in intake.events] == ["device-appeared"]


# --- real clients -----------------------------------------------------------------------------------------


class Paho:
    """A paho client in its own thread, with what it was told."""

    def __init__(self, client_id: str, protocol: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv311) -> None:
        self.client = Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=protocol)
        self.connack: list[str] = []
        self.disconnected = threading.Event()
        self.subacks: list[bool] = []
        self.client.on_connect = lambda _c, _u, _f, reason, _p: self.connack.append(str(reason))
        self.client.on_disconnect = lambda _c, _u, _f, _r, _p: self.disconnected.set()
        self.client.on_subscribe = lambda _c, _u, _m, reasons, _p: self.subacks.extend(
            reason.is_failure for reason in reasons
        )

    async def start(self, listener: MqttListener, keep_alive_s: int = 60) -> None:
        await asyncio.to_thread(self.client.connect, "127.0.0.1", listener.port, keep_alive_s)
        self.client.loop_start()
        await until(lambda: self.connack)

    async def stop(self) -> None:
        await asyncio.to_thread(self.client.disconnect)
        await asyncio.to_thread(self.client.loop_stop)


async def test_paho_publishes_with_qos_0_and_1() -> None:
    intake = RecordingIntake()
    async with listening(intake, anonymous=False, users=USERS) as listener:
        paho = Paho("m001")
        paho.client.username_pw_set("m001", CODEWORD)
        await paho.start(listener)
        assert paho.connack == ["Success"]
        sent = [paho.client.publish("device/m001/thermo", str(number), qos=number % 2) for number in range(200)]
        await until(lambda: all(message.is_published() for message in sent))
        await until(lambda: len(intake.stored) == 200)
        await paho.stop()
        await until(lambda: not listener.connections)
    # Each QoS in its order; paho lets QoS 0 overtake what waits for its window of 20.
    numbers = [int(reading.payload) for reading in intake.stored]
    assert [number for number in numbers if number % 2 == 0] == list(range(0, 200, 2))
    assert [number for number in numbers if number % 2 == 1] == list(range(1, 200, 2))
    assert {reading.writer for reading in intake.stored} == {"m001"}
    assert listener.counts["disconnected"] == 1


async def test_paho_sends_again_on_its_next_connection_what_was_not_stored() -> None:
    intake = RecordingIntake()
    intake.outcome = False
    async with listening(intake) as listener:
        paho = Paho("m001")
        paho.client.reconnect_delay_set(1, 1)
        await paho.start(listener)
        message = paho.client.publish("device/m001/thermo", "21.5", qos=1)
        await until(lambda: listener.counts["intake-refused"])
        assert not message.is_published()
        intake.outcome = True
        await until(message.is_published)
        await paho.stop()
    assert [reading.payload for reading in intake.stored] == [b"21.5"]


async def test_paho_keeps_itself_alive_and_may_not_subscribe() -> None:
    async with listening(RecordingIntake()) as listener:
        paho = Paho("m001")
        await paho.start(listener, keep_alive_s=1)
        paho.client.subscribe("device/#", 1)
        await until(lambda: paho.subacks)
        await asyncio.sleep(2)
        assert paho.subacks == [True]
        assert not paho.disconnected.is_set()
        await paho.stop()


async def test_pahos_will_is_reported_when_it_vanishes() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        paho = Paho("m001")
        paho.client.will_set("status/m001", "gone", qos=1)
        await paho.start(listener)
        paho.client.loop_stop()
        paho_socket = paho.client.socket()
        assert paho_socket is not None
        paho_socket.close()
        await until(lambda: len(intake.events) == 2)
    kind, device, details = intake.events[1]
    assert (kind, device, details["will_topic"], details["will_payload"]) == (
        "device-died",
        "m001",
        "status/m001",
        "gone",
    )


async def test_paho_with_a_wrong_password_is_told_so() -> None:
    async with listening(RecordingIntake(), anonymous=False, users=USERS) as listener:
        paho = Paho("m001")
        paho.client.username_pw_set("m001", "wrong")
        await paho.start(listener)
        await paho.stop()
        assert paho.connack[0] == "Bad user name or password"


async def test_paho_is_taken_over() -> None:
    async with listening(RecordingIntake()) as listener:
        older, newer = Paho("m001"), Paho("m001")
        older.client.reconnect_delay_set(60, 60)
        await older.start(listener)
        await newer.start(listener)
        await until(older.disconnected.is_set)
        assert newer.client.is_connected()
        await older.stop()
        await newer.stop()


async def test_paho_with_mqtt_5_is_told_the_version_is_not_supported() -> None:
    async with listening(RecordingIntake()) as listener:
        paho = Paho("m001", MQTTProtocolVersion.MQTTv5)
        await paho.start(listener)
        await paho.stop()
        assert paho.connack[0] == "Unsupported protocol version"
        assert listener.counts["unsupported-protocol-level"] >= 1


mosquitto = pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed")


async def mosquitto_pub(listener: MqttListener, *arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        "mosquitto_pub",
        *("-h", "127.0.0.1", "-p", str(listener.port), "-t", "device/m001/thermo", "-m", "21.5", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 10)
    return process.returncode, errors.decode()


@mosquitto
@pytest.mark.parametrize("qos", ["0", "1"])
async def test_mosquitto_pub_publishes(qos: str) -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        assert await mosquitto_pub(listener, "-q", qos, "-V", "311") == (0, "")
        await until(lambda: intake.stored)
    assert [reading.payload for reading in intake.stored] == [b"21.5"]


@mosquitto
@pytest.mark.parametrize("version", ["5", "31"])
async def test_mosquitto_pub_of_another_version_is_told_so(version: str) -> None:
    async with listening(RecordingIntake()) as listener:
        code, errors = await mosquitto_pub(listener, "-q", "1", "-V", version)
        assert code != 0
        assert "protocol version" in errors.lower()
