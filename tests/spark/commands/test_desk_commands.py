"""Look-ups by `sluice-cloud` without Java: what is asked for, in each form, and in words where there is nothing."""

import csv
import io
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import duckdb
import pexpect
import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.cli import FAILED, main
from spark.commands import desk_session
from spark.desk import tables
from spark.engine.interpreted_queries import interpreted_if
from spark.log.log_table import BatchId
from spark.registry.registry import Device, Registry
from spark.registry.registry_table import load_registry
from tests.support.object_store import object_store
from tests.support.spark_records import BOOTS, NOON, kafka_frame, reading, reading_headers
from tests.support.waiting import patience

pytestmark = pytest.mark.spark

SLUICE_CLOUD = str(Path(sys.executable).parent / "sluice-cloud")
LOOK_UPS = (
    ["readings"],
    ["windows"],
    ["gaps"],
    ["losses"],
    ["gateways"],
    ["quarantine", "list"],
    ["devices", "list"],
    ["catalog"],
    ["explain", "--device", "42", "--window", "2026-03-14T12:00"],
    ["sql", "SELECT count(*) FROM log"],
)


@pytest.fixture(scope="module")
def filled(spark: SparkSession, empty_warehouse: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four readings, a minute apart, with a hole. One was rejected, and another device's are lost. To be read only."""
    numbers = [0, 1, 3, 4]
    records = [
        reading(
            b"{" if number == 4 else b'{"celsius": 2%d.5}' % number,
            reading_headers(number, time=NOON + timedelta(minutes=number, seconds=30), device_boot="7-1a2b"),
            offset=number,
        )
        for number in numbers
    ]
    lost = {
        "device": "still-9",
        "reason": "buffer-full",
        "count": 5,
        "boot": BOOTS[0],
        "first_boottime_us": 60_000_000,
        "last_boottime_us": 120_000_000,
        **dict.fromkeys(("device_boot", "first_sequence", "last_sequence")),
    }
    headers = reading_headers(
        5, time=NOON + timedelta(hours=1), boot_us=3_600_000_000, event_type="sluice.gateway.loss"
    )
    told = replace(reading(json.dumps(lost).encode(), headers, offset=0, key=b"gw-1"), topic="gateway-events")
    path = str(shutil.copytree(empty_warehouse, tmp_path_factory.mktemp("filled") / "warehouse"))
    moved = NOON + timedelta(minutes=2)
    with interpreted_if(spark, small=True):
        job = BatchJob(spark, path)
        job.take(kafka_frame(spark, [*records, told]), BatchId("query", 0), {})
        job.save()
        places = (Device("plant", "42", "north", (), None, moved), Device("plant", "42", "south", (), moved, None))
        load_registry(spark, path, Registry(places))
    return path


def asked(warehouse: str, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--warehouse", warehouse], catch_exceptions=False)


def times(warehouse: str, *words: str) -> list[str]:
    """The minutes of the readings that are found."""
    shown = asked(warehouse, "readings", "--json", *words)
    assert shown.exit_code == 0, shown.output
    return [json.loads(line)["event_time"][14:16] for line in shown.stdout.splitlines()]


@pytest.mark.parametrize("command", LOOK_UPS, ids=" ".join)
def test_each_look_up_answers_without_java_from_any_folder(filled: str, tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [SLUICE_CLOUD, *command, "--warehouse", filled],
        cwd=tmp_path,
        env={"PATH": "/nonexistent", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 1
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir()), "it left something behind"


@pytest.mark.parametrize(
    ("words", "minutes"),
    [
        ([], ["03", "01", "00"]),
        (["--limit", "1"], ["03"]),
        (["--device", "42", "--stream", "device-thermo", "--metric", "celsius"], ["03", "01", "00"]),
        (["--since", "2026-03-14T12:01"], ["03", "01"]),
        (["--since", "2026-03-14T13:01", "--zone", "Europe/Berlin"], ["03", "01"]),
        (["--until", "2026-03-14T12:01:00Z"], ["00"]),
        (["--since", "2026-03-14", "--until", "2026-03-15"], ["03", "01", "00"]),
        (["--site", "north"], ["01", "00"]),
        (["--site", "south"], ["03"]),
    ],
)
def test_only_what_is_asked_for_is_shown(filled: str, words: list[str], minutes: list[str]) -> None:
    assert times(filled, *words) == minutes


def test_of_a_large_table_the_last_days_are_searched_for_the_latest_rows(
    filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_session, "SMALL_BYTES", 0)
    monkeypatch.setattr(desk_session, "DAY_US", 30_000_000)
    # The first span holds one of them, the next ones all.
    assert [times(filled, "--limit", str(limit)) for limit in (1, 2, 3)] == [["03"], ["03", "01"], ["03", "01", "00"]]


def test_it_is_told_whose_clock_is_ahead_if_the_latest_rows_are_of_the_future(
    filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Clock":
            return cls(2026, 3, 14, 12, 2, tzinfo=tz)

    monkeypatch.setattr(desk_session, "datetime", Clock)
    told = " ".join(asked(filled, "readings").stderr.split())
    assert "the latest are of the future, from 42: a clock is ahead. Without them: --until 2026-03-14T12:02Z" in told
    assert "future" not in asked(filled, "readings", "--until", "2026-03-14T12:02Z").stderr


def test_windows_say_how_many_are_final_and_leave_out_what_nobody_asked_for(filled: str) -> None:
    shown = asked(filled, "windows", "--json")
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(row["n"], row["status"], row["why"]) for row in rows] == [
        (1, "provisional", "reading 2 of boot 7-1a2b is missing"),
        (1, "provisional", "reading 2 of boot 7-1a2b is missing"),
        (1, "provisional", "gateway gw-1 has not told how far it has come"),
    ]
    assert "0 of the 3 windows from 2026-03-14T12:00:00Z on are final" in " ".join(shown.stderr.split())
    assert not {"values", "ordinal", "sum_of_squares"} & rows[0].keys()
    (row,) = map(json.loads, asked(filled, "windows", "--json", "--full", "--size", "3600").stdout.splitlines())
    assert row["values"] == ["20.500000", "21.500000", "23.500000"]


def test_csv_and_files_hold_every_row_and_read_back_as_they_were(filled: str, tmp_path: Path) -> None:
    printed = asked(filled, "windows", "--device", "42", "--csv")
    assert printed.exit_code == 0, printed.output
    rows = list(csv.DictReader(io.StringIO(printed.stdout)))
    assert [(row["window_start"], row["mean"], row["basis"]) for row in rows] == [
        ("2026-03-14T12:03:00.000000Z", "23.5", "sequence"),
        ("2026-03-14T12:01:00.000000Z", "21.5", "sequence"),
        ("2026-03-14T12:00:00.000000Z", "20.5", "watermark"),
    ]
    assert asked(filled, "windows", "--device", "42", "--out", str(tmp_path / "w.csv")).exit_code == 0
    assert list(csv.DictReader((tmp_path / "w.csv").read_text().splitlines())) == rows
    told = asked(filled, "windows", "--full", "--out", str(tmp_path / "w.parquet"))
    assert "3 rows written to " in told.stderr
    whole = tables.open(filled).windows()
    read = duckdb.read_parquet(str(tmp_path / "w.parquet"))
    order = "window_start"
    assert (
        read.project(", ".join(f'"{name}"' for name in whole.columns)).order(order).fetchall()
        == whole.order(order).fetchall()
    )


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["readings", "--device", "24"], 2, "there is no device '24' here. Did you mean 42?"),
        (["readings", "--site", "nort"], 2, "there is no site 'nort' here. Did you mean north?"),
        (["readings", "--metric", "celcius"], 2, "there is no metric 'celcius' here. Did you mean celsius?"),
        (["windows", "--stream", "thermo"], 2, "there is no stream 'thermo' here. Did you mean device-thermo?"),
        (["readings", "--since", "yesterday"], 2, "'yesterday' is no time; write 2026-03-14"),
        (["readings", "--last", "2 moons"], 2, "'2 moons' is no span of time; write 30min, 2h"),
        (["readings", "--last", "123456w"], 2, "is no span of time"),
        (["readings", "--last", "2h", "--since", "2026-03-14"], 2, "leave out --since"),
        (["readings", "--zone", "Mars/Base"], 2, "'Mars/Base' is no time zone"),
        (["readings", "--csv", "--json"], 2, "give one of them"),
        (["readings", "--out", "x.xlsx"], 2, "x.xlsx has none of the endings .csv, .parquet"),
        (["readings", "--out", "/nonexistent/x.csv"], FAILED, "/nonexistent/x.csv cannot be written: No such file"),
        (["readings", "--out", "/nonexistent/x.parquet"], FAILED, "/nonexistent/x.parquet cannot be written: No such"),
        (["windows", "--size", "7"], 2, "windows of 7 s cannot be made from windows of 60 s"),
        (["sql", "SELECT statuss FROM windows"], 2, "there is no column statuss"),
        (["sql", "SELECT * FROM reading"], 2, "there is no table reading. Did you mean readings?"),
        (["sql", "SELECT offset FROM log"], 2, "write the table's name before it: log.offset"),
        (["sql", "COPY (SELECT 1) TO 'x.csv'"], 2, "nothing was changed"),
        (["sql", "CREATE TABLE t AS SELECT 1"], 2, "nothing was changed"),
        (["sql", "EXPLAIN ANALYZE CREATE TABLE t AS SELECT 1"], 2, "nothing was changed"),
        (["sql", "SELECT 1; SELECT 2"], 2, "only one statement"),
        (["sql", "SELEC 1"], 2, "syntax error"),
    ],
)
def test_what_cannot_be_answered_is_told_in_words(filled: str, words: list[str], code: int, told: str) -> None:
    shown = asked(filled, *words)
    assert (shown.exit_code, "Traceback" in shown.output) == (code, False), shown.output
    assert told in " ".join(shown.output.split())


