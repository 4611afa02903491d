"""Certificates in a box without the time: those that have surely ended are refused, and nothing else changes."""

import asyncio
import shutil
import ssl
import time
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.clock.floor import RELEASED_US, ClockFloor
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.kafka.link import KafkaLink
from gateway.settings import BrokerTlsSettings, KafkaSettings, KafkaTlsSettings, TlsSettings
from gateway.tls.client import client_context
from gateway.tls.dates import (
    ASTRAY_US,
    NO_CHECK_TIME,
    CertificateDateError,
    CertificateDates,
    TrueTime,
    _verified_chain,
    judge_dates,
    true_time,
)
from tests.gateway.tls.test_client_tls import connect, with_chain
from tests.support.broker_intake import MemoryIntake, reading_from
from tests.support.certificates import Authority, Identity, make_authority
from tests.support.gateways import free_port
from tests.support.mosquitto import mosquitto
from tests.support.mqtt_peers import RecordingIntake, listening
from tests.support.waiting import patience, until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
DAY_US = 86_400_000_000
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="module")
def ended(authority: Authority) -> Identity:
    """A certificate that was valid from three days ago to yesterday."""
    return authority.sign("ended", valid=(-3 * DAY, -DAY))


@pytest.fixture(scope="module")
def coming(authority: Authority) -> Identity:
    """A certificate that is valid from tomorrow on."""
    return authority.sign("coming", valid=(DAY, 3 * DAY))


class Box:
    """A box's knowledge of the time, in days from the true time; None for a clock that can be trusted."""

    def __init__(self, passed: float | None, latest: float | None = None) -> None:
        self.passed, self.latest = passed, latest

    def __call__(self) -> TrueTime | None:
        now_us = time.time_ns() // 1000
        if self.passed is None:
            return None
        latest_us = None if self.latest is None else now_us + int(self.latest * DAY_US)
        return TrueTime(now_us + int(self.passed * DAY_US), latest_us)


def judged(ca: Path, dates: Box) -> ssl.SSLContext:
    context = client_context(ca, None, None)
    judge_dates(context, dates)
    return context


# -- what the time is -------------------------------------------------------------------------------


def test_a_clock_that_is_not_synced_tells_nothing_but_the_floor() -> None:
    assert true_time((5, None), RELEASED_US, 10**18) == TrueTime(RELEASED_US, None)


def test_the_systems_clock_counts_where_it_is_the_one_that_was_synced() -> None:
    known_us = RELEASED_US + 5_000_000
    for system_us in (known_us, known_us + ASTRAY_US, known_us - ASTRAY_US - 2_000):
        assert true_time((known_us, 2_000), 0, system_us) is None
    for system_us in (0, known_us + ASTRAY_US + 2_001, known_us - DAY_US):
        assert true_time((known_us, 2_000), 0, system_us) == TrueTime(known_us - 2_000, known_us + 2_000)


