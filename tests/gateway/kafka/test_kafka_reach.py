"""Every way in which a broker is not reached has its own words, and none of them holds a password."""

import asyncio
import errno
import socket
import ssl
from pathlib import Path

import pytest
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from gateway.kafka import reach
from gateway.kafka.reach import Stage, plain_words, reach_words
from gateway.settings import KafkaSaslSettings, KafkaSettings, KafkaTlsSettings

BOOTSTRAP = KafkaSettings(("kafka.example:9092", "[::1]:9092"))
TLS = KafkaSettings(("kafka.example:9092",), tls=KafkaTlsSettings())
CERTIFIED = KafkaSettings(
    ("kafka.example:9092",), tls=KafkaTlsSettings(ca=Path("ca.pem"), certificate=Path("c.pem"), key=Path("k.pem"))
)
SASL = KafkaSettings(
    ("kafka.example:9092",),
    tls=KafkaTlsSettings(),
    sasl=KafkaSaslSettings(mechanism="SCRAM-SHA-512", user="gw1", password_file=Path("/etc/sluice/kafka-password")),
)


def caused_by(cause: BaseException) -> KafkaConnectionError:
    """The Kafka client's error for the end of a connection."""
    error = KafkaConnectionError("Connection at kafka.example:9092 closed")
    error.__cause__ = cause
    return error


def alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] told (_ssl.c:1006)")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "words", "hint"),
    [
        (socket.gaierror(socket.EAI_NONAME, "x"), "the name kafka.example does not resolve: DNS knows no", "written"),
        (socket.gaierror(socket.EAI_NODATA, "x"), "the name kafka.example does not resolve: DNS knows no", "written"),
        (socket.gaierror(socket.EAI_AGAIN, "x"), "does not resolve: this box's DNS does not answer", "resolv.conf"),
        (socket.gaierror(socket.EAI_FAIL, "x"), "does not resolve: a DNS server answers, and refuses", "may ask"),
        (socket.gaierror(socket.EAI_MEMORY, "x"), "does not resolve: this box has no memory, or no thread", "free -m"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "nothing listens at kafka.example:9092", "is the broker up"),
        (TimeoutError(), "kafka.example:9092 does not answer: nothing comes back", "firewall on the way"),
        (TimeoutError(errno.ETIMEDOUT, "x"), "kafka.example:9092 does not answer", "is kafka.bootstrap right"),
        (OSError(errno.ENETUNREACH, "x"), "this box has no network that leads to kafka.example:9092", "ip route"),
        (OSError(errno.EADDRNOTAVAIL, "x"), "this box has no network", "ip address"),
        (OSError(errno.EHOSTUNREACH, "x"), "no way leads to kafka.example:9092", "routers"),
        (PermissionError(errno.EPERM, "x"), "this box's own firewall", "nft list ruleset"),
        (OSError(errno.EIO, "Input/output error"), "cannot be reached: Input/output error", "kafka.bootstrap"),
    ],
)
def test_connecting(error: OSError, words: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_has_default_route", lambda: True)
    fault = reach_words(error, "kafka.example", 9092, BOOTSTRAP)
    assert words in fault.words
    assert hint in fault.hint
    assert "advertised" not in fault.words + fault.hint


def test_a_look_up_that_takes_too_long_is_a_dead_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_has_default_route", lambda: True)
    fault = reach_words(TimeoutError(), "kafka.example", 9092, BOOTSTRAP, stage="name")
    assert fault.words == "the name kafka.example does not resolve: this box's DNS does not answer"


def test_what_this_box_lacks_for_a_look_up_is_not_called_a_dead_dns() -> None:
    # Python's error for EAI_SYSTEM.
    error = OSError(errno.EMFILE, "Too many open files")
    fault = reach_words(error, "kafka.example", 9092, BOOTSTRAP, stage="name")
    assert fault.words == "the name kafka.example does not resolve: Too many open files"
    assert "ulimit" in fault.hint


def test_a_name_that_nobody_can_be_asked_for_is_none() -> None:
    fault = reach_words(UnicodeError("label too long"), "x" * 70, 9092, BOOTSTRAP, stage="name")
    assert "does not resolve: DNS knows no such name" in fault.words


def test_a_dead_dns_and_no_way_out_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_has_default_route", lambda: False)
    fault = reach_words(socket.gaierror(socket.EAI_AGAIN, "x"), "kafka.example", 9092, BOOTSTRAP)
    assert fault.words.endswith("does not resolve: no DNS server answers, and this box has no default route")


FOUR = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
DOCKER = "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
ETHERNET = "eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
ZERO = "0" * 32
ROUTER = f"{ZERO} 00 {ZERO} 00 fd{'0' * 29}1 00000400 00000003 00000000 00000003     eth0\n"
OWN_SIX = f"fd{'0' * 30} 40 {ZERO} 00 {ZERO} 00000100 00000001 00000000 00000001     eth0\n"
# What the kernel has always: it refuses whatever no other route leads to.
REFUSES = f"{ZERO} 00 {ZERO} 00 {ZERO} ffffffff 00000001 00000000 00200200       lo\n"


@pytest.mark.parametrize(
    ("four", "six", "leads_out"),
    [
        (FOUR + ETHERNET, REFUSES, True),
        (FOUR, OWN_SIX + ROUTER + REFUSES, True),
        (FOUR + ETHERNET, None, True),
        # Networks that this box is in itself, one of them of its containers alone.
        (FOUR + DOCKER, OWN_SIX + REFUSES, False),
        (FOUR, None, False),
        # A box that may not look.
        (None, None, True),
    ],
)
def test_only_a_default_route_leads_out(tmp_path: Path, four: str | None, six: str | None, *, leads_out: bool) -> None:
    for name, table in (("route", four), ("ipv6_route", six)):
        if table is not None:
            (tmp_path / name).write_text(table)
    assert reach._has_default_route(tmp_path) is leads_out


def test_an_address_that_a_broker_gave_is_told_as_such() -> None:
    for error in (socket.gaierror(socket.EAI_NONAME, "x"), TimeoutError(), ConnectionRefusedError(111, "x")):
        fault = reach_words(error, "kafka-1.internal", 9092, BOOTSTRAP)
        assert fault.words.endswith("; a broker gave this address as its own (advertised.listeners)")
        assert "kafka-1.internal" in fault.words
        assert "advertised.listeners" in fault.hint
        # The name stands in no setting of this box's, and each thing is said once.
        assert "kafka.bootstrap" not in fault.words + fault.hint
        assert f"{fault.words} {fault.hint}".count("this box can reach") == 1
    assert "advertised" not in reach_words(TimeoutError(), "::1", 9092, BOOTSTRAP).hint


def test_an_advertised_name_that_does_not_resolve_here_is_mended_at_either_end() -> None:
    """An example is a broker in a container, which gives a name that is known there alone."""
    fault = reach_words(socket.gaierror(socket.EAI_NONAME, "x"), "c0ffee", 9092, BOOTSTRAP, stage="name")
    assert fault.hint == (
        "set advertised.listeners of that broker to an address that this box can reach, or have this name known here, "
        "by this box's DNS or a line in /etc/hosts"
    )


@pytest.mark.parametrize(
    ("error", "stage", "is_reached"),
    [
        (socket.gaierror(socket.EAI_NONAME, "x"), "name", False),
        (ConnectionRefusedError(111, "x"), "connect", False),
        (TimeoutError(), "connect", False),
        # Something takes connections, and may be a way that leads nowhere.
        (TimeoutError(), "tls", False),
        (TimeoutError(), "versions", False),
        (alert("WRONG_VERSION_NUMBER"), "tls", True),
        (ConnectionResetError(), "versions", True),
        (SaslAuthenticationFailed("x"), "login", True),
        (ssl.SSLCertVerificationError(1, "x"), "tls", True),
    ],
)
def test_a_broker_that_refuses_was_reached(error: BaseException, stage: Stage, *, is_reached: bool) -> None:
    if isinstance(error, ssl.SSLCertVerificationError):
        error.verify_code, error.verify_message = 20, "x"
    assert reach_words(error, "kafka.example", 9092, SASL, stage=stage).is_reached is is_reached


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "SSLV3_ALERT_CERTIFICATE_EXPIRED",
            "does not accept this gateway's certificate: by its clock that has expired",
        ),
        ("SSLV3_ALERT_CERTIFICATE_REVOKED", "does not accept this gateway's certificate: that was revoked"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "does not accept this gateway's certificate"),
    ],
)
def test_what_a_broker_says_of_a_certificate_is_told_in_words(reason: str, words: str) -> None:
    fault = reach_words(alert(reason), "kafka.example", 9092, CERTIFIED, stage="versions")
    assert fault.words == f"kafka.example:9092 {words}"
    fault = reach_words(alert(reason), "kafka.example", 9092, TLS, stage="versions")
    assert fault.words == (
        "kafka.example:9092 ends the TLS handshake: it seems to want a certificate of this gateway, and none is set"
    )


