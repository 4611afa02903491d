"""`sluice check` of root judges by the user that the gateway runs as, and also sees facts for root alone."""

import grp
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway import settings
from gateway.host import service_user
from gateway.host.processes import opened_by
from gateway.host.service_user import User, as_root, as_service
from gateway.listener.credentials import add
from tests.support.gateways import free_port
from tests.support.status_page_site import HASHED
from tests.support.waiting import patience

NOBODY = pwd.getpwnam("nobody")
GROUP = grp.getgrgid(NOBODY.pw_gid).gr_name
takes_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody else")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One whose parents everybody may look into, and that is nobody's, with settings of root's."""
    made = Path("/var/tmp") / f"sluice-service-user-{os.getpid()}"  # noqa: S108
    made.mkdir(mode=0o755)
    (made / "data").mkdir()
    os.chown(made / "data", NOBODY.pw_uid, NOBODY.pw_gid)
    yield made
    shutil.rmtree(made)


@takes_root
def test_root_is_the_owner_of_the_buffers_folder_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_user, "_may_read_program", lambda: True)
    roots = folder / "of-root"
    roots.touch(0o400)
    before = os.getresuid(), os.getresgid(), os.getgroups()
    with (
        roots.open() as opened,
        subprocess.Popen(["sleep", "60"], stdin=opened) as holder,
        as_service(folder / "gateway.toml", folder / "data" / "buffer.db") as user,
    ):
        assert user == User(NOBODY.pw_uid, NOBODY.pw_gid, "nobody")
        assert (os.geteuid(), os.getegid()) == (NOBODY.pw_uid, NOBODY.pw_gid)
        assert os.getgroups() == [NOBODY.pw_gid]
        assert not os.access(roots, os.R_OK)
        assert str(roots) in opened_by(holder.pid)
        with as_root():
            assert os.access(roots, os.R_OK)
        assert not os.access(roots, os.R_OK)
        with as_root():
            holder.kill()
    assert (os.getresuid(), os.getresgid(), os.getgroups()) == before


@takes_root
def test_where_the_program_is_roots_alone_root_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_user, "_may_read_program", lambda: False)
    before = os.getresuid(), os.getresgid(), os.getgroups()
    with as_service(folder / "gateway.toml", folder / "data" / "buffer.db") as user:
        assert user is None
        assert (os.getresuid(), os.getresgid(), os.getgroups()) == before


@takes_root
def test_a_folder_of_roots_is_the_packages_users_where_its_settings_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_user, "SERVICE_USER", "nobody")
    monkeypatch.setattr(service_user, "DEFAULT_CONFIG", folder / "gateway.toml")
    for buffer in (folder / "buffer.db", folder / "none" / "buffer.db"):
        found = service_user.service_user(folder / "gateway.toml", buffer)
        assert found is not None
        assert found.name == "nobody"
        assert service_user.service_user(settings.DEFAULT_CONFIG, buffer) is None


def test_another_user_than_root_stays_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    before = os.getresuid()
    with as_service(tmp_path / "gateway.toml", tmp_path / "buffer.db") as user, as_root():
        assert user is None
        assert os.getresuid() == before


CHECK = """
import sys
from contextlib import suppress
from gateway.host import service_user
from gateway.cli import main
service_user._may_read_program = lambda: True
# Once before, so that all is imported: Python itself may stand where nobody else may read.
known, service_user.service_user = service_user.service_user, lambda *_: None
arguments = ["check", "--json", "--config", sys.argv[1]]
with suppress(SystemExit):
    main(arguments)
service_user.service_user = known
main(arguments)
"""


@takes_root
def test_the_check_of_root_says_what_the_gateway_may_not(folder: Path) -> None:
    """Made by hand as root, as people do: settings, a password and a buffer that the gateway cannot use."""
    (folder / "etc").mkdir(mode=0o700)
    config, password, page = folder / "etc" / "gateway.toml", folder / "kafka.password", folder / "status-page"
    config.write_text(
        f"""
[gateway]
id = "gw1"
clock = "system"
[buffer]
path = "{folder}/data/buffer.db"
bytes_max = 10_000_000
[kafka]
bootstrap = ["127.0.0.1:1"]
[kafka.sasl]
mechanism = "SCRAM-SHA-512"
user = "gw1"
password_file = "{password}"
[[mqtt_brokers]]
host = "127.0.0.1"
port = 1
user = "gw1"
password = "inline"
topics = ["device/#"]
[mqtt_listener]
port = {free_port()}
anonymous = true
[status_page]
port = {free_port()}
password_file = "{page}"
"""
    )
    password.write_text("secret\n")
    page.write_text(HASHED)
    for file in (config, password, page):
        file.chmod(0o400)
    (folder / "data" / "buffer.db.lock").touch(0o644)
    devices = folder / "data" / "devices.json"
    add(devices, ["42"], None)
    os.chown(devices, 0, 0)
    ended = subprocess.run(
        [sys.executable, "-c", CHECK, str(config)], capture_output=True, text=True, check=False, timeout=patience(60)
    )
    as_root_saw, as_nobody_saw = (
        {found["subject"]: found for found in json.loads(line)} for line in ended.stdout.splitlines()
    )
    for subject in ("settings", "buffer.path", "kafka.sasl.password_file"):
        assert as_root_saw[subject]["result"] == "pass", as_root_saw[subject]
        assert as_nobody_saw[subject]["result"] == "fail", as_nobody_saw[subject]
    assert f"sudo chgrp {GROUP} {config}" in as_nobody_saw["settings"]["words"]
    assert "this user (nobody) may not write it" in as_nobody_saw["buffer.path"]["words"]
    assert f"run: chown --reference={devices.parent} {devices}" in as_nobody_saw["mqtt_listener.devices_file"]["words"]
    # Credentials that systemd hands to the service are root's alone. That is no mistake.
    assert as_nobody_saw["status_page.password_file"]["result"] == "pass"