def test_a_span_without_readings_says_where_the_nearest_are(filled: str) -> None:
    shown = asked(filled, "readings", "--since", "2026-03-14T12:01:40", "--until", "2026-03-14T12:02")
    assert shown.exit_code == 0
    told = " ".join(shown.stderr.split())
    assert "the last before it is of 2026-03-14T12:01:30Z, the first after it is of 2026-03-14T12:03:30Z" in told


def test_gaps_show_losses_without_numbers_beside_missing_numbers(filled: str) -> None:
    rows = [json.loads(line) for line in asked(filled, "gaps", "--json").stdout.splitlines()]
    assert [(row["device"], row["first"], row["last"], row["count"], row["reasons"]) for row in rows] == [
        ("42", 2, 2, 1, []),
        ("still-9", None, None, 5, ["buffer-full"]),
    ]
    assert [row["explained"] for row in rows] == [False, True]
    alone = asked(filled, "gaps", "--json", "--device", "42")
    assert [json.loads(line)["device"] for line in alone.stdout.splitlines()] == ["42"]


def test_a_query_may_come_from_standard_input(filled: str) -> None:
    query = "SELECT max(value) AS most FROM readings;\n"
    shown = CliRunner().invoke(main, ["sql", "--warehouse", filled, "--csv"], input=query, catch_exceptions=False)
    assert (shown.exit_code, shown.stdout.split()) == (0, ["most", "23.5"])


