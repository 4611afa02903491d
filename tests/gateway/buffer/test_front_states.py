"""The buffer while Kafka takes rows before the disk, against ledgers of what the disk and Kafka have.

Rows are read as the forwarder reads them, by its own `Supply`.
"""

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from msgspec.structs import replace

from gateway.buffer import schema
from gateway.buffer.buffer import Buffer
from gateway.buffer.commit_queue import Append
from gateway.buffer.file import BufferFile
from gateway.buffer.rows import Entry, Lane, Position, Row, joined, span_at, spans_of
from gateway.clock.kernel_clock import boottime_us
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.intake.new_clocks import NewClocks
from gateway.reading import BufferFileError, Mark
from gateway.settings import KafkaSettings
from gateway.uplink.supply import Supply
from tests.support import buffers
from tests.support.buffers import append, changed, confirm, entry, input_of, opened, store
from tests.support.restarted_buffer import RestartedBuffer
from tests.support.sizes import size
from tests.support.waiting import patience, until

TOPICS = {"a": "device-thermo", "b": "device-thermo", "c": "device-other"}
"""Sensors, and the Kafka topic of each."""
QUEUE_BYTES_MAX = 100_000
RECENT = 20
"""Readings of a sensor that it may send again: fewer than a duplicate window holds."""
PATIENCE_S = 20.0

Identity = tuple[str, int]
"""A lane's name, and the sequence in it."""
T = TypeVar("T")

sensors = st.sampled_from(sorted(TOPICS))
some_sensors = st.sets(sensors)


@dataclass(eq=False)
class Sent:
    """An append, and what was said of it."""

    number: int
    devices: frozenset[str]
    texts: list[bytes]
    """What must be durable if it is acknowledged: payloads, quarantined input, and marks."""
    outcome: bool | None = None


@dataclass(frozen=True)
class Disk:
    """What another connection sees, so what is committed."""

    rows: dict[Identity, bytes]
    beside: frozenset[bytes]
    """Quarantined input, and marks."""

    @property
    def texts(self) -> set[bytes]:
        return {*self.rows.values(), *self.beside}


