"""A box knows whether it runs our image."""

import os
from pathlib import Path

import pytest

from gateway.host import boot_slots, our_image

OURS = {"IMAGE_ID": "sluice", "IMAGE_VERSION": "1.2.0"}


def test_it_is_ours_by_its_name_and_by_the_slot_that_it_was_started_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_image, "os_release", lambda: OURS)
    monkeypatch.setattr(boot_slots, "running_slot", lambda: "b")
    found = our_image.read()
    assert found is not None
    assert (found.version, found.slot) == ("1.2.0", "b")
    monkeypatch.setattr(boot_slots, "running_slot", lambda: None)
    assert our_image.read() is None, "the files of our image, started by another loader"
    monkeypatch.setattr(boot_slots, "running_slot", lambda: "a")
    monkeypatch.setattr(our_image, "os_release", lambda: {"ID": "debian"})
    assert our_image.read() is None


def test_a_partition_is_as_full_as_it_is_for_who_is_not_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"boot partition": Path("/"), "data partition": tmp_path, "third": tmp_path / "none"}
    monkeypatch.setattr(our_image, "PARTITIONS", places)
    monkeypatch.setattr(our_image, "os_release", lambda: OURS)
    monkeypatch.setattr(boot_slots, "running_slot", lambda: "a")
    found = our_image.read()
    assert found is not None
    # What is no partition of its own is not told.
    assert set(found.full) == {"boot partition"}
    root = os.statvfs("/")
    assert found.full["boot partition"] == pytest.approx(1 - root.f_bavail / root.f_blocks, abs=0.01)
