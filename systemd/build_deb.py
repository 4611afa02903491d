"""`make deb`: builds the gateway as a signed .deb for each Debian release and architecture, with all that it imports.

The same commit gives the same bytes. Beside each package is its signature, which `sluice update` checks.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from systemd import deb_documents, deb_python, deb_signing
from systemd.deb_python import ROOT, TARGETS, Target

HERE = ROOT / "systemd"
OUTPUT = ROOT / "build" / "deb"
PACKAGE = "sluice-gateway"
"""Name of the package. Debian's own `sluice`, which copies data at a given rate, has a higher version: under that name
`apt upgrade` would put it in this one's place. Both have a command of one name, so only one of them can be there."""
MAINTAINER = "The Sluice maintainers <maintainers@sluice.invalid>"
"""Not the last committer: the same sources give the same bytes, and nobody's address is published."""
LIBRARY = "usr/lib/sluice"
DOCUMENTS = f"usr/share/doc/{PACKAGE}"
KEYS = "usr/share/sluice/release-keys"
UNITS = "usr/lib/systemd/system"
DEB_MB_MAX = 25
_PLACES = {
    "sluice.service": f"{UNITS}/sluice.service",
    "sluice-provision.service": f"{UNITS}/sluice-provision.service",
    "sluice-fleet.service": f"{UNITS}/sluice-fleet.service",
    "sluice-fleet.timer": f"{UNITS}/sluice-fleet.timer",
    "sluice.sysusers": "usr/lib/sysusers.d/sluice.conf",
    "60-sluice-usb.rules": "usr/lib/udev/rules.d/60-sluice-usb.rules",
    "60-sluice-serial.rules": "usr/lib/udev/rules.d/60-sluice-serial.rules",
    "90-sluice-braille.rules": "usr/lib/udev/rules.d/90-sluice-braille.rules",
    # Avahi reads no other folder.
    "sluice.avahi.service": "etc/avahi/services/sluice.service",
}
"""Files of this folder, and where they go."""
_PROGRAMS = {
    "usr/bin/sluice": "launcher",
    f"{LIBRARY}/self-test": "self-test",
    # For boxes with our image.
    f"{LIBRARY}/rauc-slots": "rauc-slots",
    f"{LIBRARY}/update-trial": "update-trial",
    f"{LIBRARY}/stick-update": "stick-update",
}
"""Programs, and their scripts in `debian/`."""


@dataclass(frozen=True, slots=True)
class Release:
    """A version to build, the same for every target."""

    version: str
    """Debian's version, without the target's part."""
    epoch_s: int
    """Time of its commit, which every file gets."""
    private_key: Path
    xz_level: int = 6
    """Level 0 packs six times as fast, for a box of the tests, and makes a package a quarter larger."""


def commit_version(base: str) -> str:
    """Add the commit's time and name to `base`, so that a later commit sorts as newer."""
    made, name = _git("log", "-1", "--format=%cd %h", "--date=format-local:%Y%m%d%H%M%S", "--abbrev=7").split()
    changed = ".changed" if _git("status", "--porcelain", "--", "gateway", "systemd", "constraints.txt") else ""
    return f"{base}+git{made}.{name}{changed}"


def build(target: Target, release: Release, output: Path) -> Path:
    """Build and sign one .deb, and return its path."""
    pins = deb_python.read_pins((ROOT / "constraints.txt").read_text())
    wheels = deb_python.fetch_wheels(target, deb_python.gateway_pins(target, pins), OUTPUT / "wheels" / str(target))
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        root = Path(scratch, "root")
        root.mkdir()
        library = root / LIBRARY
        for wheel in wheels:
            deb_python.unpack(wheel, library)
        inside = [deb_documents.read_inside(wheel, library) for wheel in wheels]
        _write_program(root, target, release)
        _write_documents(root, release, inside)
        _write_units(root)
        _write_control(root, target, release)
        _settle(root, release.epoch_s)
        path = output / f"{PACKAGE}_{release.version}_{target}.deb"
        _pack(root, path, release)
    deb_signing.sign(path, release.private_key)
    return path


