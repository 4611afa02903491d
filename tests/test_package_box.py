"""The package on a box that boots: installed, rebooted, hung, upgraded, downgraded, removed and purged."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo import child_process
from gateway.buffer_status import read_status
from tests import box as boxes
from tests.box import Box, box_or_skip
from tests.netns import GATEWAY_NETS
from tests.uplink_ledger import acknowledged_in, audit, in_kafka
from tests.uplink_scene import Scene, scene_or_skip

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(300)]

OLD, NEW = "1.0.0", "1.1.0"
EXPOSURE_MAX = 2.0
SECRET = "correct-horse-battery"  # noqa: S105 - made up for this
TOPIC = "device-thermo"
SENSORS = tuple(f"m{number:03}" for number in range(1, 21))
ROUTE = """
[[routes]]
topic = "device/{device}/{stream}"
kafka = "device-{stream}"
identity = "json"
"""
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
    old: Path
    new: Path

    @property
    def address(self) -> str:
        """The box's own."""
        return f"{GATEWAY_NETS['eth0'][0]}.{self.scene.network._hosts}"

    def rows(self) -> int:
        """Rows that wait on the box's disk."""
        return read_status(self.box.root / "var/lib/sluice/buffer.db").rows

    def wait_until_drained(self, patience_s: float = 60.0) -> None:
        deadline = time.monotonic() + patience_s
        while self.rows():
            assert time.monotonic() < deadline, f"{self.rows()} rows still wait:\n{self.box.journal()[-3000:]}"
            time.sleep(0.2)

    def fleet(self, name: str, interval_ms: int = 200) -> subprocess.Popen[bytes]:
        """Twenty sensors, outside; what they were told is in NAME.ledger."""
        command = [sys.executable, "-m", "sluice_sim", "fleet", "--host", self.address, "--sensors", str(len(SENSORS))]
        command += ["--user-secret", SECRET]
        command += [
            "--interval-ms",
            str(interval_ms),
            "--ledger",
            str(self.scene.directory / f"{name}.ledger"),
            "--json",
        ]
        log = self.scene.directory / f"{name}.log"
        network = self.scene.network
        return network.run(network.router, command, log, output=log.with_suffix(".out"))

    def acknowledged(self, name: str) -> int:
        ledger = self.scene.directory / f"{name}.ledger"
        return len(acknowledged_in(ledger.read_text()))

    def check(self, name: str, topic: str) -> None:
        """What the fleet got an acknowledgement for is in Kafka, once, in order."""
        self.wait_until_drained()
        found = audit(
            acknowledged_in((self.scene.directory / f"{name}.ledger").read_text()), in_kafka(self.scene.consume(topic))
        )
        assert found.acknowledged > 50
        assert not found.faults, str(found)


def set_up(box: Box, bootstrap: str) -> None:
    """As an installer does from a file of answers; then what a box without NTP needs."""
    secrets = "".join(f'{name} = "{SECRET}"\n' for name in SENSORS)
    box.write("/root/sluice.toml", ANSWERS.format(bootstrap=bootstrap, devices=list(SENSORS)))
    box.write("/root/sluice-secrets.toml", f'page_password = "{SECRET}"\n[devices]\n{secrets}', 0o600)
    told = box.call("sluice", "setup", "--answers", "/root/sluice.toml")
    assert told.returncode in {0, 1}, told.stdout + told.stderr
    assert box.property("sluice.service", "ActiveState") == "active", box.journal()
    settings = (box.root / "etc/sluice/gateway.toml").read_text()
    assert SECRET not in settings
    # Nobody keeps this clock, and what a sensor's own says is not waited for.
    known = '[gateway]\nclock = "system"\nhold_new_clock_s = 0\n'
    assert settings.count("[gateway]\n") == 1
    settings = settings.replace("[gateway]\n", known) + ROUTE
    # As it is, owner and mode included.
    box.run("tee", "/etc/sluice/gateway.toml", text=settings)
    box.run("systemctl", "restart", "sluice.service")


