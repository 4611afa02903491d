"""Certificates and keys as `sluice check` reads them: against what OpenSSL says of the same files."""

import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.check_certificates import (
    CertificateFileError,
    Validity,
    check_pair,
    date_trouble,
    read_certificates,
    validity,
)
from gateway.ingress_mqtt_broker import BrokerError, tls_context
from gateway.settings import BrokerTlsSettings
from tests.mosquitto import self_signed


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("other"), "other.example")


def openssl(*arguments: str) -> str:
    return subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def test_the_dates_are_those_that_openssl_tells(pair: tuple[Path, Path]) -> None:
    told = dict(line.split("=") for line in openssl("x509", "-noout", "-dates", "-in", str(pair[0])).splitlines())
    begin, end = (
        datetime.fromtimestamp(ssl.cert_time_to_seconds(told[name]), UTC) for name in ("notBefore", "notAfter")
    )
    assert read_certificates(pair[0]) == [Validity(begin, end)]


def test_a_certificate_for_ever_has_a_date_with_four_digits_of_the_year(tmp_path: Path) -> None:
    command = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x"]
    openssl(*command, "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate"), "-days", "30000")
    (found,) = read_certificates(tmp_path / "certificate")
    assert found.end - found.begin == timedelta(days=30_000)


@given(st.data())
def test_whatever_stands_in_der_is_read_or_refused(pair: tuple[Path, Path], data: st.DataObject) -> None:
    der = bytearray(ssl.PEM_cert_to_DER_cert(pair[0].read_text()))
    for _ in range(data.draw(st.integers(0, 3))):
        der[data.draw(st.integers(0, 120))] = data.draw(st.integers(0, 255))
    cut = bytes(der[: data.draw(st.integers(0, len(der)))])
    try:
        found = validity(cut)
    except ValueError:
        return
    assert isinstance(found.begin, datetime)


def test_a_key_fits_its_certificate_and_no_other(pair: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    check_pair(*pair)
    with pytest.raises(CertificateFileError, match=r"other\.example\.key is not the key of the first certificate in"):
        check_pair(pair[0], other[1])


def test_the_certificate_of_this_box_stands_first(
    pair: tuple[Path, Path], other: tuple[Path, Path], tmp_path: Path
) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text(other[0].read_text() + pair[0].read_text())
    assert len(read_certificates(chain)) == 2
    with pytest.raises(CertificateFileError, match="the certificate of this box before those of its authorities"):
        check_pair(chain, pair[1])


def test_files_that_cannot_be_used_are_told_apart(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def refused(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CertificateFileError) as raised:
            read_certificates(tmp_path / name)
        return str(raised.value)

    certificate, key = pair
    assert "no certificate in PEM" in refused("der", ssl.PEM_cert_to_DER_cert(certificate.read_text()))
    assert "no certificate in PEM" in refused("empty", b"")
    text = certificate.read_text()
    assert "the certificate in" in refused("damaged", (text[:100] + text[140:]).encode())
    assert "certificate 2 of 2" in refused("half", (text + text[:100] + "AAAA" + text[104:]).encode())
    with pytest.raises(CertificateFileError, match="nowhere does not exist"):
        read_certificates(tmp_path / "nowhere")
    with pytest.raises(CertificateFileError, match="is no file"):
        read_certificates(tmp_path)
    with pytest.raises(CertificateFileError, match="have certificate and key been mixed up"):
        check_pair(certificate, certificate)
    encrypted = tmp_path / "encrypted.key"
    openssl("pkey", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(encrypted))
    with pytest.raises(CertificateFileError, match="a daemon cannot ask for the passphrase"):
        check_pair(certificate, encrypted)


def test_every_certificate_of_a_chain_must_hold() -> None:
    def days(begin: int, end: int) -> Validity:
        return Validity(datetime(2026, 1, begin, tzinfo=UTC), datetime(2026, 1, end, tzinfo=UTC))

    now = datetime(2026, 1, 15, tzinfo=UTC)
    assert date_trouble([days(1, 20), days(2, 30)], now) is None
    assert date_trouble([days(1, 20), days(2, 15)], now) == "has expired on 2026-01-15"
    assert date_trouble([days(1, 20), days(16, 30)], now) == "is not valid before 2026-01-16"


def test_the_gateway_says_the_same_where_it_reads_a_broker(pair: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    assert tls_context(BrokerTlsSettings(ca=pair[0], certificate=pair[0], key=pair[1])).get_ca_certs()
    for settings, words in (
        (BrokerTlsSettings(ca=Path("nowhere")), "tls.ca: nowhere does not exist"),
        (BrokerTlsSettings(ca=pair[1]), "tls.ca: .* holds a private key and no certificate"),
        (BrokerTlsSettings(certificate=pair[0], key=other[1]), "tls.key: .* is not the key of the first certificate"),
    ):
        with pytest.raises(BrokerError, match=words):
            tls_context(settings)
