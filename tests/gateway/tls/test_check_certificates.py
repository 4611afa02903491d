"""Certificates and keys as `sluice check` reads them, against OpenSSL on the same files."""

import os
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.settings import BrokerTlsSettings
from gateway.site_broker.reach import BrokerError, tls_context
from gateway.tls.certificates import (
    FILE_BYTES_MAX,
    CertificateFileError,
    Validity,
    check_pair,
    date_trouble,
    host_names,
    others_may_read,
    read_certificates,
    read_names,
    validity,
)
from tests.support.deadline import deadline
from tests.support.mosquitto import self_signed
from tests.support.waiting import patience


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("other"), "other.example")


def openssl(*arguments: str) -> str:
    return subprocess.run(
        ["openssl", *arguments], check=True, capture_output=True, text=True, timeout=patience(20)
    ).stdout


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


def with_names(folder: Path, names: str | None) -> Path:
    """A certificate with this subjectAltName."""
    file = folder / "names.pem"
    command = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=box",
    ]
    extension = [] if names is None else ["-addext", f"subjectAltName={names}"]
    openssl(*command, "-keyout", "/dev/null", "-out", str(file), "-days", "2", *extension)
    return file


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (None, []),
        ("DNS:barn-1.example", ["barn-1.example"]),
        (
            "DNS:*.example,email:a@b.example,IP:192.168.1.5,URI:http://c.example,IP:fe80::1",
            ["*.example", "192.168.1.5", "fe80::1"],
        ),
        (",".join(f"DNS:host-{number}.example" for number in range(40)), [f"host-{n}.example" for n in range(40)]),
    ],
)
def test_the_names_that_a_certificate_is_for(tmp_path: Path, names: str | None, told: list[str]) -> None:
    assert read_names(with_names(tmp_path, names)) == told


@pytest.mark.parametrize("der", ["30043002a300", "30083006a304300230 00", "300a3008a3063004300206 00"])
def test_extensions_without_what_they_are_made_of_are_refused(der: str) -> None:
    with pytest.raises(ValueError, match=r"empty|not enough values"):
        host_names(bytes.fromhex(der))


