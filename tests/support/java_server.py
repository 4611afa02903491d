"""Servers in Java for the tests, up and answering before they are used."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from demo import child_process
from demo.kafka_broker import java_program
from tests.support.waiting import patience

START_S_MAX = 90.0
"""They are up in 5 s on an idle machine."""


@contextmanager
def java_server(
    arguments: Sequence[str | Path], log: Path, is_ready: Callable[[], bool], name: str
) -> Iterator[Popen[bytes]]:
    """A server for the length of a `with`. Raises RuntimeError with the end of its log if it does not start."""
    options = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    process = child_process.spawn([java_program(), *options, *arguments], log)
    try:
        deadline = time.monotonic() + patience(START_S_MAX)
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start:\n{child_process.log_tail(log)}")
            time.sleep(0.2)
        yield process
    finally:
        child_process.stop(process)
