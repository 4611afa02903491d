"""Fair shares of the buffer: whatever one device sends, the others' readings are taken in, and kept."""

import asyncio
import random
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from gateway.buffer import dropping, shares
from gateway.buffer.buffer import Buffer
from gateway.buffer.room import ROW_BYTES_SQL, row_bytes
from gateway.buffer.rows import START, Entry, Origin, Position, Row, Series
from gateway.buffer.shares import kept_bytes, kept_days
from gateway.reading import Datum
from gateway.settings import BufferSettings
from gateway.user_properties import text_of
from tests.support.buffers import confirm, entry, entry_of, input_of, losses, opened, rows, store
from tests.support.restarted_buffer import RestartedBuffer
from tests.support.waiting import patience, until

BROKER = Origin(leaves_room=True, is_broker=True)
GUEST = Origin(leaves_room=True)
SECRET = Origin(has_secret=True)


async def send(buffer: Buffer, entries: list[Entry], origin: Origin = SECRET) -> bool:
    """As `store`, from somebody."""
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    buffer.append(entries, outcome.set_result, (), origin)
    return await asyncio.wait_for(outcome, patience(10))


async def flood(buffer: Buffer, device: str = "bad", payload_bytes: int = 60_000, origin: Origin = SECRET) -> int:
    """Send until it is refused; how many were taken."""
    count = 0
    while await send(buffer, [entry(bytes(payload_bytes), device)], origin):
        count += 1
    return count


async def all_rows(buffer: Buffer) -> list[Row]:
    """As `rows`, however many these are."""
    found: list[Row] = []
    after = START
    while more := await rows(buffer, after):
        found += more
        after = Position(more[-1].lane, more[-1].sequence)
    return found


async def held_by(buffer: Buffer) -> dict[str, int]:
    """What is counted of each device."""
    return await buffer.run(lambda file: {device: held.bytes for device, held in file.shares.held.items()})


async def counted_anew(buffer: Buffer) -> dict[str, int]:
    """The same from the file."""

    def count(file: shares.Shares) -> dict[str, int]:
        former = file.held.copy()
        file._begin()
        while file.is_counting:
            file._count_on()
        found = {device: held.bytes for device, held in file.held.items()}
        file.held = former
        return found

    return await buffer.run(lambda file: count(file.shares))


async def test_a_device_that_fills_the_buffer_is_refused_and_no_other(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        assert 30 <= await flood(buffer) <= 34, "half of it, for then nobody else has anything"
        assert not buffer.cannot_store
        for number in range(500):
            assert await send(buffer, [entry(b"%d" % number, "good")])
        assert not await send(buffer, [entry(bytes(60_000), "bad")])
        assert buffer.counts["share-refused"] == 2
        assert await losses(buffer) == [], "who is refused keeps its reading"
        await until(lambda: [each.readings for each in buffer.state.above_share] == [2])
        (told,) = buffer.state.above_share
        assert (told.device, told.readings) == ("bad", 2)
        assert told.bytes > 1_800_000
        # Once Kafka has some of it, it is taken in again.
        await confirm(buffer, (await all_rows(buffer))[:20])
        await asyncio.sleep(shares.HOLD_S)
        assert await send(buffer, [entry(bytes(60_000), "bad")])


async def test_only_a_refusal_for_its_share_is_told_as_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000, queue_bytes_max=100_000) as buffer:
        told: list[tuple[bool, bool]] = []

        def append(payload_bytes: int) -> None:
            entries = [entry(bytes(payload_bytes), "bad")]
            buffer.append(entries, lambda stored: told.append((stored, buffer.refuses_by_share)), origin=SECRET)

        await flood(buffer)
        append(60_000)
        await until(lambda: told == [(False, True)])
        # The disk hangs, and too much waits: for that, no device has to drop a reading.
        disk = threading.Event()
        hanging = asyncio.create_task(buffer.run(lambda _: disk.wait()))
        await asyncio.sleep(0)
        try:
            for _ in range(3):
                append(60_000)
            await until(lambda: told[1:])
            assert told[1:] == [(False, False)]
        finally:
            disk.set()
        await hanging
        await until(lambda: told[2:] == [(False, True)] * 2)


@pytest.mark.parametrize("when_full", ["refuse", "drop-oldest"])
async def test_the_thread_sleeps_where_nothing_comes(tmp_path: Path, when_full: str) -> None:
    """Although all is counted, and somebody was kept to its share."""
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000, when_full=when_full) as buffer:
        for _ in range(60):
            await send(buffer, [entry(bytes(60_000), "bad")])
        await until(lambda: buffer.state.above_share_devices == 1)
        before = time.process_time()
        await asyncio.sleep(0.4)
        assert time.process_time() - before < 0.2


