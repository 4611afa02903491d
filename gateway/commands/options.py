"""Options, exit codes and error messages that the `sluice` commands share."""

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway.config import config_file
from gateway.host.logs import is_journal, prioritized
from gateway.host.service_user import as_service, is_of_root
from gateway.host.terminal import SpeakingGroup, say
from gateway.host.terminal_text import hanging, harmless
from gateway.settings import DEFAULT_CONFIG, Settings
from gateway.toml_files.mistakes import ConfigError

FINDING = 1
"""Exit code if something is wrong with the gateway. Exit code 2 is for wrong usage and wrong settings."""

config_option = click.option(
    "--config",
    "config",
    # `load_settings` reports a file that cannot be read, with what to do.
    type=click.Path(path_type=Path, readable=False),
    default=DEFAULT_CONFIG,
    show_default=True,
    help="The gateway's settings.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


_T = TypeVar("_T", bound="click.ParamType[Any]")


def named(kind: _T, name: str) -> _T:
    """Give an option's type a name for error messages: click's own names are for programmers."""
    kind.name = name
    return kind


_CONFIG = "sluice.config"
_OURS = re.compile(r"(?<![\w/.-])(?:sudo\s+)?sluice(?=\s+(?:buffer|check|devices|status)\b)")
_ERROR = "Error: "
"""Word that click puts before an error's message."""


class WrappingGroup(SpeakingGroup):
    """Group of commands whose errors are wrapped to the terminal's width."""

    def words_of(self, error: click.ClickException) -> str:
        """Wrap the message. In the journal, show it with the priority of an error."""
        words = _wrapped(error)
        if is_journal():
            error.show = partial(say_error, _ERROR + words)  # type: ignore[method-assign]
        return words


def say_error(text: str, _file: object = None) -> None:
    """Print an error on standard error. In the journal it gets the priority of an error."""
    say(prioritized(text, "error") if is_journal() else text, err=True)


def _wrapped(error: click.ClickException) -> str:
    """Wrap each line of the message. The first line leaves room for click's own word."""
    lines = harmless(as_typed(_ERROR + error.format_message())).split("\n")
    return "\n".join(hanging(line, len(_ERROR), sys.stderr) for line in lines).removeprefix(_ERROR)


def load_settings(path: Path) -> Settings:
    """Read the settings. If they are wrong, report each mistake with its line, and end with exit code 2."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_CONFIG] = path
    try:
        return config_file.load(path)
    except ConfigError as error:
        for mistake in error.mistakes:
            place = f"{path}:{mistake.line}" if mistake.line else str(path)
            say_error(hanging(f"{place}: {mistake.message}", 4, sys.stderr))
        say_error("nothing was done: correct this first")
        sys.exit(2)


def load_as_service(path: Path) -> Settings:
    """Read the settings as `load_settings` does. If this is root, be the gateway's user until the command ends.

    That user can put any file or link in the buffer's place, and so must not see or change more than it can itself.
    """
    settings = load_settings(path)
    buffer = settings.buffer.path
    try:
        if os.geteuid() == 0 and not is_of_root(buffer):
            click.get_current_context().with_resource(as_service(path, buffer))
    except OSError as error:
        raise click.ClickException(f"{buffer}: {error.strerror}") from error
    return settings


def as_typed(words: str) -> str:
    """Put `sudo` before the `sluice` commands in a text if the service's settings are used, which takes root."""
    context = click.get_current_context(silent=True)
    config = None if context is None else context.meta.get(_CONFIG)
    return _OURS.sub("sudo sluice", words) if config == DEFAULT_CONFIG else words
