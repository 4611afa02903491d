"""Accepts connections, and hands each on with its address before a transport is made for it.

asyncio's own servers accept up to a thousand connections at a time. They make a transport for each before anybody sees
its address.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Final

ACCEPTS_PER_TURN: Final = 8
"""Connections accepted in one turn of the event loop."""
BACKLOG: Final = 1_024
REST_S: Final = 1.0
"""Seconds without accepting after the system ran out of descriptors or memory."""

Receive = Callable[[socket.socket, str, int], None]
"""Takes over a connection, or closes it. It also gets the address and port of the peer."""


class Acceptor:
    """Belongs to the event loop. Calls `cannot` with the error if it accepts no connections for a while."""

    def __init__(self, cannot: Callable[[OSError], None]) -> None:
        self._cannot = cannot
        self._listening: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()

    async def open(self, host: str, port: int, receive: Receive) -> None:
        """Listen at a port, and give each connection to `receive`. Raises OSError."""
        # asyncio binds to all addresses of the host.
        server = await self._loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        try:
            sockets = [each.dup() for each in server.sockets]
        finally:
            server.close()
        self._listening += sockets
        for each in sockets:
            each.setblocking(False)
            each.listen(BACKLOG)
            self._loop.add_reader(each, self._accept, each, receive)

    def close(self) -> None:
        """Stop listening."""
        for each in self._listening:
            self._loop.remove_reader(each)
            each.close()
        self._listening.clear()

    def _accept(self, listening: socket.socket, receive: Receive) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = listening.accept()
            except OSError as error:
                # With any other error nobody waits, or the peer has gone again: accept(2) has many errors for that.
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._rest(listening, receive, error)
                return
            accepted.setblocking(False)
            receive(accepted, address[0], address[1])

    def _rest(self, listening: socket.socket, receive: Receive, error: OSError) -> None:
        """Stop accepting for a while: the kernel would report the same connection at each turn."""
        self._cannot(error)
        self._loop.remove_reader(listening)

        def go_on() -> None:
            if listening in self._listening:
                self._loop.add_reader(listening, self._accept, listening, receive)

        self._loop.call_later(REST_S, go_on)
