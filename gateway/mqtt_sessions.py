"""MQTT sessions, without I/O: what outlives a connection, and what a PUBLISH that comes again means.

What is kept is kept as marks, each in one commit with what it speaks of: `mqtt/session/<name>` is a session,
`mqtt/qos2/<name>/<packet id>` an unfinished exchange with the digest of its message, `mqtt/command/<name>/<packet id>`
a command that waits for its PUBACK. The session's name is random, so that no session inherits what another one left.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import msgspec

from gateway.mqtt_protocol import PUBCOMP, PUBREC, publish
from gateway.reading import Mark, Reading

MARKS: Final = "mqtt/"
"""How the keys of all marks of this ingress begin."""
UNANSWERED_MAX: Final = 64
"""QoS 1 packet identifiers of one connection that are remembered as stored and never answered: more than the usual
client has under way at once."""
UNANSWERED_SESSIONS_MAX: Final = 5_000
"""Sessions for which such are remembered; the oldest make room, and what they resend is stored again, marked."""
RESTART_REACH: Final = 64
"""How far a client's packet identifiers must have counted up on one connection before one of them is trusted to
name one message. See `Unanswered`."""
COUNTING_STEP_MAX: Final = 8
"""The longest step that is counting still: some clients number QoS 0 and SUBSCRIBE too."""
_NEVER: Final = 0x10000
"""Above every packet identifier."""

SessionKey: TypeAlias = tuple[str | None, str]
"""User and client identifier: nobody takes over another user's session."""


