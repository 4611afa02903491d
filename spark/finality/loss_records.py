"""Derives rows from gateways' loss records (`docs/kafka-records.md`), and from rejects, which are losses too."""

from typing import TYPE_CHECKING, cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.decode.loss_bodies import LOSS_TYPE
from spark.engine.arrow_map import map_in_arrow
from spark.finality.stream_proofs import REJECTED
from spark.log.sequence_runs import RUN_COLUMNS
from spark.log.verdicts import CONFLICT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

LOSSES_SCHEMA = """
    namespace string, gateway string, device string, reason string, count bigint,
    device_boot string, first_sequence bigint, last_sequence bigint,
    gateway_boot string, first_boottime_us bigint, last_boottime_us bigint,
    told_us bigint, told_error_us bigint, told_boot string, told_boottime_us bigint, ce_id string
"""
"""Columns of losses. `device` is null if the gateway could not say whose readings were lost. `count` is 0 if nobody can
count them. Readings were lost in the boot `gateway_boot`, and the loss record was sent in the boot `told_boot`."""


def losses_schema() -> StructType:
    """Return the table's columns. It needs a running session."""
    return cast("StructType", StructType.fromDDL(LOSSES_SCHEMA))


def losses_in(log: DataFrame) -> DataFrame:
    """Derive the losses of readings from `log`, or from any part of it, as rows of `LOSSES_SCHEMA`.

    Loss records with a fault are left out. Today they are rejects, but an older `log` may hold some as good.
    """
    told = log.where((F.col("ce_type") == LOSS_TYPE) & F.col("reject_reason").isNull() & ~F.col("duplicate"))
    sent = told.select(
        *("namespace", "gateway", "ce_id"),
        F.unix_micros("event_time").alias("told_us"),
        F.col("time_error_us").alias("told_error_us"),
        F.col("gateway_boot").alias("told_boot"),
        F.col("boot_time_us").alias("told_boottime_us"),
        "value",
    )
    columns = dict(column.split() for column in LOSSES_SCHEMA.split(","))

    # Executors may lack Delta, which this module needs: they get the function itself.
    def losses(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa  # noqa: PLC0415 - executors have it

        from spark.decode.loss_bodies import loss_of  # noqa: PLC0415

        schema = pa.schema([(name, pa.int64() if kind == "bigint" else pa.string()) for name, kind in columns.items()])
        for batch in batches:
            found = ((row, loss_of(row["value"])) for row in batch.to_pylist())
            rows = [row | loss | {"gateway_boot": loss["boot"]} for row, loss in found if loss is not None]
            yield pa.RecordBatch.from_pylist(rows, schema=schema)

    return map_in_arrow(sent, losses, losses_schema())


def rejects_as_losses(log: DataFrame) -> DataFrame:
    """Derive losses from rejects with a number, as rows of `LOSSES_SCHEMA`, so that their gaps are explained.

    There is a row for each range of numbers. `log` must have its amendments applied: a record that could be read after
    all is no loss. Conflicts are left out, because the first reading of their number is there.
    """
    reason = F.col("reject_reason")
    # If the headers cannot be read, nobody knows whose number it was.
    named = F.col("ce_id").isNotNull() & F.col("device_sequence").isNotNull() & F.col("device").isNotNull()
    rejects = log.where(reason.isNotNull() & ~reason.startswith(CONFLICT) & named)
    numbers = rejects.groupBy(*RUN_COLUMNS, "gateway", "gateway_boot").agg(
        F.sort_array(F.collect_set("device_sequence")).alias("numbers"),
        F.min("boot_time_us").alias("first_boottime_us"),
        F.max("boot_time_us").alias("last_boottime_us"),
        F.max(F.struct("boot_time_us", F.unix_micros("event_time").alias("us"), "time_error_us")).alias("told"),
    )
    lasts = F.filter("numbers", lambda number, place: _is_beyond(F.get("numbers", place + 1), number))
    firsts = F.filter("numbers", lambda number, place: _is_beyond(number, F.get("numbers", place - 1)))
    spans = F.arrays_zip(firsts.alias("first_sequence"), lasts.alias("last_sequence"))
    each = numbers.select("*", F.inline(spans))
    identity = F.concat_ws(
        "/", F.lit("rejected"), *RUN_COLUMNS, "gateway", "gateway_boot", "first_sequence", "last_sequence"
    )
    return each.select(
        *("namespace", "gateway", "device"),
        F.lit(REJECTED).alias("reason"),
        (F.col("last_sequence") - F.col("first_sequence") + 1).alias("count"),
        *("device_boot", "first_sequence", "last_sequence", "gateway_boot", "first_boottime_us", "last_boottime_us"),
        F.col("told.us").alias("told_us"),
        F.coalesce("told.time_error_us", F.lit(TIME_ERROR_UNKNOWN_US)).alias("told_error_us"),
        F.col("gateway_boot").alias("told_boot"),
        F.col("told.boot_time_us").alias("told_boottime_us"),
        identity.alias("ce_id"),
    )


def _is_beyond(number: Column, before: Column) -> Column:
    """True if `number` does not follow right on `before`, or if one of them is missing."""
    return F.coalesce(F.try_subtract(number, F.lit(1)) > before, F.lit(True))
