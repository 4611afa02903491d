"""The test reading of `sluice check` if it does not come through: the reasons of the running gateway are passed on."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from aiokafka import ConsumerRecord
from msgspec import structs

from gateway.clock.kernel_clock import boottime_us
from gateway.commands.check import end_to_end
from gateway.commands.check.end_to_end import check_end_to_end
from gateway.commands.check.finding import Finding
from gateway.daemon.control import Handler
from gateway.intake.check_readings import CheckOpened, CheckPlace, CheckReadings
from gateway.record_contract import HEADERS
from gateway.settings import (
    BufferSettings,
    GatewaySettings,
    KafkaSettings,
    ListenerSettings,
    Settings,
    TlsSettings,
)
from tests.support.buffers import opened
from tests.support.certificates import make_authority
from tests.support.gateways import answering, free_port
from tests.support.mqtt_peers import RecordingIntake, listening

SETTINGS = Settings(GatewaySettings("gw1", clock="system"), KafkaSettings(("127.0.0.1:1",)))
UP: dict[str, Any] = {"uplink": {"up": True}, "buffer": {"rows": 1}}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "_LOOK_S", 0.01)
    monkeypatch.setattr(end_to_end, "PATIENCE_S", 0.2)


async def looked(
    folder: Path,
    state: Mapping[str, Any],
    why_not: str = "",
    listener: ListenerSettings | None = None,
    instead: Mapping[str, Handler] = MappingProxyType({}),
) -> list[Finding]:
    """Findings about a gateway that reports this state."""
    checks = CheckReadings(boottime_us)

    async def check_open(_arguments: dict[str, Any]) -> object:
        await asyncio.sleep(0)
        return checks.open()

    async def check_enter(_arguments: dict[str, Any]) -> object:
        await asyncio.sleep(0)
        return {"stored": True}

    async def check_place(arguments: dict[str, Any]) -> object:
        return await checks.place_of(arguments["user"], arguments["patience_s"])

    async def told(_arguments: dict[str, Any]) -> object:
        await asyncio.sleep(0)
        return state

    answers = {
        "check-open": check_open,
        "check-enter": check_enter,
        "check-place": check_place,
        "state": told,
        **instead,
    }
    settings = structs.replace(SETTINGS, buffer=BufferSettings(folder / "buffer.db"), mqtt_listener=listener)
    async with opened(folder / "buffer.db"), answering(folder / "buffer.db", answers):
        return await asyncio.to_thread(lambda: list(check_end_to_end(settings, why_not)))


@pytest.mark.parametrize(
    ("state", "result", "words"),
    [
        ({"uplink": {"up": False, "error": "DNS knows no such name"}}, "fail", "though this check does: DNS knows no"),
        ({"uplink": {"up": False}}, "fail", "its first attempt is under way"),
        ({"uplink": {"up": False, "quota_used_up": True}}, "warning", "(kafka.bytes_per_day_max)"),
        ({"uplink": {"up": True, "waits_for_clock": True}}, "warning", "until this box's clock is synced"),
        ({"uplink": {"up": True, "parked": {"gateway-events/1": "has no leader"}}}, "fail", "gateway-events/1 has no"),
        ({"uplink": {"up": True, "refused_topics": {"gateway-events": "set it"}}}, "fail", "is not written to: set it"),
        ({"uplink": {"up": True, "parked": {"device-x/1": "x"}}, "buffer": {"rows": 9_000}}, "warning", "9,000 rows"),
        (UP, "fail", "Kafka has not acknowledged it within 0 s: it waits on disk; sluice status says more"),
        ({}, "fail", "does not reach Kafka"),
    ],
)
async def test_why_it_waits_is_told(tmp_path: Path, state: dict[str, Any], result: str, words: str) -> None:
    acknowledged, waits = await looked(tmp_path, state)
    assert (acknowledged.subject, acknowledged.result) == ("acknowledgement", "pass")
    assert (waits.subject, waits.result) == ("in Kafka", result)
    assert words in waits.words


@pytest.mark.parametrize(("barred", "code"), [(True, "kafka-unusable"), (False, "kafka-unreached")])
async def test_a_gateway_that_kafka_refuses_has_a_code_of_its_own(tmp_path: Path, barred: object, code: str) -> None:
    _, waits = await looked(tmp_path, {"uplink": {"up": False, "error": "no", "barred": barred}})
    assert waits.code == code


async def test_a_test_reading_that_is_not_stored_is_reported_with_the_buffers_reason(tmp_path: Path) -> None:
    async def not_stored(_arguments: dict[str, Any]) -> object:
        await asyncio.sleep(0)
        return {"stored": False}

    failing = {"buffer": {"failing": "Input/output error"}}
    (found,) = await looked(tmp_path, failing, instead={"check-enter": not_stored})
    assert (found.subject, found.result) == ("acknowledgement", "fail")
    assert "The disk fails: Input/output error" in found.words
    (found,) = await looked(tmp_path, {"buffer": {"full": True}}, instead={"check-enter": not_stored})
    assert "The buffer is full" in found.words


async def test_without_a_way_to_kafka_it_is_not_looked_for_there(tmp_path: Path) -> None:
    acknowledged, skipped = await looked(tmp_path, UP, "127.0.0.1:1 leads nowhere")
    assert acknowledged.result == "pass"
    assert skipped.words.startswith("not checked: 127.0.0.1:1 leads nowhere; the test reading waits on disk")


async def test_a_test_reading_goes_in_behind_a_listener_that_needs_certificates(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "ca")
    pair = authority.sign("gateway")
    tls = TlsSettings(pair.certificate, pair.key, free_port(), authority.certificate)
    async with listening(RecordingIntake(), port=0, tls=tls) as listener:
        acknowledged, _ = await looked(tmp_path, UP, "no way", listener.settings)
    assert acknowledged.words.startswith("a test reading went in behind the listener, as from a serial line,")


async def test_a_gateway_that_goes_meanwhile_is_told(tmp_path: Path) -> None:
    async def gone(_arguments: dict[str, Any]) -> object:
        await asyncio.sleep(0)
        raise RuntimeError("stopped")

    for name in ("check-place", "state"):
        acknowledged, found = await looked(tmp_path, UP, instead={name: gone})
        assert acknowledged.result == "pass"
        assert (found.subject, found.result) == ("in Kafka", "fail")
        assert "no longer answers (stopped)" in found.words


async def test_a_listener_that_does_not_acknowledge_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the reading and whose disk never answers."""
    monkeypatch.setattr("gateway.commands.check.front_door.ANSWER_S", 0.3)
    checks = CheckReadings(boottime_us)
    intake = RecordingIntake()
    intake.outcome = None
    async with listening(intake) as listener:
        listener.shared.checks = checks

        async def check_open(_arguments: dict[str, Any]) -> object:
            await asyncio.sleep(0)
            return checks.open()

        (found,) = await looked(tmp_path, {"buffer": {"full": True}}, "", listener.settings, {"check-open": check_open})
        intake.decide_all()
    assert found.result == "fail"
    assert "was not acknowledged: it takes the connection and says nothing. The buffer is full" in found.words


