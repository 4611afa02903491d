"""The MQTT listener as sensors meet it: bare sockets for the rules, paho and mosquitto's clients as real peers."""

import asyncio
import base64
import contextlib
import hashlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from gateway import ingress_mqtt_listener, mqtt_connection
from gateway.ingress_mqtt_listener import ListenError, MqttListener
from gateway.reading import Mark, Reading
from gateway.settings import ListenerSettings

Done = Callable[[bool], None]
CODEWORD = "correct horse"
USERS = {name: hashlib.sha256(CODEWORD.encode()).hexdigest() for name in ("m001", "m002")}


class RecordingIntake:
    """An intake that stores in a list and a dictionary: at once, or when the test says so.

    What it stored outlives a listener: another one over the same intake is the gateway after a restart.
    """

    def __init__(self) -> None:
        self.stored: list[Reading] = []
        self.kept: dict[str, bytes] = {}
        """The marks."""
        self.commits = 0
        self.batches: list[tuple[Sequence[Reading], Done]] = []
        """Taken and not decided, while `outcome` is None."""
        self._marks: list[Sequence[Mark]] = []
        """Of the same batches."""
        self.outcome: bool | None = True
        self.holding = False
        self.losses: list[tuple[str | None, str, int]] = []
        self.events: list[tuple[str, str | None, dict[str, object]]] = []

    def take(self, readings: Sequence[Reading], done: Done, marks: Sequence[Mark] = ()) -> None:
        self.batches.append((readings, done))
        self._marks.append(marks)
        if self.outcome is not None:
            asyncio.get_running_loop().call_soon(self.decide, self.outcome)

    def decide(self, stored: bool) -> None:  # noqa: FBT001 - as `done` has it
        (readings, done), marks = self.batches.pop(0), self._marks.pop(0)
        if stored:
            self.commits += 1
            self.stored += readings
            for key, value in marks:
                if value is None:
                    self.kept.pop(key, None)
                else:
                    self.kept[key] = value
        done(stored)

    def forget_undecided(self) -> None:
        """What was taken and not committed is gone, as after kill -9."""
        self.batches.clear()
        self._marks.clear()

    async def marks(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.kept.items() if key.startswith(prefix)}

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        assert sequences is None, "an MQTT client's sequences are not known here"
        self.losses.append((device, reason, count))

    def event(self, kind: str, device: str | None, **details: object) -> None:
        self.events.append((kind, device, details))