def test_the_log_says_once_that_dates_are_judged_otherwise() -> None:
    known = BootClock.constant(time.time_ns() // 1000 - boottime_us(), 1_000)
    clock = BootClock.constant(0, None)
    dates = CertificateDates(lambda: clock, ClockFloor())
    with capture_logs() as lines:
        assert dates() == dates() == TrueTime(RELEASED_US, None)
    assert [line["passed"] for line in lines] == ["2026-11-22"]
    clock = known
    with capture_logs() as lines:
        assert dates() is None
    assert not lines


# -- what is let pass ---------------------------------------------------------------------------------


def test_certificates_that_ended_before_the_floor_are_refused_and_others_pass(
    authority: Authority, ended: Identity, coming: Identity
) -> None:
    """This holds whatever this machine's clock says. By it, one of them has ended, and the other has not begun."""
    for passed, shown in ((-2, ended), (-9000, ended), (0, coming), (1.5, coming), (-9000, coming)):
        connect(judged(authority.certificate, Box(passed)), shown)
    with pytest.raises(CertificateDateError, match=r"has expired on \d{4}-\d\d-\d\d, and it is \d{4}-") as refused:
        connect(judged(authority.certificate, Box(0)), ended)
    assert refused.value.reason == "CERTIFICATE_VERIFY_FAILED"
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        connect(client_context(authority.certificate, None, None), ended)


def test_a_certificate_that_has_not_begun_is_refused_once_the_clock_was_synced(
    authority: Authority, coming: Identity
) -> None:
    connect(judged(authority.certificate, Box(0, 2)), coming)
    with pytest.raises(CertificateDateError, match=r"is not valid before .* and it is .* at most"):
        connect(judged(authority.certificate, Box(0, 0.5)), coming)
    with pytest.raises(CertificateDateError, match="has expired on"):
        connect(judged(authority.certificate, Box(4, 5)), coming)


def test_a_clock_that_is_learnt_during_the_handshake_judges(
    authority: Authority, ended: Identity, coming: Identity
) -> None:
    good = authority.sign("good")
    for shown in (ended, coming):
        with pytest.raises(CertificateDateError):
            connect(judged(authority.certificate, Box(None)), shown)
    connect(judged(authority.certificate, Box(None)), good)


def test_all_of_the_chain_is_looked_at(authority: Authority, tmp_path: Path) -> None:
    signed = authority.sign("between", "DNS:between\nbasicConstraints=critical,CA:TRUE", valid=(-3 * DAY, -DAY))
    folder = tmp_path / "between"
    folder.mkdir()
    shutil.copy(signed.certificate, folder / "ca.pem")
    shutil.copy(signed.key, folder / "ca.key")
    between = Authority(folder)
    shown = with_chain(between.sign("broker"), between)
    connect(judged(authority.certificate, Box(-2)), shown)
    with pytest.raises(CertificateDateError, match="hangs on one that has expired on"):
        connect(judged(authority.certificate, Box(0)), shown)


def test_nothing_else_is_eased(authority: Authority, tmp_path: Path) -> None:
    stranger = make_authority(tmp_path / "stranger")
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed") as refused:
        connect(judged(stranger.certificate, Box(0)), authority.sign("broker"))
    assert not isinstance(refused.value, CertificateDateError)
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        connect(judged(authority.certificate, Box(0)), authority.sign("other", "IP:127.0.0.2"))
    context = judged(authority.certificate, Box(0))
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.verify_flags == client_context(None, None, None).verify_flags | NO_CHECK_TIME


def test_a_python_that_shows_no_chain_lets_nothing_pass() -> None:
    class Other:
        """An SSLObject of some other Python."""

    with pytest.raises(CertificateDateError, match="shows no chain"):
        _verified_chain(Other())  # type: ignore[arg-type]


# -- Kafka ----------------------------------------------------------------------------------------------


def test_a_session_with_kafka_is_begun_anew_when_another_clock_judges(authority: Authority) -> None:
    box = Box(0)
    settings = KafkaSettings(("127.0.0.1:1",), tls=KafkaTlsSettings(ca=authority.certificate))
    link = KafkaLink(settings, box)
    assert link.options()["ssl_context"].verify_flags & NO_CHECK_TIME
    assert not link.clock_changed()
    box.passed = None
    assert link.clock_changed()
    link = KafkaLink(settings, box)
    assert not link.options()["ssl_context"].verify_flags & NO_CHECK_TIME
    assert not link.clock_changed()
    box.passed = 0
    assert link.clock_changed()
    assert not KafkaLink(KafkaSettings(("127.0.0.1:1",)), box).clock_changed(), "without TLS no clock matters"


def told(lines: list[MutableMapping[str, Any]]) -> str:
    return "\n".join(str(line["event"]) for line in lines)


# -- the site's broker ----------------------------------------------------------------------------------


async def test_a_broker_is_connected_to_anew_when_the_clock_is_learnt(authority: Authority, tmp_path: Path) -> None:
    shown = authority.sign("site", "DNS:localhost", valid=(-3 * DAY, -DAY))
    files = (f"certfile {shown.certificate}", f"keyfile {shown.key}", "allow_anonymous true")
    tls, intake, box = BrokerTlsSettings(ca=authority.certificate), MemoryIntake(), Box(-2)
    with mosquitto(tmp_path / "broker", *files) as broker, capture_logs() as lines:
        async with reading_from(intake, broker.port, box, host="localhost", tls=tls) as ingress:
            await until(ingress.session.subscriptions.answered.is_set)
            box.passed = None
            await until(lambda: "its certificate is not accepted: certificate has expired" in told(lines))
            assert not ingress.session.subscriptions.answered.is_set()
            box.passed = -1.5
            await until(ingress.session.subscriptions.answered.is_set)
            box.passed = 0
        async with reading_from(intake, broker.port, box, host="localhost", tls=tls):
            await until(lambda: "its certificate has expired on" in told(lines))


# -- the listener ---------------------------------------------------------------------------------------


async def handshake(
    port: int, authority: Authority, own: Identity
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client's connection with a certificate of its own, and CONNECT."""
    context = client_context(authority.certificate, own.certificate, own.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"\x10\x0f\0\4MQTT\4\2\0\0\0\3" + own.certificate.stem[:3].encode())
    return reader, writer


async def test_clients_whose_certificates_prove_to_have_ended_are_closed_when_the_clock_is_learnt(
    authority: Authority, ended: Identity
) -> None:
    own, good, box = authority.sign("listener"), authority.sign("good"), Box(-2)
    tls = TlsSettings(own.certificate, own.key, free_port(), client_ca=authority.certificate)
    connack = b"\x20\2\0\0"
    async with listening(RecordingIntake(), 0, dates=box, tls=tls) as listener, asyncio.timeout(patience(20)):
        reader, writer = await handshake(tls.port, authority, ended)
        other_reader, other_writer = await handshake(tls.port, authority, good)
        assert await reader.readexactly(4) == await other_reader.readexactly(4) == connack
        box.passed = None
        assert await reader.read() == b"", "closed without a word of MQTT"
        assert listener.counts["tls-certificate-date"] == 1
        other_writer.write(b"\xc0\0")
        assert await other_reader.readexactly(2) == b"\xd0\0", "whoever may stay is not disturbed"
        # OpenSSL judges from now on, and the floor again after that.
        for count, box.passed in ((1, None), (2, 0)):
            _, refused_writer = await handshake(tls.port, authority, ended)
            await until(lambda: listener.counts["tls-handshake-failed"] == count)  # noqa: B023 - waited for here
            refused_writer.transport.abort()
        for each in (writer, other_writer):
            each.transport.abort()
