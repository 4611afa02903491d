"""Changes of the network as the kernel tells them, in a network namespace of the test's own."""

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gateway.host.network_watch import (
    COALESCE_S,
    HOSTS_MAX,
    AddressChange,
    AddressWatch,
    is_own_address,
    source_address,
    watch,
)
from tests.support.waiting import patience

ROOT = Path(__file__).parents[3]
PEER = ("192.0.2.1", 9092)
PEER_6 = ("2001:db8::1", 9092)


def namespace_refusal() -> str | None:
    """Why no network namespace can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs iproute2 and util-linux"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace here: {tried.stderr.strip()}" if tried.returncode else None


REFUSAL = namespace_refusal()
in_namespace = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))


def run_in_namespace(scene: Callable[[], None]) -> None:
    """Run a function of this module in a process whose network is empty but for a loopback that is down."""
    code = f"from {__name__} import {scene.__name__} as scene; scene()"
    command = ["unshare", "--net", sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(30), check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def ip(*arguments: str, batch: str | None = None) -> None:
    subprocess.run(["ip", *arguments], input=batch, text=True, check=True)


def make_link() -> None:
    """A cable with both ends here: `up0` is this box's."""
    ip("link", "add", "up0", "type", "veth", "peer", "name", "far0")
    ip("link", "set", "far0", "up")
    ip("link", "set", "up0", "up")


class Changes:
    """Counts the changes that `watch` reports, and waits for them."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._next.set()

    async def settled(self) -> int:
        """Number of changes, once none has come for a while."""
        while True:
            self._next.clear()
            try:
                await asyncio.wait_for(self._next.wait(), 2 * COALESCE_S)
            except TimeoutError:
                return self.count


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def scene_of_links_addresses_and_routes() -> None:
    async def scene() -> None:
        changes = Changes()
        task = asyncio.create_task(watch(changes))
        assert await changes.settled() == 0
        ip("link", "add", "up0", "type", "veth", "peer", "name", "far0")
        assert await changes.settled() > 0
        for end in ("up0", "far0"):
            # No link-local address comes by itself, later.
            ip("link", "set", end, "addrgenmode", "none")
        await changes.settled()
        address, address_6 = ("192.0.2.7/24", "dev", "up0"), ("2001:db8::7/64", "dev", "up0", "nodad", "noprefixroute")
        await told_of(changes, "addr", "add", *address)
        await told_of(changes, "-6", "addr", "add", *address_6)
        # A renewed lease is told of the address alone; everything else comes with a route.
        lease = ("valid_lft", "1000", "preferred_lft", "900")
        await told_of(changes, "addr", "change", *address, *lease)
        await told_of(changes, "-6", "addr", "change", *address_6, *lease)
        ip("link", "set", "far0", "up")
        await told_of(changes, "link", "set", "up0", "up")
        # Changes that follow from a carrier are reported up to a second later.
        await asyncio.sleep(1.2)
        await changes.settled()
        await told_of(changes, "route", "add", "198.51.100.0/24", "dev", "up0")
        await told_of(changes, "-6", "route", "add", "2001:db8:5::/64", "dev", "up0")
        await told_of(changes, "addr", "del", "192.0.2.7/24", "dev", "up0")
        await told_of(changes, "link", "set", "up0", "down")
        await stop(task)

    asyncio.run(scene())


async def told_of(changes: Changes, *step: str) -> None:
    before = changes.count
    ip(*step)
    assert await changes.settled() > before, step


def scene_of_a_burst() -> None:
    async def scene() -> None:
        changes = Changes()
        task = asyncio.create_task(watch(changes))
        assert await changes.settled() == 0
        # `ip` runs while the loop stands still, so that all of it waits in the socket at once.
        ip("-batch", "-", batch="".join(f"addr add 192.0.2.{host}/24 dev lo\n" for host in range(10, 60)))
        assert await changes.settled() == 1
        # While it runs too: messages that come soon after the first one.
        ip("addr", "add", "192.0.2.60/24", "dev", "lo")
        await asyncio.sleep(COALESCE_S / 4)
        ip("addr", "add", "192.0.2.61/24", "dev", "lo")
        assert await changes.settled() == 2
        await stop(task)

    asyncio.run(scene())


def scene_of_a_flood() -> None:
    async def scene() -> None:
        changes = Changes()
        task = asyncio.create_task(watch(changes))
        assert await changes.settled() == 0
        addresses = [f"10.{number // 250}.{number % 250}.1/32" for number in range(2_000)]
        ip("-batch", "-", batch="".join(f"addr add {address} dev lo\n" for address in addresses))
        before = await changes.settled()
        assert before > 0
        # The kernel did throw messages away: the one before last column of this process's sockets.
        drops = [int(line.split()[-2]) for line in Path("/proc/self/net/netlink").read_text().splitlines()[1:]]
        assert sum(drops) > 0
        ip("link", "set", "lo", "up")
        assert await changes.settled() > before
        await stop(task)

    asyncio.run(scene())


def scene_of_source_addresses() -> None:
    assert source_address(PEER) is None
    assert source_address(PEER_6) is None
    make_link()
    ip("addr", "add", "192.0.2.7/24", "dev", "up0")
    ip("-6", "addr", "add", "2001:db8::7/64", "dev", "up0", "nodad")
    assert source_address(PEER) == "192.0.2.7"
    assert source_address(PEER_6) == "2001:db8::7"
    assert source_address(("203.0.113.1", 9092)) is None

    # A DHCP renewal with another address, a link that goes and comes with it, and with a third.
    seen = AddressWatch()
    assert seen.changes([PEER]) == []
    ip("addr", "del", "192.0.2.7/24", "dev", "up0")
    assert seen.changes([PEER]) == []
    ip("addr", "add", "192.0.2.8/24", "dev", "up0")
    assert seen.changes([PEER]) == [AddressChange("192.0.2.1", "192.0.2.7", "192.0.2.8")]
    ip("link", "set", "up0", "down")
    assert source_address(PEER) is None
    assert seen.changes([PEER]) == []
    ip("link", "set", "up0", "up")
    assert seen.changes([PEER]) == []
    ip("addr", "flush", "dev", "up0")
    ip("addr", "add", "192.0.2.9/24", "dev", "up0")
    assert seen.changes([PEER]) == [AddressChange("192.0.2.1", "192.0.2.8", "192.0.2.9")]

    # Another way: a default route over a second link, as from Wi-Fi to cellular.
    ip("link", "add", "cell0", "type", "veth", "peer", "name", "far1")
    ip("link", "set", "cell0", "up")
    ip("addr", "add", "198.51.100.7/24", "dev", "cell0")
    ip("link", "set", "up0", "down")
    ip("route", "add", "default", "via", "198.51.100.1", "dev", "cell0")
    assert seen.changes([PEER]) == [AddressChange("192.0.2.1", "192.0.2.9", "198.51.100.7")]

    # Routes that say no, each with an error of its own.
    for kind in ("blackhole", "unreachable", "prohibit"):
        ip("route", "replace", kind, "192.0.2.1/32")
        assert source_address(PEER) is None, kind


@in_namespace
def test_every_kind_of_change_is_told() -> None:
    run_in_namespace(scene_of_links_addresses_and_routes)


@in_namespace
def test_a_burst_of_messages_is_one_change() -> None:
    run_in_namespace(scene_of_a_burst)


@in_namespace
def test_messages_that_the_kernel_threw_away_are_a_change_and_end_nothing() -> None:
    run_in_namespace(scene_of_a_flood)


@in_namespace
def test_the_own_address_follows_addresses_links_and_routes() -> None:
    run_in_namespace(scene_of_source_addresses)


def test_towards_this_box_itself_the_own_address_is_the_same() -> None:
    assert source_address(("127.0.0.1", 9092)) == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.0.0.77", True),
        ("::1", True),
        # Of the documentation's networks, which no box has (RFC 5737, RFC 3849).
        ("192.0.2.1", False),
        ("2001:db8::1", False),
        ("fe80::1%nowhere0", False),
    ],
)
def test_an_address_is_this_boxs_own_while_a_socket_can_have_it(address: str, is_own: bool) -> None:  # noqa: FBT001
    assert is_own_address(address) == is_own


def test_without_a_socket_an_address_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.host.network_watch.socket.socket", refusing_socket)
    assert is_own_address("192.0.2.1")


def test_a_name_is_no_address_and_is_not_looked_up() -> None:
    with pytest.raises(ValueError, match=r"kafka\.example"):
        is_own_address("kafka.example")
    with pytest.raises(ValueError, match=r"kafka\.example"):
        source_address(("kafka.example", 9092))


def refusing_socket(*_arguments: object) -> NoReturn:
    raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))


class RefusingToBind(socket.socket):
    def bind(self, _address: object) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("kind", [refusing_socket, RefusingToBind])
async def test_a_refused_socket_is_logged_once_and_ends_the_watch(
    kind: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.host.network_watch.socket.socket", kind)
    changes = Changes()
    with structlog.testing.capture_logs() as lines:
        await watch(changes)
    assert [line["log_level"] for line in lines] == ["info"]
    assert "RestrictAddressFamilies" in lines[0]["event"]
    assert changes.count == 0


async def test_an_error_of_the_callback_is_not_taken_for_one_of_the_socket() -> None:
    def fails() -> None:
        raise OSError("of somebody else")

    class Speaking(socket.socket):
        """Has a message at once, as if a link had changed."""

        def recv(self, *_arguments: int) -> bytes:
            return b"changed"

        def bind(self, _address: object) -> None:
            """Hear nothing of this machine's own changes."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.host.network_watch.socket.socket", Speaking)
        with pytest.raises(OSError, match="of somebody else"):
            await watch(fails)


