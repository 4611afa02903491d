"""The firmware's MQTT link on this machine, in a time of its own, between a modem and a gateway in memory."""

import ctypes
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mqtt import protocol
from gateway.mqtt.protocol import (
    PINGRESP,
    Connect,
    ConnectReturnCode,
    PingRequest,
    PubAck,
    Publish,
    ServerProtocol,
    Subscribe,
    Violation,
    acknowledgements,
    connack,
    suback,
)
from sluice_sim.avr import Network, provision
from tests.support.at_modem import AtModem
from tests.support.firmware_host import ACKNOWLEDGED, DROPPED, SENT, TAKEN, HostBoard, load
from tests.support.sizes import size

pytestmark = pytest.mark.avr

WINDOW = 4
RING = 64
OWED = 8
"""Commands whose PUBACK a board may owe."""
IDLE_STEP_MS = 5
"""While nothing is on the line."""
PIECE_BYTES_MAX = 4
"""Bytes that 38400 baud bring in a turn of 1 ms, rounded up."""


@dataclass
class Server:
    """A gateway in memory: it understands by the gateway's own protocol code, and answers as the test wants."""

    answering: bool = True
    greeting: bool = True
    """Whether a CONNECT is answered."""
    refusals: list[ConnectReturnCode] = field(default_factory=list)
    """Return codes for the next CONNECTs."""
    session_kept: bool = True
    reachable: bool = True
    connects: list[tuple[int, Connect]] = field(default_factory=list)
    published: list[tuple[int, Publish]] = field(default_factory=list)
    """All PUBLISHes, with the number of their connection."""
    pings: int = 0
    subscribed: list[tuple[str, int]] = field(default_factory=list)
    """Filter and QoS of each SUBSCRIBE."""
    answered: list[int] = field(default_factory=list)
    """Packet identifiers of commands whose PUBACK came."""
    connections: "list[ServerConnection]" = field(default_factory=list)

    def dial(self, host: str, port: int) -> "ServerConnection | None":
        assert (host, port) == ("gateway.local", 1883)
        if not self.reachable:
            return None
        self.connections.append(ServerConnection(self, len(self.connections)))
        return self.connections[-1]

    def on(self, connection: int) -> list[Publish]:
        return [publish for number, publish in self.published if number == connection]


@dataclass
class ServerConnection:
    server: Server
    number: int
    open: bool = True
    vanished: bool = False
    """The other side is gone without a word: all bytes are lost."""
    protocol: ServerProtocol = field(default_factory=lambda: ServerProtocol(1024))
    outgoing: bytearray = field(default_factory=bytearray)

    def send(self, data: bytes) -> None:
        if self.vanished:
            return
        for event in self.protocol.receive(data):
            self._take(event)

    def take(self) -> bytes:
        given = bytes(self.outgoing)
        self.outgoing.clear()
        return given

    def close(self) -> None:
        self.open = False

    def _take(self, event: object) -> None:
        server = self.server
        match event:
            case Connect():
                code = server.refusals.pop(0) if server.refusals else ConnectReturnCode.ACCEPTED
                present = server.session_kept and bool(server.connects) and code == 0
                server.connects.append((self.number, event))
                if server.greeting:
                    self.outgoing += connack(code, session_present=present)
                self.open = code == 0
            case Publish():
                server.published.append((self.number, event))
                if server.answering:
                    self.outgoing += acknowledgements([event.packet_id])
            case PingRequest():
                server.pings += 1
                if server.answering:
                    self.outgoing += PINGRESP
            case Subscribe():
                server.subscribed += event.filters
                self.outgoing += suback(event.packet_id, [1])
            case PubAck():
                server.answered.append(event.packet_id)
            case Violation():
                self.open = False
            case _:
                raise AssertionError(event)


