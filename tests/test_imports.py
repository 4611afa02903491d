"""The daemon must live in 512 MB beside other things: what it imports is a budget."""

import subprocess
import sys

import pytest

from tests.support.installed_packages import packages_of

FORBIDDEN = (
    *("pyspark", "delta", "pyarrow", "pandas", "numpy", "matplotlib", "rich"),
    *("spark", "demo", "sluice_sim", "sqlite_utils"),
)
DAEMON = (
    "gateway.cli",
    "gateway.daemon.control",
    "gateway.host.logs",
    "gateway.pipeline",
    "gateway.daemon.housekeeping",
    "gateway.listener.listener",
    "gateway.serial_lines.serial_ingress",
    "gateway.commands.check.kafka",
)


HEAVY = {"pyspark", "py4j", "delta", "pandas", "pyarrow", "numpy"}
"""Packages that look-ups do without."""
FIRST = ("gateway.cli", "gateway.host.logs", "gateway.pipeline", "gateway.listener.listener")
"""Modules that are loaded until the first PUBACK."""


def imported_by(*modules: str) -> set[str]:
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in ended.stdout.split()}


def test_the_daemon_imports_nothing_of_the_cloud_side_and_no_plotting() -> None:
    assert not imported_by(*DAEMON) & set(FORBIDDEN)


@pytest.mark.parametrize("library", ["serial", "aiokafka", "asyncio"])
def test_a_command_that_only_looks_starts_light(library: str) -> None:
    heavy = imported_by("gateway.buffer.status", "gateway.config.config_file")
    assert library not in heavy


@pytest.mark.parametrize("library", ["aiokafka", "serial", "paho", "h11"])
def test_the_first_reading_is_acknowledged_before_the_rest_is_loaded(library: str) -> None:
    assert library not in imported_by(*FIRST)


def test_a_gateway_without_serial_lines_does_not_load_pyserial() -> None:
    assert "serial" not in imported_by("gateway.pipeline", "gateway.listener.listener")


@pytest.mark.parametrize("library", ["h11", "prometheus_client"])
def test_a_gateway_without_a_status_page_does_not_load_what_serves_it(library: str) -> None:
    assert library not in imported_by(*DAEMON)


def test_the_status_page_loads_prometheus_when_it_is_asked_for_metrics() -> None:
    assert "prometheus_client" not in imported_by("gateway.page.server")


def test_look_ups_load_neither_spark_nor_data_frames() -> None:
    assert not imported_by("spark.cli", "spark.desk.tables") & HEAVY


def test_look_ups_are_installed_without_spark_and_data_frames() -> None:
    installed = set(packages_of("sluice[desk]"))
    assert {"duckdb", "deltalake"} <= installed
    assert not installed & {*HEAVY, "delta-spark"}


def test_the_help_of_the_cloud_side_loads_no_engine() -> None:
    assert not imported_by("spark.cli") & {"pyspark", "duckdb", "deltalake"}