async def test_a_gateway_of_another_version_takes_none(tmp_path: Path) -> None:
    settings = structs.replace(SETTINGS, buffer=BufferSettings(tmp_path / "buffer.db"))
    async with opened(tmp_path / "buffer.db"), answering(tmp_path / "buffer.db", {}):
        (found,) = await asyncio.to_thread(lambda: list(check_end_to_end(settings, "")))
    assert found.result == "warning"
    assert "restart it after an upgrade" in found.words


# -- what is read back ----------------------------------------------------------------------------

OPENED = CheckOpened("$check-1", "secret", "$sluice/check/1", '{"check":"00ff"}')
PLACE = CheckPlace("gateway-events", 0, 7, "buffer-lane-3", 1)


def record(**changes: Any) -> ConsumerRecord[bytes, bytes]:
    told = {
        "ce_specversion": "1.0",
        "ce_id": PLACE.ce_id,
        "ce_source": "/default/gw1",
        "ce_type": "sluice.gateway.check",
        "content-type": "application/json",
    }
    headers = [(name, told.get(name, "x").encode()) for name in HEADERS]
    found = {"topic": "gateway-events", "partition": 0, "offset": 7, "timestamp": 0, "timestamp_type": 1}
    found |= {"key": b"gw1", "value": OPENED.payload.encode(), "checksum": None, "serialized_key_size": 0}
    return ConsumerRecord(**{**found, "serialized_value_size": 0, "headers": headers, **changes})


def changed(name: str, value: bytes) -> list[tuple[str, bytes]]:
    return [(each, value if each == name else old) for each, old in record().headers]


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({}, None),
        ({"offset": 8}, "the next record has offset 8"),
        ({"value": b"{}"}, "its value differs"),
        ({"value": None}, "its value differs"),
        ({"key": b"gw2"}, "its key is b'gw2', not b'gw1'"),
        ({"headers": []}, "its headers are "),
        ({"headers": changed("ce_id", b"another")}, "ce_id is 'another', not 'buffer-lane-3'"),
        ({"headers": changed("ce_type", b"sluice.reading")}, "ce_type is 'sluice.reading', not 'sluice.gateway.check'"),
        ({"headers": list(reversed(record().headers))}, "its headers are content-type, "),
    ],
)
def test_a_record_that_is_not_what_was_sent_is_found_out(changes: dict[str, Any], flaw: str | None) -> None:
    found = end_to_end._flaw(SETTINGS, record(**changes), OPENED, PLACE)
    assert found == flaw if flaw is None else (found or "").startswith(flaw)


def test_the_key_may_have_its_namespace() -> None:
    settings = structs.replace(SETTINGS, gateway=structs.replace(SETTINGS.gateway, key="namespace/name"))
    assert end_to_end._flaw(settings, record(key=b"default/gw1"), OPENED, PLACE) is None
