"""Whether a window is final: `complete`, `complete_with_loss` or `provisional`, on what basis, and what it waits for.

Computed on read, by the first of these that fits; [s, e) is the window, and what bounds of times leave open is taken
the way that promises less:

1. Basis `sequence`: the device's numbers go from a reading before s to one after e without a hole (`complete`), or
   with holes that loss records explain (`complete_with_loss` where one of them may lie in the window).
2. A hole that nothing explains may lie in it: `provisional`, basis `sequence`.
3. Nothing was heard of the stream since: `provisional`, and the basis is null.
4. Basis `watermark`: every gateway that ever served the device, and was not retired before s, has acknowledged past e
   and holds nothing of that time: `complete`, or `complete_with_loss` where a loss may lie in the window; else
   `provisional`.

What is final can still be revised by what makes times better known: a time correction, or a copy of a reading with a
smaller bound. `window_changes` tells of that.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.log_table import TIME_ERROR_UNKNOWN_US
from spark.sequence_gaps import FOREVER_US, GAP_TYPE, ISLAND_TYPE, LOSS_TYPE, PROVEN_TYPE, UNBOUNDED_US, judged_column
from spark.sequence_gaps import gaps as gaps_of
from spark.time_corrections import EARLIEST_US, LATEST_US, retimed

COMPLETE, COMPLETE_WITH_LOSS, PROVISIONAL = "complete", "complete_with_loss", "provisional"
SEQUENCE, WATERMARK = "sequence", "watermark"
ON_ITS_WAY_US = 10_000_000
"""A reading may come to the gateway so long after it was taken. A heartbeat knows only of what has come."""
CLOCK_PPM = 500
"""Kernels bend their clocks by no more: what a known time is worth so far away."""
STREAM = ("namespace", "device", "stream")
DEVICE = ("namespace", "device")
GATEWAY = ("namespace", "gateway")
HEARD_SCHEMA = "namespace string, device string, stream string, last_us bigint"
SERVICES_SCHEMA = "namespace string, device string, gateway string"
RETIRED_SCHEMA = "namespace string, gateway string, retired_from_us bigint"
_WIDE = "decimal(38,0)"


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that tells whether windows are final, each a table."""

    islands: DataFrame
    """`sequence_runs.SCHEMA`"""
    losses: DataFrame
    """`loss_records.SCHEMA`"""
    gateways: DataFrame
    """`gateway_states.SCHEMA`"""
    boots: DataFrame
    """`gateway_states.BOOTS_SCHEMA`"""
    services: DataFrame
    """Which gateways ever served a device; further columns are passed over."""
    heard: DataFrame
    """The event time of each stream's last reading that belongs to a window."""
    retired: DataFrame
    """Gateways that nothing is expected of for windows that begin after this."""
    corrections: DataFrame
    """As `time_corrections.current` yields them."""


def gaps(evidence: Evidence) -> DataFrame:
    """Derive `gaps`: what is missing of devices' own numbers, with times as they are known now."""
    return gaps_of(_judged_devices(evidence))


def with_status(windows: DataFrame, evidence: Evidence, between_us: tuple[int, int] | None = None) -> DataFrame:
    """Add `status`, `basis` and `why` to windows of any length.

    `windows` have the columns of `STREAM`, `window_start` and `window_end`. With `between_us` all of them lie between
    these times, and a device's long history costs nothing.
    """
    proofs = _proofs(evidence, between_us)
    others = [F.col(name) for name in proofs.columns if name not in STREAM]
    proven = proofs.select(*STREAM, F.struct(*others).alias("proof"))
    joined = windows.join(proven, list(STREAM), "left")
    verdict = _verdict(F.unix_micros("window_start"), F.unix_micros("window_end"), F.col("proof"))
    judged = joined.withColumn("verdict", verdict)
    return judged.select(*(F.col(name) for name in windows.columns), "verdict.*")


# -- what is known of a stream ----------------------------------------------------------------------------------------


