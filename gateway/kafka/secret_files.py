"""Certificates, keys and passwords for Kafka, as their files have them; and the certificates that brokers show."""

import hashlib
import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from gateway.host.safe_files import PasswordFileError, read_password
from gateway.settings import KafkaSaslSettings, KafkaSettings, KafkaTlsSettings
from gateway.tls.certificates import FILE_BYTES_MAX
from gateway.tls.client import ClientTlsError, client_context, trusted_stamp
from gateway.tls.dates import Dates, judge_dates

_CERTIFICATE_MESSAGE: Final = 11
"""`certificate` of TLS's HandshakeType (RFC 8446, section 4)."""

shown_certificates: ContextVar[list[bytes]] = ContextVar("shown_certificates")
"""Of the connection that is being made: gets the certificates that its broker shows."""


class KafkaFileError(OSError):
    """A certificate, key or password cannot be used; the message names the setting and says what to do."""


@dataclass(frozen=True, slots=True)
class KafkaFiles:
    """What was read of files."""

    context: ssl.SSLContext | None
    password: str | None = field(repr=False)
    digests: Mapping[Path, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class UnusableFiles:
    """Files that were found not to be usable: as long as they are these, nobody needs to look again."""

    digests: Mapping[Path, bytes]
    modes: Mapping[Path, int]
    """A password is not read where others may, and that can be mended without another word in the file."""


def read_files(kafka: KafkaSettings, judge: Dates | None = None) -> KafkaFiles:
    """What the settings name, read now. Raises KafkaFileError where something of it cannot be used.

    Brokers' certificates are judged by the dates that `judge` gives; without it by the system's clock.
    """
    # First what is compared later: a file that changes while it is read has changed since.
    digests = digests_of(kafka)
    tls = kafka.tls
    context = None if tls is None else _tls_context(tls, tuple(digests.items()), trusted_stamp(tls.ca), judge)
    return KafkaFiles(context, None if kafka.sasl is None else _password(kafka.sasl), digests)


def digests_of(kafka: KafkaSettings) -> dict[Path, bytes]:
    """SHA-256 of each file that the settings name; empty for one that cannot be read."""
    paths: list[Path | None] = []
    if kafka.tls is not None:
        paths += [kafka.tls.ca, kafka.tls.certificate, kafka.tls.key]
    if kafka.sasl is not None:
        paths.append(kafka.sasl.password_file)
    return {path: _digest(path) for path in paths if path is not None}


def mode_of(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _digest(path: Path) -> bytes:
    try:
        # Opening a named pipe would wait for its other end, for ever.
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return hashlib.sha256(file.read(FILE_BYTES_MAX + 1)).digest()
    except OSError:
        return b""


def _password(sasl: KafkaSaslSettings) -> str:
    try:
        return read_password(sasl.password_file)
    except PasswordFileError as error:
        raise KafkaFileError(f"kafka.sasl.{error}") from error


@lru_cache(maxsize=1)
def _tls_context(
    tls: KafkaTlsSettings, _digests: tuple[object, ...], _trusted: tuple[object, ...], judge: Dates | None
) -> ssl.SSLContext:
    """The context for files as they are: each has all authorities in it, and sessions may begin every few seconds."""
    try:
        context = client_context(tls.ca, tls.certificate, tls.key)
    except ClientTlsError as error:
        raise KafkaFileError(f"kafka.{error}") from error
    _watch_certificates(context)
    if judge is not None:
        judge_dates(context, judge)
    return context


def _watch_certificates(context: ssl.SSLContext) -> None:
    """Keep the certificate that a server shows, in `shown_certificates`: OpenSSL gives none that it refused.

    asyncio has a connection's data come in the context of who made it. `_msg_callback` is there for debugging and sees
    no data of the application. Where some Python has it no longer, the words for a certificate that is refused lack
    its names and dates, and nothing else.
    """

    def came(_: ssl.SSLObject, direction: str, version: int, _content: int, message: int, data: bytes) -> None:
        shown = shown_certificates.get(None)
        if direction == "read" and message == _CERTIFICATE_MESSAGE and shown is not None:
            shown[:] = [_first_certificate(data, is_1_3=version >= ssl.TLSVersion.TLSv1_3)]

    context._msg_callback = came  # type: ignore[attr-defined] # noqa: SLF001


def _first_certificate(message: bytes, *, is_1_3: bool) -> bytes:
    """The first certificate, in DER, of a handshake message (RFC 5246, section 7.4.2; RFC 8446, section 4.4.2)."""
    # Type and length; of TLS 1.3 a context with its length; the list's length.
    at = 4 + (1 + message[4] if is_1_3 and len(message) > 4 else 0) + 3
    length = int.from_bytes(message[at : at + 3])
    return bytes(message[at + 3 : at + 3 + length])
