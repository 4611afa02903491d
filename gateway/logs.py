"""What the daemon says of itself, on standard error: for people by default, as JSON lines by setting."""

import logging
import sys

import structlog

from gateway.settings import LogSettings
from gateway.terminal_text import escaped

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def quieten_libraries() -> None:
    """Keep libraries from logging every attempt: what changes is told in our words."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def set_up(settings: LogSettings) -> None:
    """Configure structlog, and quieten the libraries."""
    quieten_libraries()
    renderers: list[structlog.typing.Processor]
    if settings.format == "json":
        renderers = [structlog.processors.JSONRenderer()]
    else:
        renderers = [escape_values, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def escape_values(
    _logger: structlog.typing.WrappedLogger, _method: str, line: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Make every text of a line one that no terminal obeys: topics and names come from whoever can connect.

    What is no text is shown as Python would write it, which escapes by itself.
    """
    for name, value in line.items():
        if isinstance(value, str):
            # A stack trace keeps its lines.
            parts = value.split("\n") if name in {"exception", "stack"} else [value]
            line[name] = "\n".join(map(escaped, parts))
    return line
