"""The page of the ingest job for monitoring: what it answers, and how many it answers at once."""

import json
import socket
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spark.cli import main
from spark.service import monitor_page as module
from spark.service.monitor_page import CONNECTIONS_MAX, monitor_page
from tests.support.waiting import wait_until


def asked(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str, bytes]:
    connection = HTTPConnection(host, port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read()
    finally:
        connection.close()


def metrics() -> bytes:
    return b"sluice_x 1.0\n"


def well() -> tuple[bool, dict[str, Any]]:
    return True, {"status": "ok"}


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_the_page_answers_prometheus_and_whoever_asks_about_health() -> None:
    healths = [(False, {"status": "stuck"}), (True, {"status": "ok"})]
    with monitor_page("127.0.0.1", 0, metrics, healths.pop) as port:
        assert asked(port, "/metrics?x=1") == (200, "text/plain; version=1.0.0; charset=utf-8", b"sluice_x 1.0\n")
        status, kind, body = asked(port, "/health")
        assert (status, kind, json.loads(body)) == (200, "application/json", {"status": "ok"})
        status, _, body = asked(port, "/health")
        assert (status, json.loads(body)) == (503, {"status": "stuck"})
        assert asked(port, "/")[0] == 404
    with pytest.raises(ConnectionRefusedError):
        asked(port, "/metrics")


def test_a_figure_that_fails_costs_one_answer() -> None:
    def fails() -> bytes:
        raise ZeroDivisionError

    with monitor_page("127.0.0.1", 0, fails, well) as port:
        with pytest.raises(ConnectionError):
            asked(port, "/metrics")
        assert asked(port, "/health")[0] == 200


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(OSError, match="in use"),
        monitor_page("127.0.0.1", other.getsockname()[1], metrics, well),
    ):
        pass


def test_a_port_that_is_taken_is_told_before_spark_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ["--bootstrap", f"127.0.0.1:{port}", "--warehouse", str(tmp_path), "--monitor-port", str(port)]
        shown = CliRunner().invoke(main, ["ingest", *options])
    assert shown.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be had (Address already in use)" in shown.output


def test_who_says_nothing_takes_no_place_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "CONNECTION_S", 60.0)
    with monitor_page("127.0.0.1", 0, metrics, well) as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS_MAX)]
        wait_until(refused(port))
        monkeypatch.setattr(module, "CONNECTION_S", 0.0)
        for each in silent:
            wait_until(partial(is_closed, each))
            each.close()
        monkeypatch.setattr(module, "CONNECTION_S", 60.0)
        wait_until(lambda: not refused(port)())
        assert asked(port, "/health")[0] == 200


def refused(port: int) -> Callable[[], bool]:
    """Whether the page closes a connection instead of answering."""

    def is_refused() -> bool:
        try:
            asked(port, "/health")
        except ConnectionError:
            return True
        return False

    return is_refused
