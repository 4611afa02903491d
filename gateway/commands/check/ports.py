"""`sluice check`: may the gateway listen on a port, and who has it where it may not?"""

import errno
import ipaddress
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gateway.buffer.status import is_running
from gateway.commands.check.finding import Finding, well, wrong
from gateway.host.processes import has_open, name_of, opened_by, processes, this_user

OURS: Final = "sluice"
"""What the kernel calls a gateway that runs."""
_LISTENING: Final = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def check_port(subject: str, host: str, port: int, buffer: Path) -> Finding:
    """Whether the gateway could listen there now, or has the port already; `subject` is the port's setting."""
    setting = f"{subject.partition('.')[0]}.host"
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    address = ""
    try:
        for probe, (address, *more) in _sockets(host, port):
            with probe:
                # As asyncio's servers do it: what only lingers after a former one is in nobody's way.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if probe.family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, *more))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _taken(subject, where, _processes_listening(address, port), buffer)
        return _port_trouble(subject, setting, host, where, error)
    if host in {"127.0.0.1", "::1", "localhost"}:
        return well(subject, f'{where} is free; only this box can connect there ({setting} = "0.0.0.0": all)')
    return well(subject, f"{where} is free")


def _sockets(host: str, port: int) -> Iterator[tuple[socket.socket, tuple[Any, ...]]]:
    """A socket for each address that a host stands for. Raises OSError, also where the kernel has none of their kinds.

    A kernel without IPv6 makes no socket for localhost's ::1: asyncio's servers leave that one out too.
    """
    found = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    left_out = []
    for family, kind, protocol, _, address in found:
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            left_out.append(error)
            continue
        yield probe, address
    if len(left_out) == len(found):
        raise left_out[0]


def _port_trouble(subject: str, setting: str, host: str, where: str, error: OSError) -> Finding:
    if error.errno == errno.EACCES:
        return wrong(subject, f"{where} may not be listened on by {this_user()}; write a port from 1024 up")
    if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT} or isinstance(error, socket.gaierror):
        return wrong(
            setting,
            f'this box has no address {host} now; write one that it has (ip address lists them), or "0.0.0.0" for all',
        )
    return wrong(subject, f"{where} cannot be listened on: {error.strerror}; write another port, or another host")


def _taken(subject: str, where: str, listening: Sequence[int], buffer: Path) -> Finding:
    """By whom a port is taken: by this gateway it is no mistake."""
    lock = buffer.with_name(buffer.name + ".lock")
    others = [process for process in listening if not has_open(process, lock)]
    if listening and not others:
        return well(subject, f"{where} is served by the sluice that runs with this buffer (process {listening[0]})")
    if not listening and is_running(buffer):
        return well(subject, f"{where} is taken: most likely by the sluice that runs with this buffer")
    if others and name_of(others[0]) == OURS:
        return wrong(
            subject,
            f"{where} is taken by a sluice that runs with another buffer.path (process {others[0]}), so that a "
            "gateway with these settings cannot start: where buffer.path was changed here, sudo systemctl restart "
            "sluice; else stop that one, or write another port",
        )
    by = f"{name_of(others[0])} (process {others[0]})" if others else "another program (sudo ss -ltnp names it)"
    return wrong(subject, f"{where} is taken by {by}; stop that one, or write another port")


def _processes_listening(address: str, port: int) -> list[int]:
    """The processes that keep others from listening on an address and port, as far as this user is told (proc(5))."""
    ours = ipaddress.ip_address(address.partition("%")[0])
    exact, wider = set(), set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            local, _, local_port = columns[1].rpartition(":")
            if columns[3] != _LISTENING or int(local_port, 16) != port:
                continue
            theirs = _kernels_address(local)
            if theirs == ours:
                exact.add(f"socket:[{columns[9]}]")
            elif (theirs.is_unspecified and theirs.version >= ours.version) or (
                ours.is_unspecified and theirs.version == ours.version
            ):
                wider.add(f"socket:[{columns[9]}]")
    # One that has the very address is it: a socket for all of IPv6 may or may not be one for all of IPv4 as well.
    sockets = exact or wider
    return [process for process in processes() if any(opened in sockets for opened in opened_by(process))]


def _kernels_address(told: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address of /proc/net/tcp or tcp6: words of 32 bits in hex, each in this machine's byte order."""
    words = bytes.fromhex(told)
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    address = ipaddress.ip_address(words)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
