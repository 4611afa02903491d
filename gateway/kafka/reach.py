"""Tells an installer why a Kafka broker cannot be reached, or turns this gateway away, and what to do.

The words fit the line of a status ("Kafka unreachable since 10:02: the name kafka.example does not resolve"). The hint
is for `sluice check`. Neither ever holds a password: a library's text is repeated only if it cannot have one.
"""

import errno
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    KafkaConnectionError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from gateway.host.terminal_text import size
from gateway.kafka.answers import FIELDS_MAX, TooManyFieldsError, UnfitAnswerError, UnfitRecordsError
from gateway.settings import OAUTHBEARER, KafkaSaslSettings, KafkaSettings
from gateway.tls.certificates import date_trouble, host_names, validity
from gateway.tls.client import tls_reason
from gateway.tls.dates import EXPIRED, NOT_YET_VALID, OTHER_NAMES, CertificateDateError

Stage = Literal["token", "name", "connect", "tls", "versions", "login", "request"]
"""Steps of a connection: look-up of the name, TCP, TLS, ApiVersions, SASL, first request of the session's own."""

NAMES_TOLD_MAX: Final = 8
"""Names of a certificate, or mechanisms of a broker, that are told."""
HOST_SHOWN_MAX: Final = 255
"""Characters of a host that are shown. Names of DNS are shorter, but a broker may give anything as its own address."""
_SHOWN_MAX: Final = 64
"""Characters of a mechanism's name that are repeated."""

_SELF_SIGNED_OR_UNKNOWN: Final = frozenset({2, 18, 19, 20, 21})
"""X509_V_ERR_... of OpenSSL (X509_STORE_CTX_get_error(3))."""
_NO_TLS_REASONS: Final = frozenset(
    {
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "UNKNOWN_PROTOCOL",
        "RECORD_LAYER_FAILURE",
        "UNEXPECTED_MESSAGE",
        "BAD_RECORD_TYPE",
        "PACKET_LENGTH_TOO_LONG",
    }
)
_NO_COMMON_REASONS: Final = ("UNSUPPORTED_PROTOCOL", "ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE")
_CERTIFICATE_ALERTS: Final = (
    "ALERT_CERTIFICATE_REQUIRED",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_HANDSHAKE_FAILURE",
    "ALERT_UNKNOWN_CA",
    "ALERT_CERTIFICATE_UNKNOWN",
    "ALERT_CERTIFICATE_EXPIRED",
    "ALERT_CERTIFICATE_REVOKED",
    "ALERT_UNSUPPORTED_CERTIFICATE",
    "ALERT_ACCESS_DENIED",
)
"""Alerts by which brokers refuse a client's certificate. OpenSSL's names for them begin in several ways."""
_CERTIFICATE_FLAWS: Final = {
    "ALERT_UNKNOWN_CA": "it does not know the authority that signed it",
    "ALERT_CERTIFICATE_EXPIRED": "by its clock that has expired",
    "ALERT_CERTIFICATE_REVOKED": "that was revoked",
    "ALERT_UNSUPPORTED_CERTIFICATE": "it knows no certificates of that kind",
}
"""Alerts that say what is wrong with the certificate, in words."""
_TLS_ALERT: Final = 0x1503
"""First two bytes of a TLS alert (RFC 8446, section 5.1), read as the length of an answer of Kafka's."""
_RTF_UP, _RTF_REJECT = 0x1, 0x200
_CLOSED: Final = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, EOFError, ssl.SSLEOFError)

_BOX_SHORT: Final = "see what this box lacks (free -m, ps -eLf, ulimit -a); the name is looked up again all the time"
_PORT: Final = "is this the brokers' port for clients, as kafka.bootstrap has it, and"
_PLAIN_PORT: Final = (
    "check that the port in kafka.bootstrap is the brokers' port for TLS (SSL or SASL_SSL in their listeners), or take "
    "[kafka.tls] out"
)


