"""All figures of a report on a site or a device, as tables that become both the page and its CSV files.

Tables hold times as microseconds since 1970. They are named as in docs/tables.md, with its words.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import time_ns
from typing import TYPE_CHECKING, Any

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.desk.asked import Asked, equal, text, where
from spark.desk.evidence import Evidence
from spark.desk.explain import ADDED, changes_sql
from spark.desk.plain_rows import PlainRows, plain_rows
from spark.desk.windows_sql import FINDING, STATUS, WHY
from spark.windows.window_sizes import chosen_size

if TYPE_CHECKING:
    from spark.desk.tables import Tables

POINTS_MAX = 400
"""Windows in the span, if nobody asks for a length: about as many as a curve on paper can show."""
SIZES_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400)
"""Lengths of windows that are chosen from."""
WAITED_S = 60
"""Seconds from a reading's receipt until Kafka had it, from which it counts as having waited."""
SILENCE_S_MIN = 60
SILENCE_INTERVALS = 10
"""A stream is silent once its readings stay out for so many of its usual intervals, and for so many seconds."""


_KEY = ("namespace", "device", "stream", "metric")


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a report. Times are in microseconds since 1970."""

    asked: Asked
    """The question. Both of its times are given."""
    size_s: int
    made_us: int
    tables: Mapping[str, PlainRows]
    """By name: `windows`, `status`, `devices`, `gateways`, `gaps`, `losses`, `outages`, `lateness`, `clocks` and
    `clock_times`."""

    @property
    def from_us(self) -> int:
        return self.asked.since_us or 0

    @property
    def until_us(self) -> int:
        return self.asked.until_us or 0


def report(tables: "Tables", asked: Asked, size_s: int | None = None, now_us: int | None = None) -> Report:
    """Compute all figures of a report. Without a span, it is from the first to the last window of the warehouse.

    `size_s` is the length of windows; by default they are so long that a curve can show them. Raises WindowSizeError.
    """
    evidence = tables.evidence(asked.device)
    table_s = tables.window_seconds()
    made_us = time_ns() // 1_000 if now_us is None else now_us
    since_us, until_us = _span(tables, asked, table_s, made_us)
    chosen_s = chosen_size(size_s or usual_size(until_us - since_us, table_s), table_s)
    size_us = chosen_s * 1_000_000
    # What is not given must not cut a window in two.
    bounded = replace(
        asked,
        since_us=since_us - since_us % size_us if asked.since_us is None else since_us,
        until_us=until_us + -until_us % size_us if asked.until_us is None else until_us,
    )
    _make_windows(tables, bounded, chosen_s, evidence)
    _make_readings(tables, bounded)
    proofs = tables.proofs_sql(evidence.proofs())
    missing = tables.gaps_sql(evidence, bounded)
    at_site = None if asked.site is None else tables.devices_at(asked.site)
    found = {
        "windows": plain_rows(
            tables.source, "SELECT * FROM report_windows ORDER BY namespace, device, stream, metric, window_start"
        ),
        "status": plain_rows(tables.source, _STATUS),
        "devices": plain_rows(tables.source, _devices_sql(missing)),
        "gateways": _gateways(tables, evidence, bounded, at_site or ()),
        "gaps": plain_rows(
            tables.source, f"SELECT * FROM ({missing}) ORDER BY after_time NULLS FIRST, namespace, device, first"
        ),
        "losses": plain_rows(
            tables.source,
            f"SELECT * FROM ({tables.losses_sql(evidence, bounded)}) ORDER BY from_time NULLS FIRST, reason",
        ),
        "outages": plain_rows(tables.source, _outages_sql(bounded, proofs, at_site)),
        "lateness": plain_rows(tables.source, _lateness_sql(chosen_s)),
        "clocks": plain_rows(tables.source, _CLOCKS),
        "clock_times": plain_rows(tables.source, _clock_times_sql(chosen_s)),
    }
    return Report(bounded, chosen_s, made_us, found)


def usual_size(span_us: int, table_s: int) -> int:
    """The shortest length of windows, in seconds, of which a curve can show all."""
    fitting = [size_s for size_s in SIZES_S if size_s % table_s == 0] or [table_s]
    enough = [size_s for size_s in fitting if span_us <= POINTS_MAX * size_s * 1_000_000]
    return enough[0] if enough else fitting[-1]


def _span(tables: "Tables", asked: Asked, table_s: int, now_us: int) -> tuple[int, int]:
    """The times from and to: those that are asked for, or else those of the first and the last window."""
    parts = f"{tables.version()[0]}/window_parts"
    since_us, until_us = asked.since_us, asked.until_us
    if until_us is None:
        last_us = tables.source.statistics(parts, 'epoch_us(max("max.window_start"))')
        until_us = now_us if last_us is None else last_us + table_s * 1_000_000
    if since_us is None:
        since_us = tables.source.statistics(parts, 'epoch_us(min("min.window_start"))')
        since_us = until_us - 86_400_000_000 if since_us is None else min(since_us, until_us - 1_000_000)
    return since_us, max(until_us, since_us + 1_000_000)


def _make_windows(tables: "Tables", asked: Asked, size_s: int, evidence: Evidence) -> None:
    """Make the table of windows, each with a mark whether figures that it had before were changed."""
    size_us = size_s * 1_000_000
    key = ", ".join(_KEY)
    # The last window may end behind the span.
    changes = changes_sql(tables, replace(asked, until_us=(asked.until_us or 0) + size_us))
    revised = f"""SELECT DISTINCT {key}, {_bucket("window_start", size_s)} AS window_start
        FROM (SELECT *, row_number() OVER (
                PARTITION BY {key}, window_start ORDER BY version, ordinal, cause) AS place
            FROM ({changes}))
        WHERE place > 1 AND (cause <> '{ADDED}' OR late > 0)"""
    tables.source.db.execute(f"""CREATE OR REPLACE TEMP TABLE report_windows AS
        SELECT w.* EXCLUDE (values, sum_of_squares, ordinal, window_date), r.window_start IS NOT NULL AS revised
        FROM ({tables.windows_sql(asked, size_s, evidence)}) AS w LEFT JOIN ({revised}) AS r
        USING ({key}, window_start)""")


def _make_readings(tables: "Tables", asked: Asked) -> None:
    """Make the table of readings, a row for all metrics of one."""
    tables.source.db.execute(f"""CREATE OR REPLACE TEMP TABLE report_readings AS
        SELECT DISTINCT namespace, device, stream, gateway, ce_id, event_time, received_time, kafka_timestamp,
            time_error_us, time_quality, correction_version, doubt
        FROM ({tables.readings_sql(asked)})""")


_STATUS = """SELECT status, basis, why, count(*) AS windows, min(window_start) AS earliest, max(window_start) AS latest
    FROM report_windows GROUP BY ALL ORDER BY windows DESC, status, basis, why"""
"""How many windows are final, and why the others are not."""


def _devices_sql(missing: str) -> str:
    """A row for each device: streams may share one counter, so that missing numbers are of none of them."""
    return f"""WITH readings AS (
            SELECT namespace, device, count(DISTINCT stream) AS streams, count(*) AS readings,
                min(event_time) AS first_time, max(event_time) AS last_time,
                count(*) FILTER (doubt = 'redelivered') AS redelivered
            FROM report_readings WHERE time_error_us < {TIME_ERROR_UNKNOWN_US} GROUP BY ALL),
        windows AS (
            SELECT namespace, device, count(*) AS windows,
                count(*) FILTER (status = 'complete') AS complete,
                count(*) FILTER (status = 'complete_with_loss') AS complete_with_loss,
                count(*) FILTER (status = 'provisional') AS provisional, count(*) FILTER (revised) AS revised,
                CAST(sum(late) AS BIGINT) AS late
            FROM report_windows GROUP BY ALL),
        missing AS (
            SELECT namespace, device, CAST(sum(count) FILTER (NOT explained) AS BIGINT) AS missing,
                CAST(sum(count) FILTER (explained) AS BIGINT) AS explained
            FROM ({missing}) GROUP BY ALL)
        SELECT namespace, device, coalesce(streams, 0) AS streams, coalesce(readings, 0) AS readings,
            first_time, last_time, coalesce(m.missing, 0) AS missing,
            coalesce(m.explained, 0) AS explained, coalesce(windows, 0) AS windows,
            coalesce(complete, 0) AS complete, coalesce(complete_with_loss, 0) AS complete_with_loss,
            coalesce(provisional, 0) AS provisional, coalesce(revised, 0) AS revised, coalesce(late, 0) AS late,
            coalesce(redelivered, 0) AS redelivered
        FROM readings FULL JOIN windows USING (namespace, device)
        FULL JOIN missing AS m USING (namespace, device)
        ORDER BY namespace, device"""


def _gateways(tables: "Tables", evidence: Evidence, asked: Asked, at_site: Sequence[str]) -> PlainRows:
    """A row for each gateway that ever served one of the devices: what came through it, and what it still owes."""
    devices = [each for each in evidence.services if each.device == asked.device or each.device in at_site]
    counts = {
        (namespace, gateway): figures
        for namespace, gateway, *figures in tables.source.rows("""SELECT namespace, gateway, count(*),
            count(DISTINCT (device, stream)), epoch_us(max(kafka_timestamp)) FROM report_readings GROUP BY ALL""")
    }
    served = {(each.namespace, gateway) for each in devices for gateway in evidence.services[each]}
    found = []
    for namespace, gateway in sorted({*counts, *served}):
        told = evidence.told(namespace, gateway)
        readings, streams, last_us = counts.get((namespace, gateway), (0, 0, None))
        found.append(
            (
                *(namespace, gateway, told.site if told else None, readings, streams, last_us),
                *(told and told.heartbeat_us, told and told.complete_to_us, told and told.depth_rows),
                *(told and told.pending, told and told.quarantined, evidence.waits(namespace, gateway, asked)),
            )
        )
    return PlainRows(
        (
            *("namespace", "gateway", "site", "readings", "streams", "last_kafka_timestamp", "heartbeat_time"),
            *("complete_to_time", "depth_rows", "pending", "quarantined", "waits"),
        ),
        frozenset({"last_kafka_timestamp", "heartbeat_time", "complete_to_time"}),
        found,
    )


def _outages_sql(asked: Asked, proofs: str, devices: Sequence[str] | None) -> str:
    """Times in which readings of a gateway waited for Kafka, and times in which a stream was silent.

    `devices` are those of a site that is asked for. Both are found by the minute: a month of readings each second would
    take long to sort.
    """
    there = [] if devices is None else [f"device IN ({', '.join(map(text, devices)) or 'NULL'})"]
    if asked.metric is not None:
        # Nobody knows which of the silent streams have it.
        there.append("FALSE")
    since, until = f"make_timestamp({asked.since_us})", f"make_timestamp({asked.until_us})"
    silences = f"""WITH minutes AS (
            SELECT namespace, device, stream, count(*) AS n, min(event_time) AS first, max(event_time) AS last
            FROM report_readings WHERE time_error_us < {TIME_ERROR_UNKNOWN_US}
            GROUP BY namespace, device, stream, epoch_us(event_time) // 60000000),
        known AS (SELECT namespace, device, stream FROM minutes UNION SELECT namespace, device, stream FROM ({proofs})
            {where([*equal(asked, "device", "stream"), *there])}),
        edges AS (
            SELECT namespace, device, stream, n, first, last FROM minutes
            UNION ALL SELECT *, NULL, {since}, {since} FROM known
            UNION ALL SELECT *, NULL, {until}, {until} FROM known),
        spans AS (
            SELECT *, lead(first) OVER (PARTITION BY namespace, device, stream ORDER BY first, n NULLS FIRST) AS next
            FROM edges),
        usual AS (
            SELECT namespace, device, stream, greatest({SILENCE_S_MIN}, {SILENCE_INTERVALS} * CASE
                    WHEN median(n) >= 2 THEN 60 / median(n)
                    ELSE median(epoch_us(next) - epoch_us(last)) / 1e6 END) AS longest_s
            FROM spans WHERE n IS NOT NULL GROUP BY ALL),
        silent AS (
            SELECT s.namespace, s.device, s.stream, s.last AS from_time, s.next AS to_time
            FROM spans AS s LEFT JOIN usual USING (namespace, device, stream)
            WHERE epoch_us(s.next) - epoch_us(s.last) > coalesce(longest_s, {SILENCE_S_MIN}) * 1e6),
        judged AS (
            SELECT w.*, {FINDING} AS found FROM (
                SELECT *, epoch_us(from_time) AS asked_from, epoch_us(to_time) AS asked_to FROM silent
            ) AS w LEFT JOIN ({proofs}) AS proof USING (namespace, device, stream))
        SELECT 'silence' AS kind, namespace, CAST(NULL AS VARCHAR) AS gateway, device, stream, from_time, to_time,
            CAST(0 AS BIGINT) AS readings, {STATUS} AS status,
            coalesce({WHY}, 'none is missing: the device sent none') AS why FROM judged"""
    waits = f"""WITH minutes AS (
            SELECT namespace, gateway, min(coalesce(received_time, event_time)) AS first,
                count(*) FILTER (waited) AS n, count(*) FILTER (waited) * 2 >= count(*) AS waited,
                min(coalesce(received_time, event_time)) FILTER (waited) AS from_time,
                min(kafka_timestamp) FILTER (waited) AS to_time
            FROM (SELECT *, epoch_us(kafka_timestamp) - epoch_us(coalesce(received_time, event_time))
                    > {WAITED_S * 1_000_000} AS waited
                FROM report_readings)
            GROUP BY namespace, gateway, epoch_us(coalesce(received_time, event_time)) // 60000000),
        changes AS (
            SELECT *, waited IS DISTINCT FROM lag(waited) OVER of_gateway AS is_new FROM minutes
            WINDOW of_gateway AS (PARTITION BY namespace, gateway ORDER BY first)),
        islands AS (
            SELECT *, count(*) FILTER (is_new) OVER of_gateway AS island FROM changes
            WINDOW of_gateway AS (PARTITION BY namespace, gateway ORDER BY first))
        SELECT 'waited for Kafka' AS kind, namespace, gateway, CAST(NULL AS VARCHAR) AS device,
            CAST(NULL AS VARCHAR) AS stream, min(from_time) AS from_time, min(to_time) AS to_time,
            CAST(sum(n) AS BIGINT) AS readings, CAST(NULL AS VARCHAR) AS status,
            'readings waited in the buffer of the gateway' AS why
        FROM islands WHERE waited GROUP BY namespace, gateway, island"""
    return (
        f"SELECT * FROM (({waits}) UNION ALL ({silences})) ORDER BY from_time, kind, namespace, gateway, device, stream"
    )


def _lateness_sql(size_s: int) -> str:
    """Time from measuring to Kafka, by gateway and time."""
    delay = "(epoch_us(kafka_timestamp) - epoch_us(event_time)) / 1e6"
    return f"""SELECT namespace, gateway, {_bucket("event_time", size_s)} AS time, count(*) AS readings,
            median({delay}) AS median_s, max({delay}) AS max_s
        FROM report_readings WHERE time_error_us < {TIME_ERROR_UNKNOWN_US}
        GROUP BY ALL ORDER BY namespace, gateway, time"""


_CLOCKS = f"""SELECT namespace, device, stream, time_quality, count(*) AS readings,
        count(*) FILTER (time_error_us >= {TIME_ERROR_UNKNOWN_US}) AS unbounded,
        CAST(median(time_error_us) FILTER (time_error_us < {TIME_ERROR_UNKNOWN_US}) AS BIGINT) AS median_error_us,
        max(time_error_us) FILTER (time_error_us < {TIME_ERROR_UNKNOWN_US}) AS max_error_us,
        count(*) FILTER (correction_version IS NOT NULL) AS corrected
    FROM report_readings GROUP BY ALL ORDER BY namespace, device, stream, time_quality"""
"""How well times are known, by stream."""


def _clock_times_sql(size_s: int) -> str:
    return f"""SELECT {_bucket("event_time", size_s)} AS time, count(*) AS readings,
            CAST(median(time_error_us) AS BIGINT) AS median_error_us, max(time_error_us) AS max_error_us
        FROM report_readings WHERE time_error_us < {TIME_ERROR_UNKNOWN_US} GROUP BY ALL ORDER BY time"""


def _bucket(time: str, size_s: int) -> str:
    us, size_us = f"epoch_us({time})", size_s * 1_000_000
    return f"make_timestamp({us} - ({us} % {size_us} + {size_us}) % {size_us})"


def several(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Rows by the values of some columns, in the order of their first."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found
