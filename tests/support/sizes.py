"""Sizes of tests: small in `make test`, whole in `make test-long`; and the choice of a slice."""

import os
import secrets
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final, TypeVar

import pytest

WHOLE: Final = os.environ.get("SLUICE_TEST_WHOLE") == "1"
"""Whether all is done, as `make test-long` and `make test-slice` set it."""
SLICES: Final = 30
"""Parts of what `make test` leaves out. Each commit runs one, by its hash, so that in time all of them are run."""
SLICE_S_MAX: Final = 300
"""A test that takes longer is in no slice."""
T = TypeVar("T")


def size(small: T, whole: T) -> T:
    """Size of a test. Tests that ask for it need the mark `campaign`, or `test_sizes` fails."""
    return whole if WHOLE else small


SEED: Final = int(os.environ.setdefault("SLUICE_TEST_SEED", str(size(1, secrets.randbits(32)))))
"""Seed of the tests' random draws. In whole runs it is new each time. A run prints it first; give it again to repeat
the run."""


def left_to_long(cases: Iterable[str], kept: Container[str], seconds: int) -> list[Any]:
    """The cases of a test that `make test` leaves out; each takes so many seconds."""
    mark = pytest.mark.long(seconds=seconds)
    return [pytest.param(case, marks=mark) for case in cases if case not in kept]


def seconds(item: pytest.Item) -> int | None:
    """Seconds that a whole test takes on two idle cores; None if `make test` runs all of it.

    Raises UsageError where the mark does not say.
    """
    mark = item.get_closest_marker("long") or item.get_closest_marker("campaign")
    if mark is None:
        return None
    if set(mark.kwargs) != {"seconds"}:
        raise pytest.UsageError(f"{item.nodeid}: say how long it takes, as in @pytest.mark.{mark.name}(seconds=60)")
    return int(mark.kwargs["seconds"])


def estimate_s(item: pytest.Item) -> float:
    """About how long a test takes, as far as its marks tell: enough to know which files take longest."""
    has = {mark.name for mark in item.iter_markers()}
    return seconds(item) or (5.0 if has & {"kafka", "avr", "box", "slow"} else 0.1)


def slice_of(items: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """Give one of SLICES parts of the tests that `make test` leaves out or makes smaller: all take about as long.

    Those of Spark run beside the others, and are shared out by themselves.
    """
    costs = {item: cost for item in items if (cost := seconds(item)) is not None and cost <= SLICE_S_MAX}
    chosen: list[pytest.Item] = []
    for of_spark in (True, False):
        parts: list[list[pytest.Item]] = [[] for _ in range(SLICES)]
        shared = [item for item in costs if (item.get_closest_marker("spark") is not None) is of_spark]
        for item in sorted(shared, key=lambda each: (-costs[each], each.nodeid)):
            min(parts, key=lambda each: sum(costs[one] for one in each)).append(item)
        chosen += parts[number % SLICES]
    return chosen