async def test_who_was_kept_to_its_share_is_told_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing more comes."""
    monkeypatch.setattr(shares, "TOLD_S", 2.0)
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        await flood(buffer)
        await until(lambda: buffer.state.above_share_devices == 1)
        await until(lambda: buffer.state.above_share_devices == 0)
        assert not buffer.state.above_share


async def test_nobody_is_limited_while_less_than_half_is_used(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        for _ in range(28):
            assert await send(buffer, [entry(bytes(60_000))])
        assert not buffer.state.above_share
        assert buffer.counts["share-refused"] == 0


async def test_alike_devices_share_all_of_it(tmp_path: Path) -> None:
    """Each may hold half of what is free: of many, that leaves little free."""
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        for _ in range(100):
            if not all(await asyncio.gather(*(send(buffer, [entry(bytes(1_900), f"d{n}")]) for n in range(20)))):
                break
        assert buffer.state.bytes_used > 0.8 * 4_000_000


async def test_a_restart_forgets_nobody(path: Path) -> None:
    async with opened(path, bytes_max=4_000_000) as buffer:
        await flood(buffer)
        for number in range(100):
            assert await send(buffer, [entry(b"%d" % number, "good")])
        before = await held_by(buffer)
    for _ in range(3):
        async with opened(path, bytes_max=4_000_000) as buffer:
            assert not await send(buffer, [entry(bytes(60_000), "bad")])
            assert await send(buffer, [entry(b"more", "good")])
            assert (await held_by(buffer))["bad"] == before["bad"]


async def test_a_backlog_is_counted_in_slices_and_meanwhile_a_device_adds_little(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path, bytes_max=8_000_000) as buffer:
        for _ in range(8):
            assert await send(buffer, [entry(bytes(1_000), "bad") for _ in range(90)])
    monkeypatch.setattr(shares, "COUNTED_AT_ONCE", 10)
    monkeypatch.setattr(shares.Shares, "_count_on", lambda _: None)
    async with opened(path, bytes_max=8_000_000) as buffer:
        await flood(buffer)
        assert buffer.state.bytes_used < 8_000_000 // 2 + 8_000_000 // 64
        assert await send(buffer, [entry(b"1", "good")])
        monkeypatch.undo()
        monkeypatch.setattr(shares, "COUNTED_AT_ONCE", 10)
        await until(lambda: not buffer.attachment.file.shares.is_counting)
        assert await held_by(buffer) == await counted_anew(buffer)


async def test_a_broker_brings_the_others_readings_although_one_of_its_devices_has_too_much(tmp_path: Path) -> None:
    """That one's are lost, and counted: the broker would send nothing more without its acknowledgement."""
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        for _ in range(40):
            assert await send(buffer, [entry(bytes(60_000), "bad"), entry(b"1", "good")], BROKER)
        kept = [row.datum.payload for row in await all_rows(buffer)]
        assert kept.count(b"1") == 40
        (loss,) = await losses(buffer)
        assert (loss.device, loss.reason, loss.count) == ("bad", "above-share", 80 - len(kept))
        assert buffer.counts["above-share"] == loss.count > 0


async def test_made_up_names_leave_the_last_room_to_devices_with_secrets(path: Path) -> None:
    settings = BufferSettings(path=path, bytes_max=4_000_000, quarantine_rows_max=1, quarantine_bytes_max=100_000)
    async with opened(path, bytes_max=4_000_000) as buffer:
        for number in range(400):
            await send(buffer, [entry(bytes(30_000), f"made-up {number}")], GUEST)
        assert buffer.state.bytes_used < 3_100_000
        # Another one with a secret that floods leaves two thirds of the rest.
        assert await flood(buffer) > 1
        promised = kept_bytes(settings, 0) // 3 // row_bytes(20)
        assert promised > 500
        for number in range(0, promised, 50):
            assert await send(buffer, [entry(b"%020d" % (number + n), "good") for n in range(50)]), number


async def test_more_devices_than_are_counted_apart_count_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "DEVICES_MAX", 10)
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        for number in range(300):
            await send(buffer, [entry(bytes(9_000), f"d{number}")], GUEST)
        assert len(await held_by(buffer)) == 10
        assert not await send(buffer, [entry(bytes(9_000), "d1000")], GUEST)
        assert await send(buffer, [entry(b"1", "good")]), "one that has a secret is counted for itself"
        assert len(await held_by(buffer)) == 11


async def test_many_topics_count_as_what_they_take(tmp_path: Path) -> None:
    """A topic's names are stored once, and they are its device's as its readings are."""
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        for number in range(200):
            topics = [f"device/bad/{number}-{n}".ljust(200, "x") for n in range(10)]
            series = [Series(topic, "bad", "bad", topic, "sluice.reading", "text/plain", topic) for topic in topics]
            if not await send(buffer, [entry_of(each, b"1") for each in series]):
                break
        assert buffer.counts["share-refused"]
        assert buffer.state.bytes_used < 2_100_000
        assert await send(buffer, [entry(b"1", "good")])


