"""Looking names up: one that hangs is joined, then not relied on, and never keeps anybody from the next."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.host import name_lookup
from gateway.host.name_lookup import RESOLVER_OPTIONS, UNDER_WAY_MAX, NameLookup
from tests.support.waiting import patience

REAL = socket.getaddrinfo


class Dns:
    """Instead of getaddrinfo for the name `kafka.example`: dead at first."""

    def __init__(self) -> None:
        self.address: str | None = None
        """Its answer. While it is None the server is dead, and whoever asks hangs."""
        self.asked = 0
        self.go_on = threading.Event()
        """Lets those go that hang."""

    def getaddrinfo(self, host: str, port: int, *arguments: Any, **options: Any) -> Any:
        if host != "kafka.example" or options.get("flags"):
            return REAL(host, port, *arguments, **options)
        self.asked += 1
        address = self.address
        if address is None:
            self.go_on.wait(20)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return REAL(address, port, *arguments, **options)


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dns]:
    dns = Dns()
    monkeypatch.setattr(socket, "getaddrinfo", dns.getaddrinfo)
    yield dns
    dns.go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("look-up"):
            thread.join(5)


async def asked_in_vain(names: NameLookup, timeout_s: float = 0.02) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await names.addresses("kafka.example", 9092)


@pytest.fixture
def names() -> NameLookup:
    return NameLookup()


async def test_an_address_needs_no_look_up(names: NameLookup) -> None:
    ((family, _, _, address),) = await names.addresses("127.0.0.1", 9092)
    assert (family, address) == (socket.AF_INET, ("127.0.0.1", 9092))
    ((family, _, _, address),) = await names.addresses("::1", 9092)
    assert (family, address[:2]) == (socket.AF_INET6, ("::1", 9092))
    assert not names._under_way


async def test_questions_for_the_same_name_share_a_look_up(dns: Dns, names: NameLookup) -> None:
    for _ in range(20):
        await asked_in_vain(names)
    assert dns.asked == 1
    # A look-up of another name is its own.
    assert await names.addresses("localhost", 9092)


async def test_a_dead_dns_does_not_delay_the_next_attempt_once_it_is_back(
    dns: Dns, monkeypatch: pytest.MonkeyPatch, names: NameLookup
) -> None:
    monkeypatch.setattr(name_lookup, "HANGING_S", 0.1)
    await asked_in_vain(names)
    dns.address = "127.0.0.9"
    await asyncio.sleep(0.1)
    # The first look-up hangs for ever: a second one, begun beside it, has the answer.
    async with asyncio.timeout(patience(5)):
        ((_, _, _, address),) = await names.addresses("kafka.example", 9092)
    assert address == ("127.0.0.9", 9092)
    assert not dns.go_on.is_set()


async def test_look_ups_that_hang_do_not_pile_up(dns: Dns, monkeypatch: pytest.MonkeyPatch, names: NameLookup) -> None:
    monkeypatch.setattr(name_lookup, "HANGING_S", 0.0)
    for _ in range(10 * UNDER_WAY_MAX):
        await asked_in_vain(names, 0.005)
    assert dns.asked == UNDER_WAY_MAX
    monkeypatch.setattr(name_lookup, "THREADS_MAX", UNDER_WAY_MAX)
    with pytest.raises(socket.gaierror, match="too many look-ups"):
        await names.addresses("localhost", 9092)


async def test_a_thread_that_cannot_be_started_is_an_error_of_that_time_only(
    dns: Dns, monkeypatch: pytest.MonkeyPatch, names: NameLookup
) -> None:
    """This happens at a limit on tasks (TasksMax), or if memory is short."""

    def refuses(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(name_lookup, "HANGING_S", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_lookup._LookUp, "start", refuses)
        for _ in range(2 * UNDER_WAY_MAX):
            with pytest.raises(socket.gaierror, match="can't start new thread") as raised:
                await names.addresses("kafka.example", 9092)
            assert raised.value.errno == socket.EAI_MEMORY, "DNS is not to blame"
    await asked_in_vain(names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_lookup._LookUp, "start", refuses)
        # One that is under way is joined all the same.
        await asked_in_vain(names)
    dns.address = "127.0.0.9"
    async with asyncio.timeout(patience(5)):
        assert await names.addresses("kafka.example", 9092)


async def test_an_answer_that_came_too_late_serves_who_asks_next_and_nobody_after(dns: Dns, names: NameLookup) -> None:
    released = threading.Event()
    answer = dns.getaddrinfo

    def slowly(host: str, port: int, *arguments: Any, **options: Any) -> Any:
        if host == "kafka.example" and not options.get("flags"):
            released.wait(20)
        return answer(host, port, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", slowly)
        dns.address = "127.0.0.9"
        await asked_in_vain(names)
        released.set()
        while any(thread.name.startswith("look-up") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        # The name leads elsewhere by now.
        dns.address = "127.0.0.10"
        for expected in ("127.0.0.9", "127.0.0.10", "127.0.0.10"):
            ((_, _, _, address),) = await names.addresses("kafka.example", 9092)
            assert address[0] == expected
    assert dns.asked == 3


async def test_why_a_name_is_not_found_is_told(dns: Dns, names: NameLookup) -> None:
    dns.go_on.set()
    with pytest.raises(socket.gaierror) as raised:
        await names.addresses("kafka.example", 9092)
    assert raised.value.errno == socket.EAI_AGAIN
    dns.address = "127.0.0.9"
    assert await names.addresses("kafka.example", 9092), "a failure is not kept"


async def test_nobody_waits_at_the_end_for_a_look_up_that_hangs() -> None:
    program = (
        "import asyncio, socket, time\n"
        "from gateway.host.name_lookup import NameLookup\n"
        "real = socket.getaddrinfo\n"
        "socket.getaddrinfo = lambda *a, **o: real(*a, **o) if o.get('flags') else time.sleep(3600)\n"
        "asyncio.run(asyncio.wait_for(NameLookup().addresses('kafka.example', 1), 0.05))\n"
    )
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patience(25),
        check=False,
    )
    assert "TimeoutError" in ended.stderr


def test_glibc_is_told_to_ask_again_soon_and_the_users_own_wish_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "")
    monkeypatch.delenv("RES_OPTIONS")
    name_lookup.bound_look_ups()
    assert os.environ["RES_OPTIONS"] == RESOLVER_OPTIONS
    monkeypatch.setenv("RES_OPTIONS", "rotate")
    name_lookup.bound_look_ups()
    assert os.environ["RES_OPTIONS"] == "rotate"
