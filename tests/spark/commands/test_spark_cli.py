"""Output of `sluice-cloud` for a person: tables that fit the terminal."""

import csv
import io
import sys
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.commands.answers import Form, print_relation
from spark.commands.table_text import cell_text, columns_left_out, table_lines, to_the_second
from spark.desk.row_text import rfc3339, time_text

COLUMNS = ("window_start", "namespace", "device", "n", "min", "late", "batch")
ROWS = [
    {
        "window_start": "2026-03-14T12:00:00Z",
        "namespace": "site-a",
        "device": device,
        "n": "60",
        "min": "19.25",
        "late": "0",
        "batch": "7",
    }
    for device in ("board-1", "m200")
]


def test_columns_that_can_be_spared_make_room_for_those_that_cannot() -> None:
    whole = list(table_lines(COLUMNS, ROWS, ["window_start"], 80))
    assert max(map(len, whole)) == 64
    assert columns_left_out(COLUMNS, ROWS, ("batch", "namespace"), 64) == []
    assert columns_left_out(COLUMNS, ROWS, ("batch", "namespace"), 63) == ["batch"]
    left_out = columns_left_out(COLUMNS, ROWS, ("batch", "namespace"), 50)
    assert left_out == ["batch", "namespace"]
    assert list(table_lines([name for name in COLUMNS if name not in left_out], ROWS, ["window_start"], 50)) == [
        "window_start          device    n    min  late",
        "2026-03-14T12:00:00Z  board-1  60  19.25     0",
        "2026-03-14T12:00:00Z  m200     60  19.25     0",
    ]


@given(st.integers(1, 200))
def test_nothing_is_left_out_that_had_room(width: int) -> None:
    spare = ("batch", "namespace", "n")
    left_out = columns_left_out(COLUMNS, ROWS, spare, width)
    assert left_out == list(spare[: len(left_out)])

    def needed(without: list[str]) -> int:
        return max(map(len, table_lines([name for name in COLUMNS if name not in without], ROWS, [], 1_000)))

    assert needed(left_out) <= width or len(left_out) == len(spare)
    if left_out:
        assert needed(left_out[:-1]) > width


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("min", Decimal("24.500000"), "24.5"),
        ("sum", Decimal("1200.000000"), "1200"),
        ("n", 60, "60"),
        ("time_error_us", 1_179_648, "1179648"),
        ("time_error_us", 2**63 - 1, "unbounded"),
        ("value", None, "-"),
        ("device", "m\x1b[2J", "m\\x1b[2J"),
        ("retried", True, "true"),
        ("explained", False, "false"),
        ("labels", {"line": "B", "floor": "2"}, "floor=2; line=B"),
        ("reasons", ["buffer-full", "expired"], "buffer-full; expired"),
        ("reasons", [], "-"),
    ],
)
def test_a_cell_says_what_is_known_and_no_terminal_obeys_it(column: str, value: object, shown: str) -> None:
    assert cell_text(column, value) == shown


def test_a_time_has_as_many_digits_as_it_needs_or_there_is_room_for() -> None:
    noon_us = 1_773_489_600_000_000
    assert time_text(noon_us) == "2026-03-14T12:00:00Z" == to_the_second(time_text(noon_us))
    assert time_text(noon_us + 250_000) == "2026-03-14T12:00:00.250000Z"
    assert to_the_second(time_text(noon_us + 999_999)) == "2026-03-14T12:00:00Z"
    assert to_the_second(time_text(None)) == time_text(None) == "-"


@pytest.mark.parametrize(
    ("us", "there", "in_berlin"),
    [
        (253_402_300_799_999_999, "9999-12-31T23:59:59.999999Z", "+10000-01-01T00:59:59.999999+01:00"),
        (253_402_300_800_000_000, "+10000-01-01T00:00:00.000000Z", "+10000-01-01T01:00:00.000000+01:00"),
        (9_000_000_000_000_000_000, "+287168-08-24T16:00:00.000000Z", "+287168-08-24T18:00:00.000000+02:00"),
        (-62_135_596_800_000_001, "0000-12-31T23:59:59.999999Z", "0001-01-01T00:59:59.999999+01:00"),
        (-(2**63), "-290308-12-21T19:59:05.224192Z", "-290308-12-21T20:59:05.224192+01:00"),
    ],
)
def test_a_year_that_python_lacks_is_written_all_the_same(us: int, there: str, in_berlin: str) -> None:
    assert (rfc3339(us), rfc3339(us, ZoneInfo("Europe/Berlin"))) == (there, in_berlin)
    told = there.removesuffix("Z").removesuffix(".000000").replace("T", " ").lstrip("+")
    with duckdb.connect() as db:
        # DuckDB counts years before the first from 1 on.
        assert told.startswith(("-", "0000")) or db.sql(f"SELECT make_timestamp({us})::VARCHAR").fetchall() == [(told,)]


def test_a_list_of_times_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with duckdb.connect() as db:
        found = db.sql("SELECT time, [time] AS times FROM (SELECT TIMESTAMP '2026-03-14 12:00:00' AS time)")
        print_relation(db, found, Form(as_json=True))
    assert capsys.readouterr().out == '{"time": "2026-03-14T12:00:00.000000Z", "times": ["2026-03-14 12:00:00"]}\n'


def test_a_number_that_json_lacks_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    with duckdb.connect() as db:
        print_relation(
            db, db.sql("SELECT 1.5::DOUBLE AS x, 'nan'::DOUBLE AS y, ['-inf'::DOUBLE] AS z"), Form(as_json=True)
        )
    assert capsys.readouterr().out == '{"x": 1.5, "y": "nan", "z": ["-inf"]}\n'


def test_a_program_gets_as_csv_what_a_file_holds_and_a_terminal_gets_nothing_that_it_obeys(
    capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with duckdb.connect() as db:
        rows = db.sql(
            "SELECT 'm' || chr(27) || '[2J' AS device, 'a' || chr(13) AS other, 'b' || chr(10) || 'ü' AS third"
        )
        print_relation(db, rows, Form(None, as_csv=True))
        piped = capfdbinary.readouterr().out
        print_relation(db, rows, Form(None, out=tmp_path / "rows.csv"))
        assert piped == (tmp_path / "rows.csv").read_bytes()
        (row,) = csv.DictReader(io.StringIO(piped.decode(), newline=""))
        assert [row] == [dict(zip(rows.columns, each, strict=True)) for each in rows.fetchall()]
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        print_relation(db, rows, Form(None, as_csv=True))
    shown = capfdbinary.readouterr().out
    assert (b"\x1b" in piped, b"\x1b" in shown, b"device" in shown) == (True, False, True)


def test_parquet_keeps_each_digit_of_a_sum(tmp_path: Path) -> None:
    path = tmp_path / "sums.parquet"
    with duckdb.connect() as db:
        most = db.sql("SELECT sum(x) AS total, [sum(x)] AS several FROM (VALUES (9223372036854775807), (2)) AS t(x)")
        print_relation(db, most, Form(None, out=path))
        assert db.read_parquet(str(path)).fetchall() == [(2**63 + 1, [2**63 + 1])]
