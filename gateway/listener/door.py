"""The listener's ports: when a new connection is heard, and which one is closed where places run out.

All of it is judged by addresses alone, before anything is read and before TLS:

- **Each address has a rate, and a share of the time** for its connections that have not logged in, TLS handshakes among
  it (`turns`). A connection beyond either waits unheard for its turn, which costs an open file and no more. Where too
  many of an address wait so, newcomers from there are closed at once.
- **An address may have so many connections that were heard and have not logged in.** The next one closes the oldest.
- **Where all places are taken, the oldest connection that has not logged in is closed**, whatever its address. A sensor
  sends its CONNECT at once, so the oldest is one that says nothing. A newcomer is turned away only if all others have
  logged in.

So a host that opens connections without end keeps out nobody at another address.
"""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from gateway.host.accepting import Acceptor
from gateway.host.places import Bucket, Places, source_of
from gateway.host.terminal_text import counted
from gateway.listener.refusals import Refusals
from gateway.listener.turns import Share, Turns
from gateway.settings import ListenerSettings

SPARE_CONNECTIONS: Final = 64
"""Places beyond `connections_max`: there is room to tell a client that it has none (CONNACK 3), or to take over."""
BURST_S: Final = 2.0
"""Seconds of `new_connections_per_s_max` that may come at once.

With the default, 5,000 sensors behind one address are let in within two minutes of an outage: 100 at once, then 50 a
second, as long as others of them ask. Where 2,800 refused log-ins a second took a whole core, 50 take 2 % of it."""
QUEUE_S: Final = 5.0
"""Longest wait for a turn: sensors wait longer for their CONNACK. More connections than have their turn by then are
closed, and their sensors try again."""
SOURCES_MAX: Final = 1_024
"""Addresses whose rate is remembered. Of more, whoever came least lately is forgotten, which gives it a new burst."""
NOT_LOGGED_IN: Final = "not-logged-in"
"""Why a connection is closed that said nothing, or not who it is, when its place was needed."""
TOO_FAST: Final = "too-many-new-connections"


class Port(NamedTuple):
    """A port, and what is made of a connection to it."""

    number: int
    setting: str
    protocol: Callable[["Caller"], asyncio.BaseProtocol]
    is_tls: bool


class Source:
    """One address: its connections that were heard and have not logged in, and those unheard; oldest first."""

    __slots__ = ("bucket", "host", "is_due", "queue", "queue_max", "share", "waiting")

    def __init__(self, host: str, per_s: float) -> None:
        self.host = host
        self.queue_max = max(1, int(QUEUE_S * per_s))
        self.bucket = Bucket(max(1.0, BURST_S * per_s), per_s)
        self.waiting: dict[Caller, None] = {}
        self.queue: dict[Caller, Port] = {}
        self.share = Share()
        """Of the time: what all of them have together."""
        self.is_due = False
        """Whether the next one is heard later, as soon as rate and share allow."""


class Caller:
    """A connection from the moment it is accepted until it is gone."""

    __slots__ = ("_cut", "_places", "is_closed", "peer", "share", "socket", "source")

    def __init__(self, peer: str, source: Source, places: tuple[Places["Caller"], ...] = ()) -> None:
        self.peer = peer
        self.source = source
        self.share = source.share
        """What its work is charged to."""
        self.socket: socket.socket | None = None
        """Until it has its turn."""
        self._places = places
        self.is_closed = False
        """Whether it had to give way."""
        self._cut: Callable[[], None] | None = None

    def connected(self, cut: Callable[[], None]) -> None:
        """Take note of what closes it at once."""
        self._cut = cut
        if self.is_closed:
            cut()

    def logged_in(self) -> None:
        """Have it keep its place, and a share of its own. Its address may have any number of such connections."""
        self.share = Share()
        self.source.waiting.pop(self, None)
        for places in self._places:
            places.keep(self)

    def ends(self) -> None:
        """Take note that it only waits for what was written to it: it makes room for others."""
        for places in self._places:
            places.wait(self)

    def left(self) -> None:
        """Take back its places."""
        self.source.waiting.pop(self, None)
        for places in self._places:
            places.leave(self)

    def close(self) -> None:
        """Close it at once; its places are free when this returns."""
        self.left()
        self.is_closed = True
        self.source.queue.pop(self, None)
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        elif self._cut is not None:
            self._cut()


