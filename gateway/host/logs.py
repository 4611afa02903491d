"""Writes the daemon's log to standard error: for people by default, as JSON lines by setting."""

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

# structlog loads rich wherever that is installed, to frame tracebacks: a fifth of a start's time, and no box has it.
if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]
    import_module("structlog")
    del sys.modules["rich"]
import structlog

from gateway.host.terminal_text import escaped, harmless, harmless_json
from gateway.settings import LogSettings

PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""Priorities of syslog(3), by the level names of log lines."""


def prioritized(text: str, level: str) -> str:
    """Put the priority before each line of a text: a stack trace is as grave as its log line."""
    priority = PRIORITIES.get(level, PRIORITIES["info"])
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


LINES_MAX: Final = 10
"""Lines of one kind that are written in `LINES_S`. Further ones are counted, and their number is logged at its end."""
LINES_S: Final = 60.0
_log = structlog.get_logger()


class FewLines:
    """Bounds log lines whose number somebody outside decides: a few of each kind, and the sum of the others.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._lines: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, write: Callable[..., object], event: str, **values: Any) -> None:
        """Write a line with `write` (a logger's method), or add its `count` to the sum, by default 1."""
        self._begin()
        self._lines[event] += 1
        if self._lines[event] <= LINES_MAX:
            write(event, **values)
        else:
            self._left_out[event] += values.get("count", 1)

    def count(self, event: str, count: int) -> None:
        """Count events that have no line of their own."""
        self._begin()
        self._left_out[event] += count

    def finish(self) -> None:
        """Log the sum now."""
        if self._timer is not None:
            self._timer.cancel()
            self._end()

    def _begin(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINES_S, self._end)

    def _end(self) -> None:
        self._timer = None
        self._lines.clear()
        if self._left_out:
            _log.warning("in the last minute, beside what has a line of its own", counts=dict(self._left_out))
            self._left_out.clear()


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def quieten_libraries() -> None:
    """Keep libraries from logging every attempt: the gateway logs changes in its own words."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Harmless(logging.BASIC_FORMAT))
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


class _Harmless(logging.Formatter):
    """Formats a library's line so that no terminal obeys it."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def set_up(settings: LogSettings) -> None:
    """Configure structlog, and quieten the libraries."""
    quieten_libraries()
    renderers: list[structlog.typing.Processor]
    times: list[structlog.typing.Processor] = [structlog.processors.TimeStamper(fmt="iso", utc=True)]
    if settings.format == "json":
        renderers = [structlog.processors.JSONRenderer(_json)]
    else:
        renderers = [escape_values, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if is_journal():
            # The journal has each line's time itself, and sorts lines by priority: `journalctl -p warning`.
            times = []
            renderers = [escape_values, _Prioritized(structlog.dev.ConsoleRenderer(colors=False, pad_level=False))]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            *times,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class _Prioritized:
    """Puts the priority before each line, those of a stack trace too, as the journal takes it (sd-daemon(3))."""

    def __init__(self, render: structlog.dev.ConsoleRenderer) -> None:
        self._render = render

    def __call__(self, logger: structlog.typing.WrappedLogger, method: str, line: structlog.typing.EventDict) -> str:
        level = str(line.get("level"))  # the renderer takes it out
        return prioritized(self._render(logger, method, line), level)


def escape_values(
    _logger: structlog.typing.WrappedLogger, _method: str, line: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Make every value of a log line harmless to a terminal: topics and names come from whoever can connect.

    Values that are no text are shown as Python would write them.
    """
    for name, value in line.items():
        if isinstance(value, str):
            # A stack trace keeps its lines.
            parts = value.split("\n") if name in {"exception", "stack"} else [value]
            line[name] = "\n".join(map(escaped, parts))
        else:
            line[name] = harmless(repr(value))
    return line


def _json(line: structlog.typing.EventDict, **options: Any) -> str:
    return harmless_json(json.dumps(line, **options))


def is_journal() -> bool:
    """Whether standard error goes to the journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        stderr = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"