class Command(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message for a device, queued with QoS 1."""

    order: int
    """Commands of one session are sent in this order [MQTT-4.6.0-6]; packet identifiers begin again at 1."""
    topic: str
    payload: bytes


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """The value of a session's mark."""

    user: str | None
    client_id: str
    number: int
    subscriptions: dict[str, int]


class Batch:
    """What one read of a connection brought, up to its one commit."""

    __slots__ = (
        "again",
        "answers",
        "at_once",
        "bare",
        "began",
        "commands",
        "counting_from",
        "marks",
        "qos0",
        "readings",
        "released",
        "replies",
        "subscribed",
    )

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.answers: list[int] = []
        """As `acknowledgements` takes them: one for each reading, in order (0 with QoS 0), and `bare`."""
        self.bare: set[int] = set()
        """Positions in `answers` that answer no reading of this batch."""
        self.replies: list[bytes] = []
        """Packets that wait for the same commit and have no order among the answers."""
        self.at_once: list[bytes] = []
        """Packets that wait for nothing."""
        self.marks: dict[str, bytes | None] = {}
        self.qos0 = 0
        """How many of the answers are 0."""
        self.subscribed = False
        """Whether the session's subscriptions changed: its mark is made once, when all of the batch is known."""
        self.began: list[tuple[int, bytes]] = []
        """QoS 2 identifiers whose messages are in this batch, and their digests."""
        self.again: list[tuple[int, bytes]] = []
        """QoS 2 messages that came again: answered only if they are stored by then."""
        self.released: list[int] = []
        self.commands: list[tuple[Session, int]] = []
        """Commands that this batch queues: whose, and under which packet identifier."""
        self.counting_from = _NEVER
        """See `PacketIdRun.advance`."""

    def answer_bare(self, answer: int) -> None:
        """Answer something that is no reading of this batch."""
        self.bare.add(len(self.answers))
        self.answers.append(answer)

    @property
    def waits(self) -> bool:
        """Whether its answers must wait for a commit: its own, or that of a message that came again."""
        return bool(self.readings or self.marks or self.again or self.subscribed)


@dataclass(slots=True)
class Room:
    """What all sessions together may have waiting."""

    commands_bytes_max: int
    unfinished_max: int
    commands_bytes: int = 0
    unfinished: int = 0
    """QoS 2 exchanges."""


class PacketIdInUseError(Exception):
    """A new message under an identifier whose exchange is not finished [MQTT-2.3.1-2]."""


class TooManyUnfinishedError(Exception):
    """More unfinished QoS 2 exchanges than `qos2_unfinished_max` of one session, or `qos2_unfinished_total_max`."""


class TooManyCommandsError(Exception):
    """More commands than `commands_max` of one session, or `commands_bytes_max` of all."""


@dataclass(slots=True, eq=False)
class Session:
    """The state of section 3.1.2.4, as a server has it."""

    key: SessionKey
    name: str
    kept: bool
    """Clean session was 0: it outlives its connection."""
    room: Room
    number: int = 0
    """Sessions are numbered as they begin: of two with one key, the later counts."""
    on_disk: bool = False
    """Whether the commit that keeps it is done: only then may a CONNACK say that it is present."""
    opening: int = 0
    """Commits under way that are to keep it."""
    leaving: int = 0
    """Above 0 once it is removed, or commits that remove it are under way: then nothing new is given to it."""
    received: dict[int, bytes] = field(default_factory=dict)
    """QoS 2 identifiers in use, and the digest of the message each stands for."""
    stored: dict[int, bytes] = field(default_factory=dict)
    """Those of them whose message is committed: what is left where a later message of the identifier is not."""
    earlier: set[int] = field(default_factory=set)
    """Identifiers that an earlier connection left in use."""
    releasing: dict[int, int] = field(default_factory=dict)
    """How many PUBRELs of an identifier wait for their commit."""
    subscriptions: dict[str, int] = field(default_factory=dict)
    commands: dict[int, Command] = field(default_factory=dict)
    """By packet identifier."""
    waiting: list[int] = field(default_factory=list)
    """Identifiers of commands to be sent on this or the next connection, in order."""
    sent_before: set[int] = field(default_factory=set)
    """Identifiers of commands that may have been sent: sent again with DUP [MQTT-3.3.1-1]."""
    idle_since_s: float = 0.0

    @property
    def holds_something(self) -> bool:
        """Whether something would be lost with it: commands, or exchanges that are not finished."""
        return bool(self.commands or self.received)

    @property
    def device(self) -> str:
        """The device that its client is: the user's, or what an anonymous client calls itself."""
        user, client_id = self.key
        return client_id if user is None else user

    # --- QoS 2: exactly once (section 4.3.3, method B with the message stored at once) ----------------------

    def is_known(self, packet_id: int, message: bytes, *, dup: bool) -> bool:
        """Whether a PUBLISH with QoS 2 and the digest `message` is one that came before.

        A client sends again with DUP [MQTT-3.3.1-1]. Without it, the same message under an identifier of an earlier
        connection comes from a client that lost its session and counts from the beginning: it is another message.
        """
        return self.received.get(packet_id) == message and (dup or packet_id not in self.earlier)

    def begin(self, batch: Batch, packet_id: int, message: bytes, unfinished_max: int, *, dup: bool) -> bool:
        """Take a PUBLISH with QoS 2 and the digest `message`; tell whether it is to be stored.

        The same identifier with the same message is the same message until it is released [MQTT-4.3.3-2]. With
        another message it comes from a client that lost its session and did not say so: that message is stored, for
        taking it for the old one would lose it.

        Raises PacketIdInUseError and TooManyUnfinishedError.
        """
        if packet_id in self.releasing:
            raise PacketIdInUseError
        if self.is_known(packet_id, message, dup=dup):
            batch.again.append((packet_id, message))
            batch.answer_bare(PUBREC | packet_id)
            return False
        if packet_id not in self.received:
            if len(self.received) >= unfinished_max or self.room.unfinished >= self.room.unfinished_max:
                raise TooManyUnfinishedError
            self.room.unfinished += 1
        self.received[packet_id] = message
        self.earlier.discard(packet_id)
        batch.began.append((packet_id, message))
        batch.answers.append(PUBREC | packet_id)
        if self.kept:
            batch.marks[self._qos2_key(packet_id)] = message
        return True

    def release(self, batch: Batch, packet_id: int) -> None:
        """Take a PUBREL. One of an unknown identifier is answered too: its PUBCOMP was lost."""
        batch.answer_bare(PUBCOMP | packet_id)
        if packet_id in self.received or packet_id in self.releasing:
            self.releasing[packet_id] = self.releasing.get(packet_id, 0) + 1
            batch.released.append(packet_id)
            if self.kept:
                batch.marks[self._qos2_key(packet_id)] = None

    # --- commands -------------------------------------------------------------------------------------------

    def granted(self, matches: Callable[[str], bool]) -> int | None:
        """The highest QoS among the subscriptions that match a topic [MQTT-3.3.5-1]; None where none does."""
        return max((qos for topic_filter, qos in self.subscriptions.items() if matches(topic_filter)), default=None)

    def queue(self, batch: Batch, topic: str, payload: bytes) -> None:
        """Queue a command with QoS 1, for which `check_room` found room; it is sent when `batch` is committed."""
        self.room.commands_bytes += len(topic) + len(payload)
        order = max((command.order for command in self.commands.values()), default=0) + 1
        packet_id = (order - 1) % 65_535 + 1
        while packet_id in self.commands:
            packet_id = packet_id % 65_535 + 1
        command = Command(order, topic, payload)
        self.commands[packet_id] = command
        batch.commands.append((self, packet_id))
        if self.kept:
            batch.marks[self._command_key(packet_id)] = msgspec.msgpack.encode(command)

    def acknowledged(self, batch: Batch, packet_id: int) -> bool:
        """Take the device's PUBACK of a command; tell whether one was waiting for it."""
        if packet_id not in self.sent_before:
            return False
        self.sent_before.remove(packet_id)
        if packet_id in self.waiting:
            self.waiting.remove(packet_id)
        self._drop(packet_id)
        if self.kept:
            batch.marks[self._command_key(packet_id)] = None
        return True

    def resume(self) -> None:
        """Begin a connection: everything unacknowledged is sent again, in order [MQTT-4.4.0-1]."""
        self.earlier = set(self.received)
        committed = self.sent_before.union(self.waiting)
        self.waiting = sorted(committed, key=lambda packet_id: self.commands[packet_id].order)

    def send_waiting(self) -> bytes:
        """The PUBLISH packets of all commands that wait to be sent."""
        packets = []
        for packet_id in self.waiting:
            command = self.commands[packet_id]
            packets.append(publish(command.topic, command.payload, 1, packet_id, dup=packet_id in self.sent_before))
            self.sent_before.add(packet_id)
        self.waiting.clear()
        return b"".join(packets)

    def load_exchange(self, packet_id: int, message: bytes) -> None:
        """Take up an exchange that was unfinished before a restart; its message is stored."""
        self.received[packet_id] = self.stored[packet_id] = message
        self.room.unfinished += 1

    def load_command(self, packet_id: int, command: Command) -> None:
        """Take up a command that waited before a restart. It may have been sent: that is not known any more."""
        self.commands[packet_id] = command
        self.room.commands_bytes += len(command.topic) + len(command.payload)
        self.sent_before.add(packet_id)

    def clear(self) -> None:
        """Give back the room that its commands and exchanges take: the session is over."""
        for packet_id in tuple(self.commands):
            self._drop(packet_id)
        for packet_id in tuple(self.received):
            self._finish(packet_id)
        self.waiting.clear()
        self.sent_before.clear()

    def _drop(self, packet_id: int) -> None:
        command = self.commands.pop(packet_id, None)
        if command is not None:
            self.room.commands_bytes -= len(command.topic) + len(command.payload)

    # --- the outcome of a commit ----------------------------------------------------------------------------

    def committed(self, batch: Batch) -> bool:
        """Take note that a batch is stored; tell whether all its answers are true.

        One is not where a message came again while its first copy waited for a commit that failed.
        """
        if batch.began:
            self.stored.update(batch.began)
        true = not batch.again or all(self.stored.get(packet_id) == message for packet_id, message in batch.again)
        for packet_id in batch.released:
            self._finish(packet_id)
            self._released(packet_id)
        for session, packet_id in batch.commands:
            if packet_id in session.commands:
                session.waiting.append(packet_id)
        return true

    def undo(self, batch: Batch) -> None:
        """Take note that nothing of a batch is stored; others may have failed before it, or still wait behind it."""
        for packet_id, message in batch.began:
            if self.received.get(packet_id) is not message:
                continue  # a later message of the same identifier, which has an outcome of its own
            if packet_id in self.stored:
                self.received[packet_id] = self.stored[packet_id]
            else:
                self._finish(packet_id)
        for packet_id in batch.released:
            self._released(packet_id)
        for session, packet_id in batch.commands:
            session._drop(packet_id)  # noqa: SLF001 - of this class

    def _finish(self, packet_id: int) -> None:
        if self.received.pop(packet_id, None) is not None:
            self.room.unfinished -= 1
        self.stored.pop(packet_id, None)
        self.earlier.discard(packet_id)

    def _released(self, packet_id: int) -> None:
        self.releasing[packet_id] -= 1
        if not self.releasing[packet_id]:
            del self.releasing[packet_id]

    # --- marks ----------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """What keeps this session, without its exchanges and commands, which have marks of their own."""
        kept = _Kept(self.key[0], self.key[1], self.number, self.subscriptions)
        return Mark(f"{MARKS}session/{self.name}", msgspec.msgpack.encode(kept))

    def forgetting(self) -> dict[str, bytes | None]:
        """The marks that forget this session and all that belongs to it."""
        keys = [f"{MARKS}session/{self.name}"]
        keys += map(self._qos2_key, self.received)
        keys += map(self._command_key, self.commands)
        return dict.fromkeys(keys)

    def _qos2_key(self, packet_id: int) -> str:
        return f"{MARKS}qos2/{self.name}/{packet_id}"

    def _command_key(self, packet_id: int) -> str:
        return f"{MARKS}command/{self.name}/{packet_id}"


def digest(topic: str, payload: bytes) -> bytes:
    """What two copies of a message have in common; 8 bytes, the same after a restart."""
    return hashlib.blake2b(b"%d/%s%s" % (len(topic), topic.encode(), payload), digest_size=8).digest()


def check_room(sessions: Sequence[Session], command_bytes: int, commands_max: int) -> None:
    """Raise TooManyCommandsError unless all of these sessions have room for one more command of this size."""
    if not sessions:
        return
    room = sessions[0].room
    longest = max(len(session.commands) for session in sessions)
    if longest >= commands_max or room.commands_bytes + len(sessions) * command_bytes > room.commands_bytes_max:
        raise TooManyCommandsError


class Opening(NamedTuple):
    """What a CONNECT brings about, once its marks are committed."""

    session: Session
    replaced: Session | None
    """The kept session that a CONNECT with clean session, this one or one before it, ends."""
    marks: dict[str, bytes | None]


class SessionsFullError(Exception):
    """`sessions_max` sessions are kept, or `sessions_per_user_max` of one user, and all are connected."""


class Sessions:
    """The sessions that outlive their connections, each `expiry_s` after its last connection, within two bounds.

    Times are seconds of a clock that begins anew with the process: a box without a clock cannot know how long it was
    off, so that after a start every session's time begins again.
    """

    def __init__(
        self, sessions_max: int, per_user_max: int, expiry_s: float, room: Room, new_name: Callable[[], str]
    ) -> None:
        self._sessions_max = sessions_max
        self._per_user_max = per_user_max
        self._expiry_s = expiry_s
        self._new_name = new_name
        self.room = room
        self._number = 0
        self.kept: dict[SessionKey, Session] = {}
        self._leaving: dict[SessionKey, Session] = {}
        """Sessions that a CONNECT with clean session has taken out, while its commit is under way."""
        self.subscribed: dict[str, list[Session]] = {}
        """By device: the sessions, kept or not, that have subscriptions."""

    def load(self, marks: Mapping[str, bytes], now_s: float) -> list[Mark]:
        """Take up what was kept before a restart; give the marks that forget what belongs to no session."""
        by_name: dict[str, Session] = {}
        strays: list[str] = []
        for key, value in sorted(marks.items(), key=lambda item: not item[0].startswith(f"{MARKS}session/")):
            if not self._load(by_name, key, value):
                strays.append(key)
        forget = dict.fromkeys(strays)
        for session in sorted(by_name.values(), key=lambda session: session.number):
            session.idle_since_s = now_s
            self._number = session.number
            older = self.kept.get(session.key)
            if older is not None:
                # It was replaced, and the commit that was to forget it failed.
                forget |= older.forgetting()
                self.close(older)
            self.kept[session.key] = session
        return [Mark(key, value) for key, value in forget.items()]

    def make_room(self, user: str | None, connected: Callable[[SessionKey], bool]) -> list[Session]:
        """Take out what must go so that this user may have one more: the longest idle, those that hold nothing first.

        There is nothing to count anonymous clients by: for them the bound of all alone holds. Raises SessionsFullError
        where all are connected.
        """
        gone = []
        while full := self._full_of(user):
            idle = [session for session in full if not connected(session.key)]
            if not idle:
                raise SessionsFullError
            session = min(idle, key=lambda session: (session.holds_something, session.idle_since_s, session.number))
            self._remove(session)
            gone.append(session)
        return gone

    def _full_of(self, user: str | None) -> Collection[Session]:
        """The sessions of which one must go for one more of this user; empty where there is room."""
        if user is not None:
            own = [session for session in self.kept.values() if session.key[0] == user]
            if len(own) >= self._per_user_max:
                return own
        return self.kept.values() if len(self.kept) >= self._sessions_max else ()

    def open(self, key: SessionKey, *, clean: bool) -> Opening:
        """Give the session of a CONNECT, and the marks to commit before its CONNACK (section 3.1.2.4).

        `make_room` goes before where `key` is new. What comes of the commit is told by `opened` or `not_opened`.
        """
        leaving = self._leaving.get(key)
        if clean:
            leaving = self.kept.pop(key, leaving)
            session = Session(key, "", False, self.room)
        elif key in self.kept:
            session = self.kept[key]
        else:
            self._number += 1
            session = self.kept[key] = Session(key, self._new_name(), True, self.room, self._number)
        marks: dict[str, bytes | None] = {}
        if leaving is not None:
            # Until a commit has removed it: one that is under way may fail.
            leaving.leaving += 1
            self._leaving[key] = leaving
            marks |= leaving.forgetting()
        if session.kept and not session.on_disk:
            session.opening += 1
            marks |= (session.mark(),)
        return Opening(session, leaving, marks)

    def opened(self, opening: Opening) -> None:
        """Take note that the commit of `open` is done: a CONNACK may promise the session from now on."""
        session, replaced = opening.session, opening.replaced
        if session.kept:
            session.opening = max(session.opening - 1, 0)
            session.on_disk = True
            if not session.leaving:
                self.kept.setdefault(session.key, session)
        if replaced is not None:
            if self._leaving.get(replaced.key) is replaced:
                del self._leaving[replaced.key]
            self.close(replaced)

    def not_opened(self, opening: Opening) -> None:
        """Take note that the commit of `open` failed: what was before it is still so."""
        session, replaced = opening.session, opening.replaced
        if session.kept:
            session.opening = max(session.opening - 1, 0)
            if not (session.opening or session.on_disk) and self.kept.get(session.key) is session:
                self._remove(session)
        if replaced is None or self._leaving.get(replaced.key) is not replaced:
            return
        replaced.leaving -= 1
        if replaced.leaving:
            return
        del self._leaving[replaced.key]
        if (replaced.on_disk or replaced.opening) and replaced.key not in self.kept:
            self.kept[replaced.key] = replaced
        else:
            replaced.leaving = 1
            self.close(replaced)

    def _remove(self, session: Session) -> None:
        del self.kept[session.key]
        session.leaving += 1

    def subscribe(self, session: Session, topic_filter: str, qos: int) -> None:
        """Add a subscription, or replace the one with the same filter [MQTT-3.8.4-3]."""
        if not session.subscriptions:
            self.subscribed.setdefault(session.device, []).append(session)
        session.subscriptions[topic_filter] = qos

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Remove the subscription with exactly this filter [MQTT-3.10.4-1]; tell whether there was one."""
        if session.subscriptions.pop(topic_filter, None) is None:
            return False
        if not session.subscriptions:
            self._unlist(session)
        return True

    def close(self, session: Session) -> None:
        """Give up a session that is over."""
        session.clear()
        if session.subscriptions:
            session.subscriptions = {}
            self._unlist(session)

    def _unlist(self, session: Session) -> None:
        listed = self.subscribed[session.device]
        listed.remove(session)
        if not listed:
            del self.subscribed[session.device]

    def expired(self, now_s: float, connected: Callable[[SessionKey], bool]) -> list[Session]:
        """Take out the sessions whose time is over."""
        over = [
            session
            for key, session in self.kept.items()
            if now_s - session.idle_since_s >= self._expiry_s and not connected(key)
        ]
        for session in over:
            self._remove(session)
        return over

    def _load(self, by_name: dict[str, Session], key: str, value: bytes) -> bool:
        """Take up one mark, sessions first; tell whether it is sound and belongs to a session."""
        try:
            match key.split("/"):
                case [_, "session", name]:
                    kept = msgspec.msgpack.decode(value, type=_Kept)
                    by_name[name] = Session(
                        (kept.user, kept.client_id), name, True, self.room, kept.number, on_disk=True
                    )
                    for topic_filter, qos in kept.subscriptions.items():
                        self.subscribe(by_name[name], topic_filter, qos)
                case [_, "qos2", name, number] if name in by_name:
                    by_name[name].load_exchange(int(number), value)
                case [_, "command", name, number] if name in by_name:
                    by_name[name].load_command(int(number), msgspec.msgpack.decode(value, type=Command))
                case _:
                    return False
        except ValueError:  # of int, of a decoder, of UTF-8
            return False
        return True


class Unanswered(dict[int, bytes]):
    """QoS 1 messages of one connection that are stored and whose PUBACK could not be written: identifier to digest.

    A client that sends one of them again with DUP, on the very next connection of its session, is answered and the
    reading is not stored twice. A false match would lose a reading, so that this holds for the next connection alone:
    a sensor that restarted, lost its session, and used the same identifier for the same value is not to be mistaken
    for one that resends. The next connection that this gateway saw need not be the next one that there was: its
    CONNECT and first PUBLISH may have been lost on the way. So an identifier counts only if it was reached by counting
    up, RESTART_REACH steps or more, on the connection itself: a restarted client begins below that.
    """

    def remember(self, batch: Batch) -> None:
        """Add what a stored batch holds of such messages."""
        readings = iter(batch.readings)
        for position, answer in enumerate(batch.answers):
            if position in batch.bare:
                continue
            reading = next(readings)
            # PUBRECs have more bits: they are QoS 2, and known by their exchange.
            if batch.counting_from + RESTART_REACH <= answer <= 0xFFFF and len(self) < UNANSWERED_MAX:
                self[answer] = digest(reading.topic, reading.payload)


class PacketIdRun:
    """From where on a connection's packet identifiers have been counting up, in short steps and without a break."""

    __slots__ = ("_last", "_start")

    def __init__(self) -> None:
        self._start = 0
        self._last = _NEVER

    def advance(self, first: int, last: int, count: int) -> int:
        """Take the ends of a batch of `count` identifiers; give where the run that it belongs to began.

        Above every identifier where the batch itself does not count up. What stands between its ends is not looked
        at: this is on the way of every reading.
        """
        if not 0 < first - self._last <= COUNTING_STEP_MAX:
            self._start = first
        self._last = last
        if 0 <= last - first <= COUNTING_STEP_MAX * count:
            return self._start
        self._start = last
        return _NEVER


class RecentlyUnanswered:
    """The `Unanswered` of connections that ended, until the next connection of the session takes them."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[SessionKey, Unanswered] = OrderedDict()

    def leave(self, key: SessionKey, unanswered: Unanswered) -> None:
        """Leave for the next connection what is, or will be, stored without an answer."""
        self._by_key[key] = unanswered
        self._by_key.move_to_end(key)
        if len(self._by_key) > UNANSWERED_SESSIONS_MAX:
            self._by_key.popitem(last=False)

    def take(self, key: SessionKey) -> Unanswered | None:
        """Take what the preceding connection left; the connection after this one will not find it."""
        return self._by_key.pop(key, None)