def free_port() -> int:
    """A port that nobody has, below those that the system gives to outgoing connections."""
    while True:
        port = random.randrange(15_000, 32_000)  # noqa: S311 - a port, not a secret
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.asynccontextmanager
async def listening(
    intake: RecordingIntake, port: int | None = None, clock: Callable[[], int] = lambda: 123_456, **settings: Any
) -> AsyncIterator[MqttListener]:
    settings.setdefault("anonymous", True)
    listener = MqttListener(ListenerSettings(port=free_port() if port is None else port, **settings), intake, clock)
    running = asyncio.create_task(listener.run())
    begun = asyncio.create_task(listener.listening.wait())
    try:
        await asyncio.wait((running, begun), timeout=5, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if running.done():
            await running
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
    monkeypatch.setattr(mqtt_connection, "REFUSAL_HOLD_S", 0.3)
    intake = RecordingIntake()
    async with listening(intake) as listener:
        async with connected(listener) as peer:
            intake.outcome, intake.holding = False, True
            peer.writer.write(publish("a", 1))
            await peer.read_to_end()
        intake.outcome, intake.holding = True, False
        async with connected(listener, connect()) as peer:
            assert await peer.read_to_end() == UNAVAILABLE
        await asyncio.sleep(0.3)
        async with connected(listener) as peer:
            peer.writer.write(publish("a", 1))
            assert await peer.read(4) == puback(1)


async def test_one_refusal_of_an_intake_that_stores_turns_nobody_away() -> None:
    """One client's batch that is too much for the queue is no reason to refuse all others."""
    intake = RecordingIntake()
    intake.outcome = False
    async with listening(intake) as listener:
        async with connected(listener) as peer:
            peer.writer.write(publish("a", 1))
            await peer.read_to_end()
        async with connected(listener, connect("m002")) as peer:
            assert await peer.read(4) == ACCEPTED


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
    monkeypatch.setattr(mqtt_connection, "WRITE_STALL_S", 0.3)
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
    monkeypatch.setattr(mqtt_connection, "SPARE_CONNECTIONS", 0)
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
        (connect() + b"\x36\x05\x00\x01t\x00\x01", "qos-3", ACCEPTED),
        (connect() + b"\x60\x02\x00\x01", "reserved-flags", ACCEPTED),
        (connect() + b"\x50\x02\x00\x01", "unexpected-packet", ACCEPTED),
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


async def test_a_device_appears_once_and_dies_with_its_will_but_not_by_disconnect() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        for number, last in enumerate((DISCONNECT, b"", b"", b"", DISCONNECT)):
            async with connected(listener, connect(will=f"gone {number}") + last) as peer:
                assert await peer.read(4) == ACCEPTED
            await until(lambda: not listener.connections)
        assert len(intake.events) == 2
    # The deaths within a minute after one that was reported are one report: here at the end of the listener.
    assert [event[:2] for event in intake.events] == [("device-appeared", "m001"), *[("device-died", "m001")] * 2]
    died = {"source": "mqtt", "cause": "connection-lost", "will_topic": "status"}
    assert intake.events[1][2] == died | {"will_payload": "gone 1"}
    assert intake.events[2][2] == died | {"will_payload": "gone 3", "ends": 2, "wills_dropped": 1}


async def vanish(peer: Peer) -> None:
    """Reset the connection."""
    peer.writer.transport.abort()


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
    async with listening(intake) as listener, connected(listener, connect(will="gone", keep_alive_s=1)) as peer:
        assert await peer.read(4) == ACCEPTED
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
                await vanish(peer)
            case _:
                peer.writer.write(last)
        if last != b"stop":
            await until(lambda: len(intake.events) > 1)
    assert [(event[0], event[2]["cause"], event[2]["will_payload"]) for event in intake.events[1:2]] == [
        (kind, cause, "gone")
    ]


async def test_a_will_that_is_not_text_or_too_long_says_so() -> None:
    intake = RecordingIntake()
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


async def test_an_anonymous_client_without_an_identifier_has_a_will_too() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        async with connected(listener, connect("", will="gone")) as peer:
            assert await peer.read(4) == ACCEPTED
            await vanish(peer)
        await until(lambda: intake.events)
    ((kind, device, details),) = intake.events
    assert (kind, device, details["will_payload"]) == ("device-died", None, "gone")
    assert str(details["peer"]).startswith("127.0.0.1:")


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


async def test_a_clean_stop_acknowledges_what_is_being_stored() -> None:
    """So that after a restart nothing comes twice that need not."""
    intake = RecordingIntake()
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
    assert [reading.payload for reading in intake.stored] == [b"a"]


# --- QoS 2 ------------------------------------------------------------------------------------------------


def publish2(payload: str, packet_id: int, *, dup: bool = False, topic: str = "device/m001/thermo") -> bytes:
    body = field(topic) + packet_id.to_bytes(2, "big") + payload.encode()
    return bytes((0x3C if dup else 0x34, len(body))) + body


def numbered(first: int, *packet_ids: int) -> bytes:
    return b"".join(bytes((first, 2)) + packet_id.to_bytes(2, "big") for packet_id in packet_ids)


def pubrec(*packet_ids: int) -> bytes:
    return numbered(0x50, *packet_ids)


def pubrel(*packet_ids: int) -> bytes:
    return numbered(0x62, *packet_ids)


def pubcomp(*packet_ids: int) -> bytes:
    return numbered(0x70, *packet_ids)


def keeping(client_id: str = "m001", *, login: tuple[str, str] | None = None) -> bytes:
    """A CONNECT without clean session."""
    first = bytearray(connect(client_id, login=login))
    first[9] &= ~0x02
    return bytes(first)


PRESENT = b"\x20\x02\x01\x00"


async def test_pubrec_after_the_commit_of_the_reading_and_pubcomp_after_the_one_that_forgets_its_id() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        assert await peer.read(4) == ACCEPTED
        intake.outcome = None
        peer.writer.write(publish2("21.5", 7))
        await until(lambda: intake.batches)
        assert await peer.silent()
        intake.decide(True)
        assert await peer.read(4) == pubrec(7)
        assert [key.split("/")[:2] for key in intake.kept if "/qos2/" in key] == [["mqtt", "qos2"]]
        peer.writer.write(pubrel(7))
        await until(lambda: intake.batches)
        assert await peer.silent()
        intake.decide(True)
        assert await peer.read(4) == pubcomp(7)
    assert [reading.payload for reading in intake.stored] == [b"21.5"]
    assert not [key for key in intake.kept if "/qos2/" in key]


async def test_all_kinds_in_one_read_are_one_commit_answered_in_order() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        assert await peer.read(4) == ACCEPTED
        commits = intake.commits
        intake.outcome = None
        peer.writer.write(publish2("a", 3) + publish("b", 2) + publish("c") + pubrel(9) + publish2("a", 3, dup=True))
        peer.writer.write(PINGREQ)
        await until(lambda: intake.batches)
        assert await peer.read(2) == PINGRESP
        while intake.batches:
            intake.decide(True)
        assert await peer.read(16) == pubrec(3) + puback(2) + pubcomp(9) + pubrec(3)
        assert intake.commits == commits + 1
    assert [reading.payload for reading in intake.stored] == [b"a", b"b", b"c"]


async def test_a_message_that_comes_again_while_its_first_copy_waits_is_answered_after_that_commit() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping()) as first:
        assert await first.read(4) == ACCEPTED
        intake.outcome = None
        first.writer.write(publish2("a", 1))
        await until(lambda: intake.batches)
        async with connected(listener, keeping() + publish2("a", 1, dup=True)) as second:
            assert await second.read(4) == PRESENT
            await until(lambda: len(intake.batches) == 2)
            assert await second.silent()
            intake.decide(True)
            intake.decide(True)
            assert await second.read(4) == pubrec(1)
    assert [reading.payload for reading in intake.stored] == [b"a"]


