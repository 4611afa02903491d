"""Reads from the tables all evidence that decides which windows are final."""

from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.finality.gateway_table import read_gateways
from spark.finality.loss_records import losses_schema, rejects_as_losses
from spark.finality.loss_table import read_losses
from spark.finality.stream_proofs import LOST_IN_KAFKA
from spark.finality.window_status import Evidence, derive_gaps
from spark.ingest.reading_starts import ReadingStart, read_starts
from spark.log.amendments import effective_log
from spark.log.device_parts import islands_in, read_device_parts
from spark.log.edge_times import Correction
from spark.log.quarantine_view import still_rejected
from spark.log.time_corrections import read_corrections
from spark.log.warehouse_version import Version, seen_tables
from spark.registry.registry_table import open_gateway_registry, retired_gateways


def read_evidence(spark: SparkSession, warehouse: str, version: Version | None = None) -> Evidence:
    """Read the evidence. Read it before the windows, so that the windows hold every record that it names."""
    tables = seen_tables(spark, warehouse, version)
    # Gateways first: if a gateway appears meanwhile, only `services` has it, and it counts as not heard yet.
    gateways = read_gateways(spark, tables)
    devices = read_device_parts(spark, tables)
    retired = retired_gateways(open_gateway_registry(spark, warehouse)).collect()
    told = read_losses(spark, tables).unionByName(rejects_as_losses(still_rejected(effective_log(spark, tables))))
    evidence = Evidence(
        islands=islands_in(devices),
        losses=told,
        services=devices.select("namespace", "device", F.explode("gateways").alias("gateway")).distinct(),
        heard=devices.where(F.col("last_us").isNotNull()).select("namespace", "device", "stream", "last_us"),
        gateways=gateways.rows(),
        boots=gateways.boots(),
        retired_from_us={(row.namespace, row.gateway): row.retired_from_us for row in retired},
        corrections=[Correction(*row) for row in read_corrections(spark, tables).collect()],
    )
    starts = [start for start in read_starts(spark, tables) if start.losses]
    return replace(evidence, losses=told.unionByName(lost_in_kafka(evidence.services, starts))) if starts else evidence


def open_gaps(spark: SparkSession, warehouse: str, version: Version | None = None) -> DataFrame:
    """Return `gaps`, and register it as a temporary view."""
    view = derive_gaps(read_evidence(spark, warehouse, version))
    view.createOrReplaceTempView("gaps")
    return view


def lost_in_kafka(services: DataFrame, starts: Sequence[ReadingStart]) -> DataFrame:
    """Records that Kafka deleted unread, as a loss of each gateway: nobody knows whose they were, nor their times."""
    spark = services.sparkSession
    told = spark.createDataFrame([(start.at_us,) for start in starts], "told_us bigint")
    gateways = services.select("namespace", "gateway").distinct().crossJoin(F.broadcast(told))
    known = {
        "reason": LOST_IN_KAFKA,
        **dict.fromkeys(("count", "first_boottime_us", "last_boottime_us", "told_error_us", "told_boottime_us"), 0),
        "told_boot": "",
        # No real boot has this name, so nothing is known of its clock.
        "gateway_boot": "-",
    }
    others = [each for each in losses_schema() if each.name not in gateways.columns]
    rows = gateways.withColumns({each.name: F.lit(known.get(each.name)).cast(each.dataType) for each in others})
    return rows.select(*losses_schema().names)
