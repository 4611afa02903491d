"""A real schema registry on loopback: Apicurio's, by its Confluent-compatible interface."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from subprocess import Popen

from demo.kafka_broker import HOST, free_ports
from tests.support.java_server import java_server

JARS = Path(__file__).resolve().parents[2] / "build" / "jars" / "registry"
BASE = "/apis/ccompat/v7"


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """A started registry, which forgets its schemas when it ends."""

    process: Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        """Address for `[avro] registry` of a streams file."""
        return f"http://{HOST}:{self.port}{BASE}"

    def register(self, subject: str, schema: object) -> int:
        """Have the registry keep a schema as the subject's next version. Returns its number."""
        body = json.dumps({"schema": json.dumps(schema), "schemaType": "AVRO"}).encode()
        return int(json.loads(_asked(self.port, "POST", f"/subjects/{subject}/versions", body))["id"])


@contextmanager
def schema_registry(directory: Path) -> Iterator[SchemaRegistry]:
    """A registry for the length of a `with`, up and answering."""
    program = next(JARS.glob("*-runner.jar"), None)
    if program is None:
        raise RuntimeError(f"the schema registry is not in {JARS}: `make test` fetches it")
    (port,) = free_ports(1)
    arguments: list[str | Path] = [f"-Dquarkus.http.host={HOST}", f"-Dquarkus.http.port={port}", "-jar", program]
    with java_server(arguments, directory / "registry.log", lambda: _answers(port), "the schema registry") as process:
        yield SchemaRegistry(process, port)


def _answers(port: int) -> bool:
    try:
        _asked(port, "GET", "/subjects")
    except (OSError, HTTPException):
        return False
    return True


def _asked(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
    with closing(HTTPConnection(HOST, port, timeout=20)) as connection:
        connection.request(method, BASE + path, body, headers)
        answer = connection.getresponse()
        read = answer.read()
    if answer.status != HTTPStatus.OK:
        raise HTTPException(f"{method} {path}: {answer.status} {read.decode(errors='replace')}")
    return read
