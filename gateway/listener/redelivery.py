"""QoS 1 messages that come again, without I/O: which are known to be stored, where a mistake is impossible."""

from collections import OrderedDict
from typing import Final

from gateway.listener.session import NOT_COUNTING, Batch, SessionKey, digest

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
        self._last = NOT_COUNTING

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
        return NOT_COUNTING


class RecentlyUnanswered:
    """The `Unanswered` of connections that ended, until the next connection of the session picks them up."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[SessionKey, Unanswered] = OrderedDict()

    def leave(self, key: SessionKey, unanswered: Unanswered) -> None:
        """Leave for the next connection what is, or will be, stored without an answer."""
        self._by_key[key] = unanswered
        self._by_key.move_to_end(key)
        if len(self._by_key) > UNANSWERED_SESSIONS_MAX:
            self._by_key.popitem(last=False)

    def pick_up(self, key: SessionKey) -> Unanswered | None:
        """Pick up what the preceding connection left; the connection after this one will not find it."""
        return self._by_key.pop(key, None)
