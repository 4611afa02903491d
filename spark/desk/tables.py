"""The tables of a warehouse in Python, without Java. Each answer is a DuckDB relation.

from spark.desk import tables

hours = tables.open("build/demo/warehouse").windows(device="board-1", size_s=3600)
hours.df()  # or .pl(), .arrow(), .fetchall(), .write_csv("hours.csv")
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import duckdb

from spark.decode.codec_declarations import NO_STREAMS, Streams
from spark.desk.asked import ALL, Asked, equal, may_hold, microseconds, text, where, within
from spark.desk.delta_source import Source
from spark.desk.evidence import REGISTRY_ALSO, Device, Evidence, device_parts, read_evidence
from spark.desk.log_views import ALSO, quarantine, readings
from spark.desk.statements import SPARKS_WORDS, bare, named_in
from spark.desk.windows_sql import PROOF_COLUMNS, windows
from spark.engine.told_error import ToldError
from spark.engine.warehouse_folder import absolute, no_tables
from spark.finality import box_figures
from spark.finality.loss_figures import bounded
from spark.finality.stream_proofs import StreamProof
from spark.windows.window_sizes import WINDOW_PROPERTY, chosen_size

FACTOR = "DECIMAL(12, 6)"
SPAN = {"valid_from": "TIMESTAMP", "valid_to": "TIMESTAMP", "registry_version": "VARCHAR"}
BESIDE: Mapping[str, Mapping[str, str]] = {
    "window_changes": {},
    "devices": {
        **dict.fromkeys(("namespace", "device", "site"), "VARCHAR"),
        "labels": "MAP(VARCHAR, VARCHAR)",
        **SPAN,
    },
    "calibrations": {
        **dict.fromkeys(("namespace", "device", "stream", "metric"), "VARCHAR"),
        "scale": FACTOR,
        "offset": FACTOR,
        **SPAN,
    },
    "gateway_registry": REGISTRY_ALSO,
    "versions": {},
    "deletions": {"namespace": "VARCHAR", "device": "VARCHAR", "deleted_at": "TIMESTAMP"},
    "upkeep": {"what": "VARCHAR", "before": "DATE", "at": "TIMESTAMP"},
}
"""Tables beside the versions, which are shown as they are. Those that need not be there have their columns."""
GAP_COLUMNS = {
    **dict.fromkeys(("namespace", "device", "stream", "device_counter", "device_boot"), "VARCHAR"),
    **dict.fromkeys(("first", "last", "count", "after_us", "after_error_us", "before_us", "before_error_us"), "BIGINT"),
    "explained": "BOOLEAN",
    "reasons": "VARCHAR[]",
    **dict.fromkeys(("from_us", "to_us"), "BIGINT"),
}
_DUCKDB_TYPES = {
    "string": "VARCHAR",
    "bigint": "BIGINT",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "array<string>": "VARCHAR[]",
}
"""Types of Spark's SQL in DuckDB's."""
GATEWAY_COLUMNS = {
    **dict.fromkeys(("namespace", "gateway", "site", "buffer"), "VARCHAR"),
    "is_present": "BOOLEAN",
    "gateway_boot": "VARCHAR",
    **dict.fromkeys(("heartbeat_us", "heartbeat_error_us", "complete_to_us", "depth_rows"), "BIGINT"),
    "oldest_age_s": "DOUBLE",
    "pending": "BIGINT",
    "quarantined": "BIGINT",
    "waiting": "INTEGER",
    "retired_from_us": "BIGINT",
    "unread_topics": "VARCHAR[]",
    **{name: _DUCKDB_TYPES[kind] for name, kind in box_figures.COLUMNS.items()},
}
LOSS_COLUMNS = {
    **dict.fromkeys(("namespace", "gateway", "device", "reason"), "VARCHAR"),
    **dict.fromkeys(("count", "from_us", "to_us"), "BIGINT"),
    "device_boot": "VARCHAR",
    **dict.fromkeys(("first_sequence", "last_sequence", "told_us", "told_error_us"), "BIGINT"),
}
Time = datetime | str | None
"""A time for a question: with a zone, or UTC. A text is ISO 8601."""


def open(warehouse: str | Path) -> "Tables":  # noqa: A001 - `tables.open` is what a caller writes
    """Open a warehouse: a folder, or a URL such as `s3://bucket/warehouse`."""
    opened = Tables(absolute(str(warehouse)).rstrip("/"))
    for word in SPARKS_WORDS:
        opened.source.db.execute(f"CREATE TEMP MACRO {word}")
    return opened


@dataclass(slots=True)
class Tables:
    """The tables of one warehouse.

    `readings`, `windows`, `gaps`, `relation` and `sql` each ask a question of their own, which sees what was committed
    by then. All other calls belong to the question before them: together they see each table at one moment, and one
    version of the warehouse, until `renew`.
    """

    warehouse: str
    source: Source = field(default_factory=Source)
    _version: tuple[str, Streams] | None = None

    def renew(self) -> None:
        """Begin another question."""
        self._version = None
        self.source.renew()

    def readings(  # noqa: PLR0913 - the limits of a question
        self,
        *,
        device: str | None = None,
        site: str | None = None,
        stream: str | None = None,
        metric: str | None = None,
        since: Time = None,
        until: Time = None,
    ) -> duckdb.DuckDBPyRelation:
        """Every value once. `since` and `until` limit `event_time`."""
        return self.relation("readings", Asked(device, site, stream, metric, _us(since), _us(until)))

    def windows(  # noqa: PLR0913 - as above
        self,
        *,
        size_s: int | None = None,
        device: str | None = None,
        site: str | None = None,
        stream: str | None = None,
        metric: str | None = None,
        since: Time = None,
        until: Time = None,
    ) -> duckdb.DuckDBPyRelation:
        """Windows of `size_s` seconds, by default as the table holds them, that begin within `since` and `until`.

        Raises WindowSizeError.
        """
        self.renew()
        asked = Asked(device, site, stream, metric, _us(since), _us(until))
        return self.source.db.sql(self.windows_sql(asked, size_s))

    def gaps(
        self,
        *,
        device: str | None = None,
        site: str | None = None,
        stream: str | None = None,
        since: Time = None,
        until: Time = None,
    ) -> duckdb.DuckDBPyRelation:
        """Missing numbers of devices, some of which were measured within `since` and `until`."""
        return self.relation("gaps", Asked(device, site, stream, None, _us(since), _us(until)))

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Run a query on the views. Raises duckdb.Error."""
        self.renew()
        self.make_views(query)
        return self.source.db.sql(bare(query))

    def relation(self, name: str, asked: Asked = ALL) -> duckdb.DuckDBPyRelation:
        """Return the rows of a view within some limits. Limits on columns that the view lacks are left out."""
        self.renew()
        return self.source.db.sql(self.select(name, asked))

    def select(self, name: str, asked: Asked = ALL) -> str:
        """Return the rows of a view within some limits, as SQL."""
        made = _MAKERS.get(name)
        if made is not None:
            return made(self, asked)
        path, columns = f"{self.warehouse}/{name}", BESIDE[name]
        return self.source.optional(path, columns) if columns else self.source.table(path)

    def make_views(self, query: str) -> None:
        """Make the views that a query names."""
        names = named_in(query, VIEWS)
        # Read once for all, before the tables of single records: these then hold every record that it names.
        evidence = self.evidence() if _OF_EVIDENCE.keys() & {*names} else None
        for name in sorted(names, key=_ORDER.index):
            made = _OF_EVIDENCE.get(name)
            view = self.select(name) if made is None or evidence is None else made(self, evidence, ALL)
            self.source.db.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {view}")

    def version(self) -> tuple[str, Streams]:
        """Return the folder of the version that readers see, and its declarations. Raises ToldError."""
        if self._version is None:
            path = f"{self.warehouse}/versions"
            newest = 'SELECT number, streams FROM ({}) ORDER BY number DESC, "at" DESC LIMIT 1'
            found = self.source.rows(newest.format(self.source.table(path))) if self.source.opened(path) else []
            if not found:
                raise ToldError(no_tables(self.warehouse))
            ((number, streams),) = found
            self._version = f"{self.warehouse}/v{number}", Streams.from_json(streams) if streams else NO_STREAMS
            # Before `log`: an amendment whose batch `log` lacks would take a record away without its better copy.
            self.source.opened(f"{self._version[0]}/amendments")
        return self._version

    def evidence(self, device: str | None = None) -> Evidence:
        """Read the evidence on windows being final, of one device if it is named."""
        return read_evidence(self.source, self.warehouse, self.version()[0], device)

    def window_seconds(self) -> int:
        """Seconds of the table's windows."""
        return int(self.source.property(f"{self.version()[0]}/window_parts", WINDOW_PROPERTY))

    def windows_sql(self, asked: Asked = ALL, size_s: int | None = None, evidence: Evidence | None = None) -> str:
        """Return windows that begin within these limits, as SQL. Raises WindowSizeError."""
        _, streams = self.version()
        # Before the windows, so that they hold every record that the evidence names.
        proofs = self.proofs_sql((evidence or self.evidence(asked.device)).proofs())
        chosen_s = chosen_size(size_s, self.window_seconds())
        parts = self.parts_sql(asked, chosen_s)
        found = windows(parts, chosen_s, streams.windows.percentiles, proofs)
        limits = where(within("window_start", asked))
        return self._at_site(f"SELECT * FROM ({found}) {limits}" if limits else found, asked, "window_start")

    def proofs_sql(self, proofs: Iterable[tuple[Device, StreamProof]]) -> str:
        """Return the evidence of streams, with `PROOF_COLUMNS`, as SQL."""
        rows = [
            (*device, proof.stream, proof.last_us, *([span._asdict() for span in spans] for spans in proof[2:]))
            for device, proof in proofs
        ]
        return self.source.values(PROOF_COLUMNS, rows)

    def devices(self) -> list[str]:
        """The names of all devices that were heard or are registered."""
        heard = device_parts(self.source, self.version()[0])
        query = f"SELECT device FROM ({heard}) UNION SELECT device FROM ({self.select('devices')}) ORDER BY device"
        return [device for (device,) in self.source.rows(query)]

    def sites(self) -> list[str]:
        """The names of all sites of the registry."""
        tables = [self.select(name) for name in ("devices", "gateway_registry")]
        query = " UNION ".join(f"SELECT site FROM ({table}) WHERE site IS NOT NULL" for table in tables)
        return [site for (site,) in self.source.rows(f"{query} ORDER BY site")]

    def streams(self) -> list[str]:
        """The names of all streams that were heard."""
        heard = device_parts(self.source, self.version()[0])
        return [stream for (stream,) in self.source.rows(f"SELECT DISTINCT stream FROM ({heard}) ORDER BY stream")]

    def metrics(self) -> list[str]:
        """The names of all metrics that ever came. It reads all of `log`."""
        names = f"SELECT DISTINCT unnest(metrics).name AS metric FROM ({self.log_sql(ALL)}) ORDER BY metric"
        return [metric for (metric,) in self.source.rows(names)]

    def devices_at(self, site: str) -> list[str]:
        """The names of all devices that are or were at a site."""
        table = self.select("devices")
        found = self.source.rows(f"SELECT DISTINCT device FROM ({table}) WHERE site = {text(site)} ORDER BY device")
        return [device for (device,) in found]

    def parts_sql(self, asked: Asked, size_s: int = 0) -> str:
        """The parts of the windows of `size_s` seconds that begin within these limits, as SQL."""
        files, rows = [], equal(asked, "device", "stream", "metric")
        if asked.device is not None:
            files.append(may_hold("device", asked.device))
        if asked.site is not None:
            rows.append(f"device IN ({', '.join(map(text, self.devices_at(asked.site))) or 'NULL'})")
        if asked.since_us is not None:
            files.append(f'epoch_us("max.window_start") >= {asked.since_us - 1_000}')
            rows.append(f"window_start >= make_timestamp({asked.since_us})")
        if asked.until_us is not None:
            until_us = asked.until_us + size_s * 1_000_000
            files.append(f'epoch_us("min.window_start") < {until_us}')
            rows.append(f"window_start < make_timestamp({until_us})")
        table = self.source.table(f"{self.version()[0]}/window_parts", files=" AND ".join(files) or None)
        return f"SELECT * FROM ({table}) {where(rows)}"

    def _at_site(self, rows: str, asked: Asked, time: str, until: str | None = None) -> str:
        """Those rows whose device was at the site that is asked for, at a time or at some time from it to `until`."""
        if asked.site is None:
            return rows
        devices = f"SELECT * FROM ({self.select('devices')}) {where(equal(asked, 'site'))}"
        # If nothing bounds the time of a loss, it may have happened there.
        return f"""SELECT r.* FROM ({rows}) AS r SEMI JOIN ({devices}) AS d
            ON r.namespace = d.namespace AND r.device = d.device
            AND coalesce(r.{until or time} >= d.valid_from, TRUE) AND coalesce(r.{time} < d.valid_to, TRUE)"""

    def readings_sql(self, asked: Asked) -> str:
        tables, streams = self.version()
        devices = None if asked.site is None else self.devices_at(asked.site)
        return self._at_site(readings(self.source, tables, streams.times, asked, devices), asked, "event_time")

    def quarantine_sql(self, asked: Asked) -> str:
        tables, streams = self.version()
        return self._at_site(quarantine(self.source, tables, streams.times, asked), asked, "kafka_timestamp")

    def log_sql(self, _asked: Asked) -> str:
        return self.source.table(f"{self.version()[0]}/log", ALSO)

    def gaps_sql(self, evidence: Evidence, asked: Asked) -> str:
        rows = [
            (
                *(*device, *gap[1:7], *gap.after, *gap.before, gap.explained, gap.reasons),
                *(bounded(gap.from_us), bounded(gap.to_us)),
            )
            for device, gap in evidence.gaps()
        ]
        figures = self.source.values(GAP_COLUMNS, rows)
        found = f"""SELECT namespace, device, stream, device_counter, device_boot, first, last, count,
                make_timestamp(after_us) AS after_time, after_error_us, make_timestamp(before_us) AS before_time,
                before_error_us, explained, reasons, make_timestamp(from_us) AS from_time,
                make_timestamp(to_us) AS to_time FROM ({figures})"""
        # A counter that all streams share has no stream.
        limits = equal(asked, "device") + [f"(stream IS NULL OR {condition})" for condition in equal(asked, "stream")]
        rows_then = self._at_site(
            f"SELECT * FROM ({found}) {where(limits + _may_be_within(asked))}", asked, "from_time", "to_time"
        )
        return f"SELECT * EXCLUDE (from_time, to_time) FROM ({rows_then})"

    def losses_sql(self, evidence: Evidence, asked: Asked) -> str:
        """What is gone for good or in the quarantine, of readings that may be of these devices and times, as SQL."""
        figures = self.source.values(LOSS_COLUMNS, [tuple(each) for each in evidence.loss_figures()])
        found = f"""SELECT namespace, gateway, device, reason, count, make_timestamp(from_us) AS from_time,
                make_timestamp(to_us) AS to_time, device_boot, first_sequence, last_sequence,
                make_timestamp(told_us) AS told_time, told_error_us FROM ({figures})"""
        # If nobody can say whose readings were lost, or when, they may be of this device and of this time.
        limits = [f"(device IS NULL OR {condition})" for condition in equal(asked, "device")]
        rows = f"SELECT * FROM ({found}) {where(limits + _may_be_within(asked))}"
        if asked.site is None:
            return rows
        there = [
            f"({text(namespace)}, {text(gateway)})"
            for (namespace, gateway), (site, _) in evidence.registry.items()
            if site == asked.site
        ]
        of_gateways = f"device IS NULL AND (namespace, gateway) IN ({', '.join(there)})" if there else "FALSE"
        return (
            f"{self._at_site(rows, asked, 'from_time', 'to_time')} UNION ALL SELECT * FROM ({rows}) WHERE {of_gateways}"
        )

    def missing_sql(self, asked: Asked, evidence: Evidence | None = None) -> str:
        """Return the missing numbers of devices and, in the same columns, what was lost without a number, as SQL."""
        evidence = evidence or self.evidence(asked.device)
        return f"""{self.gaps_sql(evidence, asked)} UNION ALL BY NAME
            SELECT namespace, device, device_boot, nullif(count, 0) AS count, from_time AS after_time,
                to_time AS before_time, TRUE AS explained, [reason] AS reasons
            FROM ({self.losses_sql(evidence, asked)}) WHERE first_sequence IS NULL"""

    def gateways_sql(self, evidence: Evidence, asked: Asked) -> str:
        both = zip(evidence.gateways(), evidence.boxes(), strict=True)
        figures = self.source.values(GATEWAY_COLUMNS, [(*gateway, *box) for gateway, box in both])
        of_box = ", ".join(
            f"make_timestamp({name}) AS {box_figures.TIMES[name]}" if name in box_figures.TIMES else name
            for name in box_figures.COLUMNS
        )
        limits = where(equal(asked, "site"))
        return f"""SELECT namespace, gateway, site, buffer, is_present, gateway_boot,
                make_timestamp(heartbeat_us) AS heartbeat_time, heartbeat_error_us,
                make_timestamp(complete_to_us) AS complete_to_time, depth_rows, oldest_age_s, pending, quarantined,
                waiting, make_timestamp(retired_from_us) AS retired_from_time, unread_topics, {of_box}
            FROM ({figures}) {limits}"""


