"""A failing, read-only or damaged card under the running daemon: it keeps running, says so, and lies to nobody."""

import asyncio
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.kafka_broker import Broker
from demo.uplink import Uplink
from gateway.buffer import attachment
from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import START, Position
from gateway.buffer.salvage import aside as buffer_aside
from gateway.buffer.salvage import salvage
from gateway.reading import BufferFileError
from gateway.settings import BufferSettings
from tests.support.buffers import CLOCK, entry, opened, store
from tests.support.gateways import consume, daemon, header, write_config
from tests.support.kill_loop import KINDS, UNREACHABLE
from tests.support.sizes import SEED
from tests.support.syscall_replay import strace_refusal
from tests.support.waiting import patience
from tests.system.test_full_disk import Talk, acknowledged, answered, finished, log_of, sensors, talking

REFUSAL = strace_refusal()
needs_strace = pytest.mark.skipif(REFUSAL is not None, reason=REFUSAL or "")
WRITES = "pwrite64,ftruncate,fallocate"
SYNCS = "fsync,fdatasync"
PAGE_BYTES = 4096
SMALL: dict[str, Any] = {"bytes_max": 4_000_000, "free_bytes_min": 0}
Identity = tuple[str, str, int]
"""Buffer id, lane, sequence: a `ce_id`."""


@contextmanager
def failing(process: "subprocess.Popen[bytes]", calls: str, error: str, when: str = "1+") -> Iterator[None]:
    """Let these system calls of the running daemon fail: the `when`-th, as strace counts them."""
    command = ["strace", "-f", "-p", str(process.pid), "-o", "/dev/null", "-e", f"trace={calls}"]
    strace = subprocess.Popen([*command, "-e", f"inject={calls}:error={error}:when={when}"], stderr=subprocess.DEVNULL)
    try:
        tasks = Path(f"/proc/{process.pid}/task")
        while not all("TracerPid:\t0\n" not in (task / "status").read_text() for task in tasks.iterdir()):
            assert strace.poll() is None, "strace cannot attach"
            time.sleep(0.02)
        yield
    finally:
        strace.send_signal(signal.SIGINT)
        strace.wait(10)


