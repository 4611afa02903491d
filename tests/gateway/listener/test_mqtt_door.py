"""One host that takes all it can get at the MQTT listener costs nobody else a place, and hardly any time."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.host import accepting
from gateway.listener import door
from gateway.listener.credentials import add
from gateway.listener.door import BURST_S, NOT_LOGGED_IN, SPARE_CONNECTIONS, TOO_FAST
from gateway.listener.listener import MqttListener
from gateway.settings import TlsSettings
from gateway.tls.client import client_context
from tests.support.certificates import make_authority
from tests.support.gateways import daemon, free_port, write_config
from tests.support.mqtt_peers import (
    ACCEPTED,
    CODEWORD,
    PINGREQ,
    PINGRESP,
    USERS,
    Peer,
    RecordingIntake,
    connect,
    connected,
    listening,
)
from tests.support.waiting import patience, until

WRONG = b"\x20\x02\x00\x04"
GOOD, RIVAL = "127.0.0.1", "127.0.0.2"


class Silent:
    """Connections of one host that say nothing: sockets without a reader, as an attacker has them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sockets: list[socket.socket] = []

    async def open(self, count: int, host: str = RIVAL) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            made = socket.socket()
            made.setblocking(False)
            made.bind((host, 0))
            self.sockets.append(made)
            await loop.sock_connect(made, ("127.0.0.1", self.port))

    def closed(self) -> int:
        """Number of them that the listener has closed."""
        return sum(_is_closed(each) for each in self.sockets)


def _is_closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def silent(port: int) -> Iterator[Silent]:
    made = Silent(port)
    try:
        yield made
    finally:
        for each in made.sockets:
            each.close()


@asynccontextmanager
async def calling(port: int, first: bytes, host: str = GOOD, **more: Any) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0), **more)
    writer.write(first)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


def taken(listener: MqttListener) -> int:
    return len(listener.shared.connections)


# -- places ---------------------------------------------------------------------------------------


async def test_silent_connections_of_one_host_shut_out_nobody() -> None:
    """More of them than there are places; sensors at another address come, go and come back meanwhile."""
    room = 10
    with capture_logs() as lines:
        async with (
            listening(RecordingIntake(), connections_max=room, not_logged_in_per_address_max=20) as listener,
            calling(listener.port, connect("stays"), RIVAL) as stays,
        ):
            assert await stays.read(4) == ACCEPTED
            with silent(listener.port) as rivals:
                for number in range(5):
                    await rivals.open(room + SPARE_CONNECTIONS)
                    async with calling(listener.port, connect(f"m{number}") + PINGREQ) as peer:
                        assert await peer.read(6) == ACCEPTED + PINGRESP
                await until(lambda: taken(listener) <= 1 + 20)
                await until(lambda: rivals.closed() >= len(rivals.sockets) - 20)
                stays.writer.write(PINGREQ)
                assert await stays.read(2) == PINGRESP, "a sensor at the host's address that has logged in stays"
                async with calling(listener.port, connect("late"), RIVAL) as late:
                    assert await late.read(4) == ACCEPTED, "the host's own sensors come in too"
    warned = [line for line in lines if line.get("reason") == NOT_LOGGED_IN]
    assert len(warned) == 1, "the others are in the sum of the minute"
    assert warned[0]["log_level"] == "warning"
    count, _, told = warned[0]["why"].partition(" ")
    assert int(count) >= 21
    assert told.startswith("connections of 127.0.0.2 have not logged in")
    assert "mqtt_listener.not_logged_in_per_address_max" in warned[0]["why"]


async def test_silent_connections_of_many_hosts_shut_out_nobody() -> None:
    """All places are taken although no address has too many: the oldest goes, and a sensor is never the oldest."""
    room = 10
    places = room + SPARE_CONNECTIONS
    async with listening(RecordingIntake(), connections_max=room) as listener:
        with silent(listener.port) as rivals, capture_logs() as lines:
            for number in range(places):
                await rivals.open(1, f"127.0.1.{number}")
            await until(lambda: taken(listener) == places)
            assert not rivals.closed()
            async with calling(listener.port, connect("m1") + PINGREQ) as peer:
                assert await peer.read(6) == ACCEPTED + PINGRESP
                await until(lambda: _is_closed(rivals.sockets[0]))
                assert rivals.closed() == 1, "one for one, the oldest first"
                for number in range(places):
                    await rivals.open(1, f"127.0.2.{number}")
                await until(lambda: rivals.closed() == places + 1)
                assert all(map(_is_closed, rivals.sockets[:places]))
                peer.writer.write(PINGREQ)
                assert await peer.read(2) == PINGRESP
    assert "mqtt_listener.connections_max" in next(line["why"] for line in lines if line.get("reason") == NOT_LOGGED_IN)


