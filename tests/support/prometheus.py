"""A real Prometheus, Debian's, for tests that ask it what an operator would."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from demo import child_process
from tests.support.gateways import free_port
from tests.support.waiting import wait_until

MISSING = next(
    (
        f"there is no `{name}`: install Debian's package prometheus"
        for name in ("prometheus", "promtool")
        if shutil.which(name) is None
    ),
    None,
)
"""Why no test can have one; None if it can."""
INTERVAL = "1s"
"""Time between two scrapes, which is also their time-out, and between two looks at the alerts."""


@dataclass
class Prometheus:
    """Asks one server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now. Raises HTTPError if Prometheus cannot read it."""
        found: list[dict[str, Any]] = self._asked("query", query=expression)["result"]
        return found

    def names(self) -> set[str]:
        """All names of metrics."""
        return set(self._asked("label/__name__/values"))

    def alerts(self) -> dict[str, str]:
        """The state of each alert that is pending or firing."""
        return {each["labels"]["alertname"]: each["state"] for each in self._asked("alerts")["alerts"]}

    def is_judged(self) -> bool:
        """Whether all rules have been looked at, and none failed. Raises AssertionError if one did."""
        rules = [rule for group in self._asked("rules")["groups"] for rule in group["rules"]]
        assert not any(rule["health"] == "err" for rule in rules), rules
        return bool(rules) and all(rule["health"] == "ok" for rule in rules)

    def _asked(self, path: str, **parameters: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=20) as answer:  # noqa: S310
            return json.load(answer)["data"]


def at_once(rules: str) -> str:
    """Rules whose alerts fire as soon as their cause is there."""
    return re.sub(r"( +for:) \S+\n", r"\1 0s\n", rules)


@contextmanager
def prometheus(folder: Path, jobs: dict[str, int], rules: str = "") -> Iterator[Prometheus]:
    """A Prometheus for the length of a `with`. It scrapes ports of this machine, by their jobs' names."""
    folder.mkdir()
    (folder / "rules.yml").write_text(rules or "groups: []\n")
    scraped = "".join(
        f'  - job_name: {job}\n    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]\n' for job, port in jobs.items()
    )
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {INTERVAL}, scrape_timeout: {INTERVAL}, evaluation_interval: {INTERVAL}}}\n"
        f"rule_files: [rules.yml]\nscrape_configs:\n{scraped}"
    )
    port = free_port()
    log = folder / "prometheus.log"
    process = child_process.spawn(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
        log,
    )
    server = Prometheus(f"http://127.0.0.1:{port}")

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(URLError):
            return bool(server.query("vector(1)"))
        return False

    try:
        wait_until(is_ready, words=log.read_text)
        yield server
    finally:
        child_process.stop(process)
