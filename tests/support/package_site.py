"""A site of the tests: a box with the package on it, its sensors and a Kafka outside, and what it is measured by."""

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from demo import child_process
from gateway.buffer.status import read_status
from tests.support.box import Box
from tests.support.netns import GATEWAY_NETS
from tests.support.uplink_ledger import acknowledged_in, audit, in_kafka
from tests.support.uplink_scene import Scene
from tests.support.waiting import patience

SECRET = "correct-horse-battery"  # noqa: S105 - made up for this
TOPIC = "device-thermo"
SENSORS = tuple(f"m{number:03}" for number in range(1, 21))
ANSWERS = """\
[gateway]
id = "barn-1"
namespace = "north-farm"
[kafka]
bootstrap = ["{bootstrap}"]
tls = false
[sensors]
devices = {devices}
"""


@dataclass(frozen=True, slots=True)
class Site:
    """A box with the package installed and running, its network, and a Kafka on the other side."""

    box: Box
    scene: Scene

    @property
    def address(self) -> str:
        """The box's own."""
        return f"{GATEWAY_NETS['eth0'][0]}.{self.scene.network._hosts}"

    def rows(self) -> int:
        """Rows that wait on the box's disk."""
        return read_status(self.box.root / "var/lib/sluice/buffer.db").rows

    def wait_until_drained(self, patience_s: float = 60.0) -> None:
        deadline = time.monotonic() + patience(patience_s)
        while self.rows():
            assert time.monotonic() < deadline, f"{self.rows()} rows still wait:\n{self.box.journal()[-3000:]}"
            time.sleep(0.2)

    def wait_until_full(self, patience_s: float = 60.0) -> None:
        """Until the gateway says that nothing more fits into its buffer."""
        deadline = time.monotonic() + patience(patience_s)
        while not json.loads(self.box.run("sluice", "status", "--json"))["daemon"]["buffer"]["full"]:
            assert time.monotonic() < deadline, f"{self.rows()} rows, and not full:\n{self.box.journal()[-3000:]}"
            time.sleep(0.5)

    def fleet(self, name: str, interval_ms: int = 200) -> subprocess.Popen[bytes]:
        """Twenty sensors, outside; what they were told is in NAME.ledger."""
        command = [sys.executable, "-m", "sluice_sim", "fleet", "--host", self.address, "--sensors", str(len(SENSORS))]
        ledger = self.scene.directory / f"{name}.ledger"
        command += ["--user-secret", SECRET, "--interval-ms", str(interval_ms), "--ledger", str(ledger), "--json"]
        log = self.scene.directory / f"{name}.log"
        network = self.scene.network
        return network.run(network.router, command, log, output=log.with_suffix(".out"))

    def check(self, name: str) -> None:
        """Check that all readings that the fleet got acknowledged are in Kafka, once, in order."""
        self.wait_until_drained()
        told = (self.scene.directory / f"{name}.ledger").read_text()
        found = audit(acknowledged_in(told), in_kafka(self.scene.consume(TOPIC)))
        assert found.acknowledged > 50
        assert not found.faults, str(found)


def write_answers(box: Box, folder: str, bootstrap: str) -> None:
    """Answers and secrets, as they are prepared elsewhere."""
    secrets = "".join(f'{name} = "{SECRET}"\n' for name in SENSORS)
    box.write(f"{folder}/sluice.toml", ANSWERS.format(bootstrap=bootstrap, devices=list(SENSORS)))
    box.write(f"{folder}/sluice-secrets.toml", f'page_password = "{SECRET}"\n[devices]\n{secrets}', 0o600)


def set_up(box: Box, bootstrap: str) -> None:
    """Set the box up from a file of answers, as an installer does. Then add settings for a box without NTP."""
    write_answers(box, "/root", bootstrap)
    told = box.call("sluice", "setup", "--answers", "/root/sluice.toml")
    assert told.returncode in {0, 1}, told.stdout + told.stderr
    assert box.property("sluice.service", "ActiveState") == "active", box.journal()
    settings = (box.root / "etc/sluice/gateway.toml").read_text()
    assert SECRET not in settings
    # Nobody keeps this clock, and what a sensor's own says is not waited for.
    known = '[gateway]\nclock = "system"\nhold_new_clock_s = 0\n'
    assert settings.count("[gateway]\n") == 1
    settings = settings.replace("[gateway]\n", known)
    # As it is, owner and mode included.
    box.run("tee", "/etc/sluice/gateway.toml", text=settings)
    box.run("systemctl", "restart", "sluice.service")


def install(box: Box, package: Path) -> None:
    """Install a package as an installer does with a file that came without a network."""
    box.take(package, package.with_name(f"{package.name}.sig"))
    box.apt("install", f"/root/{package.name}")


def wait_for_first_reading(site: Site, patience_s: float = 60.0) -> None:
    """Publish as a sensor does until a reading is in Kafka."""
    command = ["mosquitto_pub", "-h", site.address, "-u", SENSORS[0], "-P", SECRET, "-q", "1"]
    command += ["-t", f"device/{SENSORS[0]}/thermo", "-m", '{"boot": "0-00000000", "seq": 0, "c": 21.5}']
    deadline = time.monotonic() + patience(patience_s)
    while subprocess.run(
        [*site.scene.network.router.prefix, *command], capture_output=True, check=False, timeout=patience(30)
    ).returncode:
        assert time.monotonic() < deadline, site.box.journal()[-3000:]
        time.sleep(0.1)
    while not site.scene.consume(TOPIC):
        assert time.monotonic() < deadline, site.box.journal()[-3000:]
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Measures:
    """Costs of a running service."""

    start_s: float
    """From the start of its process until it says that it is ready."""
    rss_mb: float
    exposure: float
    """Exposure by `systemd-analyze security`: 0 is none, 10 is a service without any restriction."""


def measure(box: Box) -> Measures:
    """The service as it runs in the box."""
    started_us, ready_us = (
        int(box.property("sluice.service", f"{name}Monotonic"))
        for name in ("ExecMainStartTimestamp", "ActiveEnterTimestamp")
    )
    status = box.run("cat", f"/proc/{box.property('sluice.service', 'MainPID')}/status")
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    told = box.run("systemd-analyze", "security", "--no-pager", "sluice.service")
    exposure = re.search(r"Overall exposure level for sluice.service: ([0-9.]+)", told)
    assert resident is not None
    assert exposure is not None
    return Measures((ready_us - started_us) / 1e6, int(resident[1]) * 1024 / 1e6, float(exposure[1]))


def stop(fleet: subprocess.Popen[bytes]) -> None:
    """Let sensors have what they wait for, and write their ledger."""
    child_process.stop(fleet, 20.0)
