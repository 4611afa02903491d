"""QoS 2 at the MQTT listener: exactly once, over lost answers, connections, commits and a kill -9."""

import contextlib
from typing import Literal, NamedTuple

import pytest

from gateway.listener import connection, link
from tests.support.mqtt_peers import (
    ACCEPTED,
    PINGREQ,
    PINGRESP,
    PRESENT,
    Peer,
    RecordingIntake,
    connect,
    connected,
    keeping,
    listening,
    puback,
    pubcomp,
    publish,
    publish2,
    pubrec,
    pubrel,
)
from tests.support.waiting import until


async def test_pubrec_after_the_commit_of_the_reading_and_pubcomp_after_the_one_that_forgets_its_id() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping(), ACCEPTED) as peer:
        intake.outcome = None
        peer.writer.write(publish2("21.5", 7))
        await until(lambda: intake.batches)
        assert await peer.silent()
        intake.decide(True)
        assert await peer.read(4) == pubrec(7)
        assert [key.split("/")[::3] for key in intake.kept if "/qos2/" in key] == [["mqtt", "7"]]
        peer.writer.write(pubrel(7))
        await until(lambda: intake.batches)
        assert await peer.silent()
        intake.decide(True)
        assert await peer.read(4) == pubcomp(7)
    assert [reading.datum.payload for reading in intake.stored] == [b"21.5"]
    assert not [key for key in intake.kept if key.endswith("/7")]


async def test_all_kinds_in_one_read_are_one_commit_answered_in_order(intake: RecordingIntake) -> None:
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
    assert [reading.datum.payload for reading in intake.stored] == [b"a", b"b", b"c"]


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
    assert [reading.datum.payload for reading in intake.stored] == [b"a"]


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


