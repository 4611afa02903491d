"""`gateways`: each gateway's last heartbeat that counts, with the registry's entry for it."""

from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession

from spark.finality.gateway_rows import GatewayRow
from spark.finality.gateway_table import read_gateways
from spark.log.edge_times import Correction, clocks
from spark.log.time_corrections import read_corrections
from spark.log.warehouse_version import Version, seen_tables
from spark.registry.registry_table import open_gateway_registry

SCHEMA = """
    namespace string, gateway string, site string, buffer string, is_present boolean, gateway_boot string,
    heartbeat_time timestamp, heartbeat_error_us bigint, complete_to_time timestamp, depth_rows bigint,
    oldest_age_s double, pending bigint, quarantined bigint, waiting int, retired_from_time timestamp,
    unread_topics array<string>
"""
"""A row for each buffer file. `heartbeat_time` has today's knowledge of the gateway's clock. Up to `complete_to_time`
the tables lack only what the gateway says that it holds: `pending` rows and `quarantined` inputs. `waiting` counts
heartbeats about records that were not read yet. `unread_topics`: topics that it writes to and `ingest` leaves out."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def open_gateways(spark: SparkSession, warehouse: str, version: Version | None = None) -> DataFrame:
    """Return `gateways`, and register it as a temporary view."""
    tables = seen_tables(spark, warehouse, version)
    states = read_gateways(spark, tables)
    corrections = [Correction(*row) for row in read_corrections(spark, tables).collect()]
    known = clocks(corrections, states.boots())
    registry = {(row.namespace, row.gateway): row for row in open_gateway_registry(spark, warehouse).collect()}

    def shown(row: GatewayRow) -> tuple[object, ...]:
        told = registry.get((row.namespace, row.gateway))
        beat = row.heartbeat
        at = None if beat is None else known.of(row.namespace, beat)
        bounded = at is not None and at.earliest_us() > 0
        return (
            *(row.namespace, row.gateway, None if told is None else told.site, row.buffer, row.until_us is None),
            None if beat is None else beat.gateway_boot,
            None if at is None or not bounded else _time(at.us),
            None if at is None else at.error_us,
            _time(at.earliest_us()) if at is not None and bounded and row.promises else None,
            row.depth_rows,
            None if row.oldest_age_ms is None else row.oldest_age_ms / 1_000,
            None if beat is None else sum(span.rows for span in row.pending),
            None if beat is None else sum(span.rows for span in row.quarantined),
            row.waiting,
            None if told is None else told.retired_from,
            list(row.unread),
        )

    view = spark.createDataFrame([shown(row) for row in states.rows()], SCHEMA)
    view.createOrReplaceTempView("gateways")
    return view


def _time(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)
