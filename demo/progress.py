"""What a person sees while the demo runs: the steps with their times, and the figures as they change."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

FIGURES_INTERVAL_S = 5.0
"""How often figures are printed where there is no terminal to keep them up to date on."""


@dataclass(slots=True)
class Figures:
    """The run's figures now; None is what is not known yet."""

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
        """Names and values in the order of a reading's way."""
        buffered = _number(self.buffered)
        if self.buffered and self.oldest_s is not None:
            buffered += f" (oldest {self.oldest_s:.0f} s)"
        return [
            ("sensors", _number(self.sensors)),
            # The sensors tell once a second. What they were told since may be in Kafka already.
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
    """One step under way."""

    words: str
    began_s: float
    result: str = ""
    """What came of it, for the line that stays."""
    until_s: float | None = None
    """When it will end, where that is known: it is counted down."""


class Progress:
    """Steps and figures on `console`; kept up to date where it is a terminal, else as plain lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.figures = Figures()
        self._began_s = time.monotonic()
        self._step: Step | None = None
        self._figures_due_s = 0.0
        self._spinner = Spinner("dots")
        self._live = (
            Live(get_renderable=self._render, console=console, refresh_per_second=5, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._began_s

    @contextmanager
    def step(self, words: str, *, lasts_s: float | None = None) -> Iterator[Step]:
        """Say what is being done, and when it is done what came of it."""
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
        """Something that happens within a step."""
        self._print(f"  {words}", style="yellow")

    def tick(self) -> None:
        """The figures have changed: shown at once on a terminal, now and then elsewhere."""
        if self._live is None and time.monotonic() >= self._figures_due_s:
            self._figures_due_s = time.monotonic() + FIGURES_INTERVAL_S
            self._print("  " + " · ".join(f"{name} {value}" for name, value in self.figures.named()))

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
        if self._step is None:
            return Text()
        words = self._step.words
        if self._step.until_s is not None:
            words += f", {max(0.0, self._step.until_s - time.monotonic()):.0f} s left"
        grid = Table.grid(padding=(0, 3))
        for name, value in self.figures.named():
            style = "bold red" if value in {"cut", "killed"} else "bold"
            grid.add_row(Text(f"          {name}", style="dim"), Text(value, style=style))
        self._spinner.update(text=Text(words))
        return Group(self._spinner, grid)
