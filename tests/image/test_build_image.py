"""`make image`, as far as it can be tried without Debian's packages."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from gateway.host import our_image
from image import base_tree, build_image, card, root_tree
from systemd import build_deb
from systemd.deb_python import ROOT

IMAGE = Path(card.__file__).parent


def test_without_root_it_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="run it as root"):
        build_image.main([])


def test_where_no_emulation_can_be_had_it_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_tree, "BINFMT", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="qemu-user-static, and a kernel with binfmt_misc"):
        base_tree.need_emulation()


def test_what_runs_under_emulation_is_the_packages_test_and_nothing_that_is_done_natively() -> None:
    script = root_tree.for_emulation((build_deb.HERE / "debian/postinst").read_text())
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert "/usr/lib/sluice/self-test" in script
    assert "systemd-sysusers" in script
    assert "compileall" not in script
    assert "deb-systemd-helper" not in script
    # That script would switch its units on.
    assert {"sluice", "sluice-provision"} <= set(root_tree.UNITS_ON)
    # The test loads all of the gateway, and with it much of Python's own library.
    assert f"usr/lib/python{root_tree.TARGET.python}" in base_tree.PYTHON_FOLDERS


def test_the_firmware_of_a_raspberry_pi_starts_a_u_boot_that_is_on_the_card() -> None:
    named = re.findall(r"(?m)^kernel=(.+)$", (IMAGE / "boot/config.txt").read_text())
    assert set(named) == set(build_image.U_BOOTS.values())
    # The firmware reads the first line alone, and Raspberry Pi Imager adds words to it.
    assert len((IMAGE / "boot/cmdline.txt").read_text().splitlines()) == 1


def test_a_key_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    keys = build_image.own_keys(tmp_path / "signing")
    assert keys.key.stat().st_mode & 0o77 == 0
    before = keys.key.read_bytes()
    assert build_image.own_keys(tmp_path / "signing") == keys
    assert keys.key.read_bytes() == before


def test_rauc_trusts_the_key_that_is_there_and_knows_the_partitions_of_the_card() -> None:
    told = (IMAGE / "root/etc/rauc/system.conf").read_text()
    assert f"path=/{root_tree.TRUSTED}" in told
    assert f"compatible={our_image.COMPATIBLE}" in told
    assert f"bootloader-custom-backend=/{build_deb.LIBRARY}/rauc-slots" in told
    assert re.findall(r"by-partuuid/(\S+)", told) == [f"{card.DISK_SIGNATURE:08x}-{part:02}" for part in (2, 3)]


def test_folders_that_are_state_are_those_that_the_gateway_writes() -> None:
    kept = (IMAGE / "root/usr/lib/sluice-image/state-folders").read_text().split()
    assert kept == sorted(kept)
    assert {"var/lib/sluice", "var/lib/sluice-update", "var/cache/sluice", "home", "var/log"} <= set(kept)
    assert not any(one.startswith(f"{other}/") for one in kept for other in kept), "one would hide the other"


def test_the_page_names_each_file_that_is_built() -> None:
    page = (ROOT / "docs/flashing.md").read_text()
    for name in (
        "img.xz",
        ".sha256",
        ".sig",
        ".cdx.json",
        ".raucb",
        "sluice.rpi-imager-manifest",
        "sluice-network.txt",
        build_image.EXAMPLE_NAME,
    ):
        assert name in page