def test_a_relation_goes_on_to_other_tools(filled: str) -> None:
    desk = tables.open(filled)
    found = desk.readings(device="42", since="2026-03-14T12:01", until=NOON + timedelta(minutes=3))
    assert [row[:5] for row in found.fetchall()] == [
        ("plant", "42", "device-thermo", "celsius", found.fetchall()[0][4])
    ]
    assert desk.gaps().project("first, last, explained").fetchall() == [(2, 2, False)]
    assert desk.sql("SELECT count(*) FROM quarantine").fetchall() == [(1,)]


@pytest.mark.parametrize(
    "ask", [tables.Tables.windows, lambda desk: desk.sql("FROM readings, log, windows, gaps, versions, quarantine")]
)
def test_windows_are_opened_after_their_evidence_and_before_single_records(
    filled: str, ask: Callable[[tables.Tables], object]
) -> None:
    """Else an answer may count a reading that it does not show, or take one for missing that it counts."""
    desk = tables.open(filled)
    ask(desk)
    seen = [Path(path).name for path in desk.source.seen]
    parts = seen.index("window_parts")
    assert {"gateway_states", "device_parts"} <= {*seen[:parts]}
    assert {"amendments", "versions"} <= {*seen[: seen.index("log")]}
    assert parts < seen.index("log")


