"""Power cuts by the thousand: what was acknowledged is there after each, once, whatever the card had not written yet.

`SLUICE_TEST_SEED` repeats a run.
"""

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import get_args
from unittest import mock

import msgspec
import pytest

from gateway.buffer import schema
from gateway.buffer.commit_queue import Append
from gateway.buffer.file import AHEAD_MARK, OFFSETS_BEHIND, BufferFile
from gateway.buffer.front import Front
from gateway.buffer.lanes import LANE_PREFIX
from gateway.buffer.losses import EVENTS_DROPPED, LOSS_TYPE, loss_body
from gateway.buffer.rings import AGAIN_MARK
from gateway.buffer.rows import START, Entry, Lane, Loss, Position, Row, Series, Span
from gateway.buffer.stored_rows import first_after, rows_after
from gateway.clock.gateway_clock import BootClock
from gateway.reading import Mark
from gateway.settings import BufferSettings
from tests.gateway.buffer.test_stored_rows import place_in
from tests.support.buffers import entry_of, input_of
from tests.support.power_cut_vfs import (
    CuttableDisk,
    CuttableVfs,
    PowerCut,
    Survival,
    Synchronous,
    sqlite_over_cuttable_disks,
)
from tests.support.sizes import SEED, size

CUTS = size(400, 4000)
CUTS_PER_CARD = 40
FRONT_MAX = 40
"""Rows that wait for Kafka, fewer than a duplicate window holds."""
DEVICES = ("7", "42", "43")
CLOCK = BootClock.constant(1_700_000_000_000_000, 1_000)
THERMO = Series("device-thermo", "42", "42", "device/42/thermo", "sluice.reading", "text/plain")
EVENTS = Series("gateway-events", "gw1", "", "loss", LOSS_TYPE, "application/json")
SURVIVALS: tuple[Survival, ...] = get_args(Survival)


class PromiseBrokenError(AssertionError):
    """A promise does not hold."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A row as a promise speaks of it."""

    lane: int
    sequence: int
    device: str
    text: str
    """The payload; of a loss record, what it says."""
    loss: tuple[str, str, int] | None = None
    """Device, reason and count, where it is a loss record."""


@dataclass(slots=True)
class Model:
    """Content of the file."""

    rows: list[Stored] = field(default_factory=list)
    marks: dict[str, bytes] = field(default_factory=dict)
    quarantine: list[bytes] = field(default_factory=list)
    losses: Counter[tuple[str, str]] = field(default_factory=Counter)

    def sort(self) -> None:
        """Order the rows as they are read: one of the front may come behind later ones."""
        self.rows.sort(key=lambda row: (row.lane, row.sequence))

    def copy(self) -> "Model":
        return replace(
            self,
            rows=self.rows.copy(),
            marks=self.marks.copy(),
            quarantine=self.quarantine.copy(),
            losses=self.losses.copy(),
        )


