"""Finds mistakes in a TOML file: on which line each stands, and what to write instead."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path

import msgspec

Place = tuple[str | int, ...]
"""Place of a setting: ('kafka', 'linger_ms'), ('routes', 0, 'topic')."""


_TEXT_SHOWN_MAX = 300
"""Characters of a text that a message repeats: longer than Kafka's longest topic."""


_PART = r"""(?:[A-Za-z0-9_\-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"({_PART}(?:\s*\.\s*{_PART})*)"
_HEADER = re.compile(rf"^\s*(\[\[?)\s*{_DOTTED}\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"^\s*{_DOTTED}\s*=")
_BARE = re.compile(r"[A-Za-z0-9_\-]+")
_BACKSLASH = "a backslash means something else in double quotes; write the text in single quotes"
_NO_CHARACTER = "a character that cannot be seen stands here; remove it"
_TWICE = (
    "this section stands in the file already; write its settings together, or, where there may be several, each with "
    "two brackets, as in [[routes]]"
)
_SYNTAX = (
    (
        "Invalid value",
        'no value stands behind the =; write a text in double quotes, as in id = "barn-1", and other values without',
    ),
    ("Cannot overwrite", "this name was given a value before; remove one of the two"),
    ("Cannot declare", _TWICE),
    ("Cannot mutate", "this section was written out in another way before; write its settings together"),
    ("Duplicate", "this name stands in the braces twice; remove one of the two"),
    ("Expected '='", 'a setting is written name = value, as in id = "barn-1"'),
    ("Expected newline", "something follows the value; write each setting on a line of its own, and notes behind a #"),
    ("Expected ']'", "a section's name stands in brackets, as in [kafka]; close them"),
    ("Expected ']]'", "a name that begins with [[ ends with ]], as in [[routes]]; close them"),
    ("Expected \"'", "a text that begins with a single quote ends in none; write one at its end, as in id = 'barn-1'"),
    ("Invalid statement", 'write [section] or name = value, as in id = "barn-1"'),
    ("Invalid initial character", "a name stands here that is none; write letters, digits, '_' or '-'"),
    ("Illegal character '\\n'", 'a text ends in no double quote; write one at its end, as in id = "barn-1"'),
    ("Unterminated string", 'a text ends in no double quote; write one at its end, as in id = "barn-1"'),
    ("Unclosed", "a list or a brace is not closed; write ] or } at its end"),
    ("Unescaped '\\'", _BACKSLASH),
    ("Invalid hex value", _BACKSLASH),
    ("Escaped character", _BACKSLASH),
    ("Found invalid character '\\n'", "a text ends in no single quote; write one at its end, as in id = 'barn-1'"),
    ("Found invalid character", _NO_CHARACTER),
    ("Illegal character", _NO_CHARACTER),
    ("Cannot redefine", "this section was written out in another way before; write its settings together"),
    ("Invalid date", "this is no date; write a text in double quotes"),
)
"""Beginnings of tomllib's messages, and what to do."""
_CURLY = frozenset("\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb")
"""Quotes as word processors write them."""
_STRAIGHT = 'these quotes are a word processor\'s; write straight ones, as in id = "barn-1"'
_WORD = re.compile(r"[A-Za-z]+(?=\s*(?:[#,\]}]|$))")
_TRUTHS = {
    word: truth for truth, words in (("true", "true yes on"), ("false", "false no off")) for word in words.split()
}
"""Words that people and other formats write for true and false."""
_WENT_ON = ("Expected newline", "Unclosed")
"""tomllib's words for a value that begins as a number and goes on: 127.0.0.1."""
_ONE_LINE = (
    "all within { } must stand on one line; if the line is too long, write each setting on a line of its own, in a "
    "section"
)
_IN_BRACES = ("Invalid initial character", "Unclosed", "Invalid value", "Expected '='")
"""tomllib's words for a line that ends within braces."""
_QUOTED = re.compile(r"""\"(?:\\.|[^"\\])*\"|'[^']*'""")
_ENDS_A_VALUE = frozenset(" \t\r\n\"'[]{},#")
_NO_QUOTES = 'this is no number; put texts in double quotes, as in host = "127.0.0.1"'
_NOT_SHOWN = "a text with an @ (not shown, as it may hold a password)"
_SHOWN_MAX = 20
"""Elements of a list that a message repeats."""
_DIGITS_SHOWN_MAX = 40
UNSEEN = re.compile(
    "[\x80-\xa0\xad\u061c\u115f\u1160\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u2064\u2066-\u206f\u2800\u3000"
    "\u3164\ufeff\uffa0]"
)
"""Characters that look like a blank and are none, or like nothing. TOML allows them in texts."""
_BEFORE_A_NOTE = re.compile(r"""(?:\"(?:\\.|[^"\\])*\"|'[^']*'|[^#"'])*(?=#)""")
_NAME_MISSING = "the file ends where a name should stand; write it, and close the brackets that are open"


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """One mistake in the file. Line 0: it is not about one line."""

    line: int
    message: str


class ConfigError(Exception):
    """The file cannot be used. Has every mistake that was found, in the order of their lines."""

    def __init__(self, path: Path, mistakes: list[Mistake]) -> None:
        self.path = path
        self.mistakes = sorted(mistakes)
        super().__init__("\n".join(f"{where(path, mistake.line)}: {mistake.message}" for mistake in self.mistakes))


