"""Test readings of `sluice check` at the daemon: one credential, one connection, one reading, and nobody else's."""

from pathlib import Path

import msgspec
import pytest

from gateway.buffer.rows import Lane, Row
from gateway.intake.check_readings import LIFE_US, UNDER_WAY_MAX, CheckOpened, CheckReadings
from gateway.intake.front_door import FrontDoor
from gateway.intake.routes import compile_routes
from gateway.reading import Reading
from gateway.settings import DEFAULT_ROUTE, GatewaySettings, KafkaSettings
from tests.support.buffers import opened, reading_of, row_of, series_of
from tests.support.waiting import until

LANE = Lane(1, "lane", "boot", "buffer")


class Now:
    def __init__(self) -> None:
        self.us = 1_000_000

    def __call__(self) -> int:
        return self.us


def reading(of: CheckOpened, *, topic: str = "", payload: bytes = b"", writer: str | None = "") -> Reading:
    topic = topic or of.topic
    return reading_of(topic, payload or of.payload.encode(), 1_000_000, writer=of.user if writer == "" else writer)


def row(payload: bytes, sequence: int = 7) -> Row:
    return row_of(sequence, payload=payload)


def test_a_credential_is_good_for_one_connection() -> None:
    checks = CheckReadings(Now())
    one = checks.open()
    assert not checks.lets_in(one.user, b"another")
    assert not checks.lets_in(None, one.secret.encode())
    assert not checks.lets_in("$check-0", one.secret.encode())
    assert checks.lets_in(one.user, one.secret.encode())
    assert not checks.lets_in(one.user, one.secret.encode())
    assert not checks.lets_in(one.user, b"")


def test_a_credential_does_not_live_long_and_there_are_few() -> None:
    now = Now()
    checks = CheckReadings(now)
    first = checks.open()
    assert checks.takes(reading(first))
    others = [checks.open() for _ in range(UNDER_WAY_MAX)]
    assert not checks.lets_in(first.user, first.secret.encode()), "the oldest gives way"
    assert not checks.waiting
    now.us += LIFE_US
    assert not any(checks.lets_in(each.user, each.secret.encode()) for each in others)


def test_one_reading_is_taken_as_it_was_handed_out() -> None:
    checks = CheckReadings(Now())
    one, other = checks.open(), checks.open()
    assert not checks.takes(reading(one, writer=None)), "anybody's"
    assert not checks.takes(reading(one, writer="42"))
    assert not checks.takes(reading(one, writer=other.user))
    assert not checks.takes(reading(one, payload=b"{}"))
    assert not checks.takes(reading(one, topic=other.topic))
    assert checks.takes(reading(one))
    assert not checks.takes(reading(one)), "the first, and no other"
    made = checks.reading_of(other.user)
    assert made is not None
    assert checks.takes(made)
    assert checks.reading_of("$check-0") is None


async def test_the_place_of_a_test_reading_in_kafka_is_reported() -> None:
    checks = CheckReadings(Now())
    one, other = checks.open(), checks.open()
    assert checks.takes(reading(one))
    assert checks.takes(reading(other))
    rows = [row(b"1", 6), row(one.payload.encode(), 7)]
    checks.acknowledged(("gateway-events", 2), 40, rows, [LANE, LANE])
    place = await checks.place_of(one.user, 0)
    assert place is not None
    assert (place.topic, place.partition, place.offset, place.ce_id) == ("gateway-events", 2, 41, "buffer-lane-7")
    assert await checks.place_of(other.user, 0) is None
    assert await checks.place_of("$check-0", 0) is None
    checks.acknowledged(("gateway-events", 0), -1, [row(other.payload.encode())], [LANE])
    place = await checks.place_of(other.user, 0)
    assert place is not None
    assert place.offset is None, "the broker had it already, and does not say where"
    assert not checks.waiting


async def test_it_goes_through_the_front_door_as_a_reading_and_out_as_an_event(tmp_path: Path) -> None:
    kafka = KafkaSettings(("127.0.0.1:1",))
    async with opened(tmp_path / "buffer.db") as buffer:
        routes = compile_routes([DEFAULT_ROUTE], None, frozenset())
        door = FrontDoor(buffer, routes, GatewaySettings("gw1"), kafka, Now())
        one = door.checks.open()
        stored: list[bool] = []
        door.take([reading(one)], stored.append)
        door.take([reading(one, writer=None)], stored.append)
        await until(lambda: len(stored) == 2)
        assert stored == [True, True]
        (quarantined,) = door.quarantine.by_reason.items()
        assert quarantined == ("no-route", 1), "what anybody else sends there is a reading that no route takes"
        assert list(door.heard) == [], "it is no device's"
        assert door.counts["readings"] == 1, "nor is it counted as a sensor's"
        series = [await series_of(buffer, number) for number in (1, 2)]
    told = next(each for each in series if each.type == "sluice.gateway.check")
    assert (told.topic, told.key, told.device, told.subject) == ("gateway-events", "gw1", "", "check")


@pytest.mark.parametrize("key", ["user", "secret", "topic", "payload"])
def test_no_two_are_alike(key: str) -> None:
    checks = CheckReadings(Now())
    assert len({msgspec.to_builtins(checks.open())[key] for _ in range(50)}) == 50
