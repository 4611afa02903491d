"""A warehouse of two hundred gateways at some twenty sites, with one gateway for each trouble that there is."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gateway.condition_codes import CODES
from gateway.record_contract import HEARTBEAT_TYPE
from spark.decode.record_types import STATE_TYPE
from spark.desk.asked import microseconds
from spark.finality.gateway_states import GatewayEvent, GatewayStates
from spark.finality.gateway_troubles import UNHEARD
from spark.log.edges import Edge
from tests.support import hostile
from tests.support.plain_warehouse import NOON, PlainWarehouse, row
from tests.support.spark_records import NOTHING_WAITS

COUNT = 200
NOON_US = microseconds(NOON)
HOUR_US = 3_600_000_000
NOTES = {"update-on-trial", "certificate-dates-unknown", "readings-missing", "quarantine", "serial-awaited"}
BAD = {"disk-failing", "buffer-full", "above-share", "no-source", "kafka-unusable", "serial-rivals", "serial-unopened"}
BAD |= {"broker-unconnected", "broker-refuses", "serial-gone"}
"""Codes that are bad here, and those that are notes. All others are warnings."""
EACH = (UNHEARD, *(code for code in CODES if code != "disk-hangs"))
"""One gateway has each of these, and all others have none."""
SITES = [
    *("Aachen", "Bern", "Cork", "Delft", "Essen", "Fürth", "Graz", "Hof", "Ibbenbüren", "Jena", "Kiel", "Lübeck"),
    *("Mainz", "Nantes", "Oslo", "Plön", "Riga", "Soest", "Trier", "Ulm", "<i>Werk\u202e 7</i>", "Xanten"),
]
ODD = "gw-<b>odd</b>"
RETIRED = "gw-retired"


class Told(NamedTuple):
    """A state that a gateway told so many hours before noon."""

    hours: float
    version: str
    code: str | None


def level_of(code: str) -> str:
    return "bad" if code in BAD else "note" if code in NOTES else "warn"


def made(folder: Path) -> PlainWarehouse:
    """Make the warehouse."""
    warehouse, rng = PlainWarehouse(folder), random.Random("fleet")  # noqa: S311
    states, logged, registered = GatewayStates(), [], []
    for number in range(COUNT + 1):
        name = RETIRED if number == COUNT else ODD if number == COUNT - 1 else f"gw-{number:03}"
        code = EACH[number] if number < len(EACH) else None
        site = SITES[rng.randrange(len(SITES))] if number % 40 else None
        retired = NOON if name == RETIRED else None
        registered.append({"gateway": name, "site": site, "retired_from": retired})
        ago_us = 5 * HOUR_US if code == UNHEARD else 0
        told = [each for each in _told(code, rng) if each.hours * HOUR_US >= ago_us]
        place = f"{number:04}"
        events = [_event(STATE_TYPE, name, int(each.hours * HOUR_US), _state(each, number)) for each in told]
        states.take([*events, _event(HEARTBEAT_TYPE, name, ago_us, NOTHING_WAITS)], {})
        logged += [_row(event, place, at_place) for at_place, event in enumerate(events)]
    warehouse.register(*registered)
    warehouse.take(*logged)
    warehouse.note(
        "gateway_states",
        *(
            {"namespace": namespace, "gateway": name, "state": msgspec.json.encode(state), "ordinal": warehouse.ordinal}
            for (namespace, name), state in states.gateways.items()
        ),
    )
    return warehouse


def told_rows(gateway: str, told: Iterable[Told]) -> list[dict[str, object]]:
    """Rows of `log` with states that a gateway told."""
    events = (_event(STATE_TYPE, gateway, int(each.hours * HOUR_US), _state(each, 1)) for each in told)
    return [_row(event, gateway, number) for number, event in enumerate(events)]


def _told(code: str | None, rng: random.Random) -> Iterator[Told]:
    """States of each hour of a week: an update on the way, some trouble in between, and at the end the code."""
    updated_h, troubled_h = rng.randrange(20, 150), rng.randrange(30, 160)
    is_old = rng.random() < 0.15
    for hours in range(24 * 7 - 1, -1, -1):
        version = "1.1.4" if is_old or hours > updated_h else "1.2.0"
        between = "kafka-unreached" if troubled_h - 6 < hours < troubled_h else None
        yield Told(hours, version, code if hours < 9 and code != UNHEARD else between)


def _state(told: Told, number: int) -> bytes:
    conditions: dict[str, list[str]] = {"bad": [], "warn": [], "note": []}
    if told.code is not None:
        conditions[level_of(told.code)].append(told.code)
    changed: Mapping[str, Any] = {
        "version": told.version,
        "conditions": conditions,
        "addresses": [f"192.0.2.{number}"],
        "disk": {"free_bytes": 21_000_000_000, "bytes": 31_000_000_000, "life_used_tenths": 2},
        "memory": {"free_bytes": 310_000_000, "bytes": 970_000_000},
        "devices": {"known": 12, "heard": 11, "silent": 1, "silent_named": [f"pump-{number}"]},
    }
    return json.dumps({**hostile.STATE, **changed}).encode()


def _event(kind: str, gateway: str, ago_us: int, value: bytes) -> GatewayEvent:
    at_us = NOON_US - ago_us
    edge = Edge(at_us, 500, "synced", gateway, "boot-1", 10**13 - ago_us, None)
    return GatewayEvent(kind, "plant", gateway, "0011", (at_us, "gateway-events", 0, 0), edge, value)


def _row(event: GatewayEvent, place: str, number: int) -> dict[str, object]:
    days = (event.edge.event_us - NOON_US) / 86_400e6
    edge = {name: value for name, value in event.edge._asdict().items() if name != "event_us"}
    others = dict.fromkeys(("device", "stream", "metrics"))
    told = {"ce_type": STATE_TYPE, "topic": "gateway-events", "value": event.value}
    return row(number, days) | edge | others | told | {"ce_id": f"{place}-{number}", "lane": place}
