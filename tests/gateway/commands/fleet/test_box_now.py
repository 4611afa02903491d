"""The box is asked by a child, whose time and memory are bounded, and whatever it meets harms nobody else."""

import signal
import subprocess
import sys

import pytest

from tests.support.waiting import WAIT_S, patience

PROGRAM = """
import os, signal, time
from gateway.commands.fleet import box_now
from gateway.host.last_update import Before

def well():
    return Before(service=True)

def without_end():
    time.sleep(600)

def without_bound():
    held = []
    while True:
        held.append(bytes(1_000_000))

def deep():
    raise RecursionError

def without_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

box_now.ASKED_S = {patience}
print(box_now.asked({look}, Before))
"""


@pytest.mark.parametrize(
    ("look", "patience", "told"),
    [
        ("well", 60, "Before(service=True, readings=False, kafka=False)"),
        ("without_end", 0.1, "None"),
        ("without_bound", 60, "None"),
        ("deep", 60, "None"),
    ],
)
def test_a_look_comes_to_an_end(look: str, patience: float, told: str) -> None:
    # A process without threads, as the command is one.
    command = [sys.executable, "-c", PROGRAM.format(look=look, patience=patience)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == told


def test_a_child_ends_although_its_parent_was_killed() -> None:
    """Else it would keep the lock, and no look could begin until the box restarts."""
    command = [sys.executable, "-c", PROGRAM.format(look="without_parent", patience=0.5)]
    # Its output ends with the last process that has it.
    ended = subprocess.run(command, capture_output=True, check=False, timeout=patience(WAIT_S))
    assert ended.returncode == -signal.SIGKILL
