"""Tables that fit a terminal, and payloads that cannot command it."""

import ast
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.terminal_text import COLUMN_MIN, aligned, escaped, escaped_bytes, size, span, utc


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


@given(st.text())
def test_escaped_text_is_harmless_and_tells_what_was_sent(text: str) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    assert not any(unicodedata.category(character) in {"Cc", "Cf"} for character in shown)
    assert ast.literal_eval('"' + shown.replace('"', r"\"") + '"') == text


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


def test_times_are_utc_and_those_that_cannot_be_do_not_fail() -> None:
    assert utc(1_700_000_000_000_000) == "2023-11-14 22:13:20"
    assert utc(2**62) == utc(-(2**62)) == "no such date"