def _proofs(evidence: Evidence, between_us: tuple[int, int] | None) -> DataFrame:
    """One row for each stream: `last_us`, `proven`, `gaps`, `gateways`, `losses`."""
    losses = _timed_losses(evidence)
    numbers = _judged_devices(evidence, losses).select(*DEVICE, F.inline("judged.streams"))
    gateways = _gateways(evidence, losses)
    served = evidence.services.select(*DEVICE, "gateway").distinct().join(F.broadcast(gateways), list(GATEWAY), "left")
    by_device = served.groupBy(*DEVICE).agg(
        F.sort_array(F.collect_list(F.struct("gateway", "retired_from_us", "buffers", "losses"))).alias("gateways")
    )
    own = _of_devices(losses)
    proofs = (
        evidence.heard.groupBy(*STREAM)
        .agg(F.max("last_us").alias("last_us"))
        .join(numbers, list(STREAM), "left")
        .join(by_device, list(DEVICE), "left")
        .join(own, list(DEVICE), "left")
    )
    if between_us is None:
        return proofs
    from_us, to_us = (F.lit(us) for us in between_us)

    def near(span: Column) -> Column:
        return (span["from_us"] <= to_us) & (span["to_us"] >= from_us)

    return proofs.withColumns({name: F.filter(name, near) for name in ("proven", "gaps", "losses")})


def _judged_devices(evidence: Evidence, losses: DataFrame | None = None) -> DataFrame:
    """One row for each device that sends numbers, with `judged`."""
    timed = evidence.islands
    for name in ("first_edge", "last_edge"):
        timed = _retimed_edge(timed, name, evidence.corrections)
    island = F.struct(
        *("stream", "device_boot", "first", "last"),
        F.col("first_edge.event_us").alias("first_us"),
        F.col("first_edge.time_error_us").alias("first_error_us"),
        F.col("last_edge.event_us").alias("last_us"),
        F.col("last_edge.time_error_us").alias("last_error_us"),
    )
    islands = timed.groupBy(*DEVICE).agg(F.collect_list(island.cast(ISLAND_TYPE)).alias("islands"))
    own = _of_devices(_timed_losses(evidence) if losses is None else losses)
    joined = islands.join(own, list(DEVICE), "left")
    return joined.select(*DEVICE, judged_column(F.col("islands"), F.col("losses")).alias("judged"))


def _of_devices(timed_losses: DataFrame) -> DataFrame:
    """The losses whose device is known, by device."""
    return timed_losses.where(F.col("device").isNotNull()).groupBy(*DEVICE).agg(_collected_losses())


def _collected_losses() -> Column:
    names = ("reason", "count", "device_boot", "first_sequence", "last_sequence", "from_us", "to_us")
    return F.sort_array(F.collect_list(F.struct(*names).cast(LOSS_TYPE))).alias("losses")


def _gateways(evidence: Evidence, timed_losses: DataFrame) -> DataFrame:
    """One row for each gateway: `retired_from_us`, `buffers`, and `losses` of which nobody knows whose they are."""
    told = _retimed_edge(evidence.gateways, "heartbeat", evidence.corrections)
    bounded = F.col("promises") & (F.col("heartbeat.time_error_us") < UNBOUNDED_US)
    acknowledged = F.when(bounded, F.col("heartbeat.event_us") - F.col("heartbeat.time_error_us"))
    buffer = F.struct(
        "buffer",
        F.col("heartbeat.event_us").isNotNull().alias("is_known"),
        acknowledged.alias("acknowledged_us"),
        "pending",
        "quarantined",
        "until_us",
    )
    buffers = told.groupBy(*GATEWAY).agg(F.sort_array(F.collect_list(buffer)).alias("buffers"))
    losses = timed_losses.where(F.col("device").isNull()).groupBy(*GATEWAY).agg(_collected_losses())
    retired = evidence.retired.groupBy(*GATEWAY).agg(F.min("retired_from_us").alias("retired_from_us"))
    return buffers.join(losses, list(GATEWAY), "full").join(retired, list(GATEWAY), "full")


