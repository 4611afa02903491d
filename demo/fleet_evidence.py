"""Ends a run of many gateways: compares what every part knows, and tells the outcome."""

import json
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import asdict

from demo.audit import Audit, audit, read_ledgers, verdict
from demo.evidence import arrived
from demo.fleet_run import GOOD, FleetRun, RollOut, in_words
from gateway.fleet_file import load, with_changes


async def conclude(run: FleetRun) -> bool:
    """Audit a run whose sensors and gateways have stopped and whose broker still runs. Returns whether all is well."""
    records, readings = await arrived(run.children, run.folder, run.progress, run.cloud.broker.bootstrap)
    ledgers = [each for path in sorted((run.folder.root / "ledgers").glob("*.jsonl")) for each in read_ledgers(path)]
    result = audit(ledgers, records, readings)
    findings = (*result.findings, *changes_findings(run))
    _write_summary(run, result)
    _tell(run, result, findings)
    return not findings


def changes_findings(run: FleetRun) -> Iterator[str]:
    """Find what is wrong with the settings of the gateways after a good change and a bad one."""
    good, bad = run.roll_outs
    if good.has_stopped or good.last.standings != {"good": len(run.boxes)}:
        yield f"the good change ended with {in_words(good.last.standings)}"
    if "no share is raised" not in bad.refusal or set(bad.last.standings) - {"went-back", "not-drawn"}:
        yield f"the bad change ended with {in_words(bad.last.standings)}"
    (group,) = load(run.fleet_file).groups
    for box in run.boxes:
        wanted = with_changes(box.first_settings, GOOD.settings)
        if tomllib.loads(box.config.read_text()) != wanted:
            yield f"{box.name} does not have the settings of the good change, and no others"
        if group.is_drawn(box.name) != (box.report.given_up == group.wish):
            yield f"{box.name} tried the bad change without being drawn, or was drawn and has not given it up"


def _write_summary(run: FleetRun, result: Audit) -> None:
    total = result.total
    run.folder.summary.write_text(
        json.dumps(
            {
                "gateways": len(run.boxes),
                "acknowledged": total.acknowledged,
                "in_kafka": total.in_kafka,
                "in_readings": total.in_readings,
                "missing": total.missing,
                "duplicates": total.doubled,
                "seconds": round(run.progress.elapsed_s, 1),
                "roll_outs": [asdict(each) for each in run.roll_outs],
                "killed": dict(run.killed),
            },
            indent=2,
        )
        + "\n"
    )


def _tell(run: FleetRun, result: Audit, findings: tuple[str, ...]) -> None:
    """Show the outcome on the screen; its last line is the verdict."""
    console, total = run.progress.console, result.total

    def say(words: str, style: str | None = None) -> None:
        console.print(words, style=style, markup=False, highlight=False, soft_wrap=True)

    say("\nWhat became of the two changes:", "bold")
    for roll_out in run.roll_outs:
        say(_words_of(roll_out))
    if run.killed:
        say(f"Ended by kill -9 meanwhile: {in_words(run.killed)}.")
    for typed, said in run.shown:
        say(f"\n$ {shlex.join(typed)}", "bold")
        say(said)
    say("\nWhat the sensors know, against what arrived:", "bold")
    say(
        f"The gateways acknowledged {total.acknowledged:,} readings. There are {total.in_kafka:,} in Kafka, and "
        f"{total.in_readings:,} in the table `readings`."
    )
    for words in (*findings, *result.examples):
        say(words, "red")
    say(verdict(total, findings), "bold red" if findings else "bold green")


def _words_of(roll_out: RollOut) -> str:
    shares = ", ".join(str(step.share) for step in roll_out.steps)
    end = "Then it stopped by itself" if roll_out.has_stopped else "Then all had it"
    return (
        f"  {roll_out.change.setting} was rolled out to {shares} per cent. {end}: {in_words(roll_out.last.standings)}."
    )