@dataclass
class Bench:
    board: HostBoard
    server: Server
    modem: AtModem
    sample_ms: int = 1000
    sampling: bool = True
    _to_chip: bytearray = field(default_factory=bytearray)

    def run(self, seconds: float) -> None:
        end_ms = self.board.now_ms + int(seconds * 1000)
        self.until(lambda: self.board.now_ms >= end_ms, seconds + 1)

    def until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        limit_ms = self.board.now_ms + int(seconds * 1000)
        while not condition():
            now_ms = self.board.now_ms + 1
            if not (self._to_chip or self.modem.holds_piece):
                now_ms += -now_ms % IDLE_STEP_MS
            assert now_ms < limit_ms, f"in vain; the modem was told {self.modem.commands[-20:]}"
            if self.sampling and now_ms % self.sample_ms == 0:
                self.board.take(1500 + len(self.board.values))
            piece, self._to_chip[:PIECE_BYTES_MAX] = bytes(self._to_chip[:PIECE_BYTES_MAX]), b""
            sent = self.board.turn(now_ms, piece)
            if sent:
                self.modem.receive(sent, now_ms)
            self._to_chip += self.modem.poll(now_ms)

    def online(self) -> None:
        before = len(self.server.published)
        self.until(lambda: len(self.server.published) > before)

    def drain(self) -> None:
        """Stop sampling, and wait until all that is held is acknowledged."""
        self.sampling = False
        board = self.board
        self.until(lambda: len(board.of(ACKNOWLEDGED)) + len(board.of(DROPPED)) == len(board.of(TAKEN)), 300)

    def readings(self) -> list[dict[str, Any]]:
        """One for each sequence, in order of first arrival."""
        seen: dict[int, dict[str, Any]] = {}
        for _, publish in self.server.published:
            reading = json.loads(publish.payload)
            assert seen.setdefault(reading["seq"], reading) == reading, "a sample is the same each time it is sent"
        return list(seen.values())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    network = Network("gateway.local", 1883, 'site, "A"', "pass\\word", "Zx81")
    return started(tmp_path, network, Server(), seed=7)


def started(folder: Path, network: Network, server: Server, seed: int) -> Bench:
    """A new board, switched on."""
    provision(folder / "s1.eeprom", "s1", network=network)
    board = HostBoard(load("mqtt"))
    board.write_eeprom((folder / "s1.eeprom").read_bytes())
    bench = Bench(board, server, AtModem(server.dial))
    board.start(seed, now_ms=1)
    return bench


# --- The way to the gateway


def test_the_modem_is_led_from_power_on_to_transparent_mode(bench: Bench) -> None:
    bench.online()
    assert bench.modem.commands == [
        "+++",
        "AT",
        "ATE0",
        "AT+CWMODE=1",
        "AT+CIPCLOSE",
        'AT+CWJAP="site\\, \\"A\\"","pass\\\\word"',
        "AT+CIPMODE=1",
        'AT+CIPSTART="TCP","gateway.local",1883',
        "AT+CIPSEND",
    ]
    ((_, connect),) = bench.server.connects
    assert (connect.client_id, connect.user_name, connect.password) == ("s1", "s1", b"Zx81")
    assert (connect.clean_session, connect.keep_alive_s) == (False, 30)
    assert connect.will is not None
    assert (connect.will.topic, connect.will.payload, connect.will.qos) == ("device/s1/status", b'{"status":"lost"}', 1)


def test_samples_come_in_order_once_with_identity_and_tick(bench: Bench) -> None:
    bench.run(20)
    bench.drain()
    ((boot, incarnation),) = bench.board.boots
    readings = bench.readings()
    assert [reading["seq"] for reading in readings] == list(range(len(readings)))
    assert {reading["boot"] for reading in readings} == {f"{boot}-{incarnation:08x}"}
    assert [round(reading["celsius"] * 100) for reading in readings] == list(bench.board.values.values())
    assert all(b["tick"] - a["tick"] == bench.sample_ms for a, b in pairwise(readings))
    assert {(publish.topic, publish.qos, publish.dup) for _, publish in bench.server.published} == {
        ("device/s1/thermo", 1, False)
    }
    assert bench.board.of(ACKNOWLEDGED) == bench.board.of(SENT) == bench.board.of(TAKEN)


def test_the_chip_is_reset_while_the_modem_is_in_transparent_mode(bench: Bench) -> None:
    bench.online()
    bench.server.answering = False
    bench.run(3)
    ids_before = {publish.packet_id for _, publish in bench.server.published}
    bench.server.answering = True
    bench.modem.commands.clear()
    bench.board.start(seed=8)
    bench.online()
    assert bench.modem.commands[0] == "", "the first end of a line; the escape was taken as such"
    assert not bench.server.connections[0].open, "the old connection is closed, not taken for the new one"
    first_of_run = bench.server.on(1)[0]
    assert not first_of_run.dup
    assert json.loads(first_of_run.payload)["boot"].startswith("2-")
    bench.drain()
    assert ids_before.isdisjoint(publish.packet_id for publish in bench.server.on(1))


