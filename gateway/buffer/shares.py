"""Fair shares: what each device holds of the buffer, and which readings would make it more than its share.

Up to `buffer.fair_from` of the room nobody is limited. Beyond it a device may hold half of what is free, and not more.
So one device that takes all it can leaves the room beyond `fair_from`: another one gets a third of that before it holds
half of what is left. Each further device of the kind leaves two thirds of what it found.

Made-up names would take share after share. So readings whose sender has no secret of its own leave the last half of
that room to those that have one (`Origin.leaves_room`).

Nothing is counted while little waits. Counting begins at half of `fair_from`: rows that are there are counted in slices
between two commits, rows that come and go as they do so. A restart costs one such count.
"""

import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import Struct

from gateway.buffer.commit_queue import OWN_BYTES_MAX, Append
from gateway.buffer.lanes import Lanes
from gateway.buffer.room import INLINE_BYTES_MAX, PAGE_BYTES, ROW_BYTES_SQL, Room, row_bytes
from gateway.buffer.rows import START, Entry, Origin, Position, Series, Span
from gateway.buffer.sensor_runs import RUNS_PER_COUNTER, WINDOW_BYTES
from gateway.settings import BufferSettings

ABOVE_SHARE: Final = "above-share"
"""Why readings are lost whose device held more than its share."""
REFUSED: Final = "share-refused"
"""Counts readings that were refused for that: their sensors send them again."""
DEVICES_MAX: Final = 20_000
"""Devices that are counted each for itself, beside those with secrets of their own; all others count as one."""
COUNTED_AT_ONCE: Final = 20_000
"""Rows that are counted between two commits."""
WHILE_COUNTING: Final = 64
"""Until all rows are counted, a device adds no more than this part of the room."""
HOLD_S: Final = 1.0
"""A device that was refused stays so for this time: what it had sent behind that must not overtake it."""
TOLD_S: Final = 60.0
"""How long a device that was refused is told of."""
TOLD_MAX: Final = 20
"""Devices above their share that are told by name."""
REFUSED_MAX: Final = 1_000
"""Devices of which refusals are remembered."""
SERIES_BYTES: Final = 100 + RUNS_PER_COUNTER * WINDOW_BYTES
"""What a series takes beside its texts; its readings' duplicate windows included."""
SERIES_COPIES: Final = 3
"""How often its texts count: they stand in an index too, and one of them in a column more."""
BESIDE_BYTES: Final = 12_000_000
"""What loss counters, sessions and open exchanges may take beside the readings."""

BEHIND_ALL: Final = Position(sys.maxsize, 0)
"""A place behind all rows."""

