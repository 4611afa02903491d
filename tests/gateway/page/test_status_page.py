"""The status page's server, as clients meet it: log-ins, who is let in, bounds, and bytes that are no HTTP."""

import asyncio
import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway import pipeline
from gateway.config.config_file import load
from gateway.page import answers, server
from gateway.page.access import FAILURES_MAX
from gateway.page.answers import Answers
from gateway.page.password import make_password_line, read_password_line, verify_password
from gateway.page.server import PER_ADDRESS_MAX, StatusPage
from gateway.settings import StatusPageSettings
from tests.support.gateways import free_port
from tests.support.status_page_site import HASHED, PASSWORD, UNREACHABLE, Site, page_config
from tests.support.waiting import patience, until, wait_until

if TYPE_CHECKING:
    from gateway.page.view import StatusView

CONNECTIONS_MAX = 16


class StubView:
    """The view that the server asks, without a gateway behind it."""

    def __init__(self) -> None:
        self.gateway = "barn-1"
        self.trouble = ""
        self.asked: list[tuple[str, int]] = []

    async def follow(self) -> None:
        await asyncio.Event().wait()

    async def refresh(self) -> None:
        await asyncio.Event().wait()

    async def state(self, query: str, limit: int) -> dict[str, object]:
        self.asked.append((query, limit))
        if query == "break":
            raise ZeroDivisionError
        return {"words": "x" * 2_000}

    def curves(self, query: str, limit: int) -> dict[str, object]:
        return {"query": query, "limit": limit}

    async def health(self) -> dict[str, object]:
        if self.trouble:
            return {"status": "failing", "reason": self.trouble}
        return {"status": "ok", "warnings": ["Kafka is not reached"]}

    async def metrics(self) -> bytes:
        return b"sluice_readings_total 1.0\n"


class Served(Site):
    """The server in this process, on a loop of its own."""

    view: StubView
    page: StatusPage
    password_file: Path
    loop: asyncio.AbstractEventLoop


@contextmanager
def serving(folder: Path, *, per_s: float = 1e6, burst: float = 100.0, **more: Any) -> Iterator[Served]:
    """Tests ask as often as they like: the rates are so high that nobody waits."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("PER_S", "STRANGERS_PER_S"):
            patched.setattr(server, name, per_s)
        for name in ("BURST", "STRANGERS_BURST"):
            patched.setattr(server, name, burst)
        with _serving(folder, **more) as found:
            yield found


@contextmanager
def _serving(folder: Path, **more: Any) -> Iterator[Served]:
    password_file = folder / "status-page"
    password_file.write_text(HASHED + "\n")
    password_file.chmod(0o400)
    port = free_port()
    wanted = StatusPageSettings("127.0.0.1", port, password_file, connections_max=CONNECTIONS_MAX, **more)
    view = StubView()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None], StatusPage]] = Future()

    async def serve() -> None:
        page = StatusPage(wanted, cast("StatusView", view))
        task = asyncio.create_task(page.run())
        await page.listening.wait()
        started.set_result((asyncio.get_running_loop(), task, page))
        with suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, task, page = started.result(10)
    served = Served(port, 0, folder, cast("Any", None))
    served.view, served.page, served.password_file, served.loop = view, page, password_file, loop
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("page")) as found:
        yield found


# -- log-ins ----------------------------------------------------------------------------------------


def test_nothing_is_told_before_the_log_in(served: Served) -> None:
    answer, body = served.ask("/")
    assert answer.status == 200
    assert b'type="password"' in body
    assert b"<b>barn-1</b>" in body
    assert b"sudo sluice setup" in body
    for path in ("/api/state", "/api/curves", "/api/state?q=1&limit=5"):
        answer, body = served.ask(path)
        assert (answer.status, json.loads(body)) == (401, {"error": "log in first"})
    assert not served.view.asked


def test_a_log_in_begins_a_session_that_a_log_out_ends(served: Served) -> None:
    answer = served.log_in()
    assert (answer.status, answer.getheader("Location")) == (303, "/")
    cookie = answer.getheader("Set-Cookie", "")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert PASSWORD not in str(answer.getheaders())
    assert served.ask("/api/state")[0].status == 200
    assert b"app.js" in served.ask("/")[1]
    before = served.cookie
    assert served.ask("/logout", "POST")[0].status == 303
    served.cookie = before
    assert served.ask("/api/state")[0].status == 401


def test_a_wrong_password_lets_nobody_in_and_has_its_line(served: Served) -> None:
    with capture_logs() as lines:
        answer = served.log_in("swordfish")
    assert answer.status == 401
    assert answer.getheader("Set-Cookie") is None
    refused = [line for line in lines if "refused" in line["event"]]
    assert [(line["peer"], line["why"]) for line in refused] == [("127.0.0.1", "the password is wrong")]
    assert "swordfish" not in str(lines)
    for cookie in ("sluice=", "sluice=AAAAAAAAAAAAAAAAAAAAAA", "other=1"):
        assert served.ask("/api/state", Cookie=cookie)[0].status == 401


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passwords that were hashed, which takes time."""
    verify, found = verify_password, list[str]()

    def noted(password: str, line: str) -> bool:
        found.append(password)
        return verify(password, line)

    monkeypatch.setattr("gateway.page.answers.verify_password", noted)
    return found


