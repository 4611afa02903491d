"""Makes the value of the event `state`: what the gateway runs, how its box is, and what is not well. No I/O.

docs/kafka-records.md describes its members. However much there is to tell, it has at most `STATE_BYTES_MAX` bytes.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gateway.condition_codes import LEVELS, Level
from gateway.config.running_settings import digest_for_others
from gateway.health.conditions import Condition, conditions
from gateway.health.facts import Facts
from gateway.host.box import Box
from gateway.host.fleet_report import FleetReport
from gateway.host.last_update import LastUpdate
from gateway.host.terminal_text import shortened

STATE_BYTES_MAX: Final = 6_656
"""Bytes of the event's value. A usual one has a tenth of this."""
NAMED_MAX: Final = 8
"""Addresses, ports and silent devices that are named."""
NAME_BYTES_MAX: Final = 128
"""Bytes of a name, an address or a version."""
REASON_BYTES_MAX: Final = 512
"""Bytes of the words on an update."""
FLEET_BYTES_MAX: Final = 200
"""Bytes of each of the words on the fleet's file."""


def state_body(facts: Facts, box: Box, version: str, lane_number: int) -> dict[str, Any]:
    """Return the event's value. `lane_number` rises with each lane of the buffer."""
    clock, uplink = facts.clock, facts.uplink
    return {
        "version": _name(version),
        "lane_number": lane_number,
        "up_s": round(facts.up_s),
        "image": None if box.image is None else _name(box.image.version),
        "slot": None if box.image is None else box.image.slot,
        "update": None if facts.update is None else _update(facts.update),
        "fleet": None if facts.fleet is None else _fleet(facts.fleet),
        "heartbeat_s": facts.settings.kafka.heartbeat_interval_s,
        "settings": digest_for_others(facts.settings),
        "clock": {"synced": clock.synced, "source": facts.settings.gateway.clock, "error_us": clock.error_us},
        "disk": {
            "free_bytes": facts.disk_free_bytes,
            "bytes": facts.disk_bytes,
            "life_used_tenths": facts.life_used_tenths,
            "written_bytes_per_day": None if facts.disk_bytes_per_day is None else round(facts.disk_bytes_per_day),
            "spared": facts.counts.get("spared", 0),
        },
        "memory": {"free_bytes": box.memory_free_bytes, "bytes": box.memory_bytes, "own_bytes": box.own_bytes},
        "addresses": [_name(address) for address in box.addresses[:NAMED_MAX]],
        "uplink_s": None if facts.since_s is None or not uplink.up else max(0, round(facts.since_s)),
        **_ports(facts.serial),
        "devices": {
            "known": facts.devices,
            "heard": facts.heard,
            "silent": len(facts.silent),
            "silent_named": [_name(each.device) for each in facts.silent[:NAMED_MAX]],
        },
        "conditions": _codes(conditions(facts)),
    }


def lasting(body: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a state that last. Others always change a little, and that is no news."""
    of_box = ("version", "image", "slot", "update", "fleet", "settings", "addresses")
    return {
        **{name: body[name] for name in (*of_box, "ports", "ports_known", "conditions")},
        "clock": (body["clock"]["synced"], body["clock"]["source"]),
        "life_used_tenths": body["disk"]["life_used_tenths"],
        "silent": (body["devices"]["silent"], body["devices"]["silent_named"]),
    }


def _update(update: LastUpdate) -> dict[str, object]:
    return {
        "from": _name(update.old),
        "to": _name(update.new) or None,
        "result": update.result,
        "reason": _cut(update.reason, REASON_BYTES_MAX) or None,
    }


def _fleet(report: FleetReport) -> dict[str, object]:
    return {
        "serial": report.serial,
        "wish": report.wish or None,
        "result": report.result,
        "reason": _cut(report.reason, FLEET_BYTES_MAX) or None,
        "trouble": _cut(report.trouble, FLEET_BYTES_MAX) or None,
    }


def _ports(serial: dict[str, Any]) -> dict[str, object]:
    """The serial ports, those that are not open first, and their number."""
    ports = dict(_each_port(serial))
    first = sorted(ports, key=lambda name: (ports[name] == "open", name))[:NAMED_MAX]
    return {"ports": {_name(name): ports[name] for name in first}, "ports_known": len(ports)}


def _each_port(serial: dict[str, Any]) -> Iterator[tuple[str, str]]:
    # A port may stand in several of these. The last one says most.
    for state, member in (
        ("open", "ports"),
        ("awaited", "awaited"),
        ("missing", "missing"),
        ("gone", "gone"),
        ("unopened", "unopened"),
    ):
        yield from ((name, state) for name in serial.get(member, ()))


def _codes(found: list[Condition]) -> dict[Level, list[str]]:
    """The codes by level, each once, at its worst level."""
    worst: dict[str, Level] = {}
    for condition in found:
        worst.setdefault(condition.code, condition.level)
    return {level: [code for code, its in worst.items() if its == level] for level in LEVELS}


def _name(text: str) -> str:
    return _cut(text, NAME_BYTES_MAX)


def _cut(text: str, bytes_max: int) -> str:
    """Shorten a text until its JSON has few enough bytes. What is no text in UTF-8 becomes question marks."""
    text, width = text.encode("utf-8", "replace").decode(), bytes_max
    while len(msgspec.json.encode(shortened(text, width))) > bytes_max:
        width = width * 3 // 4
    return shortened(text, width)
