"""The files of docs/monitoring in a real Prometheus: every query finds figures, and every alert its cause."""

import dataclasses
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from gateway.clock.report import ClockView
from gateway.page.metrics import DeviceFigures, text
from spark.ingest_job import BatchReport, Begun, Listener
from spark.service.job_figures import JobFigures
from spark.service.monitor_page import monitor_page
from tests.gateway.health.test_conditions import FOUND, WELL
from tests.support.job_reports import batch, gateway
from tests.support.prometheus import MISSING, Prometheus, at_once, prometheus
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]

FILES = Path(__file__).parents[2] / "docs" / "monitoring"
ALERTS = (FILES / "alerts.yml").read_text()
VERSIONS = {"sluice": "0.1.0", "python": "3.11", "sqlite": "3.40"}
GRAFANA = {"$__rate_interval": "10s", "$gateway": ".*"}
"""Values that Grafana would put in place of its variables."""


class Case(NamedTuple):
    """An alert that is quiet in one minute and fires in a later one."""

    alert: str
    series: dict[str, str]
    """Values of each figure, minute by minute, as promtool writes them."""
    quiet_min: int
    fires_min: int
    labels: Mapping[str, str] = {}
    """Labels of the figures beside job and instance."""


OF_ONE = {"gateway": "gw-1", "level": "bad"}
CASES = [
    Case("SluiceIngestDown", {"up": "1x5 0x10"}, 7, 8),
    Case("SluiceIngestStarting", {"sluice_ingest_ready": "0x40"}, 29, 30),
    Case(
        "SluiceIngestStuck",
        {"sluice_ingest_ready": "1x40", "sluice_ingest_progress_timestamp_seconds": "0+60x5 300x40"},
        16,
        17,
    ),
    Case("SluiceIngestRestarts", {"process_start_time_seconds": "0x3 200x2 400x2 600x20"}, 9, 10),
    Case(
        "SluiceTablesBehind",
        {"sluice_ingest_lag_records": "5x40", "sluice_ingest_newest_record_timestamp_seconds": "0x40"},
        20,
        21,
    ),
    Case(
        "SluiceRejects", {"sluice_ingest_rejects_total": "0x5 5+5x30", "sluice_ingest_records_total": "0+99x40"}, 6, 20
    ),
    Case("SluiceTopicsLeftOut", {"sluice_ingest_left_out_topics": "0x5 2x20"}, 15, 16),
    Case("SluiceRecordsHeldBack", {"sluice_ingest_held_back_records": "0x5 2x20"}, 15, 16),
    Case("SluiceIngestWarns", {"sluice_ingest_warnings_total": "0x5 1x20"}, 5, 6),
    Case("SluiceNoGatewayHeard", {"sluice_ingest_newest_heartbeat_timestamp_seconds": "0+60x5 300x20"}, 15, 16),
    Case(
        "SluiceGatewayUnheard", {"sluice_ingest_gateway_condition": "1x20"}, 4, 5, {**OF_ONE, "code": "gateway-unheard"}
    ),
    Case("SluiceGatewayBad", {"sluice_ingest_gateway_condition": "1x20"}, 4, 5, {**OF_ONE, "code": "buffer-full"}),
    Case(
        "SluiceGatewayWarns",
        {"sluice_ingest_gateway_condition": "1x90"},
        59,
        60,
        {"gateway": "gw-1", "level": "warn", "code": "device-silent"},
    ),
    Case("SluiceGatewayBacklogGrows", {"sluice_ingest_gateway_depth_rows": "9e3x5 2e4+100x60"}, 35, 36),
    Case("SluiceGatewayDown", {"up": "1x5 0x20"}, 10, 11),
    Case("SluiceUplinkDown", {"sluice_uplink_up": "1x5 0x20"}, 20, 21),
    Case("SluiceBufferFilling", {"sluice_uplink_up": "0x20", "sluice_buffer_full_in_seconds": "9e4x5 8e4x20"}, 10, 11),
    Case("SluiceBufferFull", {"sluice_buffer_full": "0x5 1x5"}, 5, 6),
    Case("SluiceBufferFailing", {"sluice_buffer_failing": "0x5 1x5"}, 5, 6),
    Case("SluiceReadingsLost", {"sluice_lost_readings_total": "3x5 4x5"}, 5, 6),
    Case("SluiceQuarantineGrows", {"sluice_quarantined": "2x5 3x5"}, 5, 6),
    Case("SluiceClockNotSynced", {"sluice_clock_synced": "1x5 0x70"}, 65, 66),
    Case("SluiceDevicesSilent", {"sluice_devices_silent": "0x5 1x40"}, 35, 36),
]


class Pages(NamedTuple):
    """The pages that Prometheus scrapes, by the jobs' names of docs/monitoring/prometheus.yml."""

    ports: dict[str, int]
    served: ExitStack
    job: Listener


def gateway_text() -> bytes:
    """The figures of a gateway that knows all of them."""
    found = replace(FOUND, quarantined=2, quarantine_reasons={"no-route": 2})
    commands = {"topic": "commands", "waiting": 1, "counts": {"read": 3, "delivered": 2}, "error": None}
    clock = ClockView(synced=True, error_us=900)
    facts = replace(WELL, buffer_status=found, disk_bytes_per_day=5e6, clock=clock, commands=commands)
    return text(facts, VERSIONS, {"wrong-secret": 1}, [DeviceFigures("42", 7, facts.boottime_us, 1)])


