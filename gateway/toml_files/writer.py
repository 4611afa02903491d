"""Writes a TOML document with notes beside its settings, for a person to edit."""

import json
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import Any, Final

from gateway.toml_files.mistakes import UNSEEN

Notes = Mapping[tuple[str, ...], str]
"""Notes by the place of their setting or section."""
_NOTE_COLUMN: Final = 40
_BARE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def toml_text(document: Mapping[str, Any], notes: Notes) -> str:
    """Write a document in the order of its keys. tomllib reads the same document back."""
    lines: list[str] = []
    _table(document, (), notes, lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, Any], place: tuple[str, ...], notes: Notes, lines: list[str]) -> None:
    inner = {key: value for key, value in table.items() if _is_section(value)}
    for key, value in table.items():
        if key not in inner:
            lines.append(line_text(key, value, notes.get((*place, key))))
    for key, value in inner.items():
        below = (*place, key)
        name = ".".join(map(key_text, below))
        for element in value if isinstance(value, list) else (value,):
            lines.append("")
            lines.append(
                _with_note(f"[[{name}]]", notes.get(below)) if isinstance(value, list) else section_text(below, notes)
            )
            _table(element, below, notes, lines)


def _is_section(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(element, dict) for element in value)
    return isinstance(value, dict)


def line_text(key: str, value: object, note: str | None) -> str:
    """Write one setting."""
    return _with_note(f"{key_text(key)} = {value_text(value)}", note)


def section_text(place: tuple[str, ...], notes: Notes) -> str:
    """Write the header of a section."""
    return _with_note(f"[{'.'.join(map(key_text, place))}]", notes.get(place))


def _with_note(text: str, note: str | None) -> str:
    return text if note is None else f"{text.ljust(_NOTE_COLUMN - 1)} # {note}"


def key_text(key: str) -> str:
    """Write a name, in quotes if TOML wants them."""
    return key if key and _BARE.issuperset(key) else _string(key)


def value_text(value: object) -> str:
    """Write a value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key_text(key)} = {value_text(element)}" for key, element in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(value_text, value)) + "]"
    # Numbers: TOML and Python both write inf and nan.
    return repr(value)


def _string(text: str) -> str:
    # JSON escapes all that TOML wants escaped, except DEL.
    written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", written)
