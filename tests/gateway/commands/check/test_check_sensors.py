"""`sluice check` on sensors' input: a quarantine with input in it, and refused log-ins."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from gateway.clock.kernel_clock import boot_id
from gateway.commands.check.finding import Finding
from gateway.commands.check.sensors import check_sensors
from gateway.settings import (
    BufferSettings,
    GatewaySettings,
    KafkaSettings,
    ListenerSettings,
    Settings,
    TlsSettings,
)
from tests.support.buffers import opened
from tests.support.gateways import answering

REFUSED = {"user": "attic", "address": "192.0.2.7", "why": "the password is wrong; rotate it", "ago_s": 30.0}


def settings_in(folder: Path, **listener: Any) -> Settings:
    return Settings(
        GatewaySettings("gw1"),
        KafkaSettings(("127.0.0.1:1",)),
        BufferSettings(folder / "buffer.db"),
        ListenerSettings(**listener),
    )


def told(settings: Settings) -> dict[str, Finding]:
    return {found.subject: found for found in check_sensors(settings)}


def put_aside(folder: Path, *reasons: str) -> None:
    with closing(sqlite3.connect(folder / "buffer.db")) as connection, connection:
        connection.executemany(
            "INSERT INTO quarantine (boot_id, received_us, device, subject, reason, payload, topic)"
            " VALUES ('boot', 1, 'shed', 'device/shed/x', ?, x'00', '')",
            [(reason,) for reason in reasons],
        )


async def test_the_quarantine_of_a_stopped_gateway_is_shown_and_no_file_is_made(tmp_path: Path) -> None:
    assert told(settings_in(tmp_path)) == {}, "no gateway has run here"
    async with opened(tmp_path / "buffer.db", boot_id()):
        pass
    assert told(settings_in(tmp_path))["quarantine"].result == "pass"
    put_aside(tmp_path, "no-route", "payload", "no-route")
    before = sorted(tmp_path.iterdir())
    found = told(settings_in(tmp_path))["quarantine"]
    assert (found.result, found.code) == ("warning", "quarantine")
    assert found.words == (
        "3 messages could not be forwarded: 2 no-route, 1 payload. All of it is kept on this box. sluice buffer "
        "quarantine ls says what to do about each reason. For no-route: routes here take device/{device}/{stream}."
    )
    assert sorted(tmp_path.iterdir()) == before


async def test_log_ins_that_were_refused_are_told_until_that_sensor_gets_in(tmp_path: Path) -> None:
    late: list[dict[str, object]] = []

    async def state(_: dict[str, Any]) -> object:
        return {"mqtt_listener": {"bad-credentials": 3, "connected": 9}, "log_ins_refused": late}

    settings = settings_in(tmp_path)
    certified = settings_in(tmp_path, tls=TlsSettings(tmp_path / "c", tmp_path / "k", client_ca=tmp_path / "ca"))
    async with opened(tmp_path / "buffer.db", boot_id()), answering(tmp_path / "buffer.db", {"state": state}):
        assert (await asyncio.to_thread(told, settings))["log-ins"].result == "pass"
        late[:] = [REFUSED]
        refused = (await asyncio.to_thread(told, settings))["log-ins"]
        # This command has no certificate to show.
        late[:] = [{**REFUSED, "user": None, "address": "127.0.0.1"}]
        own = (await asyncio.to_thread(told, certified))["log-ins"]
        anybody = (await asyncio.to_thread(told, settings))["log-ins"]
    assert refused.result == "warning"
    assert refused.words == (
        "3 log-ins refused since the start. The last: The log-in of attic from 192.0.2.7 was refused 30 s ago: the "
        "password is wrong. What that sensor measures does not come in. Rotate it."
    )
    assert own.result == "pass"
    assert "A sensor's log-in from 127.0.0.1 was refused" in anybody.words
