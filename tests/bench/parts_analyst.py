"""What an analyst waits for: look-ups of the demo's tables, and questions about a year of many devices."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median

from tests.bench.analyst_tables import BEGINS, Year, made
from tests.bench.context import Bench, say
from tests.bench.parts_desk_page import QUESTIONS, page
from tests.bench.processes import NotMeasuredError
from tests.bench.report import ROOT, Result
from tests.bench.spark_job import session

SLUICE_CLOUD = Path(sys.executable).with_name("sluice-cloud")
DEMO = ROOT / "build" / "demo" / "warehouse"
RUNS, RUNS_QUICK = 5, 1
READINGS, READINGS_QUICK = 50_000_000, 200_000
DEVICES, DEVICES_QUICK = 1_000, 50
DAYS, DAYS_QUICK = 365, 4
LOOK_UPS = {
    "readings": ["readings"],
    "windows": ["windows"],
    "gaps": ["gaps"],
    "quarantine": ["quarantine", "list"],
    "gateways": ["gateways"],
}
ASKED = """
import json, time
def read():
    return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))
begun, cpu = time.monotonic(), time.process_time()
from spark.desk import tables
opened = tables.open({path!r})
before = read()
rows = len(opened.{call}.fetchall())
print(json.dumps([rows, time.monotonic() - begun, time.process_time() - cpu, read() - before]))
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One cold process."""

    wall_s: float
    cpu_s: float
    rss_mb: float


def ran(command: Sequence[str | Path]) -> Run:
    """Run a program to its end. Raises NotMeasuredError if it fails."""
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/") as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise NotMeasuredError(f"{' '.join(map(str, command))}: {said.decode(errors='replace')[-300:]}")
    return Run(time.monotonic() - begun, used.ru_utime + used.ru_stime, used.ru_maxrss * 1_024 / 1e6)


async def lookups(bench: Bench) -> list[Result]:
    """Cold look-ups of the demo's tables, one after the other."""
    if not DEMO.is_dir():
        raise NotMeasuredError(f"there is no {DEMO}: run `make demo` first")
    results, most = [], 0.0
    for name, words in LOOK_UPS.items():
        runs = [ran([SLUICE_CLOUD, *words, "--warehouse", DEMO]) for _ in range(bench.pick(RUNS, RUNS_QUICK))]
        most = max([most, *(run.rss_mb for run in runs)])
        note = f"median of {len(runs)}; {median(run.cpu_s for run in runs):.2f} s of CPU"
        results.append(Result(f"lookup_s_demo_{name}", median(run.wall_s for run in runs), "s", "<= 1", note))
    return [
        *results,
        *page("demo", DEMO, bench.pick(QUESTIONS, 5)),
        Result("lookup_rss_mb", most, "MB", "<= 250"),
        Result("desk_install_mb", _install_mb(), "MB", "<= 250"),
    ]


