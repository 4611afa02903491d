"""Questions about 50 million readings of a year, about a day of 10 million, and about days that nobody has merged."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, time, timedelta
from pathlib import Path

from pyspark.sql import SparkSession

from spark.engine.delta_staging import jvm_of
from spark.views.views import open_all
from tests.bench.analyst_tables import BEGINS, Made, Shape, kept
from tests.bench.cold import SLUICE_CLOUD, Runs, asked, ran, repeated
from tests.bench.context import Bench
from tests.bench.parts_desk_page import QUESTIONS, QUESTIONS_QUICK, page
from tests.bench.report import Result
from tests.bench.spark_job import session

RUNS, RUNS_QUICK = 5, 1
MONTH_DAYS, MONTH_DAYS_QUICK = 30, 2
DEVICE, SITE, METRIC = "device-0042", "site-3", "celsius"
YEAR = Shape("year", 50_000_000, 1_000, 365)
YEAR_QUICK = Shape("quick-year", 200_000, 50, 4)
DAY = Shape("day", 10_000_000, 1_000, 1)
DAY_QUICK = Shape("quick-day", 100_000, 50, 1)
UNMERGED = Shape("unmerged", 1_500_000, 1_000, 10, batches_of_day=288)
"""As `ingest` leaves it: a batch every five minutes."""
UNMERGED_QUICK = Shape("quick-unmerged", 20_000, 50, 2, batches_of_day=24)


def year_of(bench: Bench) -> Made:
    shape = YEAR_QUICK if bench.quick else YEAR
    readings = int(os.environ.get("BENCH_READINGS", shape.readings))
    return kept(Shape(shape.name, readings, shape.devices, shape.days))


async def year(bench: Bench) -> list[Result]:
    """Questions about a year of many devices, each in a cold process, without Java."""
    there = year_of(bench)
    runs = bench.pick(RUNS, RUNS_QUICK)
    month = _span(there, bench.pick(MONTH_DAYS, MONTH_DAYS_QUICK))
    hours = f"windows(site={SITE!r}, size_s=3600, {month}).project('window_start, device, n, mean, status')"
    by_hour = "aggregate('device, date_trunc(\\'hour\\', event_time), avg(value)')"
    results: list[Result] = []
    most_mb = 0.0
    for name, call, target, target_mb in (
        ("device_day", f"readings(device={DEVICE!r}, {_span(there)})", "<= 1", "<= 5"),
        ("site_month", hours, "<= 2", "<= 30"),
        ("site_month_readings", f"readings(site={SITE!r}, {month}).{by_hour}", "<= 2", None),
    ):
        found, rows, read_mb = asked(there.path, call, runs)
        most_mb = max(most_mb, found.rss_mb)
        results += [
            found.result(f"{name}_s_duckdb", target, f"{rows:,} rows of {there.readings:,} readings"),
            Result(f"{name}_mb_read", read_mb, "MB", target_mb),
        ]
    for name, words, target in _commands(bench, there):
        commands = repeated([SLUICE_CLOUD, *words, "--warehouse", there.path], runs)
        results.append(commands.result(name, target))
    results.append(Result("lookup_rss_mb_year", most_mb, "MB", "<= 250", "the most of these three questions"))
    return [*results, *page("", Path(there.path), bench.pick(QUESTIONS, QUESTIONS_QUICK), (BEGINS, there.days))]


def _commands(bench: Bench, there: Made) -> Iterator[tuple[str, list[str | Path], str]]:
    noon = datetime.combine(there.middle, time(12))
    window: list[str | Path] = ["--device", DEVICE, "--metric", METRIC, "--window", noon.isoformat()]
    yield "explain_s", ["explain", *window], "<= 2"
    bench.directory.mkdir(parents=True, exist_ok=True)
    until = there.middle + timedelta(days=bench.pick(MONTH_DAYS, MONTH_DAYS_QUICK))
    span = ["--since", there.middle.isoformat(), "--until", until.isoformat()]
    yield "report_s", ["report", "--site", SITE, *span, "--out", bench.directory / "report.html"], "<= 10"


async def day(bench: Bench) -> list[Result]:
    """One device's readings of a day that has 10 million, in a cold process."""
    there = kept(DAY_QUICK if bench.quick else DAY)
    return _device_day("device_day_10m_day", "<= 1", there, bench)


