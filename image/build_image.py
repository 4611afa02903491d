"""`make image`: builds the card to flash, an update of it, and what belongs to them, into build/image.

A Debian 13 for arm64 with the gateway's package on it. What Debian's packages give is kept, so a change of our own code
needs no emulation but the package's own test. Needs root, for the owners of files.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.commands.setup.answers import EXAMPLE
from gateway.host.our_image import COMPATIBLE
from image import base_tree, card, native_tools, packages_inside, publish, quiet, root_tree
from image.native_tools import Tools
from image.root_tree import Inputs
from systemd import build_deb, deb_documents, deb_signing
from systemd.deb_python import ROOT, DependencyError

HERE = ROOT / "image"
OUTPUT = ROOT / "build" / "image"
BOOT_MB, ROOT_MB, DATA_MB = 128, 640, 64
ROOT_UUID = "5711ce00-0000-4000-8000-000000000001"
DATA_UUID = "5711ce00-0000-4000-8000-000000000002"
U_BOOTS = {"rpi_3": "u-boot-rpi3.bin", "rpi_4": "u-boot-rpi4.bin"}
"""Boards of Debian's U-Boot, and their files on the boot partition. `config.txt` names them too."""
FIRMWARE = ("bootcode.bin", "start.elf", "fixup.dat", "start4.elf", "fixup4.dat")
EXAMPLE_NAME = "sluice-example.toml"
DEVICE_TREES = ("bcm2711*.dtb", "bcm2837*.dtb")


@dataclass(frozen=True, slots=True)
class Keys:
    """A key and its certificate, which sign bundles."""

    key: Path
    certificate: Path


def own_keys(folder: Path) -> Keys:
    """Keys that sign bundles, made if there are none. RAUC takes X.509, so the package's Ed25519 key does not do."""
    keys = Keys(folder / "image.key", folder / "image.pem")
    if not keys.key.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-days", "36500", "-subj", "/CN=Sluice images", "-keyout", str(keys.key)]
        subprocess.run([*command, "-out", str(keys.certificate)], umask=0o077, check=True, capture_output=True)
    return keys


def build(scratch: Path, image: Path, inputs: Inputs, keys: Keys) -> str:
    """Build a card, and its update beside it, with the help of an empty folder. Returns the list of packages inside."""
    epoch_s, version = inputs.release.epoch_s, inputs.release.version
    root, boot, empty, boot_packages = (scratch / name for name in ("root", "boot", "empty", "packages"))
    for folder in (root, boot, empty, boot_packages):
        folder.mkdir()
    packages = root_tree.unpack_boot_packages(inputs.base, boot_packages)
    root_tree.make(root, inputs, boot_packages, image.parent / "deb")
    make_boot_folder(boot, boot_packages)
    sbom = packages_inside.sbom(root, packages, version, deb_documents.at(epoch_s))
    root_image, data_image = make_ext4(root, empty, inputs.tools, epoch_s)
    boot_image = scratch / "boot.fat"
    for path in [boot, *boot.rglob("*")]:
        os.utime(path, (epoch_s, epoch_s))
    card.make_fat(boot_image, BOOT_MB, boot)
    # The first update fills root B: a second copy would double what is fetched.
    partitions = [
        card.Partition(card.FAT32, BOOT_MB, boot_image),
        card.Partition(card.LINUX, ROOT_MB, root_image),
        card.Partition(card.LINUX, ROOT_MB, None),
        card.Partition(card.LINUX, DATA_MB, data_image),
    ]
    card.make_card(image, partitions)
    make_bundle(root_image, version, keys, image.with_suffix(".raucb"))
    return sbom


def make_boot_folder(folder: Path, boot_packages: Path) -> None:
    """Fill the boot partition: Raspberry Pi's firmware, U-Boot, the slot script, and an example of our own file."""
    firmware = boot_packages / "raspi-firmware/usr/lib/raspi-firmware"
    for name in FIRMWARE:
        shutil.copy(firmware / name, folder / name)
    shutil.copytree(firmware / "overlays", folder / "overlays")
    (trees,) = (root_tree.linux_of(boot_packages) / "usr/lib").glob("linux-image-*/broadcom")
    for pattern in DEVICE_TREES:
        for tree in trees.glob(pattern):
            shutil.copy(tree, folder / tree.name)
    for board, name in U_BOOTS.items():
        shutil.copy(boot_packages / "u-boot-rpi/usr/lib/u-boot" / board / "u-boot.bin", folder / name)
    card.make_script(folder / "boot.scr", HERE / "boot.cmd")
    for file in (HERE / "boot").iterdir():
        shutil.copy(file, folder / file.name)
    (folder / EXAMPLE_NAME).write_text(EXAMPLE)