def test_many_wrong_ones_have_to_wait_and_the_right_one_with_them(served: Served, hashed: list[str]) -> None:
    with capture_logs() as lines:
        assert {served.log_in("wrong").status for _ in range(FAILURES_MAX)} == {401}
        answer = served.log_in()
    assert hashed == ["wrong"] * FAILURES_MAX
    assert answer.status == 429
    assert 0 < int(answer.getheader("Retry-After", "")) <= 60
    assert len([line for line in lines if "refused" in line["event"]]) == FAILURES_MAX + 1


def test_without_a_password_file_nobody_is_let_in_and_is_told_what_to_do(served: Served) -> None:
    assert served.log_in().status == 303
    served.password_file.unlink()
    assert b"sluice setup" in served.ask("/", Cookie="")[1]
    assert served.ask("/api/state")[0].status == 401, "who was in is out"
    answer = served.log_in()
    assert answer.status == 503
    served.password_file.write_text(make_password_line("another") + "\n")
    served.password_file.chmod(0o400)
    assert served.log_in().status == 401
    assert served.log_in("another").status == 303


def test_another_password_ends_all_sessions_before_long(served: Served) -> None:
    served.log_in()
    served.password_file.unlink()
    served.password_file.write_text(make_password_line("another") + "\n")
    served.password_file.chmod(0o400)
    asyncio.run_coroutine_threadsafe(served.page._answers.tidy(), served.loop).result(10)
    assert served.ask("/api/state")[0].status == 401


def test_a_disk_that_hangs_takes_one_thread_and_lets_in_whom_it_did_before(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "READ_S", 0.1)
    hangs, read, begun = threading.Event(), read_password_line, []

    def hung(path: Path) -> str:
        begun.append(path)
        assert hangs.wait(20)
        return read(path)

    monkeypatch.setattr("gateway.page.answers.read_password_line", hung)
    try:
        assert [served.ask("/")[0].status for _ in range(4)] == [200] * 4
        assert served.log_in().status == 303
        assert served.ask("/api/state")[0].status == 200
        assert len(begun) == 1
        served.password_file.unlink()
    finally:
        hangs.set()
    assert wait_until(
        lambda: served.ask("/api/state")[0].status == 401, 5, words="the file is read once its disk answers"
    )


def test_a_form_of_another_sites_page_is_refused(served: Served) -> None:
    form = "password=" + PASSWORD.replace(" ", "+")
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert served.ask("/login", "POST", form, **headers)[0].status == 403
    ours = {"Origin": served.url, "Sec-Fetch-Site": "same-origin"}
    assert served.ask("/login", "POST", form, **ours)[0].status == 303


