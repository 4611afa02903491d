"""The events about a buffer that takes nothing: one for each change, and few of a disk that comes and goes."""

from collections.abc import Callable
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


def after(seconds: int, trouble: str = "failing") -> tuple[str, dict[str, object]]:
    return "buffer-well", {"trouble": trouble, "seconds": seconds}


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([(0, WELL), (1, WELL)], []),
        ([(0, WELL), (1, FAILING), (2, FAILING), (9, WELL), (10, WELL)], [TROUBLE, after(8)]),
        ([(1, FULL), (5, WELL)], [("buffer-trouble", {"trouble": "full", "error": None}), after(4, "full")]),
        ([(1, WITHOUT_KAFKA), (2, FAILING)], [TROUBLE]),
        # Neither had the report while it lasted.
        ([(1, WITHOUT_KAFKA), (7, WELL), (8, WELL)], [TROUBLE, after(6)]),
        ([(second, FAILING if second % 2 else WELL) for second in range(int(INTERVAL_S))], [TROUBLE, after(1)]),
        # What lasts is told, however soon it comes after another.
        ([(1, FAILING), (2, WELL), (3, FAILING), (2 + INTERVAL_S, FAILING)], [TROUBLE, after(1), TROUBLE]),
    ],
)
@pytest.mark.parametrize("refused", [0, 1])
def test_each_change_is_told_once(
    looks: list[tuple[float, tuple[str, bool, bool]]], told: list[object], refused: int
) -> None:
    """What is refused is told again."""
    stored: list[object] = []
    refusals = 0

    def append_own(entry: object, done: Callable[[bool], None]) -> None:
        nonlocal refusals
        if refusals < refused:
            refusals += 1
            done(False)
            return
        stored.append(entry)
        done(True)

    buffer: Any = SimpleNamespace(append_own=append_own)

    def event_entry(kind: str, body: dict[str, object]) -> tuple[str, dict[str, object]]:
        assert body.pop("device") is None
        return kind, body

    events: Any = SimpleNamespace(topic="events", event_entry=event_entry)
    watch = BufferWatch(buffer, events)
    for now_s, (error, is_full, is_direct) in looks:
        buffer.state = SimpleNamespace(failing=error or None)
        buffer.is_full = is_full
        buffer.direct_topics = frozenset({"events"} if is_direct else ())
        for _ in range(1 + refused):
            watch.look(float(now_s))
    assert stored == told


def test_nothing_is_told_twice_while_a_report_is_on_its_way() -> None:
    reports: list[Callable[[bool], None]] = []
    buffer: Any = SimpleNamespace(
        state=SimpleNamespace(failing="gone"),
        is_full=False,
        direct_topics=frozenset({"events"}),
        append_own=lambda _, done: reports.append(done),
    )
    events: Any = SimpleNamespace(topic="events", event_entry=lambda kind, _: kind)
    watch = BufferWatch(buffer, events)
    for now_s in range(5):
        watch.look(float(now_s))
    assert len(reports) == 1
    reports[0](False)
    watch.look(6.0)
    assert len(reports) == 2


def test_how_long_it_lasted_is_told_although_the_report_was_on_its_way_when_it_ended() -> None:
    reports: list[tuple[dict[str, object], Callable[[bool], None]]] = []
    buffer: Any = SimpleNamespace(
        state=SimpleNamespace(failing="gone"),
        is_full=False,
        direct_topics=frozenset({"events"}),
        append_own=lambda body, done: reports.append((body, done)),
    )
    events: Any = SimpleNamespace(topic="events", event_entry=lambda _, body: body)
    watch = BufferWatch(buffer, events)
    watch.look(1.0)
    buffer.state.failing = None
    watch.look(4.0)
    watch.look(9.0)
    reports[0][1](True)
    watch.look(10.0)
    assert reports[1][0]["seconds"] == 3
