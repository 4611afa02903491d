"""Finds the days whose readings may have changed since a batch: where they are now, and where they were published.

Readings are new on a day (`log` has further batches), or they are there no more: another copy counts or a reject was
read again (`amendments`), a correction moves them (`time_corrections`), they were deleted or are too old.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from hashlib import blake2b

from gateway.record_contract import READING_TYPE
from spark.decode.codec_declarations import Times
from spark.desk.asked import may_hold, microseconds, text
from spark.desk.delta_source import Source
from spark.desk.log_views import ALSO, Corrections, retimed
from spark.log.edge_times import EARLIEST_US

PLACE = ("topic", "partition", '"offset"')
DAY = "CAST(event_time AS DATE)"


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since the last time."""

    ordinal: int
    """The last batch that was read then."""
    boots: Sequence[str]
    """Boots of gateways whose correction is another now."""


def boot_digests(corrections: Corrections) -> dict[str, str]:
    """Return a digest of the correction that counts for each boot."""
    return {
        "/".join(boot): blake2b(repr(told).encode(), digest_size=8).hexdigest()
        for boot, told in corrections.current.items()
    }


def changed_boots(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of boots whose digests differ."""
    return sorted({boot.rpartition("/")[2] for boot, _ in before.items() ^ now.items()})


def days_now(source: Source, tables: str, times: Times, corrections: Corrections, changes: Changes) -> set[date]:
    """Return the days on which changed records have readings now, and a few more where they had some."""
    # Records of a batch may be amended while the next run reads it: so amendments of the last batch are read again.
    logs = source.parts(f"{tables}/log", ALSO, f'"max.ordinal" > {changes.ordinal}', _of_boots_in(changes.boots))
    new, moved = (f"SELECT * FROM ({log})" for log in logs)
    parts = [f"{new} WHERE ordinal > {changes.ordinal}"]
    if changes.boots:
        parts.append(f"{moved} WHERE gateway_boot IN {_texts(changes.boots)}")
    if source.has_rows(f"{tables}/amendments"):
        parts.append(_amended(source, tables, changes.ordinal))
    records = " UNION ALL BY NAME ".join(parts)
    timed = retimed(source, f"SELECT * FROM ({records}) WHERE ce_type = '{READING_TYPE}'", corrections, times)
    # Of packs, each value has a time of its own.
    agos = "list_append(list_transform(coalesce(metrics, []), lambda each: coalesce(each.ago_us, 0)), 0)"
    of_values = f"""SELECT make_timestamp(greatest(epoch_us(event_time) - ago_us, {EARLIEST_US})) AS event_time
        FROM (SELECT unnest([event_time, sent_event_time]) AS event_time, agos
            FROM (SELECT event_time, sent_event_time, {agos} AS agos FROM ({timed}))), unnest(agos) AS a(ago_us)"""
    return _days(source, of_values)


def days_then(source: Source, published: str, tables: str, times: Times, changes: Changes) -> set[date]:
    """Return the days on which changed or removed records have readings in the published table, given as SQL."""
    found: set[date] = set()
    if changes.boots:
        found |= _days(source, f"SELECT event_time FROM ({published}) WHERE gateway_boot IN {_texts(changes.boots)}")
    if source.has_rows(f"{tables}/amendments"):
        amended = _amended(source, tables, changes.ordinal)
        found |= _days(
            source,
            f"SELECT event_time FROM ({published}) SEMI JOIN (SELECT {', '.join(PLACE)} FROM ({amended})) "
            f"USING ({', '.join(PLACE)})",
        )
    for condition in _removed(source, tables.rpartition("/")[0], times):
        found |= _days(source, f"SELECT event_time FROM ({published}) WHERE {condition}")
    return found


def days_of(source: Source, parts: Iterable[str]) -> set[date]:
    """Return all days of readings."""
    return set().union(*(_days(source, part) for part in parts))


def _days(source: Source, rows: str) -> set[date]:
    return {day for (day,) in source.rows(f"SELECT DISTINCT {DAY} FROM ({rows}) WHERE event_time IS NOT NULL")}


def _amended(source: Source, tables: str, ordinal: int) -> str:
    amendments = source.table(f"{tables}/amendments", ALSO)
    return f"SELECT * EXCLUDE (amended_ordinal) FROM ({amendments}) WHERE amended_ordinal >= {ordinal}"


def _removed(source: Source, warehouse: str, times: Times) -> list[str]:
    """Conditions on published readings that were deleted, or are older than `log` keeps them.

    A deletion is noted before it is carried out. So all that were ever noted are looked for.
    """
    columns = {"namespace": "VARCHAR", "device": "VARCHAR", "deleted_at": "TIMESTAMP"}
    deletions = source.optional(f"{warehouse}/deletions", columns)
    conditions = [
        f"namespace = {text(namespace)} AND device = {text(device)} AND epoch_us(kafka_timestamp) < {deleted_us}"
        for namespace, device, deleted_us in source.rows(
            f"SELECT namespace, device, epoch_us(max(deleted_at)) FROM ({deletions}) GROUP BY ALL ORDER BY ALL"
        )
    ]
    upkeep = source.optional(f"{warehouse}/upkeep", {"what": "VARCHAR", "before": "DATE"})
    ((before,),) = source.rows(f"SELECT max(before) FROM ({upkeep}) WHERE what = 'log'")
    if before is not None:
        taken_in_before = datetime.combine(before, time.min, UTC) - timedelta(seconds=times.ahead_max_s)
        conditions.append(f"epoch_us(kafka_timestamp) < {microseconds(taken_in_before)}")
    return conditions


def _of_boots_in(boots: Sequence[str]) -> str:
    """A condition on Delta's statistics of a file: it may hold records of these boots."""
    return " OR ".join(may_hold("gateway_boot", boot) for boot in boots) or "FALSE"


def _texts(values: Iterable[str]) -> str:
    return f"({', '.join(map(text, values))})"