def test_forms_that_are_none(served: Served) -> None:
    for body in ("", "password", "password=%ff%00", "&" * 4_000, "password=" + "x" * 4_000, "a=1&b=2&c=3&" * 200):
        assert served.ask("/login", "POST", body)[0].status in {401, 429}


# -- what it says -----------------------------------------------------------------------------------


def test_every_answer_forbids_what_no_page_of_ours_needs(served: Served) -> None:
    served.log_in()
    for path in ("/", "/app.js", "/style.css", "/health", "/metrics", "/api/state", "/nothing"):
        answer, _ = served.ask(path)
        policy = answer.getheader("Content-Security-Policy", "")
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Referrer-Policy") == "same-origin"
        assert answer.getheader("Access-Control-Allow-Origin") is None
        assert answer.getheader("Server") is None


def test_files_are_packed_and_asked_for_once(served: Served) -> None:
    served.log_in()
    for path in ("/", "/app.js", "/style.css"):
        answer, body = served.ask(path, Accept_Encoding="br, gzip")
        assert answer.getheader("Content-Encoding") == "gzip"
        assert gzip.decompress(body) == served.ask(path)[1]
        etag = answer.getheader("ETag", "")
        again, nothing = served.ask(path, If_None_Match=etag)
        assert (again.status, nothing) == (304, b"")
        assert served.ask(path, If_None_Match='"other"')[0].status == 200
        head, nothing = served.ask(path, "HEAD")
        assert (head.status, nothing) == (200, b"")
    answer, body = served.ask("/api/state", Accept_Encoding="gzip")
    assert json.loads(gzip.decompress(body))["words"] == "x" * 2_000
    assert "Content-Encoding" not in served.ask("/api/state", Accept_Encoding="gzip;q=0")[0].headers


def test_what_is_searched_for_is_bounded(served: Served) -> None:
    served.log_in()
    served.ask("/api/state?q=barn%201&limit=10")
    for limit in ("1000000", "-5", "x", "99999999999999999999", "%C2%B2"):
        served.ask(f"/api/state?limit={limit}")
    assert served.view.asked[0] == ("barn 1", 10)
    assert all(limit <= 200 for _, limit in served.view.asked)


def test_health_is_told_to_everybody_on_the_lan(served: Served) -> None:
    answer, body = served.ask("/health")
    assert (answer.status, json.loads(body)) == (200, {"status": "ok", "warnings": ["Kafka is not reached"]})
    served.view.trouble = "the buffer cannot be written"
    answer, body = served.ask("/health")
    assert answer.status == 503
    assert json.loads(body) == {"status": "failing", "reason": "the buffer cannot be written"}


