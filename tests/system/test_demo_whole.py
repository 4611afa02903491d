"""`make demo` in small, with the gateway killed in the outage: from an 8-bit sensor to a Delta table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark.engine.session import SHORT_LIVED
from tests.support.sizes import size

DEMO = Path(__file__).parents[2] / "build" / "demo"
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
def test_nothing_acknowledged_is_missing_and_nothing_stands_twice() -> None:
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
