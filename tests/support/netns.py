"""A gateway, a router and brokers in network namespaces of their own, and what can go wrong between them.

    gateway                     router                        brokers
    eth0   192.0.2.x      ────  lan0   192.0.2.1
    wwan0  198.51.100.x   ────  cell0  198.51.100.1
                                wan0   203.0.113.1      ────  eth0  203.0.113.2
                                                                    .10 and others for brokers, .53 for the DNS server

Each has an IPv6 address beside it, with the same last number, in 2001:db8:1::/64, 2001:db8:2::/64 and 2001:db8:3::/64.
All are those of documentation (RFC 5737, RFC 3849). Nothing of the machine's own network is touched.
"""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from demo import child_process
from tests.support import dns_server
from tests.support.waiting import patience

BROKERS_NET = "203.0.113"
DNS_ADDRESS = f"{BROKERS_NET}.53"
BROKERS_NET6 = "2001:db8:3"
GATEWAY_NETS = {"eth0": ("192.0.2", "2001:db8:1"), "wwan0": ("198.51.100", "2001:db8:2")}
"""Prefixes of IPv4 and IPv6, by the gateway's interface."""
RESOLVERS = Path("/etc/netns")
"""`ip netns exec` mounts what stands here under a namespace's name over the files of /etc."""
RUNNING = Path("/run/netns")
OURS = re.compile(r"sluice-(\d+)-(\d+)-\d+-\w+")
"""The process that made a namespace, by number and start time, the network's number, and the namespace's part in it."""
CLONE_NEWNET = 0x40000000
FORGOTTEN_S_MAX = 10.0
_ENDS = re.compile(r"(?:src|dst|sport|dport)=\S+")

_numbers = itertools.count(1)
Result = TypeVar("Result")


class NetworkUnavailableError(RuntimeError):
    """This machine makes no network namespaces for us; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One box of the network."""

    name: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words to put before a command so that it runs in here. Its pid and its signals are the command's own."""
        return ("ip", "netns", "exec", self.name)

    def ip(self, *arguments: str) -> None:
        _execute("ip", "-n", self.name, *arguments)

    def nft(self, rules: str) -> None:
        _execute(*self.prefix, "nft", "-f", "-", text=rules)

    def tc(self, *arguments: str) -> None:
        _execute("tc", "-n", self.name, *arguments)

    def set(self, name: str, value: int) -> None:
        """Write a setting of the kernel's, by its path below /proc/sys."""
        self.inside(lambda: Path("/proc/sys", name).write_text(str(value)))

    def inside(self, function: Callable[[], Result]) -> Result:
        """Call `function` in a thread whose sockets are of this namespace, and those of the threads that it starts.

        Names are resolved as everywhere on this machine, not by the namespace's own resolv.conf: give addresses.
        """

        def entered() -> Result:
            with (RUNNING / self.name).open("rb") as file:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", self.name)
            return function()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(entered).result()


