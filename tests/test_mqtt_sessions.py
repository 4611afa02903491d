"""Sessions: one client against a gateway that loses answers, connections, commits and itself; the rules in small."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.ingress_mqtt_listener import MqttListener
from gateway.mqtt_connection import Connection
from gateway.mqtt_sessions import (
    MARKS,
    RESTART_REACH,
    Batch,
    PacketIdRun,
    Room,
    Session,
    Sessions,
    SessionsFullError,
    TooManyCommandsError,
    TooManyUnfinishedError,
    Unanswered,
    check_room,
    digest,
)
from gateway.reading import Mark, Reading
from gateway.settings import ListenerSettings
from tests.test_ingress_mqtt_listener import RecordingIntake, again, connect, keeping, publish, publish2, pubrel

# --- the state machine ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Message:
    """One message of the client, and how far it has come."""

    qos: int
    payload: str
    packet_id: int
    sent: bool = False
    released: bool = False
    """QoS 2: PUBREC has come."""
    arrivals: set[int] = field(default_factory=set)
    """When the gateway read a copy of it: what a stored reading is known by, as others have its value."""

    def packet(self) -> bytes:
        """What the client sends now; DUP if it sent it before."""
        if self.released:
            return pubrel(self.packet_id)
        if self.qos == 2:
            return publish2(self.payload, self.packet_id, dup=self.sent)
        return (again if self.sent else publish)(self.payload, self.packet_id)


class Line(asyncio.Transport):
    """A connection in memory: what the gateway wrote and the client has not read."""

    def __init__(self, written: Callable[["Line", bytes], None]) -> None:
        super().__init__()
        self.unread = bytearray()
        self.closing = False
        self.clean = False
        """Its CONNECT asked for clean session."""
        self.messages: dict[int, Message] = {}
        """What came over this connection, by packet identifier."""
        self._written = written

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self if name == "socket" else default

    def setsockopt(self, *_: int) -> None:
        """As the listener wants it of a socket."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        self._written(self, bytes(data))
        self.unread += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing comes by itself here."""

    resume_reading = pause_reading


class OneClient(RuleBasedStateMachine):
    """A client with a kept session, QoS 1 and 2, whose QoS 1 messages have few values and whose QoS 2 have their own.

    The ledger: of each message that was answered a copy of its own is stored, which a false match would break; of each
    QoS 2 message there is never more than one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.intake = RecordingIntake()
        self.intake.outcome = None
        self.line: Line | None = None
        self.connection: Connection | None = None
        self.accepted = False
        self.promised = False
        """Whether a CONNACK was read: from then on the session must be present."""
        self.waiting: list[Message] = []
        """What the client has not finished, in its order."""
        self.next_id = {1: 1, 2: 40_001}
        self.qos2_made = 0
        self.answered: set[Message] = set()
        """Messages whose PUBACK or PUBREC was written."""
        self.everything: list[Message] = []
        self.now = 0
        self.in_clean_session = False
        self.gave_up = False
        """Whether exchanges were left unfinished, which stay at the gateway until the session ends."""

    def in_loop(self, step: Callable[[], object]) -> None:
        """Do something that the gateway does in its event loop; each time is another time of receipt."""
        self.now += 1
        if self.connection is not None and self.line is not None and self.connection._opening is not None:
            # What came behind a CONNECT is read when its commit is done.
            for message in self.line.messages.values():
                message.arrivals.add(self.now)

        async def run() -> None:
            step()

        self.loop.run_until_complete(run())

    @initialize()
    def begin(self) -> None:
        self.restart_gateway()

    def teardown(self) -> None:
        self.loop.close()

    # --- the gateway's side -----------------------------------------------------------------------------

    @rule()
    def restart_gateway(self) -> None:
        """kill -9: whatever was not committed is gone."""
        self.intake.forget_undecided()
        self.line = self.connection = None
        self.accepted = False
        self.listener = MqttListener(ListenerSettings(anonymous=True), self.intake, lambda: self.now)
        self.loop.run_until_complete(self.listener._load_sessions())
        self.commit_all()

    @rule(count=st.integers(1, 3))
    def commit(self, count: int) -> None:
        for _ in range(min(count, len(self.intake.batches))):
            self.in_loop(lambda: self.intake.decide(True))
        self.settle()

    @rule()
    @precondition(lambda self: self.intake.batches)
    def refuse(self) -> None:
        self.in_loop(lambda: self.intake.decide(False))
        self.settle()

    def settle(self) -> None:
        """A connection that the gateway closed is gone, and what it wrote last may be lost with it."""
        if self.line is not None and self.line.closing:
            self.cut()

    def written(self, line: Line, data: bytes) -> None:
        """Judge what the gateway says in the moment in which it says it."""
        for word in (data[at : at + 4] for at in range(0, len(data), 4)):
            message = line.messages.get(int.from_bytes(word[2:], "big"))
            if word[0] in {0x40, 0x50}:
                assert message is not None
                self.answered.add(message)

    @invariant()
    def nothing_is_answered_that_is_not_stored(self) -> None:
        stored = {(reading.payload.decode(), reading.received_us) for reading in self.intake.stored}
        for message in self.answered:
            assert stored & {(message.payload, arrival) for arrival in message.arrivals}, message
        copies = Counter(reading.payload for reading in self.intake.stored if reading.payload.startswith(b"exactly"))
        assert set(copies.values()) <= {1}

    # --- the client's side ------------------------------------------------------------------------------

    @rule(eager=st.booleans(), seen=st.booleans())
    @precondition(lambda self: self.line is None)
    def connect(self, eager: bool, seen: bool) -> None:  # noqa: FBT001
        """`eager` does not wait for CONNACK. What is not `seen` is lost on the way, CONNECT and all."""
        self.end_clean_session()
        if not seen:
            for message in self.waiting if eager else ():
                message.sent = True
            return
        self.begin_connection(keeping(), eager=eager)

    def end_clean_session(self) -> None:
        """Nothing of a clean session goes on into the next one [MQTT-3.1.2-6]; QoS 1 it may send again all the same."""
        if self.in_clean_session:
            given_up = [message for message in self.waiting if message.qos == 2 and message.sent]
            self.waiting = [message for message in self.waiting if message not in given_up]
            self.everything = [message for message in self.everything if message not in given_up]
            self.in_clean_session = False

    def begin_connection(self, first: bytes, *, eager: bool, clean: bool = False) -> None:
        self.listener.refusing_until = 0.0
        line = self.line = Line(self.written)
        line.clean = self.in_clean_session = clean
        connection = self.connection = Connection(self.listener, self.loop)
        self.accepted = eager
        data = first + (self.resend() if eager else b"")
        resent = tuple(line.messages.values())
        self.in_loop(lambda: connection.connection_made(line))
        self.send(data, resent)

    @rule()
    def connect_clean(self) -> None:
        """The client gives up its session and all that it had not finished; its QoS 2 identifiers begin again too.

        An older connection may be there still, and may even wait for the commit of its session.
        """
        old, line = self.connection, self.line
        self.line = self.connection = None
        self.give_up_messages()
        self.promised = False
        self.begin_connection(connect(), eager=True, clean=True)
        if old is not None and line is not None and line.closing:
            self.in_loop(lambda: old.connection_lost(None))

    def give_up_messages(self) -> None:
        self.everything = [message for message in self.everything if message not in self.waiting]
        self.waiting.clear()
        self.next_id = {1: 1, 2: 40_001}
        self.gave_up = True

    @rule(decided=st.lists(st.booleans(), max_size=3))
    @precondition(lambda self: self.listener.kept.kept)
    def connect_clean_and_come_back(self, decided: list[bool]) -> None:
        """Some commits succeed in between, some do not; once a clean CONNECT is accepted, nothing is left of before."""
        self.connect_clean()
        for stored in decided:
            if self.intake.batches:
                self.in_loop(lambda stored=stored: self.intake.decide(stored))  # type: ignore[misc]
        self.commit_all()
        line = self.line
        assert line is not None
        was_accepted = bytes(line.unread[:4]) == b"\x20\x02\x00\x00"
        self.cut()
        if was_accepted:
            assert not self.listener.kept.kept
            assert not [key for key in self.intake.kept if "/session/" in key]

    @rule()
    @precondition(lambda self: self.connection is not None and self.connection._opening is not None)
    def take_over_while_opening(self) -> None:
        self.give_up()

    @rule()
    def connect_well(self) -> None:
        """Without any trouble, up to where the client has its CONNACK and sent again what it had to."""
        if self.line is None:
            self.connect(eager=False, seen=True)
        self.commit_all()
        self.settle()
        if self.line is not None:
            self.read()

    @rule()
    @precondition(lambda self: self.line is not None and self.intake.batches)
    def cut_before_the_answer(self) -> None:
        """The commit comes when the connection is gone."""
        self.cut()
        self.commit_all()

    @rule()
    @precondition(lambda self: self.line is not None and self.intake.batches)
    def lose_the_answer(self) -> None:
        """The commit comes, and then the gateway is killed."""
        self.commit_all()
        self.restart_gateway()

    @rule()
    @precondition(lambda self: self.line is not None)
    def cut(self) -> None:
        """Both sides learn that the connection is gone; the client has read nothing more."""
        connection = self.connection
        assert connection is not None
        self.line = self.connection = None
        self.accepted = False
        self.in_loop(lambda: connection.connection_lost(None))

    @rule()
    @precondition(lambda self: self.line is not None)
    def give_up(self) -> None:
        """The client thinks that the connection is gone, the gateway does not: the next one takes it over."""
        old, line = self.connection, self.line
        assert old is not None
        assert line is not None
        self.line = self.connection = None
        self.accepted = False
        self.connect(eager=True, seen=True)
        if line.closing:
            self.in_loop(lambda: old.connection_lost(None))

    @rule(count=st.sampled_from([1, 2, RESTART_REACH + 6]), value=st.sampled_from("ab"), arrives=st.booleans())
    def publish_qos1(self, count: int, value: str, arrives: bool) -> None:  # noqa: FBT001
        self.publish([Message(1, value, self.new_id(1)) for _ in range(count)], arrives=arrives)

    @rule(count=st.integers(1, 3), arrives=st.booleans())
    def publish_qos2(self, count: int, arrives: bool) -> None:  # noqa: FBT001
        messages = []
        for _ in range(count):
            self.qos2_made += 1
            messages.append(Message(2, f"exactly {self.qos2_made}", self.new_id(2)))
        self.publish(messages, arrives=arrives)

    @rule()
    @precondition(lambda self: self.line is not None)
    def read(self) -> None:
        line = self.line
        assert line is not None
        data, line.unread = bytes(line.unread), bytearray()
        answer = b"".join(self.understand(data[at : at + 4]) for at in range(0, len(data), 4))
        if answer:
            self.send(answer, tuple(line.messages.values()))

    @rule()
    def restart_client(self) -> None:
        """It loses its QoS 1 messages and counts from 1 again; a client that keeps nothing must not use QoS 2."""
        if self.line is not None:
            self.cut()
        self.waiting = [message for message in self.waiting if message.qos == 2]
        self.next_id[1] = 1

    @rule(value=st.sampled_from("ab"), seen=st.booleans())
    @precondition(lambda self: self.line is not None)
    def restart_client_after_an_unanswered_reading(self, value: str, seen: bool) -> None:  # noqa: FBT001
        """And the first try of its next reading, of the same value, is lost: with the CONNECT before it, or alone."""
        self.publish_qos1(1, value, arrives=True)
        if self.line is not None:
            self.cut()
        self.commit_all()
        self.restart_client()
        self.publish_qos1(1, value, arrives=True)
        self.connect(eager=False, seen=seen)
        self.commit_all()
        if self.line is not None:
            self.cut()
        self.waiting[-1].sent = True

    def new_id(self, qos: int) -> int:
        self.next_id[qos] += 1
        return self.next_id[qos] - 1

    def publish(self, messages: list[Message], *, arrives: bool) -> None:
        self.waiting += messages
        self.everything += messages
        if self.line is None or not self.accepted:
            return
        packets = b"".join(message.packet() for message in messages)
        for message in messages:
            message.sent = True
        if not arrives:
            self.cut()
            return
        self.line.messages |= {message.packet_id: message for message in messages}
        self.send(packets, messages)

    def resend(self) -> bytes:
        assert self.line is not None
        packets = b"".join(message.packet() for message in self.waiting)
        for message in self.waiting:
            message.sent = True
            self.line.messages[message.packet_id] = message
        return packets

    def send(self, data: bytes, messages: Sequence[Message] = ()) -> None:
        connection = self.connection
        assert connection is not None
        for message in messages:
            message.arrivals.add(self.now + 1)
        self.in_loop(lambda: connection.data_received(data))
        self.settle()

    def understand(self, word: bytes) -> bytes:
        packet_id = int.from_bytes(word[2:], "big")
        message = next((message for message in self.waiting if message.packet_id == packet_id), None)
        match word[0]:
            case 0x20:
                if word[3] == 0:
                    assert word[2] or not self.promised, "a session that was promised is not there"
                    self.promised = self.line is not None and not self.line.clean
                    if not self.accepted:
                        self.accepted = True
                        return self.resend()
            case 0x50:
                assert message is not None
                message.released = True
                return message.packet()
            case 0x40 | 0x70:
                if message is not None:
                    self.waiting.remove(message)
        return b""

    def commit_all(self) -> None:
        while self.intake.batches:
            self.in_loop(lambda: self.intake.decide(True))


