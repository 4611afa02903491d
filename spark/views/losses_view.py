"""`losses`: readings that are gone for good, or in the quarantine, with the times when they were taken."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.finality.loss_figures import figures_of
from spark.finality.stream_proofs import DeviceLoss
from spark.log.edge_times import clocks
from spark.log.warehouse_version import Version
from spark.views.evidence import read_evidence

SCHEMA = """
    namespace string, gateway string, device string, reason string, count bigint, from_us bigint, to_us bigint,
    device_boot string, first_sequence bigint, last_sequence bigint, told_us bigint, told_error_us bigint
"""
"""Columns of a table of `LossFigures`."""
TIMES = {"from_us": "from_time", "to_us": "to_time", "told_us": "told_time"}
"""Columns of times, and their names in the view."""


def open_losses(spark: SparkSession, warehouse: str, version: Version | None = None) -> DataFrame:
    """Return `losses`, and register it as a temporary view."""
    evidence = read_evidence(spark, warehouse, version)
    known = clocks(evidence.corrections, evidence.boots)
    names = ("gateway", "reason", "count", *DeviceLoss._fields[4:])
    rows = []
    for row in evidence.losses.select("namespace", "device", *names).collect():
        namespace, device, gateway, *others = row
        rows.append(figures_of(known, namespace, device, DeviceLoss(gateway, device is not None, *others)))
    told = spark.createDataFrame(rows, SCHEMA)
    view = told.select(
        *(F.timestamp_micros(name).alias(TIMES[name]) if name in TIMES else name for name in told.columns)
    )
    view.createOrReplaceTempView("losses")
    return view
