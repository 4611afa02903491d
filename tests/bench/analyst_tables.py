"""A large warehouse for `make bench-analyst`: files as the job writes them, put straight into the tables.

Each day is one file of `log` and one of `window_parts`, as after upkeep. Rows are in Kafka's order in `log`, and by
device in `window_parts`. One difference is left: DuckDB writes times without a zone, and Spark in UTC.
"""

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.decode.codec_declarations import Streams, Windows
from spark.registry.registry import Device, Registry
from spark.registry.registry_table import load_registry

BEGINS = date(2025, 1, 1)
WINDOW_S = 600
DEVICES_OF_SITE = 10
ROWS_OF_GROUP = 1_000_000
LOG_COLUMNS = {
    "topic_id": "'id-1'",
    "topic": "'device-bench'",
    "partition": "CAST(device_number % 8 AS INTEGER)",
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
    "time_error_us": "CAST(1000 + number % 7 AS BIGINT)",
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
    "batch": "CAST(day AS BIGINT)",
    "ordinal": "CAST(day AS BIGINT)",
    "code_version": "'bench'",
    "declarations": "'none'",
}
"""Columns of `log` of which a reading has a value."""
STATISTICS = {
    "log": ("event_time", "ordinal", "device", "ce_type", "gateway_boot", "kafka_timestamp", "ingest", "pack_span_us",
            "boot_time_error_us", "reject_reason"),
    "window_parts": ("window_start", "device", "metric", "stream", "ordinal"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Year:
    """The warehouse, and what is in it."""

    path: str
    readings: int
    devices: int
    days: int
    day: date
    """A day in the middle."""


def made(spark: SparkSession, folder: Path, readings: int, devices: int, days: int) -> Year:
    """Make the warehouse."""
    path = str(folder)
    tables = BatchJob(spark, path, Streams(unknown="accept", windows=Windows((WINDOW_S, 3_600, 86_400)))).tables
    sites = [Device("plant", f"device-{number:04}", f"site-{number // DEVICES_OF_SITE}") for number in range(devices)]
    load_registry(spark, path, Registry(tuple(sites)))
    db = duckdb.connect()
    db.execute("SET TimeZone = 'UTC'")
    log, parts = Path(tables) / "log", Path(tables) / "window_parts"
    added: dict[Path, list[dict[str, Any]]] = {log: [], parts: []}
    of_day = readings // days // devices
    for day in range(days):
        _day(db, day, devices, of_day)
        for table, query in ((log, _log_query(log)), (parts, _parts_query(day))):
            added[table].append(_added(db, table, query, BEGINS + timedelta(days=day)))
    for table, actions in added.items():
        _commit(table, actions)
    _state(db, Path(tables), devices, of_day * days)
    return Year(path, of_day * days * devices, devices, days, BEGINS + timedelta(days=days // 2))


def _day(db: duckdb.DuckDBPyConnection, day: int, devices: int, of_day: int) -> None:
    start = datetime.combine(BEGINS, datetime.min.time()) + timedelta(days=day)
    db.execute(f"""CREATE OR REPLACE TEMP TABLE rows AS
        SELECT {day} AS day, d AS device_number, printf('device-%04d', d) AS device,
            CAST({day} * {of_day} + t AS BIGINT) AS tick,
            CAST(({day} * {of_day} + t) * {devices} + d AS BIGINT) AS number,
            TIMESTAMP '{start}' + to_microseconds(t * (86400000000 // {of_day}) + d * 1000 + 7) AS time,
            CAST(20 + 5 * sin(t / 40.0 + d) + (hash(t * 7919 + d) % 100) / 100.0 AS DECIMAL(18, 6)) AS value
        FROM range({of_day}) AS a(t), range({devices}) AS b(d) ORDER BY t, d""")


def _log_query(log: Path) -> str:
    types = _types(log)
    shown = [
        f'CAST({LOG_COLUMNS.get(name, "NULL")} AS {kind}) AS "{name}"'
        for name, kind in types.items()
        if name != "event_date"
    ]
    return f"SELECT {', '.join(shown)}, CAST(time AS DATE) AS event_date FROM rows"


def _parts_query(day: int) -> str:
    order = "{'time': time, 'buffer': '00112233445566aa', 'lane': '0123456789ab', 'lane_sequence': number}"
    return f"""SELECT 'plant' AS namespace, device, 'device-bench' AS stream, 'celsius' AS metric,
            time_bucket(INTERVAL {WINDOW_S} SECOND, time) AS window_start, count(*) AS n, min(value) AS min,
            max(value) AS max, CAST(sum(value) AS DECIMAL(38, 6)) AS sum,
            CAST(sum(CAST(value * value AS DECIMAL(36, 12))) AS DECIMAL(38, 12)) AS sum_of_squares,
            arg_min(value, number) AS first, min({order}) AS first_at,
            arg_max(value, number) AS last, max({order}) AS last_at,
            list_sort(list(value)) AS values, CAST(0 AS BIGINT) AS late, CAST({day} AS BIGINT) AS ordinal,
            CAST(time AS DATE) AS window_date
        FROM rows GROUP BY ALL ORDER BY device, window_start"""


def _types(table: Path) -> dict[str, str]:
    from spark.desk.delta_source import type_of

    (schema,) = [
        json.loads(json.loads(line)["metaData"]["schemaString"])
        for line in (table / "_delta_log" / f"{0:020}.json").read_text().splitlines()
        if "metaData" in line
    ]
    return {each["name"]: type_of(each["type"]) for each in schema["fields"]}


def _added(db: duckdb.DuckDBPyConnection, table: Path, query: str, day: date) -> dict[str, Any]:
    """Write a day's file, and return what Delta's log says of it."""
    column = "event_date" if table.name == "log" else "window_date"
    name = f"{column}={day}/part-00000-bench.snappy.parquet"
    file = table / name
    file.parent.mkdir(parents=True, exist_ok=True)
    db.execute(f"COPY ({query}) TO '{file}' (FORMAT parquet, COMPRESSION snappy, ROW_GROUP_SIZE {ROWS_OF_GROUP})")
    wanted = STATISTICS[table.name]
    figures = ", ".join(f'min("{each}"), max("{each}"), count(*) - count("{each}")' for each in wanted)
    count, *found = db.execute(
        f"SELECT count(*), {figures} FROM read_parquet('{file}', hive_partitioning = false)"
    ).fetchall()[0]
    least, most, nulls = (dict(zip(wanted, found[place::3], strict=True)) for place in range(3))
    stats = {
        "numRecords": count,
        "minValues": {each: _told(value) for each, value in least.items() if value is not None},
        "maxValues": {each: _told(value) for each, value in most.items() if value is not None},
        "nullCount": nulls,
    }
    return {
        "path": name,
        "partitionValues": {column: str(day)},
        "size": file.stat().st_size,
        "modificationTime": 0,
        "dataChange": True,
        "stats": json.dumps(stats),
    }


def _told(value: object) -> object:
    return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1_000:03}Z" if isinstance(value, datetime) else value


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
        'last_edge': struct_update({edge}, event_us := CAST({end_us} AS BIGINT)), 'batch_first': CAST(0 AS BIGINT),
        'batch_last': CAST(0 AS BIGINT)}}"""
    name = "'plant' AS namespace, printf('device-%04d', d) AS device, 'device-bench' AS stream"
    rows = {
        "devices_heard": f"{name}, [concat('gw-', d // 100)] AS gateways, CAST({end_us} AS BIGINT) AS last_us",
        "device_runs": f"{name}, '' AS device_counter, '7-1a2b3c4d' AS device_boot, [{island}] AS islands",
    }
    for table, columns in rows.items():
        file = tables / table / "part-00000-bench.snappy.parquet"
        query = f"SELECT {columns}, CAST(0 AS BIGINT) AS ordinal FROM range({devices}) AS a(d)"
        db.execute(f"COPY ({query}) TO '{file}' (FORMAT parquet)")
        action = {
            "path": file.name,
            "partitionValues": {},
            "size": file.stat().st_size,
            "modificationTime": 0,
            "dataChange": True,
        }
        _commit(tables / table, [action])