async def test_a_message_that_comes_again_is_not_answered_if_its_first_copy_could_not_be_stored() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping()) as first:
        assert await first.read(4) == ACCEPTED
        intake.outcome = None
        first.writer.write(publish2("a", 1))
        await until(lambda: intake.batches)
        async with connected(listener, keeping() + publish2("a", 1, dup=True)) as second:
            await until(lambda: len(intake.batches) == 2)
            intake.decide(False)
            intake.decide(True)
            assert await second.read_to_end() == PRESENT
    assert not intake.stored


async def test_an_unfinished_exchange_survives_kill_9_with_its_session() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        peer.writer.write(publish2("a", 1) + publish2("b", 2))
        assert await peer.read(12) == ACCEPTED + pubrec(1, 2)
        peer.writer.write(pubrel(2))
        assert await peer.read(4) == pubcomp(2)
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        peer.writer.write(publish2("a", 1, dup=True) + pubrel(2) + pubrel(1) + publish2("c", 2))
        assert await peer.read(20) == PRESENT + pubrec(1) + pubcomp(2) + pubcomp(1) + pubrec(2)
    assert [reading.payload for reading in intake.stored] == [b"a", b"b", b"c"]
    assert not any(reading.redelivered for reading in intake.stored)


async def test_clean_session_forgets_the_exchanges_and_says_so_of_what_comes_again() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        async with connected(listener, keeping()) as peer:
            peer.writer.write(publish2("a", 1))
            assert await peer.read(8) == ACCEPTED + pubrec(1)
        async with connected(listener) as peer:
            assert intake.kept == {}
            peer.writer.write(publish2("a", 1, dup=True))
            assert await peer.read(4) == pubrec(1)
    assert [(reading.payload, reading.redelivered) for reading in intake.stored] == [(b"a", False), (b"a", True)]


async def test_the_same_identifier_with_another_message_is_another_message() -> None:
    """A sensor that keeps its session at the gateway and lost its own begins at 1 again."""
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        peer.writer.write(publish2("21.5", 1) + publish2("21.6", 1))
        assert await peer.read(12) == ACCEPTED + pubrec(1, 1)
    assert [reading.payload for reading in intake.stored] == [b"21.5", b"21.6"]


async def test_an_identifier_in_use_and_too_many_of_them_end_the_connection() -> None:
    intake = RecordingIntake()
    async with listening(intake, qos2_unfinished_max=2) as listener:
        async with connected(listener) as peer:
            peer.writer.write(publish2("a", 1) + publish2("b", 2) + publish2("c", 3))
            assert await peer.read_to_end() in {pubrec(1, 2), b""}
        assert listener.counts["too-many-unfinished"] == 1
        async with connected(listener) as peer:
            peer.writer.write(publish2("a", 1) + pubrel(1) + publish2("b", 1))
            await peer.read_to_end()
        assert listener.counts["packet-id-in-use"] == 1


# --- sessions ---------------------------------------------------------------------------------------------