def test_metrics_are_for_this_box_and_for_who_knows_the_password(
    served: Served, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.ask("/metrics")[1] == b"sluice_readings_total 1.0\n"
    come_from(monkeypatch, "127.0.0.1", "192.168.1.9")
    answer, _ = served.ask("/metrics")
    assert answer.status == 401
    assert answer.getheader("WWW-Authenticate", "").startswith("Basic ")

    def basic(password: str) -> str:
        return "Basic " + base64.b64encode(f"prometheus:{password}".encode()).decode()

    assert served.ask("/metrics", Authorization=basic(PASSWORD))[0].status == 200
    for _ in range(5):
        assert served.ask("/metrics", Authorization=basic(PASSWORD))[0].status == 200
    assert hashed == [PASSWORD], "it is hashed once"
    for wrong in (basic("wrong"), "Basic !!!", "Basic " + base64.b64encode(b"nocolon").decode(), "Bearer x", "Basic"):
        assert served.ask("/metrics", Authorization=wrong)[0].status == 401
    assert served.ask("/api/state", Authorization=basic(PASSWORD))[0].status == 401, "that is for browsers"


def test_a_mistake_of_ours_is_an_answer_and_no_end(served: Served) -> None:
    served.log_in()
    with capture_logs() as lines:
        answer, body = served.ask("/api/state?q=break")
    assert answer.status == 500
    assert b"journalctl" in body
    assert any(line["log_level"] == "error" for line in lines)
    assert served.ask("/health")[0].status == 200


# -- who may ask ------------------------------------------------------------------------------------


def test_a_name_that_is_not_ours_is_refused(served: Served) -> None:
    for host in ("evil.example", f"evil.example:{served.port}", "8.8.8.8", ""):
        answer, body = served.ask("/health", Host=host)
        assert answer.status in {400, 421}
        assert b"status" not in body
    assert served.ask("/health", Host=f"{socket.gethostname()}.local:{served.port}")[0].status == 200
    answered = spoken(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert answered.startswith((b"HTTP/1.1 400", b"HTTP/1.1 421"))


def test_requests_from_another_network_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    come_from(monkeypatch, "127.0.0.1", "203.0.114.5")
    for path in ("/", "/health", "/app.js"):
        answer, body = served.ask(path)
        assert (answer.status, answer.getheader("Connection")) == (403, "close")
        assert b"own network" in body
    assert served.page.turned_away == 3


def test_paths_and_methods_that_there_are_none_of(served: Served) -> None:
    for path in ("/etc/passwd", "/../gateway.toml", "/page/index.html", "/login.html", "//", "/%2e%2e/x", "*"):
        assert served.ask(path)[0].status == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        answer, _ = served.ask("/", method)
        assert (answer.status, answer.getheader("Allow")) == (405, "GET, HEAD")
    assert served.ask("/login")[0].status == 405


# -- bounds -----------------------------------------------------------------------------------------


def spoken(served: Served, data: bytes, *, seconds: float = 5) -> bytes:
    """Bytes that come back for bare bytes, until the connection is closed."""
    answered = b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=seconds) as channel, suppress(OSError):
        channel.sendall(data)
        channel.shutdown(socket.SHUT_WR)
        while chunk := channel.recv(65_536):
            answered += chunk
    return answered


def test_requests_that_are_too_large_end(served: Served) -> None:
    assert spoken(served, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000).startswith(b"HTTP/1.1 431")
    assert served.ask("/login", "POST", "x" * 5_000)[0].status == 413
    chunked = b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert spoken(served, chunked + b"1000\r\n" + b"x" * 4096 + b"\r\n1\r\nx\r\n").startswith(b"HTTP/1.1 413")
    expecting = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    assert spoken(served, expecting).startswith(b"HTTP/1.1 417")


def test_several_requests_on_one_connection(served: Served) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert spoken(served, one * 3).count(b'"status":"ok"') == 3


def test_a_connection_says_when_it_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUESTS_MAX", 2)
    answered = spoken(served, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
    first, _, second = answered.partition(b'"]}')
    assert b"connection: close" not in first
    assert b"connection: close" in second
    assert answered.count(b'"status":"ok"') == 2


def test_a_slow_one_is_ended_and_others_are_served_meanwhile(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 1.0)
    with ExitStack() as held:
        slow = [
            held.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=5))
            for _ in range(PER_ADDRESS_MAX - 1)
        ]
        for channel in slow:
            channel.sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert served.ask("/health")[0].status == 200
        for channel in slow:
            assert channel.recv(100).startswith(b"HTTP/1.1 408")


def test_one_address_does_not_get_all_connections(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as held:
        for _ in range(CONNECTIONS_MAX):
            held.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=5))
        until_there(served, PER_ADDRESS_MAX)
        wait_until(
            lambda: served.page.turned_away == CONNECTIONS_MAX - PER_ADDRESS_MAX,
            words="the others are turned away",
        )
        come_from(monkeypatch, "127.0.0.1", "192.168.1.9")
        assert served.ask("/health")[0].status == 200
    until_there(served, 0)


def come_from(monkeypatch: pytest.MonkeyPatch, begin: str, other: str) -> None:
    """Let clients of an address with this beginning come from another address, as far as the server knows."""
    accept = socket.socket.accept

    def accepting(listening: socket.socket) -> tuple[socket.socket, Any]:
        accepted, (host, port, *_) = accept(listening)
        return accepted, (host.replace(begin, other), port)

    monkeypatch.setattr(socket.socket, "accept", accepting)