class TokenError(ConnectionError):
    """No access token can be had (`tokens.py`). The message says why, and `hint` what to do. Neither holds a secret."""

    def __init__(self, words: str, hint: str) -> None:
        super().__init__(words)
        self.words = words
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in words short enough for a status, and a hint what to do about it."""

    words: str
    hint: str
    is_reached: bool = False
    """Whether the network is not to blame: something answers, and one side refuses the other."""
    stage: Stage = "connect"
    """Step that the connection reached. A fault of certificates counts as TLS, whenever it is reported."""
    lasts: bool = False
    """Whether it stays the reason although the same broker gives good answers too."""


def reach_words(  # noqa: PLR0913 - what is known of an attempt that failed
    error: BaseException,
    host: str,
    port: int,
    kafka: KafkaSettings,
    *,
    stage: Stage = "connect",
    shown: bytes | None = None,
    mechanisms: Sequence[str | None] = (),
) -> Fault:
    """Words for an attempt to connect to `host:port` that failed at a stage.

    `shown` is the certificate that the broker showed, in DER. `mechanisms` are the broker's mechanisms for SASL, with
    None for a null among them.
    """
    error = _cause_of(error)
    fault = _fault(error, _Place(host[:HOST_SHOWN_MAX], port, kafka), stage, shown, mechanisms)
    is_reached = stage not in {"name", "connect"} and not isinstance(error, TimeoutError)
    return replace(fault, is_reached=is_reached, stage="tls" if isinstance(error, ssl.SSLError) else stage)


def _fault(
    error: BaseException, at: "_Place", stage: Stage, shown: bytes | None, mechanisms: Sequence[str | None]
) -> Fault:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_refused(error, at, shown)
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return _tls_failed(error, at)
    if stage == "name" or isinstance(error, socket.gaierror):
        return _no_address(error, at)
    if stage == "connect":
        return _not_connected(error, at)
    if stage == "tls":
        return _handshake_ended(error, at, shown)
    return (
        _unfit(error, at, stage) if isinstance(error, UnfitAnswerError) else _turned_away(error, at, stage, mechanisms)
    )


def plain_words(error: BaseException, host: str, port: int) -> Fault:
    """Words for any attempt that failed. They repeat nothing that a peer sent."""
    return Fault(
        f"{host_and_port(host[:HOST_SHOWN_MAX], port)} cannot be reached: {_told(error)}",
        "check kafka.bootstrap, this box's network, and the way between",
    )


def host_and_port(host: str, port: int) -> str:
    """`host:port` in the form of `kafka.bootstrap`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class _Place:
    """A broker's address, and the settings that led there."""

    host: str
    port: int
    kafka: KafkaSettings

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)

    @property
    def is_advertised(self) -> bool:
        """Whether a broker named this address, and not the settings."""
        return str(self) not in self.kafka.bootstrap

    def fault(self, words: str, hint: str, or_else: str) -> Fault:
        """A fault of the address itself. The hint depends on who gave the address.

        `hint` is for an address of the settings. `or_else` is for an address that a broker advertises, if the address
        is right.
        """
        if not self.is_advertised:
            return Fault(words, hint)
        return Fault(
            f"{words}; a broker gave this address as its own (advertised.listeners)",
            f"set advertised.listeners of that broker to an address that this box can reach, or {or_else}",
        )


def _cause_of(error: BaseException) -> BaseException:
    """The error behind the Kafka client's own connection errors."""
    while isinstance(error, KafkaConnectionError) and error.__cause__ is not None:
        error = error.__cause__
    return error


# -- name and TCP ---------------------------------------------------------------------------------


def _not_connected(error: BaseException, at: _Place) -> Fault:
    if isinstance(error, TimeoutError):
        return at.fault(
            f"{at} does not answer: nothing comes back",
            "is kafka.bootstrap right, is the broker up, and does the network, with every firewall on the way, let "
            "this box reach it?",
            "let the network, with every firewall on the way, lead there; is that broker up?",
        )
    if isinstance(error, ConnectionRefusedError):
        return at.fault(
            f"nothing listens at {at}",
            "is the broker up, and are host and port in kafka.bootstrap right?",
            "have it listen there; is it up?",
        )
    return _not_routed(error, at)


def _not_routed(error: BaseException, at: _Place) -> Fault:
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL}:
        return Fault(
            f"this box has no network that leads to {at}",
            "check its cable, Wi-Fi or modem, its address (ip address) and its routes (ip route)",
        )
    if number in {errno.EHOSTUNREACH, errno.EHOSTDOWN}:
        return at.fault(
            f"no way leads to {at}: the network says that it cannot be reached",
            "check this box's network and the routers on the way, and kafka.bootstrap",
            "have the network lead there: check this box's own, and the routers on the way",
        )
    if number in {errno.EPERM, errno.EACCES}:
        return Fault(f"this box's own firewall forbids to connect to {at}", "allow it there (nft list ruleset)")
    plain = plain_words(error, at.host, at.port)
    return at.fault(plain.words, plain.hint, "check this box's network, and the way between")


