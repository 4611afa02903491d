"""One Kafka broker for all processes of a test run. The first that asks has it started; it ends after the last one.

Run as a file, this module is the process that keeps the broker. Users hold a lock on a file meanwhile. The kernel takes
that lock off every process that ends, so the broker outlives none of them for long.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.child_process import log_tail
from demo.kafka_broker import Broker, BrokerError, kafka_broker

USERS, STARTS = "users.lock", "starts.lock"
PORT = "port"


@contextmanager
def shared_broker(folder: Path) -> Iterator[Broker]:
    """The broker of all who name this folder, for the length of a `with`. Raises BrokerError."""
    folder.mkdir(exist_ok=True)
    with (folder / USERS).open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield Broker(_port(folder))


def _port(folder: Path) -> int:
    with (folder / STARTS).open("a") as starts, (folder / "keeper.log").open("ab") as log:
        fcntl.flock(starts, fcntl.LOCK_EX)
        if not (folder / PORT).exists():
            command = [sys.executable, "-m", "tests.support.shared_broker", str(folder)]
            if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
                raise BrokerError(f"no broker to share:\n{log_tail(folder / 'keeper.log')}")
    return int((folder / PORT).read_text())


def keep(folder: Path) -> None:
    """Run a broker while somebody uses it."""
    with kafka_broker(folder / f"broker-{os.getpid()}") as broker, (folder / USERS).open("a") as users:
        unfinished = folder / f"{PORT}.part"
        unfinished.write_text(str(broker.port))
        unfinished.rename(folder / PORT)
        fcntl.flock(users, fcntl.LOCK_EX)
        (folder / PORT).unlink()


def start_keeper(folder: Path) -> int:
    """Start a process that outlives this one and its starter. Returns 0 once there is a broker, or 1."""
    keeper = os.fork()
    if keeper == 0:
        os.setsid()
        keep(folder)
        return 0
    while not (folder / PORT).exists():
        if os.waitpid(keeper, os.WNOHANG) != (0, 0):
            return 1
        time.sleep(0.02)
    return 0


if __name__ == "__main__":
    sys.exit(start_keeper(Path(sys.argv[1])))