class HealedOneClient(OneClient):
    """As before; and at the end, with all trouble over, everything arrives."""

    def teardown(self) -> None:
        try:
            self.heal()
        finally:
            super().teardown()

    def heal(self) -> None:
        for _ in range(20):
            if self.line is None:
                self.connect(eager=False, seen=True)
            self.commit_all()
            self.settle()
            if self.line is not None:
                self.read()
        self.commit_all()
        assert self.waiting == []
        self.nothing_is_answered_that_is_not_stored()
        if self.gave_up:
            self.connect_clean()
            self.commit_all()
            assert self.intake.kept == {}
        assert [key for key in self.intake.kept if "/session/" not in key] == []
        stored = {reading.payload.decode() for reading in self.intake.stored}
        assert stored >= {message.payload for message in self.everything if message.qos == 2}


HealedOneClient.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=40)
TestOneClient = HealedOneClient.TestCase

# --- the rules in small -----------------------------------------------------------------------------------


def kept_marks(*marks: Mark) -> dict[str, bytes]:
    return {mark.key: mark.value for mark in marks if mark.value is not None}


def sessions(sessions_max: int = 10, per_user_max: int = 8, room: Room | None = None) -> Sessions:
    names = iter("abcdefghijklmnopqrstuvwxyz")
    return Sessions(sessions_max, per_user_max, 3_600.0, room or Room(1_000, 100), lambda: next(names))


