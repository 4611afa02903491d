"""Programs of Debian 13 for the machine that builds: Python for bytecode, mke2fs for the same bytes each time."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from image import quiet

HERE = Path(__file__).parent
PACKAGES = "python3,e2fsprogs,libarchive13t64"


@dataclass(frozen=True, slots=True)
class Tools:
    """A tree with these programs, for this machine's own processor."""

    tree: Path

    def compile_python(self, root: Path, folder: Path) -> None:
        """Compile the Python files of a folder in a root, without their times."""
        mode = ("--invalidation-mode", "unchecked-hash")
        self._run("usr/bin/python3", "-IS", "-m", "compileall", "-q", *mode, "-s", str(root), "-p", "/", str(folder))

    def compiling(self, folders: Sequence[str]) -> str:
        """A hook of mmdebstrap's that compiles the Python files of these folders of its root."""
        words = (sys.executable, "-m", __name__, str(self.tree), *folders)
        return f'PYTHONPATH={shlex.quote(str(HERE.parent))} {shlex.join(words)} "$1"'

    def make_ext4(self, path: Path, megabytes: int, tar: Path, uuid: str, epoch_s: int, *options: str) -> None:
        """Make an ext4 file system with the files of a tar file."""
        seeds = ("-U", uuid, "-E", f"hash_seed={uuid},lazy_itable_init=0,nodiscard")
        command = ("usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", *seeds, *options, "-d", str(tar), str(path))
        self._run(*command, f"{megabytes}M", epoch_s=epoch_s)

    def _run(self, program: str, *arguments: str, epoch_s: int = 0) -> None:
        libraries = [found for found in self.tree.glob("usr/lib/*-linux-gnu") if (found / "libc.so.6").exists()]
        (loader,) = libraries[0].glob("ld-linux*")
        environment = {
            **os.environ,
            "SOURCE_DATE_EPOCH": str(epoch_s),
            "MKE2FS_CONFIG": str(self.tree / "etc/mke2fs.conf"),
            "PYTHONHOME": str(self.tree / "usr"),
        }
        command = [str(loader), "--library-path", str(libraries[0]), str((self.tree / program).resolve()), *arguments]
        subprocess.run(command, env=environment, check=True)


def get(output: Path, suite: str) -> Tools:
    """Return the tools; they are fetched the first time."""
    tree = output / "tools"
    if not tree.exists():
        part = output / "tools.part"
        subprocess.run(["rm", "-rf", part], check=True)
        command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={PACKAGES}", suite, str(part)]
        quiet.run(command)
        part.rename(tree)
    return Tools(tree)


if __name__ == "__main__":
    _, of_tools, *to_compile, of_root = sys.argv
    for name in to_compile:
        Tools(Path(of_tools)).compile_python(Path(of_root), Path(of_root, name))
