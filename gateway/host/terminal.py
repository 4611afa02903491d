"""The one way in which commands speak to a person or a program: nothing that they print is obeyed by a terminal.

Elsewhere ruff refuses click's own functions for that (`banned-api` in pyproject.toml).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from gateway.host.terminal_text import harmless, json_text


def say(text: str = "", *, bold: int = 0, err: bool = False, nl: bool = True) -> None:
    """Print words; their first `bold` characters are bold on a terminal. `err`: on standard error."""
    words = harmless(text)
    # Before and behind it nothing else is drawn in another way.
    click.echo(click.style(words[:bold], bold=True) + words[bold:] if bold else words, err=err, nl=nl)


def say_json(value: object) -> None:
    """Print a value as one line of JSON."""
    say(json_text(value))


def ask(question: str, **options: Any) -> Any:
    """As `click.prompt` does. Raises click.Abort where the person ends it."""
    return click.prompt(harmless(question), **options)


def confirm(question: str, *, default: bool = False, abort: bool = False, err: bool = False) -> bool:
    """As `click.confirm` does. Raises click.Abort where the person ends it, or with `abort` says no."""
    return click.confirm(harmless(question), default=default, abort=abort, err=err)


class SpeakingGroup(click.Group):
    """Commands whose errors are told as everything else is."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """As click does; what is wrong with the words typed goes on as an error that is told harmlessly."""
        with self.told():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """As click does; an error goes on as it is, with its message made harmless."""
        with self.told():
            return super().invoke(ctx)

    def words_of(self, error: click.ClickException) -> str:
        """What is told of an error."""
        return harmless(error.format_message())

    @contextmanager
    def told(self) -> Iterator[None]:
        """Errors within are told so."""
        try:
            yield
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.ClickException as error:
            # On this one error: its class, with its exit code, makes the message in a way of its own.
            error.format_message = partial(str, self.words_of(error))  # type: ignore[method-assign]
            raise