def opened(table: Sessions, client_id: str = "m001", user: str | None = None) -> Session:
    """A session whose commit is done."""
    opening = table.open((user, client_id), clean=False)
    table.opened(opening)
    return opening.session


def begin(session: Session, packet_id: int, payload: bytes, *, dup: bool = False) -> Batch:
    batch = Batch()
    session.begin(batch, packet_id, digest("t", payload), 10, dup=dup)
    return batch


def test_a_batch_of_many_kinds() -> None:
    """What one read brought is one commit; marks say what a restart must know of it."""
    session, _, marks = sessions().open((None, "m001"), clean=False)
    assert list(marks) == ["mqtt/session/a"]
    batch = Batch()
    assert session.begin(batch, 7, digest("t", b"x"), 10, dup=False)
    assert not session.begin(batch, 7, digest("t", b"x"), 10, dup=False)
    session.release(batch, 8)
    assert batch.marks == {"mqtt/qos2/a/7": digest("t", b"x")}
    assert session.committed(batch)
    later = Batch()
    session.release(later, 7)
    assert later.marks == {"mqtt/qos2/a/7": None}
    session.undo(later)
    assert 7 in session.received, "a PUBREL whose commit failed has released nothing"
    again_later = Batch()
    session.release(again_later, 7)
    session.committed(again_later)
    assert not session.received