def identities(path: Path) -> dict[Identity, tuple[str, int]]:
    """The readings of a buffer that nobody has open for writing, by their identity: device and number."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute(
            "SELECT coalesce(lane.buffer_id, meta.value), lane.name, reading.sequence, series.device, reading.payload"
            " FROM reading JOIN lane ON lane.number = reading.lane JOIN series ON series.number = reading.series"
            " JOIN meta ON meta.name = 'buffer_id' WHERE series.type = 'sluice.reading'"
            " ORDER BY reading.lane, reading.sequence"
        ).fetchall()
    return {
        (buffer, lane, sequence): (device, json.loads(payload)["n"])
        for buffer, lane, sequence, device, payload in found
    }


def stored(path: Path) -> dict[str, list[int]]:
    """Each device's readings in the buffer's order."""
    numbers: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for device, number in identities(path).values():
        numbers[device].append(number)
    return numbers


async def logged(config: Path, words: str) -> None:
    async with asyncio.timeout(patience(30)):
        while words not in log_of(config):
            await asyncio.sleep(0.05)


@needs_strace
@pytest.mark.parametrize(
    ("calls", "error"),
    [(WRITES, "EIO"), (SYNCS, "EIO"), (f"{WRITES},{SYNCS}", "EROFS")],
    ids=["failing", "not syncing", "read-only"],
)
async def test_a_card_that_refuses_costs_nothing_and_the_daemon_goes_on_when_it_takes_again(
    calls: str, error: str, tmp_path: Path, port: int
) -> None:
    config = write_config(tmp_path, UNREACHABLE, port, "faults")
    talks = [Talk(sensor) for sensor in sensors()]
    devices = [talk.sensor for talk in talks]
    with daemon(config, port) as process:
        async with talking(talks, port):
            await asyncio.sleep(0.5)
            with failing(process, calls, error):
                await logged(config, "buffer cannot be read or written")
                await asyncio.sleep(0.5)  # what was stored before is acknowledged
                while_failing = acknowledged(devices)
                await asyncio.gather(asyncio.sleep(1.8), answered(talks, 4))
                assert acknowledged(devices) == while_failing, "acknowledged what no disk has taken"
                on_disk = stored(tmp_path / "buffer.db")
                assert all(set(sensor.acknowledged) <= set(on_disk[sensor.device]) for sensor in devices)
            async with asyncio.timeout(patience(5)):
                while acknowledged(devices) == while_failing:
                    await asyncio.sleep(0.05)
            await finished(talks)
        assert max(talk.longest_silence_s for talk in talks) < patience(2)
    numbers = stored(tmp_path / "buffer.db")
    for sensor in devices:
        assert numbers[sensor.device] == sensor.acknowledged == list(range(sensor.next_number))
    assert "buffer cannot be read or written" in log_of(config)
    assert "buffer can be written again" in log_of(config)


@needs_strace
async def test_a_card_that_fails_now_and_then_costs_nothing(tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, UNREACHABLE, port, "faults")
    talks = [Talk(sensor) for sensor in sensors()]
    devices = [talk.sensor for talk in talks]
    with daemon(config, port) as process:
        async with talking(talks, port):
            await asyncio.sleep(0.3)
            for calls, when in ((WRITES, "20+37"), (SYNCS, "3+3")):
                with failing(process, calls, "EIO", when):
                    await asyncio.sleep(1.5)
            await finished(talks)
    numbers = stored(tmp_path / "buffer.db")
    for sensor in devices:
        assert numbers[sensor.device] == sensor.acknowledged == list(range(sensor.next_number))
    assert log_of(config).count("buffer can be written again") >= 1


def damage(path: Path, pages: Iterable[int]) -> None:
    """Overwrite pages of the file with what a dying card gives back. Pages are counted from 1, as SQLite does."""
    chance = random.Random(1)  # noqa: S311 - repeatable is the point
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE_BYTES)
            file.write(chance.randbytes(PAGE_BYTES))


def checkpointed(path: Path) -> None:
    """Let everything be in the file itself; nobody else has it open."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def reading_pages(path: Path) -> list[int]:
    """The pages that readings stand on, in the readings' order."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute(
            "SELECT pageno FROM dbstat WHERE name = 'reading' AND pagetype = 'leaf' ORDER BY path"
        )
        return [page for (page,) in found]


async def fill(config: Path, port: int, talks: list[Talk], count: int, until: str = "") -> None:
    """Let a daemon store so many readings, log these words, and stop."""
    devices = [talk.sensor for talk in talks]
    with daemon(config, port):
        async with talking(talks, port):
            async with asyncio.timeout(patience(30)):
                before = acknowledged(devices)
                while acknowledged(devices) < before + count:
                    await asyncio.sleep(0.05)
            await finished(talks)
        await logged(config, until)


def pages_of(path: Path) -> int:
    return path.stat().st_size // PAGE_BYTES


@pytest.mark.parametrize("where", ["first page", "whole file", "WAL and first page"])
async def test_a_file_found_corrupt_at_the_start_is_set_aside_and_the_daemon_goes_on(
    where: str, tmp_path: Path, port: int
) -> None:
    config = write_config(tmp_path, UNREACHABLE, port, "faults")
    path = tmp_path / "buffer.db"
    talks = [Talk(sensor) for sensor in sensors()]
    await fill(config, port, talks, 500)
    before = identities(path)
    if where == "WAL and first page":
        damage(path.with_name("buffer.db-wal"), range(1, 5))
    else:
        checkpointed(path)
    damage(path, range(1, pages_of(path) + 1) if where == "whole file" else [1])
    for talk in talks:
        talk.sensor.acknowledged.clear()
    await fill(config, port, talks, 500)
    (aside,) = (found for found in tmp_path.glob("buffer.db.corrupt-*") if not found.name.endswith(("-wal", "-shm")))
    assert pages_of(aside) > 0
    assert "buffer is corrupt: set aside" in log_of(config)
    after = identities(path)
    assert all(
        (sensor.device, number) in after.values()
        for sensor in (talk.sensor for talk in talks)
        for number in sensor.acknowledged
    )
    assert not [identity for identity, reading in after.items() if before.get(identity, reading) != reading]


async def test_what_can_be_read_of_a_damaged_file_is_taken_over_with_its_identity(tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, UNREACHABLE, port, "faults")
    path = tmp_path / "buffer.db"
    talks = [Talk(sensor) for sensor in sensors()]
    await fill(config, port, talks, 3_000)
    before = identities(path)
    checkpointed(path)
    # The newest pages: opening the file looks at both ends of each lane. The very last may hold a heartbeat alone.
    damage(path, reading_pages(path)[-2:])
    await fill(config, port, talks, 500, until="a damaged buffer was salvaged")
    after = identities(path)
    lost = set(before) - set(after)
    assert 0 < len(lost) < 40, "two pages hold a few readings"
    assert all(after[identity] == reading for identity, reading in before.items() if identity in after)
    assert len(set(after.values())) == len(after), "a reading stands twice"


async def test_a_restored_copy_gives_no_identity_to_another_reading(tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, UNREACHABLE, port, "faults")
    path = tmp_path / "buffer.db"
    talks = [Talk(sensor) for sensor in sensors()]
    await fill(config, port, talks, 300)
    wal = path.with_name("buffer.db-wal")
    copy = path.read_bytes(), wal.read_bytes() if wal.exists() else b""
    seen: dict[Identity, tuple[str, int]] = {}
    for _ in range(3):
        await fill(config, port, talks, 300)
        for identity, reading in identities(path).items():
            assert seen.setdefault(identity, reading) == reading
        path.write_bytes(copy[0])
        wal.write_bytes(copy[1])
        path.with_name("buffer.db-shm").unlink(missing_ok=True)
    assert len(set(seen.values())) > 900


@pytest.fixture(scope="module")
def three_lanes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A buffer of 1,500 readings in three lanes, all in the file itself."""
    path = tmp_path_factory.mktemp("three-lanes") / "buffer.db"

    async def build() -> None:
        for lane in range(3):
            async with opened(path, f"boot-{lane}", **SMALL) as buffer:
                readings = [entry(b"%d-%d" % (lane, number) + bytes(60), sequence=number) for number in range(500)]
                assert await store(buffer, readings)

    asyncio.run(build())
    checkpointed(path)
    return path


