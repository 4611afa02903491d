"""Gives each connection a share of the event loop's time; beyond its share, a connection stands in line.

The event loop takes one read from each socket that has bytes. A connection within its share is acted on at once. A
connection beyond its share stands in line. Connections in line have one turn each, in order, until ROUND_S has passed.
A turn is one piece of TURN_BYTES; a TLS handshake takes one or two turns. Then the line rests for as long as the round
took, and for REST_S at least. The rest is for connections within their share and for other threads, above all commits.

So a connection within its share waits for one round and one turn at most, however many others stand in line, and
however much work they cause. Connections in line wait for one another in order. A connection alone in line has every
turn, which is half of the time.

A connection that has logged in has a share of its own. All connections of one address that have not logged in have one
share and one place in line together. The address's next connection is heard in the turns of that place too. So the
costly TLS handshakes of an address take no more than one place's turns, however many connections it makes.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

SHARE: Final = 0.01
"""Part of the event loop's time that one connection has before it stands in line."""
AHEAD_S: Final = 0.2
"""Seconds that a connection may be ahead of its share: 2 ms of work at once, after so long without any work."""
ROUND_S: Final = 0.001
"""Seconds after which a round leaves the rest of the line to the next round."""
REST_S: Final = 0.001
"""Shortest pause between two rounds in seconds: the shortest wait that epoll knows."""
TURN_BYTES: Final = 1_024
"""Bytes acted on in one turn: 512 of the smallest packets."""


class Turns:
    """The line of connections beyond their share."""

    __slots__ = ("_is_due", "_line")

    def __init__(self) -> None:
        self._line: OrderedDict[TimeShare, deque[Callable[[], None]]] = OrderedDict()
        """The turns that each place in line waits for."""
        self._is_due = False
        """Whether the next round is scheduled."""

    def stand_in_line(self, loop: asyncio.AbstractEventLoop, share: "TimeShare", take_turn: Callable[[], None]) -> None:
        """Call `take_turn` once, as the last turn of its place; a new place stands at the end of the line."""
        self._line.setdefault(share, deque()).append(take_turn)
        if not self._is_due:
            self._is_due = True
            loop.call_later(REST_S, self._round, loop)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        time, line = loop.time, self._line
        began = time()
        try:
            # A place that stands in line again meanwhile goes to the end.
            while line and time() < began + ROUND_S:
                share, turns = line.popitem(last=False)
                take_turn = turns.popleft()
                if turns:
                    line[share] = turns
                take_turn()
        finally:
            self._is_due = bool(line)
            if line:
                loop.call_later(max(REST_S, time() - began), self._round, loop)


class TimeShare:
    """The time used by one connection, or by all connections of an address that have not logged in."""

    __slots__ = ("_paid_until_s", "work_s")

    def __init__(self) -> None:
        self._paid_until_s = 0.0
        self.work_s = 0.0
        """Seconds of work recorded in all."""

    def is_used(self, now_s: float) -> bool:
        """Whether the share is used up, so that a connection must stand in line."""
        return self._paid_until_s > now_s + AHEAD_S

    def use(self, began_s: float, ended_s: float) -> None:
        """Record work."""
        self._paid_until_s = max(self._paid_until_s, began_s) + (ended_s - began_s) / SHARE
        self.work_s += ended_s - began_s
