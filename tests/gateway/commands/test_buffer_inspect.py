"""Looking into a buffer file beside the daemon that writes it: in short transactions, and not believing it blindly."""

import base64
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.buffer import schema
from gateway.buffer.rows import Position
from gateway.buffer.salvage import aside as buffer_aside
from gateway.buffer.status import Moment, Now, read_status
from gateway.commands import buffer_reading
from gateway.commands.buffer_reading import depths, lanes, opened, quarantined, readings
from gateway.commands.buffer_verify import verify
from gateway.reading import BufferFileError
from gateway.settings import BufferSettings
from tests.support.buffers import BOOT, CLOCK, confirm, entry, rows, store
from tests.support.buffers import opened as opened_buffer

BOOT_OFFSET_US = 1_700_000_000_000_000


@contextmanager
def written(path: Path) -> Iterator[sqlite3.Connection]:
    """A buffer file to put things into by hand, with a boot that was synced and one that never was."""
    connection = schema.connect(path)
    try:
        connection.execute(
            "INSERT INTO boot (boot_id, offset_us, error_us) VALUES ('synced', ?, 1000), ('unsynced', 5, NULL)",
            (BOOT_OFFSET_US,),
        )
        yield connection
    finally:
        connection.close()


def put_lane(connection: sqlite3.Connection, boot: str, sequences: Iterable[int], **more: object) -> int:
    """A lane with a row for each sequence; devices take turns."""
    (lane,) = connection.execute(
        "INSERT INTO lane (name, boot_id, buffer_id) VALUES (lower(hex(randomblob(6))), ?, ?) RETURNING number",
        (boot, more.get("buffer_id")),
    ).fetchone()
    for sequence in sequences:
        device = f"d{sequence % 3}"
        series = put_series(connection, device)
        connection.execute(
            "INSERT INTO reading (place, series, received_us, event_error_us, payload, doubt)"
            " VALUES (?, ?, ?, 0, ?, 0)",
            (Position(lane, sequence).place, series, sequence * 1_000, more.get("payload", b"21.5")),
        )
    return int(lane)


def put_series(connection: sqlite3.Connection, device: str) -> int:
    values = ("device-thermo", device, device, f"device/{device}/thermo", "sluice.reading", "application/json")
    connection.execute(
        "INSERT OR IGNORE INTO series (topic, key, device, subject, type, content_type) VALUES (?, ?, ?, ?, ?, ?)",
        values,
    )
    (number,) = connection.execute("SELECT number FROM series WHERE device = ?", (device,)).fetchone()
    return int(number)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer.db"


async def test_a_waiting_reading_with_all_that_is_known_of_it(path: Path) -> None:
    async with opened_buffer(path) as buffer:
        assert await store(buffer, [entry(b'{"t": 21.5}', sequence=7, received_us=5_000_000)])
        with opened(path) as db:
            (reading,) = readings(db)
        lane, buffer_id = buffer.lane.name, buffer.id
    assert reading.id == f"{buffer_id}-{lane}-0"
    assert (reading.device, reading.topic, reading.key) == ("42", "device-thermo", "42")
    assert (reading.time, reading.time_quality) == ("2023-11-14T22:13:25.000000Z", "received")
    assert reading.time_error_us is not None
    assert reading.time_error_us == CLOCK.error_us(5_000_000)
    assert (reading.gateway_boot, reading.received_boottime_us) == (BOOT, 5_000_000)
    assert (reading.device_boot, reading.device_sequence, reading.doubt) == ("1-00000001", 7, None)
    assert reading.payload == '{"t": 21.5}'


