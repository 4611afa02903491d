"""A damaged buffer file: what can be read of it is taken over with its identity, and what cannot is counted."""

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from gateway import buffer_salvage
from gateway.buffer import Buffer
from gateway.buffer_rows import START, Loss, Row
from gateway.reading import Mark
from tests.buffers import append, entry, opened, store

ROWS = 3_000
PAGE_BYTES = 4096


async def fill(path: Path) -> None:
    """A file whose rows say their sequence, with its WAL folded in."""
    async with opened(path) as buffer:
        for start in range(0, ROWS, 500):
            batch = [entry(b"%0200d" % number, "42", number) for number in range(start, start + 500)]
            assert await store(buffer, batch)
        await buffer._call(lambda: buffer._file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())


def damage(path: Path, share: float) -> int:
    """Overwrite that share of the pages that hold readings and nothing else; how many."""
    pages = path.read_bytes()
    leaves = [
        start
        for start in range(0, len(pages), PAGE_BYTES)
        if pages[start] == 0x0A and pages[start : start + PAGE_BYTES].count(b"0000000000000000") > 10
    ]
    chosen = leaves[2 : 2 + max(1, int(len(leaves) * share))]
    with path.open("r+b") as file:
        for start in chosen:
            file.seek(start)
            file.write(b"\xff" * PAGE_BYTES)
    return len(chosen)


async def salvaged(buffer: Buffer) -> buffer_salvage.SalvagedBatch:
    async with asyncio.timeout(20):
        while not buffer.salvaged:
            await asyncio.sleep(0.01)
    return buffer.salvaged.popleft()


async def identities(buffer: Buffer) -> dict[tuple[str, str, int], bytes]:
    """Every waiting reading by what its `ce_id` is made of."""
    found: dict[tuple[str, str, int], bytes] = {}
    after = START
    while rows := (await buffer.read(after, 1_000))[1]:
        for row in rows:
            lane = await buffer.lane_of(row.lane)
            identity = (lane.buffer_id, lane.name, row.sequence)
            assert identity not in found
            found[identity] = row.payload
        after = after._replace(lane=rows[-1].lane, sequence=rows[-1].sequence)
    return found


async def losses(buffer: Buffer) -> list[Loss]:
    found: list[Loss] = []

    def report(loss: Loss) -> object:
        found.append(loss)
        return entry(b"report")

    await buffer.report_losses(report)  # type: ignore[arg-type]
    return found


async def test_what_a_start_finds_damaged_is_salvaged_with_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    async with opened(path) as buffer:
        before = await identities(buffer)
    pages = damage(path, 0.2)
    async with opened(path) as buffer:
        # A read finds it: the file is set aside, and readings are taken in all the while.
        with pytest.raises(Exception, match="buffer"):
            await identities(buffer)
        assert await store(buffer, [entry(b"after", "43", 0)])
        done = await salvaged(buffer)
        after = await identities(buffer)
        assert done.missing is not None
        assert 0 < done.missing <= pages * 20
        assert after.pop((buffer.id, buffer.lane.name, 0)) == b"after"
        assert after.items() <= before.items()
        assert len(after) == len(before) - done.missing == done.progress.taken
        (lost,) = await losses(buffer)
        assert (lost.reason, lost.count) == ("buffer-damaged", done.missing)
        # The sensor sends again what it was told is safe: its window was taken over too.
        assert await store(buffer, [entry(b"%0200d" % (ROWS - 1), "42", ROWS - 1)])
        assert buffer.counts["duplicate"] == 1


@pytest.mark.parametrize("table", ["meta", "lane", "series", "mark", "device_run", "boot"])
async def test_one_damaged_small_page_costs_no_reading(tmp_path: Path, table: str) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    async with opened(path) as buffer:
        before = await identities(buffer)
        assert await append(buffer, [], [Mark("mqtt/x", b"1")])
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    file.close()
    with path.open("r+b") as damaged:
        damaged.seek((page - 1) * PAGE_BYTES)
        damaged.write(b"\xff" * PAGE_BYTES)
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"after", "43", 0)])
        done = await salvaged(buffer)
        assert (done.progress.taken, done.missing) == (ROWS, 0)
        after = await identities(buffer)
        assert before.items() <= after.items()


