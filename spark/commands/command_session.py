"""The Spark that a command of `sluice-cloud` works in: started by it, and gone with it, however the command ends."""

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
from spark.engine.session import JarsMissingError, open_session
from spark.engine.warehouse_folder import holds_little

if TYPE_CHECKING:
    from subprocess import Popen

    from pyspark.sql import SparkSession

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that end a command; `ingest` has handlers of its own for them, once it has its session."""

JAVA_END_S = 3.0

# Spark is imported inside the functions: it takes a second, which `--help` need not cost.


def session(application: str, warehouse: str | None = None) -> "SparkSession":
    """Start Spark, or say what is missing; for brief work, where a `warehouse` is only read that holds little.

    It is there until the command ends.
    """
    is_brief = warehouse is not None and holds_little(warehouse)
    if sys.stderr.isatty():
        say("starting Spark, which takes some seconds ...", err=True)
    context = click.get_current_context()
    spark = context.with_resource(_started(application, is_brief=is_brief))
    from pyspark.logger import PySparkLogger  # noqa: PLC0415

    # To these PySpark writes each error with the whole plan and a trace of Java's calls; we say it in a line.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True
    from spark.engine.interpreted_queries import interpreted_if  # noqa: PLC0415

    context.with_resource(interpreted_if(spark, small=is_brief))
    return spark


@contextmanager
def _started(application: str, *, is_brief: bool) -> "Iterator[SparkSession]":
    """Have a session, whose Java ends with this command and leaves no file behind.

    A signal ends Java as suddenly as this process: else both tell of every call that was cut off. The tables bear any
    end.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415
    from pyspark import SparkContext  # noqa: PLC0415

    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - PySpark tells it nowhere else
        # Of whoever called this command in his own process.
        yield _opened(application, None, is_brief=is_brief)
        return
    scratch = Path(mkdtemp(prefix="sluice-"))

    def clear() -> None:
        java = _java()
        if java is not None:
            java.kill()
            java.wait()
        shutil.rmtree(scratch, ignore_errors=True)
        # Else PySpark would look for that Java again, if this process runs another command.
        SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 - as above

    def end(number: int, _frame: object) -> None:
        # A second Ctrl-C too: it would wait for Java within this wait, for ever.
        with _signals_waiting():
            # Other threads would say until the end that Java does not answer them.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            clear()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with _signals_waiting():
        try:
            with _failures_told(scratch), _stdout_kept():
                spark = _opened(application, scratch, is_brief=is_brief)
        except BaseException:
            clear()
            raise
        _hush(spark)
        # After Spark has started: PySpark sets a handler of its own.
        before = {number: signal.signal(number, end) for number in ending()} if _is_main_thread() else {}
    try:
        with _failures_told(scratch):
            yield spark
    finally:
        with _signals_waiting():
            for number, handler in before.items():
                signal.signal(number, handler)
            try:
                _end_finalizer(spark)
                # A cluster is told that all went well. Where Java has died there is nothing to end.
                with suppress(Py4JError):
                    spark.stop()
            finally:
                clear()


def ending() -> tuple[signal.Signals, ...]:
    """The signals that end this command: SIGHUP not where `nohup` has it ignored."""
    return tuple(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN)


def _java() -> "Popen[bytes] | None":
    """The Java that this process has started. That of `spark-submit`, which has started us, is not ours to end."""
    from pyspark import SparkContext  # noqa: PLC0415

    return getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - as above


@contextmanager
def _failures_told(scratch: Path) -> Iterator[None]:
    """Tell failures in words while Java is there: PySpark asks it what it has raised."""
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
    """Have PySpark print no traces of a Java that has gone: we say that it has."""
    # What py4j logs, with a trace for each call, is raised too.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    server = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: None


def _code_of(java: "Popen[bytes] | None", error: Exception) -> int | None:
    """The exit code of a Java that has ended by itself; None where it has not."""
    from py4j.protocol import Py4JNetworkError  # noqa: PLC0415

    if java is not None and isinstance(error, (Py4JNetworkError, ConnectionError)):
        # Its connections close a moment before it is gone.
        with suppress(subprocess.TimeoutExpired):
            java.wait(JAVA_END_S)
    return None if java is None else java.poll()


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Have nothing of what is started meanwhile written to our standard output.

    Delta tells there of each vacuum, in the midst of what others read as JSON.
    """
    if sys.stdout is None:
        # Whoever called us has closed it: 1 may be any file by now.
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
    """Have the thread end that tells Java which of its objects Python needs no more.

    It would tell of a Java that went while it spoke to it. What it says now takes less time than Spark's end.
    """
    from py4j.clientserver import SHUTDOWN_FINALIZER_WORKER  # type: ignore[import-untyped]  # noqa: PLC0415

    # Not there where PYSPARK_PIN_THREAD is false. The next is taken from its right end.
    client = getattr(spark.sparkContext._gateway, "_gateway_client", None)  # noqa: SLF001 - as above
    tasks = getattr(client, "finalizer_deque", None)
    if tasks is not None:
        tasks.append(SHUTDOWN_FINALIZER_WORKER)


def _opened(application: str, scratch: Path | None, *, is_brief: bool) -> "SparkSession":
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415

    try:
        return open_session(application, is_brief=is_brief, scratch=scratch)
    except JarsMissingError as error:
        raise click.ClickException(str(error)) from error
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        words = "Java did not start, for what it says above. Spark needs Java 17 or 21: in JAVA_HOME, or as `java`"
        raise click.ClickException(words) from error


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """Have signals wait meanwhile: one that came while Java was being started would leave it behind, for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
