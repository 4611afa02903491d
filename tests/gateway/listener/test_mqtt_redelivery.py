"""QoS 1 that comes again: recognised only where a mistake is impossible."""

import pytest

from gateway.listener.listener import MqttListener
from gateway.listener.redelivery import PacketIdRun, Unanswered
from gateway.listener.session import ClientBatch
from tests.support.buffers import reading_of
from tests.support.mqtt_peers import (
    ACCEPTED,
    Peer,
    RecordingIntake,
    again,
    connect,
    connected,
    keeping,
    listening,
    puback,
    publish,
)
from tests.support.waiting import until

COUNTED = b"".join(publish(str(number), number) for number in range(1, 71))
"""A client's packet identifiers have counted up to 70."""


async def cut_before_the_answer(listener: MqttListener, intake: RecordingIntake, peer: Peer, data: bytes) -> None:
    """Store a client's messages after its connection is gone."""
    intake.outcome = None
    peer.writer.write(data)
    await until(lambda: intake.batches)
    peer.vanish()
    await until(lambda: not listener.shared.connections)
    intake.decide(True)
    intake.outcome = True


async def leave_unanswered(listener: MqttListener, intake: RecordingIntake, first: bytes, payload: str) -> None:
    """Have a reading with packet identifier 71 stored, and not answered."""
    async with connected(listener, first + COUNTED) as peer:
        await peer.read(4 + 4 * 70)
        await cut_before_the_answer(listener, intake, peer, publish(payload, 71))


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
async def test_a_doubtful_redelivery_is_stored(later: bytes, why: str, intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        await leave_unanswered(listener, intake, connect(), "21.5")
        stored = len(intake.stored)
        async with connected(listener, connect() + later) as peer:
            await peer.read(8)
    assert len(intake.stored) == stored + 1, why
    assert intake.stored[-1].datum.doubt == (later[0] & 0x08 != 0)


async def test_qos_0_does_not_count_as_an_identifier(intake: RecordingIntake) -> None:
    """Its readings among others neither begin a client's counting nor break it."""
    async with listening(intake) as listener:
        async with connected(listener) as peer:
            await cut_before_the_answer(listener, intake, peer, publish("x") * 10 + publish("21.5", 70))
        async with connected(listener, connect() + again("21.5", 70)) as peer:
            assert await peer.read(8) == ACCEPTED + puback(70)
        assert len(intake.stored) == 12, "70 was not reached by counting, so that this may be another one"
        async with connected(listener, connect() + publish("x") + COUNTED + publish("x")) as peer:
            await peer.read(4 + 4 * 70)
            data = publish("x") + publish("21.5", 71) + publish("x")
            await cut_before_the_answer(listener, intake, peer, data)
        async with connected(listener, connect() + again("21.5", 71)) as peer:
            assert await peer.read(8) == ACCEPTED + puback(71)
        assert listener.counts["redelivery-recognised"] == 1


async def test_only_the_very_next_connection_may_send_again(intake: RecordingIntake) -> None:
    """The sensor restarted in between: its reading under the same identifier is another one, of the same value."""
    async with listening(intake) as listener:
        await leave_unanswered(listener, intake, connect(), "21.5")
        stored = len(intake.stored)
        async with connected(listener):
            pass  # here its first try was lost
        async with connected(listener, connect() + again("21.5", 71)) as peer:
            await peer.read(8)
    assert len(intake.stored) == stored + 1


async def test_an_identifier_that_a_restarted_sensor_would_use_is_not_trusted(intake: RecordingIntake) -> None:
    """The gateway also never saw the connection in between, on which the first try was lost."""
    async with listening(intake) as listener:
        async with connected(listener) as peer:
            await cut_before_the_answer(listener, intake, peer, publish("21.5", 1))
        async with connected(listener, connect() + again("21.5", 1)) as peer:
            assert await peer.read(8) == ACCEPTED + puback(1)
    assert [(reading.datum.payload, reading.datum.doubt) for reading in intake.stored] == [
        (b"21.5", False),
        (b"21.5", True),
    ]


@pytest.mark.parametrize(
    ("batches", "trusted"),
    [
        ([list(range(1, 80))], [*range(65, 80)]),
        ([[number] for number in range(1, 80)], [79]),
        ([[number, number + 1] for number in range(1, 200, 6)], [199, 200]),
        ([list(range(1, 80)), [1]], []),
        ([[70]], []),
        ([[1]] * 100, []),
        ([[10, 500]] * 9, []),
        ([[500, 10]] * 9, []),
        ([list(range(1, 80)), [40_000]], []),
        ([list(range(65_500, 65_536)), list(range(1, 30))], []),
    ],
)
def test_an_identifier_counts_only_if_it_was_reached_by_counting(batches: list[list[int]], trusted: list[int]) -> None:
    run = PacketIdRun()
    for identifiers in batches:
        batch = ClientBatch()
        batch.answers = identifiers
        batch.readings = [reading_of("t", b"x", 0)] * len(identifiers)
        batch.counting_from = run.advance(identifiers[0], identifiers[-1], len(identifiers))
    unanswered = Unanswered()
    unanswered.remember(batch)
    assert sorted(unanswered) == trusted
