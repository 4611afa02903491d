"""A box: a Debian tree made by mmdebstrap, booted with its own systemd by systemd-nspawn, in a network of the test's.

Its disk is a folder and outlives a reboot and a power cut; the kernel is this machine's. Needs root.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from demo import child_process
from tests.support.cgroups import Cgroup, new_cgroup
from tests.support.netns import DNS_ADDRESS, Namespace
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
TREES = ROOT / "build" / "box"
"""Each release's tree, made once, as a tar file."""
SUITES = {11: "bullseye", 12: "bookworm", 13: "trixie"}
PACKAGES = "systemd,systemd-sysv,udev,dbus,python3,openssl,iproute2,mosquitto-clients"
"""Packages of the tree. A small server has them, so the package's own dependencies are there without a network."""
PROGRAMS = {"mmdebstrap": "mmdebstrap", "systemd-nspawn": "systemd-container", "nsenter": "util-linux", "tar": "tar"}
BOOT_S_MAX = 60.0
STOP_S_MAX = 60.0
COMMAND_S_MAX = 480.0
"""`sluice fleet pull` looks at a box for two minutes before a change, and for five after it."""
# With `unshare` all ends that runs in its process namespace; systemd-nspawn alone would leave the box behind.
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
NSPAWN = ("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--console=pipe", "--timezone=off")
REBOOTED = 133
"""Exit code of systemd-nspawn if its box asked to be started again."""


Made = TypeVar("Made")


class BoxUnavailableError(RuntimeError):
    """This machine starts no box for us; the message says why and what to do."""


