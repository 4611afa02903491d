"""Starts programs that die with the demo: whatever ends it, even `kill -9`, ends its children too.

Run as a file, this module is the small step between. It asks the kernel for a signal on its parent's death, and then
becomes the program.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def spawn(
    command: Sequence[str | Path],
    log: Path,
    *,
    output: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own. Its messages are appended to `log`, its results to `output` if given.

    The program gets SIGKILL when the calling *thread* ends (that is how the kernel counts, prctl(2)). So call from a
    thread that lives as long as the program shall. A terminal's Ctrl-C does not reach it: its starter stops it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors, (output or log).open("ab") as results:
        return subprocess.Popen(
            # -I and -S: the step between needs nothing from site-packages, and starts in 20 ms.
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=results,
            stderr=errors,
            env=None if env is None else dict(env),
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes], patience_s: float = 10.0) -> int:
    """Send SIGTERM, then after `patience_s` SIGKILL to it and to all that it started. Returns its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
    code = process.wait()
    kill_session(process)
    return code


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to all that still runs of the program's session, and wait until nothing of it does."""
    # The session has the program's pid as its number, and lives while one member lives. A process group would not do:
    # Spark's Python daemon makes one of its own.
    while members := _session_members(process.pid):
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.poll()
        time.sleep(0.01)
    process.wait()


def _session_members(session: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are enough
        # A process that has ended since has no file, or an empty one.
        with contextlib.suppress(ValueError, OSError):
            _, _, fields = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")
            state, _, _, its_session, *_ = fields.split()
            if int(its_session) == session and state not in "ZX":
                found.append(int(name))
    return found


def log_tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, for a person who has to know why."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16_384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _become(parent: int, command: Sequence[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the prctl: nobody would ever stop this program
        sys.exit(1)
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - becoming the program is what this step is for
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