class Door:
    """Accepts connections. `files_max` is how many of them the system has open files for."""

    def __init__(self, settings: ListenerSettings, refusals: Refusals, files_max: int, turns: Turns) -> None:
        self._settings = settings
        self._refusals = refusals
        self._turns = turns
        places_max = min(settings.connections_max + SPARE_CONNECTIONS, files_max)
        self._all = Places[Caller](places_max)
        tls = settings.tls
        self._tls = Places[Caller](0 if tls is None else tls.connections_max)
        self._sources: OrderedDict[str, Source] = OrderedDict()
        """Who came least lately is first."""
        self._acceptor = Acceptor(self._cannot_accept)
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that make a transport."""
        self._loop = asyncio.get_running_loop()

    async def open(self, port: Port) -> None:
        """Listen at a port. Raises OSError."""
        await self._acceptor.open(self._settings.host, port.number, partial(self._receive, port))

    async def close(self) -> None:
        """Accept nobody more, and close those that were not heard yet."""
        self._acceptor.close()
        for caller in tuple(self._all):
            if caller.socket is not None:
                caller.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- accepting ----------------------------------------------------------------------------------------

    def _cannot_accept(self, error: OSError) -> None:
        why = (
            f"no connection can be accepted: {error.strerror}; raise the limit of open files (LimitNOFILE= in the unit)"
        )
        self._refusals.refused("cannot-accept", why)

    def _receive(self, port: Port, accepted: socket.socket, host: str, peer_port: int) -> None:
        """Give a newcomer a place, and hear it now or later."""
        source = self._source(source_of(host))
        places = (self._all, self._tls) if port.is_tls else (self._all,)
        caller = Caller(f"{source.host}:{peer_port}", source, places)
        if not self._has_room(caller, places):
            accepted.close()
            return
        caller.socket = accepted
        for each in places:
            each.enter(caller)
        source.queue[caller] = port
        if not source.is_due:
            self._call_up(source)

    def _source(self, host: str) -> Source:
        source = self._sources.get(host)
        if source is None:
            source = self._sources[host] = Source(host, self._settings.new_connections_per_s_max)
            if len(self._sources) > SOURCES_MAX:
                self._sources.popitem(last=False)
        else:
            self._sources.move_to_end(host)
        return source

    def _has_room(self, newcomer: Caller, places: tuple[Places[Caller], ...]) -> bool:
        """Tell whether there is room for a newcomer, after closing who must give way."""
        source = newcomer.source
        if len(source.queue) >= source.queue_max:
            words = (
                f"{counted(len(source.queue), 'connection')} of {source.host} wait for their turn already "
                "(mqtt_listener.new_connections_per_s_max): those that come beyond them are closed unheard"
            )
            self._refusals.refused(TOO_FAST, words, peer=newcomer.peer)
            return False
        for each in places:
            if not each.are_taken:
                continue
            kind, of = ("tls-", "tls.") if each is self._tls else ("", "")
            setting = f"mqtt_listener.{of}connections_max"
            oldest = each.longest_waiting()
            if oldest is None:
                words = f"all places are taken by clients that have logged in; see {setting}"
                self._refusals.refused(f"too-many-{kind}connections", words, peer=newcomer.peer)
                return False
            self._close(oldest, f"and all places are taken ({setting}): the oldest is closed for each that comes")
        return True

    def _close(self, caller: Caller, why: str) -> None:
        source = caller.source
        told = f"{counted(len(source.waiting) + len(source.queue), 'connection')} of {source.host} have not logged in"
        self._refusals.refused(NOT_LOGGED_IN, f"{told}, {why}", peer=caller.peer)
        caller.close()

    # --- turns --------------------------------------------------------------------------------------------

    def _call_up(self, source: Source) -> None:
        """Hear as many of an address as its rate and its share of the time allow now, and the others later."""
        source.is_due = False
        now_s = self._loop.time()
        while source.queue and not source.is_due:
            wait_s = source.bucket.wait_s(now_s)
            source.is_due = wait_s > 0 or source.share.is_used(now_s)
            if wait_s > 0:
                self._loop.call_later(wait_s, self._call_up, source)
            elif source.is_due:
                self._turns.stand_in_line(self._loop, source.share, partial(self._take_turn, source))
            else:
                self._call_next(source)

    def _take_turn(self, source: Source) -> None:
        if source.queue:
            self._call_next(source)
        self._call_up(source)

    def _call_next(self, source: Source) -> None:
        source.bucket.take(self._loop.time())
        if len(source.waiting) >= self._settings.not_logged_in_per_address_max:
            self._close(
                next(iter(source.waiting)),
                "more than mqtt_listener.not_logged_in_per_address_max: the oldest is closed for each that comes",
            )
        caller = next(iter(source.queue))
        port = source.queue.pop(caller)
        source.waiting[caller] = None
        task = self._loop.create_task(self._hear(caller, port), name="mqtt-accept")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear(self, caller: Caller, port: Port) -> None:
        accepted, caller.socket = caller.socket, None
        if accepted is None:  # it gave way meanwhile
            return
        try:
            await self._loop.connect_accepted_socket(partial(port.protocol, caller), accepted)
        except BaseException:
            caller.left()
            accepted.close()
            raise
