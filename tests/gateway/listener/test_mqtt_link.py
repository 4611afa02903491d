"""Peers of the MQTT listener that say nothing, too little, or read nothing."""

import asyncio
import contextlib
import socket

import pytest
from structlog.testing import capture_logs

from gateway.listener import link
from tests.support.mqtt_peers import ACCEPTED, PINGREQ, PINGRESP, RecordingIntake, connect, connected, listening
from tests.support.waiting import patience, until


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with (
        listening(RecordingIntake(), connect_timeout_s=0.1) as listener,
        connected(listener, b"\x10") as peer,
    ):
        assert await peer.read_to_end() == b""
        assert listener.counts["connect-timeout"] == 1


async def test_whoever_sends_a_connect_by_drops_is_not_waited_for() -> None:
    async with listening(RecordingIntake(), connect_timeout_s=0.3) as listener, connected(listener, b"") as peer:
        with contextlib.suppress(ConnectionError):
            for byte in connect():
                peer.writer.write(bytes((byte,)))
                await asyncio.sleep(0.05)
                if listener.counts["connect-timeout"]:
                    break
        assert await peer.read_to_end() == b""
        assert not listener.counts["connected"]


async def test_keep_alive_closes_the_silent_and_not_the_pinging(intake: RecordingIntake) -> None:
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


@pytest.mark.slow
async def test_a_peer_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "WRITE_STALL_S", 0.3)
    with capture_logs() as lines:
        await _stall()
    (line,) = [line for line in lines if line.get("reason") == "write-stall"]
    assert line["event"] == "connection ended by the MQTT listener"


async def _stall() -> None:
    async with listening(RecordingIntake()) as listener, connected(listener, connect(keep_alive_s=0)) as peer:
        transport = peer.writer.transport
        assert isinstance(transport, asyncio.Transport)
        # The less it takes without reading, the sooner it is full.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        transport.pause_reading()
        with contextlib.suppress(ConnectionError):
            while not listener.counts["write-stall"]:
                peer.writer.write(PINGREQ * 50_000)
                await asyncio.wait_for(peer.writer.drain(), patience(20))
                await asyncio.sleep(0)
        await until(lambda: listener.counts["write-stall"] == 1)