def test_a_clean_session_leaves_no_mark() -> None:
    session, _, marks = sessions().open((None, "m001"), clean=True)
    batch = begin(session, 1, b"x")
    session.release(batch, 1)
    assert marks == batch.marks == {}


def test_what_is_loaded_is_what_was_kept() -> None:
    before = sessions()
    session = opened(before, "\u00fc/+#\0", "m001")
    before.subscribe(session, "command/m001/#", 1)
    batch = begin(session, 65_535, b"x")
    session.queue(batch, "command/m001/set", b"\x00on")
    session.committed(batch)
    kept = kept_marks(session.mark(), *(Mark(key, value) for key, value in batch.marks.items()))
    after = sessions()
    assert after.load(kept, 5.0) == []
    loaded = after.kept["m001", "\u00fc/+#\0"]
    assert (loaded.received, loaded.stored, loaded.commands, loaded.subscriptions) == (
        session.received,
        session.stored,
        session.commands,
        session.subscriptions,
    )
    assert (loaded.on_disk, loaded.idle_since_s, after.room) == (True, 5.0, before.room)
    assert after.subscribed == {"m001": [loaded]}
    loaded.resume()
    assert loaded.send_waiting()[0] == 0x3A, "it may have been sent before the restart"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qos2/gone/1", b"12345678"),
        ("qos2/a/x", b"12345678"),
        ("command/a/1", b"rubbish"),
        ("command/gone/1", b""),
        ("session/b", b"\xff"),
        ("session/b", b"\x93\xc0\xa1\xff\x80"),
        ("something", b""),
        ("", b""),
    ],
)
def test_marks_that_belong_to_nothing_are_forgotten(key: str, value: bytes) -> None:
    session = opened(sessions())
    after = sessions()
    assert after.load({**kept_marks(session.mark()), MARKS + key: value}, 0.0) == [Mark(MARKS + key, None)]
    assert list(after.kept) == [(None, "m001")]