hosts = st.integers(0, 5).map(lambda number: f"10.0.0.{number}")
own = st.one_of(st.none(), st.sampled_from(["192.0.2.1", "192.0.2.2", "192.0.2.3"]))


@given(st.lists(st.tuples(st.dictionaries(hosts, own), st.sets(hosts))))
def test_a_change_is_told_once_against_the_address_that_was_last_known(
    looks: list[tuple[dict[str, str | None], set[str]]],
) -> None:
    towards: dict[str, str | None] = {}
    seen = AddressWatch(lambda peer: towards.get(peer[0]))
    known: dict[str, str] = {}
    for changed, asked in looks:
        towards.update(changed)
        expected = []
        for host in sorted(asked):
            new = towards.get(host)
            if new is None:
                continue
            if known.get(host, new) != new:
                expected.append(AddressChange(host, known[host], new))
            known[host] = new
        # A broker with two ports is one host.
        assert sorted(seen.changes([(host, port) for host in asked for port in (9092, 9093)])) == expected
        assert seen.changes([(host, 9092) for host in asked]) == []


def test_the_peers_asked_about_last_are_remembered() -> None:
    own_address = "192.0.2.1"
    seen = AddressWatch(lambda _peer: own_address)
    many = [(f"10.0.{number // 256}.{number % 256}", 9092) for number in range(HOSTS_MAX + 1)]
    for peer in many:
        seen.changes([peer])
    own_address = "192.0.2.2"
    assert seen.changes([many[0]]) == []
    assert seen.changes([many[-1]]) == [AddressChange(many[-1][0], "192.0.2.1", "192.0.2.2")]
