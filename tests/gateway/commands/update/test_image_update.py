"""`sluice update FILE.raucb`, with RAUC itself, slots in files, and the slots' state that its back end writes."""

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.commands.update import download, update_command
from gateway.host import boot_slots, last_update
from gateway.host.boot_slots import SlotState
from gateway.host.last_update import Before
from tests.support.certificates import make_authority
from tests.support.https_site import https_site
from tests.support.rauc_site import CONTENT, RaucSite


def update(file: Path | str, *options: str) -> Result:
    return CliRunner().invoke(main, ["update", str(file), *options])


def test_a_bundle_is_written_into_the_other_slot_which_is_then_on_trial(site: RaucSite) -> None:
    shown = update(site.bundle("1.1.0"))
    assert shown.exit_code == 0, shown.output
    assert "installed: version 1.1.0, before it 1.0.0" in shown.output
    assert (site.folder / "slot-b").read_bytes()[: len(CONTENT)] == CONTENT
    assert (site.folder / "slot-a").read_bytes() == bytes(200_000)
    assert (site.state.good, site.state.trial, site.state.tries) == ("a", "b", 3)
    found = last_update.read()
    assert found is not None
    assert (found.old, found.new, found.slot, found.result, found.before) == (
        "1.0.0",
        "1.1.0",
        "b",
        "on-trial",
        Before(),
    )
    assert (site.folder / "rebooted").exists()


def test_a_bundle_of_a_web_server_is_installed_and_not_kept(
    site: RaucSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_authority(tmp_path / "tls")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    monkeypatch.setattr(update_command, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(download, "PAUSES_S", (0.0,))
    with https_site(authority.sign("server")) as server:
        server.files["/latest.raucb"] = site.bundle("1.1.0").read_bytes()
        server.cuts = [40_000]
        boot_slots.write(site.folder / "boot", boot_slots.put_on_trial(SlotState(good="b"), "a"))
        assert "version 1.0.0 is on trial itself" in refused(site, server.address("/latest.raucb"))
        assert server.asked == [], "nothing is fetched in vain"
        boot_slots.write(site.folder / "boot", SlotState())
        shown = update(server.address("/latest.raucb"))
    assert shown.exit_code == 0, shown.output
    assert "installed: version 1.1.0, before it 1.0.0" in shown.output
    assert [asked for _, asked in server.asked] == ["", "bytes=39999-"]
    assert (site.folder / "slot-b").read_bytes()[: len(CONTENT)] == CONTENT
    assert list((tmp_path / "cache").iterdir()) == []


def refused(site: RaucSite, file: Path | str, *options: str) -> str:
    """The words that an update is refused with. Nothing may have changed, and nothing restarts."""
    before, record = site.state, last_update.read()
    shown = update(file, *options)
    assert shown.exit_code == 1, shown.output
    assert (site.state.good, site.state.trial) == (before.good, before.trial)
    assert last_update.read() == record
    assert (site.folder / "slot-b").read_bytes() == bytes(200_000)
    assert not (site.folder / "rebooted").exists()
    return " ".join(shown.output.split())


def test_a_bundle_that_is_not_ours_is_refused(site: RaucSite) -> None:
    assert "RAUC does not trust it" in refused(site, site.bundle("1.1.0", signer="another"))
    changed = site.bundle("1.1.0")
    content = bytearray(changed.read_bytes())
    content[5_000] ^= 1
    changed.write_bytes(content)
    assert "RAUC does not trust it" in refused(site, changed)
    changed.write_bytes(content[:50_000])
    assert "RAUC does not trust it" in refused(site, changed)


def test_a_bundle_for_another_board_is_refused_and_the_record_before_stays(site: RaucSite) -> None:
    told = refused(site, site.bundle("1.1.0", compatible="toaster"))
    assert "RAUC did not install it; this version goes on" in told
    assert "toaster" in told
    former = last_update.LastUpdate("0", "0.9", "1.0.0", "a", Before(), "good")
    last_update.write(former)
    refused(site, site.bundle("1.1.0", compatible="toaster"))
    assert last_update.read() == former


def test_an_older_bundle_and_the_same_one_are_not_installed(site: RaucSite) -> None:
    assert "add --allow-downgrade" in refused(site, site.bundle("0.9.0"))
    assert "nothing was done" in update(site.bundle("1.0.0")).output
    assert update(site.bundle("0.9.0"), "--allow-downgrade").exit_code == 0


def test_a_full_data_partition_is_told_and_nothing_is_written(site: RaucSite, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(last_update, "write", full)
    assert "cannot be written (No space left on device)" in refused(site, site.bundle("1.1.0"))


def test_a_version_on_trial_does_not_overwrite_its_way_back(site: RaucSite) -> None:
    boot_slots.write(site.folder / "boot", boot_slots.put_on_trial(SlotState(good="b"), "a"))
    assert "version 1.0.0 is on trial itself" in refused(site, site.bundle("1.1.0"))


def test_a_box_without_our_image_says_what_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    file = tmp_path / "sluice.raucb"
    file.touch()
    shown = update(file)
    assert shown.exit_code == 1
    assert "this one was not: take the .deb file" in " ".join(shown.output.split())
    assert update(file, "--signature", str(file)).exit_code == 2


def test_a_box_with_our_image_takes_no_package(site: RaucSite, tmp_path: Path) -> None:
    file = tmp_path / "sluice-gateway_1.1.0_arm64_deb13.deb"
    file.touch()
    assert "take the .raucb file of that version" in refused(site, file)
