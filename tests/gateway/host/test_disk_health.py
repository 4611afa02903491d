"""The state of a disk from the kernel's files in /sys: cards, eMMCs, errors of the file system."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.check.disk import check_disk
from gateway.commands.check.finding import Finding
from gateway.host.disk_health import Disk, health_words, read_disk, troubles


@pytest.fixture
def device(tmp_path: Path) -> str:
    number = tmp_path.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


class System:
    """A folder that looks like /sys, with a partition on a disk, and a list of mounts."""

    def __init__(self, folder: Path, device: str, kind: str = "ext4", disk: str = "mmcblk0") -> None:
        self.sys, self.mounts = folder / "sys", folder / "mountinfo"
        self.block = self.sys / "devices/mmc0" / disk
        partition = self.block / f"{disk}p2"
        (self.block / "device").mkdir(parents=True)
        partition.mkdir()
        (partition / "partition").write_text("2\n")
        (self.sys / "dev/block").mkdir(parents=True)
        (self.sys / "dev/block" / device).symlink_to(partition)
        self.kind, self.partition = kind, partition.name
        self.mounts.write_text(
            f"22 1 0:21 / /proc rw - proc proc rw\n27 1 {device} / / rw,noatime - {kind} /dev/x rw\n"
        )

    def tell(self, files: Mapping[str, str]) -> "System":
        for name, text in files.items():
            path = self.block / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return self

    def errors(self, count: int) -> None:
        folder = self.sys / "fs" / self.kind / self.partition
        folder.mkdir(parents=True)
        (folder / "errors_count").write_text(f"{count}\n")
        (folder / "last_error_time").write_text("1790000000\n")


def judged(tmp_path: Path, system: System) -> list[Finding]:
    return list(check_disk(tmp_path / "buffer.db", system.sys, system.mounts))


EMMC = {"device/type": "MMC", "device/name": "DG4032"}


def test_an_emmc_tells_how_much_of_its_life_is_used(tmp_path: Path, device: str) -> None:
    system = System(tmp_path, device).tell({**EMMC, "device/life_time": "0x01 0x02", "device/pre_eol_info": "0x01"})
    disk = read_disk(tmp_path, system.sys, system.mounts)
    assert (disk.kind, disk.name, disk.life_used_tenths, disk.reserve) == ("ext4", "mmcblk0", 2, 1)
    (found,) = judged(tmp_path, system)
    assert (found.result, found.words) == (
        "pass",
        "mmcblk0 is an eMMC (DG4032), 10 to 20 % of its life used; ext4 without errors",
    )


@pytest.mark.parametrize(
    ("told", "result", "words"),
    [
        (("0x08 0x01", "0x01"), "pass", "70 to 80 % of its life used"),
        (("0x01 0x09", "0x01"), "warning", "80 % of its life is used; have another one ready"),
        (("0x0b 0x01", "0x01"), "fail", "has outlived what its maker promises: it may fail any day"),
        (("0x01 0x01", "0x02"), "warning", "80 % of the blocks that it keeps in reserve are used"),
        (("0x01 0x01", "0x03"), "fail", "90 % of the blocks that it keeps in reserve are used: it may fail any day"),
        (("", ""), "pass", "mmcblk0 is an eMMC (DG4032); ext4"),
        (("0x00 0x00", "0x00"), "pass", "mmcblk0 is an eMMC (DG4032); ext4"),
        (("garbage 0xzz", "zz"), "pass", "mmcblk0 is an eMMC (DG4032); ext4"),
    ],
)
def test_flash_that_is_worn(tmp_path: Path, device: str, told: tuple[str, str], result: str, words: str) -> None:
    files = {**EMMC, "device/life_time": told[0], "device/pre_eol_info": told[1]}
    (found,) = judged(tmp_path, System(tmp_path, device).tell(files))
    assert found.result == result
    assert words in found.words


def test_an_sd_card_does_not_tell(tmp_path: Path, device: str) -> None:
    system = System(tmp_path, device).tell({"device/type": "SD", "device/name": "SC32G"})
    (found,) = judged(tmp_path, system)
    assert found.words == "mmcblk0 is an SD card (SC32G), which does not tell its wear; ext4 without errors"
    system.tell({"ro": "1"})
    (found,) = judged(tmp_path, system)
    assert found.result == "fail"
    assert "an SD card (SC32G) that takes no writes: its switch, or its end of life" in found.words


def test_errors_of_the_file_system_are_told(tmp_path: Path, device: str) -> None:
    system = System(tmp_path, device, disk="sda").tell({"device/model": "Disk One", "device/state": "running"})
    system.errors(3)
    (found,) = judged(tmp_path, system)
    assert found.result == "fail"
    assert "ext4 on sda has met 3 errors since its last check, the last on 2026-09-21" in found.words
    system.tell({"device/state": "offline"})
    assert [each.result for each in judged(tmp_path, system)] == ["fail", "fail"]


@pytest.mark.parametrize(
    ("kind", "result", "words"),
    [
        ("nfs4", "fail", "SQLite's WAL does not work"),
        ("tmpfs", "warning", "is gone when this box restarts"),
        ("vfat", "warning", "without a journal"),
    ],
)
def test_a_file_system_that_will_not_do(tmp_path: Path, device: str, kind: str, result: str, words: str) -> None:
    system = System(tmp_path, device, kind)
    (system.sys / "dev/block" / device).unlink()
    (found,) = judged(tmp_path, system)
    assert found.result == result
    assert words in found.words


@pytest.mark.parametrize(("left", "result"), [(0, "fail"), (999, "warning"), (1_000, "pass")])
def test_files_that_have_no_room(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, left: int, result: str
) -> None:
    system = System(tmp_path, device).tell(EMMC)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=10_000, f_favail=left))
    (found,) = judged(tmp_path, system)
    assert found.result == result


def test_what_is_mapped_onto_a_partition_is_looked_through(tmp_path: Path, device: str) -> None:
    system = System(tmp_path, device).tell(EMMC)
    mapped = system.sys / "devices/virtual/block/dm-0"
    (mapped / "slaves").mkdir(parents=True)
    (mapped / "slaves" / system.partition).symlink_to(system.block / system.partition)
    (system.sys / "dev/block" / device).unlink()
    (system.sys / "dev/block" / device).symlink_to(mapped)
    assert read_disk(tmp_path, system.sys, system.mounts).name == "mmcblk0"


def test_a_disk_that_reports_nothing_has_no_words(tmp_path: Path) -> None:
    assert read_disk(tmp_path, tmp_path / "none", tmp_path / "none") == Disk("")
    assert list(check_disk(tmp_path / "buffer.db", tmp_path / "none", tmp_path / "none")) == []
    assert list(check_disk(tmp_path / "none/buffer.db")) == []


DISKS = st.builds(
    Disk,
    st.sampled_from(["", "ext4", "nfs", "tmpfs", "vfat"]),
    st.just("mmcblk0"),
    st.sampled_from(["an eMMC", "an SD card (X)", "a disk"]),
    st.none() | st.integers(0, 255),
    st.none() | st.integers(0, 255),
    st.none() | st.text(max_size=9),
    st.booleans(),
    st.integers(0, 5),
    st.none() | st.integers(0, 2**31),
)


@given(DISKS)
def test_whatever_a_disk_says_there_are_words_for_it(disk: Disk) -> None:
    assert health_words(disk).startswith("mmcblk0 is ")
    assert all(trouble.words for trouble in troubles(disk, Path("/x")))


def test_this_machine_can_be_looked_at() -> None:
    assert all(found.words for found in check_disk(Path.cwd() / "buffer.db"))