def payloads(path: Path) -> dict[Identity, bytes]:
    """Payloads in a buffer file by identity, whatever the state of the file."""
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute(
            "SELECT coalesce(lane.buffer_id, (SELECT value FROM meta)), lane.name, sequence, payload"
            " FROM reading JOIN lane ON lane.number = reading.lane"
        ).fetchall()
    return {(buffer, lane, sequence): payload for buffer, lane, sequence, payload in found}


def counted(path: Path) -> list[tuple[str, int]]:
    """Losses that are counted, by reason."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT reason, count FROM loss").fetchall()


async def everything(buffer: Buffer) -> None:
    """Read all rows as the forwarder does: from the beginning, until there is no more, and again after an error."""
    async with asyncio.timeout(patience(10)):
        while True:
            after = START
            try:
                while found := (await buffer.read(after, 1_000))[1]:
                    after = Position(found[-1].lane, found[-1].sequence)
            except BufferFileError:
                await asyncio.sleep(0.01)
            else:
                return


@pytest.mark.parametrize("damaged_by", ["noise", "zeros", "another page"])
async def test_with_any_page_damaged_the_buffer_goes_on_and_gives_no_identity_twice(
    damaged_by: str, three_lanes: Path, tmp_path: Path
) -> None:
    before = payloads(three_lanes)
    content = three_lanes.read_bytes()
    with closing(sqlite3.connect(three_lanes)) as connection:
        pages = connection.execute("SELECT pageno, name, pagetype FROM dbstat ORDER BY pageno").fetchall()
    others = [content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] for page, *_ in pages]
    chance = random.Random(SEED)  # noqa: S311 - repeatable is the point
    # Each table's pages once, and of the readings' many a few.
    readings = [page for page in pages if page[1:] == ("reading", "leaf")]
    damaged = [page for page in pages if page not in readings] + chance.sample(readings, 10)
    for page, table, kind in damaged:
        path = tmp_path / f"{page}-{table}" / "buffer.db"
        path.parent.mkdir(exist_ok=True)
        new = {"noise": chance.randbytes(PAGE_BYTES), "zeros": bytes(PAGE_BYTES), "another page": chance.choice(others)}
        start = (page - 1) * PAGE_BYTES
        path.write_bytes(content[:start] + new[damaged_by] + content[start + PAGE_BYTES :])
        what = f"page {page}, a {kind} of {table}, seed {SEED}"
        async with opened(path, "boot-9", **SMALL) as buffer:
            await everything(buffer)
            assert await store(buffer, [entry(b"new-%d" % number, device="new") for number in range(10)]), what
            for thread in buffer.attachment._salvages:
                await asyncio.to_thread(thread.join, 10)
            await everything(buffer)
            assert buffer.state.failing is None, what
        after = payloads(path)
        assert not [identity for identity in before if after.get(identity, before[identity]) != before[identity]], what
        assert sum(payload.startswith(b"new") for payload in after.values()) == 10, what
        missing = len(set(before) - set(after))
        if damaged_by != "another page":
            # Another page of the same table in its place looks sound.
            assert not missing or counted(path), f"{missing} readings lost and not told of: {what}"
        if kind == "leaf" and table == "reading" and damaged_by != "another page":
            assert missing < 50, f"{missing} lost, more than stood on {what}"


@pytest.mark.parametrize("of", ["lane", "series", "sqlite_sequence", "usage", "reading"])
@pytest.mark.parametrize("to", ["lane", "series", "sqlite_sequence", "quarantine"])
async def test_a_sound_page_of_another_table_is_damage(three_lanes: Path, tmp_path: Path, to: str, of: str) -> None:
    """All of these have numbered rows, so SQLite sees nothing wrong."""
    path, content = tmp_path / "buffer.db", three_lanes.read_bytes()
    with closing(sqlite3.connect(three_lanes)) as connection:
        found = connection.execute("SELECT name, pageno FROM dbstat WHERE pagetype = 'leaf' ORDER BY pageno DESC")
        first = dict(found.fetchall())
    start, other = ((first[table] - 1) * PAGE_BYTES for table in (to, of))
    path.write_bytes(content[:start] + content[other : other + PAGE_BYTES] + content[start + PAGE_BYTES :])
    async with opened(path, "boot-9", **SMALL) as buffer:
        await everything(buffer)
        assert await store(buffer, [entry(b"new", device="new")])
        for thread in buffer.attachment._salvages:
            await asyncio.to_thread(thread.join, 10)
        await everything(buffer)
        assert buffer.state.failing is None
    assert payloads(three_lanes).items() <= payloads(path).items()


class Interrupted(BaseException):
    """The daemon is killed here."""


@pytest.mark.parametrize("where", ["read_beside", "BufferFile", "adopt_beside", "finish"])
async def test_a_kill_while_a_file_is_set_aside_costs_nothing_of_what_can_be_read(
    where: str, three_lanes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = payloads(three_lanes)
    path = tmp_path / "buffer.db"
    shutil.copy(three_lanes, path)
    damage(path, reading_pages(path)[-1:])
    owner = {"read_beside": salvage, "finish": buffer_aside}.get(where, attachment)
    original = getattr(owner, where)
    calls = 0

    def interrupt(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        # The damaged file is opened as ever; it is the new one whose opening is interrupted.
        if where == "BufferFile" and calls == 1:
            return original(*arguments, **named)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupt)
        buffer = Buffer(BufferSettings(path=path, **SMALL), "boot-8", lambda: CLOCK)
        with pytest.raises(Interrupted):
            buffer.open()
    if where in {"adopt_beside", "finish"}:
        buffer.attachment.file.abandon()
    async with opened(path, "boot-9", **SMALL) as buffer:
        for thread in buffer.attachment._salvages:
            await asyncio.to_thread(thread.join, 10)
    after = payloads(path)
    assert len(set(before) & set(after)) > 1_400


@pytest.mark.kafka
async def test_a_page_that_goes_bad_under_the_running_daemon_costs_what_stood_on_it(
    kafka: Broker, tmp_path: Path, port: int
) -> None:
    path = tmp_path / "buffer.db"
    talks = [Talk(sensor) for sensor in sensors()]
    devices = [talk.sensor for talk in talks]
    async with Uplink() as uplink:
        config = write_config(tmp_path, f"127.0.0.1:{uplink.port}", port, "damaged")
        with daemon(config, port):
            async with talking(talks, port):
                # More than SQLite keeps in memory, and the daemon beside it.
                async with asyncio.timeout(patience(60)):
                    while acknowledged(devices) < 8_000:
                        await asyncio.sleep(0.1)
                pages = reading_pages(path)
                damage(path, pages[len(pages) // 3 :][:5])
                uplink.open(int(kafka.bootstrap.rpartition(":")[2]))
                await logged(config, "buffer is corrupt: set aside")
                before = acknowledged(devices)
                async with asyncio.timeout(patience(10)):
                    while acknowledged(devices) < before + 100:
                        await asyncio.sleep(0.05)
                await logged(config, "a damaged buffer was salvaged")
                await finished(talks)
            async with asyncio.timeout(patience(60)):
                while identities(path):
                    await asyncio.sleep(0.3)
            await asyncio.sleep(1.5)
    records = await consume(kafka.bootstrap, *(f"damaged-{kind}" for kind in KINDS))
    given: dict[str, tuple[str, int]] = {}
    for record in records:
        reading = record.key.decode(), int(json.loads(record.value)["n"])
        assert given.setdefault(header(record, "ce_id"), reading) == reading, "one identity, two readings"
    assert max(Counter(given.values()).values()) == 1, "a reading under two identities"
    missing = [
        (sensor.device, number)
        for sensor in devices
        for number in sensor.acknowledged
        if (sensor.device, number) not in given.values()
    ]
    assert 0 < len(missing) < 100
    events = await consume(kafka.bootstrap, "damaged-events")
    losses = [json.loads(event.value) for event in events if header(event, "ce_type") == "sluice.gateway.loss"]
    assert sum(loss["count"] for loss in losses if loss["reason"] == "buffer-damaged") >= len(missing)