def make_ext4(root: Path, data: Path, tools: Tools, epoch_s: int) -> tuple[Path, Path]:
    """Make the file systems of a root and of the data. The same tree gives the same bytes."""
    tars = [root.with_suffix(".tar"), data.with_suffix(".tar")]
    for tree, tar in zip((root, data), tars, strict=True):
        command = ["tar", "--create", f"--file={tar}", f"--directory={tree}", "--sort=name", "--numeric-owner"]
        command += ["--xattrs", f"--mtime=@{epoch_s}", "--format=posix", "--pax-option=delete=atime,delete=ctime", "."]
        subprocess.run(command, check=True)
    images = root.with_suffix(".ext4"), data.with_suffix(".ext4")
    tools.make_ext4(images[0], ROOT_MB, tars[0], ROOT_UUID, epoch_s, "-O", "^has_journal", "-m", "0")
    # As for the size that it will have: mke2fs takes smaller blocks for so small a partition.
    large = ("-b", "4096", "-i", "16384", "-J", "size=16")
    tools.make_ext4(images[1], DATA_MB, tars[1], DATA_UUID, epoch_s, "-m", "1", *large)
    return images


def make_bundle(root_image: Path, version: str, keys: Keys, target: Path, compatible: str = COMPATIBLE) -> None:
    """Make the update: a root in RAUC's signed form."""
    with tempfile.TemporaryDirectory(dir=root_image.parent) as scratch:
        os.link(root_image, Path(scratch, "root.img"))
        Path(scratch, "manifest.raucm").write_text(
            f"[update]\ncompatible={compatible}\nversion={version}\n\n[bundle]\nformat=verity\n\n[image.root]\n"
            "filename=root.img\n"
        )
        target.unlink(missing_ok=True)
        signed = [f"--cert={keys.certificate}", f"--key={keys.key}"]
        # A board unpacks it in a fraction of the time that zlib takes, while readings come in.
        packed = "--mksquashfs-args=-comp zstd -Xcompression-level 6"
        quiet.run(["rauc", *signed, "bundle", packed, scratch, target])


def main(arguments: Sequence[str] | None = None) -> None:
    """Build everything."""
    parser = argparse.ArgumentParser(prog="python -m image.build_image", description=__doc__)
    parser.add_argument("--version", help="instead of the one that follows from pyproject.toml and the commit")
    parser.add_argument("--signing-key", type=Path, help="an Ed25519 key in PEM, for the package and the image")
    parser.add_argument(
        "--url", help="address of the folder that the image will be fetched from, for Imager's manifest"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder that all of it is put into")
    parser.add_argument(
        "--raw", action="store_true", help="leave the image unpacked, with nothing beside it: for tests"
    )
    given = parser.parse_args(arguments)
    if os.geteuid() != 0:
        sys.exit("make image gives files their owners: run it as root")
    output: Path = given.output
    output.mkdir(parents=True, exist_ok=True)
    try:
        release = build_deb.prepare(given.version, given.signing_key)
        keys = own_keys(release.private_key.parent)
        base_tree.need_emulation()
        tools = native_tools.get(OUTPUT, base_tree.SUITE)
        base = base_tree.get(OUTPUT, tools)
        image = output / f"sluice-{release.version}-arm64.img"
        with tempfile.TemporaryDirectory(dir=output) as scratch:
            sbom = build(Path(scratch), image, Inputs(base, tools, release, keys.certificate), keys)
        if given.raw:
            print(image)
            return
        edition = publish.Edition(release.version, release.epoch_s, release.private_key, sbom, given.url)
        for path in (publish.publish(image, edition), image.with_suffix(".raucb")):
            print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    except (DependencyError, deb_signing.SigningError) as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed with exit code {error.returncode}: see what it says above")


if __name__ == "__main__":
    main()
