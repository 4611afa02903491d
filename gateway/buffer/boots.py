"""The table `boot`: the order of this gateway's boots, their clocks, and corrections still to be sent.

If the clock of a boot was never learnt, the boots before and after it give its bound. So these are kept while needed.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from gateway.buffer.schema import corruption
from gateway.buffer.stored_rows import last_of
from gateway.clock.floor import FIRST_RELEASED_US
from gateway.clock.gateway_clock import BootClock, Line, Quality, Us, bounded_between
from gateway.reading import BufferFileError

SEEN_SAVE_S = 10.0
"""Seconds between two saves of a boot's latest time; they go with a transaction that is made anyway."""
BOOTS_MAX = 1_000
"""Boots kept although no row needs them. Beyond that, the oldest go, and their corrections are never sent."""
TELL_AGAIN = 4
"""Factor by which a bound must shrink below that of the last correction for a further correction."""
COLUMNS = ("boot_id", "offset_us", "error_us", "ordinal", "seen_us", "clock", "version", "owed", "told_error_us")

NOT_OWED = 0
OWED = 1
"""Records of the boot were forwarded while its clock was unknown."""
OWED_ANEW = 2
"""A wrong clock of the boot was used for records or corrections."""


class Correction(NamedTuple):
    """Corrects the times of records that were forwarded while their boot's clock was unknown or wrong."""

    boot_id: str
    version: int
    """Counts up for each boot; the highest version is valid."""
    quality: Quality
    line: Line
    supersedes: bool
    """Whether the earlier times were wrong, rather than less exact."""


def correction_body(correction: Correction) -> dict[str, object]:
    """The body of a correction on `gateway-events`."""
    line = correction.line
    return {
        "device": None,
        "boot": correction.boot_id,
        "version": correction.version,
        "quality": correction.quality,
        "boottime_us": line.boottime_us,
        "offset_us": line.offset_us,
        "rate_ppm": line.rate_ppm,
        "error_us": line.error_us,
        "error_growth_ppm": line.error_growth_ppm,
        "supersedes": correction.supersedes,
    }


_Counted = Annotated[int, Meta(ge=-(2**53), le=2**53)]
"""A number that will be counted up. A damaged file may hold one that SQLite's integers leave no room above."""


class _Row(Struct, array_like=True):
    """A row of the table `boot`; the fields are `COLUMNS`."""

    boot_id: str
    offset_us: Us
    error_us: Us | None
    ordinal: _Counted | None = None
    seen_us: Us | None = None
    clock: bytes | None = None
    version: _Counted = 0
    owed: int = NOT_OWED
    told_error_us: Us | None = None


class _Boot(Struct):
    ordinal: int | None
    """Its place in the order of boots; None if unknown."""
    clock: BootClock
    seen_us: int
    """The latest CLOCK_BOOTTIME known of it."""
    version: int = 0
    """Version of the last correction; 0 before the first."""
    owed: int = NOT_OWED
    told_error_us: int | None = None
    """The bound in the last correction."""


def clock_of(offset_us: int, error_us: int | None, clock: bytes | None) -> BootClock:
    """A boot's clock from its columns.

    Files of former versions have one offset and bound for the whole boot. A clock that cannot be decoded falls back to
    these.
    """
    if clock is not None:
        try:
            return BootClock.from_bytes(clock)
        except ValueError:
            pass
    return BootClock.constant(offset_us, error_us)