class FrontMachine(RestartedBuffer):
    """Sensors send and send again; Kafka takes rows in any order, or none; disks, power and sessions fail."""

    @initialize(
        disk_after_ms=st.sampled_from([60_000, 60_000, 3]),
        when_full=st.sampled_from(["refuse", "drop-oldest"]),
        drain=st.sampled_from(["live-first", "oldest-first"]),
    )
    def begin(self, disk_after_ms: int, when_full: str, drain: str) -> None:
        self.kafka = KafkaSettings(bootstrap=("kafka:9092",), drain=drain)  # type: ignore[arg-type]
        self.sequences = dict.fromkeys(TOPICS, 0)
        self.readings: dict[str, list[Entry]] = {device: [] for device in TOPICS}
        self.in_kafka: dict[Identity, bytes] = {}
        """What Kafka has acknowledged."""
        self.set_aside: set[Identity] = set()
        """What Kafka has refused, and the quarantine has."""
        self.acknowledged: set[bytes] = set()
        self.told_lost: set[bytes] = set()
        """Dropped, and counted as lost."""
        self.told_twice: set[bytes] = set()
        """May stand twice, as a crash or another file came between, or as a sensor used a number again."""
        self.come_again: set[Identity] = set()
        """Kafka has it, but the disk may not know it, as a crash or another file came between."""
        self.seen: dict[Identity, bytes] = {}
        """Every identity that anybody could have seen, and its row."""
        self.durable: set[Identity] = set()
        """Identities that the disk or Kafka had at some time."""
        self.cut_lanes: set[str] = set()
        """Lanes that did not end by themselves."""
        self.marks = self.payloads = self.replacements = 0
        self.faults: list[str] = []
        self.start(disk_after_ms=disk_after_ms, when_full=when_full, fair_from=1.0, queue_bytes_max=QUEUE_BYTES_MAX)

    def _open(self) -> None:
        super()._open()
        self.sent: list[Sent] = []
        self.disk_fails = False
        self._begin_session()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    async def _settle(self) -> None:
        """Let the buffer's thread do what it can do now."""
        for _ in range(3):
            await self.buffer.answers()
            await asyncio.sleep(0)

    # -- sensors --------------------------------------------------------------------------------

    def _append(self, entries: Sequence[Entry], marks: Sequence[Mark] = ()) -> None:
        quarantined = [each.quarantined.datum.payload for each in entries if each.quarantined is not None]
        texts = [*(each.datum.payload for each in entries), *quarantined, *(mark.key.encode() for mark in marks)]
        sent = Sent(len(self.sent), frozenset(each.series.device for each in entries), texts)
        self.sent.append(sent)
        buffer = self.buffer

        def done(stored: bool) -> None:  # noqa: FBT001 - the contract of Intake
            if self.is_cut or self.buffer is not buffer:
                return  # the power had gone
            if sent.outcome is not None:
                self.faults.append(f"append {sent.number} was answered twice")
            if stored and any(later.outcome and later.devices & sent.devices for later in self.sent[sent.number + 1 :]):
                self.faults.append(f"append {sent.number} was acknowledged behind a later one of its device")
            sent.outcome = stored
            if stored:
                self.acknowledged.update(sent.texts)

        async def send() -> None:
            buffer.append(entries, done, marks)
            await self._settle()

        self._run(send())

    def _reading(self, device: str, length: int = 0, *, numbered: bool = True) -> Entry:
        self.payloads += 1
        sequence = None
        if numbered:
            sequence = self.sequences[device]
            self.sequences[device] += 1
        made = entry(b"%s %d %s" % (device.encode(), self.payloads, b"." * length), device, sequence)
        made = replace(made, series=replace(made.series, topic=TOPICS[device]))
        if numbered:
            self.readings[device].append(made)
        return made

    @rule(devices=st.lists(sensors, min_size=1, max_size=5), numbered=st.booleans())
    def append(self, devices: list[str], numbered: bool) -> None:  # noqa: FBT001
        self._append([self._reading(device, numbered=numbered) for device in devices])

    @rule(
        device=sensors,
        places=st.lists(st.integers(1, RECENT), min_size=1, max_size=4),
        new=st.integers(0, 2),
        marked=st.booleans(),
    )
    def send_again(self, device: str, places: list[int], new: int, marked: bool) -> None:  # noqa: FBT001
        """Its acknowledgement was lost, or never came. Beside it may be what needs the disk."""
        known = self.readings[device]
        entries = [known[-place] for place in places if place <= len(known)]
        entries = [*(changed(each) for each in entries), *(self._reading(device) for _ in range(new))]
        self._append(entries, [self._mark()] if marked else [])

    @rule(device=sensors)
    def use_a_number_again(self, device: str) -> None:
        if self.readings[device]:
            former = self.readings[device][-1]
            self.payloads += 1
            other = changed(former, payload=b"%s %d" % (device.encode(), self.payloads))
            self.told_twice |= {former.datum.payload, other.datum.payload}
            self.readings[device].append(other)
            self._append([other])

    @rule(device=sensors, kind=st.sampled_from(["mark", "lost", "quarantined"]))
    def append_what_needs_the_disk(self, device: str, kind: str) -> None:
        reading = self._reading(device)
        match kind:
            case "mark":
                self._append([reading], [self._mark()])
            case "lost":
                self._append([replace(reading, lost=(1_000, 1_001))])
            case _:
                self.payloads += 1
                text = b"input %d" % self.payloads
                report = self._reading(device, numbered=False)
                self._append([reading, replace(report, quarantined=input_of("no-route", text, device, "kitchen"))])

    def _mark(self) -> Mark:
        self.marks += 1
        return Mark(f"test/{self.marks}", b"1")

    @rule(device=sensors)
    def crowd_the_memory(self, device: str) -> None:
        """More than half of what may wait has to go to the disk at once."""
        self._append([self._reading(device, QUEUE_BYTES_MAX * 2 // 3)])
        if not self.disk_fails:
            self._run(until_true(lambda: not self.buffer._queue.is_crowded))

    # -- Kafka ----------------------------------------------------------------------------------

    def _begin_session(self) -> None:
        clocks = NewClocks(0.0, DeviceClocks(), boottime_us)
        self.under_way: dict[str, list[Row]] = {}
        """Rows of partitions that do not answer. Each sensor has a partition."""
        self.parked: set[str] = set()
        self.given: dict[tuple[int, str], int] = {}
        """The last sequence given since the session began or a partition answered, by lane and sensor."""
        self.supply = Supply(
            self.buffer, self.kafka, lambda: [row for rows in self.under_way.values() for row in rows], clocks
        )

    async def _end_session(self) -> None:
        self.buffer.end_direct()
        await self.supply.close()
        self._begin_session()

    @rule(devices=some_sensors)
    def go_direct(self, devices: set[str]) -> None:
        async def go() -> None:
            with suppress(BufferFileError):
                await self.buffer.go_direct(frozenset(TOPICS[device] for device in devices), self.supply.buffer_id)
            await self._settle()

        self._run(go())

    @rule()
    def go_direct_with_all(self) -> None:
        self.forward(1e9, set())
        self.go_direct(set(TOPICS))

    @rule(budget=st.sampled_from([1.0, 800.0, 1e9]), silent=some_sensors)
    def forward(self, budget: float, silent: set[str]) -> None:
        """A round: partitions answer, or do not and are parked."""
        self._run(self._forward(budget, silent, frozenset()))

    @rule(refused=some_sensors)
    def refuse_some(self, refused: set[str]) -> None:
        """Kafka refuses some sensors' records, which go to the quarantine."""
        self._run(self._forward(1e9, set(), frozenset(refused)))

    async def _forward(self, budget: float, silent: set[str], refused: frozenset[str]) -> bool:
        """Send a round. Returns whether there were rows, or may be more."""
        try:
            self.supply.follow()
            live, backlog = await self.supply.next(
                lambda _: budget,
                self._may_go if self.parked else None,
                False,
            )
            by_device: dict[str, list[Row]] = {}
            for row in (*live, *backlog):
                await self._note_given(row)
                by_device.setdefault(device_of(row), []).append(row)
        except BufferFileError:
            await self._end_session()
            return True
        for device, own in by_device.items():
            if device in silent:
                self.under_way[device] = own
                self.parked.add(device)
                self.supply.pass_over()
            elif device in refused:
                await self._quarantine(device, own)
            else:
                await self._take(own)
        await self._settle()
        return bool(live or backlog or self.supply.has_more)

    def _may_go(self, row: Row) -> bool:
        return device_of(row) not in self.parked

    async def _note_given(self, row: Row) -> None:
        series, lane = await self.supply.series(row.series), await self.supply.lane(row.lane)
        device = device_of(row)
        assert series.device == device
        assert series.topic == TOPICS.get(device, series.topic)
        assert device not in self.parked, "a partition is passed over while it does not answer"
        identity = lane.name, row.sequence
        assert identity not in self.in_kafka or identity in self.come_again, "sent again, and Kafka had it"
        assert identity not in self.set_aside or identity in self.come_again, "sent again, and it was set aside"
        assert self.seen.setdefault(identity, row.datum.payload) == row.datum.payload
        before = self.given.get((row.lane, device), -1)
        assert before < row.sequence, "given twice, or out of order"
        self.given[row.lane, device] = row.sequence

    async def _take(self, rows: Sequence[Row]) -> None:
        """Kafka acknowledges rows."""
        self._note_taken({((await self.supply.lane(row.lane)).name, row.sequence): row.datum.payload for row in rows})
        self.buffer.confirm(self.supply.buffer_id, spans_of(rows))

    def _note_taken(self, rows: dict[Identity, bytes]) -> None:
        self.in_kafka |= rows
        if self.supply.buffer_id != self.buffer.id:
            self.come_again.update(rows)  # of a former file, of which the present one has its own copies

    async def _quarantine(self, device: str, rows: Sequence[Row]) -> None:
        reports = []
        for row in rows:
            report = self._reading(device, numbered=False)
            lane = await self.supply.lane(row.lane)
            refused = replace(
                input_of("broker-refused", row.datum.payload, device, device), series=row.series, boot_id=lane.boot_id
            )
            reports.append(replace(report, quarantined=refused))
        try:
            await self.buffer.quarantine(self.supply.buffer_id, reports, rows)
        except BufferFileError:
            await self._end_session()
            return
        moved = {((await self.supply.lane(row.lane)).name, row.sequence) for row in rows}
        self.durable |= moved
        self.set_aside |= moved

    @rule(devices=some_sensors, again=st.booleans())
    def give_up(self, devices: set[str], again: bool) -> None:  # noqa: FBT001
        """Neither Kafka nor the disk takes some sensors' rows for long. What was sent may still arrive."""
        for device in sorted(devices) if again else ():
            self.send_again(device, [1], 0, marked=False)
        front = self.buffer._outgoing.front
        lane = self.buffer.lane.name
        before = front.rows()

        async def give_up() -> None:
            rows = [row for row in before if device_of(row) in devices]
            await self.buffer.run(lambda _: self.buffer._commits._give_up(rows))
            gone = {row.sequence for row in before} - {row.sequence for row in front.rows()}
            self.cut_lanes |= {lane} if gone else set()
            self.told_twice |= {row.datum.payload for row in before if row.sequence in gone}
            await self._settle()

        self._run(give_up())

    @rule(devices=some_sensors, backwards=st.booleans())
    def answer(self, devices: set[str], backwards: bool) -> None:  # noqa: FBT001
        """Partitions answer that were parked."""

        async def answer() -> None:
            for device in sorted(devices & self.parked, reverse=backwards):
                self.parked.discard(device)
                rows = self.under_way.pop(device, [])
                with suppress(BufferFileError):
                    await self._take(rows)
            self.supply.come_again()
            if self.parked:
                self.supply.pass_over()
            await self._settle()

        self._run(answer())

    @rule()
    def end_the_session(self) -> None:
        async def end() -> None:
            await self._end_session()
            await self._settle()

        self._run(end())

    @rule(lanes_back=st.integers(0, 1), sequence=st.integers(-1, 40), limit=st.sampled_from([1, 3, 1_000]))
    def read_behind(self, lanes_back: int, sequence: int, limit: int) -> None:
        """A reader anywhere gets every row behind it that Kafka does not have, in order."""
        after = Position(self.buffer.lane.number - lanes_back, sequence)

        def behind(file: BufferFile) -> list[Position]:
            stored = file.connection.execute("SELECT lane, sequence FROM reading").fetchall()
            there = {*starmap(Position, stored), *(Position(row.lane, row.sequence) for row in file.front.rows())}
            taken = self.buffer._outgoing._confirmed
            left = [place for place in there if place > after and span_at(joined(taken), *place) is None]
            return sorted(left)

        async def read() -> None:
            expected = await self.buffer.run(behind)
            _, rows = await self.buffer.read(after, limit)
            assert [Position(row.lane, row.sequence) for row in rows] == expected[: len(rows)]
            assert len(rows) <= limit
            assert rows or not expected

        self._run(read())

    # -- the buffer itself ----------------------------------------------------------------------

    async def _transact(self, function: Callable[[BufferFile], T]) -> T | None:
        try:
            found = await self.buffer.transact(function)
        except BufferFileError:
            found = None
        await self._settle()
        return found

    @rule(bytes_max=st.sampled_from([None, 1, 20]))
    def write_the_front(self, bytes_max: int | None) -> None:
        self._run(self._transact(lambda file: file.write_front(bytes_max)))

    @rule(fails=st.booleans())
    def answer_during_a_commit(self, fails: bool) -> None:  # noqa: FBT001
        """Kafka acknowledges rows between their INSERT and their COMMIT, which may fail."""
        # No precondition: if threads race, another run may have other partitions that do not answer.
        if not self.parked:
            return
        rows = self.under_way.popitem()[1] if self.under_way else []
        device = device_of(rows[0]) if rows else min(self.parked)
        buffer_id = self.supply.buffer_id
        taken: list[Row] = []

        def write(file: BufferFile) -> None:
            file.write_front()
            taken.extend(rows)
            self.buffer._outgoing.confirm(buffer_id, spans_of(rows))
            if fails:
                raise BufferFileError("the disk fails")

        async def answer() -> None:
            names = {row.lane: (await self.supply.lane(row.lane)).name for row in rows}
            await self._transact(write)
            self._note_taken({(names[row.lane], row.sequence): row.datum.payload for row in taken})
            if not taken:
                await self._end_session()
                return
            self.buffer._commits.release()
            self.buffer._queue.delete_soon()
            self.parked.discard(device)
            self.supply.come_again()
            if self.parked:
                self.supply.pass_over()

        with suppress(BufferFileError):
            self._run(answer())

    @rule()
    def save_the_windows(self) -> None:
        self._run(self._transact(lambda file: file.save_windows()))

    @rule(soon=st.booleans())
    def keep_a_mark(self, soon: bool) -> None:  # noqa: FBT001
        self.buffer.keep([Mark("kept/quietly", b"1")], soon=soon)

    @rule()
    def delete_what_kafka_has(self) -> None:
        self.buffer._queue.delete_now()
        self._run(self._settle())

    @rule()
    def let_time_pass(self) -> None:
        self._run(asyncio.sleep(0.01))
        self._run(self._settle())

    @precondition(lambda self: self.settings.when_full == "drop-oldest")
    @rule()
    def drop_the_oldest(self) -> None:
        def drop(file: BufferFile) -> dict[Identity, bytes]:
            before = rows_of(file.connection)
            file.dropping.drop_aged(0, self.buffer._outgoing.spared())
            left = rows_of(file.connection)
            return {identity: text for identity, text in before.items() if identity not in left}

        async def drop_some() -> None:
            dropped = await self._transact(drop) or {}
            self.durable.update(dropped)
            self.told_lost.update(dropped.values())
            under_way = {
                ((await self.supply.lane(row.lane)).name, row.sequence)
                for rows in self.under_way.values()
                for row in rows
            }
            if self.supply.buffer_id != self.buffer.id:
                return  # the former file's rows are being sent, which nothing protects here
            assert not dropped.keys() & under_way, "what is being sent is not dropped"
            assert not dropped.keys() & (self.in_kafka.keys() - self.come_again), "what Kafka has is not lost"

        self._run(drop_some())

    @rule()
    def begin_a_lane(self) -> None:
        said: list[tuple[str, int]] = []

        def report(kind: str, lane: Lane, count: int, _: str) -> Entry:
            if kind == "lane-closed":
                said.append((lane.name, count))
            self.payloads += 1
            return entry(b"gateway %d" % self.payloads, "gateway")

        async def begin() -> bool:
            try:
                await self.buffer.begin_lane("", report)
            except BufferFileError:
                return False
            await self._settle()
            return True

        if not self._run(begin()):
            return
        self._observe()
        for name, count in said:
            missing = {(name, sequence) for sequence in range(count)} - self.durable
            assert not missing, "a lane counts rows that nobody has"
            behind = {sequence for of, sequence in self.durable | self.seen.keys() if of == name and sequence >= count}
            assert not behind or name in self.cut_lanes, "a lane counts too few"

    # -- troubles -------------------------------------------------------------------------------

    @rule(fails=st.booleans())
    def let_the_disk_fail_or_mend_it(self, fails: bool) -> None:  # noqa: FBT001
        async def change() -> None:
            await self._set_disk(fails=fails)
            await self._settle()

        self._run(change())

    async def _set_disk(self, *, fails: bool) -> None:
        self.disk_fails = fails
        word = "ON" if fails else "OFF"
        await self.buffer.run(lambda file: file.connection.execute(f"PRAGMA query_only = {word}").fetchone())
        self.buffer._queue.retry_after(0.0)

    @precondition(lambda self: self.replacements < 2)
    @rule()
    def replace_the_file(self) -> None:
        """It is found damaged, and another takes its place, with all that can be read of it."""
        self.replacements += 1

        async def replace_it() -> None:
            attachment = self.buffer.attachment
            attachment._anew_due_s = float("-inf")
            self._note_break()
            await self.buffer.run(lambda _: self.buffer._commits._fail(schema.corruption("found just now")))
            self.disk_fails = False
            await until(lambda: not any(salvage.is_alive() for salvage in attachment._salvages))
            await self._settle()

        self._run(replace_it())

    def _note_break(self) -> None:
        """Of what Kafka has, the next file or start may not know."""
        self.cut_lanes.add(self.buffer.lane.name)
        self.come_again |= {*self.in_kafka, *self.set_aside}
        # Part of what was not acknowledged may be in Kafka.
        self.told_twice.update(text for sent in self.sent if not sent.outcome for text in sent.texts)
        self.told_twice |= {each.datum.payload for known in self.readings.values() for each in known}

    @rule()
    def restart(self) -> None:
        if self.disk_fails:
            # What could not be stored is refused, and the next start may take the end for a cut.
            self._note_break()
        self._close()
        self._open()

    def _close(self) -> None:
        async def close() -> None:
            await self.supply.close()
            await self.buffer.close()
            for _ in range(3):
                await asyncio.sleep(0)

        self._run(close())
        assert None not in [sent.outcome for sent in self.sent], "everything has its answer in the end"

    @rule()
    def power_cut(self) -> None:
        self._note_break()
        self._run(self.supply.close())
        super().power_cut()

    # -- what must hold -------------------------------------------------------------------------

    def _observe(self) -> Disk:
        with closing(sqlite3.connect(f"file:{self.settings.path}?mode=ro", uri=True)) as other:
            other.execute("BEGIN")
            rows = rows_of(other)
            beside = [payload for (payload,) in other.execute("SELECT payload FROM quarantine")]
            marks = [key.encode() for (key,) in other.execute("SELECT key FROM mark WHERE key LIKE 'test/%'")]
        self.durable |= rows.keys() | self.in_kafka.keys()
        for identity, text in rows.items():
            assert self.seen.setdefault(identity, text) == text, "an identity has two readings"
        return Disk(rows, frozenset([*beside, *marks]))

    @invariant()
    def holds_what_it_promises(self) -> None:
        disk = self._observe()
        self._is_durable(disk)
        self._is_stored_once(disk)
        self._is_counted()
        self._is_bounded()

    def _is_durable(self, disk: Disk) -> None:
        assert not self.faults
        missing = self.acknowledged - disk.texts - set(self.in_kafka.values()) - self.told_lost
        assert not missing

    def _is_stored_once(self, disk: Disk) -> None:
        front = {(self.buffer.lane.name, row.sequence): row.datum.payload for row in self.buffer._outgoing.front.rows()}
        counts = Counter({**disk.rows, **front, **self.in_kafka}.values())
        assert {text for text, count in counts.items() if count > 1} <= self.told_twice

    def _is_counted(self) -> None:
        def count(file: BufferFile) -> tuple[int, int]:
            (rows,) = file.connection.execute("SELECT count(*) FROM reading").fetchone()
            return file.lanes.rows, rows

        counted, rows = self._run(self.buffer.run(count))
        assert counted == rows

    def _is_bounded(self) -> None:
        queue = self.buffer._queue
        assert 0 <= queue._queued_bytes <= 2 * QUEUE_BYTES_MAX
        if None not in [sent.outcome for sent in self.sent]:
            assert queue._queued_bytes == 0

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self._run(self._drain())
        super().teardown()

    async def _drain(self) -> None:
        """The disk works, and Kafka takes everything: nothing is left, and nothing is missing."""
        await self._set_disk(fails=False)
        await self._end_session()
        while None in [sent.outcome for sent in self.sent] or self.buffer.state.rows:
            await self._forward(1e9, set(), frozenset())
            self.buffer._queue.delete_now()
        disk = self._observe()
        assert not disk.rows
        missing = self.acknowledged - set(self.in_kafka.values()) - disk.beside - self.told_lost
        assert not missing


def device_of(row: Row) -> str:
    return row.datum.payload.split(b" ")[0].decode()


def rows_of(connection: sqlite3.Connection) -> dict[Identity, bytes]:
    found = connection.execute(
        "SELECT name, sequence, payload FROM reading JOIN lane ON lane.number = reading.lane ORDER BY lane, sequence"
    )
    return {(name, sequence): payload for name, sequence, payload in found}


async def until_true(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


FrontMachine.TestCase.settings = hypothesis_settings(
    max_examples=size(8, 200), stateful_step_count=size(25, 40), deadline=None
)
TestFrontAgainstLedgers = pytest.mark.campaign(seconds=300)(FrontMachine.TestCase)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert "buffer" not in [thread.name for thread in threading.enumerate()]


# -- examples, of which each was a fault ----------------------------------------------------------


async def test_a_resend_is_not_acknowledged_if_its_first_copy_is_refused(path: Path) -> None:
    async with opened(path, disk_after_ms=60_000) as buffer:
        await go_direct(buffer)
        first = append(buffer, [entry(b"1", sequence=1)])
        await buffer.answers()
        await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = ON").fetchone())
        again = append(buffer, [entry(b"1", sequence=1)])
        await buffer.answers()
    await asyncio.sleep(0)
    assert not first.result()
    assert not again.result()


async def test_a_resend_is_not_acknowledged_if_its_first_copy_is_given_up(path: Path) -> None:
    async with opened(path, disk_after_ms=60_000) as buffer:
        await go_direct(buffer)
        first = append(buffer, [entry(b"1", sequence=1)])
        await buffer.answers()
        again = append(buffer, [entry(b"1", sequence=1), entry(b"2", sequence=2)])
        other = append(buffer, [entry(b"3", sequence=3)])
        await buffer.answers()
        last = append(buffer, [entry(b"2", sequence=2)])
        for _ in range(2):
            await buffer.answers()
        await buffer.run(lambda _: buffer._commits._give_up(buffer._outgoing.front.rows()[:1]))
        assert [await each for each in (first, again, last)] == [False, False, False]
        assert not other.done()
        anew = append(buffer, [entry(b"1", sequence=1), entry(b"2", sequence=2)])
        for _ in range(2):
            await buffer.answers()
        rows = await buffers.rows(buffer)
        assert [row.datum.payload for row in rows] == [b"3", b"1", b"2"]
        await confirm(buffer, rows)
        assert [await each for each in (other, anew)] == [True, True]


async def test_a_reader_behind_rows_under_way_does_not_get_them_again(path: Path) -> None:
    async with opened(path, disk_after_ms=60_000) as buffer:
        await go_direct(buffer)
        append(buffer, [entry(b"1"), entry(b"2")])
        for _ in range(2):
            await buffer.answers()  # the second comes behind the numbers
        _, found = await buffer.read(Position(buffer.lane.number, -1), 10)
        assert len(found) == 2
        # Another partition has not answered yet.
        buffer.confirm(buffer.id, spans_of(found[1:]))
        assert (await buffer.read(Position(buffer.lane.number, found[1].sequence), 10))[1] == []
        assert (await buffer.read(Position(buffer.lane.number, -1), 10))[1] == found[:1]


async def test_a_file_found_damaged_while_rows_are_numbered_takes_them_with_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the former file must not be read as rows of the new one."""
    admit, admitted = BufferFile.admit, []

    def admit_some(file: BufferFile, appended: Append) -> list[Row]:
        admitted.append(appended)
        if len(admitted) == 2:
            raise schema.corruption("found just now")
        return admit(file, appended)

    async with opened(path, disk_after_ms=60_000) as buffer:
        await go_direct(buffer)
        former, lane = buffer.id, buffer.lane.number
        monkeypatch.setattr(BufferFile, "admit", admit_some)

        both_wait = threading.Event()
        busy = asyncio.create_task(buffer.run(lambda _: both_wait.wait(5)))
        await asyncio.sleep(0.01)
        outcomes = [append(buffer, [entry(b"%d" % number, device=f"{number}")]) for number in range(2)]
        both_wait.set()
        assert await busy
        assert await asyncio.wait_for(asyncio.gather(*outcomes), patience(10)) == [True, True]
        assert len(admitted) == 2
        buffer_id, found = await buffer.read(Position(lane, -1), 10)
        assert buffer_id == buffer.id != former
        assert [(row.lane, row.datum.payload) for row in found] == [(lane + 1, b"0"), (lane + 1, b"1")]


async def test_a_window_knows_in_the_end_what_was_in_the_front_when_it_was_written(path: Path) -> None:
    """Else a resend after a clean end is stored again, although nothing was lost of what was known."""
    async with opened(path, disk_after_ms=60_000) as buffer:
        await go_direct(buffer)
        outcome = append(buffer, [entry(b"1", sequence=1)])
        await buffer.answers()

        def write(file: BufferFile) -> None:
            file.write_front()
            file.save_windows()

        await buffer.transact(write)
        assert await outcome
        await confirm(buffer, await buffers.rows(buffer))
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"1", sequence=1)])
        assert buffer.counts["duplicate"] == 1
        assert buffer.state.rows == 0


async def go_direct(buffer: Buffer) -> None:
    await buffer.read(Position(buffer.lane.number, -1), 100)
    await buffer.go_direct(frozenset(["device-thermo"]), buffer.id)
