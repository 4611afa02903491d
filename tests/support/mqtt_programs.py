"""Runs programs made with other people's MQTT clients: each publishes what it is given and tells what became of it.

The programs lie in `tests/support/mqtt_clients`, one for each client, and do the same job. Their environment says where
to connect, with a kept session, and which commands to subscribe to. They publish each line of their standard input, and
end with it. They write a line for each event: `connected`, `subscribed`, `acknowledged READING` and `command PAYLOAD`.
Any other line tells a failure.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = ROOT / "tests" / "support" / "mqtt_clients"
BUILT: Final = ROOT / "build" / "clients"
SECRET: Final = "correct horse"  # noqa: S105 - of a gateway that lives for a test
DIGEST: Final = hashlib.sha256(SECRET.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Program:
    """The command of a client's program, and the tools that it needs."""

    command: tuple[str | Path, ...]
    needs: str | None = None
    """A program on the `PATH` without which it can be neither built nor run."""
    target: str | None = None
    """Target of `make`, below BUILT."""
    levels: tuple[int, ...] = (4,)
    """Protocol levels that the program speaks: 4 is MQTT 3.1.1, and 5 is MQTT 5."""


PROGRAMS: Final = {
    "paho-python": Program((sys.executable, SOURCES / "paho_python.py"), levels=(4, 5)),
    "mosquitto": Program((sys.executable, SOURCES / "mosquitto_programs.py"), "mosquitto_pub", levels=(4, 5)),
    "mqttjs": Program(("node", BUILT / "mqttjs" / "client.js"), "npm", "mqttjs.done", (4, 5)),
    "paho-go": Program((BUILT / "paho-go",), "go", "paho-go"),
    "rumqttc": Program((BUILT / "rumqttc" / "release" / "client",), "cargo", "rumqttc.done"),
    "gmqtt": Program((BUILT / "gmqtt" / "bin" / "python", SOURCES / "gmqtt" / "client.py"), None, "gmqtt.done", (5,)),
}


def available(client: str) -> bool:
    """Whether this machine can build and run a client's program."""
    needs = PROGRAMS[client].needs
    return needs is None or shutil.which(needs) is not None


def build(client: str) -> None:
    """Make a client's program, where it is missing or older than its source."""
    if (target := PROGRAMS[client].target) is None:
        return
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "--silent", "-C", ROOT, f"build/clients/{target}"], check=True)


@dataclass(frozen=True, slots=True)
class Job:
    """Publish readings, numbered from 0, to one topic; receive commands, if there is a filter for them."""

    port: int
    name: str
    """The user's, and the client identifier."""
    topic: str
    qos: int
    commands: str = ""
    window: int = 50
    """Readings that the program has been given and has not finished. The gateway marks as many that come again after
    their PUBREL as RELEASED_MAX, 64; rumqttc loses some that nobody has acknowledged if it holds more than 100."""
    reading_bytes: int = 1
    """The least length of a reading, which is its number."""
    level: int = 4
    """Protocol level."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "MQTT_HOST": "127.0.0.1",
            "MQTT_PORT": str(self.port),
            "MQTT_NAME": self.name,
            "MQTT_SECRET": SECRET,
            "MQTT_TOPIC": self.topic,
            "MQTT_QOS": str(self.qos),
            "MQTT_COMMANDS": self.commands,
            "MQTT_LEVEL": str(self.level),
        }

    def reading(self, number: int) -> str:
        return f"{number:0{self.reading_bytes}}"


@dataclass(slots=True)
class Running:
    """A program at its job, and what it has told."""

    job: Job
    process: subprocess.Popen[str]
    given: int = 0
    acknowledged: set[int] = field(default_factory=set)
    """Readings whose PUBACK or PUBCOMP came."""
    commands: set[int] = field(default_factory=set)
    connections: int = 0
    subscribed: bool = False
    wrong: list[str] = field(default_factory=list)
    _limit: float = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def finished(self) -> bool:
        """Whether all that it was given is acknowledged."""
        return self._unfinished == 0

    @property
    def _unfinished(self) -> int:
        return self.given - len(self.acknowledged)

    def publish(self, limit: float) -> None:
        """Give it readings from now on until it has been given so many; no more if it has been."""
        with self._lock:
            self._limit = limit
        self._feed()

    def _feed(self) -> None:
        assert self.process.stdin is not None
        with self._lock:
            while self.given < self._limit and self._unfinished < self.job.window:
                self.process.stdin.write(f"{self.job.reading(self.given)}\n")
                self.given += 1
            self.process.stdin.flush()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            match line.split():
                case ["acknowledged", reading]:
                    self.acknowledged.add(int(reading))
                    self._feed()
                case ["command", payload]:
                    self.commands.add(int(payload))
                case ["subscribed"]:
                    self.subscribed = True
                case ["connected"]:
                    self.connections += 1
                case _:
                    self.wrong.append(line)


@contextlib.contextmanager
def running(client: str, job: Job) -> Iterator[Running]:
    """A client's program at its job, ended with its children at the end of the block."""
    with subprocess.Popen(
        PROGRAMS[client].command,
        env=os.environ | job.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        program = Running(job, process)
        listening = threading.Thread(target=program.listen)
        listening.start()
        try:
            yield program
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            listening.join()
