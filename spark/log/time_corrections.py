"""Keeps the table `time_corrections`, by which gateways correct their clocks afterwards, and corrects readings' times.

A reading has its time by the gateway's clock (CLOCK_BOOTTIME, in `boot_time_us`), which never steps. A correction gives
the true time by that clock for one boot of a gateway. At a boot time b the true time is

    offset_us + b + (b - boottime_us) * rate_ppm / 10^6        the last term cut towards zero to whole microseconds

and its bound

    error_us + |b - boottime_us| * error_growth_ppm / 10^6     the last term rounded up

plus the reading's own bound: `boot_time_error_us`, or `time_error_us` if that is null. All of this is computed in whole
numbers and decimals, without binary floats.

Of a boot's corrections, the one with the highest version counts. It applies to a reading if it makes the bound smaller,
or if the times sent before were wrong (`supersedes`). It applies only to readings from before the correction: a reading
whose corrected time is later was sent by the corrected clock. Times from a sensor itself (`device`) do not depend on
the gateway's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.decode.codec_declarations import USUAL_TIMES, Times
from spark.decode.correction_records import CORRECTION_TYPE, MEMBERS, fault, value_of
from spark.decode.event_bodies import body_of
from spark.engine.delta_staging import AppendTable, is_empty, make_table
from spark.log.edge_times import DEVICE_QUALITY, EARLIEST_US, LATEST_US, TOLD_SLACK_US, Clocks, Correction, clocks
from spark.log.log_table import ORDINAL, date_of

BOOT = ("namespace", "gateway", "gateway_boot")
"""Columns that name the boot of a gateway."""
SCHEMA = f"""
    namespace string, gateway string, gateway_boot string,
    {", ".join(f"{member.name} {member.type}" for member in MEMBERS if member.name != "boot")},
    told_us bigint, ce_id string
"""
BOOTS_MAX = 200
"""Boots that are named one by one when `log` is searched for their readings."""
WIDE = "decimal(38,0)"
DISTANCE_US = "(cast(boot_time_us as decimal(19,0)) - cast(correction.boottime_us as decimal(19,0)))"


@dataclass(frozen=True, slots=True)
class Corrections:
    """All corrections known at one moment."""

    current: DataFrame
    """Corrections that count, from the function `current`."""
    told_us: dict[str, int]
    """Time of each boot's last correction. No correction moves later readings."""
    wrong_boots: frozenset[str]
    """Boots that sent wrong times."""
    clocks: Clocks
    """The corrections that count, for plain Python."""

    def may_move(self) -> Column:
        """True for readings that a correction may move. It uses literals, so that Delta can skip other files.

        Most readings cannot be moved: they were sent by a synced clock, and no correction supersedes it.
        """
        return F.col("boot_time_error_us").isNotNull() | F.col("gateway_boot").isin(*self.wrong_boots)

    def may_move_to(self, from_us: int) -> Column:
        """True for readings that a correction may move to a time from `from_us` on, whatever time was sent."""
        boots = [boot for boot, told_us in self.told_us.items() if from_us <= told_us + TOLD_SLACK_US]
        if not boots:
            return F.lit(False)
        return self.may_move() & F.col("gateway_boot").isin(*boots) if len(boots) <= BOOTS_MAX else self.may_move()


@dataclass(frozen=True, slots=True)
class BatchCorrections:
    """The corrections that the windows of one batch need."""

    known: Corrections
    """All corrections, with this batch's among them."""
    brought: DataFrame
    """All versions for the boots that this batch corrects. `wrong_until_us` is the time of the last superseding one."""
    brought_boots: frozenset[str]


def corrections_schema() -> StructType:
    """Return the table's columns. It needs a running session, whose parser reads them."""
    return cast("StructType", StructType.fromDDL(SCHEMA))


def corrections_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/time_corrections"


def create_corrections(spark: SparkSession, tables: str) -> None:
    """Create the table if there is none."""
    make_table(spark, corrections_path(tables), corrections_schema())


def read_corrections(spark: SparkSession, tables: str) -> DataFrame:
    """Return the table."""
    return spark.read.format("delta").load(corrections_path(tables))


def corrections_in(log: DataFrame) -> list[Correction]:
    """Derive `time_corrections` from `log`, or from any part of it."""
    good = log.where((F.col("ce_type") == CORRECTION_TYPE) & F.col("reject_reason").isNull() & ~F.col("duplicate"))
    told = good.select("namespace", "gateway", "value", F.unix_micros("event_time").alias("told_us"), "ce_id")
    rows = told.collect()
    each = (correction_in(row.namespace, row.gateway, row.value, row.told_us, row.ce_id) for row in rows)
    return [correction for correction in each if correction is not None]


