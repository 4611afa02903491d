"""`sluice update`: installs a newer version of this gateway from a file or an address, if its signature is trusted.

A .deb replaces the package. A .raucb is a whole root, for boxes with our image (`image_update`).
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from msgspec import Struct

from gateway.commands.certificate_dates import certificate_dates
from gateway.commands.options import FINDING
from gateway.commands.update import download
from gateway.commands.update.image_update import BUNDLE_SUFFIX, ready_image, refuse_packages, update_image
from gateway.commands.update.programs import UpdateError, call, is_newer_version, last_lines
from gateway.commands.update.trial import own_settings
from gateway.host.our_image import os_release
from gateway.host.safe_files import why_others_could_change, write_whole
from gateway.host.terminal import say
from gateway.host.terminal_text import counted, escaped, hanging
from gateway.settings import GatewaySettings, KafkaSettings, Settings

PACKAGE = "sluice-gateway"
"""Name of the gateway's package. Debian's own package `sluice` is another program."""
SERVICE = "sluice.service"
KEY_FOLDERS = (Path("/usr/share/sluice/release-keys"), Path("/etc/sluice/release-keys"))
"""Folders with trusted public keys, in PEM: those that came with this version, and the site's own."""
CACHE = Path("/var/cache/sluice")
"""Folder that only root can write, so that the verified file is the installed file, wherever it came from."""
PREVIOUS, INSTALLED = "previous.deb", "installed.deb"
"""Packages kept in CACHE with their signatures, as a way back without a network."""
SIGNATURE_BYTES = 64
"""Length of an Ed25519 signature (RFC 8032)."""
PACKAGE_BYTES_MAX = 200_000_000
"""Largest package that is copied. A larger file could fill the disk of the readings; versions have a tenth of it."""
BUNDLE_BYTES_MAX = 1_000_000_000
"""Largest bundle that is fetched. A root has less."""
KEYS_MAX = 20
FETCHED = "fetched"
"""Name in CACHE of a file that is fetched, without its ending."""
_DEFAULTS = Settings(GatewaySettings(id="none"), KafkaSettings(bootstrap=("none:9092",)))
"""Settings of a gateway that is not set up yet, as far as they matter here: its clock is the kernel's."""


class Package(Struct, frozen=True):
    """Name, version and target system in a package's own fields."""

    name: str
    version: str
    architecture: str
    debian: str
    """Release of Debian that the package is for."""


class Box(Struct, frozen=True):
    """System and installed version of this box."""

    architecture: str
    debian: str
    """Release of Debian; empty if this is no Debian, or one without a number."""
    installed: str
    """Installed version; empty if none is installed."""


class FileOrAddress(click.Path):
    """A file that exists, as a path, or an address in the network, as a text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        is_address = isinstance(value, str) and "://" in value
        return value if is_address else super().convert(value, param, ctx)


@click.command(
    short_help="Install a newer version from a signed file or from https.",
    epilog="Example: sluice update sluice-gateway_1.1.0_arm64_deb12.deb",
)
@click.argument("source", metavar="FILE|URL", type=FileOrAddress(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--signature",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The signature of a .deb file, if it is not beside it as FILE.sig.",
)
@click.option("--allow-downgrade", is_flag=True, help="Install the file even if it is older than this version.")
def update(source: Path | str, signature: Path | None, allow_downgrade: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Install a version of this gateway, as root, from a FILE, or from a URL that begins with https://.

    If the connection breaks for long, the same command goes on where it was. A .deb file's signature is fetched from
    beside it. Nothing else is fetched from a network.

    A .deb file must be signed by a key that came with the installed version or is in /etc/sluice/release-keys. It must
    be for this box, and newer. Installing it restarts the service. The previous version is kept in /var/cache/sluice.

    A .raucb file is for a box whose card was written from Sluice's image. It is written beside the running system, and
    the box restarts to try it. If it is not found good within 5 minutes, the box goes back by itself. Such a box takes
    no .deb file.

    Waiting readings, settings and credentials stay.
    """
    if os.geteuid() != 0:
        _refuse("only root may install a version: run this again with sudo")
    try:
        name = source.name if isinstance(source, Path) else download.path_of(source)
        if not name.endswith(BUNDLE_SUFFIX):
            refuse_packages()
            with _at_hand(source, signature) as (file, its_signature):
                _update(file, its_signature, allow_downgrade=allow_downgrade)
        elif signature is not None:
            raise click.UsageError(f"a {BUNDLE_SUFFIX} file has its signature inside: leave out --signature")
        elif isinstance(source, Path):
            update_image(source, allow_downgrade=allow_downgrade)
        else:
            ready_image()
            with _fetched(source, BUNDLE_SUFFIX, BUNDLE_BYTES_MAX) as file:
                update_image(file, allow_downgrade=allow_downgrade)
    except UpdateError as error:
        _refuse(str(error))


