"""A file system of a few megabytes in a mount namespace of its own, that a test may fill to the last byte."""

import errno
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.gateways import SLUICE, wait_for_port

PAGE_BYTES = 4096
FILLER = "others.dat"


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """`inside` is the path that programs see which `enter` starts; `outside` is the same place for everybody else."""

    inside: Path
    outside: Path
    enter: Sequence[str]

    def fill(self, leave_bytes: int = 0) -> None:
        """Let others take all the room there is, but for so much."""
        with (self.outside / FILLER).open("ab", buffering=0) as filler:
            while True:
                free = self.free_bytes() - leave_bytes
                if free < PAGE_BYTES:
                    return
                try:
                    filler.write(bytes(min(free, 64 * PAGE_BYTES)))
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        return
                    raise

    def empty(self) -> None:
        """Let the others give their room back."""
        (self.outside / FILLER).unlink()

    def free_bytes(self) -> int:
        found = os.statvfs(self.outside)
        return found.f_bavail * found.f_frsize


def mount_refusal() -> str | None:
    """Why no file system can be mounted here; None where one can."""
    try:
        ended = subprocess.run(
            [*_unshare(), "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unshare is not installed"
    return None if ended.returncode == 0 else f"a tmpfs cannot be mounted here: {ended.stderr.strip()[:100]}"


@contextmanager
def small_disk(directory: Path, size: str = "4M") -> Iterator[SmallDisk]:
    """Mount a tmpfs on a directory, for those alone who enter; gone at the end, with what is in it."""
    directory.mkdir(exist_ok=True)
    script = 'mount -t tmpfs -o "size=$1" none "$2" && echo mounted && exec sleep infinity'
    holder = subprocess.Popen([*_unshare(), "sh", "-c", script, "sh", size, directory], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"mounted\n":
            raise OSError(f"no tmpfs of {size} on {directory}")
        outside = Path(f"/proc/{holder.pid}/root{directory}")
        user = () if os.geteuid() == 0 else ("--preserve-credentials", "--user")
        yield SmallDisk(directory, outside, ("nsenter", "--target", str(holder.pid), "--mount", *user))
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


@contextmanager
def daemon_on(disk: SmallDisk, config: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`sluice run` where the disk is mounted, listening; stopped by SIGTERM at the end unless it was killed before."""
    with config.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen([*disk.enter, SLUICE, "run", "--config", config], stderr=log)
        try:
            wait_for_port(port, process)
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(20)


def _unshare() -> list[str]:
    if os.geteuid() == 0:
        return ["unshare", "--mount"]
    return ["unshare", "--user", "--map-root-user", "--mount"]
