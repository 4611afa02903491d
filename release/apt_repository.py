"""`make apt-repo`: makes a folder for any web server, from which apt installs and upgrades the gateway.

apt-ftparchive writes the indexes: it comes with apt and keeps no database, so the folder is all there is. It gives a
phased percentage to all versions of a package or to none, so that field is added here. gpg signs.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from systemd import build_deb
from systemd.deb_python import ROOT, TARGETS, Target

OUTPUT = ROOT / "build" / "apt"
OWN_KEY = ROOT / "build" / "signing" / "apt.key"
"""OpenPGP key that is made if none is given. apt knows no other kind, so it is not the key of `sluice update`."""
SUITES = {12: "bookworm", 13: "trixie"}
"""Names of Debian's releases: each gets a suite, for a package fits the Python of one release."""
_KEY_OF_BEFORE = (
    "name the key of before (APT_KEY=FILE). If it is lost, remove all *.sources there, and give gateways the new one"
)
ARCHITECTURES = tuple(dict.fromkeys(target.architecture for target in TARGETS))


class RepositoryError(RuntimeError):
    """The repository cannot be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The version that gateways are to have."""

    version: str
    """Debian's version, without the target's part."""
    url: str
    """Address of the folder, as gateways will reach it."""
    private_key: Path
    phased_percent: int = 100
    """Share of the gateways that upgrade now. apt draws it from package, version and machine."""


def make(packages: Path, folder: Path, offer: Offer) -> list[Target]:
    """Add this version's packages to the repository in `folder`, and sign its indexes anew.

    Versions that are there stay, so that a gateway can go back to them. Returns the targets that have this version.

    Raises:
        RepositoryError: the version is not built, or not for all targets of the repository. Or it is not the newest, or
            the repository has other bytes under its name. Or the key cannot sign, or is not the repository's. Then
            nothing is changed.
    """
    with _keyring(offer.private_key) as home:
        _expect_trusted(folder, home, offer.private_key)
        offered = _add(packages, folder / "pool", offer.version)
        key = _gpg(home, "--armor", "--export")
        for suite in sorted(path.name for path in (folder / "pool").iterdir()):
            release = _index(folder, suite, offer)
            _sign(release, folder / "dists" / suite, home)
            (folder / f"sluice-{suite}.sources").write_text(_sources(offer.url, suite, key))
    return offered


def make_key(path: Path) -> None:
    """Make a private key at `path`, for its owner alone. Raises FileExistsError if there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    with _home() as home:
        # It never expires: a gateway that was off for years must still find its way.
        _gpg(home, "--passphrase", "", "--quick-generate-key", "Sluice packages", "ed25519", "sign", "never")
        made = _gpg(home, "--armor", "--export-secret-keys")
    path.touch(0o600, exist_ok=False)
    path.write_text(made)


def _expect_trusted(folder: Path, home: Path, private_key: Path) -> None:
    """Sign nothing, and verify that with the keys that gateways were given."""
    try:
        signed = _signed("", home)
    except RepositoryError as error:
        raise RepositoryError(f"{private_key} cannot sign, perhaps as it has a passphrase: {error}") from error
    for sources in _sources_in(folder):
        with _home() as gateway:
            (gateway / "key").write_text(_key_of(sources.read_text()))
            (gateway / "signed").write_text(signed)
            try:
                _gpg(gateway, "--import", str(gateway / "key"))
                _gpg(gateway, "--verify", str(gateway / "signed"))
            except RepositoryError as error:
                raise RepositoryError(
                    f"gateways that have {sources} would refuse what {private_key} signs: {_KEY_OF_BEFORE}"
                ) from error


def _add(packages: Path, pool: Path, version: str) -> list[Target]:
    """Copy packages into the pool, under the names that Debian gives to packages."""
    new: dict[Path, Path] = {}
    offered: list[Target] = []
    lacking: list[Target] = []
    for target in TARGETS:
        source = packages / f"{build_deb.PACKAGE}_{version}_{target}.deb"
        name = f"{build_deb.PACKAGE}_{version}~deb{target.release}_{target.architecture}.deb"
        place = pool / SUITES[target.release] / name
        others = [*place.parent.glob(f"*_{target.architecture}.deb")]
        _expect_fitting(source, place, others)
        if source.exists():
            new[place] = source
        if source.exists() or place.exists():
            offered.append(target)
        elif others:
            lacking.append(target)
    if not offered:
        raise RepositoryError(f"there is no package of version {version} in {packages}: run `make deb` first")
    if lacking:
        raise RepositoryError(
            f"the repository has older versions for {_listed(lacking)}, but {packages} has no {version} for them: "
            f"build it, or remove those older versions from {pool}; such gateways then get no package"
        )
    for place, source in new.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
    return offered


def _expect_fitting(source: Path, place: Path, others: Sequence[Path]) -> None:
    """Raise RepositoryError if a package is another one than that of its name in the pool, or is not the newest."""
    full = _version_of(place)
    for other in others:
        if _is_newer(_version_of(other), full):
            raise RepositoryError(
                f"the repository has {_version_of(other)}, which is newer than {full}: offer a newer version, "
                f"or remove {other} to withdraw it"
            )
    if source.exists() and place.exists() and place.read_bytes() != source.read_bytes():
        raise RepositoryError(
            f"the repository has {full} with other bytes, and gateways may have installed it: "
            "build this one under a version of its own"
        )


def _version_of(package: Path) -> str:
    return package.name.split("_")[1]


def _listed(targets: Sequence[Target]) -> str:
    return ", ".join(map(str, targets))


def _is_newer(version: str, other: str) -> bool:
    command = ["dpkg", "--compare-versions", version, "gt", other]
    return subprocess.run(command, check=False).returncode == 0


def _index(folder: Path, suite: str, offer: Offer) -> str:
    """Write `Packages` of each architecture. Returns the text of `Release`, which has their digests."""
    place = folder / "dists" / suite
    for architecture in ARCHITECTURES:
        listed = _output("apt-ftparchive", "--arch", architecture, "packages", f"pool/{suite}", folder=folder)
        index = place / "main" / f"binary-{architecture}" / "Packages"
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text("".join(f"{each}\n\n" for each in _phased(listed, offer)))
    said = {"Origin": "Sluice", "Label": "Sluice", "Suite": suite, "Codename": suite, "Components": "main"}
    said["Architectures"] = " ".join(ARCHITECTURES)
    options = [f"--option=APT::FTPArchive::Release::{name}={value}" for name, value in said.items()]
    return _output("apt-ftparchive", *options, "release", ".", folder=place)


def _phased(listed: str, offer: Offer) -> Iterator[str]:
    """Yield each package's paragraph, with the percentage where it is of the offered version."""
    for paragraph in filter(None, listed.strip().split("\n\n")):
        is_offered = f"\nVersion: {offer.version}~deb" in paragraph
        phased = f"\nPhased-Update-Percentage: {offer.phased_percent}"
        yield paragraph + (phased if is_offered and offer.phased_percent < 100 else "")


