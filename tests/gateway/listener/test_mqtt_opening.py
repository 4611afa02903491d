"""CONNECT at the MQTT listener: who is let in, take-over, and sessions that are opened, capped and expire."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.listener import connection, door
from tests.support.mqtt_peers import (
    ACCEPTED,
    CODEWORD,
    PINGREQ,
    PINGRESP,
    PRESENT,
    UNAVAILABLE,
    USERS,
    RecordingIntake,
    connect,
    connected,
    keeping,
    listening,
    puback,
    publish,
)
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("first", "answer", "reason"),
    [
        (connect(), b"\x20\x02\x00\x05", "no-credentials"),
        (connect(login=("m001", "wrong")), b"\x20\x02\x00\x04", "bad-credentials"),
        (connect(login=("m003", CODEWORD)), b"\x20\x02\x00\x04", "bad-credentials"),
        (connect(login=("m001", "")), b"\x20\x02\x00\x04", "bad-credentials"),
    ],
)
async def test_an_unknown_client_is_refused_and_none_of_its_readings_is_taken(
    first: bytes, answer: bytes, reason: str, intake: RecordingIntake
) -> None:
    async with listening(intake, anonymous=False, users=USERS) as listener:
        async with connected(listener, first + publish("a", 1)) as peer:
            assert await peer.read_to_end() == answer
        assert listener.counts[reason] == 1
    assert not intake.stored
    assert not intake.events


async def test_a_reading_carries_the_device_that_its_sender_may_write_as(intake: RecordingIntake) -> None:
    async with (
        listening(intake, anonymous=False, users=USERS) as listener,
        connected(listener, connect("any", login=("m001", CODEWORD)) + publish("a", 1)) as peer,
    ):
        assert await peer.read(8) == ACCEPTED + puback(1)
    assert [reading.writer for reading in intake.stored] == ["m001"]


async def test_the_same_client_identifier_takes_the_connection_over(intake: RecordingIntake) -> None:
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
        assert len(listener.shared.sessions) == 2


async def test_beyond_connections_max_connack_3_but_a_known_client_may_come_again() -> None:
    async with listening(RecordingIntake(), connections_max=1) as listener, connected(listener):
        async with connected(listener, connect("m002")) as peer:
            assert await peer.read_to_end() == UNAVAILABLE
        assert listener.counts["too-many-connections"] == 1
        async with connected(listener) as again:
            again.writer.write(PINGREQ)
            assert await again.read(2) == PINGRESP


async def test_far_beyond_connections_max_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SPARE_CONNECTIONS", 0)
    async with (
        listening(RecordingIntake(), connections_max=1) as listener,
        connected(listener),
        connected(listener, connect("m002")) as peer,
    ):
        assert await peer.read_to_end() == b""


async def test_while_the_intake_refuses_connack_3_answers_and_then_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, intake: RecordingIntake
) -> None:
    monkeypatch.setattr(connection, "REFUSAL_HOLD_S", 0.3)
    async with listening(intake) as listener:
        async with connected(listener) as peer:
            intake.outcome, intake.cannot_store = False, True
            peer.writer.write(publish("a", 1))
            await peer.read_to_end()
        intake.outcome, intake.cannot_store = True, False
        async with connected(listener, connect()) as peer:
            assert await peer.read_to_end() == UNAVAILABLE
        await asyncio.sleep(0.3)
        async with connected(listener) as peer:
            peer.writer.write(publish("a", 1))
            assert await peer.read(4) == puback(1)


async def test_a_client_turned_away_after_its_log_in_is_named(intake: RecordingIntake) -> None:
    intake.cannot_store = True
    with capture_logs() as lines:
        async with (
            listening(intake, anonymous=False, users=USERS) as listener,
            connected(listener, connect("thermometer", login=("m001", CODEWORD))) as peer,
        ):
            assert await peer.read_to_end() == UNAVAILABLE
    (line,) = [line for line in lines if line.get("reason") == "connect-while-refusing"]
    assert (line["user"], line["client_id"]) == ("m001", "thermometer")


async def test_one_refusal_of_an_intake_that_stores_turns_nobody_away(intake: RecordingIntake) -> None:
    """One client's batch that is too much for the queue is no reason to refuse all others."""
    intake.outcome = False
    async with listening(intake) as listener:
        async with connected(listener) as peer:
            peer.writer.write(publish("a", 1))
            await peer.read_to_end()
        async with connected(listener, connect("m002")) as peer:
            assert await peer.read(4) == ACCEPTED


async def test_connack_promises_a_session_only_after_its_commit(intake: RecordingIntake) -> None:
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
        assert not listener.shared.kept.kept
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
            await until(lambda: not listener.shared.connections)
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
        await until(lambda: not listener.shared.connections)
        async with connected(listener, connect("more", login=one)) as peer:
            assert await peer.read(4) == ACCEPTED


async def test_sessions_are_capped_and_expire(monkeypatch: pytest.MonkeyPatch, intake: RecordingIntake) -> None:
    monkeypatch.setattr("gateway.listener.listener.HOUSEKEEPING_INTERVAL_S", 0.02)
    now_us = 0
    async with listening(intake, sessions_max=1, session_expiry_s=3_600, clock=lambda: now_us) as listener:
        async with connected(listener, keeping("m001"), ACCEPTED) as peer:
            now_us = 3_600_000_000
            async with connected(listener, keeping("m002")) as other:
                assert await other.read_to_end() == UNAVAILABLE
            assert listener.counts["too-many-sessions"] == 1
            await asyncio.sleep(0.1)
            assert listener.shared.kept.kept, "a session does not expire while it is connected"
        await until(lambda: not listener.shared.connections)
        now_us += 3_599_000_000
        await asyncio.sleep(0.1)
        assert listener.shared.kept.kept
        now_us += 1_000_000
        await until(lambda: not listener.shared.kept.kept)
        await until(lambda: not intake.kept)
        async with connected(listener, keeping("m002")) as peer:
            assert await peer.read(4) == ACCEPTED
