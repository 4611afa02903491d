"""No command of `sluice-cloud` prints anything that a terminal obeys, whatever devices, payloads and topics hold."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from pyspark.sql import Row

from gateway.host.terminal import say
from spark.batch_job import BatchCounts
from spark.cli import main
from spark.commands import ingest_command, table_commands
from spark.commands.answers import Form, print_found, say_json
from spark.ingest_job import BatchReport, Begun
from spark.source.kafka_source import KafkaSource
from spark.source.topic_changes import Loss
from tests.support.terminals import WORST, assert_harmless, names


def printed_rows(hostile: str, columns: int, *options: str) -> Result:
    """Rows as Spark hands them over, in which each text is the name."""
    row: dict[str, Any] = {
        "event_time": 1_700_000_000_000_000,
        "device": hostile,
        hostile: Row(**{hostile: [hostile]}),
        "labels": {hostile: hostile},
        "raw": hostile.encode(),
        "value": Decimal("1.5"),
    }

    @click.command()
    @click.option("--json", "as_json", is_flag=True)
    def show(as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
        print_found([row, row], [*row], ["event_time"], Form(1, as_json=as_json), spare=["raw"])

    return CliRunner(env={"COLUMNS": str(columns)}).invoke(show, [*options], catch_exceptions=False)


@given(names)
def test_no_table_prints_what_is_obeyed_and_json_says_the_same(hostile: str) -> None:
    for columns in (1_000, 40):
        assert_harmless(printed_rows(hostile, columns).output)
    shown = printed_rows(hostile, 1_000, "--json")
    assert_harmless(shown.output)
    told = json.loads(shown.stdout)
    assert (told["device"], told["labels"], told["raw"]) == (hostile, {hostile: hostile}, hostile)
    assert told[hostile] == {hostile: [hostile]} or hostile in {"device", "labels", "raw", "value", "event_time"}


@given(names)
def test_nothing_that_ingest_says_is_obeyed(hostile: str) -> None:
    counts = BatchCounts(1, 0, 0, 0, 0, 0, 0, 0, 1.0, undeclared={hostile: {hostile}})
    batch = BatchReport(1, counts, {hostile: 3}, 3.0, {hostile: {0: 1}})
    # Kafka takes no line end in the name of a topic.
    topic = "x" + hostile.replace("\n", "")
    begun = Begun([topic], [Loss(topic, topic, 0, 1, None)], {topic: 3}, topic)
    source = KafkaSource(topic, topic, {})

    @click.command()
    def show() -> None:
        for value in (ingest_command.batch_members(batch), ingest_command.begun_members(begun)):
            say_json(value)
        for line in (
            ingest_command.batch_line(batch),
            *ingest_command.undeclared_lines(batch, {}),
            *ingest_command.begun_lines(begun, source, topic),
            *ingest_command.left_out_lines({topic: topic}),
        ):
            say(line)

    shown = CliRunner().invoke(show, [], catch_exceptions=False)
    assert_harmless(shown.output)
    members, ready, *_ = shown.stdout.split("\n")
    assert json.loads(members)["undeclared"] == {hostile: [hostile]}
    assert json.loads(ready)["topics"] == [topic]


def test_names_that_a_program_makes_up_are_told_up_to_a_bound() -> None:
    def batch(first: int, end: int) -> BatchReport:
        names = {f"n{number:03}" for number in range(first, end)}
        return BatchReport(1, BatchCounts(1, 0, 0, 0, 0, 0, 0, 0, 1.0, undeclared={"device-x": names}), {}, 0.0, {})

    told: dict[str, set[str]] = {}
    (first,) = ingest_command.undeclared_lines(batch(0, 30), told)
    assert "device-x: its payloads also have 'n000', 'n001'" in first
    assert "'n028', 'n029', which stay in `log` alone" in first
    assert "nothing more" not in first
    (rest,) = ingest_command.undeclared_lines(batch(20, 121), told)
    assert "'n030'" in rest
    assert "'n099', which stay in `log` alone" in rest
    assert rest.endswith("These make 100 names of this stream, and no more will be told")
    assert ingest_command.undeclared_lines(batch(0, 121), told) == []
    members: Any = ingest_command.batch_members(batch(0, 101))
    assert (len(members["undeclared"]["device-x"]), members["undeclared_more"]) == (100, ["device-x"])


@settings(max_examples=15)
@given(names)
def test_no_word_that_is_typed_or_stands_in_a_file_is_obeyed(
    tmp_path_factory: pytest.TempPathFactory, hostile: str
) -> None:
    folder = tmp_path_factory.mktemp("registry")
    typed = hostile.replace("\n", "").replace("\0", "") + "x"
    registry = folder / "registry.toml"
    registry.write_text(f"[[devices]]\n{json.dumps(hostile)} = {json.dumps(hostile)}\n")
    for words in (
        ("registry", "check", str(registry)),
        ("registry", "check", str(folder / "none")),
        ("readings", "--warehouse", str(folder / typed.replace("/", ""))),
        ("replay", "--warehouse", str(folder), "--bootstrap", "x", "--since", typed),
        ("ingest", "--warehouse", str(folder), "--bootstrap", typed, "--kafka-option", typed),
        (typed,),
        (f"--{typed}",),
    ):
        shown = CliRunner(env={"COLUMNS": "1000"}).invoke(main, [*words])
        assert isinstance(shown.exception, SystemExit), (words, shown.exception)
        assert shown.exit_code != 0
        assert_harmless(shown.output)


def test_an_error_that_names_what_was_found_is_harmless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_arguments: object) -> None:
        raise click.ClickException("there is nothing of " + WORST.replace("\n", ""))

    monkeypatch.setattr("spark.commands.cli_options.may_be_warehouse", lambda _path: True)
    monkeypatch.setattr(table_commands, "asking", fail)
    shown = CliRunner().invoke(main, ["readings", "--warehouse", str(tmp_path)])
    assert "there is nothing of x" in shown.output
    assert_harmless(shown.output)
