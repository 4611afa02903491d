"""Makes the initramfs: busybox, the modules that our boards start by, and e2fsck."""

import lzma
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

INIT = Path(__file__).with_name("init")
MODULES = (
    *("virtio_pci", "virtio_mmio", "virtio_blk"),
    # The card reader of a Raspberry Pi 4 has no voltage without the first two.
    *("fixed", "gpio_regulator", "sdhci_iproc", "bcm2835", "mmc_block", "bcm2835_wdt"),
    *("ext4", "overlay", "vfat", "nls_ascii", "nls_cp437"),
)
"""Modules that must be there before the root is."""
PROGRAMS = ("usr/sbin/e2fsck",)


def make(root: Path, busybox: Path, kernel: str, target: Path, epoch_s: int) -> None:
    """Make the initramfs of a root for its kernel."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for name in ("bin", "sbin", "lib", "modules", "proc", "sys", "dev", "run", "root"):
            (tree / name).mkdir()
        shutil.copy(busybox / "usr/bin/busybox", tree / "bin/busybox")
        (tree / "bin/sh").symlink_to("busybox")
        shutil.copy(INIT, tree / "init")
        for program in PROGRAMS:
            shutil.copy(root / program, tree / "sbin")
            for library in _libraries(root, program):
                place = tree / library.lstrip("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy((root / library.lstrip("/")).resolve(), place)
        order = dict.fromkeys(path for module in MODULES for path in _needed(root, kernel, module))
        for path in order:
            content = path.read_bytes()
            (tree / "modules" / _name(path)).write_bytes(lzma.decompress(content) if path.suffix == ".xz" else content)
        (tree / "modules/order").write_text("".join(f"{_name(path)}\n" for path in order))
        for path in [tree, *tree.rglob("*")]:
            os.utime(path, (epoch_s, epoch_s), follow_symlinks=False)
        names = "".join(f"{path.relative_to(tree)}\n" for path in sorted(tree.rglob("*")))
        archive = subprocess.run(
            ["cpio", "--create", "--format=newc", "--quiet", "--reproducible", "--owner=0:0"],
            cwd=tree,
            input=names.encode(),
            capture_output=True,
            check=True,
        ).stdout
        packed = subprocess.run(["zstd", "-q", "-10", "-c"], input=archive, capture_output=True, check=True).stdout
        target.write_bytes(packed)


def _name(path: Path) -> str:
    return path.name.removesuffix(".xz")


def _needed(root: Path, kernel: str, module: str) -> Iterator[Path]:
    """A module and those that it needs, in the order in which they are loaded; none if it is built in."""
    command = ["modprobe", "-d", str(root), "-S", kernel, "--show-depends", module]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        kind, _, path = line.strip().partition(" ")
        if kind == "insmod":
            yield Path(path.split()[0])


def _libraries(root: Path, program: str) -> Iterator[str]:
    """Libraries of a program, as its own loader finds them."""
    shown = subprocess.run(["chroot", root, "ldd", f"/{program}"], capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        found = [word for word in line.split() if word.startswith("/")]
        if found:
            yield found[0]
