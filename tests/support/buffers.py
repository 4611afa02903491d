"""Shared by the buffer's tests: entries, and a buffer that is open for the length of a block."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from msgspec.structs import replace

from gateway.buffer import insert
from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import (
    ROW_COLUMNS,
    SEQUENCE_BITS,
    SEQUENCE_MAX,
    START,
    Entry,
    Lane,
    Loss,
    Position,
    Quarantined,
    Row,
    Series,
    spans_of,
)
from gateway.clock.gateway_clock import BootClock
from gateway.reading import Datum, Mark, Reading
from gateway.settings import BufferSettings
from tests.support.waiting import patience

CLOCK = BootClock.constant(1_700_000_000_000_000, 1_000)
BOOT = "boot-1"


def entry(
    payload: bytes = b"21.5",
    device: str = "42",
    sequence: int | None = None,
    boot: str = "1-00000001",
    received_us: int = 1,
) -> Entry:
    series = Series("device-thermo", device, device, f"device/{device}/thermo", "sluice.reading", "application/json")
    numbered = {} if sequence is None else {"device_boot": boot, "device_sequence": sequence}
    return entry_of(series, payload, received_us, **numbered)


def reading_of(topic: str, payload: bytes, received_us: int = 1, port: str = "", **fields: Any) -> Reading:
    return changed(Reading(topic, port or topic, Datum(received_us=received_us, payload=payload)), **fields)


def entry_of(series: Series, payload: bytes, received_us: int = 1, **fields: Any) -> Entry:
    return changed(Entry(series, Datum(received_us=received_us, payload=payload)), **fields)


def row_of(sequence: int = 0, lane: int = 1, series: int = 1, **fields: Any) -> Row:
    """A row that says 21.5, received after a second."""
    return changed(Row(lane, sequence, series, Datum(received_us=1_000_000, payload=b"21.5")), **fields)


def input_of(
    reason: str, payload: bytes, device: str, subject: str, received_us: int = 1, **fields: Any
) -> Quarantined:
    datum = Datum(received_us=received_us, payload=payload)
    return changed(Quarantined(reason=reason, device=device, subject=subject, datum=datum), **fields)


Whole = TypeVar("Whole", Reading, Entry, Row, Quarantined)


def changed(whole: Whole, **fields: Any) -> Whole:
    """A copy with other fields, of its datum too."""
    of_datum = {name: fields.pop(name) for name in Datum.__struct_fields__ if name in fields}
    return replace(whole, datum=replace(whole.datum, **of_datum), **fields)


FORMER = "former_reading"
TABLES = ("reading", FORMER)
"""The tables of rows: today's, and that of former versions."""


@contextmanager
def storing_in(table: str) -> Iterator[None]:
    """Have rows stored in one of `TABLES`."""
    if table != FORMER:
        yield
        return
    rest = ", ".join(f"?{number}" for number in range(2, len(ROW_COLUMNS) - 1))
    statement = f"INSERT INTO former_reading VALUES (?1 >> {SEQUENCE_BITS}, ?1 & {SEQUENCE_MAX}, {rest})"
    with mock.patch.multiple(insert, _INSERT=statement, ROWS_AT_ONCE=10**9):
        yield


@asynccontextmanager
async def opened(
    path: Path, boot: str = BOOT, clock: Callable[[], BootClock] = lambda: CLOCK, **settings: object
) -> AsyncIterator[Buffer]:
    buffer = Buffer(BufferSettings(path=path, **{"commit_delay_ms": 0, **settings}), boot, clock)  # type: ignore[arg-type]
    buffer.open()
    try:
        yield buffer
    finally:
        await buffer.close()


async def store(buffer: Buffer, entries: Sequence[Entry]) -> bool:
    """Append and wait for the outcome, as a sensor waits for its acknowledgement."""
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    buffer.append(entries, outcome.set_result)
    return await asyncio.wait_for(outcome, patience(10))


def append(buffer: Buffer, entries: Sequence[Entry], marks: Sequence[Mark] = ()) -> asyncio.Future[bool]:
    """Append; the outcome may take as long as the buffer holds it."""
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def done(stored: bool) -> None:  # noqa: FBT001 - the contract of Intake
        if not outcome.done():
            outcome.set_result(stored)

    buffer.append(entries, done, marks)
    return outcome


async def is_held(outcome: asyncio.Future[bool], seconds: float = 1.5) -> bool:
    """Whether it has no outcome, after the buffer had the time to try again."""
    await asyncio.wait((outcome,), timeout=seconds)
    return not outcome.done()


async def fill(buffer: Buffer, payload_bytes: int = 50_000) -> tuple[int, asyncio.Future[bool]]:
    """Append until one is held for want of room: how many were stored before it, and its outcome to come."""
    for count in range(10_000):
        outcome = append(buffer, [entry(bytes(payload_bytes))])
        if await is_held(outcome, 0.3):
            return count, outcome
        assert await outcome
    raise AssertionError("the buffer has no bounds")


async def rows(buffer: Buffer, after: Position = START) -> list[Row]:
    _, found = await buffer.read(after, 1_000_000)
    return found


async def series_of(buffer: Buffer, number: int) -> Series:
    return await buffer.run(lambda file: file.series.find(number))


async def lane_of(buffer: Buffer, number: int) -> Lane:
    return await buffer.run(lambda file: file.lanes.find(number))


async def marks_of(buffer: Buffer, prefix: str) -> dict[str, bytes]:
    return await buffer.run(lambda file: file.marks(prefix))


async def quarantined_of(buffer: Buffer, numbers: Sequence[int]) -> dict[int, Quarantined]:
    return await buffer.run(lambda file: file.quarantine.find(numbers))


async def confirm(buffer: Buffer, confirmed: Sequence[Row]) -> None:
    """Confirm rows, and have them deleted without the delay that spares the card."""
    buffer.confirm(buffer.id, spans_of(confirmed))
    buffer._queue._delete_due_s = 0.0
    await buffer.answers()  # wakes it
    async with asyncio.timeout(patience(10)):
        while buffer._outgoing.has_confirmed:
            await asyncio.sleep(0.005)
    await buffer.answers()  # comes behind the commit


async def losses(buffer: Buffer) -> list[Loss]:
    """Losses that are counted, reported now."""
    found: list[Loss] = []

    def report(loss: Loss) -> Entry:
        found.append(loss)
        return entry(b"report")

    await buffer.report_losses(report)
    return found


def is_full(buffer: Buffer) -> bool:
    """`buffer.state.full`, asked anew: a type checker takes the attribute for constant."""
    return buffer.state.full


def failure(buffer: Buffer) -> str | None:
    """`buffer.state.failing`, asked anew."""
    return buffer.state.failing