async def test_an_unfinished_exchange_survives_kill_9_with_its_session(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        peer.writer.write(publish2("a", 1) + publish2("b", 2))
        assert await peer.read(12) == ACCEPTED + pubrec(1, 2)
        peer.writer.write(pubrel(2))
        assert await peer.read(4) == pubcomp(2)
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        peer.writer.write(publish2("a", 1, dup=True) + pubrel(2) + pubrel(1) + publish2("c", 2))
        assert await peer.read(20) == PRESENT + pubrec(1) + pubcomp(2) + pubcomp(1) + pubrec(2)
    assert [reading.datum.payload for reading in intake.stored] == [b"a", b"b", b"c"]
    assert not any(reading.datum.doubt for reading in intake.stored)


async def test_clean_session_forgets_the_exchanges_and_says_so_of_what_comes_again(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        async with connected(listener, keeping()) as peer:
            peer.writer.write(publish2("a", 1))
            assert await peer.read(8) == ACCEPTED + pubrec(1)
        async with connected(listener) as peer:
            assert intake.kept == {}
            peer.writer.write(publish2("a", 1, dup=True))
            assert await peer.read(4) == pubrec(1)
    assert [(reading.datum.payload, reading.datum.doubt) for reading in intake.stored] == [(b"a", False), (b"a", True)]


async def test_the_same_identifier_with_another_message_is_another_message(intake: RecordingIntake) -> None:
    """A sensor that keeps its session at the gateway and lost its own begins at 1 again."""
    async with listening(intake) as listener, connected(listener, keeping()) as peer:
        peer.writer.write(publish2("21.5", 1) + publish2("21.6", 1))
        assert await peer.read(12) == ACCEPTED + pubrec(1, 1)
    assert [reading.datum.payload for reading in intake.stored] == [b"21.5", b"21.6"]


# --- the shapes in which a PUBLISH comes again ----------------------------------------------------------------

Way = Literal["same connection", "cut once", "cut three times", "killed once", "killed three times"]
"""The events between the first PUBLISH and the later one with the same identifier."""
WAYS: tuple[Way, ...] = ("same connection", "cut once", "cut three times", "killed once", "killed three times")


class Shape(NamedTuple):
    """A later PUBLISH with the identifier of an earlier one, and the outcome that MQTT 3.1.1 demands."""

    exchange: Literal["open", "released"]
    sent: Literal["same", "other"]
    """The later PUBLISH's bytes."""
    dup: bool
    session: Literal["present", "absent"]
    """Session Present in CONNACK, on the connection of the later PUBLISH."""
    copies: int
    """Readings of the two PUBLISHes."""
    marked: bool
    """Whether the second reading is stored as one that may be a copy."""
    demand: str


OPEN = "4.3.3: until PUBREL comes, the identifier's PUBLISH is answered and not delivered again; DUP is not looked at"
OTHER = "2.3.1: an identifier that is in use must not be given to another message; a client that did was reset"
OVER = "4.3.3: PUBREL has come, so that this is a new message; a client must not send the old one again"
FREE = "2.3.1: the identifier is free after PUBCOMP: this is a new message"
LOST = "3.1.2.4: nothing of an earlier session goes on: this is a new message"
MAYBE = "3.3.1.1: DUP says that it may have been sent before, in a session that is gone"
SHAPES = (
    Shape("open", "same", False, "present", 1, False, OPEN),
    Shape("open", "same", True, "present", 1, False, OPEN),
    Shape("open", "other", False, "present", 2, False, OTHER),
    Shape("open", "other", True, "present", 2, False, OTHER),
    Shape("released", "same", False, "present", 2, True, OVER),
    Shape("released", "same", True, "present", 2, True, OVER),
    Shape("released", "other", False, "present", 2, False, FREE),
    Shape("released", "other", True, "present", 2, False, FREE),
    Shape("open", "same", False, "absent", 2, False, LOST),
    Shape("open", "same", True, "absent", 2, True, MAYBE),
    Shape("open", "other", False, "absent", 2, False, LOST),
    Shape("open", "other", True, "absent", 2, True, MAYBE),
    Shape("released", "same", False, "absent", 2, False, LOST),
    Shape("released", "same", True, "absent", 2, True, MAYBE),
    Shape("released", "other", False, "absent", 2, False, LOST),
    Shape("released", "other", True, "absent", 2, True, MAYBE),
)
CASES = [
    pytest.param(shape, way, id=f"{'-'.join(map(str, shape[:4]))}-{way}")
    for shape in SHAPES
    for way in WAYS
    if shape.session == "present" or way != "same connection"
]


async def first_try(peer: Peer, shape: Shape) -> None:
    """A PUBLISH that is stored, and released where the shape says so."""
    peer.writer.write(publish2("21.5", 7))
    assert await peer.read(4) == pubrec(7)
    if shape.exchange == "released":
        peer.writer.write(pubrel(7))
        assert await peer.read(4) == pubcomp(7)


async def later_try(peer: Peer, shape: Shape) -> None:
    """The later PUBLISH, and all that follows it."""
    peer.writer.write(publish2("21.5" if shape.sent == "same" else "21.6", 7, dup=shape.dup))
    assert await peer.read(4) == pubrec(7), "whatever it is, it is answered"
    peer.writer.write(pubrel(7))
    assert await peer.read(4) == pubcomp(7)


@pytest.mark.parametrize(("shape", "way"), CASES)
async def test_a_publish_with_the_identifier_of_an_earlier_one(shape: Shape, way: Way, intake: RecordingIntake) -> None:
    last = (connect(), ACCEPTED) if shape.session == "absent" else (keeping(), PRESENT)
    between = 2 if "three" in way else 0
    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(listening(intake))
        async with connected(listener, keeping(), ACCEPTED):
            pass
        async with connected(listener, keeping(), PRESENT) as peer:
            await first_try(peer, shape)
            if way == "same connection":
                await later_try(peer, shape)
        for number in range(between + 1 if way != "same connection" else 0):
            if "killed" in way:
                await stack.aclose()
                listener = await stack.enter_async_context(listening(intake))
            async with connected(listener, *((keeping(), PRESENT) if number < between else last)) as peer:
                if number < between:
                    peer.vanish()
                else:
                    await later_try(peer, shape)
    assert len(intake.stored) == shape.copies, shape.demand
    marked = shape.marked and way != "same connection"
    assert [reading.datum.doubt for reading in intake.stored[1:]] == [marked] * (shape.copies - 1), shape.demand
    assert not [key for key in intake.kept if key.endswith("/7")], "the exchange is forgotten"


# --- an identifier that is used again before its PUBCOMP was read ---------------------------------------------


@pytest.mark.parametrize("payload", ["b", "a"])
async def test_pubrel_and_the_next_publish_of_its_identifier_in_one_write_are_answered_in_order(payload: str) -> None:
    """rumqttc does so. A PUBLISH after PUBREL is a new message, even with the same bytes."""
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener, keeping() + publish2("a", 1)) as peer:
        assert await peer.read(8) == ACCEPTED + pubrec(1)
        intake.outcome = None
        peer.writer.write(pubrel(1) + publish2(payload, 1))
        await until(lambda: intake.batches)
        assert await peer.silent()
        peer.writer.write(pubrel(1) + publish2("c", 1) + publish2("c", 1, dup=True))
        await until(lambda: len(intake.batches) == 2)
        intake.decide_all()
        assert await peer.read(20) == pubcomp(1) + pubrec(1) + pubcomp(1) + pubrec(1, 1)
        assert [key for key in intake.kept if key.endswith("/1")], "the exchange of the last one is open"
    assert [(reading.datum.payload.decode(), reading.datum.doubt) for reading in intake.stored] == [
        ("a", False),
        (payload, False),
        ("c", False),
    ]


async def test_an_exchange_in_one_read_is_answered_and_leaves_nothing(intake: RecordingIntake) -> None:
    async with listening(intake) as listener, connected(listener, keeping(), ACCEPTED) as peer:
        peer.writer.write((publish2("a", 1) + pubrel(1)) * 3)
        assert await peer.read(24) == (pubrec(1) + pubcomp(1)) * 3
        assert not [key for key in intake.kept if key.endswith("/1")]
        assert listener.shared.kept.room.unfinished == 0
    assert len(intake.stored) == 3


async def test_a_pubrel_whose_commit_fails_opens_its_exchange_again(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        async with connected(listener, keeping() + publish2("a", 1)) as peer:
            assert await peer.read(8) == ACCEPTED + pubrec(1)
            intake.outcome = False
            peer.writer.write(pubrel(1) + publish2("b", 1))
            assert await peer.read_to_end() == b""
        intake.outcome, listener.shared.refusing_until = True, 0.0
        async with connected(listener, keeping() + publish2("a", 1) + pubrel(1) + publish2("b", 1)) as peer:
            assert await peer.read(16) == PRESENT + pubrec(1) + pubcomp(1) + pubrec(1)
    assert [reading.datum.payload for reading in intake.stored] == [b"a", b"b"]


# --- bounds that close a connection ---------------------------------------------------------------------------


async def test_too_many_unfinished_ends_the_connection_behind_the_answers_of_what_is_stored() -> None:
    """A client that sends all that it holds at once comes through, as many at a time as the bound lets in."""
    intake = RecordingIntake()
    left = {number: publish2(str(number), number) for number in range(1, 8)}
    connections = 0
    async with listening(intake, qos2_unfinished_max=2) as listener:
        while left:
            connections += 1
            assert connections < 10, "each connection makes progress"
            async with connected(listener, keeping()) as peer:
                peer.writer.write(b"".join(left.values()))
                answers = (await peer.read_to_end())[4:] if len(left) > 2 else (await peer.read(4 + 4 * len(left)))[4:]
            for word in (answers[at : at + 4] for at in range(0, len(answers), 4)):
                if word[0] == 0x50:
                    left[word[3]] = pubrel(word[3])
                else:
                    del left[word[3]]
        assert listener.counts["too-many-unfinished"] > 1
    assert [reading.datum.payload for reading in intake.stored] == [b"%d" % number for number in range(1, 8)]
    died = [details["cause"] for kind, _, details in intake.events if kind == "device-died"]
    assert "too-many-unfinished" not in died, "the device is alive"


ENDINGS = {
    "too-many-unfinished": publish2("b", 2) + publish2("c", 3) + publish2("d", 4) + publish2("e", 5),
    "reserved-packet-type": b"\xff\x00",
    "packet-too-large": b"\x32\xff\xff\xff\x7f",
    "intake-refused": publish("refused", 8),
}
"""Reasons for closing a connection, each with bytes that cause it."""


@pytest.mark.parametrize("reason", ENDINGS)
@pytest.mark.parametrize("qos", [1, 2])
async def test_publishes_under_commit_are_answered_before_a_connection_closes(reason: str, qos: int) -> None:
    sent, answer = (publish("a", 1), puback(1)) if qos == 1 else (publish2("a", 1), pubrec(1))
    taken = pubrec(2, 3, 4)[: 4 * (4 - qos)] if reason == "too-many-unfinished" else b""
    intake = RecordingIntake()
    async with listening(intake, qos2_unfinished_max=3) as listener, connected(listener) as peer:
        intake.outcome = None
        peer.writer.write(sent)
        await until(lambda: intake.batches)
        peer.writer.write(PINGREQ + ENDINGS[reason])
        assert await peer.read(2) == PINGRESP
        if reason == "intake-refused":
            intake.decide(False, -1)
        assert listener.counts[reason] == 1
        assert await peer.silent()
        peer.writer.write(publish("not taken", 9))
        intake.decide_all()
        assert await peer.read_to_end() == answer + taken


async def test_a_commit_that_takes_too_long_holds_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSING_COMMITS_S", 0.1)
    intake = RecordingIntake()
    async with listening(intake) as listener, connected(listener) as peer:
        intake.outcome = None
        peer.writer.write(publish2("a", 1) + b"\xff\x00")
        assert await peer.read_to_end() == b""
        peer.writer.close()
        await until(lambda: not listener.shared.connections)
        intake.decide_all()


async def test_a_client_that_reads_nothing_holds_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LINGER_S", 0.1)
    async with listening(RecordingIntake()) as listener, connected(listener) as peer:
        peer.writer.write(publish2("a", 1) + b"\xff\x00")
        await until(lambda: not listener.shared.connections)


async def test_what_one_session_leaves_unfinished_leaves_room_for_others(intake: RecordingIntake) -> None:
    """Even one that never comes back: its exchanges are kept as long as its session."""
    async with listening(intake, qos2_unfinished_total_max=8) as listener:
        greedy = b"".join(publish2("a", number) for number in range(1, 20))
        async with connected(listener, keeping() + greedy) as peer:
            assert await peer.read_to_end() == ACCEPTED + pubrec(1, 2, 3, 4)
        async with connected(listener, keeping("m002") + greedy) as peer:
            assert await peer.read_to_end() == ACCEPTED + pubrec(1, 2)
        async with connected(listener, keeping("m003") + publish2("a", 1)) as peer:
            assert await peer.read(8) == ACCEPTED + pubrec(1)