def test_a_time_that_the_sensor_sent_is_shown_where_it_can_be_right(path: Path) -> None:
    with written(path) as connection:
        put_lane(connection, "synced", [3, 4])
        for sequence, seconds in ((3, -60), (4, 3_600)):
            connection.execute(
                "UPDATE reading SET sent = ?, event_error_us = 250 WHERE sequence = ?",
                (BOOT_OFFSET_US + seconds * 1_000_000, sequence),
            )
    with opened(path) as db:
        believed, not_believed = readings(db)
    assert (believed.time, believed.time_error_us) == ("2023-11-14T22:12:20.000000Z", 250)
    assert (believed.time_quality, believed.boottime_us) == ("device", 3_000)
    assert (not_believed.time, not_believed.time_quality) == (not_believed.received_time, "received")


def test_no_time_is_claimed_where_the_clock_was_never_known(path: Path) -> None:
    with written(path) as connection:
        put_lane(connection, "unsynced", [3])
    with opened(path) as db:
        (reading,) = readings(db)
        (depth,) = depths(db).devices
    assert (reading.time, reading.time_error_us, reading.received_time) == (None, None, None)
    assert (reading.gateway_boot, reading.boottime_us) == ("unsynced", 3_000)
    assert depth.oldest == Moment("unsynced", 3_000, None, None)


@pytest.mark.parametrize("payload", [b"", b"text \x00\x1b", "Küche".encode(), b"\xff\x00", b"\xed\xa0\x80"])
def test_a_payload_comes_back_byte_for_byte_and_in_one_way_only(path: Path, payload: bytes) -> None:
    with written(path) as connection:
        put_lane(connection, "synced", [0], payload=payload)
    with opened(path) as db:
        (line,) = (msgspec.json.decode(msgspec.json.encode(reading)) for reading in readings(db))
    if "payload" in line:
        assert "payload_base64" not in line
        assert line["payload"].encode() == payload
    else:
        assert base64.b64decode(line["payload_base64"]) == payload


lane_contents = st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=3)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=lane_contents,
    device=st.sampled_from([None, "d0", "d1", "nobody"]),
    newest_first=st.booleans(),
    span_rows=st.integers(1, 70),
    page_rows=st.integers(1, 70),
    page_bytes=st.integers(0, 100),
)
def test_paging_gives_each_row_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    contents: list[set[int]],
    device: str | None,
    newest_first: bool,  # noqa: FBT001 - drawn
    **sizes: int,
) -> None:
    path = tmp_path_factory.mktemp("paging") / "buffer.db"
    with written(path) as connection:
        expected: list[tuple[int, int]] = []
        for sequences in contents:
            number = put_lane(connection, "synced", sequences)
            expected += [(number, sequence) for sequence in sorted(sequences) if device in {None, f"d{sequence % 3}"}]
    if newest_first:
        expected.reverse()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(buffer_reading, name.upper(), value)
        with opened(path) as db:
            numbers = {lane.name: lane.number for lane in lanes(db)}
            found = [
                (numbers[reading.lane], reading.sequence) for reading in readings(db, device, newest_first=newest_first)
            ]
            by_device = {depth.device: depth.rows for depth in depths(db).devices}
    assert found == expected
    if device is not None:
        assert by_device.get(device, 0) == len(expected)


async def test_reading_everything_holds_no_transaction_and_survives_what_the_daemon_deletes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_reading, "PAGE_ROWS", 10)
    async with opened_buffer(path) as buffer:
        assert await store(buffer, [entry(b"%d" % number) for number in range(100)])
        with opened(path) as db:
            export = readings(db)
            taken = [next(export) for _ in range(5)]
            # The reader of an export may take hours. Meanwhile the WAL can begin anew.
            with sqlite3.connect(path) as other:
                busy, *_ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            other.close()
            assert busy == 0
            await confirm(buffer, (await rows(buffer))[:50])
            assert await store(buffer, [entry(b"later")])
            taken += export
    # The page that was read already, then the rest. Later rows are for the next export.
    assert [reading.payload for reading in taken] == [str(n) for n in [*range(10), *range(50, 100)]]


