"""Turns all evidence of a device into spans of time, by which its windows are judged final or not. It needs no Spark.

A device's islands, losses and gateways become a few lists for each of its streams. A window of any length is then
looked up in these lists.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from spark.finality.gateway_rows import GatewayRow, Span
from spark.finality.sequence_gaps import Gap, Judged, Proven, TimedIsland, TimedLoss, judged
from spark.log.edge_times import FOREVER_US, Clocks, Moment
from spark.log.edges import Edge

ON_ITS_WAY_US = 10_000_000
"""Microseconds that a reading may need to reach its gateway. A heartbeat knows only of readings that have come."""
TOPICS_TOLD_MAX = 3
REJECTED = "in the quarantine"
"""Reason of readings that came and could not be taken."""
LOST_IN_KAFKA = "deleted in Kafka before it was read"


class DeviceIsland(NamedTuple):
    """An island of a device, from `device_parts`."""

    stream: str
    device_counter: str
    device_boot: str
    first: int
    last: int
    first_edge: Edge
    last_edge: Edge


class DeviceLoss(NamedTuple):
    """A loss that may be the device's, with columns of `loss_records.LOSSES_SCHEMA`."""

    gateway: str
    is_its_own: bool
    """False if the gateway could not say whose readings were lost."""
    reason: str
    size: int
    device_boot: str | None
    first_sequence: int | None
    last_sequence: int | None
    gateway_boot: str
    first_boottime_us: int
    last_boottime_us: int
    told_us: int
    told_error_us: int
    told_boot: str
    told_boottime_us: int


class Within(NamedTuple):
    """A span of time. It concerns windows that end after `from_us` and begin before `until_us`."""

    run: int | None
    from_us: int
    until_us: int
    why: str
    """Words for a person. Of a loss, its reasons."""


class StreamProof(NamedTuple):
    """The evidence of one stream."""

    stream: str
    last_us: int | None
    """Time of the stream's last reading."""
    proven: list[Proven]
    missing: list[Within]
    """Missing numbers that nothing explains."""
    lost: list[Within]
    """Missing numbers that are explained, with their runs; and losses told by gateways, without a run."""
    waits: list[Within]
    """Times from which gateways may still bring readings."""


@dataclass(frozen=True, slots=True)
class Sites:
    """The evidence of gateways."""

    clocks: Clocks = field(default_factory=Clocks)
    buffers: Mapping[tuple[str, str], list[GatewayRow]] = field(default_factory=dict)
    """Rows by namespace and gateway."""
    retired_from_us: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Times of retirement by namespace and gateway."""


def device_gaps(
    sites: Sites, namespace: str, islands: Iterable[DeviceIsland], losses: Iterable[DeviceLoss]
) -> list[Gap]:
    """The gaps in a device's numbers."""
    timed = [timed_loss(sites.clocks, namespace, loss) for loss in losses if loss.is_its_own]
    return _judged(sites.clocks, namespace, islands, timed).gaps


def stream_proofs(  # noqa: PLR0913, PLR0917 - all evidence of a device
    sites: Sites,
    namespace: str,
    islands: Iterable[DeviceIsland],
    losses: Iterable[DeviceLoss],
    gateways: Iterable[str],
    heard: Mapping[str, int],
    between_us: tuple[int, int] = (-FOREVER_US, FOREVER_US),
) -> list[StreamProof]:
    """Return the evidence of each stream of a device, for windows between two times.

    `gateways` are all that ever served the device. `heard` has the time of each stream's last reading.
    """
    all_losses = list(losses)
    timed = [timed_loss(sites.clocks, namespace, loss) for loss in all_losses]
    own = [loss for loss, told in zip(timed, all_losses, strict=True) if told.is_its_own]
    by_numbers = {proof.stream: proof for proof in _judged(sites.clocks, namespace, islands, own).streams}
    serving = sorted(set(gateways))
    waits = [wait for gateway in serving for wait in gateway_waits(sites, namespace, gateway)]
    if not serving:
        waits = [Within(None, -FOREVER_US, FOREVER_US, "no gateway is known to serve it")]
    told = [Within(None, loss.from_us, loss.to_us + 1, loss.reason) for loss in timed]
    from_us, to_us = between_us

    def near(spans: Iterable[Within]) -> list[Within]:
        return [span for span in spans if span.from_us < to_us and span.until_us > from_us]

    proofs = []
    for stream in sorted({*heard, *by_numbers}):
        numbers = by_numbers.get(stream)
        gaps = numbers.gaps if numbers else []
        proven = [span for span in numbers.proven if span.from_us < to_us and span.to_us > from_us] if numbers else []
        missing = near(_within(gap, _numbers(gap)) for gap in gaps if not gap.explained)
        lost = near([*(_within(gap, ", ".join(gap.reasons)) for gap in gaps if gap.explained), *told])
        proofs.append(StreamProof(stream, heard.get(stream), proven, missing, lost, near(waits)))
    return proofs