@pytest.mark.parametrize("state", ["echo off", "half a command", "busy", "restarts", "without power"])
def test_it_works_from_any_state_of_the_modem(bench: Bench, state: str) -> None:
    match state:
        case "echo off":
            bench.modem.receive(b"ATE0\r\n", 0)
        case "half a command":
            bench.modem.receive(b'AT+CWJAP="si', 0)
        case "busy":
            bench.modem.busy_until_ms = 9000
        case "restarts":
            bench.until(lambda: "AT+CIPMODE=1" in bench.modem.commands)
            bench.modem.restart()
        case _:
            bench.modem.powered = False
            bench.run(60)
            bench.modem.powered = True
    bench.online()
    bench.drain()
    attempts = bench.modem.commands.count("+++")
    assert state not in {"busy", "restarts"} or attempts == 1, "it is asked again, and no attempt given up"


def test_a_network_that_is_away_is_tried_after_growing_pauses_until_it_is_back(bench: Bench) -> None:
    bench.modem.wifi = False
    attempts: list[int] = []
    while len(attempts) < 9:
        bench.modem.commands.clear()
        bench.until(lambda: any(command.startswith("AT+CWJAP") for command in bench.modem.commands))
        attempts.append(bench.board.now_ms)
    pauses = [b - a for a, b in pairwise(attempts)]
    for failures, pause in enumerate(pauses):
        mean = 1000 << min(failures, 6)
        assert mean / 2 < pause < mean * 1.5 + 3500, "and the second and more that the escape takes"
    assert 30_000 < pauses[-1] < 100_000, "no longer than a minute and a half"
    bench.modem.wifi = True
    bench.online()
    bench.drain()


