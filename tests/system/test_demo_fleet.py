"""`make demo FLEET=50`: a good change in steps, bad ones that stop by themselves, and kills meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.demo_settings import MISTAKES
from spark.engine.session import SHORT_LIVED
from tests.support.waiting import patience

GATEWAYS = 50
SUMMARY = Path(__file__).parents[2] / "build" / "demo" / "summary.json"


# Its Spark is the demo's own. Marked `spark`, it would have the tests that share a Spark wait for fifty gateways.
@pytest.mark.kafka
@pytest.mark.long(seconds=1_500)
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_good_change_comes_to_all_and_a_bad_one_stops_at_a_tenth(mistake: str) -> None:
    """Fifty gateways of the real daemon, one folder and one Kafka. Some looks and some daemons on trial are killed."""
    asked = {
        "FLEET": str(GATEWAYS),
        "DEMO_STEP": "10",
        # On a slow machine, a daemon takes long to start anew beside fifty others.
        "DEMO_TRIAL_S": str(round(min(patience(60), 300))),
        "DEMO_KILL": "1",
        "DEMO_MISTAKE": mistake,
        "SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED,
    }
    ended = subprocess.run(
        [sys.executable, "-m", "demo"], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert ended.stdout.endswith("\nmissing 0, duplicates 0\n")
    summary = json.loads(SUMMARY.read_text())
    assert (summary["gateways"], summary["missing"], summary["duplicates"]) == (GATEWAYS, 0, 0)
    assert summary["in_readings"] >= summary["acknowledged"] > GATEWAYS * 100
    good, bad = summary["roll_outs"]
    assert [step["share"] for step in good["steps"]] == list(range(10, 101, 10))
    assert good["steps"][-1]["standings"] == {"good": GATEWAYS}
    (step,) = bad["steps"]
    assert (step["share"], bad["has_stopped"], set(step["standings"])) == (10, True, {"went-back", "not-drawn"})
    assert 0 < step["standings"]["went-back"] < GATEWAYS / 3
    assert set(summary["killed"]) >= {"looks before a trial", "looks on trial", "daemons on trial"}
