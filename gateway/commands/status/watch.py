"""`sluice status --watch`: clears the screen and prints the status anew, until Ctrl-C."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import click

from gateway.commands.status.words import Glance, Rates, facts_of
from gateway.host.terminal import say
from gateway.host.terminal_text import terminal_height
from gateway.reading import BufferFileError

RATES_S: Final = 10.0
"""Seconds over which rates are taken, once the watching has lasted that long."""
RATES_S_MIN: Final = 5.0
"""Seconds below which no rates are shown: they would say nothing of a sensor that measures now and then."""
REST: Final = 4
"""Least pause, as a multiple of the time that asking took: a gateway with thousands of devices is asked less often."""


def watch(look: Callable[[], Glance], lines: Callable[[Glance], Iterable[str]], interval_s: float) -> None:
    """Print the `lines` of `look` again and again until Ctrl-C."""
    before: deque[tuple[float, int, int, int]] = deque()
    with suppress(KeyboardInterrupt):
        while True:
            begun_s = time.monotonic()
            try:
                told = [*lines(with_rates(look(), before))]
            except (BufferFileError, click.ClickException, OSError) as error:
                told = [error.message if isinstance(error, click.ClickException) else str(error)]
            took_s = time.monotonic() - begun_s
            click.clear()
            top = f"{time.strftime('%H:%M:%S')}, every {interval_s:g} s; Ctrl-C ends"
            for line in fitting([top, *told], terminal_height() - 1):
                say(line)
            time.sleep(max(interval_s - took_s, REST * took_s))


def fitting(lines: Iterable[str], rows: int) -> list[str]:
    """Rows of the lines, which may be wrapped, as far as they fit; the last one says if there are more."""
    shown = [row for line in lines for row in line.split("\n")]
    return shown if len(shown) <= rows else [*shown[: max(1, rows - 1)], "... sluice status says more"]


def with_rates(seen: Glance, before: "deque[tuple[float, int, int, int]]") -> Glance:
    """Add rates to a glance, from earlier figures in `before`, which gets the present figures too."""
    facts = facts_of(seen)
    counts = facts.counts.get("readings", 0), facts.uplink.sent, facts.uplink.wire_bytes
    at_s = seen.now.boottime_us / 1e6
    if seen.answer is None or (before and any(now < then for now, then in zip(counts, before[-1][1:], strict=True))):
        # The daemon was stopped or started anew, and counts from zero.
        before.clear()
    if seen.answer is None:
        return seen
    while len(before) > 1 and at_s - before[1][0] >= RATES_S:
        before.popleft()
    rates = None
    if before and at_s - before[0][0] >= RATES_S_MIN:
        then_s, *then = before[0]
        readings, sent, wire_bytes = ((now - of) / (at_s - then_s) for now, of in zip(counts, then, strict=True))
        rates = Rates(readings, sent, wire_bytes)
    before.append((at_s, *counts))
    return replace(seen, rates=rates)
