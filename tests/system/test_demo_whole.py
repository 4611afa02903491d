"""`make demo` in small, with the gateway killed in the outage: from an 8-bit sensor to a Delta table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "build" / "demo"
KEYS = {
    "sent",
    "acknowledged",
    "in_kafka",
    "in_readings",
    "missing",
    "duplicates",
    "buffer_peak",
    "late_readings",
    "times_judged",
    "times_within_bound",
    "seconds",
}


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.avr
@pytest.mark.timeout(400)
def test_nothing_acknowledged_is_missing_and_nothing_stands_twice() -> None:
    sizes = {
        "DEMO_SECONDS": "30",
        "DEMO_OUTAGE_SECONDS": "14",
        "DEMO_SENSORS": "30",
        "DEMO_SERIAL_SENSORS": "2",
        "DEMO_WIFI_SENSORS": "2",
        "DEMO_KILL": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "demo"],
        env={**os.environ, **sizes},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    summary = json.loads((DEMO / "summary.json").read_text())
    assert set(summary) == KEYS
    assert (summary["missing"], summary["duplicates"]) == (0, 0)
    # 30 s of 34 sensors at one reading a second, give or take the seconds of starting and being killed.
    assert summary["acknowledged"] > 600
    assert summary["in_readings"] >= summary["acknowledged"]
    assert summary["buffer_peak"] > 200, "the outage was buffered"
    assert summary["late_readings"] > 0
    assert summary["times_judged"] > 30, "boards on serial lines, at least, say when they measured"
    assert summary["times_within_bound"] >= 0.999 * summary["times_judged"]
    assert ended.stdout.endswith("\nmissing 0, duplicates 0\n")
    assert "</svg>" in (DEMO / "report.html").read_text()
