"""The gateway trusts the named authorities when it connects, and nobody else."""

import shutil
import ssl
import subprocess

import pytest

from gateway.tls.client import client_context
from tests.support.certificates import Authority, Identity, make_authority


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("root") / "ca")


@pytest.fixture(scope="module")
def issuing(root: Authority, tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority below the root, which signs at most companies."""
    signed = root.sign("issuing", "DNS:issuing\nbasicConstraints=critical,CA:TRUE")
    folder = tmp_path_factory.mktemp("issuing")
    shutil.copy(signed.certificate, folder / "ca.pem")
    shutil.copy(signed.key, folder / "ca.key")
    return Authority(folder)


def connect(client: ssl.SSLContext, server: Identity) -> None:
    """A handshake in memory. Raises ssl.SSLError where a side does not accept the other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(down, up, server_hostname="127.0.0.1"),
        context.wrap_bio(up, down, server_side=True),
    ]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)


def with_chain(broker: Identity, *authorities: Authority) -> Identity:
    """The chain that a broker shows: its certificate, and the authorities above it."""
    shown = broker.certificate.with_suffix(".chain.pem")
    shown.write_text("".join(each.read_text() for each in (broker.certificate, *(a.certificate for a in authorities))))
    return Identity(shown, broker.key)


def test_an_authority_that_is_named_is_trusted_be_it_a_root_or_not(root: Authority, issuing: Authority) -> None:
    broker = issuing.sign("broker")
    for shown in (broker, with_chain(broker, issuing)):
        connect(client_context(issuing.certificate, None, None), shown)
    connect(client_context(root.certificate, None, None), with_chain(broker, issuing))


def test_an_authority_that_says_nothing_of_its_key_usage_is_trusted(root: Authority) -> None:
    # Python 3.13 takes it for invalid by default; most private authorities are made so.
    asked = ["openssl", "x509", "-noout", "-ext", "keyUsage", "-in", str(root.certificate)]
    assert "Key Usage" not in subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    connect(client_context(root.certificate, None, None), root.sign("broker"))


def test_nobody_else_is_trusted(root: Authority, issuing: Authority) -> None:
    beside = root.sign("beside")
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer certificate"):
        connect(client_context(issuing.certificate, None, None), beside)
    # The root is named, and nobody shows the authority between it and the broker.
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer certificate"):
        connect(client_context(root.certificate, None, None), issuing.sign("broker"))
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        connect(client_context(issuing.certificate, None, None), issuing.sign("other", "IP:127.0.0.2"))


def test_without_a_name_the_authorities_of_this_box_count(issuing: Authority) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer certificate"):
        connect(client_context(None, None, None), with_chain(issuing.sign("broker"), issuing))
