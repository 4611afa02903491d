"""Makes TLS contexts for connections that the gateway opens: to a site's MQTT broker, and to Kafka."""

import re
import ssl
from pathlib import Path
from typing import Final

from gateway.tls.certificates import CertificateFileError, check_pair, read_certificates

_IN_SOURCE: Final = re.compile(r" \(_ssl\.c:\d+\)")


class ClientTlsError(Exception):
    """A file cannot be used; the message begins with its setting (`tls.ca`, `tls.certificate`, `tls.key`) or `tls`."""


def client_context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """A context that verifies the server's certificate and its host name, and speaks TLS 1.2 or 1.3.

    Without `ca`, the authorities that this box trusts count. Raises ClientTlsError.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A named authority counts by itself, even if it is no root (the default from Python 3.13 on).
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        # Python 3.13 also refuses an authority without a key usage (RFC 5280), as `openssl req -x509` makes it. A site
        # that works on Debian 12 must work on Debian 13. The flag changes neither who is trusted nor for which names.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if certificate is not None:
            # An empty password, as an encrypted key must not ask a daemon's terminal for one.
            context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise ClientTlsError(_file_trouble(ca, certificate, key, error)) from error
    return context


def trusted_stamp(ca: Path | None) -> tuple[object, ...]:
    """A value that changes with the authorities that this box trusts. With `ca` they do not count, and it is empty."""
    if ca is not None:
        return ()
    paths = ssl.get_default_verify_paths()
    return tuple((path, _stamp(Path(path))) for path in (paths.cafile, paths.capath) if path is not None)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _file_trouble(ca: Path | None, certificate: Path | None, key: Path | None, error: Exception) -> str:
    """Words for the file that cannot be used, and why."""
    place = "tls.ca"
    try:
        if ca is not None:
            read_certificates(ca)
        place = "tls.certificate"
        if certificate is not None:
            read_certificates(certificate)
        place = "tls.key"
        if certificate is not None and key is not None:
            check_pair(certificate, key)
    except CertificateFileError as found:
        return f"{place}: {found}"
    return (
        f"tls: {tls_reason(error)}; check tls.ca, tls.certificate and tls.key, which must be PEM files, the key "
        "without a passphrase"
    )


def tls_reason(error: BaseException) -> str:
    """The TLS library's words for an error, without the place in its source."""
    reason = getattr(error, "reason", None)
    told = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(reason).lower().replace("_", " ") if reason else _IN_SOURCE.sub("", told)
