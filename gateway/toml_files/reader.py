"""Reads a TOML file that a person wrote."""

import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.toml_files.mistakes import ConfigError, Mistake, syntax_mistake, unseen_mistakes


def read_text(path: Path, advice: Mapping[type[Exception], str], bytes_max: int | None = None) -> str:
    """Read a file. `advice` says what to do about errors, the more special ones first. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read() if bytes_max is None else file.read(bytes_max + 1)
    except OSError as error:
        unread = f"cannot be read: {error.strerror}; name a file that you may read, on a disk that is sound"
        words = next((words for kind, words in advice.items() if isinstance(error, kind)), unread)
        raise ConfigError(path, [Mistake(0, words)]) from error
    if bytes_max is not None and len(data) > bytes_max:
        raise ConfigError(path, [Mistake(0, f"is longer than {bytes_max} bytes; is it the right file?")])
    with suppress(UnicodeDecodeError):
        # Editors on Windows, and spreadsheets, put a byte order mark first, and end lines in other ways.
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    # Not from the error, for that holds the text, which may be secret.
    no_utf8 = "is not UTF-8 text, as TOML must be; save it as UTF-8"
    raise ConfigError(path, [Mistake(0, advice.get(UnicodeDecodeError, no_utf8))])


def read_toml(text: str, path: Path, parse_float: Callable[[str], object] = float) -> dict[str, Any]:
    """Parse a file's text; `path` is for messages.

    Raises ConfigError if it is no TOML, holds characters that nobody sees, or is too deep or too long to be read.
    """
    if unseen := unseen_mistakes(text):
        raise ConfigError(path, unseen)
    try:
        return tomllib.loads(text, parse_float=parse_float)
    except tomllib.TOMLDecodeError as error:
        mistake = syntax_mistake(error, text)
    except RecursionError:
        mistake = Mistake(0, "arrays or tables stand too deep inside one another to be read; write fewer levels")
    except (ValueError, ArithmeticError):
        # tomllib lets errors of int() and Decimal() through: for a number of more than 4300 digits, say.
        mistake = Mistake(0, "holds a number that is too long to be read; write a shorter one")
    # Not from these errors, for they hold the text, which may be secret.
    raise ConfigError(path, [mistake])
