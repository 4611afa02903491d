"""A stick with updates: the newest right one is installed, once; a wrong one is told while the stick is there."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.commands.update import image_update, stick_update, trial
from gateway.commands.update.image_update import Bundle
from gateway.commands.update.programs import UpdateError
from gateway.host import boot_slots, last_update, our_image, usb_sticks
from gateway.host.boot_slots import SlotState
from gateway.host.last_update import Before, LastUpdate
from gateway.host.our_image import COMPATIBLE
from gateway.host.usb_sticks import MediumError
from tests.support.rauc_site import CONTENT, RaucSite

ALL = Before(service=True, readings=True, kafka=True)


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_update, "FILE", tmp_path / "last.json")
    monkeypatch.setattr(last_update, "REFUSED", tmp_path / "refused.json")


# -- which file is chosen -----------------------------------------------------------------------------


def stick_with(folder: Path, patched: pytest.MonkeyPatch, **files: Bundle | None) -> list[Path]:
    """A stick whose files are these bundles; RAUC does not trust those that are None."""

    def read(file: Path) -> Bundle:
        found = files[file.stem]
        if found is None:
            raise UpdateError("RAUC does not trust it.\nIt says: no")
        return found

    patched.setattr(stick_update, "read_bundle", read)
    for name in files:
        (folder / f"{name}.raucb").touch()
    return stick_update.bundles(folder)


def ours(version: str) -> Bundle:
    return Bundle(COMPATIBLE, version)


@given(
    versions=st.lists(st.integers(1, 12), max_size=4),
    strangers=st.integers(0, 2),
    installed=st.integers(3, 9),
    former=st.tuples(st.integers(0, 12), st.booleans()),
)
def test_the_newest_that_is_newer_and_was_not_given_up_is_chosen(
    tmp_path_factory: pytest.TempPathFactory,
    versions: list[int],
    strangers: int,
    installed: int,
    former: tuple[int, bool],
) -> None:
    """By versions of which dpkg knows that 1.10 is newer than 1.9. One was given up, in the last update or before."""
    given_up, was_last = former
    with pytest.MonkeyPatch.context() as patched:
        folder = tmp_path_factory.mktemp("stick")
        files: dict[str, Bundle | None] = {f"v{place}": ours(f"1.{number}") for place, number in enumerate(versions)}
        files |= dict.fromkeys([f"broken{number}" for number in range(strangers)])
        patched.setattr(last_update, "FILE", folder / "last.json")
        new = f"1.{given_up}" if was_last else "1.99"
        last_update.write(LastUpdate("1", "1.0", new, "b", ALL, "went-back", "why", given_up=f"1.{given_up}"))
        found = stick_update.choose(stick_with(folder, patched, **files), f"1.{installed}")
        right = [number for number in versions if number > installed and number != given_up]
        assert (found.file is not None) == bool(right)
        if right:
            assert (found.version, found.trouble) == (f"1.{max(right)}", "")
            return
        newest = max(versions, default=None)
        told = found.trouble.split("; broken")
        assert len(told) + (found.trouble.startswith("broken")) - 1 == strangers
        if newest is None or newest == installed:
            assert "version" not in found.trouble
        elif newest == given_up:
            assert ("was given up before" in found.trouble) == (not was_last), "else the last update says it"
        else:
            assert f"version 1.{newest} is older than the installed 1.{installed}" in found.trouble


def test_what_is_wrong_with_a_file_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = stick_with(tmp_path, monkeypatch, toaster=Bundle("toaster", "9"), torn=None)
    assert stick_update.choose(files, "1.0").trouble.split("; ") == [
        "toaster.raucb: it is for toaster, and this box is sluice-arm64",
        "torn.raucb: RAUC does not trust it. It says: no",
    ]
    monkeypatch.setattr(stick_update, "read_bundle", lambda _: ours("0.9"))
    odd = stick_update.choose([tmp_path / "\x1b[2J\udc80.raucb"], "1.0")
    assert odd.trouble == "\\x1b[2J\\x80.raucb: version 0.9 is older than the installed 1.0"


def test_only_plain_files_with_the_ending_are_looked_at(tmp_path: Path) -> None:
    for name in ("b.RAUCB", "a.raucb", "._a.raucb", "a.raucb.sig", "sluice.toml"):
        (tmp_path / name).touch()
    (tmp_path / "folder.raucb").mkdir()
    (tmp_path / "link.raucb").symlink_to("/etc/hostname")
    assert [path.name for path in stick_update.bundles(tmp_path)] == ["a.raucb", "b.RAUCB"]
    for number in range(30):
        (tmp_path / f"c{number}.raucb").touch()
    assert len(stick_update.bundles(tmp_path)) == stick_update.FILES_MAX


# -- what is done -------------------------------------------------------------------------------------


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box that has run for long."""
    monkeypatch.setattr(stick_update, "SETTLED_S", 0.0)
    monkeypatch.setattr(image_update, "how_it_is", Before)


