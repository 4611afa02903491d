"""`readings` and `quarantine` in DuckDB's SQL. `readings_view` and `quarantine_view` have the same in Spark's words.

DuckDB divides decimals as doubles, so that corrections of times are computed in whole numbers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gateway.record_contract import READING_TYPE, TIME_ERROR_UNKNOWN_US
from spark.decode.codec_declarations import Times
from spark.desk.asked import Asked, equal, may_hold, text, where, within
from spark.desk.delta_source import Source
from spark.log.edge_times import DEVICE_QUALITY, EARLIEST_US, LATEST_US, TOLD_SLACK_US, Correction, GatewayBoot, clocks
from spark.log.verdicts import DELETED, IMPLAUSIBLE, IMPLAUSIBLE_DATE, RETRY

ALSO = {"device_counter": "VARCHAR"}
"""Columns that `log` of an earlier release lacks."""
ROW = ("topic_id", "topic", "partition", '"offset"', "ordinal")
PLACE = ROW[:-1]
CUT_US = 1_000
"""Delta cuts the greatest time of a file to whole milliseconds."""
NO_DATE = f"event_date = DATE '{IMPLAUSIBLE_DATE}'"
IS_IMPLAUSIBLE = f"{NO_DATE} AND time_error_us < {TIME_ERROR_UNKNOWN_US}"
IS_READING = f"ce_type = '{READING_TYPE}' AND reject_reason IS NULL AND NOT duplicate"
IS_REJECT = f"reject_reason IS NOT NULL AND reject_reason <> {text(DELETED)}"
WAS_READ_AGAIN = f"ingest LIKE '{RETRY}%'"
MAY_HOLD_REJECTS = (
    f'"null_count.reject_reason" < num_records OR ("max.ingest" >= \'{RETRY}\' AND "min.ingest" < \'{RETRY}~\')'
)
"""Files of `log` with rejects, or with records that were read again."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """All time corrections known at one moment."""

    known: tuple[Correction, ...] = ()

    @property
    def current(self) -> Mapping[GatewayBoot, tuple[Correction, int | None]]:
        """Each boot's correction that counts, and the time until which wrong times were sent."""
        return clocks(self.known, {}).corrections

    def may_move(self) -> str:
        """A condition on rows of `log`: true if a correction may move the reading."""
        if not self.known:
            return "FALSE"
        wrong = sorted({correction.gateway_boot for correction in self.known if correction.supersedes})
        of_wrong_boot = f" OR gateway_boot IN ({', '.join(map(text, wrong))})" if wrong else ""
        return f"(boot_time_error_us IS NOT NULL{of_wrong_boot})"

    def may_move_in(self) -> str:
        """The same as a condition on Delta's statistics of a file."""
        wrong = sorted({correction.gateway_boot for correction in self.known if correction.supersedes})
        boots = [may_hold("gateway_boot", boot) for boot in wrong]
        return " OR ".join(['"null_count.boot_time_error_us" < num_records', *boots]) if self.known else "FALSE"


def read_corrections(source: Source, tables: str) -> Corrections:
    """Return all corrections known now."""
    table = source.table(f"{tables}/time_corrections")
    rows = source.rows(f"SELECT {', '.join(Correction._fields)} FROM ({table})")
    return Corrections(tuple(Correction(*row) for row in rows))


def effective_log(source: Source, tables: str, files: str | None = None) -> str:
    """Return `log` with the amendments applied."""
    (found,) = _effective(source, tables, files)
    return found


def _effective(source: Source, tables: str, *files: str | None) -> list[str]:
    """Return parts of `log`, by conditions on its files, with the amendments applied to each."""
    # Amendments first, as in `Tables.version`.
    path = f"{tables}/amendments"
    # Most warehouses have none. They are spared the join.
    amendments = source.table(path, ALSO) if source.has_rows(path) else None
    logs = source.parts(f"{tables}/log", ALSO, *files)
    if amendments is None:
        return logs
    latest = f"""SELECT * EXCLUDE (amended_ordinal) FROM ({amendments})
        QUALIFY row_number() OVER (PARTITION BY {", ".join(ROW)} ORDER BY amended_ordinal DESC) = 1"""
    same = " AND ".join(f"l.{name} IS NOT DISTINCT FROM a.{name}" for name in (*ROW, "event_date"))
    return [
        f"SELECT l.* FROM ({log}) AS l ANTI JOIN ({latest}) AS a ON {same} UNION ALL BY NAME {latest}" for log in logs
    ]


def readings(source: Source, tables: str, times: Times, asked: Asked, devices: Iterable[str] | None = None) -> str:
    """Return the readings within these limits. `devices` are those of the site that is asked for."""
    return " UNION ALL BY NAME ".join(reading_parts(source, tables, times, asked, devices))


