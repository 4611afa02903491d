"""Servers of a test's own on the loopback interface, that tell each connection what a script says."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def speaking(
    script: Script, context: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """A server, and its port: with each connection it does what `script` says, and closes it then.

    Its end leaves no connection open, not even one that has just come: a socket left to the garbage collection fails
    whichever test runs when that finds it. What goes wrong in a script is raised here; that a client left is no fault.
    """
    running: dict[asyncio.Future[None], asyncio.StreamWriter] = {}

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Called at once when a connection is made: a task that is cancelled before its first turn runs no `finally`.
        running[asyncio.ensure_future(_told(script, reader, writer))] = writer

    server = await asyncio.start_server(begin, host, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        # No further one is accepted; one that was gets to `begin`: a server that is closed meanwhile would forget it.
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening)
        for _ in range(5):
            await asyncio.sleep(0)
        server.close()
        for task, writer in running.items():
            task.cancel()
            # Python 3.11.2's raises where a connection by TLS has ended already.
            with suppress(AttributeError):
                writer.transport.abort()
        ended = await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)  # the transports' own end
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome


async def _told(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await script(reader, writer)
    except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