class Card:
    """One card in one gateway: its power is cut again and again, and each time the gateway starts on what is left."""

    def __init__(self, root: Path, vfs: CuttableVfs, seed: int, first: "tuple[Path, Model] | None" = None) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - repeatable is the point
        self._root = root
        self._vfs = vfs
        self._starts = 0
        self._directory = self._next_directory()
        self.model = Model()
        if first is None:
            self._directory.mkdir(parents=True)
        else:
            shutil.copytree(first[0], self._directory)
            self.model = first[1].copy()
        self._possible = [self.model]
        """Contents that the file may have: of the last acknowledged commit, or of an attempt since."""
        self._copy: tuple[Path, Model] | None = None
        """A copy of the card that somebody made earlier, and what it held."""
        self._given: dict[tuple[str, str, int], str] = {}
        """Every identity that anybody could have seen, and the reading that it was given to."""
        self._sequences: Counter[str] = Counter()
        self._boots = dict.fromkeys(DEVICES, 1)
        self._sent: dict[str, list[Entry]] = {device: [] for device in DEVICES}
        """The latest readings of each device's present boot."""
        self._on_disk: dict[tuple[str, str, int], bytes] = {}
        """Readings that the duplicate windows know, as long as they are asked only about recent sequences."""
        self._in_front: list[Stored] = []
        """Rows that neither the disk nor Kafka has yet."""
        self._unsettled: list[Entry] = []
        """What came with them, and is not acknowledged."""
        self._ahead: set[tuple[str, str, int]] = set()
        """Readings that were in the front at some time. After a crash the windows may not know them."""
        self._durable: set[str] = set()
        """Rows that the disk or Kafka had at some time."""
        self._durable_numbers: dict[tuple[str, str], set[int]] = {}
        """Their numbers, by file and lane."""
        self._stored_numbers: dict[tuple[str, str], set[int]] = {}
        """Those of them that the disk had."""
        self._holes: dict[tuple[str, str], int] = {}
        """The first number that was skipped, by file and lane."""
        self._ends: dict[tuple[str, str], int] = {}
        """The first number that nobody had at the last commit, by file and lane."""
        self._in_flight: list[Entry] = []
        """Entries of the last attempt."""
        self._attempted: list[Entry] = []
        """Entries of all attempts since the last acknowledged commit."""
        self._numbers = 0
        self.acknowledged = 0
        self.spared = 0
        """Rows that Kafka had before the disk."""

    # -- a life between two cuts ----------------------------------------------------------------

    def run_until_cut(self) -> None:
        """Start the gateway, check what it finds, let it work until the power goes. Raises PromiseBrokenError."""
        disk = CuttableDisk(self._directory, self.chance)
        # Often within the first commits, where opening, migrating and pre-growing are; sometimes much later.
        disk.cut_at = int(self.chance.expovariate(1 / self.chance.choice((10, 60, 400))))
        survival = self.chance.choice(SURVIVALS)
        if self.chance.random() < 0.3:
            # A dying card: some syncs fail, and what they were to write is gone.
            disk.sync_fails = lambda: self.chance.random() < 0.05
        self._vfs.mount(disk)
        file: BufferFile | None = None
        try:
            try:
                file = self._open(disk)
                self._check(file)
                self._go_ahead(file, disk)
                while not disk.is_cut:
                    file = self._work(file, disk)
            except PowerCut:
                pass
            left = self._next_directory()
            disk.image(left, survival)
        finally:
            disk.cut_at = None  # what closing does to the old files matters no more
            if file is not None:
                with suppress(sqlite3.Error, OSError):
                    file.close()
            self._vfs.unmount(disk)
        shutil.rmtree(self._directory)
        self._directory = left
        self._copy_or_restore()

    def _go_ahead(self, file: BufferFile, disk: CuttableDisk) -> None:
        """As `Buffer.go_direct` does it: the file knows that Kafka may have more than it tells."""
        failed = disk.failed_syncs
        try:
            with file.transaction():
                file.keep_marks([Mark(AHEAD_MARK, b"boot")])
        except sqlite3.Error:
            if disk.failed_syncs == failed:
                raise

    def _open(self, disk: CuttableDisk) -> BufferFile:
        # What was in memory is gone, and its sensors send it again.
        self._in_flight = [*self._in_flight, *self._unsettled]
        self._attempted += self._unsettled
        self._in_front, self._unsettled = [], []
        settings = BufferSettings(path=self._directory / "buffer.db", bytes_max=1_000_000, free_bytes_min=0)
        while True:
            failed = disk.failed_syncs
            try:
                return BufferFile(settings, f"boot-{self._starts}", lambda: CLOCK, Counter())
            except sqlite3.Error:
                if disk.failed_syncs == failed:
                    raise

    def _work(self, file: BufferFile, disk: CuttableDisk) -> BufferFile:
        """Do something; where the card fails, nothing of it counts, and what follows is on the same file."""
        failed = disk.failed_syncs
        if self.chance.random() < 0.05:
            file.close()
            file = self._open(disk)
            if disk.is_cut:
                raise PowerCut
            # A commit whose sync failed may be found now: what was written stands in the kernel's memory.
            try:
                self._check(file)
            except PromiseBrokenError:
                file.abandon()
                raise
            return file
        try:
            self._do(file, disk)
        except sqlite3.Error:
            if disk.failed_syncs == failed:
                raise
        return file

    def _do(self, file: BufferFile, disk: CuttableDisk) -> None:
        draw = self.chance.random()
        if draw < 0.1:
            mode = self.chance.choice(("PASSIVE", "PASSIVE", "RESTART", "TRUNCATE"))
            file.connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        elif draw < 0.15:
            self._roll_back(file)
        elif draw < 0.2:
            self._drop(file, disk)
        elif draw < 0.25:
            self._report_losses(file, disk)
        elif draw < 0.28:
            self._begin_lane(file, disk)
        elif draw < 0.45:
            self._admit(file)
        elif draw < 0.55:
            self._take(file)
        elif draw < 0.6:
            self._write_some(file, disk)
        else:
            self._commit(file, disk)

    def _begin_lane(self, file: BufferFile, disk: CuttableDisk) -> None:
        """Rows go into another lane from here on; each lane that ended is told of once, with how many it has had."""
        after = self.model.copy()

        def report(kind: str, lane: Lane, count: int, _: str) -> Entry:
            if kind == "lane-closed":
                self._check_end(file, lane, count)
            return entry_of(Series("events", "gw", "", kind, f"sluice.gateway.{kind}", "text/plain"), self._payload())

        after.rows += self._in_front
        after.sort()
        with file.transaction():
            file.begin_lane("", report)
            for row in file.inserted:
                after.rows.append(
                    Stored(row.lane, row.sequence, "", _text(row.datum.payload, file.series.find(row.series).type))
                )
            self._possible.append(after)
        self._acknowledge(file, disk, after)

    def _check_end(self, file: BufferFile, lane: Lane, count: int) -> None:
        """Whatever a lane is said to have had is on the disk or in Kafka, or was; and all that the disk had is told."""
        of = file.id, lane.name
        durable = self._durable_numbers.get(of, set())
        if lane.number == file.lanes.current.number:
            raise PromiseBrokenError(f"lane {lane.name} is closed, and goes on")
        # What was in the front until now is written in this transaction.
        durable |= {row.sequence for row in self._in_front if row.lane == lane.number}
        missing = set(range(count)) - durable
        if missing:
            raise PromiseBrokenError(f"lane {lane.name} is closed with {count} rows, and nobody has {missing}")
        if count in self._stored_numbers.get(of, set()) or count < self._ends.get(of, 0):
            raise PromiseBrokenError(f"lane {lane.name} is closed with {count} rows, and has given more")

    # -- before the disk ------------------------------------------------------------------------

    def _admit(self, file: BufferFile) -> None:
        """Readings come whose topic is direct: they get numbers, and wait for Kafka."""
        if len(self._in_front) > FRONT_MAX:
            return
        entries = [entry for entry in self._entries() if entry.quarantined is None][:FRONT_MAX]
        expected = Model()
        before = file.lanes.next_sequence
        self._on_disk |= self._insert(expected, entries, file)
        self._in_flight = []
        self._unsettled += entries
        rows = file.admit(Append(entries, (), None, 0, 0))
        if rows and rows[0].sequence > before:
            # A commit has failed, and these numbers may be on disk.
            skipped = rows[0].sequence - before
            self._holes.setdefault((file.id, file.lanes.current.name), before)
            expected.rows = [replace(row, sequence=row.sequence + skipped) for row in expected.rows]
        if [(row.lane, row.sequence) for row in rows] != [(row.lane, row.sequence) for row in expected.rows]:
            raise PromiseBrokenError(f"{len(rows)} rows were admitted where {len(expected.rows)} are new")
        self._in_front += expected.rows
        self._ahead |= {identity for entry in entries if (identity := _identity(entry)) is not None}
        for row in expected.rows:
            self._give(file.id, file.lanes.current.name, row.sequence, row.text)
        self._settle(file)

    def _take(self, file: BufferFile) -> None:
        """Kafka acknowledges some rows of the front, as its partitions answer."""
        chance = self.chance.choice((0.2, 0.8, 1.0))
        taken = [row for row in self._in_front if self.chance.random() < chance]
        file.front.confirm([Span(row.lane, row.sequence, row.sequence) for row in taken])
        self._in_front = [row for row in self._in_front if row not in taken]
        self._note_durable(file, [(row.sequence, row.text) for row in taken])
        self.spared += len(taken)
        self._settle(file)

    def _write_some(self, file: BufferFile, disk: CuttableDisk) -> None:
        """The front is due, and more than one commit may hold."""
        after = self.model.copy()
        with file.transaction():
            file.write_front(self.chance.choice((1, 100, 1_000)))
            if self.chance.random() < 0.5:
                file.save_windows()
            after.rows += self._in_front[: len(file.written)]
            after.sort()
            self._possible.append(after)
        self._acknowledge(file, disk, after)

    def _note_durable(self, file: BufferFile, rows: Sequence[tuple[int, str]]) -> None:
        of = file.id, file.lanes.current.name
        self._durable |= {text for _, text in rows}
        self._durable_numbers.setdefault(of, set()).update(sequence for sequence, _ in rows)

    def _settle(self, file: BufferFile) -> None:
        """Acknowledge what is durable."""
        for append in file.front.take_settled():
            for entry in append.entries:
                text = _text(entry.datum.payload, entry.series.type)
                if text not in self._durable:
                    raise PromiseBrokenError(f"acknowledged, and neither on the disk nor in Kafka: {text[:40]}")
            del self._unsettled[: len(append.entries)]
            self.acknowledged += len(append.entries)

    # -- commits --------------------------------------------------------------------------------

    def _commit(self, file: BufferFile, disk: CuttableDisk) -> None:
        """One transaction of the buffer: delete rows that Kafka has, store readings, keep marks, count losses."""
        entries = self._entries()
        marks = self._marks()
        confirmed = self._confirmed()
        losses = self._losses()
        after = self.model.copy()
        if confirmed is not None:
            gone = range(confirmed.first, confirmed.last + 1)
            after.rows = [row for row in after.rows if row.lane != confirmed.lane or row.sequence not in gone]
        is_front_due = self.chance.random() < 0.5
        if is_front_due:
            after.rows += self._in_front
        on_disk = self._insert(after, entries, file)
        after.sort()
        for key, value in marks:
            after.marks.pop(key, None)
            if value is not None:
                after.marks[key] = value
        for loss in losses:
            after.losses[loss.device, loss.reason] += loss.count
        self._possible.append(after)
        self._in_flight = entries
        self._attempted += entries
        with file.transaction():
            rest = confirmed
            while rest is not None:
                rest = file.deletion.delete(rest)
            if is_front_due:
                file.write_front()
            file.insert(entries)
            file.keep_marks(marks)
            if losses:
                file.count_losses(losses)
        self._on_disk |= on_disk
        self._acknowledge(file, disk, after)

    def _acknowledge(self, file: BufferFile, disk: CuttableDisk, after: Model) -> None:
        """The transaction has returned: from here on it is a promise, unless the power was gone by then."""
        if disk.is_cut:
            raise PowerCut
        if after == self.model:
            # Nothing was written: what a failed attempt has left in the WAL may still be found by the next start.
            return
        self.model = after
        self._possible = [after]
        self._in_flight = []
        self._attempted = []
        self.acknowledged += len(file.inserted)
        file.front.written(file.written)
        del self._in_front[: len(file.written)]
        of = file.id, file.lanes.current.name
        first = self._in_front[0].sequence if self._in_front else file.lanes.next_sequence
        self._ends[of] = min(first, self._holes.get(of, first))
        for row in (*file.written, *file.inserted):
            text = _text(row.datum.payload, file.series.find(row.series).type)
            of = file.id, file.lanes.find(row.lane).name
            self._give(*of, row.sequence, text)
            self._note_stored(of, row.sequence, text)
        self._settle(file)

    def _note_stored(self, of: tuple[str, str], sequence: int, text: str) -> None:
        self._durable.add(text)
        self._durable_numbers.setdefault(of, set()).add(sequence)
        self._stored_numbers.setdefault(of, set()).add(sequence)

    def _insert(self, model: Model, entries: list[Entry], file: BufferFile) -> dict[tuple[str, str, int], bytes]:
        on_disk: dict[tuple[str, str, int], bytes] = {}
        sequence = file.lanes.next_sequence
        for entry in entries:
            identity = _identity(entry)
            if identity is not None:
                if {**self._on_disk, **on_disk}.get(identity) == entry.datum.payload:
                    continue
                on_disk[identity] = entry.datum.payload
            if entry.quarantined is not None:
                model.quarantine.append(entry.quarantined.datum.payload)
            text = _text(entry.datum.payload, entry.series.type)
            model.rows.append(Stored(file.lanes.current.number, sequence, entry.series.device, text))
            sequence += 1
        return on_disk

    def _roll_back(self, file: BufferFile) -> None:
        """A commit that fails gives its numbers back, and nothing of it is stored."""
        with suppress(ZeroDivisionError), file.transaction():
            file.insert([self._entry(self.chance.choice(DEVICES))])
            raise ZeroDivisionError

    def _drop(self, file: BufferFile, disk: CuttableDisk) -> None:
        """The oldest rows are too old: each of them is counted as lost in the commit that drops it."""
        after = self.model.copy()
        oldest = min((row.lane for row in after.rows), default=0)
        with file.transaction():
            file.dropping.drop_aged(0)
            left = first_after(file.connection, Position(oldest, -1))
            after.rows = [row for row in after.rows if row.lane != oldest or (left and (oldest, row.sequence) >= left)]
            for row in self.model.rows[: len(self.model.rows) - len(after.rows)]:
                # The gateway's own events are of no device, and no readings.
                device, reason, count = row.loss or (row.device, "too-old" if row.device else EVENTS_DROPPED, 1)
                after.losses[device, reason] += count
            self._possible.append(after)
        self._acknowledge(file, disk, after)

    def _report_losses(self, file: BufferFile, disk: CuttableDisk) -> None:
        """Counters become rows that tell of them, in one commit: no loss is told twice or never."""
        after = self.model.copy()
        with file.transaction():
            first = file.lanes.next_sequence
            file.report_losses(_report, 1_000)
            # The records' order is the file's: what they say in all is ours to check.
            for row in file.inserted:
                body = msgspec.json.decode(row.datum.payload)
                loss = (body["device"] or "", body["reason"], body["count"])
                after.rows.append(
                    Stored(file.lanes.current.number, row.sequence, "", _text(row.datum.payload, LOSS_TYPE), loss=loss)
                )
                after.losses[loss[:2]] -= loss[2]
            if +after.losses or -after.losses or file.lanes.next_sequence - first != len(file.inserted):
                raise PromiseBrokenError(f"losses counted but not told, or told but not counted: {after.losses}")
            after.losses.clear()
            self._possible.append(after)
        self._acknowledge(file, disk, after)

    # -- what the sensors do --------------------------------------------------------------------

    def _entries(self) -> list[Entry]:
        entries: list[Entry] = []
        # Whoever was not told that it is stored sends it again; some have lost it meanwhile, which is their loss.
        entries += [entry for entry in self._in_flight if self.chance.random() < 0.9]
        for _ in range(self.chance.choice((0, 1, 1, 2, 5, 5, 150 if self.chance.random() < 0.1 else 20))):
            device = self.chance.choice(DEVICES)
            draw = self.chance.random()
            if draw < 0.1 and self._sent[device]:
                entries.append(self.chance.choice(self._sent[device][-10:]))  # its PUBACK was lost
            elif draw < 0.13:
                entries.append(self._unroutable())
            elif draw < 0.15 and not self._in_flight:
                self._boots[device] += 1
                self._sent[device].clear()
                self._sequences[device] = 0
            else:
                entries.append(self._entry(device))
        return entries

    def _entry(self, device: str) -> Entry:
        series = Series("device-thermo", device, device, f"device/{device}/thermo", "sluice.reading", "text/plain")
        payload = self._payload()
        # Each later than the one before: which runs of a device are its latest is told by that.
        received_us = self._numbers
        if self.chance.random() < 0.3:
            return entry_of(series, payload, received_us)
        self._sequences[device] += 1
        entry = entry_of(
            series,
            payload,
            received_us,
            device_boot=f"{self._boots[device]}-a",
            device_sequence=self._sequences[device],
        )
        self._sent[device].append(entry)
        return entry

    def _payload(self) -> bytes:
        self._numbers += 1
        length = 9_000 if self.chance.random() < 0.01 else self.chance.choice((0, 30, 300))
        return f"{self._numbers:08d}".encode() + b"." * length

    def _unroutable(self) -> Entry:
        payload = self._payload()
        report = Series("gateway-quarantine", "gw1", "", "kitchen", "sluice.gateway.quarantined", "application/json")
        return entry_of(report, payload, quarantined=input_of("no-route", payload, "", "kitchen"))

    def _marks(self) -> list[Mark]:
        return [
            Mark(f"mqtt/qos2/{self.chance.randrange(8)}", self.chance.choice((None, b"", self.chance.randbytes(8))))
            for _ in range(self.chance.choice((0, 0, 1, 3)))
        ]

    def _losses(self) -> list[Loss]:
        if self.chance.random() < 0.8:
            return []
        device = self.chance.choice(DEVICES)
        return [Loss(device, "refused-qos0", "boot", self.chance.randint(1, 9), 1, 2)]

    def _confirmed(self) -> Span | None:
        """Kafka has some rows, from the front of one of the lanes."""
        if not self.model.rows or self.chance.random() < 0.6:
            return None
        lane = self.chance.choice(self.model.rows).lane
        rows = [row.sequence for row in self.model.rows if row.lane == lane]
        # From the front, or from the middle: a partition may take none for a while.
        first = 0 if self.chance.random() < 0.7 else self.chance.randrange(len(rows))
        return Span(lane, rows[first], rows[self.chance.randrange(first, len(rows))])

    # -- what must hold -------------------------------------------------------------------------

    def _check(self, file: BufferFile) -> None:
        """The file is as of the last acknowledged commit, or of an attempt since: nothing between."""
        found = _observe(file)
        if found not in self._possible:
            raise PromiseBrokenError(f"after cut {self._starts}: {_difference(found, self._possible)}")
        self._on_disk |= self._landed(found)
        self._attempted = []
        self.model = found
        self._check_windows(file)
        read = [(row.lane, row.sequence) for row in _read(file)]
        if read != [(row.lane, row.sequence) for row in found.rows]:
            raise PromiseBrokenError(
                f"after cut {self._starts}: the forwarder reads {len(read)} rows of {len(found.rows)}"
            )
        self._possible = [found]
        (intact,) = file.connection.execute("PRAGMA integrity_check").fetchone() or ("",)
        if intact != "ok":
            raise PromiseBrokenError(f"after cut {self._starts}: integrity_check says {intact}")
        if file.lanes.rows != len(found.rows):
            raise PromiseBrokenError(
                f"after cut {self._starts}: counts {file.lanes.rows} rows where there are {len(found.rows)}"
            )
        lanes: dict[int, list[int]] = {}
        for row in found.rows:
            lanes.setdefault(row.lane, []).append(row.sequence)
        for lane, sequences in lanes.items():
            if sequences != sorted(set(sequences)):
                raise PromiseBrokenError(f"after cut {self._starts}: lane {lane} is out of order: {sequences}")
            name = file.lanes.find(lane).name
            for row in found.rows:
                if row.lane == lane:
                    self._give(file.id, name, row.sequence, row.text)
                    self._note_stored((file.id, name), row.sequence, row.text)

    def _check_windows(self, file: BufferFile) -> None:
        """No resend is taken for stored unless the disk or Kafka has the reading."""
        there = {row.text for row in self.model.rows} | self._durable
        known: dict[tuple[str, str], frozenset[int]] = {}
        for entry in (*self._in_flight, *chain.from_iterable(self._sent.values())):
            identity = _identity(entry)
            if identity is None:
                continue
            device, boot, sequence = identity
            if (device, boot) not in known:
                known[device, boot] = file.recall(device, boot, range(0)).stored
            text = _text(entry.datum.payload, entry.series.type)
            if sequence in known[device, boot]:
                if text not in there:
                    raise PromiseBrokenError(f"after cut {self._starts}: a resend of {text[:40]} would be lost")
            elif identity in self._ahead:
                # Only Kafka had it, or had it before the window was written once more.
                self._on_disk.pop(identity, None)

    def _landed(self, found: Model) -> dict[tuple[str, str, int], bytes]:
        """The unacknowledged readings that the file holds now, and will recognise."""
        texts = {row.text for row in found.rows}
        return {
            (entry.series.device, entry.datum.device_boot, entry.datum.device_sequence): entry.datum.payload
            for entry in self._attempted
            if entry.datum.device_boot is not None
            and entry.datum.device_sequence is not None
            and _text(entry.datum.payload, entry.series.type) in texts
        }

    def _give(self, buffer_id: str, lane: str, sequence: int, text: str) -> None:
        before = self._given.setdefault((buffer_id, lane, sequence), text)
        if before != text:
            raise PromiseBrokenError(f"ce_id {buffer_id}/{lane}/{sequence} was given to {before!r} and to {text!r}")

    # -- the card -------------------------------------------------------------------------------

    def _next_directory(self) -> Path:
        self._starts += 1
        return self._root / str(self._starts)

    def _copy_or_restore(self) -> None:
        """Somebody copies the card, or puts such a copy back."""
        draw = self.chance.random()
        if draw < 0.05 and len(self._possible) == 1:
            if self._copy is not None:
                shutil.rmtree(self._copy[0])
            self._copy = self._root / f"copy-{self._starts}", self.model.copy()
            shutil.copytree(self._directory, self._copy[0])
        elif draw < 0.1 and self._copy is not None:
            shutil.rmtree(self._directory)
            self._directory = self._next_directory()
            shutil.copytree(self._copy[0], self._directory)
            self.model = self._copy[1].copy()
            self._possible = [self.model]
            self._in_flight = []
            self._attempted = []
            self._unsettled = []
            # The sensors went on: what they send is new to the copy, and what it knew is far behind.
            self._on_disk.clear()
            for device in DEVICES:
                self._boots[device] += 1
                self._sequences[device] = 0
                self._sent[device].clear()