class BootTable:
    """The table `boot`. Belongs to the buffer's thread; methods that write need a transaction."""

    def __init__(self, connection: sqlite3.Connection, boot_id: str) -> None:
        self._connection = connection
        self._boot_id = boot_id
        self._read: dict[str, _Boot] | None = None
        self._save_due_s = 0.0
        self._owed_later: set[str] = set()
        """Boots that owe a correction, as long as the disk does not take it."""
        self.owes_correction = False
        """Whether a correction is owed and can be made, as of the last transaction. Any thread may read it."""

    def forget(self) -> None:
        """Drop the table's copy in memory, after a transaction was rolled back."""
        self._read = None
        self._save_due_s = 0.0

    def settle(self) -> None:
        """Update what is owed after a commit."""
        self._owed_later.clear()
        if self._read is not None:
            self.owes_correction = any(boot.owed and boot.clock.known for boot in self._read.values())

    def kept(self) -> BootClock | None:
        """The clock that an earlier start in this boot saved, or None."""
        return self.find(self._boot_id)

    def clock(self, boot_id: str) -> BootClock:
        """A boot's clock, as far as it is known. Raises BufferFileError if there is no such boot."""
        clock = self.find(boot_id)
        if clock is None:
            raise BufferFileError("the buffer does not hold this boot: it was begun anew in between")
        return clock

    def find(self, boot_id: str) -> BootClock | None:
        """A boot's clock, as far as it is known, or None if there is no such boot."""
        boot = self._boots.get(boot_id)
        return None if boot is None else boot.clock

    def seen_us(self, boot_id: str) -> int:
        """The latest CLOCK_BOOTTIME known of a boot; 0 if there is no such boot."""
        boot = self._boots.get(boot_id)
        return 0 if boot is None else boot.seen_us

    def may_be_learnt(self, boot_id: str) -> bool:
        """Whether this boot's clock can bound a former boot: it has no bound yet, and its order is known."""
        boot = self._boots.get(boot_id)
        return boot is not None and not boot.clock.known and boot.ordinal is not None

    # -- what was learnt ------------------------------------------------------------------------

    def _see_earlier(self) -> None:
        """Raise the latest times of former boots to those of their rows, as they are saved only now and then."""
        found = self._connection.execute(
            f"""SELECT boot_id, max({last_of("lane.number", "received_us")}) AS last_us
            FROM lane WHERE boot_id <> ? GROUP BY boot_id HAVING last_us IS NOT NULL""",
            (self._boot_id,),
        ).fetchall()
        for boot_id, last_us in found:
            boot = self._boots.get(boot_id)
            if boot is not None and last_us > boot.seen_us:
                boot.seen_us = last_us
                self._connection.execute("UPDATE boot SET seen_us = ? WHERE boot_id = ?", (last_us, boot_id))

    def save(self, clock: BootClock, now_us: int, now_s: float) -> None:
        """Save this boot's clock, in the caller's transaction.

        It need not be saved each second: a clock that was right at one moment holds later, with a bound that grows.
        """
        is_first = not self._save_due_s
        if is_first:
            self._see_earlier()
        boot = self._boots.get(self._boot_id)
        if boot is None:
            ordinal = max((other.ordinal or 0 for other in self._boots.values()), default=0) + 1
            self._connection.execute(
                "INSERT INTO boot (boot_id, offset_us, error_us, ordinal) VALUES (?, ?, NULL, ?)",
                (self._boot_id, clock.offset_us(now_us), ordinal),
            )
            boot = self._boots[self._boot_id] = _Boot(ordinal, BootClock.constant(0, None), 0)
        elif now_s < self._save_due_s and clock.says_as(boot.clock):
            return
        if boot.clock.known and not clock.known:
            # The clock that an earlier start in this boot saved still holds.
            clock = boot.clock
        before, boot.clock = boot.clock, clock
        boot.seen_us = max(boot.seen_us, now_us)
        self._connection.execute(
            "UPDATE boot SET offset_us = ?, error_us = ?, seen_us = ?, clock = ? WHERE boot_id = ?",
            (clock.offset_us(now_us), clock.error_us(now_us), boot.seen_us, clock.to_bytes(), self._boot_id),
        )
        self._save_due_s = now_s + SEEN_SAVE_S
        if not clock.known:
            return
        # The wrong clock may have been used for records, even if it was never saved here.
        is_anew = clock.revision != before.revision
        if is_anew:
            self._owe(self._boot_id, OWED_ANEW)
        # A former version may have known this boot's clock, but did not bound other boots by it.
        if is_anew or not before.known or (is_first and any(map(self.may_be_learnt, self._boots))):
            self._bound_earlier()
        line = clock.line()
        if line is not None and boot.told_error_us is not None and line.error_us * TELL_AGAIN < boot.told_error_us:
            self._owe(self._boot_id, OWED)

    def _bound_earlier(self) -> None:
        """Bound boots that were never synced by the synced boots around them, now that this boot's clock is known."""
        before: _Boot | None = None
        run: dict[str, _Boot] = {}
        ordered = ((boot_id, boot) for boot_id, boot in self._boots.items() if boot.ordinal is not None)
        for boot_id, boot in sorted(ordered, key=lambda each: each[1].ordinal or 0):
            if not boot.clock.synced:
                run[boot_id] = boot
                continue
            # Boots before another synced boot were bounded when that boot was synced.
            if boot_id == self._boot_id or not all(each.clock.known for each in run.values()):
                known = None if before is None else (before.clock, before.seen_us)
                seen_us = [each.seen_us for each in run.values()]
                clocks = bounded_between(known, seen_us, boot.clock, FIRST_RELEASED_US)
                for earlier, clock in zip(run, clocks, strict=True):
                    self._bound(earlier, clock)
            before, run = boot, {}

    def _bound(self, boot_id: str, clock: BootClock) -> None:
        boot = self._boots[boot_id]
        if boot.clock.known and not boot.clock.says_as(clock):
            self._owe(boot_id, OWED_ANEW)
        boot.clock = clock
        self._connection.execute(
            "UPDATE boot SET offset_us = ?, error_us = ?, clock = ? WHERE boot_id = ?",
            (clock.offset_us(0), clock.error_us(0), clock.to_bytes(), boot_id),
        )

    # -- what has to be corrected ---------------------------------------------------------------

    def owes(self, boot_id: str) -> bool:
        """Whether a correction of a boot is owed already. True if the boot is missing, as it cannot be corrected."""
        if boot_id in self._owed_later:
            return True
        boot = self._boots.get(boot_id)
        return boot is None or boot.owed != NOT_OWED

    def owe(self, boot_id: str) -> None:
        """Note that records of a boot go out while its clock is unknown."""
        self._owe(boot_id, OWED)

    def owe_later(self, boot_id: str) -> None:
        """Note it for the next commit, as the disk fails. Needs no transaction, and asks the disk nothing."""
        self._owed_later.add(boot_id)

    def save_owed(self) -> None:
        """Store what was to be owed later, in the caller's transaction."""
        for boot_id in self._owed_later & self._boots.keys():
            self._owe(boot_id, OWED)

    def _owe(self, boot_id: str, owed: int) -> None:
        boot = self._boots[boot_id]
        if owed > boot.owed:
            boot.owed = owed
            self._connection.execute("UPDATE boot SET owed = ? WHERE boot_id = ?", (owed, boot_id))

    def take_corrections(self) -> list[Correction]:
        """Return the corrections that can be made now, and mark them as made."""
        taken = []
        for boot_id, boot in self._boots.items():
            line = boot.clock.line()
            if boot.owed == NOT_OWED or line is None:
                continue
            supersedes = boot.owed == OWED_ANEW
            boot.version, boot.owed, boot.told_error_us = boot.version + 1, NOT_OWED, line.error_us
            self._connection.execute(
                "UPDATE boot SET version = ?, owed = ?, told_error_us = ? WHERE boot_id = ?",
                (boot.version, boot.owed, boot.told_error_us, boot_id),
            )
            taken.append(Correction(boot_id, boot.version, boot.clock.quality, line, supersedes))
        return taken

    # -- boots of other files, and of long ago --------------------------------------------------

    def add_unknown(self, boot_id: str) -> None:
        """Add a boot without a known clock, unless it is there."""
        if boot_id not in self._boots:
            self._connection.execute("INSERT INTO boot (boot_id, offset_us) VALUES (?, 0)", (boot_id,))
            self._boots[boot_id] = _Boot(None, BootClock.constant(0, None), 0)

    def adopted(self) -> None:
        """Put this boot behind the boots that came in from a damaged file.

        A correction that this boot owed may have been lost with the file, so it owes one again. A needless one does no
        harm.
        """
        self._read = None
        boot = self._boots[self._boot_id]
        boot.ordinal = max(other.ordinal or 0 for other in self._boots.values()) + 1
        self._connection.execute("UPDATE boot SET ordinal = ? WHERE boot_id = ?", (boot.ordinal, self._boot_id))
        self._owe(self._boot_id, OWED)
        if boot.clock.known:
            self._bound_earlier()

    def forget_unneeded(self) -> None:
        """Delete boots that have no rows and that no other boot's bound needs."""
        needed = {
            boot_id
            for (boot_id,) in self._connection.execute(
                "SELECT boot_id FROM lane UNION SELECT boot_id FROM quarantine UNION SELECT boot_id FROM loss"
            )
        }
        needed.add(self._boot_id)
        synced = [
            boot.ordinal or 0 for boot_id, boot in self._boots.items() if boot.clock.synced and boot_id != self._boot_id
        ]
        from_ordinal = max(synced, default=0)
        others = [
            (boot.ordinal or 0, boot_id)
            for boot_id, boot in self._boots.items()
            if boot_id not in needed and (boot.owed or (boot.ordinal or -1) >= from_ordinal)
        ]
        needed.update(boot_id for _, boot_id in sorted(others)[-BOOTS_MAX:])
        for boot_id in self._boots.keys() - needed:
            self._connection.execute("DELETE FROM boot WHERE boot_id = ?", (boot_id,))
            del self._boots[boot_id]

    @property
    def _boots(self) -> dict[str, _Boot]:
        if self._read is None:
            found = self._connection.execute(f"SELECT {', '.join(COLUMNS)} FROM boot").fetchall()
            self._read = {values[0]: _boot(values) for values in found}
        return self._read