def _no_address(error: BaseException, at: _Place) -> Fault:
    unresolved = f"the name {at.host} does not resolve"
    number = error.errno if isinstance(error, socket.gaierror) else None
    if number in {socket.EAI_NONAME, socket.EAI_NODATA} or isinstance(error, UnicodeError):
        return at.fault(
            f"{unresolved}: DNS knows no such name",
            "is it written right in kafka.bootstrap, and is this box's DNS the one that knows it (/etc/resolv.conf)?",
            "have this name known here, by this box's DNS or a line in /etc/hosts",
        )
    if number == socket.EAI_FAIL:
        return at.fault(
            f"{unresolved}: a DNS server answers, and refuses to look it up",
            "are the servers in /etc/resolv.conf those that this box may ask?",
            "have this name known here: are the servers in /etc/resolv.conf those that this box may ask?",
        )
    if number == socket.EAI_MEMORY:
        return Fault(f"{unresolved}: this box has no memory, or no thread, left to look it up", _BOX_SHORT)
    if number != socket.EAI_AGAIN and not isinstance(error, TimeoutError):
        # The system itself lacks something (EAI_SYSTEM).
        return Fault(f"{unresolved}: {_told(error)}", _BOX_SHORT)
    if not _has_default_route():
        return Fault(
            f"{unresolved}: no DNS server answers, and this box has no default route",
            "check its cable, Wi-Fi or modem, its address (ip address) and its routes (ip route); where the DNS server "
            "is in this box's own network, check that one, and /etc/resolv.conf",
        )
    return at.fault(
        f"{unresolved}: this box's DNS does not answer",
        "are the servers in /etc/resolv.conf right, and can this box reach them? It is asked again all the time",
        "mend this box's DNS: are the servers in /etc/resolv.conf right, and can this box reach them?",
    )


def _has_default_route(folder: Path = Path("/proc/net")) -> bool:
    """Whether this box has a default route; true if that cannot be known.

    Both of the kernel's tables are read (net/ipv4/fib_trie.c and net/ipv6/route.c), with flags as in linux/route.h.
    """
    try:
        four = (folder / "route").read_text(encoding="ascii").splitlines()[1:]
        six_table = folder / "ipv6_route"
        six = six_table.read_text(encoding="ascii").splitlines() if six_table.exists() else []
    except OSError:
        return True
    # Destination, its mask or prefix, flags.
    routes = [(columns[1], columns[7], columns[3]) for columns in map(str.split, four)]
    routes += [(columns[0], columns[1], columns[8]) for columns in map(str.split, six)]
    return any(
        not int(destination, 16) and not int(mask, 16) and int(flags, 16) & (_RTF_UP | _RTF_REJECT) == _RTF_UP
        for destination, mask, flags in routes
    )


# -- TLS ------------------------------------------------------------------------------------------


def _certificate_refused(error: ssl.SSLCertVerificationError, at: _Place, shown: bytes | None) -> Fault:
    """The fault of a broker's certificate that this gateway does not accept."""
    code = error.verify_code
    if isinstance(error, CertificateDateError):
        return Fault(
            f"the certificate of {at} {error.verify_message}, although this box's own clock is not to be trusted",
            "have the certificate renewed at the broker",
        )
    if code in OTHER_NAMES:
        return at.fault(
            f"the certificate of {at} is {_for_whom(shown)}, and not for {at.host}",
            "write a name that it is for into kafka.bootstrap, or have it made anew with this one (subjectAltName)",
            "have its certificate made anew with this name (subjectAltName)",
        )
    if code in {EXPIRED, NOT_YET_VALID}:
        now = datetime.now(UTC)
        return Fault(
            f"the certificate of {at} {_date_words(code, shown, now)}; this box's clock says {now:%Y-%m-%d}",
            "where that clock is right, have the certificate renewed at the broker; where it is not, see to time sync",
        )
    if code in _SELF_SIGNED_OR_UNKNOWN:
        ca = None if at.kafka.tls is None else at.kafka.tls.ca
        whom, named = ("this box trusts", "") if ca is None else ("kafka.tls.ca names", f" (it is {ca} now)")
        return Fault(
            f"the certificate of {at} is signed by nobody whom {whom}",
            "write the certificate of the authority that signed the brokers' into a file, and that file's path as "
            f"kafka.tls.ca{named}; ask who runs the brokers for it. Where others stand between that authority and the "
            "brokers' own certificates, the brokers must show those too",
        )
    return Fault(
        f"the certificate of {at} is not accepted: {error.verify_message}",
        "have it made anew, or check kafka.tls.ca and this box's clock",
    )


