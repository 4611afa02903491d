"""Images that buildah makes of a Containerfile, and their containers. These have this machine's network. Needs root."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import child_process
from tests.support.box import APART, BoxUnavailableError

CHROOT = ("--isolation", "chroot")
"""A container without a runtime of its own: it needs no rights that root in a container lacks."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container that was started."""

    buildah: subprocess.Popen[bytes]
    program: str
    """The file that its entry point begins with."""

    def end(self, seconds_max: float) -> int:
        """Send SIGTERM to the entry point, as `podman stop` does. Returns its exit code.

        Raises subprocess.TimeoutExpired.
        """
        pid = self.buildah.pid
        # buildah has one child, which has one child, down to the entry point. It would pass no signal on.
        while Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] != self.program:
            tasks = Path(f"/proc/{pid}/task").glob("*/children")
            (pid,) = [int(child) for task in tasks for child in task.read_text().split()]
        os.kill(pid, signal.SIGTERM)
        return self.buildah.wait(seconds_max)


class Images:
    """Images in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        places = ["--root", folder / "images", "--runroot", folder / "run"]
        # What buildah mounts ends with its process, so the folder can always be removed. Copies of files work anywhere.
        self._buildah = [*map(str, (*APART, "buildah", *places)), "--storage-driver", "vfs"]
        self._log = folder / "buildah.log"

    def import_tree(self, tree: Path, environment: Mapping[str, str]) -> str:
        """Make an image of a tree of files. Returns its name."""
        container = self._call("from", "scratch")
        self._call("add", "--quiet", container, str(tree), "/")
        self._call("config", *(f"--env={name}={value}" for name, value in environment.items()), container)
        self._call("commit", "--quiet", "--rm", container, "base")
        return "localhost/base"

    def build(self, containerfile: Path, context: Path, arguments: Mapping[str, str]) -> str:
        """Build an image. Returns its name."""
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        self._call("build", *CHROOT, *given, "--tag", "built", "--file", str(containerfile), str(context))
        return "localhost/built"

    def configuration(self, image: str) -> dict[str, Any]:
        """What an image says of its containers, by the names of the OCI's specification."""
        told: dict[str, Any] = json.loads(self._call("inspect", "--type", "image", image))["OCIv1"]["config"]
        return told

    @contextmanager
    def container(
        self, image: str, options: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> Iterator[Container]:
        """A container that runs its entry point for the length of a `with`."""
        name = self._call("from", image)
        given = [f"--env={variable}={value}" for variable, value in environment.items()]
        entry = self.configuration(image)["Entrypoint"]
        process = child_process.spawn([*self._buildah, "run", *CHROOT, *given, name, "--", *entry, *options], log)
        try:
            yield Container(process, entry[0])
        finally:
            child_process.stop(process)

    def _call(self, *command: str) -> str:
        with self._log.open("ab") as log:
            ended = subprocess.run(
                [*self._buildah, *command], stdout=subprocess.PIPE, stderr=log, text=True, check=False
            )
        assert ended.returncode == 0, (
            f"buildah {command[0]}: {ended.stdout[-4_000:]}\n{child_process.log_tail(self._log)}"
        )
        return ended.stdout.strip()


@contextmanager
def images(folder: Path) -> Iterator[Images]:
    """A place for images for the length of a `with`. Raises BoxUnavailableError where there can be none."""
    if os.geteuid() != 0:
        raise BoxUnavailableError("only root can make images")
    if shutil.which("buildah") is None:
        raise BoxUnavailableError("there is no `buildah`: install Debian's package buildah")
    folder.mkdir()
    try:
        yield Images(folder)
    finally:
        # Gigabytes, which pytest would keep.
        shutil.rmtree(folder)