async def test_where_all_have_logged_in_a_newcomer_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SPARE_CONNECTIONS", 0)
    with capture_logs() as lines:
        async with listening(RecordingIntake(), connections_max=1) as listener, connected(listener) as inside:
            async with connected(listener, connect("m002")) as peer:
                assert await peer.read_to_end() == b""
            inside.writer.write(PINGREQ)
            assert await inside.read(2) == PINGRESP
            assert listener.counts["too-many-connections"] == 1
    (line,) = [line for line in lines if line.get("reason") == "too-many-connections"]
    assert "clients that have logged in; see mqtt_listener.connections_max" in line["why"]


async def test_who_was_ended_and_reads_nothing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that connects again and again, with a good secret, keeps no place with connections that are over."""
    monkeypatch.setattr(door, "SPARE_CONNECTIONS", 1)
    settings: dict[str, Any] = {"anonymous": False, "users": USERS, "connections_max": 1}
    login = connect("m", login=("m001", CODEWORD))
    async with listening(RecordingIntake(), **settings) as listener, AsyncExitStack() as held:
        for _ in range(5):
            inside = await held.enter_async_context(calling(listener.port, login))
            assert await inside.read(4) == ACCEPTED, "it takes over from the one before"
            # There is no place for this one: it is told so, and its connection lingers, for it does not close its side.
            other = await held.enter_async_context(calling(listener.port, connect("x", login=("m002", CODEWORD))))
            assert await other.read(4) == b"\x20\x02\x00\x03"


async def test_one_is_heard_one_waits_and_the_others_are_closed() -> None:
    """No more is kept of an address than has its turn soon; at the end no file is left open."""
    with capture_logs() as lines:
        async with listening(RecordingIntake(), new_connections_per_s_max=0.1) as listener:
            with silent(listener.port) as rivals:
                await rivals.open(6)
                await until(lambda: rivals.closed() == 4)
                await asyncio.sleep(0.05)
                assert [_is_closed(each) for each in rivals.sockets] == 2 * [False] + 4 * [True]
                assert taken(listener) == 1
                async with calling(listener.port, connect() + PINGREQ) as peer:
                    assert await peer.read(6) == ACCEPTED + PINGRESP, "which concerns no other address"
    (line,) = [line for line in lines if line.get("reason") == TOO_FAST]
    assert line["why"].startswith("1 connection of 127.0.0.2 wait")
    with silent(listener.port) as gone, pytest.raises(ConnectionRefusedError):
        await gone.open(1)


async def test_where_fewer_files_may_be_open_the_oldest_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MqttListener, "_allow_open_files", lambda _: 3)
    async with listening(RecordingIntake()) as listener, connected(listener) as stays:
        with silent(listener.port) as rivals:
            await rivals.open(10)
            async with calling(listener.port, connect("m1") + PINGREQ) as peer:
                assert await peer.read(6) == ACCEPTED + PINGRESP
                stays.writer.write(PINGREQ)
                assert await stays.read(2) == PINGRESP
            assert rivals.closed() >= 8


async def test_a_system_without_files_is_told_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "REST_S", 0.05)
    accept, errors = socket.socket.accept, iter((errno.EMFILE, errno.ECONNABORTED, errno.EMFILE))

    def fails_at_first(listening: socket.socket) -> Any:
        if (error := next(errors, None)) is not None:
            raise OSError(error, os.strerror(error))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fails_at_first)
    with capture_logs() as lines:
        async with listening(RecordingIntake()) as listener, connected(listener):
            assert listener.counts["cannot-accept"] == 2
    (line,) = [line for line in lines if line.get("reason") == "cannot-accept"]
    assert "Too many open files; raise the limit" in line["why"]


# -- the rate -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steady_time")
async def test_a_flood_of_log_ins_is_heard_at_its_rate_and_others_at_once(tmp_path: Path) -> None:
    path, per_s = tmp_path / "devices.json", 20
    (made,) = add(path, ["m7"], None)
    settings: dict[str, Any] = {"anonymous": False, "new_connections_per_s_max": per_s}
    async with listening(RecordingIntake(), devices_file=path, **settings) as listener:
        begun_s = time.monotonic()

        async def flood() -> None:
            while True:
                async with calling(listener.port, connect(login=("m7", "wrong")), RIVAL) as peer:
                    assert await peer.read_to_end() == WRONG

        floods = [asyncio.create_task(flood()) for _ in range(8)]
        try:
            await until(lambda: listener.counts["bad-credentials"] >= BURST_S * per_s + 5)
            for host in (GOOD, RIVAL):
                before_s = time.monotonic()
                async with calling(listener.port, connect("m7", login=("m7", made.secret)), host) as sensor:
                    assert await sensor.read(4) == ACCEPTED
                waited_s = time.monotonic() - before_s
                assert waited_s < (0.2 if host == GOOD else 1.0), f"{host} waited {waited_s} s"
            heard = listener.counts["bad-credentials"]
            assert heard <= (BURST_S + time.monotonic() - begun_s) * per_s + 1
        finally:
            for each in floods:
                each.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
        assert not listener.counts[NOT_LOGGED_IN]
        assert not listener.counts["too-many-failed-logins"]


@pytest.mark.usefixtures("steady_time")
async def test_sensors_that_come_back_together_behind_one_address_are_all_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are more than are heard at once, and more than may wait. Closed ones try again."""
    monkeypatch.setattr(door, "QUEUE_S", 0.5)
    sensors, per_s = 140, 40
    async with listening(RecordingIntake(), new_connections_per_s_max=per_s) as listener, AsyncExitStack() as held:

        async def come_back(name: str) -> None:
            while True:
                async with AsyncExitStack() as attempt:
                    peer = await attempt.enter_async_context(calling(listener.port, connect(name)))
                    with suppress(asyncio.IncompleteReadError, ConnectionError):
                        assert await peer.read(4) == ACCEPTED
                        await held.enter_async_context(attempt.pop_all())
                        return
                await asyncio.sleep(0.2)

        begun_s = time.monotonic()
        await asyncio.gather(*(come_back(f"m{number}") for number in range(sensors)))
        least_s = (sensors - BURST_S * per_s - 1) / per_s
        assert least_s < time.monotonic() - begun_s < 2 * least_s
        assert len(listener.shared.sessions) == sensors
        assert listener.counts[TOO_FAST]


