"""Published tables hold what the views do, whatever was done to the warehouse, and a run writes only what changed."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.cli import FAILED, main
from spark.decode.streams_file import parse_streams
from spark.desk import publishing, tables
from spark.desk.asked import quoted
from spark.desk.delta_source import Source
from spark.desk.publishing import BATCH, NOT_OF_WINDOWS, READINGS, STATISTICS, publish
from spark.engine.warehouse_folder import locked
from tests.support.plain_warehouse import NOON, PlainWarehouse, at, row

UNBOUNDED: dict[str, Any] = {
    "time_error_us": TIME_ERROR_UNKNOWN_US,
    "boot_time_error_us": 0,
    "time_quality": "bounded",
    "gateway_boot": "boot-2",
}
"""A reading whose gateway did not know the time."""


class Compared:
    """A warehouse, and the folder that it is published to. After each run both are compared."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.folder = folder

    def publish(self) -> dict[str, list[int]]:
        """Publish, compare, and return the days that were written, counted from NOON's."""
        written: dict[str, list[int]] = {"readings": [], "windows": []}
        before = {name: self.files(name) for name in STATISTICS}
        publish(
            str(self.path),
            str(self.folder),
            lambda name, day, _rows: written[name].append((day - NOON.date()).days),
        )
        for name, days in written.items():
            changed = {path.parent.name for path in before[name] ^ self.files(name)}
            assert changed <= {f"day={NOON.date() + timedelta(days=day)}" for day in days}
        self.expect_what_the_views_hold()
        return written

    def files(self, name: str) -> set[Path]:
        path = self.folder / name
        return {Path(uri) for uri in DeltaTable(path).file_uris()} if path.exists() else set()

    def added(self, name: str, day: str) -> list[str]:
        """The lines of a table's log that add files of a day."""
        logs = sorted((self.folder / name / "_delta_log").glob("*.json"))
        return [line for log in logs for line in log.read_text().splitlines() if f'"add":{{"path":"{day}/' in line]

    def expect_what_the_views_hold(self) -> None:
        desk = tables.open(self.path)
        shown = {
            "readings": (f"SELECT {', '.join(map(quoted, READINGS))} FROM ({desk.select('readings')})", "event_time"),
            "windows": (
                f"SELECT * EXCLUDE ({', '.join(NOT_OF_WINDOWS)}) FROM ({desk.select('windows')})",
                "window_start",
            ),
        }
        for name, (view, time) in shown.items():
            wanted = desk.source.db.sql(view)
            columns = ", ".join(map(quoted, wanted.columns))
            read = Source()
            found = read.rows(f"SELECT {columns} FROM ({read.table(str(self.folder / name))})")
            assert Counter(map(repr, found)) == Counter(map(repr, wanted.fetchall())), name
            # And by another engine, which goes by the days that Delta's log names.
            by_day = (
                QueryBuilder()
                .register("published", DeltaTable(self.folder / name))
                .execute(f"""SELECT CAST(day AS VARCHAR), count(*),
                    count(*) FILTER (WHERE CAST({time} AS DATE) = day) FROM published GROUP BY day""")
            )
            read.db.register("answer", by_day.read_all())
            days = desk.source.rows(
                f"SELECT CAST(CAST({time} AS DATE) AS VARCHAR), count(*) FROM ({view}) GROUP BY ALL"
            )
            assert sorted(read.rows("SELECT * FROM answer")) == sorted((day, count, count) for day, count in days), name


