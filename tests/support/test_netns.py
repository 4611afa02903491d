"""The network that the uplink's tests are made of: each fault does what it says, and nothing stays behind."""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import dns_server, netns
from tests.support.netns import Network, network_or_skip
from tests.support.waiting import patience, wait_until

BROKER = "203.0.113.10"
PORT = 9000
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network_or_skip(tmp_path_factory.mktemp("network")) as made:
        yield made


@pytest.fixture
def echo(network: Network) -> Iterator[Callable[[], str | None]]:
    """Asks a UDP service in the brokers' namespace who is asking: the address that it saw, None without an answer."""
    numbers = itertools.count()
    with network.brokers.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as service:
        service.bind(("0.0.0.0", PORT))  # noqa: S104 - in a namespace of its own
        service.settimeout(0.3)

        def ask() -> str | None:
            question, found = b"%d" % next(numbers), b""
            with network.gateway.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asking:
                asking.settimeout(0.3)
                try:
                    asking.sendto(question, (BROKER, PORT))
                    while found != question:  # an earlier one may have come late
                        found, (address, port) = service.recvfrom(16)
                    service.sendto(b"!", (address, port))
                    asking.recv(16)
                except OSError:
                    return None
                return str(address)

        yield ask
    network.heal()


def resolve(network: Network, name: str) -> str:
    """Address that a program in the gateway's namespace gets for a name, or else the resolver's words."""
    ask = "import socket, sys; print(socket.getaddrinfo(sys.argv[1], 1, type=socket.SOCK_STREAM)[0][4][0])"
    command = [*network.gateway.prefix, sys.executable, "-I", "-S", "-c", ask, name]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
        env={"RES_OPTIONS": "timeout:1 attempts:1", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    return ended.stdout.strip() or ended.stderr.splitlines()[-1]


def test_the_gateways_address_and_interface_change(network: Network, echo: Callable[[], str | None]) -> None:
    first = wait_until(echo)
    network.change_address()
    second = wait_until(echo)
    network.change_interface()
    third = wait_until(echo)
    network.change_interface()
    assert first.startswith("192.0.2.")
    assert second.startswith("192.0.2.")
    assert first != second
    assert third.startswith("198.51.100.")
    assert wait_until(echo).startswith("192.0.2.")


def test_a_link_and_a_path_fail_and_come_back(network: Network, echo: Callable[[], str | None]) -> None:
    network.link_down()
    assert echo() is None
    network.link_up()
    assert wait_until(echo)
    network.blackhole()
    assert echo() is None
    network.heal()
    assert wait_until(echo)


def test_ipv6_goes_the_same_ways_and_can_vanish_alone(network: Network) -> None:
    def reach(address: str) -> str | None:
        try:
            network.gateway.inside(lambda: socket.create_connection((address, PORT + 3), timeout=0.5)).close()
        except OSError:
            return None
        return address

    def serve() -> socket.socket:
        return socket.create_server(("::", PORT + 3), family=socket.AF_INET6, dualstack_ipv6=True)

    four, six = BROKER, "2001:db8:3::10"
    with network.brokers.inside(serve):
        network.change_address()
        assert wait_until(lambda: reach(four))
        assert wait_until(lambda: reach(six))
        network.blackhole_ipv6()
        assert wait_until(lambda: reach(four))
        assert reach(six) is None
        network.heal()
        network.link_down()
        network.link_up()
        # A link that goes down takes IPv6 addresses with it.
        assert wait_until(lambda: reach(six))


def test_a_broker_that_moves_leaves_the_others_where_they_are(network: Network, echo: Callable[[], str | None]) -> None:
    network.add_broker_address(11)
    network.remove_broker_address(10)
    assert echo() is None
    network.add_broker_address(10)
    network.remove_broker_address(11)
    assert wait_until(echo)
    network.name("kafka.example", "203.0.113.10")
    assert resolve(network, "kafka.example") == "203.0.113.10", "the DNS server is where it was"


def test_answers_are_lost_and_questions_arrive(network: Network) -> None:
    with (
        network.brokers.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as service,
        network.gateway.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asking,
    ):
        service.settimeout(10)
        asking.settimeout(0.3)
        service.bind((BROKER, PORT))
        network.lose_answers()
        asking.sendto(b"?", (BROKER, PORT))
        _, asker = service.recvfrom(16)
        service.sendto(b"!", asker)
        with pytest.raises(TimeoutError):
            asking.recv(16)
    network.heal()


def test_thirty_packets_in_a_hundred_are_lost(network: Network, echo: Callable[[], str | None]) -> None:
    """A question and its answer both arrive with a chance of 0.49: fewer than 4 or more than 26 of 30 is no chance."""
    network.lose(30)
    answered = sum(echo() is not None for _ in range(30))
    assert 4 <= answered <= 26


def test_a_slow_path_takes_what_it_should(network: Network) -> None:
    """32 kB at 128 kbit/s take two seconds; the queue and the first burst take up to 17 kB at once."""
    with network.brokers.inside(lambda: socket.create_server((BROKER, PORT + 1))) as server:
        connecting = network.gateway.inside(lambda: socket.create_connection((BROKER, PORT + 1), timeout=10))
        with connecting as sending, server.accept()[0] as receiving:
            network.slow(128)
            begin = time.monotonic()
            sending.sendall(bytes(32_000))
            left = 32_000
            while left:
                left -= len(receiving.recv(left))
            took_s = time.monotonic() - begin
    network.heal()
    assert 1.0 < took_s < 10.0


def test_a_router_that_forgets_lets_an_old_connection_vanish(network: Network) -> None:
    """Neither an answer nor a reset: what a gateway behind a rebooted NAT router sees."""
    network.masquerade()
    try:
        with network.brokers.inside(lambda: socket.create_server((BROKER, PORT + 2))) as server:
            connecting = network.gateway.inside(lambda: socket.create_connection((BROKER, PORT + 2), timeout=10))
            accepted, (address, _) = server.accept()
            with connecting as sending, accepted as receiving:
                receiving.settimeout(10)
                sending.sendall(b"before")
                assert receiving.recv(16) == b"before"
                assert address == "203.0.113.1"
                network.forget_connections()
                for each in (sending, receiving):
                    each.settimeout(1)
                sending.sendall(b"after")
                with pytest.raises(TimeoutError):
                    receiving.recv(16)
                with pytest.raises(TimeoutError):
                    sending.recv(16)
            network.gateway.inside(lambda: socket.create_connection((BROKER, PORT + 2), timeout=10)).close()
    finally:
        network.masquerade_no_more()


def test_names_follow_change_and_fall_silent(network: Network) -> None:
    network.name("kafka.example", "203.0.113.10")
    assert resolve(network, "kafka.example") == "203.0.113.10"
    network.name("kafka.example", "203.0.113.11")
    assert resolve(network, "kafka.example") == "203.0.113.11"
    network.dns_dead()
    assert "Temporary failure in name resolution" in resolve(network, "kafka.example")
    network.dns_alive()
    network.name("kafka.example")
    assert "Name or service not known" in resolve(network, "kafka.example")


def test_nothing_stays_behind_a_killed_run(tmp_path: Path) -> None:
    """The next run removes what a killed run left."""
    killed = "import sys, pathlib, signal, os; from tests.support.netns import Network, _names, _start_time\n"
    killed += "network = Network(pathlib.Path(sys.argv[1]), f'sluice-{os.getpid()}-{_start_time(os.getpid())}-1')\n"
    killed += "network.make(); print(*_names(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    with network_or_skip(tmp_path):
        with subprocess.Popen([sys.executable, "-c", killed, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            made, _ = process.communicate(timeout=patience(30))
        assert process.returncode == -9
        # Another run that starts now may have removed it already.
        assert made.count(f"sluice-{process.pid}-") == 3
    before = _names_of(os.getpid())
    with network_or_skip(tmp_path) as network:
        assert not _names_of(process.pid)
        assert len(_names_of(os.getpid()) - before) == 3
        sleeping = network.run(network.gateway, ["sleep", "60"], tmp_path / "log")
    assert _names_of(os.getpid()) == before
    assert sleeping.poll() is not None


def test_nothing_stays_behind_a_failure(tmp_path: Path) -> None:
    def fail() -> None:
        with network_or_skip(tmp_path):
            raise ValueError("the test fails")

    before = _names_of(os.getpid())
    with pytest.raises(ValueError, match="the test fails"):
        fail()
    assert _names_of(os.getpid()) == before


def _names_of(pid: int) -> set[str]:
    """Another run may make its own meanwhile."""
    return {name for name in netns._names() if name.startswith(f"sluice-{pid}-")}


def test_without_namespaces_tests_are_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(pytest.skip.Exception, match="no `ip`: install Debian's package iproute2"),
        network_or_skip(tmp_path),
    ):
        raise AssertionError("made without ip")
    for program in ("ip", "tc", "nft"):
        (tmp_path / program).write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    with pytest.raises(pytest.skip.Exception, match="Operation not permitted"), network_or_skip(tmp_path):
        raise AssertionError("made although ip fails")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root could make them")
def test_missing_namespaces_fail_where_there_should_be_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(netns.NetworkUnavailableError), network_or_skip(tmp_path):
        raise AssertionError("made without ip")


ANSWERS = dns_server.Answers({"kafka.example": ("203.0.113.10", "203.0.113.11")})


def test_the_dns_server_answers_a_record() -> None:
    response = dns_server.answer(dns_server.question("Kafka.example", identifier=7), ANSWERS)
    assert response is not None
    assert response[:12] == bytes.fromhex("0007 8500 0001 0002 0000 0000")
    assert response[12:31] == b"\x05Kafka\x07example\x00\x00\x01\x00\x01"
    assert response[31:47] == bytes.fromhex("c00c 0001 0001 00000001 0004 cb00710a")


def test_the_dns_server_answers_an_aaaa_record() -> None:
    both = dns_server.Answers({"kafka.example": ("203.0.113.10", "2001:db8:3::10")})
    response = dns_server.answer(dns_server.question("kafka.example", kind=28), both)
    assert response is not None
    assert response[6:8] == b"\0\1"
    assert response[31:] == bytes.fromhex("c00c 001c 0001 00000001 0010 20010db8000300000000000000000010")


def test_the_dns_server_has_no_other_types_and_no_other_names() -> None:
    aaaa = dns_server.answer(dns_server.question("kafka.example", kind=28), ANSWERS)
    other = dns_server.answer(dns_server.question("other.example"), ANSWERS)
    assert aaaa is not None
    assert other is not None
    assert (aaaa[3] & 15, aaaa[6:8]) == (0, b"\0\0")
    assert (other[3] & 15, other[6:8]) == (3, b"\0\0")


@given(st.binary(max_size=64) | st.binary(max_size=50).map(lambda rest: dns_server.question("a.b")[:12] + rest))
def test_the_dns_server_survives_any_packet(query: bytes) -> None:
    try:
        response = dns_server.answer(query, ANSWERS)
    except dns_server.QueryError:
        return
    assert response is not None
    assert response[:2] == query[:2]
