"""The boots of this gateway in the buffer file: their order, what is known of their clocks, what has to be corrected.

A boot whose clock was never learnt is told by those before and after it; so these stay for as long as they are needed.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from gateway.buffer.schema import corruption
from gateway.clock.floor import FIRST_RELEASED_US
from gateway.clock.gateway_clock import BootClock, Line, Quality, Us, bounded_between
from gateway.reading import BufferFileError

SEEN_SAVE_S = 10.0
"""How far a boot has come is written down no more often than this, with what is written anyway."""
BOOTS_MAX = 1_000
"""Boots that are kept although no row is of them; of more the oldest go, and what was to be corrected of them stays."""
TELL_AGAIN = 4
"""A correction is made once more where the bound has become so many times smaller than what the last one said."""
COLUMNS = ("boot_id", "offset_us", "error_us", "ordinal", "seen_us", "clock", "version", "owed", "told_error_us")

NOT_OWED = 0
OWED = 1
"""Something of the boot was forwarded while nothing was known of its clock."""
OWED_ANEW = 2
"""What was told of the boot's clock was wrong."""


class Correction(NamedTuple):
    """What mends the times of records that were forwarded before their boot's clock was known, or by a wrong one."""

    boot_id: str
    version: int
    """Counts up for each boot: the highest counts."""
    quality: Quality
    line: Line
    supersedes: bool
    """Whether what was told before was wrong, rather than less well known."""


def correction_body(correction: Correction) -> dict[str, object]:
    """What a correction on `gateway-events` says."""
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
"""What is added to: a damaged file may give numbers that SQLite has no room for then."""


class _Row(Struct, array_like=True):
    """A row of the table; the fields are `COLUMNS`."""

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
    """The order in which boots came; None where nobody knows."""
    clock: BootClock
    seen_us: int
    """The latest CLOCK_BOOTTIME that is known of it."""
    version: int = 0
    """Of the last correction; 0: there was none."""
    owed: int = NOT_OWED
    told_error_us: int | None = None
    """The bound that the last correction gave."""


def clock_of(offset_us: int, error_us: int | None, clock: bytes | None) -> BootClock:
    """A boot's clock by its columns. Those of former versions have one offset and bound for the whole boot.

    So have those whose clock cannot be read.
    """
    if clock is not None:
        try:
            return BootClock.from_bytes(clock)
        except ValueError:
            pass
    return BootClock.constant(offset_us, error_us)