@given(st.data())
def test_whatever_stands_in_der_names_are_read_or_refused(pair: tuple[Path, Path], data: st.DataObject) -> None:
    der = bytearray(ssl.PEM_cert_to_DER_cert(pair[0].read_text()))
    assert host_names(bytes(der)) == ["localhost"]
    for _ in range(data.draw(st.integers(1, 3))):
        der[data.draw(st.integers(0, len(der) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(der[: data.draw(st.integers(0, len(der)))])
    try:
        found = host_names(cut)
    except ValueError:
        return
    assert all(isinstance(name, str) for name in found)


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
    assert "is damaged" in refused("damaged", (text[:100] + text[140:]).encode())
    assert "is damaged" in refused("half", (text + text[:100] + "AAAA" + text[104:]).encode())
    assert "is larger than any file of certificates" in refused("large", text.encode() + bytes(FILE_BYTES_MAX))
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


def damage(lines: list[str], how: str) -> str:
    """Damage a PEM file as editors, mail programs and the clipboard do."""
    first, *body, last = lines
    texts = {
        "indented": "\n".join(f"  {line}" for line in lines),
        "on one line": "".join(lines),
        "a blank line inside": "\n".join([first, *body[:2], "", *body[2:], last]),
        "a blank line before the end": "\n".join([first, *body, "", last]),
        "a second one cut off": "\n".join([*lines, *lines[:4]]),
        "another label at its end": "\n".join([*lines[:-1], last.replace("END ", "END X509 ")]),
    }
    return texts[how] + "\n"


@pytest.mark.parametrize(
    "how",
    [
        "indented",
        "on one line",
        "a blank line inside",
        "a blank line before the end",
        "a second one cut off",
        "another label at its end",
    ],
)
def test_a_file_that_tls_refuses_is_damaged_and_its_key_is_not_to_blame(
    pair: tuple[Path, Path], tmp_path: Path, how: str
) -> None:
    damaged = tmp_path / "damaged.pem"
    damaged.write_text(damage(pair[0].read_text().splitlines(), how))
    with pytest.raises(ssl.SSLError):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(damaged, pair[1])
    with pytest.raises(CertificateFileError, match=r"damaged\.pem is damaged, .* copy the file anew") as raised:
        read_certificates(damaged)
    assert "_ssl.c" not in str(raised.value)
    with pytest.raises(BrokerError, match=r"tls\.certificate: .*damaged\.pem is damaged"):
        tls_context(BrokerTlsSettings(certificate=damaged, key=pair[1]))


@given(st.data())
def test_the_verdict_on_a_file_is_what_tls_does_with_it(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = pair[0].read_text().splitlines() * data.draw(st.integers(1, 2))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["", " ", "\t", "#", "-----BEGIN CERTIFICATE-----", "AAAA", "\r"]))
        lines[at : at + data.draw(st.integers(0, 1))] = [change + data.draw(st.sampled_from(["", lines[at]]))]
    file = tmp_path_factory.getbasetemp() / "any.pem"
    file.write_text("\n".join(lines), newline="")
    said = ""
    try:
        read_certificates(file)
        check_pair(file, pair[1])
    except CertificateFileError as error:
        said = str(error)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(file, pair[1])
    except ssl.SSLError:
        assert "damaged" in said or "no certificate in PEM" in said
    else:
        assert not said


def test_all_that_tls_takes_for_a_certificate_is_one(pair: tuple[Path, Path], tmp_path: Path) -> None:
    text = pair[0].read_text()
    trusted = openssl("x509", "-in", str(pair[0]), "-trustout", "-addtrust", "serverAuth")
    assert "BEGIN TRUSTED CERTIFICATE" in trusted
    for number, taken in enumerate(
        (
            trusted,
            text.replace("CERTIFICATE", "X509 CERTIFICATE"),
            text.replace("\n", "\r\n"),
            f"\ufeff{text}",
            f"für\n{text}",
            f"-----BEGIN CERTIFICATE-----#\n{text}",
            text.replace("CERTIFICATE-----\n", "CERTIFICATE-----\x07 \n"),
        )
    ):
        file = tmp_path / f"{number}.pem"
        file.write_text(taken, encoding="utf-8", newline="")
        assert read_certificates(file) == read_certificates(pair[0])
        check_pair(file, pair[1])


def test_a_file_of_beginnings_takes_no_longer_than_others_of_its_size(pair: tuple[Path, Path], tmp_path: Path) -> None:
    line = "-----BEGIN CERTIFICATE-----\n"
    file = tmp_path / "beginnings.pem"
    with deadline():
        for text in (line * 100_000, pair[0].read_text() + line * 100_000):
            file.write_text(text)
            with pytest.raises(CertificateFileError, match="is damaged"):
                read_certificates(file)


def test_a_damaged_key_is_said_to_be_damaged(pair: tuple[Path, Path], tmp_path: Path) -> None:
    key = tmp_path / "cut.key"
    key.write_text(pair[1].read_text()[:120])
    with pytest.raises(CertificateFileError, match=r"cut\.key \(or .*\) is damaged, .* copy the file anew") as raised:
        check_pair(pair[0], key)
    assert "_ssl.c" not in str(raised.value)


def test_a_named_pipe_is_no_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with deadline():
        with pytest.raises(CertificateFileError, match="pipe is no file"):
            read_certificates(pipe)
        with pytest.raises(CertificateFileError, match="pipe is no file"):
            check_pair(pair[0], pipe)


def test_what_stands_in_a_folder_of_ones_own_is_for_nobody_else(tmp_path: Path) -> None:
    outer = Path("/var/tmp") / f"sluice-others-{os.getpid()}"  # noqa: S108 - pytest's own are closed to others
    file = outer / "inner" / "key"
    file.parent.mkdir(parents=True)
    try:
        file.touch()
        for folder, mode, may in (
            (0o755, 0o644, True),
            (0o700, 0o644, False),
            (0o755, 0o640, False),
            (0o711, 0o604, True),
        ):
            outer.chmod(folder)
            file.chmod(mode)
            (tmp_path / "link").unlink(missing_ok=True)
            (tmp_path / "link").symlink_to(file)
            assert others_may_read(file) is may
            # Whoever knows where a link leads needs no link.
            assert others_may_read(tmp_path / "link") is may
    finally:
        file.unlink()
        file.parent.rmdir()
        outer.rmdir()


def test_dates_by_the_clock() -> None:
    dates = Validity(datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 20, tzinfo=UTC))
    assert date_trouble(dates, datetime(2026, 1, 15, tzinfo=UTC)) is None
    assert date_trouble(dates, dates.end) == "has expired on 2026-01-20"
    assert date_trouble(dates, datetime(2026, 1, 1, tzinfo=UTC)) == "is not valid before 2026-01-02"


def test_the_gateway_says_the_same_where_it_reads_a_broker(pair: tuple[Path, Path], other: tuple[Path, Path]) -> None:
    assert tls_context(BrokerTlsSettings(ca=pair[0], certificate=pair[0], key=pair[1])).get_ca_certs()
    for settings, words in (
        (BrokerTlsSettings(ca=Path("nowhere")), "tls.ca: nowhere does not exist"),
        (BrokerTlsSettings(ca=pair[1]), "tls.ca: .* holds a private key and no certificate"),
        (BrokerTlsSettings(certificate=pair[0], key=other[1]), "tls.key: .* is not the key of the first certificate"),
    ):
        with pytest.raises(BrokerError, match=words):
            tls_context(settings)


def test_nobody_is_told_where_in_the_source_of_openssl_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_files: object) -> ssl.SSLContext:
        raise ssl.SSLError(1, "[SSL] PEM lib (_ssl.c:3905)")

    monkeypatch.setattr(ssl, "create_default_context", fail)
    with pytest.raises(BrokerError, match=r"\[SSL\] PEM lib; check tls\.ca"):
        tls_context(BrokerTlsSettings())
