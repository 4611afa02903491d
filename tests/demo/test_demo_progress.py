import io
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from demo.progress import Progress
from tests.support.waiting import patience


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
    progress.tell()
    progress.tell()
    (line,) = output.getvalue().splitlines()
    assert "acknowledged (up to 1 s ago) 12,345 · in the buffer 700 (oldest 12 s) · records in Kafka - " in line


def test_a_step_in_which_no_figure_changes_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.progress.TELL_INTERVAL_S", 0.02)
    progress, output = plain_progress()
    with progress, progress.step("Wait for Spark") as step:
        step.state = lambda: "it reads its tables"
        deadline = time.monotonic() + patience(10)
        # The event loop, or whatever waits, need not do anything for it.
        while output.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    told = output.getvalue().splitlines()[1:3]
    assert all(line.endswith("s    0 s so far · it reads its tables") for line in told), told
    lines = output.getvalue().count("\n")
    time.sleep(0.1)
    assert output.getvalue().count("\n") == lines


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
            step.state = lambda: "all is silent"
            progress._live.refresh()
            shown = output.getvalue()
            step.result = "700 wait"
    assert "Outage, 20 s left" in shown
    assert "all is silent" in shown
    assert "uplink" in shown
    assert "cut" in shown
    assert re.search(r"✓ Outage \(\d\.\d s\)\s+700 wait", output.getvalue())


def test_words_with_brackets_are_shown_as_they_are() -> None:
    progress, output = plain_progress()
    progress.note("device [board-1] said [red]")
    assert "device [board-1] said [red]" in output.getvalue()