class BootTable:
    """The table `boot`. Belongs to the buffer's thread; what writes belongs into a transaction."""

    def __init__(self, connection: sqlite3.Connection, boot_id: str) -> None:
        self._connection = connection
        self._boot_id = boot_id
        self._read: dict[str, _Boot] | None = None
        self._save_due_s = 0.0
        self.owes_correction = False
        """Whether something is to be corrected and can be, as of the last transaction; may be read on any thread."""

    def forget(self) -> None:
        """A transaction was rolled back: what is remembered of the table may not be what stands in it."""
        self._read = None
        self._save_due_s = 0.0

    def settle(self) -> None:
        """A transaction ended well."""
        if self._read is not None:
            self.owes_correction = any(boot.owed and boot.clock.known for boot in self._read.values())

    def kept(self) -> BootClock | None:
        """What an earlier start in this boot knew of its clock."""
        return self.find(self._boot_id)

    def clock(self, boot_id: str) -> BootClock:
        """What is known of a boot's clock. Raises BufferFileError where there is no such boot."""
        clock = self.find(boot_id)
        if clock is None:
            raise BufferFileError("the buffer does not hold this boot: it was begun anew in between")
        return clock

    def find(self, boot_id: str) -> BootClock | None:
        """The same, or None."""
        boot = self._boots.get(boot_id)
        return None if boot is None else boot.clock

    def may_be_learnt(self, boot_id: str) -> bool:
        """Whether a former boot's clock will be told by this one's: it was never synced, and when it came is known."""
        boot = self._boots.get(boot_id)
        return boot is not None and not boot.clock.known and boot.ordinal is not None

    # -- what was learnt ------------------------------------------------------------------------

    def _see_earlier(self) -> None:
        """See how far former boots came by their rows: that is written down only now and then."""
        found = self._connection.execute(
            """SELECT boot_id, max((
                SELECT received_us FROM reading WHERE lane = lane.number ORDER BY sequence DESC LIMIT 1
            )) AS last_us FROM lane WHERE boot_id <> ? GROUP BY boot_id HAVING last_us IS NOT NULL""",
            (self._boot_id,),
        ).fetchall()
        for boot_id, last_us in found:
            boot = self._boots.get(boot_id)
            if boot is not None and last_us > boot.seen_us:
                boot.seen_us = last_us
                self._connection.execute("UPDATE boot SET seen_us = ? WHERE boot_id = ?", (last_us, boot_id))

    def save(self, clock: BootClock, now_us: int, now_s: float) -> None:
        """Keep what is known of this boot's clock, in one transaction with what comes in meanwhile.

        It need not be written each second: what is known at one moment holds at later ones, with a bound that grows.
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
            # What an earlier start in this boot knew holds as well as ever.
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
        # What turned out wrong may have been told, be it that it was never written here.
        is_anew = clock.revision != before.revision
        if is_anew:
            self._owe(self._boot_id, OWED_ANEW)
        # A former version, which knew this boot's clock, bounded nobody by it.
        if is_anew or not before.known or (is_first and any(map(self.may_be_learnt, self._boots))):
            self._bound_earlier()
        line = clock.line()
        if line is not None and boot.told_error_us is not None and line.error_us * TELL_AGAIN < boot.told_error_us:
            self._owe(self._boot_id, OWED)

    def _bound_earlier(self) -> None:
        """Bound the boots that were never synced by those that were, now that this one is."""
        before: _Boot | None = None
        run: dict[str, _Boot] = {}
        ordered = ((boot_id, boot) for boot_id, boot in self._boots.items() if boot.ordinal is not None)
        for boot_id, boot in sorted(ordered, key=lambda each: each[1].ordinal or 0):
            if not boot.clock.synced:
                run[boot_id] = boot
                continue
            # What lies before another boot was bounded when that one was synced.
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
        """Whether a boot's records are to be corrected already; those of one that is not there cannot be."""
        boot = self._boots.get(boot_id)
        return boot is None or boot.owed != NOT_OWED

    def owe(self, boot_id: str) -> None:
        """Records of a boot go out although nothing is known of its clock."""
        self._owe(boot_id, OWED)

    def _owe(self, boot_id: str, owed: int) -> None:
        boot = self._boots[boot_id]
        if owed > boot.owed:
            boot.owed = owed
            self._connection.execute("UPDATE boot SET owed = ? WHERE boot_id = ?", (owed, boot_id))

    def take_corrections(self) -> list[Correction]:
        """The corrections that can be made now, written down as made."""
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
        """There was such a boot, and nothing is known of its clock."""
        if boot_id not in self._boots:
            self._connection.execute("INSERT INTO boot (boot_id, offset_us) VALUES (?, 0)", (boot_id,))
            self._boots[boot_id] = _Boot(None, BootClock.constant(0, None), 0)

    def adopted(self) -> None:
        """Boots of a damaged file have come in: this one is later than all of them.

        What was to be corrected of it may have been lost with the file; a correction too many does no harm.
        """
        self._read = None
        boot = self._boots[self._boot_id]
        boot.ordinal = max(other.ordinal or 0 for other in self._boots.values()) + 1
        self._connection.execute("UPDATE boot SET ordinal = ? WHERE boot_id = ?", (boot.ordinal, self._boot_id))
        self._owe(self._boot_id, OWED)
        if boot.clock.known:
            self._bound_earlier()

    def forget_unneeded(self) -> None:
        """Let go of boots that nothing is left of, and that tell nothing of another one's time."""
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
    """A boot by its columns: what a damaged file gives may be anything. Raises sqlite3.DatabaseError."""
    try:
        row = msgspec.convert(values, _Row)
    except msgspec.ValidationError as error:
        raise corruption(f"a boot is none ({error})") from error
    clock = clock_of(row.offset_us, row.error_us, row.clock)
    return _Boot(row.ordinal, clock, row.seen_us or 0, row.version, row.owed, row.told_error_us)


def adopt_boots(connection: sqlite3.Connection, boots: Iterable[Sequence[object]]) -> None:
    """Write boots of a damaged file into another, as `COLUMNS` has them, or the first few of these (former versions).

    What is known of one already stays, but for what has to be corrected, and how often it was. Of one that makes no
    sense it is known that it was.
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
        msgspec.convert(values, _Row)
    except msgspec.ValidationError:
        return False
    return True


def is_ordered(values: Sequence[object]) -> bool:
    """Whether a boot of a damaged file says when it came among the others: those of former versions do not."""
    return len(values) > COLUMNS.index("ordinal") and values[COLUMNS.index("ordinal")] is not None


def order_by_lanes(connection: sqlite3.Connection, first_lanes: Iterable[tuple[str, int]]) -> None:
    """Put boots of a file of a former version in their order: that of the first of their lanes, in that file."""
    connection.executemany(
        "UPDATE boot SET ordinal = ?2 WHERE boot_id = ?1 AND ordinal IS NULL",
        first_lanes,
    )
