"""Failures of storage, Kafka and Java in one line of words, and their traces in a file that the line names."""

import os
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir, mkstemp

import click

from gateway.host.terminal_text import harmless
from spark.engine.session import ERRORS
from spark.source.kafka_failures import explain_failure, innermost
from spark.source.kafka_options import without
from spark.source.memory_failures import explain_memory
from spark.source.storage_failures import explain_storage

LOG_BYTES_MAX = 2_000_000
"""Of what Java has logged: more than `log4j2.properties` lets it keep."""
TRACE_PREFIX = "sluice-cloud-trace-"
TRACE_SUFFIX = ".log"
TRACES_MAX = 5
"""Files of traces that one user's commands leave: a service that fails all day would fill the disk with them."""
TOLD = (click.ClickException, click.exceptions.Exit, click.Abort)
"""Words of ours, and the ends that click has for a command."""
_KEY = "spark.commands.failure_words"


@dataclass(slots=True)
class Known:
    """What a command knows by the time that it fails."""

    warehouse: str | None = None
    kafka_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Passwords may be among them."""
    reads_kafka: bool = False
    java_log: str = ""
    java_code: int | None = None
    """With what Java ended, if it ended before its time."""


def known(context: click.Context | None = None) -> Known:
    """Return what the running command knows, to be added to."""
    found: Known = (context or click.get_current_context()).meta.setdefault(_KEY, Known())
    return found


def keep_java_log(found: Known, scratch: Path) -> None:
    """Take what Java has logged out of a command's temporary folder."""
    for path in (scratch / f"{ERRORS}.1", scratch / ERRORS):
        # A disk that fails must not hide what it did.
        with suppress(OSError):
            found.java_log += path.read_text("utf-8", errors="replace")[-LOG_BYTES_MAX:]


def told_failure(error: Exception, found: Known) -> click.ClickException | None:
    """Return a failure as one line, with its trace in a file; None where the program itself is at fault."""
    options = found.kafka_options
    words = _words(error, found)
    if words is None:
        return None
    trace = _kept(without(options, "".join(traceback.format_exception(error)) + found.java_log))
    where = f" (the trace is in {trace})" if trace else ""
    return click.ClickException(" ".join(f"{without(options, words).rstrip('.')}{where}".split()))


def _words(error: Exception, found: Known) -> str | None:
    is_sparks = type(error).__module__.startswith(("py4j.", "pyspark."))
    words = explain_memory(error)
    if words is None and found.java_code is not None:
        by = f"by signal {-found.java_code}" if found.java_code < 0 else f"with exit code {found.java_code}"
        words = f"Java ended {by} in the midst of the work. If nobody stopped it, memory was short: see `dmesg`"
    if words is None:
        # Disks first: what Kafka's client says of them is the same.
        words = explain_storage(error, found.warehouse)
    if words is None and is_sparks and found.reads_kafka:
        words = explain_failure(error)
    if words is None and is_sparks:
        words = f"Spark failed: {innermost(error)}"
    if words is not None and type(error).__name__ == "StreamingQueryException":
        words = f"{words.rstrip('.')}. What was committed stays, and the next run goes on from there"
    return words


def _kept(trace: str) -> str | None:
    """Write a file that this user alone can read; its path, or None where there is no room for it.

    Of earlier ones only the last few stay.
    """
    try:
        # First: where the disk is full, they may be what fills it.
        _clear_traces(Path(gettempdir()))
        number, path = mkstemp(prefix=TRACE_PREFIX, suffix=TRACE_SUFFIX)
    except OSError:
        return None
    try:
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(harmless(trace.expandtabs(4)))
    except OSError:
        Path(path).unlink(missing_ok=True)
        return None
    return path


def _clear_traces(folder: Path) -> None:
    """Remove this user's traces but the last ones, so that with the next there are `TRACES_MAX`."""
    found = []
    for path in folder.glob(f"{TRACE_PREFIX}*{TRACE_SUFFIX}"):
        # Another command may be clearing them.
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid():
                found.append((status.st_mtime_ns, path))
    for _, path in sorted(found, reverse=True)[TRACES_MAX - 1 :]:
        with suppress(OSError):
            path.unlink()
