"""Shows a person the steps of the running demo with their times, and the figures as they change."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

TELL_INTERVAL_S = 5.0
"""Seconds between two lines on the state of things, if no terminal can be kept up to date."""


@dataclass(slots=True)
class Figures:
    """The run's figures now. None is a figure that is not known yet."""

    sensors: int | None = None
    acknowledged: int | None = None
    buffered: int | None = None
    oldest_s: float | None = None
    """Age of the oldest reading in the buffer."""
    in_kafka: int | None = None
    in_table: int | None = None
    uplink: str | None = None
    gateway: str | None = None

    def named(self) -> list[tuple[str, str]]:
        """Return names and values in the order of a reading's way."""
        buffered = _number(self.buffered)
        if self.buffered and self.oldest_s is not None:
            buffered += f" (oldest {self.oldest_s:.0f} s)"
        return [
            ("sensors", _number(self.sensors)),
            # The sensors tell once a second. Readings acknowledged since may be in Kafka already.
            ("acknowledged (up to 1 s ago)", _number(self.acknowledged)),
            ("in the buffer", buffered),
            ("records in Kafka", _number(self.in_kafka)),
            ("in the table", "starting" if self.in_table is None else _number(self.in_table)),
            ("uplink", self.uplink or "-"),
            ("gateway", self.gateway or "-"),
        ]


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


@dataclass(slots=True)
class Step:
    """A step under way."""

    words: str
    began_s: float
    result: str = ""
    """Result for the line that stays."""
    until_s: float | None = None
    """Time at which it will end, if that is known: it is counted down."""
    state: Callable[[], str] | None = None
    """Says how far the step has come. It is called whenever the step is shown, from another thread."""

    def so_far(self) -> str:
        """Say how long it takes yet, or has taken: this moves although nothing else does."""
        now_s = time.monotonic()
        if self.until_s is not None:
            return f"{max(0.0, self.until_s - now_s):.0f} s left"
        return f"{now_s - self.began_s:.0f} s so far"


class Progress:
    """Shows steps and figures on `console`: kept up to date on a terminal, else as plain lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.figures = Figures()
        self._began_s = time.monotonic()
        self._step: Step | None = None
        self._told_figures = self.figures.named()
        self._leave = threading.Event()
        # A thread of its own, as rich has for a terminal: it also tells of steps that keep the event loop busy.
        self._teller = threading.Thread(target=self._tell_now_and_then, name="progress", daemon=True)
        self._spinner = Spinner("dots")
        self._live = (
            Live(get_renderable=self._render, console=console, refresh_per_second=5, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._teller.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._leave.set()
            self._teller.join()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._began_s

    @contextmanager
    def step(self, words: str, *, lasts_s: float | None = None) -> Iterator[Step]:
        """Say what begins, and at its end what came of it."""
        now_s = time.monotonic()
        step = self._step = Step(words, now_s, until_s=None if lasts_s is None else now_s + lasts_s)
        if self._live is None:
            self._print(f"{words} …")
        try:
            yield step
        except BaseException:
            self._step = None
            self._print(f"✗ {words}", style="red")
            raise
        self._step = None
        took = f"{time.monotonic() - step.began_s:.1f} s"
        if self._live is None:  # the words stand above already
            self._print(f"✓ {step.result or 'done'} ({took})", style="green")
        else:
            result = f"\n  {step.result}" if step.result else ""
            self._print(f"✓ {words} ({took}){result}", style="green")

    def note(self, words: str) -> None:
        """Tell of something that happens within a step."""
        self._print(f"  {words}", style="yellow")

    def tell(self) -> None:
        """Print how the step under way goes, and the figures if they have changed."""
        step, figures = self._step, self.figures.named()
        parts = [] if step is None else [step.so_far()]
        if step is not None and step.state is not None:
            parts.append(step.state())
        if figures != self._told_figures:
            self._told_figures = figures
            parts += [f"{name} {value}" for name, value in figures]
        if parts:
            self._print("  " + " · ".join(parts))

    def _tell_now_and_then(self) -> None:
        while not self._leave.wait(TELL_INTERVAL_S):
            self.tell()

    def _print(self, words: str, style: str | None = None) -> None:
        when = f"{self.elapsed_s:6.1f} s"
        if self._live is None:
            self.console.print(Text(f"{when}  {words}", style=style or ""), soft_wrap=True)
            return
        # Two columns: long words are wrapped beside the time, not under it.
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_row(Text(when, style="dim"), Text(words, style=style or ""))
        self.console.print(grid)

    def _render(self) -> RenderableType:
        step = self._step
        if step is None:
            return Text()
        state = [] if step.state is None else [Text(f"  {step.state()}")]
        grid = Table.grid(padding=(0, 3))
        for name, value in self.figures.named():
            style = "bold red" if value in {"cut", "killed"} else "bold"
            grid.add_row(Text(f"          {name}", style="dim"), Text(value, style=style))
        self._spinner.update(text=Text(f"{step.words}, {step.so_far()}"))
        return Group(self._spinner, *state, grid)
