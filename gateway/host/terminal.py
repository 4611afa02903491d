"""Prints for commands, so that a terminal obeys nothing of it.

Elsewhere ruff refuses click's own functions (`banned-api` in pyproject.toml).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from gateway.host.terminal_text import harmless, json_text, terminal_height


def say(text: str = "", *, bold: int = 0, err: bool = False, nl: bool = True) -> None:
    """Print text; its first `bold` characters are bold on a terminal. `err` prints on standard error."""
    words = harmless(text)
    # Without bold characters there are no escape sequences either.
    click.echo(click.style(words[:bold], bold=True) + words[bold:] if bold else words, err=err, nl=nl)


def page(text: str) -> None:
    """Print text. If the terminal cannot show it all at once, the pager does (the variable PAGER, or `less`)."""
    if text.count("\n") + 1 < terminal_height():
        say(text)
    else:
        click.echo_via_pager(harmless(text))


def say_json(value: object) -> None:
    """Print a value as one line of JSON."""
    say(json_text(value))


def ask(question: str, **options: Any) -> Any:
    """Ask as `click.prompt` does. Raises click.Abort if the person ends it."""
    return click.prompt(harmless(question), **options)


def confirm(question: str, *, default: bool = False, abort: bool = False, err: bool = False) -> bool:
    """Ask as `click.confirm` does. Raises click.Abort if the person ends it, or says no and `abort` is set."""
    return click.confirm(harmless(question), default=default, abort=abort, err=err)


class SpeakingGroup(click.Group):
    """Commands whose errors are made harmless, as all else that is printed."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Read the arguments as click does; an error in them is raised with a harmless message."""
        with self.harmless_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command as click does; an error is raised with a harmless message."""
        with self.harmless_errors():
            return super().invoke(ctx)

    def words_of(self, error: click.ClickException) -> str:
        """Text printed for an error."""
        return harmless(error.format_message())

    @contextmanager
    def harmless_errors(self) -> Iterator[None]:
        """Make the messages of errors within harmless."""
        try:
            yield
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.ClickException as error:
            # Only this error is changed: its class has the exit code, and makes messages in its own way.
            error.format_message = partial(str, self.words_of(error))  # type: ignore[method-assign]
            raise