async def test_connack_promises_a_session_only_after_its_commit() -> None:
    intake = RecordingIntake()
    intake.outcome = None
    async with listening(intake) as listener:
        async with connected(listener, keeping() + publish("a", 1) + PINGREQ) as peer:
            await until(lambda: intake.batches)
            assert await peer.silent()
            assert len(intake.batches) == 1
            intake.decide(True)
            assert await peer.read(6) == ACCEPTED + PINGRESP
            await until(lambda: intake.batches)
            intake.decide(True)
            assert await peer.read(4) == puback(1)
        async with connected(listener, keeping()) as peer:
            assert await peer.read(4) == PRESENT
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        assert await peer.read(4) == PRESENT


async def test_a_session_that_cannot_be_stored_is_refused_and_nothing_behind_its_connect_is_taken() -> None:
    intake = RecordingIntake()
    intake.outcome = False
    async with listening(intake) as listener:
        async with connected(listener, keeping() + publish("a", 1)) as peer:
            assert await peer.read_to_end() == UNAVAILABLE
        assert not listener.kept.kept
    assert not intake.stored


async def test_sessions_are_each_users_own() -> None:
    async with listening(RecordingIntake(), anonymous=False, users=USERS) as listener:
        async with connected(listener, keeping("sensor", login=("m001", CODEWORD))) as peer:
            assert await peer.read(4) == ACCEPTED
        async with connected(listener, keeping("sensor", login=("m002", CODEWORD))) as peer:
            assert await peer.read(4) == ACCEPTED


async def test_a_users_sessions_and_connections_are_capped_and_cost_nobody_else_anything() -> None:
    intake = RecordingIntake()
    caps: dict[str, Any] = {"sessions_per_user_max": 2, "connections_per_user_max": 2, "sessions_max": 3}
    one, other = ("m001", CODEWORD), ("m002", CODEWORD)
    async with listening(intake, anonymous=False, users=USERS, **caps) as listener:
        for number in range(5):
            async with connected(listener, keeping(f"c{number}", login=one)) as peer:
                assert await peer.read(4) == ACCEPTED
            await until(lambda: not listener.connections)
        assert listener.counts["session-displaced"] == 3
        assert len(intake.kept) == 2, "their marks go too"
        async with (
            connected(listener, keeping("c3", login=one)) as first,
            connected(listener, keeping("c4", login=one)) as second,
        ):
            assert await first.read(4) == await second.read(4) == PRESENT
            async with connected(listener, connect("more", login=one)) as third:
                assert await third.read_to_end() == UNAVAILABLE
            assert listener.counts["too-many-user-connections"] == 1
            async with connected(listener, connect("more", login=other)) as peer:
                assert await peer.read(4) == ACCEPTED
            async with connected(listener, keeping("c4", login=one)) as peer:
                assert await peer.read(4) == PRESENT, "a take-over is no further connection"
        await until(lambda: not listener.connections)
        async with connected(listener, connect("more", login=one)) as peer:
            assert await peer.read(4) == ACCEPTED


async def test_qos_2_of_a_client_that_lost_its_state_is_stored_and_marked() -> None:
    """It counts from 1 again, and its first reading has the value of one that it never finished."""
    intake = RecordingIntake()
    async with listening(intake) as listener:
        for answer in (ACCEPTED, PRESENT):
            async with connected(listener, keeping() + publish2("21.5", 1)) as peer:
                assert await peer.read(8) == answer + pubrec(1)
    assert [reading.redelivered for reading in intake.stored] == [False, True]


async def test_sessions_are_capped_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_mqtt_listener, "HOUSEKEEPING_INTERVAL_S", 0.02)
    intake = RecordingIntake()
    now_us = 0
    async with listening(intake, sessions_max=1, session_expiry_s=3_600, clock=lambda: now_us) as listener:
        async with connected(listener, keeping("m001")) as peer:
            assert await peer.read(4) == ACCEPTED
            now_us = 3_600_000_000
            async with connected(listener, keeping("m002")) as other:
                assert await other.read_to_end() == UNAVAILABLE
            assert listener.counts["too-many-sessions"] == 1
            await asyncio.sleep(0.1)
            assert listener.kept.kept, "a session does not expire while it is connected"
        await until(lambda: not listener.connections)
        now_us += 3_599_000_000
        await asyncio.sleep(0.1)
        assert listener.kept.kept
        now_us += 1_000_000
        await until(lambda: not listener.kept.kept)
        await until(lambda: not intake.kept)
        async with connected(listener, keeping("m002")) as peer:
            assert await peer.read(4) == ACCEPTED


# --- QoS 1 that comes again -------------------------------------------------------------------------------

