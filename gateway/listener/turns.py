"""A turn for everybody: a connection that has used its share of the event loop's time is acted on after the others.

The event loop looks at all sockets, and takes one read from each that has something to say. A connection that is within
its share is acted on as soon as it is read. One that is beyond it stands in line. Those in line have a turn each, in
order, until ROUND_S has passed. A turn is one piece of TURN_BYTES; a TLS handshake is one or two. Then the line rests
for as long as that took, and for REST_S at the least. The rest is for connections within their share, and for other
threads, commits above all.

So whoever is within its share waits for one round and one turn at the most, however many stand in line, whatever they
send, and however dear that is. Those in line wait for one another in order. A connection alone has every turn, which is
half of the time.

Whoever has logged in has a share of its own. All connections of one address that have not logged in have one share and
one place in line together, and their address's next connection is heard in the turns of that place. So TLS handshakes,
which are dear, take no more than a place's turns, however many connections an address makes for them.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

SHARE: Final = 0.01
"""Of the event loop's time: what one connection has before it stands in line."""
AHEAD_S: Final = 0.2
"""How far it may be ahead of its share: 2 ms of work at once, after so long without any."""
ROUND_S: Final = 0.001
"""After so long, a round leaves the rest of the line to the next one."""
REST_S: Final = 0.001
"""The shortest pause between two rounds: the shortest wait that epoll knows."""
TURN_BYTES: Final = 1_024
"""What is acted on in one turn: 512 of the smallest packets."""


class Turns:
    """The line."""

    __slots__ = ("_is_due", "_line")

    def __init__(self) -> None:
        self._line: OrderedDict[Share, deque[Callable[[], None]]] = OrderedDict()
        """The turns that each place waits for."""
        self._is_due = False
        """Whether a round is to come."""

    def stand_in_line(self, loop: asyncio.AbstractEventLoop, share: "Share", take_turn: Callable[[], None]) -> None:
        """Have `take_turn` called once: behind all that stand in line, or behind what its place waits for already."""
        self._line.setdefault(share, deque()).append(take_turn)
        if not self._is_due:
            self._is_due = True
            loop.call_later(REST_S, self._round, loop)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        time, line = loop.time, self._line
        began = time()
        try:
            # Whoever stands in line again meanwhile has its turn behind the others.
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


class Share:
    """What one connection has used of its share, or all of an address that have not logged in."""

    __slots__ = ("_paid_until_s", "work_s")

    def __init__(self) -> None:
        self._paid_until_s = 0.0
        self.work_s = 0.0
        """All that was taken note of."""

    def is_used(self, now_s: float) -> bool:
        """Whether it is to stand in line."""
        return self._paid_until_s > now_s + AHEAD_S

    def use(self, began_s: float, ended_s: float) -> None:
        """Take note of work for it."""
        self._paid_until_s = max(self._paid_until_s, began_s) + (ended_s - began_s) / SHARE
        self.work_s += ended_s - began_s
