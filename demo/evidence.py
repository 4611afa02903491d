"""Ends a run: gathers what every part knows, compares it, and tells the outcome."""

import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from demo.audit import (
    LATE_US,
    Audit,
    Identity,
    KafkaReading,
    Ledger,
    SensorAudit,
    TableReading,
    audit,
    audit_lines,
    read_kafka,
    read_ledgers,
    read_table,
    run_findings,
    shown_sensors,
    verdict,
)
from demo.child_process import log_tail
from demo.children import COMMANDS, Children, DemoError
from demo.chronicle import Chronicle
from demo.demo_settings import DemoSettings
from demo.progress import Progress
from demo.report import Story, report_page
from demo.run import EXPORT_S_MAX, Folder, Run, board_kind, board_ledgers
from demo.time_audit import TimeAudit, audit_times, read_taken

LOOK_UPS: Mapping[str, tuple[str, ...]] = {
    "desk": (),
    "report": ("--device", "board-1", "--out", "board-1.html"),
    "sql": (),
}
"""Commands of `sluice-cloud` that an analyst would type next, with their options beside --warehouse."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Accounts of every part of the line at the end."""

    boards: Sequence[Ledger]
    fleet: Sequence[Ledger]
    records: Sequence[KafkaReading]
    readings: Sequence[TableReading]
    taken: Mapping[Identity, int]
    """Time at which each reading was truly measured, as the simulated sensors know it."""


async def conclude(run: Run) -> bool:
    """Audit a run whose sensors have stopped and whose broker still runs. Returns whether all is well."""
    return publish(run.settings, run.folder, run.chronicle, run.progress, await gather(run))


async def gather(run: Run) -> Evidence:
    """Read the ledgers, Kafka and the table."""
    folder = run.folder
    records, readings = await arrived(run.children, folder, run.progress, run.cloud.broker.bootstrap)
    fleet = read_ledgers(folder.fleet_ledger) if run.settings.sensors else []
    taken = read_taken(folder.fleet_samples, sorted(folder.boards.glob("*.samples")))
    return Evidence(board_ledgers(folder), fleet, records, readings, taken)


async def arrived(
    children: Children, folder: Folder, progress: Progress, bootstrap: str
) -> tuple[list[KafkaReading], list[TableReading]]:
    """Read what is in Kafka and in the table. Raises DemoError."""
    with progress.step("Audit: ask Spark for the table `readings`") as step:
        command = (sys.executable, "-m", "demo.readings_export", folder.warehouse, folder.table)
        said = folder.logs / "export.said"
        step.state = lambda: log_tail(said, lines=1) or "another JVM starts, with a Spark of its own"
        child = children.start("export", command, "See what Spark says.", output=said)
        if await children.finish(child, EXPORT_S_MAX) != 0:
            raise DemoError("the table `readings` could not be read", child.advice, child.log)
        readings = read_table(folder.table)
        step.result = f"{len(readings):,} rows"
    with progress.step("Audit: read Kafka from the beginning") as step:
        records = await read_kafka(bootstrap)
        step.result = f"{len(records):,} records"
    return records, readings


def publish(
    settings: DemoSettings, folder: Folder, chronicle: Chronicle, progress: Progress, evidence: Evidence
) -> bool:
    """Compare, write summary.json, audit.txt and report.html, and tell a person. Returns whether all is well."""
    result = audit([*evidence.boards, *evidence.fleet], evidence.records, evidence.readings)
    times = audit_times(evidence.readings, evidence.taken)
    findings = (*run_findings(result, settings, chronicle, evidence.records), *times.findings)
    boards = {ledger.device: board_kind(ledger.device) for ledger in evidence.boards}
    shown = shown_sensors(result, boards)
    summary = run_summary(result, times, chronicle, progress.elapsed_s)
    story = Story(
        settings, chronicle, result, times, findings, shown, boards, evidence.records, evidence.readings, summary
    )
    folder.report.write_text(report_page(story), encoding="utf-8")
    folder.summary.write_text(json.dumps(summary, indent=2) + "\n")
    lines = [*audit_lines(result.sensors, result.total), "", *_notes(result), *findings, *result.examples]
    folder.audit.write_text("\n".join(lines) + "\n")
    _tell(progress.console, folder, result, times, findings, shown)
    return not findings


def run_summary(result: Audit, times: TimeAudit, chronicle: Chronicle, seconds: float) -> Mapping[str, float]:
    """Contents of `summary.json`."""
    total = result.total
    return {
        "sent": total.sent,
        "acknowledged": total.acknowledged,
        "in_kafka": total.in_kafka,
        "in_readings": total.in_readings,
        "missing": total.missing,
        "duplicates": total.doubled,
        "buffer_peak": chronicle.buffer_peak,
        "disk_bytes": sum(chronicle.written.values()),
        "late_readings": result.late_readings,
        "times_judged": times.judged,
        "times_within_bound": times.within,
        "seconds": round(seconds, 1),
    }


def _notes(result: Audit) -> list[str]:
    """Facts that are worth knowing, and are no faults."""
    if not result.waiting:
        return []
    words = "reading was still" if result.waiting == 1 else "readings were still"
    return [f"{result.waiting:,} {words} unacknowledged when the sensors were switched off: nobody vouched for them."]


def _tell(  # noqa: PLR0913, PLR0917 - all that is told
    console: Console,
    folder: Folder,
    result: Audit,
    times: TimeAudit,
    findings: Sequence[str],
    shown: Sequence[SensorAudit],
) -> None:
    """Show the audit on the screen; its last line is the verdict."""
    total = result.total
    lines = audit_lines(shown, total)
    if more := len(result.sensors) - len(shown):
        lines.insert(-2, f"... and {more} more, in {folder.audit.name} beside the report")

    def say(words: str, style: str | None = None) -> None:
        console.print(words, style=style, markup=False, highlight=False, soft_wrap=True)

    def say_wrapped(words: str, style: str | None = None) -> None:
        """Break the text at words: a terminal breaks anywhere. Rich would leave blanks at the ends."""
        say(textwrap.fill(words, console.width, break_long_words=False, break_on_hyphens=False), style)

    say("\nWhat the sensors know, against what arrived:", "bold")
    say("\n".join(lines))
    waited = ", for they waited in the buffer or at the sensor" if result.late_readings else ""
    say_wrapped(
        f"{result.late_readings:,} readings reached Kafka more than {LATE_US // 1_000_000} s after they were taken"
        f"{waited}. {result.copies:,} records in Kafka are repetitions, which the table leaves out."
    )
    if times.judged:
        say_wrapped(
            f"{times.within:,} of {times.judged:,} readings with a time of their own were truly measured within its "
            "bound."
        )
    for words in _notes(result):
        say_wrapped(words)
    for words in (*findings, *result.examples):
        say_wrapped(words, "red")
    say(f"The report: {folder.report}")
    say("Look further, from any folder:")
    for command, options in LOOK_UPS.items():
        typed = (COMMANDS / "sluice-cloud", command, "--warehouse", folder.warehouse.absolute(), *options)
        say(shlex.join(map(str, typed)))
    say(verdict(total, findings), "bold red" if findings else "bold green")
