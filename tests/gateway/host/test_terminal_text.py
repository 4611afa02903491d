"""Tables that fit a terminal, and payloads that cannot command it."""

import ast
import fcntl
import io
import json
import os
import pty
import struct
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.host.terminal_text import (
    COLUMN_MIN,
    UNBOUNDED,
    WIDTH_UNKNOWN,
    aligned,
    escaped,
    escaped_bytes,
    hanging,
    harmless,
    harmless_json,
    moment,
    size,
    span,
    terminal_width,
    utc,
)
from tests.support.terminals import AFTER_LINE_END, OBEYED, WORST, assert_harmless, is_obeyed


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"21.5", "21.5"),
        ("Küche 21 °C".encode(), "Küche 21 °C"),
        (b"\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        (b"a\r\nb\tc", r"a\x0d\x0ab\x09c"),
        (b"\xff\xfe", r"\xff\xfe"),
        (rb"\x1b", r"\\x1b"),
        ("\u202egnp.exe".encode(), r"\u202egnp.exe"),
        ("\x9b31m".encode(), r"\u009b31m"),
    ],
)
def test_a_payload_is_shown_and_not_obeyed(payload: bytes, shown: str) -> None:
    assert escaped_bytes(payload) == shown


@given(st.text(st.characters(codec="utf-8", exclude_characters=AFTER_LINE_END)))
def test_escaped_text_is_harmless_and_tells_what_was_sent(text: str) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    assert_harmless(shown)
    assert ast.literal_eval('"' + shown.replace('"', r"\"") + '"') == text


def test_nothing_that_a_terminal_obeys_or_hides_gets_through() -> None:
    for character in OBEYED:
        assert escaped(character) != character
        assert harmless(character) == (character if character == "\n" else escaped(character))
    assert_harmless(escaped(WORST))


@given(st.text(st.characters(exclude_characters="\n"), min_size=1))
def test_words_keep_their_lines_and_backslashes_and_nothing_else_that_is_obeyed(text: str) -> None:
    shown = harmless(f"{text}\n\\{text}")
    assert not any(is_obeyed(character) for character in shown.replace("\n", ""))
    assert shown.count("\n") == 1
    assert shown.count("\\") >= text.count("\\") * 2 + 1
    assert harmless(shown) == shown


@given(st.text(), st.booleans())
def test_json_is_harmless_and_says_the_same(text: str, ascii_only: bool) -> None:  # noqa: FBT001 - drawn
    told = {text: [text, 1.5, None]}
    document = json.dumps(told, ensure_ascii=ascii_only)
    shown = harmless_json(f"{document}\n{document}")
    assert_harmless(shown)
    assert [json.loads(line) for line in shown.split("\n")] == [told, told]


@given(st.binary())
def test_any_bytes_are_harmless(data: bytes) -> None:
    assert escaped_bytes(data).isprintable()


def test_a_table_has_its_figures_to_the_right_and_gives_way_where_it_is_widest() -> None:
    rows = [("42", "1,000", "x" * 60), ("kitchen", "7", "y")]
    assert list(aligned(("DEVICE", "WAITING", "PAYLOAD"), rows, right=frozenset({1}), width=40)) == [
        "DEVICE   WAITING  PAYLOAD",
        "42         1,000  " + "x" * 21 + "…",
        "kitchen        7  y",
    ]


def test_times_and_figures_are_never_cut_and_the_last_column_gives_way_first() -> None:
    headers = ("NUMBER", "RECEIVED (UTC)", "REASON", "SUBJECT")
    rows = [("1", "2026-03-14 12:00:00", "topic-not-logappendtime", "device/" + "x" * 40)]
    figures, times = frozenset({0}), frozenset({1})
    assert list(aligned(headers, rows, right=figures, whole=times, width=70))[1] == (
        "     1  2026-03-14 12:00:00  topic-not-logappendtime  device/xxxxxxxx…"
    )
    assert list(aligned(headers, rows, right=figures, whole=times, width=50))[1] == (
        "     1  2026-03-14 12:00:00  topic-no…  device/xx…"
    )
    # Where even that is too much, the terminal's own wrapping cuts no number.
    assert list(aligned(headers, rows, right=figures, whole=times, width=20))[1] == (
        "     1  2026-03-14 12:00:00  topic…  devic…"
    )


def test_the_width_is_the_terminals_and_a_pipe_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert terminal_width(terminal) == WIDTH_UNKNOWN  # as a serial console, which tells of 0 columns
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 61, 0, 0))
        assert terminal_width(terminal) == 61
        monkeypatch.setenv("COLUMNS", "40")
        assert terminal_width(terminal) == 40
        monkeypatch.setenv("COLUMNS", "wide")
        assert terminal_width(terminal) == 61
    os.close(ours)
    assert terminal_width(io.StringIO()) == UNBOUNDED
    assert hanging("word " * 100, 4, io.StringIO()).count("\n") == 0
    monkeypatch.setenv("COLUMNS", "12")
    assert hanging("a line that is long", 4) == "a line that\n    is long"


cells = st.text(alphabet="abc", max_size=120)


@given(st.lists(st.tuples(cells, cells, cells, cells), max_size=6), st.integers(4 * COLUMN_MIN + 3 * 2, 200))
def test_no_line_is_wider_than_the_terminal(rows: list[tuple[str, ...]], width: int) -> None:
    lines = list(aligned(("A", "B", "C", "D"), rows, width=width))
    assert len(lines) == len(rows) + 1
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.2, "0 s"),
        (-3, "0 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (2 * 3600 + 31 * 60 + 5, "2 h 31 min"),
        (86_400 * 3 + 4 * 3600, "3 d 4 h"),
        (365.25 * 86_400 * 2.5, "2.5 years"),
    ],
)
def test_spans(seconds: float, told: str) -> None:
    assert span(seconds) == told


def test_sizes_are_decimal_as_the_settings_are() -> None:
    assert [size(count) for count in (0, 999, 1_000, 1_250_000, 3e9, 16e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.2 MB",
        "3.0 GB",
        "16.0 TB",
    ]


@given(st.floats(0, 9e17))
def test_no_size_is_told_in_a_unit_that_is_too_small_for_it(count: float) -> None:
    number, _, unit = size(count).partition(" ")
    assert float(number) < 1_000
    assert unit == "B" or float(number) >= 1


def test_sizes_are_rounded_before_their_unit_is_chosen() -> None:
    assert [size(count) for count in (999.6, 950_000, 999_949, 999_950, 10**15, 10**18)] == [
        "1.0 kB",
        "950.0 kB",
        "999.9 kB",
        "1.0 MB",
        "1.0 PB",
        "1,000.0 PB",
    ]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "boot + 0:00:00"), (26_549, "boot + 7:22:29"), (86_400 * 3 + 5, "boot + 3 d 0:00:05"), (-1, "boot + 0:00:00")],
)
def test_a_moment_without_a_clock_is_told_from_the_boot_with_its_seconds(seconds: int, told: str) -> None:
    assert moment(seconds * 1_000_000 + 999_999 * (seconds > 0), None) == told
    assert moment(seconds * 1_000_000, 0) == "1970-01-01 00:00:00"


def test_times_are_utc_and_those_that_cannot_be_do_not_fail() -> None:
    assert utc(1_700_000_000_000_000) == "2023-11-14 22:13:20"
    assert utc(2**62) == utc(-(2**62)) == "no such date"