async def test_a_page_of_another_table_is_damage_too(tmp_path: Path) -> None:
    """A misdirected write: the page is sound, and its rows are none."""
    path = tmp_path / "buffer.db"
    await fill(path)
    pages = path.read_bytes()
    with sqlite3.connect(path) as file:
        (other,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = 'boot'").fetchone()
    file.close()
    leaf = next(
        start
        for start in range(40 * PAGE_BYTES, len(pages), PAGE_BYTES)
        if pages[start] == 0x0A and pages[start : start + PAGE_BYTES].count(b"0000000000000000") > 10
    )
    with path.open("r+b") as damaged:
        damaged.seek(leaf)
        damaged.write(pages[(other - 1) * PAGE_BYTES : other * PAGE_BYTES])
    async with opened(path) as buffer:
        with pytest.raises(Exception, match="buffer"):
            await identities(buffer)
        done = await salvaged(buffer)
        assert done.missing is not None
        assert 0 < done.missing < 30
        assert len(await identities(buffer)) == ROWS - done.missing


async def test_a_file_whose_beginning_is_gone_costs_the_file_and_not_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * PAGE_BYTES)
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"after")])
        done = await salvaged(buffer)
        assert (done.progress.taken, done.missing) == (0, None)
        assert list((await identities(buffer)).values()) == [b"after"]
        # How much is not known; that something is, is told.
        assert [(loss.reason, loss.count) for loss in await losses(buffer)] == [("buffer-unreadable", 0)]
    (aside,) = tmp_path.glob("buffer.db.corrupt-*[0-9]")
    assert aside.stat().st_size > ROWS * 200


async def test_a_salvage_that_was_interrupted_goes_on_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    damage(path, 0.1)
    monkeypatch.setattr(buffer_salvage, "CHUNK_ROWS", 100)
    adopt_now = Buffer._adopt_now
    taken: list[buffer_salvage.SalvagedBatch] = []

    def only_five(self: Buffer, batch: buffer_salvage.SalvagedBatch) -> bool:
        if len(taken) == 5:
            return False
        taken.append(batch)
        return adopt_now(self, batch)

    monkeypatch.setattr(Buffer, "_adopt_now", only_five)
    async with opened(path) as buffer:
        with pytest.raises(Exception, match="buffer"):
            await identities(buffer)
        async with asyncio.timeout(20):
            while len(taken) < 5:
                await asyncio.sleep(0.01)
    monkeypatch.setattr(Buffer, "_adopt_now", adopt_now)
    async with opened(path) as buffer:
        done = await salvaged(buffer)
        assert done.progress.taken == len(await identities(buffer)) > 2_000
    async with opened(path) as buffer:
        assert not buffer.salvaged
        assert len(await identities(buffer)) == done.progress.taken


async def test_a_restored_copy_never_gives_an_identity_again(tmp_path: Path) -> None:
    path, copy = tmp_path / "buffer.db", tmp_path / "copy.db"
    async with opened(path) as buffer:
        await store(buffer, [entry(b"old")])
    shutil.copy(path, copy)
    shutil.copy(f"{path}-wal", f"{copy}-wal")
    found: list[dict[tuple[str, str, int], bytes]] = []
    for number, file in enumerate((path, copy)):
        async with opened(file) as buffer:
            await store(buffer, [entry(b"new %d" % number)])
            found.append(await identities(buffer))
    shared = found[0].keys() & found[1].keys()
    assert [found[0][identity] for identity in shared] == [b"old"]
    assert len(found[0] | found[1]) == 3


def test_damage_is_jumped_over_in_few_steps(tmp_path: Path) -> None:
    """Rows on both sides of a damaged stretch are read, whatever its length."""
    path = tmp_path / "buffer.db"
    asyncio.run(fill(path))
    damage(path, 0.5)
    connection = sqlite3.connect(path)
    found: list[Row] = []
    for chunk in buffer_salvage.salvaged_rows(connection, 1, -1):
        found += chunk
    connection.close()
    sequences = [row.sequence for row in found]
    assert sequences == sorted(set(sequences))
    assert sequences[0] == 0
    assert sequences[-1] == ROWS - 1
    assert ROWS * 0.3 < len(sequences) < ROWS * 0.7