COUNTED = b"".join(publish(str(number), number) for number in range(1, 71))
"""A client's packet identifiers have counted up to 70."""


async def leave_unanswered(listener: MqttListener, intake: RecordingIntake, first: bytes, payload: str) -> None:
    """Have a reading stored after its connection is gone: packet identifier 71."""
    async with connected(listener, first + COUNTED) as peer:
        await peer.read(4 + 4 * 70)
        intake.outcome = None
        peer.writer.write(publish(payload, 71))
        await until(lambda: intake.batches)
        await vanish(peer)
    await until(lambda: not listener.connections)
    intake.decide(True)
    intake.outcome = True


def again(payload: str, packet_id: int) -> bytes:
    data = bytearray(publish(payload, packet_id))
    data[0] |= 0x08
    return bytes(data)


@pytest.mark.parametrize("first", [connect(), keeping()])
async def test_a_reading_stored_without_an_answer_is_recognised_on_the_next_connection(first: bytes) -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        await leave_unanswered(listener, intake, first, "21.5")
        stored = len(intake.stored)
        async with connected(listener, first + again("21.5", 71)) as peer:
            assert (await peer.read(8))[4:] == puback(71)
        assert listener.counts["redelivery-recognised"] == 1
    assert len(intake.stored) == stored


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (publish("21.5", 71), "without DUP it is a new reading"),
        (again("21.6", 71), "another value"),
        (again("21.5", 70), "that one was answered, so this is another"),
    ],
)
async def test_whatever_is_in_doubt_is_stored(later: bytes, why: str) -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        await leave_unanswered(listener, intake, connect(), "21.5")
        stored = len(intake.stored)
        async with connected(listener, connect() + later) as peer:
            await peer.read(8)
    assert len(intake.stored) == stored + 1, why
    assert intake.stored[-1].redelivered == (later[0] & 0x08 != 0)


async def test_qos_0_does_not_count_as_an_identifier() -> None:
    """Its readings among others neither begin a client's counting nor break it."""
    intake = RecordingIntake()
    async with listening(intake) as listener:
        async with connected(listener, connect() + publish("x") * 10 + publish("21.5", 70)) as peer:
            intake.outcome = None
            await until(lambda: intake.batches)
            await vanish(peer)
        await until(lambda: not listener.connections)
        intake.decide(True)
        intake.outcome = True
        async with connected(listener, connect() + again("21.5", 70)) as peer:
            assert await peer.read(8) == ACCEPTED + puback(70)
        assert len(intake.stored) == 12, "70 was not reached by counting, so that this may be another one"
        async with connected(listener, connect() + publish("x") + COUNTED + publish("x")) as peer:
            await peer.read(4 + 4 * 70)
            intake.outcome = None
            peer.writer.write(publish("x") + publish("21.5", 71) + publish("x"))
            await until(lambda: intake.batches)
            await vanish(peer)
        await until(lambda: not listener.connections)
        intake.decide(True)
        intake.outcome = True
        async with connected(listener, connect() + again("21.5", 71)) as peer:
            assert await peer.read(8) == ACCEPTED + puback(71)
        assert listener.counts["redelivery-recognised"] == 1


async def test_only_the_very_next_connection_may_send_again() -> None:
    """The sensor restarted in between: its reading under the same identifier is another one, of the same value."""
    intake = RecordingIntake()
    async with listening(intake) as listener:
        await leave_unanswered(listener, intake, connect(), "21.5")
        stored = len(intake.stored)
        async with connected(listener):
            pass  # here its first try was lost
        async with connected(listener, connect() + again("21.5", 71)) as peer:
            await peer.read(8)
    assert len(intake.stored) == stored + 1


async def test_an_identifier_that_a_restarted_sensor_would_use_is_not_trusted() -> None:
    """As before, and the gateway never saw the connection in between, on which the first try was lost."""
    intake = RecordingIntake()
    async with listening(intake) as listener:
        async with connected(listener) as peer:
            intake.outcome = None
            peer.writer.write(publish("21.5", 1))
            await until(lambda: intake.batches)
            await vanish(peer)
        await until(lambda: not listener.connections)
        intake.decide(True)
        intake.outcome = True
        async with connected(listener, connect() + again("21.5", 1)) as peer:
            assert await peer.read(8) == ACCEPTED + puback(1)
    assert [(reading.payload, reading.redelivered) for reading in intake.stored] == [(b"21.5", False), (b"21.5", True)]


# --- back-pressure ----------------------------------------------------------------------------------------


