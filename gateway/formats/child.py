"""The process of one format of one's own: reads bytes on its standard input, and answers what the format cut.

It speaks in lines: bytes in hexadecimal in, a JSON object out. The kernel ends it if an answer takes too long, whatever
the format is doing then. So a format that hangs needs nobody who watches it. docs/decisions/105-own-formats.md has the
reasons.
"""

import io
import json
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from gateway.formats.cutter import Cut, Cutter, FormatError
from gateway.formats.own import load

ANSWER_S: Final = 10
"""Seconds that loading the format, and then each answer, may take."""
ANSWER_BYTES_MAX: Final = 1_000_000
"""Bytes of the longest answer."""
MEMORY_BYTES_MAX: Final = 128 * 1024 * 1024
"""Address space of the process."""
WORDS_MAX: Final = 500
"""Characters of the longest words about a failure."""
PRINTED_MAX: Final = 10_000
"""Characters that a format may print from one start to the next. The log has to last for the gateway too."""
_OOM_SCORE: Final = "900"
"""If the box has no memory left, the kernel ends this process before the gateway."""
_OURS: Final = str(Path(__file__).parent)


def main() -> None:
    """Serve a format until the input ends. The last arguments: its name, its folder, and the seconds of an answer."""
    *_, name, folder, answer_s = sys.argv
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = _Printed(sys.stderr)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    try:
        signal.alarm(int(answer_s))
        cutter = Cutter(load(name, Path(folder)))
        _answer(answers, cutter, [])
        while line := _next_line():
            signal.alarm(int(answer_s))
            _answer(answers, cutter, cutter.feed(bytes.fromhex(line)))
    except BaseException as error:  # noqa: BLE001 - whatever the format raises is told, and ends this process
        _write(answers, {"failed": _words(error)[:WORDS_MAX]})


class _Printed(io.TextIOBase):
    """What a format prints: the first characters go to the log of the gateway."""

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._left = PRINTED_MAX

    def write(self, text: str, /) -> int:
        """See `io.TextIOBase`."""
        if self._left > 0:
            self._log.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._log.write("\n(a format of one's own prints more than is shown)\n")
            self._log.flush()
        return len(text)


def _next_line() -> str:
    # Waiting for bytes is no hanging.
    signal.alarm(0)
    return sys.stdin.readline()


def _answer(answers: int, cutter: Cutter, cuts: list[Cut]) -> None:
    told = [
        ([reading.decode("latin-1") for reading in readings], damage, noise, piece.decode("latin-1"))
        for readings, damage, noise, piece in cuts
    ]
    _write(answers, {"cuts": told, "left": cutter.left})


def _write(answers: int, answer: dict[str, object]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    if len(line) > ANSWER_BYTES_MAX:
        raise FormatError(f"gave {len(line):,} bytes for one answer; {ANSWER_BYTES_MAX:,} is the most")
    with suppress(BrokenPipeError):
        while line:
            line = line[os.write(answers, line) :]


def _words(error: BaseException) -> str:
    if isinstance(error, FormatError):
        return str(error)
    said = str(error) or (f"it may take {MEMORY_BYTES_MAX >> 20} MB" if isinstance(error, MemoryError) else "")
    # The line that its author knows, and not one of a library that it calls.
    lines = [
        (name, line)
        for name, line in ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
        if not name.startswith((_OURS, "<")) and "/importlib/" not in name
    ]
    own = [line for name, line in lines if name == lines[0][0]]
    where = f" ({lines[0][0]}, line {own[-1]})" if own else ""
    return f"raised {type(error).__name__}{said and ': '}{said}{where}"
