"""`sluice update`: installs a newer version of this gateway from a file, once its signature has proved whose it is."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from msgspec import Struct

from gateway.commands.options import FINDING
from gateway.host.safe_files import why_others_could_change
from gateway.host.terminal import say
from gateway.host.terminal_text import escaped, hanging

PACKAGE = "sluice-gateway"
"""Debian's package `sluice` is something else."""
SERVICE = "sluice.service"
KEY_FOLDERS = (Path("/usr/share/sluice/release-keys"), Path("/etc/sluice/release-keys"))
"""Public keys, in PEM, of whose packages are taken: those that came with this version, and the site's own."""
CACHE = Path("/var/cache/sluice")
"""For root alone: what is verified here is what is installed, whoever can write where the file came from."""
PREVIOUS, INSTALLED = "previous.deb", "installed.deb"
"""Kept there with their signatures, so that there is a way back without a network."""
SIGNATURE_BYTES = 64
"""Ed25519 (RFC 8032)."""
PACKAGE_BYTES_MAX = 200_000_000
"""No version is a tenth of it; what is larger would fill the disk that readings are kept on."""
KEYS_MAX = 20
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


class UpdateError(Exception):
    """The package is not installed; the message says why, what that means and what to do."""


class Package(Struct, frozen=True):
    """What a package says of itself."""

    name: str
    version: str
    architecture: str
    debian: str
    """The release that it is for."""


class Box(Struct, frozen=True):
    """What this box can take."""

    architecture: str
    debian: str
    """Empty where it is no Debian, or none with a number."""
    installed: str
    """The version that is installed; empty where none is."""


@click.command(
    short_help="Install a newer version from a file, if its signature is good.",
    epilog="Example: sluice update sluice-gateway_1.1.0_arm64_deb12.deb",
)
@click.argument("package", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--signature",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Where its signature is, if not beside it as PACKAGE.sig.",
)
@click.option("--allow-downgrade", is_flag=True, help="Install it also where it is older than what is installed.")
def update(package: Path, signature: Path | None, allow_downgrade: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Install a version of this gateway from a .deb file, as root; nothing is fetched from a network.

    First its signature is verified, by the keys that came with the installed version or stand in
    /etc/sluice/release-keys; then whether it is for this box, and newer. The service is restarted by it; readings that
    wait, settings and credentials stay. The version before is kept in /var/cache/sluice.
    """
    try:
        _update(package, signature or package.with_name(f"{package.name}.sig"), allow_downgrade=allow_downgrade)
    except UpdateError as error:
        for number, line in enumerate(str(error).split("\n")):
            say(hanging(f"{'    ' if number else 'not installed: '}{escaped(line)}", 4, sys.stderr), err=True)
        sys.exit(FINDING)


def _update(package: Path, signature: Path, *, allow_downgrade: bool) -> None:
    if os.geteuid() != 0:
        raise UpdateError("a package is installed by root alone: run it again with sudo")
    with _private_copy(package, signature) as (copy, its_signature):
        verify(copy, its_signature, trusted_keys(KEY_FOLDERS))
        found = read_package(copy)
        box = this_box()
        if not is_newer(found, box, allow_downgrade=allow_downgrade):
            say(f"{PACKAGE} {found.version} is installed already: nothing was done")
            return
        was_active = _is_active()
        _install(copy)
        _keep(copy, its_signature)
    say(f"installed: {PACKAGE} {found.version}" + (f", before it {box.installed}" if box.installed else ""))
    if was_active and not _is_active():
        back = f"sudo sluice update --allow-downgrade {CACHE / PREVIOUS}" if (CACHE / PREVIOUS).exists() else ""
        raise UpdateError(
            "that is, the package is in place, and the service does not run with it; what waits is on disk. See "
            "journalctl -u sluice for the reason" + (f"; to go back: {back}" if back else "")
        )


def trusted_keys(folders: Sequence[Path], *, owner: int = 0) -> list[Path]:
    """The public keys of these folders. One that somebody else than `owner` can write or replace is none.

    Raises:
        UpdateError: there is none.
    """
    keys, passed_over = [], []
    for folder in folders:
        for path in sorted(folder.glob("*.pem"))[:KEYS_MAX]:
            try:
                why = why_others_could_change(path, owner)
            except OSError as error:
                why = error.strerror
            if why is None:
                keys.append(path)
            else:
                passed_over.append(f"{path}: {why}")
    if not keys:
        told = f" Not trusted: {'; '.join(passed_over)}." if passed_over else ""
        raise UpdateError(
            f"no key to verify it by is in {' or '.join(map(str, folders))}, with its folders owned by root and "
            f"writable by root alone, so nobody can tell who made it.{told} Install this version's package again, or "
            f"put the maker's public key into {folders[-1]}"
        )
    return keys


def verify(package: Path, signature: bytes, keys: Sequence[Path]) -> None:
    """Raise UpdateError unless one of the keys has signed exactly these bytes."""
    if len(signature) != SIGNATURE_BYTES:
        raise UpdateError(
            f"its signature has {len(signature)} bytes instead of {SIGNATURE_BYTES}: it is cut off, or no signature. "
            "Get package and signature anew"
        )
    with tempfile.NamedTemporaryFile() as file:
        file.write(signature)
        file.flush()
        for key in keys:
            command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(key)]
            ended = _call(*command, "-in", str(package), "-sigfile", file.name)
            if ended.returncode == 0:
                return
    raise UpdateError(
        "its signature is of none of the keys that this gateway trusts: the file was changed or cut off on its way, "
        "or somebody else made it. Get package and signature anew from where your gateway's came from; where another "
        f"maker is wanted, put the maker's public key into {KEY_FOLDERS[-1]} first"
    )


def read_package(path: Path) -> Package:
    """What a .deb says of itself. Raises UpdateError where it is none."""
    ended = _call("dpkg-deb", "--field", str(path), "Package", "Version", "Architecture", "Sluice-Debian")
    if ended.returncode != 0:
        raise UpdateError("it is no Debian package, or a damaged one; get it anew")
    fields = dict(line.split(": ", 1) for line in ended.stdout.splitlines() if ": " in line)
    return Package(*(fields.get(name, "") for name in ("Package", "Version", "Architecture", "Sluice-Debian")))


def this_box() -> Box:
    """This one. Raises UpdateError where it has no dpkg."""
    architecture = _call("dpkg", "--print-architecture").stdout.strip()
    if not architecture:
        raise UpdateError("this box has no dpkg: it was not installed from a package, and is not updated by one")
    installed = _call("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", PACKAGE).stdout.split()
    return Box(architecture, _debian(_os_release()), installed[-1] if len(installed) == 2 else "")


def _os_release() -> Mapping[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _debian(told: Mapping[str, str]) -> str:
    """The number of Debian's release; Raspberry Pi OS has the same."""
    return told.get("VERSION_ID", "") if told.get("ID") in {"debian", "raspbian"} else ""


def is_newer(package: Package, box: Box, *, allow_downgrade: bool) -> bool:
    """Whether the package is to be installed; False where it is already.

    Raises:
        UpdateError: it is not for this box, or older than what is installed.
    """
    if package.name != PACKAGE:
        raise UpdateError(f'it is the package "{package.name}", not {PACKAGE}: give the gateway\'s file')
    if package.architecture != box.architecture:
        raise UpdateError(
            f"it is for {package.architecture}, and this box is {box.architecture}: take the file whose name has "
            f"{box.architecture}"
        )
    if box.debian and package.debian != box.debian:
        raise UpdateError(
            f"it is for Debian {package.debian or '(none named)'}, and this box has Debian {box.debian}: take the file "
            f"whose name has deb{box.debian}"
        )
    if not box.installed:
        return True
    if _compare(package.version, "eq", box.installed):
        return False
    if _compare(package.version, "lt", box.installed) and not allow_downgrade:
        raise UpdateError(
            f"it is version {package.version}, older than {box.installed}, which is installed, and may have faults "
            "that are mended here. Where that is meant, add --allow-downgrade: what waits in the buffer stays"
        )
    return True


def _compare(one: str, relation: str, other: str) -> bool:
    return _call("dpkg", "--compare-versions", one, relation, other).returncode == 0


@contextmanager
def _private_copy(package: Path, signature: Path) -> Iterator[tuple[Path, bytes]]:
    """The package where nobody but root can change it any more, and its signature; gone afterwards."""
    try:
        CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        CACHE.chmod(0o700)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="update-") as folder:
            copy = Path(folder, f"{PACKAGE}.deb")
            with package.open("rb") as source, copy.open("wb") as target:
                size = os.fstat(source.fileno()).st_size
                if size > PACKAGE_BYTES_MAX:
                    raise UpdateError(f"it has {size / 1e6:,.0f} MB: no version of this gateway is that large")
                shutil.copyfileobj(source, target)
            yield copy, _read_signature(signature)
    except OSError as error:
        raise UpdateError(f"{error.filename}: {error.strerror}; is the disk full, or the stick pulled out?") from error


