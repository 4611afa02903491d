import io
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from demo.audit import Identity, KafkaReading, Ledger, TableReading
from demo.chronicle import Chronicle, Sample
from demo.demo_settings import DemoSettings
from demo.evidence import LOOK_UPS, Evidence, publish
from demo.progress import Progress
from demo.run import Folder
from spark.cli import main

NOON_US = 1_750_000_000_000_000
ROWS = [
    TableReading("m001", "1-aa", second, "celsius", NOON_US + second * 1_000_000, 21.5, 4_000, "estimated")
    for second in range(10)
]
TAKEN = {row.identity: row.event_us - 3_000 for row in ROWS}
WIDTH = 80
M001 = Ledger("m001", "1-aa", 10, ((0, 9),), taken=10)


def published(
    folder: Path,
    rows: Sequence[TableReading],
    *,
    fleet: Sequence[Ledger] = (M001,),
    boards: Sequence[Ledger] = (),
    taken: Mapping[Identity, int] = TAKEN,
) -> tuple[bool, str]:
    """Publish a run of one sensor, with ten acknowledged readings. Returns the verdict, and the output."""
    folder.mkdir(exist_ok=True)
    output = io.StringIO()
    chronicle = Chronicle(
        sampling_from_us=NOON_US,
        sampling_until_us=NOON_US + 10_000_000,
        drained_us=NOON_US + 11_000_000,
        cut_us=NOON_US + 3_000_000,
        restored_us=NOON_US + 6_000_000,
        samples=[Sample(NOON_US + 4_000_000, 7, None, None)],
    )
    records = [
        KafkaReading(f"id-{row.sequence}", "m001", "1-aa", row.sequence, row.event_us, row.event_us) for row in ROWS
    ]
    # Readings of the outage came after it.
    records[3:6] = [replace(record, appended_us=chronicle.restored_us) for record in records[3:6]]
    evidence = Evidence(boards, fleet, records, rows, taken)
    progress = Progress(Console(file=output, width=WIDTH))
    good = publish(DemoSettings(15, 5, 1, len(boards), 0, kill=False), Folder(folder), chronicle, progress, evidence)
    return good, output.getvalue()


def test_a_good_run_ends_with_the_verdict_and_leaves_its_files(tmp_path: Path) -> None:
    good, said = published(tmp_path, ROWS)
    assert good
    assert said.endswith("\nmissing 0, duplicates 0\n")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["acknowledged"], summary["missing"], summary["buffer_peak"]) == (10, 0, 7)
    assert "m001" in (tmp_path / "audit.txt").read_text()
    assert (tmp_path / "report.html").stat().st_size > 5_000


def test_the_commands_that_come_next_can_be_typed_in_any_folder(tmp_path: Path) -> None:
    _, said = published(tmp_path / "a b", ROWS)
    typed = [shlex.split(line) for line in said.partition("from any folder:\n")[2].splitlines()[:-1]]
    assert [words[1:] for words in typed] == [
        [each, "--warehouse", f"{tmp_path}/a b/warehouse", *options] for each, options in LOOK_UPS.items()
    ]
    assert {*LOOK_UPS} <= {*main.commands}
    assert all(Path(words[0]).is_absolute() and os.access(words[0], os.X_OK) for words in typed)


@pytest.mark.parametrize(
    ("rows", "verdict", "named"),
    [
        (ROWS[1:], "missing 1, duplicates 0", "sequence 0: acknowledged, is in Kafka but not in `readings`"),
        ([*ROWS, ROWS[4]], "missing 0, duplicates 1", "sequence 4: more than once in `readings`"),
    ],
)
def test_a_finding_is_a_bad_verdict_and_is_named(
    tmp_path: Path, rows: list[TableReading], verdict: str, named: str
) -> None:
    good, said = published(tmp_path, rows)
    assert not good
    assert said.endswith(f"\n{verdict}\n")
    assert named in said
    assert named in (tmp_path / "audit.txt").read_text()


def test_times_that_do_not_keep_their_bound_spoil_the_verdict(tmp_path: Path) -> None:
    good, said = published(tmp_path, ROWS)
    assert good
    assert "10 of 10 readings with a time of their own were truly measured within its bound." in said.replace("\n", " ")
    good, said = published(tmp_path, ROWS, taken=TAKEN | {ROWS[3].identity: ROWS[3].event_us + 4_001})
    assert not good
    assert "but: 1 of 10 readings were not measured within the bound of their time" in said


def test_a_board_that_was_never_served_spoils_the_verdict(tmp_path: Path) -> None:
    good, said = published(tmp_path, ROWS, boards=[Ledger("board-1", "0", 0, ())])
    finding = "1 sensor had no reading acknowledged: board-1"
    assert not good
    assert said.endswith(f"\nmissing 0, duplicates 0, but: {finding}\n")
    assert finding in (tmp_path / "audit.txt").read_text()
    assert f"<p><b>{finding}.</b></p>" in (tmp_path / "report.html").read_text()


def test_what_a_sensor_still_held_is_said_and_is_no_finding(tmp_path: Path) -> None:
    good, said = published(tmp_path, ROWS, fleet=[Ledger("m001", "1-aa", 12, ((0, 9),), taken=12)])
    assert good
    assert "2 readings were still unacknowledged when the sensors were switched off" in said


def test_sentences_break_at_words_and_nothing_begins_with_a_blank(tmp_path: Path) -> None:
    _, said = published(tmp_path, ROWS, fleet=[Ledger("m001", "1-aa", 12, ((0, 9),), taken=12)])
    lines = said.rpartition("all sensors")[2].splitlines()[1:]
    sentences = lines[: lines.index(f"The report: {tmp_path / 'report.html'}")]
    assert len(sentences) == 5
    assert all(len(line) <= WIDTH and line == line.strip() for line in sentences)
