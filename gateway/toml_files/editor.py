"""Changes settings in a TOML text, and leaves the rest as a person wrote it: notes, order, blank lines."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.toml_files.mistakes import lines_of
from gateway.toml_files.writer import Notes, key_text, line_text, section_text, value_text

_Path = tuple[str, ...]
_HEADER: Final = re.compile(r"^\s*\[")
_ONE_LINE: Final = re.compile(r"^(\s*[^=#]+?\s*=\s*)(.*)$")
_QUOTED: Final = re.compile(r"""\"(?:\\.|[^"\\])*\"|'[^']*'""")


def edited(text: str, document: Mapping[str, Any], notes: Notes) -> str | None:
    """Return the text changed to say `document`; None if its form cannot be changed safely."""
    before = tomllib.loads(text)
    if before == document:
        return text
    lines = text.rstrip("\n").split("\n")
    try:
        for path in [*_gone(before, document, ())]:
            _remove(lines, path, _at(before, path))
        for path, value in _new(before, document, ()):
            _set(lines, path, value, notes)
    except LookupError:
        return None
    after = "\n".join(lines).rstrip("\n") + "\n"
    # Values over several lines, or in braces, were not understood above: then the result differs.
    try:
        return after if tomllib.loads(after) == document else None
    except tomllib.TOMLDecodeError:
        return None


def _gone(before: Mapping[str, Any], after: Mapping[str, Any], path: _Path) -> Iterator[_Path]:
    for key, value in before.items():
        if key not in after:
            yield (*path, key)
        elif isinstance(value, dict) and isinstance(after[key], dict):
            yield from _gone(value, after[key], (*path, key))


def _new(before: Mapping[str, Any], after: Mapping[str, Any], path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yield settings that are new or changed, and a new section without settings of its own as `{}`."""
    for key, value in after.items():
        here, old = (*path, key), before.get(key)
        if not isinstance(value, dict):
            if key not in before or old != value or type(old) is not type(value):
                yield here, value
        elif isinstance(old, dict):
            yield from _new(old, value, here)
        else:
            if not any(not isinstance(inner, dict) for inner in value.values()):
                yield here, {}
            yield from _new({}, value, here)


def _at(document: Mapping[str, Any], path: _Path) -> object:
    for key in path:
        document = document[key]
    return document


def _remove(lines: list[str], path: _Path, value: object) -> None:
    """Remove a setting or a section. Raises LookupError if a setting has no line of its own."""
    if not isinstance(value, dict):
        del lines[_line_of(lines, path)]
        return
    while (header := _header_of(lines, path)) is not None:
        end = _end_of(lines, header)
        # Notes right above the next header are mostly about that header.
        while end > header + 1 and end < len(lines) and lines[end - 1].lstrip().startswith("#"):
            end -= 1
        del lines[header:end]


def _set(lines: list[str], path: _Path, value: Any, notes: Notes) -> None:
    *parents, key = path
    section = tuple(parents)
    if value == {}:
        lines += ["", section_text(path, notes)]
        return
    try:
        at = _line_of(lines, path)
    except LookupError:
        header = _header_of(lines, section, exactly=True)
        if not section:
            raise
        if header is None:
            lines += ["", section_text(section, notes)]
            header = len(lines) - 1
        end = _end_of(lines, header)
        while end > header + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
            end -= 1
        lines.insert(end, line_text(key, value, notes.get(path)))
        return
    found = _ONE_LINE.match(lines[at])
    if found is None or key_text(key) not in found[1]:
        raise LookupError(path)
    note = _note_of(found[2])
    lines[at] = found[1] + value_text(value) + (f" {note}" if note else "")


def _note_of(rest: str) -> str:
    """Return the note behind a value on one line; empty if there is none."""
    bare = _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), rest)
    at = bare.find("#")
    return "" if at < 0 else rest[at:]


def _line_of(lines: list[str], path: _Path) -> int:
    """Return the index of a setting's line. Raises LookupError."""
    return lines_of("\n".join(lines))[path] - 1


def _header_of(lines: list[str], path: _Path, *, exactly: bool = False) -> int | None:
    """Return the index of the first header of a section, or of one below it."""
    for place, line in sorted(lines_of("\n".join(lines)).items(), key=lambda each: each[1]):
        is_below = place[: len(path)] == path
        if is_below and (not exactly or place == path) and _HEADER.match(lines[line - 1]):
            return line - 1
    return None


def _end_of(lines: list[str], header: int) -> int:
    """Return the index of the line behind a section's last one."""
    return next((at for at in range(header + 1, len(lines)) if _HEADER.match(lines[at])), len(lines))
