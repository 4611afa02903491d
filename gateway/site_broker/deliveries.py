"""Judges by packet identifier, digest and DUP which deliveries of a broker are stored already; no I/O, no clock.

With QoS 1, a broker may deliver again whatever it has no PUBACK for. A gateway that was killed cannot know which
PUBACKs got through. So each commit of readings carries a mark: the packet identifiers and digests that it stores. A
batch's mark is forgotten once a PINGRESP shows that the broker has handled the batch's PUBACKs. All marks are forgotten
in a commit before the next CONNECT: they count for the one connection that follows, and no other.

QoS 1, DUP=0: new. The broker says that it never sent this message.
QoS 1, DUP=1, by what the preceding connection brought:

| packet identifier and digest                  | PUBACK               | broker    | judged   | because             |
|-----------------------------------------------|----------------------|-----------|----------|---------------------|
| as stored, in the order of storing            | surely not written   | any       | stored   | (a)                 |
| as stored, in the order of storing            | may have been written | counts up | stored   | (b)                 |
| as stored, in the order of storing            | may have been written | any other | doubtful | perhaps reused      |
| as what the buffer refused to store           | withheld             | any       | new      | it is in no commit  |
| none of these; lies beyond all that ever came |                      | counts up | new      | it never came       |
| none of these                                 |                      | any       | doubtful | (c)                 |

A doubtful delivery is stored and marked, because a false match would lose a reading. "Stored" is no false match:

- Within a connection TCP keeps the order, and so do commits. So messages are stored from the first sent onwards,
  without a gap. On the next connection a broker sends again in the original order [MQTT-4.6.0-1]. An equal reading that
  never came, under a reused identifier, therefore comes after everything that was stored. The first DUP=1 that is not
  expected ends the expectation, and nothing after it is recognised.
- If everything stored was acknowledged, such a reading could still stand first. (a) Before the PUBACK, an identifier
  cannot be reused. (b) A broker that counts up reuses it after 65,535 others, which would have come before it. Counting
  is not assumed but seen: `FRESH_IDS_MIN` new identifiers while acknowledged ones were free. A reused identifier puts
  it in doubt again, and so does a leap of more than half of all identifiers, as after a full queue.
- (c) A broker that is killed and comes back with an old state counts from an earlier number. So new readings get
  identifiers that marks hold. They come with DUP=0 first, and with DUP=1 only on the connection after that. By then the
  marks are void: CONNECT makes earlier marks void, whether a CONNACK came or not.
- A broker that refuses the connection (CONNACK 1 to 5) has sent nothing. All is as it was before CONNECT.
- If the session is not present, everything is void.

This caution has a cost. If two connections are lost in quick succession, the second before the messages sent again were
stored, readings are stored twice and marked.

QoS 2: the identifier is kept with its reading until PUBREL. A message with DUP=1 and an equal digest under it is
answered and not stored. DUP=0, or another digest, under a kept identifier comes only from a broker that lost its state.
Such a message is stored.
"""

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Final
from urllib.parse import quote

from gateway.reading import Mark
from gateway.settings import BrokerSettings

BROKER_MARKS: Final = "broker/"
"""Prefix of the keys of all brokers' marks."""

PACKET_IDS: Final = 65_535
"""The highest packet identifier; the lowest is 1 (section 2.3.1 of MQTT 3.1.1)."""
FRESH_IDS_MIN: Final = 100
"""New packet identifiers, given while used ones were free, after which a broker is taken to count up."""
UNCONFIRMED_MAX: Final = 100
"""Acknowledged deliveries after which a PINGREQ asks whether the broker has handled their PUBACKs."""
_HEADER: Final = struct.Struct(">HB")
_ENTRY: Final = struct.Struct(">H8s")


class Judgement(Enum):
    """Treatment of a delivery."""

    NEW = "new"
    """Store it, then acknowledge it."""
    DOUBTFUL = "doubtful"
    """Store it with `Doubt.REDELIVERED`, then acknowledge it."""
    STORED = "stored"
    """Acknowledge it again, after the commit of the marks that go with it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    packet_id: int
    digest: bytes
    was_stored: bool
    """Whether it was stored before its batch, so that the batch only acknowledges it again."""


@dataclass(slots=True)
class _Batch:
    entries: list[_Entry]
    released: list[tuple[int, bytes | None]] = field(default_factory=list)
    """QoS 2 identifiers that the batch changes, with the digest that was kept of each before."""
    forgets: tuple[int, ...] = ()
    """Batches whose marks are forgotten in the commit of this one."""
    frees: int = 0
    """Number of identifiers that the broker may reuse once it has handled the batch's acknowledgements."""
    stored: bool = False
    acknowledged: bool = False


