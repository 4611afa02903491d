"""Messages to systemd, at a socket like systemd's: ready, alive, stopping; none while the daemon hangs."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.buffer.state import BufferState
from gateway.daemon import service_notify
from gateway.host.systemd_notify import notify
from gateway.uplink.state import UplinkState
from tests.support.buffers import opened
from tests.support.gateways import daemon, free_port, write_config
from tests.support.waiting import patience

UNREACHABLE = "127.0.0.1:1"


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(20)
        yield channel


def told(channel: socket.socket) -> list[str]:
    return channel.recv(65_536).decode().split("\n")


def told_until(channel: socket.socket, wanted: str) -> list[list[str]]:
    heard = [told(channel)]
    while wanted not in heard[-1]:
        heard.append(told(channel))
    return heard


def test_a_gateway_that_is_idle_and_offline_is_ready_and_healthy(systemd: socket.socket, tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, UNREACHABLE, port, "t")
    environment = {**os.environ, "NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "600000"}
    with daemon(config, port, environment) as process:
        *starting, ready = told_until(systemd, "READY=1")
        assert all("READY=1" not in each for each in starting)
        assert ready[1].startswith("STATUS=Kafka is not reached")
        for _ in range(3):
            fed = told(systemd)
            assert fed[0] == "WATCHDOG=1"
        assert "rows wait" in fed[1]
        process.send_signal(signal.SIGTERM)
        told_until(systemd, "STOPPING=1")


@pytest.mark.parametrize(("rows", "words"), [(0, "0 rows wait"), (1, "1 row waits"), (1_234, "1,234 rows wait")])
def test_how_much_waits_fits_its_number(rows: int, words: str) -> None:
    told = service_notify.service_words(UplinkState(up=True), BufferState(rows=rows))
    assert told == f"Kafka is reached; {words}"


async def test_systemd_that_reads_nothing_for_a_while_holds_nobody_up_and_hears_of_it_later(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setattr(service_notify, "READY_RETRY_S", 0.01)
    filled = 0
    while notify("STATUS=filler"):
        filled += 1
    watching = asyncio.create_task(service_notify.watch(no_wait, lambda: "fine"))
    await asyncio.sleep(0.05)
    assert [told(systemd) for _ in range(filled)] == [["STATUS=filler"]] * filled
    assert await asyncio.to_thread(told, systemd) == ["READY=1", "STATUS=fine"]
    watching.cancel()


def test_a_daemon_that_is_stopped_in_its_tracks_feeds_no_watchdog(systemd: socket.socket, tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, UNREACHABLE, port, "t")
    environment = {**os.environ, "NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "600000"}
    with daemon(config, port, environment) as process:
        told_until(systemd, "WATCHDOG=1")
        process.send_signal(signal.SIGSTOP)
        systemd.settimeout(1.5)
        with pytest.raises(TimeoutError):
            told_until(systemd, "nothing that is ever said")
        systemd.settimeout(20)
        process.send_signal(signal.SIGCONT)
        told_until(systemd, "WATCHDOG=1")


async def test_a_buffer_thread_that_hangs_feeds_no_watchdog_though_the_event_loop_runs(
    systemd: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "150000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    systemd.setblocking(False)
    loop = asyncio.get_running_loop()

    async def heard() -> list[str]:
        return (await loop.sock_recv(systemd, 65_536)).decode().split("\n")

    async with opened(tmp_path / "buffer.db") as buffer:
        watching = asyncio.create_task(service_notify.watch(buffer.answers, lambda: "well"))
        while "WATCHDOG=1" not in await heard():
            pass
        disk = threading.Event()
        hanging = asyncio.ensure_future(buffer.run(lambda _: disk.wait()))
        await asyncio.sleep(0.3)
        while True:
            try:
                systemd.recv(65_536)
            except BlockingIOError:
                break
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await heard()
        disk.set()
        await hanging
        async with asyncio.timeout(patience(10)):
            while "WATCHDOG=1" not in await heard():
                pass
        watching.cancel()


async def no_wait() -> None:
    pass


async def test_a_buffer_without_a_file_answers_all_the_same(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        async with asyncio.timeout(patience(5)):
            await buffer.answers()
    async with asyncio.timeout(patience(5)):
        await buffer.answers()


async def test_without_systemd_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    async with asyncio.timeout(patience(5)):
        await service_notify.watch(no_wait, lambda: "well")


@pytest.mark.parametrize(
    ("timeout_us", "pid", "wanted_s"),
    [
        ("30000000", None, 10.0),
        ("6000000", None, 2.0),
        ("6000000", "1", 10.0),
        ("", None, 10.0),
        ("soon", None, 10.0),
    ],
)
def test_the_watchdog_is_fed_thrice_in_its_time(
    monkeypatch: pytest.MonkeyPatch, timeout_us: str, pid: str | None, wanted_s: float
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", timeout_us)
    monkeypatch.setenv("WATCHDOG_PID", pid or str(os.getpid()))
    assert service_notify.interval_s() == wanted_s


def test_a_socket_that_is_gone_is_no_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (str(tmp_path / "gone"), "@sluice-test-gone", "x" * 300):
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify("READY=1")
