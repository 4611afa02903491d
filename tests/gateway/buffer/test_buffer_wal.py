"""A damaged WAL: what SQLite then leaves out without a word is told of; what a power cut leaves is not."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from gateway.buffer.sqlite_pages import FRAME_HEADER_BYTES, WAL_HEADER_BYTES
from gateway.buffer.wal import lacks_commits
from tests.support.buffers import entry, losses, opened, rows, store
from tests.support.waiting import patience

FRAME_BYTES = FRAME_HEADER_BYTES + 4096
COMMITS = 60


@pytest.fixture
async def cut_off(tmp_path: Path) -> Path:
    """A buffer as `kill -9` leaves it, with its last commits in the WAL."""
    path = tmp_path / "running" / "buffer.db"
    path.parent.mkdir()
    async with opened(path):
        pass  # the WAL is grown now
    async with opened(path) as buffer:
        for number in range(COMMITS):
            assert await store(buffer, [entry(b"%d" % number)])
        left = tmp_path / "buffer.db"
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{left}{suffix}")
    return left


def frames(path: Path) -> list[int]:
    """Where the commits of the WAL end: the places of their last frames."""
    log = path.with_name("buffer.db-wal").read_bytes()
    salts = log[16:24]
    places = range(WAL_HEADER_BYTES, len(log), FRAME_BYTES)
    return [at for at in places if log[at + 8 : at + 16] == salts and log[at + 4 : at + 8] != bytes(4)]


def flip(path: Path, place: int) -> None:
    log = path.with_name("buffer.db-wal")
    content = bytearray(log.read_bytes())
    content[place] ^= 0x10
    log.write_bytes(content)


async def test_a_small_commit_writes_three_pages_or_fewer(tmp_path: Path) -> None:
    """With Kafka away, these pages are what wears the card. Now and then a page is full, and a commit writes more."""
    path = tmp_path / "buffer.db"
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"0", sequence=0)])
        pages = []
        for number in range(1, COMMITS):
            before = written_frames(path)
            assert await store(buffer, [entry(b"%d" % number, sequence=number)])
            pages.append(written_frames(path) - before)
    assert sum(pages) / len(pages) <= 3
    assert sum(count > 3 for count in pages) <= len(pages) / 10


def written_frames(path: Path) -> int:
    """Pages in the WAL that were written since it was begun."""
    log = path.with_name("buffer.db-wal").read_bytes()
    salts = log[16:24]
    return sum(log[at + 8 : at + 16] == salts for at in range(WAL_HEADER_BYTES, len(log), FRAME_BYTES))


async def test_acknowledged_commits_behind_a_damaged_frame_are_told_of(cut_off: Path) -> None:
    flip(cut_off, frames(cut_off)[30] + FRAME_HEADER_BYTES + 2_000)
    async with opened(cut_off) as buffer:
        assert len(await rows(buffer)) < COMMITS
        (loss,) = await losses(buffer)
        assert (loss.reason, loss.count) == ("buffer-unreadable", 0)
    async with opened(cut_off) as buffer:
        assert not await losses(buffer), "it is told once"


@pytest.mark.parametrize("place", [0, 9, 16, 20, 25])
async def test_so_are_those_behind_a_damaged_header(cut_off: Path, place: int) -> None:
    flip(cut_off, place)
    async with opened(cut_off) as buffer:
        assert not await rows(buffer)
        assert [loss.reason for loss in await losses(buffer)] == ["buffer-unreadable"]


async def test_a_last_commit_that_is_not_whole_was_acknowledged_to_nobody(cut_off: Path) -> None:
    flip(cut_off, frames(cut_off)[-1] + FRAME_HEADER_BYTES)
    async with opened(cut_off) as buffer:
        assert len(await rows(buffer)) == COMMITS - 1
        assert not await losses(buffer)


async def test_a_wal_that_was_done_with_may_lose_its_header(cut_off: Path) -> None:
    """The power goes while it is begun anew."""
    async with opened(cut_off) as buffer:
        assert len(await rows(buffer)) == COMMITS
    flip(cut_off, 20)
    async with opened(cut_off) as buffer:
        assert len(await rows(buffer)) == COMMITS
        assert not await losses(buffer)


async def test_a_look_into_it_by_another_program_takes_it_away_from_nobody(cut_off: Path) -> None:
    async with opened(cut_off):
        pass
    flip(cut_off, 20)
    async with opened(cut_off) as buffer:
        # The last one to close a database deletes its WAL, unless it finds the other's lock.
        look = "import sqlite3, sys; of = sqlite3.connect(sys.argv[1]); of.execute('SELECT * FROM meta'); of.close()"
        looking = await asyncio.create_subprocess_exec(sys.executable, "-c", look, cut_off)
        assert await asyncio.wait_for(looking.wait(), patience(20)) == 0
        assert cut_off.with_name("buffer.db-wal").exists()
        assert await store(buffer, [entry(b"later")])
    async with opened(cut_off) as buffer:
        assert len(await rows(buffer)) == COMMITS + 1


def test_without_a_wal_nothing_is_missing(tmp_path: Path) -> None:
    with (tmp_path / "buffer.db").open("wb+") as database:
        assert not lacks_commits(tmp_path / "buffer.db", database.fileno(), 0)
        (tmp_path / "buffer.db-wal").touch()
        assert not lacks_commits(tmp_path / "buffer.db", database.fileno(), 0)