def test_ages_within_a_boot_need_no_wall_clock() -> None:
    now = Now("b", 10_000_000, None)
    assert now.age_s(Moment("b", 4_000_000, None, None)) == 6
    assert now.age_s(Moment("a", 4_000_000, BOOT_OFFSET_US, 1_000)) is None
    synced = Now("b", 10_000_000, BOOT_OFFSET_US + 90_000_000)
    assert synced.age_s(Moment("a", 4_000_000, BOOT_OFFSET_US, 1_000)) == 90
    assert synced.age_s(Moment("a", 4_000_000, None, None)) is None


def test_the_oldest_is_told_by_the_clock_where_it_is_known_and_by_lanes_where_not(path: Path) -> None:
    with written(path) as connection:
        connection.execute(
            "INSERT INTO boot (boot_id, offset_us, error_us) VALUES ('earlier', ?, 1000)", (BOOT_OFFSET_US - 10**12,)
        )
        put_lane(connection, "synced", [9])
        # Salvaged lanes are opened later, and hold older rows.
        put_lane(connection, "earlier", [9], buffer_id="00112233445566aa")
        put_lane(connection, "unsynced", [9])
    with opened(path) as db:
        found = depths(db)
    assert found.oldest is not None
    assert found.oldest.boot == "earlier"
    (depth,) = found.devices
    assert (depth.rows, depth.payload_bytes) == (3, 12)
    assert depth.newest is not None
    assert depth.newest.boot == "unsynced"


def put_input(connection: sqlite3.Connection, reason: str, payload: bytes, boot: str = "synced") -> None:
    connection.execute(
        "INSERT INTO quarantine (boot_id, received_us, device, subject, reason, payload, topic)"
        " VALUES (?, 5, '42', 'a/b', ?, ?, 'a/b')",
        (boot, reason, payload),
    )


def test_why_input_is_quarantined_is_told_without_a_copy_of_all_of_it(path: Path) -> None:
    def written_bytes() -> int:
        told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(told["wchar"])

    with written(path) as connection:
        connection.execute("BEGIN")
        for number in range(1_000):
            put_input(connection, "no-route" if number % 2 else "too-large", b"%d" % number + bytes(10_000))
        connection.execute("COMMIT")
    with opened(path) as db:
        before = written_bytes()
        told = buffer_reading.quarantine_reasons(db)
        assert written_bytes() - before < 1_000_000
    assert [(each.reason, each.count, each.example[:3], each.device) for each in told] == [
        ("no-route", 500, b"999", "42"),
        ("too-large", 500, b"998", "42"),
    ]


def test_the_quarantine_is_listed_by_reason_in_pages(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_reading, "PAGE_ROWS", 2)
    with written(path) as connection:
        for number in range(7):
            put_input(connection, "no-route" if number % 2 else "too-large", b"\xff%d" % number)
        put_input(connection, "no-route", b"of a boot that is forgotten", "gone")
    with opened(path) as db:
        assert [item.number for item in quarantined(db)] == list(range(1, 9))
        assert [item.number for item in quarantined(db, "no-route")] == [2, 4, 6, 8]
        assert list(quarantined(db, device="43")) == []
        assert buffer_reading.quarantine_sizes(db, "too-large") == {1: 2, 3: 2, 5: 2, 7: 2}
        assert [(each.reason, each.count) for each in buffer_reading.quarantine_reasons(db)] == [
            ("no-route", 4),
            ("too-large", 4),
        ]
        (of_one,) = buffer_reading.quarantine_reasons(db, "too-large", "42")
        assert (of_one.reason, of_one.count, of_one.example) == ("too-large", 4, b"\xff6")
        assert buffer_reading.quarantine_reasons(db, device="43") == []
        assert [item.number for item in buffer_reading.quarantined(db, newest_first=True)] == [*range(8, 0, -1)]
        assert buffer_reading.quarantine_count(db, "no-route") == 4
        *_, last = quarantined(db)
    assert (last.received_time, last.payload) == (None, "of a boot that is forgotten")


# -- files that cannot simply be read -------------------------------------------------------------