def correction_in(namespace: str, gateway: str, value: bytes | None, told_us: int, ce_id: str) -> Correction | None:
    """Return the correction that a record tells; None if its body has a fault."""
    body = body_of(None if value is None else bytes(value))
    if body is None or fault(body) is not None:
        return None
    members = [value_of(body, member) for member in MEMBERS]
    values: tuple[Any, ...] = (*members, told_us, ce_id)
    return Correction(namespace, gateway, *values)


def known_corrections(spark: SparkSession, tables: str) -> Corrections:
    """Return all corrections known now."""
    return _known(spark, _collected(spark, corrections_path(tables)))


def take_corrections(table: AppendTable, appended: DataFrame, ordinal: int) -> BatchCorrections:
    """Store a batch's corrections, and return those known then. To store them again changes nothing.

    `appended` is the batch's part of `log`.
    """
    spark = table.spark
    brought = corrections_in(appended)
    stored: list[Correction | Row] = [*_collected(spark, table.path)]
    stored_ids = {row.ce_id for row in stored}
    new = [row for row in brought if row.ce_id not in stored_ids]
    if new:
        table.append(spark.createDataFrame(new, SCHEMA), {ORDINAL: ordinal})
        stored += new
    boots = {_boot(row) for row in brought}
    wrong_until_us = _wrong_until_us(stored)
    versions = [(*row, wrong_until_us.get(_boot(row))) for row in stored if _boot(row) in boots]
    return BatchCorrections(
        _known(spark, stored),
        _frame(spark, versions, f"{SCHEMA}, wrong_until_us bigint"),
        frozenset(boot for *_, boot in boots),
    )


def _collected(spark: SparkSession, path: str) -> list[Row]:
    # Most warehouses have no corrections, and so every batch has one job less.
    return [] if is_empty(spark, path) else spark.read.format("delta").load(path).collect()


def _known(spark: SparkSession, rows: Sequence[Correction | Row]) -> Corrections:
    told_us: dict[str, int] = {}
    for row in rows:
        told_us[row.gateway_boot] = max(row.told_us, told_us.get(row.gateway_boot, row.told_us))
    wrong_boots = frozenset(boot for *_, boot in _wrong_until_us(rows))
    known = clocks((Correction(*row) for row in rows), {})
    return Corrections(current(_frame(spark, rows, SCHEMA)), told_us, wrong_boots, known)


def _wrong_until_us(rows: Sequence[Correction | Row]) -> dict[tuple[str, ...], int]:
    """Time of each boot's last correction that supersedes earlier times."""
    wrong_until_us: dict[tuple[str, ...], int] = {}
    for row in rows:
        if row.supersedes:
            wrong_until_us[_boot(row)] = max(row.told_us, wrong_until_us.get(_boot(row), row.told_us))
    return wrong_until_us


def _boot(row: Correction | Row) -> tuple[str, ...]:
    return tuple(getattr(row, name) for name in BOOT)


def _frame(spark: SparkSession, rows: Sequence[tuple[object, ...]], schema: str) -> DataFrame:
    frame = spark.createDataFrame(rows, schema)
    # With a condition that is never true, Spark knows that the join has no rows, and leaves it out.
    return frame if rows else frame.where(F.lit(False))


def current(corrections: DataFrame) -> DataFrame:
    """Choose each boot's correction that counts, as a struct `correction` for each boot.

    Its `wrong_until_us` is the time until which the boot sent wrong times: the time of the last correction that
    supersedes, or null. Of two with one version, which no gateway sends, the one with the greater `ce_id` counts.
    """
    latest = F.struct("version", "ce_id")
    values = [F.col(name) for name in corrections.columns if name not in BOOT]
    wrong_until = F.max_by("told_us", F.when(F.col("supersedes"), latest))
    return (
        corrections.groupBy(*BOOT)
        .agg(F.max_by(F.struct(*values), latest).alias("last"), wrong_until.alias("wrong_until_us"))
        .select(*BOOT, F.struct("last.*", "wrong_until_us").alias("correction"))
    )


