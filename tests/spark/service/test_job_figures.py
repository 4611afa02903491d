"""The figures of the ingest job: what batches add to them, and what `/health` says."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spark.finality.gateway_troubles import UNHEARD
from spark.ingest_job import Begun, Listener
from spark.service.job_figures import GATEWAYS_MAX, OTHERS, STUCK_S, TOPICS_MAX, JobFigures
from tests.support.job_reports import NEWEST_US, batch, gateway
from tests.support.prometheus import MISSING


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def values(figures: JobFigures) -> dict[tuple[str, str], float]:
    """Every sample of the job, by its name and its topic."""
    return {
        (sample.name.removeprefix("sluice_ingest_"), sample.labels.get("topic", "")): sample.value
        for family in text_string_to_metric_families(figures.text().decode())
        for sample in family.samples
        if sample.name.startswith("sluice_ingest_") and "le" not in sample.labels
    }


def test_batches_add_up_and_the_last_one_says_what_is_left() -> None:
    figures = JobFigures()
    listener = figures.beside(Listener())
    listener.ready(Begun(["device-a", "device-b"]))
    listener.report(batch({"device-a": 4, "device-gone": 9}, rows=100, rejected=2, seconds=0.5))
    listener.report(batch({"device-a": 0, "device-b": 7}, rows=20, rejected=1, seconds=1.5))
    found = values(figures)
    assert (found["records_total", ""], found["rejects_total", ""]) == (120, 3)
    assert (found["batch_seconds_sum", ""], found["batch_seconds_count", ""]) == (2, 2)
    assert {topic: value for (name, topic), value in found.items() if name == "lag_records"} == {
        "device-a": 0,
        "device-b": 7,
    }
    assert found["newest_record_timestamp_seconds", "device-a"] == 1_750_000_000
    assert found["ready", ""] == 1


def test_whoever_is_told_of_the_job_is_told_as_before() -> None:
    told: list[object] = []
    listener = JobFigures().beside(
        Listener(told.append, told.append, lambda: told.append("idle"), told.append, told.append, told.append)
    )
    begun, report = Begun([]), batch({})
    listener.ready(begun)
    listener.report(report)
    listener.idle()
    listener.leave_out({"x": "why"})
    listener.hold_back([])
    listener.warn("words")
    assert told == [begun, report, "idle", {"x": "why"}, [], "words"]


def test_a_job_that_comes_no_further_is_stuck_and_one_that_waits_for_records_is_not() -> None:
    clock = Clock()
    figures = JobFigures(clock)
    listener = figures.beside(Listener())
    clock.now_s += 2 * STUCK_S
    # It may be making the tables of a restored warehouse anew.
    assert figures.health()[0]
    assert figures.health()[1]["status"] == "starting"
    listener.ready(Begun(["device-a"]))
    listener.report(batch({"device-a": 3}))
    clock.now_s += STUCK_S
    listener.idle()
    clock.now_s += STUCK_S
    assert figures.health() == (
        True,
        {"status": "ok", "batch": 1, "lag_records": 3, "progress_age_s": STUCK_S, "commit_age_s": 2 * STUCK_S},
    )
    clock.now_s += 1
    is_well, members = figures.health()
    assert not is_well
    assert (members["status"], members["code"]) == ("stuck", "ingest-stuck")
    assert members["reason"].startswith("no batch has ended for 1,801 s")


def test_systemd_and_health_call_a_job_stuck_after_the_same_time() -> None:
    unit = (Path(__file__).parents[3] / "systemd" / "sluice-ingest.service").read_text()
    assert f"\nWatchdogSec={STUCK_S / 60:.0f}min\n" in unit


def test_topics_beyond_the_bound_share_a_label() -> None:
    figures = JobFigures()
    listener = figures.beside(Listener())
    listener.report(batch({f"device-{number:04}": 1 for number in range(TOPICS_MAX + 50)}))
    lags = {topic: value for (name, topic), value in values(figures).items() if name == "lag_records"}
    assert len(lags) == TOPICS_MAX + 1
    assert lags[OTHERS] == 50


def samples(figures: JobFigures, name: str) -> dict[tuple[str, ...], float]:
    """Samples of a figure of gateways, by gateway, level and code."""
    return {
        tuple(sample.labels[label] for label in ("gateway", "level", "code") if label in sample.labels): sample.value
        for family in text_string_to_metric_families(figures.text().decode())
        for sample in family.samples
        if sample.name == f"sluice_ingest_{name}"
    }


def test_each_gateway_has_figures_before_the_first_batch_and_after_each() -> None:
    figures = JobFigures()
    assert samples(figures, "gateways") == {("bad",): 0, ("warn",): 0, ("well",): 0}
    listener = figures.beside(Listener())
    full, worn, well = (
        gateway("full", "buffer-full", "unheard-of"),
        gateway("worn", "card-wears-out", level="warn"),
        gateway("well"),
    )
    listener.ready(Begun([], gateways=(full, worn, well)))
    assert samples(figures, "gateways") == {("bad",): 1, ("warn",): 1, ("well",): 1}
    # A code of another make's gateway is no label.
    assert samples(figures, "gateway_condition") == {
        ("full", "bad", "(others)"): 1,
        ("full", "bad", "buffer-full"): 1,
        ("worn", "warn", "card-wears-out"): 1,
    }
    assert samples(figures, "gateway_heard_timestamp_seconds")["well",] == NEWEST_US / 1e6
    listener.report(replace(batch({}), gateways=(gateway("worn", depth_rows=7),)))
    assert samples(figures, "gateway_depth_rows") == {("worn",): 7}
    assert samples(figures, "gateway_condition") == {}


def test_of_ten_thousand_gateways_the_worst_have_figures_and_all_are_counted() -> None:
    figures = JobFigures()
    many = tuple(gateway(f"gw-{number:05}", *(("buffer-full",) if number < 20 else ())) for number in range(10_000))
    figures.beside(Listener()).report(replace(batch({}), gateways=many))
    assert samples(figures, "gateways") == {("bad",): 20, ("warn",): 0, ("well",): 9_980}
    heard = samples(figures, "gateway_heard_timestamp_seconds")
    assert len(heard) == GATEWAYS_MAX
    assert len(samples(figures, "gateway_condition")) == 20


def test_the_newest_heartbeat_may_be_of_a_gateway_without_figures_of_its_own() -> None:
    figures = JobFigures()
    assert samples(figures, "newest_heartbeat_timestamp_seconds") == {}
    unheard = [gateway(f"gw-{number:05}", UNHEARD, heard_us=NEWEST_US - 10**9) for number in range(GATEWAYS_MAX + 200)]
    figures.beside(Listener()).report(replace(batch({}), gateways=(*unheard, gateway("heard"))))
    assert max(samples(figures, "gateway_heard_timestamp_seconds").values()) == NEWEST_US / 1e6 - 1_000
    assert samples(figures, "newest_heartbeat_timestamp_seconds") == {(): NEWEST_US / 1e6}


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_promtool_finds_nothing_to_correct_in_the_figures() -> None:
    figures = JobFigures()
    figures.beside(Listener()).report(replace(batch({"device-a": 3}), gateways=(gateway("full", "buffer-full"),)))
    told = subprocess.run(["promtool", "check", "metrics"], input=figures.text(), capture_output=True, check=False)
    assert (told.returncode, told.stderr) == (0, b"")
