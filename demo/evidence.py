"""The end of a run: gather what every part knows, compare, and tell."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from demo.audit import (
    LATE_US,
    Audit,
    SensorAudit,
    audit,
    audit_lines,
    read_kafka,
    read_ledgers,
    read_table,
    shown_sensors,
)
from demo.children import DemoError
from demo.report import Story, report_page
from demo.run import EXPORT_S_MAX, Run, board_ledgers


async def conclude(run: Run) -> bool:
    """Audit a run whose sensors have stopped and whose broker still runs; whether all is well."""
    progress, folder = run.progress, run.folder
    with progress.step("Audit: ask Spark for the table `readings`") as step:
        command = (sys.executable, "-m", "demo.readings_export", folder.warehouse, folder.table)
        child = run.children.start("export", command, "See what Spark says.")
        if await run.children.finish(child, EXPORT_S_MAX) != 0:
            raise DemoError("the table `readings` could not be read", child.advice, child.log)
        readings = read_table(folder.table)
        step.result = f"{len(readings):,} rows"
    with progress.step("Audit: read Kafka from the beginning") as step:
        records = await read_kafka(run.broker.bootstrap)
        step.result = f"{len(records):,} records"
    boards = board_ledgers(folder)
    fleet = read_ledgers(folder.fleet_ledger) if run.settings.sensors else []
    result = audit([*boards, *fleet], records, readings)
    serial = frozenset(ledger.device for ledger in boards)
    shown = shown_sensors(result, serial)
    summary = run_summary(result, run.chronicle.buffer_peak, progress.elapsed_s)
    page = folder.root / "report.html"
    page.write_text(
        report_page(
            Story(run.settings, run.chronicle, result, shown, serial, records, readings, summary),
        ),
        encoding="utf-8",
    )
    (folder.root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    lines = [*audit_lines(result.sensors, result.total), "", *result.findings, *result.examples]
    (folder.root / "audit.txt").write_text("\n".join(lines) + "\n")
    _tell(run, result, shown, page)
    return not result.findings


def run_summary(result: Audit, buffer_peak: int, seconds: float) -> Mapping[str, float]:
    """What `summary.json` holds."""
    total = result.total
    return {
        "sent": total.sent,
        "acknowledged": total.acknowledged,
        "in_kafka": total.in_kafka,
        "in_readings": total.in_readings,
        "missing": total.missing,
        "duplicates": total.doubled,
        "buffer_peak": buffer_peak,
        "late_readings": result.late_readings,
        "seconds": round(seconds, 1),
    }


def _tell(run: Run, result: Audit, shown: list[SensorAudit], page: Path) -> None:
    """The audit on the screen; its last line is the verdict."""
    console, total = run.progress.console, result.total
    console.print("\nWhat the sensors know, against what arrived:", style="bold")
    more = len(result.sensors) - len(shown)
    lines = audit_lines(shown, total)
    if more:
        lines.insert(-2, f"... and {more} more, in {page.with_name('audit.txt')}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{result.late_readings:,} readings reached Kafka more than {LATE_US // 1_000_000} s after they were taken: "
        f"they waited out the outage. "
        f"{result.copies:,} records in Kafka are repetitions, which the table leaves out.",
        soft_wrap=True,
    )
    for words in (*result.findings, *result.examples):
        console.print(words, style="red", markup=False, soft_wrap=True)
    console.print(f"The report: {page}", soft_wrap=True, markup=False)
    verdict = f"missing {total.missing}, duplicates {total.doubled}"
    console.print(verdict, style="bold red" if result.findings else "bold green", highlight=False)
