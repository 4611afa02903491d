"""Accepts connections and hands on each with its address, before anything is made of it.

asyncio's own servers take a thousand from the kernel at a time, and make a transport of each before anybody sees whose
it is.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Final

ACCEPTS_PER_TURN: Final = 8
"""Connections that are taken from the kernel before others have their turn."""
BACKLOG: Final = 1_024
REST_S: Final = 1.0
"""Pause after the system could give no more files."""

Receive = Callable[[socket.socket, str, int], None]
"""Takes a connection, and the address and port of its other side; or closes it."""


class Acceptor:
    """Belongs to the event loop. `cannot` is told why no connection can be accepted for a moment."""

    def __init__(self, cannot: Callable[[OSError], None]) -> None:
        self._cannot = cannot
        self._listening: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()

    async def open(self, host: str, port: int, receive: Receive) -> None:
        """Listen at a port. Raises OSError."""
        # asyncio binds, to all addresses of the host.
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
        """Accept nobody more."""
        for each in self._listening:
            self._loop.remove_reader(each)
            each.close()
        self._listening.clear()

    def _accept(self, listening: socket.socket, receive: Receive) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = listening.accept()
            except OSError as error:
                # Else nobody is there, or whoever was has gone again: accept(2) tells that in many ways.
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._rest(listening, receive, error)
                return
            accepted.setblocking(False)
            receive(accepted, address[0], address[1])

    def _rest(self, listening: socket.socket, receive: Receive, error: OSError) -> None:
        """Let a while pass: the kernel would tell of the same connection at each turn."""
        self._cannot(error)
        self._loop.remove_reader(listening)

        def go_on() -> None:
            if listening in self._listening:
                self._loop.add_reader(listening, self._accept, listening, receive)

        self._loop.call_later(REST_S, go_on)