def _identity(entry: Entry) -> tuple[str, str, int] | None:
    """What tells a resend: device, boot and sequence."""
    boot, sequence = entry.datum.device_boot, entry.datum.device_sequence
    return None if boot is None or sequence is None else (entry.series.device, boot, sequence)


def _read(file: BufferFile) -> list[Row]:
    """All rows, as the forwarder reads them."""
    found: list[Row] = []
    while some := file.read(Position(found[-1].lane, found[-1].sequence) if found else START, 100):
        found += some
    return found


def _text(payload: bytes, type_: str) -> str:
    return f"{type_} {payload.decode()}"


def _report(loss: Loss) -> Entry:
    return entry_of(EVENTS, msgspec.json.encode(loss_body(loss)))


def _observe(file: BufferFile) -> Model:
    execute = file.connection.execute
    rows = []
    for lane, sequence, device, type_, payload in execute(
        f"SELECT lane, sequence, device, type, payload FROM {rows_after('lane, sequence, series, payload')} AS found"
        " JOIN series ON series.number = found.series ORDER BY place",
        (START.place, -1),
    ):
        if not isinstance(payload, bytes):
            raise PromiseBrokenError(f"row {sequence} of lane {lane} has no payload any more")
        body = msgspec.json.decode(payload) if type_ == LOSS_TYPE else None
        loss = None if body is None else (body["device"] or "", body["reason"], body["count"])
        rows.append(Stored(lane, sequence, device, _text(payload, type_), loss))
    losses = Counter(
        {
            (device, reason): count
            for device, reason, count in execute("SELECT device, reason, sum(count) FROM loss GROUP BY device, reason")
        }
    )
    quarantine = [payload for (payload,) in execute("SELECT payload FROM quarantine ORDER BY number")]
    # What the file keeps of its lanes is its own: that the counts are right is seen when it is opened.
    marks = {
        key: value
        for key, value in execute("SELECT key, value FROM mark")
        if not key.startswith((LANE_PREFIX, AHEAD_MARK, OFFSETS_BEHIND.key, AGAIN_MARK))
    }
    return Model(rows, marks, quarantine, losses)