@contextmanager
def _at_hand(package: Path | str, signature: Path | None) -> Iterator[tuple[Path, Path]]:
    """A package and its signature as files; what was fetched is removed afterwards. Raises UpdateError."""
    if isinstance(package, Path):
        yield package, signature or package.with_name(f"{package.name}.sig")
    elif signature is not None:
        with _fetched(package, ".deb", PACKAGE_BYTES_MAX) as file:
            yield file, signature
    else:
        # The signature first: if there is none, the package is not fetched for nothing.
        address = download.beside(package, ".sig")
        with (
            _fetched(address, ".sig", PACKAGE_BYTES_MAX) as fetched,
            _fetched(package, ".deb", PACKAGE_BYTES_MAX) as file,
        ):
            yield file, fetched


@contextmanager
def _fetched(address: str, suffix: str, bytes_max: int) -> Iterator[Path]:
    """A file of the network; if it came whole, it is removed afterwards. Raises UpdateError."""
    file = CACHE / f"{FETCHED}{suffix}"
    _make_cache()
    say(f"fetching {address}")
    download.fetch(address, file, bytes_max, certificate_dates(own_settings() or _DEFAULTS))
    try:
        yield file
    finally:
        # Also if nobody trusts it: the next call must not go on from it.
        download.forget(file)


def _make_cache() -> None:
    try:
        CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        CACHE.chmod(0o700)
    except OSError as error:
        raise UpdateError(f"{CACHE} cannot be made: {error.strerror}; is the disk full?") from error


def _refuse(words: str) -> NoReturn:
    for number, line in enumerate(words.split("\n")):
        say(hanging(f"{'    ' if number else 'not installed: '}{escaped(line)}", 4, sys.stderr), err=True)
    sys.exit(FINDING)


def _update(package: Path, signature: Path, *, allow_downgrade: bool) -> None:
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
            "that is, the package is in place, but the service does not run with it; waiting readings are on disk. See "
            "journalctl -u sluice for the reason" + (f"; to go back: {back}" if back else "")
        )


