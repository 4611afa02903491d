"""Tries Kafka for `sluice setup`: finds out what brokers speak, and tries settings that are not written yet."""

import asyncio
import errno
import os
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.commands.check.finding import Finding
from gateway.commands.check.kafka import check_kafka
from gateway.commands.setup.answers import Mechanism
from gateway.host.name_lookup import names
from gateway.kafka.reach import Stage, reach_words
from gateway.settings import KafkaSettings, Settings

NONE: Final = "none"
"""Answer that stands for "no such thing"."""
PATIENCE_S: Final = 5.0
"""Seconds that an address may take for each step, while a person waits."""
CHECK_S: Final = 15.0
"""Seconds that one request may take while settings are tried."""
MECHANISMS: Final[tuple[Mechanism, ...]] = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN")
"""Mechanisms that the gateway speaks, best first."""
IN_ANSWERS: Final[Mapping[str, str]] = {
    "or take [kafka.tls] out": "or write tls = false",
    "and [kafka.tls] is not set": "and tls = false was given",
    "add [kafka.tls], with ca": "write tls = true, with ca",
    "and [kafka.sasl] is set": "and a user was given",
    "take [kafka.sasl] out": "take user out",
    "add [kafka.sasl] with mechanism, user and password_file": "write user, and kafka_password for it",
    "check kafka.sasl.mechanism, user": "check mechanism, user",
    "kafka.sasl.": "kafka.",
    "kafka.sasl": "user and kafka_password",
    "kafka.tls.ca": "kafka.ca",
}
"""Words of messages about settings, and their words for a file of answers. They are replaced in this order."""
IN_QUESTIONS: Final[Mapping[str, str]] = {
    "or take [kafka.tls] out": "or write plain:// before the address",
    "and [kafka.tls] is not set": "and the answer was no TLS",
    "add [kafka.tls], with ca": "write tls:// before the address; the authority is asked for",
    "and [kafka.sasl] is set": "and a user was given",
    "take [kafka.sasl] out": f'write "{NONE}" as the user',
    "add [kafka.sasl] with mechanism, user and password_file": "give a user and a password",
    "mend kafka.sasl.user": "mend the user",
    "check kafka.sasl.mechanism, user": "check the user",
    "check kafka.sasl": "check the user and the password",
    "and that file's path as kafka.tls.ca": "and name that file here",
    "written right in kafka.bootstrap": "written right",
    "kafka.bootstrap": "the address",
}
"""Words of messages about settings, and their words for a person who answers questions."""
_SASL_HANDSHAKE: Final = 17
_NO_WAY: Final = frozenset({errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL})
_ANSWER_BYTES_MAX: Final = 10_000
"""Most bytes of a broker's answer to a SaslHandshake. A longer answer is no broker's."""


class Broker(Struct, frozen=True):
    """Properties of the broker at one address of `kafka.bootstrap`."""

    address: str
    trouble: str = ""
    """Reason why it cannot be reached, and what to do; empty if it is reached."""
    is_offline: bool = False
    """True if a missing network explains the trouble: the name does not resolve, or there is no route."""
    tls: bool = False
    mechanisms: tuple[str, ...] | None = None
    """Mechanisms that it takes for a log-in; empty if it wants no log-in; None if it does not say."""


def look_at(addresses: Sequence[str]) -> list[Broker]:
    """Find out what brokers speak, all at the same time. Nothing secret is sent."""
    # Each broker has a thread of its own: OpenSSL keeps errors by thread, and would mix up those of two brokers.
    with ThreadPoolExecutor(max(1, len(addresses)), thread_name_prefix="setup") as threads:
        return list(threads.map(_look_at, addresses))


def _look_at(address: str) -> Broker:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    stage: Stage = "name"
    try:
        resolved = asyncio.run(_resolved(host, int(port)))
        stage = "connect"
        found = _first_reached(resolved)
    except (OSError, TimeoutError) as error:
        fault = reach_words(error, host, int(port), KafkaSettings((address,)), stage=stage)
        is_offline = stage == "name" or error.errno in _NO_WAY
        return Broker(address, reworded(f"{fault.words}; {fault.hint}", IN_QUESTIONS), is_offline=is_offline)
    for tls in (True, False):
        # If this way fails, try the other. If both fail, trying the settings will show why.
        with suppress(OSError, EOFError, ValueError, struct.error), _connected(found, tls=tls) as connection:
            return Broker(address, tls=tls, mechanisms=_asked(connection))
    return Broker(address, tls=_speaks_tls(found))


async def _resolved(host: str, port: int) -> list[tuple[str, int]]:
    """Look up the addresses of a host. Raises OSError, TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        return [(found[0], found[1]) for _, _, _, found in await names.addresses(host, port)]


def _first_reached(addresses: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Find the first address that takes a connection. If none does, raises the OSError of the first address."""
    failures: list[OSError] = []
    for address in addresses:
        try:
            socket.create_connection(address, PATIENCE_S).close()
        except OSError as error:
            failures.append(error)
        else:
            return address
    raise failures[0]


