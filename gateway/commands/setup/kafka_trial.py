"""Tries Kafka for `sluice setup`: what a broker speaks and wants, and whether settings that are not written yet do."""

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
"""What is typed where there is no such thing."""
PATIENCE_S: Final = 5.0
"""How long an address may take for each step: a person waits for it."""
CHECK_S: Final = 15.0
"""How long one request may take while settings are tried."""
MECHANISMS: Final[tuple[Mechanism, ...]] = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN")
"""Those that the gateway speaks, the best first."""
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
"""What the settings' words are called in a file of answers; the first that fits counts."""
IN_QUESTIONS: Final[Mapping[str, str]] = {
    "or take [kafka.tls] out": "or write plain:// before the address",
    "and [kafka.tls] is not set": "and no TLS was to be spoken",
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
"""What a person is asked for has no settings' names yet."""
_SASL_HANDSHAKE: Final = 17
_NO_WAY: Final = frozenset({errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL})
_ANSWER_BYTES_MAX: Final = 10_000
"""Of a broker's answer to what is asked here; more is none."""


class Broker(Struct, frozen=True):
    """What one address of `kafka.bootstrap` is like."""

    address: str
    trouble: str = ""
    """Why it cannot be reached, and what to do; empty where it is reached."""
    is_offline: bool = False
    """Whether that is as it must be where there is no network: no name resolves, or no way leads there."""
    tls: bool = False
    mechanisms: tuple[str, ...] | None = None
    """What it takes for a log-in: nothing where it wants none; None where it does not say."""


def look_at(addresses: Sequence[str]) -> list[Broker]:
    """Find out what brokers speak, side by side; nothing secret is sent."""
    # A thread for each: OpenSSL keeps its errors by thread, and what one broker refuses would be told of another.
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
        # The other way, then: what is wrong with both is found as the settings are tried.
        with suppress(OSError, EOFError, ValueError, struct.error), _connected(found, tls=tls) as connection:
            return Broker(address, tls=tls, mechanisms=_asked(connection))
    return Broker(address, tls=_speaks_tls(found))


async def _resolved(host: str, port: int) -> list[tuple[str, int]]:
    """The addresses of a host. Raises OSError, TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        return [(found[0], found[1]) for _, _, _, found in await names.addresses(host, port)]


def _first_reached(addresses: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """The first address that takes a connection. Raises OSError, TimeoutError of the first one where none does."""
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
    """The mechanisms that a broker takes, none where it wants no log-in.

    Kafka's SaslHandshake, version 1: `clients/src/main/resources/common/message/SaslHandshakeRequest.json`. Raises
    OSError, EOFError, ValueError, struct.error where what answers is none, or speaks otherwise.
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
    """TLS that looks at nobody's certificate, to see whether TLS is spoken at all.

    Nothing that anybody may not know goes this way: the log-in is tried with certificates verified, as ever.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def reworded(words: str, names: Mapping[str, str]) -> str:
    """Words for an installer, with other names for the settings in them."""
    for setting, name in names.items():
        words = words.replace(setting, name)
    return words


def best_mechanism(brokers: Sequence[Broker], *, tls: bool) -> Mechanism | None:
    """The best log-in that all brokers that answered take; None where none of ours, or nobody said."""
    offers = [set(broker.mechanisms) for broker in brokers if broker.mechanisms]
    if not offers:
        return None
    common = set.intersection(*offers) - (set() if tls else {"PLAIN"})
    return next((name for name in MECHANISMS if name in common), None)


def try_settings(
    settings: Settings, names: Mapping[str, str], *, password: str | None = None, ca: bytes | None = None
) -> list[Finding]:
    """What `sluice check` would say of Kafka with settings whose files are not written yet; `names` for those."""
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
    """A file that no disk ever sees, for as long as it is tried; None without content."""
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
    """The same without the names of such files, which nobody can look into."""
    words = finding.words
    for path in filter(None, files):
        words = (
            words.replace(f" in {path}", "").replace(f" (it is {path} now)", "").replace(str(path), "what was given")
        )
    return msgspec.structs.replace(finding, words=words)
