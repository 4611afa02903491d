"""Back-pressure of the MQTT listener: bytes that wait for a commit are bounded, and nobody waits unheard."""

import asyncio
import contextlib
from typing import Any

import pytest

from tests.support.mqtt_peers import (
    ACCEPTED,
    PINGREQ,
    PINGRESP,
    UNAVAILABLE,
    Peer,
    RecordingIntake,
    connect,
    connected,
    keeping,
    listening,
    puback,
    publish,
    publish2,
)
from tests.support.waiting import patience, until


@pytest.mark.slow
async def test_a_flood_waits_in_the_network_while_its_commit_takes_long(intake: RecordingIntake) -> None:
    intake.outcome = None
    one = publish("x" * 100)
    count = 30_000
    async with (
        listening(intake, inflight_bytes_max=100_000) as listener,
        connected(listener, connect(keep_alive_s=1), ACCEPTED) as peer,
    ):
        peer.writer.write(one * count)
        await until(lambda: intake.batches)
        # Longer than 1.5 times the keep-alive: silence of our own making is not held against the client.
        await asyncio.sleep(1.8)
        assert listener.shared.inflight.bytes < 100_000 + 262_144 * (1 + 200 / len(one))
        assert sum(len(readings) for readings, _ in intake.batches) < 10_000
        intake.outcome = True
        intake.decide(True)
        async with asyncio.timeout(patience(20)):
            while len(intake.stored) < count:
                while intake.batches:
                    intake.decide(True)
                await asyncio.sleep(0.005)
        assert listener.shared.inflight.bytes == 0


async def deliver(peer: Peer, intake: RecordingIntake, number: int) -> None:
    """Have the intake take a message in a batch of its own."""
    peer.writer.write(publish(str(number), number))
    await until(lambda: len(intake.batches) == number)


