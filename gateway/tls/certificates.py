"""Reads certificates and keys without a connection: PEM, dates, names, and whether a key fits its certificate."""

import binascii
import codecs
import ipaddress
import os
import re
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

FILE_BYTES_MAX: Final = 4_000_000
"""Bytes that are read of a file: more than all authorities of the world take."""
SOON: Final = timedelta(days=30)
"""Time before its end from which a certificate is reported."""

_BEGIN = re.compile(r"^-----BEGIN ([A-Z0-9 ]+)-----[\0-\t\x0b-\x20]*$", re.MULTILINE)
"""Blanks and control characters may follow, as OpenSSL allows it. A line with more is no beginning."""
_CERTIFICATE = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----")
_LABELS: Final = frozenset({"CERTIFICATE", "X509 CERTIFICATE", "TRUSTED CERTIFICATE"})
"""Labels that OpenSSL takes for a certificate (PEM_read(3))."""
_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")
_ENCRYPTED = re.compile(r"-----BEGIN ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.MULTILINE)
_UTC_TIME, _GENERALIZED_TIME, _EXPLICIT_0, _EXPLICIT_3 = 0x17, 0x18, 0xA0, 0xA3
_DNS_NAME, _IP_ADDRESS = 0x82, 0x87
"""Tags of DER (X.690)."""
_SUBJECT_ALT_NAME = bytes.fromhex("551d11")
"""The object identifier 2.5.29.17, as DER has it."""
_DAMAGED: Final = (
    "is damaged, so that TLS does not take it (or its lines were indented, joined or taken apart on the way); copy the "
    "file anew from who made it, byte for byte"
)


class CertificateFileError(Exception):
    """A file cannot be used; the message says why and what to do."""


class Validity(NamedTuple):
    """The dates between which a certificate is valid."""

    begin: datetime
    end: datetime


def read_certificates(path: Path) -> list[Validity]:
    """The dates of each certificate in a PEM file, in the file's order. Raises CertificateFileError."""
    text = _read(path)
    try:
        # Loaded as the gateway loads it: OpenSSL decides whether the file will do, and not this module's reader.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cafile=path)
        found = [validity(der) for der in _certificates(text)]
    except (OSError, ValueError) as error:
        if _CERTIFICATE.search(text):
            raise CertificateFileError(f"{path} {_DAMAGED}") from error
        found = []
    if not found and _KEY.search(text):
        raise CertificateFileError(f"{path} holds a private key and no certificate; have the two been mixed up?")
    if not found:
        raise CertificateFileError(
            f"{path} holds no certificate in PEM, which begins with -----BEGIN CERTIFICATE-----; ask who made it for "
            "PEM (openssl x509 -inform der turns DER into it)"
        )
    return found


def _certificates(text: str) -> list[bytes]:
    """The certificates of a PEM file that OpenSSL has taken (RFC 7468), in DER."""
    found, at = [], 0
    while begin := _BEGIN.search(text, at):
        end = text.find("\n-----END ", begin.end())
        at = end if end >= 0 else len(text)
        if begin[1] in _LABELS:
            # OpenSSL's base64 ends at the first dash, too.
            found.append(binascii.a2b_base64(text[begin.end() : at].partition("-")[0]))
    return found


def read_names(path: Path) -> list[str]:
    """The names and addresses that the first certificate of a file is for (`host_names`).

    The file must be one that `read_certificates` takes. Raises CertificateFileError.
    """
    try:
        return host_names(next(iter(_certificates(_read(path))), b""))
    except ValueError as error:
        raise CertificateFileError(f"{path} {_DAMAGED}") from error


def check_pair(certificate: Path, key: Path) -> None:
    """Check that a private key can be used and belongs to a certificate. Raises CertificateFileError, about the key."""
    text = _read(key)
    if _ENCRYPTED.search(text):
        raise CertificateFileError(
            f"{key} is encrypted, and a daemon cannot ask for the passphrase; write it without one "
            f"(openssl pkey -in {key} -out NEW), mode 0400"
        )
    if not _KEY.search(text):
        raise CertificateFileError(
            f"{key} holds no private key in PEM, which begins with -----BEGIN PRIVATE KEY-----; "
            "have certificate and key been mixed up?"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if reason in {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"}:
            raise CertificateFileError(
                f"{key} is not the key of the first certificate in {certificate}; write the key that this one was "
                "made with, and the certificate of this box before those of its authorities"
            ) from error
        if reason is None or getattr(error, "library", None) == "PEM":
            # The certificate was found good, but OpenSSL is a little stricter with a chain than with a CA's file.
            raise CertificateFileError(f"{key} (or {certificate}) {_DAMAGED}") from error
        raise CertificateFileError(
            f"{key} and {certificate} are not taken by TLS ({reason.lower().replace('_', ' ')}); have a new pair made"
        ) from error


def others_may_read(path: Path) -> bool:
    """Whether anybody on this box may read a file, by its mode and by each directory on the path. Raises OSError."""
    real = Path(os.path.realpath(path))
    return bool(real.stat().st_mode & stat.S_IROTH) and all(
        folder.stat().st_mode & stat.S_IXOTH for folder in real.parents
    )


def date_trouble(dates: Validity, now: datetime) -> str | None:
    """Words for what is wrong with a certificate's dates, or None."""
    if now < dates.begin:
        return f"is not valid before {_day(dates.begin)}"
    if now >= dates.end:
        return f"has expired on {_day(dates.end)}"
    return None


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d}"


def _read(path: Path) -> str:
    try:
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise CertificateFileError(f"{path} {what}; write where the file is, or put it there")
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except PermissionError as error:
        raise CertificateFileError(
            f"{path} may not be read by this user; let the user that sluice runs as read it, and no others (0400)"
        ) from error
    except OSError as error:
        raise CertificateFileError(f"{path} cannot be read: {error.strerror}; is the disk sound?") from error
    if len(content) > FILE_BYTES_MAX:
        raise CertificateFileError(f"{path} is larger than any file of certificates or keys; write the right file")
    return content.removeprefix(codecs.BOM_UTF8).decode("ascii", "replace")


def validity(der: bytes) -> Validity:
    """The dates of an X.509 certificate (RFC 5280, section 4.1). Raises ValueError if it is no certificate."""
    try:
        _, at, _ = _element(der, 0)  # Certificate
        _, at, _ = _element(der, at)  # TBSCertificate
        tag, _, end = _element(der, at)
        if tag == _EXPLICIT_0:  # version
            at = end
        for _ in ("serialNumber", "signature", "issuer"):
            _, _, at = _element(der, at)
        _, at, _ = _element(der, at)  # Validity
        times = []
        for _ in ("notBefore", "notAfter"):
            tag, start, at = _element(der, at)
            times.append(_time(tag, der[start:at]))
    except IndexError as error:
        raise ValueError("it ends in the middle") from error
    return Validity(*times)


def host_names(der: bytes) -> list[str]:
    """The DNS names and IP addresses of an X.509 certificate's subjectAltName (RFC 5280, section 4.2.1.6).

    Empty if it has none. Raises ValueError if it is no certificate.
    """
    try:
        _, at, _ = _element(der, 0)  # Certificate
        _, at, end = _element(der, at)  # TBSCertificate
        for tag, start, stop in _elements(der, at, end):
            if tag == _EXPLICIT_3:
                return [name for extension in _extensions(der, start, stop) for name in _alternative_names(extension)]
    except IndexError as error:
        raise ValueError("it ends in the middle") from error
    return []


def _extensions(der: bytes, start: int, stop: int) -> Iterator[bytes]:
    """The values of the extensions called subjectAltName. Mostly there is one."""
    found = next(_elements(der, start, stop), None)
    if found is None:
        raise ValueError("its extensions are empty")
    _, at, end = found
    for _, first, last in _elements(der, at, end):
        (_, name, name_end), *_, (_, value, value_end) = _elements(der, first, last)
        if der[name:name_end] == _SUBJECT_ALT_NAME:
            yield der[value:value_end]


def _alternative_names(der: bytes) -> Iterator[str]:
    """The names of hosts among GeneralNames. The other kinds name people and directories."""
    _, at, end = _element(der, 0)
    for tag, start, stop in _elements(der, at, end):
        if tag == _DNS_NAME:
            yield der[start:stop].decode("ascii", "replace")
        elif tag == _IP_ADDRESS:
            yield str(ipaddress.ip_address(der[start:stop]))


def _elements(der: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The elements that stand between `at` and `end`, one after another."""
    while at < end:
        yield (found := _element(der, at))
        at = found[2]


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """The element that begins at `at`: its tag, and where its content begins and ends."""
    tag, length = der[at], der[at + 1]
    at += 2
    if length & 0x80:
        count = length & 0x7F
        length = int.from_bytes(der[at : at + count])
        at += count
    if at + length > len(der):
        raise ValueError("it is longer than the file")
    return tag, at, at + length


def _time(tag: int, told: bytes) -> datetime:
    """The time of a certificate. UTCTime's year has two digits, from 1950 to 2049 (RFC 5280, section 4.1.2.5.1)."""
    text = told.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no date stands where dates must")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