class Site(Compared):
    """A warehouse as the job would leave it."""

    def __init__(self, path: Path) -> None:
        self.warehouse = PlainWarehouse(path / "warehouse")
        super().__init__(self.warehouse.path, path / "published")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Two devices on three days, published."""
    made = Site(tmp_path)
    made.warehouse.take(*(row(number, number - 3) for number in (1, 2, 3)), row(1, -2, "43"), row(2, 0, "43"))
    assert made.publish() == {"readings": [-2, -1, 0], "windows": [-2, -1, 0]}
    return made


def test_nothing_is_written_where_nothing_has_changed(site: Site) -> None:
    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in site.folder.rglob("*") if path.name != publishing.LOCK}

    before = written()
    assert site.publish() == {"readings": [], "windows": []}
    assert written() == before


def test_a_late_reading_changes_its_day(site: Site) -> None:
    site.warehouse.take(row(4, -1.1))
    assert site.publish() == {"readings": [-1], "windows": [-1]}


def test_a_correction_changes_the_days_that_it_moves_readings_from_and_to(site: Site) -> None:
    site.warehouse.take(row(5, -2, boot_time_us=60_000_000, kafka_timestamp=at(0.2), **UNBOUNDED))
    assert site.publish()["readings"] == [-2]
    site.warehouse.correct("boot-2", 0, told=0.1)
    assert site.publish() == {"readings": [-2, 0], "windows": [0]}
    # The day of the time as sent is written too, for it might be there again.
    site.warehouse.correct("boot-2", -1, version=2, told=0.1)
    assert site.publish() == {"readings": [-2, -1, 0], "windows": [-1, 0]}


def test_values_of_a_pack_change_the_days_when_they_were_taken(site: Site) -> None:
    pack = [{"name": "t", "value": value, "ago_us": hours * 3_600_000_000 or None} for value, hours in ((1, 2), (2, 0))]
    packed = row(6, 0.55, metrics=pack, pack_span_us=7_200_000_000)
    site.warehouse.take(packed)
    assert site.publish() == {"readings": [0, 1], "windows": [0, 1]}
    # Its batch turns out to be none that can be taken: the record is set aside.
    site.warehouse.amend(packed, 1, reject_reason="set-aside: it fails", metrics=None)
    assert site.publish() == {"readings": [0, 1], "windows": [0, 1]}


def test_a_better_copy_changes_both_days(site: Site) -> None:
    first = row(7, -1.1, device_boot="b", device_sequence=7)
    site.warehouse.take(first)
    site.publish()
    site.warehouse.take(row(8, 0.1, device_boot="b", device_sequence=7))
    site.warehouse.amend(first, 1, duplicate=True)
    assert site.publish() == {"readings": [-1, 0], "windows": [-1, 0]}


def test_a_status_changes_without_any_new_reading(site: Site) -> None:
    site.warehouse.acknowledge(-0.6)
    # The window of today is as it was. But the evidence of today is not.
    assert site.publish() == {"readings": [], "windows": [-2, -1, 0]}
    site.warehouse.acknowledge(0.3)
    assert site.publish() == {"readings": [], "windows": [-1, 0]}
    site.warehouse.acknowledge(0.4)
    assert site.publish() == {"readings": [], "windows": [0]}


def test_a_device_is_gone_even_if_its_deletion_took_place_meanwhile(site: Site) -> None:
    site.warehouse.delete("43", is_done=False)
    assert site.publish()["readings"] == [-2, 0]
    site.warehouse.delete("43")
    assert site.publish() == {"readings": [-2, 0], "windows": [-2, 0]}
    assert site.publish() == {"readings": [], "windows": []}


def test_days_that_expired_are_gone(site: Site) -> None:
    site.warehouse.expire(NOON.date() + timedelta(days=1))
    assert site.publish() == {"readings": [-2, -1], "windows": [-2, -1]}
    assert {path.parent.name for path in site.files("readings")} == {f"day={NOON.date()}"}


def test_a_replay_is_published_whole(site: Site) -> None:
    site.warehouse.begin_version()
    assert site.publish() == {"readings": [-2, -1, 0], "windows": [-2, -1, 0]}
    assert site.publish() == {"readings": [], "windows": []}


def test_other_percentiles_become_columns(site: Site) -> None:
    site.warehouse.declare(
        parse_streams('unknown = "accept"\n[windows]\npercentiles = [50, 90]\n', Path("streams.toml"))
    )
    assert site.publish() == {"readings": [-2, -1, 0], "windows": [-2, -1, 0]}
    columns = {each.name for each in DeltaTable(site.folder / "windows").schema().fields}
    # Programs may have asked for the column that is gone. It is null.
    assert {"p50", "p90", "p99"} <= columns


def test_windows_that_were_folded_are_written_once_more(site: Site) -> None:
    site.warehouse.fold()
    assert site.publish() == {"readings": [], "windows": [-2, -1, 0]}


class KilledError(BaseException):
    """What nobody catches."""


def dying(real: Callable[..., None], calls: Iterator[int]) -> Callable[..., None]:
    """A function that works so many times."""

    def call(*arguments: object) -> None:
        if not next(calls):
            raise KilledError
        real(*arguments)

    return call


def test_the_next_run_writes_what_a_killed_one_did_not(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in ((publishing, "write_state"), (publishing, "sync_folder")):
        for works in (0, 1, 2):
            site.warehouse.take(row(10, -2.1), row(11, -1.1), row(12, -0.1))
            with monkeypatch.context() as changed:
                changed.setattr(place, name, dying(getattr(place, name), iter([*[1] * works, 0])))
                with pytest.raises(KilledError):
                    publish(str(site.warehouse.path), str(site.folder))
    site.publish()
    assert site.publish() == {"readings": [], "windows": []}


def test_the_command_says_what_was_written_and_as_of_when(site: Site) -> None:
    warehouse = str(site.warehouse.path)

    def run(folder: Path | str = site.folder) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["publish", str(folder), "--warehouse", warehouse])
        return done.exit_code, " ".join(done.output.split())

    assert run() == (0, f"nothing has changed: {site.folder} is as of batch 0 of v1")
    site.warehouse.take(row(20, -1))
    words = [
        f"{name}: 1 day written, {rows} rows, as of batch 1 of v1" for name, rows in (("readings", 2), ("windows", 1))
    ]
    assert run() == (0, " ".join(words))
    for name in STATISTICS:
        table = DeltaTable(site.folder / name)
        assert table.metadata().configuration[BATCH] == "1"
        # Any reader takes it: no feature beyond Delta's first version.
        assert table.protocol().min_reader_version == 1
    with locked(str(site.folder), publishing.LOCK):
        code, said = run()
    assert code == FAILED
    assert "another `publish` writes" in said
    for wrong, told in ((warehouse, "is a warehouse"), (f"{warehouse}/x", "or in one"), ("s3://x", "is not a folder")):
        code, said = run(wrong)
        assert code == FAILED
        assert told in said


def test_what_somebody_else_has_there_is_left_alone(site: Site, tmp_path: Path) -> None:
    warehouse = str(site.warehouse.path)
    mine = tmp_path / "mine"
    write_deltalake(mine / "readings", Source().db.sql("SELECT 1 AS a, DATE '2026-03-14' AS day"), partition_by=["day"])
    notes = tmp_path / "notes" / "windows" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("kept")
    os.utime(notes, (0, 0))
    for folder in (mine, tmp_path / "notes"):
        for _ in range(2):
            with pytest.raises(publishing.PublishError, match="`publish` did not make it"):
                publish(warehouse, str(folder))
    assert DeltaTable(mine / "readings").version() == 0
    assert notes.read_text() == "kept"
    assert {path.name for path in (tmp_path / "notes").iterdir()} == {"windows"}
    # A folder of ours whose memory was removed is written anew.
    (site.folder / "_published.json").unlink()
    assert site.publish()["readings"] == [-2, -1, 0]


def test_another_warehouse_in_the_same_place_and_an_older_copy_are_published_whole(site: Site, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    copytree(site.warehouse.path, kept)
    for number in (5, 6):
        site.warehouse.take(row(number, -1))
    site.publish()
    rmtree(site.warehouse.path)
    copytree(kept, site.warehouse.path)
    assert site.publish()["readings"] == [-2, -1, 0]
    rmtree(site.warehouse.path)
    site.warehouse = PlainWarehouse(site.warehouse.path)
    for number in range(4):
        site.warehouse.take(row(number, 1))
    assert site.publish() == {"readings": [-2, -1, 0, 1], "windows": [-2, -1, 0, 1]}


def test_times_at_the_ends_of_all_times_are_published(site: Site) -> None:
    far = {"kafka_timestamp": NOON, "received_time": NOON, **UNBOUNDED, "gateway_boot": "boot-1"}
    last, first = datetime(9999, 12, 31, 23, tzinfo=UTC), datetime(2, 1, 1, tzinfo=UTC)
    site.warehouse.take(row(30, 0) | far | {"event_time": last, "event_date": date(1970, 1, 1)})
    site.warehouse.take(row(31, 0) | far | {"event_time": first, "event_date": date(1970, 1, 1)})
    assert site.publish()["windows"] == []
    told = {json.loads(line)["add"]["stats"] for line in site.added("readings", "day=0002-01-01")}
    assert [json.loads(each)["minValues"]["event_time"] for each in told] == ["0002-01-01T00:00:00.000000Z"]


def test_tables_say_as_of_when_they_are_even_if_a_run_died_at_its_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.warehouse.take(row(4, -1.1))
    with monkeypatch.context() as changed:
        changed.setattr(publishing._Run, "_finish", dying(publishing._Run._finish, iter([0])))
        with pytest.raises(KilledError):
            publish(str(site.warehouse.path), str(site.folder))
    assert site.publish() == {"readings": [], "windows": []}
    # A status that becomes final is of the windows alone.
    site.warehouse.acknowledge(0.4)
    site.publish()
    ordinal = tables.open(site.warehouse.path).sql("SELECT max(ordinal) FROM log").fetchall()[0][0]
    for name in STATISTICS:
        assert DeltaTable(site.folder / name).metadata().configuration[BATCH] == str(ordinal)


def test_files_that_are_published_say_what_readers_skip_them_by(site: Site) -> None:
    figures = DeltaTable(site.folder / "readings").get_add_actions(flatten=True)
    source = Source()
    source.db.register("files", figures)
    found = source.rows("""SELECT num_records, "partition.day", "min.device", "max.device", "min.event_time"::VARCHAR
        FROM files ORDER BY 2""")
    assert found[0] == (2, date(2026, 3, 12), "42", "43", "2026-03-12 12:00:00+00")
