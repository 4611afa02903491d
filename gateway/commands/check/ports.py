"""Checks whether the gateway may listen on a port, and finds out which program has the port instead."""

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
"""Process name of a running gateway."""
_LISTENING: Final = "0A"
"""State of a listening socket in /proc/net/tcp."""


def check_port(subject: str, host: str, port: int, buffer: Path) -> Finding:
    """Check that the gateway could listen on a port, or does so already. `subject` is the port's setting."""
    setting = f"{subject.partition('.')[0]}.host"
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    address = ""
    try:
        for probe, (address, *more) in _sockets(host, port):
            with probe:
                # asyncio's servers set this too: connections of a former server may linger.
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
    """Make a socket for each address of a host. Raises OSError, also if the kernel has none of their families.

    A kernel without IPv6 makes no socket for localhost's ::1. asyncio's servers leave that address out too.
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
        return wrong("port-unusable", subject, f"{this_user()} may not listen on {where}; write a port from 1024 up")
    if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT} or isinstance(error, socket.gaierror):
        return wrong(
            "port-unusable",
            setting,
            f'this box has no address {host} now; write one that it has (ip address lists them), or "0.0.0.0" for all',
        )
    return wrong(
        "port-unusable",
        subject,
        f"nothing can listen on {where}: {error.strerror}; write another port, or another host",
    )


def _taken(subject: str, where: str, listening: Sequence[int], buffer: Path) -> Finding:
    """Say which program has a port. If it is this gateway, all is well."""
    lock = buffer.with_name(buffer.name + ".lock")
    others = [process for process in listening if not has_open(process, lock)]
    if listening and not others:
        return well(subject, f"{where} is served by the running sluice of this buffer (process {listening[0]})")
    if not listening and is_running(buffer):
        return well(subject, f"{where} is taken, most likely by the running sluice of this buffer")
    if others and name_of(others[0]) == OURS:
        return wrong(
            "port-taken",
            subject,
            f"{where} is taken by a sluice that runs with another buffer.path (process {others[0]}), so a gateway with "
            "these settings cannot start: if buffer.path was changed here, sudo systemctl restart sluice; else stop "
            "that sluice, or write another port",
        )
    by = f"{name_of(others[0])} (process {others[0]})" if others else "another program (sudo ss -ltnp names it)"
    return wrong("port-taken", subject, f"{where} is taken by {by}; stop that program, or write another port")


def _processes_listening(address: str, port: int) -> list[int]:
    """Processes that listen on an address and port, as far as this user may know (proc(5))."""
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
    # A socket with exactly this address decides. A socket for all of IPv6 may or may not be for all of IPv4 too.
    sockets = exact or wider
    return [process for process in processes() if any(opened in sockets for opened in opened_by(process))]


def _kernels_address(told: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Decode an address of /proc/net/tcp or tcp6: words of 32 bits in hex, each in the host's byte order."""
    words = bytes.fromhex(told)
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    address = ipaddress.ip_address(words)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
