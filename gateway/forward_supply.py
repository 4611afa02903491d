"""Which rows are sent next: live ones, and those of the lanes behind, each with its share.

Rows that cannot go at present (their partition does not answer) are passed over, and come again when they can.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

from gateway.buffer import Buffer
from gateway.buffer_rows import START, Lane, Position, Row, Series
from gateway.buffer_schema import BufferFileError
from gateway.settings import KafkaSettings

ROW_BYTES = 360
"""What a record takes beside its payload before it is compressed, about: headers and key."""
CACHE_MAX = 50_000
SCANS_MAX = 4
"""Reads of nothing but rows that are passed over, before live ones are looked at again."""


class _Cursor:
    """How far rows have been read."""

    def __init__(self) -> None:
        self.position = START
        self.is_over = False
        """Whether nothing more was there."""
        self.passed_over = False
        """Whether rows were left behind it that have to be sent."""

    def rewind(self, to: Position) -> None:
        """Read again from there; rows that are confirmed are not read twice."""
        self.position = to
        self.is_over = self.passed_over = False

    def advance(self, rows: Sequence[Row]) -> None:
        if rows:
            self.position = Position(rows[-1].lane, rows[-1].sequence)


class Supply:
    """Rows of one buffer file, for one session. Raises BufferFileError where another file has taken its place."""

    def __init__(self, buffer: Buffer, kafka: KafkaSettings) -> None:
        self._buffer = buffer
        self._kafka = kafka
        self.buffer_id = buffer.id
        self._rewinds = buffer.rewinds
        self.live_lane = 0
        """The lane that readings go into, as of the last look."""
        self._live = _Cursor()
        self._behind = _Cursor()
        self.has_more = False
        """Whether nothing was found to send, and not everything was looked at."""
        self._series: dict[int, Series] = {}
        self._lanes: dict[int, Lane] = {}

    def follow(self) -> bool:
        """See what became of the file; whether another lane is the live one now."""
        if self._buffer.id != self.buffer_id:
            raise _replaced()
        is_ordered = self._kafka.drain == "oldest-first"
        if self._buffer.rewinds != self._rewinds:
            # Rows have come to stand before those that were read.
            self._rewinds = self._buffer.rewinds
            self._behind.rewind(START)
            if is_ordered:
                self._live.rewind(START)
        lane = self._buffer.lane.number
        if lane == self.live_lane:
            return False
        self.live_lane = lane
        if not is_ordered:
            self._behind.passed_over |= self._live.passed_over
            self._behind.is_over = False
            self._live.rewind(Position(lane, -1))
        return True

    async def next(
        self, budget: Callable[[bool], float], may_go: Callable[[Row], bool] | None, boot_held: str | None
    ) -> tuple[list[Row], list[Row]]:
        """The rows to send now: live ones and those behind, in order.

        `budget` says how many bytes they may take before they are compressed, and is told whether both are there;
        `may_go` which of them may be sent, None that all may; `boot_held` is the boot whose rows have to wait.
        """
        self.has_more = False
        if self._kafka.drain == "oldest-first":
            return await self._take(self._live, budget(False), may_go, boot_held), []
        live_rows, live = await self._look(self._live, may_go, boot_held)
        behind: list[Row] = []
        left = budget(bool(live) and not self._behind.is_over)
        if not self._behind.is_over:
            # What live readings do not need of their share, the backlog has, and the other way round.
            live_bytes = min(_bytes_of(live), left * (1 - self._kafka.backlog_share))
            behind = await self._take(self._behind, left - live_bytes, may_go, boot_held)
            left -= _bytes_of(behind)
        return self._advance(self._live, live_rows, live, left), behind

    def pass_over(self) -> None:
        """Rows that were given are left behind: `come_again` gives them once more."""
        self._live.passed_over = self._behind.passed_over = True

    def come_again(self) -> None:
        """What was passed over may go now."""
        if self._behind.passed_over:
            self._behind.rewind(START)
        if self._live.passed_over:
            is_ordered = self._kafka.drain == "oldest-first"
            self._live.rewind(START if is_ordered else Position(self.live_lane, -1))

    async def series(self, number: int) -> Series:
        """What a row's series number stands for."""
        series = self._series.get(number)
        if series is None:
            if len(self._series) >= CACHE_MAX:
                self._series.clear()
            series = self._series[number] = await self._buffer.series(self.buffer_id, number)
        return series

    async def lane(self, number: int) -> Lane:
        """The lane of a row."""
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = await self._buffer.lane_of(self.buffer_id, number)
        return lane

    async def _take(
        self, cursor: _Cursor, budget: float, may_go: Callable[[Row], bool] | None, boot_held: str | None
    ) -> list[Row]:
        """Rows behind a cursor that may go, and take no more than that; the cursor comes to stand behind them."""
        rows, going = await self._look(cursor, may_go, boot_held)
        return self._advance(cursor, rows, going, budget)

    async def _look(
        self, cursor: _Cursor, may_go: Callable[[Row], bool] | None, boot_held: str | None
    ) -> tuple[list[Row], list[Row]]:
        """The next rows behind a cursor, and those of them that may go; chunks of which none may are passed over."""
        for _ in range(SCANS_MAX):
            rows = await self._read(cursor, boot_held)
            going = rows if may_go is None else [row for row in rows if may_go(row)]
            if going or not rows:
                return rows, going
            cursor.advance(rows)
            cursor.passed_over = True
        self.has_more = True
        return [], []

    def _advance(self, cursor: _Cursor, rows: list[Row], going: list[Row], budget: float) -> list[Row]:
        """Those of `going` that the budget allows; the cursor comes to stand behind the last of them."""
        taken = _within(going, budget)
        if len(taken) < len(going):
            place = taken[-1].lane, taken[-1].sequence
            rows = [row for row in rows if (row.lane, row.sequence) <= place]
        cursor.advance(rows)
        cursor.passed_over |= len(taken) < len(rows)
        return taken

    async def _read(self, cursor: _Cursor, boot_held: str | None) -> list[Row]:
        limit = self._kafka.batch_rows_max
        if cursor is self._behind:
            buffer_id, rows = await self._buffer.read_behind(cursor.position, limit, self.live_lane)
        else:
            buffer_id, rows = await self._buffer.read(cursor.position, limit)
        if buffer_id != self.buffer_id:
            raise _replaced()
        cursor.is_over = not rows
        if boot_held is not None:
            for place, row in enumerate(rows):
                if (await self.lane(row.lane)).boot_id == boot_held:
                    return rows[:place]
        return rows


def _replaced() -> BufferFileError:
    return BufferFileError("the buffer file was replaced: starting over with the new one")


def _bytes_of(rows: Sequence[Row]) -> int:
    return sum([len(row.payload) for row in rows]) + ROW_BYTES * len(rows)


def _within(rows: list[Row], budget: float) -> list[Row]:
    """As many as take no more than that, but one at least: however small the budget, there is progress."""
    if _bytes_of(rows) <= budget:
        return rows
    sizes = accumulate(len(row.payload) + ROW_BYTES for row in rows)
    return rows[: max(1, sum(1 for _ in takewhile(lambda size: size <= budget, sizes)))]
