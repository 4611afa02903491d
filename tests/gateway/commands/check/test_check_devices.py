"""`sluice check`: who may log in, and whether the file of their hashes can be used."""

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.clock.kernel_clock import boottime_us
from gateway.commands.check.finding import Finding, Remark
from gateway.commands.check.users import check_devices
from gateway.config.config_file import load
from gateway.listener.credentials import add
from gateway.listener.logins import NOBODY
from tests.gateway.devices.test_device_listing import devices, gateway, take
from tests.support.buffers import reading_of

CONFIG = """\
[gateway]
id = "gw1"
[buffer]
path = "{folder}/buffer.db"
[kafka]
bootstrap = ["127.0.0.1:1"]
[mqtt_listener]
"""
WRITTEN = f'[mqtt_listener.users]\n"m001" = "{"0" * 64}"\n[mqtt_listener.operators]\n"ops" = "{"1" * 64}"\n'
NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)


def found(folder: Path, more: str = "") -> list[Finding]:
    config = folder / "gateway.toml"
    config.write_text(CONFIG.format(folder=folder) + more)
    settings = load(config)
    assert settings.mqtt_listener is not None
    return list(check_devices(settings, settings.mqtt_listener))


def test_devices_of_both_places_are_counted(tmp_path: Path) -> None:
    add(tmp_path / "devices.json", ["42", "43"], NOW)
    (finding,) = found(tmp_path, WRITTEN)
    assert finding.words == "3 devices may log in (sluice devices list)"
    assert not isinstance(finding, Remark)


async def test_beside_a_running_gateway_those_are_named_that_were_not_heard(tmp_path: Path) -> None:
    add(tmp_path / "devices.json", ["42", "43"], NOW)
    async with gateway(tmp_path) as door:
        await take(door, reading_of("device/42/thermo", b"{}", boottime_us()))
        (finding,) = await asyncio.to_thread(found, tmp_path)
        told = json.loads((await devices(tmp_path, "--json")).stdout)
    assert finding.words == "2 devices may log in (sluice devices list); not heard yet: 43"
    assert finding.result == "pass"
    assert told["not_heard"] == [], "these settings have no listener"


def test_nobody_is_warned_of_and_fails_nothing_for_devices_may_come_later(tmp_path: Path) -> None:
    (finding,) = found(tmp_path)
    assert finding == Remark("mqtt_listener.users", ok=True, words=NOBODY, code="nobody-can-log-in")
    assert found(tmp_path, "anonymous = true\n") == []


def test_a_damaged_file_fails_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "devices.json").write_text("{")
    (finding,) = found(tmp_path, WRITTEN)
    assert (finding.subject, finding.ok) == ("mqtt_listener.devices_file", False)
    assert "put back a copy of it" in finding.words
    assert "goes on with the last good file" in finding.words


def test_a_name_in_both_places_is_told(tmp_path: Path) -> None:
    add(tmp_path / "devices.json", ["m001", "ops"], NOW)
    crossed, twice, counted = found(tmp_path, WRITTEN)
    assert (crossed.ok, crossed.words.partition(":")[0]) == (False, "ops")
    assert isinstance(twice, Remark)
    assert twice.words.startswith("m001: the secret in gateway.toml works beside")
    assert counted.words.startswith("2 devices")


def test_a_file_that_others_may_read_is_told(tmp_path: Path) -> None:
    add(tmp_path / "devices.json", ["42"], NOW)
    (tmp_path / "devices.json").chmod(0o644)
    remark, _ = found(tmp_path)
    assert isinstance(remark, Remark)
    assert f"chmod 0600 {tmp_path / 'devices.json'}" in remark.words


@pytest.mark.skipif(os.geteuid() != 0, reason="only root looks at others' files")
def test_root_finds_a_file_that_the_daemon_cannot_read(tmp_path: Path) -> None:
    add(tmp_path / "devices.json", ["42"], NOW)
    os.chown(tmp_path, 65_534, 65_534)
    finding, _ = found(tmp_path)
    assert not finding.ok
    assert "chown --reference" in finding.words
