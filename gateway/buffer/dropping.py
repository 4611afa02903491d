"""Drops rows that Kafka never had, each counted as lost: the oldest if there is no room, and those that are too old.

If devices share the room (`buffer.shares`), the oldest rows of those that hold too much go.
"""

import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.buffer.boots import BootTable
from gateway.buffer.deletion import Deletion
from gateway.buffer.lanes import Lanes
from gateway.buffer.losses import count_losses, losses_of_rows
from gateway.buffer.room import ROW_BYTES_SQL, SIZE_SQL, Room
from gateway.buffer.rows import START, Position, Span, joined, span_at
from gateway.buffer.shares import ABOVE_SHARE, BEHIND_ALL, Shares
from gateway.buffer.stored_rows import first_after, first_of, rows_after
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us

DROPPED_ROWS_MAX = 5_000
DROP_BYTES = 64_000
"""Bytes that `drop-oldest` drops at a time. Counting them costs less than the commit that they make room for."""
LOOKED_ROWS_MAX = 50_000
"""Rows that one commit searches for those of devices that hold too much. The next commit goes on behind them."""
FREED_BYTES = 40
"""Bytes that a deleted row surely frees beside its payload. A device must not get more room than it frees."""
_Found = tuple[int, int, str, int]
"""A row's lane, sequence, device, and the bytes that it frees."""
_WITH_DEVICES = f"""
    SELECT lane, sequence, coalesce((SELECT device FROM series WHERE number = found.series), ''), size
    FROM {rows_after(f"lane, sequence, series, {SIZE_SQL} + {FREED_BYTES} AS size")} AS found
"""
# In order already. To sort them would read all of them before the first.
_FRONT = f"""
    SELECT lane, sequence, size, received_us
    FROM {rows_after(f"lane, sequence, {ROW_BYTES_SQL} AS size, received_us")}
"""
_LANES = f"SELECT number, boot_id FROM lane WHERE {first_of('number', 'sequence')} IS NOT NULL ORDER BY number"


@dataclass(slots=True)
class _Search:
    """Looks for the oldest rows of some devices, from the front of the file."""

    wanted: Mapping[str, int]
    """Bytes that each device is to free."""
    bytes_max: int
    """Bytes that all of them together free at most, exceeded by less than one row."""
    spared: Sequence[Span]
    places: dict[str, Position]
    """Devices that have not freed enough, each with the place behind which its rows are."""
    freed: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    _over: dict[str, Position] = field(default_factory=dict)
    """Devices that have freed enough, each with the place of its last dropped row."""
    _kept: set[str] = field(default_factory=set)
    """Devices with spared rows, which stay only for now."""

    @property
    def is_over(self) -> bool:
        return not self.places or self.bytes >= self.bytes_max

    def pick(self, found: Sequence[_Found]) -> list[_Found]:
        """Choose the rows to drop. `found` are rows behind the first of `places`: `DROPPED_ROWS_MAX`, or all."""
        gone: list[_Found] = []
        reached = BEHIND_ALL if len(found) < DROPPED_ROWS_MAX else Position(*found[-1][:2])
        for row in found:
            lane, sequence, device, size = row
            place = Position(lane, sequence)
            if device not in self.places or place <= self.places[device]:
                continue
            if span_at(self.spared, lane, sequence) is not None:
                self._kept.add(device)
                continue
            gone.append(row)
            self.freed[device] += size
            self.bytes += size
            if self.freed[device] >= self.wanted[device]:
                self._over[device] = place
                del self.places[device]
            if self.is_over:
                reached = place
                break
        if reached == BEHIND_ALL:
            self.places.clear()
        self.places = {device: max(place, reached) for device, place in self.places.items()}
        return gone

    def passed(self) -> Iterator[tuple[str, Position]]:
        """The place up to which a device has no rows left."""
        return ((device, place) for device, place in (self._over | self.places).items() if device not in self._kept)


