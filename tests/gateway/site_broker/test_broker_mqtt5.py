"""The broker ingress with MQTT 5: with a real mosquitto, and with brokers that do as told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.support.broker_intake import MemoryIntake, broker_telling, numbered, published, reading_from
from tests.support.mosquitto import mosquitto
from tests.support.mqtt5 import publish5
from tests.support.waiting import until

USER = ("-V", "5", "-D", "publish", "user-property", "seq", "7")


@pytest.fixture
def intake() -> MemoryIntake:
    return MemoryIntake()


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_what_the_broker_delivers_comes_with_its_user_properties(
    tmp_path: Path, qos: int, intake: MemoryIntake
) -> None:
    with mosquitto(tmp_path / "broker", "allow_anonymous true", "max_queued_messages 0") as broker:
        async with reading_from(intake, broker.port, qos=2, version="5") as ingress:
            await ingress.session.subscriptions.answered.wait()
            await published(broker.port, numbered(0, 200), *USER, qos=qos)
            await until(lambda: len(intake.stored) == 200)
        assert intake.payloads() == numbered(0, 200)
        assert {reading.user for reading in intake.stored} == {(("seq", "7"),)}


async def test_the_session_is_kept_and_what_was_retained_does_not_come_again(
    tmp_path: Path, intake: MemoryIntake
) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port, version="5") as ingress:
            await ingress.session.subscriptions.answered.wait()
        await published(broker.port, ["kept"], "-r")
        await published(broker.port, numbered(0, 50))
        async with reading_from(intake, broker.port, version="5") as ingress:
            await until(lambda: len(intake.stored) >= 50)
            await ingress.session.subscriptions.answered.wait()
            await asyncio.sleep(0.2)
            assert ingress.session.counts["retained"] == 0
    assert intake.payloads()[-50:] == numbered(0, 50)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\x20\x03\x00\x84\x00", "it does not speak MQTT 5; leave mqtt_brokers.version out"),
        (b"\x20\x03\x00\x87\x00", "user or password is wrong or missing"),
        (b"\x20\x02\x00\x01", "it does not speak this version of MQTT; set mqtt_brokers.version"),
        (b"\x20\x02\x00\x00", "it sent no CONNACK"),
        (b"\x20\x03\x00\x00\x00\xe0\x01\x8e", "another client uses the same client_id"),
        (b"\x20\x03\x00\x00\x00\xe0\x09\x99\x07\x1f\x00\x04bad!", "reason code 0x99 (bad!)"),
    ],
)
async def test_why_there_is_no_connection_is_told(sent: bytes, words: str, intake: MemoryIntake) -> None:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await reader.read()

    with structlog.testing.capture_logs() as said:
        async with broker_telling(tell) as port, reading_from(intake, port, version="5"):
            await until(lambda: any(words in entry["event"] for entry in said))


async def test_user_properties_beyond_all_bounds_cost_themselves_and_nothing_else(intake: MemoryIntake) -> None:
    many: Any = tuple((str(number), "") for number in range(100))

    async def deliver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x03\x01\x00\x00" + publish5("a", 1, user=many) + publish5("b", 2, user=many[:2]))
        await reader.read()

    async with broker_telling(deliver) as port, reading_from(intake, port, version="5"):
        await until(lambda: len(intake.stored) == 2)
    assert [(reading.datum.payload, reading.user) for reading in intake.stored] == [(b"a", ()), (b"b", many[:2])]
