"""Runs `sluice-cloud desk` as a process, and asks it over HTTP."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.support.waiting import patience

SLUICE_CLOUD = str(Path(sys.executable).parent / "sluice-cloud")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, read whole. Headers have lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(slots=True)
class Desk:
    """A running server."""

    process: subprocess.Popen[str]
    address: str
    """The address with the token, as it was printed."""
    port: int = field(init=False)
    token: str = field(init=False)

    def __post_init__(self) -> None:
        where, _, self.token = self.address.partition("/?token=")
        self.port = int(where.rpartition(":")[2])

    def get(
        self,
        path: str,
        told: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        method: str = "GET",
        with_token: bool = True,
    ) -> Answer:
        """Ask for a path with parameters."""
        parameters = {**(told or {}), **({"token": self.token} if with_token else {})}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=patience(60))
        try:
            connection.request(method, f"{path}?{urlencode(parameters)}", headers=dict(headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def stop(self) -> tuple[int, str]:
        """End it as Ctrl-C does, and return its exit code and what it said on standard error."""
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=patience(30))
        return self.process.returncode, said


@contextmanager
def desk(warehouse: str, folder: Path, *options: str) -> Iterator[Desk]:
    """Start the server from an empty folder, without Java, and end it."""
    environment: dict[str, Any] = {"PATH": "/nonexistent", "HOME": str(folder), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [SLUICE_CLOUD, "desk", "--warehouse", warehouse, "--no-browser", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, (line, process.stderr and process.stderr.read())
        yield Desk(process, line.split()[-1])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
