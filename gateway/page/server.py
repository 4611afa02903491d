"""The status page's server: HTTP/1.1 for browsers on the LAN, for Prometheus and for whoever asks about health.

h11 parses; here are the connections and their bounds. What is answered is `page.answers`'.
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

from gateway.host.places import Places, source_of
from gateway.page.access import is_loopback, is_of_a_private_network
from gateway.page.answers import Answer, Answers, Request, refusal
from gateway.page.view import StatusView
from gateway.settings import StatusPageSettings

HEADER_BYTES_MAX: Final = 16_384
BODY_BYTES_MAX: Final = 4_096
"""The log-in is the only request with a body."""
REQUEST_S: Final = 10.0
"""How long a request may take to come in, once it has begun, and its answer to be taken."""
IDLE_S: Final = 30.0
"""How long a connection may wait for its next request: the page asks every other second."""
REQUESTS_MAX: Final = 1_000
"""Of a connection; a browser then makes another."""
PER_ADDRESS_MAX: Final = 12
"""Connections of one address (IPv6: its /64): a browser opens six."""
READ_BYTES: Final = 8_192
RETRY_S: Final = 30.0
"""How long until the port is tried again that is taken."""
TIDY_S: Final = 10.0
LOG_INTERVAL_S: Final = 60.0
"""How often the log tells of connections that made room."""

_log = structlog.get_logger("sluice.status_page")


class _RefusedError(Exception):
    """A request that is not read to its end."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


class _Visitor:
    """A connection, and its places: of its address, and of all."""

    def __init__(
        self, writer: asyncio.StreamWriter, peer: str, places: tuple[Places["_Visitor"], Places["_Visitor"]]
    ) -> None:
        self.writer = writer
        self.peer = peer
        self.places = places

    def enter(self) -> None:
        """Wait for its first request."""
        for places in self.places:
            places.enter(self)

    def keep(self) -> None:
        """It has asked something: it makes room for nobody while its answer is found."""
        for places in self.places:
            places.keep(self)

    def wait(self) -> None:
        """It is sent its answer, and may ask again."""
        for places in self.places:
            places.wait(self)

    def leave(self) -> None:
        """Take back its places."""
        for places in self.places:
            places.leave(self)


class StatusPage:
    """Serves it until cancelled. A port that cannot be had is no reason not to take readings."""

    def __init__(self, settings: StatusPageSettings, view: StatusView) -> None:
        self._settings = settings
        self._view = view
        self._answers = Answers(settings, view, socket.gethostname())
        self._connections: set[asyncio.Task[None]] = set()
        self._familiar = Places[_Visitor](settings.connections_max)
        """For this box itself, and addresses where somebody has logged in: nobody else takes their places."""
        self._strangers = Places[_Visitor](settings.connections_max)
        self._by_address: dict[str, Places[_Visitor]] = {}
        self._told_s: float | None = None
        self.listening = asyncio.Event()
        self.turned_away = 0
        """Connections that came from elsewhere, that there was no room for, or that had to make room."""

    async def run(self) -> None:
        """For the pipeline's TaskGroup."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._view.follow(), name="status-page-follow")
            tasks.create_task(self._view.refresh(), name="status-page-refresh")
            tasks.create_task(self._serve(), name="status-page-serve")

    async def _serve(self) -> None:
        said = ""
        while True:
            try:
                server = await asyncio.start_server(
                    self._connected, self._settings.host, self._settings.port, limit=HEADER_BYTES_MAX, backlog=64
                )
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
                server.close()
                self._answers.log_ins.sum_up(time.monotonic(), is_end=True)
                for connection in self._connections:
                    connection.cancel()
                await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection is there: make room, or turn it away before it costs anything."""
        peer = _peer(writer)
        is_familiar = is_loopback(peer) or self._answers.log_ins.has_let_in(peer)
        source = source_of(peer)
        of_address = self._by_address.setdefault(source, Places(PER_ADDRESS_MAX))
        visitor = _Visitor(writer, peer, (of_address, self._familiar if is_familiar else self._strangers))
        if not self._has_room(visitor):
            writer.transport.abort()
            self._leave(visitor)
            return
        visitor.enter()
        converse = self._converse(reader, visitor)
        task = asyncio.get_running_loop().create_task(converse, name="status-page-client")
        self._connections.add(task)
        task.add_done_callback(lambda done: self._ended(done, visitor))

    def _has_room(self, newcomer: "_Visitor") -> bool:
        """Tell whether there is room, after closing whoever has been silent for longest where there was none."""
        for places in newcomer.places:
            if places.are_taken:
                oldest = places.longest_waiting()
                self._tell(newcomer if oldest is None else oldest)
                if oldest is None:
                    return False
                self._leave(oldest)
                oldest.writer.transport.abort()
        return True

    def _leave(self, visitor: "_Visitor") -> None:
        visitor.leave()
        of_address, source = visitor.places[0], source_of(visitor.peer)
        if not of_address and self._by_address.get(source) is of_address:
            del self._by_address[source]

    def _tell(self, closed: "_Visitor") -> None:
        """Count a connection that is closed for want of room, and log it now and then."""
        self.turned_away += 1
        now_s = time.monotonic()
        if self._told_s is None or now_s - self._told_s >= LOG_INTERVAL_S:
            self._told_s = now_s
            _log.warning(
                "connections to the status page are closed to make room for others, the longest silent first; "
                "see status_page.connections_max",
                peer=closed.peer,
                of_this_address=len(closed.places[0]),
                closed_since_the_start=self.turned_away,
            )

    def _ended(self, task: "asyncio.Task[None]", visitor: "_Visitor") -> None:
        self._connections.discard(task)
        self._leave(visitor)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a request to the status page failed", error=repr(task.exception()))

    async def _converse(self, reader: asyncio.StreamReader, visitor: "_Visitor") -> None:
        writer = visitor.writer
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)
        try:
            for left in reversed(range(REQUESTS_MAX)):
                if not await self._exchange(connection, reader, visitor, is_last=not left):
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
        self, connection: h11.Connection, reader: asyncio.StreamReader, visitor: "_Visitor", *, is_last: bool
    ) -> bool:
        """One request and its answer; whether another may follow."""
        method, peer, writer = b"GET", visitor.peer, visitor.writer
        try:
            found = await _request(connection, reader)
            if found is None:
                return False
            head, body = found
            method = head.method
            if is_of_a_private_network(peer):
                visitor.keep()
                answer = await self._answer(_told(head, body, peer))
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
    """The next request with its body; None where the client has gone. Raises what h11 does, and TimeoutError."""
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


def _told(head: h11.Request, body: bytes, peer: str) -> Request:
    target = head.target.decode("ascii", "replace")
    path, _, query = target.partition("?")
    headers: dict[str, str] = {}
    repeated = set()
    for raw_name, raw_value in head.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name in headers:
            repeated.add(name)
        headers[name] = value
    # Two of these are two opinions of who asks whom: the one is this server's, the other some proxy's.
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


def _peer(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else ""


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
