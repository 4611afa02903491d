"""Serves the status page by HTTP/1.1: to browsers on the LAN, to Prometheus, and to whoever asks about health.

h11 parses. This module has the connections and their bounds, and `page.answers` finds the answers.
"""

import asyncio
import errno
import socket
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Final

import h11
import structlog

from gateway.host.accepting import Acceptor
from gateway.host.latest import Latest
from gateway.host.places import Bucket, Places, source_of
from gateway.page.access import is_loopback, is_of_a_private_network
from gateway.page.answers import Answer, Answers, Request, refusal
from gateway.page.view import StatusView
from gateway.settings import StatusPageSettings

HEADER_BYTES_MAX: Final = 16_384
BODY_BYTES_MAX: Final = 4_096
"""Bytes of a body. The log-in is the only request with one."""
REQUEST_S: Final = 10.0
"""Seconds that a request may take to come in, once it has begun, and that its answer may take to be sent."""
IDLE_S: Final = 30.0
"""Seconds that a connection may wait for its next request: the page asks every other second."""
REQUESTS_MAX: Final = 1_000
"""Requests of one connection; a browser then makes another."""
PER_ADDRESS_MAX: Final = 12
"""Connections of one address (IPv6: its /64): a browser opens six."""
PER_S: Final = 20.0
BURST: Final = 100.0
"""Connections and requests of one address, a second and at once. Further ones wait. A browser makes a dozen of them for
the page, and one a second for its figures."""
STRANGERS_PER_S: Final = 50.0
STRANGERS_BURST: Final = 200.0
"""Connections and requests of all strangers: addresses where nobody has logged in, except this box itself."""
ADDRESSES_MAX: Final = 1_024
"""Addresses whose rate is remembered. Beyond it, the one that came longest ago is forgotten, and may burst again."""
READ_BYTES: Final = 8_192
RETRY_S: Final = 30.0
"""Seconds until the page tries again to listen on its port."""
TIDY_S: Final = 10.0
LOG_INTERVAL_S: Final = 60.0
"""Least seconds between two log lines on one kind of trouble."""

_log = structlog.get_logger("sluice.status_page")