@dataclass(frozen=True, slots=True)
class Dropping:
    """Drops rows of an open file. Every method needs a transaction of the file.

    `spared` rows stay: Kafka has them, or is being sent them. These spans are `joined`.
    """

    connection: sqlite3.Connection
    clock: Callable[[], BootClock]
    tally: Counter[str]
    """Counts rows dropped: all, and by reason (`buffer-full`, `above-share`, `too-old`)."""
    room: Room
    boots: BootTable
    lanes: Lanes
    deletion: Deletion
    shares: Shares

    def drop_oldest(self, coming_bytes: int, spared: Sequence[Span] = ()) -> None:
        """Drop the oldest rows until there is room for `coming_bytes`, or as many as one commit may.

        While shares are counted, only devices that hold more than an equal part lose rows.
        """
        bytes_left, after = self.room.commit_bytes_max, START
        while bytes_left > 0 and self.room.is_full(coming_bytes):
            bytes_max = min(bytes_left, DROP_BYTES)
            if self.shares.is_active:
                size = self._drop_of("buffer-full", self.shares.above_equal_part(), bytes_max, spared).total()
            else:
                dropped, size = self._drop_front("buffer-full", bytes_max, after, spared)
                after = after if dropped is None else Position(dropped.lane, dropped.last)
            if not size:
                return
            bytes_left -= size

    def drop_own(self, wanted: Mapping[str, int], spared: Sequence[Span] = ()) -> Counter[str]:
        """Drop the oldest rows of devices that hold more than their share; return the bytes that each has freed.

        Each device frees the bytes that are `wanted` of it. It frees fewer if `LOOKED_ROWS_MAX` rows hold no more of
        its rows, or if the disk has no room for a larger transaction.
        """
        bytes_max = self.room.commit_bytes_max if self.room.is_tight() else sys.maxsize
        return self._drop_of(ABOVE_SHARE, wanted, bytes_max, spared)

    def _drop_of(self, reason: str, wanted: Mapping[str, int], bytes_max: int, spared: Sequence[Span]) -> Counter[str]:
        """Drop the oldest rows of devices until each has freed its `wanted` bytes, or all of them `bytes_max`."""
        held = self.shares.held
        search = _Search(wanted, bytes_max, spared, {device: held[device].after for device in wanted if device in held})
        looked = 0
        while not search.is_over and looked < LOOKED_ROWS_MAX:
            after = min(search.places.values())
            found = self.connection.execute(_WITH_DEVICES, (after.place, DROPPED_ROWS_MAX)).fetchall()
            looked += len(found)
            gone = search.pick(found)
            for span in joined(Span(lane, sequence, sequence) for lane, sequence, _, _ in gone):
                self._drop(span, reason)
            if reason == ABOVE_SHARE:
                self.shares.note_dropped(Counter(device for _, _, device, _ in gone))
            for device, place in search.passed():
                if device in held:
                    held[device].after = place
        return search.freed

    def drop_aged(self, age_us: int, spared: Sequence[Span] = ()) -> bool:
        """Drop some rows that waited longer than `age_us`; return whether there may be more.

        Rows of a boot whose wall clock was never known stay, as their age is unknown.
        """
        now = self.clock()
        for lane, boot_id in self.connection.execute(_LANES).fetchall():
            cutoff_us = boottime_us() - age_us
            if boot_id != self.lanes.current.boot_id:
                then = self.boots.find(boot_id)
                if then is None or not (then.known and now.synced):
                    continue
                wall_us = now.at(boottime_us()) - age_us
                cutoff_us = wall_us - then.offset_us(wall_us - then.offset_us(0))
                if not then.synced:
                    # Only rows that are surely so old, wherever the true time lies within its bound.
                    cutoff_us -= then.error_us(cutoff_us) or 0
            start = Position(lane, -1)
            dropped, _ = self._drop_front("too-old", self.room.commit_bytes_max, start, spared, cutoff_us)
            if dropped is not None:
                return True
        return False

    def _drop_front(
        self, reason: str, bytes_max: int, after: Position, spared: Sequence[Span], before_us: int | None = None
    ) -> tuple[Span | None, int]:
        """Drop the first rows behind a position that are not spared; return their span and their bytes.

        With `before_us`, only rows of the position's lane that were received earlier are dropped. At least one row is
        dropped, if there is one; otherwise at most `bytes_max` bytes.
        """
        found = self.connection.execute(_FRONT, (self._after_spared(after, spared).place, DROPPED_ROWS_MAX))
        span: Span | None = None
        size = 0
        for of, sequence, row_bytes, received_us in found:
            # Stop at the first row that stays, whatever follows it.
            if before_us is not None and (of != after.lane or received_us >= before_us):
                break
            if span is not None and (span.lane != of or size + row_bytes > bytes_max):
                break
            if span_at(spared, of, sequence) is not None:
                break
            size += row_bytes
            span = Span(of, sequence if span is None else span.first, sequence)
        found.close()
        if span is None:
            return None, 0
        self._drop(span, reason)
        return span, size

    def _drop(self, span: Span, reason: str) -> None:
        losses = losses_of_rows(self.connection, span, reason)
        before = self.lanes.rows
        self.deletion.delete_whole(span)
        count_losses(self.connection, losses)
        for counted in ("dropped", reason):
            self.tally[counted] += before - self.lanes.rows

    def _after_spared(self, after: Position, spared: Sequence[Span]) -> Position:
        """The position before the first row that is not spared."""
        while True:
            first = first_after(self.connection, after)
            span = None if first is None else span_at(spared, *first)
            if span is None:
                return after
            after = Position(span.lane, span.last)
