"""Fair shares: what each device holds of the buffer, and which readings would exceed its share.

Up to `buffer.fair_from` of the room nobody is limited. Beyond it a device may hold at most half of what is free. So one
device that takes all it can leaves the room beyond `fair_from`. Another device gets a third of that before it holds
half of what is left. Each further such device leaves two thirds of what it found.

Made-up names would take share after share. So senders without a secret of their own leave the last half of that room to
senders with one (`Origin.leaves_room`).

Nothing is counted while little waits. Counting begins at half of `fair_from`. Rows that are there are counted in slices
between commits, and rows that come and go at once. A restart costs one such count.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import Struct

from gateway.buffer.commit_queue import OWN_BYTES_MAX, Append
from gateway.buffer.lanes import Lanes
from gateway.buffer.room import INLINE_BYTES_MAX, PAGE_BYTES, ROW_BYTES_SQL, Room, row_bytes
from gateway.buffer.rows import LANE_MAX, SEQUENCE_MAX, START, Entry, Origin, Position, Series, Span
from gateway.buffer.sensor_runs import RUNS_PER_COUNTER, WINDOW_BYTES
from gateway.buffer.stored_rows import first_after, rows_within
from gateway.settings import BufferSettings

ABOVE_SHARE: Final = "above-share"
"""Loss reason: the device held more than its share."""
REFUSED: Final = "share-refused"
"""Counter of readings that were refused for that; their sensors send them again."""
DEVICES_MAX: Final = 20_000
"""Devices that are counted one by one, beside those with a secret; all others count as one."""
COUNTED_AT_ONCE: Final = 20_000
"""Rows counted between two commits."""
WHILE_COUNTING: Final = 64
"""Divisor of the room: until all rows are counted, a device adds no more than this part."""
HOLD_S: Final = 1.0
"""Seconds that a refused device stays refused, so that its later readings do not overtake the refused one."""
TOLD_S: Final = 60.0
"""Seconds that a device kept to its share is reported."""
TOLD_MAX: Final = 20
"""Devices above their share that are reported by name."""
REFUSED_MAX: Final = 1_000
"""Devices whose refusals are remembered."""
SERIES_BYTES: Final = 100 + RUNS_PER_COUNTER * WINDOW_BYTES
"""Bytes that a series takes beside its texts, with the duplicate windows of its readings."""
SERIES_COPIES: Final = 3
"""Factor for the bytes of its texts: they are also in an index, and one is in another column too."""
BESIDE_BYTES: Final = 12_000_000
"""Bytes that loss counters, sessions and open exchanges may take beside the readings."""

BEHIND_ALL: Final = Position(LANE_MAX, SEQUENCE_MAX)
"""A position behind all rows."""

# A device with two series has two rows in the result.
_BY_SERIES: Final = f"""
    SELECT coalesce((SELECT device FROM series WHERE number = one), ''), bytes FROM (
        SELECT series AS one, sum(size) AS bytes FROM {rows_within(f"series, {ROW_BYTES_SQL} AS size")} GROUP BY series
    )
"""
_TEXTS: Final = " + ".join(
    f"length(CAST({column} AS BLOB))" for column in ("topic", "key", "device", "subject", "type", "content_type")
)
_OF_SERIES: Final = f"""
    SELECT device, sum({SERIES_BYTES} + {SERIES_COPIES} * texts + {2 * PAGE_BYTES} * (texts > {INLINE_BYTES_MAX}))
    FROM (SELECT device, {_TEXTS} AS texts FROM series) GROUP BY device
