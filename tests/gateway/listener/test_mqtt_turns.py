"""A turn for everybody: whatever one client sends, another one is acted on after a bounded number of its bytes.

Turns are counted, not seconds: how fast the machine is decides nothing here.
"""

import asyncio
import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gateway.listener import turns
from gateway.listener.link import READ_BYTES_MAX
from gateway.listener.listener import MqttListener
from gateway.listener.turns import AHEAD_S, REST_S, ROUND_S, SHARE, TURN_BYTES, Share, Turns
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
from tests.support.waiting import until

ATTACKERS = 3
ROUNDS = 3
"""The one under way, the next one, and one more where the good sensor has used its own share."""


class Acted:
    """What was acted on, in order: whose bytes, and how many. `names` are known once a connection's CONNECT came."""

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
        """How many bytes were acted on until one of `name` was, that one counted; 0 where none was yet."""
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
    """How many bytes of the attackers are acted on, each time, between a good sensor's sending and its turn."""
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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_it_does_so_over_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    acted = Acted(monkeypatch)
    authority = make_authority(tmp_path / "ca")
    server = authority.sign("server")
    context = client_context(authority.certificate, None, None)
    context.check_hostname = False
    tls = TlsSettings(server.certificate, server.key, free_port())
    async with listening(RecordingIntake(), 0, tls=tls) as listener:
        waits = await measured(listener, acted, tls.port, FLOODS["PINGREQ"], context)
    assert max(waits) <= ROUNDS * ATTACKERS * READ_BYTES_MAX, waits


# --- ends -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _everybody_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "AHEAD_S", -1e12)


@pytest.mark.usefixtures("_everybody_in_line")
async def test_what_stands_in_line_at_a_clean_end_is_taken() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        for _ in range(3):
            async with connected(listener, connect(will="gone")) as peer:
                peer.writer.write(b"".join(publish(str(number)) for number in range(700)) + DISCONNECT)
                # Who closes before it has read the answers resets the connection.
                await peer.read_to_end()
        await until(lambda: not listener.shared.connections)
        assert listener.counts["disconnected"] == 3
        assert [reading.payload for reading in intake.stored] == [b"%d" % number for number in range(700)] * 3


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
async def test_the_listener_ends_while_some_stand_in_line() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        async with connected(listener) as peer, connected(listener, connect("other")) as other:
            await other.read(4)
            intake.outcome = None
            peer.writer.write(publish("a", 1) * 100)
            await until(lambda: intake.batches)
            listener.shared.stopping = True
            peer.writer.write(publish("b", 2) * 10_000)
            other.writer.write(publish("c", 3) * 10_000)
            intake.decide_all()
            assert await peer.read(400) == puback(1) * 100
        assert not intake.batches


# --- the line itself ------------------------------------------------------------------------------------------


async def order_in_line(*stands: tuple[str, int, Share]) -> str:
    """Whose turns came in which order, where each comes back at once until it has had so many."""
    line, order = Turns(), ""
    loop = asyncio.get_running_loop()

    def stand(name: str, times: int, share: Share) -> None:
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
    assert await order_in_line(("a", 3, Share()), ("b", 2, Share()), ("c", 1, Share())) == "abcaba"


async def test_those_who_have_one_share_have_one_place_in_line() -> None:
    share = Share()
    assert await order_in_line(("a", 2, share), ("b", 2, share), ("x", 3, Share())) == "axbxaxb"


async def test_between_two_rounds_the_loop_is_left_to_others_for_as_long_as_a_round_takes() -> None:
    loop, line, share, rounds, turn_s = asyncio.get_running_loop(), Turns(), Share(), 0, 5 * ROUND_S

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
    share, burst_s = Share(), AHEAD_S * SHARE
    share.use(100.0, 100.0 + burst_s / 2)
    assert not share.is_used(100.0)
    share.use(100.0, 100.0 + burst_s)
    assert share.is_used(100.0)
    assert not share.is_used(100.0 + AHEAD_S)
    # A connection that never has more than its share never stands in line.
    for second in range(1_000, 1_100):
        share.use(second, second + SHARE)
        assert not share.is_used(second + 1.0)
