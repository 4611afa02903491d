"""A test's server leaves nothing behind: what it forgets, the garbage collection finds in another test."""

import asyncio
import gc
import socket

import pytest

from tests.support.stream_server import speaking


async def test_it_tells_what_its_script_says_and_closes() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))

    async with speaking(greet) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        assert await reader.read() == b"hello"
        writer.close()


@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_that_has_just_come_is_closed(turns: int) -> None:
    """`filterwarnings = error` and the collection make a forgotten one an error, at whichever turn of the loop."""

    async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    with socket.socket() as client:
        client.setblocking(False)
        async with speaking(listen) as port:
            with pytest.raises(BlockingIOError):
                client.connect(("127.0.0.1", port))
            for _ in range(turns):
                await asyncio.sleep(0)
    gc.collect()


async def test_what_goes_wrong_in_a_script_is_raised() -> None:
    async def fail(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        raise ValueError("the script")

    async def told() -> None:
        async with speaking(fail) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
            writer.close()

    with pytest.raises(ValueError, match="the script"):
        await told()