def _read_signature(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(SIGNATURE_BYTES + 1)
    except OSError as error:
        raise UpdateError(
            f"its signature cannot be read ({path}: {error.strerror}), so nobody can tell who made it. Put the .sig "
            "file that belongs to it beside it, or name it with --signature"
        ) from error


def _install(package: Path) -> None:
    """By apt, which refuses before anything is changed where something else is missing."""
    words = ["install", "--yes", "--quiet", "--no-install-recommends", "--allow-downgrades", str(package)]
    planned = _apt("--simulate", *words)
    others = [line.split()[1] for line in planned.splitlines() if line.startswith(("Inst ", "Remv "))]
    others = [name for name in others if name != PACKAGE]
    if others:
        raise UpdateError(
            "it needs other packages of Debian's, and nothing is fetched here: sudo apt install "
            f"{' '.join(others)}, then run it again"
        )
    # Unattended upgrades may be at work.
    _apt("-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120", *words)


def _apt(*words: str) -> str:
    """What apt-get prints. Raises UpdateError with it where it fails."""
    ended = _call("apt-get", *words, patience_s=None)
    if ended.returncode != 0:
        told = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()][-15:]
        raise UpdateError("\n".join(("apt did not install it; what ran before still runs. It says:", *told)))
    return ended.stdout


def _keep(package: Path, signature: bytes) -> None:
    """Keep what is installed now, and what was before: a way back without a network."""
    for suffix in ("", ".sig"):
        installed = CACHE / f"{INSTALLED}{suffix}"
        if installed.exists():
            installed.replace(CACHE / f"{PREVIOUS}{suffix}")
    package.replace(CACHE / INSTALLED)
    (CACHE / f"{INSTALLED}.sig").write_bytes(signature)


def _is_active() -> bool:
    return _call("systemctl", "is-active", "--quiet", SERVICE).returncode == 0


def _call(*command: str, patience_s: float | None = 60.0) -> subprocess.CompletedProcess[str]:
    """A program of Debian's, in words of its own; raises UpdateError where it is not there or does not end."""
    try:
        return subprocess.run(  # noqa: S603 - programs named here
            command,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=patience_s,
        )
    except FileNotFoundError:
        raise UpdateError(f"there is no `{command[0]}` on this box: sudo apt install {command[0]}") from None
    except subprocess.TimeoutExpired:
        raise UpdateError(f"`{command[0]}` did not end within {patience_s:.0f} s; is the disk sound?") from None
