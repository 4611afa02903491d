"""`make demo` in small, with the gateway killed in the outage: from an 8-bit sensor to a Delta table."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spark.engine.session import SHORT_LIVED
from tests.support.desk_server import SLUICE_CLOUD, desk
from tests.support.sizes import size

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "build" / "demo"
KEYS = {
    "sent",
    "acknowledged",
    "in_kafka",
    "in_readings",
    "missing",
    "duplicates",
    "buffer_peak",
    "disk_bytes",
    "late_readings",
    "times_judged",
    "times_within_bound",
    "seconds",
}


# Its Spark is the demo's own. Marked `spark`, it would have the tests that share a Spark wait for its sensors.
@pytest.mark.kafka
@pytest.mark.avr
@pytest.mark.campaign(seconds=100)
@pytest.mark.timeout(900)
def test_nothing_acknowledged_is_missing_and_nothing_stands_twice(tmp_path: Path) -> None:
    seconds, outage_seconds, sensors = size((18, 8, 6), (30, 14, 30))
    boards = size(1, 2)
    sizes = {
        "DEMO_SECONDS": str(seconds),
        "DEMO_OUTAGE_SECONDS": str(outage_seconds),
        "DEMO_SENSORS": str(sensors),
        "DEMO_SERIAL_SENSORS": str(boards),
        "DEMO_WIFI_SENSORS": str(boards),
        "DEMO_KILL": "1",
        "SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED,
    }
    ended = subprocess.run(
        [sys.executable, "-m", "demo"],
        env={**os.environ, **sizes},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    summary = json.loads((DEMO / "summary.json").read_text())
    assert set(summary) == KEYS
    assert (summary["missing"], summary["duplicates"]) == (0, 0)
    # 18 s of 8 sensors, or 30 s of 34, at one reading a second, give or take those of starting and being killed.
    assert summary["acknowledged"] > size(70, 600)
    assert summary["in_readings"] >= summary["acknowledged"]
    assert summary["buffer_peak"] > size(10, 200), "the outage was buffered"
    assert summary["disk_bytes"] > 0
    assert summary["late_readings"] > 0
    assert summary["times_judged"] > size(10, 30), "boards on serial lines, at least, say when they measured"
    assert summary["times_within_bound"] >= 0.999 * summary["times_judged"]
    assert ended.stdout.endswith("\nmissing 0, duplicates 0\n")
    assert "</svg>" in (DEMO / "report.html").read_text()
    expect_look_ups(ended.stdout, tmp_path)


def expect_look_ups(said: str, folder: Path) -> None:
    """Fail unless what the demo and README tell an analyst to type works as it stands, without Java."""

    def typed(words: list[str], query: str = "") -> str:
        environment = {"PATH": "/nonexistent", "HOME": str(folder)}
        done = subprocess.run(
            words, cwd=folder, env=environment, input=query, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    told = said.partition("Look further, from any folder:\n")[2].splitlines()
    page, report, sql = (shlex.split(line) for line in told[:3])
    with desk(page[-1], folder) as server:
        assert page[:2] == [SLUICE_CLOUD, "desk"]
        assert json.loads(server.get("/choices.json").body)["devices"]
    typed(report)
    assert "</svg>" in (folder / "board-1.html").read_text()
    assert "board-1" in typed(sql, "SELECT DISTINCT device FROM readings ORDER BY device")
    # The gateway was killed. What nobody sends again may be gone then, and the tables say so.
    assert "unclean-end" in typed(sql, "SELECT DISTINCT reason FROM losses")

    (minutes,) = re.findall(r"`(sluice-cloud windows .* minutes\.csv)`", (ROOT / "README.md").read_text())
    (folder / "build").symlink_to(DEMO.parent)
    command, *options = shlex.split(minutes)
    typed([str(Path(SLUICE_CLOUD).with_name(command)), *options])
    with (folder / "minutes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["device"] for row in rows} == {"board-1"}
    assert all(row["status"] and row["mean"] for row in rows)
