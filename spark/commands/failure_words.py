"""Turns failures of storage, Kafka and Java into one line. Their traces go to a file that the line names."""

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
from spark.engine.told_error import ToldError
from spark.source.kafka_failures import explain_failure, innermost
from spark.source.kafka_options import without
from spark.source.memory_failures import explain_memory
from spark.source.storage_failures import explain_storage

LOG_BYTES_MAX = 2_000_000
"""Bytes of each Java log that are taken: more than `log4j2.properties` lets Java keep."""
TRACE_PREFIX = "sluice-cloud-trace-"
TRACE_SUFFIX = ".log"
TRACES_MAX = 5
"""Trace files kept for one user. Without a bound, a service that fails all day would fill the disk."""
TOLD = (ToldError, click.ClickException, click.exceptions.Exit, click.Abort)
"""Exceptions that need no message: ours have one, and the others are click's ways to end a command."""
_KEY = "spark.commands.failure_words"


@dataclass(slots=True)
class Known:
    """Facts about the running command that a message about its failure needs."""

    warehouse: str | None = None
    kafka_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """May hold passwords."""
    reads_kafka: bool = False
    java_log: str = ""
    java_code: int | None = None
    """Exit code of Java, if Java ended by itself; negative for a signal."""


def known(context: click.Context | None = None) -> Known:
    """Return the facts about the running command. The caller may add to them."""
    found: Known = (context or click.get_current_context()).meta.setdefault(_KEY, Known())
    return found


def keep_java_log(found: Known, scratch: Path) -> None:
    """Read Java's log out of a command's temporary folder, before the folder is removed."""
    for path in (scratch / f"{ERRORS}.1", scratch / ERRORS):
        # An error from a failing disk here must not hide the first error.
        with suppress(OSError):
            found.java_log += path.read_text("utf-8", errors="replace")[-LOG_BYTES_MAX:]


def told_failure(error: Exception, found: Known) -> click.ClickException | None:
    """Return a failure as one line, and write its trace to a file. Return None if the program itself is at fault."""
    words = _words(error, found)
    return None if words is None else _with_trace(words, error, found)


def unforeseen(error: Exception, found: Known) -> click.ClickException:
    """Return an error of the program itself as one line, and write its trace to a file."""
    return _with_trace(f"the program itself failed: {type(error).__name__}: {error}. Please report it", error, found)


def _with_trace(words: str, error: Exception, found: Known) -> click.ClickException:
    options = found.kafka_options
    trace = _kept(without(options, "".join(traceback.format_exception(error)) + found.java_log))
    where = f" (the trace is in {trace})" if trace else ""
    return click.ClickException(" ".join(f"{without(options, words).rstrip('.')}{where}".split()))


def _words(error: Exception, found: Known) -> str | None:
    is_sparks = type(error).__module__.startswith(("py4j.", "pyspark."))
    words = explain_memory(error)
    if words is None and found.java_code is not None:
        code = found.java_code
        end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        words = f"Java {end} during the work. If nobody stopped it, memory was short: see `dmesg`"
    if words is None:
        # Storage first: Kafka's client reports failures of storage in the same words.
        words = explain_storage(error, found.warehouse)
    if words is None and is_sparks and found.reads_kafka:
        words = explain_failure(error)
    if words is None and is_sparks:
        words = f"Spark failed: {innermost(error)}"
    if words is not None and type(error).__name__ == "StreamingQueryException":
        words = f"{words.rstrip('.')}. What was committed stays, and the next run goes on from there"
    return words


def _kept(trace: str) -> str | None:
    """Write a trace to a file that only this user can read, and keep only the last few such files.

    Returns the file's path, or None if it could not be written.
    """
    try:
        # First: old traces may be what fills the disk.
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
    """Remove this user's oldest traces, so that there are `TRACES_MAX` with the next one."""
    found = []
    for path in folder.glob(f"{TRACE_PREFIX}*{TRACE_SUFFIX}"):
        # Another command may remove the same file.
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid():
                found.append((status.st_mtime_ns, path))
    for _, path in sorted(found, reverse=True)[TRACES_MAX - 1 :]:
        with suppress(OSError):
            path.unlink()