@dataclass(frozen=True, slots=True)
class _Expected:
    position: int
    digest: bytes
    stored: bool
    acknowledged: bool


def digest(body: bytes) -> bytes:
    """Return eight bytes that stand for a PUBLISH: its topic, packet identifier and payload, as they came."""
    return blake2b(body, digest_size=8).digest()


class Deliveries:
    """The deliveries of one broker's session that matter for its next deliveries.

    For each connection, call `forget_marks`, commit its marks, call `connecting`, send CONNECT, and call
    `connection_refused` or `connected`. For each read, call `receive`, `receive_exactly_once` and `release`, and then
    `batch` once. For each batch, in order, call `stored` and `acknowledged`, or `not_stored`. Every batch must be
    decided before `forget_marks` is called again.
    """

    def __init__(self, prefix: str, kept: Mapping[str, bytes]) -> None:
        """Begin with the marks that an earlier process kept under `prefix`."""
        self._prefix = prefix
        self._batches: dict[int, _Batch] = {}
        """Batches that are not yet decided, or not yet confirmed, by number."""
        self._preceding: dict[int, _Batch] = {}
        """Batches of the preceding connection. `_expected` is made of them."""
        self._next = 0
        self._expected: dict[int, _Expected] = {}
        self._passed = 0
        """Position in the expected order, before which nothing comes any more."""
        self._entries: list[_Entry] = []
        self._released: list[tuple[int, bytes | None]] = []
        self._frees = 0
        self._marks: list[Mark] = []
        self._unreleased: dict[int, bytes] = {}
        """QoS 2: packet identifier to digest, from PUBLISH to PUBREL."""
        self._forgettable: list[int] = []
        self._kept: set[int] = set()
        """Batches whose marks may be on disk."""
        self._barriers: deque[int] = deque()
        """For each PINGREQ without its PINGRESP: the first batch whose PUBACKs were not written before it."""
        self._acknowledged = 0
        """All batches with lower numbers were acknowledged."""
        self._unconfirmed = 0
        self._highest = 0
        self._fresh_ids = 0
        self._free_ids = 0
        """Number of identifiers whose PUBACK the broker has handled, since the last identifier was reused."""
        self._free_from = 0
        """The first batch that counts for `_free_ids`: all of it came after the last reused identifier."""
        self._load(kept)

    @property
    def counts_up(self) -> bool:
        """Whether the broker was seen to count its packet identifiers up."""
        return self._fresh_ids >= FRESH_IDS_MIN

    @property
    def wants_ping(self) -> bool:
        """Whether a PINGREQ should follow the PUBACKs, to learn that the broker has handled them."""
        return not self._barriers and self._unconfirmed >= (UNCONFIRMED_MAX if self.counts_up else 1)

    # --- connections --------------------------------------------------------------------------------------

    def forget_marks(self) -> list[Mark]:
        """Return the marks that must be on disk before CONNECT: this connection makes earlier marks void."""
        return [
            Mark(f"{self._prefix}ids", self._header()),
            *(Mark(self._stored_key(number), None) for number in sorted(self._kept)),
        ]

    def connecting(self) -> None:
        """Expect the stored messages once more: `forget_marks` is on disk, and CONNECT is sent next."""
        entries = [(batch, entry) for _, batch in sorted(self._batches.items()) for entry in batch.entries]
        self._expected = {
            entry.packet_id: _Expected(position, entry.digest, batch.stored or entry.was_stored, batch.acknowledged)
            for position, (batch, entry) in enumerate(entries)
        }
        self._passed = 0
        # Messages that were judged but are in no batch were not stored.
        self._undo(self._released)
        self._entries, self._released, self._marks, self._frees = [], [], [], 0
        self._preceding, self._batches = self._batches, {}
        self._kept.clear()
        self._forgettable.clear()
        self._barriers.clear()
        self._acknowledged = self._next
        self._unconfirmed = self._free_ids = 0

    def connected(self, *, session_present: bool) -> None:
        """Take a CONNACK that accepts the connection. If the session is not present, forget the last session.

        Then a batch must follow, whose commit forgets the last session's marks.
        """
        self._preceding = {}
        if not session_present:
            self._expected.clear()
            self._highest = self._fresh_ids = 0
            for packet_id in tuple(self._unreleased):
                self.release(packet_id)

    def connection_refused(self) -> list[Mark]:
        """Take a CONNACK that refuses the connection: nothing was delivered, so earlier marks still count.

        Return these marks, to be stored again. Without them the next process would judge repeated messages doubtful.
        """
        self._expected.clear()
        self._batches, self._preceding = self._preceding, {}
        marks = []
        for number, batch in self._batches.items():
            stored = [entry for entry in batch.entries if batch.stored or entry.was_stored]
            if stored:
                marks.append(Mark(self._stored_key(number), _packed(stored)))
                self._kept.add(number)
        return marks

    # --- deliveries ---------------------------------------------------------------------------------------

    def receive(self, packet_id: int, digest: bytes, *, duplicate: bool) -> Judgement:
        """Judge a PUBLISH with QoS 1 by the table above."""
        judgement = Judgement.NEW
        expected = self._expected.pop(packet_id, None) if self._expected else None
        if not duplicate:
            self._given(packet_id)
        elif expected is not None and expected.position >= self._passed and expected.digest == digest:
            self._passed = expected.position + 1
            if expected.stored:
                sure = self.counts_up or not expected.acknowledged
                judgement = Judgement.STORED if sure else Judgement.DOUBTFUL
        else:
            judgement = self._unexpected(packet_id)
        self._entries.append(_Entry(packet_id, digest, judgement is Judgement.STORED))
        return judgement

    def receive_exactly_once(self, packet_id: int, digest: bytes, *, duplicate: bool) -> Judgement:
        """Judge a PUBLISH with QoS 2, and remember it until its PUBREL."""
        known = self._unreleased.get(packet_id)
        if duplicate and known == digest:
            return Judgement.STORED
        self._expected.pop(packet_id, None)
        if duplicate:
            judgement = self._unexpected(packet_id)
        else:
            self._given(packet_id)
            judgement = Judgement.DOUBTFUL if known == digest else Judgement.NEW
        self._released.append((packet_id, known))
        self._unreleased[packet_id] = digest
        self._marks.append(Mark(self._unreleased_key(packet_id), digest))
        return judgement

    def release(self, packet_id: int) -> None:
        """Take a PUBREL: the next batch's commit forgets the identifier, and then PUBCOMP may be sent."""
        self._frees += 1
        known = self._unreleased.pop(packet_id, None)
        if known is not None:
            self._released.append((packet_id, known))
            self._marks.append(Mark(self._unreleased_key(packet_id), None))

    def batch(self) -> tuple[int, list[Mark]]:
        """Make a batch of what came since the last one; return its number, and the marks for its commit."""
        number, self._next = self._next, self._next + 1
        frees = len(self._entries) + self._frees
        batch = self._batches[number] = _Batch(self._entries, self._released, tuple(self._forgettable), frees)
        marks, self._entries, self._released, self._marks, self._frees = self._marks, [], [], [], 0
        if batch.entries:
            marks.append(Mark(self._stored_key(number), _packed(batch.entries)))
            self._kept.add(number)
        marks += (Mark(self._stored_key(old), None) for old in batch.forgets)
        if marks:
            marks.append(Mark(f"{self._prefix}ids", self._header()))
        self._forgettable = []
        return number, marks

    # --- batches ------------------------------------------------------------------------------------------

    def stored(self, number: int) -> None:
        """Record that the batch's commit is on disk."""
        batch = self._batches[number]
        batch.stored = True
        self._kept.difference_update(batch.forgets)

    def not_stored(self, number: int) -> None:
        """Record that neither the batch nor its marks were stored: the connection must end."""
        self._undo(self._batches[number].released)

    def acknowledged(self, number: int) -> None:
        """Record that the batch's acknowledgements are about to be written, in the order of the batches."""
        batch = self._batches[number]
        batch.acknowledged = True
        self._acknowledged = number + 1
        self._unconfirmed += batch.frees
        if not batch.frees:
            del self._batches[number]

    def pinged(self) -> None:
        """Record that a PINGREQ is written, after the acknowledgements so far."""
        self._barriers.append(self._acknowledged)

    def ponged(self) -> None:
        """Take a PINGRESP: the broker has handled what was written before its PINGREQ."""
        if not self._barriers:
            return
        reached = self._barriers.popleft()
        for number in [number for number in self._batches if number < reached]:
            batch = self._batches.pop(number)
            self._unconfirmed -= batch.frees
            if number >= self._free_from:
                self._free_ids += batch.frees
            if batch.entries:
                self._forgettable.append(number)

    # --- packet identifiers -------------------------------------------------------------------------------

    def _given(self, packet_id: int) -> None:
        """Learn from the identifier of a new message."""
        if self._is_fresh(packet_id):
            if self._free_ids:
                self._fresh_ids = min(self._fresh_ids + 1, FRESH_IDS_MIN)
            self._highest = packet_id
        else:
            self._fresh_ids = self._free_ids = 0
            self._free_from = self._next + 1

    def _unexpected(self, packet_id: int) -> Judgement:
        self._expected.clear()
        fresh = self._is_fresh(packet_id)
        judgement = Judgement.NEW if fresh and self._highest and self.counts_up else Judgement.DOUBTFUL
        if fresh:
            self._highest = packet_id
        return judgement

    def _is_fresh(self, packet_id: int) -> bool:
        """Whether an identifier lies ahead of all that came, by at most half of all identifiers, as they wrap."""
        return not self._highest or 0 < (packet_id - self._highest) % PACKET_IDS <= PACKET_IDS // 2

    def _undo(self, released: list[tuple[int, bytes | None]]) -> None:
        for packet_id, known in reversed(released):
            if known is None:
                self._unreleased.pop(packet_id, None)
            else:
                self._unreleased[packet_id] = known

    # --- marks --------------------------------------------------------------------------------------------

    def _header(self) -> bytes:
        return _HEADER.pack(self._highest, self._fresh_ids)

    def _stored_key(self, number: int) -> str:
        return f"{self._prefix}stored/{number}"

    def _unreleased_key(self, packet_id: int) -> str:
        return f"{self._prefix}qos2/{packet_id}"

    def _load(self, kept: Mapping[str, bytes]) -> None:
        header = kept.get(f"{self._prefix}ids", b"")
        if len(header) == _HEADER.size:
            self._highest, self._fresh_ids = _HEADER.unpack(header)
        for number, value in sorted(_numbered(kept, f"{self._prefix}stored/")):
            if len(value) % _ENTRY.size:
                continue
            entries = [_Entry(packet_id, found, was_stored=False) for packet_id, found in _ENTRY.iter_unpack(value)]
            self._batches[number] = _Batch(entries, stored=True, acknowledged=True)
            self._kept.add(number)
            self._next = self._acknowledged = number + 1
        self._unreleased = dict(_numbered(kept, f"{self._prefix}qos2/"))


def removed_sessions(kept: Mapping[str, bytes], brokers: Sequence[BrokerSettings], gateway_id: str) -> list[Mark]:
    """Return marks that forget the sessions of brokers that are no longer in the settings."""
    prefixes = tuple(session_prefix(broker, gateway_id) for broker in brokers)
    return [Mark(key, None) for key in kept if not key.startswith(prefixes)]


def session_prefix(broker: BrokerSettings, gateway_id: str) -> str:
    """Return the prefix of the keys of a session's marks."""
    name = broker.client_id or f"sluice-{gateway_id}"
    return f"{BROKER_MARKS}{quote(broker.host, safe='')}:{broker.port}/{quote(name, safe='')}/"


def _packed(entries: Iterable[_Entry]) -> bytes:
    return b"".join([_ENTRY.pack(entry.packet_id, entry.digest) for entry in entries])


def _numbered(kept: Mapping[str, bytes], prefix: str) -> Iterator[tuple[int, bytes]]:
    for key, value in kept.items():
        if key.startswith(prefix):
            yield int(key.removeprefix(prefix)), value