# -- times, as they are known now -------------------------------------------------------------------------------------


def _retimed_edge(frame: DataFrame, name: str, corrections: DataFrame) -> DataFrame:
    """Put the time right that a column of `EDGE_TYPE` tells; of the column its `event_us` and `time_error_us` stay."""
    edge = F.col(name)
    rest = [each for each in frame.columns if each != name]
    records = frame.select(
        "namespace",
        F.struct(*rest).alias("rest"),
        *(edge[part].alias(part) for part in ("gateway", "gateway_boot", "boot_time_us", "boot_time_error_us")),
        F.timestamp_micros(edge["event_us"]).alias("event_time"),
        edge["time_error_us"].alias("time_error_us"),
        edge["time_quality"].alias("time_quality"),
        F.lit(None).cast("timestamp").alias("kafka_timestamp"),
        F.lit(None).cast("date").alias("event_date"),
    )
    time = F.struct(F.unix_micros("event_time").alias("event_us"), "time_error_us")
    return retimed(records, corrections).select(*(F.col("rest")[each].alias(each) for each in rest), time.alias(name))


def _timed_losses(evidence: Evidence) -> DataFrame:
    """Add to losses between which times they happened: `from_us` and `to_us`.

    They are told by the clock of their boot. What is known of that: the time of the record that told of it, where that
    was the same boot; the gateway's heartbeats; corrections. Where nothing is, it was before it was told.
    """
    known = evidence.boots.select(*GATEWAY, "gateway_boot", F.col("known"))
    timed = evidence.losses.join(F.broadcast(known), [*GATEWAY, "gateway_boot"], "left")
    for name in ("first", "last"):
        timed = timed.withColumn(f"{name}_edge", _loss_edge(F.col(f"{name}_boottime_us")))
    for name in ("first_edge", "last_edge"):
        timed = _retimed_edge(timed, name, evidence.corrections)
    told_us = F.when(F.col("told_error_us") < UNBOUNDED_US, F.col("told_us") + F.col("told_error_us"))
    from_us = _earliest(F.col("first_edge"))
    to_us = F.least(_latest(F.col("last_edge")), F.coalesce(told_us, F.lit(FOREVER_US)))
    names = ("reason", "count", "device_boot", "first_sequence", "last_sequence")
    # Told before it can have been, by a clock that was wrong: then only the one end is believed.
    return timed.select(*GATEWAY, "device", *names, F.least(from_us, to_us).alias("from_us"), to_us.alias("to_us"))


def _loss_edge(boottime_us: Column) -> Column:
    """The time of a moment of a loss's boot, as a struct of `EDGE_TYPE`."""
    unknown = F.struct(F.lit(TIME_ERROR_UNKNOWN_US).alias("error_us"), F.col("told_us").alias("time_us"))
    told = _reckoned(boottime_us, F.col("told_boottime_us"), F.col("told_us"), F.col("told_error_us"))
    beat = _reckoned(boottime_us, *(F.col("known")[name] for name in ("boot_time_us", "event_us", "time_error_us")))
    same_boot = F.col("told_boot") == F.col("gateway_boot")
    best = F.least(F.when(same_boot, told), beat, unknown)
    return F.struct(
        best["time_us"].alias("event_us"),
        best["error_us"].alias("time_error_us"),
        F.lit("bounded").alias("time_quality"),
        F.col("gateway").alias("gateway"),
        F.col("gateway_boot").alias("gateway_boot"),
        boottime_us.alias("boot_time_us"),
        F.lit(0).cast("bigint").alias("boot_time_error_us"),
    )