async def unmerged(bench: Bench) -> list[Result]:
    """One device's readings of a day that upkeep has not merged, in a cold process."""
    there = kept(UNMERGED_QUICK if bench.quick else UNMERGED)
    return _device_day("device_day_unmerged", None, there, bench)


def _device_day(name: str, target: str | None, there: Made, bench: Bench) -> list[Result]:
    call = f"readings(device={DEVICE!r}, {_span(there)})"
    found, rows, read_mb = asked(there.path, call, bench.pick(RUNS, RUNS_QUICK))
    about = f"{rows:,} rows of {there.readings // there.days:,} in a day"
    return [found.result(f"{name}_s", target, about), Result(f"{name}_mb_read", read_mb, "MB")]


async def published(bench: Bench) -> list[Result]:
    """Plain tables of the whole year, and a run that finds nothing changed."""
    return _published("", year_of(bench), bench)


async def published_day(bench: Bench) -> list[Result]:
    """Plain tables of the day that has 10 million readings, and a run that finds nothing changed."""
    return _published("_10m_day", kept(DAY_QUICK if bench.quick else DAY), bench)


def _published(suffix: str, there: Made, bench: Bench) -> list[Result]:
    folder = bench.directory / "published"
    command: list[str | Path] = [SLUICE_CLOUD, "publish", folder, "--warehouse", there.path]
    first, again = ran(command), repeated(command, bench.pick(RUNS, RUNS_QUICK))
    size = sum(file.stat().st_size for file in (folder / "readings").rglob("*.parquet"))
    shutil.rmtree(folder)
    us = first.wall_s * 1e6 / there.readings
    note = f"days: {there.days}; windows too; {first.cpu_s:.0f} s of CPU, {first.rss_mb:.0f} MB"
    return [
        Result(f"publish_us_per_reading{suffix}", us, "us", "<= 10", note),
        Result(f"publish_bytes_per_reading{suffix}", size / there.readings, "bytes"),
        again.result(f"publish_unchanged_s{suffix}", "<= 1"),
    ]


async def in_spark(bench: Bench) -> list[Result]:
    """Questions about a year in Spark: each as a command, and what it reads in a session that runs already."""
    there = year_of(bench)
    log_mb = sum(file.stat().st_size for file in (Path(there.path) / "v1" / "log").rglob("*.parquet")) / 1e6
    start = datetime.combine(there.middle, time())
    end = start + timedelta(days=bench.pick(MONTH_DAYS, MONTH_DAYS_QUICK))
    queries = {
        "device_day": (
            "readings",
            f"SELECT * FROM readings WHERE device = '{DEVICE}' AND event_date = DATE '{there.middle}'",
        ),
        "site_month": (
            "windows, devices",
            f"""SELECT device, date_trunc('hour', window_start) AS hour, sum(sum) / sum(n), min(status)
            FROM windows JOIN devices USING (namespace, device) WHERE site = '{SITE}'
                AND window_start >= TIMESTAMP '{start}' AND window_start < TIMESTAMP '{end}'
            GROUP BY device, hour""",
        ),
    }
    command: list[str | Path] = [SLUICE_CLOUD, "sql", "--engine", "spark", "--warehouse", there.path, "--csv"]
    results = [Runs((ran([*command, query]),)).result(f"{name}_s_spark", None) for name, (_, query) in queries.items()]
    with session() as spark:
        for name, (views, query) in queries.items():
            open_all(spark, there.path, views.split(", "))
            with _read_mb(spark) as read:
                rows = len(spark.sql(query).collect())
            note = f"{rows:,} rows; all of `log` is {log_mb:,.0f} MB"
            results.append(Result(f"{name}_mb_read_spark", read[0], "MB", None, note))
    return results


@contextmanager
def _read_mb(spark: SparkSession) -> Iterator[list[float]]:
    """Megabytes that Java reads from files and sockets meanwhile."""
    pid = jvm_of(spark).java.lang.ProcessHandle.current().pid()

    def now() -> int:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("rchar")))

    before, read = now(), [0.0]
    yield read
    read[0] = (now() - before) / 1e6


def _span(there: Made, days: int = 1) -> str:
    """Arguments of a question: the day in the middle, or days from it on."""
    start = datetime.combine(there.middle, time())
    return f"since={start.isoformat()!r}, until={(start + timedelta(days=days)).isoformat()!r}"
