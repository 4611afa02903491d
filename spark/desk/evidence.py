"""Reads from the tables all evidence that decides which windows are final. `views/evidence` does the same in Spark."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.desk.asked import Asked, text
from spark.desk.delta_source import Source, type_of
from spark.desk.log_views import read_corrections, still_rejected
from spark.finality.box_figures import BoxFigures, box_figures
from spark.finality.gateway_figures import GatewayFigures, figures_of
from spark.finality.gateway_rows import GatewayRow
from spark.finality.gateway_states import GatewayState, GatewayStates
from spark.finality.loss_figures import LossFigures
from spark.finality.loss_figures import figures_of as loss_figures
from spark.finality.sequence_gaps import Gap
from spark.finality.stream_proofs import (
    LOST_IN_KAFKA,
    REJECTED,
    DeviceIsland,
    DeviceLoss,
    Sites,
    StreamProof,
    device_gaps,
    gateway_waits,
    stream_proofs,
)
from spark.log.edge_times import clocks
from spark.log.edges import EDGE_COLUMNS, Edge
from spark.log.lane_sequences import joined
from spark.log.verdicts import CONFLICT

RUN = ("namespace", "device", "stream", "device_counter", "device_boot")
"""Columns that name a run of numbers."""
_EDGE = f"STRUCT({', '.join(f'{name} {type_of(kind)}' for name, kind in EDGE_COLUMNS.items())})"
DEVICE_PARTS = {
    **dict.fromkeys(RUN, "VARCHAR"),
    "islands": f"STRUCT(first BIGINT, last BIGINT, first_edge {_EDGE}, last_edge {_EDGE})[]",
    "gateways": "VARCHAR[]",
    "last_us": "BIGINT",
}
"""Columns of `device_parts`, which a warehouse of an earlier release lacks."""
REGISTRY_ALSO = {
    **dict.fromkeys(("namespace", "gateway", "site"), "VARCHAR"),
    "retired_from": "TIMESTAMP",
    "registry_version": "VARCHAR",
    "topics": "VARCHAR[]",
}
"""Columns of `gateway_registry`, which may not be there."""


class Device(NamedTuple):
    """A device in one namespace."""

    namespace: str
    device: str


class Loss(NamedTuple):
    """Readings that are lost. `device` is None if nobody can say whose."""

    namespace: str
    device: str | None
    told: DeviceLoss


@dataclass(frozen=True, slots=True)
class Evidence:
    """All evidence on windows being final, of all devices or of one."""

    states: GatewayStates
    sites: Sites
    registry: Mapping[tuple[str, str], tuple[str | None, int | None]]
    """Site and time of retirement of each registered gateway, by namespace and gateway."""
    islands: Mapping[Device, list[DeviceIsland]]
    losses: list[Loss]
    services: Mapping[Device, set[str]]
    """All gateways that ever served each device."""
    heard: Mapping[Device, dict[str, int]]
    """Event time of each stream's last reading in a window."""

    def gaps(self) -> list[tuple[Device, Gap]]:
        """The gaps in the numbers of all devices."""
        return [
            (device, gap)
            for device, losses in self._losses().items()
            for gap in device_gaps(self.sites, device.namespace, self.islands.get(device, ()), losses)
        ]

    def proofs(self) -> list[tuple[Device, StreamProof]]:
        """The proofs of all streams of all devices."""
        return [
            (device, proof)
            for device, losses in self._losses().items()
            for proof in stream_proofs(
                self.sites,
                device.namespace,
                self.islands.get(device, ()),
                losses,
                self.services.get(device, ()),
                self.heard.get(device, {}),
            )
        ]

    def loss_figures(self) -> list[LossFigures]:
        """The figures of all losses."""
        return [loss_figures(self.sites.clocks, *loss) for loss in self.losses]

    def gateways(self) -> list[GatewayFigures]:
        """The figures of each buffer file of all gateways."""
        return [self._figures(row) for row in self.states.rows()]

    def boxes(self) -> list[BoxFigures]:
        """What each gateway last told of its box, in the order of `gateways`."""
        return [
            box_figures(row.namespace, self.states.box(row.namespace, row.gateway, row.buffer), self.sites.clocks)
            for row in self.states.rows()
        ]

    def told(self, namespace: str, gateway: str) -> GatewayFigures | None:
        """The figures of a gateway's present buffer file, or of its last one; None if nothing was heard of it."""
        rows = self.sites.buffers.get((namespace, gateway))
        return self._figures(min(rows, key=lambda row: not row.is_present)) if rows else None

    def waits(self, namespace: str, gateway: str, asked: Asked) -> list[str]:
        """Why a gateway may still bring readings of a span, in words."""
        from_us, until_us = asked.since_us or 0, asked.until_us or 0
        found = gateway_waits(self.sites, namespace, gateway)
        return [*dict.fromkeys(wait.why for wait in found if wait.from_us < until_us and wait.until_us > from_us)]

    def _figures(self, row: GatewayRow) -> GatewayFigures:
        nothing = (None, None)
        return figures_of(row, self.sites.clocks, *self.registry.get((row.namespace, row.gateway), nothing))

    def _losses(self) -> dict[Device, list[DeviceLoss]]:
        """The losses that may be each device's."""
        own, others = defaultdict(list), defaultdict(list)
        for namespace, device, told in self.losses:
            if device is not None:
                own[Device(namespace, device)].append(told)
            else:
                # They may be any device's that the gateway served.
                others[namespace, told.gateway].append(told)
        return {
            device: own.get(device, [])
            + [
                loss
                for gateway in sorted(self.services.get(device, ()))
                for loss in others.get((device.namespace, gateway), [])
            ]
            for device in sorted({*self.islands, *own, *self.services, *self.heard}, key=repr)
        }