def _sign(release: str, place: Path, home: Path) -> None:
    """Write `InRelease`, which holds `Release` and its signature: one file, so both are always of one moment."""
    new = place / "InRelease.new"
    new.write_text(_signed(release, home))
    new.rename(place / "InRelease")


def _signed(text: str, home: Path) -> str:
    plain = home / "plain"
    plain.write_text(text)
    return _gpg(home, "--clearsign", "--output", "-", str(plain))


def _sources(url: str, suite: str, key: str) -> str:
    """Return the text for a gateway's `/etc/apt/sources.list.d`, which carries the key that it is to trust."""
    lines = "".join(f" {line or '.'}\n" for line in key.strip().splitlines())
    return f"Types: deb\nURIs: {url}\nSuites: {suite}\nComponents: main\nSigned-By:\n{lines}"


def _sources_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("sluice-*.sources"))


def _key_of(sources: str) -> str:
    """Return the key of a text of `_sources`."""
    lines = sources.partition("\nSigned-By:\n")[2].splitlines()
    return "".join(f"{line.strip().removeprefix('.')}\n" for line in lines)


@contextmanager
def _keyring(private_key: Path) -> Iterator[Path]:
    """A home of gpg with this key alone."""
    with _home() as home:
        _gpg(home, "--import", str(private_key))
        yield home


@contextmanager
def _home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        finally:
            # gpg leaves its agent behind.
            subprocess.run(["gpgconf", "--homedir", folder, "--kill", "all"], check=False)


def _gpg(home: Path, *arguments: str) -> str:
    return _output("gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback", *arguments)


def _output(*command: str, folder: Path | None = None) -> str:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RepositoryError(f"{command[0]} failed: {ended.stderr.strip()}")
    return ended.stdout


def _percent(text: str) -> int:
    # apt lets one machine in a hundred upgrade at 0: a version is stopped by removing its package.
    if not 1 <= (value := int(text)) <= 100:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and 100; to stop a version, remove its package")
    return value


def _own_key(folder: Path) -> Path:
    """Return the key that is used if none is given. It is made for a repository that gateways do not know yet."""
    if OWN_KEY.exists():
        return OWN_KEY
    if known := _sources_in(folder):
        raise RepositoryError(
            f"there is no {OWN_KEY}, and gateways that have {known[0]} trust no new key: {_KEY_OF_BEFORE}"
        )
    make_key(OWN_KEY)
    print(f"made a key of your own, {OWN_KEY}: keep it, for gateways trust no other (APT_KEY=FILE names another)")
    return OWN_KEY


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the repository that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m release.apt_repository", description=__doc__)
    parser.add_argument("--version", help="the version to offer, as `make deb` built it; by default this commit's")
    parser.add_argument("--url", required=True, help="the address of the folder, as gateways will reach it")
    parser.add_argument("--phased", type=_percent, default=100, help="per cent of the gateways that upgrade now")
    parser.add_argument("--key", type=Path, help="a private OpenPGP key without a passphrase, as gpg exports it")
    parser.add_argument("--packages", type=Path, default=build_deb.OUTPUT, help="the folder of the packages")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder of the repository")
    given = parser.parse_args(arguments)
    version = given.version or build_deb.commit_version(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    )
    try:
        key = given.key or _own_key(given.output)
        offered = make(given.packages, given.output, Offer(version, given.url, key, given.phased))
    except RepositoryError as error:
        sys.exit(str(error))
    print(
        f"{given.output}  {version} for {given.phased} % of the gateways on {_listed(offered)}: "
        f"copy the folder to {given.url}"
    )


if __name__ == "__main__":
    main()
