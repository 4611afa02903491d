"""The boots in the buffer file: what is known of their clocks outlives restarts, damage and former versions."""

import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from gateway.buffer import schema
from gateway.buffer.boots import BOOTS_MAX, COLUMNS, SEEN_SAVE_S, BootTable, Correction, adopt_boots, correction_body
from gateway.buffer.file import BufferFile
from gateway.buffer.rows import Entry
from gateway.buffer.schema import corruption
from gateway.clock.floor import FIRST_RELEASED_US, RELEASED_US
from gateway.clock.gateway_clock import BootClock, Look
from gateway.reading import BufferFileError
from gateway.settings import BufferSettings
from tests.support.buffers import entry, failure, opened, rows, store
from tests.support.dead_disk import dead_disk
from tests.support.waiting import until

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
PPM = 100.0
UNKNOWN = BootClock("unknown", PPM)
NOON_US = RELEASED_US + 12 * HOUR_US


def synced(zero_us: int, at_us: int = HOUR_US, error_us: int = 1_000) -> BootClock:
    """A clock that was learnt at one moment of a boot that began at `zero_us` (wall time)."""
    return UNKNOWN.looked(Look(at_us, zero_us, error_us))


@contextmanager
def booted(path: Path, boot: str, clock: BootClock, seen_us: int = HOUR_US) -> Iterator[BufferFile]:
    """One start of the gateway, at that CLOCK_BOOTTIME of a boot."""
    with (
        mock.patch("gateway.buffer.file.boottime_us", return_value=seen_us),
        closing(BufferFile(BufferSettings(path=path), boot, lambda: clock, Counter())) as file,
    ):
        yield file


def report(correction: Correction) -> Entry:
    return entry(repr(correction_body(correction)).encode())


def corrections(file: BufferFile) -> list[Correction]:
    with file.transaction():
        return file.report_corrections(report)


def owe(file: BufferFile, boot: str) -> None:
    with file.transaction():
        file.boots.owe(boot)


# -- what was learnt ------------------------------------------------------------------------------


async def test_a_restart_within_a_boot_goes_on_with_what_was_known_of_its_clock(path: Path) -> None:
    clock = synced(NOON_US).looked(Look(3 * HOUR_US, NOON_US + 40_000, 1_000))
    with booted(path, "boot-1", clock):
        pass
    told: list[BootClock] = []

    def ask() -> BootClock:
        assert told, "what is kept is told before anything else is written in its place"
        return told[0]

    with closing(BufferFile(BufferSettings(path=path), "boot-1", ask, Counter(), resume=told.append)) as file:
        assert told[0].says_as(clock)
        assert file.boots.clock("boot-1").says_as(clock)


def test_what_is_learnt_is_kept_with_the_rows_of_the_same_commit_or_not_at_all(path: Path) -> None:
    clock = UNKNOWN
    with closing(BufferFile(BufferSettings(path=path), "boot-1", lambda: clock, Counter())) as file:
        clock = synced(NOON_US)
        with pytest.raises(sqlite3.OperationalError), file.transaction():
            file.connection.execute("INSERT INTO nowhere VALUES (1)")
        assert not BootTable(file.connection, "boot-1").clock("boot-1").known
        with file.transaction():
            file.insert([entry()])
        assert BootTable(file.connection, "boot-1").clock("boot-1").synced


def test_the_clock_is_not_written_each_second_and_holds_for_rows_that_come_later(tmp_path: Path) -> None:
    clock = synced(NOON_US)
    with booted(tmp_path / "buffer.db", "boot-1", clock) as file:
        table = file.boots
        with file.transaction():
            now_s = time.monotonic() + 1_000
            table.save(clock, HOUR_US, now_s)
            before = file.connection.total_changes
            later = clock.looked(Look(HOUR_US + SECOND_US, NOON_US, 1_000))
            table.save(later, HOUR_US + SECOND_US, now_s + 1)
            table.save(later, HOUR_US + 9 * SECOND_US, now_s + SEEN_SAVE_S - 0.1)
            assert file.connection.total_changes == before
            table.save(later, HOUR_US + 10 * SECOND_US, now_s + SEEN_SAVE_S)
            assert file.connection.total_changes == before + 1
        kept = BootTable(file.connection, "boot-1").clock("boot-1")
        day_us = 25 * HOUR_US
        assert (kept.error_us(day_us) or 0) >= 1_000 + 24 * HOUR_US * PPM / 1e6


