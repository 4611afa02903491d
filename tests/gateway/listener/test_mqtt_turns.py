"""A turn for everybody: whatever one client sends, another one is acted on after a bounded number of its bytes.

Turns are counted, not seconds: how fast the machine is decides nothing here.
"""

import asyncio
import contextlib
import shutil
import socket
import ssl
import time
from asyncio import sslproto
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gateway.listener import turns
from gateway.listener.link import READ_BYTES_MAX
from gateway.listener.listener import MqttListener
from gateway.listener.tls_connection import TlsConnection
from gateway.listener.turns import AHEAD_S, REST_S, ROUND_S, SHARE, TURN_BYTES, TimeShare, Turns
from gateway.mqtt.protocol import Event, ServerProtocol
from gateway.settings import TlsSettings
from gateway.tls.client import client_context
from tests.support.certificates import make_authority
from tests.support.gateways import free_port
from tests.support.mqtt_peers import (
    DISCONNECT,
    PINGREQ,
    PINGRESP,
    RecordingIntake,
    connect,
    connected,
    field,
    listening,
    puback,
    publish,
    publish2,
    pubrel,
)
from tests.support.waiting import patience, until

NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
RIVAL = "127.0.0.2"
ATTACKERS = 3
ROUNDS = 3
"""The one under way, the next one, and one more where the good sensor has used its own share."""


class Acted:
    """Bytes that were acted on, in order, with their connection. `names` are known once a connection's CONNECT came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[tuple[ServerProtocol, int]] = []
        self._named: dict[ServerProtocol, str] = {}
        receive = ServerProtocol.receive

        def receiving(protocol: ServerProtocol, data: bytes) -> list[Event]:
            events = receive(protocol, data)
            for event in events[:1]:
                if client_id := getattr(event, "client_id", ""):
                    self._named[protocol] = client_id
            self.pieces.append((protocol, len(data)))
            return events

        monkeypatch.setattr(ServerProtocol, "receive", receiving)

    def since(self, begin: int) -> Iterator[tuple[str, int]]:
        for protocol, count in self.pieces[begin:]:
            yield self._named.get(protocol, ""), count

    def bytes_before(self, name: str, begin: int) -> int:
        """Bytes that were acted on up to the first one of `name`, which counts too; 0 if there is none yet."""
        total = 0
        for whose, count in self.since(begin):
            total += count
            if whose == name:
                return total
        return 0


class Sensor:
    """A client on a bare socket, which is never waited for; over TLS with a context."""

    def __init__(self, port: int, name: str, context: ssl.SSLContext | None = None) -> None:
        bare = socket.create_connection(("127.0.0.1", port))
        self.socket = bare if context is None else context.wrap_socket(bare, do_handshake_on_connect=False)
        self.socket.setblocking(False)
        self.name = name

    async def begin(self) -> None:
        if isinstance(self.socket, ssl.SSLSocket):
            await until(self._has_shaken_hands)
        self.socket.send(connect(self.name, keep_alive_s=0))
        await until(self._hears)

    def _has_shaken_hands(self) -> bool:
        assert isinstance(self.socket, ssl.SSLSocket)
        with contextlib.suppress(ssl.SSLWantReadError):
            self.socket.do_handshake()
            return True
        return False

    def _hears(self) -> bytes:
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            return self.socket.recv(65_536)
        return b""

    def flood(self, flood: bytes) -> None:
        """Take all answers, and send until the network takes no more."""
        while self._hears():
            pass
        with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
            while True:
                self._rest = self._rest[self.socket.send(self._rest) :] or flood

    _rest = PINGREQ


FLOODS = {
    "PINGREQ": PINGREQ * 8_000,
    "QoS 0": publish("x", topic="d/m") * 2_000,
    "QoS 1": publish("x", 1, topic="d/m") * 2_000,
    "QoS 2": (publish2("x", 1, topic="d/m") + pubrel(1)) * 1_000,
    "SUBSCRIBE": b"".join(bytes((0x82, len(body))) + body for body in [b"\x00\x01" + field("command/a/#") + b"\x01"])
    * 500,
    "large packets": b"\x30\xe0\xd4\x03" + field("d/m") + bytes(60_000 - 5),
}


async def measured(
    listener: MqttListener, acted: Acted, port: int, flood: bytes, context: ssl.SSLContext | None = None
) -> list[int]:
    """Bytes of the attackers that are acted on between each sending of a good sensor and its turn."""
    attackers = [Sensor(port, f"bad{number}", context) for number in range(ATTACKERS)]
    good = Sensor(port, "good", context)
    for sensor in (*attackers, good):
        await sensor.begin()

    def pumped(enough: Callable[[], bool]) -> bool:
        for attacker in attackers:
            attacker.flood(flood)
        return enough()

    # Until each has used its share.
    begin = len(acted.pieces)
    await until(lambda: pumped(lambda: sum(count for _, count in acted.since(begin)) > 400_000))
    waits = []
    for number in range(1, 11):
        pumped(lambda: True)
        begin = len(acted.pieces)
        good.socket.send(publish("good", number, topic="d/good"))
        waits.append(await until(partial(acted.bytes_before, "good", begin)))
    for sensor in (*attackers, good):
        sensor.socket.close()
    await until(lambda: not listener.shared.connections)
    return waits


@pytest.mark.slow
@pytest.mark.parametrize("flood", FLOODS)
async def test_a_good_sensor_waits_for_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch, flood: str) -> None:
    acted = Acted(monkeypatch)
    async with listening(RecordingIntake()) as listener:
        waits = await measured(listener, acted, listener.port, FLOODS[flood])
    assert max(waits) <= ROUNDS * ATTACKERS * READ_BYTES_MAX, waits


@pytest.fixture
def tls_site(tmp_path: Path) -> tuple[TlsSettings, ssl.SSLContext]:
    authority = make_authority(tmp_path / "ca")
    server = authority.sign("server")
    context = client_context(authority.certificate, None, None)
    context.check_hostname = False
    return TlsSettings(server.certificate, server.key, free_port()), context


def hello(context: ssl.SSLContext) -> bytes:
    """The beginning of a client's handshake."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