def read_evidence(source: Source, warehouse: str, tables: str, device: str | None = None) -> Evidence:
    """Read the evidence, of one device if it is named. Read it before windows, so that they hold all that it names."""
    # Gateways first: if a gateway appears meanwhile, only `services` has it, and it counts as not heard yet.
    states = read_gateways(source, tables)
    services, heard = _heard(source, tables, device)
    registry = read_registry(source, warehouse)
    buffers = defaultdict(list)
    for row in states.rows():
        buffers[row.namespace, row.gateway].append(row)
    islands = _islands(source, tables, device)
    # Windows have all that was read until here, and `log`, which is read next, has all that windows have.
    source.opened(f"{tables}/window_parts")
    serving = {(each.namespace, name) for each, names in services.items() for name in names}
    losses = read_losses(source, tables, serving)
    return Evidence(
        states=states,
        sites=Sites(
            clocks(read_corrections(source, tables).known, states.boots()),
            dict(buffers),
            {gateway: retired_us for gateway, (_, retired_us) in registry.items() if retired_us is not None},
        ),
        registry=registry,
        islands=islands,
        losses=[
            loss
            for loss in losses
            if device in {None, loss.device} or (loss.device is None and (loss.namespace, loss.told.gateway) in serving)
        ],
        services=services,
        heard=heard,
    )


def read_gateways(source: Source, tables: str) -> GatewayStates:
    """Return the last saved states of gateways."""
    rows = source.rows(
        f"""SELECT namespace, gateway, state FROM ({source.table(f"{tables}/gateway_states")})
        QUALIFY row_number() OVER (PARTITION BY namespace, gateway ORDER BY ordinal DESC) = 1"""
    )
    return GatewayStates(
        {(namespace, gateway): msgspec.json.decode(state, type=GatewayState) for namespace, gateway, state in rows}
    )


def read_registry(source: Source, warehouse: str) -> dict[tuple[str, str], tuple[str | None, int | None]]:
    """Return site and time of retirement of each registered gateway."""
    table = source.optional(f"{warehouse}/gateway_registry", REGISTRY_ALSO)
    rows = source.rows(f"SELECT namespace, gateway, site, epoch_us(retired_from) FROM ({table})")
    return {(namespace, gateway): (site, retired_us) for namespace, gateway, site, retired_us in rows}


def read_losses(source: Source, tables: str, gateways: Iterable[tuple[str, str]]) -> list[Loss]:
    """Return what gateways told of, what is in the quarantine, and what Kafka deleted unread of these gateways."""
    columns = {"is_its_own": "device IS NOT NULL", "size": "count"}
    told = ", ".join(columns.get(name, name) for name in DeviceLoss._fields)
    table = source.table(f"{tables}/losses")
    # Of copies of a record, the copy with the smallest bound of its time counts.
    surest = f"""SELECT namespace, device, {told} FROM ({table}) QUALIFY row_number() OVER (
        PARTITION BY ce_id ORDER BY told_error_us NULLS FIRST, told_us NULLS FIRST) = 1"""
    losses = [Loss(namespace, device, DeviceLoss(*row)) for namespace, device, *row in source.rows(surest)]
    return losses + _rejects(source, tables) + _lost_in_kafka(source, tables, gateways)


