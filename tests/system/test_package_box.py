"""The package on a box that boots: installed, rebooted, hung, upgraded, downgraded, removed and purged."""

import base64
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.box import Box, box_or_skip, build
from tests.support.fixtures_boxes import NEW, OLD, Packages
from tests.support.package_site import (
    SECRET,
    Site,
    install,
    measure,
    set_up,
    stop,
    wait_for_first_reading,
    write_answers,
)
from tests.support.uplink_scene import scene_or_skip
from tests.support.waiting import patience

pytestmark = [pytest.mark.box, pytest.mark.kafka, pytest.mark.timeout(900)]

EXPOSURE_MAX = 2.0
PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
GAUGE = """
import os, pty, time, tty
ours, port = pty.openpty()
tty.setraw(port)
os.chmod(os.ttyname(port), 0o666)
os.symlink(os.ttyname(port), "/run/gauge")
os.close(port)
while True:
    try:
        os.write(ours, bytes.fromhex("55 00 2a 7f"))
    except OSError:
        pass
    time.sleep(0.2)
"""
"""A rain gauge on a serial port."""
FORMAT_SECTION = '\n[[serial.format]]\nport = "/run/gauge"\ndevice = "roof"\nformat = "rain"\n'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "scene").mkdir()
    with box_or_skip(directory) as box, scene_or_skip(directory / "scene") as scene:
        box.boot(scene.network.gateway)
        install(box, packages.old)
        box.take(packages.new, packages.new.with_name(f"{packages.new.name}.sig"))
        assert box.property("sluice.service", "ActiveState") == "inactive", "it is not set up yet"
        assert box.property("sluice.service", "ConditionResult") == "no"
        set_up(box, scene.bootstrap)
        made = Site(box, scene)
        wait_for_first_reading(made)
        yield made


def test_systemd_finds_nothing_to_say_of_the_units(site: Site) -> None:
    for unit in ("sluice.service", "sluice-provision.service", "sluice-fleet.service", "sluice-fleet.timer"):
        found = site.box.call("systemd-analyze", "verify", "--man=no", f"/usr/lib/systemd/system/{unit}")
        assert (found.stdout, found.stderr, found.returncode) == ("", "", 0)


def test_the_service_is_light_and_little_is_open_to_it(site: Site) -> None:
    found = measure(site.box)
    assert found.exposure <= EXPOSURE_MAX
    # Of a busy machine; the bench has what an idle one takes.
    assert found.start_s < patience(20)
    assert found.rss_mb < 100


def test_the_format_of_the_page_runs_within_the_services_bounds(site: Site) -> None:
    format_, *_ = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())
    settings = (site.box.root / "etc/sluice/gateway.toml").read_text()
    site.box.run("tee", "/etc/sluice/formats/rain.py", text=format_)
    site.box.run("tee", "/etc/sluice/gateway.toml", text=settings + FORMAT_SECTION)
    site.box.run("systemd-run", "--unit=gauge", "python3", "-c", GAUGE)
    site.box.run("systemctl", "restart", "sluice.service")
    deadline = time.monotonic() + patience(60)
    while "serial device appeared" not in site.box.journal():
        assert time.monotonic() < deadline, site.box.journal()[-3000:]
        time.sleep(0.2)
    assert "a format of one's own failed" not in site.box.journal()
    site.box.run("tee", "/etc/sluice/gateway.toml", text=settings)
    site.box.run("systemctl", "restart", "sluice.service")
    site.box.run("systemctl", "stop", "gauge.service")


def test_the_whole_chain_is_well_as_check_sees_it(site: Site) -> None:
    told = site.box.run("runuser", "-u", "sluice", "--", "sluice", "check")
    assert "FAIL" not in told
    assert "read back: byte for byte" in told


def test_modules_of_the_caller_and_of_the_system_do_not_reach_the_program(site: Site) -> None:
    for folder in ("/root/evil", "/usr/lib/python3/dist-packages", "/usr/local/lib/python3.11/dist-packages"):
        for module in ("click", "gateway", "json", "sitecustomize"):
            site.box.run("mkdir", "-p", folder)
            site.box.run("tee", f"{folder}/{module}.py", text="raise SystemExit('taken over')")
    poisoned = [
        "env",
        "-C",
        "/root/evil",
        "PYTHONPATH=/root/evil",
        "PYTHONHOME=/root/evil",
        "PYTHONSTARTUP=/root/evil/json.py",
    ]
    assert site.box.run(*poisoned, "sluice", "--version").strip() == f"sluice {OLD}"
    site.box.run(
        "sh", "-c", "rm -r /root/evil /usr/local/lib/python3.11/dist-packages/*.py /usr/lib/python3/dist-packages/*.py"
    )


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


