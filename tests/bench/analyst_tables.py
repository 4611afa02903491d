"""Large warehouses for `make bench-analyst`: files as the job writes them, put straight into the tables.

They are kept in `build/bench/analyst-tables` for later runs. After upkeep, a day is one file of `window_parts` and some
of `log`, all sorted by device. As `ingest` leaves it, a day is a file for each batch, and `log` is in Kafka's order.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb

from spark.batch_job import BatchJob
from spark.decode.codec_declarations import Streams, Windows
from spark.desk.delta_source import type_of
from spark.engine.delta_upkeep import ROWS_OF_GROUP
from spark.log import log_table
from spark.registry.registry import Device, Registry
from spark.registry.registry_table import load_registry
from spark.upkeep.table_upkeep import LOG_ORDER
from spark.windows import windows_table
from tests.bench.context import say
from tests.bench.report import BUILD
from tests.bench.spark_job import session

KEPT = BUILD / "analyst-tables"
BEGINS = date(2025, 1, 1)
WINDOW_S = 600
DEVICES_OF_SITE = 10
FORM = "COMPRESSION snappy, ROW_GROUP_SIZE 1000000"
"""Files as Spark writes them: their parts have up to 128 MB."""
FORM_SORTED = f"COMPRESSION zstd, ROW_GROUP_SIZE {ROWS_OF_GROUP}"
"""Files as upkeep writes them."""
LOG_COLUMNS = {
    "topic_id": "'id-1'",
    "topic": "'device-bench'",
    "partition": "device_number % 8",
    "offset": "number // 8",
    "kafka_timestamp": "time + INTERVAL 1 SECOND",
    "key": "device",
    "value": "encode(concat('{\"celsius\": ', value, '}'))",
    "namespace": "'plant'",
    "gateway": "concat('gw-', device_number // 100)",
    "device": "device",
    "stream": "'device-bench'",
    "buffer": "'00112233445566aa'",
    "lane": "'0123456789ab'",
    "lane_sequence": "number",
    "ce_id": "concat('00112233445566aa-0123456789ab-', number)",
    "ce_type": "'sluice.reading'",
    "subject": "concat('device/', device, '/bench')",
    "event_time": "time",
    "time_error_us": "1000 + number % 7",
    "time_quality": "'estimated'",
    "received_time": "time + INTERVAL 20 MILLISECONDS",
    "gateway_boot": "'5d0a1f7e'",
    "boot_time_us": "epoch_us(time) - 1735000000000000",
    "content_type": "'application/json'",
    "device_boot": "'7-1a2b3c4d'",
    "device_sequence": "tick",
    "metrics": "[{'name': 'celsius', 'value': value, 'ago_us': CAST(NULL AS BIGINT)}]",
    "duplicate": "FALSE",
    "ingest": "'bench'",
    "batch": "batch",
    "ordinal": "batch",
    "code_version": "'bench'",
    "declarations": "'none'",
}
"""Columns of `log` of which a reading has a value."""
TIMES = {"event_time", "kafka_timestamp", "window_start"}
STATISTICS = {
    "log": ("event_time", "ordinal", "device", "ce_type", "gateway_boot", "kafka_timestamp", "ingest", "pack_span_us",
            "boot_time_error_us", "reject_reason"),
    "window_parts": ("window_start", "device", "metric", "stream", "ordinal"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """A warehouse to be made."""

    name: str
    readings: int
    devices: int
    days: int
    batches_of_day: int | None = None
    """Batches of each day, if they are as `ingest` leaves them; None if upkeep has merged them."""


@dataclass(frozen=True, slots=True)
class Made:
    """A warehouse, and what is in it."""

    path: str
    readings: int
    devices: int
    days: int

    @property
    def middle(self) -> date:
        """A day in the middle."""
        return BEGINS + timedelta(days=self.days // 2)


def kept(shape: Shape) -> Made:
    """Return a warehouse of an earlier run, or make it."""
    folder = KEPT / _folder(shape)
    of_day = shape.readings // shape.days // shape.devices
    made = Made(str(folder), of_day * shape.days * shape.devices, shape.devices, shape.days)
    if not folder.exists():
        # Of an earlier commit, or of a run that was ended.
        for old in KEPT.glob(f"{shape.name}-*"):
            shutil.rmtree(old)
        begun = time.monotonic()
        unfinished = KEPT / f"{shape.name}-unfinished"
        _make(shape, unfinished, of_day)
        unfinished.rename(folder)
        say(f"{shape.name}: {made.readings:,} readings are in the tables after {time.monotonic() - begun:.0f} s")
    return made


def _folder(shape: Shape) -> str:
    """The folder's name tells apart all that the tables depend on."""
    told = repr((shape, log_table.SCHEMA, windows_table.SCHEMA)).encode()
    digest = hashlib.sha256(Path(__file__).read_bytes() + told)
    return f"{shape.name}-{shape.readings}-{digest.hexdigest()[:12]}"