"""


class AboveShare(Struct, frozen=True):
    """A device that was kept to its share lately."""

    device: str
    """Empty if unknown."""
    bytes: int
    """Bytes that it holds."""
    readings: int
    """Readings refused or lost since it was first kept to its share."""


@dataclass(slots=True)
class Held:
    """The part of the buffer that one device holds."""

    after: Position
    """A position before all of its rows."""
    bytes: int = 0
    added: int = 0
    """Bytes of these that came since counting began."""


@dataclass(slots=True)
class _Limited:
    """A device that is kept to its share."""

    seen_s: float
    refused_s: float = float("-inf")
    readings: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """The decision about an append."""

    append: Append
    fair: Append | None
    """The append to be stored if there is room, without lost readings; None if refused."""
    lost: Sequence[Entry] = ()


class Shares:
    """Bytes that devices hold in an open file. Belongs to the buffer's thread; call `forget` after a roll-back.

    Each row counts for at least the bytes that it takes, so no device holds more than its count.
    """

    def __init__(
        self,
        settings: BufferSettings,
        connection: sqlite3.Connection,
        room: Room,
        lanes: Lanes,
        tally: Counter[str],
    ) -> None:
        """`tally` counts `share-refused`, and `above-share` for lost readings."""
        self.fair_from = settings.fair_from
        self._connection = connection
        self.room = room
        self._lanes = lanes
        self._tally = tally
        self.held: dict[str, Held] = {}
        self._others = Held(START)
        """All devices beyond `DEVICES_MAX` together."""
        self.is_active = False
        """Whether the devices' bytes are counted."""
        self._reached = START
        """Rows up to here are counted, and rows behind `_end`, which came since counting began."""
        self._end = START
        self._count_due_s = 0.0
        self._limited: dict[str, _Limited] = {}
        self._hold_until_s = float("-inf")

    # -- counting -------------------------------------------------------------------------------

    @property
    def is_counting(self) -> bool:
        """Whether rows from before counting began are still to be counted."""
        return self._reached < self._end

    @property
    def count_due_s(self) -> float:
        """When the next slice of these is to be counted."""
        return self._count_due_s if self.is_counting else float("inf")

    def follow(self, now_s: float) -> None:
        """Begin, continue or end counting, as much waits. Call between transactions. Raises sqlite3.Error."""
        if self.fair_from >= 1:
            return
        used, left = self.room.used_and_left()
        share = used / max(1, used + left)
        if not self.is_active and share > self.fair_from / 2:
            self._begin()
        elif self.is_active and share < self.fair_from / 4:
            self.forget()
        if now_s >= self.count_due_s:
            self._count_on()
            # Commits get half of the time.
            self._count_due_s = 2 * time.monotonic() - now_s

    def forget(self) -> None:
        """Stop counting, and drop the counts, which may be wrong or are not needed."""
        self.is_active = False
        self.held.clear()
        self._others = Held(START)
        self._reached = self._end = START

    def _begin(self) -> None:
        self.forget()
        self.is_active = True
        self._end = self._lanes.last_stored
        self._count_due_s = 0.0
        for device, size in self._connection.execute(_OF_SERIES):
            self._add(device, size, BEHIND_ALL)

    def _count_on(self) -> None:
        first = first_after(self._connection, self._reached)
        if first is None or first > self._end:
            self._reached = self._end
            return
        lane, sequence = first
        last = sequence + COUNTED_AT_ONCE - 1
        span = Span(lane, sequence, min(last, self._end.sequence) if lane == self._end.lane else last)
        for device, size in self._connection.execute(_BY_SERIES, span.places):
            self._add(device, size, Position(lane, sequence - 1))
        self._reached = Position(lane, span.last)

    def _is_counted(self, place: Position) -> bool:
        return place <= self._reached or place > self._end

    def _add(self, device: str, size: int, after: Position) -> Held:
        held = self.held.get(device)
        if held is None:
            if len(self.held) >= DEVICES_MAX:
                held = self._others
            else:
                held = self.held[device] = Held(after)
        held.bytes += size
        held.after = min(held.after, after)
        return held

    def _take_off(self, device: str, size: int) -> None:
        held = self.held.get(device)
        if held is not None:
            taken = min(size, held.bytes)
            held.bytes -= taken
            size -= taken
            if not held.bytes:
                del self.held[device]
        # These rows came before the device had its own count.
        self._others.bytes = max(0, self._others.bytes - size)

    def come(self, rows: Iterable[tuple[str, Position, int]]) -> None:
        """Count rows that were added to the current lane: device, place, payload bytes."""
        if not self.is_active:
            return
        for device, place, payload_bytes in rows:
            if self._is_counted(place):
                size = row_bytes(payload_bytes)
                self._add(device, size, Position(place.lane, place.sequence - 1)).added += size

    def adopted(self, device: str, place: Position, payload_bytes: int) -> None:
        """Count a row that was taken over from a damaged file."""
        if self.is_active and self._is_counted(place):
            self._add(device, row_bytes(payload_bytes), Position(place.lane, place.sequence - 1))

    def series_added(self, series: Series) -> None:
        """Count a newly stored series."""
        if self.is_active:
            self._add(series.device, _series_bytes(series), BEHIND_ALL)

    def leave(self, span: Span) -> None:
        """Subtract rows that are about to be deleted."""
        if self.is_active:
            for part in self._counted_parts(span):
                for device, size in self._connection.execute(_BY_SERIES, part.places).fetchall():
                    self._take_off(device, size)

    def _counted_parts(self, span: Span) -> Iterator[Span]:
        if not self.is_counting:
            yield span
            return
        lane, first, last = span
        reached = last if lane < self._reached.lane else self._reached.sequence if lane == self._reached.lane else -1
        if first <= min(last, reached):
            yield Span(lane, first, min(last, reached))
        new = 0 if lane > self._end.lane else self._end.sequence + 1 if lane == self._end.lane else last + 1
        if max(first, new) <= last:
            yield Span(lane, max(first, new), last)

    # -- judging --------------------------------------------------------------------------------

    def limits(self, coming_bytes: int, now_s: float) -> bool:
        """Whether shares limit who may add `coming_bytes`. Without any room they do not, as nobody may add."""
        used, left = self.room.used_and_left()
        if not left:
            return False
        return now_s < self._hold_until_s or (self.is_active and used + coming_bytes > self.fair_from * (used + left))

    def judge(
        self, appends: Iterable[Append], known: Mapping[Series, int], freed: Mapping[str, int], now_s: float
    ) -> tuple[list[Judged], Counter[str]]:
        """Judge which readings would exceed their device's share; return also the bytes that such devices wanted.

        `known` are stored series. `freed` are the bytes of their own rows that devices gave up for their new ones.
        """
        limit = _Limit(self, freed, now_s)
        judged: list[Judged] = []
        wanted = Counter[str]()
        behind: set[str] = set()
        for append in appends:
            sizes = Counter[str]()
            for entry in append.entries:
                size = row_bytes(entry.datum.size)
                sizes[entry.series.device] += size if entry.series in known else size + _series_bytes(entry.series)
            above: set[str] = set()
            for device, size in sizes.items():
                if not limit.admits(device, size, append.origin):
                    above.add(device)
                    if append.origin.is_broker or not self.is_held_back(device, now_s):
                        wanted[device] += size
                elif append.origin.is_broker:
                    limit.add({device: size})
            if append.origin.is_broker:
                judged.append(Judged(append, *_parted(append, above)) if above else Judged(append, append))
            elif above or not behind.isdisjoint(sizes):
                # A device's later readings must not overtake its refused one.
                behind |= sizes.keys()
                judged.append(Judged(append, None))
            else:
                limit.add(sizes)
                judged.append(Judged(append, append))
        return judged, wanted

    def note(self, judged: Iterable[Judged], wanted: Iterable[str], now_s: float) -> None:
        """Remember and count the devices that were kept to their share."""
        for device in wanted:
            self._limit(device, now_s).refused_s = now_s
            self._hold_until_s = now_s + HOLD_S
        for each in judged:
            refused = each.append.entries if each.fair is None else ()
            if refused:
                self._tally[REFUSED] += len(refused)
            if each.lost:
                self._tally[ABOVE_SHARE] += len(each.lost)
            for entry in (*refused, *each.lost):
                limited = self._limited.get(entry.series.device)
                if limited is not None:
                    limited.readings += 1

    def note_dropped(self, rows: Mapping[str, int]) -> None:
        """Remember devices whose oldest rows made room for their own, and how many rows."""
        for device, count in rows.items():
            self._limit(device, time.monotonic()).readings += count

    def _limit(self, device: str, now_s: float) -> _Limited:
        if device not in self._limited and len(self._limited) >= REFUSED_MAX:
            del self._limited[next(iter(self._limited))]
        limited = self._limited.pop(device, None) or _Limited(now_s)
        limited.seen_s = now_s
        # Move it to the end: the device that was limited longest ago is forgotten first.
        self._limited[device] = limited
        return limited

    @property
    def limits_some(self) -> bool:
        """Whether any device was kept to its share lately."""
        return bool(self._limited)

    def is_held_back(self, device: str, now_s: float) -> bool:
        """Whether a device was refused within `HOLD_S`."""
        limited = self._limited.get(device)
        return limited is not None and now_s < limited.refused_s + HOLD_S

    def of(self, device: str) -> Held:
        """The count of a device; if devices are too many, that of all others together."""
        held = self.held.get(device)
        if held is not None:
            return held
        return Held(START) if len(self.held) < DEVICES_MAX else self._others

    def count_apart(self, device: str) -> None:
        """Give a device its own count, however many there are: secrets are handed out, not made up."""
        if device not in self.held and len(self.held) >= DEVICES_MAX:
            self.held[device] = Held(self._lanes.last)

    def above_equal_part(self) -> dict[str, int]:
        """Devices that hold more than an equal part, and how much more; if all hold as much, all their bytes."""
        part = sum(held.bytes for held in self.held.values()) // max(1, len(self.held))
        above = {device: held.bytes - part for device, held in self.held.items() if held.bytes > part}
        return above or {device: held.bytes for device, held in self.held.items()}

    def above_share(self, now_s: float) -> list[AboveShare]:
        """Devices that were kept to their share lately, largest first."""
        for device in [device for device, limited in self._limited.items() if now_s > limited.seen_s + TOLD_S]:
            del self._limited[device]
        found = [AboveShare(device, self.of(device).bytes, each.readings) for device, each in self._limited.items()]
        return sorted(found, key=lambda each: (-each.bytes, each.device))


