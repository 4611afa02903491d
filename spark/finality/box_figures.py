"""Figures of a gateway's box in the view `gateways`, from the newest state that it told. It needs no Spark."""

from typing import NamedTuple

from gateway.condition_codes import LEVELS
from spark.finality.box_states import FleetState, ToldState, Update
from spark.log.edge_times import Clocks

TIMES = {"state_us": "state_time", "booted_us": "booted_time", "uplink_since_us": "uplink_since_time"}
"""Columns of times, and their names in the view."""


class BoxFigures(NamedTuple):
    """The columns that a state adds to a row of `gateways`. Times are in microseconds since 1970.

    Times have today's knowledge of the gateway's clock. `level` is that of the worst condition, and `conditions` begin
    with the worst.
    """

    state_us: int | None = None
    version: str | None = None
    image: str | None = None
    slot: str | None = None
    update_to: str | None = None
    update_result: str | None = None
    update_reason: str | None = None
    fleet_serial: int | None = None
    fleet_wish: str | None = None
    fleet_result: str | None = None
    fleet_reason: str | None = None
    fleet_trouble: str | None = None
    settings: str | None = None
    heartbeat_s: float | None = None
    booted_us: int | None = None
    uplink_since_us: int | None = None
    clock_synced: bool | None = None
    clock_source: str | None = None
    clock_error_us: int | None = None
    disk_free_bytes: int | None = None
    disk_bytes: int | None = None
    disk_life_used_tenths: int | None = None
    disk_written_bytes_per_day: int | None = None
    spared: int | None = None
    memory_free_bytes: int | None = None
    memory_bytes: int | None = None
    addresses: list[str] | None = None
    ports: list[str] | None = None
    devices_known: int | None = None
    devices_heard: int | None = None
    devices_silent: int | None = None
    silent: list[str] | None = None
    level: str | None = None
    conditions: list[str] | None = None


_TYPES = {str: "string", int: "bigint", float: "double", bool: "boolean", list[str]: "array<string>"}
COLUMNS = {
    name: next(kind for each, kind in _TYPES.items() if hint == each | None)
    for name, hint in BoxFigures.__annotations__.items()
}
"""Names of the columns, and their types in Spark's SQL."""


def box_figures(namespace: str, told: ToldState | None, clocks: Clocks) -> BoxFigures:
    """Return the figures of a box; none is known of a gateway that told no state."""
    if told is None:
        return BoxFigures()
    state, at = told.state, clocks.of(namespace, told.edge)
    at_us = at.us if at.earliest_us() > 0 else None
    update, clock, disk = state.update or Update(), state.clock, state.disk
    memory, devices, fleet = state.memory, state.devices, state.fleet or FleetState()
    by_level = {level: codes for level in LEVELS if (codes := getattr(state.conditions, level))}
    return BoxFigures(
        state_us=at_us,
        version=state.version,
        image=state.image,
        slot=state.slot,
        update_to=update.to,
        update_result=update.result,
        update_reason=update.reason,
        fleet_serial=fleet.serial,
        fleet_wish=fleet.wish,
        fleet_result=fleet.result,
        fleet_reason=fleet.reason,
        fleet_trouble=fleet.trouble,
        settings=state.settings,
        heartbeat_s=state.heartbeat_s,
        booted_us=_before(at_us, told.edge.boot_time_us),
        uplink_since_us=_before(at_us, None if state.uplink_s is None else state.uplink_s * 1_000_000),
        clock_synced=clock.synced,
        clock_source=clock.source,
        clock_error_us=clock.error_us,
        disk_free_bytes=disk.free_bytes,
        disk_bytes=disk.bytes,
        disk_life_used_tenths=disk.life_used_tenths,
        disk_written_bytes_per_day=disk.written_bytes_per_day,
        spared=disk.spared,
        memory_free_bytes=memory.free_bytes,
        memory_bytes=memory.bytes,
        addresses=state.addresses,
        ports=[f"{name} {how}" for name, how in sorted(state.ports.items())],
        devices_known=devices.known,
        devices_heard=devices.heard,
        devices_silent=devices.silent,
        silent=devices.silent_named,
        level=next(iter(by_level), None),
        conditions=[code for codes in by_level.values() for code in codes],
    )


def _before(at_us: int | None, ago_us: int | None) -> int | None:
    """A moment so long before another; None if that is not known, or lies before 1970."""
    return None if at_us is None or ago_us is None or not 0 <= ago_us <= at_us else at_us - ago_us
