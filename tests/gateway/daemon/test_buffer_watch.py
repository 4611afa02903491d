"""The events about a buffer that takes nothing: one for each change, and few of a disk that comes and goes."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.daemon.buffer_watch import INTERVAL_S, BufferWatch

WELL = ("", False, True)
"""The disk's error, whether the buffer is full, whether events go to Kafka first."""
FAILING = ("disk I/O error", False, True)
WITHOUT_KAFKA = ("disk I/O error", False, False)
FULL = ("", True, False)
TROUBLE = ("buffer-trouble", {"trouble": "failing", "error": "disk I/O error"})


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([(0, WELL), (1, WELL)], []),
        (
            [(0, WELL), (1, FAILING), (2, FAILING), (9, WELL), (10, WELL)],
            [TROUBLE, ("buffer-well", {"trouble": "failing", "seconds": 8})],
        ),
        (
            [(1, FULL), (5, WELL)],
            [
                ("buffer-trouble", {"trouble": "full", "error": None}),
                ("buffer-well", {"trouble": "full", "seconds": 4}),
            ],
        ),
        ([(1, WITHOUT_KAFKA), (2, FAILING)], [TROUBLE]),
        # Neither had the report while it lasted.
        ([(1, WITHOUT_KAFKA), (7, WELL)], [TROUBLE, ("buffer-well", {"trouble": "failing", "seconds": 6})]),
        (
            [(second, FAILING if second % 2 else WELL) for second in range(int(INTERVAL_S))],
            [TROUBLE, ("buffer-well", {"trouble": "failing", "seconds": 1})],
        ),
        # What lasts is told, however soon it comes after another.
        (
            [(1, FAILING), (2, WELL), (3, FAILING), (2 + INTERVAL_S, FAILING)],
            [TROUBLE, ("buffer-well", {"trouble": "failing", "seconds": 1}), TROUBLE],
        ),
    ],
)
def test_each_change_is_told_once(looks: list[tuple[float, tuple[str, bool, bool]]], told: list[object]) -> None:
    found: list[object] = []
    buffer: Any = SimpleNamespace()
    watch = BufferWatch(buffer, lambda kind, _, **details: found.append((kind, details)), "events")
    for now_s, (error, is_full, is_direct) in looks:
        buffer.state = SimpleNamespace(failing=error or None)
        buffer.is_full = is_full
        buffer.direct_topics = frozenset({"events"} if is_direct else ())
        watch.look(float(now_s))
    assert found == told
