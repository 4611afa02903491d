"""The real daemon, a real folder by https and a real Kafka: a change that goes well, and one that loses the uplink."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from demo.kafka_broker import Broker
from gateway.commands.fleet import box_now, fleet_command, look, trial_steps
from gateway.commands.update import trial
from gateway.commands.update.trial import LOOK_S
from gateway.commands.update.update_command import trusted_keys
from gateway.host import fleet_report, service
from gateway.record_contract import GATEWAY_TYPES
from tests.support.certificates import make_authority
from tests.support.fleet_box import FleetFolder
from tests.support.gateways import consume, header, publish, uplink_told, wait_for_port, write_config
from tests.support.https_site import https_site
from tests.support.waiting import patience, wait_until

STATE_TYPE = f"{GATEWAY_TYPES}state"
pytestmark = pytest.mark.kafka
PROGRAM = """
import sys
from pathlib import Path
from gateway.cli import main
from gateway.health import state_watch
from gateway.host import fleet_report
fleet_report.FOLDER = Path(sys.argv.pop(1))
state_watch.LOOK_S = 0.5
main(prog_name="sluice")
"""
"""The daemon, which finds the report in a test's folder, and looks for changes of its state more often."""


class Service:
    """The service, as systemd runs it."""

    def __init__(self, config: Path, port: int) -> None:
        self._config = config
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.began_s = 0.0

    def start(self) -> None:
        log = self._config.with_suffix(".log").open("ab")
        command = [sys.executable, "-c", PROGRAM, str(fleet_report.FOLDER), "run", "--config", str(self._config)]
        self._process = subprocess.Popen(command, stderr=log)
        log.close()
        wait_for_port(self._port, self._process)
        self.began_s = time.monotonic()

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(patience(20))

    def restart(self) -> None:
        self.stop()
        self.start()

    def fed_s(self) -> tuple[bool, float]:
        assert self._process is not None
        return self._process.poll() is None, time.monotonic() - self.began_s


@contextmanager
def running(folder: FleetFolder, config: Path, port: int, patched: pytest.MonkeyPatch) -> Iterator[Service]:
    """A gateway that sends to Kafka, and a box that looks at a folder."""
    its = Service(config, port)
    patched.setattr(fleet_report, "FOLDER", config.parent / "state")
    patched.setattr(fleet_command.os, "geteuid", lambda: 0)  # type: ignore[attr-defined]
    for module in (fleet_command, trial):
        patched.setattr(module, "DEFAULT_CONFIG", config)
    patched.setattr(look, "KEY_FOLDERS", (folder.keys,))
    patched.setattr(look, "trusted_keys", partial(trusted_keys, owner=fleet_command.os.getuid()))  # type: ignore[attr-defined]
    patched.setattr(service, "restart", its.restart)
    patched.setattr(service, "fed_s", its.fed_s)
    patched.setattr(service, "started_s", lambda: its.began_s)
    # The service is a child of this process alone.
    patched.setattr(box_now, "asked", lambda look, _kind: look())
    patched.setattr(trial, "FED_S", LOOK_S)
    patched.setattr(trial_steps, "TRIAL_S", patience(10))
    its.start()
    try:
        yield its
    finally:
        its.stop()


async def states(kafka: Broker, topic: str) -> list[dict[str, Any]]:
    """What the box told of the fleet's file, in order."""
    told = [record for record in await consume(kafka.bootstrap, topic) if header(record, "ce_type") == STATE_TYPE]
    return [json.loads(record.value)["fleet"] for record in told]


async def result_told(kafka: Broker, topic: str, result: str) -> dict[str, Any]:
    """What the box tells of the fleet's file, once it has this result."""
    async with asyncio.timeout(patience(60)):
        while not (found := await states(kafka, topic)) or (found[-1] or {}).get("result") != result:
            await asyncio.sleep(0.2)
    return found[-1]


async def arrived(kafka: Broker, topic: str) -> set[int]:
    return {json.loads(record.value)["seq"] for record in await consume(kafka.bootstrap, topic)}


async def test_a_good_change_stays_and_one_that_loses_the_uplink_is_taken_back(
    kafka: Broker, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_authority(tmp_path / "ca")
    sent: list[int] = []

    def reading() -> None:
        publish(port, "device/42/thermo", f'{{"boot": "a", "seq": {len(sent)}, "celsius": 21.5}}')
        sent.append(len(sent))

    class Busy:
        """`time` of the judge: sensors send meanwhile."""

        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            reading()
            time.sleep(seconds / 10)

    monkeypatch.setattr(trial_steps, "time", Busy)
    with https_site(authority.sign("server")) as site:
        folder = FleetFolder(site, authority.certificate, tmp_path)
        config = write_config(tmp_path, kafka.bootstrap, port, "fleet", f"\n{folder.section}")
        before = config.read_text()
        with running(folder, config, port, monkeypatch):
            for _ in range(3):
                reading()
            wait_until(lambda: uplink_told(tmp_path / "buffer.db")["up"])
            good = before.replace("heartbeat_interval_s = 0.5", "heartbeat_interval_s = 0.75")
            folder.publish("[groups.settings.kafka]\nheartbeat_interval_s = 0.75")
            look_now(0)
            assert config.read_text().split() == good.split()
            await result_told(kafka, "fleet-events", "good")
            folder.publish('[groups.settings.kafka]\nbootstrap = ["127.0.0.1:1"]', serial=2)
            look_now(1)
            assert config.read_text().split() == good.split()
            wait_until(lambda: uplink_told(tmp_path / "buffer.db")["up"])
            async with asyncio.timeout(patience(60)):
                while await arrived(kafka, "fleet-thermo") != set(sent):
                    await asyncio.sleep(0.2)
            told = await result_told(kafka, "fleet-events", "went-back")
    assert (told["serial"], told["trouble"]) == (2, None)
    assert "Kafka is not reached, and was before" in told["reason"]


def look_now(code: int) -> None:
    """A look as the timer begins it."""
    with pytest.raises(SystemExit) as ended:
        fleet_command.fleet.main(["pull"])
    assert ended.value.code == code, fleet_report.read()
