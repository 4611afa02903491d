"""Which gateways need somebody, the worst first; and none is called unheard because the tables trail."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.condition_codes import CODES
from gateway.record_contract import HEARTBEAT_TYPE, TIME_ERROR_UNKNOWN_US
from spark.cli import main
from spark.decode.record_types import STATE_TYPE
from spark.desk import tables
from spark.desk.asked import microseconds
from spark.finality.gateway_states import GatewayEvent, GatewayStates
from spark.finality.gateway_troubles import OLD_US, UNHEARD, Trouble, gateways_now, troubles
from spark.log.edges import Edge
from tests.support import hostile
from tests.support.plain_warehouse import NOON, PlainWarehouse
from tests.support.spark_records import NOTHING_WAITS

WELL: Mapping[str, list[str]] = {"bad": [], "warn": [], "note": []}
NOON_US = microseconds(NOON)


def event(kind: str, gateway: str, ago_s: float, value: bytes) -> GatewayEvent:
    at_us = NOON_US - int(ago_s * 1e6)
    edge = Edge(at_us, 500, "synced", gateway, "boot-1", 10**12 - int(ago_s * 1e6), None)
    return GatewayEvent(kind, "plant", gateway, "0011", (at_us, "gateway-events", 0, 0), edge, value)


class Site:
    """Gateways, and what they told before noon."""

    def __init__(self, folder: Path) -> None:
        self.warehouse = PlainWarehouse(folder)
        self._states = GatewayStates()

    def gateway(self, name: str, ago_s: float = 0, heartbeat_s: float = 10.0, **conditions: list[str]) -> None:
        """A gateway with these conditions, whose last heartbeat was so long ago."""
        body = {**hostile.STATE, "heartbeat_s": heartbeat_s, "conditions": {**WELL, **conditions}}
        told = [
            event(HEARTBEAT_TYPE, name, ago_s, NOTHING_WAITS),
            event(STATE_TYPE, name, ago_s, json.dumps(body).encode()),
        ]
        self._states.take(told, {})
        self.warehouse.ordinal += 1
        state = msgspec.json.encode(self._states.gateways["plant", name])
        row = {"namespace": "plant", "gateway": name, "state": state, "ordinal": self.warehouse.ordinal}
        self.warehouse.note("gateway_states", row)

    def troubles(self) -> list[Trouble]:
        evidence = tables.open(str(self.warehouse.path)).evidence()
        return troubles(evidence.states, evidence.registry)

    def asked(self, *options: str) -> Result:
        return CliRunner().invoke(main, ["gateways", "--trouble", "--warehouse", str(self.warehouse.path), *options])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "warehouse")


def test_the_worst_comes_first_with_what_to_do(site: Site) -> None:
    site.gateway("well")
    site.gateway("noted", note=["quarantine"])
    site.gateway("worn", warn=["card-wears-out"])
    site.gateway("two", warn=["clock-unsynced", "device-silent"])
    site.gateway("full", bad=["buffer-full"], warn=["kafka-unreached"])
    site.gateway("gone", ago_s=31)
    found = site.troubles()
    assert [(each.gateway, each.code) for each in found] == [
        ("gone", UNHEARD),
        ("full", "buffer-full"),
        ("full", "kafka-unreached"),
        ("two", "clock-unsynced"),
        ("two", "device-silent"),
        ("worn", "card-wears-out"),
    ]
    assert all(each.means and each.todo for each in found)
    assert (found[1].means, found[1].todo) == CODES["buffer-full"]


def test_three_heartbeats_are_counted_by_the_gateways_own_interval(site: Site) -> None:
    site.gateway("now")
    site.gateway("ten", ago_s=29.9)
    site.gateway("minute", ago_s=179, heartbeat_s=60.0)
    assert site.troubles() == []
    site.gateway("late", ago_s=181, heartbeat_s=60.0)
    assert [each.gateway for each in site.troubles()] == ["late"]


def test_a_gateway_with_another_card_and_no_clock_is_there_once() -> None:
    states = GatewayStates()
    before, after = (event(HEARTBEAT_TYPE, "gw-1", ago_s, NOTHING_WAITS) for ago_s in (20, 10))
    edge = after.edge._replace(time_error_us=TIME_ERROR_UNKNOWN_US)
    states.take([before, after._replace(edge=edge, buffer="0000")], {})
    # Nobody knows yet until when the former buffer took readings.
    assert [row.until_us for row in states.rows()] == [None, None]
    assert [(each.gateway, each.buffer) for each in gateways_now(states, {})] == [("gw-1", "0000")]


def test_a_code_of_a_newer_gateway_is_told_too(site: Site) -> None:
    site.gateway("newer", bad=["anything-else"])
    (found,) = site.troubles()
    assert found.code == "anything-else"
    assert "sluice-cloud" in found.todo


def test_the_command_ends_with_1_if_somebody_is_needed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark.commands.table_commands.time.time_ns", lambda: (NOON_US + 60_000_000) * 1_000)
    site.gateway("well")
    ended = site.asked()
    assert ended.exit_code == 0
    assert "no gateway needs anybody" in ended.output
    site.gateway("full", bad=["buffer-full"])
    ended = site.asked("--json")
    assert ended.exit_code == 1
    told = json.loads(ended.stdout)
    assert (told["gateway"], told["code"], told["level"]) == ("full", "buffer-full", "bad")
    assert told["todo"] == CODES["buffer-full"].todo


def test_tables_that_end_long_ago_are_a_finding_of_their_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.gateway("well")
    old_ns = (NOON_US + OLD_US + 1) * 1_000
    monkeypatch.setattr("spark.commands.table_commands.time.time_ns", lambda: old_ns)
    ended = site.asked()
    assert ended.exit_code == 1
    assert "does ingest run?" in ended.output