def test_the_pages_password_comes_to_the_service_though_its_user_cannot_read_it(site: Site) -> None:
    def status(password: str) -> int:
        token = base64.b64encode(f"sluice:{password}".encode()).decode()
        asked = urllib.request.Request(
            f"http://{site.address}:8080/metrics", headers={"Authorization": f"Basic {token}"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 - the box of this test
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            return refused.code

    router = site.scene.network.router
    assert router.inside(lambda: status("wrong-password")) == 401
    assert router.inside(lambda: status(SECRET)) == 200
    assert site.box.call("runuser", "-u", "sluice", "--", "cat", "/etc/sluice/credentials/status-page").returncode != 0


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
    site.check("reboot")


def drop_in(box: Box, text: str) -> None:
    """Change the service's unit until the box is booted again; with an empty text, change it back."""
    path = "/run/systemd/system/sluice.service.d/test.conf"
    box.run("mkdir", "-p", path.rpartition("/")[0])
    box.run("tee", path, text=text)
    box.run("systemctl", "daemon-reload")


def test_a_daemon_that_hangs_is_started_anew(site: Site) -> None:
    assert site.box.property("sluice.service", "WatchdogUSec") == "30s"
    # Of the tests' patience a tenth.
    drop_in(site.box, "[Service]\nWatchdogSec=2\nTimeoutAbortSec=2\nRestartSec=1\n")
    site.box.run("systemctl", "restart", "sluice.service")
    pid = site.box.property("sluice.service", "MainPID")
    time.sleep(3)
    assert site.box.property("sluice.service", "MainPID") == pid, "it feeds the watchdog"
    site.box.run("systemctl", "kill", "--signal=STOP", "sluice.service")
    deadline = time.monotonic() + patience(30)
    while site.box.property("sluice.service", "MainPID") in {pid, "0"}:
        assert time.monotonic() < deadline, site.box.journal()[-2000:]
        time.sleep(0.2)
    assert "Watchdog timeout" in site.box.journal()
    drop_in(site.box, "")
    site.box.run("systemctl", "restart", "sluice.service")


def test_a_waiting_buffer_is_there_after_an_upgrade_and_a_downgrade(site: Site, packages: Packages) -> None:
    site.scene.network.blackhole()
    fleet = site.fleet("upgrade")
    try:
        time.sleep(3)
        before = site.rows()
        assert before > 100
        pid = site.box.property("sluice.service", "MainPID")
        told = site.box.run("sluice", "update", f"/root/{packages.new.name}")
        assert told.startswith(f"installed: sluice-gateway {NEW}~deb12, before it {OLD}~deb12")
        assert site.box.run("sluice", "--version").strip() == f"sluice {NEW}"
        assert site.box.property("sluice.service", "MainPID") not in {pid, "0"}
        assert site.rows() >= before
        time.sleep(2)
        between = site.rows()
        refused = site.box.call("sluice", "update", f"/root/{packages.old.name}")
        assert refused.returncode == 1
        assert "--allow-downgrade" in refused.stderr
        site.box.run("sluice", "update", "--allow-downgrade", f"/root/{packages.old.name}")
        assert site.box.run("sluice", "--version").strip() == f"sluice {OLD}"
        assert site.rows() >= between
        time.sleep(2)
    finally:
        site.scene.network.heal()
        stop(fleet)
    site.check("upgrade")


@pytest.mark.long(seconds=120)
def test_a_full_buffer_is_there_after_an_upgrade(site: Site, packages: Packages) -> None:
    settings = (site.box.root / "etc/sluice/gateway.toml").read_text()
    site.box.run(
        "tee", "/etc/sluice/gateway.toml", text=f"{settings}\n[buffer]\nbytes_max = 1_000_000\nfair_from = 1.0\n"
    )
    site.box.run("systemctl", "restart", "sluice.service")
    site.scene.network.blackhole()
    fleet = site.fleet("full", interval_ms=10)
    try:
        site.wait_until_full()
        before = site.rows()
        assert before > 1_000
        site.box.run("sluice", "update", f"/root/{packages.new.name}")
        assert site.rows() >= before
        site.wait_until_full()
    finally:
        site.scene.network.heal()
        stop(fleet)
    site.check("full")
    site.box.run("sluice", "update", "--allow-downgrade", f"/root/{packages.old.name}")
    site.box.run("tee", "/etc/sluice/gateway.toml", text=settings)
    site.box.run("systemctl", "restart", "sluice.service")


def test_a_changed_package_and_one_without_a_signature_are_refused(site: Site, packages: Packages) -> None:
    site.box.run("sh", "-c", f"cp /root/{packages.new.name} /root/changed.deb; printf x >> /root/changed.deb")
    unsigned = site.box.call("sluice", "update", "/root/changed.deb")
    signed = site.box.call("sluice", "update", "--signature", f"/root/{packages.new.name}.sig", "/root/changed.deb")
    assert (unsigned.returncode, signed.returncode) == (1, 1)
    assert "its signature cannot be read" in unsigned.stderr
    assert "its signature fits none of the keys" in signed.stderr
    assert site.box.run("sluice", "--version").strip() == f"sluice {OLD}"


def test_an_update_whose_service_does_not_start_says_how_to_go_back(site: Site, packages: Packages) -> None:
    drop_in(site.box, "[Service]\nExecStart=\nExecStart=/bin/false\n")
    ended = site.box.call("sluice", "update", f"/root/{packages.new.name}")
    words = " ".join(ended.stderr.split())
    assert ended.returncode == 1
    assert "the service does not run with it" in words
    back = "sluice update --allow-downgrade /var/cache/sluice/previous.deb"
    assert f"sudo {back}" in words
    drop_in(site.box, "")
    site.box.run(*back.split())
    assert site.box.run("sluice", "--version").strip() == f"sluice {OLD}"
    assert site.box.property("sluice.service", "ActiveState") == "active"
    assert "nothing was done" in site.box.run("sluice", "update", f"/root/{packages.old.name}")
    assert modes(site.box, "/var/cache/sluice") == ["root:root 700"]


def test_an_upgrade_that_does_not_fit_the_settings_leaves_the_old_one_running(site: Site, packages: Packages) -> None:
    toml = (site.box.root / "etc/sluice/gateway.toml").read_text()
    pid = site.box.property("sluice.service", "MainPID")
    site.box.write("/etc/sluice/gateway.toml", toml + "\n[no_longer_there]\n", 0o640)
    try:
        ended = site.box.call("dpkg", "--install", f"/root/{packages.new.name}")
        assert ended.returncode != 0
        assert "no_longer_there" in ended.stderr
        assert site.box.property("sluice.service", "MainPID") == pid
    finally:
        site.box.write("/etc/sluice/gateway.toml", toml, 0o640)
    site.box.run("dpkg", "--configure", "sluice-gateway")
    # It stays: the tests that follow take either version.
    assert site.box.property("sluice.service", "MainPID") not in {pid, "0"}


def test_the_journal_tells_no_secret_and_no_traceback(site: Site) -> None:
    told = site.box.run("journalctl", "--no-pager", "--quiet")
    assert "listening for MQTT" in told
    assert SECRET not in told
    assert "Traceback" not in told


def test_removing_keeps_what_waits_and_purging_deletes_it(site: Site, packages: Packages) -> None:
    site.box.apt("remove", "sluice-gateway")
    assert not site.box.there("/usr/lib/sluice")
    assert not site.box.there("/usr/bin/sluice")
    for kept in ("/etc/sluice/gateway.toml", "/etc/sluice/credentials/status-page", "/var/lib/sluice/buffer.db"):
        assert site.box.there(kept), kept
    site.box.apt("install", f"/root/{packages.new.name}")
    assert site.box.property("sluice.service", "ActiveState") == "active", "as it was before"
    site.box.apt("purge", "sluice-gateway")
    assert not site.box.there("/etc/sluice")
    assert not site.box.there("/var/lib/sluice")
    assert site.box.property("sluice.service", "LoadState") == "not-found"


@pytest.mark.long(seconds=200)
def test_the_next_debian_takes_its_package_which_sets_itself_up_from_the_boot_partition(
    tmp_path: Path, packages: Packages
) -> None:
    with box_or_skip(tmp_path, 13) as box:
        (package,) = build(tmp_path / "packages", "amd64_deb13", version=OLD, xz_level=0)
        # There is no Kafka, and no network: it starts all the same.
        write_answers(box, "/boot/firmware", "kafka.example:9092")
        box.boot()
        install(box, package)
        assert box.property("sluice.service", "ActiveState") == "active", box.journal("sluice-provision.service")
        assert "listening for MQTT" in box.journal()
        assert not box.there("/boot/firmware/sluice-secrets.toml")
        assert measure(box).exposure <= EXPOSURE_MAX
        for rules in ("60-sluice-serial", "60-sluice-usb", "90-sluice-braille"):
            box.run("udevadm", "verify", f"/usr/lib/udev/rules.d/{rules}.rules")
        box.take(packages.new, packages.new.with_name(f"{packages.new.name}.sig"))
        refused = box.call("sluice", "update", f"/root/{packages.new.name}")
        assert "it is for Debian 12, and this box has Debian 13" in " ".join(refused.stderr.split())
        told = box.run("journalctl", "--no-pager", "--quiet")
        assert SECRET not in told
        assert "Traceback" not in told