def full_version(release: Release, target: Target) -> str:
    """Version as dpkg knows it. A later Debian's is newer, so that its package replaces the one before."""
    return f"{release.version}~deb{target.release}"


def _write_program(root: Path, target: Target, release: Release) -> None:
    library = root / LIBRARY
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard", "--", "gateway").splitlines():
        source = ROOT / name
        # The pages for people are elsewhere. A file that is not there was deleted, and that is not committed yet.
        if source.suffix != ".md" and source.exists():
            place = library / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.read_bytes())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = library / f"sluice-{project['version']}.dist-info"
    told.mkdir()
    needs = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
    (told / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: sluice\nVersion: {release.version}\nSummary: {project['description']}\n{needs}"
    )
    for script, name in _PROGRAMS.items():
        _write_script(root / script, (HERE / "debian" / name).read_text(), target)
    key = root / KEYS / "release.pem"
    key.parent.mkdir(parents=True)
    key.write_text(deb_signing.public_key(release.private_key))


def _write_script(path: Path, text: str, target: Target) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("sluice-provision.service", "sluice-fleet.timer", "sluice.service")
    units = " ".join(found for found in names if (HERE / found).exists())
    path.write_text(text.replace("@PYTHON@", f"/usr/bin/python{target.python}").replace("@UNITS@", units))
    path.chmod(0o755)


def _write_documents(root: Path, release: Release, inside: Sequence[deb_documents.Inside]) -> None:
    # Imported here: a wrong command breaks man pages, and nothing else of this module.
    from gateway.cli import main  # noqa: PLC0415

    folder = root / DOCUMENTS
    folder.mkdir(parents=True)
    made = deb_documents.at(release.epoch_s)
    deb_documents.write_licences(inside, folder / "licenses")
    (folder / "copyright").write_text(deb_documents.copyright_text(inside))
    (folder / "sbom.cdx.json").write_text(deb_documents.sbom(PACKAGE, release.version, inside, made))
    # An installer may have no network.
    (folder / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copyfile(page, folder / "docs" / page.name)
    for name, text in (
        ("changelog.upstream", (ROOT / "CHANGELOG.md").read_text()),
        (
            "changelog",
            _changelog(release),
        ),
    ):
        (folder / name).write_text(text)
        deb_documents.compress(folder / name)
    deb_documents.write_man_pages(main, release.version, made, root / "usr/share/man/man1")
    deb_documents.write_completions(main, root)


def _changelog(release: Release) -> str:
    signed = f" -- {MAINTAINER}  {deb_documents.at(release.epoch_s):%a, %d %b %Y %H:%M:%S +0000}\n"
    return f"{PACKAGE} ({release.version}) stable; urgency=medium\n\n  * See changelog.upstream.gz.\n\n{signed}"


def _write_units(root: Path) -> None:
    for name, place in _PLACES.items():
        source = HERE / name
        if source.exists():
            path = root / place
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)