def stop(fleet: subprocess.Popen[bytes]) -> None:
    child_process.stop(fleet, 20.0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "scene").mkdir()
    with box_or_skip(directory) as box, scene_or_skip(directory / "scene") as scene:
        (old,) = boxes.build(directory / "old", "amd64_deb12", version=OLD)
        (new,) = boxes.build(directory / "new", "amd64_deb12", version=NEW)
        box.boot(scene.network.gateway)
        box.take(old, new, old.with_name(f"{old.name}.sig"), new.with_name(f"{new.name}.sig"))
        box.apt("install", f"/root/{old.name}")
        assert box.property("sluice.service", "ActiveState") == "inactive", "it is not set up yet"
        assert box.property("sluice.service", "ConditionResult") == "no"
        set_up(box, scene.bootstrap)
        yield Site(box, scene, old, new)


def test_the_unit_is_what_systemd_reads_and_little_is_open_to_it(site: Site) -> None:
    found = site.box.call("systemd-analyze", "verify", "--man=no", "/usr/lib/systemd/system/sluice.service")
    assert (found.stdout, found.stderr, found.returncode) == ("", "", 0)
    told = site.box.run("systemd-analyze", "security", "--no-pager", "sluice.service")
    exposure = re.search(r"Overall exposure level for sluice.service: ([0-9.]+)", told)
    assert exposure is not None
    assert float(exposure[1]) <= EXPOSURE_MAX


def test_the_service_is_up_as_its_own_user_with_the_kernels_clock_in_sight(site: Site) -> None:
    pid = site.box.property("sluice.service", "MainPID")
    assert site.box.property("sluice.service", "ActiveState") == "active"
    assert site.box.run("stat", "-c", "%U", f"/proc/{pid}").strip() == "sluice"
    groups = site.box.run("getent", "group", "dialout", "sluice").splitlines()
    has = site.box.run("grep", "Groups:", f"/proc/{pid}/status").split()[1:]
    assert {line.split(":")[2] for line in groups} == set(has)
    assert "wait" in site.box.property("sluice.service", "StatusText")
    assert site.box.run("cat", f"/proc/{pid}/limits").split("Max core file size")[1].split()[0] == "0"
    assert modes(site.box, "/etc/sluice", "/etc/sluice/secrets", "/etc/sluice/credentials", "/var/lib/sluice") == [
        "root:sluice 750",
        "root:sluice 750",
        "root:root 700",
        "sluice:sluice 750",
    ]
    files = ("/etc/sluice/gateway.toml", "/etc/sluice/credentials/status-page", "/var/lib/sluice/buffer.db")
    assert modes(site.box, *files) == ["root:sluice 640", "root:root 400", "sluice:sluice 600"]


def modes(box: Box, *paths: str) -> list[str]:
    """Owner, group and mode of each."""
    return box.run("stat", "-c", "%U:%G %a", *paths).splitlines()


def test_a_reboot_and_a_power_cut_lose_nothing(site: Site) -> None:
    fleet = site.fleet("reboot")
    try:
        time.sleep(3)
        site.box.reboot()
        time.sleep(3)
        site.box.kill()
        site.box.boot(site.scene.network.gateway)
        assert site.box.property("sluice.service", "ActiveState") == "active"
        time.sleep(3)
    finally:
        stop(fleet)
    site.check("reboot", TOPIC)


def test_a_daemon_that_hangs_is_started_anew(site: Site) -> None:
    # By the package's own unit, in less time.
    site.box.run("mkdir", "-p", "/run/systemd/system/sluice.service.d")
    quick = "[Service]\nWatchdogSec=2\nTimeoutAbortSec=2\nRestartSec=1\n"
    site.box.run("tee", "/run/systemd/system/sluice.service.d/quick.conf", text=quick)
    site.box.run("systemctl", "daemon-reload")
    site.box.run("systemctl", "restart", "sluice.service")
    pid = site.box.property("sluice.service", "MainPID")
    site.box.run("systemctl", "kill", "--signal=STOP", "sluice.service")
    deadline = time.monotonic() + 30
    while site.box.property("sluice.service", "MainPID") in {pid, "0"}:
        assert time.monotonic() < deadline, site.box.journal()[-2000:]
        time.sleep(0.2)
    assert "Watchdog timeout" in site.box.journal()
    site.box.run("rm", "/run/systemd/system/sluice.service.d/quick.conf")
    site.box.run("systemctl", "daemon-reload")
    site.box.run("systemctl", "restart", "sluice.service")
    # It goes on feeding the watchdog of the unit as it is.
    assert site.box.property("sluice.service", "WatchdogUSec") == "30s"


