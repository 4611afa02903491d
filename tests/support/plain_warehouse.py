"""A small warehouse as the job leaves it, made without Spark: rows of `log`, and all that follows from them."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from deltalake import DeltaTable, write_deltalake

from gateway.record_contract import READING_TYPE, TIME_ERROR_UNKNOWN_US
from spark.decode.codec_declarations import NO_STREAMS, Streams
from spark.desk import tables
from spark.desk.asked import microseconds
from spark.desk.delta_source import Source
from spark.desk.evidence import REGISTRY_ALSO
from spark.log.verdicts import DELETED, IMPLAUSIBLE_DATE
from spark.windows.window_sizes import WINDOW_PROPERTY

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)
WINDOW_S = 3_600
# In Delta's log are statistics of the first 32 columns.
LOG = {
    **dict.fromkeys(("event_time", "kafka_timestamp", "received_time"), "TIMESTAMPTZ"),
    **dict.fromkeys(
        ("ordinal", "batch", "lane_sequence", "time_error_us", "boot_time_us", "boot_time_error_us"), "BIGINT"
    ),
    **dict.fromkeys(("offset", "device_sequence", "pack_span_us"), "BIGINT"),
    **dict.fromkeys(("device", "ce_type", "topic", "lane", "reject_reason", "gateway_boot", "ingest"), "VARCHAR"),
    **dict.fromkeys(("topic_id", "key", "namespace", "gateway", "stream", "buffer", "ce_id", "subject"), "VARCHAR"),
    **dict.fromkeys(("time_quality", "content_type", "device_boot", "device_counter", "doubt"), "VARCHAR"),
    **dict.fromkeys(("code_version", "declarations"), "VARCHAR"),
    "partition": "INTEGER",
    "value": "BLOB",
    "headers": "STRUCT(key VARCHAR, value BLOB)[]",
    "metrics": "STRUCT(name VARCHAR, value DECIMAL(18, 6), ago_us BIGINT)[]",
    "undeclared": "VARCHAR[]",
    "duplicate": "BOOLEAN",
    "event_date": "DATE",
}
EDGE = (
    "STRUCT(event_us BIGINT, time_error_us BIGINT, time_quality VARCHAR, gateway VARCHAR, gateway_boot VARCHAR, "
    "boot_time_us BIGINT, boot_time_error_us BIGINT)"
)
RUN = dict.fromkeys(("namespace", "device", "stream", "device_counter", "device_boot"), "VARCHAR")
OTHERS: Mapping[str, Mapping[str, str]] = {
    "amendments": {**LOG, "amended_ordinal": "BIGINT"},
    "time_corrections": {
        **dict.fromkeys(("namespace", "gateway", "gateway_boot"), "VARCHAR"),
        "version": "BIGINT",
        "quality": "VARCHAR",
        **dict.fromkeys(("boottime_us", "offset_us"), "BIGINT"),
        "rate_ppm": "DECIMAL(12, 6)",
        "error_us": "BIGINT",
        "error_growth_ppm": "DECIMAL(12, 6)",
        "supersedes": "BOOLEAN",
        "told_us": "BIGINT",
        "ce_id": "VARCHAR",
    },
    "gateway_states": {"namespace": "VARCHAR", "gateway": "VARCHAR", "state": "BLOB", "ordinal": "BIGINT"},
    "device_parts": {
        **RUN,
        "islands": f"STRUCT(first BIGINT, last BIGINT, first_edge {EDGE}, last_edge {EDGE})[]",
        "gateways": "VARCHAR[]",
        "last_us": "BIGINT",
    },
    "losses": {
        **dict.fromkeys(("namespace", "gateway", "device", "reason", "device_boot", "gateway_boot"), "VARCHAR"),
        **dict.fromkeys(
            ("count", "first_sequence", "last_sequence", "first_boottime_us", "last_boottime_us"), "BIGINT"
        ),
        **dict.fromkeys(("told_us", "told_error_us", "told_boottime_us"), "BIGINT"),
        **dict.fromkeys(("told_boot", "ce_id"), "VARCHAR"),
    },
}
PARTS = f"""SELECT namespace, device, stream, metric,
        time_bucket(INTERVAL 1 HOUR, event_time)::TIMESTAMPTZ AS window_start,
        count(*) AS n, min(value) AS min, max(value) AS max, CAST(sum(value) AS DECIMAL(38, 6)) AS sum,
        CAST(0 AS DECIMAL(38, 12)) AS sum_of_squares,
        arg_min(value, event_time) AS first, {{'time': min(event_time)::TIMESTAMPTZ}} AS first_at,
        arg_max(value, event_time) AS last, {{'time': max(event_time)::TIMESTAMPTZ}} AS last_at,
        list_sort(list(value)) AS values, CAST(0 AS BIGINT) AS late, CAST(0 AS BIGINT) AS ordinal,
        CAST(window_start AS DATE) AS window_date
    FROM readings WHERE time_error_us < {TIME_ERROR_UNKNOWN_US} GROUP BY ALL ORDER BY ALL"""


def at(days: float) -> datetime:
    """A time so many days after noon."""
    return NOON + timedelta(days=days)


def row(number: int, days: float, device: str = "42", **changes: object) -> dict[str, object]:
    """A reading in `log`, which Kafka took in a second later."""
    time = at(days)
    usual: dict[str, object] = {
        **dict.fromkeys(LOG),
        "event_time": time,
        "kafka_timestamp": time + timedelta(seconds=1),
        "received_time": time,
        "lane_sequence": number,
        "time_error_us": 1_000,
        "boot_time_us": 0,
        "offset": 100 * int(device) + number,
        "device": device,
        "ce_type": READING_TYPE,
        "topic": "device-thermo",
        "lane": device,
        "gateway_boot": "boot-1",
        "ingest": "query",
        "namespace": "plant",
        "gateway": "gw-1",
        "stream": "device-thermo",
        "buffer": "0011",
        "ce_id": f"0011-{device}-{number}",
        "time_quality": "estimated",
        "partition": 0,
        "metrics": [{"name": "celsius", "value": number, "ago_us": None}],
        "duplicate": False,
    }
    made = usual | changes
    is_bounded = made["time_error_us"] != TIME_ERROR_UNKNOWN_US
    return {"event_date": time.date() if is_bounded else date.fromisoformat(str(IMPLAUSIBLE_DATE))} | {
        name: value for name, value in made.items() if name != "event_date"
    }


class PlainWarehouse:
    """The warehouse. After each change, windows are those of the readings that the view then has."""

    def __init__(self, path: Path, streams: Streams = NO_STREAMS) -> None:
        self.path = path
        self.ordinal = -1
        self.version = 0
        self._streams = streams
        self._declared = 0
        self._heard: dict[tuple[str, str], int] = {}
        """Time of the last reading of each device and stream."""
        self.begin_version()

    @property
    def folder(self) -> Path:
        return self.path / f"v{self.version}"

    def begin_version(self) -> None:
        """Go on in another version of the tables, which has all records and nothing else."""
        before = self.folder
        self.version += 1
        for name, columns in {"log": LOG, **OTHERS}.items():
            self._append(self.folder / name, columns, [])
        if self.version > 1:
            source = Source()
            log = source.db.sql(source.table(str(before / "log")))
            zoned = ", ".join(f'"{name}"::{kind} AS "{name}"' for name, kind in LOG.items())
            write_deltalake(self.folder / "log", log.project(zoned), mode="append")
        source = Source()
        empty = source.db.sql(
            f"""SELECT * FROM ({
                PARTS.replace(
                    "FROM readings",
                    '''FROM (SELECT 'a' AS namespace, 'a' AS device, 'a' AS stream, 'a' AS metric,
            TIMESTAMP '2026-01-01' AS event_time, CAST(1 AS DECIMAL(18, 6)) AS value, 0 AS time_error_us)''',
                )
            }) LIMIT 0"""
        )
        write_deltalake(self.folder / "window_parts", empty, partition_by=["window_date"])
        parts = DeltaTable(self.folder / "window_parts")
        parts.alter.set_table_properties({WINDOW_PROPERTY: str(WINDOW_S)}, raise_if_not_exists=False)
        self.declare(self._streams)
        self._derive()

    def declare(self, streams: Streams) -> None:
        """Note by which declarations the warehouse is written."""
        self._streams = streams
        self._declared += 1
        noted = {"number": self.version, "streams": streams.to_json(), "at": at(self._declared)}
        self._append(self.path / "versions", {"number": "INTEGER", "streams": "VARCHAR", "at": "TIMESTAMPTZ"}, [noted])

    def take(self, *rows: Mapping[str, object]) -> None:
        """Append a batch to `log`."""
        self.ordinal += 1
        self._append(
            self.folder / "log", LOG, [{**each, "ordinal": self.ordinal, "batch": self.ordinal} for each in rows]
        )
        for each in rows:
            if each["ce_type"] == READING_TYPE and each["time_error_us"] != TIME_ERROR_UNKNOWN_US:
                stream = str(each["device"]), str(each["stream"])
                us = microseconds(each["event_time"])  # type: ignore[arg-type]
                self._heard[stream] = max(us, self._heard.get(stream, us))
        names = ("namespace", "device", "stream", "last_us")
        heard = [("plant", *stream, last_us) for stream, last_us in self._heard.items()]
        self.note("device_parts", *({"gateways": ["gw-1"], **dict(zip(names, of, strict=True))} for of in heard))

    def note(self, name: str, *rows: Mapping[str, object]) -> None:
        """Append rows to another table."""
        columns = OTHERS[name]
        self._append(self.folder / name, columns, [dict.fromkeys(columns) | {**each} for each in rows])
        self._derive()

    def amend(self, amended: Mapping[str, object], ordinal: int, **changes: object) -> None:
        """Give a record of a batch another verdict, found out by the last batch."""
        self.note("amendments", {**amended, "ordinal": ordinal, **changes, "amended_ordinal": self.ordinal})

    def correct(self, boot: str, days: float, version: int = 1, *, told: float) -> None:
        """Tell when a gateway's boot really was."""
        self.note(
            "time_corrections",
            {
                "namespace": "plant",
                "gateway": "gw-1",
                "gateway_boot": boot,
                "version": version,
                "quality": "synced",
                "boottime_us": 0,
                "offset_us": microseconds(at(days)),
                "rate_ppm": 0,
                "error_us": 1_000,
                "error_growth_ppm": 0,
                "supersedes": False,
                "told_us": microseconds(at(told)),
                "ce_id": f"correction-{version}",
            },
        )

    def acknowledge(self, days: float) -> None:
        """Let the gateway tell that all until then is in Kafka."""
        us = microseconds(at(days))
        edge = [us, 0, "synced", "gw-1", "boot-1", us, None]
        buffer: dict[str, object] = {
            "counted": {
                "order": [us, "gateway-events", 0, 0],
                "edge": edge,
                "offsets": {},
                "low_watermark_us": us,
                "pending": [],
                "quarantined": [],
                "depth_rows": 0,
                "oldest_age_ms": 0,
            },
            "waiting": [],
            "until_us": None,
            "is_former": False,
            "is_over": False,
            "unread": [],
        }
        state = {
            "buffers": {"0011": buffer},
            "newest": [us, "gateway-events", 0, 0],
            "boots": {"boot-1": edge},
        }
        # Later states have later batches.
        self.ordinal += 1
        told = {"namespace": "plant", "gateway": "gw-1", "state": msgspec.json.encode(state), "ordinal": self.ordinal}
        self.note("gateway_states", told)

    def register(self, *gateways: Mapping[str, object]) -> None:
        """Put gateways into the registry."""
        self._append(
            self.path / "gateway_registry",
            {**REGISTRY_ALSO, "retired_from": "TIMESTAMPTZ"},
            [{**dict.fromkeys(REGISTRY_ALSO), "namespace": "plant", **each} for each in gateways],
        )

    def delete(self, device: str, *, is_done: bool = True) -> None:
        """Note a device's deletion and, if it is done, empty its records."""
        columns = {"namespace": "VARCHAR", "device": "VARCHAR", "deleted_at": "TIMESTAMPTZ"}
        if not (self.path / "deletions").exists():
            self._append(
                self.path / "deletions", columns, [{"namespace": "plant", "device": device, "deleted_at": at(100)}]
            )
        if is_done:
            emptied = {"event_time": "NULL", "metrics": "NULL", "reject_reason": f"'{DELETED}'"}
            self._rewrite_log(
                lambda name: (
                    f"CASE WHEN device = '{device}' THEN {emptied.get(name, _quoted(name))} ELSE {_quoted(name)} END"
                )
            )

    def expire(self, before: date) -> None:
        """Remove records and windows from before a date."""
        columns = {"what": "VARCHAR", "before": "DATE"}
        self._append(self.path / "upkeep", columns, [{"what": "log", "before": before}])
        taken_in_before = before - timedelta(days=1)
        self._rewrite_log(_quoted, f"WHERE kafka_timestamp >= TIMESTAMP '{taken_in_before}'")

    def fold(self) -> None:
        """Write the windows of all days anew, as they are."""
        self._derive(is_fold=True)

    def _rewrite_log(self, value: Any, condition: str = "") -> None:
        source = Source()
        shown = ", ".join(f"({value(name)})::{kind} AS {_quoted(name)}" for name, kind in LOG.items())
        rows = source.db.sql(f"SELECT {shown} FROM ({source.table(str(self.folder / 'log'))}) {condition}")
        write_deltalake(self.folder / "log", rows, mode="overwrite")
        self._derive()

    def _append(self, path: Path, columns: Mapping[str, str], rows: list[Mapping[str, object]]) -> None:
        source = Source()
        found = source.values(columns, [[each[name] for name in columns] for each in rows])
        write_deltalake(path, source.db.sql(found), mode="append")

    def _derive(self, *, is_fold: bool = False) -> None:
        """Write the windows of the days that have changed."""
        desk = tables.open(self.path)
        desk.make_views("readings")
        desk.source.db.execute(f"CREATE TEMP TABLE parts AS {PARTS}")
        path = self.folder / "window_parts"
        desk.source.db.execute(f"CREATE TEMP TABLE there AS {desk.source.table(str(path))}")
        columns = ", ".join(_quoted(name) for name, *_ in desk.source.rows("DESCRIBE parts") if name != "window_date")
        changed = f"""SELECT DISTINCT CAST(window_start AS DATE) FROM (
            (SELECT {columns} FROM parts EXCEPT SELECT {columns} FROM there)
            UNION ALL (SELECT {columns} FROM there EXCEPT SELECT {columns} FROM parts))"""
        days = "SELECT DISTINCT window_date FROM parts" if is_fold else changed
        for (day,) in desk.source.rows(days):
            rows = desk.source.db.sql(f"SELECT * FROM parts WHERE window_date = DATE '{day}'")
            write_deltalake(path, rows, mode="overwrite", predicate=f"window_date = '{day}'")


def _quoted(name: str) -> str:
    return f'"{name}"'