def reading_parts(
    source: Source, tables: str, times: Times, asked: Asked, devices: Iterable[str] | None = None
) -> tuple[str, str]:
    """Return the readings within these limits in two parts: with their times as sent, and with other times."""
    corrections = read_corrections(source, tables)
    rows = [IS_READING, *equal(asked, "device", "stream")]
    if devices is not None:
        rows.append(f"device IN ({', '.join(map(text, devices)) or 'NULL'})")
    # Of most readings no correction moves the time, and all values were taken at the record's time. Their times are the
    # columns of `log`, so that a condition on them skips files and parts of files.
    is_moved = f"({corrections.may_move()} OR pack_span_us IS NOT NULL)"
    may_be_moved = f'"null_count.pack_span_us" < num_records OR {corrections.may_move_in()}'
    of_device = _of_device(asked)
    still, moved = _effective(
        source, tables, _all([*of_device, *_within_files(asked)]), _all([*of_device, f"({may_be_moved})"])
    )
    as_sent = f"""SELECT *, event_time AS sent_event_time, time_error_us AS sent_time_error_us,
            time_quality AS sent_time_quality, CAST(NULL AS BIGINT) AS correction_version
        FROM ({still}) {where([*rows, f"NOT {is_moved}", *within("event_time", asked)])}"""
    timed = retimed(source, f"SELECT * FROM ({moved}) {where([*rows, is_moved])}", corrections, times)
    limits = equal(asked, "metric")
    return (
        f"SELECT * FROM ({_each_metric(as_sent, str)}) {where(limits)}",
        f"SELECT * FROM ({_each_metric(timed, _taken_at)}) {where([*limits, *within('event_time', asked)])}",
    )


def _each_metric(timed: str, time: Callable[[str], str]) -> str:
    """A row for each metric of readings. `time` makes the time of a value from the record's."""
    return f"""SELECT namespace, device, stream, m.name AS metric, m.value AS value,
            {time("event_time")} AS event_time, time_error_us, time_quality, received_time,
            device_boot, device_sequence, device_counter, doubt, gateway, gateway_boot, ce_id, buffer, lane,
            lane_sequence, topic, partition, "offset", kafka_timestamp, event_date,
            {time("sent_event_time")} AS sent_event_time, sent_time_error_us, sent_time_quality, correction_version
        FROM (SELECT *, unnest(metrics) AS m FROM ({timed}) WHERE NOT ({IS_IMPLAUSIBLE}))"""


def quarantine(source: Source, tables: str, times: Times, asked: Asked) -> str:
    """Return the rejects within these limits, with the times when Kafka took them in."""
    corrections = read_corrections(source, tables)
    files = [f'epoch_us("max.kafka_timestamp") >= {asked.since_us - CUT_US}'] if asked.since_us is not None else []
    files += [f'epoch_us("min.kafka_timestamp") < {asked.until_us}'] if asked.until_us is not None else []
    log = effective_log(source, tables, " AND ".join(files) or None)
    candidates = f"SELECT * FROM ({log}) WHERE {IS_READING} AND ({NO_DATE} OR {corrections.may_move()})"
    timed = retimed(source, candidates, corrections, times)
    implausible = f"""SELECT * EXCLUDE (sent_event_time, sent_time_error_us, sent_time_quality, correction_version)
            REPLACE ({text(IMPLAUSIBLE)} AS reject_reason)
        FROM ({timed}) WHERE {IS_IMPLAUSIBLE}"""
    rejects = f"SELECT * FROM ({log}) WHERE {IS_REJECT} UNION ALL BY NAME {implausible}"
    limits = [*equal(asked, "device"), *within("kafka_timestamp", asked)]
    return f"""SELECT kafka_timestamp, topic, partition, "offset", split_part(reject_reason, ':', 1) AS kind,
            reject_reason AS reason, retried, namespace, gateway, device, ce_type, ce_id, event_time, device_boot,
            device_sequence, device_counter, content_type, key, value, headers, declarations, code_version, topic_id,
            ordinal
        FROM ({_with_retried(rejects, log)}) {where(limits)}"""


def still_rejected(source: Source, tables: str) -> str:
    """Return the rows of `log` that are still rejects."""
    log = effective_log(source, tables, MAY_HOLD_REJECTS)
    return f"SELECT * FROM ({_with_retried(f'SELECT * FROM ({log}) WHERE {IS_REJECT}', log)}) WHERE NOT retried"