def _boot(values: Sequence[object]) -> _Boot:
    """A boot from its columns. Those of a damaged file may be anything. Raises sqlite3.DatabaseError."""
    try:
        row = msgspec.convert(values, _Row, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise corruption(f"a boot is none ({error})") from error
    clock = clock_of(row.offset_us, row.error_us, row.clock)
    return _Boot(row.ordinal, clock, row.seen_us or 0, row.version, row.owed, row.told_error_us)


def adopt_boots(connection: sqlite3.Connection, boots: Iterable[Sequence[object]]) -> None:
    """Write boots of a damaged file into another file. Values are in the order of `COLUMNS`; old files have fewer.

    A boot that is there already keeps its clock; its latest time and its corrections are merged. If a boot makes no
    sense, only its id is written.
    """
    for values in boots:
        if not _is_boot(values):
            values = values[0], 0  # noqa: PLW2901
        columns = COLUMNS[: len(values)]
        connection.execute(
            f"""INSERT INTO boot ({", ".join(columns)}) VALUES ({", ".join("?" * len(columns))})
            ON CONFLICT (boot_id) DO UPDATE SET
                version = max(version, excluded.version), owed = max(owed, excluded.owed),
                told_error_us = coalesce(told_error_us, excluded.told_error_us),
                seen_us = max(coalesce(seen_us, 0), coalesce(excluded.seen_us, 0))""",
            tuple(values),
        )


def _is_boot(values: Sequence[object]) -> bool:
    try:
        msgspec.convert(values, _Row, builtin_types=(bytes,))
    except msgspec.ValidationError:
        return False
    return True


def is_ordered(values: Sequence[object]) -> bool:
    """Whether a boot of a damaged file has an ordinal. Former versions did not store it."""
    return len(values) > COLUMNS.index("ordinal") and values[COLUMNS.index("ordinal")] is not None


def order_by_lanes(connection: sqlite3.Connection, first_lanes: Iterable[tuple[str, int]]) -> None:
    """Order boots from a former version's file by the first of their lanes in that file."""
    connection.executemany(
        "UPDATE boot SET ordinal = ?2 WHERE boot_id = ?1 AND ordinal IS NULL",
        first_lanes,
    )