def retimed(records: DataFrame, corrections: DataFrame, times: Times = USUAL_TIMES) -> DataFrame:
    """Correct the times of readings: `event_time`, `time_error_us`, `time_quality` and `event_date`.

    The times as sent go into `sent_event_time`, `sent_time_error_us` and `sent_time_quality`. `correction_version` is
    null if no correction applies. `records` are rows of `log`, `corrections` are from `current`.
    """
    joined = records.join(F.broadcast(corrections), list(BOOT), "left")
    mended = joined.withColumns({"mended_us": mended_us(), "mended_error_us": _mended_error_us()})
    told_before = _within_us("correction.told_us")
    was_wrong = _within_us("correction.wrong_until_us")
    better = (F.col("mended_error_us") < F.col("time_error_us")) & told_before
    applies = (F.col("time_quality") != DEVICE_QUALITY) & (better | was_wrong)

    def chosen(value: Column, sent: str) -> Column:
        return F.when(F.col("applies"), value).otherwise(F.col(sent)).alias(sent)

    time, error_us = F.timestamp_micros("mended_us"), F.col("mended_error_us")
    replaced = {"event_time", "time_error_us", "time_quality", "event_date"}
    return mended.withColumn("applies", applies).select(
        *(name for name in records.columns if name not in replaced),
        chosen(time, "event_time"),
        chosen(error_us, "time_error_us"),
        chosen(_mended_quality(), "time_quality"),
        chosen(date_of(time, error_us, times), "event_date"),
        F.col("event_time").alias("sent_event_time"),
        F.col("time_error_us").alias("sent_time_error_us"),
        F.col("time_quality").alias("sent_time_quality"),
        F.when(F.col("applies"), F.col("correction.version")).alias("correction_version"),
    )


def mended_us() -> Column:
    """The corrected time in microseconds since 1970; null without a correction, or if it is out of range."""
    drift = F.expr(f"({DISTANCE_US} * correction.rate_ppm) div 1000000").cast(WIDE)
    time = F.col("boot_time_us").cast(WIDE) + F.col("correction.offset_us").cast(WIDE) + drift
    return F.when(time.between(EARLIEST_US, LATEST_US), time.try_cast("bigint"))


def _mended_error_us() -> Column:
    # Adding just less than 1,000,000 before the division rounds up.
    growth = F.expr(f"(abs({DISTANCE_US}) * correction.error_growth_ppm + 999999.999999) div 1000000").cast(WIDE)
    own = F.coalesce("boot_time_error_us", "time_error_us").cast(WIDE)
    error = F.col("correction.error_us").cast(WIDE) + growth + own
    return F.least(error, F.lit(TIME_ERROR_UNKNOWN_US).cast(WIDE)).try_cast("bigint")


def _mended_quality() -> Column:
    unbounded = F.col("boot_time_error_us") == TIME_ERROR_UNKNOWN_US
    synced = F.col("correction.quality") == "synced"
    from_bounded = synced & (F.col("time_quality") == "bounded") & ~F.coalesce(unbounded, F.lit(False))
    return F.when(~synced, "bounded").when(from_bounded, "estimated").otherwise(F.col("time_quality"))


def _within_us(moment: str) -> Column:
    """True if the corrected time is before a moment, or less than TOLD_SLACK_US after it."""
    slack = F.col(moment) + TOLD_SLACK_US
    return F.coalesce(F.col("mended_us") <= slack, F.lit(False))


def readings_moved(records: DataFrame, corrections: BatchCorrections, times: Times = USUAL_TIMES) -> DataFrame:
    """Find readings that a batch's corrections move, with all times that they may have had.

    There is a row for each of these times, as sent and by each version, in `event_time` and `event_date`. A few of the
    readings were not really moved. That does no harm, because their windows are then computed anew to the same figures.
    """
    candidates = records.where(F.col("gateway_boot").isin(*corrections.brought_boots) & corrections.known.may_move())
    values = [name for name in corrections.brought.columns if name not in BOOT]
    versions = corrections.brought.select(*BOOT, F.struct(*values).alias("correction"))
    joined = candidates.join(F.broadcast(versions), list(BOOT)).withColumn("mended_us", mended_us())
    concerned = joined.where(F.col("boot_time_error_us").isNotNull() | _within_us("correction.wrong_until_us"))
    time = F.timestamp_micros("mended_us")
    sent = F.struct("event_time", "event_date")
    by_version = F.struct(time.alias("event_time"), date_of(time, F.lit(0), times).alias("event_date"))
    return concerned.select(
        *(name for name in records.columns if name not in {"event_time", "event_date"}),
        F.inline(F.array(sent, by_version)),
    )