class _RefusedError(Exception):
    """A request is refused before it is read to its end."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


class _Address:
    """One address: its connections, and the rate at which it may come and ask."""

    def __init__(self) -> None:
        self.places = Places[_Visitor](PER_ADDRESS_MAX)
        self.rate = Bucket(BURST, PER_S)


class _Visitor:
    """A connection with its places and rates: those of its address, and those of all strangers or all others."""

    def __init__(
        self, accepted: socket.socket, peer: str, places: tuple[Places["_Visitor"], ...], rates: tuple[Bucket, ...]
    ) -> None:
        self.socket = accepted
        self.peer = peer
        self.places = places
        self.rates = rates
        self.writer: asyncio.StreamWriter | None = None
        """None until the connection is heard."""
        self.task: asyncio.Task[None]

    async def turn(self) -> None:
        """Wait until the rates let it come, or ask."""
        time_s = asyncio.get_running_loop().time
        while wait_s := max(rate.wait_s(time_s()) for rate in self.rates):  # noqa: ASYNC110 - time brings it about
            await asyncio.sleep(wait_s)
        for rate in self.rates:
            rate.take(time_s())

    def cut(self) -> None:
        """Close it at once."""
        if self.writer is None:
            self.task.cancel()
        else:
            self.writer.transport.abort()

    def enter(self) -> None:
        """Take its places, and wait for its first request."""
        for places in self.places:
            places.enter(self)

    def keep(self) -> None:
        """Keep its places while its answer is found: it makes room for nobody."""
        for places in self.places:
            places.keep(self)

    def wait(self) -> None:
        """Wait for its next request, as its answer is sent."""
        for places in self.places:
            places.wait(self)

    def leave(self) -> None:
        """Give up its places."""
        for places in self.places:
            places.leave(self)


class StatusPage:
    """Serves the page until cancelled. If it cannot have its port, readings are taken all the same."""

    def __init__(self, settings: StatusPageSettings, view: StatusView) -> None:
        self._settings = settings
        self._view = view
        self._answers = Answers(settings, view, socket.gethostname())
        self._connections: set[asyncio.Task[None]] = set()
        self._familiar = Places[_Visitor](settings.connections_max)
        """Places for this box itself, and for addresses where somebody has logged in. Nobody else takes them."""
        self._strangers = Places[_Visitor](settings.connections_max)
        self._strangers_rate = Bucket(STRANGERS_BURST, STRANGERS_PER_S)
        self._addresses = Latest[str, _Address](ADDRESSES_MAX)
        """Addresses by source."""
        self._told_s: dict[str, float] = {}
        """Time at which the log told of each kind of trouble."""
        self.listening = asyncio.Event()
        self.turned_away = 0
        """Connections that came from elsewhere, that found no room, or that had to make room."""

    async def run(self) -> None:
        """Serve until cancelled. For the pipeline's TaskGroup."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._view.follow(), name="status-page-follow")
            tasks.create_task(self._view.refresh(), name="status-page-refresh")
            tasks.create_task(self._serve(), name="status-page-serve")

    async def _serve(self) -> None:
        said = ""
        while True:
            acceptor = Acceptor(self._cannot_accept)
            try:
                await acceptor.open(self._settings.host, self._settings.port, self._receive)
            except OSError as error:
                words = _bind_words(self._settings, error)
                if words != said:
                    said = words
                    _log.warning(words)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                self.listening.set()
                _log.info("the status page is served", host=self._settings.host, port=self._settings.port)
                while True:
                    await self._answers.tidy()
                    await asyncio.sleep(TIDY_S)
            finally:
                self.listening.clear()
                acceptor.close()
                self._answers.log_ins.sum_up(time.monotonic(), is_end=True)
                for connection in self._connections:
                    connection.cancel()
                await asyncio.gather(*self._connections, return_exceptions=True)

    def _receive(self, accepted: socket.socket, peer: str, _port: int) -> None:
        """Make room for a connection, or turn it away before it costs anything."""
        address = self._address(source_of(peer))
        if is_loopback(peer) or self._answers.log_ins.has_let_in(peer):
            visitor = _Visitor(accepted, peer, (address.places, self._familiar), (address.rate,))
        else:
            rates = address.rate, self._strangers_rate
            visitor = _Visitor(accepted, peer, (address.places, self._strangers), rates)
        if not self._has_room(visitor):
            accepted.close()
            return
        visitor.enter()
        task = visitor.task = asyncio.get_running_loop().create_task(self._hear(visitor), name="status-page-client")
        self._connections.add(task)
        task.add_done_callback(lambda done: self._ended(done, visitor))

    def _address(self, source: str) -> _Address:
        address = self._addresses[source] = self._addresses.get(source) or _Address()
        return address

    def _has_room(self, newcomer: _Visitor) -> bool:
        """Make room if there is none, by closing the longest silent connection. Return whether there is room."""
        for places in newcomer.places:
            if places.are_taken:
                oldest = places.longest_waiting()
                self._make_room(newcomer if oldest is None else oldest)
                if oldest is None:
                    return False
                oldest.leave()
                oldest.cut()
        return True

    def _make_room(self, closed: _Visitor) -> None:
        self.turned_away += 1
        self._tell(
            "connections to the status page are closed to make room for others, the longest silent first; "
            "see status_page.connections_max",
            peer=closed.peer,
            of_this_address=len(closed.places[0]),
            closed_since_the_start=self.turned_away,
        )

    def _cannot_accept(self, error: OSError) -> None:
        self._tell(
            "no connection to the status page can be accepted; raise the limit of open files (LimitNOFILE= in the "
            "unit)",
            why=str(error.strerror),
        )

    def _tell(self, words: str, **more: str | int) -> None:
        """Log a kind of trouble now and then, not each time."""
        now_s = time.monotonic()
        if now_s - self._told_s.get(words, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._told_s[words] = now_s
            _log.warning(words, **more)

    def _ended(self, task: "asyncio.Task[None]", visitor: _Visitor) -> None:
        self._connections.discard(task)
        visitor.leave()
        if visitor.writer is None:
            visitor.socket.close()
        if not task.cancelled() and task.exception() is not None:
            _log.error("a request to the status page failed", error=repr(task.exception()))

    async def _hear(self, visitor: _Visitor) -> None:
        loop = asyncio.get_running_loop()
        await visitor.turn()
        reader = asyncio.StreamReader(HEADER_BYTES_MAX, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, visitor.socket)
        visitor.writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        await self._converse(reader, visitor.writer, visitor)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, visitor: _Visitor) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)
        try:
            for left in reversed(range(REQUESTS_MAX)):
                if not await self._exchange(connection, reader, writer, visitor, is_last=not left):
                    break
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            _log.debug("a client of the status page went away", peer=visitor.peer, error=str(error))
        finally:
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await writer.wait_closed()
            writer.transport.abort()

    async def _exchange(
        self,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        visitor: _Visitor,
        *,
        is_last: bool,
    ) -> bool:
        """Receive one request and send its answer. Return whether another may follow."""
        method, peer = b"GET", visitor.peer
        try:
            found = await _request(connection, reader)
            if found is None:
                return False
            head, body = found
            method = head.method
            await visitor.turn()
            if is_of_a_private_network(peer):
                visitor.keep()
                answer = await self._answer(_parsed(head, body, peer))
                visitor.wait()
            else:
                self.turned_away += 1
                answer, is_last = (
                    refusal(403, "this page is for the gateway's own network, and you are not in it"),
                    True,
                )
        except h11.RemoteProtocolError as error:
            answer, is_last = refusal(error.error_status_hint or 400, "this is no request that can be answered"), True
        except _RefusedError as error:
            answer, is_last = refusal(error.status, error.words), True
        except TimeoutError:
            if connection.their_state is h11.IDLE and not connection.trailing_data[0]:
                return False
            answer, is_last = refusal(408, "the request took too long"), True
        if connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return False
        async with asyncio.timeout(REQUEST_S):
            for data in _sent(connection, answer, method, is_last=is_last):
                writer.write(data)
            await writer.drain()
        if is_last or not _may_go_on(connection):
            return False
        connection.start_next_cycle()
        return True

    async def _answer(self, request: Request) -> Answer:
        try:
            return await self._answers.answer(request)
        except Exception:  # noqa: BLE001 - whatever it is, readings must not suffer for a page
            _log.exception("a request to the status page could not be answered", path=request.path[:80])
            return refusal(500, "the gateway could not answer; its log says why (journalctl -u sluice)")