async def test_what_a_refused_device_sent_behind_does_not_overtake(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000) as buffer:
        await flood(buffer)
        await confirm(buffer, (await all_rows(buffer))[:20])
        # There would be room for it. Its sender was not told yet that the one before was refused.
        assert not await send(buffer, [entry(b"behind", "bad")])
        assert await send(buffer, [entry(b"1", "good")])


@given(
    st.integers(0, 10_000) | st.sampled_from([900, 901, 1_955, 4_006, 4_007]),
    st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))),
)
def test_sql_counts_a_row_as_python_does(payload_bytes: int, properties: list[tuple[str, str]]) -> None:
    datum = Datum(received_us=1, payload=bytes(payload_bytes), properties=text_of(properties))
    with closing(sqlite3.connect(":memory:")) as file:
        (size,) = file.execute(
            f"SELECT {ROW_BYTES_SQL} FROM (SELECT ? AS payload, ? AS properties)", (datum.payload, datum.properties)
        ).fetchone()
    assert size == row_bytes(datum.size) >= payload_bytes + 90


@pytest.mark.parametrize("payload_bytes", [200, 1_100, 1_960, 2_010, 3_000, 4_006, 4_050, 60_000])
async def test_what_is_counted_is_what_it_takes_or_more(tmp_path: Path, payload_bytes: int) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=10_000_000) as buffer:
        before = buffer.state.bytes_used
        count = 1_000_000 // payload_bytes
        assert await store(buffer, [entry(bytes(payload_bytes)) for _ in range(count)])
        assert buffer.state.bytes_used - before <= count * row_bytes(payload_bytes) + 8_192


async def test_drop_oldest_drops_the_oldest_of_those_that_hold_too_much(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=4_000_000, when_full="drop-oldest") as buffer:
        for number in range(300):
            assert await send(buffer, [entry(b"%d" % number, "good")])
        for number in range(100):
            assert await send(buffer, [entry(b"%d" % number + bytes(60_000), "bad")])
        kept = [row.datum.payload for row in await all_rows(buffer)]
        assert kept[:300] == [b"%d" % number for number in range(300)]
        bad = [int(payload.strip(b"\0")) for payload in kept[300:]]
        assert bad == list(range(100 - len(bad), 100)), "its newest are kept"
        (loss,) = await losses(buffer)
        assert (loss.device, loss.reason, loss.count) == ("bad", "above-share", 100 - len(bad))
        assert not buffer.state.full


async def test_its_oldest_are_found_behind_many_of_others_after_a_restart_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("DROPPED_ROWS_MAX", "LOOKED_ROWS_MAX"):
        monkeypatch.setattr(dropping, constant, 100)
    monkeypatch.setattr(shares, "COUNTED_AT_ONCE", 50)
    sent = 0
    for _ in range(3):
        async with opened(path, bytes_max=4_000_000, when_full="drop-oldest") as buffer:
            held = buffer.attachment.file.shares
            # Behind the first, counting has begun: until it is over, a device adds very little.
            await buffer.answers()
            await buffer.answers()
            if not sent:
                assert await send(buffer, [entry(b"%d" % number, "good") for number in range(2_000)])
            for _ in range(40):
                await until(lambda held=held: not held.is_counting)  # type: ignore[misc]
                assert await send(buffer, [entry(b"%d" % sent + bytes(60_000), "bad")])
                sent += 1
    async with opened(path) as buffer:
        kept = [row.datum.payload for row in await all_rows(buffer)]
        assert kept[:2_000] == [b"%d" % number for number in range(2_000)]
        bad = [int(payload.strip(b"\0")) for payload in kept[2_000:]]
        assert bad == list(range(sent - len(bad), sent))


async def test_on_a_disk_without_room_those_that_hold_most_make_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "buffer.db", bytes_max=100_000_000, when_full="drop-oldest") as buffer:
        for number in range(300):
            assert await send(buffer, [entry(b"%d" % number, "good")])
        for _ in range(20):
            assert await send(buffer, [entry(bytes(60_000), "bad")])
        # Others take what the disk has, all at once.
        monkeypatch.setattr(type(buffer.attachment.file.room), "disk_free_bytes", lambda _: 0)
        for number in range(300, 600):
            assert await send(buffer, [entry(b"%d" % number, "good")])
        found = [loss for loss in await losses(buffer) if loss.count]
        assert {loss.device for loss in found} <= {"bad"}