def _reckoned(boottime_us: Column, known_boottime_us: Column, known_us: Column, known_error_us: Column) -> Column:
    """From one moment whose time is known to another one of the same boot; null where that leads to no time."""
    distance = boottime_us.cast(_WIDE) - known_boottime_us.cast(_WIDE)
    time = known_us.cast(_WIDE) + distance
    error = known_error_us.cast(_WIDE) + F.ceil(F.abs(distance) * F.lit(CLOCK_PPM) / F.lit(1_000_000)).cast(_WIDE)
    fits = (known_error_us < UNBOUNDED_US) & time.between(EARLIEST_US, LATEST_US) & (error < UNBOUNDED_US)
    return F.when(fits, F.struct(error.try_cast("bigint").alias("error_us"), time.try_cast("bigint").alias("time_us")))


def _earliest(edge: Column) -> Column:
    bounded = edge["time_error_us"] < UNBOUNDED_US
    return F.when(bounded, edge["event_us"] - edge["time_error_us"]).otherwise(F.lit(-FOREVER_US))


def _latest(edge: Column) -> Column:
    bounded = edge["time_error_us"] < UNBOUNDED_US
    return F.when(bounded, edge["event_us"] + edge["time_error_us"]).otherwise(F.lit(FOREVER_US))


# -- the verdict ------------------------------------------------------------------------------------------------------


def _verdict(start: Column, end: Column, proof: Column) -> Column:
    """A struct of `status`, `basis` and `why`."""
    numbers = _or_empty(proof["gaps"], GAP_TYPE)

    def may_lie_in(gap: Column) -> Column:
        # Taken after the one reading and before the other.
        return (gap["from_us"] < end) & (gap["to_us"] > start)

    def covers(span: Column) -> Column:
        return (span["from_us"] <= start) & (span["to_us"] >= end)

    def told_in(loss: Column) -> Column:
        return (loss["from_us"] < end) & (loss["to_us"] >= start)

    def lost_of(span: Column) -> Column:
        return F.filter(numbers, lambda gap: (gap["run"] == span["run"]) & gap["explained"] & may_lie_in(gap))

    def by_numbers(spans: Column) -> Column:
        lost = F.flatten(F.transform(spans, lost_of))
        return F.when(F.size(lost) == 0, _said(COMPLETE, SEQUENCE)).otherwise(
            _let(lost, lambda gaps: _said(COMPLETE_WITH_LOSS, SEQUENCE, _missing(gaps, "lost", _reasons(gaps))))
        )

    missing = F.filter(numbers, lambda gap: ~gap["explained"] & may_lie_in(gap))
    explained = F.filter(numbers, lambda gap: gap["explained"] & may_lie_in(gap))
    # Of which it is not known whose they are, may be this device's.
    losses = F.concat(
        _or_empty(proof["losses"], LOSS_TYPE),
        F.flatten(F.transform(proof["gateways"], lambda gateway: _or_empty(gateway["losses"], LOSS_TYPE))),
    )
    blocks = F.transform(proof["gateways"], lambda gateway: _blocked(gateway, start, end))
    waits = F.when(
        F.coalesce(F.size(proof["gateways"]), F.lit(0)) <= 0, F.array(F.lit("no gateway is known to serve it"))
    )
    waits = waits.otherwise(F.filter(blocks, lambda why: why.isNotNull()))

    def by_watermark() -> Column:
        reasons = F.array_distinct(
            F.concat(
                F.flatten(F.transform(explained, lambda gap: gap["reasons"])),
                F.transform(F.filter(losses, told_in), lambda loss: loss["reason"]),
            )
        )
        why = F.concat(F.lit("readings of about this time were lost: "), F.array_join(F.sort_array(reasons), ", "))
        return F.when(F.size(reasons) == 0, _said(COMPLETE, WATERMARK)).otherwise(
            _said(COMPLETE_WITH_LOSS, WATERMARK, why)
        )

    return (
        F.when(F.exists(_or_empty(proof["proven"], PROVEN_TYPE), covers), by_numbers(F.filter(proof["proven"], covers)))
        .when(F.size(missing) > 0, _let(missing, lambda gaps: _said(PROVISIONAL, SEQUENCE, _missing(gaps, "missing"))))
        .when(
            F.coalesce(proof["last_us"] < end, F.lit(True)), _said(PROVISIONAL, None, F.lit("no later reading of it"))
        )
        .when(F.size(waits) > 0, _said(PROVISIONAL, WATERMARK, F.array_join(waits, "; ")))
        .otherwise(by_watermark())
    )


