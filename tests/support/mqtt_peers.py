"""Shared by tests of the MQTT listener: the listener over an intake in memory, and clients that send bare bytes."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from gateway.listener.listener import MqttListener
from gateway.reading import Mark, Reading
from gateway.settings import ListenerSettings
from gateway.tls.dates import Dates, by_system_clock
from tests.support.gateways import free_port
from tests.support.waiting import patience

Done = Callable[[bool], None]
CODEWORD = "correct horse"
USERS = {name: hashlib.sha256(CODEWORD.encode()).hexdigest() for name in ("m001", "m002")}


class RecordingIntake:
    """An intake that stores in a list and a dictionary: at once, or when the test says so.

    What it stored outlives a listener: another one over the same intake is the gateway after a restart.
    """

    def __init__(self) -> None:
        self.stored: list[Reading] = []
        self.kept: dict[str, bytes] = {}
        """The marks."""
        self.commits = 0
        self.batches: list[tuple[Sequence[Reading], Done]] = []
        """Taken and not decided, while `outcome` is None."""
        self._marks: list[Sequence[Mark]] = []
        """Marks of the same batches."""
        self.outcome: bool | None = True
        self.cannot_store = False
        self.refuses_by_share = False
        self.losses: list[tuple[str | None, str, int]] = []
        self.events: list[tuple[str, str | None, dict[str, object]]] = []

    def take(self, readings: Sequence[Reading], done: Done, marks: Sequence[Mark] = ()) -> None:
        self.batches.append((readings, done))
        self._marks.append(marks)
        if self.outcome is not None:
            asyncio.get_running_loop().call_soon(self.decide, self.outcome)

    def decide(self, stored: bool, place: int = 0) -> None:  # noqa: FBT001 - as `done` has it
        """Decide a batch, by default the oldest. Too much may wait for the newest; Kafka may have a later one first."""
        (readings, done), marks = self.batches.pop(place), self._marks.pop(place)
        if stored:
            self.commits += 1
            self.stored += readings
            for key, value in marks:
                if value is None:
                    self.kept.pop(key, None)
                else:
                    self.kept[key] = value
        done(stored)

    def decide_all(self) -> None:
        while self.batches:
            self.decide(True)

    def forget_undecided(self) -> None:
        """Forget batches that were taken and not committed, as `kill -9` does."""
        self.batches.clear()
        self._marks.clear()

    async def marks(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.kept.items() if key.startswith(prefix)}

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        assert sequences is None, "an MQTT client's sequences are not known here"
        self.losses.append((device, reason, count))

    def event(self, kind: str, device: str | None, **details: object) -> None:
        self.events.append((kind, device, details))


@contextlib.asynccontextmanager
async def listening(
    intake: RecordingIntake,
    port: int | None = None,
    clock: Callable[[], int] = lambda: 123_456,
    dates: Dates = by_system_clock,
    devices_file: Path | None = None,
    **settings: Any,
) -> AsyncIterator[MqttListener]:
    settings.setdefault("anonymous", True)
    # Tests connect as often as they like, all from one address.
    settings.setdefault("new_connections_per_s_max", 10_000)
    given = ListenerSettings(port=free_port() if port is None else port, **settings)
    listener = MqttListener(given, intake, clock, dates, devices_file=devices_file)
    running = asyncio.create_task(listener.run())
    begun = asyncio.create_task(listener.listening.wait())
    try:
        await asyncio.wait((running, begun), timeout=patience(5), return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if running.done():
            await running
        yield listener
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert not listener.shared.connections


class Peer:
    """A client that sends exactly the bytes it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(patience(5)):
            return await self.reader.readexactly(count)

    async def read_to_end(self) -> bytes:
        async with asyncio.timeout(patience(5)):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def silent(self, seconds: float = 0.05) -> bool:
        """Tell whether nothing comes for a while."""
        try:
            async with asyncio.timeout(seconds):
                await self.reader.read(1)
        except TimeoutError:
            return True
        return False

    def vanish(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()


# --- packets ----------------------------------------------------------------------------------------------

ACCEPTED = b"\x20\x02\x00\x00"
PRESENT = b"\x20\x02\x01\x00"
UNAVAILABLE = b"\x20\x02\x00\x03"
PINGREQ, PINGRESP, DISCONNECT = b"\xc0\x00", b"\xd0\x00", b"\xe0\x00"


def field(text: str) -> bytes:
    return len(text.encode()).to_bytes(2, "big") + text.encode()


def connect(
    client_id: str = "m001", *, keep_alive_s: int = 60, login: tuple[str, str] | None = None, will: str = ""
) -> bytes:
    flags, payload = 0x02, field(client_id)
    if will:
        flags, payload = flags | 0x04, payload + field("status") + field(will)
    if login is not None:
        flags, payload = flags | 0xC0, payload + field(login[0]) + field(login[1])
    body = field("MQTT") + bytes((4, flags)) + keep_alive_s.to_bytes(2, "big") + payload
    return bytes((0x10, len(body))) + body


def keeping(client_id: str = "m001", *, login: tuple[str, str] | None = None) -> bytes:
    """A CONNECT without clean session."""
    first = bytearray(connect(client_id, login=login))
    first[9] &= ~0x02
    return bytes(first)


def publish(payload: str, packet_id: int = 0, topic: str = "device/m001/thermo") -> bytes:
    body = field(topic) + (packet_id.to_bytes(2, "big") if packet_id else b"") + payload.encode()
    return bytes((0x32 if packet_id else 0x30, len(body))) + body


def again(payload: str, packet_id: int) -> bytes:
    data = bytearray(publish(payload, packet_id))
    data[0] |= 0x08
    return bytes(data)


def publish2(payload: str, packet_id: int, *, dup: bool = False, topic: str = "device/m001/thermo") -> bytes:
    body = field(topic) + packet_id.to_bytes(2, "big") + payload.encode()
    return bytes((0x3C if dup else 0x34, len(body))) + body


def puback(*packet_ids: int) -> bytes:
    return b"".join(b"\x40\x02" + packet_id.to_bytes(2, "big") for packet_id in packet_ids)


def numbered(first: int, *packet_ids: int) -> bytes:
    return b"".join(bytes((first, 2)) + packet_id.to_bytes(2, "big") for packet_id in packet_ids)


def pubrec(*packet_ids: int) -> bytes:
    return numbered(0x50, *packet_ids)


def pubrel(*packet_ids: int) -> bytes:
    return numbered(0x62, *packet_ids)


def pubcomp(*packet_ids: int) -> bytes:
    return numbered(0x70, *packet_ids)


@contextlib.asynccontextmanager
async def connected(listener: MqttListener, first: bytes | None = None, answer: bytes = b"") -> AsyncIterator[Peer]:
    """Connect a socket, send `first` and be answered `answer`; a CONNECT that is accepted if nothing is given."""
    if first is None:
        first, answer = connect(), ACCEPTED
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    peer = Peer(reader, writer)
    try:
        writer.write(first)
        assert await peer.read(len(answer)) == answer
        yield peer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