def test_the_shell_completes_names_ends_a_query_by_ctrl_c_and_keeps_an_answer(filled: str, tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\nexec /bin/sed 's/^/paged: /'\n")
    pager.chmod(0o700)
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path), "TERM": "dumb", "PAGER": str(pager)}
    options: dict[str, Any] = {"env": environment, "cwd": str(tmp_path), "encoding": "utf-8", "timeout": patience(60)}
    shell = pexpect.spawn(SLUICE_CLOUD, ["sql", "--warehouse", filled], **options)
    shell.expect_exact("sql> ")
    shell.sendline("SELECT count(*) FROM range(1000000000) a, range(1000) b WHERE hash(a.range) = hash(b.range);")
    time.sleep(1)
    shell.sendintr()
    shell.expect_exact("stopped")
    shell.expect_exact("sql> ")
    shell.send("SELECT max(value) AS most FROM readi\t")
    shell.expect_exact("readings")
    shell.sendline(";")
    shell.expect_exact("23.5")
    shell.sendline(".csv most.csv")
    shell.expect_exact("1 row written to most.csv")
    shell.sendline(".csv none/most.csv")
    shell.expect_exact("none/most.csv cannot be written: No such file or directory")
    shell.sendline("SELECT statuss FROM windows;")
    shell.expect_exact("there is no column statuss")
    shell.sendline("\\d gateways")
    shell.expect_exact("unread_topics")
    shell.sendline(".limit 100")
    shell.sendline("\\d log")
    shell.expect_exact("paged: event_date")
    # What is typed while the pager has the terminal may be lost.
    shell.expect_exact("sql> ")
    shell.sendeof()
    shell.expect(pexpect.EOF)
    assert (tmp_path / "most.csv").read_text().split() == ["most", "23.5"]
    history = tmp_path / ".local" / "state" / "sluice" / "sql_history"
    assert (history.stat().st_mode & 0o777, "FROM readings" in history.read_text()) == (0o600, True)


def test_a_warehouse_on_an_object_store_answers_as_one_on_this_machine(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store(tmp_path) as store:
        for name, value in store.for_deltalake().items():
            monkeypatch.setenv(name, value)
        store.put(Path(filled), "warehouse")
        here, there = tables.open(filled), tables.open(f"{store.url}/warehouse")
        for view in tables.VIEWS:
            rows = [Counter(map(repr, desk.relation(view).fetchall())) for desk in (here, there)]
            assert rows[0] == rows[1], view
        assert asked("s3://bucket/warehouse", "readings", "--json").output == asked(filled, "readings", "--json").output
        nowhere = CliRunner().invoke(main, ["readings", "--warehouse", "s3://bucket/none"])
    assert (nowhere.exit_code, "s3://bucket/none holds no tables of Sluice" in nowhere.output) == (FAILED, True)