@pytest.mark.parametrize(
    ("kafka", "stage", "error", "words", "hint"),
    [
        (TLS, "tls", alert("WRONG_VERSION_NUMBER"), "does not speak TLS", "port for TLS"),
        (TLS, "tls", ConnectionResetError(), "most likely it does not speak TLS there", "port for TLS"),
        (TLS, "tls", TimeoutError(), "says nothing in TLS", "port for TLS"),
        (TLS, "tls", alert("TLSV1_ALERT_PROTOCOL_VERSION"), "speaks neither TLS 1.2 nor 1.3", "ssl.enabled.protocols"),
        (TLS, "tls", alert("LENGTH_MISMATCH"), "TLS with kafka.example:9092 fails: length mismatch", "[kafka.tls]"),
        (TLS, "versions", caused_by(alert("TLSV13_ALERT_CERTIFICATE_REQUIRED")), "seems to want a certificate", "key"),
        (TLS, "versions", caused_by(asyncio.IncompleteReadError(b"", 4)), "after the TLS handshake", "client.auth"),
        (CERTIFIED, "versions", caused_by(alert("TLSV1_ALERT_UNKNOWN_CA")), "does not accept this gateway's", "trust"),
        (CERTIFIED, "versions", caused_by(ConnectionResetError()), "may not accept this gateway's", "ssl.truststore"),
        (
            BOOTSTRAP,
            "versions",
            caused_by(asyncio.IncompleteReadError(b"", 0x15030300)),
            "wants TLS, and",
            "[kafka.tls]",
        ),
        (BOOTSTRAP, "versions", caused_by(ConnectionResetError()), "most likely it wants TLS", "[kafka.tls]"),
        (BOOTSTRAP, "versions", TimeoutError(), "does not answer Kafka's first request", "connect_timeout_s"),
        (BOOTSTRAP, "request", TimeoutError(), "does not answer Kafka's first request", "longer kafka.request_timeout"),
        (BOOTSTRAP, "versions", caused_by(ValueError("x")), "is no Kafka broker", "port"),
        (BOOTSTRAP, "request", asyncio.IncompleteReadError(b"", 4), "most likely it wants a log-in", "[kafka.sasl]"),
        (SASL, "request", asyncio.IncompleteReadError(b"", 4), "closes the connection at the first request", "log"),
        (SASL, "login", SaslAuthenticationFailed("x"), "refuses the log-in of user gw1", "/etc/sluice/kafka-password"),
        (
            SASL,
            "login",
            UnsupportedSaslMechanismError("x"),
            "not take SCRAM-SHA-512 for log-in; it takes: PLAIN",
            "one of",
        ),
        (SASL, "login", IllegalSaslStateError("x"), "does not take SCRAM-SHA-512", "sasl.enabled.mechanisms"),
        (SASL, "login", caused_by(ConnectionResetError()), "closes the connection at the log-in", "with SASL"),
        (SASL, "login", TimeoutError(), "does not answer the log-in", "slow link"),
        (SASL, "login", ValueError("Server sent wrong signature!"), "with what does not fit it", "kafka.sasl"),
    ],
)
def test_being_turned_away(kafka: KafkaSettings, stage: Stage, error: BaseException, words: str, hint: str) -> None:
    fault = reach_words(error, "kafka.example", 9092, kafka, stage=stage, mechanisms=("PLAIN",))
    assert words in fault.words
    assert hint in fault.hint
    assert "kafka.example:9092" in fault.words


def test_a_login_where_none_is_taken() -> None:
    fault = reach_words(UnsupportedSaslMechanismError("x"), "kafka.example", 9092, SASL, stage="login")
    assert fault.words == "kafka.example:9092 takes no log-in (SASL), and [kafka.sasl] is set"
    assert "take [kafka.sasl] out" in fault.hint


def test_a_mechanism_that_is_null_is_none() -> None:
    error = UnsupportedSaslMechanismError("x")
    fault = reach_words(error, "kafka.example", 9092, SASL, stage="login", mechanisms=(None, "", "PLAIN"))
    assert fault.words == "kafka.example:9092 does not take SCRAM-SHA-512 for log-in; it takes: PLAIN"
    fault = reach_words(error, "kafka.example", 9092, SASL, stage="login", mechanisms=(None,))
    assert fault.words == "kafka.example:9092 takes no log-in (SASL), and [kafka.sasl] is set"


def test_a_certificate_that_is_none_costs_its_names_only() -> None:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_code, error.verify_message = 62, "Hostname mismatch"
    # Its extensions hold nothing, not even a list.
    shown = bytes.fromhex("30043002a300")
    fault = reach_words(error, "kafka.example", 9092, TLS, stage="tls", shown=shown)
    assert fault.words == "the certificate of kafka.example:9092 is for other names, and not for kafka.example"


def test_plain_words_fit_any_error() -> None:
    assert plain_words(TypeError("correct horse"), "::1", 9092).words == "[::1]:9092 cannot be reached: TypeError"
    assert len(plain_words(OSError(errno.EIO, "Input/output error"), "x" * 30_000, 9092).words) < 1_000


def test_what_a_broker_says_of_itself_is_not_repeated_at_any_length() -> None:
    fault = reach_words(ConnectionRefusedError(111, "x"), "x" * 30_000, 9092, BOOTSTRAP)
    assert len(fault.words) + len(fault.hint) < 1_000
    error = UnsupportedSaslMechanismError("x")
    fault = reach_words(error, "kafka.example", 9092, SASL, stage="login", mechanisms=["x" * 30_000, "\x1b[2J"] * 1_000)
    assert len(fault.words) < 1_000
    assert fault.words.isprintable()


def test_what_a_library_says_of_a_login_is_not_repeated() -> None:
    for error in (SaslAuthenticationFailed("correct horse"), ValueError("correct horse"), KeyError("correct horse")):
        fault = reach_words(error, "kafka.example", 9092, SASL, stage="login")
        assert "horse" not in fault.words + fault.hint
