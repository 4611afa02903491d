"""Accepts connections at the listener's ports, and closes connections if places run out.

It judges by addresses alone, before anything is read and before TLS:

- **Each address has a rate of new connections, and a share of the event loop's time.** All its connections that have
  not logged in have this share together, TLS handshakes included (`turns`). A connection beyond the rate or the share
  waits unheard for its turn, which costs no more than an open file. If too many connections of an address wait,
  further ones are closed at once.
- **Each address has a bound for connections that were heard and have not logged in.** Beyond it, each new connection
  closes the oldest.
- **If all places are taken, the oldest connection that has not logged in is closed**, whatever its address. A sensor
  sends its CONNECT at once, so the oldest is a silent connection. A newcomer is turned away only if all others have
  logged in.

So a host that opens connections without end keeps out nobody at another address.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from gateway.host.accepting import Acceptor
from gateway.host.latest import Latest
from gateway.host.places import Bucket, Places, source_of
from gateway.host.terminal_text import counted
from gateway.listener.refusals import Refusals
from gateway.listener.turns import TimeShare, Turns
from gateway.settings import ListenerSettings

SPARE_CONNECTIONS: Final = 64
"""Places beyond `connections_max`, for clients that are refused by CONNACK 3 or take over their session."""
BURST_S: Final = 2.0
"""Burst of new connections, in seconds of `new_connections_per_s_max`.

With the default, an address gets 100 connections at once, then 50 a second. So 5,000 sensors behind one address are let
in within two minutes of an outage. As 2,800 refused log-ins a second took a whole core, 50 take 2 % of it."""
QUEUE_S: Final = 5.0
"""Longest wait for a turn in seconds; sensors wait longer for their CONNACK. Connections that could not have their turn
by then are closed, and their sensors try again."""
SOURCES_MAX: Final = 1_024
"""Addresses whose rate is remembered. The address unseen for longest is forgotten first, and then has a new burst."""
NOT_LOGGED_IN: Final = "not-logged-in"
"""Reason for closing a connection that had not logged in when its place was needed."""
TOO_FAST: Final = "too-many-new-connections"


class Port(NamedTuple):
    """A port, and the protocol of connections to it."""

    number: int
    setting: str
    protocol: Callable[["Caller"], asyncio.BaseProtocol]
    is_tls: bool


class Source:
    """An address and its connections that have not logged in: heard ones (`waiting`) and unheard ones (`queue`)."""

    __slots__ = ("bucket", "host", "is_due", "queue", "queue_max", "time_share", "waiting")

    def __init__(self, host: str, per_s: float) -> None:
        self.host = host
        self.queue_max = max(1, int(QUEUE_S * per_s))
        self.bucket = Bucket(max(1.0, BURST_S * per_s), per_s)
        self.waiting: dict[Caller, None] = {}
        """Oldest first."""
        self.queue: dict[Caller, Port] = {}
        """Oldest first."""
        self.time_share = TimeShare()
        """The share of the event loop's time that all these connections have together."""
        self.is_due = False
        """Whether the next connection is to be heard later, as soon as rate and share allow."""


class Caller:
    """A connection from the moment it is accepted until it is gone."""

    __slots__ = ("_cut", "_places", "is_closed", "peer", "socket", "source", "time_share")

    def __init__(self, peer: str, source: Source, places: tuple[Places["Caller"], ...] = ()) -> None:
        self.peer = peer
        self.source = source
        self.time_share = source.time_share
        """The share of time that its work is charged to."""
        self.socket: socket.socket | None = None
        """The accepted socket, until the connection is heard."""
        self._places = places
        self.is_closed = False
        """Whether it was closed to make room."""
        self._cut: Callable[[], None] | None = None

    def connected(self, cut: Callable[[], None]) -> None:
        """Remember `cut`, which closes the connection at once."""
        self._cut = cut
        if self.is_closed:
            cut()

    def logged_in(self) -> None:
        """Let it keep its place, with a share of its own. An address may have any number of such connections."""
        self.time_share = TimeShare()
        self.source.waiting.pop(self, None)
        for places in self._places:
            places.keep(self)

    def ends(self) -> None:
        """Offer its place to newcomers: it only waits until the peer has read the last answers."""
        for places in self._places:
            places.wait(self)

    def left(self) -> None:
        """Free its places."""
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
    """Accepts connections. `files_max` is the number of open files that the system allows for them."""

    def __init__(self, settings: ListenerSettings, refusals: Refusals, files_max: int, turns: Turns) -> None:
        self._settings = settings
        self._refusals = refusals
        self._turns = turns
        places_max = min(settings.connections_max + SPARE_CONNECTIONS, files_max)
        self._all = Places[Caller](places_max)
        tls = settings.tls
        self._tls = Places[Caller](0 if tls is None else tls.connections_max)
        self._sources = Latest[str, Source](SOURCES_MAX)
        self._acceptor = Acceptor(self._cannot_accept)
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that make a transport of an accepted socket."""
        self._loop = asyncio.get_running_loop()

    async def open(self, port: Port) -> None:
        """Listen at a port. Raises OSError."""
        await self._acceptor.open(self._settings.host, port.number, partial(self._receive, port))

    async def close(self) -> None:
        """Stop accepting, and close connections that were not heard yet."""
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
        source = self._sources.get(host) or Source(host, self._settings.new_connections_per_s_max)
        self._sources[host] = source
        return source

    def _has_room(self, newcomer: Caller, places: tuple[Places[Caller], ...]) -> bool:
        """Make room for a newcomer, by closing others if need be; return whether there is room."""
        source = newcomer.source
        if len(source.queue) >= source.queue_max:
            words = (
                f"{counted(len(source.queue), 'connection')} of {source.host} wait for their turn already "
                "(mqtt_listener.new_connections_per_s_max): further connections are closed unheard"
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
            self._close(oldest, f"and all places are taken ({setting}): each new connection closes the oldest")
        return True

    def _close(self, caller: Caller, why: str) -> None:
        source = caller.source
        told = f"{counted(len(source.waiting) + len(source.queue), 'connection')} of {source.host} have not logged in"
        self._refusals.refused(NOT_LOGGED_IN, f"{told}, {why}", peer=caller.peer)
        caller.close()

    # --- turns --------------------------------------------------------------------------------------------

    def _call_up(self, source: Source) -> None:
        """Hear as many connections of an address as its rate and share allow now, and the others later."""
        source.is_due = False
        now_s = self._loop.time()
        while source.queue and not source.is_due:
            wait_s = source.bucket.wait_s(now_s)
            source.is_due = wait_s > 0 or source.time_share.is_used(now_s)
            if wait_s > 0:
                self._loop.call_later(wait_s, self._call_up, source)
            elif source.is_due:
                self._turns.stand_in_line(self._loop, source.time_share, partial(self._take_turn, source))
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
                "more than mqtt_listener.not_logged_in_per_address_max allows: each new connection closes the oldest",
            )
        caller = next(iter(source.queue))
        port = source.queue.pop(caller)
        source.waiting[caller] = None
        task = self._loop.create_task(self._hear(caller, port), name="mqtt-accept")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear(self, caller: Caller, port: Port) -> None:
        accepted, caller.socket = caller.socket, None
        if accepted is None:  # it was closed meanwhile to make room
            return
        try:
            await self._loop.connect_accepted_socket(partial(port.protocol, caller), accepted)
        except BaseException:
            caller.left()
            accepted.close()
            raise