@contextmanager
def _connected(found: tuple[str, int], *, tls: bool) -> Iterator[socket.socket]:
    with socket.create_connection(found, PATIENCE_S) as plain:
        if not tls:
            yield plain
            return
        with _any_certificate().wrap_socket(plain) as wrapped:
            yield wrapped


def _speaks_tls(found: tuple[str, int]) -> bool:
    try:
        with _connected(found, tls=True):
            return True
    except OSError:
        return False


def _asked(connection: socket.socket) -> tuple[str, ...]:
    """Ask a broker for its mechanisms; empty if it wants no log-in.

    This is Kafka's SaslHandshake, version 1: `clients/src/main/resources/common/message/SaslHandshakeRequest.json`.
    Raises OSError, EOFError, ValueError, struct.error if no broker answers, or if it speaks the other of TLS or plain.
    """
    wanted = MECHANISMS[0].encode()
    asked = struct.pack(f">hhih6sh{len(wanted)}s", _SASL_HANDSHAKE, 1, 1, 6, b"sluice", len(wanted), wanted)
    connection.sendall(struct.pack(">i", len(asked)) + asked)
    (length,) = struct.unpack(">i", _read(connection, 4))
    if not 10 <= length <= _ANSWER_BYTES_MAX:
        raise ValueError("no answer of Kafka's")
    answer = _read(connection, length)
    (count,) = struct.unpack_from(">i", answer, 6)
    found, at = [], 10
    for _ in range(count):
        (size,) = struct.unpack_from(">h", answer, at)
        found.append(answer[at + 2 : at + 2 + size].decode("ascii"))
        at += 2 + size
    return tuple(found)


def _read(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        more = connection.recv(size - len(read))
        if not more:
            raise EOFError
        read += more
    return read


def _any_certificate() -> ssl.SSLContext:
    """TLS that verifies no certificate, only to see whether the broker speaks TLS.

    Nothing secret is sent this way. The log-in is tried later, with verified certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def reworded(words: str, names: Mapping[str, str]) -> str:
    """Replace the names of settings in a message."""
    for setting, name in names.items():
        words = words.replace(setting, name)
    return words


def best_mechanism(brokers: Sequence[Broker], *, tls: bool) -> Mechanism | None:
    """Best mechanism that all brokers that answered take; None if there is none in common, or nobody said."""
    offers = [set(broker.mechanisms) for broker in brokers if broker.mechanisms]
    if not offers:
        return None
    common = set.intersection(*offers) - (set() if tls else {"PLAIN"})
    return next((name for name in MECHANISMS if name in common), None)


def try_settings(
    settings: Settings, names: Mapping[str, str], *, password: str | None = None, ca: bytes | None = None
) -> list[Finding]:
    """Check Kafka as `sluice check` does, with settings that are not written yet. `names` replaces settings' names."""
    kafka = settings.kafka
    with _in_memory(password) as password_file, _in_memory(ca) as ca_file:
        if kafka.sasl is not None and password_file is not None:
            kafka = msgspec.structs.replace(
                kafka, sasl=msgspec.structs.replace(kafka.sasl, password_file=password_file)
            )
        if kafka.tls is not None and ca_file is not None:
            kafka = msgspec.structs.replace(kafka, tls=msgspec.structs.replace(kafka.tls, ca=ca_file))
        kafka = msgspec.structs.replace(
            kafka,
            connect_timeout_s=min(kafka.connect_timeout_s, PATIENCE_S),
            request_timeout_s=min(kafka.request_timeout_s, CHECK_S),
        )
        found = asyncio.run(check_kafka(msgspec.structs.replace(settings, kafka=kafka), create=False))
    found = [_without_memory(finding, (password_file, ca_file)) for finding in found]
    return [msgspec.structs.replace(finding, words=reworded(finding.words, names)) for finding in found]


@contextmanager
def _in_memory(content: str | bytes | None) -> Iterator[Path | None]:
    """Give a path to content in memory, which is never on a disk; None without content."""
    if content is None:
        yield None
        return
    held = os.memfd_create("sluice-setup", os.MFD_CLOEXEC)
    try:
        os.fchmod(held, 0o400)
        os.write(held, content.encode() if isinstance(content, str) else content)
        yield Path(f"/proc/self/fd/{held}")
    finally:
        os.close(held)


def _without_memory(finding: Finding, files: Sequence[Path | None]) -> Finding:
    """Take the paths of files in memory out of a finding, because nobody can open them."""
    words = finding.words
    for path in filter(None, files):
        words = (
            words.replace(f" in {path}", "").replace(f" (it is {path} now)", "").replace(str(path), "what was given")
        )
    return msgspec.structs.replace(finding, words=words)
