import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from demo.uplink import Uplink
from tests.support.gateways import free_port
from tests.support.stream_server import speaking
from tests.support.waiting import patience

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def line_to_echo() -> AsyncIterator[Uplink]:
    async with speaking(echo) as port, Uplink() as uplink:
        uplink.open(port)
        yield uplink


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Stream]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(stream: Stream, question: bytes) -> bytes:
    stream[1].write(question)
    return await asyncio.wait_for(stream[0].readexactly(len(question)), patience(5))


async def silent(stream: Stream) -> bool:
    """Nothing comes: neither bytes nor an end of the connection."""
    try:
        await asyncio.wait_for(stream[0].read(1), 0.1)
    except TimeoutError:
        return True
    return False


async def test_bytes_pass_both_ways_and_an_end_is_handed_on() -> None:
    async with line_to_echo() as uplink, client(uplink.port) as stream:
        assert await ask(stream, b"a" * 200_000) == b"a" * 200_000
        stream[1].write_eof()
        assert await asyncio.wait_for(stream[0].read(), patience(5)) == b""


async def test_a_cut_line_is_silent_and_what_stood_on_it_is_reset_at_its_return() -> None:
    async with line_to_echo() as uplink, client(uplink.port) as before:
        assert await ask(before, b"hello") == b"hello"
        await uplink.cut()
        before[1].write(b"into the void")
        assert await silent(before)
        async with client(uplink.port) as during:  # the kernel completes the handshake, nobody answers
            during[1].write(b"anybody?")
            assert await silent(during)
            await uplink.restore()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(before[0].read(1), patience(5))
            assert await asyncio.wait_for(during[0].readexactly(8), patience(5)) == b"anybody?"
        async with client(uplink.port) as after:
            assert await ask(after, b"hello again") == b"hello again"


async def test_cutting_twice_is_cutting_once() -> None:
    async with line_to_echo() as uplink:
        await uplink.cut()
        await uplink.cut()
        await uplink.restore()
        async with client(uplink.port) as stream:
            assert await ask(stream, b"still here") == b"still here"


async def test_a_target_that_refuses_resets_the_client() -> None:
    async with Uplink() as uplink:
        uplink.open(free_port())
        async with client(uplink.port) as stream:
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(stream[0].read(1), patience(5))
