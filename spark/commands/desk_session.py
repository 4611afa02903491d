"""Opens the tables for one look-up, without Java, and explains an empty answer."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from spark.commands.answers import Form, beside
from spark.commands.command_session import ending, is_main_thread
from spark.desk.asked import Asked, microseconds

if TYPE_CHECKING:
    from spark.desk.tables import Tables

# Functions import DuckDB and deltalake themselves: the import takes a fifth of a second, and `--help` needs neither.
SMALL_BYTES = 64_000_000
"""Bytes of a table up to which all of it is searched for the latest rows."""
WORDS_MAX = 400
"""Characters of a message of DuckDB or deltalake. A store tells the cause in one of its later lines."""
DAY_US = 86_400_000_000
LATEST_DAYS = (1, 8, 64)
"""Days before the newest row that are searched for the latest rows, one after the other."""


@contextmanager
def asking(warehouse: str) -> "Iterator[Tables]":
    """Open a warehouse. What goes wrong with its files is told in a line."""
    try:
        import duckdb  # noqa: PLC0415
        from deltalake.exceptions import DeltaError  # noqa: PLC0415

        from spark.desk import tables  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    try:
        with _nothing_left():
            yield tables.open(warehouse)
    except BrokenPipeError:
        raise
    except (duckdb.IOException, duckdb.OutOfMemoryException, DeltaError, OSError) as error:
        words = " ".join(click.unstyle(str(error)).split())[:WORDS_MAX] or type(error).__name__
        raise click.ClickException(f"{warehouse} cannot be read: {words}") from error
    except RuntimeError as error:
        if not was_interrupted(error):
            raise
        raise KeyboardInterrupt from error


@contextmanager
def _nothing_left() -> Iterator[None]:
    """Remove what DuckDB puts aside also if a signal ends this process. Otherwise Python's end removes it."""
    from spark.desk.delta_source import SPILLS  # noqa: PLC0415

    def end(number: int, _frame: object) -> None:
        for folder in [*SPILLS]:
            shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # Ctrl-C is an exception, after which Python ends as always.
    numbers = [number for number in ending() if number != signal.SIGINT] if is_main_thread() else []
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def missing_package(error: ModuleNotFoundError) -> click.ClickException:
    """Say which package of the desk's is not installed."""
    return click.ClickException(
        f"the Python package {error.name} is missing: run `pip install '.[desk]'` in Sluice's folder"
    )


def was_interrupted(error: BaseException) -> bool:
    """True if Ctrl-C has ended a query: DuckDB raises a RuntimeError of its own."""
    return isinstance(error, KeyboardInterrupt) or str(error) == "Query interrupted"


def latest(  # noqa: PLR0913, PLR0917 - the question, and its table
    tables: "Tables", asked: Asked, limit: int | None, path: str, time: str, rows: Callable[[Asked], str]
) -> Asked:
    """Limit a question without a span to the last days of a large table, if they hold `limit` rows and more.

    `path` is the table's, and `time` its column with statistics. If the latest rows are of the future, say whose.
    """
    if asked.has_span or limit is None:
        return asked
    now = datetime.now(UTC)
    newest_us = tables.source.statistics(path, f'epoch_us(max("max.{time}"))')
    if newest_us is not None and newest_us > microseconds(now):
        _tell_of_future(tables, time, rows(replace(asked, since_us=microseconds(now))), now)
        newest_us = microseconds(now)
    if (tables.source.statistics(path, "sum(size_bytes)") or 0) <= SMALL_BYTES or newest_us is None:
        return asked
    for days in LATEST_DAYS:
        narrow = replace(asked, since_us=newest_us - days * DAY_US)
        found = tables.source.rows(f"SELECT count(*) FROM (SELECT 1 FROM ({rows(narrow)}) LIMIT {limit + 1})")
        if found[0][0] > limit:
            return narrow
    return asked


def _tell_of_future(tables: "Tables", time: str, rows: str, now: datetime) -> None:
    """Say whose rows are of the future: they would push all others off a table of the latest ones."""
    ahead = f"device FROM ({rows}) GROUP BY device ORDER BY max({time}) DESC, device"
    devices = [str(device) for (device,) in tables.source.rows(f"SELECT {ahead}")]
    if devices:
        others = f" and {len(devices) - 1} more" if devices[1:] else ""
        beside(
            f"the latest are of the future, from {devices[0]}{others}: a clock is ahead. Without them: "
            f"--until {now:%Y-%m-%dT%H:%MZ}"
        )


def explain_nothing(tables: "Tables", asked: Asked, form: Form, time: str | None, rows: Callable[[Asked], str]) -> None:
    """Say why an answer has no rows. Raises click.BadParameter for a name that nobody knows."""
    from spark.desk.nothing import why_nothing  # noqa: PLC0415

    with known_names():
        words = why_nothing(tables, asked, time, rows).words(form.zone)
    if words:
        beside(words)


@contextmanager
def known_names() -> Iterator[None]:
    """Raise click.BadParameter for a name that nobody knows."""
    from spark.desk.nothing import UnknownNameError  # noqa: PLC0415

    try:
        yield
    except UnknownNameError as error:
        raise click.BadParameter(str(error), param_hint=f"--{error.what}") from error