class Box:
    """One box. It stands still until it is booted."""

    def __init__(self, root: Path, log: Path, cgroup: Cgroup) -> None:
        self.root = root
        self._cgroup = cgroup
        self._log = log
        """File with the console's output."""
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._namespace: Namespace | None = None
        self._leader = 0
        self.shown: dict[Path, str] = {}
        """Folders of this machine, and where the box sees them, to be read only. Set them before it is booted."""

    def boot(self, namespace: Namespace | None = None) -> float:
        """Start it, in a network namespace or without a network; gives the seconds until systemd was done starting.

        Raises AssertionError where that does not come to an end.
        """
        self._namespace = namespace
        network = (
            ["--private-network"] if namespace is None else [f"--network-namespace-path=/run/netns/{namespace.name}"]
        )
        begin = time.monotonic()
        # The clock is read as on a box of its own; nobody in there has the right to set it.
        command = [*NSPAWN, "--boot", "--system-call-filter=adjtimex clock_adjtime", "--resolv-conf=off"]
        command += [f"--bind-ro={folder}:{place}" for folder, place in self.shown.items()]
        command += [*network, f"--directory={self.root}"]
        self._nspawn = child_process.spawn(self._cgroup.joined(*APART, *command), self._log)
        self._leader = self._wait_for_leader()
        deadline = begin + patience(BOOT_S_MAX)
        while (state := self.call("systemctl", "is-system-running").stdout.strip()) not in {"running", "degraded"}:
            assert time.monotonic() < deadline, f"the box does not come up ({state}):\n{self.console()}"
            time.sleep(0.05)
        assert state == "running", self.call("systemctl", "--failed", "--no-pager").stdout
        return time.monotonic() - begin

    def _wait_for_leader(self) -> int:
        """The process number of the box's own first process."""
        assert self._nspawn is not None
        deadline = time.monotonic() + patience(BOOT_S_MAX)
        while True:
            assert self._nspawn.poll() is None, f"systemd-nspawn ended:\n{self.console()}"
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for nspawn in _children(self._nspawn.pid):
                    for child in _children(nspawn):
                        if _is_first(child):
                            return child
            assert time.monotonic() < deadline, f"the box has no first process:\n{self.console()}"
            time.sleep(0.02)

    def call(self, *command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the box as root, whatever comes of it."""
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "DEBIAN_FRONTEND": "noninteractive",
            "LANG": "C.UTF-8",
            "HOME": "/root",
            "TERM": "dumb",
        }
        return subprocess.run(
            self.inside(*command),
            input=text or "",
            capture_output=True,
            text=True,
            check=False,
            timeout=patience(COMMAND_S_MAX),
            env=environment,
        )

    def inside(self, *command: str) -> list[str]:
        """The command that runs another one in the box, for who needs a terminal of his own."""
        return ["nsenter", "--all", f"--target={self._leader}", "--", *command]

    def run(self, *command: str, text: str | None = None) -> str:
        """Run a command that must succeed, and return its output."""
        ended = self.call(*command, text=text)
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.returncode}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def apt(self, *arguments: str) -> str:
        """`apt-get`, which asks nothing. There is no network to get anything from."""
        return self.run("apt-get", "-y", "-q", "-o", "Dpkg::Use-Pty=0", "--no-install-recommends", *arguments)

    def take(self, *files: Path) -> None:
        """Copy files into root's home in the box."""
        for file in files:
            shutil.copyfile(file, self.root / "root" / file.name)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file in the box, made as root; folders above it are made."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def there(self, path: str) -> bool:
        """Whether a path is in the box."""
        return os.path.lexists(self.root / path.lstrip("/"))

    def property(self, unit: str, name: str) -> str:
        """A property of a unit in systemd, such as ActiveState."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def journal(self, unit: str = "sluice.service") -> str:
        """Everything that a unit has said, in every boot that the journal has."""
        return self.run("journalctl", "--no-pager", "--quiet", "--output=short-monotonic", f"--unit={unit}")

    def console(self) -> str:
        return child_process.log_tail(self._log, 30)

    def reboot(self) -> float:
        """Reboot as `systemctl reboot` does, with an orderly stop. Returns the seconds that starting took."""
        assert self._nspawn is not None
        self.call("systemctl", "reboot")
        assert self._nspawn.wait(STOP_S_MAX) == REBOOTED, self.console()
        return self.boot(self._namespace)

    def kill(self) -> None:
        """Everything in it is gone at once, as when its power is cut; what was written to files stays."""
        if self._nspawn is not None:
            self._nspawn.kill()
            self._nspawn.wait()
            leader = Path(f"/proc/{self._leader}")
            # The kernel ends it a moment later.
            deadline = time.monotonic() + patience(STOP_S_MAX)
            while leader.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            self._nspawn = None


def _children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _is_first(process: int) -> bool:
    """Whether it is the first one of a process namespace in this one's, and systemd already."""
    numbers = Path(f"/proc/{process}/status").read_text().partition("NSpid:")[2].partition("\n")[0].split()
    return numbers[-1] == "1" and Path(f"/proc/{process}/comm").read_text().strip() == "systemd"


def tree(release: int) -> Path:
    """The tar file of a Debian release's tree; made where it is not there yet (half a minute).

    Raises:
        BoxUnavailableError: not root, a program is missing, or the packages cannot be had.
    """
    # What nobody reads there takes a third of the time that a box is made in.
    less = (f'--customize-hook=rm -rf "$1"/usr/share/{unread}' for unread in ("locale", "man", "doc", "perl"))
    return _made_once(f"debian{release}", SUITES[release], "--variant=minbase", f"--include={PACKAGES}", *less)


def minimal_tree(release: int) -> Path:
    """A Debian release with nothing but apt, certificates and the two programs that a person begins with.

    Raises BoxUnavailableError as `tree` does.
    """
    options = ("--variant=minbase", "--include=ca-certificates,git,make")
    return _made_once(f"debian{release}_minimal", SUITES[release], *options)


def foreign_tree(release: int, architecture: str, packages: str) -> Path:
    """The files of these packages and of what they need, for another architecture: nothing of it was run.

    Raises BoxUnavailableError as `tree` does.
    """
    options = ("--variant=extract", f"--architectures={architecture}", f"--include={packages}")
    return _made_once(f"debian{release}_{architecture}", SUITES[release], *options)


def _made_once(name: str, suite: str, *options: str) -> Path:
    if os.geteuid() != 0:
        raise BoxUnavailableError("a Debian tree is made and booted by root alone: run as root")
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise BoxUnavailableError(f"there is no `{program}`: install Debian's package {package}")
    TREES.mkdir(parents=True, exist_ok=True)
    made, how = TREES / f"{name}.tar", TREES / f"{name}.options"
    with (TREES / f"{name}.lock").open("w") as lock:
        # Tests run side by side.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made.exists() and how.exists() and how.read_text() == "\n".join(options)):
            _make_tree(suite, made, options)
            how.write_text("\n".join(options))
    return made


def _make_tree(suite: str, made: Path, options: Sequence[str]) -> None:
    """Make the tree from the archive that this machine has its own packages from."""
    site = _archive()
    if site is None:
        # Some images come without apt's lists.
        _output("apt-get", "update")
        site = _archive()
    if site is None:
        raise BoxUnavailableError("apt knows no archive of Debian's here, or cannot reach it: see apt-get update")
    part = made.with_suffix(".part")
    command = ["mmdebstrap", "--quiet", "--format=tar", *options, suite, str(part), f"deb {site} {suite} main"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BoxUnavailableError(f"mmdebstrap cannot make a tree of {suite}: {ended.stderr.strip()[-2000:]}")
    part.rename(made)


def _archive() -> str | None:
    sites = _output("apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages")
    return next((line.split()[1] for line in sites.splitlines() if line.startswith("Debian ")), None)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def extract(made: Path, root: Path) -> None:
    """Unpack a tree into a folder, which is made."""
    root.mkdir(parents=True)
    subprocess.run(["tar", "--extract", "--file", made, "--directory", root, "--numeric-owner"], check=True)


def box_cgroup() -> AbstractContextManager[Cgroup]:
    """A control group for one systemd-nspawn, by a name that nobody else has."""
    return new_cgroup(f"sluice-{os.getpid()}-{time.monotonic_ns()}")


@contextmanager
def new_box(directory: Path, release: int = 12) -> Iterator[Box]:
    """A box of its own for the length of a `with`, not booted yet. Raises BoxUnavailableError as `tree` does."""
    source = tree(release)
    root = directory / "box"
    extract(source, root)
    (root / "etc" / "hostname").write_text("barn-1\n")
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost barn-1\n")
    (root / "etc" / "resolv.conf").unlink(missing_ok=True)
    (root / "etc" / "resolv.conf").write_text(f"nameserver {DNS_ADDRESS}\n")
    # There is no network to fetch anything from, and none is tried.
    (root / "etc" / "apt" / "sources.list").write_text("")
    # Kept through a reboot.
    (root / "var" / "log" / "journal").mkdir(exist_ok=True)
    try:
        with box_cgroup() as cgroup:
            box = Box(root, directory / "console.log", cgroup)
            try:
                yield box
            finally:
                box.kill()
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def box_or_skip(directory: Path, release: int = 12) -> Iterator[Box]:
    """A box for a fixture. If there can be no box, its tests are skipped with the reason."""
    with entered_or_skip(new_box(directory, release)) as box:
        yield box


@contextmanager
def entered_or_skip(context: AbstractContextManager[Made]) -> Iterator[Made]:
    """Enter a context that may raise BoxUnavailableError, and skip the test with that reason."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(context)
        except BoxUnavailableError as reason:
            if os.environ.get("CI") and os.geteuid() == 0:
                # What matters must run there: a skip would pass for a success.
                raise
            pytest.skip(str(reason))
        yield made


def build(output: Path, *targets: str, version: str | None = None, xz_level: int = 6) -> list[Path]:
    """The packages of these targets, as `make deb` builds them; packed in no time at level 0."""
    from systemd import build_deb
    from systemd.deb_python import TARGETS

    release = replace(build_deb.prepare(version, None), xz_level=xz_level)
    return [build_deb.build(target, release, output) for target in TARGETS if str(target) in targets]
