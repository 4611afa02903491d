"""Runs one box's daemon as systemd does: takes its word that it is ready and alive, and starts it again if it ends.

`ask` answers in place of `systemctl`, as far as `sluice fleet pull` asks: `try-restart` and `show`.
"""

import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from demo import child_process

if TYPE_CHECKING:
    import subprocess

WATCHDOG_S: Final = 3.0
"""Time-out of the watchdog. The daemon feeds it three times as often."""
RESTART_S: Final = 0.5
"""Seconds after which a daemon that has ended is started again."""
STOP_S_MAX: Final = 30.0
START_S_MAX: Final = 90.0
_TURN_S: Final = 0.2
_FAILED: Final = (1, "Job for sluice.service failed because the control process exited with error code.")


class BoxService:
    """One daemon, and a thread that is its systemd. Leaving the `with` stops both."""

    def __init__(self, folder: Path, command: Sequence[str | Path], log: Path) -> None:
        """Prepare the service of the box that a folder is."""
        self._folder = folder
        self._command = command
        self._log = log
        self._leave = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_us = self._fed_us = 0
        self._is_ready = False
        self.starts = 0
        self._thread = threading.Thread(target=self._run, name=f"service of {folder.name}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        self.join()

    def start(self) -> None:
        """Begin to start the daemon."""
        self._thread.start()

    def leave(self) -> None:
        """Begin to stop the daemon."""
        self._leave.set()

    def join(self) -> None:
        """Wait until the daemon has stopped."""
        self._thread.join()

    @property
    def is_ready(self) -> bool:
        """Whether the daemon runs and has said that it is ready."""
        return self._is_ready

    @property
    def is_over(self) -> bool:
        """Whether its thread has ended, and the daemon with it."""
        return not self._thread.is_alive()

    def kill(self) -> None:
        """End the daemon by `kill -9`. It is started again."""
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGKILL)

    def _run(self) -> None:
        # The daemon gets SIGKILL if this thread ends, whatever ends it (`child_process.spawn`).
        with ExitStack() as stack:
            told = stack.enter_context(_bound(_address(self._folder, "notify"), socket.SOCK_DGRAM))
            asked = stack.enter_context(_bound(_address(self._folder, "systemctl"), socket.SOCK_STREAM))
            asked.listen()
            stack.callback(self._stop)
            self._start()
            while not self._leave.is_set():
                self._hear(told)
                if not self._lives():
                    self._is_ready = False
                    self._leave.wait(RESTART_S)
                    self._start()
                with suppress(BlockingIOError):
                    channel, _ = asked.accept()
                    # A look that is killed may leave half a question.
                    with channel, suppress(OSError, ValueError):
                        self._answer(channel, told)

    def _answer(self, channel: socket.socket, told: socket.socket) -> None:
        channel.settimeout(1.0)
        words = json.loads(channel.recv(65_536))
        self._hear(told, 0.0)
        channel.sendall(json.dumps(self._done(words, told)).encode())

    def _done(self, words: Sequence[str], told: socket.socket) -> tuple[int, str]:
        if words[0] == "try-restart":
            self._stop()
            self._start()
            until_s = time.monotonic() + START_S_MAX
            while not self._is_ready and self._lives() and time.monotonic() < until_s:
                self._hear(told)
            return (0, "") if self._is_ready else _FAILED
        if words[0] == "show":
            state = ("active" if self._is_ready else "activating") if self._lives() else "failed"
            return 0, (
                f"ActiveState={state}\nActiveEnterTimestampMonotonic={self._ready_us}\n"
                f"WatchdogTimestampMonotonic={self._fed_us}\n"
            )
        return 1, f"this is not systemd, and knows nothing of systemctl {' '.join(words)}"

    def _hear(self, told: socket.socket, turn_s: float = _TURN_S) -> None:
        """Take in what the daemon tells by sd_notify(3), for a turn or until it tells nothing more."""
        told.settimeout(turn_s)
        with suppress(BlockingIOError, TimeoutError):
            while True:
                assignments = told.recv(65_536).decode(errors="replace").split("\n")
                now_us = time.monotonic_ns() // 1_000
                if "READY=1" in assignments:
                    self._is_ready, self._ready_us, self._fed_us = True, now_us, now_us
                if "WATCHDOG=1" in assignments:
                    self._fed_us = now_us
                told.settimeout(0.0)

    def _start(self) -> None:
        self._is_ready = False
        self.starts += 1
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": "@" + _address(self._folder, "notify")[1:],
            "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
        }
        self._process = child_process.spawn(self._command, self._log, env=environment)

    def _stop(self) -> None:
        self._is_ready = False
        if self._process is not None:
            child_process.stop(self._process, STOP_S_MAX)

    def _lives(self) -> bool:
        return self._process is not None and self._process.poll() is None


def ask(folder: Path, *arguments: str) -> tuple[int, str]:
    """Do `systemctl` of a box: its exit code, and what it prints."""
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(STOP_S_MAX + START_S_MAX)
            channel.connect(_address(folder, "systemctl"))
            channel.sendall(json.dumps(arguments).encode())
            code, told = json.loads(channel.recv(65_536))
    except (OSError, ValueError) as error:
        return 1, str(error)
    return int(code), str(told)


def _address(folder: Path, of: str) -> str:
    """A name in the abstract namespace (unix(7)): paths of sockets may have 107 bytes, and folders more."""
    return f"\0sluice-demo-{of}-{hashlib.sha256(bytes(folder.absolute())).hexdigest()[:16]}"


def _bound(address: str, kind: socket.SocketKind) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, kind)
    channel.bind(address)
    channel.setblocking(False)
    return channel
