"""What the `sluice` commands share: their options, their exit codes, and how settings that are wrong are told."""

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway.config import config_file
from gateway.host.logs import is_journal, prioritized
from gateway.host.terminal import SpeakingGroup, say
from gateway.host.terminal_text import hanging, harmless
from gateway.settings import DEFAULT_CONFIG, Settings
from gateway.toml_files.mistakes import ConfigError

FINDING = 1
"""Exit code where something is wrong with the gateway; 2 is wrong usage, the configuration included."""

config_option = click.option(
    "--config",
    "config",
    # What cannot be read is told by `load_settings`, with what to do.
    type=click.Path(path_type=Path, readable=False),
    default=DEFAULT_CONFIG,
    show_default=True,
    help="The gateway's settings.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


_T = TypeVar("_T", bound="click.ParamType[Any]")


def named(kind: _T, name: str) -> _T:
    """A type of options by the name that a person is told where it does not fit: click's own are a programmer's."""
    kind.name = name
    return kind


_CONFIG = "sluice.config"
_OURS = re.compile(r"(?<![\w/.-])(?:sudo\s+)?sluice(?=\s+(?:buffer|check|devices|status)\b)")
_ERROR = "Error: "
"""What click puts before an error's message."""


class WrappingGroup(SpeakingGroup):
    """Commands whose errors are wrapped to the terminal's width."""

    def words_of(self, error: click.ClickException) -> str:
        """The message wrapped; in the journal it is told with its priority."""
        words = _wrapped(error)
        if is_journal():
            error.show = partial(say_error, _ERROR + words)  # type: ignore[method-assign]
        return words


def say_error(text: str, _file: object = None) -> None:
    """Tell a person on standard error what went wrong; in the journal with the priority of an error."""
    say(prioritized(text, "error") if is_journal() else text, err=True)


def _wrapped(error: click.ClickException) -> str:
    """The message with each line wrapped; the first comes behind click's own word."""
    lines = harmless(as_typed(_ERROR + error.format_message())).split("\n")
    return "\n".join(hanging(line, len(_ERROR), sys.stderr) for line in lines).removeprefix(_ERROR)


def load_settings(path: Path) -> Settings:
    """Read the settings; where they are wrong, say so by line and end with exit code 2."""
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


def as_typed(words: str) -> str:
    """A text with commands of ours as they are typed: what the service's settings are used for takes root."""
    context = click.get_current_context(silent=True)
    config = None if context is None else context.meta.get(_CONFIG)
    return _OURS.sub("sudo sluice", words) if config == DEFAULT_CONFIG else words