@contextmanager
def plugged_in(folder: Path, patched: pytest.MonkeyPatch, *files: Path) -> Iterator[str]:
    """A stick with these files: its name in /dev."""
    tree, image = folder / "tree", folder / "stick"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    for file in files:
        shutil.copy(file, tree)
    image.unlink(missing_ok=True)
    path = f"/usr/sbin:/sbin:{os.environ['PATH']}"
    make: list[str | Path] = ["mke2fs", "-q", "-t", "ext4", "-d", tree, image, "8M"]
    subprocess.run(make, env={"PATH": path}, check=True, capture_output=True)
    attach: list[str | Path] = ["losetup", "--find", "--show", image]
    device = subprocess.run(attach, env={"PATH": path}, check=True, capture_output=True, text=True).stdout.strip()
    try:
        patched.setattr(usb_sticks, "sticks", lambda: [device.removeprefix("/dev/")])
        yield device.removeprefix("/dev/")
    finally:
        subprocess.run(["losetup", "--detach", device], env={"PATH": path}, check=True)


def last() -> LastUpdate:
    found = last_update.read()
    assert found is not None
    return found


def refused() -> LastUpdate:
    found = last_update.read_refused()
    assert found is not None
    return found


@pytest.mark.usefixtures("settled")
def test_the_update_on_a_stick_is_installed_once(
    site: RaucSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [site.bundle("1.1.0"), site.bundle("1.10.0"), site.bundle("2.0.0", signer="another")]
    with plugged_in(tmp_path, monkeypatch, *files) as name:
        stick_update.main(name)
        assert (last().new, last().result) == ("1.10.0", "on-trial")
        assert site.state.trial == "b"
        assert (site.folder / "slot-b").read_bytes()[: len(CONTENT)] == CONTENT
        rebooted = site.folder / "rebooted"
        rebooted.unlink()
        record = last()
        stick_update.main(name)
        assert (last(), last_update.read_refused()) == (record, None), (
            "another partition of the stick, before the box restarts"
        )
        # The box runs it, and found it good.
        boot_slots.write(site.folder / "boot", SlotState(good="a"))
        last_update.write(replace(record, result="good"))
        monkeypatch.setattr(our_image, "read", lambda: our_image.OurImage("1.10.0", "a", {}))
        stick_update.main(name)
        assert not rebooted.exists()
        # The file that nobody trusts is still there, and nothing hides it any more.
        assert (refused().result, refused().new) == ("refused", "")
        assert refused().reason.startswith("2.0.0-sluice-arm64-another.raucb: RAUC does not trust it")


@pytest.mark.usefixtures("settled")
def test_a_version_that_was_given_up_is_not_brought_again(
    site: RaucSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plugged_in(tmp_path, monkeypatch, site.bundle("1.1.0")) as name:
        stick_update.main(name)
        (site.folder / "rebooted").unlink()
        monkeypatch.setattr(boot_slots, "running_slot", lambda: "a")
        boot_slots.write(site.folder / "boot", replace(site.state, tries=0))
        trial.main()
        assert (last().result, last().given_up) == ("went-back", "1.1.0")
        stick_update.main(name)
        assert not (site.folder / "rebooted").exists()
        assert last_update.read_refused() is None, "the last update says it, and why"


@pytest.mark.usefixtures("settled")
def test_a_writing_that_was_cut_off_is_begun_again_but_not_for_ever(
    site: RaucSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot_slots, "running_slot", lambda: "a")
    with plugged_in(tmp_path, monkeypatch, site.bundle("1.1.0")) as name:
        for cuts in range(1, trial.CUTS_MAX + 1):
            stick_update.main(name)
            assert (site.folder / "rebooted").exists()
            (site.folder / "rebooted").unlink()
            # The power went before RAUC put the slot on trial.
            boot_slots.write(site.folder / "boot", SlotState())
            trial.main()
            assert (last().result, last().cuts) == ("went-back", cuts)
            assert "not written to its end" in last().reason
        stick_update.main(name)
        assert not (site.folder / "rebooted").exists()


@pytest.mark.usefixtures("settled")
def test_a_stick_that_is_wrong_is_told_and_nothing_changes(
    site: RaucSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plugged_in(tmp_path, monkeypatch, site.bundle("1.1.0", compatible="toaster")) as name:
        stick_update.main(name)
        first = refused()
        assert (first.result, first.old, first.reason) == (
            "refused",
            "1.0.0",
            "1.1.0-toaster-ours.raucb: it is for toaster, and this box is sluice-arm64",
        )
        stick_update.main(name)
        assert refused() == first, "its event comes once"
    assert (site.state, last_update.read()) == (SlotState(), None)
    assert not (site.folder / "rebooted").exists()
    assert json.loads(last_update.REFUSED.read_bytes())["reason"] == first.reason


@pytest.mark.usefixtures("settled")
def test_what_rauc_does_not_install_is_told(site: RaucSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UpdateError("RAUC did not install it; this version goes on. It says:\n  no space")

    monkeypatch.setattr(stick_update, "update_image", fail)
    with plugged_in(tmp_path, monkeypatch, site.bundle("1.1.0")) as name:
        stick_update.main(name)
    assert (refused().result, refused().new) == ("refused", "1.1.0")
    assert refused().reason.endswith("this version goes on. It says: no space")


def test_a_medium_that_is_no_stick_or_has_no_bundle_is_left_alone(
    site: RaucSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with plugged_in(tmp_path, monkeypatch) as name:
        stick_update.main(name)
        monkeypatch.setattr(usb_sticks, "sticks", list)
        monkeypatch.setattr(usb_sticks, "mounted", None)
        stick_update.main(name)
    assert (last_update.read(), last_update.read_refused()) == (None, None)

    def fail(_: str) -> NoReturn:
        raise MediumError("no file system vfat, exfat, ext4 is seen on /dev/sdz1")

    monkeypatch.setattr(usb_sticks, "sticks", lambda: ["sdz1"])
    monkeypatch.setattr(usb_sticks, "mounted", fail)
    stick_update.main("sdz1")
    assert "no file system" in capsys.readouterr().err
    assert site.state == SlotState()


def test_a_box_that_has_just_started_is_given_time_until_sensors_and_kafka_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 40.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def how_it_is(well_s: float) -> Before:
        return ALL if now_s > well_s else replace(ALL, kafka=False)

    monkeypatch.setattr(stick_update.time, "monotonic", lambda: now_s)  # type: ignore[attr-defined]
    monkeypatch.setattr(stick_update.time, "sleep", sleep)  # type: ignore[attr-defined]
    for well_s, expected_s in ((90.0, 95.0), (9_000.0, stick_update.SETTLED_S)):
        now_s = 40.0
        monkeypatch.setattr(stick_update, "how_it_is", partial(how_it_is, well_s))
        stick_update._wait_until_settled()
        assert now_s == expected_s
    stick_update._wait_until_settled()
    assert now_s == stick_update.SETTLED_S, "one that has run for long installs it at once"
