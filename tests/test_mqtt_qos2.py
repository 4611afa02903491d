"""QoS 2 at the MQTT listener: exactly once, over lost answers, connections, commits and a kill -9."""

from tests.mqtt_peers import (
    ACCEPTED,
    PINGREQ,
    PINGRESP,
    PRESENT,
    RecordingIntake,
    connected,
    keeping,
    listening,
    puback,
    pubcomp,
    publish,
    publish2,
    pubrec,
    pubrel,
    until,
)


async def test_pubrec_after_the_commit_of_the_reading_and_pubcomp_after_the_one_that_forgets_its_id() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping(), ACCEPTED) as peer:
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
    async with listening(intake) as listener, connected(listener, keeping(), ACCEPTED) as peer:
        commits = intake.commits
        intake.outcome = None
        peer.writer.write(publish2("a", 3) + publish("b", 2) + publish("c") + pubrel(9) + publish2("a", 3, dup=True))
        peer.writer.write(PINGREQ)
        await until(lambda: intake.batches)
        assert await peer.read(2) == PINGRESP
        intake.decide_all()
        assert await peer.read(16) == pubrec(3) + puback(2) + pubcomp(9) + pubrec(3)
        assert intake.commits == commits + 1
    assert [reading.payload for reading in intake.stored] == [b"a", b"b", b"c"]


async def test_a_message_that_comes_again_while_its_first_copy_waits_is_answered_after_that_commit() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping(), ACCEPTED) as first:
        intake.outcome = None
        first.writer.write(publish2("a", 1))
        await until(lambda: intake.batches)
        async with connected(listener, keeping() + publish2("a", 1, dup=True), PRESENT) as second:
            await until(lambda: len(intake.batches) == 2)
            assert await second.silent()
            intake.decide(True)
            intake.decide(True)
            assert await second.read(4) == pubrec(1)
    assert [reading.payload for reading in intake.stored] == [b"a"]


async def test_a_message_that_comes_again_is_not_answered_if_its_first_copy_could_not_be_stored() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping(), ACCEPTED) as first:
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


async def test_qos_2_of_a_client_that_lost_its_state_is_stored_and_marked() -> None:
    """It counts from 1 again, and its first reading has the value of one that it never finished."""
    intake = RecordingIntake()
    async with listening(intake) as listener:
        for answer in (ACCEPTED, PRESENT):
            async with connected(listener, keeping() + publish2("21.5", 1)) as peer:
                assert await peer.read(8) == answer + pubrec(1)
    assert [reading.redelivered for reading in intake.stored] == [False, True]
