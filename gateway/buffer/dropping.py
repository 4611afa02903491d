"""Drops rows that Kafka never had, each counted as lost: the oldest for want of room, and those that are too old.

Where room is shared (`buffer.shares`), the oldest of those who hold too much.
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
from gateway.buffer.room import ROW_BYTES_SQL, Room
from gateway.buffer.rows import START, Position, Span, joined, span_at
from gateway.buffer.shares import ABOVE_SHARE, BEHIND_ALL, Shares
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us

DROPPED_ROWS_MAX = 5_000
DROP_BYTES = 64_000
"""What `drop-oldest` drops at a time: counting it costs less than the commit that it makes room for."""
LOOKED_ROWS_MAX = 50_000
"""Rows among which one commit looks for those of devices that hold too much; the next one goes on behind them."""
FREED_BYTES = 40
"""What a row frees at the least beside its payload: who gets room for it must not get more than that."""
_Found = tuple[int, int, str, int]
"""A row's lane, sequence and device, and what it frees."""
_WITH_DEVICES = f"""
    SELECT lane, sequence, coalesce((SELECT device FROM series WHERE number = reading.series), ''),
        length(payload) + {FREED_BYTES}
    FROM reading WHERE (lane, sequence) > (?, ?) ORDER BY lane, sequence LIMIT ?
"""


@dataclass(slots=True)
class _Search:
    """Looks for the oldest rows of some devices, from the front of the file on."""

    wanted: Mapping[str, int]
    """Bytes that each device is to free."""
    bytes_max: int
    """What all of them free at the most, but for one row."""
    spared: Sequence[Span]
    places: dict[str, Position]
    """Behind which place there are rows of a device that has not freed enough."""
    freed: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    _over: dict[str, Position] = field(default_factory=dict)
    """Devices that have freed enough, and where."""
    _kept: set[str] = field(default_factory=set)
    """Devices some of whose rows stay, only for now."""

    @property
    def is_over(self) -> bool:
        return not self.places or self.bytes >= self.bytes_max

    def pick(self, found: Sequence[_Found]) -> list[_Found]:
        """The rows that are to go, of those that follow the first of `places`: `DROPPED_ROWS_MAX`, or all there are."""
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
        """How far no row of a device is left."""
        return ((device, place) for device, place in (self._over | self.places).items() if device not in self._kept)


@dataclass(frozen=True, slots=True)
class Dropping:
    """Every method belongs into a transaction of the file, whose parts these are.

    Rows that are `spared` stay: Kafka has them, or is about to. These spans are `joined`.
    """

    connection: sqlite3.Connection
    clock: Callable[[], BootClock]
    tally: Counter[str]
    """Counts what is dropped, and by its reason: `buffer-full`, `above-share`, `too-old`."""
    room: Room
    boots: BootTable
    lanes: Lanes
    deletion: Deletion
    shares: Shares

    def drop_oldest(self, coming_bytes: int, spared: Sequence[Span] = ()) -> None:
        """Drop the oldest rows until there is room for more, or as many as one commit may.

        Where it is counted what devices hold, these are rows of those that hold more than an equal part.
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
        """Drop the oldest rows of devices that hold more than their share; give the bytes that each has freed.

        That is what is `wanted` of each, as far as it is found among `LOOKED_ROWS_MAX` rows, and a disk without room
        lets one transaction drop it.
        """
        bytes_max = self.room.commit_bytes_max if self.room.is_tight() else sys.maxsize
        return self._drop_of(ABOVE_SHARE, wanted, bytes_max, spared)

    def _drop_of(self, reason: str, wanted: Mapping[str, int], bytes_max: int, spared: Sequence[Span]) -> Counter[str]:
        """Drop the oldest rows of devices, until each has freed what is wanted of it, or all of them `bytes_max`."""
        held = self.shares.held
        search = _Search(wanted, bytes_max, spared, {device: held[device].after for device in wanted if device in held})
        looked = 0
        while not search.is_over and looked < LOOKED_ROWS_MAX:
            after = min(search.places.values())
            found = self.connection.execute(_WITH_DEVICES, (*after, DROPPED_ROWS_MAX)).fetchall()
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
        """Drop some rows that waited longer than this; tell whether there may be more.

        Rows of a boot whose wall clock was never known stay: how old they are is not known either.
        """
        lanes = self.connection.execute(
            """SELECT number, boot_id FROM lane
            WHERE EXISTS (SELECT 1 FROM reading WHERE lane = number) ORDER BY number"""
        ).fetchall()
        now = self.clock()
        for lane, boot_id in lanes:
            cutoff_us = boottime_us() - age_us
            if boot_id != self.lanes.current.boot_id:
                then = self.boots.find(boot_id)
                if then is None or not (then.known and now.synced):
                    continue
                wall_us = now.at(boottime_us()) - age_us
                cutoff_us = wall_us - then.offset_us(wall_us - then.offset_us(0))
                if not then.synced:
                    # Surely as old as that, wherever in its bound it lies.
                    cutoff_us -= then.error_us(cutoff_us) or 0
            start = Position(lane, -1)
            dropped, _ = self._drop_front("too-old", self.room.commit_bytes_max, start, spared, cutoff_us)
            if dropped is not None:
                return True
        return False

    def _drop_front(
        self, reason: str, bytes_max: int, after: Position, spared: Sequence[Span], before_us: int | None = None
    ) -> tuple[Span | None, int]:
        """Drop the first rows behind a position that are not spared; which, and what they took in bytes.

        With `before_us` those of its lane that were received before only. One at least, if any, and no more than
        `bytes_max` otherwise.
        """
        found = self.connection.execute(
            f"SELECT lane, sequence, {ROW_BYTES_SQL}, received_us FROM reading WHERE (lane, sequence) > (?, ?)"
            " ORDER BY lane, sequence LIMIT ?",
            (*self._after_spared(after, spared), DROPPED_ROWS_MAX),
        )
        span: Span | None = None
        size = 0
        for of, sequence, row_bytes, received_us in found:
            # Up to the first that stays, whatever comes behind it.
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
            first = self.connection.execute(
                "SELECT lane, sequence FROM reading WHERE (lane, sequence) > (?, ?) ORDER BY lane, sequence LIMIT 1",
                after,
            ).fetchone()
            span = None if first is None else span_at(spared, *first)
            if span is None:
                return after
            after = Position(span.lane, span.last)