def test_how_long_a_device_is_kept_follows_from_the_settings() -> None:
    assert 5 < kept_days(BufferSettings(), 100) < 10
    assert kept_days(BufferSettings(bytes_max=16_000_000_000), 100) > 100
    assert kept_days(BufferSettings(fair_from=1.0), 100) == 0


SETTINGS = {"bytes_max": 14_000_000, "quarantine_rows_max": 10, "quarantine_bytes_max": 100_000}


class NeighbourMachine(RestartedBuffer):
    """Whatever one device does, another one is taken in until it holds what the settings promise.

    With `drop-oldest` no reading of that one goes.
    """

    @initialize(when_full=st.sampled_from(["refuse", "drop-oldest"]))
    def begin(self, when_full: str) -> None:
        self.start(when_full=when_full, **SETTINGS)
        # There are no sessions here, and few losses.
        self.promised = kept_bytes(self.settings, 4_000_000)
        self.good: list[bytes] = []
        self.sent = 0

    @rule(payload_bytes=st.sampled_from([64_000, 5_000, 1_100, 950, 90]), megabytes=st.integers(1, 15))
    def attack(self, payload_bytes: int, megabytes: int) -> None:
        """As much as it can, until it is refused."""

        async def send_all() -> None:
            at_once = min(5_000, 1_500_000 // row_bytes(payload_bytes))
            for _ in range(megabytes):
                if not await send(self.buffer, [entry(bytes(payload_bytes), "bad") for _ in range(at_once)]):
                    break

        self.loop.run_until_complete(send_all())

    @rule(count=st.integers(1, 40))
    def attack_with_what_no_route_takes(self, count: int) -> None:
        async def send_all() -> None:
            for number in range(count):
                input_ = input_of("no-route", bytes(20_000), "bad", "kitchen", number)
                report = entry_of(entry(b"", "bad").series, bytes(27_000), quarantined=input_)
                await send(self.buffer, [report])

        self.loop.run_until_complete(send_all())

    @rule(count=st.integers(1, 60))
    def attack_with_topics(self, count: int) -> None:
        async def send_all() -> None:
            for number in range(count):
                subject = f"device/bad/{self.sent}-{number}".ljust(240, "x")
                series = Series(subject.replace("/", "-"), "bad", "bad", subject, "sluice.reading", "text/plain")
                await send(self.buffer, [entry_of(series, b"1")])

        self.loop.run_until_complete(send_all())

    @rule(count=st.integers(1, 4_000), payload_bytes=st.integers(10, 120), at_once=st.integers(1, 500))
    def good_sensor(self, count: int, payload_bytes: int, at_once: int) -> None:
        async def send_all() -> None:
            held = sum(row_bytes(len(payload)) for payload in self.good)
            left = min(count, (self.promised - held - 5_000) // row_bytes(payload_bytes))
            while left > 0:
                payloads = [b"%0*d" % (payload_bytes, self.sent + number) for number in range(min(left, at_once, 500))]
                self.sent += len(payloads)
                left -= max(len(payloads), count // 20)
                assert await send(self.buffer, [entry(payload, "good") for payload in payloads])
                self.good += payloads

        self.loop.run_until_complete(send_all())

    @rule(share=st.floats(0, 1), chooser=st.randoms(use_true_random=False))
    def kafka_takes_some(self, share: float, chooser: random.Random) -> None:
        async def take() -> None:
            found = await all_rows(self.buffer)
            first = chooser.randint(0, max(0, len(found) - 1))
            taken = found[first : first + round(share * 100)]
            if taken:
                await confirm(self.buffer, taken)
                gone = {row.datum.payload for row in taken}
                self.good = [payload for payload in self.good if payload not in gone]

        self.loop.run_until_complete(take())

    @rule()
    def a_lane_begins(self) -> None:
        self.loop.run_until_complete(self.buffer.begin_lane("why", lambda *_: entry(b"", "")))

    @invariant()
    def the_good_one_is_kept(self) -> None:
        if hasattr(self, "loop"):
            found = self.loop.run_until_complete(all_rows(self.buffer))
            of_good = [
                row.datum.payload
                for row in found
                if row.datum.payload.strip(b"\0").isdigit() and len(row.datum.payload) > 9
            ]
            assert of_good == self.good
            assert not self.buffer.state.full

    @invariant()
    def what_is_counted_is_true(self) -> None:
        if not hasattr(self, "loop"):
            return
        file = self.buffer.attachment.file
        self.loop.run_until_complete(until(lambda: not file.shares.is_counting))
        if file.shares.is_active:
            counted = self.loop.run_until_complete(held_by(self.buffer))
            assert counted == self.loop.run_until_complete(counted_anew(self.buffer))


NeighbourMachine.TestCase.settings = hypothesis_settings(max_examples=8, stateful_step_count=15)
TestAGoodSensorBesideABadOne = pytest.mark.slow(NeighbourMachine.TestCase)