async def test_while_the_buffer_holds_readings_wait_and_pings_are_answered() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, connect(keep_alive_s=1)) as peer:
        assert await peer.read(4) == ACCEPTED
        intake.outcome, intake.holding = None, True
        for number in range(1, 8):
            peer.writer.write(publish("a", number) + publish("qos 0") + PINGREQ)
            assert await peer.read(2) == PINGRESP
            await asyncio.sleep(0.3)
        async with connected(listener, connect("m002")) as other:
            assert await other.read_to_end() == UNAVAILABLE
        assert intake.losses == [("m001", "refused-qos0", 1)] * 7
        intake.holding = False
        while intake.batches:
            intake.decide(True)
        assert await peer.read(28) == puback(*range(1, 8))
    assert [reading.payload for reading in intake.stored] == [b"a"] * 7


@pytest.mark.parametrize(
    "cap", [{"inflight_bytes_max": 1_000}, {"inflight_messages_max": 3}, {"inflight_bytes_total_max": 1_000}]
)
async def test_beyond_a_cap_while_the_buffer_holds_the_connection_is_closed(cap: dict[str, Any]) -> None:
    intake = RecordingIntake()
    async with listening(intake, **cap) as listener, connected(listener) as peer:
        intake.outcome, intake.holding = None, True
        peer.writer.write(publish("a", 1))
        await until(lambda: intake.batches)
        peer.writer.write(PINGREQ)
        assert await peer.read(2) == PINGRESP
        peer.writer.write(b"".join(publish("b", number) for number in range(2, 7)))
        assert await peer.read_to_end() == b""
        assert listener.counts["held-too-much"] == 1
        while intake.batches:
            intake.decide(True)
        assert listener.inflight_bytes == 0


async def test_a_paused_connection_is_closed_when_the_buffer_begins_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_mqtt_listener, "HOUSEKEEPING_INTERVAL_S", 0.02)
    intake = RecordingIntake()
    intake.outcome = None
    async with listening(intake, inflight_messages_max=1) as listener, connected(listener) as peer:
        peer.writer.write(publish("a", 1) + publish("b", 2))
        await until(lambda: listener.paused)
        assert await peer.silent()
        intake.holding = True
        assert await peer.read_to_end() == b""


async def test_with_the_total_exceeded_while_the_buffer_holds_nothing_more_is_taken() -> None:
    intake = RecordingIntake()
    async with (
        listening(intake, inflight_bytes_total_max=1_000) as listener,
        connected(listener) as one,
        connected(listener, connect("m002")) as two,
    ):
        assert await two.read(4) == ACCEPTED
        intake.outcome, intake.holding = None, True
        one.writer.write(publish("x" * 100, 1) * 10)
        await one.read_to_end()
        assert len(intake.batches) == 1
        two.writer.write(publish("y", 1))
        assert await two.read_to_end() == b""
        assert len(intake.batches) == 1
        assert listener.counts["held-too-much"] == 2
        intake.decide(True)


async def test_what_all_connections_have_waiting_is_bounded_by_the_total_and_one_read() -> None:
    """A read of tiny readings weighs far more than its bytes, and each of many connections may bring one."""
    intake = RecordingIntake()
    tiny = b"\x32\x07\x00\x03d/m\x00\x01"
    flood = tiny * (65_536 // len(tiny))
    one_read = len(flood) + 200 * (len(flood) // len(tiny))
    async with listening(intake, inflight_bytes_total_max=3_000_000) as listener, contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(connected(listener, connect(f"m{number}"))) for number in range(12)]
        for peer in peers:
            assert await peer.read(4) == ACCEPTED
        intake.outcome = None
        for peer in peers:
            peer.writer.write(flood)
        await until(lambda: len(listener.paused) == len(peers))
        assert 3_000_000 < listener.inflight_bytes <= 3_000_000 + one_read
        intake.outcome = True
        while intake.batches:
            intake.decide(True)
        for peer in peers:
            assert await peer.read(4 * (len(flood) // len(tiny))) == puback(1) * (len(flood) // len(tiny))
        assert listener.inflight_bytes == 0
        assert not listener.paused


async def test_marks_weigh_with_what_waits_for_its_commit() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        assert await peer.read(4) == ACCEPTED
        intake.outcome = None
        data = b"".join(publish2("a", number) for number in range(1, 11))
        peer.writer.write(data)
        await until(lambda: intake.batches)
        assert listener.inflight_bytes == len(data) + 10 * (200 + 100 + 8)
        intake.decide(True)
