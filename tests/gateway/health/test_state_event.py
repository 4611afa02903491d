"""The event `state`: what it tells, what of it is news, and that it stays small whatever there is to tell."""

import re
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.clock.report import ClockView
from gateway.config.running_settings import digest_for_others
from gateway.health.facts import Facts, Silent
from gateway.health.state_event import NAMED_MAX, STATE_BYTES_MAX, lasting, state_body
from gateway.host.box import Box
from gateway.host.fleet_report import FleetReport
from gateway.host.last_update import Before, LastUpdate
from gateway.host.our_image import OurImage
from gateway.settings import BufferSettings, GatewaySettings, KafkaSettings, ListenerSettings, Settings
from gateway.uplink.state import UplinkState

ROOT = Path(__file__).parents[3]
CODES = re.findall(r"^\| `([a-z-]+)` \| ", (ROOT / "docs/conditions.md").read_text(), re.MULTILINE)
"""All codes of conditions. No gateway has all of these at once."""
WALL_S = 1_800_000_000.0
SETTINGS = Settings(
    GatewaySettings("barn-1"),
    KafkaSettings(("kafka.example:9092",)),
    BufferSettings(Path("/nowhere")),
    ListenerSettings(users={"42": "a" * 64}),
)
WELL = Facts(
    SETTINGS,
    boottime_us=10**10,
    wall_s=WALL_S,
    up_s=3_600.4,
    uplink=UplinkState(up=True, since=WALL_S - 600),
    clock=ClockView(synced=True, error_us=1_500),
    disk_bytes_per_day=40_000_000.4,
    disk_free_bytes=10**9,
    disk_bytes=10**10,
    life_used_tenths=2,
    counts={"spared": 70},
    serial={"ports": {"/dev/ttyUSB0": {}}},
    devices=4,
    heard=3,
    silent=(Silent("attic", 900.0),),
    update=LastUpdate("1", "1.1", "1.2", "b", Before(), "went-back", "Kafka is not reached"),
    fleet=FleetReport(7, "", "0123456789abcdef", "went-back", "no reading came in", trouble="the server answers 404"),
)
BOX = Box(OurImage("1.1", "a", {}), 512_000_000, 300_000_000, 60_000_000, ("192.0.2.7", "2001:db8::7"))


def test_a_state_tells_what_runs_how_the_box_is_and_what_is_not_well() -> None:
    assert state_body(WELL, BOX, "0.1.0", 12) == {
        "version": "0.1.0",
        "lane_number": 12,
        "up_s": 3_600,
        "image": "1.1",
        "slot": "a",
        "update": {"from": "1.1", "to": "1.2", "result": "went-back", "reason": "Kafka is not reached"},
        "fleet": {
            "serial": 7,
            "wish": "0123456789abcdef",
            "result": "went-back",
            "reason": "no reading came in",
            "trouble": "the server answers 404",
        },
        "heartbeat_s": 10.0,
        "settings": digest_for_others(SETTINGS),
        "clock": {"synced": True, "source": "kernel", "error_us": 1_500},
        "disk": {
            "free_bytes": 10**9,
            "bytes": 10**10,
            "life_used_tenths": 2,
            "written_bytes_per_day": 40_000_000,
            "spared": 70,
        },
        "memory": {"free_bytes": 300_000_000, "bytes": 512_000_000, "own_bytes": 60_000_000},
        "addresses": ["192.0.2.7", "2001:db8::7"],
        "uplink_s": 600,
        "ports": {"/dev/ttyUSB0": "open"},
        "ports_known": 1,
        "devices": {"known": 4, "heard": 3, "silent": 1, "silent_named": ["attic"]},
        "conditions": {
            "bad": [],
            "warn": ["device-silent", "update-went-back", "fleet-went-back", "fleet-unread"],
            "note": [],
        },
    }


