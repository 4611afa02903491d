"""A tiny DNS server for tests, which answers as a file says at that moment.

`python -m tests.support.dns_server ADDRESS FILE`

RFC 1035 over UDP: A and AAAA records with a TTL of one second, nothing for other types, NXDOMAIN for other names, or
silence.
"""

import contextlib
import ipaddress
import json
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.waiting import patience

PORT = 53
TTL_S = 1
TYPE_A = 1
TYPE_AAAA = 28
CLASS_IN = 1
NXDOMAIN = 3
START_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Answers:
    """The server's answers."""

    records: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By name: IPv4 and IPv6 addresses."""
    silent: bool = False


class QueryError(ValueError):
    """Not a question that RFC 1035 section 4.1 knows."""


def write_answers(path: Path, answers: Answers) -> None:
    """Let the server at this file answer so from its next query on."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(asdict(answers)))
    beside.replace(path)


def read_answers(path: Path) -> Answers:
    raw = json.loads(path.read_text())
    return Answers({name: tuple(addresses) for name, addresses in raw["records"].items()}, bool(raw["silent"]))


def answer(query: bytes, answers: Answers) -> bytes | None:
    """The response to a query's bytes; None for silence.

    Raises:
        QueryError: it is cut short, or no query with one question.
    """
    if len(query) < 12:
        raise QueryError("a header has 12 bytes")
    identifier, flags, questions = struct.unpack_from(">HHH", query)
    if flags & 0x8000 or questions != 1:
        raise QueryError("no query with one question")
    name, end = _read_name(query, 12)
    if len(query) < end + 4:
        raise QueryError("the question is cut short")
    if answers.silent:
        return None
    kind, klass = struct.unpack_from(">HH", query, end)
    known = answers.records.get(name.lower())
    addresses = [bytes_of for each in known or () if klass == CLASS_IN and (bytes_of := _record_data(each, kind))]
    # A response of an authority; "recursion desired" is given back as it came.
    code = 0x8400 | flags & 0x0100 | (0 if known else NXDOMAIN)
    header = struct.pack(">HHHHHH", identifier, code, 1, len(addresses), 0, 0)
    # 0xC00C points back to the name in the question (section 4.1.4).
    records = [struct.pack(">HHHIH", 0xC00C, kind, CLASS_IN, TTL_S, len(each)) + each for each in addresses]
    return header + query[12 : end + 4] + b"".join(records)


def _record_data(address: str, kind: int) -> bytes:
    """An address as a record of a type has it; empty where it is not of that type."""
    parsed = ipaddress.ip_address(address)
    return parsed.packed if kind == (TYPE_A if parsed.version == 4 else TYPE_AAAA) else b""


def question(name: str, *, identifier: int = 1, kind: int = TYPE_A) -> bytes:
    """A query for one name."""
    labels = b"".join(bytes((len(label),)) + label.encode() for label in name.split("."))
    return struct.pack(">HHHHHH", identifier, 0x0100, 1, 0, 0, 0) + labels + struct.pack(">xHH", kind, CLASS_IN)


def wait_until_ready(address: str, server: subprocess.Popen[bytes]) -> None:
    """Return once the server answers; it must not be silent. Raises RuntimeError where it does not."""
    deadline = time.monotonic() + patience(START_S_MAX)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(0.1)
        asking.connect((address, PORT))
        while server.poll() is None and time.monotonic() < deadline:
            # Refused while nobody listens.
            with contextlib.suppress(OSError):
                asking.send(question("ready"))
                asking.recv(512)
                return
            time.sleep(0.02)
    raise RuntimeError(f"the DNS server does not answer at {address} (exit code {server.poll()})")


def serve(address: str, path: Path) -> None:
    """Answer for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((address, PORT))
        while True:
            query, peer = listening.recvfrom(4096)
            with contextlib.suppress(QueryError):
                response = answer(query, read_answers(path))
                if response is not None:
                    # Who asked may be unreachable by now: that is what these tests do.
                    with contextlib.suppress(OSError):
                        listening.sendto(response, peer)


def _read_name(query: bytes, start: int) -> tuple[str, int]:
    """The name that begins at `start`, and where it ends."""
    labels = []
    at = start
    while at < len(query) and query[at]:
        length = query[at]
        if length > 63 or at + 1 + length >= len(query):
            raise QueryError("a label is cut short, or a pointer, which no question needs")
        labels.append(query[at + 1 : at + 1 + length].decode("ascii", "replace"))
        at += 1 + length
    if at >= len(query):
        raise QueryError("the name is cut short")
    return ".".join(labels), at + 1


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
