"""The box is asked by a child, whose time and memory are bounded, and whatever it meets harms nobody else."""

import subprocess
import sys

import pytest

PROGRAM = """
import time
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