def test_a_clock_that_cannot_be_read_has_the_bound_that_was_written_beside_it(path: Path) -> None:
    with booted(path, "boot-1", synced(NOON_US)) as file:
        with file.transaction():
            file.connection.execute("UPDATE boot SET clock = x'00'")
        table = BootTable(file.connection, "boot-1")
        assert table.clock("boot-1").around(0).offset_us == NOON_US
        with pytest.raises(BufferFileError):
            table.clock("boot-2")


# -- boots that were never synced -----------------------------------------------------------------


def test_boots_that_were_never_synced_lie_between_those_that_were(path: Path) -> None:
    # Up for an hour, twice for half an hour with nobody to ask, and synced three hours after the first was seen last.
    with booted(path, "a", synced(NOON_US)):
        pass
    for boot in ("b", "c"):
        with booted(path, boot, UNKNOWN, HOUR_US // 2) as file:
            assert not file.boots.clock(boot).known
    with booted(path, "d", synced(NOON_US + 4 * HOUR_US, at_us=SECOND_US), SECOND_US) as file:
        b, c = file.boots.clock("b"), file.boots.clock("c")
        assert (b.quality, c.quality) == ("bounded", "bounded")
        assert c.at(0) == b.at(HOUR_US // 2)
        # Two hours of the three are anybody's.
        for clock, earliest_us in ((b, NOON_US + HOUR_US), (c, NOON_US + HOUR_US * 3 // 2)):
            error_us = clock.error_us(0) or 0
            assert clock.at(0) - error_us <= earliest_us
            assert clock.at(0) + error_us >= earliest_us + 2 * HOUR_US
            assert error_us <= HOUR_US + 2 * SECOND_US
    # It is known for good, also when those before it are forgotten.
    with booted(path, "d", synced(NOON_US + 4 * HOUR_US, at_us=SECOND_US), 2 * SECOND_US) as file:
        assert file.boots.clock("b").says_as(b)


def test_where_nothing_is_known_before_the_first_release_is(path: Path) -> None:
    with booted(path, "a", UNKNOWN, HOUR_US):
        pass
    with booted(path, "b", synced(NOON_US)) as file:
        clock = file.boots.clock("a")
        error_us = clock.error_us(0) or 0
        # It may have been of any version, be this one as young as it is.
        assert clock.at(0) - error_us <= FIRST_RELEASED_US <= RELEASED_US
        assert clock.at(HOUR_US) + error_us >= NOON_US


async def test_how_far_a_boot_came_is_told_by_its_rows_too(path: Path) -> None:
    """It is written down now and then only: what came in behind that must not stand before the next boot's rows."""
    with booted(path, "a", UNKNOWN, SECOND_US) as file, file.transaction():
        file.insert([entry(received_us=9 * SECOND_US)])
    with booted(path, "b", UNKNOWN, SECOND_US):
        pass
    with booted(path, "c", synced(NOON_US)) as file:
        assert file.boots.clock("a").at(9 * SECOND_US) <= file.boots.clock("b").at(0)


def test_boots_that_tell_nothing_any_more_are_forgotten_and_others_kept(path: Path) -> None:
    for number, boot in enumerate("abc"):
        with booted(path, boot, synced(NOON_US + number * 2 * HOUR_US)):
            pass
    with booted(path, "d", UNKNOWN) as file:
        owe(file, "d")
    with booted(path, "e", UNKNOWN) as file:
        # Their rows are in Kafka, and their lanes reported.
        file.connection.execute("DELETE FROM lane")
    with booted(path, "f", UNKNOWN) as file:
        boots = {boot for (boot,) in file.connection.execute("SELECT boot_id FROM boot")}
    # `c` tells when `e` began at the earliest, and `d` is still to be corrected.
    assert boots == {"c", "d", "e", "f"}


def test_a_box_that_is_never_synced_keeps_no_more_boots_than_it_may(tmp_path: Path) -> None:
    with booted(tmp_path / "buffer.db", "last", UNKNOWN) as file:
        with file.transaction():
            file.connection.executemany(
                "INSERT INTO boot (boot_id, offset_us, ordinal) VALUES (?, 0, ?)",
                [(f"boot-{number}", number - 5_000) for number in range(BOOTS_MAX + 100)],
            )
        file.boots.forget()
        with file.transaction():
            file.boots.forget_unneeded()
        (left,) = file.connection.execute("SELECT count(*) FROM boot").fetchone()
        assert left <= BOOTS_MAX + 1


def test_boots_of_a_former_version_are_bounded_by_this_one_after_an_upgrade_without_a_reboot(path: Path) -> None:
    with booted(path, "a", UNKNOWN) as file, file.transaction():
        file.insert([entry(received_us=HOUR_US)])
    with booted(path, "b", synced(NOON_US)) as file, file.transaction():
        # As the former version, which bounded nobody, and its migration leave them.
        file.connection.execute("UPDATE boot SET seen_us = NULL, clock = NULL")
        file.connection.execute("UPDATE boot SET offset_us = 0, error_us = NULL WHERE boot_id = 'a'")
    with booted(path, "b", synced(NOON_US)) as file:
        assert file.boots.clock("a").quality == "bounded"
        assert not file.boots.may_be_learnt("a")


# -- corrections ----------------------------------------------------------------------------------


def test_what_went_out_without_a_clock_is_corrected_once_it_is_known(path: Path) -> None:
    with booted(path, "a", UNKNOWN) as file:
        owe(file, "a")
        assert corrections(file) == []
    # Killed before it was told: the next start in this boot does.
    clock = synced(NOON_US, error_us=20_000)
    with booted(path, "a", clock) as file:
        (made,) = corrections(file)
        assert correction_body(made) == {
            "device": None,
            "boot": "a",
            "version": 1,
            "quality": "synced",
            "boottime_us": HOUR_US,
            "offset_us": NOON_US,
            "rate_ppm": 0.0,
            "error_us": 20_000,
            "error_growth_ppm": PPM,
            "supersedes": False,
        }
        assert corrections(file) == []
        assert file.lanes.rows == 1
    with booted(path, "a", clock) as file:
        assert not file.boots.owes_correction


def test_a_correction_that_is_not_stored_is_still_owed(tmp_path: Path) -> None:
    with booted(tmp_path / "buffer.db", "a", synced(NOON_US)) as file:
        owe(file, "a")

        def fail(_: Correction) -> Entry:
            raise sqlite3.OperationalError("disk I/O error")

        with pytest.raises(sqlite3.OperationalError), file.transaction():
            file.report_corrections(fail)
        assert [made.version for made in corrections(file)] == [1]


def test_a_boot_that_was_never_synced_is_corrected_in_a_later_one(path: Path) -> None:
    with booted(path, "a", UNKNOWN) as file:
        owe(file, "a")
    with booted(path, "b", UNKNOWN) as file:
        assert corrections(file) == []
    with booted(path, "c", synced(NOON_US)) as file:
        (made,) = corrections(file)
        assert (made.boot_id, made.version, made.quality, made.supersedes) == ("a", 1, "bounded", False)
        assert made.line.boottime_us == 0
        assert made.line.offset_us == file.boots.clock("a").offset_us(0)


def test_a_clock_that_was_wrong_is_told_anew_and_so_are_those_that_were_bounded_by_it(path: Path) -> None:
    with booted(path, "a", UNKNOWN) as file, file.transaction():
        file.insert([entry()])
    wrong = synced(NOON_US + 1000 * HOUR_US)
    clock = wrong
    with closing(BufferFile(BufferSettings(path=path), "b", lambda: clock, Counter())) as file:
        assert corrections(file) == []
        was = file.boots.clock("a")
        clock = wrong.looked(Look(2 * HOUR_US, NOON_US, 1_000))
        with file.transaction():
            pass
        assert (file.boots.clock("a").error_us(0) or 0) < (was.error_us(0) or 0)
        made = corrections(file)
        assert {each.boot_id: (each.quality, each.version, each.supersedes) for each in made} == {
            "a": ("bounded", 1, True),
            "b": ("synced", 1, True),
        }
        (of_b,) = [each for each in made if each.boot_id == "b"]
        assert of_b.line.offset_us == NOON_US


def test_a_clock_that_was_wrong_and_put_right_before_it_was_written_is_told_anew(tmp_path: Path) -> None:
    """What waits on disk is sent by the clock as it is known, which comes to the disk with the next commit."""
    clock = UNKNOWN
    with closing(BufferFile(BufferSettings(path=tmp_path / "buffer.db"), "a", lambda: clock, Counter())) as file:
        wrong = synced(NOON_US + 1000 * HOUR_US)
        clock = wrong.looked(Look(HOUR_US + 2 * SECOND_US, NOON_US, 1_000))
        with file.transaction():
            pass
        (made,) = corrections(file)
        assert (made.supersedes, made.line.offset_us) == (True, NOON_US)


def test_a_bound_that_has_become_much_smaller_is_told_again(path: Path) -> None:
    """The first word of NTP may be a second off; what it says a minute later is as good for what came before."""
    first = synced(NOON_US, error_us=1_000_000)
    clock = first
    with closing(BufferFile(BufferSettings(path=path), "a", lambda: clock, Counter())) as file:
        owe(file, "a")
        assert [each.line.error_us for each in corrections(file)] == [1_000_000]
        clock = first.looked(Look(HOUR_US + 60 * SECOND_US, NOON_US, 600_000))
        assert corrections(file) == []
        clock = clock.looked(Look(HOUR_US + 120 * SECOND_US, NOON_US, 10_000))
        (again,) = corrections(file)
        assert (again.version, again.supersedes) == (2, False)
        assert again.line.error_us == 10_000 + 120 * PPM
        # And that is all, however often it is looked at.
        clock = clock.looked(Look(HOUR_US + 180 * SECOND_US, NOON_US, 9_000))
        assert corrections(file) == []


async def test_that_a_row_goes_out_without_a_clock_is_on_disk_before_it_goes(path: Path) -> None:
    clock = UNKNOWN
    async with opened(path, boot="a", clock=lambda: clock) as buffer:
        assert await store(buffer, [entry()])
        await buffer.owe_correction("a")
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT owed FROM boot").fetchall() == [(1,)]
            before = other.execute("PRAGMA data_version").fetchone()
            # It is written once, however many rows go.
            await buffer.owe_correction("a")
            assert other.execute("PRAGMA data_version").fetchone() == before
        assert not buffer.owes_correction
        clock = synced(NOON_US)
        assert await store(buffer, [entry()])
        await until(lambda: buffer.owes_correction)
        (made,) = await buffer.report_corrections(report)
        assert made.boot_id == "a"
        assert (await rows(buffer))[-1].datum.payload == report(made).datum.payload


@pytest.mark.parametrize("boot", ["a", "b"])
async def test_a_dead_disk_stops_no_row_without_a_clock_and_no_crash_forgets_what_is_owed(
    path: Path, tmp_path: Path, boot: str
) -> None:
    after = tmp_path / "after.db"
    async with opened(path, boot="a", clock=lambda: UNKNOWN) as buffer:
        await buffer.go_direct(frozenset(["device-thermo"]), buffer.id)
        with dead_disk(path):
            await buffer.owe_correction("a")
            await buffer.owe_correction("a")
            assert failure(buffer) is not None
            for suffix in ("", "-wal"):
                shutil.copy(f"{path}{suffix}", f"{after}{suffix}")
        await until(lambda: failure(buffer) is None)
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT owed FROM boot").fetchall() == [(1,)]
    with closing(sqlite3.connect(after)) as other:
        assert other.execute("SELECT owed FROM boot").fetchall() == [(0,)]
    async with opened(after, boot=boot, clock=lambda: synced(NOON_US)) as buffer:
        assert buffer.owes_correction
        (made,) = await buffer.report_corrections(report)
        assert made.boot_id == "a"


async def test_a_crowded_buffer_waits_with_corrections(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", boot="a", clock=lambda: synced(NOON_US), bytes_max=1_000_000) as buffer:
        await buffer.owe_correction("a")
        used = buffer.state.bytes_used
        buffer.state.bytes_used = 1_600_000
        assert await buffer.report_corrections(report) == []
        buffer.state.bytes_used = used
        assert len(await buffer.report_corrections(report)) == 1


# -- former versions, and damage ------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
async def test_a_file_of_a_former_version_keeps_its_clocks_and_gets_their_order(path: Path, version: int) -> None:
    with (
        mock.patch.object(schema, "MIGRATIONS", schema.MIGRATIONS[:version]),
        closing(schema.connect(path)) as file,
    ):
        # Not in the order of their names; the last is of no lane any more.
        boots = [("z", NOON_US, 1_000), ("m", 5, None), ("a", 5, None), ("q", NOON_US, None)]
        file.executemany("INSERT INTO boot VALUES (?, ?, ?)", boots)
        for boot, *_ in boots[:3]:
            file.execute("INSERT INTO lane (name, boot_id) VALUES (?, ?)", (f"of-{boot}", boot))
        stream = ", NULL" if version == 2 else ""
        file.execute(f"INSERT INTO series VALUES (1, 't', 'k', 'd', 's', 'sluice.reading', 'c'{stream})")
        doubt = ", 0" if version == 2 else ""
        row = f"INSERT INTO reading VALUES (?, 0, 1, ?, NULL, 0, NULL, NULL, NULL, x'31'{doubt})"
        file.executemany(row, [(lane, HOUR_US) for lane in (1, 2, 3)])
    with booted(path, "now", synced(NOON_US + 10 * HOUR_US)) as opened_file:
        clocks = {boot: opened_file.boots.clock(boot) for boot in ("z", "m", "a")}
        assert clocks["z"].around(123).error_us == 1_000
        assert clocks["m"].at(HOUR_US) == clocks["a"].at(0), "in the order of their lanes"
        assert {clock.quality for clock in clocks.values()} == {"synced", "bounded"}
        assert opened_file.lanes.rows == 3


async def test_what_is_known_of_boots_is_taken_over_from_a_damaged_file(path: Path) -> None:
    clock = synced(NOON_US)
    with booted(path, "a", clock) as file, file.transaction():
        file.insert([entry(received_us=HOUR_US)])
    with booted(path, "b", UNKNOWN, HOUR_US) as file:
        with file.transaction():
            file.insert([entry(received_us=HOUR_US)])
        owe(file, "b")
    now = synced(NOON_US + 5 * HOUR_US, at_us=SECOND_US)
    async with opened(path, boot="c", clock=lambda: now) as buffer:
        before = {boot: await buffer.boot_clock(boot) for boot in ("a", "b")}
        assert buffer.owes_correction
        await buffer.run(lambda _: buffer._commits._fail(corruption("tried")))
        await until(lambda: bool(buffer.attachment.salvaged))
        after = {boot: await buffer.boot_clock(boot) for boot in ("a", "b")}
        assert after["a"].says_as(before["a"])
        assert after["b"].quality == "bounded"
        assert after["b"].at(0) == before["b"].at(0)
        made = await buffer.report_corrections(report)
        # Nobody knows whether this boot's own was lost with the file.
        assert {each.boot_id for each in made} == {"b", "c"}
    # This boot comes behind those that were taken over.
    async with opened(path, boot="d", clock=lambda: UNKNOWN) as buffer:
        in_order = "SELECT boot_id FROM boot WHERE ordinal > 0 ORDER BY ordinal"
        order = await buffer.run(lambda file: file.connection.execute(in_order).fetchall())
        assert [boot for (boot,) in order] == ["a", "b", "c", "d"]


def test_what_was_known_is_not_forgotten_by_a_start_that_knows_nothing(path: Path) -> None:
    clock = synced(NOON_US)
    with booted(path, "a", clock):
        pass
    with booted(path, "a", UNKNOWN, 2 * HOUR_US) as file:
        assert file.boots.clock("a").says_as(clock)


@pytest.mark.parametrize("column", ["ordinal", "version", "offset_us", "seen_us", "told_error_us"])
def test_a_boot_of_a_damaged_file_that_makes_no_sense_is_known_to_have_been(tmp_path: Path, column: str) -> None:
    path = tmp_path / "buffer.db"
    with booted(path, "a", synced(NOON_US)) as file:
        found = file.connection.execute(f"SELECT {', '.join(COLUMNS)} FROM boot").fetchone()
    damaged = [2**63 - 1 if name == column else value for name, value in zip(COLUMNS, found, strict=True)]
    with booted(tmp_path / "new.db", "b", synced(NOON_US)) as file:
        with file.transaction():
            adopt_boots(file.connection, [damaged])
            file.boots.adopted()
        assert not file.boots.clock("a").known
        assert file.boots.clock("b").known
