"""U-Boot on an emulated board, with cards whose kernels say which one was started, and then start the board anew."""

import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest

from image import card
from tests.support.waiting import patience

U_BOOT = Path("/usr/lib/u-boot/qemu_arm64/u-boot.bin")
SCRIPT = Path(card.__file__).with_name("boot.cmd")
IMAGER = "console=ttyAMA0 cfg80211.ieee80211_regdom=DE ds=nocloud;i=rpi-imager-1786000000001\r\n"
"""A cmdline.txt to which Raspberry Pi Imager has added a country and a number, with an end of line as of Windows."""
NEEDED = {
    "qemu-system-aarch64": "qemu-system-arm",
    "mkimage": "u-boot-tools",
    "mcopy": "mtools",
    "mkfs.vfat": "dosfstools",
    "mke2fs": "e2fsprogs",
}
ROOT_MB, BOOT_MB, DATA_MB = 4, 36, 1
_SYSTEM_OFF, _SYSTEM_RESET = 0x84000008, 0x84000009
"""Functions of PSCI (Arm DEN 0022, 5.1)."""

_STARTED = r"Starting kernel \.\.\.\s+([a-z])"


def skip_without_tools() -> None:
    for program, package in NEEDED.items():
        if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            pytest.skip(f"there is no `{program}`: install Debian's package {package}")
    if not U_BOOT.exists():
        pytest.skip(f"there is no {U_BOOT}: install Debian's package u-boot-qemu")


def kernel(letter: str, *, then_off: bool = False) -> bytes:
    """An arm64 kernel of eight instructions: it writes a letter to the UART, and starts the board anew."""
    call = _SYSTEM_OFF if then_off else _SYSTEM_RESET
    code = (
        0xD2A12001,  # movz x1, #0x900, lsl #16: the UART of qemu's virt at 0x9000000
        0x52800000 | ord(letter) << 5,  # movz w0, #letter
        0xB9000020,  # str w0, [x1]
        0x52800000 | (call & 0xFFFF) << 5,  # movz w0, #low
        0x72A00000 | (call >> 16) << 5,  # movk w0, #high, lsl #16
        0xD4000002,  # hvc #0
        0x14000000,  # b .
    )
    # Kernel's Documentation/arch/arm64/booting.rst: a branch over the header, sizes, magic.
    header = struct.pack("<IIQQQ24x4s4x", 0x14000010, 0, 0, 4096, 0xA, b"ARM\x64")
    return (header + struct.pack(f"<{len(code)}I", *code)).ljust(4096, b"\0")


def make_root(path: Path, files: Mapping[str, bytes]) -> Path:
    """A root with these files in /boot."""
    tree = path.with_suffix(".tree")
    (tree / "boot").mkdir(parents=True)
    for name, content in files.items():
        (tree / "boot" / name).write_bytes(content)
    card.make_ext4(path, ROOT_MB, tree, "-O", "^has_journal")
    return path


def make_card(path: Path, roots: Sequence[Path], files: Mapping[str, bytes]) -> Path:
    """A card with the slot script, these two roots, and these files in the boot partition."""
    boot = path.with_suffix(".boot")
    boot.mkdir()
    card.make_script(boot / "boot.scr", SCRIPT)
    for name, content in {"cmdline.txt": IMAGER.encode(), **files}.items():
        (boot / name).write_bytes(content)
    fat = path.with_suffix(".fat")
    card.make_fat(fat, BOOT_MB, boot)
    partitions = [card.Partition(card.FAT32, BOOT_MB, fat)]
    partitions += [card.Partition(card.LINUX, ROOT_MB, root) for root in roots]
    card.make_card(path, [*partitions, card.Partition(card.LINUX, DATA_MB, None)])
    return path


def boot_file(path: Path, name: str) -> bytes | None:
    """A file of a card's boot partition; None if it is not there."""
    place = f"{path}@@{card.FIRST_SECTOR * card.SECTOR}"
    ended = subprocess.run(["mcopy", "-i", place, f"::{name}", "-"], capture_output=True, check=False)
    return None if ended.returncode else ended.stdout


class Board:
    """A board with some cards in it. Each start uses one of them."""

    def __init__(self, console: "pexpect.spawn[Any]") -> None:
        self._console = console

    def start_by_itself(self) -> str:
        """Let U-Boot find the first card's script. Returns the letter of the kernel."""
        self._expect(_STARTED)
        return str(self._console.match[1].decode())

    def start(self, number: int) -> tuple[str, str]:
        """Start from a card. Returns the kernel's letter and its command line; both empty if there is no kernel."""
        self._expect("Hit any key to stop autoboot")
        self._console.send("\r")
        self._say(f"virtio scan; setenv devtype virtio; setenv devnum {number:x}; setenv distro_bootpart 1")
        self._say("load virtio ${devnum}:1 ${scriptaddr} boot.scr; source ${scriptaddr}")
        if self._expect(r"resetting \.\.\.", _STARTED) == 0:
            return "", ""
        line = self._console.before.decode().rpartition("; root=")[2].partition("\r")[0]
        return self._console.match[1].decode(), line

    def wait_until_off(self) -> None:
        self._expect(pexpect.EOF)

    def _say(self, line: str) -> None:
        self._expect("=> ")
        self._console.sendline(line)

    def _expect(self, *patterns: Any) -> int:
        return int(self._console.expect(list(patterns), timeout=patience(20)))


@contextmanager
def board(cards: Sequence[Path], read_only: Sequence[Path] = ()) -> Iterator[Board]:
    """A board for the length of a `with`."""
    command = ["qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a53", "-m", "256", "-nographic", "-net", "none"]
    command += ["-monitor", "none", "-bios", str(U_BOOT)]
    for number, path in enumerate(cards):
        locked = "on" if path in read_only else "off"
        command += ["-drive", f"if=none,file={path},format=raw,id=card{number},readonly={locked}"]
        command += ["-device", f"virtio-blk-pci,drive=card{number},romfile="]
    console: pexpect.spawn[Any] = pexpect.spawn(command[0], command[1:], encoding=None)
    try:
        yield Board(console)
    finally:
        console.close(force=True)