def test_of_two_sessions_with_one_key_the_later_counts() -> None:
    """The older one's exchanges would make new messages look old."""
    table = sessions()
    table.open((None, "m000"), clean=False)
    first = opened(table)
    table.open((None, "m001"), clean=True)
    second = opened(table)
    batch = begin(first, 7, b"x")
    after = sessions()
    forgotten = after.load(kept_marks(second.mark(), first.mark(), *map(Mark, batch.marks, batch.marks.values())), 0.0)
    assert set(forgotten) == {Mark("mqtt/session/b", None), Mark("mqtt/qos2/b/7", None)}
    assert after.kept[None, "m001"].name == "c"
    assert after.room.unfinished == 0
    assert opened(after, "m002").number == second.number + 1


def test_beyond_the_bound_the_longest_idle_session_goes_and_one_that_holds_something_last() -> None:
    table = sessions(sessions_max=3)
    for number, name in enumerate(("busy", "old", "new")):
        opened(table, name).idle_since_s = float(number)
    begin(table.kept[None, "busy"], 7, b"x")
    assert [session.key[1] for session in table.make_room(None, lambda _: False)] == ["old"]
    opened(table, "fourth").idle_since_s = 3.0
    assert [session.key[1] for session in table.make_room(None, lambda key: key[1] == "new")] == ["fourth"]
    assert table.make_room(None, lambda _: False) == []
    opened(table, "fifth")
    with pytest.raises(SessionsFullError):
        table.make_room(None, lambda _: True)


def test_a_user_who_keeps_too_many_sessions_displaces_nobody_elses() -> None:
    table = sessions(per_user_max=2)
    opened(table, "other", "m002")
    for number in range(5):
        gone = table.make_room("m001", lambda _: False)
        assert [session.key[1] for session in gone] == ([str(number - 2)] if number >= 2 else [])
        opened(table, str(number), "m001").idle_since_s = 1.0 + number
    assert sorted(table.kept) == [("m001", "3"), ("m001", "4"), ("m002", "other")]
    for number in range(5):
        assert table.make_room(None, lambda _: False) == [], "anonymous clients have no user to be counted by"
        opened(table, str(number))


@pytest.mark.parametrize("in_time", [True, False])
def test_a_session_that_a_clean_connect_removed_does_not_come_back(in_time: bool) -> None:  # noqa: FBT001
    """Its own commit may still be under way, and may fail."""
    table = sessions()
    first = table.open((None, "m001"), clean=False)
    second = table.open((None, "m001"), clean=True)
    (table.opened if in_time else table.not_opened)(first)
    table.opened(second)
    assert not table.kept
    assert second.marks == {"mqtt/session/a": None}