def _make(shape: Shape, folder: Path, of_day: int) -> None:
    path = str(folder)
    with session() as spark:
        streams = Streams(unknown="accept", windows=Windows((WINDOW_S, 3_600, 86_400)))
        tables = Path(BatchJob(spark, path, streams).tables)
        devices = range(shape.devices)
        sites = [Device("plant", f"device-{number:04}", f"site-{number // DEVICES_OF_SITE}") for number in devices]
        load_registry(spark, path, Registry(tuple(sites)))
    db = duckdb.connect()
    # Times are UTC, as Spark writes them.
    db.execute("SET TimeZone = 'UTC'")
    log, parts = tables / "log", tables / "window_parts"
    added: dict[Path, list[dict[str, Any]]] = {log: [], parts: []}
    pieces = shape.batches_of_day or -(-of_day * shape.devices // LOG_ORDER.rows_max)
    for day in range(shape.days):
        of = BEGINS + timedelta(days=day)
        _day(db, day, shape.devices, of_day, pieces)
        for piece in range(pieces):
            where = f"batch = {day * pieces + piece}"
            if shape.batches_of_day:
                added[log].append(_added(db, log, _log_query(log, where), of, piece))
                added[parts].append(_added(db, parts, _parts_query(parts, where), of, piece))
            else:
                query = f"{_log_query(log, where)} ORDER BY device, time"
                added[log].append(_added(db, log, query, of, piece, FORM_SORTED))
        if not shape.batches_of_day:
            added[parts].append(_added(db, parts, _parts_query(parts, "TRUE"), of, 0, FORM_SORTED))
    for table, actions in added.items():
        _commit(table, actions)
    _state(db, tables, shape.devices, of_day * shape.days)
    db.close()


def _day(db: duckdb.DuckDBPyConnection, day: int, devices: int, of_day: int, pieces: int) -> None:
    start = datetime.combine(BEGINS, datetime.min.time()) + timedelta(days=day)
    db.execute(f"""CREATE OR REPLACE TEMP TABLE rows AS
        SELECT {day} * {pieces} + (t * {devices} + d) * {pieces} // ({of_day} * {devices}) AS batch, d AS device_number,
            printf('device-%04d', d) AS device, CAST({day} * {of_day} + t AS BIGINT) AS tick,
            CAST(({day} * {of_day} + t) * {devices} + d AS BIGINT) AS number,
            TIMESTAMP '{start}' + to_microseconds(t * (86400000000 // {of_day}) + d * 1000 + 7) AS time,
            CAST(20 + 5 * sin(t / 40.0 + d) + (hash(t * 7919 + d) % 100) / 100.0 AS DECIMAL(18, 6)) AS value
        FROM range({of_day}) AS a(t), range({devices}) AS b(d) ORDER BY t, d""")


def _log_query(log: Path, where: str) -> str:
    columns = {**dict.fromkeys(_types(log), "NULL"), **LOG_COLUMNS, "event_date": "CAST(time AS DATE)"}
    return f"SELECT {_cast(columns, log)} FROM rows WHERE {where}"


def _parts_query(parts: Path, where: str) -> str:
    order = "{'time': time, 'buffer': '00112233445566aa', 'lane': '0123456789ab', 'lane_sequence': number}"
    start = f"time_bucket(INTERVAL {WINDOW_S} SECOND, time)"
    columns = {
        "namespace": "'plant'",
        "device": "device",
        "stream": "'device-bench'",
        "metric": "'celsius'",
        "window_start": start,
        "n": "count(*)",
        "min": "min(value)",
        "max": "max(value)",
        "sum": "sum(value)",
        "sum_of_squares": "sum(CAST(value * value AS DECIMAL(36, 12)))",
        "first": "arg_min(value, number)",
        "first_at": f"min({order})",
        "last": "arg_max(value, number)",
        "last_at": f"max({order})",
        "values": "list_sort(list(value))",
        "late": "0",
        "ordinal": "max(batch)",
        "window_date": "CAST(min(time) AS DATE)",
    }
    return f"SELECT {_cast(columns, parts)} FROM rows WHERE {where} GROUP BY device, {start} ORDER BY device, {start}"


def _cast(columns: Mapping[str, str], table: Path) -> str:
    types = _types(table)
    return ", ".join(
        f'CAST({value} AS {types[name].replace("TIMESTAMP", "TIMESTAMPTZ")}) AS "{name}"'
        for name, value in columns.items()
    )


def _types(table: Path) -> dict[str, str]:
    (schema,) = [
        json.loads(json.loads(line)["metaData"]["schemaString"])
        for line in (table / "_delta_log" / f"{0:020}.json").read_text().splitlines()
        if "metaData" in line
    ]
    return {each["name"]: type_of(each["type"]) for each in schema["fields"]}


def _added(  # noqa: PLR0913, PLR0917 - what varies
    db: duckdb.DuckDBPyConnection, table: Path, query: str, day: date, piece: int, form: str = FORM
) -> dict[str, Any]:
    """Write a file of a day, and return what Delta's log says of it."""
    partition = "event_date" if table.name == "log" else "window_date"
    name = f"{partition}={day}/part-{piece:05}-bench.snappy.parquet"
    file = table / name
    file.parent.mkdir(parents=True, exist_ok=True)
    db.execute(f"COPY ({query}) TO '{file}' (FORMAT parquet, {form})")
    wanted = STATISTICS[table.name]
    # Times as numbers: Python would need another package for times with a zone.
    values = [f"epoch_us({each})" if each in TIMES else each for each in wanted]
    figures = ", ".join(f"min({value}), max({value}), count(*) - count({value})" for value in values)
    rows = db.execute(f"SELECT count(*), {figures} FROM read_parquet('{file}', hive_partitioning = false)").fetchall()
    ((count, *found),) = rows
    least, most, nulls = (dict(zip(wanted, found[place::3], strict=True)) for place in range(3))
    stats = {
        "numRecords": count,
        "minValues": _told(least),
        "maxValues": _told(most),
        "nullCount": nulls,
    }
    return {
        "path": name,
        "partitionValues": {partition: str(day)},
        "size": file.stat().st_size,
        "modificationTime": 0,
        "dataChange": True,
        "stats": json.dumps(stats),
    }


def _told(values: Mapping[str, Any]) -> dict[str, object]:
    """Values as Delta's statistics have them, with times in whole milliseconds."""
    known = {name: value for name, value in values.items() if value is not None}
    return {name: _time(value) if name in TIMES else value for name, value in known.items()}


def _time(us: int) -> str:
    time = datetime.fromtimestamp(us // 1_000 / 1_000, UTC)
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1_000:03}Z"


def _commit(table: Path, actions: list[dict[str, Any]]) -> None:
    log = table / "_delta_log"
    number = max(int(path.stem) for path in log.glob("*.json")) + 1
    about = {"commitInfo": {"timestamp": 0, "operation": "WRITE", "operationParameters": {}, "isBlindAppend": True}}
    lines = [about, *({"add": action} for action in actions)]
    (log / f"{number:020}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _state(db: duckdb.DuckDBPyConnection, tables: Path, devices: int, last: int) -> None:
    """What the job remembers: of each device the gateway, the last reading, and its numbers without a hole."""
    end_us = round((datetime.combine(BEGINS, datetime.min.time(), UTC) + timedelta(days=366)).timestamp() * 1e6)
    edge = """{'event_us': CAST(1735689600000000 AS BIGINT), 'time_error_us': CAST(1000 AS BIGINT),
        'time_quality': 'estimated', 'gateway': 'gw-0', 'gateway_boot': '5d0a1f7e', 'boot_time_us': CAST(0 AS BIGINT),
        'boot_time_error_us': CAST(NULL AS BIGINT)}"""
    island = f"""{{'first': CAST(0 AS BIGINT), 'last': CAST({last} AS BIGINT), 'first_edge': {edge},
        'last_edge': struct_update({edge}, event_us := CAST({end_us} AS BIGINT))}}"""
    columns = f"""'plant' AS namespace, printf('device-%04d', d) AS device, 'device-bench' AS stream,
        '' AS device_counter, '7-1a2b3c4d' AS device_boot, CAST(d AS BIGINT) AS run, CAST(0 AS BIGINT) AS first,
        CAST({last} AS BIGINT) AS last, [{island}] AS islands, [concat('gw-', d // 100)] AS gateways,
        CAST({end_us} AS BIGINT) AS last_us, CAST(0 AS BIGINT) AS batch_first, CAST(0 AS BIGINT) AS batch_last"""
    file = tables / "device_parts" / "part-00000-bench.snappy.parquet"
    db.execute(f"COPY (SELECT {columns} FROM range({devices}) AS a(d)) TO '{file}' (FORMAT parquet)")
    action = {
        "path": file.name,
        "partitionValues": {},
        "size": file.stat().st_size,
        "modificationTime": 0,
        "dataChange": True,
    }
    _commit(tables / "device_parts", [action])
