import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from demo.progress import Progress


def plain_progress() -> tuple[Progress, io.StringIO]:
    output = io.StringIO()
    return Progress(Console(file=output, width=200)), output


def test_a_step_says_what_is_done_and_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("demo.progress.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    progress, output = plain_progress()
    with progress, progress.step("Start Kafka") as step:
        clock.now_s += 1.5
        step.result = "on port 9092"
    first, second = output.getvalue().splitlines()
    assert first.endswith("s  Start Kafka …")
    assert "✓ on port 9092 (1.5 s)" in second


def test_a_step_that_fails_says_so() -> None:
    progress, output = plain_progress()
    with pytest.raises(RuntimeError), progress, progress.step("Start Kafka"):
        raise RuntimeError
    assert "✗ Start Kafka" in output.getvalue()


def test_figures_are_printed_now_and_then_where_there_is_no_terminal() -> None:
    progress, output = plain_progress()
    progress.figures.acknowledged = 12_345
    progress.figures.buffered = 700
    progress.figures.oldest_s = 12.3
    progress.tick()
    progress.tick()
    (line,) = output.getvalue().splitlines()
    assert "acknowledged (up to 1 s ago) 12,345 · in the buffer 700 (oldest 12 s) · records in Kafka - " in line


def test_a_terminal_shows_the_step_with_its_figures_and_keeps_the_finished_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("demo.progress.time", SimpleNamespace(monotonic=lambda: 100.0))
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True, color_system=None)
    with Progress(console) as progress:
        progress.figures.uplink = "cut"
        with progress.step("Outage", lasts_s=20.0) as step:
            assert progress._live is not None
            progress._live.refresh()
            shown = output.getvalue()
            step.result = "700 wait"
    assert "Outage, 20 s left" in shown
    assert "uplink" in shown
    assert "cut" in shown
    assert re.search(r"✓ Outage \(\d\.\d s\)\s+700 wait", output.getvalue())


def test_words_with_brackets_are_shown_as_they_are() -> None:
    progress, output = plain_progress()
    progress.note("device [board-1] said [red]")
    assert "device [board-1] said [red]" in output.getvalue()