def _install_mb() -> float:
    """What `pip install sluice[desk]` needs beside the gateway's own packages."""
    site = Path(sys.executable).parent.parent
    packages = [
        path
        for name in ("duckdb", "_duckdb*", "deltalake", "arro3", "deprecated", "starlette", "uvicorn", "anyio", "idna")
        for path in site.glob(f"lib/python*/site-packages/{name}")
    ]
    files = [file for path in packages for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


def _year(bench: Bench) -> Year:
    readings = int(os.environ.get("BENCH_READINGS", bench.pick(READINGS, READINGS_QUICK)))
    devices, days = bench.pick(DEVICES, DEVICES_QUICK), bench.pick(DAYS, DAYS_QUICK)
    folder = bench.directory / "year"
    with session() as spark:
        shutil.rmtree(folder, ignore_errors=True)
        begun = time.monotonic()
        year = made(spark, folder, readings, devices, days)
        say(f"year: {year.readings:,} readings are in the tables after {time.monotonic() - begun:.0f} s")
    return year


def _asked(path: str, call: str, runs: int) -> tuple[int, float, float, float]:
    """Rows, seconds, seconds of CPU and megabytes read of a question in a cold process."""
    found = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", ASKED.format(path=path, call=call)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if done.returncode:
            raise NotMeasuredError(done.stderr[-300:])
        found.append(json.loads(done.stdout))
    rows, walls, cpus, read = zip(*found, strict=True)
    return rows[0], median(walls), median(cpus), median(read) / 1e6


async def year(bench: Bench) -> list[Result]:
    """Questions about a year of many devices, each in a cold process: without Java, and in Spark."""
    there = _year(bench)
    runs = bench.pick(RUNS, RUNS_QUICK)
    start = datetime.combine(there.day, datetime.min.time())
    day = f"since={start.isoformat()!r}, until={(start + timedelta(days=1)).isoformat()!r}"
    month_days = bench.pick(30, 2)
    month = f"since={start.isoformat()!r}, until={(start + timedelta(days=month_days)).isoformat()!r}"
    questions = {
        "device_day": (f"readings(device='device-0042', {day})", "<= 1", "<= 5"),
        "site_month": (
            f"windows(site='site-3', size_s=3600, {month}).project('window_start, device, n, mean, status')",
            "<= 2",
            "<= 30",
        ),
        "site_month_readings": (
            f"readings(site='site-3', {month}).aggregate('device, date_trunc(\\'hour\\', event_time), avg(value)')",
            "<= 2",
            None,
        ),
    }
    results = []
    for name, (call, target, target_mb) in questions.items():
        rows, wall_s, cpu_s, read_mb = _asked(there.path, call, runs)
        note = f"{rows:,} rows of {there.readings:,} readings; {cpu_s:.2f} s of CPU"
        results += [
            Result(f"{name}_s_duckdb", wall_s, "s", target, note),
            Result(f"{name}_mb_read", read_mb, "MB", target_mb),
        ]
    results += _explained(bench, there, runs, month_days)
    results += page("year", Path(there.path), bench.pick(QUESTIONS, 5), (BEGINS, there.days))
    log = Path(there.path) / "v1" / "log"
    size = sum(file.stat().st_size for file in log.rglob("*.parquet"))
    results.append(Result("log_bytes_per_reading", size / there.readings, "bytes"))
    return [*results, *_published(there, bench.directory / "published"), *_in_spark(there, month_days)]


def _published(there: Year, folder: Path) -> list[Result]:
    """What plain tables cost: readings and windows of the whole year, and a run that finds nothing changed."""
    shutil.rmtree(folder, ignore_errors=True)
    command: list[str | Path] = [SLUICE_CLOUD, "publish", folder, "--warehouse", there.path]
    first, again = ran(command), ran(command)
    size = sum(file.stat().st_size for file in (folder / "readings").rglob("*.parquet"))
    note = f"{there.days} days, windows too; {first.cpu_s:.0f} s of CPU, {first.rss_mb:.0f} MB of memory"
    return [
        Result("publish_us_per_reading", first.wall_s * 1e6 / there.readings, "us", "<= 10", note),
        Result("publish_bytes_per_reading", size / there.readings, "bytes"),
        Result("publish_unchanged_s", again.wall_s, "s", "<= 1", f"{again.cpu_s:.2f} s of CPU"),
    ]


def _explained(bench: Bench, there: Year, runs: int, days: int) -> list[Result]:
    """One window explained, and a report on a site's month, each in a cold process."""
    noon = datetime.combine(there.day, datetime.min.time()) + timedelta(hours=12)
    since, until = there.day.isoformat(), (there.day + timedelta(days=days)).isoformat()
    out = bench.directory / "report.html"
    commands: dict[str, tuple[list[str | Path], str]] = {
        "explain_s": (
            ["explain", "--device", "device-0042", "--metric", "celsius", "--window", noon.isoformat()],
            "<= 2",
        ),
        "report_s": (["report", "--site", "site-3", "--since", since, "--until", until, "--out", out], "<= 10"),
    }
    results = []
    for name, (words, target) in commands.items():
        done = [ran([SLUICE_CLOUD, *words, "--warehouse", there.path]) for _ in range(runs)]
        most_mb = max(run.rss_mb for run in done)
        note = f"median of {runs}; {median(run.cpu_s for run in done):.2f} s of CPU, {most_mb:.0f} MB"
        results.append(Result(name, median(run.wall_s for run in done), "s", target, note))
    return results


def _in_spark(there: Year, days: int) -> list[Result]:
    """The same questions in Spark: a cold process each, once."""
    start = datetime.combine(there.day, datetime.min.time())
    queries = {
        "device_day": f"""SELECT * FROM readings WHERE device = 'device-0042' AND event_date = DATE '{there.day}'""",
        "site_month": f"""SELECT device, date_trunc('hour', window_start) AS hour, sum(sum) / sum(n), min(status)
            FROM windows JOIN devices USING (namespace, device)
            WHERE site = 'site-3' AND window_start >= TIMESTAMP '{start}'
                AND window_start < TIMESTAMP '{start + timedelta(days=days)}'
            GROUP BY device, hour""",
    }
    results = []
    for name, query in queries.items():
        run = ran([SLUICE_CLOUD, "sql", "--engine", "spark", "--warehouse", there.path, "--csv", query])
        results.append(Result(f"{name}_s_spark", run.wall_s, "s", None, f"once; {run.cpu_s:.0f} s of CPU"))
    return results
