"""What the daemon says of itself, on standard error: for people by default, as JSON lines by setting."""

import logging
import sys

import structlog

from gateway.settings import LogSettings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def quieten_libraries() -> None:
    """Keep libraries from logging every attempt: what changes is told in our words."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def set_up(settings: LogSettings) -> None:
    """Configure structlog, and quieten the libraries."""
    quieten_libraries()
    renderer: structlog.typing.Processor
    if settings.format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
