import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark.engine.session import SHORT_LIVED
from tests.support.waiting import patience

PATIENCE_S = 120
MARK = "SLUICE_TEST_MARK"
PROGRAMS = ("kafka.Kafka", "sluice run", "sluice_sim fleet", "avr-runner", "sluice-cloud ingest")


def processes(mark: str) -> dict[int, str]:
    """The running programs that were started, however indirectly, with this mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if f"{MARK}={mark}".encode() in environment and command:
            found[int(folder.name)] = command
    return found


def nothing_left(mark: str) -> dict[int, str]:
    """Wait until no such program runs. Returns the programs that still run after a while."""
    deadline = time.monotonic() + patience(PATIENCE_S)
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@contextmanager
def measuring_demo(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A small demo in a folder of its own, with everything started."""
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'firmware-sim'}",
        "DEMO_SECONDS": "600",
        "DEMO_SENSORS": "3",
        "DEMO_SERIAL_SENSORS": "1",
        "SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "demo"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        watchdog = threading.Timer(2 * PATIENCE_S, demo.kill)
        watchdog.start()
        try:
            assert demo.stdout is not None
            lines = iter(demo.stdout)
            said = [next(lines)]
            while "Measure with the uplink up" not in said[-1]:
                line = next(lines, None)
                assert line is not None, "".join(said)
                said.append(line)
            # The steps below have limits of their own.
            watchdog.cancel()
            yield demo, mark
        finally:
            watchdog.cancel()
            demo.kill()


def until_all_run(mark: str) -> dict[int, str]:
    """The demo's programs once each has taken its name: a process just forked still has its parent's."""
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    while True:
        running = processes(mark)
        commands = " ".join(running.values())
        missing = [name for name in PROGRAMS if name not in commands]
        if not missing:
            return running
        assert time.monotonic() < deadline_s, f"{missing} not among {commands}"
        time.sleep(0.05)


# The Spark of these is the demo's own: they need not wait for the one that other tests share.
pytestmark = [pytest.mark.kafka, pytest.mark.avr]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long(seconds=20))])
def test_ctrl_c_stops_every_program_that_was_started_and_a_second_demo_starts_none(
    tmp_path: Path, number: signal.Signals
) -> None:
    with measuring_demo(tmp_path) as (demo, mark):
        until_all_run(mark)
        second = subprocess.run(
            [sys.executable, "-m", "demo"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'firmware-sim'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 1
        assert "Another demo is running" in second.stderr
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=PATIENCE_S)
        assert demo.returncode == 130
        assert "nothing is left running" in output
        assert processes(mark) == {}


@pytest.mark.long(seconds=20)
def test_nothing_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    with measuring_demo(tmp_path) as (demo, mark):
        until_all_run(mark)
        demo.kill()
        demo.wait(PATIENCE_S)
        assert nothing_left(mark) == {}


@pytest.mark.long(seconds=20)
def test_a_program_that_ends_by_itself_fails_the_demo_and_is_named(tmp_path: Path) -> None:
    with measuring_demo(tmp_path) as (demo, mark):
        (fleet,) = [pid for pid, command in until_all_run(mark).items() if "sluice_sim fleet" in command]
        os.kill(fleet, signal.SIGKILL)
        output, _ = demo.communicate(timeout=PATIENCE_S)
        assert demo.returncode == 1
        assert "The demo failed: fleet was ended by signal 9" in output
        assert nothing_left(mark) == {}