def _write_control(root: Path, target: Target, release: Release) -> None:
    control = root / "DEBIAN"
    files = sorted(path for path in root.rglob("*") if path.is_file())
    installed_kb = sum(-(-path.stat().st_size // 1024) for path in files)
    control.mkdir()
    needs = (
        # Compiled modules fit this minor version and no other. By this name it stays when the release is upgraded.
        f"python{target.python}, libc6 (>= 2.36), libgcc-s1, init-system-helpers (>= 1.54), "
        "systemd | systemd-standalone-sysusers, udev"
    )
    (control / "control").write_text(
        f"Package: {PACKAGE}\nVersion: {full_version(release, target)}\nArchitecture: {target.architecture}\n"
        f"Maintainer: {MAINTAINER}\nInstalled-Size: {installed_kb}\nDepends: {needs}\nConflicts: sluice\n"
        "Recommends: avahi-daemon, ca-certificates, openssl, systemd-timesyncd | time-daemon\n"
        "Section: net\nPriority: optional\n"
        f"Sluice-Debian: {target.release}\n"
        "Description: edge gateway for constrained devices: MQTT and serial in, Kafka out\n"
        " Takes readings from 8-bit sensors over MQTT and serial lines, keeps them\n"
        " through outages and power cuts, and forwards them to Kafka. What a sensor\n"
        " has an acknowledgement for is on disk, or with Kafka's replicas.\n"
        " .\n"
        ' Run "sudo sluice setup" to set it up.\n'
    )
    conffiles = [f"/{path.relative_to(root)}" for path in files if path.relative_to(root).parts[0] == "etc"]
    if conffiles:
        (control / "conffiles").write_text("".join(f"{name}\n" for name in conffiles))
    sums = subprocess.run(
        ["md5sum", *(str(path.relative_to(root)) for path in files)],
        cwd=root,
        capture_output=True,
        check=True,
    )
    (control / "md5sums").write_bytes(sums.stdout)
    for name in ("preinst", "postinst", "prerm", "postrm"):
        _write_script(control / name, (HERE / "debian" / name).read_text(), target)


def _settle(root: Path, epoch_s: int) -> None:
    """Give every file its mode and one time, whatever umask and clock the build had."""
    scripts = {root / name for name in _PROGRAMS}
    scripts |= {root / "DEBIAN" / name for name in ("preinst", "postinst", "prerm", "postrm")}
    for path in sorted(root.rglob("*"), reverse=True):
        path.chmod(0o755 if path.is_dir() or path in scripts else 0o644)
        os.utime(path, (epoch_s, epoch_s))
    root.chmod(0o755)
    os.utime(root, (epoch_s, epoch_s))


def _pack(root: Path, path: Path, release: Release) -> None:
    # One thread: with several, xz's blocks, and so the bytes, depend on the machine's memory.
    xz = ("-Zxz", f"-z{release.xz_level}", "--threads-max=1")
    command = ["dpkg-deb", "--root-owner-group", *xz, "--build", str(root), str(path)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(release.epoch_s)}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)


def _git(*arguments: str) -> str:
    environment = {**os.environ, "TZ": "UTC"}
    ended = subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.strip()


def prepare(version: str | None, private_key: Path | None) -> Release:
    """Describe what to build of this commit. Makes a key if none is given and none was made before."""
    key = private_key or ROOT / deb_signing.OWN_KEY
    if not key.exists():
        if private_key is not None:
            raise deb_signing.SigningError(f"there is no signing key {key}; correct SIGNING_KEY, or leave it out")
        deb_signing.make_key(key)
        print(
            f"made a signing key of your own, {key}: keep it, for a box takes updates only of the key that its package "
            "came with (SIGNING_KEY=FILE names another)"
        )
    base = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return Release(
        version or commit_version(base),
        int(os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct")),
        key,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the targets that the command line names; all by default."""
    parser = argparse.ArgumentParser(prog="python -m systemd.build_deb", description=__doc__)
    parser.add_argument("--version", help="instead of the one that follows from pyproject.toml and the commit")
    parser.add_argument("--target", action="append", choices=[str(target) for target in TARGETS], help="only this one")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder that the packages are put into")
    parser.add_argument("--signing-key", type=Path, help="an Ed25519 key in PEM")
    given = parser.parse_args(arguments)
    try:
        release = prepare(given.version, given.signing_key)
        for target in TARGETS:
            if given.target is None or str(target) in given.target:
                path = build(target, release, given.output)
                megabytes = path.stat().st_size / 1e6
                print(f"{path}  {megabytes:.1f} MB")
                if megabytes > DEB_MB_MAX:
                    sys.exit(f"that is more than {DEB_MB_MAX} MB: see what came into it (dpkg-deb -c)")
    except (deb_python.DependencyError, deb_signing.SigningError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
