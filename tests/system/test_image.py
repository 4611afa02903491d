"""The card to flash, in a machine that starts from it: dialog, answers, readings, a power cut, an update, a bad update.

One story on one card, for each start takes minutes of emulation: the tests need the ones before them. `make test-image`
builds the image and runs them.
"""

import os
import random
import subprocess
from pathlib import Path

import pytest

from gateway.commands.setup.answers import EXAMPLE
from gateway.commands.setup.provision import DONE_NAME, REPORT_NAME
from image import build_image
from tests.support.forgetful_card import powered
from tests.support.image_guest import raspberry_pi_3
from tests.support.image_story import BUILT, CARD_MB, NAME, SECRET, VERSION, Story, flash
from tests.support.sizes import SEED
from tests.support.uboot_board import boot_file, skip_without_tools

pytestmark = [pytest.mark.box, pytest.mark.long(seconds=1500), pytest.mark.timeout(10_000)]


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


def test_it_starts_on_a_raspberry_pi_3_up_to_systemd(image: Path, tmp_path: Path) -> None:
    """The addresses at which U-Boot loads, and the drivers of its card, are others than those of `virt`."""
    card_file = tmp_path / "card.img"
    subprocess.run(["cp", "--sparse=always", image, card_file], check=True)
    os.truncate(card_file, 2 << 30)
    with raspberry_pi_3(card_file, tmp_path) as box:
        box.wait_for("Machine model: Raspberry Pi 3 Model B")
        box.wait_for(r"systemd\[1\]: Hostname set to <sluice>")


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


def test_after_the_cut_it_starts_again_and_every_acknowledged_reading_is_there_once(story: Story) -> None:
    with story.start(story.image) as box:
        box.wait(lambda: story.publish(box), "a reading after the cut")
        story.call(box, "true")
        failed = story.call(box, "systemctl", "list-units", "--failed", "--no-legend", "--plain")
        assert failed == ""
        story.switch_off(box)
    assert sorted(story.waiting()) == story.acknowledged


def test_a_good_update_is_found_good(story: Story) -> None:
    stick = story.bundle("90.0.0")
    with story.start(story.image, stick) as box:
        box.wait(lambda: story.publish(box), "a reading before the update")
        story.update(box)
        box.wait_for(r"sluice: starting b; good a, on trial b with 2 tries left", 1000)
        box.wait(lambda: story.publish(box), "a reading of the new version")
        box.wait(lambda: "found good" in story.try_call(box, "sluice", "status"), "found good", 1000)
        story.switch_off(box)
    assert sorted(story.waiting()) == story.acknowledged


def test_a_version_that_takes_no_reading_goes_away_by_itself_and_says_why(story: Story) -> None:
    stick = story.bundle("91.0.0", is_deaf=True)
    with story.start(story.image, stick) as box:
        for _ in range(20):
            box.wait(lambda: story.publish(box), "readings before the update")
        story.update(box)
        box.wait_for(r"sluice: starting a; good b, on trial a with 2 tries left", 1000)
        box.wait_for(r"sluice: starting b; good b, on trial none", 2000)
        box.wait(lambda: story.publish(box), "a reading of the version before")
        told = story.call(box, "sluice", "status")
        assert "91.0.0 was given up" in told
        assert "no reading came in" in told
        story.switch_off(box)
    assert sorted(story.waiting()) == story.acknowledged
