"""`sluice check` on the status page: its password, and whether it is served."""

import socket
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.commands.check.page import check_page
from gateway.page.password import PagePasswordError
from gateway.settings import StatusPageSettings
from tests.support.gateways import free_port
from tests.support.status_page_site import HASHED, site


def settings_in(folder: Path) -> StatusPageSettings:
    password = folder / "status-page"
    password.write_text(HASHED)
    password.chmod(0o400)
    return StatusPageSettings("127.0.0.1", free_port(), password)


def told(page: StatusPageSettings, folder: Path) -> list[tuple[str, str]]:
    return [(found.result, found.words) for found in check_page(page, folder / "buffer.db")]


def test_a_page_that_could_be_served(tmp_path: Path) -> None:
    page = settings_in(tmp_path)
    assert told(page, tmp_path) == [
        ("pass", "a password is set"),
        ("pass", f'127.0.0.1:{page.port} is free; only this box can connect there (status_page.host = "0.0.0.0": all)'),
    ]


def test_without_a_password_the_gateway_works_and_nobody_can_log_in(tmp_path: Path) -> None:
    page = replace(settings_in(tmp_path), password_file=tmp_path / "none")
    (result, words), _ = told(page, tmp_path)
    assert result == "warning"
    assert "nobody can log in" in words
    assert "run sluice setup" in words


def test_a_file_of_roots_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> str:
        raise PagePasswordError("cannot be read") from PermissionError()

    monkeypatch.setattr("gateway.commands.check.page.read_password_line", refused)
    (result, words), _ = told(settings_in(tmp_path), tmp_path)
    assert result == "warning"
    assert "run this with sudo" in words


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    page = settings_in(tmp_path)
    with socket.create_server(("127.0.0.1", page.port)):
        _, (result, words) = told(page, tmp_path)
    assert result == "fail"
    assert words.startswith(f"127.0.0.1:{page.port} is taken by ")
    assert "stop that program, or write another port. Readings are taken in all the same" in words


def test_a_page_that_is_served_and_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with site(tmp_path) as gateway:
        page = StatusPageSettings("127.0.0.1", gateway.port, tmp_path / "status-page")
        _, (result, words) = told(page, tmp_path)
        assert (result, words) == ("pass", f"served: http://127.0.0.1:{gateway.port}")
        # A name that nothing announces leads nobody here.
        monkeypatch.setattr("gateway.commands.handout._is_announced", lambda: False)
        monkeypatch.setattr("gateway.commands.handout.ipv4_addresses", lambda: iter(["192.0.2.1"]))
        _, (_, words) = told(replace(page, host="0.0.0.0"), tmp_path)  # noqa: S104 - as setup writes it
        assert words == f"served: http://192.0.2.1:{gateway.port}"
        elsewhere = replace(page, port=free_port())
        _, (result, words) = told(elsewhere, tmp_path)
        assert result == "fail"
        assert "does not serve its status page" in words


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", b"220 mail\r\n", b""])
def test_another_program_that_answers_is_not_taken_for_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr("gateway.commands.check.page.is_running", lambda _: True)
    page = settings_in(tmp_path)
    with socket.create_server(("127.0.0.1", page.port)) as server:

        def serve() -> None:
            channel, _ = server.accept()
            with channel:
                channel.recv(1_000)
                channel.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        _, (result, words) = told(page, tmp_path)
        thread.join(10)
    assert result == "fail"
    assert "does not serve its status page" in words
