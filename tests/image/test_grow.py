"""The data partition grows to the end of its card, whatever was grown before."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from image import card

GROW = Path(card.__file__).parent / "root/usr/lib/sluice-image/grow"
CONTENT = os.urandom(1_000_000)
DATA_MB = 8
CAP_SYS_RESOURCE = 1 << 24
"""linux/capability.h"""
NEEDED = {"sfdisk": "fdisk", "partx": "util-linux", "resize2fs": "e2fsprogs", "mkfs.vfat": "dosfstools"}


def skip_without_tools() -> None:
    for program, package in NEEDED.items():
        if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            pytest.skip(f"there is no `{program}`: install Debian's package {package}")
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("a card in a reader is a loop device with partitions: run as root, where there are such")


def skip_without_right_to_grow() -> None:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if not int(status["CapEff"], 16) & CAP_SYS_RESOURCE:
        pytest.skip("a file system in use is grown by CAP_SYS_RESOURCE alone, which this container's root has not")


def run(*command: str | Path) -> str:
    path = f"/usr/sbin:/sbin:{os.environ['PATH']}"
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def mounted(path: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """A card in a reader, with its data partition mounted: the reader's device, and the folder."""
    device = run("losetup", "--find", "--show", path)
    try:
        # Not by losetup: kernels differ in whether they look for partitions there.
        run("partx", "--add", device)
        folder.mkdir(exist_ok=True)
        run("mount", f"{device}p4", folder)
        try:
            yield device, folder
        finally:
            run("umount", folder)
    finally:
        run("partx", "--delete", device)
        run("losetup", "--detach", device)


def make_card(folder: Path) -> Path:
    """A card with a data partition of ours, and a first file there."""
    tree = folder / "tree"
    tree.mkdir()
    (tree / "reading").write_bytes(CONTENT)
    data, path = folder / "data.ext4", folder / "card"
    card.make_ext4(data, DATA_MB, tree, "-b", "4096")
    partitions = [card.Partition(card.FAT32, 1, None), *[card.Partition(card.LINUX, 1, None)] * 2]
    card.make_card(path, [*partitions, card.Partition(card.LINUX, DATA_MB, data)])
    return path


def grow(folder: Path) -> None:
    """Run what the unit runs. Where the file system may not be grown, the partition is grown all the same."""
    path = f"/usr/sbin:/sbin:{os.environ['PATH']}"
    ended = subprocess.run([GROW, folder], env={"PATH": path}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 or "Permission denied to resize" in ended.stderr, ended.stderr


def size_of(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize


def test_the_partition_grows_to_the_cards_end_while_it_is_used_and_then_stays(tmp_path: Path) -> None:
    skip_without_tools()
    path = make_card(tmp_path)
    before = path.read_bytes()
    os.truncate(path, 300 << 20)
    with mounted(path, tmp_path / "data") as (device, folder):
        grow(folder)
        table = run("sfdisk", "--dump", device)
        seen = int(Path("/sys/class/block", f"{Path(device).name}p4/size").read_text()) * card.SECTOR
        grow(folder)
        assert run("sfdisk", "--dump", device) == table
        assert (folder / "reading").read_bytes() == CONTENT
    assert 298 << 20 > seen > 290 << 20
    # The loader's partitions and the name of the disk are as before.
    after = path.read_bytes()
    assert (after[:494], after[510:512]) == (before[:494], before[510:512])


def test_the_file_system_grows_with_it(tmp_path: Path) -> None:
    skip_without_tools()
    skip_without_right_to_grow()
    path = make_card(tmp_path)
    os.truncate(path, 300 << 20)
    with mounted(path, tmp_path / "data") as (_, folder):
        grow(folder)
        assert size_of(folder) > 250 << 20
        (folder / "more").write_bytes(bytes(100 << 20))
    with mounted(path, tmp_path / "data") as (_, folder):
        assert (folder / "reading").read_bytes() == CONTENT


def test_a_cut_between_the_partition_and_its_file_system_is_made_up_for(tmp_path: Path) -> None:
    skip_without_tools()
    skip_without_right_to_grow()
    path = make_card(tmp_path)
    os.truncate(path, 100 << 20)
    run("sh", "-c", f"echo ', +' | sfdisk --quiet --partno 4 {path}")
    with mounted(path, tmp_path / "data") as (_, folder):
        assert size_of(folder) < 10 << 20
        grow(folder)
        assert size_of(folder) > 80 << 20


def test_a_card_that_is_full_already_stays_as_it_is(tmp_path: Path) -> None:
    skip_without_tools()
    path = make_card(tmp_path)
    before = path.read_bytes()[: card.FIRST_SECTOR * card.SECTOR]
    with mounted(path, tmp_path / "data") as (_, folder):
        grow(folder)
    assert path.read_bytes()[: card.FIRST_SECTOR * card.SECTOR] == before
