"""Reads certificates, keys and passwords for Kafka from their files, and keeps the certificates that brokers show."""

import hashlib
import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from gateway.host.safe_files import PasswordFileError, read_password
from gateway.settings import OAUTHBEARER, KafkaSaslSettings, KafkaSettings, KafkaTlsSettings
from gateway.tls.certificates import FILE_BYTES_MAX
from gateway.tls.client import ClientTlsError, client_context, trusted_stamp
from gateway.tls.dates import Dates, judge_dates

_CERTIFICATE_MESSAGE: Final = 11
"""`certificate` of TLS's HandshakeType (RFC 8446, section 4)."""

shown_certificates: ContextVar[list[bytes]] = ContextVar("shown_certificates")
"""Gets the certificate that the broker shows on the connection that is being made."""


class KafkaFileError(OSError):
    """A certificate, key or password cannot be used; the message names the setting and says what to do."""


@dataclass(frozen=True, slots=True)
class KafkaFiles:
    """Contents of the files that the settings name."""

    context: ssl.SSLContext | None
    password: str | None = field(repr=False)
    token_context: ssl.SSLContext | None
    """Verifies the server that gives access tokens; None without OAUTHBEARER."""
    digests: Mapping[Path, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class UnusableFiles:
    """Files that cannot be used. They are not read again until a digest or a mode changes."""

    digests: Mapping[Path, bytes]
    modes: Mapping[Path, int]
    """A password file that others may read is refused. A change of its mode mends that without a change of its
    content."""


def read_files(kafka: KafkaSettings, judge: Dates | None = None) -> KafkaFiles:
    """Read the files that the settings name. Raises KafkaFileError if one of them cannot be used.

    `judge` gives the time by which brokers' certificates are judged. Without it, the system's clock does.
    """
    # Digests come first, so that a file that changes while it is read counts as changed.
    digests = digests_of(kafka)
    tls = kafka.tls
    context = None if tls is None else _tls_context(tls, tuple(digests.items()), trusted_stamp(tls.ca), judge)
    if kafka.sasl is None:
        return KafkaFiles(context, None, None, digests)
    return KafkaFiles(context, _password(kafka.sasl), _token_context(kafka.sasl, digests, judge), digests)


def digests_of(kafka: KafkaSettings) -> dict[Path, bytes]:
    """SHA-256 of each file that the settings name; empty for a file that cannot be read."""
    paths: list[Path | None] = []
    if kafka.tls is not None:
        paths += [kafka.tls.ca, kafka.tls.certificate, kafka.tls.key]
    if kafka.sasl is not None:
        paths += [kafka.sasl.password_file, kafka.sasl.token_ca]
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


def _token_context(
    sasl: KafkaSaslSettings, digests: Mapping[Path, bytes], judge: Dates | None
) -> ssl.SSLContext | None:
    if sasl.mechanism != OAUTHBEARER:
        return None
    tls = KafkaTlsSettings(ca=sasl.token_ca)
    try:
        return _tls_context(tls, tuple(digests.items()), trusted_stamp(tls.ca), judge)
    except KafkaFileError as error:
        raise KafkaFileError(f"kafka.sasl.token_ca: {str(error).removeprefix('kafka.tls.ca: ')}") from error


@lru_cache(maxsize=2)
def _tls_context(
    tls: KafkaTlsSettings, _digests: tuple[object, ...], _trusted: tuple[object, ...], judge: Dates | None
) -> ssl.SSLContext:
    """The context for the files' present contents. It is kept, as it holds all authorities and sessions begin often."""
    try:
        context = client_context(tls.ca, tls.certificate, tls.key)
    except ClientTlsError as error:
        raise KafkaFileError(f"kafka.{error}") from error
    _watch_certificates(context)
    if judge is not None:
        judge_dates(context, judge)
    return context


def _watch_certificates(context: ssl.SSLContext) -> None:
    """Keep the certificate that a server shows in `shown_certificates`, as OpenSSL gives none that it refused.

    asyncio handles a connection's data in the context of the task that made it. `_msg_callback` is there for debugging
    and sees no data of the application. If some Python lacks it, the words for a refused certificate lack its names and
    dates, and nothing else.
    """

    def came(_: ssl.SSLObject, direction: str, version: int, _content: int, message: int, data: bytes) -> None:
        shown = shown_certificates.get(None)
        if direction == "read" and message == _CERTIFICATE_MESSAGE and shown is not None:
            shown[:] = [_first_certificate(data, is_1_3=version >= ssl.TLSVersion.TLSv1_3)]

    context._msg_callback = came  # type: ignore[attr-defined] # noqa: SLF001


def _first_certificate(message: bytes, *, is_1_3: bool) -> bytes:
    """The first certificate, in DER, of a handshake message (RFC 5246, section 7.4.2; RFC 8446, section 4.4.2)."""
    # Before it stand type and length, in TLS 1.3 a context with its length, and the list's length.
    at = 4 + (1 + message[4] if is_1_3 and len(message) > 4 else 0) + 3
    length = int.from_bytes(message[at : at + 3])
    return bytes(message[at + 3 : at + 3 + length])