def _judged(clocks: Clocks, namespace: str, islands: Iterable[DeviceIsland], losses: Iterable[TimedLoss]) -> Judged:
    timed = [
        TimedIsland(*island[:5], clocks.of(namespace, island.first_edge), clocks.of(namespace, island.last_edge))
        for island in islands
    ]
    return judged(timed, losses)


def timed_loss(clocks: Clocks, namespace: str, loss: DeviceLoss) -> TimedLoss:
    """Find the times between which readings were lost. A loss record has them by the clock of a boot.

    This clock is known from the loss record itself, if it is of the same boot, from the gateway's heartbeats, and from
    corrections. If it is not known, the loss was before the loss record.
    """
    boot = (namespace, loss.gateway, loss.gateway_boot)
    told = Edge(
        *(loss.told_us, loss.told_error_us, "bounded", loss.gateway, loss.told_boot, loss.told_boottime_us, None)
    )
    first = clocks.in_boot(boot, loss.first_boottime_us, told)
    last = clocks.in_boot(boot, loss.last_boottime_us, told)
    to_us = min(last.latest_us(), Moment(loss.told_us, loss.told_error_us).latest_us())
    # If a wrong clock puts the loss after its record, only the record's time is believed.
    return TimedLoss(*loss[2:7], min(first.earliest_us(), to_us), to_us)


def _within(gap: Gap, why: str) -> Within:
    return Within(gap.run, gap.from_us, gap.to_us, why)


def _numbers(gap: Gap) -> str:
    boot = gap.device_boot if gap.device_counter is None else f"{gap.device_boot} in {gap.device_counter}"
    if gap.first == gap.last:
        return f"reading {gap.first} of boot {boot} is missing"
    return f"readings {gap.first} to {gap.last} of boot {boot} are missing"


def gateway_waits(sites: Sites, namespace: str, gateway: str) -> list[Within]:
    """Times from which a gateway may still bring readings, with the reasons."""
    retired_us = sites.retired_from_us.get((namespace, gateway), FOREVER_US)
    buffers = sites.buffers.get((namespace, gateway))
    if not buffers:
        return [Within(None, -FOREVER_US, retired_us, f"gateway {gateway} has not told how far it has come")]
    return [wait for buffer in buffers for wait in _buffer_waits(sites.clocks, buffer, retired_us)]


def _buffer_waits(clocks: Clocks, buffer: GatewayRow, retired_us: int) -> list[Within]:
    name = f"gateway {buffer.gateway}"
    until_us = min(retired_us, FOREVER_US if buffer.until_us is None else buffer.until_us)
    what_follows = f"{name} has not acknowledged past it"
    if buffer.unread:
        what_follows = f"{name} sends readings to {_some(buffer.unread)}, which `ingest` does not read"
    elif buffer.until_us is not None:
        what_follows = f"what a former buffer of {name} still held is not known"
    if buffer.heartbeat is None:
        is_silent = buffer.until_us is None and not buffer.unread
        why = f"{name} has not told how far it has come" if is_silent else what_follows
        return [Within(None, -FOREVER_US, until_us, why)]
    acknowledged_us = clocks.of(buffer.namespace, buffer.heartbeat).earliest_us()
    if not buffer.promises or acknowledged_us == -FOREVER_US:
        why = f"{name} can promise nothing yet" if buffer.until_us is None else what_follows
        return [Within(None, -FOREVER_US, until_us, why)]
    return [
        *(_held(span, until_us, f"{name} holds {_counted(span.rows, 'row')}") for span in buffer.pending),
        *(
            _held(span, until_us, f"{name} has {_counted(span.rows, 'input')} in its quarantine")
            for span in buffer.quarantined
        ),
        Within(None, acknowledged_us - ON_ITS_WAY_US, until_us, what_follows),
    ]


def _held(span: Span, until_us: int, why: str) -> Within:
    from_us = -FOREVER_US if span.from_us is None else span.from_us
    # The end of the span may be a little too early for the rows stored last.
    to_us = FOREVER_US if span.to_us is None else span.to_us + ON_ITS_WAY_US + 1
    return Within(None, from_us, min(until_us, to_us), f"{why} of about this time")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _some(topics: tuple[str, ...]) -> str:
    told = ", ".join(topics[:TOPICS_TOLD_MAX])
    return told if len(topics) <= TOPICS_TOLD_MAX else f"{told} and {len(topics) - TOPICS_TOLD_MAX} more topics"