def test_a_box_that_tells_nothing_of_itself_has_a_state_too() -> None:
    body = state_body(Facts(SETTINGS, 10**10, WALL_S, uplink=UplinkState()), Box(), "0.1.0", 1)
    assert (body["image"], body["slot"], body["update"], body["fleet"], body["uplink_s"]) == (None,) * 5
    assert body["disk"]["life_used_tenths"] is None
    assert (body["ports"], body["addresses"]) == ({}, [])


def test_a_port_in_trouble_is_named_before_the_others() -> None:
    ports: dict[str, Any] = {f"/dev/ttyUSB{number}": {} for number in range(20)}
    gone = {"/dev/ttyUSB19": {"gone_s": 5.0, "devices": []}}
    serial = {"ports": ports, "missing": ["/dev/ttyUSB19", "/dev/ttyS9"], "gone": gone, "unopened": {"/dev/ttyS8": "x"}}
    body = state_body(replace(WELL, serial=serial), BOX, "0.1.0", 1)
    assert [*body["ports"].items()][:3] == [
        ("/dev/ttyS8", "unopened"),
        ("/dev/ttyS9", "missing"),
        ("/dev/ttyUSB19", "gone"),
    ]
    assert (len(body["ports"]), body["ports_known"]) == (NAMED_MAX, 22)
    assert body["conditions"]["bad"] == ["serial-unopened", "serial-gone"]


def test_what_always_changes_a_little_is_no_news() -> None:
    def news(box: Box = BOX, **changes: Any) -> bool:
        body = state_body(replace(WELL, **changes), box, "0.1.0", 2)
        return lasting(body) != lasting(state_body(WELL, BOX, "0.1.0", 1))

    assert not news(
        replace(BOX, memory_free_bytes=1, own_bytes=2),
        up_s=9.0,
        clock=ClockView(synced=True, error_us=9),
        disk_free_bytes=1,
        disk_bytes_per_day=1.0,
        counts={"spared": 71},
        devices=9,
        heard=8,
        uplink=UplinkState(up=True, since=WALL_S - 5),
    )
    assert news(replace(BOX, addresses=("192.0.2.8",)))
    assert news(replace(BOX, image=OurImage("1.2", "b", {})))
    assert news(clock=ClockView(synced=False))
    assert news(life_used_tenths=3)
    assert news(silent=())
    assert news(serial={})
    assert news(update=None)
    assert news(fleet=None)
    assert news(failing="disk I/O error")
    assert news(settings=replace(SETTINGS, kafka=KafkaSettings(("elsewhere.example:9092",))))


ugly = st.text(st.characters(exclude_categories=()), max_size=20).map(lambda text: text * 200)
numbers = st.integers(0, 2**63 - 1)
names = st.lists(ugly, max_size=40).map(tuple)


@given(ugly, names, names, st.lists(numbers, min_size=4, max_size=4), st.sampled_from(["went-back", "refused"]))
def test_a_state_stays_small_whatever_there_is_to_tell(
    text: str, addresses: tuple[str, ...], devices: tuple[str, ...], figures: list[int], result: Any
) -> None:
    facts = replace(
        WELL,
        silent=tuple(Silent(device, 900.0) for device in devices),
        serial={"missing": list(devices), "gone": {text: {"gone_s": 1.0, "devices": []}}},
        update=LastUpdate(text, text, text, "b", Before(), result, text),
        fleet=FleetReport(2**53, text, "0" * 16, result, text, trouble=text),
        disk_free_bytes=figures[0],
        disk_bytes=figures[1],
        counts={"spared": figures[2]},
        devices=figures[3],
    )
    box = Box(OurImage(text, "a", {}), figures[0], figures[1], figures[2], addresses)
    body = state_body(facts, box, text, figures[0])
    assert {code for codes in body["conditions"].values() for code in codes} <= set(CODES)
    body["conditions"] = {"bad": CODES, "warn": [], "note": []}
    assert len(msgspec.json.encode(body)) <= STATE_BYTES_MAX