@contextmanager
def of_the_lan(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], socket.socket]]:
    """Connects from an address of the LAN, 192.168.1.N, as far as the server knows."""
    come_from(monkeypatch, "127.0.1.", "192.168.1.")
    with ExitStack() as held:

        def connect(number: int) -> socket.socket:
            address = ("127.0.0.1", served.port)
            made = socket.create_connection(address, timeout=5, source_address=(f"127.0.1.{number}", 0))
            return held.enter_context(made)

        yield connect


def is_served(channel: socket.socket) -> bool:
    """Whether `/health` is answered on an open connection."""
    answered = b""
    with suppress(OSError):
        channel.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not answered.endswith(b"}") and (chunk := channel.recv(65_536)):
            answered += chunk
    return b'"status":"ok"' in answered


def test_silent_connections_of_the_lan_shut_out_nobody(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this box, nor who has logged in, nor anybody else of the LAN."""
    with capture_logs() as lines, of_the_lan(served, monkeypatch) as connect:
        log_in = connect(50)
        body = f"password={PASSWORD}"
        log_in.sendall(f"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert log_in.recv(4_096).startswith(b"HTTP/1.1 303")
        let_in = connect(50)
        assert is_served(let_in)
        for number in range(4):
            for _ in range(CONNECTIONS_MAX):
                connect(100 + number)
        assert served.ask("/health")[0].status == 200
        assert served.ask("/metrics")[0].status == 200
        assert is_served(let_in), "its place is its own"
        assert is_served(connect(50))
        assert is_served(connect(60)), "the one that was silent for longest makes room"
    (line,) = [line for line in lines if "make room" in line["event"]]
    assert line["peer"].startswith("192.168.1.")
    assert line["of_this_address"] > 0


def test_whoever_was_silent_for_longest_goes_first(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with of_the_lan(served, monkeypatch) as connect:
        asks, silent = connect(1), connect(2)
        for number in range(3 * CONNECTIONS_MAX):
            assert is_served(asks), "it has asked since others came"
            connect(10 + number)
        assert silent.recv(1) == b""


def test_beyond_an_address_bound_its_oldest_goes(served: Served) -> None:
    with ExitStack() as held:
        channels = [
            held.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=5))
            for _ in range(PER_ADDRESS_MAX + 1)
        ]
        assert channels[0].recv(1) == b""
        assert is_served(channels[1])
        assert served.ask("/health")[0].status == 200, "on a connection of its own"


# -- rates ------------------------------------------------------------------------------------------


def test_an_address_that_asks_without_end_is_answered_at_its_rate_and_others_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests on one connection and new connections share one bound. Who asks often gets no more by the other way."""
    burst, per_s = 20, 10.0
    with serving(tmp_path, per_s=per_s, burst=burst) as served, of_the_lan(served, monkeypatch) as connect:
        began_s = time.monotonic()
        pipelined = connect(1)
        pipelined.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2 * burst)
        assert served.ask("/health")[0].status == 200, "this box has a rate of its own"
        answered = b""
        while answered.count(b"HTTP/1.1 200") < 2 * burst:
            answered += pipelined.recv(65_536)
        least_s = (1 + 2 * burst - burst) / per_s
        assert time.monotonic() - began_s >= least_s
        for _ in range(5):
            assert is_served(connect(1))
        assert time.monotonic() - began_s >= least_s + 10 / per_s


def test_strangers_together_have_a_rate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    burst, per_s = 20, 10.0
    with serving(tmp_path, per_s=per_s, burst=burst) as served, of_the_lan(served, monkeypatch) as connect:
        began_s = time.monotonic()
        for number in range(burst):
            assert is_served(connect(number + 1))
        assert time.monotonic() - began_s >= burst / per_s
        assert served.ask("/health")[0].status == 200


def test_a_waiting_connection_that_makes_room_leaves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, per_s=0.001, burst=1.0) as served, of_the_lan(served, monkeypatch) as connect:
        waiting = [connect(1) for _ in range(3 * PER_ADDRESS_MAX)]
        for closed in waiting[1 : 2 * PER_ADDRESS_MAX]:
            with suppress(ConnectionResetError):
                assert closed.recv(1) == b""
        until_there(served, PER_ADDRESS_MAX)