class Network:
    """Three namespaces, joined, with a DNS server; whole until told otherwise.

    The faults of the path (`blackhole`, `lose_answers`, `lose`, `slow`) replace one another; `heal` ends them.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self.gateway = Namespace(f"{prefix}-gateway")
        self.router = Namespace(f"{prefix}-router")
        self.brokers = Namespace(f"{prefix}-brokers")
        self.names = dns_server.Answers()
        self._names_file = directory / "names.json"
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._hosts = 8
        self.interface = "eth0"
        """The one of the gateway's two interfaces that has the address."""

    # -- where the gateway stands ---------------------------------------------------------------

    def change_address(self) -> None:
        """The gateway's lease ends and the next one is another: the old address is gone before the new one comes."""
        self._leave()
        self._join()

    def change_interface(self) -> None:
        """Out of the reach of the Wi-Fi, or back: another interface, another net, another address."""
        self._leave()
        self.gateway.ip("link", "set", self.interface, "down")
        self.interface = next(name for name in GATEWAY_NETS if name != self.interface)
        self._join()

    def link_down(self) -> None:
        """The gateway's cable is out: its routes go, and whatever it sends fails at once."""
        self.gateway.ip("link", "set", self.interface, "down")

    def link_up(self) -> None:
        self._attach()

    def _leave(self) -> None:
        self.gateway.ip("address", "flush", "dev", self.interface, "scope", "global")

    def _join(self) -> None:
        self._hosts = self._hosts % 250 + 2
        self._attach()

    def _attach(self) -> None:
        # IPv6 addresses and all routes go with a link that goes down.
        net, net6 = GATEWAY_NETS[self.interface]
        self.gateway.ip("link", "set", self.interface, "up")
        self.gateway.ip("address", "replace", f"{net}.{self._hosts}/24", "dev", self.interface)
        self.gateway.ip("address", "replace", f"{net6}::{self._hosts}/64", "dev", self.interface)
        self.gateway.ip("route", "replace", "default", "via", f"{net}.1")
        self.gateway.ip("route", "replace", "default", "via", f"{net6}::1")

    # -- the path -------------------------------------------------------------------------------

    def blackhole(self) -> None:
        """Packets vanish in the router, both ways: no RST, no ICMP."""
        self._forwarding("drop")

    def blackhole_ipv6(self) -> None:
        """Drop packets over IPv6 in the router. IPv4 goes on."""
        self._forwarding("meta nfproto ipv6 drop")

    def lose_answers(self) -> None:
        """Let the gateway's packets arrive, and drop all answers."""
        self._forwarding('iifname "wan0" drop')

    def lose(self, percent: int) -> None:
        """Drop this many packets in a hundred, both ways."""
        self._forwarding(f"numgen random mod 100 < {percent} drop")

    def slow(self, kbit_per_s: int) -> None:
        """The path takes no more than this, each way, with a queue of 0.8 s before it."""
        self.heal()
        for interface in ("wan0", "lan0", "cell0"):
            rate = ("rate", f"{kbit_per_s}kbit", "burst", "4kb", "latency", "800ms")
            self.router.tc("qdisc", "add", "dev", interface, "root", "tbf", *rate)

    def heal(self) -> None:
        """The path is whole again; where the gateway stands, and what names say, is as before."""
        self._forwarding("accept")
        for interface in ("wan0", "lan0", "cell0"):
            self.router.tc("qdisc", "replace", "dev", interface, "root", "pfifo", "limit", "1000")

    def _forwarding(self, rule: str) -> None:
        # Added before it is deleted, so that deleting does not fail the first time: one transaction, no gap.
        chain = f"chain forward {{\n type filter hook forward priority 0;\n {rule}\n}}"
        self.router.nft(f"table inet fault {{ }}\ndelete table inet fault\ntable inet fault {{\n{chain}\n}}\n")

    def masquerade(self) -> None:
        """From here on the router hides the gateway behind its own address, and drops what it has no state for."""
        self.router.nft(
            "table ip nat {\nchain postrouting {\ntype nat hook postrouting priority 100;\n"
            'oifname "wan0" masquerade\n}\n}\n'
            "table ip stateful {\nchain forward {\ntype filter hook forward priority 10;\nct state invalid drop\n}\n}\n"
        )
        # Otherwise a packet from the middle of a connection makes the state that it lacks.
        self.router.set("net/netfilter/nf_conntrack_tcp_loose", 0)

    def forget_connections(self) -> None:
        """The masquerading router loses its table, as by a reboot: what belongs to older connections vanishes."""
        older = self._masqueraded()
        # The kernel drops masqueraded state of an interface that goes down (nf_nat_masquerade), in its own time.
        self.router.ip("link", "set", "wan0", "down")
        self.router.ip("link", "set", "wan0", "up")
        deadline = time.monotonic() + patience(FORGOTTEN_S_MAX)
        while older & self._masqueraded():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the router still knows connections after {FORGOTTEN_S_MAX:.0f} s")
            time.sleep(0.01)

    def _masqueraded(self) -> set[tuple[str, ...]]:
        """Addresses and ports of the TCP connections that the router hides."""
        told = self.router.inside(lambda: Path("/proc/thread-self/net/nf_conntrack").read_text())
        return {
            tuple(_ENDS.findall(line))
            for line in told.splitlines()
            if " ESTABLISHED " in line and f" dst={BROKERS_NET}.1 " in line
        }

    def masquerade_no_more(self) -> None:
        self.router.nft("delete table ip nat\ndelete table ip stateful\n")

    def connections(self) -> str:
        """The gateway's TCP connections, a line each, as `ss` (iproute2) has them."""
        return _execute(*self.gateway.prefix, "ss", "-Htn", "state", "established")

    # -- the brokers' side ----------------------------------------------------------------------

    def add_broker_address(self, host: int) -> str:
        """One more address on the brokers' interface, and the IPv6 one beside it; gives it."""
        # /32: a kernel that removes a net's first address removes the others of that net with it.
        self.brokers.ip("address", "add", f"{BROKERS_NET}.{host}/32", "dev", "eth0")
        self.brokers.ip("address", "add", f"{BROKERS_NET6}::{host}/128", "dev", "eth0")
        return f"{BROKERS_NET}.{host}"

    def remove_broker_address(self, host: int) -> None:
        self.brokers.ip("address", "del", f"{BROKERS_NET}.{host}/32", "dev", "eth0")
        self.brokers.ip("address", "del", f"{BROKERS_NET6}::{host}/128", "dev", "eth0")

    def name(self, name: str, *addresses: str) -> None:
        """Set the addresses of a name, IPv4 and IPv6. A name without addresses does not exist (NXDOMAIN)."""
        records = {key: value for key, value in self.names.records.items() if key != name}
        self._answer(dns_server.Answers(records | ({name: addresses} if addresses else {}), self.names.silent))

    def dns_dead(self) -> None:
        """The DNS server answers nothing at all."""
        self._answer(dns_server.Answers(self.names.records, silent=True))

    def dns_alive(self) -> None:
        self._answer(dns_server.Answers(self.names.records, silent=False))

    def _answer(self, answers: dns_server.Answers) -> None:
        self.names = answers
        dns_server.write_answers(self._names_file, answers)

    # -- programs -------------------------------------------------------------------------------

    def run(
        self,
        namespace: Namespace,
        command: Sequence[str | Path],
        log: Path,
        *,
        output: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program in a namespace; it dies with the calling thread, and with the network at the latest.

        What it says is appended to `log`, its results to `output` if given.
        """
        process = child_process.spawn([*namespace.prefix, *command], log, output=output, env=env)
        self._processes.append(process)
        return process

    # -- from the beginning to the end ----------------------------------------------------------

    def make(self) -> None:
        """Lay the cables. Raises CalledProcessError where the kernel or iproute2 will not."""
        for namespace in (self.gateway, self.router, self.brokers):
            _execute("ip", "netns", "add", namespace.name)
            namespace.ip("link", "set", "lo", "up")
            # Nobody else can have an IPv6 address here: none is tried for a second before it is used.
            for which in ("all", "default"):
                namespace.set(f"net/ipv6/conf/{which}/accept_dad", 0)
        resolver = RESOLVERS / self.gateway.name
        resolver.mkdir(parents=True)
        (resolver / "resolv.conf").write_text(f"nameserver {DNS_ADDRESS}\n")
        # An nsswitch.conf of the machine may ask others first.
        (resolver / "nsswitch.conf").write_text("hosts: files dns\n")
        # Its IPv6 addresses stay while an interface is down, as those of IPv4 do.
        self.router.set("net/ipv6/conf/all/keep_addr_on_down", 1)
        for outer, interface, inner, (net, net6) in (
            (self.gateway, "eth0", "lan0", GATEWAY_NETS["eth0"]),
            (self.gateway, "wwan0", "cell0", GATEWAY_NETS["wwan0"]),
            (self.brokers, "eth0", "wan0", (BROKERS_NET, BROKERS_NET6)),
        ):
            outer.ip("link", "add", interface, "type", "veth", "peer", "name", inner, "netns", self.router.name)
            self.router.ip("address", "add", f"{net}.1/24", "dev", inner)
            self.router.ip("address", "add", f"{net6}::1/64", "dev", inner)
            self.router.ip("link", "set", inner, "up")
        self.router.set("net/ipv4/ip_forward", 1)
        self.router.set("net/ipv6/conf/all/forwarding", 1)
        self._join()
        self.brokers.ip("link", "set", "eth0", "up")
        self.brokers.ip("address", "add", f"{BROKERS_NET}.2/24", "dev", "eth0")
        self.brokers.ip("address", "add", f"{BROKERS_NET6}::2/64", "dev", "eth0")
        for host in (10, 53):
            self.add_broker_address(host)
        self.brokers.ip("route", "add", "default", "via", f"{BROKERS_NET}.1")
        self.brokers.ip("route", "add", "default", "via", f"{BROKERS_NET6}::1")
        self.heal()
        self._answer(self.names)
        log = self._directory / "dns.log"
        server = self.run(
            self.brokers, [sys.executable, "-m", "tests.support.dns_server", DNS_ADDRESS, self._names_file], log
        )
        self.brokers.inside(lambda: dns_server.wait_until_ready(DNS_ADDRESS, server))

    def close(self) -> None:
        """Stop what runs here and leave nothing behind."""
        for process in reversed(self._processes):
            child_process.stop(process)
        for namespace in (self.gateway, self.router, self.brokers):
            _remove(namespace.name)


@contextmanager
def new_network(directory: Path) -> Iterator[Network]:
    """A network for the length of a `with`.

    Raises:
        NetworkUnavailableError: this machine does not let us.
    """
    _try_namespaces()
    _remove_leftovers()
    network = Network(directory, f"sluice-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}")
    try:
        network.make()
        yield network
    finally:
        network.close()


@contextmanager
def network_or_skip(directory: Path) -> Iterator[Network]:
    """A network for a fixture. If there can be no namespaces, its tests are skipped with the reason."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(new_network(directory))
        except NetworkUnavailableError as reason:
            if os.environ.get("CI") and os.geteuid() == 0:
                # What matters must run there: a skip would pass for a success.
                raise
            pytest.skip(str(reason))
        yield network


def _try_namespaces() -> None:
    """Make one and use it: nothing else tells whether this kernel, user and container may."""
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")):
        if shutil.which(program) is None:
            raise NetworkUnavailableError(f"there is no `{program}`: install Debian's package {package}")
    trial = Namespace(f"sluice-{os.getpid()}-{_start_time(os.getpid())}-0-trial")
    try:
        _execute("ip", "netns", "add", trial.name)
        _execute(*trial.prefix, "nft", "list", "ruleset")
        # Most containers mount /proc/sys read-only, root or not.
        trial.set("net/ipv6/conf/all/accept_dad", 0)
    except OSError as error:
        raise NetworkUnavailableError(f"settings of a network namespace cannot be written here: {error}") from None
    except subprocess.CalledProcessError as error:
        root = "" if os.geteuid() == 0 else " (run as root)"
        raise NetworkUnavailableError(f"network namespaces cannot be made here{root}: {error.stderr.strip()}") from None
    finally:
        _remove(trial.name)


def _remove_leftovers() -> None:
    """Remove what killed runs left: their process is gone, or its number is another's by now."""
    for name in _names():
        found = OURS.fullmatch(name)
        if found and _start_time(int(found[1])) != int(found[2]):
            _remove(name)


def _names() -> set[str]:
    return {path.name for folder in (RUNNING, RESOLVERS) if folder.exists() for path in folder.iterdir()}


def _remove(name: str) -> None:
    try:
        _execute("ip", "netns", "del", name)
    except subprocess.CalledProcessError:
        # Two runs that start together both remove what a third one left.
        if (RUNNING / name).exists():
            raise
    shutil.rmtree(RESOLVERS / name, ignore_errors=True)
    # Another run's may stand in it.
    with contextlib.suppress(OSError):
        RESOLVERS.rmdir()


def _start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did (proc(5)); None without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name stands in parentheses and may hold spaces.
    return int(stat.rpartition(")")[2].split()[19])


def _execute(*command: str | Path, text: str = "") -> str:
    try:
        return subprocess.run(
            command, input=text, text=True, capture_output=True, check=True, timeout=patience(20)
        ).stdout
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise
