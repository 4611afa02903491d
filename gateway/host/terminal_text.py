"""Formats text for a person at a terminal: tables that fit, sizes, time spans, and hostile bytes made harmless."""

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TextIO

import msgspec

GAP = "  "
COLUMN_MIN = 6
"""Least width of a column, even if the table is then wider than the terminal."""
LAST_COLUMN_MIN = 12
"""Width to which the last column shrinks before any other does."""
WIDTH_UNKNOWN = 80
"""Columns of a terminal that does not know its own width, such as many a serial console."""
HEIGHT_UNKNOWN = 24
UNBOUNDED = 1_000_000
"""Width if the output is no terminal: a pipe or a file gets whole lines."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
YEAR_S = 365.25 * 86_400
YEARS_FROM_S = 2 * YEAR_S
_SIZES = ((10**3, "kB"), (10**6, "MB"), (10**9, "GB"), (10**12, "TB"))
_PETABYTE = 10**15
UNKNOWN = "-"
_MS_BELOW_US = 1_000_000
_S_BELOW_US = 60_000_000
_SPAN_UNITS = ((86_400_000_000, 3_600_000_000), (3_600_000_000, 60_000_000), (0, 1_000_000))


def terminal_width(stream: TextIO | None = None) -> int:
    """Columns of the terminal behind a stream, by default standard output, unless the variable COLUMNS says other."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or WIDTH_UNKNOWN
    except (OSError, ValueError):  # no terminal, or closed
        return UNBOUNDED


def terminal_height(stream: TextIO | None = None) -> int:
    """Lines of the terminal behind a stream, by default standard output."""
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).lines or HEIGHT_UNKNOWN
    except (OSError, ValueError):  # no terminal, or closed
        return UNBOUNDED


def escaped(text: str) -> str:
    r"""Write a name or a payload as one line that no terminal obeys, with escapes such as `\x1b` or `\u202e`.

    A backslash is doubled, so that a reader can tell what was sent.
    """
    if "\\" not in text and _is_shown(text):
        return text
    return "".join(r"\\" if character == "\\" else _spelled(character) for character in text)


def escaped_bytes(data: bytes) -> str:
    r"""Escape bytes: as UTF-8 where they are UTF-8, each other byte as `\xff`."""
    return escaped(data.decode("utf-8", "surrogateescape"))


def harmless(text: str) -> str:
    """Make text harmless to a terminal, whatever names stand in it. Line ends stay, and backslashes single.

    All that commands print comes through here (`gateway.host.terminal`).
    """
    if _is_shown(text):
        return text
    return "".join(character if character == "\n" else _spelled(character) for character in text)


def harmless_json(document: str) -> str:
    r"""Make JSON harmless to a terminal by escapes such as `\u009b`. Programs read the same values from it."""
    if _is_shown(document):
        return document
    # Outside its texts JSON has only printable ASCII, and line ends between documents.
    return "".join(character if character == "\n" else _spelled_for_json(character) for character in document)


def json_text(value: object) -> str:
    """Encode a value as one line of JSON that no terminal obeys."""
    try:
        document = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        # Half a surrogate pair, which a file's name may hold.
        document = json.dumps(msgspec.to_builtins(value))
    return harmless_json(document)


_HIDDEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that Unicode lets be ignored (Default_Ignorable_Code_Point) and Python calls printable: they hide."""


def _is_shown(text: str) -> bool:
    """Whether each character has a place on the screen. Controls, line ends, bidi marks and surrogates have none."""
    return text.isprintable() and _HIDDEN.search(text) is None


def _spelled(character: str) -> str:
    if _is_shown(character):
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not UTF-8, as "surrogateescape" carries it
        return f"\\x{number - 0xDC00:02x}"
    if number < 0x80:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _spelled_for_json(character: str) -> str:
    """Write a character for a JSON text: beyond U+FFFF as a pair of surrogates (RFC 8259, section 7)."""
    if _is_shown(character):
        return character
    number = ord(character)
    if number < 0x10000:
        return f"\\u{number:04x}"
    high, low = divmod(number - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def shortened(text: str, width: int) -> str:
    """Cut a text to `width` characters, and mark the cut."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def hanging(line: str, indent: int, stream: TextIO | None = None) -> str:
    """Wrap a line at words to the width of `stream`'s terminal; indent what follows. A longer word stays whole."""
    return textwrap.fill(
        line, terminal_width(stream), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def aligned(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: frozenset[int] = frozenset(),
    whole: frozenset[int] = frozenset(),
    width: int | None = None,
) -> Iterator[str]:
    """Yield a table's lines, headers first. Columns in `right` are figures; the last column takes the room left.

    If not all fit, the last column shrinks first, then the widest of all. A figure or a column in `whole` never does:
    half a number or half a time says something else. Cells are one line each and hold nothing hostile.
    """
    width = terminal_width() if width is None else width
    widths = _fitted([max(map(len, column)) for column in zip(headers, *rows, strict=True)], width, right | whole)
    for cells in (headers, *rows):
        aligned_cells = (
            _justified(number in right)(shortened(cell, widths[number]), widths[number])
            for number, cell in enumerate(cells)
        )
        yield GAP.join(aligned_cells).rstrip()


def _fitted(widths: list[int], width: int, whole: frozenset[int]) -> list[int]:
    cuttable = [number for number in range(len(widths)) if number not in whole]
    over = sum(widths) + len(GAP) * (len(widths) - 1) - width
    last = len(widths) - 1
    if over > 0 and last in cuttable:
        given = min(over, max(0, widths[last] - LAST_COLUMN_MIN))
        widths[last] -= given
        over -= given
    while over > 0 and cuttable:
        widest = max(widths[number] for number in cuttable)
        if widest <= COLUMN_MIN:
            break
        alike = [number for number in cuttable if widths[number] == widest]
        next_widest = max([COLUMN_MIN, *(widths[number] for number in cuttable if widths[number] < widest)])
        # Equally wide columns shrink alike: none is cut short while another keeps all its room.
        each = min(widest - next_widest, max(1, over // len(alike)))
        for number in alike:
            given = min(each, over)
            widths[number] -= given
            over -= given
    return widths


def _justified(to_the_right: bool) -> Callable[[str, int], str]:  # noqa: FBT001 - a column's side
    return str.rjust if to_the_right else str.ljust


def size(count: float) -> str:
    """Write bytes in decimal units, as the settings have them: `950 B`, `1.2 MB`."""
    if round(count) < 1_000:
        return f"{count:.0f} B"
    for unit, name in _SIZES:
        # Rounded as it is shown: 999,950 bytes are 1.0 MB, and not 1000.0 kB.
        if round(count / unit, 1) < 1_000:
            return f"{count / unit:.1f} {name}"
    return f"{count / _PETABYTE:,.1f} PB"


def span(seconds: float) -> str:
    """Write a time span in its leading units: `45 s`, `10 min`, `2 h 31 min`, `3 d 4 h`, `2.5 years`."""
    whole = round(max(seconds, 0.0))
    if whole >= YEARS_FROM_S:
        return f"{whole / YEAR_S:,.1f} years"
    for (unit_s, unit), (smaller_s, smaller) in pairwise(_SPANS):
        if whole >= unit_s:
            rest = whole % unit_s // smaller_s
            return f"{whole // unit_s:,} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def milliseconds(count: float) -> str:
    """Write a duration: `3 ms`, `1,250 ms`, `less than 1 ms`."""
    return f"{count:,.0f} ms" if count >= 1 else "less than 1 ms"


def counted(number: int, what: str) -> str:
    """Write a number with its noun: `1 row`, `2,000 rows`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def readings_and_events(number: int) -> str:
    """Write how many rows there are: `1 reading or event`, `2,000 readings and events`."""
    return "1 reading or event" if number == 1 else f"{number:,} readings and events"


def moment(boottime_us: int, wall_us: int | None) -> str:
    """Write a time in UTC, `2026-03-14 12:00:00`, or as `boot + 7:22:29` if its wall time is not known."""
    if wall_us is not None:
        return utc(wall_us)
    minutes, seconds = divmod(max(boottime_us, 0) // 1_000_000, 60)
    days, hours = divmod(minutes // 60, 24)
    return f"boot + {f'{days:,} d ' if days else ''}{hours}:{minutes % 60:02}:{seconds:02}"


def utc(wall_us: int) -> str:
    """Write microseconds since 1970 as `2026-03-14 12:00:00` in UTC, or `no such date` if Python has none."""
    try:
        return f"{_EPOCH + timedelta(microseconds=wall_us):%Y-%m-%d %H:%M:%S}"
    except OverflowError:
        return "no such date"


def bound(error_us: int | None) -> str:
    """Write an error bound, rounded up: `± 2.1 ms`."""
    if error_us is None:
        return UNKNOWN
    if error_us < _MS_BELOW_US:
        return f"± {math.ceil(error_us / 100) / 10:,.1f} ms"
    if error_us < _S_BELOW_US:
        return f"± {math.ceil(error_us / 100_000) / 10:.1f} s"
    # In whole units of the smaller of the two units shown.
    unit_us = next(unit_us for least_us, unit_us in _SPAN_UNITS if error_us >= least_us)
    return f"± {span(-(-error_us // unit_us) * unit_us / 1e6)}"
