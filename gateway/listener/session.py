"""One MQTT session: its QoS 2 exchanges and commands, in step with the commits that keep them; no I/O.

A session is kept as marks. Each mark is stored in one commit with the readings that it concerns:

- `mqtt/session/<name>`: the session
- `mqtt/qos2/<name>/<packet id>`: an unfinished exchange, with the digest of its message
- `mqtt/qos2/<name>/released`: the exchanges that were released last
- `mqtt/command/<name>/<packet id>`: an operator's command that waits for its PUBACK

The session's name is random, so that no session inherits another session's marks.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from gateway.listener.released import Released
from gateway.mqtt.protocol import PUBCOMP, PUBREC, VERSION_4, Dialect
from gateway.reading import Mark, Reading

SESSION_MARKS: Final = "mqtt/"
"""Prefix of the keys of all marks of this ingress."""
RELEASED: Final = "released"
"""Stands for the packet identifier in the key of the mark of released exchanges."""
NOT_COUNTING: Final = 0x10000
"""A number above every packet identifier, for batches whose identifiers do not count up."""

SessionKey: TypeAlias = tuple[str | None, str]
"""User and client identifier. With the user in it, nobody takes over another user's session."""


class Command(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message for a device. With QoS 1 it is queued, and this is the value of its mark."""

    order: int
    """Commands of one session are sent in this order [MQTT-4.6.0-6], as packet identifiers begin again at 1."""
    topic: str
    payload: bytes
    forwarded: bytes = b""
    """Properties that an operator sent along, encoded (MQTT 5, 3.3.2.3)."""
    expires_us: int | None = None
    """When it is no longer to be sent: CLOCK_BOOTTIME of the kernel's boot `boot` (MQTT 5, 3.3.2.3.3)."""
    boot: str = ""
    id: str = ""
    """Name of a command from the cloud. No mark keeps it in the session, as the gateway's ledger of commands has it."""

    @property
    def size(self) -> int:
        """Bytes that count for `mqtt_listener.commands_bytes_max`."""
        return len(self.topic) + len(self.payload) + len(self.forwarded)

    @property
    def expires_here(self) -> bool:
        """Whether the session gives it up when its time is over. The ledger withdraws a command of the cloud."""
        return self.expires_us is not None and not self.id

    def packet(self, dialect: Dialect, qos: int, packet_id: int, *, dup: bool, now_us: int) -> bytes:
        """Its PUBLISH; empty if the device takes no packet of this size."""
        expiry_s = None if self.expires_us is None else max(0, -((now_us - self.expires_us) // 1_000_000))
        return dialect.publish(
            self.topic, self.payload, qos, packet_id, dup=dup, forwarded=self.forwarded, expiry_s=expiry_s
        )


class KeptSession(msgspec.Struct, frozen=True, array_like=True):
    """The value of a session's mark."""

    user: str | None
    client_id: str
    number: int
    subscriptions: dict[str, int]
    expiry_s: int | None = None
    """As `Session.expiry_s`."""


class ClientBatch:
    """Everything that one read of a connection brought. If one reading needs the disk, all wait for its commit."""

    __slots__ = (
        "answers",
        "at_once",
        "bare",
        "code",
        "commands",
        "counting_from",
        "exchanges",
        "follows",
        "is_stored",
        "is_undone",
        "marks",
        "qos0",
        "readings",
        "replies",
        "subscribed",
        "untrue",
        "weight_bytes",
    )

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.answers: list[int] = []
        """Answers for `acknowledgements`: one for each reading, in order (0 with QoS 0), and the bare ones."""
        self.bare: set[int] = set()
        """Positions in `answers` that answer no reading of this batch."""
        self.replies: list[bytes] = []
        """Packets that wait for the same commit, in any order among the answers."""
        self.at_once: list[bytes] = []
        """Packets that wait for nothing."""
        self.marks: dict[str, bytes | None] = {}
        self.qos0 = 0
        """Number of answers that are 0."""
        self.subscribed = False
        """Whether the session's subscriptions changed. Its mark is made once, when the batch is complete."""
        self.exchanges: dict[int, bytes | None] = {}
        """Changes of QoS 2 exchanges by identifier: the digest of the message if an exchange begins, None if it is
        released. Of several changes of one identifier the last counts, as all are in one commit."""
        self.follows: list[tuple[int, ClientBatch]] = []
        """Positions in `answers` that are true only if another batch under way is stored too, and that batch."""
        self.is_stored = False
        """Whether it is stored. It may still wait for earlier batches of its connection."""
        self.is_undone = False
        """Whether the batch is decided, and nothing of it was stored."""
        self.untrue: set[int] = set()
        """Positions in `answers` that must not be written although this batch is stored."""
        self.commands: list[tuple[Session, int]] = []
        """Commands that this batch queues: their session and packet identifier."""
        self.counting_from = NOT_COUNTING
        """First identifier of the run that the batch belongs to (`listener.redelivery.PacketIdRun`)."""
        self.weight_bytes = 0
        """Bytes that it takes in memory until it is decided."""
        self.code = 0
        """Reason code of its answers if none of it was stored and the client is told so; else 0."""

    def answer_bare(self, answer: int) -> None:
        """Add an answer that belongs to no reading of this batch."""
        self.bare.add(len(self.answers))
        self.answers.append(answer)

    @property
    def has_only_readings(self) -> bool:
        """Whether all of its answers belong to its readings. Then they can be refused, and nothing is left behind."""
        return bool(self.readings) and not (self.bare or self.replies or self.follows or self.subscribed)

    @property
    def waits(self) -> bool:
        """Whether the answers must wait for a commit, of this batch or of a batch that it follows."""
        return bool(self.readings or self.marks or self.follows or self.subscribed)


@dataclass(slots=True)
class Room:
    """Room that all sessions share for commands and unfinished QoS 2 exchanges."""

    commands_bytes_max: int
    unfinished_max: int
    boot: str = ""
    """The kernel's boot that CLOCK_BOOTTIME counts from."""
    commands_bytes: int = 0
    expiring: int = 0
    """Number of commands that sessions give up when their time is over."""
    unfinished: int = 0
    """Number of unfinished QoS 2 exchanges."""
    sent_of_cloud: set[str] = field(default_factory=set)
    """Open commands of the cloud that were sent to a device, by id. They outlive a session that is not kept."""


class TooManyUnfinishedError(Exception):
    """More unfinished QoS 2 exchanges than one session may have; see `Session.begin`."""


class TooManyCommandsError(Exception):
    """More commands than `commands_max` allows a session, or `commands_bytes_max` allows all."""


@dataclass(slots=True, eq=False)
class Session:
    """The server's session state (section 3.1.2.4)."""

    key: SessionKey
    name: str
    kept: bool
    """Whether it outlives its connection: clean session was 0."""
    room: Room
    number: int = 0
    """Sessions are numbered as they begin. Of two sessions with one key, the later counts."""
    on_disk: bool = False
    """Whether a commit has stored the session. Only then may CONNACK say that it is present."""
    opening: int = 0
    """Number of commits under way that store the session."""
    leaving: int = 0
    """Number of commits under way that forget the session. While there are any, it gets no commands."""
    stored: dict[int, bytes] = field(default_factory=dict)
    """Committed QoS 2 exchanges: identifier to the digest of the message."""
    changing: dict[int, list[ClientBatch]] = field(default_factory=dict)
    """Batches under way that begin or release an exchange, in order, by identifier."""
    unfinished: int = 0
    """Number of identifiers in `stored` or `changing`."""
    released: Released = field(default_factory=Released)
    subscriptions: dict[str, int] = field(default_factory=dict)
    commands: dict[int, Command] = field(default_factory=dict)
    """Commands that wait for their PUBACK, by packet identifier."""
    waiting: list[int] = field(default_factory=list)
    """Identifiers of commands to send on this or the next connection, in order."""
    sent_before: set[int] = field(default_factory=set)
    """Identifiers of commands that may have been sent, and are sent again with DUP [MQTT-3.3.1-1]."""
    in_flight: set[int] = field(default_factory=set)
    """Identifiers that were sent on this connection and wait for their PUBACK, of withdrawn commands too."""
    order_withdrawn: int = 0
    """Highest order of a withdrawn command. A late PUBACK for it must name no later command."""
    given_up: set[int] = field(default_factory=set)
    """Identifiers of commands that are not sent: they have expired, or are too large for the device."""
    expiry_s: int | None = None
    """Seconds that it is kept after its connection, by MQTT 5; None is `mqtt_listener.session_expiry_s`."""
    idle_since_s: float = 0.0

    @property
    def holds_something(self) -> bool:
        """Whether it holds commands or unfinished exchanges, which would be lost with it."""
        return bool(self.commands or self.unfinished)

    @property
    def device(self) -> str:
        """The client's device: the user name, or an anonymous client's identifier."""
        user, client_id = self.key
        return client_id if user is None else user

    # --- QoS 2: exactly once (section 4.3.3, method B with the message stored at once) ----------------------

    def is_known(self, packet_id: int, message: bytes) -> bool:
        """Whether an exchange with this identifier and the digest `message` is open, whatever DUP says."""
        return self._message(packet_id) == message

    def begin(self, batch: ClientBatch, packet_id: int, message: bytes, unfinished_max: int) -> bool:
        """Take a PUBLISH with QoS 2 and the digest `message`; return whether it must be stored.

        Until PUBREL, an equal message under the same identifier is a copy [MQTT-4.3.3-2]. Another message under it
        comes from a client that lost its session and did not say so. It is stored, as a message taken for a copy
        would be lost.

        A session may have `unfinished_max` exchanges, and at most as many as `room` has free. Raises
        TooManyUnfinishedError.
        """
        if self.is_known(packet_id, message):
            self._follow(batch, packet_id)
            batch.answer_bare(PUBREC | packet_id)
            return False
        if not self._is_in_use(packet_id):
            room = self.room
            if self.unfinished >= min(unfinished_max, room.unfinished_max - room.unfinished):
                raise TooManyUnfinishedError
        self._change(batch, packet_id, message)
        batch.answers.append(PUBREC | packet_id)
        if self.kept:
            batch.marks[self._qos2_key(packet_id)] = message
        return True

    def release(self, batch: ClientBatch, packet_id: int, now_us: int) -> None:
        """Take a PUBREL. One with an unknown identifier is answered too, as its PUBCOMP was lost.

        From here on a PUBLISH with the identifier is a new message, although PUBCOMP still waits for its commit.
        """
        if self._is_in_use(packet_id):
            message = self._message(packet_id)
            if message is not None:
                self._follow(batch, packet_id)
                self.released.add(packet_id, message, now_us)
            self._change(batch, packet_id, None)
            if self.kept:
                batch.marks[self._qos2_key(packet_id)] = None
                batch.marks[self._qos2_key(RELEASED)] = self.released.packed
        batch.answer_bare(PUBCOMP | packet_id)

    def _is_in_use(self, packet_id: int) -> bool:
        return packet_id in self.stored or packet_id in self.changing

    def _message(self, packet_id: int) -> bytes | None:
        """The digest of an open exchange's message, by the last batch under way or else by the last commit."""
        under_way = self.changing.get(packet_id)
        return self.stored.get(packet_id) if under_way is None else under_way[-1].exchanges[packet_id]

    def _change(self, batch: ClientBatch, packet_id: int, message: bytes | None) -> None:
        """Let a batch begin an exchange, or release it if `message` is None."""
        if not self._is_in_use(packet_id):
            self.unfinished += 1
            self.room.unfinished += 1
        if packet_id not in batch.exchanges:
            self.changing.setdefault(packet_id, []).append(batch)
        batch.exchanges[packet_id] = message

    def _follow(self, batch: ClientBatch, packet_id: int) -> None:
        """Let a batch's next answer depend on the batch under way that began the exchange, if there is one."""
        under_way = self.changing.get(packet_id)
        if under_way is not None and under_way[-1] is not batch:
            batch.follows.append((len(batch.answers), under_way[-1]))

    # --- commands -------------------------------------------------------------------------------------------

    def granted(self, matches: Callable[[str], bool]) -> int | None:
        """The highest QoS among the subscriptions that match a topic [MQTT-3.3.5-1]; None if none matches."""
        return max((qos for topic_filter, qos in self.subscriptions.items() if matches(topic_filter)), default=None)

    def queue(self, batch: ClientBatch, command: Command) -> None:
        """Queue a command with QoS 1, to be sent when `batch` is committed. Call `check_room` first."""
        packet_id = self._add(command)
        batch.commands.append((self, packet_id))
        if self.kept:
            batch.marks[self._command_key(packet_id)] = msgspec.msgpack.encode(self.commands[packet_id])

    def queue_of_cloud(self, command: Command) -> None:
        """Queue a command of the cloud with QoS 1, to be sent at once. Call `check_room` first."""
        self.waiting.append(self._add(command))

    def holds(self, command_id: str) -> bool:
        """Whether a command of the cloud waits here for its PUBACK."""
        return any(command.id == command_id for command in self.commands.values())

    def withdraw(self, command_id: str) -> None:
        """Drop a command of the cloud."""
        found = [packet_id for packet_id, command in self.commands.items() if command.id == command_id]
        for packet_id in found:
            self.order_withdrawn = max(self.order_withdrawn, self.commands[packet_id].order)
            self._end(packet_id)

    def _add(self, command: Command) -> int:
        """Add a command; return its packet identifier."""
        order = max((each.order for each in self.commands.values()), default=0)
        order = max(order, self.order_withdrawn) + 1
        packet_id = (order - 1) % 65_535 + 1
        while packet_id in self.commands:
            packet_id = packet_id % 65_535 + 1
        boot = "" if command.expires_us is None else self.room.boot
        self.commands[packet_id] = replace(command, order=order, boot=boot)
        self._take_room(command)
        return packet_id

    def acknowledged(self, batch: ClientBatch, packet_id: int) -> Command | None:
        """Take the device's PUBACK; return the command that was waiting for it, if there is one."""
        self.in_flight.discard(packet_id)
        if packet_id not in self.sent_before:
            return None
        command = self.commands[packet_id]
        self._end(packet_id)
        if self.kept and not command.id:
            batch.marks[self._command_key(packet_id)] = None
        return command

    def resume(self) -> None:
        """Begin a connection, on which all unacknowledged commands are sent again in order [MQTT-4.4.0-1]."""
        self.released.resume()
        self.in_flight.clear()
        committed = self.sent_before.union(self.waiting)
        self.waiting = sorted(committed, key=lambda packet_id: self.commands[packet_id].order)

    def send_waiting(self, dialect: Dialect = VERSION_4, now_us: int = 0) -> bytes:
        """Return the PUBLISH packets of commands that wait to be sent, and take them as sent.

        These are as many as the client's Receive Maximum allows (MQTT 5, 4.9). A command that may not be sent any more,
        or that the client does not take, is `given_up` (MQTT 5, 3.3.2.3.3 and [MQTT-3.1.2-25]).
        """
        packets: list[bytes] = []
        room = dialect.receives - len(self.in_flight)
        taken = 0
        for packet_id in self.waiting:
            if len(packets) >= room:
                break
            taken += 1
            command = self.commands[packet_id]
            packet = b""
            if not self._has_expired(command, now_us):
                is_again = packet_id in self.sent_before
                packet = command.packet(dialect, 1, packet_id, dup=is_again, now_us=now_us)
            if packet:
                packets.append(packet)
                if command.id:
                    self.room.sent_of_cloud.add(command.id)
                self.sent_before.add(packet_id)
                self.in_flight.add(packet_id)
            else:
                self.given_up.add(packet_id)
        del self.waiting[:taken]
        return b"".join(packets)

    def _has_expired(self, command: Command, now_us: int) -> bool:
        """Whether a command is no longer to be sent. After a reboot nobody knows how long the box was off."""
        if command.expires_us is None or not command.expires_here:
            return False
        return command.boot != self.room.boot or now_us >= command.expires_us

    def drop_given_up(self) -> tuple[dict[str, bytes | None], list[str]]:
        """Drop the commands that were given up; return the marks that forget them, and the names of the cloud's."""
        marks: dict[str, bytes | None] = {}
        of_cloud = []
        for packet_id in self.given_up:
            command = self.commands[packet_id]
            if command.id:
                of_cloud.append(command.id)
            elif self.kept:
                marks[self._command_key(packet_id)] = None
            self._end(packet_id)
        self.given_up.clear()
        return marks, of_cloud

    def expire_commands(self, now_us: int) -> None:
        """Give up commands that wait for the device's next connection and are no longer to be sent."""
        for packet_id in self.sent_before.union(self.waiting):
            if self._has_expired(self.commands[packet_id], now_us):
                self.given_up.add(packet_id)
        self.waiting = [packet_id for packet_id in self.waiting if packet_id not in self.given_up]

    def load_exchange(self, packet_id: int, message: bytes) -> None:
        """Load an exchange that was unfinished before a restart; its message is stored."""
        self.stored[packet_id] = message
        self.unfinished += 1
        self.room.unfinished += 1

    def load_command(self, packet_id: int, command: Command) -> None:
        """Load a command that waited before a restart. Nobody knows any more whether it was sent."""
        self.commands[packet_id] = command
        self._take_room(command)
        self.sent_before.add(packet_id)

    def clear(self) -> None:
        """Free the room of the session's commands and exchanges, as the session is over."""
        for packet_id in tuple(self.commands):
            self._drop(packet_id)
        self.room.unfinished -= self.unfinished
        self.unfinished = 0
        self.stored.clear()
        self.changing.clear()
        self.waiting.clear()
        self.sent_before.clear()
        self.in_flight.clear()
        self.given_up.clear()

    def _take_room(self, command: Command) -> None:
        self.room.commands_bytes += command.size
        self.room.expiring += command.expires_here

    def _end(self, packet_id: int) -> None:
        self.sent_before.discard(packet_id)
        if packet_id in self.waiting:
            self.waiting.remove(packet_id)
        self._drop(packet_id)

    def _drop(self, packet_id: int) -> None:
        command = self.commands.pop(packet_id, None)
        if command is not None:
            self.room.commands_bytes -= command.size
            self.room.expiring -= command.expires_here

    # --- the outcome of a commit ----------------------------------------------------------------------------

    def committed(self, batch: ClientBatch) -> None:
        """Record that a batch is stored; its `untrue` answers must not be written.

        An answer is untrue if its message came again while the first copy waited for a commit that failed.
        """
        batch.untrue = {position for position, first in batch.follows if first.is_undone}
        self._decide(batch, is_stored=True)
        for session, packet_id in batch.commands:
            if packet_id in session.commands:
                session.waiting.append(packet_id)

    def undo(self, batch: ClientBatch) -> None:
        """Record that nothing of a batch is stored. Others may have failed before it, or still wait after it."""
        batch.is_undone = True
        self._decide(batch, is_stored=False)
        for session, packet_id in batch.commands:
            session._drop(packet_id)  # noqa: SLF001 - of this class

    def _decide(self, batch: ClientBatch, *, is_stored: bool) -> None:
        # A decided batch must not keep other batches in memory.
        batch.follows.clear()
        for packet_id, message in batch.exchanges.items():
            under_way = self.changing.get(packet_id, [])
            if batch not in under_way:
                continue  # the session is over
            under_way.remove(batch)
            if not under_way:
                del self.changing[packet_id]
            if is_stored and message is not None:
                self.stored[packet_id] = message
            elif is_stored:
                self.stored.pop(packet_id, None)
            if not self._is_in_use(packet_id):
                self.unfinished -= 1
                self.room.unfinished -= 1

    # --- marks ----------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The mark that keeps this session. Its exchanges and commands have marks of their own."""
        kept = KeptSession(self.key[0], self.key[1], self.number, self.subscriptions, self.expiry_s)
        return Mark(f"{SESSION_MARKS}session/{self.name}", msgspec.msgpack.encode(kept))

    def forgetting(self) -> dict[str, bytes | None]:
        """The marks that forget this session and all that belongs to it."""
        keys = [f"{SESSION_MARKS}session/{self.name}"]
        keys += map(self._qos2_key, {*self.stored, *self.changing})
        if self.released.packed:
            keys.append(self._qos2_key(RELEASED))
        keys += map(self._command_key, self.commands)
        return dict.fromkeys(keys)

    def _qos2_key(self, packet_id: int | str) -> str:
        return f"{SESSION_MARKS}qos2/{self.name}/{packet_id}"

    def _command_key(self, packet_id: int) -> str:
        return f"{SESSION_MARKS}command/{self.name}/{packet_id}"


def digest(topic: str, payload: bytes, user: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return 8 bytes that are equal for two copies of a message, even after a restart. `user` are user properties."""
    message = b"%d/%s%s" % (len(topic), topic.encode(), payload)
    if user:
        message += b"/%d/%s" % (len(payload), msgspec.msgpack.encode(user))
    return hashlib.blake2b(message, digest_size=8).digest()


def check_room(sessions: Sequence[Session], command_bytes: int, commands_max: int) -> None:
    """Raise TooManyCommandsError unless all of these sessions have room for one more command of this size."""
    if not sessions:
        return
    room = sessions[0].room
    longest = max(len(session.commands) for session in sessions)
    if longest >= commands_max or room.commands_bytes + len(sessions) * command_bytes > room.commands_bytes_max:
        raise TooManyCommandsError