_OF_EVIDENCE: Mapping[str, Callable[[Tables, Evidence, Asked], str]] = {
    "windows": lambda tables, evidence, asked: tables.windows_sql(asked, evidence=evidence),
    "gaps": Tables.gaps_sql,
    "losses": Tables.losses_sql,
    "gateways": Tables.gateways_sql,
}
_MAKERS: Mapping[str, Callable[[Tables, Asked], str]] = {
    "log": Tables.log_sql,
    "readings": Tables.readings_sql,
    "quarantine": Tables.quarantine_sql,
    "windows": Tables.windows_sql,
    "gaps": lambda tables, asked: tables.gaps_sql(tables.evidence(asked.device), asked),
    "losses": lambda tables, asked: tables.losses_sql(tables.evidence(asked.device), asked),
    "gateways": lambda tables, asked: tables.gateways_sql(tables.evidence(), asked),
}
VIEWS = (
    *("log", "readings", "windows", "window_changes", "gaps", "losses", "gateways", "quarantine"),
    *("devices", "calibrations", "gateway_registry", "versions", "deletions", "upkeep"),
)
"""Names of all views, in the order in which messages list them."""
_ORDER = (*_OF_EVIDENCE, *(name for name in VIEWS if name not in _OF_EVIDENCE))


def _may_be_within(asked: Asked) -> list[str]:
    """Conditions on rows that happened between `from_time` and `to_time`. Null is no bound."""
    since, until = Asked(since_us=asked.since_us), Asked(until_us=asked.until_us)
    return [f"coalesce({limit}, TRUE)" for limit in (*within("to_time", since), *within("from_time", until))]


def _us(time: Time) -> int | None:
    if time is None:
        return None
    return microseconds(datetime.fromisoformat(time) if isinstance(time, str) else time)