def _parted(append: Append, above: Container[str]) -> tuple[Append, list[Entry]]:
    """An append without the readings of some devices, and these readings."""
    kept = [entry for entry in append.entries if entry.series.device not in above]
    lost = [entry for entry in append.entries if entry.series.device in above]
    return replace(append, entries=kept, disk_bytes=sum(row_bytes(entry.datum.size) for entry in kept)), lost


class _Limit:
    """Bytes that devices may add in one commit, while more than `fair_from` of the room would be used."""

    def __init__(self, shares: Shares, freed: Mapping[str, int], now_s: float) -> None:
        self._shares = shares
        self._freed = Counter(freed)
        self._now_s = now_s
        self._used, self._left = shares.room.used_and_left()
        self._room_bytes = self._used + self._left
        self._free_for_all = shares.fair_from * self._room_bytes
        self._reserved = (1 - shares.fair_from) / 2 * self._room_bytes
        self._taken = 0
        self._added: Counter[str] = Counter()

    def admits(self, device: str, size: int, origin: Origin) -> bool:
        """Whether a device may add `size` bytes."""
        shares, taken = self._shares, self._taken + size
        if origin.has_secret:
            shares.count_apart(device)
        if not origin.is_broker and shares.is_held_back(device, self._now_s):
            return False
        if self._used + taken <= self._free_for_all or self._freed[device] >= size:
            return True
        if origin.leaves_room and self._left - taken < self._reserved:
            return False
        held, added = shares.of(device), self._added[device] + size
        if shares.is_counting and held.added + added > self._room_bytes // WHILE_COUNTING:
            return False
        return held.bytes + added <= (self._left - self._taken) // 2

    def add(self, sizes: Mapping[str, int]) -> None:
        """Count readings that are to be stored."""
        for device, size in sizes.items():
            if self._freed[device] >= size:
                self._freed[device] -= size
            else:
                self._taken += size
                self._added[device] += size


def _series_bytes(series: Series) -> int:
    size = sum(len(text.encode()) for text in series.columns)
    return SERIES_BYTES + SERIES_COPIES * size + (2 * PAGE_BYTES if size > INLINE_BYTES_MAX else 0)


def kept_bytes(settings: BufferSettings, beside_bytes: int = BESIDE_BYTES) -> int:
    """Bytes that a device may surely hold, whatever one other device sends."""
    quarantine = min(settings.quarantine_bytes_max, settings.bytes_max // 10)
    quarantine += min(settings.quarantine_rows_max, quarantine // INLINE_BYTES_MAX) * PAGE_BYTES
    left = round(settings.bytes_max * (1 - settings.fair_from)) - quarantine - OWN_BYTES_MAX - beside_bytes
    return max(0, left // 3)


def kept_days(settings: BufferSettings, payload_bytes: int) -> float:
    """Days for which `kept_bytes` take one reading a second."""
    return kept_bytes(settings) / row_bytes(payload_bytes) / 86_400
