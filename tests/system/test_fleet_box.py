"""`sluice fleet pull` on a box of Debian that boots: real packages, real dpkg, a folder by https, and a power cut."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gateway.host.fleet_report import FleetReport, Trial
from gateway.host.last_update import Before
from systemd import deb_signing
from tests.support.box import Box, box_or_skip
from tests.support.certificates import make_authority
from tests.support.fixtures_boxes import NEW, OLD, Packages
from tests.support.package_site import install, write_answers
from tests.support.waiting import patience

pytestmark = [pytest.mark.box, pytest.mark.timeout(1_800)]
PORT = 8443
SERVER = f"""
import http.server, ssl
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/root/server.pem", "/root/server.key")
handler = lambda *a, **k: http.server.SimpleHTTPRequestHandler(*a, directory="/root/folder", **k)
server = http.server.ThreadingHTTPServer(("127.0.0.1", {PORT}), handler)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
PULL = ("sluice", "fleet", "pull")
CA = 'ca = "/root/ca.pem"\n'


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> Iterator[Box]:
    """A box with the old version, which looks at a folder that has both."""
    directory = tmp_path_factory.mktemp("fleet-box")
    authority = make_authority(directory / "ca")
    identity = authority.sign("server")
    with box_or_skip(directory) as made:
        made.boot()
        install(made, packages.old)
        assert made.property("sluice-fleet.timer", "ActiveState") == "active"
        # Here the tests say when it looks.
        made.run("systemctl", "mask", "--now", "sluice-fleet.timer")
        write_answers(made, "/root", "127.0.0.1:9")
        made.run("sluice", "setup", "--no-check", "--answers", "/root/sluice.toml")
        settings = (made.root / "etc/sluice/gateway.toml").read_text()
        section = f'\n[fleet]\nurl = "https://127.0.0.1:{PORT}"\n{CA}'
        made.run("tee", "/etc/sluice/gateway.toml", text=settings + section)
        made.run("systemctl", "restart", "sluice.service")
        made.write("/root/ca.pem", authority.certificate.read_text())
        made.write("/root/server.pem", identity.certificate.read_text())
        made.write("/root/server.key", identity.key.read_text())
        made.take(*(Path(f"{path}{suffix}") for path in (packages.old, packages.new) for suffix in ("", ".sig")))
        made.run("sh", "-c", "mkdir /root/folder && mv /root/*.deb /root/*.sig /root/folder")
        serve(made)
        yield made


def serve(box: Box) -> None:
    box.run("systemd-run", "--unit=folder", "python3", "-c", SERVER)


def publish(box: Box, place: Path, text: str) -> None:
    file = place / "fleet.toml"
    file.write_text(text)
    deb_signing.sign(file, deb_signing.OWN_KEY)
    box.take(file, place / "fleet.toml.sig")
    box.run("sh", "-c", "mv /root/fleet.toml /root/fleet.toml.sig /root/folder")


def report(box: Box) -> FleetReport:
    return msgspec.json.decode((box.root / "var/lib/sluice-fleet/report.json").read_bytes(), type=FleetReport)


def version(box: Box) -> str:
    return box.run("sluice", "--version").strip()


def wanting(serial: int, wanted: str, more: str = "") -> str:
    return f'serial = {serial}\n[[groups]]\nname = "all"\ngateways = ["*/*"]\nversion = "{wanted}"\n{more}\n'