def trusted_keys(folders: Sequence[Path], *, owner: int = 0) -> list[Path]:
    """Find the public keys in folders, without keys that somebody else than `owner` can write or replace.

    Raises:
        UpdateError: there is no such key.
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
            f"no key to verify it by: {' and '.join(map(str, folders))} have no public key that, with its folders, "
            f"belongs to root and can be changed by root alone.{told} Install this version's package again, or put the "
            f"maker's public key into {folders[-1]}"
        )
    return keys


def verify(package: Path, signature: bytes, keys: Sequence[Path]) -> None:
    """Raise UpdateError unless one of the keys has signed exactly these bytes."""
    if len(signature) != SIGNATURE_BYTES:
        raise UpdateError(
            f"its signature has {counted(len(signature), 'byte')} instead of {SIGNATURE_BYTES}: it is cut off, or no "
            "signature. Get the package and its signature again"
        )
    with tempfile.NamedTemporaryFile() as file:
        file.write(signature)
        file.flush()
        for key in keys:
            command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(key)]
            ended = call(*command, "-in", str(package), "-sigfile", file.name)
            if ended.returncode == 0:
                return
    raise UpdateError(
        "its signature fits none of the keys that this gateway trusts: the file was changed or cut off on its way, "
        "or somebody else made it. Get the package and its signature again from where your gateway came from. If you "
        f"want a package of another maker, put the maker's public key into {KEY_FOLDERS[-1]} first"
    )


def read_package(path: Path) -> Package:
    """Read the fields of a .deb. Raises UpdateError if the file is no .deb."""
    ended = call("dpkg-deb", "--field", str(path), "Package", "Version", "Architecture", "Sluice-Debian")
    if ended.returncode != 0:
        raise UpdateError("it is no Debian package, or a damaged one; get it again")
    fields = dict(line.split(": ", 1) for line in ended.stdout.splitlines() if ": " in line)
    return Package(*(fields.get(name, "") for name in ("Package", "Version", "Architecture", "Sluice-Debian")))


def this_box() -> Box:
    """Describe this box. Raises UpdateError if it has no dpkg."""
    architecture = call("dpkg", "--print-architecture").stdout.strip()
    if not architecture:
        raise UpdateError("this box has no dpkg: the gateway did not come as a package, and no package can update it")
    installed = call("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", PACKAGE).stdout.split()
    return Box(architecture, _debian(os_release()), installed[-1] if len(installed) == 2 else "")


def _debian(told: Mapping[str, str]) -> str:
    """Number of Debian's release. Raspberry Pi OS has the same numbers."""
    return told.get("VERSION_ID", "") if told.get("ID") in {"debian", "raspbian"} else ""


def is_newer(package: Package, box: Box, *, allow_downgrade: bool) -> bool:
    """Tell whether the package is to be installed; False if this version is installed already.

    Raises:
        UpdateError: the package is not for this box, or older than the installed version.
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
    return not box.installed or is_newer_version(package.version, box.installed, allow_downgrade=allow_downgrade)


@contextmanager
def _private_copy(package: Path, signature: Path) -> Iterator[tuple[Path, bytes]]:
    """Copy the package to where only root can change it, and read its signature. The copy is removed afterwards."""
    try:
        _make_cache()
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
    """Install a package by apt. Raises UpdateError, before anything is changed, if apt needs other packages."""
    words = ["install", "--yes", "--quiet", "--no-install-recommends", "--allow-downgrades", str(package)]
    planned = _apt("--simulate", *words)
    others = [line.split()[1] for line in planned.splitlines() if line.startswith(("Inst ", "Remv "))]
    others = [name for name in others if name != PACKAGE]
    if others:
        raise UpdateError(
            "it needs other Debian packages, and nothing is fetched here: sudo apt install "
            f"{' '.join(others)}, then run this again"
        )
    # Unattended upgrades may hold apt's lock.
    _apt("-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120", *words)


def _apt(*words: str) -> str:
    """Run apt-get and return its output. Raises UpdateError, with the output, if apt-get fails."""
    ended = call("apt-get", *words, patience_s=None)
    if ended.returncode != 0:
        told = "apt did not install it; the version before still runs. It says:"
        raise UpdateError("\n".join((told, *last_lines(ended, 15))))
    return ended.stdout


def _keep(package: Path, signature: bytes) -> None:
    """Keep the installed package and the one before, as a way back without a network."""
    for suffix in ("", ".sig"):
        installed = CACHE / f"{INSTALLED}{suffix}"
        if installed.exists():
            installed.replace(CACHE / f"{PREVIOUS}{suffix}")
    # Synced: an empty file after a power cut is no way back.
    write_whole(CACHE / INSTALLED, package, 0o600)
    write_whole(CACHE / f"{INSTALLED}.sig", signature, 0o600)


def _is_active() -> bool:
    return call("systemctl", "is-active", "--quiet", SERVICE).returncode == 0
