"""The card to flash, in a machine that starts from it: dialog, answers, readings, a power cut, bad and good updates.

One story on one card, for each start takes minutes of emulation: the tests need the ones before them. `make test-image`
builds the image and runs them.
"""

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.commands.setup.answers import EXAMPLE
from gateway.commands.setup.provision import ANSWERS_NAME, DONE_NAME, REPORT_NAME
from image import build_image
from tests.support.forgetful_card import powered
from tests.support.https_site import https_site
from tests.support.image_guest import HOST, Guest, put, raspberry_pi_3
from tests.support.image_story import (
    AUTHORITY,
    BUILT,
    CARD_MB,
    NAME,
    SECRET,
    USER,
    VERSION,
    Story,
    flash,
    make_deaf,
)
from tests.support.sizes import SEED
from tests.support.uboot_board import boot_file, skip_without_tools

pytestmark = [pytest.mark.box, pytest.mark.long(seconds=1500), pytest.mark.timeout(10_000)]

NETWORK_REPORT = "sluice-network.txt"
WRONG = b"""\
[gateway]
id = "silo"
[kafka]
bootstrap = 5
tls = false
"""
"""Answers with a mistake in line 4."""
SLOW_CPU_S = 1500.0
"""CPU seconds of the emulator within which four emulated processors have started a box, and a root is written."""


@pytest.fixture(scope="module")
def image() -> Path:
    skip_without_tools()
    found = sorted(BUILT.glob("*.img"))
    if not found:
        pytest.skip("no image was built: run `make test-image`")
    return found[-1]


@pytest.fixture(scope="module")
def story(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return flash(tmp_path_factory.mktemp("card"), image)


@pytest.fixture(scope="module")
def good(story: Story) -> Path:
    """A newer version, as good as the one on the card."""
    return story.bundle("92.0.0")


@pytest.fixture(scope="module")
def box(story: Story, good: Path) -> Iterator[Guest]:  # noqa: ARG001 - made while the card has no power
    """The box after the power cut. It is switched off by the last test that uses it."""
    stick = story.stick(story.bundle("91.0.0", make_deaf))
    with story.start(story.image, stick) as box:
        yield box


def test_a_raspberry_pi_3_starts_without_a_network_and_says_what_is_wrong_with_its_answers(
    image: Path, tmp_path: Path
) -> None:
    """The addresses at which U-Boot loads, and the drivers of its card, are others than those of `virt`."""
    card_file = tmp_path / "card.img"
    subprocess.run(["cp", "--sparse=always", image, card_file], check=True)
    os.truncate(card_file, 2 << 30)
    put(card_file, ANSWERS_NAME, WRONG)

    def told(name: str, words: bytes) -> bool:
        return words in (boot_file(card_file, name) or b"")

    with raspberry_pi_3(card_file, tmp_path) as box:
        box.wait_for("Machine model: Raspberry Pi 3 Model B")
        box.wait_for(r"systemd\[1\]: Hostname set to <sluice>")
        box.wait(lambda: told(REPORT_NAME, b"sluice.toml, line 4"), "the mistake in its report", SLOW_CPU_S)
        box.wait(lambda: told(NETWORK_REPORT, b"Name of this box: sluice"), "the network's report", SLOW_CPU_S)
    assert boot_file(card_file, ANSWERS_NAME) == WRONG


def test_the_same_inputs_make_the_same_bytes(image: Path, tmp_path: Path) -> None:
    build_image.main(["--raw", "--version", VERSION, "--output", str(tmp_path)])
    subprocess.run(["cmp", image, tmp_path / image.name], check=True)


def test_the_first_start_takes_in_dialog_and_answers_until_the_power_is_cut(story: Story) -> None:
    with powered(story.image, SEED) as power, story.start(power.drive) as box:
        box.wait(lambda: story.publish(box), "the first acknowledged reading")
        box.wait(lambda: NAME in story.try_call(box, "hostname"), "the user's log-in and the box's name")
        assert story.call(box, "findmnt", "--noheadings", "--output", "OPTIONS", "/").startswith("ro")
        size = int(story.call(box, "df", "--output=size", "--block-size=1M", "/data").split()[-1])
        assert size > (CARD_MB - 1_500) * 0.85
        assert story.call(box, "readlink", "/etc/localtime").strip().endswith("America/Sao_Paulo")
        box.wait(lambda: "user-data" not in story.call(box, "ls", "/boot/firmware"), "the dialog's files are wiped")
        chance = random.Random(SEED)  # noqa: S311 - drawn again by its seed
        for _ in range(chance.randrange(5, 30)):
            story.publish(box)
        power.cut()
        box.kill()
    assert len(story.acknowledged) > 1
    assert boot_file(story.image, REPORT_NAME) is not None
    assert boot_file(story.image, DONE_NAME) is not None
    assert boot_file(story.image, build_image.EXAMPLE_NAME) == EXAMPLE.encode()


def test_no_secret_is_left_on_the_boot_partition(story: Story) -> None:
    assert SECRET.encode() not in story.partition(1).read_bytes()


def test_after_the_cut_it_starts_again(story: Story, box: Guest) -> None:
    box.wait(lambda: story.publish(box), "a reading after the cut")
    failed = story.call(box, "systemctl", "list-units", "--failed", "--no-legend", "--plain")
    assert failed == ""


def test_a_version_on_a_stick_that_takes_no_reading_goes_away_by_itself_and_is_not_brought_again(
    story: Story, box: Guest
) -> None:
    for _ in range(20):
        box.wait(lambda: story.publish(box), "readings before the update")
    box.plug_in()
    story.send_until(box, r"sluice: starting b; good a, on trial b with 2 tries left", SLOW_CPU_S)
    story.send_until(box, r"sluice: starting a; good a, on trial none", SLOW_CPU_S)
    box.wait(lambda: story.publish(box), "a reading of the version before")
    looked_at = ("systemctl", "show", "--property=SubState", "--value", "sluice-stick@sda.service")
    box.wait(
        lambda: story.try_call(box, *looked_at).strip() == "exited", "the stick, which is still there, is looked at"
    )
    told = story.call(box, "sluice", "status")
    assert "91.0.0 was given up" in told
    assert "no reading came in" in told


def test_a_good_version_of_a_web_server_is_found_good(story: Story, box: Guest, good: Path) -> None:
    with https_site(story.authority.sign("server", f"IP:{HOST}")) as site:
        site.files["/latest.raucb"] = good.read_bytes()
        site.cuts = [good.stat().st_size // 3]
        trust = f"SSL_CERT_FILE=/boot/firmware/{AUTHORITY}"
        address = site.address("/latest.raucb", HOST)
        # The restart ends the connection.
        ended = box.ssh(story.key, USER, "sudo", "env", trust, "sluice", "update", address)
    assert "This box restarts now to try it" in ended.stdout, ended.stdout + ended.stderr
    assert len(site.asked) == 2
    box.wait_for(r"sluice: starting b; good a, on trial b with 2 tries left", SLOW_CPU_S)
    box.wait(lambda: story.publish(box), "a reading of the new version")
    box.wait(lambda: "92.0.0 was found good" in story.try_call(box, "sluice", "status"), "found good", SLOW_CPU_S)
    story.switch_off(box)


def test_every_acknowledged_reading_is_there_once(story: Story) -> None:
    assert sorted(story.waiting()) == story.acknowledged
