"""One MQTT session, without I/O: exchanges with QoS 2 and commands, in step with the commits that keep them.

What is kept is kept as marks, each in one commit with what it speaks of: `mqtt/session/<name>` is a session,
`mqtt/qos2/<name>/<packet id>` an unfinished exchange with the digest of its message, `mqtt/command/<name>/<packet id>`
a command that waits for its PUBACK. The session's name is random, so that no session inherits what another one left.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from gateway.mqtt_protocol import PUBCOMP, PUBREC, publish
from gateway.reading import Mark, Reading

MARKS: Final = "mqtt/"
"""How the keys of all marks of this ingress begin."""
NOT_COUNTING: Final = 0x10000
"""Above every packet identifier: where a batch's do not count up."""

SessionKey: TypeAlias = tuple[str | None, str]
"""User and client identifier: nobody takes over another user's session."""


class Command(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message for a device, queued with QoS 1."""

    order: int
    """Commands of one session are sent in this order [MQTT-4.6.0-6]; packet identifiers begin again at 1."""
    topic: str
    payload: bytes


class KeptSession(msgspec.Struct, frozen=True, array_like=True):
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
        self.counting_from = NOT_COUNTING
        """See `mqtt_redelivery.PacketIdRun.advance`."""

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
    """Commits under way that are to forget it: while there are any, nothing new is given to it."""
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
        kept = KeptSession(self.key[0], self.key[1], self.number, self.subscriptions)
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
