"""Chooses the rows to send next: live rows and rows of the backlog, each with its share.

Rows that cannot go at present, as their partition does not answer, are passed over. They come again when they can go.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, takewhile
from operator import attrgetter

from gateway.buffer.buffer import Buffer
from gateway.buffer.read_rows import READ_BYTES_MAX
from gateway.buffer.rows import START, Lane, Position, Row, Series, sizes_of, spans_of, without
from gateway.intake.new_clocks import NewClocks
from gateway.reading import BufferFileError
from gateway.settings import KafkaSettings

ROW_BYTES = 360
"""Bytes of a record beside its payload, about, before compression: headers and key."""
ROUND_BYTES = 4_000_000
"""Bytes of rows to read for a round. Each read is smaller, as commits wait for it."""
CACHE_MAX = 50_000
SHARED_ROWS_MAX = 2_000
"""Rows of the backlog in a round that also has live readings. Live readings wait for the whole round."""
LIVE_S = 1.0
"""Seconds after the last live reading in which another one is expected."""
SCANS_MAX = 4
"""Reads that find only rows to pass over, before live rows are looked at again."""


class _Cursor:
    """The place up to which rows have been taken, and rows that were read and not taken yet."""

    def __init__(self) -> None:
        self.position = START
        self.ahead: list[Row] = []
        """Rows that were read after `position`."""
        self.drops = 0
        """`Buffer.drops` when the rows ahead were known to be there."""
        self.next_read: asyncio.Task[tuple[int, list[Row]]] | None = None
        """The read of the next rows after `position`, under way while a round is sent."""
        self.is_over = False
        """Whether the last read found nothing."""
        self.passed_over = False
        """Whether rows before the cursor were left that have to be sent."""

    def rewind(self, to: Position) -> None:
        """Read again from a position. Rows that are confirmed are not read twice."""
        self.forget()
        self.position = to
        self.is_over = self.passed_over = False

    def forget(self) -> None:
        """Drop the rows that were read ahead, as the file may have changed."""
        self.ahead = []
        if self.next_read is not None:
            if not self.next_read.cancel() and not self.next_read.cancelled():
                # Retrieved, so that asyncio does not complain. If the error lasts, the next read raises it.
                self.next_read.exception()
            self.next_read = None

    def advance(self, rows: Sequence[Row], ahead: list[Row]) -> None:
        """Note that `rows` were taken or passed over, and that the rows `ahead` follow them."""
        self.ahead = ahead
        if rows:
            self.position = Position(rows[-1].lane, rows[-1].sequence)


class Supply:
    """Rows of one buffer file, for one session. Raises BufferFileError if another file has taken its place."""

    def __init__(
        self, buffer: Buffer, kafka: KafkaSettings, under_way: Callable[[], Iterable[Row]], new_clocks: NewClocks
    ) -> None:
        """`under_way` gives rows of former rounds that are still being sent. They may not be dropped."""
        self._buffer = buffer
        self._new_clocks = new_clocks
        self._under_way = under_way
        self._kafka = kafka
        self.buffer_id = buffer.id
        self._rewinds = buffer.attachment.rewinds
        self.live_lane = 0
        """The lane that readings go into, as of the last `follow`."""
        self._live = _Cursor()
        self._backlog = _Cursor()
        self.has_more = False
        """Whether nothing was found to send, although not everything was looked at."""
        self._live_s = float("-inf")
        """When live rows were last found (monotonic)."""
        self._waits_for_clock = False
        self._waiting_boots: dict[str, bool] = {}
        """By boot of this gateway: whether its rows wait for a clock."""
        self._series: dict[int, Series] = {}
        self._lanes: dict[int, Lane] = {}

    def follow(self) -> bool:
        """Follow the buffer file. Returns whether another lane is the live one now."""
        if self._buffer.id != self.buffer_id:
            raise _replaced()
        is_ordered = self._kafka.drain == "oldest-first"
        if self._buffer.attachment.rewinds != self._rewinds:
            # Rows were put before those that were read, or were passed over.
            self._rewinds = self._buffer.attachment.rewinds
            self._backlog.rewind(START)
            self._live.rewind(START if is_ordered else Position(self.live_lane, -1))
        lane = self._buffer.lane.number
        if lane == self.live_lane:
            return False
        self.live_lane = lane
        if not is_ordered:
            self._backlog.passed_over |= self._live.passed_over
            self._backlog.forget()
            self._backlog.is_over = False
            self._live.rewind(Position(lane, -1))
        return True

    async def next(
        self,
        budget: Callable[[bool], float],
        may_go: Callable[[Row], bool] | None,
        waits_for_clock: bool,  # noqa: FBT001 - how things stand, not what to do
    ) -> tuple[list[Row], list[Row]]:
        """The rows to send now: live rows and rows of the backlog, each in order.

        `budget` gives the bytes that they may take before compression, and is told whether both kinds are there.
        `may_go` tells whether a row may be sent; None if all may. `waits_for_clock` means that a time may still be
        learnt for rows of this boot, and of earlier boots that were never synced. These rows have to wait. The buffer
        drops none of the returned rows before the next call.
        """
        if waits_for_clock != self._waits_for_clock:
            self._waits_for_clock = waits_for_clock
            self._waiting_boots.clear()
        for _ in range(SCANS_MAX):
            taken = await self._choose(budget, may_go)
            kept = await self._keep_from_drop(*taken)
            if any(kept) or not any(taken):
                return kept
        self.has_more = True
        return [], []

    async def _choose(
        self, budget: Callable[[bool], float], may_go: Callable[[Row], bool] | None
    ) -> tuple[list[Row], list[Row]]:
        """The next live rows and backlog rows. Some may have been dropped since they were read."""
        self.has_more = False
        if self._kafka.drain == "oldest-first":
            rows, going = await self._look(self._live, may_go)
            return self._advance(self._live, rows, _within(going, budget(False))), []
        live_rows, live = await self._look(self._live, may_go)
        backlog: list[Row] = []
        if live:
            self._live_s = time.monotonic()
        is_shared = not self._backlog.is_over and time.monotonic() < self._live_s + LIVE_S
        left = budget(is_shared)
        if not self._backlog.is_over:
            # The backlog gets what live readings leave of their share, and the other way round.
            live_bytes = min(_bytes_of(live), left * (1 - self._kafka.backlog_share))
            rows, going = await self._look(self._backlog, may_go)
            going = _within(going, left - live_bytes)
            backlog = self._advance(self._backlog, rows, going[:SHARED_ROWS_MAX] if is_shared else going)
            left -= _bytes_of(backlog)
        return self._advance(self._live, live_rows, _within(live, left)), backlog

    async def _keep_from_drop(self, live: list[Row], backlog: list[Row]) -> tuple[list[Row], list[Row]]:
        """Keep rows from being dropped from here on. Returns them without rows that were dropped before."""
        if not self._buffer.may_drop:
            return live, backlog
        drops = [cursor.drops for cursor, rows in ((self._live, live), (self._backlog, backlog)) if rows]
        gone = await self._buffer.keep_from_drop(
            self.buffer_id,
            [*spans_of(live), *spans_of(backlog)],
            min(drops, default=self._buffer.drops),
            spans_of(sorted(self._under_way(), key=attrgetter("lane", "sequence"))),
        )
        return (without(live, gone), without(backlog, gone)) if gone else (live, backlog)

    def pass_over(self) -> None:
        """Note that rows were given and not sent. `come_again` gives them once more."""
        self._live.passed_over = self._backlog.passed_over = True

    def come_again(self) -> None:
        """Give rows again that were passed over, as they may go now."""
        if self._backlog.passed_over:
            self._backlog.rewind(START)
        if self._live.passed_over:
            is_ordered = self._kafka.drain == "oldest-first"
            self._live.rewind(START if is_ordered else Position(self.live_lane, -1))

    async def series(self, number: int) -> Series:
        """The series that a row's series number stands for."""
        series = self._series.get(number)
        if series is None:
            if len(self._series) >= CACHE_MAX:
                self._series.clear()
            series = await self._buffer.run(lambda file: file.series.find(number), self.buffer_id)
            self._series[number] = series
        return series

    async def lane(self, number: int) -> Lane:
        """The lane that a row's lane number stands for."""
        lane = self._lanes.get(number)
        if lane is None:
            lane = await self._buffer.run(lambda file: file.lanes.find(number), self.buffer_id)
            self._lanes[number] = lane
        return lane

    async def _look(self, cursor: _Cursor, may_go: Callable[[Row], bool] | None) -> tuple[list[Row], list[Row]]:
        """The next rows after a cursor, and those that may go. If none of a read may go, its rows are passed over."""
        for _ in range(SCANS_MAX):
            rows = await self._read(cursor)
            going = rows if may_go is None else [row for row in rows if may_go(row)]
            if self._new_clocks.waiting_devices:
                going = [row for row in going if not await self._waits_for_sensor_clock(row)]
            if going or not rows:
                return rows, going
            cursor.advance(rows, [])
            cursor.passed_over = True
        self.has_more = True
        return [], []

    async def _waits_for_sensor_clock(self, row: Row) -> bool:
        """Whether a row waits for its sensor's clock, or would overtake a row that does."""
        series = await self.series(row.series)
        return (series.topic, series.device) in self._new_clocks.waiting_devices

    def _advance(self, cursor: _Cursor, rows: list[Row], taken: list[Row]) -> list[Row]:
        """Move the cursor behind the last of the rows `taken`. A backlog is read on meanwhile. Returns `taken`."""
        passed = len(rows)
        if taken and taken[-1] is not rows[-1]:
            place = taken[-1].lane, taken[-1].sequence
            passed = sum(1 for row in rows if (row.lane, row.sequence) <= place)
        cursor.passed_over |= len(taken) < passed
        cursor.advance(rows[:passed], rows[passed:])
        if cursor is self._backlog and taken and not cursor.ahead:
            cursor.next_read = asyncio.create_task(self._read_file(cursor), name="read ahead")
        return taken

    async def _read(self, cursor: _Cursor) -> list[Row]:
        rows = cursor.ahead
        if not rows and cursor.next_read is not None:
            next_read, cursor.next_read = cursor.next_read, None
            cursor.drops, rows = await next_read
        drops = self._buffer.drops
        if rows and cursor.drops != drops:
            ahead = spans_of(rows)
            gone = await self._buffer.run(lambda file: file.gone(ahead), self.buffer_id)
            rows = cursor.ahead = without(rows, gone)
            cursor.drops = drops
        if not rows:
            cursor.drops, rows = await self._read_file(cursor)
            cursor.is_over = not rows
        if self._waits_for_clock:
            # Rows behind the first waiting row wait too. If a later boot was synced, it would have told the time.
            for place, row in enumerate(rows):
                if await self._waits_for_boot_clock(row.lane):
                    return rows[:place]
        return rows

    async def _waits_for_boot_clock(self, number: int) -> bool:
        """Whether a time may still be learnt for the rows of a lane."""
        boot_id = (await self.lane(number)).boot_id
        waits = self._waiting_boots.get(boot_id)
        if waits is None:
            waits = boot_id == self._buffer.boot_id
            waits = waits or await self._buffer.run(lambda file: file.boots.may_be_learnt(boot_id))
            self._waiting_boots[boot_id] = waits
        return waits

    async def _read_file(self, cursor: _Cursor) -> tuple[int, list[Row]]:
        """Read the rows after a cursor. Returns `Buffer.drops` as it was before, and the rows."""
        limit, drops = self._kafka.batch_rows_max, self._buffer.drops
        rows: list[Row] = []
        position = cursor.position
        while True:
            wanted = limit - len(rows)
            if cursor is self._backlog:
                buffer_id, some = await self._buffer.read_backlog(position, wanted, self.live_lane)
            else:
                buffer_id, some = await self._buffer.read(position, wanted)
            if buffer_id != self.buffer_id:
                raise _replaced()
            rows += some
            is_cut = len(some) < wanted and _bytes_of(some) > READ_BYTES_MAX // 2
            if not is_cut or _bytes_of(rows) >= ROUND_BYTES:
                return drops, rows
            # On a link with a long delay, the rows of one read would make a round too small.
            position = Position(some[-1].lane, some[-1].sequence)

    async def close(self) -> None:
        """Stop reading, and let the buffer drop rows again."""
        self._buffer.release()
        next_read = self._backlog.next_read
        self._backlog.forget()
        if next_read is not None:
            await asyncio.gather(next_read, return_exceptions=True)


def _replaced() -> BufferFileError:
    return BufferFileError("the buffer file was replaced: starting over with the new one")


def _bytes_of(rows: Sequence[Row]) -> int:
    return sum(sizes_of(rows)) + ROW_BYTES * len(rows)


def _within(rows: list[Row], budget: float) -> list[Row]:
    """The first rows that fit into a budget, at least one: however small the budget, there is progress."""
    if _bytes_of(rows) <= budget:
        return rows
    sizes = accumulate(row.datum.size + ROW_BYTES for row in rows)
    return rows[: max(1, sum(1 for _ in takewhile(lambda size: size <= budget, sizes)))]
