"""Publishes `readings` and `windows` as plain Delta tables, for programs that cannot run the views.

Each day is one partition, which one commit replaces. A run writes only days that may have changed. It first remembers
which, then writes them one after the other: if it dies, the next run writes the rest. All of a run is as of one moment.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from hashlib import blake2b
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any
from uuid import uuid4

from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.transaction import AddAction, RemoveAction

from gateway.host.safe_files import sync_folder
from spark.desk.asked import ALL, Asked, quoted, text, where, within
from spark.desk.changed_days import Changes, boot_digests, changed_boots, days_now, days_of, days_then
from spark.desk.delta_source import Source, no_pattern
from spark.desk.evidence import Device
from spark.desk.log_views import read_corrections, reading_parts
from spark.desk.publish_state import FILE, PublishState, read_state, write_state
from spark.desk.row_text import rfc3339
from spark.desk.status_digests import DAY_US, EPOCH, digests
from spark.desk.tables import Tables
from spark.desk.windows_sql import windows
from spark.engine.told_error import ToldError
from spark.engine.warehouse_folder import VERSIONS, absolute, is_local, locked
from spark.finality.stream_proofs import StreamProof
from spark.log.edge_times import EARLIEST_US, LATEST_US

DAY = "day"
"""Column of the date, UTC, that the published tables are partitioned by."""
READINGS = (
    *("namespace", "device", "stream", "metric", "event_time", "value", "time_error_us", "time_quality"),
    *("received_time", "device_boot", "device_sequence", "device_counter", "doubt", "gateway", "gateway_boot"),
    *("topic", "partition", "offset", "kafka_timestamp", "correction_version"),
)
READ = (
    *("gateway_states", "device_parts", "../gateway_registry", "losses"),
    *("reading_starts", "time_corrections", "amendments", "log", "window_parts", "../deletions", "../upkeep"),
)
"""Tables that are read, in this order. Evidence comes before windows, so that they hold all that it names."""
OF_READINGS = ("time_corrections", "amendments", "log", "../deletions", "../upkeep")
"""Those by which the days of readings change."""
NOT_OF_WINDOWS = ("values", "sum_of_squares", "ordinal", "window_date")
STATISTICS = {
    "readings": ("device", "metric", "event_time", "gateway_boot", "kafka_timestamp"),
    "windows": ("device", "metric", "window_start", "status"),
}
"""Columns with statistics in Delta's log, by which readers skip files."""
TIMES = ("event_time", "kafka_timestamp", "window_start")
"""Those that hold times."""
ORDER = {"readings": 'event_time, topic, partition, "offset"', "windows": "window_start"}
ROWS_OF_GROUP = 65_536
MEMORY = "1GB"
"""Memory in which a day's readings are sorted. The rest of a large day waits on the disk."""
KEEP_HOURS = 168
"""Hours that replaced files are kept, for readers that began before."""
LOCK = "_published.lock"
AS_OF, BATCH, PROGRAM = "sluice.warehouse_version", "sluice.batch", "sluice.program"
"""Properties of the published tables."""

Proofs = list[tuple[Device, StreamProof]]


class PublishError(ToldError):
    """A folder cannot be published to. The message says what to write instead."""


@dataclass(slots=True)
class Published:
    """The result of a run."""

    batch: int
    """The last batch of `log` that the tables hold."""
    version: str
    """The version of the warehouse's tables, such as `v1`."""
    days: dict[str, int] = field(default_factory=dict)
    """Days that were written, by the name of the table."""
    rows: dict[str, int] = field(default_factory=dict)


def publish(warehouse: str, folder: str, report: Callable[[str, date, int], None] = lambda *_: None) -> Published:
    """Bring the tables in a folder up to date. `report` gets each written table and day, and the number of rows.

    Raises PublishError, WarehouseInUseError if another run writes the folder, and ToldError.
    """
    # One path for each table: by it, a table is opened once.
    warehouse = os.path.normpath(absolute(warehouse))
    target = _target(warehouse, folder)
    with locked(str(target), LOCK, f"another `publish` writes {folder}: let it, or stop it first"):
        return _Run(warehouse, target).run(report)