def _may_go_on(connection: h11.Connection) -> bool:
    return connection.our_state is h11.DONE and connection.their_state is h11.DONE


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[h11.Request, bytes] | None:
    """Return the next request with its body; None if the client has gone.

    Raises h11's errors, _RefusedError and TimeoutError.
    """
    head: h11.Request | None = None
    body = bytearray()
    loop = asyncio.get_running_loop()
    due_s = loop.time() + IDLE_S
    is_begun = bool(connection.trailing_data[0])
    if is_begun:
        due_s = loop.time() + REQUEST_S
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            async with asyncio.timeout_at(due_s):
                data = await reader.read(READ_BYTES)
            if data and not is_begun:
                is_begun, due_s = True, loop.time() + REQUEST_S
            connection.receive_data(data)
        elif isinstance(event, h11.Request):
            head = event
            if connection.they_are_waiting_for_100_continue:
                raise _RefusedError(417, "no request here has a body that is worth asking for")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_BYTES_MAX:
                raise _RefusedError(413, "the request is larger than any that this page makes")
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None  # noqa: S101 - h11 gives the request first
            return head, bytes(body)
        else:  # ConnectionClosed, or PAUSED, which a finished exchange leaves behind
            return None


def _parsed(head: h11.Request, body: bytes, peer: str) -> Request:
    target = head.target.decode("ascii", "replace")
    path, _, query = target.partition("?")
    headers: dict[str, str] = {}
    repeated = set()
    for raw_name, raw_value in head.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name in headers:
            repeated.add(name)
        headers[name] = value
    # If one of these comes twice, a proxy may have read one value, and this server reads the other.
    if repeated & {"host", "origin", "authorization"}:
        headers["host"] = ""
    return Request(head.method.decode("latin-1"), path, query, headers, body, peer)


def _sent(connection: h11.Connection, answer: Answer, method: bytes, *, is_last: bool) -> list[bytes]:
    headers = [*answer.headers, ("content-length", str(len(answer.body)))]
    if answer.status == 304:
        headers = list(answer.headers)
    if is_last:
        headers.append(("connection", "close"))
    parts = [
        connection.send(
            h11.Response(status_code=answer.status, reason=HTTPStatus(answer.status).phrase, headers=headers)
        )
    ]
    if answer.body and method != b"HEAD" and answer.status != 304:
        parts.append(connection.send(h11.Data(data=answer.body)))
    parts.append(connection.send(h11.EndOfMessage()))
    return [part for part in parts if part]


def _bind_words(settings: StatusPageSettings, error: OSError) -> str:
    where = f"the status page cannot be served on {settings.host} port {settings.port}"
    goes_on = f"readings are taken all the same; it is tried again every {RETRY_S:.0f} s"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: the port is taken; stop what has it, or set another status_page.port; {goes_on}"
    if error.errno == errno.EACCES:
        return f"{where}: ports below 1024 need a privilege; set status_page.port to 1024 or above; {goes_on}"
    # From Python 3.12 on, asyncio passes over an address that is not there. If none is left, its error has no number.
    if error.errno in {errno.EADDRNOTAVAIL, None} or isinstance(error, socket.gaierror):
        return f"{where}: this machine has no such address; set status_page.host (0.0.0.0 means all); {goes_on}"
    return f"{where}: {error.strerror or error}; see status_page.host and status_page.port; {goes_on}"
