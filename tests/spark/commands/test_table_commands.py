"""`sluice-cloud` prints all rows that were asked for, or says how many it leaves out."""

import json
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.cli import FAILED, main
from spark.engine.interpreted_queries import interpreted_if
from spark.engine.session import SHORT_LIVED
from spark.log.log_table import BatchId
from spark.views.windows_view import open_windows
from tests.support.spark_records import NOON, kafka_frame, reading, reading_headers
from tests.support.waiting import patience

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

ALL_WINDOWS = ("sql", "--engine", "spark", "SELECT * FROM windows")

LOOK = """
import click
from spark.commands.command_session import session

@click.command()
def look():
    context = session("look").sparkContext
    context._jvm.System.out.println("said by Java")
    # Objects of Java's that are needed no more: more than it can be told of in that time.
    client = context._gateway._gateway_client
    client.finalizer_deque.extend([(client, "o0")] * 200_000)
    click.echo("looked")

look(standalone_mode=False)
"""
LOOK_AND_WAIT = f"""{LOOK}
@click.command()
def wait():
    spark = session("wait")
    click.echo("at work")
    spark.sql("SELECT java_method('java.lang.Thread', 'sleep', 600000L)").collect()

wait()
"""


@pytest.fixture(scope="module")
def filled(spark: SparkSession, empty_warehouse: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A warehouse with three readings, each in a window of its own: to be read only."""
    records = [
        reading(headers=reading_headers(number, time=NOON + timedelta(minutes=number)), offset=number)
        for number in range(3)
    ]
    path = str(shutil.copytree(empty_warehouse, tmp_path_factory.mktemp("filled") / "warehouse"))
    with interpreted_if(spark, small=True):
        BatchJob(spark, path).take(kafka_frame(spark, records), BatchId("query", 0), {})
    return path


@pytest.fixture
def filled_copy(filled: str, tmp_path: Path) -> str:
    """A copy of `filled` for one test."""
    return str(shutil.copytree(filled, tmp_path / "warehouse"))


@pytest.mark.parametrize(
    ("limit", "options", "more"),
    [
        (2, [], True),
        (3, ["--json"], False),
        pytest.param(2, ["--json"], True, marks=pytest.mark.long(seconds=10)),
        pytest.param(3, [], False, marks=pytest.mark.long(seconds=10)),
    ],
)
def test_rows_that_are_left_out_are_told_of(
    spark: SparkSession, filled: str, limit: int, options: list[str], *, more: bool
) -> None:
    assert spark is not None
    shown = CliRunner().invoke(main, ["readings", "--warehouse", filled, "--limit", str(limit), *options])
    assert shown.exit_code == 0, shown.output
    assert len(shown.stdout.splitlines()) == limit + (not options)
    assert ("there are more than these 2 rows: --limit N" in shown.stderr) == more


def test_json_has_every_column_of_a_window(spark: SparkSession, filled: str) -> None:
    shown = CliRunner().invoke(main, ["windows", "--warehouse", filled, "--json", "--full"])
    row = json.loads(shown.stdout.splitlines()[0])
    assert row.keys() == set(open_windows(spark, filled).columns)
    assert {"deviation", "p50", "p95", "p99", "why"} <= row.keys()


@pytest.mark.long(seconds=15)
def test_a_narrow_terminal_cuts_the_reasons_of_a_status_last(
    spark: SparkSession, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spark is not None
    monkeypatch.setenv("COLUMNS", "150")
    shown = CliRunner().invoke(main, ["windows", "--warehouse", filled])
    header = shown.stdout.splitlines()[0].split()
    assert {"device", "metric", "n", "mean", "status", "why"} <= set(header)
    assert not {"p50", "sum", "ordinal"} & set(header)
    told = " ".join(shown.stderr.split())
    assert told.startswith("no room here for ")
    # How many do not fit depends on how long the others are.
    assert " window_end, sum, first" in told
    assert ": --json shows all, and so does a wider terminal" in told


@pytest.mark.parametrize(
    ("width", "is_cut"), [("50", True), pytest.param("60", False, marks=pytest.mark.long(seconds=10))]
)
def test_times_that_there_is_no_room_for_are_cut_and_it_is_said(
    spark: SparkSession, filled: str, monkeypatch: pytest.MonkeyPatch, width: str, *, is_cut: bool
) -> None:
    assert spark is not None
    monkeypatch.setenv("COLUMNS", width)
    query = "SELECT event_time + INTERVAL 250 MILLISECONDS AS measured, received_time + INTERVAL 1 MILLISECOND AS came"
    shown = CliRunner().invoke(main, ["sql", "--warehouse", filled, f"{query} FROM readings"])
    assert shown.exit_code == 0, shown.output
    assert ("times are cut to the second" in shown.stderr) == is_cut
    assert (".250000Z" in shown.stdout) != is_cut


@pytest.mark.parametrize(
    "command", [["devices", "list"], ["windows"], ["replay"], ["maintain"], ["registry", "load", "registry.toml"]]
)
def test_a_mistyped_warehouse_is_none_and_is_not_made(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    assert spark is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "registry.toml").write_text('[[devices]]\nnamespace = "plant"\ndevice = "42"\nsite = "hall"\n')
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name in ("warehuose", "file", "empty"):
        shown = CliRunner().invoke(main, [*command, "--warehouse", str(tmp_path / name)])
        assert shown.exit_code == FAILED, shown.output
        assert "holds no tables of Sluice" in shown.output
        assert ("there is no such folder" in shown.output) == (not (tmp_path / name).is_dir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "registry.toml"]
    assert not any((tmp_path / "empty").iterdir())


def test_a_warehouse_that_is_not_there_is_told_before_spark_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "spark.commands.command_session.open_session", lambda *_, **__: pytest.fail("Spark was started")
    )
    shown = CliRunner().invoke(main, ["readings", "--warehouse", str(tmp_path / "warehuose")])
    assert shown.exit_code == FAILED
    assert "there is no such folder" in shown.output


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which commands keep their files while they run."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def started(*command: str) -> "subprocess.Popen[str]":
    program = [sys.executable, "-u", "-m", "spark.cli", *command]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long(seconds=60)
def test_commands_end_quietly_and_by_a_signal_with_their_java_and_all_that_they_needed(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_SPARK_JAVA_OPTIONS", SHORT_LIVED)
    # Two of them in one process, where the second must not look for the Java of the first.
    program = [sys.executable, "-c", LOOK_AND_WAIT]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["looked\n", "at work\n"]
        process.send_signal(signal.SIGTERM)
        # A reader of the output waits for Java as well, because Java has the same output.
        printed, told = process.communicate(timeout=patience(300))
    assert (process.returncode, printed) == (-signal.SIGTERM, ""), told
    assert "ERROR" not in told, told
    assert "Traceback" not in told, told
    assert not any(scratch.iterdir())


@pytest.mark.long(seconds=50)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_replay_and_its_java_without_traces(
    filled_copy: str, scratch: Path, number: signal.Signals
) -> None:
    with started("replay", "--warehouse", filled_copy) as process:
        assert process.stdout is not None
        # It has begun to make the tables: Java is at work.
        assert any(line.startswith("v2: 0 of 3 records") for line in process.stdout)
        process.send_signal(number)
        printed = process.communicate(timeout=patience(300))[0]
    assert process.returncode == -number
    assert "Traceback" not in printed, printed
    assert "ERROR" not in printed, printed
    assert not any(scratch.iterdir())


def test_a_signal_that_comes_while_java_starts_waits_until_that_can_be_ended(filled: str, scratch: Path) -> None:
    with started(*ALL_WINDOWS, "--warehouse", filled) as process:
        # The folder of Java's files is made right before Java is started.
        while not any(scratch.glob("sluice-*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=patience(300))[0]
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in printed, printed
    assert "window_start" not in printed, printed
    assert not any(scratch.iterdir())


def test_a_java_that_does_not_start_is_told_in_a_line(
    filled: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/no/such/java")
    with started(*ALL_WINDOWS, "--warehouse", filled) as process:
        printed = process.communicate(timeout=patience(300))[0]
    assert process.returncode == FAILED
    assert "/no/such/java" in printed
    assert "Error: Java did not start" in printed
    assert "Traceback" not in printed, printed
    assert not any(scratch.iterdir())


@pytest.mark.long(seconds=60)
def test_what_a_command_needs_while_it_runs_is_gone_with_it(filled: str, scratch: Path) -> None:
    # Two of them in one process, where the second must not look for the Java of the first.
    command = f"main({[*ALL_WINDOWS, '--warehouse', filled]!r}, standalone_mode=False)"
    program = [sys.executable, "-c", f"from spark.cli import main; {command}; {command}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=patience(300), check=False)
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr, done.stderr
    assert not any(scratch.iterdir())


@pytest.mark.long(seconds=20)
def test_a_command_prints_nothing_that_java_says_and_ends_quietly_while_that_is_told_something(scratch: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=patience(300), check=False
    )
    assert (done.returncode, done.stdout) == (0, "looked\n"), done.stderr
    assert "ERROR" not in done.stderr, done.stderr
    assert not any(scratch.iterdir())


@pytest.mark.parametrize(
    ("warehouse", "told"),
    [
        ("s3a://bucket/tables", "Spark has no jars for a warehouse of this kind"),
        ("nothing://bucket/tables", "Spark has no jars for a warehouse of this kind (it misses nothing)"),
        ("hdfs://no.such.host.invalid:9000/tables", "the warehouse's host no.such.host.invalid cannot be found"),
    ],
)
def test_a_place_that_cannot_be_reached_is_told_in_a_line(spark: SparkSession, warehouse: str, told: str) -> None:
    assert spark is not None
    shown = CliRunner().invoke(main, [*ALL_WINDOWS, "--warehouse", warehouse])
    assert shown.exit_code == FAILED
    assert isinstance(shown.exception, SystemExit), shown.exception
    assert shown.output.startswith(f"Error: {told}"), shown.output