def until_there(served: Served, count: int) -> None:
    wait_until(lambda: len(served.page._connections) == count, words=lambda: str(len(served.page._connections)))


def test_a_port_that_is_taken_is_told_and_ends_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = told_of(StatusPageSettings("127.0.0.1", taken.getsockname()[1], tmp_path / "none"))
    assert "set another status_page.port" in told
    assert "readings are taken all the same" in told


def test_an_address_of_another_machine_is_told_and_ends_nothing(tmp_path: Path) -> None:
    told = told_of(StatusPageSettings("192.0.2.1", free_port(), tmp_path / "none"))
    assert "this machine has no such address; set status_page.host" in told
    assert "readings are taken all the same" in told


def told_of(wanted: StatusPageSettings) -> str:
    """Why a page with these settings cannot be served, as its first warning says."""

    async def run() -> str:
        page = StatusPage(wanted, cast("StatusView", StubView()))
        serving = asyncio.create_task(page.run())
        try:
            return await until(
                lambda: next((str(line["event"]) for line in lines if "cannot be served" in line["event"]), None)
            )
        finally:
            serving.cancel()

    with capture_logs() as lines:
        return asyncio.run(run())


@pytest.mark.parametrize(("of", "what"), [(StatusPage, "__init__"), (StatusPage, "run"), (Answers, "tidy")])
async def test_a_page_that_fails_ends_no_gateway_and_is_begun_anew(
    of: type, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RES_OPTIONS", "")
    monkeypatch.setattr(pipeline, "PAGE_RETRY_S", 0.05)
    whole, failures = getattr(of, what), iter(range(2))

    def fails_twice(*given: Any) -> Any:
        if next(failures, None) is not None:
            raise ZeroDivisionError
        return whole(*given)

    monkeypatch.setattr(of, what, fails_twice)
    mqtt_port, port = free_port(), free_port()
    config = page_config(tmp_path / "site", UNREACHABLE, mqtt_port, port)
    with capture_logs() as lines:
        gateway = asyncio.create_task(pipeline.run(load(config)))
        try:
            async with asyncio.timeout(patience(20)):
                while not (is_served := await reaches(port)) and not gateway.done():
                    await asyncio.sleep(0.05)
            assert is_served, gateway
            assert await reaches(mqtt_port)
        finally:
            gateway.cancel()
            with suppress(asyncio.CancelledError):
                await gateway
    told = [line["event"] for line in lines if "the status page has failed" in line["event"]]
    assert len(told) == 2
    assert "readings are taken and forwarded all the same" in told[0]


async def reaches(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


PARTS = st.sampled_from(
    [
        *(
            b"GET / HTTP/1.1\r\n",
            b"POST /login HTTP/1.1\r\n",
            b"GET /health HTTP/1.1\r\n",
            b"HEAD /app.js HTTP/1.0\r\n",
        ),
        *(b"Host: localhost\r\n", b"Host: evil\r\n", b"Content-Length: 5\r\n", b"Content-Length: 99999999999\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Cookie: sluice=\xff\r\n"),
        *(
            b"Authorization: Basic \xff\r\n",
            b"\r\n",
            b"\n",
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
            b"password=x",
            b"\x16\x03\x01",
        ),
        *(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /api/state?q=%ff&limit=\xc2 HTTP/1.1\r\n",
            b"Accept-Encoding: gzip\r\n",
        ),
    ]
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PARTS | st.binary(max_size=40), max_size=12).map(b"".join))
def test_whatever_is_sent_the_next_one_is_served(lasting: Served, data: bytes) -> None:
    answered = spoken(lasting, data)
    assert not answered or answered.startswith(b"HTTP/1.")
    assert b"HTTP/1.1 500" not in answered
    answer, body = lasting.ask("/health")
    assert (answer.status, json.loads(body)["status"]) == (200, "ok")
    until_there(lasting, 0)
