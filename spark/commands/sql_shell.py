"""`sluice-cloud sql` without a query: a shell for SQL on the tables."""

import os
import readline
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import duckdb

from gateway.host.terminal import say
from spark.commands.answers import SUFFIXES, Form, print_relation
from spark.commands.desk_session import was_interrupted
from spark.desk.statements import QueryError, expect_reading, words_of
from spark.desk.tables import VIEWS, Tables
from spark.engine.told_error import ToldError

HISTORY_MAX = 1_000
"""Lines of history that are kept."""
WORDS = (
    *("SELECT", "FROM", "WHERE", "GROUP BY", "ORDER BY", "LIMIT", "JOIN", "USING", "WITH", "AND", "OR", "NOT", "NULL"),
    *("DESCRIBE", "SHOW", "EXPLAIN", "TIMESTAMP", "INTERVAL", "count(*)", "DESC", "DISTINCT"),
)
HELP = """\
SQL ends with a semicolon. Only statements that read are run.
\\d             the tables           \\d NAME       a table's columns
.csv FILE      keep the last answer, all its rows: .csv or .parquet
.limit N       most rows to print   \\q            leave (or Ctrl-D)
Tab completes names. Ctrl-C ends a query. A table that is higher than the terminal goes to the pager."""


class Shell:
    """One session. Each statement sees the tables as they are then."""

    def __init__(self, tables: Tables, form: Form) -> None:
        self._tables = tables
        self._form = replace(form, in_pages=True)
        self._last: str | None = None
        """The last query that was answered."""
        self._names: list[str] = []

    def run(self) -> None:
        """Read and answer until the input ends."""
        with_history = _history()
        readline.set_completer(self._complete)
        readline.set_completer_delims(" \t\n`!@#$%^&*()=+[{]}|;:'\",<>?/")
        readline.parse_and_bind("tab: complete")
        say(f"{self._tables.warehouse}: {', '.join(VIEWS)}. \\? helps, \\q leaves.")
        try:
            for statement in _statements():
                try:
                    self._do(statement)
                except duckdb.Error as error:
                    say(f"Error: {words_of(error, VIEWS)}", err=True)
                except (ToldError, click.ClickException) as error:
                    say(f"Error: {error}", err=True)
                except (KeyboardInterrupt, RuntimeError) as error:
                    if not was_interrupted(error):
                        raise
                    say("stopped", err=True)
        finally:
            if with_history is not None:
                readline.set_history_length(HISTORY_MAX)
                readline.write_history_file(with_history)

    def _do(self, statement: str) -> None:
        command, _, rest = statement.partition(" ")
        match command:
            case "\\?" | ".help":
                say(HELP)
            case "\\d" if not rest:
                say("\n".join(VIEWS))
            case "\\d":
                self._answer(f"DESCRIBE {rest.strip()}")
            case ".csv" | ".out":
                self._keep(Path(rest.strip()))
            case ".limit" if rest.strip().isdecimal() and int(rest) > 0:
                self._form = replace(self._form, limit=int(rest))
            case _ if command.startswith((".", "\\")):
                say(f"there is no {command}\n{HELP}", err=True)
            case _:
                self._answer(statement)
                self._last = statement

    def _answer(self, query: str) -> None:
        print_relation(self._tables.source.db, self._asked(query), self._form)

    def _keep(self, path: Path) -> None:
        if self._last is None:
            raise QueryError("there is no answer yet to keep")
        if path.suffix not in SUFFIXES:
            raise QueryError(f"write a file's name that ends in {' or '.join(SUFFIXES)}")
        found = self._asked(self._last)
        print_relation(self._tables.source.db, found, Form(None, out=path, zone=self._form.zone))

    def _asked(self, query: str) -> duckdb.DuckDBPyRelation:
        expect_reading(query)
        return self._tables.sql(query)

    def _complete(self, begun: str, place: int) -> str | None:
        if not self._names:
            columns = {column for name in VIEWS for column in self._tables.relation(name).columns}
            self._names = [*VIEWS, *sorted(columns), *WORDS]
        fitting = [name for name in self._names if name.lower().startswith(begun.lower())]
        return fitting[place] if place < len(fitting) else None


def _statements() -> Iterator[str]:
    """Statements as they are typed: lines up to a semicolon, or one line that begins with a point or a backslash."""
    lines: list[str] = []
    while True:
        try:
            line = input("   -> " if lines else "sql> ")
        except KeyboardInterrupt:
            say()
            lines.clear()
            continue
        except EOFError:
            say()
            return
        if not lines and line.strip() in {"\\q", "exit", "quit"}:
            return
        if not lines and line.lstrip().startswith((".", "\\")):
            yield line.strip()
            continue
        lines.append(line)
        text = "\n".join(lines).strip()
        if text.endswith(";") or not text:
            lines.clear()
            if text.strip("; \n"):
                yield text.rstrip("; \n")


def _history() -> Path | None:
    """Read the lines typed before. Returns their file, or None if there can be none."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(state).expanduser() / "sluice" / "sql_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        readline.read_history_file(path)
    except OSError:
        return None
    return path