# -- TLS ------------------------------------------------------------------------------------------


async def test_silent_connections_to_the_tls_port_shut_out_nobody(tmp_path: Path) -> None:
    """They never begin their handshake. The port for TLS has fewer places, and its sensors too must come in."""
    authority = make_authority(tmp_path / "ca")
    server = authority.sign("server")
    tls = TlsSettings(server.certificate, server.key, free_port(), connections_max=3)
    context = client_context(authority.certificate, None, None)
    async with listening(RecordingIntake(), tls=tls, not_logged_in_per_address_max=2) as listener:
        with silent(tls.port) as rivals:
            await rivals.open(6)
            for number in range(6):
                await rivals.open(1, f"127.0.1.{number}")
            async with calling(tls.port, connect("m1"), ssl=context) as peer:
                assert await peer.read(4) == ACCEPTED
                await rivals.open(3, "127.0.2.1")
                peer.writer.write(PINGREQ)
                assert await peer.read(2) == PINGRESP
            await until(lambda: len(listener._tls_connections) <= tls.connections_max)
            assert listener.counts[NOT_LOGGED_IN] >= 12
            assert not listener.counts["tls-handshake-failed"], "it was not their doing"


# -- the daemon -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_daemon_lets_sensors_in_beside_hosts_that_take_all_they_get(tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, "127.0.0.1:1", port, "t")
    config.write_text(config.read_text().replace("anonymous = true", "anonymous = true\nconnections_max = 200"))
    with daemon(config, port), silent(port) as rivals:
        for round_number in range(3):
            for host in ("127.0.0.2", "127.0.0.3"):
                await rivals.open(300, host)
            async with asyncio.timeout(patience(2)), calling(port, connect(f"m{round_number}") + PINGREQ) as peer:
                assert await peer.read(6) == ACCEPTED + PINGRESP
    log = config.with_suffix(".log").read_text()
    assert "connections of 127.0.0.2 have not logged in" in log
    assert log.count(NOT_LOGGED_IN) < 10