def where(path: Path, line: int) -> str:
    """Write PATH:LINE, as editors follow it; PATH alone for line 0."""
    return f"{path}:{line}" if line else str(path)


def unseen_mistakes(text: str) -> list[Mistake]:
    """Find characters that a person cannot see, outside of notes: the first of each line.

    Web pages and word processors put them there. A text that needs one has it as an escape.
    """
    return [
        _unseen_mistake(number, found)
        for number, line in enumerate(text.split("\n"), start=1)
        if (found := UNSEEN.search(_without_note(line))) is not None
    ]


def _without_note(line: str) -> str:
    before = _BEFORE_A_NOTE.match(line)
    return line if before is None else before[0]


def _unseen_mistake(line: int, found: re.Match[str]) -> Mistake:
    import unicodedata  # noqa: PLC0415 - nearly no file needs it

    character = found[0]
    name = unicodedata.name(character, "a control character").lower()
    return Mistake(
        line,
        f"column {found.start() + 1}: here stands {name} (U+{ord(character):04X}), which looks like a blank, or like "
        "nothing, and is neither; write an ordinary blank, or remove it. Where a text in double quotes is to have it, "
        f"write \\u{ord(character):04x}",
    )


def syntax_mistake(error: tomllib.TOMLDecodeError, text: str) -> Mistake:
    """Say where a text is no TOML, and what to do."""
    told, _, place = str(error).partition(" (at ")
    found = re.match(r"line (\d+), column (\d+)", place)
    if found is None and told.startswith("Invalid value") and not text.rstrip().endswith("="):
        # The end of the file cut off a list.
        told = "Unclosed"
    words = next((words for beginning, words in _SYNTAX if told.startswith(beginning)), told)
    if found is not None:
        line, column = int(found[1]), int(found[2])
        written = text.split("\n")[line - 1]
        around = written[max(column - 2, 0) : column]
        if told.startswith(_WENT_ON) and len(around) == len("..") and not _ENDS_A_VALUE.intersection(around):
            words = _NO_QUOTES
        elif told.startswith("Cannot overwrite") and _HEADER.match(written):
            words = _TWICE
        elif told.startswith(_IN_BRACES) and _goes_on_within_braces(written, column):
            words = _ONE_LINE
        elif told.startswith("Invalid value"):
            words = _no_value(written[column - 1 :]) or words
        return Mistake(line, f"is not TOML at column {column}: {words}")
    if told.startswith("Invalid initial character"):
        words = _NAME_MISSING
    end = text.rstrip()
    if told.startswith('Expected "'):
        # The last quotes are those that nothing closes.
        end = text[: text.rfind(told.split('"')[1])]
    return Mistake(end.count("\n") + 1, f"is not TOML: {words}")


def _no_value(written: str) -> str | None:
    """Say what to write instead of something that is nearly a value; None for anything else."""
    if written[:1] in _CURLY:
        return _STRAIGHT
    word = _WORD.match(written)
    truth = None if word is None else _TRUTHS.get(word[0].lower())
    return None if truth is None else f"write {truth}, in small letters and without quotes"


def _goes_on_within_braces(line: str, column: int) -> bool:
    """Whether at most a note stands from a column on, and a { is open before it."""
    before = _QUOTED.sub("", line[: column - 1])
    after = line[column - 1 :].strip()
    return (not after or after.startswith("#")) and before.count("{") > before.count("}")


def lines_of(text: str) -> dict[Place, int]:
    """Find the line on which each table and key begins. tomllib keeps no positions: this scan finds plain ones."""
    places: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    around: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.split("\n"), start=1):
        header = _HEADER.match(line)
        if header is not None:
            *outer, name = _split(header[2])
            table = ()
            for part in outer:
                table = (*table, part)
                around.setdefault(table, number)
                # A table inside an array belongs to the element that was begun last.
                table = (*table, counts[table]) if table in counts else table
            table = (*table, name)
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                places.setdefault(table, number)
                table = (*table, counts[table])
            places.setdefault(table, number)
            continue
        key = _KEY.match(line)
        if key is not None:
            parts = _split(key[1])
            for count in range(1, len(parts) + 1):
                places.setdefault((*table, *parts[:count]), number)
    # Sections that only their inner sections name.
    return around | places


def _split(dotted: str) -> Place:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))


def line_of(lines: Mapping[Place, int], place: Place) -> int:
    """Return the line of a setting, or of the nearest thing around it in the file; 0 if there is none."""
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 0)


def spell(place: Place) -> str:
    """Write a place as a person would: kafka.tls, routes[0].topic."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if _BARE.fullmatch(part) else show(part)
            text += f".{shown}" if text else shown
    return text


def show(value: object) -> str:
    """Show a value on one line, short. A text with an @ is left out: it may hold the password of an address."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        short = value if len(value) <= _TEXT_SHOWN_MAX else value[:_TEXT_SHOWN_MAX] + "..."
        # As JSON, so that no character of it acts on the terminal.
        return _NOT_SHOWN if "@" in value else msgspec.json.encode(short).decode()
    if isinstance(value, list | tuple):
        inner = ["a list" if isinstance(element, list) else show(element) for element in value[:_SHOWN_MAX]]
        return f"[{', '.join(inner)}{', ...' if len(value) > len(inner) else ''}]"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of this size"
    if isinstance(value, Decimal | date | time):
        return str(value) if len(str(value)) <= _DIGITS_SHOWN_MAX else "a number of this length"
    return "a section" if isinstance(value, dict) else repr(value)