def retimed(source: Source, records: str, corrections: Corrections, times: Times) -> str:
    """Correct the times of readings by the rules of `time_corrections`. `records` are rows of `log`."""
    if not corrections.known:
        return f"""SELECT *, event_time AS sent_event_time, time_error_us AS sent_time_error_us,
            time_quality AS sent_time_quality, CAST(NULL AS BIGINT) AS correction_version FROM ({records})"""
    current = source.values(
        {
            **dict.fromkeys(("namespace", "gateway", "gateway_boot"), "VARCHAR"),
            "c_version": "BIGINT",
            "c_quality": "VARCHAR",
            "c_boottime_us": "BIGINT",
            "c_offset_us": "BIGINT",
            "c_rate": "HUGEINT",
            "c_error_us": "BIGINT",
            "c_growth": "HUGEINT",
            "c_told_us": "BIGINT",
            "c_wrong_until_us": "BIGINT",
        },
        [
            (
                *(*boot, last.version, last.quality, last.boottime_us, last.offset_us),
                *(int(last.rate_ppm.scaleb(6)), last.error_us, int(last.error_growth_ppm.scaleb(6))),
                *(last.told_us, wrong_until_us),
            )
            for boot, (last, wrong_until_us) in corrections.current.items()
        ],
    )
    mended = "make_timestamp(mended_us)"
    plausible = f"""mended_error_us < {TIME_ERROR_UNKNOWN_US}
        AND {mended} >= TIMESTAMP '{times.plausible_from} 00:00:00'
        AND {mended} <= kafka_timestamp + to_seconds({times.ahead_max_s})"""
    unbounded = f"coalesce(boot_time_error_us = {TIME_ERROR_UNKNOWN_US}, FALSE)"
    return f"""WITH reckoned AS (
            SELECT l.*, c.* EXCLUDE (namespace, gateway, gateway_boot),
                CAST(l.boot_time_us AS HUGEINT) - c.c_boottime_us AS distance,
                CAST(l.boot_time_us AS HUGEINT) + c.c_offset_us
                    + sign(distance) * sign(c.c_rate) * (abs(distance) * abs(c.c_rate) // 1000000000000) AS us
            FROM ({records}) AS l LEFT JOIN ({current}) AS c USING (namespace, gateway, gateway_boot)),
        mended AS (
            SELECT *, CASE WHEN us BETWEEN {EARLIEST_US} AND {LATEST_US} THEN CAST(us AS BIGINT) END AS mended_us,
                CAST(least(
                    CAST(c_error_us AS HUGEINT) + (abs(distance) * c_growth + 999999999999) // 1000000000000
                        + coalesce(boot_time_error_us, time_error_us),
                    CAST({TIME_ERROR_UNKNOWN_US} AS HUGEINT)) AS BIGINT) AS mended_error_us
            FROM reckoned),
        judged AS (
            SELECT *, coalesce(time_quality <> '{DEVICE_QUALITY}' AND (
                (mended_error_us < time_error_us AND {_within_us("c_told_us")}) OR {_within_us("c_wrong_until_us")}
            ), FALSE) AS applies FROM mended)
        SELECT * EXCLUDE (c_version, c_quality, c_boottime_us, c_offset_us, c_rate, c_error_us, c_growth, c_told_us,
                c_wrong_until_us, distance, us, mended_us, mended_error_us, applies)
            REPLACE (
                CASE WHEN applies THEN {mended} ELSE event_time END AS event_time,
                CASE WHEN applies THEN mended_error_us ELSE time_error_us END AS time_error_us,
                CASE WHEN NOT applies THEN time_quality WHEN c_quality <> 'synced' THEN 'bounded'
                    WHEN time_quality = 'bounded' AND NOT {unbounded} THEN 'estimated' ELSE time_quality
                END AS time_quality,
                CASE WHEN NOT applies THEN event_date WHEN {plausible} THEN CAST({mended} AS DATE)
                    ELSE DATE '{IMPLAUSIBLE_DATE}' END AS event_date),
            event_time AS sent_event_time, time_error_us AS sent_time_error_us, time_quality AS sent_time_quality,
            CASE WHEN applies THEN c_version END AS correction_version
        FROM judged"""


def _within_us(moment: str) -> str:
    return f"coalesce(mended_us <= CAST({moment} AS HUGEINT) + {TOLD_SLACK_US}, FALSE)"


def _taken_at(record_time: str) -> str:
    return f"make_timestamp(greatest(epoch_us({record_time}) - coalesce(m.ago_us, 0), {EARLIEST_US}))"


def _of_device(asked: Asked) -> list[str]:
    """Conditions on Delta's statistics of a file, by the device."""
    return [] if asked.device is None else [may_hold("device", asked.device)]


def _within_files(asked: Asked) -> list[str]:
    """Conditions on Delta's statistics of a file, by the times of its records."""
    found = [f'epoch_us("max.event_time") >= {asked.since_us - CUT_US}'] if asked.since_us is not None else []
    return found + ([f'epoch_us("min.event_time") < {asked.until_us}'] if asked.until_us is not None else [])


def _all(conditions: list[str]) -> str | None:
    return " AND ".join(conditions) or None


def _with_retried(rejects: str, log: str) -> str:
    same = " AND ".join(f"l.{name} IS NOT DISTINCT FROM a.{name}" for name in PLACE)
    return f"""WITH last AS (
            SELECT * FROM ({rejects})
            QUALIFY row_number() OVER (PARTITION BY {", ".join(PLACE)} ORDER BY ordinal DESC) = 1),
        again AS (SELECT DISTINCT {", ".join(PLACE)}, TRUE AS retried FROM ({log}) WHERE {WAS_READ_AGAIN})
        SELECT l.*, coalesce(a.retried, FALSE) AS retried FROM last AS l LEFT JOIN again AS a ON {same}"""