def test_a_waiting_buffer_is_there_after_an_upgrade_and_a_downgrade(site: Site) -> None:
    site.scene.network.blackhole()
    fleet = site.fleet("upgrade")
    try:
        time.sleep(3)
        before = site.rows()
        assert before > 100
        pid = site.box.property("sluice.service", "MainPID")
        told = site.box.run("sluice", "update", f"/root/{site.new.name}")
        assert told.startswith(f"installed: sluice {NEW}~deb12, before it {OLD}~deb12")
        assert site.box.run("sluice", "--version").strip() == f"sluice {NEW}"
        assert site.box.property("sluice.service", "MainPID") not in {pid, "0"}
        assert site.rows() >= before
        time.sleep(2)
        between = site.rows()
        refused = site.box.call("sluice", "update", f"/root/{site.old.name}")
        assert refused.returncode == 1
        assert "--allow-downgrade" in refused.stderr
        site.box.run("sluice", "update", "--allow-downgrade", f"/root/{site.old.name}")
        assert site.box.run("sluice", "--version").strip() == f"sluice {OLD}"
        assert site.rows() >= between
        time.sleep(2)
    finally:
        site.scene.network.heal()
        stop(fleet)
    site.check("upgrade", TOPIC)


def test_a_changed_package_and_one_without_a_signature_are_refused(site: Site) -> None:
    site.box.run("sh", "-c", f"cp /root/{site.new.name} /root/changed.deb; printf x >> /root/changed.deb")
    unsigned = site.box.call("sluice", "update", "/root/changed.deb")
    signed = site.box.call("sluice", "update", "--signature", f"/root/{site.new.name}.sig", "/root/changed.deb")
    assert (unsigned.returncode, signed.returncode) == (1, 1)
    assert "its signature cannot be read" in unsigned.stderr
    assert "its signature is of none of the keys" in signed.stderr
    assert site.box.run("sluice", "--version").strip() == f"sluice {OLD}"


def test_an_upgrade_that_does_not_fit_the_settings_leaves_the_old_one_running(site: Site) -> None:
    toml = (site.box.root / "etc/sluice/gateway.toml").read_text()
    pid = site.box.property("sluice.service", "MainPID")
    site.box.write("/etc/sluice/gateway.toml", toml + "\n[no_longer_there]\n", 0o640)
    try:
        ended = site.box.call("dpkg", "--install", f"/root/{site.new.name}")
        assert ended.returncode != 0
        assert "no_longer_there" in ended.stderr
        assert site.box.property("sluice.service", "MainPID") == pid
    finally:
        site.box.write("/etc/sluice/gateway.toml", toml, 0o640)
    site.box.run("dpkg", "--configure", "sluice")
    assert site.box.property("sluice.service", "MainPID") not in {pid, "0"}
    site.box.apt("install", "--allow-downgrades", f"/root/{site.old.name}")


def test_the_journal_tells_no_secret_and_no_traceback(site: Site) -> None:
    told = site.box.run("journalctl", "--no-pager", "--quiet")
    assert "listening for MQTT" in told
    assert SECRET not in told
    assert "Traceback" not in told


def test_removing_keeps_what_waits_and_purging_deletes_it(site: Site) -> None:
    site.box.apt("remove", "sluice")
    assert not site.box.there("/usr/lib/sluice")
    assert not site.box.there("/usr/bin/sluice")
    for kept in ("/etc/sluice/gateway.toml", "/etc/sluice/credentials/status-page", "/var/lib/sluice/buffer.db"):
        assert site.box.there(kept), kept
    site.box.apt("install", f"/root/{site.new.name}")
    assert site.box.property("sluice.service", "ActiveState") == "active", "as it was before"
    site.box.apt("purge", "sluice")
    assert not site.box.there("/etc/sluice")
    assert not site.box.there("/var/lib/sluice")
    assert site.box.property("sluice.service", "LoadState") == "not-found"
