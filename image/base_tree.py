"""Installs Debian's packages for arm64 into a tar file. It takes minutes of emulation, so it is kept for its inputs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from image import quiet
from image.native_tools import Tools

HERE = Path(__file__).parent
SUITE = "trixie"
BOOT_PACKAGES = ("linux-image-arm64", "raspi-firmware", "u-boot-rpi", "busybox-static")
"""Packages that are fetched and not installed: their scripts want a boot partition, or make an initramfs."""
BOOT_FOLDER = "boot-packages"
"""Folder of the tree with them, as .deb files."""
PYTHON_FOLDERS = ("usr/lib/python3", "usr/lib/python3.13")
"""Folders whose Python files are compiled once, with the packages that they belong to."""
BINFMT = Path("/proc/sys/fs/binfmt_misc")
_COMPONENTS = "main,non-free-firmware"


def get(output: Path, tools: Tools) -> Path:
    """Return the tar file. The tools compile its Python files."""
    inputs = [(HERE / name).read_bytes() for name in ("packages.txt", "install_packages.sh")]
    inputs.append(repr((SUITE, _COMPONENTS, BOOT_PACKAGES, PYTHON_FOLDERS)).encode())
    digest = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    made = output / f"debian-{digest}.tar"
    if made.exists():
        return made
    packages = [line for line in (HERE / "packages.txt").read_text().split("\n") if line and not line.startswith("#")]
    hook = f'{HERE}/install_packages.sh "$1" {" ".join(packages)} -- {" ".join(BOOT_PACKAGES)}'
    command = ["mmdebstrap", "--quiet", "--mode=root", "--arch=arm64", "--variant=essential", "--format=tar"]
    command += [f"--components={_COMPONENTS}"]
    command += ['--aptopt=APT::Install-Recommends "false"', "--skip=cleanup/apt", f"--essential-hook={hook}"]
    command.append(f"--customize-hook={tools.compiling(PYTHON_FOLDERS)}")
    command += [f"--dpkgopt=path-exclude=/usr/share/{unread}/*" for unread in ("man", "locale", "doc", "info")]
    command.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
    part = made.with_suffix(".part.tar")
    print("installing Debian's packages for arm64 by emulation: some ten minutes, this once", flush=True)
    # Without a mirror's name it takes Debian's own, with updates and security fixes.
    quiet.run([*command, SUITE, part])
    for old in output.glob("debian-*.tar"):
        if old != part:
            old.unlink()
    part.rename(made)
    return made


def need_emulation() -> None:
    """See that this kernel runs arm64 programs by qemu. Ends the program with a message if it does not."""
    if os.uname().machine == "aarch64":
        return
    known, register = Path("/usr/lib/binfmt.d/qemu-aarch64.conf"), BINFMT / "register"
    if not register.exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT], capture_output=True, check=False)
    # In a container nobody has done this at the start.
    if not (BINFMT / "qemu-aarch64").exists() and register.exists() and known.exists():
        register.write_bytes(known.read_bytes())
    if not (BINFMT / "qemu-aarch64").exists():
        sys.exit(
            "this machine does not run arm64 programs: make image needs qemu-user-static, and a kernel with binfmt_misc"
            " that this user may mount. Build on a machine of your own, or on arm64"
        )
