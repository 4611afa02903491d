"""Fixtures that several test modules share, and how Hypothesis runs in all of them."""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.sizes import SEED, WHOLE, estimate_s, size, slice_of

pytest_plugins = [
    "tests.support.fixtures_boxes",
    "tests.support.fixtures_gateways",
    "tests.support.fixtures_kafka",
    "tests.support.fixtures_spark",
    "tests.support.fixtures_time",
]

# A slow machine is no finding: how long an example takes is measured in benches. What `make test` draws is always the
# same; `make test-long` draws anew, and prints what brings back a failure.
settings.register_profile(
    "sluice",
    max_examples=size(30, 100),
    deadline=None,
    derandomize=not WHOLE,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("sluice")
# What commands print must not depend on whose terminal this is, or on whether tests run side by side.
os.environ.pop("COLUMNS", None)
# Who runs tests in the background has them ignore Ctrl-C, and the programs that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

SPARK_TIMEOUT_S = 900
"""Seconds after which a test with Spark counts as hanging. On a busy machine its JVM alone takes a minute to start."""


LOG_SETTINGS: Final = structlog.get_config()
_configure: Final = structlog.configure


def _configure_without_cache(**settings: Any) -> None:
    # A logger that is cached would write to that test's standard error for ever.
    _configure(**{**settings, "cache_logger_on_first_use": False})


mock.patch.object(structlog, "configure", _configure_without_cache).start()


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Undo the changes that a command within a test, or within a fixture of several tests, makes to the log."""
    yield
    structlog.configure(**LOG_SETTINGS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice", type=int, metavar="N", help="run this part of the long tests alone: see `make test-slice`"
    )


ERROR_LINES_MAX: Final = 20


class FailuresAtOnce:
    """Says a failure when it happens. The summary comes at the end, which may be an hour later."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = report.longreprtext.splitlines()
            # A group of exceptions is shown without such marks.
            errors = [line for line in lines if line.startswith("E ")] or lines[-ERROR_LINES_MAX:]
            self._reporter.line(f"\n{report.nodeid} failed in its {report.when}:", red=True)
            self._reporter.line("\n".join(errors[:ERROR_LINES_MAX]))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(FailuresAtOnce(reporter))


def pytest_report_header() -> str:
    return f"SLUICE_TEST_SEED={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are imported, nor later among what stays of that: it took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("spark") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
    number = config.getoption("slice")
    if number is not None:
        chosen = set(slice_of(items, number))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if not config.getoption("loadscopereorder", default=True):
        # Pytest-xdist would begin the files with most tests first. A long file that begins last keeps one core idle.
        takes_s = defaultdict[Path, float](float)
        for item in items:
            takes_s[item.path] += estimate_s(item)
        items.sort(key=lambda item: -takes_s[item.path])