def test_boards_that_lose_a_gateway_at_once_do_not_come_back_at_once(tmp_path: Path) -> None:
    third_attempts = set()
    for seed in range(1, 9):
        bench = started(tmp_path, Network("gateway.local"), Server(reachable=False), seed)
        while dials(bench) < 3:
            bench.run(0.1)
        third_attempts.add(bench.board.now_ms // 100)
    assert len(third_attempts) > 5


def dials(bench: Bench) -> int:
    return sum(command.startswith("AT+CIPSTART") for command in bench.modem.commands)


def test_after_five_failures_the_modem_is_restarted(bench: Bench) -> None:
    bench.server.reachable = False
    bench.until(lambda: "AT+RST" in bench.modem.commands, 300)
    assert dials(bench) == 5
    bench.server.reachable = True
    bench.online()


def test_in_an_outage_of_many_hours_the_modem_is_restarted_no_more_often(bench: Bench) -> None:
    bench.server.reachable = False
    for _ in range(300):
        bench.board.library.modem_hang_up(bench.board.now_ms)
    bench.until(lambda: dials(bench) == 10, 1200)
    assert 1 <= bench.modem.commands.count("AT+RST") <= 3


@pytest.mark.parametrize("flipped_bit", [None, 96 * 8, 98 * 8 + 3, 300 * 8])
def test_a_board_that_knows_no_network_leaves_the_modem_alone_and_drops_what_its_ring_cannot_hold(
    tmp_path: Path, flipped_bit: int | None
) -> None:
    board = HostBoard(load("mqtt"))
    if flipped_bit is not None:
        provision(tmp_path / "s1.eeprom", "s1", network=Network())
        image = bytearray((tmp_path / "s1.eeprom").read_bytes())
        image[flipped_bit // 8] ^= 1 << flipped_bit % 8
        board.write_eeprom(bytes(image))
    server = Server()
    bench = Bench(board, server, AtModem(server.dial), sample_ms=10)
    board.start()
    bench.run(2)
    assert not bench.modem.commands
    assert len(board.of(TAKEN)) == len(board.of(DROPPED)) + RING
    assert not board.of(SENT)


# --- The session


@pytest.mark.parametrize("session_kept", [True, False])
def test_unacknowledged_publishes_go_again_in_order_with_dup_and_their_identifiers(
    bench: Bench,
    session_kept: bool,  # noqa: FBT001
) -> None:
    bench.online()
    bench.drain()
    bench.sampling = True
    bench.server.answering = False
    bench.server.session_kept = session_kept
    bench.until(lambda: len(bench.server.connects) == 2)
    bench.server.answering = True
    bench.online()
    bench.drain()
    before, after = bench.server.on(0)[-WINDOW:], bench.server.on(1)
    assert [(publish.packet_id, publish.payload) for publish in after[:WINDOW]] == [
        (publish.packet_id, publish.payload) for publish in before
    ]
    assert [publish.dup for publish in after] == [True] * WINDOW + [False] * (len(after) - WINDOW)
    assert [reading["seq"] for reading in bench.readings()] == bench.board.of(TAKEN) == bench.board.of(ACKNOWLEDGED)


def test_no_more_than_a_window_is_under_way(bench: Bench) -> None:
    bench.online()
    bench.drain()
    acknowledged = len(bench.server.published)
    bench.server.answering = False
    bench.sampling = True
    bench.run(9)
    assert len(bench.server.published) == acknowledged + WINDOW


def test_a_connection_that_the_modem_dialled_again_by_itself_is_given_up(bench: Bench) -> None:
    """The modem says nothing of it: a PUBLISH comes before any CONNECT, and the gateway closes."""
    bench.online()
    bench.server.connections[-1].close()
    bench.until(lambda: len(bench.server.connects) == 2)
    bench.drain()
    assert sorted(reading["seq"] for reading in bench.readings()) == bench.board.of(TAKEN)


def test_a_gateway_that_is_gone_without_a_word_is_noticed_though_there_is_nothing_to_send(bench: Bench) -> None:
    bench.online()
    bench.drain()
    bench.run(25)
    assert bench.server.pings == 1, "within the keep-alive"
    bench.server.connections[-1].vanished = True
    bench.until(lambda: len(bench.server.connects) == 2, 45)
    bench.run(100)
    assert len(bench.server.connects) == 2, "the ping that was not answered is that of the former connection"


def test_an_answered_ping_makes_pauses_short_again(bench: Bench) -> None:
    bench.online()
    bench.drain()
    bench.server.reachable = False
    bench.server.connections[-1].vanished = True
    bench.run(200)
    bench.server.reachable = True
    bench.until(lambda: len(bench.server.connects) == 2)
    pings = bench.server.pings
    bench.until(lambda: bench.server.pings > pings)
    bench.server.connections[-1].vanished = True
    bench.until(lambda: len(bench.server.connects) == 3, 20 + 10 + 10)


def test_a_radio_that_was_away_is_joined_again_without_a_restart(bench: Bench) -> None:
    """While bytes go through the modem does not say that it lost the network: that dialling fails shows it."""
    bench.online()
    bench.modem.commands.clear()
    bench.modem.joined = False
    bench.server.connections[-1].vanished = True
    bench.until(lambda: len(bench.server.connects) == 2)
    assert sum(command.startswith("AT+CWJAP") for command in bench.modem.commands) == 1
    assert "AT+RST" not in bench.modem.commands
    bench.drain()


def test_a_sensor_with_little_to_say_keeps_its_connection(bench: Bench) -> None:
    bench.sample_ms = 30_000
    bench.run(301)
    assert len(bench.server.connects) == 1
    assert len(bench.server.published) == 10
    assert bench.server.pings >= 9


def test_a_gateway_that_never_answers_connect_is_dialled_again(bench: Bench) -> None:
    bench.server.greeting = False
    bench.until(lambda: len(bench.server.connects) == 3)
    assert not bench.server.published
    bench.server.greeting = True
    bench.online()


def test_an_answer_of_which_half_came_before_the_connection_ended(bench: Bench) -> None:
    bench.online()
    bench.drain()
    connection = bench.server.connections[-1]
    connection.outgoing += acknowledgements([1])[:3]
    bench.run(0.1)
    connection.vanished = True
    bench.sampling = True
    bench.until(lambda: len(bench.server.published) > len(bench.server.on(0)))
    bench.drain()
    assert len(bench.server.connects) == 2


def test_pauses_are_short_again_once_the_gateway_has_acknowledged(bench: Bench) -> None:
    bench.server.reachable = False
    bench.run(100)
    bench.server.reachable = True
    bench.online()
    bench.drain()
    bench.sampling = True
    bench.server.connections[-1].vanished = True
    connects = len(bench.server.connects)
    bench.until(lambda: len(bench.server.connects) > connects, 10 + 10)


def test_refusals_of_the_connection(bench: Bench) -> None:
    bench.server.refusals = [ConnectReturnCode.SERVER_UNAVAILABLE]
    bench.until(lambda: len(bench.server.connects) == 2, 10)
    bench.drain()
    bench.server.refusals = [ConnectReturnCode.BAD_USER_NAME_OR_PASSWORD]
    bench.server.connections[-1].vanished = True
    bench.until(lambda: len(bench.server.connects) == 3)
    refused_ms = bench.board.now_ms
    bench.until(lambda: len(bench.server.connects) == 4)
    assert 32_000 < bench.board.now_ms - refused_ms < 100_000, "only a person can mend it: about once a minute"


def test_an_unknown_a_second_and_a_damaged_answer(bench: Bench) -> None:
    bench.online()
    bench.drain()
    (first, *_) = bench.server.on(0)
    connection = bench.server.connections[-1]
    connection.outgoing += acknowledgements([first.packet_id, 77])
    connection.outgoing += b"\x30\x81\x01" + b"\x00\x01x" + b"m" * 126
    bench.sampling = True
    bench.run(3)
    bench.drain()
    assert len(bench.server.connects) == 1
    assert len(bench.board.of(ACKNOWLEDGED)) == len(set(bench.board.of(ACKNOWLEDGED)))
    connection.outgoing += b"\x40\x03"
    bench.until(lambda: len(bench.server.connects) == 2)


# --- What the ring had to drop


def test_drops_are_reported_exactly_with_the_next_sample_and_in_each_of_its_resends(bench: Bench) -> None:
    bench.sample_ms = 100
    bench.online()
    bench.run(2)
    for _ in range(2):
        bench.server.reachable = False
        bench.server.connections[-1].vanished = True
        bench.server.connections[-1].close()
        bench.run(20)
        bench.server.reachable = True
        bench.online()
    bench.drain()
    lost: set[int] = set()
    for reading in bench.readings():
        first, last = reading.get("lost", (0, -1))
        assert "lost" not in reading or last == reading["seq"] - 1
        lost |= set(range(first, last + 1))
    dropped = bench.board.of(DROPPED)
    assert len(dropped) > RING
    assert sorted(lost) == sorted(dropped)
    assert not lost & {reading["seq"] for reading in bench.readings()}, "what was sent is never dropped"
    assert sorted(bench.board.of(ACKNOWLEDGED) + dropped) == bench.board.of(TAKEN)


def test_the_clock_wraps_while_samples_are_under_way(bench: Bench) -> None:
    bench.board.start(seed=3, now_ms=2**32 - 8000)
    bench.online()
    bench.run(30)
    bench.drain()
    readings = bench.readings()
    assert [reading["seq"] for reading in readings] == bench.board.of(ACKNOWLEDGED) == bench.board.of(TAKEN)
    assert {(b["tick"] - a["tick"]) % 2**32 for a, b in pairwise(readings)} == {bench.sample_ms}
    assert len(bench.server.connects) == 1


def test_payloads_are_what_the_contract_with_the_gateway_says(bench: Bench) -> None:
    bench.online()
    bench.drain()
    (_, publish), *_ = bench.server.published
    assert re.fullmatch(rb'{"celsius":15\.00,"boot":"1-[0-9a-f]{8}","seq":0,"tick":\d+}', publish.payload)


class Troubles:
    """Things that happen to a sensor's connection, one at a time."""

    @staticmethod
    def silent_end(bench: Bench) -> None:
        bench.server.connections[-1].vanished = True

    @staticmethod
    def closed(bench: Bench) -> None:
        bench.server.connections[-1].close()

    @staticmethod
    def no_answers(bench: Bench) -> None:
        bench.server.answering = not bench.server.answering

    @staticmethod
    def unreachable(bench: Bench) -> None:
        bench.server.reachable = not bench.server.reachable

    @staticmethod
    def modem_restarts(bench: Bench) -> None:
        bench.modem.restart()

    @staticmethod
    def wifi(bench: Bench) -> None:
        bench.modem.wifi = not bench.modem.wifi
        bench.modem.joined = False

    @staticmethod
    def refusal(bench: Bench) -> None:
        bench.server.refusals.append(ConnectReturnCode.SERVER_UNAVAILABLE)

    @staticmethod
    def session_lost(bench: Bench) -> None:
        bench.server.session_kept = not bench.server.session_kept


TROUBLES = [trouble.__func__ for trouble in vars(Troubles).values() if isinstance(trouble, staticmethod)]


@pytest.mark.campaign(seconds=20)
@settings(max_examples=size(5, 15))
@given(
    st.lists(st.tuples(st.sampled_from(TROUBLES), st.floats(0.01, 30)), max_size=8), st.sampled_from((50, 300, 1000))
)
def test_every_sample_ends_acknowledged_or_reported_as_lost(
    tmp_path_factory: pytest.TempPathFactory, troubles: list[tuple[Callable[[Bench], None], float]], sample_ms: int
) -> None:
    bench = started(tmp_path_factory.mktemp("board"), Network("gateway.local"), Server(), seed=5)
    bench.sample_ms = sample_ms
    bench.online()
    for trouble, seconds in troubles:
        trouble(bench)
        bench.run(seconds)
    bench.server.answering = bench.server.reachable = bench.modem.wifi = True
    bench.drain()
    readings = bench.readings()
    arrived = {reading["seq"] for reading in readings}
    lost = [n for reading in readings if "lost" in reading for n in range(reading["lost"][0], reading["lost"][1] + 1)]
    assert set(bench.board.of(ACKNOWLEDGED)) == arrived
    assert sorted(lost) == bench.board.of(DROPPED)
    assert sorted([*arrived, *lost]) == bench.board.of(TAKEN)
    for reading in readings:
        assert round(reading["celsius"] * 100) == bench.board.values[reading["seq"]]


# --- Commands


def led(bench: Bench) -> bool:
    lit = bench.board.library.host_led
    lit.restype = ctypes.c_bool
    return bool(lit())


def command(bench: Bench, payload: bytes, packet_id: int, *, dup: bool = False) -> None:
    qos = 1 if packet_id else 0
    bench.server.connections[-1].outgoing += protocol.publish("command/s1/set", payload, qos, packet_id, dup=dup)


def test_a_command_switches_the_led_and_is_acknowledged(bench: Bench) -> None:
    bench.online()
    assert bench.server.subscribed == [("command/s1/#", 1)]
    command(bench, b"led=1", 7)
    bench.until(lambda: bench.server.answered == [7])
    assert led(bench)
    command(bench, b"led=0", 0)
    bench.until(lambda: not led(bench))
    bench.drain()
    assert bench.server.answered == [7], "with QoS 0 there is no PUBACK"


def test_a_command_that_is_not_known_is_acknowledged_and_does_nothing(bench: Bench) -> None:
    bench.online()
    for number, payload in enumerate((b"led=2", b"led=", b"", b"led=1 ", b"led=1" * 100, bytes(9)), 1):
        command(bench, payload, number)
    bench.until(lambda: bench.server.answered == [1, 2, 3, 4, 5, 6])
    assert not led(bench)


def test_commands_beyond_the_boards_memory_come_again_on_its_next_connection(bench: Bench) -> None:
    """A gateway sends all that wait at once. None is acknowledged that the board did not look at."""
    bench.online()
    numbers = list(range(1, 17))
    for number in numbers:
        command(bench, b"led=%d" % (number % 2), number)
    bench.run(5)
    first = list(bench.server.answered)
    assert first == numbers[: len(first)]
    assert len(first) >= OWED
    bench.server.connections[-1].vanished = True
    before = len(bench.server.connects)
    bench.until(lambda: len(bench.server.connects) > before)
    bench.online()
    assert bench.server.subscribed == [("command/s1/#", 1)] * 2
    for number in numbers[len(first) :]:
        command(bench, b"led=%d" % (number % 2), number, dup=True)
    bench.run(5)
    assert bench.server.answered == numbers[: len(bench.server.answered)]
    bench.drain()
