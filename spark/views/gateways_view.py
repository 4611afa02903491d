"""`gateways`: each gateway's last heartbeat that counts, its newest state, and the registry's entry for it."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.finality import box_figures
from spark.finality.gateway_figures import figures_of
from spark.finality.gateway_table import read_gateways
from spark.log.edge_times import Correction, clocks
from spark.log.time_corrections import read_corrections
from spark.log.warehouse_version import Version, seen_tables
from spark.registry.registry_table import open_gateway_registry

SCHEMA = f"""
    namespace string, gateway string, site string, buffer string, is_present boolean, gateway_boot string,
    heartbeat_us bigint, heartbeat_error_us bigint, complete_to_us bigint, depth_rows bigint,
    oldest_age_s double, pending bigint, quarantined bigint, waiting int, retired_from_us bigint,
    unread_topics array<string>, {", ".join(f"{name} {kind}" for name, kind in box_figures.COLUMNS.items())}
"""
"""Columns of a table of `GatewayFigures`, each with its `BoxFigures`."""
TIMES = {
    "heartbeat_us": "heartbeat_time",
    "complete_to_us": "complete_to_time",
    "retired_from_us": "retired_from_time",
    **box_figures.TIMES,
}
"""Columns of times, and their names in the view."""


def open_gateways(spark: SparkSession, warehouse: str, version: Version | None = None) -> DataFrame:
    """Return `gateways`, a row for each buffer file, and register it as a temporary view."""
    tables = seen_tables(spark, warehouse, version)
    states = read_gateways(spark, tables)
    known = clocks((Correction(*row) for row in read_corrections(spark, tables).collect()), states.boots())
    registered = open_gateway_registry(spark, warehouse).withColumn("retired_from_us", F.unix_micros("retired_from"))
    registry = {(row.namespace, row.gateway): (row.site, row.retired_from_us) for row in registered.collect()}
    rows = [
        (
            *figures_of(row, known, *registry.get((row.namespace, row.gateway), (None, None))),
            *box_figures.box_figures(row.namespace, states.box(row.namespace, row.gateway, row.buffer), known),
        )
        for row in states.rows()
    ]
    told = spark.createDataFrame(rows, SCHEMA)
    view = told.select(
        *(F.timestamp_micros(name).alias(TIMES[name]) if name in TIMES else name for name in told.columns)
    )
    view.createOrReplaceTempView("gateways")
    return view