@pytest.mark.parametrize("kept_first", [True, False])
def test_a_clean_connect_whose_commit_failed_removed_nothing(kept_first: bool) -> None:  # noqa: FBT001
    """What it would have removed is as it was: there, unless that failed too."""
    table = sessions()
    first = table.open((None, "m001"), clean=False)
    second = table.open((None, "m001"), clean=True)
    (table.opened if kept_first else table.not_opened)(first)
    table.not_opened(second)
    assert list(table.kept.values()) == ([first.session] if kept_first else [])
    assert bool(first.session.leaving) != kept_first


def test_of_two_clean_connects_one_is_enough() -> None:
    table = sessions()
    session = opened(table)
    one, two = table.open(session.key, clean=True), table.open(session.key, clean=True)
    assert one.marks == two.marks == {"mqtt/session/a": None}
    table.not_opened(one)
    assert not table.kept, "the other one may still forget it"
    table.opened(two)
    assert not table.kept


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_refused_messages_of_one_identifier_leave_nothing(order: tuple[int, int]) -> None:
    session = opened(sessions())
    batches = [begin(session, 5, b"A"), begin(session, 5, b"B")]
    for number in order:
        session.undo(batches[number])
    assert session.received == {}
    assert session.room.unfinished == 0


def test_a_refused_message_leaves_the_one_of_its_identifier_that_is_stored() -> None:
    session = opened(sessions())
    session.committed(begin(session, 5, b"A"))
    refused, stored = begin(session, 5, b"B"), begin(session, 5, b"C")
    session.undo(refused)
    session.committed(stored)
    session.undo(begin(session, 5, b"D"))
    assert session.received == {5: digest("t", b"C")}


def test_a_message_without_dup_on_a_later_connection_is_another_one() -> None:
    session = opened(sessions())
    session.committed(begin(session, 1, b"21.5"))
    assert session.is_known(1, digest("t", b"21.5"), dup=False)
    session.resume()
    assert session.is_known(1, digest("t", b"21.5"), dup=True)
    assert not session.is_known(1, digest("t", b"21.5"), dup=False)
    begin(session, 1, b"21.5")
    assert session.is_known(1, digest("t", b"21.5"), dup=False), "of this connection now"


def test_unfinished_exchanges_of_all_sessions_are_bounded() -> None:
    table = sessions(room=Room(1_000, 2))
    one, two = opened(table), opened(table, "m002")
    begin(one, 1, b"x")
    begin(two, 1, b"x")
    with pytest.raises(TooManyUnfinishedError):
        begin(two, 2, b"x")
    begin(two, 1, b"y")
    table.close(one)
    begin(two, 2, b"x")
    assert table.room.unfinished == 2


def test_commands_keep_their_order_and_their_bounds() -> None:
    table = sessions(room=Room(20, 10))
    session = opened(table)
    batch = Batch()
    for payload in (b"1", b"2"):
        check_room([session], 2, 2)
        session.queue(batch, "t", payload)
    with pytest.raises(TooManyCommandsError):
        check_room([session], 2, 2)
    check_room([session, session], 8, 9)
    with pytest.raises(TooManyCommandsError):
        check_room([session, session], 9, 9)
    assert session.send_waiting() == b"", "not before the commit"
    session.committed(batch)
    assert session.send_waiting() == b"\x32\x06\x00\x01t\x00\x011" + b"\x32\x06\x00\x01t\x00\x022"
    done = Batch()
    assert session.acknowledged(done, 1)
    assert done.marks == {"mqtt/command/a/1": None}
    session.resume()
    assert session.send_waiting() == b"\x3a\x06\x00\x01t\x00\x022"
    table.close(session)
    assert table.room.commands_bytes == 0


def test_a_command_whose_commit_failed_was_never_there() -> None:
    table = sessions()
    session = opened(table)
    batch = Batch()
    session.queue(batch, "t", b"1")
    session.undo(batch)
    assert session.commands == {}
    assert table.room.commands_bytes == 0
    assert not session.acknowledged(Batch(), 1)


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
        batch = Batch()
        batch.answers = identifiers
        batch.readings = [Reading("t", "t", b"x", 0)] * len(identifiers)
        batch.counting_from = run.advance(identifiers[0], identifiers[-1], len(identifiers))
    unanswered = Unanswered()
    unanswered.remember(batch)
    assert sorted(unanswered) == trusted