def _for_whom(shown: bytes | None) -> str:
    try:
        names = host_names(shown or b"")
    except ValueError:
        return "for other names"
    if not names:
        return "for no name at all (subjectAltName)"
    # Anybody may answer there, so the names in a certificate must not act on a terminal.
    told = [name for name in names if name.isprintable()][:NAMES_TOLD_MAX]
    return f"for {', '.join(told)}" + (", ..." if len(names) > len(told) else "")


def _date_words(code: int, shown: bytes | None, now: datetime) -> str:
    try:
        trouble = date_trouble(validity(shown or b""), now)
    except ValueError:
        trouble = None
    # If its own dates are right, the dates of a certificate above it are wrong.
    return trouble or f"hangs on one that {'has expired' if code == EXPIRED else 'is not valid yet'}"


def _tls_failed(error: ssl.SSLError, at: _Place) -> Fault:
    reason = str(error.reason or "")
    if reason in _NO_TLS_REASONS:
        return Fault(f"what answers at {at} does not speak TLS", _PLAIN_PORT)
    if reason.endswith(_NO_COMMON_REASONS):
        return Fault(
            f"{at} speaks neither TLS 1.2 nor 1.3, and this gateway speaks nothing older",
            "allow one of them at the broker (ssl.enabled.protocols)",
        )
    if not reason.endswith(_CERTIFICATE_ALERTS):
        return Fault(f"TLS with {at} fails: {tls_reason(error)}", "check the brokers' settings of TLS, and [kafka.tls]")
    if at.kafka.tls is None or at.kafka.tls.certificate is None:
        return _certificate_wanted(at, "ends the TLS handshake")
    flaw = next((f": {words}" for alert, words in _CERTIFICATE_FLAWS.items() if reason.endswith(alert)), "")
    return Fault(
        f"{at} does not accept this gateway's certificate{flaw}",
        "kafka.tls.certificate must be in date, of an authority that the brokers trust (ssl.truststore), and not "
        "revoked; have it made anew",
    )


def _certificate_wanted(at: _Place, did: str) -> Fault:
    return Fault(
        f"{at} {did}: it seems to want a certificate of this gateway, and none is set",
        "write certificate and key under [kafka.tls]; who runs the brokers makes them (ssl.client.auth=required)",
    )


def _handshake_ended(error: BaseException, at: _Place, shown: bytes | None) -> Fault:
    if shown is not None and isinstance(error, _CLOSED):
        return _closed(error, at, "versions")
    if isinstance(error, TimeoutError):
        return Fault(f"{at} takes connections and says nothing in TLS", _PLAIN_PORT)
    if isinstance(error, _CLOSED):
        return Fault(f"{at} ends the TLS handshake: most likely it does not speak TLS there", _PLAIN_PORT)
    return Fault(f"TLS with {at} fails: {_told(error)}", _PLAIN_PORT)


# -- Kafka's own opening --------------------------------------------------------------------------


def _turned_away(error: BaseException, at: _Place, stage: Stage, mechanisms: Sequence[str | None]) -> Fault:
    sasl = at.kafka.sasl
    if sasl is not None and isinstance(error, (UnsupportedSaslMechanismError, IllegalSaslStateError)):
        return _mechanism_refused(at, sasl.mechanism, mechanisms)
    if sasl is not None and isinstance(error, (SaslAuthenticationFailed, AuthenticationFailedError)):
        return _log_in_refused(at, sasl)
    if isinstance(error, TimeoutError):
        what = "the log-in" if stage == "login" else "Kafka's first request"
        bound = "kafka.request_timeout_s" if stage == "request" else "kafka.connect_timeout_s"
        return Fault(
            f"{at} takes connections and does not answer {what}",
            f"{_PORT} is the broker well? A very slow link may need a longer {bound}",
        )
    if isinstance(error, _CLOSED) or (isinstance(error, OSError) and error.errno is not None):
        return _closed(error, at, stage)
    if stage == "login":
        return Fault(
            f"{at} answers the log-in with what does not fit it",
            "most likely the broker does not know the password itself, and so is not the one that is meant, or the "
            "user is not known for this mechanism: check kafka.sasl",
        )
    return Fault(f"what answers at {at} is no Kafka broker", f"{_PORT} do the brokers run there?")


def _log_in_refused(at: _Place, sasl: KafkaSaslSettings) -> Fault:
    if sasl.mechanism == OAUTHBEARER:
        return Fault(
            f"{at} refuses the token of client {sasl.user}",
            "have the brokers trust the authorization server (its keys and issuer), and compare kafka.sasl.scope and "
            "the token's audience with what they expect",
        )
    return Fault(
        f"{at} refuses the log-in of user {sasl.user}: user or password is wrong",
        f"mend kafka.sasl.user, or the password in {sasl.password_file}, which is read again when it changes; the "
        f"brokers must know that user for {sasl.mechanism}",
    )


