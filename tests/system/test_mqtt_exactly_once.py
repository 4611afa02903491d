"""One client against a gateway that loses answers, connections, commits and itself: nothing lost, nothing doubled."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.listener.connection import Connection
from gateway.listener.door import Caller, Source
from gateway.listener.listener import MqttListener
from gateway.listener.redelivery import RESTART_REACH
from gateway.listener.turns import REST_S
from gateway.settings import ListenerSettings
from tests.support.mqtt_peers import RecordingIntake, again, connect, keeping, publish, publish2, pubrel
from tests.support.sizes import size


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

    def packet(self, *, says_dup: bool = True) -> bytes:
        """The packet that the client sends now. It has DUP if the client sent it before and says so."""
        if self.released:
            return pubrel(self.packet_id)
        if self.qos == 2:
            return publish2(self.payload, self.packet_id, dup=self.sent and says_dup)
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
        """Messages of this connection, by packet identifier."""
        self._written = written

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self if name == "socket" else default

    def setsockopt(self, *_: int) -> None:
        """Do nothing: the listener sets options of a socket."""

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
    QoS 2 message there is never more than one, and never more than one without a mark where the client sent a PUBLISH
    again after its PUBREL. It may send QoS 2 again without DUP, as many clients do.
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
        """Messages that the client has not finished, in its order."""
        self.next_id = {1: 1, 2: 40_001}
        self.qos2_made = 0
        self.answered: set[Message] = set()
        """Messages whose PUBACK or PUBREC was written."""
        self.everything: list[Message] = []
        self.now = 0
        self.in_clean_session = False
        self.says_dup = True
        """Whether it sends QoS 2 again with DUP, on this connection."""
        self.forgot: set[str] = set()
        """Payloads of QoS 2 messages that it sent again after their PUBREL."""
        self.gave_up = False
        """Whether exchanges were left unfinished, which stay at the gateway until the session ends."""

    def in_loop(self, step: Callable[[], object]) -> None:
        """Do something that the gateway does in its event loop; each time is another time of receipt."""
        self.now += 1
        if self.connection is not None and self.line is not None and self.connection._connect_waits:
            # What came after a CONNECT is read when its commit is done.
            for message in self.line.messages.values():
                message.arrivals.add(self.now)

        async def run() -> None:
            step()
            while self.connection is not None and self.connection._is_in_line:
                await asyncio.sleep(REST_S)

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

    @rule()
    @precondition(lambda self: self.intake.batches)
    def refuse_newest(self) -> None:
        self.in_loop(lambda: self.intake.decide(False, -1))
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
        stored = {(reading.datum.payload.decode(), reading.datum.received_us) for reading in self.intake.stored}
        for message in self.answered:
            assert stored & {(message.payload, arrival) for arrival in message.arrivals}, message
        copies = Counter(
            reading.datum.payload
            for reading in self.intake.stored
            if reading.datum.payload.startswith(b"exactly")
            and not (reading.datum.doubt and reading.datum.payload.decode() in self.forgot)
        )
        assert set(copies.values()) <= {1}

    # --- the client's side ------------------------------------------------------------------------------

    @rule(eager=st.booleans(), seen=st.booleans(), says_dup=st.booleans())
    @precondition(lambda self: self.line is None)
    def connect(self, eager: bool, seen: bool, says_dup: bool = True) -> None:  # noqa: FBT001, FBT002
        """`eager` does not wait for CONNACK. What is not `seen` is lost on the way, CONNECT and all."""
        self.end_clean_session()
        self.says_dup = says_dup
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
        self.listener.shared.refusing_until = 0.0
        line = self.line = Line(self.written)
        line.clean = self.in_clean_session = clean
        connection = self.connection = Connection(self.listener.shared, self.loop, Caller("", Source("", 1.0)))
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
    @precondition(lambda self: self.listener.shared.kept.kept)
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
            assert not self.listener.shared.kept.kept
            assert not [key for key in self.intake.kept if "/session/" in key]

    @rule()
    @precondition(lambda self: self.line is None and self.listener.shared.kept.kept)
    def expire(self) -> None:
        """The session's time is over, and what the client had not finished is given up with it."""
        self.give_up_messages()
        self.promised = False
        for session in self.listener.shared.kept.kept.values():
            session.idle_since_s = float("-inf")
        self.in_loop(self.listener._expire_sessions)

    @rule()
    @precondition(lambda self: self.connection is not None and self.connection._connect_waits)
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

    @rule()
    @precondition(lambda self: self.line is None and any(message.released for message in self.waiting))
    def forget_the_pubrel(self) -> None:
        """Like paho after a connection attempt that fails: it sends a PUBLISH again whose PUBREL it has sent."""
        for message in self.waiting:
            if message.released:
                message.released = False
                self.forgot.add(message.payload)

    @rule(killed=st.booleans())
    def lose_a_pubcomp_and_forget_the_pubrel(self, killed: bool) -> None:  # noqa: FBT001
        self.connect_well()
        self.publish_qos2(1, arrives=True)
        for _ in range(2):
            self.commit_all()
            if self.line is not None and not self.line.closing:
                self.read()
        self.commit_all()
        if killed:
            self.restart_gateway()
        elif self.line is not None:
            self.cut()
        if self.line is None:
            self.forget_the_pubrel()
            self.connect_well()
            self.commit_all()

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
        packets = b"".join(message.packet(says_dup=self.says_dup) for message in self.waiting)
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
    """At the end, with all trouble over, everything arrives."""

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
        left = [key for key in self.intake.kept if "/session/" not in key and not key.endswith("/released")]
        assert left == []
        stored = {reading.datum.payload.decode() for reading in self.intake.stored}
        assert stored >= {message.payload for message in self.everything if message.qos == 2}


HealedOneClient.TestCase.settings = hypothesis_settings(max_examples=size(50, 150), stateful_step_count=40)
TestOneClient = pytest.mark.campaign(seconds=5)(HealedOneClient.TestCase)
