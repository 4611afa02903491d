"""A Debian as it is right after its installation, with a clone of this project: commands run in it one after the other.

It reaches package registries as this machine does. What that takes is copied from this machine's configuration when
the tree is unpacked. Needs root.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo import child_process
from tests.support.box import APART, NSPAWN, ROOT, box_cgroup, extract, minimal_tree
from tests.support.cgroups import Cgroup

CLONE = Path("root") / "sluice"
CONFIGURATION = (
    *("/etc/apt/auth.conf", "/etc/apt/auth.conf.d", "/usr/local/share/ca-certificates", "/etc/pip.conf"),
    *("/root/.config/pip", "/root/.pip", "/root/.netrc", "/root/.m2/settings.xml"),
)
"""Places where this machine may keep log-ins, certificates and addresses of registries."""
VARIABLES = re.compile(r"(PIP|MAVEN)_\w+|SSL_CERT_\w+|\w+_CA_BUNDLE|\w+_proxy", re.IGNORECASE)
"""Names of environment variables that say the same."""

NSPAWN_ENVIRONMENT = {
    # The tests fill a /tmp in memory of a tenth of this machine's.
    "SYSTEMD_NSPAWN_TMPFS_TMP": "0",
    # They make networks, and write settings of theirs.
    "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",
}
ALLOWED = ("--capability=CAP_NET_ADMIN", "--system-call-filter=adjtimex clock_adjtime")


class FreshSystem:
    """One tree. Nothing runs in it between two commands."""

    def __init__(self, root: Path, log: Path, cgroup: Cgroup) -> None:
        self.clone = root / CLONE
        self.root = root
        self._log = log
        self._cgroup = cgroup

    def call(self, *command: str, seconds_max: float) -> tuple[int, str]:
        """Run a command as root in the clone. Returns its exit code and what it said.

        Raises subprocess.TimeoutExpired, and ends the command.
        """
        begin = self._log.stat().st_size if self._log.exists() else 0
        options = [*ALLOWED, "--as-pid2", "--resolv-conf=copy-host"]
        options += [f"--directory={self.root}", f"--chdir=/{CLONE}"]
        options += [f"--setenv={name}={value}" for name, value in self.environment().items()]
        nspawn = self._cgroup.joined(*APART, *NSPAWN, *options, *command)
        process = child_process.spawn(nspawn, self._log, env=os.environ | NSPAWN_ENVIRONMENT)
        try:
            code = process.wait(seconds_max)
        finally:
            child_process.stop(process)
        with self._log.open("rb") as file:
            file.seek(begin)
            return code, file.read().decode(errors="replace")

    def run(self, *command: str, seconds_max: float = 120) -> str:
        """Run a command that must succeed. Returns what it said."""
        code, said = self.call(*command, seconds_max=seconds_max)
        assert code == 0, f"{' '.join(command)}: {code}\n{said[-8_000:]}"
        return said

    def environment(self) -> dict[str, str]:
        """This machine's variables about registries, but for paths that the tree has not."""
        found = {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)}
        there = {
            name: value
            for name, value in found.items()
            if not value.startswith("/") or (self.root / value.removeprefix("/")).exists()
        }
        return {"LANG": "C.UTF-8", **there}


@contextmanager
def fresh_system(directory: Path, release: int) -> Iterator[FreshSystem]:
    """A Debian of its own for the length of a `with`. Raises BoxUnavailableError as `minimal_tree` does."""
    root = directory / f"debian{release}"
    try:
        extract(minimal_tree(release), root)
        _configure(root)
        _clone(root / CLONE)
        with box_cgroup() as cgroup:
            system = FreshSystem(root, directory / "said.log", cgroup)
            system.run("update-ca-certificates")
            yield system
    finally:
        # Gigabytes, which pytest would keep.
        shutil.rmtree(root, ignore_errors=True)


def _configure(root: Path) -> None:
    # Every installation has this line. Nothing here resolves the name of the machine itself, as in many containers.
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    for name in CONFIGURATION:
        source, target = Path(name), root / name.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy(source, target)
    settings = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True).stdout
    kept = [line for line in settings.splitlines() if "::IndexTargets" not in line]
    (root / "etc/apt/apt.conf.d/01registry").write_text("\n".join(kept) + "\n")


def _clone(target: Path) -> None:
    """Clone this project with its changes that are not committed yet."""
    git = ["git", "-C", str(ROOT)]
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, target], check=True)
    files = subprocess.run(
        [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=True
    ).stdout
    for name in files.decode().split("\0"):
        source = ROOT / name
        if name and source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    # The index that a checkout would have made.
    subprocess.run(["git", "-C", target, "reset", "--quiet"], check=True)
