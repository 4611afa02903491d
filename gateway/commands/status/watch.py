"""`sluice status --watch`: draws the status again and again, in place, until somebody presses q.

It draws on the terminal's alternate screen, so the former screen comes back however this ends. It overwrites line by
line, so nothing flickers. A thread of its own asks the gateway, so q works even if the gateway hangs.
"""

import os
import select
import signal
import sys
import termios
import textwrap
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, Self, TextIO

import click

from gateway.commands.options import as_typed
from gateway.commands.status.device_table import device_lines
from gateway.commands.status.words import INDENT, Glance, Rates, status_lines
from gateway.host.terminal_text import escaped, harmless, shortened, span
from gateway.reading import BufferFileError

DEVICES_MIN: Final = 4
"""Lines that the table of devices gets at the least. The lines above it are cut short for that."""
RATES_S: Final = 10.0
"""Seconds over which rates are taken, once the watching has lasted that long."""
RATES_S_MIN: Final = 5.0
"""Seconds below which no rates are shown: they would say nothing of a sensor that measures now and then."""
LATE_S: Final = 5.0
"""Seconds without an answer after which the screen says so."""
SHARE_MAX: Final = 0.2
"""Share of the time that asking may take. With thousands of devices, the gateway is asked less often."""
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Enters the alternate screen, without a cursor and without wrapping lines, and clears it."""
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h\x1b[H", "\x1b[J\x1b[?2026l"
"""Begin and end of a drawing, from the top left corner on. Terminals with mode 2026 (synchronized output) show the
drawing at once. The end clears the screen below it."""
_QUIT: Final = frozenset({b"q", b"Q", b"\x03", b"\x04"})
_SIGNALS: Final = (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTSTP, signal.SIGCONT)


def is_screen(keys: TextIO, screen: TextIO) -> bool:
    """Tell whether there is a terminal to draw on, and a terminal to press keys at."""
    return keys.isatty() and screen.isatty() and os.environ.get("TERM", "") not in {"", "dumb"}


class _Ended(Exception):  # noqa: N818 - no error
    """The watching ends. The argument is the number of the signal, or 0 for a key."""


def watch(look: Callable[[], Glance], interval_s: float) -> None:
    """Draw the results of `look` until q, Ctrl-C or a signal. A thread of its own calls `look`."""
    looking = _Looking(look, interval_s)
    number = 0
    with ExitStack() as until_end:
        came = until_end.enter_context(_signals())
        screen = until_end.enter_context(_Screen(sys.stdin.fileno()))
        looking.start()
        try:
            while True:
                screen.draw(looking)
                _wait(screen, looking, came)
        except _Ended as ended:
            number = int(ended.args[0])
    if number:
        # The terminal is restored. Now end by the signal.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _wait(screen: "_Screen", looking: "_Looking", came: int) -> None:
    """Wait until the screen must be drawn again. Raises _Ended."""
    ready, _, _ = select.select([screen.keys, came, looking.news], [], [], 1.0)
    if looking.news in ready:
        os.read(looking.news, 4096)
        if looking.failure is not None:
            raise looking.failure
    if came in ready:
        for number in os.read(came, 64):
            if number in {signal.SIGTERM, signal.SIGHUP}:
                raise _Ended(number)
            if number == signal.SIGINT:
                raise _Ended(0)
            if number == signal.SIGTSTP:
                screen.suspend()
    if screen.keys in ready:
        pressed = os.read(screen.keys, 64)
        # Nothing to read means that the terminal is gone.
        if not pressed or pressed[:1] in _QUIT:
            raise _Ended(0)


@contextmanager
def _signals() -> Iterator[int]:
    """Give a pipe from which the numbers of signals are read, so that no signal interrupts a drawing."""
    came, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(came, False)
    former = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    former_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield came
    finally:
        signal.set_wakeup_fd(former_fd)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.close(came)
        os.close(write)


# -- the screen -----------------------------------------------------------------------------------


class _Screen:
    """The terminal while the status is drawn on it."""

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self._former: list[Any] = []

    def __enter__(self) -> Self:
        self._former = termios.tcgetattr(self.keys)
        self._take_terminal()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_terminal_back()

    def _take_terminal(self) -> None:
        # In cbreak mode, Ctrl-C and Ctrl-Z still make signals.
        tty.setcbreak(self.keys, termios.TCSADRAIN)
        self._write(_ENTER)

    def _give_terminal_back(self) -> None:
        # Errors mean that the terminal is gone.
        with suppress(OSError, termios.error):
            self._write(_LEAVE)
        with suppress(OSError, termios.error):
            termios.tcsetattr(self.keys, termios.TCSADRAIN, self._former)

    def suspend(self) -> None:
        """Handle Ctrl-Z: give the terminal back, stop the process, and take the terminal again afterwards."""
        self._give_terminal_back()
        former = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, former)
        self._take_terminal()

    def draw(self, looking: "_Looking") -> None:
        """Draw the latest status."""
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
        lines = drawing(looking.seen, looking.trouble, looking.late_s(), looking.interval_s, columns or 80, rows or 24)
        # After a line that fills its row, the cursor is on the last character, which would be cleared.
        cleared = (line if len(line) >= columns else f"{line}\x1b[K" for line in lines)
        self._write(_BEGIN + "\r\n".join(cleared) + _END)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def drawing(  # noqa: PLR0913, PLR0917 - what a screen is made of
    seen: Glance | None, trouble: str, late_s: float, interval_s: float, columns: int, rows: int
) -> list[str]:
    """Lines of a screen: at most `rows`, none longer than `columns`."""
    when = "" if seen is None else f"{time.strftime('%H:%M:%S', time.localtime(seen.wall_s))}, "
    late = f"no answer for {span(late_s)}, " if late_s >= LATE_S else ""
    head = f"{when}{late}every {interval_s:g} s; q ends"
    if trouble or seen is None:
        words = trouble or "looking ..."
        return [shortened(head, columns), "", *textwrap.wrap(escaped(words), columns)][:rows]
    above = [line for told in status_lines(seen) for line in _wrapped(as_typed(told), columns)]
    above[0] = _with_head(above[0], head, columns)
    devices = seen.devices or ()
    left = rows - len(above)
    least = min(DEVICES_MIN, len(devices) + 1) if devices else 0
    if left < least:
        above = [*above[: max(1, rows - least - 1)], "... sluice status says more"]
        left = rows - len(above)
    # `device_lines` does not count the table's line of headings.
    table = list(device_lines(devices, left - 1, columns))[:left] if devices and left > 1 else []
    return [harmless(line)[:columns] for line in (*above, *table)][:rows]


def _wrapped(line: str, columns: int) -> list[str]:
    indent = " " * INDENT
    return textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _with_head(first: str, head: str, columns: int) -> str:
    """Put the head at the right end of the first line, as far as there is room."""
    gap = columns - len(first) - len(head)
    return f"{first}{' ' * gap}{head}" if gap >= 2 else shortened(f"{first}  {head}", columns)


# -- asking the gateway ---------------------------------------------------------------------------


class _Looking(threading.Thread):
    """Calls `look` again and again. `news` has a byte to read whenever there is a new result."""

    def __init__(self, look: Callable[[], Glance], interval_s: float) -> None:
        # A daemon thread, so that the end does not wait for a gateway that hangs.
        super().__init__(name="look", daemon=True)
        self.interval_s = interval_s
        self.news, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self.seen: Glance | None = None
        self.trouble = ""
        self.failure: Exception | None = None
        """Unexpected error, which the main thread raises again once the terminal is restored."""
        self._look = look
        self._since_s: float | None = None
        self._before: deque[tuple[float, int, int, int]] = deque()

    def late_s(self) -> float:
        """Seconds since the unanswered question; 0 if there is none."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def run(self) -> None:
        """Call `look` for as long as the process lives."""
        try:
            while True:
                self._look_once()
        except Exception as error:  # noqa: BLE001 - raised again by the main thread
            self.failure = error
            self._tell()

    def _look_once(self) -> None:
        begun_s = self._since_s = time.monotonic()
        try:
            seen, trouble = self._look(), ""
        except (BufferFileError, click.ClickException, OSError) as error:
            seen, trouble = None, error.message if isinstance(error, click.ClickException) else str(error)
        took_s = time.monotonic() - begun_s
        self._since_s = None
        # Each is replaced as a whole, so the drawing thread never sees a half.
        self.trouble = trouble
        self.seen = None if seen is None else _with_rates(seen, self._before)
        self._tell()
        time.sleep(max(0.0, max(self.interval_s, took_s / SHARE_MAX) - took_s))

    def _tell(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._write, b".")


def _with_rates(seen: Glance, before: "deque[tuple[float, int, int, int]]") -> Glance:
    """Add rates to a glance, from earlier figures in `before`, which gets the present figures too."""
    answer = seen.answer or {}
    uplink = answer.get("uplink") or {}
    counts = answer.get("counts", {}).get("readings", 0), uplink.get("sent", 0), uplink.get("wire_bytes", 0)
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