def _unfit(error: UnfitAnswerError, at: _Place, stage: Stage) -> Fault:
    """The fault of an answer that no broker gives, with a guess at who answers."""
    if at.kafka.tls is None and _is_alert(error):
        return _closed(error, at, stage)
    begins = error.announced.to_bytes(4).decode("latin-1")
    if isinstance(error, TooManyFieldsError):
        words = (
            f"{at} lists more than {FIELDS_MAX:,} numbers and names in one answer of {size(error.announced)}: the "
            "answer was dropped, and the connection ended. No cluster is as large that this gateway can write to"
        )
    elif isinstance(error, UnfitRecordsError):
        words = (
            f"{at} gives records that are damaged, or larger than {size(error.limit)} once unpacked: the answer was "
            "dropped, and the connection ended"
        )
    elif begins.isascii() and begins.isprintable():
        who = "a web server listens there" if begins == "HTTP" else "something else listens there"
        words = (
            f"what answers at {at} is no Kafka broker: {who}. Its answer begins with {begins!r}; read as a length, "
            f"that is {size(error.announced)}: the connection was ended, and nothing more was read"
        )
    else:
        words = (
            f"{at} announces an answer of {size(error.announced)}, and no broker's answer has more than "
            f"{size(error.limit)} here: the connection was ended, and nothing more was read. Most likely it is no "
            "Kafka broker"
        )
    sure = "" if at.kafka.tls is not None else "; [kafka.tls] makes sure of who answers"
    return Fault(words, f"{_PORT} do the brokers run there?{sure}", lasts=stage == "request")


def _mechanism_refused(at: _Place, mechanism: str, mechanisms: Sequence[str | None]) -> Fault:
    offered = [name[:_SHOWN_MAX] for name in mechanisms[:NAMES_TOLD_MAX] if name and name.isprintable()]
    if not offered:
        return Fault(
            f"{at} takes no log-in (SASL), and [kafka.sasl] is set",
            "write the brokers' port with SASL into kafka.bootstrap; or take [kafka.sasl] out, where none is wanted",
        )
    return Fault(
        f"{at} does not take {mechanism} for log-in; it takes: {', '.join(offered)}",
        "write one of those as kafka.sasl.mechanism, or have it allowed at the brokers (sasl.enabled.mechanisms)",
    )


def _closed(error: BaseException, at: _Place, stage: Stage) -> Fault:
    """The most likely fault if the broker ends the connection without a word."""
    kafka = at.kafka
    if kafka.tls is None and (_is_alert(error) or stage == "versions"):
        sure = "wants TLS" if _is_alert(error) else "closes the connection at once: most likely it wants TLS"
        return Fault(
            f"{at} {sure}, and [kafka.tls] is not set",
            "add [kafka.tls], with ca where the brokers' certificates are of an authority of your own; or write the "
            "brokers' port without TLS into kafka.bootstrap",
        )
    if stage == "versions" and kafka.tls is not None and kafka.tls.certificate is None:
        return _certificate_wanted(at, "ends the connection after the TLS handshake")
    if stage == "versions":
        return Fault(
            f"{at} ends the connection after the TLS handshake: it may not accept this gateway's certificate",
            "kafka.tls.certificate must be in date, and of an authority that the brokers trust (ssl.truststore)",
        )
    if kafka.sasl is None and stage == "request":
        return Fault(
            f"{at} closes the connection at the first request: most likely it wants a log-in (SASL), and none is set",
            "add [kafka.sasl] with mechanism, user and password_file; or write the brokers' port without SASL into "
            "kafka.bootstrap",
        )
    if stage == "login":
        return Fault(
            f"{at} closes the connection at the log-in",
            "check kafka.sasl.mechanism, user and password, and that this port of the brokers' is one with SASL",
        )
    return Fault(
        f"{at} closes the connection at the first request",
        "is the broker starting or stopping? Its own log tells why",
    )


def _is_alert(error: BaseException) -> bool:
    """Whether the length of an answer is really a TLS alert: the peer says that it cannot speak with us."""
    expected = error.announced if isinstance(error, UnfitAnswerError) else getattr(error, "expected", None)
    return isinstance(expected, int) and expected >> 16 == _TLS_ALERT


def _told(error: BaseException) -> str:
    """The system's text, which has no secrets in it. Of other errors only their type."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