@pytest.fixture
def pages() -> Iterator[Pages]:
    """Those of a job that has read one batch, after which a gateway is in trouble, and of a gateway."""
    job = JobFigures()
    listener = job.beside(Listener())
    listener.ready(Begun(["device-a"]))
    listener.report(batch_with("buffer-full"))
    with ExitStack() as served:
        ports = {
            "sluice-ingest": served.enter_context(monitor_page("127.0.0.1", 0, job.text, job.health)),
            "sluice-gateway": served.enter_context(monitor_page("127.0.0.1", 0, gateway_text, job.health)),
        }
        assert set(re.findall(r"job_name: (\S+)", (FILES / "prometheus.yml").read_text())) == set(ports)
        yield Pages(ports, served, listener)


def batch_with(*codes: str) -> BatchReport:
    """A batch after which a gateway, which was heard just now, has these conditions."""
    now = gateway("gw-1", *codes, heard_us=int(time.time() * 1e6))
    return dataclasses.replace(batch({"device-a": 0}, rows=10), gateways=(now,))


def queries() -> list[str]:
    """Every query of the dashboard: of its panels, and of its choice of gateways."""
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    chosen = [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    names = [name for each in chosen for name in re.findall(r"^label_values\((\w+), instance\)$", each)]
    assert len(names) == len(chosen)
    return [*names, *(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))]


def answered(server: Prometheus, query: str) -> bool:
    for variable, value in GRAFANA.items():
        query = query.replace(variable, value)
    return bool(server.query(query))


def test_every_query_of_the_dashboard_finds_figures(pages: Pages, tmp_path: Path) -> None:
    asked = queries()
    assert len(asked) > 20
    with prometheus(tmp_path / "prometheus", pages.ports) as server:
        for query in asked:
            # A rate needs two scrapes.
            wait_until(partial(answered, server, query), words=query)


def test_no_alert_fires_until_the_job_and_the_gateway_are_gone(pages: Pages, tmp_path: Path) -> None:
    with prometheus(tmp_path / "prometheus", pages.ports, at_once(ALERTS)) as server:
        asked = set(re.findall(r"\b(?:sluice|process)_\w+", "".join(re.findall(r"expr: .*", ALERTS))))
        wait_until(lambda: asked <= server.names(), words=lambda: str(asked - server.names()))
        pages.job.report(batch_with())
        # Until its first scrapes, Prometheus knows of no job.
        wait_until(lambda: server.is_judged() and not server.alerts(), words=lambda: str(server.alerts()))
        pages.served.close()
        wait_until(
            lambda: server.alerts() == {"SluiceIngestDown": "firing", "SluiceGatewayDown": "firing"},
            words=lambda: str(server.alerts()),
        )


def test_promtool_takes_the_files() -> None:
    promtool("check", "config", str(FILES / "prometheus.yml"))
    promtool("check", "rules", "--lint-fatal", str(FILES / "alerts.yml"))
    promtool("check", "metrics", stdin=gateway_text().decode())


def test_each_alert_fires_once_its_cause_has_lasted(tmp_path: Path) -> None:
    assert [case.alert for case in CASES] == re.findall(r"alert: (\w+)", ALERTS)
    # Promtool would compare their words too.
    (tmp_path / "alerts.yml").write_text(re.sub(r" +annotations:\n +summary: .*\n", "", ALERTS))
    tests = [promtool_case(case) for case in CASES]
    # JSON is YAML too.
    (tmp_path / "cases.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}))
    promtool("test", "rules", str(tmp_path / "cases.yml"))


# To Prometheus, an empty label is none.
@pytest.mark.parametrize(("site", "words"), [({"site": "north"}, "plant/gw-1 (north)"), ({}, "plant/gw-1")])
def test_an_alert_names_a_gateway_by_its_namespace_and_its_site_if_it_has_one(
    tmp_path: Path, site: Mapping[str, str], words: str
) -> None:
    (tmp_path / "alerts.yml").write_text(ALERTS)
    labels = {"namespace": "plant", "gateway": "gw-1", "level": "bad", "code": "buffer-full", **site}
    series = {"sluice_ingest_gateway_condition": "1x20"}
    case: dict[str, Any] = promtool_case(Case("SluiceGatewayBad", series, 4, 5, labels))
    (fired,) = case["alert_rule_test"][1]["exp_alerts"]
    fired["exp_annotations"] = {"summary": f"Gateway {words} says buffer-full."}
    (tmp_path / "cases.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [case]}))
    promtool("test", "rules", str(tmp_path / "cases.yml"))


def promtool_case(case: Case) -> dict[str, object]:
    """A case as promtool takes it."""
    group = ALERTS[: ALERTS.index(f"alert: {case.alert}\n")].rpartition("- name: ")[2].partition("\n")[0]
    labels = {"job": group, "instance": "there:1", **case.labels}
    severity = re.findall(rf"alert: {case.alert}\n(?:.*\n)*?.*severity: (\w+)", ALERTS)[0]
    among = ", ".join(f'{name}="{value}"' for name, value in labels.items())
    return {
        "interval": "1m",
        "input_series": [{"series": f"{name}{{{among}}}", "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.quiet_min}m", "alertname": case.alert, "exp_alerts": []},
            {
                "eval_time": f"{case.fires_min}m",
                "alertname": case.alert,
                "exp_alerts": [{"exp_labels": {**labels, "severity": severity}}],
            },
        ],
    }


def promtool(*arguments: str, stdin: str = "") -> None:
    ended = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
