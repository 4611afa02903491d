"""Finds copies of a reading, chooses the one that counts, and rejects other payloads under its name as conflicts.

A reading is named by its `ce_id`. If its sensor sends a sequence, the sequence and its run
(`sequence_runs.RUN_COLUMNS`) name it too: a sensor that changes to another gateway may send again what the first one
has. Of copies with one payload, the one with the smallest bound of its time counts, then the first in Kafka's order. If
payloads differ, the first in Kafka's order is right. The others are conflicts: rejects, never duplicates.

A record rejected for another reason is no copy: a record that was damaged on its way must not hide a good one.
"""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import READING_TYPE
from spark.decode.codec_declarations import Streams
from spark.log.amendments import ROW
from spark.log.lane_sequences import joined
from spark.log.sequence_runs import RUN_COLUMNS, RunNumbers
from spark.log.verdicts import CONFLICT

CONFLICT_CE_ID = f"{CONFLICT}: another payload came first with this ce_id"
CONFLICT_SEQUENCE = f"{CONFLICT}: another payload came first with this boot and sequence of the device"
NUMBER = (*RUN_COLUMNS, "device_sequence", "has_sequence")
JUDGED = (
    *(*ROW, "kafka_timestamp", "buffer", "lane", "lane_sequence", "ce_id", "ce_type", "value", "time_error_us"),
    *(*RUN_COLUMNS, "device_sequence", "duplicate", "reject_reason", "event_date"),
)
"""Columns of `log` that decide on copies, and the date. The others are most of a row's bytes."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Ranges of numbers of lanes and runs that came again, and the batches where copies may stand.

    All of these numbers came in the batch that is taken. Of any other number, the search in these batches may miss
    copies, and then take a duplicate for the copy that counts.
    """

    lanes: list[tuple[str, str, int, int]]
    """Buffer, lane, first and last number."""
    runs: list[RunNumbers]
    batches: list[tuple[int, int]]
    """First and last ordinal."""

    def count(self) -> int:
        """How many numbers these are, a number of a lane and one of a run counted apart."""
        return sum(each[-1] - each[-2] + 1 for each in self.lanes) + sum(each[-1] - each[-2] + 1 for each in self.runs)

    def __bool__(self) -> bool:
        return bool(self.lanes or self.runs)

    def and_also(self, other: "Suspects") -> "Suspects":
        """Return these suspects and others."""
        batches = joined(self.batches + other.batches)
        return Suspects(self.lanes + other.lanes, self.runs + other.runs, batches)


NO_SUSPECTS = Suspects([], [], [])


def suspected(rows: DataFrame, suspects: Suspects) -> DataFrame:
    """Choose the rows of `log` that may be copies of one another."""
    spark = rows.sparkSession
    is_suspect = F.lit(False)
    for ranges, key, number in (
        (suspects.lanes, {name: F.col(name).outer() for name in ("buffer", "lane")}, "lane_sequence"),
        (suspects.runs, _run(), "device_sequence"),
    ):
        if ranges:
            named = ", ".join(f"of_{name} string" for name in key)
            found = spark.createDataFrame(ranges, f"{named}, first bigint, last bigint")
            is_in = F.col(number).outer().between(F.col("first"), F.col("last"))
            for name, value in key.items():
                is_in &= F.col(f"of_{name}") == value
            is_suspect |= F.broadcast(found).where(is_in).exists()
    # One read of the rows, however many ranges there are.
    return rows.where(may_be_copy()).where(is_suspect)


def conflicts_kept(streams: Streams) -> Column:
    """True for rows of streams whose declaration keeps conflicts."""
    kept = F.lit(False)
    for stream in reversed(streams.in_order()):
        is_of = F.col("stream").rlike(stream.regex) if stream.is_pattern else F.col("stream") == stream.name
        kept = F.when(is_of, stream.conflicts == "keep").otherwise(kept)
    return F.coalesce(kept, F.lit(False)) if any(each.conflicts == "keep" for each in streams.streams) else F.lit(False)


def may_be_copy() -> Column:
    """True for rows that may be copies, or have copies."""
    fault = F.col("reject_reason")
    return F.col("ce_id").isNotNull() & (fault.isNull() | fault.startswith(CONFLICT))


def judged(copies: DataFrame, kept: Column | None = None) -> DataFrame:
    """Decide anew which rows are duplicates or conflicts. `copies` must hold all copies of each reading in it.

    `kept` is true for rows that stay as readings of their own if their payload differs.
    """
    kept = F.lit(False) if kept is None else kept
    order = F.struct("kafka_timestamp", "topic", "partition", "offset", "ordinal")
    ranked = copies.withColumns({"order": order, "rank": F.struct("time_error_us", order), "kept": kept})
    ranked = ranked.withColumn("first_order", F.min("order").over(Window.partitionBy("ce_id")))
    by_id = _told_apart(ranked, ["ce_id"], F.lit(True), "id")
    counts = ~F.col("id_duplicate") & ~F.col("id_conflict")
    has_sequence = counts & F.col("device_sequence").isNotNull() & (F.col("ce_type") == READING_TYPE)
    by_run = _told_apart(by_id.withColumn("has_sequence", has_sequence), list(NUMBER), F.col("has_sequence"), "run")
    conflict = F.when(F.col("id_conflict"), CONFLICT_CE_ID).when(F.col("run_conflict"), CONFLICT_SEQUENCE)
    names = [name for name in copies.columns if name not in {"duplicate", "reject_reason"}]
    return by_run.select(
        *names,
        (F.col("id_duplicate") | F.col("run_duplicate")).alias("duplicate"),
        conflict.alias("reject_reason"),
    ).select(*copies.columns)


def _told_apart(rows: DataFrame, name: list[str], named: Column, prefix: str) -> DataFrame:
    """Mark conflicts, whose payload is not the first one of their name, and all but the best row of a payload."""
    same_name, same_payload = Window.partitionBy(*name), Window.partitionBy(*name, "value")
    first = F.min_by("value", F.when(named, F.struct("first_order", "order"))).over(same_name)
    best = F.min(F.when(named, F.col("rank"))).over(same_payload)
    other = named & ~F.col("value").eqNullSafe(F.col("first_value"))
    return (
        rows.withColumns({"first_value": first, "best": best})
        .withColumn(f"{prefix}_conflict", other & ~F.col("kept"))
        .withColumn(f"{prefix}_duplicate", named & ~F.col(f"{prefix}_conflict") & (F.col("rank") != F.col("best")))
        .drop("first_value", "best")
    )


def with_verdicts(rows: DataFrame, verdicts: DataFrame, how: str = "left") -> DataFrame:
    """Put the `verdicts` of `judged` into rows. With `how` "inner", only rows with a verdict are returned."""
    said = verdicts.select(*ROW, F.struct("duplicate", "reject_reason").alias("said"))
    same = [F.col(f"row.{name}").eqNullSafe(F.col(f"verdict.{name}")) for name in ROW]
    joined = rows.alias("row").join(said.alias("verdict"), same, how)
    replaced = {"duplicate", "reject_reason"}
    return joined.select(
        *(
            F.when(F.col("verdict.said").isNull(), F.col(f"row.{name}"))
            .otherwise(F.col(f"verdict.said.{name}"))
            .alias(name)
            if name in replaced
            else F.col(f"row.{name}")
            for name in rows.columns
        )
    )


def _run() -> dict[str, Column]:
    """The names of a row's run, in a condition of a subquery."""
    columns = {name: F.col(name).outer() for name in RUN_COLUMNS}
    return columns | {"device_counter": F.coalesce(columns["device_counter"], F.lit(""))}
