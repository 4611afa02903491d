"""Reads a TOML file that a person wrote."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.toml_files.mistakes import ConfigError, syntax_mistake, unseen_mistakes


def read_toml(text: str, path: Path, parse_float: Callable[[str], object] = float) -> dict[str, Any]:
    """Parse a file's text; `path` is for messages.

    Raises ConfigError if it is no TOML, or holds characters that nobody sees. Raises ValueError, ArithmeticError or
    RecursionError for numbers that are too long and lists that are too deep: callers know how to say that.
    """
    if unseen := unseen_mistakes(text):
        raise ConfigError(path, unseen)
    try:
        return tomllib.loads(text, parse_float=parse_float)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [syntax_mistake(error, text)]) from error
