"""Decides on read whether a window is `complete`, `complete_with_loss` or `provisional`, on what basis and why.

The first rule that fits counts. The window is [s, e). If the bounds of times leave a question open, the answer that
promises less is taken.

1. The device's numbers go from a reading before s to a reading after e, and every gap is explained by loss records
   that count: basis `sequence`. The window is `complete_with_loss` if a gap may lie in it, or else `complete`.
2. A gap that nothing explains may lie in the window: `provisional`, basis `sequence`.
3. No later reading of the stream came: `provisional`, and the basis is null.
4. Every gateway that ever served the device, and was not retired before s, has acknowledged past e and holds nothing of
   the window's time: basis `watermark`. The window is `complete_with_loss` if a loss may lie in it, or else `complete`.
   If a gateway has not: `provisional`, basis `watermark`.

A final window can still be revised if times become better known: by a time correction, or by a copy of a reading with a
smaller bound. `window_changes` has such revisions.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.finality.gateway_rows import GatewayRow
from spark.finality.sequence_gaps import Gap
from spark.finality.stream_proofs import DeviceIsland, DeviceLoss, Sites, StreamProof, device_gaps, stream_proofs
from spark.log.edge_times import FOREVER_US, Correction, GatewayBoot, clocks
from spark.log.edges import EDGE_TYPE, Edge

STREAM = ("namespace", "device", "stream")
DEVICE = ("namespace", "device")
SERVICES_SCHEMA = "namespace string, device string, gateway string"
HEARD_SCHEMA = "namespace string, device string, stream string, last_us bigint"

ISLAND_TYPE = (
    "struct<stream: string, device_counter: string, device_boot: string, first: bigint, last: bigint, "
    f"first_edge: {EDGE_TYPE}, last_edge: {EDGE_TYPE}>"
)
LOSS_TYPE = (
    "struct<gateway: string, is_its_own: boolean, reason: string, count: bigint, device_boot: string, "
    "first_sequence: bigint, last_sequence: bigint, gateway_boot: string, first_boottime_us: bigint, "
    "last_boottime_us: bigint, told_us: bigint, told_error_us: bigint, told_boot: string, told_boottime_us: bigint>"
)
HEARD_TYPE = "struct<stream: string, last_us: bigint>"
GAP_TYPE = (
    "struct<stream: string, device_counter: string, device_boot: string, first: bigint, last: bigint, count: bigint, "
    "after_us: bigint, after_error_us: bigint, before_us: bigint, before_error_us: bigint, explained: boolean, "
    "reasons: array<string>>"
)
WITHIN_TYPE = "struct<run: int, from_us: bigint, until_us: bigint, why: string>"
PROOF_TYPE = (
    "struct<stream: string, last_us: bigint, proven: array<struct<run: int, from_us: bigint, to_us: bigint>>, "
    f"missing: array<{WITHIN_TYPE}>, lost: array<{WITHIN_TYPE}>, waits: array<{WITHIN_TYPE}>>"
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All evidence on windows being final: tables about devices, and rows about gateways."""

    islands: DataFrame
    """`device_parts.islands_in`. They may overlap."""
    losses: DataFrame
    """`loss_records.LOSSES_SCHEMA`"""
    services: DataFrame
    """All gateways that ever served each device: `SERVICES_SCHEMA`. Further columns are ignored."""
    heard: DataFrame
    """Event times of each stream's last readings in a window: `HEARD_SCHEMA`."""
    gateways: Sequence[GatewayRow] = ()
    boots: Mapping[GatewayBoot, Edge] = field(default_factory=dict)
    """Heartbeats from `GatewayStates.boots`."""
    retired_from_us: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Times by namespace and gateway. A window that begins then or later does not wait for the gateway."""
    corrections: Iterable[Correction] = ()
    """All rows of `time_corrections`."""


def derive_gaps(evidence: Evidence) -> DataFrame:
    """Derive `gaps`, the missing numbers of devices, with times as they are known now."""
    sites = _sites(evidence)

    def found(namespace: str, islands: list[Row] | None, losses: list[Row] | None) -> list[tuple[object, ...]]:
        return [_gap_row(gap) for gap in device_gaps(sites, namespace, _islands(islands), _losses(losses))]

    # Arrow is off, because the project does not depend on it.
    column = F.udf(found, f"array<{GAP_TYPE}>", useArrow=False)("namespace", "islands", "losses")
    each = _devices(evidence).select(*DEVICE, F.inline_outer(column)).where(F.col("device_boot").isNotNull())
    return each.select(
        *("namespace", "device", "stream", "device_counter", "device_boot", "first", "last", "count"),
        F.timestamp_micros("after_us").alias("after_time"),
        "after_error_us",
        F.timestamp_micros("before_us").alias("before_time"),
        *("before_error_us", "explained", "reasons"),
    )


def with_status(windows: DataFrame, evidence: Evidence, between_us: tuple[int, int] | None = None) -> DataFrame:
    """Add `status`, `basis` and `why` to windows of any length.

    `windows` have the columns of `STREAM`, `window_start` and `window_end`. If they all lie within `between_us`, give
    it: then a device's long history costs nothing.
    """
    proof = F.struct("last_us", "proven", "missing", "lost", "waits").alias("proof")
    proofs = _proofs(evidence, between_us or (-FOREVER_US, FOREVER_US)).select(*STREAM, proof)
    asked = F.struct(F.unix_micros("window_start").alias("from_us"), F.unix_micros("window_end").alias("to_us"))
    joined = windows.join(proofs, list(STREAM), "left").withColumn("asked", asked)
    found = joined.withColumn("found", F.expr(FINDING))
    return found.select(*windows.columns, F.expr(VERDICT).alias("verdict")).select(*windows.columns, "verdict.*")


def _proofs(evidence: Evidence, between_us: tuple[int, int]) -> DataFrame:
    """Return a row with the fields of `StreamProof` for each stream."""
    sites = _sites(evidence)

    def found(
        namespace: str,
        islands: list[Row] | None,
        losses: list[Row] | None,
        gateways: list[str] | None,
        heard: list[Row] | None,
    ) -> list[StreamProof]:
        last_us: dict[str, int] = {}
        for stream, us in heard or ():
            last_us[stream] = max(us, last_us.get(stream, us))
        of_device = (_islands(islands), _losses(losses), gateways or (), last_us)
        return stream_proofs(sites, namespace, *of_device, between_us)

    column = F.udf(found, f"array<{PROOF_TYPE}>", useArrow=False)("namespace", "islands", "losses", "gateways", "heard")
    # An outer inline: for an inner one, Spark infers a condition, and computes everything twice.
    return _devices(evidence).select(*DEVICE, F.inline_outer(column))


def _devices(evidence: Evidence) -> DataFrame:
    """Return a row for each device, with all its evidence: `islands`, `losses`, `gateways`, `heard`.

    Everything is grouped at once, because each of four joins would cost more than its rows.
    """
    losses = evidence.losses
    own = losses.where(F.col("device").isNotNull())
    # If nobody knows whose readings were lost, they may be any device's that the gateway served.
    services = evidence.services.select(*DEVICE, "gateway")
    others = services.join(F.broadcast(losses.where(F.col("device").isNull()).drop("device")), ["namespace", "gateway"])
    island = F.struct(*DeviceIsland._fields).cast(ISLAND_TYPE)
    parts = [
        evidence.islands.select(*DEVICE, island.alias("island")),
        own.select(*DEVICE, _loss(is_its_own=True)),
        others.select(*DEVICE, _loss(is_its_own=False)),
        services.select(*DEVICE, "gateway"),
        evidence.heard.select(*DEVICE, F.struct("stream", "last_us").cast(HEARD_TYPE).alias("heard")),
    ]
    every = parts[0]
    for part in parts[1:]:
        every = every.unionByName(part, allowMissingColumns=True)
    return every.groupBy(*DEVICE).agg(
        F.collect_list("island").alias("islands"),
        F.collect_list("loss").alias("losses"),
        F.collect_set("gateway").alias("gateways"),
        F.collect_list("heard").alias("heard"),
    )


def _loss(*, is_its_own: bool) -> Column:
    names = DeviceLoss._fields[4:]
    told = F.struct("gateway", F.lit(is_its_own).alias("is_its_own"), "reason", "count", *names)
    return told.cast(LOSS_TYPE).alias("loss")


def _sites(evidence: Evidence) -> Sites:
    buffers: dict[tuple[str, str], list[GatewayRow]] = defaultdict(list)
    for row in evidence.gateways:
        buffers[row.namespace, row.gateway].append(row)
    known = clocks((Correction(*row) for row in evidence.corrections), evidence.boots)
    return Sites(known, dict(buffers), dict(evidence.retired_from_us))


def _islands(rows: Iterable[Row] | None) -> list[DeviceIsland]:
    return [
        DeviceIsland(*row)._replace(first_edge=Edge(*row.first_edge), last_edge=Edge(*row.last_edge))
        for row in rows or ()
    ]


def _losses(rows: Iterable[Row] | None) -> list[DeviceLoss]:
    return [DeviceLoss(*row) for row in rows or ()]


def _gap_row(gap: Gap) -> tuple[object, ...]:
    return (*gap[1:7], *gap.after, *gap.before, gap.explained, gap.reasons)


FINDING = """
CASE
    WHEN exists(proof.proven, span -> span.from_us <= asked.from_us AND span.to_us >= asked.to_us)
    THEN named_struct('is_final', TRUE, 'basis', 'sequence', 'spans', filter(
        proof.lost, loss -> loss.from_us < asked.to_us AND loss.until_us > asked.from_us AND exists(
            proof.proven,
            span -> span.run = loss.run AND span.from_us <= asked.from_us AND span.to_us >= asked.to_us)))
    WHEN exists(proof.missing, gap -> gap.from_us < asked.to_us AND gap.until_us > asked.from_us)
    THEN named_struct('is_final', FALSE, 'basis', 'sequence', 'spans', filter(
        proof.missing, gap -> gap.from_us < asked.to_us AND gap.until_us > asked.from_us))
    WHEN coalesce(proof.last_us < asked.to_us, TRUE)
    THEN named_struct('is_final', FALSE, 'basis', NULL, 'spans', NULL)
    WHEN exists(proof.waits, wait -> wait.from_us < asked.to_us AND wait.until_us > asked.from_us)
    THEN named_struct('is_final', FALSE, 'basis', 'watermark', 'spans', filter(
        proof.waits, wait -> wait.from_us < asked.to_us AND wait.until_us > asked.from_us))
    ELSE named_struct('is_final', TRUE, 'basis', 'watermark', 'spans', filter(
        proof.lost, loss -> loss.from_us < asked.to_us AND loss.until_us > asked.from_us))
END
"""
"""The first rule that fits, with the spans of time that speak against the window."""
VERDICT = """
named_struct(
    'status', if(NOT found.is_final, 'provisional', if(size(found.spans) = 0, 'complete', 'complete_with_loss')),
    'basis', found.basis,
    'why', CASE
        WHEN found.basis IS NULL THEN 'no later reading of it'
        WHEN found.is_final AND size(found.spans) = 0 THEN NULL
        WHEN found.is_final
        THEN 'readings of about this time were lost: ' || array_join(array_sort(array_distinct(found.spans.why)), ', ')
        WHEN found.basis = 'watermark' THEN array_join(array_distinct(found.spans.why), '; ')
        WHEN size(found.spans) = 1 THEN found.spans[0].why
        ELSE concat(found.spans[0].why, ', and ', size(found.spans) - 1, ' more spans are')
    END
)
"""
