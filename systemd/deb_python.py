"""Finds the Python packages that go into a .deb, at their pinned versions, and fetches them for another machine."""

import fcntl
import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parent.parent
GLIBC_MINORS = range(36, 4, -1)
"""Minor versions of glibc whose wheels run on Debian 12, which has 2.36."""
NOT_NEEDED = frozenset({"pip"})
"""Packages left out. sqlite-utils needs pip for a command that installs plugins: 2 MB that nothing here calls."""
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures as wheels name them, by Debian's name."""


@dataclass(frozen=True, slots=True)
class Target:
    """A Debian release on an architecture."""

    release: int
    python: str
    """Minor version of Python in this release: compiled modules fit no other."""
    architecture: str

    @property
    def machine(self) -> str:
        return _MACHINES[self.architecture]

    def __str__(self) -> str:
        return f"{self.architecture}_deb{self.release}"


TARGETS = tuple(
    Target(release, python, architecture)
    for release, python in ((12, "3.11"), (13, "3.13"))
    for architecture in _MACHINES
)


class DependencyError(RuntimeError):
    """The gateway's packages cannot be put together; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A package in `constraints.txt`."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def line(self) -> str:
        """Line that pip reads."""
        return " ".join((f"{self.name}=={self.version}", *(f"--hash={found}" for found in self.hashes)))


def read_pins(constraints: str) -> dict[str, Pin]:
    """Read every package of `constraints.txt`, by its canonical name."""
    pins: dict[str, Pin] = {}
    for block in re.split(r"(?m)^(?=[A-Za-z0-9])", constraints):
        if found := re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", block):
            name = canonicalize_name(found[1])
            pins[name] = Pin(name, found[2], tuple(re.findall(r"--hash=(\S+)", block)))
    return pins


def gateway_pins(target: Target, pins: Mapping[str, Pin]) -> list[Pin]:
    """Return what the gateway alone needs on the target, without the extras (Spark, simulator, development), by name.

    The needs of a package are read from its copy that is installed here, at the same version, for the target's Python.

    Raises:
        DependencyError: one is not pinned, or not installed at its pinned version.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = {
        "python_version": target.python,
        "python_full_version": f"{target.python}.0",
        "platform_machine": target.machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    waiting = [Requirement(line) for line in project["dependencies"]]
    # Each extra counts: pymodbus[serial] needs more than pymodbus.
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in NOT_NEEDED:
            continue
        if name not in pins:
            raise DependencyError(f"{name} is not in constraints.txt, and the gateway needs it: run `make lock`")
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            waiting += _needs(pins[name], {**environment, "extra": extra})
    return [pins[name] for name in sorted({name for name, _ in seen})]


def _needs(pin: Pin, environment: dict[str, str]) -> Iterator[Requirement]:
    try:
        installed = metadata.distribution(pin.name)
    except metadata.PackageNotFoundError:
        raise DependencyError(f"{pin.name} is not installed here: run `make install`") from None
    if installed.version != pin.version:
        raise DependencyError(
            f"{pin.name} is installed at {installed.version}, and constraints.txt has {pin.version}: run `make install`"
        )
    for line in installed.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def fetch_wheels(target: Target, pins: Iterable[Pin], folder: Path) -> list[Path]:
    """Return the wheels of these packages for the target, by name. `folder` keeps them for the next time.

    A wheel that is there and has a hash of its pin is not fetched again. Nothing is compiled: a package without a wheel
    for the target fails.

    Raises:
        DependencyError: pip cannot get one.
    """
    pins = list(pins)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # Tests build side by side.
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _kept(pins, folder)
        if len(found) < len(pins):
            _download(target, pins, folder)
            found = _kept(pins, folder)
    if missing := sorted({pin.name for pin in pins} - found.keys()):
        raise DependencyError(
            f"pip said that all is there, and in {folder} is no wheel of {', '.join(missing)} that has a hash of "
            "constraints.txt: remove that folder, and build again"
        )
    return [found[name] for name in sorted(found)]


def _kept(pins: Sequence[Pin], folder: Path) -> dict[str, Path]:
    """Return by name the wheels that are there already, byte for byte as they are pinned."""
    by_name = {pin.name: pin for pin in pins}
    found: dict[str, Path] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        pin = by_name.get(name)
        if pin is not None and pin.version == str(version):
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if f"sha256:{digest}" in pin.hashes:
                found[name] = wheel
    return found


def _download(target: Target, pins: Sequence[Pin], folder: Path) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(f"{pin.line}\n" for pin in pins))
    tags = [f"manylinux_2_{minor}_{target.machine}" for minor in GLIBC_MINORS]
    tags += [f"{old}_{target.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    abis = [f"cp{target.python.replace('.', '')}", "abi3", "none"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--implementation", "cp"]
    command += ["--python-version", target.python, "--dest", str(folder), "--requirement", str(wanted)]
    command += [word for tag in tags for word in ("--platform", tag)]
    command += [word for abi in abis for word in ("--abi", abi)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise DependencyError(f"pip cannot get the packages for {target}:\n{ended.stdout}{ended.stderr}".strip())


def unpack(wheel: Path, folder: Path) -> None:
    """Put a wheel's files for importing into `folder`; its scripts and headers stay out.

    Raises DependencyError if a file would come over another package's.
    """
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            place = _place(entry.filename)
            if place is None or entry.is_dir():
                continue
            path = folder / place
            if path.exists():
                raise DependencyError(
                    f"{wheel.name} has {place}, and so has another package: only one can be installed"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(entry))


def _place(name: str) -> str | None:
    """Return the place of a wheel's file (PEP 427) in the folder for importing; None if it goes elsewhere."""
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return name
    kind, _, inner = rest.partition("/")
    return inner if kind in {"purelib", "platlib"} else None