async def test_pubacks_come_in_the_order_of_the_messages_whichever_is_stored_first(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected(listener, connect(), ACCEPTED) as peer:
        intake.outcome = None
        for number in range(1, 5):
            await deliver(peer, intake, number)
        intake.decide(True, 1)
        intake.decide(True, 1)
        assert await peer.silent()
        intake.decide(True)
        assert await peer.read(12) == puback(1, 2, 3)
        intake.decide(True)
        assert await peer.read(4) == puback(4)
        assert listener.shared.inflight.bytes == 0


async def test_what_waits_for_a_refused_message_is_answered_without_it(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected(listener, connect(), ACCEPTED) as peer:
        intake.outcome = None
        for number in range(1, 3):
            await deliver(peer, intake, number)
        intake.decide(True, 1)
        intake.decide(False)
        assert await peer.read_to_end() == puback(2)
        assert listener.shared.inflight.bytes == 0


async def test_while_the_buffer_holds_readings_wait_and_pings_are_answered(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected(listener, connect(keep_alive_s=1), ACCEPTED) as peer:
        intake.outcome, intake.cannot_store = None, True
        for number in range(1, 8):
            peer.writer.write(publish("a", number) + publish("qos 0") + PINGREQ)
            assert await peer.read(2) == PINGRESP
            await asyncio.sleep(0.3)
        async with connected(listener, connect("m002")) as other:
            assert await other.read_to_end() == UNAVAILABLE
        assert intake.losses == [("m001", "refused-qos0", 1)] * 7
        intake.cannot_store = False
        intake.decide_all()
        assert await peer.read(28) == puback(*range(1, 8))
    assert [reading.datum.payload for reading in intake.stored] == [b"a"] * 7


@pytest.mark.parametrize(
    "cap", [{"inflight_bytes_max": 1_000}, {"inflight_messages_max": 3}, {"inflight_bytes_total_max": 1_000}]
)
async def test_beyond_a_cap_while_the_buffer_holds_the_connection_is_closed(cap: dict[str, Any]) -> None:
    intake = RecordingIntake()
    async with listening(intake, **cap) as listener, connected(listener) as peer:
        intake.outcome, intake.cannot_store = None, True
        peer.writer.write(publish("a", 1))
        await until(lambda: intake.batches)
        peer.writer.write(PINGREQ)
        assert await peer.read(2) == PINGRESP
        peer.writer.write(b"".join(publish("b", number) for number in range(2, 7)))
        assert await peer.read_to_end() == b""
        assert listener.counts["held-too-much"] == 1
        intake.decide_all()
        assert listener.shared.inflight.bytes == 0


async def test_a_paused_connection_is_closed_when_the_buffer_begins_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.listener.listener.HOUSEKEEPING_INTERVAL_S", 0.02)
    intake = RecordingIntake()
    intake.outcome = None
    async with listening(intake, inflight_messages_max=1) as listener, connected(listener) as peer:
        peer.writer.write(publish("a", 1) + publish("b", 2))
        await until(lambda: listener.shared.paused)
        assert await peer.silent()
        intake.cannot_store = True
        assert await peer.read_to_end() == b""


async def test_with_the_total_exceeded_while_the_buffer_holds_nothing_more_is_taken(intake: RecordingIntake) -> None:
    async with (
        listening(intake, inflight_bytes_total_max=1_000) as listener,
        connected(listener) as one,
        connected(listener, connect("m002"), ACCEPTED) as two,
    ):
        intake.outcome, intake.cannot_store = None, True
        one.writer.write(publish("x" * 100, 1) * 10)
        await one.read_to_end()
        assert len(intake.batches) == 1
        two.writer.write(publish("y", 1))
        assert await two.read_to_end() == b""
        assert len(intake.batches) == 1
        assert listener.counts["held-too-much"] == 2
        intake.decide(True)


async def test_waiting_bytes_of_all_connections_are_bounded_by_the_total_and_one_read(intake: RecordingIntake) -> None:
    """A read of tiny readings weighs far more than its bytes, and each of many connections may bring one."""
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
        await until(lambda: len(listener.shared.paused) == len(peers))
        assert 3_000_000 < listener.shared.inflight.bytes <= 3_000_000 + one_read
        intake.outcome = True
        intake.decide_all()
        for peer in peers:
            assert await peer.read(4 * (len(flood) // len(tiny))) == puback(1) * (len(flood) // len(tiny))
        assert listener.shared.inflight.bytes == 0
        assert not listener.shared.paused


async def test_marks_weigh_with_what_waits_for_its_commit(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected(listener, keeping(), ACCEPTED) as peer:
        intake.outcome = None
        data = b"".join(publish2("a", number) for number in range(1, 11))
        peer.writer.write(data)
        await until(lambda: intake.batches)
        assert listener.shared.inflight.bytes == len(data) + 10 * (200 + 100 + 8)
        intake.decide(True)


async def test_beside_others_one_connection_has_little_waiting_for_a_commit(intake: RecordingIntake) -> None:
    intake.outcome = None
    async with (
        listening(intake, inflight_messages_max=8_000) as listener,
        connected(listener, connect("flood"), ACCEPTED) as flood,
        connected(listener, connect("good"), ACCEPTED) as good,
    ):

        def waiting() -> int:
            return sum(len(readings) for readings, _ in intake.batches)

        async def paused() -> int:
            await until(lambda: listener.shared.paused)
            return waiting()

        flood.writer.write(publish("x") * 40_000)
        assert 8_000 < await paused() < 8_200, "alone it has all of it"
        good.writer.write(publish("g", 1))
        await until(lambda: len(intake.batches[-1][0]) == 1)
        while listener.shared.paused:
            intake.decide(True)
        assert 1_000 - 200 < waiting() <= 1_001 + 200
        assert 1_000 < await paused() < 1_200
        intake.outcome = True
        async with asyncio.timeout(patience(20)):
            while len(intake.stored) < 40_001:
                intake.decide_all()
                await asyncio.sleep(0.005)
        assert await good.read(4) == puback(1)


async def test_after_a_while_without_others_it_has_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.listener.inflight.OTHERS_S", 0.05)
    intake = RecordingIntake()
    async with (
        listening(intake, inflight_messages_max=800) as listener,
        connected(listener, connect("flood"), ACCEPTED) as flood,
        connected(listener, connect("good"), ACCEPTED) as good,
    ):
        for peer in (flood, good):
            peer.writer.write(publish("a", 1))
            assert await peer.read(4) == puback(1)
        await asyncio.sleep(0.2)
        intake.outcome = None
        flood.writer.write(publish("x") * 4_000)
        await until(lambda: listener.shared.paused)
        # It counts as another one, as the last batch was not its own, for as short a while.
        await asyncio.sleep(0.2)
        listener.shared.pause_or_resume()
        await until(lambda: sum(len(readings) for readings, _ in intake.batches) > 800)
        intake.outcome = True
        intake.decide_all()
