"""Kafka Connect as it is: a standalone worker with its default error handling, and connectors by their settings."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from demo.kafka_broker import HOST, free_ports
from tests.support.java_server import java_server

JARS = Path(__file__).resolve().parents[2] / "build" / "jars" / "connect"
RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True)
class ConnectWorker:
    """A started worker. A task that fails stays as it is: by default nothing begins it anew."""

    port: int

    def states(self, connector: str) -> list[str]:
        """The states of a connector's tasks, each with the beginning of its error if there is one."""
        with urlopen(f"http://{HOST}:{self.port}/connectors/{connector}/status", timeout=20) as answer:
            told: dict[str, Any] = json.load(answer)
        return [f"{task['state']} {task.get('trace', '')[:2000]}".strip() for task in told["tasks"]]


@contextmanager
def connect_standalone(
    directory: Path, bootstrap: str, connectors: Mapping[str, Mapping[str, str]], worker: Mapping[str, str]
) -> Iterator[ConnectWorker]:
    """A worker for the length of a `with`, with `connectors` by their names. `worker` has settings beside addresses."""
    sinks = sorted(JARS.glob("connect-file-*.jar"))
    if not sinks:
        raise RuntimeError(f"Kafka Connect is not in {JARS}: `make test` fetches it")
    (port,) = free_ports(1)
    own = {
        "bootstrap.servers": bootstrap,
        "listeners": f"http://{HOST}:{port}",
        "offset.storage.file.filename": str(directory / "connect.offsets"),
        "offset.flush.interval.ms": "1000",
        # As in a Kafka of one's own, where the sinks for files are not on the class path.
        "plugin.path": ",".join(map(str, sinks)),
        "plugin.discovery": "only_scan",
        **worker,
    }
    files = [_written(directory / "worker.properties", own)]
    files += [
        _written(directory / f"{name}.properties", {"name": name, **settings}) for name, settings in connectors.items()
    ]
    classes = ":".join(str(jar) for jar in sorted(JARS.glob("*.jar")) if jar not in sinks)
    arguments: list[str | Path] = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", classes]
    arguments += ["org.apache.kafka.connect.cli.ConnectStandalone", *files]
    with java_server(arguments, directory / "connect.log", lambda: _has(port, connectors), "Kafka Connect"):
        yield ConnectWorker(port)


def _written(path: Path, settings: Mapping[str, str]) -> Path:
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return path


def _has(port: int, connectors: Mapping[str, object]) -> bool:
    try:
        with urlopen(f"http://{HOST}:{port}/connectors", timeout=20) as answer:
            return set(json.load(answer)) == set(connectors)
    except (OSError, HTTPException):
        return False
