"""Carries TCP from the gateway to Kafka as a proxy that can be cut like a real line: silence, no farewell."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
CHUNK_BYTES = 65_536

# SO_LINGER on with zero seconds: closing sends RST instead of FIN, as a router does that has lost the connection.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Uplink:
    """A proxy from a free port of the loopback to `target_port`; `async with` closes it.

    The port is bound at once, so that others can be told of it before the target is known.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.target_port: int | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cut()
        await self._reset_all()
        self._listener.close()

    def open(self, target_port: int) -> None:
        """Begin to forward to `target_port` of the loopback."""
        self.target_port = target_port
        self._accepting = asyncio.create_task(self._accept(target_port), name="uplink accept")

    async def cut(self) -> None:
        """Let nothing pass from now on, in either direction, and tell nobody.

        The kernel completes a new connection, as behind many a modem, but nobody answers it.
        """
        if self._accepting is None:
            return
        accepting, self._accepting = self._accepting, None
        accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
        for connection in tuple(self._connections):
            await connection.freeze()

    async def restore(self) -> None:
        """Forward again. Connections from before the cut are reset, as after a NAT forgot them."""
        if self.target_port is None:
            raise RuntimeError("restore() comes after open() and cut()")
        await self._reset_all()
        self.open(self.target_port)

    async def _accept(self, target_port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            connection = _Connection(client)
            self._connections.add(connection)
            connection.start(target_port, self._connections.discard)

    async def _reset_all(self) -> None:
        connections, self._connections = self._connections, set()
        for connection in connections:
            await connection.freeze()
            connection.reset()


class _Connection:
    """One client's connection, and the one to the target that belongs to it."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._target = socket.socket()
        for each in (self._client, self._target):
            each.setblocking(False)
        self._task: asyncio.Task[None] | None = None

    def start(self, target_port: int, on_end: Callable[["_Connection"], None]) -> None:
        async def run() -> None:
            try:
                await self._forward(target_port)
            except* OSError:  # reset by one side, or refused by the target: the other side hears the same
                self.reset()
            self.close()
            on_end(self)

        self._task = asyncio.create_task(run(), name="uplink connection")

    async def _forward(self, target_port: int) -> None:
        await asyncio.get_running_loop().sock_connect(self._target, (HOST, target_port))
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(self._client, self._target))
            group.create_task(_pump(self._target, self._client))

    async def freeze(self) -> None:
        """Stop forwarding; both sockets stay open and silent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def reset(self) -> None:
        for each in (self._client, self._target):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.close()

    def close(self) -> None:
        self._client.close()
        self._target.close()


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Forward one direction until its source says that nothing more comes, and say so to the sink."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK_BYTES):
        await loop.sock_sendall(sink, data)
    sink.shutdown(socket.SHUT_WR)
