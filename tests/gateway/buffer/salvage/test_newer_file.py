"""A buffer file of a newer version is set aside. Once that version runs, its readings are taken over."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.buffer import schema, status
from gateway.buffer.buffer import Buffer
from gateway.buffer.file import AHEAD_MARK
from gateway.buffer.losses import UNCLEAN_END
from gateway.buffer.rows import Loss
from gateway.buffer.salvage import aside as buffer_aside
from gateway.buffer.salvage.progress import SALVAGE_PREFIX
from gateway.buffer.salvage.salvage import SalvagedBatch
from gateway.reading import Mark
from tests.gateway.buffer.salvage.test_buffer_salvage import fold
from tests.support.buffers import (
    append,
    changed,
    entry,
    input_of,
    losses,
    marks_of,
    opened,
    quarantined_of,
    rows,
    store,
)
from tests.support.waiting import patience

pytestmark = pytest.mark.slow

FORMER, NEWER = len(schema.MIGRATIONS), len(schema.MIGRATIONS) + 1
QOS2 = "a mark of an ingress"
UNIT = '[["unit","C"]]'


@contextmanager
def version(number: int) -> Iterator[None]:
    """Run as the version that has this schema."""
    migrations = (*schema.MIGRATIONS, ("CREATE TABLE of_a_newer_version (value INTEGER)",))
    with (
        mock.patch.object(schema, "MIGRATIONS", migrations[:number]),
        mock.patch.object(status, "MIGRATIONS", migrations[:number]),
    ):
        yield


async def taken_over(buffer: Buffer) -> list[SalvagedBatch]:
    """Wait until nothing is left to be taken over."""
    async with asyncio.timeout(patience(20)):
        while (await buffer.outstanding()).is_salvaging:
            await asyncio.sleep(0.01)
    return list(buffer.attachment.salvaged)


async def payloads(buffer: Buffer) -> list[bytes]:
    return [row.datum.payload for row in await rows(buffer)]


async def fill(path: Path) -> None:
    """Have a newer version store a reading, an input of the quarantine, a loss and a mark."""
    with version(NEWER):
        async with opened(path) as buffer:
            assert await store(buffer, [changed(entry(b"newer", "42", 7), properties=UNIT)])
            refused = input_of("refused", b"put aside", "42", "s", 5, series=1, boot_id="boot-0")
            refused.datum.properties = UNIT
            assert await append(buffer, [changed(entry(b"report"), quarantined=refused)], [Mark(QOS2, b"7")])
            await buffer.transact(lambda file: file.count_losses([Loss("42", "ring", "boot-1", 3, 1, 2)]))


async def test_what_a_newer_version_stored_waits_until_that_version_runs(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    for boot in ("boot-2", "boot-3"):
        async with opened(path, boot) as buffer:
            assert await store(buffer, [entry(boot.encode(), "43")])
            assert b"newer" not in await payloads(buffer)
            # Nobody may call a time complete while readings of it may wait.
            assert (await buffer.outstanding()).is_salvaging
    (aside,) = buffer_aside.waiting(path)
    assert schema.is_newer(aside)
    assert status.read_status(path).newer == (aside.name,) == status.read_status(path).set_aside
    with version(NEWER):
        async with opened(path, "boot-4") as buffer:
            (done,) = await taken_over(buffer)
            assert (done.progress.taken, done.missing) == (2, 0)
            assert sorted(await payloads(buffer)) == [b"boot-2", b"boot-3", b"newer", b"report"]
            set_aside = (await quarantined_of(buffer, range(9))).values()
            assert [(input_.datum.payload, input_.datum.properties) for input_ in set_aside] == [(b"put aside", UNIT)]
            kept = [row.datum.payload for row in await rows(buffer) if row.datum.properties == UNIT]
            assert kept == [b"newer"]
            assert [(loss.reason, loss.count) for loss in await losses(buffer)] == [("ring", 3)]
            assert not await marks_of(buffer, QOS2)
            assert await store(buffer, [entry(b"newer", "42", 7)])
            assert buffer.counts["duplicate"] == 1
        async with opened(path, "boot-5") as buffer:
            assert not await taken_over(buffer)
        assert status.read_status(path).newer == ()
    assert buffer_aside.waiting(path) == []


async def test_an_end_of_a_newer_version_that_lost_readings_is_reported_once_it_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    with version(NEWER), closing(schema.connect(path)) as connection:
        schema.keep_marks(connection, [Mark(AHEAD_MARK, b"boot-1")])
    async with opened(path, "boot-2") as buffer:
        assert await losses(buffer) == []
    with version(NEWER):
        async with opened(path, "boot-3") as buffer:
            await taken_over(buffer)
            assert {(loss.reason, loss.boot_id) for loss in await losses(buffer)} == {
                (UNCLEAN_END, "boot-1"),
                ("ring", "boot-1"),
            }


async def test_a_damaged_number_of_the_schema_makes_no_file_newer(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with opened(path) as buffer:
        assert await store(buffer, [entry(b"before", "42", 7)])
        await fold(buffer)
    with path.open("r+b") as file:
        file.seek(60)
        file.write(b"\1")
    async with opened(path, "boot-2") as buffer:
        (done,) = await taken_over(buffer)
        assert (done.progress.taken, done.missing) == (1, 0)
        assert await payloads(buffer) == [b"before"]


async def test_a_setting_aside_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    buffer_aside.begin(path)
    async with opened(path, "boot-2") as buffer:
        assert await store(buffer, [entry(b"former", "43")])
    with version(NEWER):
        async with opened(path, "boot-3") as buffer:
            await taken_over(buffer)
            assert sorted(await payloads(buffer)) == [b"former", b"newer", b"report"]


async def test_without_its_mark_it_still_waits(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    await fill(path)
    async with opened(path, "boot-2") as buffer:
        (mark,) = await marks_of(buffer, SALVAGE_PREFIX)
        assert await append(buffer, [], [Mark(mark, None)])
    async with opened(path, "boot-3") as buffer:
        assert (await buffer.outstanding()).is_salvaging
        assert await payloads(buffer) == []
    with version(NEWER):
        async with opened(path, "boot-4") as buffer:
            await taken_over(buffer)
            assert await payloads(buffer) == [b"newer", b"report"]


STEPS = st.lists(st.tuples(st.sampled_from([FORMER, NEWER]), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=20)
@given(STEPS)
def test_whatever_versions_follow_one_another_every_reading_is_there_once(steps: list[tuple[int, bool]]) -> None:
    """A step is a start of a version, which may find its file damaged. It ends whatever was taken over so far."""

    async def run(path: Path) -> None:
        stored = []
        for number, (schema_number, is_damaged) in enumerate(steps):
            with version(schema_number):
                async with opened(path, f"boot-{number}", damaged_files_max=len(steps)) as buffer:
                    if is_damaged:
                        # Only damage that comes again and again makes a new file wait.
                        buffer.attachment._anew_due_s = float("-inf")
                        await buffer.run(lambda _: buffer.attachment.replace(schema.corruption("the test says so")))
                    for count in range(3):
                        stored.append(b"%d.%d" % (number, count))
                        assert await store(buffer, [entry(stored[-1], "42", len(stored))])
        with version(NEWER):
            async with opened(path, "the last", damaged_files_max=len(steps)) as buffer:
                await taken_over(buffer)
                assert sorted(await payloads(buffer)) == sorted(stored)

    with TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder) / "buffer.db"))
