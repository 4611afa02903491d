"""A turn for everybody: a connection that has used its share of the event loop's time is acted on after the others.

The event loop looks at all sockets, and takes one read from each that has something to say. A connection that is within
its share is acted on as soon as it is read. One that is beyond it stands in line. A round begins REST_S after the one
before. Those in line have a turn each, in order, until ROUND_S has passed; a turn is one piece of TURN_BYTES. The rest
is for connections within their share, and for other threads, commits above all.

So whoever is within its share waits for one round and one piece at the most, however many stand in line, whatever they
send, and however dear that is. Those in line wait for one another in order. A connection alone has every turn, which is
about half of the time.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

SHARE: Final = 0.01
"""Of the event loop's time: what one connection has before it stands in line."""
AHEAD_S: Final = 0.2
"""How far it may be ahead of its share: 2 ms of work at once, after so long without any."""
ROUND_S: Final = 0.001
"""After so long, a round leaves the rest of the line to the next one."""
REST_S: Final = 0.001
"""The pause between two rounds: the shortest wait that epoll knows."""
TURN_BYTES: Final = 1_024
"""What is acted on in one turn: 512 of the smallest packets."""


class Turns:
    """The line."""

    __slots__ = ("_is_due", "_line")

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._is_due = False
        """Whether a round is to come."""

    def stand_in_line(self, loop: asyncio.AbstractEventLoop, take_turn: Callable[[], None]) -> None:
        """Have `take_turn` called once, behind all that stand in line."""
        self._line.append(take_turn)
        if not self._is_due:
            self._is_due = True
            loop.call_later(REST_S, self._round, loop)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        time, line = loop.time, self._line
        ends = time() + ROUND_S
        try:
            # Whoever stands in line again meanwhile has its turn behind the others.
            while line and time() < ends:
                line.popleft()()
        finally:
            self._is_due = bool(line)
            if line:
                loop.call_later(REST_S, self._round, loop)


class Share:
    """What one connection has used of its share."""

    __slots__ = ("_paid_until_s",)

    def __init__(self) -> None:
        self._paid_until_s = 0.0

    def is_used(self, now_s: float) -> bool:
        """Whether it is to stand in line."""
        return self._paid_until_s > now_s + AHEAD_S

    def use(self, began_s: float, ended_s: float) -> None:
        """Take note of work for it."""
        self._paid_until_s = max(self._paid_until_s, began_s) + (ended_s - began_s) / SHARE