class Computed:
    """Addresses whose TLS was computed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost_s: float = 0.0) -> None:
        self.hosts: list[str] = []
        self.bytes: list[int] = []
        compute = sslproto.SSLProtocol.buffer_updated

        def computing(connection: sslproto.SSLProtocol, count: int) -> None:
            # Clients in this process are others.
            if isinstance(connection, TlsConnection):
                self.hosts.append(connection.peer.rpartition(":")[0])
                self.bytes.append(count)
                time.sleep(cost_s)
            compute(connection, count)

        monkeypatch.setattr(sslproto.SSLProtocol, "buffer_updated", computing)


@NEEDS_OPENSSL
async def test_it_does_so_over_tls(
    monkeypatch: pytest.MonkeyPatch, tls_site: tuple[TlsSettings, ssl.SSLContext]
) -> None:
    acted, computed = Acted(monkeypatch), Computed(monkeypatch)
    tls, context = tls_site
    async with listening(RecordingIntake(), 0, tls=tls) as listener:
        waits = await measured(listener, acted, tls.port, FLOODS["PINGREQ"], context)
    assert max(computed.bytes) <= TURN_BYTES
    assert max(waits) <= ROUNDS * ATTACKERS * READ_BYTES_MAX, waits


@NEEDS_OPENSSL
async def test_a_good_sensors_handshake_waits_for_few_of_another_host(
    monkeypatch: pytest.MonkeyPatch, tls_site: tuple[TlsSettings, ssl.SSLContext]
) -> None:
    """A hundred of them came before it did. Each of its own reads waits for one of theirs."""
    (tls, context), rivals = tls_site, 100
    monkeypatch.setattr(turns, "AHEAD_S", -1e12)
    computed = Computed(monkeypatch, ROUND_S)
    async with listening(RecordingIntake(), 0, tls=tls) as listener:
        with contextlib.ExitStack() as held:
            for _ in range(rivals):
                made = held.enter_context(socket.create_connection(("127.0.0.1", tls.port), source_address=(RIVAL, 0)))
                made.sendall(hello(context))
            await until(lambda: computed.hosts)
            reader, writer = await asyncio.open_connection("127.0.0.1", tls.port, ssl=context)
            writer.write(connect("good", keep_alive_s=0))
            assert (await reader.readexactly(4))[3] == 0
            until_in = computed.hosts[: len(computed.hosts) - computed.hosts[::-1].index("127.0.0.1")]
            since = until_in[until_in.index("127.0.0.1") :]
            assert since.count(RIVAL) <= since.count("127.0.0.1") + 1, since
            assert until_in.count(RIVAL) < rivals / 2, until_in
            writer.transport.abort()
    assert listener.counts["connected"] == 1


@NEEDS_OPENSSL
async def test_tls_is_charged_once_and_to_the_address_until_a_client_has_logged_in(
    monkeypatch: pytest.MonkeyPatch, tls_site: tuple[TlsSettings, ssl.SSLContext]
) -> None:
    (tls, context), cost_s = tls_site, 0.05
    Computed(monkeypatch, cost_s)
    async with listening(RecordingIntake(), 0, tls=tls) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", tls.port, ssl=context)
        (made,) = listener._tls_connections
        source = made._caller.source
        begun_s = time.monotonic()
        writer.write(connect("good", keep_alive_s=0))
        assert (await reader.readexactly(4))[3] == 0
        handshake_s = source.time_share.work_s
        assert 2 * cost_s <= handshake_s
        own = made._caller.time_share
        assert own is not source.time_share
        assert own.work_s == 0
        for number in range(1, 4):
            writer.write(publish("x", number, topic="d/m"))
            assert await reader.readexactly(4) == puback(number)
        assert 3 * cost_s <= own.work_s <= time.monotonic() - begun_s
        assert source.time_share.work_s == handshake_s
        writer.transport.abort()


@NEEDS_OPENSSL
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda version: version.name)
async def test_nobody_shakes_hands_twice_on_one_connection(
    tls_site: tuple[TlsSettings, ssl.SSLContext], version: ssl.TLSVersion
) -> None:
    """`R` has OpenSSL's client ask for it."""
    tls, _ = tls_site
    async with listening(RecordingIntake(), 0, tls=tls) as listener:
        client = await asyncio.create_subprocess_exec(
            *("openssl", "s_client", "-connect", f"127.0.0.1:{tls.port}", f"-{version.name.lower().replace('v', '')}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert client.stdin is not None
        await until(lambda: any(each._handshake.done() for each in listener._tls_connections))
        client.stdin.write(b"R\n")
        told, _ = await asyncio.wait_for(client.communicate(), patience(10))
        if version is ssl.TLSVersion.TLSv1_2:
            assert b"RENEGOTIATING" in told
            assert b"no renegotiation" in told
        await until(lambda: not listener._tls_connections)


# --- ends -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _everybody_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "AHEAD_S", -1e12)


@pytest.mark.usefixtures("_everybody_in_line")
async def test_what_stands_in_line_at_a_clean_end_is_taken(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        for _ in range(3):
            async with connected(listener, connect(will="gone")) as peer:
                peer.writer.write(b"".join(publish(str(number)) for number in range(700)) + DISCONNECT)
                # Who closes before it has read the answers resets the connection.
                await peer.read_to_end()
        await until(lambda: not listener.shared.connections)
        assert listener.counts["disconnected"] == 3
        assert [reading.datum.payload for reading in intake.stored] == [b"%d" % number for number in range(700)] * 3


@NEEDS_OPENSSL
@pytest.mark.usefixtures("_everybody_in_line")
async def test_the_end_of_tls_overtakes_no_reading_in_line(
    monkeypatch: pytest.MonkeyPatch, intake: RecordingIntake, tls_site: tuple[TlsSettings, ssl.SSLContext]
) -> None:
    """asyncio reads on by itself once the connection inside does, and so can meet the end while bytes wait."""
    tls, context = tls_site
    async with listening(intake, 0, tls=tls) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", tls.port, ssl=context)
        writer.write(connect("sensor"))
        assert (await reader.readexactly(4))[3] == 0
        (made,) = listener._tls_connections
        assert made._underlying is not None
        # So it never has a turn.
        monkeypatch.setattr(made, "_stand_in_line", made._underlying.pause_reading)
        # One record of TLS, which one read takes whole.
        writer.write(b"".join(publish(str(number)) for number in range(200)))
        await until(lambda: made._unread)
        assert not intake.stored
        made.eof_received()
        await until(lambda: not listener.shared.connections)
        assert [reading.datum.payload for reading in intake.stored] == [b"%d" % number for number in range(200)]
        writer.transport.abort()


@pytest.mark.usefixtures("_everybody_in_line")
async def test_a_reset_in_line_and_a_failing_turn_cost_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = ServerProtocol.receive

    def receiving(protocol: ServerProtocol, data: bytes) -> list[Event]:
        if b"fault" in data:
            raise ZeroDivisionError
        return receive(protocol, data)

    monkeypatch.setattr(ServerProtocol, "receive", receiving)
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    intake = RecordingIntake()
    async with (
        listening(intake) as listener,
        connected(listener, connect("reset")) as reset,
        connected(listener, connect("failing")) as failing,
        connected(listener) as good,
    ):
        await until(lambda: listener.counts["connected"] == 3)
        reset.writer.write(publish("r") * 500)
        failing.writer.write(publish("fault") * 10)
        good.writer.write(publish("g", 7))
        reset.vanish()
        assert await good.read(4) == puback(7)
        await failing.read_to_end()
        await until(lambda: len(listener.shared.connections) == 1)
        good.writer.write(PINGREQ)
        assert await good.read(2) == PINGRESP
    assert [type(fault) for fault in faults] == [ZeroDivisionError]


@pytest.mark.usefixtures("_everybody_in_line")
async def test_the_listener_ends_while_some_stand_in_line(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        async with connected(listener) as peer, connected(listener, connect("other")) as other:
            await other.read(4)
            intake.outcome = None
            peer.writer.write(publish("a", 1) * 100)
            # They take more than one turn.
            await until(lambda: sum(len(readings) for readings, _ in intake.batches) == 100)
            listener.shared.stopping = True
            peer.writer.write(publish("b", 2) * 10_000)
            other.writer.write(publish("c", 3) * 10_000)
            intake.decide_all()
            assert await peer.read(400) == puback(1) * 100
        assert not intake.batches


# --- the line itself ------------------------------------------------------------------------------------------


async def order_in_line(*stands: tuple[str, int, TimeShare]) -> str:
    """The order of turns. Each place comes back at once until it has had its number of turns."""
    line, order = Turns(), ""
    loop = asyncio.get_running_loop()

    def stand(name: str, times: int, share: TimeShare) -> None:
        def turn() -> None:
            nonlocal order
            order += name
            if times > 1:
                stand(name, times - 1, share)

        line.stand_in_line(loop, share, turn)

    for each in stands:
        stand(*each)
    await until(lambda: len(order) == sum(times for _, times, _ in stands))
    return order


async def test_the_line_keeps_its_order() -> None:
    assert await order_in_line(("a", 3, TimeShare()), ("b", 2, TimeShare()), ("c", 1, TimeShare())) == "abcaba"


async def test_those_who_have_one_share_have_one_place_in_line() -> None:
    share = TimeShare()
    assert await order_in_line(("a", 2, share), ("b", 2, share), ("x", 3, TimeShare())) == "axbxaxb"


async def test_between_two_rounds_the_loop_is_left_to_others_for_as_long_as_a_round_takes() -> None:
    loop, line, share, rounds, turn_s = asyncio.get_running_loop(), Turns(), TimeShare(), 0, 5 * ROUND_S

    def turn() -> None:
        nonlocal rounds
        rounds += 1
        time.sleep(turn_s)
        if rounds < 20:
            line.stand_in_line(loop, share, turn)

    line.stand_in_line(loop, share, turn)
    began = time.monotonic()
    await until(lambda: rounds == 20)
    assert time.monotonic() - began >= REST_S + 20 * turn_s + 19 * turn_s


async def test_a_turn_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    acted = Acted(monkeypatch)
    monkeypatch.setattr(turns, "AHEAD_S", -1e12)
    async with listening(RecordingIntake()) as listener:
        sensor = Sensor(listener.port, "bad")
        await sensor.begin()
        begin = len(acted.pieces)
        sensor.flood(FLOODS["PINGREQ"])
        await until(lambda: sum(count for _, count in acted.since(begin)) > 20_000)
        assert max(count for _, count in acted.since(begin)) <= TURN_BYTES
        sensor.socket.close()


def test_a_share_is_used_by_a_burst_and_comes_back_with_time() -> None:
    share, burst_s = TimeShare(), AHEAD_S * SHARE
    share.use(100.0, 100.0 + burst_s / 2)
    assert not share.is_used(100.0)
    share.use(100.0, 100.0 + burst_s)
    assert share.is_used(100.0)
    assert not share.is_used(100.0 + AHEAD_S)
    # A connection that never has more than its share never stands in line.
    for second in range(1_000, 1_100):
        share.use(second, second + SHARE)
        assert not share.is_used(second + 1.0)