def _target(warehouse: str, folder: str) -> Path:
    if not is_local(folder):
        raise PublishError(f"{folder} is not a folder of this machine: publish to one, and copy it from there")
    target, source = Path(folder).resolve(), Path(warehouse).resolve()
    if target == source or source in target.parents or (target / VERSIONS).is_dir():
        raise PublishError(f"{folder} is a warehouse, or in one: give a folder of its own")
    for name in STATISTICS:
        if not (target / FILE).exists() and _is_anothers(target / name):
            raise PublishError(f"{target / name} is there already, and `publish` did not make it: give another folder")
    return target


def _is_anothers(folder: Path) -> bool:
    """True if a table or files of somebody else are there, which a run would replace or remove."""
    if DeltaTable.is_deltatable(folder.as_uri()):
        return PROGRAM not in DeltaTable(folder.as_uri()).metadata().configuration
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


class _Run:
    """One run, as of the moment when it opens the warehouse's tables."""

    def __init__(self, warehouse: str, target: Path) -> None:
        self._source = Source()
        self._tables = Tables(warehouse, self._source)
        self._target = target
        self._folder, self._streams = self._tables.version()
        paths = {name: os.path.normpath(f"{self._folder}/{name}") for name in READ}
        versions = {name: self._source.version(path) for name, path in paths.items()}
        # An empty `log` has no statistics.
        ordinal = self._source.statistics(f"{self._folder}/log", 'max("max.ordinal")')
        self._state = PublishState(
            warehouse=warehouse,
            rules=self._rules(),
            versions=versions,
            ordinal=-1 if ordinal is None else ordinal,
            boots=boot_digests(read_corrections(self._source, self._folder)),
        )

    def run(self, report: Callable[[str, date, int], None]) -> Published:
        before, done = read_state(self._target), Published(self._state.ordinal, Path(self._folder).name)
        if before is None or not self._is_up_to_date(before):
            self._write_changed(before, done, report)
        for name in STATISTICS:
            # Also if nothing was written: a run that was killed may have come no further, and old files have their day.
            self._finish(name)
        return done

    def _write_changed(
        self, before: PublishState | None, done: Published, report: Callable[[str, date, int], None]
    ) -> None:
        now = self._state
        proofs = self._tables.evidence().proofs()
        self._note_windows(proofs)
        self._note_pending(before)
        write_state(self._target, now)
        queries = {"readings": self._readings(now.pending["readings"]), "windows": self._windows(proofs)}
        for name, query_of in queries.items():
            # DuckDB cannot put the values of windows aside as it can rows that it sorts. Windows get what they need.
            self._source.db.execute(f"SET memory_limit = '{MEMORY}'" if name == "readings" else "RESET memory_limit")
            for day in list(now.pending[name]):
                done.rows[name] = done.rows.get(name, 0) + (rows := self._write(name, day, query_of(day)))
                done.days[name] = done.days.get(name, 0) + 1
                now.pending[name].remove(day)
                write_state(self._target, now)
                report(name, day, rows)

    def _rules(self) -> str:
        """A digest of all that every day's rows depend on."""
        streams, log = self._streams, self._source.opened(f"{self._folder}/log")
        rules = (
            self._folder,
            # Another warehouse may have been made in the same place.
            log and log.metadata().id,
            streams.times,
            streams.windows.percentiles,
            self._tables.window_seconds(),
            READ,
            READINGS,
        )
        return blake2b(repr(rules).encode(), digest_size=8).hexdigest()

    def _must_begin_anew(self, before: PublishState) -> bool:
        now = self._state
        same = (before.warehouse, before.rules) == (now.warehouse, now.rules)
        # An older copy of the warehouse may have been put back.
        went_back = any(now.versions[name] < number for name, number in before.versions.items() if name in now.versions)
        return not same or went_back or not all(DeltaTable.is_deltatable(self._uri(name)) for name in STATISTICS)

    def _is_up_to_date(self, before: PublishState) -> bool:
        is_same = before.versions == self._state.versions and not self._must_begin_anew(before)
        return is_same and not any(before.pending.values())

    def _note_windows(self, proofs: Proofs) -> None:
        """Note a digest of each day's windows: of the files with their figures, and of what decides on their status."""
        path = f"{self._folder}/window_parts"
        of_files = """map_from_entries(list((day, files))) FROM (
            SELECT "partition.window_date" AS day, md5(string_agg(path, chr(10) ORDER BY path)) AS files
            FROM files GROUP BY ALL)"""
        found = self._source.statistics(path, of_files) or {}
        of_status = digests(proofs, found)
        self._state.windows = {day: f"{files} {of_status[day]}" for day, files in found.items()}

    def _note_pending(self, before: PublishState | None) -> None:
        now, times = self._state, self._streams.times
        there = {name: self._published_days(name) for name in STATISTICS}
        if before is None or self._must_begin_anew(before):
            days = {
                "readings": days_of(self._source, reading_parts(self._source, self._folder, times, ALL)),
                "windows": set(now.windows),
            }
            found = {name: there[name] | days[name] for name in STATISTICS}
        else:
            found = {
                "readings": self._changed_readings(before),
                "windows": {day for day, _ in before.windows.items() ^ now.windows.items()},
            }
            found = {name: found[name] | {*before.pending[name]} for name in STATISTICS}
        now.pending = {name: sorted(days) for name, days in found.items()}

    def _changed_readings(self, before: PublishState) -> set[date]:
        now, source, times = self._state, self._source, self._streams.times
        if all(before.versions[name] == now.versions[name] for name in OF_READINGS):
            return set()
        changes = Changes(before.ordinal, changed_boots(before.boots, now.boots))
        corrections = read_corrections(source, self._folder)
        published = source.table(str(self._target / "readings"))
        then = days_then(source, published, self._folder, times, changes)
        return then | days_now(source, self._folder, times, corrections, changes)

    def _published_days(self, name: str) -> set[date]:
        days = Source().statistics(str(self._target / name), f'list(DISTINCT "partition.{DAY}")')
        return {*(days or ())}

    def _readings(self, days: Iterable[date]) -> Callable[[date], str]:
        """Return the readings of each of these days, as SQL."""
        times, shown = self._streams.times, ", ".join(map(quoted, READINGS))
        # Readings with other times than in `log` are searched for once: they may stand in the files of any day.
        _, other = reading_parts(self._source, self._folder, times, ALL)
        dates = ", ".join(f"DATE '{day}'" for day in days) or "NULL"
        of_days = f"SELECT {shown} FROM ({other}) WHERE CAST(event_time AS DATE) IN ({dates})"
        self._source.db.execute(f"CREATE TEMP TABLE other_times AS {of_days}")

        def of(day: date) -> str:
            as_sent, _ = reading_parts(self._source, self._folder, times, _span(day))
            others = f"SELECT * FROM other_times WHERE CAST(event_time AS DATE) = DATE '{day}'"
            return f"SELECT {shown} FROM ({as_sent}) UNION ALL BY NAME {others}"

        return of

    def _windows(self, proofs: Proofs) -> Callable[[date], str]:
        """Return the windows of a day, as SQL."""
        known, percentiles = self._tables.proofs_sql(proofs), self._streams.windows.percentiles

        def of(day: date) -> str:
            path = f"{self._folder}/window_parts"
            parts = self._source.table(path, files=f"\"partition.window_date\" = DATE '{day}'")
            found = windows(parts, self._tables.window_seconds(), percentiles, known)
            limits = where(within("window_start", _span(day)))
            return f"SELECT * EXCLUDE ({', '.join(NOT_OF_WINDOWS)}) FROM ({found}) {limits}"

        return of

    def _write(self, name: str, day: date, query: str) -> int:
        """Replace a day of a published table, in one commit. Returns the number of its rows."""
        rows = self._source.db.sql(query)
        shown = ", ".join(
            f"CAST({quoted(column)} AS TIMESTAMPTZ) AS {quoted(column)}" if kind == "TIMESTAMP" else quoted(column)
            for column, kind in zip(rows.columns, rows.types, strict=True)
        )
        table = self._table(name, f"SELECT {shown}, DATE '{day}' AS {DAY} FROM ({query}) LIMIT 0")
        path = f"{DAY}={day}/part-{uuid4()}.zstd.parquet"
        file = self._target / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        self._source.db.execute(
            f"COPY (SELECT {shown} FROM ({query}) ORDER BY namespace, device, stream, metric, {ORDER[name]}) "
            f"TO {text(str(file))} (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROWS_OF_GROUP})"
        )
        count, statistics = self._statistics(name, file)
        if not count:
            file.unlink()
        actions: list[AddAction | RemoveAction] = [self._added(path, file, day, statistics)] if count else []
        if actions or day in self._published_days(name):
            # A commit of an emptied day only takes its files away.
            table.create_write_transaction(
                actions,
                "overwrite",
                table.schema(),
                [DAY],
                partition_filters=[(DAY, "=", str(day))],
                commit_properties=CommitProperties(custom_metadata=self._as_of()),
            )
        return count

    def _table(self, name: str, empty: str) -> DeltaTable:
        """Open a published table. It is made, or gets the columns that it lacks, by an answer without rows."""
        uri = self._uri(name)
        rows = self._source.db.sql(empty)
        if not DeltaTable.is_deltatable(uri):
            write_deltalake(uri, rows, partition_by=[DAY], name=name)
        table = DeltaTable(uri)
        if {*rows.columns} - {each.name for each in table.schema().fields}:
            write_deltalake(table, rows, mode="append", schema_mode="merge")
            table = DeltaTable(uri)
        return table

    def _statistics(self, name: str, file: Path) -> tuple[int, str]:
        """The number of rows in a file, and what Delta's log says of them."""
        columns = STATISTICS[name]
        # Times as numbers: Python might need another package for times with a zone.
        values = {each: f"epoch_us({each})" if each in TIMES else each for each in columns}
        figures = ", ".join(f"min({each}), max({each}), count(*) - count({each})" for each in values.values())
        ((count, *found),) = self._source.rows(
            f"SELECT count(*), {figures} FROM read_parquet({text(no_pattern(str(file)))})"
        )
        least, most, nulls = (dict(zip(columns, found[place::3], strict=True)) for place in range(3))
        told = {
            "numRecords": count,
            "minValues": _told(least),
            "maxValues": _told(most),
            "nullCount": nulls,
        }
        return count, json.dumps(told)

    def _added(self, path: str, file: Path, day: date, statistics: str) -> AddAction:
        with file.open("rb") as written:
            # A commit must not outlive its file.
            os.fsync(written.fileno())
        sync_folder(file.parent)
        about = file.stat()
        return AddAction(path, about.st_size, {DAY: str(day)}, int(about.st_mtime * 1_000), True, statistics)

    def _finish(self, name: str) -> None:
        """Note in a table as of when it is, and remove files that it needs no more."""
        if not DeltaTable.is_deltatable(self._uri(name)):
            return
        table = DeltaTable(self._uri(name))
        if any(table.metadata().configuration.get(key) != value for key, value in self._as_of().items()):
            table.alter.set_table_properties(self._as_of(), raise_if_not_exists=False)
        # With those that a run which died has left.
        table.vacuum(KEEP_HOURS, dry_run=False, full=True)

    def _as_of(self) -> dict[str, str]:
        return {
            AS_OF: Path(self._folder).name,
            BATCH: str(self._state.ordinal),
            PROGRAM: package_version("sluice"),
        }

    def _uri(self, name: str) -> str:
        return (self._target / name).as_uri()


def _span(day: date) -> Asked:
    # In numbers: Python knows no day after 9999-12-31.
    begin_us = (day - EPOCH).days * DAY_US
    return Asked(since_us=begin_us, until_us=begin_us + DAY_US)


def _told(values: Mapping[str, Any]) -> dict[str, object]:
    """Values as Delta's statistics have them. Times of which not each reader could read the year are left out."""
    known = {name: value for name, value in values.items() if value is not None and not _is_far(name, value)}
    return {name: rfc3339(value) if name in TIMES else value for name, value in known.items()}


def _is_far(name: str, value: Any) -> bool:
    return name in TIMES and not EARLIEST_US <= value <= LATEST_US