def test_a_file_of_another_version_is_not_guessed_at(path: Path) -> None:
    with written(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    with pytest.raises(BufferFileError, match=r"older Sluice .* sluice run brings it up to date"), opened(path):
        pass
    with written_as_is(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(BufferFileError, match="newer Sluice"), opened(path):
        pass


def test_a_file_that_is_no_buffer_is_told_as_what_it_is(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(BufferFileError) as raised, opened(path):
            pass
        return str(raised.value)

    assert refused(tmp_path / "buffer.db").endswith("buffer.db yet: sluice run makes it when it first starts")
    assert f"nor a directory {tmp_path}/none: mend buffer.path, or make the directory" in refused(
        tmp_path / "none" / "buffer.db"
    )
    assert f"is a directory; name a file in it, such as {tmp_path}/buffer.db" in refused(tmp_path)
    (tmp_path / "empty.db").touch()
    assert "is not made yet: sluice run makes it" in refused(tmp_path / "empty.db")
    with written_as_is(tmp_path / "foreign.db") as connection:
        connection.execute("CREATE TABLE mail (text)")
    assert "is another program's database: set buffer.path to a file of its own" in refused(tmp_path / "foreign.db")


@contextmanager
def written_as_is(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


READ_AS_NOBODY = """
import os, sys
from pathlib import Path
from gateway.buffer.status import read_status
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(read_status(Path(sys.argv[1])).rows)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody who may not write")
@pytest.mark.parametrize("wal", [False, True])
def test_a_folder_that_may_not_be_written(tmp_path: Path, wal: bool) -> None:  # noqa: FBT001
    path = tmp_path / "buffer.db"
    with written(path) as connection:
        put_lane(connection, "synced", [0, 1])
        if wal:
            # As a killed daemon leaves it.
            shutil.copy(path, tmp_path / "copy.db")
            shutil.copy(f"{path}-wal", tmp_path / "copy.db-wal")
    folder = Path("/var/tmp") / f"sluice-test-{os.getpid()}"  # noqa: S108 - pytest's own folders are closed to others
    folder.mkdir()
    try:
        for found in tmp_path.glob("copy.db*" if wal else "buffer.db*"):
            copied = folder / found.name.replace("copy", "buffer")
            shutil.copy(found, copied)
            # Its owner may let others read it.
            copied.chmod(0o644)
        command = [sys.executable, "-c", READ_AS_NOBODY, str(folder / "buffer.db")]
        read = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder)
    if wal:
        assert "run this with sudo, or as the user that sluice runs as" in read.stderr
    else:
        # Nobody writes it and it has no WAL: it is read as it is.
        assert read.stdout == "2\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody who may not look")
def test_a_folder_that_is_closed_to_others_is_told_as_such() -> None:
    folder = Path("/var/tmp") / f"sluice-closed-{os.getpid()}"  # noqa: S108 - pytest's own folders are closed as well
    folder.mkdir(mode=0o700)
    try:
        command = [sys.executable, "-c", READ_AS_NOBODY, str(folder / "buffer.db")]
        read = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder)
    assert "BufferFileError: this user may not look at the buffer at" in read.stderr
    assert "run this with sudo, or as the user that sluice runs as" in read.stderr


def test_files_that_were_set_aside_are_named(path: Path) -> None:
    with written(path):
        pass
    names = [buffer_aside.begin(path).name]
    with written(path) as connection:
        connection.execute("INSERT INTO meta VALUES ('x', 'y')")
        names.append(buffer_aside.begin(path).name)
    with written(path):
        pass
    assert list(read_status(path).set_aside) == names


# -- verify ---------------------------------------------------------------------------------------


def faults(path: Path, **bounds: int) -> dict[str, str]:
    """Faults that `verify` finds, by subject."""
    found = verify(path, BufferSettings(path=path, **bounds))  # type: ignore[arg-type]
    return {verdict.subject: verdict.words for verdict in found if not verdict.ok}


def test_a_sound_file_has_no_faults(path: Path) -> None:
    with written(path) as connection:
        put_lane(connection, "synced", range(5, 50))
        put_lane(connection, "unsynced", [0])
        put_lane(connection, "synced", [1, 2, 90], buffer_id="00112233445566aa")
        put_input(connection, "no-route", b"x")
    found = list(verify(path, BufferSettings(path=path), full=True))
    assert all(verdict.ok for verdict in found)
    assert [verdict.words for verdict in found if verdict.subject.startswith("lane")] == [
        "45 rows, none is missing",
        "1 row, none is missing",
        "3 rows, salvaged from buffer 00112233445566aa",
    ]


@settings(max_examples=60)
@given(sequences=st.sets(st.integers(0, 60), min_size=1), span_rows=st.integers(1, 70))
def test_every_hole_in_a_lane_is_found(
    tmp_path_factory: pytest.TempPathFactory, sequences: set[int], span_rows: int
) -> None:
    path = tmp_path_factory.mktemp("holes") / "buffer.db"
    with written(path) as connection:
        put_lane(connection, "synced", sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.commands.buffer_verify.SPAN_ROWS", span_rows)
        found = " ".join(faults(path).values())
    missing = set(range(min(sequences), max(sequences))) - sequences
    assert bool(found) == bool(missing)
    if missing:
        assert f"missing between rows that are there: {len(missing)} sequence number" in found
        assert f"({min(missing)} to " in found


def test_what_points_nowhere_is_found(path: Path) -> None:
    with written(path) as connection:
        lane = put_lane(connection, "synced", [0, 1, 2])
        connection.execute("UPDATE reading SET series = 99 WHERE sequence = 1")
        put_lane(connection, "forgotten", [0])
        put_lane(connection, "synced", [0])
        connection.execute("DELETE FROM lane WHERE number = ?", (lane + 2,))
        put_input(connection, "no-route", b"x", "gone")
    found = faults(path)
    assert f"readings refer to lane number {lane + 2}, which is not there" in found["references"]
    assert "refers to a boot that is not there" in found["references"]
    assert "quarantined input 1 refers to a boot" in found["references"]
    (of_lane,) = (words for subject, words in found.items() if subject.startswith("lane"))
    assert "of 1 row the series is not there" in of_lane


def test_a_quarantine_over_its_bounds_is_found(path: Path) -> None:
    with written(path) as connection:
        for _ in range(3):
            put_input(connection, "no-route", bytes(50_000))
    assert faults(path) == {}
    assert "buffer.quarantine_rows_max = 2" in faults(path, quarantine_rows_max=2)["quarantine"]
    assert "more than 100,000 bytes" in faults(path, quarantine_bytes_max=100_000)["quarantine"]
    assert "a tenth of buffer.bytes_max" in faults(path, bytes_max=1_000_000)["quarantine"]


@pytest.mark.parametrize("place", [0, 3])
def test_a_damaged_file_is_told_as_such_with_what_to_do(path: Path, place: int) -> None:
    with written(path) as connection:
        put_lane(connection, "synced", range(2_000))
    with path.open("r+b") as file:
        file.seek(place * 4096)
        file.write(os.urandom(4096 * 12))
    found = faults(path)
    assert list(found) == ["pages"]
    assert re.search(r"sets (?:it|the file) aside", found["pages"])


async def test_a_running_daemon_that_deletes_from_the_front_makes_no_holes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.commands.buffer_verify.SPAN_ROWS", 10)
    async with opened_buffer(path) as buffer:
        assert await store(buffer, [entry() for _ in range(100)])
        verdicts = verify(path, BufferSettings(path=path))
        seen = [next(verdicts) for _ in range(3)]
        await confirm(buffer, (await rows(buffer))[:50])
        seen += verdicts
    assert all(verdict.ok for verdict in seen)
    assert "50 rows, none is missing" in [verdict.words for verdict in seen]