def _difference(found: Model, possible: list[Model]) -> str:
    told = []
    for model in possible:
        missing = [row.text[:40] for row in model.rows if row not in found.rows]
        surplus = [row.text[:40] for row in found.rows if row not in model.rows]
        others = [name for name in ("marks", "quarantine", "losses") if getattr(found, name) != getattr(model, name)]
        told.append(f"{len(missing)} missing {missing[:3]}, {len(surplus)} too many {surplus[:3]}, differing: {others}")
    return " | ".join(told)


def cut(
    cuts: int,
    directory: Path,
    seed: int,
    synchronous: Synchronous = "FULL",
    first: tuple[Path, Model] | None = None,
) -> Counter[str]:
    """Cut the power so often; count `cuts`, `acknowledged`, and `broken` cards, of which each ends its card's test.

    A card begins empty, or as a copy of `first`.
    """
    counts: Counter[str] = Counter()
    with sqlite_over_cuttable_disks(synchronous) as vfs:
        while counts["cuts"] < cuts:
            card_seed = seed * 1_000_003 + counts["cards"]
            card = Card(directory / str(card_seed), vfs, card_seed, first)
            counts["cards"] += 1
            try:
                # One that begins with `first` is about its beginning.
                for _ in range(CUTS_PER_CARD if first is None else CUTS_PER_CARD // 4):
                    counts["cuts"] += 1
                    card.run_until_cut()
            # A damaged page may read as anything.
            except (PromiseBrokenError, sqlite3.Error, AttributeError, TypeError, UnicodeDecodeError) as error:
                if synchronous == "FULL":
                    raise PromiseBrokenError(f"seed {seed}, card {counts['cards']}: {error}") from error
                counts["broken"] += 1
            counts["acknowledged"] += card.acknowledged
            counts["spared"] += card.spared
    return counts


def former(directory: Path, version: int) -> tuple[Path, Model]:
    """A file of a former version, with readings that wait."""
    directory.mkdir()
    with mock.patch.object(schema, "MIGRATIONS", schema.MIGRATIONS[:version]):
        connection = schema.connect(directory / "buffer.db")
    connection.execute(
        "INSERT INTO boot (boot_id, offset_us, error_us) VALUES ('boot', ?, 1000)", (CLOCK.offset_us(0),)
    )
    connection.execute("INSERT INTO lane (name, boot_id, event_from_us) VALUES ('0123456789ab', 'boot', 1)")
    connection.execute(
        "INSERT INTO series (topic, key, device, subject, type, content_type)"
        " VALUES ('device-thermo', '42', '42', 'device/42/thermo', 'sluice.reading', 'text/plain')"
    )
    place, values = place_in(version)
    connection.executemany(
        f"INSERT INTO reading ({place}, series, received_us, event_error_us, payload) VALUES ({values}, 1, 1, 0, ?)",
        [(1, sequence, f"old {sequence}".encode()) for sequence in range(100)],
    )
    connection.execute(
        "INSERT INTO quarantine (boot_id, received_us, device, subject, reason, payload)"
        " VALUES ('boot', 1, '', 'kitchen', 'no-route', x'00')"
    )
    connection.close()
    rows = [Stored(1, sequence, "42", f"sluice.reading old {sequence}") for sequence in range(100)]
    return directory, Model(rows, quarantine=[b"\0"])


@pytest.mark.campaign(seconds=120)
def test_no_power_cut_costs_what_was_acknowledged(tmp_path: Path) -> None:
    counts = cut(CUTS, tmp_path, SEED)
    assert counts["acknowledged"] > 5 * CUTS
    assert counts["spared"] > CUTS // 2


@pytest.mark.parametrize("fault", ["windows know the front", "lanes count the front"])
def test_the_cuts_find_a_file_that_counts_on_what_only_the_front_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault.startswith("windows"):
        monkeypatch.setattr(Front, "first_and_sequences", lambda _: (None, {}))
    else:
        monkeypatch.setattr(Front, "first_behind", lambda _self, _rows: None)
    with pytest.raises(PromiseBrokenError, match=r"would be lost|nobody has|counts \d+ rows"):
        cut(2_000, tmp_path, SEED)


def open_on(vfs: CuttableVfs, disk: CuttableDisk) -> BufferFile:
    vfs.mount(disk)
    settings = BufferSettings(path=disk.directory / "buffer.db", bytes_max=1_000_000, free_bytes_min=0)
    return BufferFile(settings, "boot", lambda: CLOCK, Counter())


def cut_the_start_after_a_failed_sync(root: Path, vfs: CuttableVfs, operation: int, survival: Survival) -> bool:
    """Let the power go before an operation of that start, and see what the next one finds; False where it has fewer."""
    (root / "card").mkdir(parents=True)
    disk = CuttableDisk(root / "card", random.Random(SEED))  # noqa: S311
    with closing(open_on(vfs, disk)) as file:
        with file.transaction():
            file.insert([entry_of(THERMO, b"%d" % number * 100) for number in range(100)])
        before = _observe(file)
        disk.sync_fails = lambda: True
        with suppress(sqlite3.OperationalError), file.transaction():
            # Pages here and there.
            file.deletion.delete_whole(Span(file.lanes.current.number, 0, 79))
            file.keep_marks([Mark("a", b"1")])
            file.count_losses([Loss("42", "refused-qos0", "boot", 1, 1, 2)])
            after = _observe(file)
        assert _observe(file) == before
        disk.sync_fails = lambda: False
    disk.cut_at = disk.operations + operation
    with suppress(PowerCut), closing(open_on(vfs, disk)):
        disk.cut_at = None
    disk.image(root / "left", survival)
    with closing(open_on(vfs, CuttableDisk(root / "left", disk.chance))) as file:
        assert _observe(file) in (before, after), f"seed {SEED}, cut before operation {operation}"
    return disk.is_cut


@pytest.mark.parametrize("survival", SURVIVALS)
def test_a_commit_whose_sync_failed_is_there_whole_or_not_at_all_when_the_power_goes_at_the_next_start(
    tmp_path: Path, survival: Survival
) -> None:
    """That start finds it in the kernel's memory. Nothing tells that it is not on the card."""
    cuts = 0
    with sqlite_over_cuttable_disks() as vfs:
        while cut_the_start_after_a_failed_sync(tmp_path / str(cuts), vfs, cuts, survival):
            cuts += 1
    assert cuts > 20


def test_a_number_of_a_commit_whose_sync_failed_goes_to_no_row_that_kafka_may_have_first(tmp_path: Path) -> None:
    ends: list[int] = []

    def report(kind: str, _: Lane, count: int, __: str) -> Entry:
        ends.extend([count] if kind == "lane-closed" else [])
        return entry_of(EVENTS, b"")

    disk = CuttableDisk(tmp_path, random.Random(SEED))  # noqa: S311
    with sqlite_over_cuttable_disks() as vfs:
        with closing(open_on(vfs, disk)) as file:
            disk.sync_fails = lambda: True
            with suppress(sqlite3.OperationalError), file.transaction():
                file.insert([entry_of(THERMO, b"on disk")] * 2)
            disk.sync_fails = lambda: False
            (row,) = file.admit(Append([entry_of(THERMO, b"in Kafka")], (), None, 0, 0))
            file.front.confirm([Span(row.lane, row.sequence, row.sequence)])
        with closing(open_on(vfs, disk)) as file:
            found = _read(file)
            assert [row.datum.payload for row in found] == [b"on disk"] * 2
            assert row.sequence not in [each.sequence for each in found]
            disk.sync_fails = lambda: True
            with suppress(sqlite3.OperationalError), file.transaction():
                file.insert([entry_of(THERMO, b"lost")] * 2)
            disk.sync_fails = lambda: False
            file.admit(Append([entry_of(THERMO, b"written")], (), None, 0, 0))
            with file.transaction():
                file.insert([entry_of(THERMO, b"behind it")])
            file.front.written(file.written)
            holes = [file.lanes.has_hole]
            with file.transaction():
                file.begin_lane("commit-failed", report)
            assert [*holes, file.lanes.has_hole] == [True, False]
            assert ends == [2, 0], "the first lane held two rows; none of the second lane's stands before its hole"
            ends.clear()
        with closing(open_on(vfs, disk)) as file:
            again = [entry_of(THERMO, b"a"), entry_of(THERMO, b"b")]
            disk.sync_fails = lambda: True
            with suppress(sqlite3.OperationalError), file.transaction():
                file.insert(again)
            disk.sync_fails = lambda: False
            with file.transaction():
                file.insert(again)
            (row,) = file.admit(Append([entry_of(THERMO, b"c")], (), None, 0, 0))
            assert row.sequence == 2, "the numbers went to the rows that came again"


@pytest.mark.parametrize("version", range(1, len(schema.MIGRATIONS)))
def test_a_file_of_a_former_version_survives_cuts_while_it_is_migrated_and_drains(tmp_path: Path, version: int) -> None:
    counts = cut(100, tmp_path, SEED, first=former(tmp_path / "former", version))
    assert counts["acknowledged"] > 100


@pytest.mark.parametrize("synchronous", ["NORMAL", "OFF"])
def test_the_cuts_find_a_buffer_that_does_not_sync_each_commit(tmp_path: Path, synchronous: Synchronous) -> None:
    counts = cut(200, tmp_path, SEED, synchronous)
    assert counts["broken"] >= 5
