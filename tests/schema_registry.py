"""A real schema registry on loopback: Apicurio's, by its Confluent-compatible interface."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from subprocess import Popen

from demo import child_process
from demo.kafka_broker import HOST, free_ports

JARS = Path(__file__).resolve().parent.parent / "build" / "jars" / "registry"
BASE = "/apis/ccompat/v7"
START_S_MAX = 90.0
"""It is up in 5 s on an idle machine."""


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """A started registry, which forgets its schemas when it ends."""

    process: Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        """What `[avro] registry` of a streams file names."""
        return f"http://{HOST}:{self.port}{BASE}"

    def register(self, subject: str, schema: object) -> int:
        """Have the registry keep a schema as the subject's next version. Returns its number."""
        body = json.dumps({"schema": json.dumps(schema), "schemaType": "AVRO"}).encode()
        return int(json.loads(self._asked("POST", f"/subjects/{subject}/versions", body))["id"])

    def is_ready(self) -> bool:
        """Tell whether it answers."""
        try:
            self._asked("GET", "/subjects")
        except (OSError, HTTPException):
            return False
        return True

    def _asked(self, method: str, path: str, body: bytes = b"") -> bytes:
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        with closing(HTTPConnection(HOST, self.port, timeout=20)) as connection:
            connection.request(method, BASE + path, body, headers)
            answer = connection.getresponse()
            read = answer.read()
        if answer.status != HTTPStatus.OK:
            raise HTTPException(f"{method} {path}: {answer.status} {read.decode(errors='replace')}")
        return read


@contextmanager
def schema_registry(directory: Path) -> Iterator[SchemaRegistry]:
    """A registry for the length of a `with`, up and answering."""
    (port,) = free_ports(1)
    command: list[str | Path] = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    program = next(JARS.glob("*-runner.jar"), None)
    if program is None:
        raise RuntimeError(f"the schema registry is not in {JARS}: `make test` fetches it")
    command += [f"-Dquarkus.http.host={HOST}", f"-Dquarkus.http.port={port}", "-jar", program]
    log = directory / "registry.log"
    registry = SchemaRegistry(child_process.spawn(command, log), port)
    try:
        _wait_until_ready(registry, log)
        yield registry
    finally:
        child_process.stop(registry.process)


def _wait_until_ready(registry: SchemaRegistry, log: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    while not registry.is_ready():
        if registry.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the schema registry did not start:\n{child_process.log_tail(log)}")
        time.sleep(0.2)