# Two series of a device are two rows.
_BY_SERIES: Final = f"""
    SELECT coalesce((SELECT device FROM series WHERE number = one), ''), bytes FROM (
        SELECT series AS one, sum({ROW_BYTES_SQL}) AS bytes FROM reading
        WHERE lane = ? AND sequence BETWEEN ? AND ? GROUP BY series
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
    """Empty where it is not known which."""
    bytes: int
    """What it holds."""
    readings: int
    """Those that were refused, or lost, since that began."""


@dataclass(slots=True)
class Held:
    """What one device holds."""

    after: Position
    """All of its rows stand behind this."""
    bytes: int = 0
    added: int = 0
    """Of these, what came since counting began."""


@dataclass(slots=True)
class _Limited:
    """A device that is kept to its share."""

    seen_s: float
    refused_s: float = float("-inf")
    readings: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """What becomes of an append."""

    append: Append
    fair: Append | None
    """To be stored, where there is room; without the readings that are lost. None where it is refused."""
    lost: Sequence[Entry] = ()


class Shares:
    """What devices hold in an open file. Belongs to the buffer's thread; `forget` after a roll-back.

    What is counted for a row is at least what it takes, so that no device takes more than it is counted for.
    """

    def __init__(
        self,
        settings: BufferSettings,
        connection: sqlite3.Connection,
        room: Room,
        lanes: Lanes,
        tally: Counter[str],
    ) -> None:
        """`tally` counts `share-refused`, and `above-share` for what is lost."""
        self.fair_from = settings.fair_from
        self._connection = connection
        self.room = room
        self._lanes = lanes
        self._tally = tally
        self.held: dict[str, Held] = {}
        self._others = Held(START)
        """All devices beyond DEVICES_MAX."""
        self.is_active = False
        """Whether what devices hold is counted."""
        self._reached = START
        """Rows up to here are counted, and those behind `_end`: these came since counting began."""
        self._end = START
        self._count_due_s = 0.0
        self._limited: dict[str, _Limited] = {}
        self._hold_until_s = float("-inf")

    # -- counting -------------------------------------------------------------------------------

    @property
    def is_counting(self) -> bool:
        """Whether rows are still to be counted that were there before counting began."""
        return self._reached < self._end

    @property
    def count_due_s(self) -> float:
        """When more of them are to be counted."""
        return self._count_due_s if self.is_counting else float("inf")

    def follow(self, now_s: float) -> None:
        """Begin, go on or end counting, as much waits; between two transactions. Raises sqlite3.Error."""
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
            # Half of the time is the commits'.
            self._count_due_s = 2 * time.monotonic() - now_s

    def forget(self) -> None:
        """Know nothing: what is counted may not be true any more, or is not needed."""
        self.is_active = False
        self.held.clear()
        self._others = Held(START)
        self._reached = self._end = START

    def _begin(self) -> None:
        self.forget()
        self.is_active = True
        self._end = self._lanes.last
        self._count_due_s = 0.0
        for device, size in self._connection.execute(_OF_SERIES):
            self._add(device, size, BEHIND_ALL)

    def _count_on(self) -> None:
        first = self._connection.execute(
            "SELECT lane, sequence FROM reading WHERE (lane, sequence) > (?, ?) ORDER BY lane, sequence LIMIT 1",
            self._reached,
        ).fetchone()
        if first is None or first > self._end:
            self._reached = self._end
            return
        lane, sequence = first
        last = sequence + COUNTED_AT_ONCE - 1
        span = Span(lane, sequence, min(last, self._end.sequence) if lane == self._end.lane else last)
        for device, size in self._connection.execute(_BY_SERIES, span):
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
        # Rows that came before it was counted for itself.
        self._others.bytes = max(0, self._others.bytes - size)

    def come(self, entries: Iterable[Entry], first: Position) -> None:
        """Entries became rows of the current lane, from a place on."""
        if not self.is_active:
            return
        lane, before = first.lane, first.sequence - 1
        for number, entry in enumerate(entries):
            size = row_bytes(len(entry.payload))
            self._add(entry.series.device, size, Position(lane, before + number)).added += size

    def adopted(self, device: str, place: Position, payload_bytes: int) -> None:
        """A row of a damaged file was taken over."""
        if self.is_active and self._is_counted(place):
            self._add(device, row_bytes(payload_bytes), Position(place.lane, place.sequence - 1))

    def series_added(self, series: Series) -> None:
        """A series was stored that was not known."""
        if self.is_active:
            self._add(series.device, _series_bytes(series), BEHIND_ALL)

    def leave(self, span: Span) -> None:
        """Rows are about to be deleted."""
        if self.is_active:
            for part in self._counted_parts(span):
                for device, size in self._connection.execute(_BY_SERIES, part).fetchall():
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
        """Whether so much more would be more than everybody may add. Without any room nobody is told of a share."""
        used, left = self.room.used_and_left()
        if not left:
            return False
        return now_s < self._hold_until_s or (self.is_active and used + coming_bytes > self.fair_from * (used + left))

    def judge(
        self, appends: Iterable[Append], known: Mapping[Series, int], freed: Mapping[str, int], now_s: float
    ) -> tuple[list[Judged], Counter[str]]:
        """Tell whose readings would make it more than its share; and how many bytes these devices wanted to add.

        `known` are series that are stored, `freed` is what devices gave up of their own for what they add.
        """
        limit = _Limit(self, freed, now_s)
        judged: list[Judged] = []
        wanted = Counter[str]()
        behind: set[str] = set()
        for append in appends:
            sizes = Counter[str]()
            for entry in append.entries:
                size = row_bytes(len(entry.payload))
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
                # What a device sent behind a refused reading must not overtake that.
                behind |= sizes.keys()
                judged.append(Judged(append, None))
            else:
                limit.add(sizes)
                judged.append(Judged(append, append))
        return judged, wanted

    def note(self, judged: Iterable[Judged], wanted: Iterable[str], now_s: float) -> None:
        """Remember, and count, who was kept to its share."""
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
        """Remember whose oldest rows made room for its own, and how many."""
        for device, count in rows.items():
            self._limit(device, time.monotonic()).readings += count

    def _limit(self, device: str, now_s: float) -> _Limited:
        if device not in self._limited and len(self._limited) >= REFUSED_MAX:
            del self._limited[next(iter(self._limited))]
        limited = self._limited.pop(device, None) or _Limited(now_s)
        limited.seen_s = now_s
        # Behind the others: the one that was so first is forgotten first.
        self._limited[device] = limited
        return limited

    @property
    def limits_some(self) -> bool:
        """Whether there are devices to be told of."""
        return bool(self._limited)

    def is_held_back(self, device: str, now_s: float) -> bool:
        """Whether a device was refused just now."""
        limited = self._limited.get(device)
        return limited is not None and now_s < limited.refused_s + HOLD_S

    def of(self, device: str) -> Held:
        """What a device is counted for; where devices are too many, that is what all others hold."""
        held = self.held.get(device)
        if held is not None:
            return held
        return Held(START) if len(self.held) < DEVICES_MAX else self._others

    def count_apart(self, device: str) -> None:
        """Count a device for itself from now on, however many there are: secrets are handed out, not made up."""
        if device not in self.held and len(self.held) >= DEVICES_MAX:
            self.held[device] = Held(self._lanes.last)

    def above_equal_part(self) -> dict[str, int]:
        """Who holds more than if all held as much, and how much more; of equal ones, all they hold."""
        part = sum(held.bytes for held in self.held.values()) // max(1, len(self.held))
        above = {device: held.bytes - part for device, held in self.held.items() if held.bytes > part}
        return above or {device: held.bytes for device, held in self.held.items()}

    def above_share(self, now_s: float) -> list[AboveShare]:
        """Who was kept to its share lately: those that hold most first."""
        for device in [device for device, limited in self._limited.items() if now_s > limited.seen_s + TOLD_S]:
            del self._limited[device]
        found = [AboveShare(device, self.of(device).bytes, each.readings) for device, each in self._limited.items()]
        return sorted(found, key=lambda each: (-each.bytes, each.device))


def _parted(append: Append, above: Container[str]) -> tuple[Append, list[Entry]]:
    """An append without the readings of some devices, and these."""
    kept = [entry for entry in append.entries if entry.series.device not in above]
    lost = [entry for entry in append.entries if entry.series.device in above]
    return replace(append, entries=kept, disk_bytes=sum(row_bytes(len(entry.payload)) for entry in kept)), lost


class _Limit:
    """How much devices may add in one commit, while more than `fair_from` of the room would be used."""

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
        """Whether a device may add so much."""
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
        """These are to be stored."""
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
    """What a device may hold for certain, whatever one other device sends; see above."""
    quarantine = min(settings.quarantine_bytes_max, settings.bytes_max // 10)
    quarantine += min(settings.quarantine_rows_max, quarantine // INLINE_BYTES_MAX) * PAGE_BYTES
    left = round(settings.bytes_max * (1 - settings.fair_from)) - quarantine - OWN_BYTES_MAX - beside_bytes
    return max(0, left // 3)


def kept_days(settings: BufferSettings, payload_bytes: int) -> float:
    """For how long that takes one reading a second."""
    return kept_bytes(settings) / row_bytes(payload_bytes) / 86_400