def test_the_unit_looks_only_where_it_is_asked_to(box: Box) -> None:
    for unit in ("sluice-fleet.service", "sluice-fleet.timer"):
        found = box.call("systemd-analyze", "verify", "--man=no", f"/usr/lib/systemd/system/{unit}")
        assert (found.stdout, found.stderr, found.returncode) == ("", "", 0)
    settings = (box.root / "etc/sluice/gateway.toml").read_text()
    box.run("tee", "/etc/sluice/gateway.toml", text=settings.replace(CA, ""))
    box.run("systemctl", "start", "sluice-fleet.service")
    # Without its authority, the folder is not trusted. That is told, and the unit is well.
    assert box.property("sluice-fleet.service", "Result") == "success"
    assert "signed by nobody whom this box trusts" in report(box).trouble
    box.run("tee", "/etc/sluice/gateway.toml", text=settings.partition("[fleet]")[0])
    box.run("systemctl", "start", "sluice-fleet.service")
    assert "Skipped due to 'exec-condition'" in box.journal("sluice-fleet.service")
    # A change that was cut off is ended all the same.
    begun = FleetReport(result="on-trial", trial=Trial("settings", "", "", Before()))
    box.run("tee", "/var/lib/sluice-fleet/report.json", text=msgspec.json.encode(begun).decode())
    box.run("systemctl", "start", "sluice-fleet.service")
    box.run("tee", "/etc/sluice/gateway.toml", text=settings)
    assert (report(box).trial, report(box).result) == (None, "went-back")
    box.run("rm", "/var/lib/sluice-fleet/report.json")


@pytest.mark.long(seconds=420)
def test_a_version_and_its_settings_come_from_the_folder(box: Box, tmp_path: Path) -> None:
    publish(box, tmp_path, wanting(1, NEW, '[groups.settings.log]\nlevel = "debug"'))
    assert version(box) == f"sluice {OLD}"
    told = box.run(*PULL)
    assert "the version is good; the settings follow" in told
    assert (version(box), report(box).result) == (f"sluice {NEW}", "waits")
    told = box.run(*PULL)
    assert (report(box).result, report(box).serial) == ("good", 1), told
    settings = box.root / "etc/sluice/gateway.toml"
    assert 'level = "debug"' in settings.read_text()
    assert box.run("stat", "-c", "%U:%G %a", "/etc/sluice/gateway.toml").strip() == "root:sluice 640"
    assert box.property("sluice.service", "ActiveState") == "active"
    assert "this box has what fleet.toml wants" in " ".join(box.run("sluice", "status").split())


@pytest.mark.long(seconds=300)
def test_a_power_cut_while_dpkg_works_leaves_a_box_that_goes_on(box: Box, tmp_path: Path) -> None:
    publish(box, tmp_path, wanting(2, OLD, "allow_downgrade = true"))
    box.run("systemd-run", "--unit=pull", *PULL)
    status = box.root / "var/lib/dpkg/updates"
    deadline = time.monotonic() + patience(300)
    while not any(status.iterdir()):
        assert time.monotonic() < deadline, box.journal("pull.service")
    box.kill()
    box.boot()
    serve(box)
    for _ in range(2):
        box.call(*PULL)
        if report(box).trial is None and report(box).result == "good":
            break
    assert (report(box).result, version(box)) == ("good", f"sluice {OLD}"), report(box)
    assert box.run("dpkg", "--audit") == ""
    assert box.property("sluice.service", "ActiveState") == "active"


@pytest.mark.long(seconds=220)
def test_a_version_whose_service_does_not_start_is_taken_back(box: Box, tmp_path: Path) -> None:
    """By the process of the former version, which is in memory only, and by dpkg."""
    condition = f"[Service]\nExecStartPre=/bin/sh -c '! sluice --version | grep -q {NEW}'\n"
    box.run("mkdir", "-p", "/etc/systemd/system/sluice.service.d")
    box.run("tee", "/etc/systemd/system/sluice.service.d/bad.conf", text=condition)
    box.run("systemctl", "daemon-reload")
    publish(box, tmp_path, wanting(3, NEW))
    told = box.call(*PULL)
    assert told.returncode == 1, told
    assert (report(box).result, report(box).trial, version(box)) == ("went-back", None, f"sluice {OLD}"), told
    assert box.run("dpkg", "--audit") == ""
    assert box.property("sluice.service", "ActiveState") == "active"
    kept = box.run("dpkg-deb", "--field", "/var/cache/sluice/installed.deb", "Version")
    assert kept.startswith(OLD), "it is a way back again"
