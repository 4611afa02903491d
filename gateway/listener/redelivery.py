"""Recognises QoS 1 messages that come again and are surely stored; no I/O."""

from typing import Final

from gateway.host.latest import Latest
from gateway.listener.session import NOT_COUNTING, ClientBatch, SessionKey, digest

UNANSWERED_MAX: Final = 64
"""QoS 1 messages of one connection that are remembered as stored and unanswered. The usual client has fewer under way
at once."""
UNANSWERED_SESSIONS_MAX: Final = 5_000
"""Sessions with such messages. The oldest make room, and the messages that they resend are stored again and marked."""
RESTART_REACH: Final = 64
"""Steps that a connection's packet identifiers must have counted up before an identifier is trusted to name one
message. See `Unanswered`."""
COUNTING_STEP_MAX: Final = 8
"""Longest step between identifiers that still counts up: some clients number QoS 0 and SUBSCRIBE too."""


class Unanswered(dict[int, bytes]):
    """QoS 1 messages of one connection that are stored but whose PUBACK was not written: identifier to digest.

    If a client sends such a message again with DUP, on its session's next connection, the message is answered and not
    stored twice. A false match would lose a reading: a sensor that restarted and lost its session may give an old
    identifier to an equal value. So the messages count for the next connection alone. The next connection seen here
    may still be a later one, if CONNECT and the first PUBLISH of another were lost on the way. So an identifier counts
    only if its own connection reached it by counting up RESTART_REACH steps or more. A restarted client begins below.
    """

    def remember(self, batch: ClientBatch) -> None:
        """Add the QoS 1 messages of a stored batch."""
        readings = iter(batch.readings)
        for position, answer in enumerate(batch.answers):
            if position in batch.bare:
                continue
            reading = next(readings)
            # Answers above 0xFFFF are PUBRECs: a QoS 2 message is recognised by its exchange.
            if batch.counting_from + RESTART_REACH <= answer <= 0xFFFF and len(self) < UNANSWERED_MAX:
                self[answer] = digest(reading.topic, reading.datum.payload, reading.user)


class PacketIdRun:
    """Finds the identifier from which a connection's packet identifiers have been counting up in short steps."""

    __slots__ = ("_last", "_start")

    def __init__(self) -> None:
        self._start = 0
        self._last = NOT_COUNTING

    def advance(self, first: int, last: int, count: int) -> int:
        """Take the first and last of a batch's `count` identifiers; return the first identifier of their run.

        If the batch does not count up, return NOT_COUNTING. Only its ends are looked at, as this is the hot path of
        every reading.
        """
        if not 0 < first - self._last <= COUNTING_STEP_MAX:
            self._start = first
        self._last = last
        if 0 <= last - first <= COUNTING_STEP_MAX * count:
            return self._start
        self._start = last
        return NOT_COUNTING


class RecentlyUnanswered:
    """The `Unanswered` of connections that ended, until the next connection of the session picks them up."""

    def __init__(self) -> None:
        self._by_key = Latest[SessionKey, Unanswered](UNANSWERED_SESSIONS_MAX)

    def leave(self, key: SessionKey, unanswered: Unanswered) -> None:
        """Leave to the next connection the messages that are, or will be, stored without an answer."""
        self._by_key[key] = unanswered

    def pick_up(self, key: SessionKey) -> Unanswered | None:
        """Pick up what the preceding connection left; later connections will not find it."""
        return self._by_key.pop(key, None)
