"""Starts Spark for one command of `sluice-cloud`, and ends it with the command, however the command ends."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import click

from gateway.host.terminal import say
from spark.commands.failure_words import TOLD, keep_java_log, known, told_failure
from spark.engine.session import open_session
from spark.engine.warehouse_folder import holds_little

if TYPE_CHECKING:
    from subprocess import Popen

    from pyspark.sql import SparkSession

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a command. Once `ingest` has its session, it sets handlers of its own for them."""

JAVA_END_S = 3.0
"""Seconds to wait for Java to end after it has closed its connections."""

# Functions import Spark themselves: the import takes a second, and `--help` does not need it.


def session(application: str, warehouse: str | None = None) -> "SparkSession":
    """Start Spark until the command ends, or fail with a message that says what is missing.

    Give `warehouse` if the command only reads it: if it is small, the session is set for brief work.
    """
    is_brief = warehouse is not None and holds_little(warehouse)
    if sys.stderr.isatty():
        say("starting Spark, which takes some seconds ...", err=True)
    context = click.get_current_context()
    spark = context.with_resource(_started(application, is_brief=is_brief))
    from pyspark.logger import PySparkLogger  # noqa: PLC0415

    # PySpark logs each error there with the whole plan and a Java trace. The command prints one line instead.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True
    from spark.engine.interpreted_queries import interpreted_if  # noqa: PLC0415

    context.with_resource(interpreted_if(spark, small=is_brief))
    return spark


@contextmanager
def _started(application: str, *, is_brief: bool) -> "Iterator[SparkSession]":
    """Start a session whose Java ends with this command and leaves no file behind.

    If a signal ends this process, Java is killed at once: else both would report every call that was cut off. The
    tables survive that.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415
    from pyspark import SparkContext  # noqa: PLC0415

    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - PySpark has no public name for it
        # The caller of this command has started it in this process, and ends it.
        yield _opened(application, None, is_brief=is_brief)
        return

    def clear() -> None:
        java = _java()
        if java is not None:
            java.kill()
            java.wait()
        shutil.rmtree(scratch, ignore_errors=True)
        # Else another command in this process would look for the Java that has gone.
        SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 - as above

    def end(number: int, _frame: object) -> None:
        # A second Ctrl-C must wait too: its handler would wait for Java inside this wait, for ever.
        with _signals_waiting():
            # Until the process ends, other threads would print that Java does not answer.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            clear()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with _signals_waiting():
        scratch = Path(mkdtemp(prefix="sluice-"))
        try:
            with _failures_told(scratch), _stdout_kept():
                spark = _opened(application, scratch, is_brief=is_brief)
        except BaseException:
            clear()
            raise
        _hush(spark)
        # Only now: when Spark starts, PySpark sets a handler of its own.
        before = {number: signal.signal(number, end) for number in ending()} if is_main_thread() else {}
    try:
        with _failures_told(scratch):
            yield spark
    finally:
        with _signals_waiting():
            for number, handler in before.items():
                signal.signal(number, handler)
            try:
                _end_finalizer(spark)
                # This tells a cluster that all went well. If Java has died, there is nothing to stop.
                with suppress(Py4JError):
                    spark.stop()
            finally:
                clear()


def ending() -> tuple[signal.Signals, ...]:
    """Signals that end this command, without those that are ignored, as SIGHUP is under `nohup`."""
    return tuple(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN)


def _java() -> "Popen[bytes] | None":
    """The Java that this process has started. The Java of `spark-submit` is the parent, and not ours to end."""
    from pyspark import SparkContext  # noqa: PLC0415

    return getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - as above


@contextmanager
def _failures_told(scratch: Path) -> Iterator[None]:
    """Turn failures into messages while Java still runs: PySpark asks Java for the error's text."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TOLD):
            raise
        found = known()
        found.java_code = _code_of(_java(), error)
        keep_java_log(found, scratch)
        told = told_failure(error, found)
        if told is None:
            raise
        raise told from error


def _hush(spark: "SparkSession") -> None:
    """Stop PySpark from printing traces when Java has gone: the command says that itself."""
    # py4j raises every error that it logs.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    # If a connection is reset, it logs by the root logger.
    logging.getLogger().addFilter(_is_not_of_py4j)
    server = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: None


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    # A function, for a logger takes one filter once, and a process may have many sessions.
    return record.module != "java_gateway"


def _code_of(java: "Popen[bytes] | None", error: Exception) -> int | None:
    """The exit code of Java, if it has ended by itself."""
    from py4j.protocol import Py4JNetworkError  # noqa: PLC0415

    if java is not None and isinstance(error, (Py4JNetworkError, ConnectionError)):
        # Java closes its connections a moment before it is gone.
        with suppress(subprocess.TimeoutExpired):
            java.wait(JAVA_END_S)
    return None if java is None else java.poll()


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Give programs that are started meanwhile another standard output.

    Delta prints a line for each vacuum, which would stand between lines of JSON.
    """
    if sys.stdout is None:
        # The caller has closed it, and descriptor 1 may be any file by now.
        yield
        return
    kept = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _end_finalizer(spark: "SparkSession") -> None:
    """End the thread that tells Java which objects Python no longer needs.

    If Java went away while the thread speaks to it, the thread would print an error. The thread has less left to say
    than Spark takes to stop.
    """
    from py4j.clientserver import SHUTDOWN_FINALIZER_WORKER  # type: ignore[import-untyped]  # noqa: PLC0415

    # With PYSPARK_PIN_THREAD=false there is no such client. The thread takes the next task from the right end.
    client = getattr(spark.sparkContext._gateway, "_gateway_client", None)  # noqa: SLF001 - as above
    tasks = getattr(client, "finalizer_deque", None)
    if tasks is not None:
        tasks.append(SHUTDOWN_FINALIZER_WORKER)


def _opened(application: str, scratch: Path | None, *, is_brief: bool) -> "SparkSession":
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415

    try:
        return open_session(application, is_brief=is_brief, scratch=scratch)
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise click.ClickException(
            "Java did not start: see its message above. Spark needs Java 17 or 21. Set JAVA_HOME, or put `java` on "
            "the PATH"
        ) from error


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """Hold signals back meanwhile: a signal while Java is being started would leave Java behind, for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_main_thread() -> bool:
    """True where handlers of signals can be set."""
    return threading.current_thread() is threading.main_thread()
