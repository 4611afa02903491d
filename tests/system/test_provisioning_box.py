"""Provisioning on a box that boots: from files on its boot partition to a gateway that runs, and back by a reset."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.commands.setup.dialogue import QUESTIONS_MAX
from gateway.commands.setup.provision import DONE_NAME, REPORT_NAME
from gateway.page.password import verify_password
from gateway.settings import DEFAULT_CONFIG
from tests.support.box import Box, box_or_skip
from tests.support.setup_dialogue import ENTER, questions_asked, set_up
from tests.support.waiting import patience

pytestmark = [pytest.mark.box, pytest.mark.timeout(900)]

BOOT = "/boot/firmware"
ANSWERS = """\
[gateway]
id = "barn-1"
[kafka]
bootstrap = ["kafka.farm.example:9093"]
tls = true
user = "barn-1"
[sensors]
devices = ["42"]
"""
SECRETS = """\
kafka_password = "kafka-9d2c1b77"
page_password = "page-51ab03fe"
[devices]
"42" = "device-0123456789"
"""
PUBLISH = ["mosquitto_pub", "-t", "device/42/thermo", "-m", "1", "-q", "1", "-u", "42"]
WORDS = ("kafka-9d2c1b77", "page-51ab03fe", "device-0123456789")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, old_package: Path) -> Iterator[Box]:
    """A box with the package installed, never set up."""
    with box_or_skip(tmp_path_factory.mktemp("provisioned")) as box:
        box.boot()
        box.take(old_package)
        box.apt("install", f"/root/{old_package.name}")
        yield box


@pytest.fixture
def bare(box: Box) -> Box:
    """The box, not set up, whichever of these tests came before on it."""
    if box.there(str(DEFAULT_CONFIG)):
        box.run("sluice", "reset", "--yes-wipe", "barn-1", "--stop")
    return box


@pytest.fixture
def provisioned(box: Box) -> Box:
    """The box, set up from its boot partition and running."""
    if not box.there(str(DEFAULT_CONFIG)):
        lay(box)
        box.run("systemctl", "restart", "sluice-provision.service")
        # Which starts the service, and does not wait for it.
        deadline = time.monotonic() + patience(30)
        while box.call(*PUBLISH, "-P", "device-0123456789").returncode:
            assert time.monotonic() < deadline, box.journal()
            time.sleep(0.2)
    return box


def lay(box: Box, answers: str = ANSWERS) -> None:
    box.write(f"{BOOT}/sluice.toml", answers)
    box.write(f"{BOOT}/sluice-secrets.toml", SECRETS)


def test_the_unit_is_what_systemd_reads(box: Box) -> None:
    found = box.call("systemd-analyze", "verify", "--man=no", "/usr/lib/systemd/system/sluice-provision.service")
    assert (found.stdout, found.stderr, found.returncode) == ("", "", 0)


def test_a_mistake_is_told_on_the_boot_partition_and_nothing_starts(bare: Box) -> None:
    box = bare
    lay(box, ANSWERS.replace("tls = true\n", ""))
    box.call("systemctl", "restart", "sluice-provision.service")
    assert box.property("sluice-provision.service", "Result") == "exit-code"
    assert "kafka: tls is missing" in (box.root / BOOT[1:] / REPORT_NAME).read_text()
    assert "kafka: tls is missing" in box.journal("sluice-provision.service")
    assert box.property("sluice.service", "ActiveState") == "inactive"
    box.run("systemctl", "reset-failed")


def test_a_start_takes_it_in_and_the_gateway_runs(bare: Box) -> None:
    box = bare
    lay(box)
    box.reboot()
    assert box.property("sluice-provision.service", "Result") == "success", box.journal("sluice-provision.service")
    assert box.property("sluice.service", "ActiveState") == "active", box.journal()
    assert sorted(path.name for path in (box.root / BOOT[1:]).iterdir()) == [REPORT_NAME, DONE_NAME]
    assert modes(box, "/etc/sluice/gateway.toml", "/etc/sluice/secrets", "/etc/sluice/secrets/kafka.password") == [
        "root:sluice 640",
        "root:sluice 750",
        "sluice:sluice 400",
    ]
    assert modes(box, "/etc/sluice/credentials/status-page", "/var/lib/sluice/devices.json") == [
        "root:root 400",
        "sluice:sluice 600",
    ]
    told = box.journal("sluice-provision.service") + box.journal()
    told += (box.root / BOOT[1:] / REPORT_NAME).read_text() + (box.root / BOOT[1:] / DONE_NAME).read_text()
    assert "set up from /boot/firmware: default/barn-1" in told
    assert not [words for words in WORDS if words in told]
    # The sensor is let in with the secret that it was given.
    assert box.call(*PUBLISH, "-P", "device-0123456789").returncode == 0
    assert box.call(*PUBLISH, "-P", "device-0123456780").returncode != 0


def test_another_start_changes_nothing(provisioned: Box) -> None:
    box = provisioned
    before = (box.root / "etc/sluice/gateway.toml").read_bytes()
    box.reboot()
    assert (box.root / "etc/sluice/gateway.toml").read_bytes() == before
    assert box.property("sluice.service", "ActiveState") == "active"


def test_the_check_of_root_judges_by_the_services_user_and_sees_what_is_roots(provisioned: Box) -> None:
    box = provisioned

    def checked() -> dict[str, dict[str, str]]:
        return {found["subject"]: found for found in json.loads(box.call("sluice", "check", "--json").stdout)}

    found = checked()
    for subject, words in (
        ("settings", "can be used"),
        ("buffer.path", "can be written by this user (sluice)"),
        ("status_page.password_file", "a password is set"),
        ("kafka.sasl.password_file", "only its owner may read it"),
        ("mqtt_listener.port", "is served by the running sluice of this buffer (process "),
    ):
        assert found[subject]["result"] == "pass", found[subject]
        assert words in found[subject]["words"]
    # As an editor leaves them that writes a new file.
    box.run("chown", "root:root", "/etc/sluice/gateway.toml")
    box.run("chown", "root:root", "/etc/sluice/secrets/kafka.password")
    found = checked()
    assert "runs as this user (sluice), who may not read" in found["settings"]["words"]
    assert found["kafka.sasl.password_file"]["result"] == "fail"
    box.run("chown", "root:sluice", "/etc/sluice/gateway.toml")
    box.run("chown", "sluice:sluice", "/etc/sluice/secrets/kafka.password")


def test_answers_for_a_gateway_whose_buffer_has_a_disk_of_its_own_are_taken_in(provisioned: Box) -> None:
    box = provisioned
    box.run("install", "-d", "-o", "sluice", "-g", "sluice", "-m", "0750", "/srv/sluice")
    settings = (box.root / "etc/sluice/gateway.toml").read_text()
    assert "[buffer]" not in settings
    # As it is, owner and mode included.
    box.run("tee", "/etc/sluice/gateway.toml", text=f'{settings}\n[buffer]\npath = "/srv/sluice/buffer.db"\n')
    lay(box, ANSWERS.replace('["42"]', '["42", "43"]'))
    box.write(f"{BOOT}/sluice-secrets.toml", f'{SECRETS}"43" = "device-9876543210"\n')
    box.call("systemctl", "restart", "sluice-provision.service")
    assert box.property("sluice-provision.service", "Result") == "success", box.journal("sluice-provision.service")
    assert set(json.loads((box.root / "srv/sluice/devices.json").read_text())["devices"]) == {"42", "43"}
    box.run("tee", "/etc/sluice/gateway.toml", text=settings)


def test_a_reset_leaves_nothing_of_the_site(provisioned: Box) -> None:
    box = provisioned
    refused = box.call("sluice", "reset", "--yes-wipe", "barn-1")
    assert refused.returncode == 2
    assert "the gateway runs: nothing was wiped" in refused.stderr
    told = box.run("sluice", "reset", "--yes-wipe", "barn-1", "--stop")
    assert "WAIT" in told
    left = box.run("find", "/etc/sluice", "/var/lib/sluice", BOOT, "-type", "f", "-o", "-type", "s").split()
    assert left == []
    assert not box.call("grep", "-rlF", "kafka-9d2c1b77", "/etc", "/var/lib", "/boot").stdout
    box.reboot()
    assert box.property("sluice.service", "ActiveState") == "inactive"
    assert box.property("sluice.service", "ConditionResult") == "no"


def test_a_person_sets_it_up_at_the_terminal_and_it_runs(bare: Box) -> None:
    box = bare
    inside = box.inside("env", "-i", "PATH=/usr/bin:/usr/sbin", "LANG=C.UTF-8")
    answers = ["north-farm/barn-1", "kafka.example:9093", "y", "barn-1", "kafka-9d2c1b77", ENTER, "42", ENTER, "yes"]
    shown, code = set_up(DEFAULT_CONFIG, answers, [*inside, "sluice"])
    # There is no Kafka here.
    assert code == 1, shown
    assert len(questions_asked(shown)) == QUESTIONS_MAX
    assert "the gateway was started, and starts at every boot" in shown
    assert box.property("sluice.service", "ActiveState") == "active", box.journal()
    found = re.search(r"^    42 +(\S+)\r$", shown, re.MULTILINE)
    assert found is not None
    assert box.call(*PUBLISH, "-P", found[1]).returncode == 0
    page = re.search(r"^    status page +(\S+)\r$", shown, re.MULTILINE)
    assert page is not None
    assert verify_password(page[1], (box.root / "etc/sluice/credentials/status-page").read_text())
    # Again, with Enter all the way: nothing changes, and it is restarted.
    before = (box.root / "etc/sluice/gateway.toml").read_bytes()
    shown, code = set_up(DEFAULT_CONFIG, [ENTER, ENTER, "y", *[ENTER] * 6], [*inside, "sluice"])
    assert code == 1, shown
    assert (box.root / "etc/sluice/gateway.toml").read_bytes() == before
    assert box.call(*PUBLISH, "-P", found[1]).returncode == 0


def modes(box: Box, *paths: str) -> list[str]:
    """Owner, group and mode of each."""
    return box.run("stat", "-c", "%U:%G %a", *paths).splitlines()