def _blocked(gateway: Column, start: Column, end: Column) -> Column:
    """Say what of a gateway a window waits for; null where nothing."""
    name = F.concat(F.lit("gateway "), gateway["gateway"])

    def says(words: str) -> Column:
        return F.concat(name, F.lit(words))

    def holds(spans: Column, before: str, after: str) -> Column:
        return F.concat(name, F.lit(before), _rows(spans), F.lit(after))

    def may_be_in(span: Column) -> Column:
        after_start = F.coalesce(span["to_us"] + ON_ITS_WAY_US >= start, F.lit(True))
        return after_start & F.coalesce(span["from_us"] < end, F.lit(True))

    def blocked(buffer: Column) -> Column:
        waiting = F.filter(buffer["pending"], may_be_in)
        aside = F.filter(buffer["quarantined"], may_be_in)
        former = F.concat(F.lit("what a former buffer of "), name, F.lit(" still held is not known"))
        is_former = buffer["until_us"].isNotNull()
        behind = F.coalesce(buffer["acknowledged_us"] < end + ON_ITS_WAY_US, F.lit(True))
        return (
            F.when(buffer["until_us"] <= start, None)
            .when(~buffer["is_known"], says(" has not told how far it has come"))
            .when(buffer["acknowledged_us"].isNull() & ~is_former, says(" can promise nothing yet"))
            .when(F.size(waiting) > 0, holds(waiting, " holds ", " rows of about this time"))
            .when(F.size(aside) > 0, holds(aside, " has ", " inputs of about this time in its quarantine"))
            .when(behind, F.when(is_former, former).otherwise(says(" has not acknowledged past it")))
        )

    by_buffer = F.filter(F.transform(gateway["buffers"], blocked), lambda why: why.isNotNull())
    return (
        F.when(gateway["retired_from_us"] <= start, None)
        .when(gateway["buffers"].isNull(), says(" has not told how far it has come"))
        .otherwise(F.get(by_buffer, F.lit(0)))
    )


def _rows(spans: Column) -> Column:
    return F.aggregate(spans, F.lit(0).cast("bigint"), lambda total, span: total + span["rows"]).cast("string")


def _missing(gaps: Column, what: str, reasons: Column | None = None) -> Column:
    """Say which numbers, in words."""
    gap = F.get(gaps, F.lit(0))
    of_boot = F.concat(F.lit(" of boot "), gap["device_boot"])
    one = F.concat(F.lit("reading "), gap["first"], of_boot, F.lit(" is "))
    several = F.concat(F.lit("readings "), gap["first"], F.lit(" to "), gap["last"], of_boot, F.lit(" are "))
    numbers = F.when(gap["count"] == 1, one).otherwise(several)
    more = F.when(F.size(gaps) > 1, F.concat(F.lit(", and "), F.size(gaps) - 1, F.lit(" more spans"))).otherwise("")
    why = F.concat(F.lit(": "), reasons) if reasons is not None else F.lit("")
    return F.concat(numbers, F.lit(what), more, why)


def _reasons(gaps: Column) -> Column:
    return F.array_join(F.sort_array(F.array_distinct(F.flatten(F.transform(gaps, lambda gap: gap["reasons"])))), ", ")


def _said(status: str, basis: str | None, why: Column | None = None) -> Column:
    return F.struct(
        F.lit(status).alias("status"),
        F.lit(basis).cast("string").alias("basis"),
        (F.lit(None) if why is None else why).cast("string").alias("why"),
    )


def _or_empty(array: Column, of_type: str) -> Column:
    return F.coalesce(array, F.array().cast(f"array<{of_type}>"))


def _let(value: Column, use: Callable[[Column], Column]) -> Column:
    """Compute a value once and use it several times."""
    return F.get(F.transform(F.array(value), use), F.lit(0))
