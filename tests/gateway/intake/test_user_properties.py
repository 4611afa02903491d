"""Identity and time in the user properties of MQTT 5: as in JSON, by the front door and into the record."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from gateway.clock.rfc3339 import rfc3339
from gateway.intake.front_door import FrontDoor
from gateway.intake.payload_identity import (
    TICK_UNREADABLE,
    Identity,
    of_properties,
    reader,
    why_no_properties,
)
from gateway.intake.payload_time import DEVICE_TIME_US_MAX, NothingToldError, Told, of_property
from gateway.intake.quarantine_retry import retry_quarantined
from gateway.settings import PayloadIdentity, RouteSettings, TimeSource
from gateway.user_properties import of_text
from tests.gateway.intake.test_intake import NOW_US, door_of, take
from tests.support.buffers import opened, reading_of, rows

_of_json = reader("json")
PAYLOAD = b"21.5"


def route(identity: PayloadIdentity = "properties", time: TimeSource = "auto") -> RouteSettings:
    return RouteSettings("device/{device}/{stream}", "device-{stream}", "text/plain", identity, time)


async def take_with(door: FrontDoor, *user: tuple[str, str], received_us: int = 20_000_000) -> None:
    assert await take(door, reading_of("device/42/thermo", PAYLOAD, received_us, user=user))


@given(
    boot=st.text(st.characters(codec="utf-8"), min_size=1, max_size=64),
    sequence=st.integers(0, 2**63 - 1),
    tick_ms=st.none() | st.integers(0, 2**32 - 1),
    lost=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_user_properties_say_what_json_says(
    boot: str, sequence: int, tick_ms: int | None, lost: tuple[int, int] | None
) -> None:
    members: dict[str, object] = {"boot": boot, "seq": sequence}
    user = [("celsius", "21.5"), ("boot", boot), ("seq", str(sequence))]
    if tick_ms is not None:
        members["tick"] = tick_ms
        user.append(("tick", str(tick_ms)))
    if lost is not None:
        members["lost"] = lost
        user.append(("lost", json.dumps(lost)))
    assert _of_json is not None
    assert of_properties(user) == _of_json(json.dumps(members).encode())


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ((), None),
        ((("boot", "a1"),), None),
        ((("boot", ""), ("seq", "1")), None),
        ((("boot", "a1"), ("seq", "-1")), None),
        ((("boot", "a1"), ("seq", "1")), Identity("a1", 1)),
        ((("seq", "1"), ("boot", "a1"), ("boot", "b2")), Identity("a1", 1)),
        ((("boot", "a1"), ("seq", "1"), ("tick", "soon")), Identity("a1", 1, TICK_UNREADABLE)),
        ((("boot", "a1"), ("seq", "1"), ("tick", str(2**32))), Identity("a1", 1, TICK_UNREADABLE)),
        ((("boot", "a1"), ("seq", "9"), ("lost", "3-5")), Identity("a1", 9, None, None)),
    ],
)
def test_what_makes_no_sense_is_none(user: tuple[tuple[str, str], ...], found: Identity | None) -> None:
    assert of_properties(user) == found
    if found is not None and not any(name == "lost" for name, _ in user):
        assert found.lost is UNSET


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ((), "no user property `boot` and no `seq`"),
        ((("boot", "a1"),), "no user property `seq`"),
        ((("boot", "a1"), ("seq", "x")), "`seq` is a text that is no number"),
    ],
)
def test_why_there_is_no_identity_is_told(user: tuple[tuple[str, str], ...], why: str) -> None:
    assert why_no_properties(user) == why


@given(st.integers(-(10**30), 10**30))
def test_a_time_is_whole_milliseconds(milliseconds: int) -> None:
    if milliseconds < 0:
        with pytest.raises(NothingToldError):
            of_property(b"", [("timestamp", str(milliseconds))])
    else:
        expected = Told(min(milliseconds * 1_000, DEVICE_TIME_US_MAX), is_relative=False)
        assert of_property(b"", [("timestamp", str(milliseconds))]) == expected


@pytest.mark.parametrize("user", [(), (("timestamp", "now"),), (("time", "1"),)])
def test_without_a_time_nothing_is_told(user: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(NothingToldError):
        of_property(b"", user)


async def test_a_route_takes_identity_and_time_from_user_properties(tmp_path: Path) -> None:
    said_us = NOW_US + 15_000_000
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route("properties", "property"))
        timestamp = ("timestamp", str(said_us // 1_000))
        await take_with(door, ("boot", "a1"), ("seq", "7"), timestamp)
        await take_with(door, ("boot", "a1"), ("seq", "7"), timestamp)
        (row,) = await rows(buffer)
    datum = row.datum
    assert (datum.device_boot, datum.device_sequence, datum.payload) == ("a1", 7, PAYLOAD)
    assert rfc3339(datum.device_time_us or 0) == rfc3339(said_us)


async def test_a_tick_in_a_user_property_teaches_the_sensors_clock(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route())
        for sequence in range(60):
            taken_us = 20_000_000 + sequence * 1_000_000
            user = (("boot", "a1"), ("seq", str(sequence)), ("tick", str(sequence * 1_000)))
            await take_with(door, *user, received_us=taken_us + 5_000)
        stored = await rows(buffer)
    assert stored[0].datum.tick_ms == 0
    last = stored[-1].datum
    assert last.event_us is not None
    assert abs(last.event_us - 79_000_000) <= last.event_error_us


async def test_missing_properties_are_counted_and_cost_the_reading_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route("properties", "property"))
        await take_with(door)
        await take_with(door, ("boot", "a1"), ("seq", "1"), ("tick", "soon"))
        assert len(await rows(buffer)) == 2
    assert (door.counts["identity-missing"], door.counts["time-missing"]) == (1, 2)


async def test_other_routes_do_not_look_at_user_properties(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route("none", "auto"))
        await take_with(door, ("boot", "a1"), ("seq", "7"))
        (row,) = await rows(buffer)
    assert row.datum.device_boot is None


async def test_properties_that_the_route_does_not_read_are_stored_with_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    user = (("boot", "a1"), ("unit", "°C"), ("seq", "7"), ("unit", "K"), ("", "x"), ("a\nb", "x"), ("timestamp", "x"))
    async with opened(path) as buffer:
        await take_with(door_of(buffer, route()), *user)
        await take_with(door_of(buffer, route("none")), *user)
        await take_with(door_of(buffer, route()), ("boot", "a1"), ("seq", "8"))
        await take(door_of(buffer, route()), reading_of("device/42/thermo", PAYLOAD))
    async with opened(path) as buffer:
        found = [of_text(row.datum.properties) for row in await rows(buffer)]
    unread = (("unit", "°C"), ("unit", "K"), ("timestamp", "x"))
    assert found == [unread, (("boot", "a1"), *unread[:1], ("seq", "7"), *unread[1:]), (), ()]


async def test_input_that_is_taken_in_again_has_its_properties(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        user = ("boot", "a1"), ("seq", "7"), ("unit", "C")
        await take_with(door_of(buffer, replace(route(), topic="other/{device}/{stream}")), *user)
        outcome = await retry_quarantined(door_of(buffer, route()), buffer, [1])
        assert (outcome.stored, outcome.refused) == (1, {})
        *_, row = await rows(buffer)
    datum = row.datum
    assert (datum.payload, datum.device_boot, datum.device_sequence) == (PAYLOAD, "a1", 7)
    assert of_text(datum.properties) == (("unit", "C"),)


@given(st.text(max_size=30))
def test_a_damaged_text_has_no_properties(text: str) -> None:
    assert all(len(pair) == 2 for pair in of_text(text))
    assert of_text(None) == ()