def _rejects(source: Source, tables: str) -> list[Loss]:
    """Rejects with a number, a row for each range of numbers."""
    newest = "ORDER BY boot_time_us DESC NULLS LAST, event_time DESC NULLS LAST, time_error_us DESC NULLS LAST"
    numbers = f"""SELECT namespace, device, stream, device_counter, device_boot, gateway, gateway_boot,
            list(DISTINCT device_sequence), min(boot_time_us), max(boot_time_us),
            first(epoch_us(event_time) {newest}), first(time_error_us {newest})
        FROM ({still_rejected(source, tables)})
        WHERE NOT starts_with(reject_reason, '{CONFLICT}') AND ce_id IS NOT NULL AND device_sequence IS NOT NULL
            AND device IS NOT NULL
        GROUP BY ALL"""
    found = []
    for row in source.rows(numbers):
        namespace, device, _, _, boot, gateway, gateway_boot, sequences, from_us, to_us, told_us, error_us = row
        for first, last in joined((number, number) for number in sequences):
            told = DeviceLoss(
                *(gateway, True, REJECTED, last - first + 1, boot, first, last, gateway_boot, from_us, to_us, told_us),
                *(TIME_ERROR_UNKNOWN_US if error_us is None else error_us, gateway_boot, to_us),
            )
            found.append(Loss(namespace, device, told))
    return found


def _lost_in_kafka(source: Source, tables: str, gateways: Iterable[tuple[str, str]]) -> list[Loss]:
    """Records that Kafka deleted unread, as a loss of each gateway: nobody knows whose they were, nor their times."""
    table = source.optional(f"{tables}/reading_starts", {"at_us": "BIGINT", "losses": "INTEGER[]"})
    starts = source.rows(f"SELECT at_us FROM ({table}) WHERE len(losses) > 0")
    return [
        # No real boot has this name, so nothing is known of its clock.
        Loss(
            namespace, None, DeviceLoss(gateway, False, LOST_IN_KAFKA, 0, None, None, None, "-", 0, 0, at_us, 0, "", 0)
        )
        for namespace, gateway in sorted(set(gateways))
        for (at_us,) in starts
    ]


def _heard(
    source: Source, tables: str, device: str | None
) -> tuple[dict[Device, set[str]], dict[Device, dict[str, int]]]:
    query = f"""SELECT namespace, device, stream, list_distinct(flatten(list(coalesce(gateways, [])))), max(last_us)
        FROM ({device_parts(source, tables)}){_of(device)} GROUP BY ALL"""
    services: dict[Device, set[str]] = defaultdict(set)
    heard: dict[Device, dict[str, int]] = defaultdict(dict)
    for namespace, name, stream, gateways, last_us in source.rows(query):
        key = Device(namespace, name)
        services[key].update(gateways)
        if last_us is not None:
            heard[key][stream] = last_us
    return dict(services), dict(heard)


def _islands(source: Source, tables: str, device: str | None) -> dict[Device, list[DeviceIsland]]:
    """All islands of numbers. They may overlap."""
    runs = ", ".join(RUN)
    edges = [f"{end}_edge.{name}" for end in ("first", "last") for name in Edge._fields]
    each = f"SELECT {runs}, unnest(islands, max_depth := 2) FROM ({device_parts(source, tables)}){_of(device)}"
    shown = f"SELECT {runs}, first, last, {', '.join(edges)} FROM ({each})"
    found: dict[Device, list[DeviceIsland]] = defaultdict(list)
    for namespace, name, stream, counter, boot, first, last, *ends in source.rows(shown):
        first_edge, last_edge = Edge(*ends[: len(Edge._fields)]), Edge(*ends[len(Edge._fields) :])
        found[Device(namespace, name)].append(DeviceIsland(stream, counter, boot, first, last, first_edge, last_edge))
    return dict(found)


def device_parts(source: Source, tables: str) -> str:
    """All that is known of devices. Before the first start after an earlier release, it is nothing."""
    return source.optional(f"{tables}/device_parts", DEVICE_PARTS)


def _of(device: str | None) -> str:
    return "" if device is None else f" WHERE device = {text(device)}"
