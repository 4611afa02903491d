"""Kafka's settings as Java names them, for the client in Python."""

import ssl
from pathlib import Path

import pytest

from spark.source.kafka_options import KafkaOptionError
from spark.source.kafka_python import client_options
from tests.support.certificates import make_authority

JAAS = "org.apache.kafka.common.security.scram.ScramLoginModule required"


def test_names_and_passwords_come_from_the_line_for_java() -> None:
    given = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": rf'{JAAS} username="it\"s" password=s3cret;',
        "request.timeout.ms": "5000",
        "groupIdPrefix": "sluice",
    }
    found, unused = client_options(given)
    assert found == {
        "isolation_level": "read_committed",
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": 'it"s',
        "sasl_plain_password": "s3cret",
        "request_timeout_ms": 5_000,
    }
    assert unused == ["groupIdPrefix"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism GSSAPI is not known"),
        (
            {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.jaas.config": 'x password="p"'},
            "sasl.jaas.config lacks username",
        ),
        ({"security.protocol": "SSL", "ssl.truststore.location": "/x.jks"}, "reads PEM alone"),
        ({"security.protocol": "SSL", "ssl.truststore.location": "/x", "ssl.truststore.type": "PEM"}, "no file /x"),
        ({"security.protocol": "SSL", "ssl.truststore.certificates": "none"}, "cannot be read"),
        (
            {"security.protocol": "SSL", "ssl.keystore.key": "-----BEGIN"},
            "write the key and its certificates to a file",
        ),
        ({"security.protocol": "ssl"}, "is none of PLAINTEXT, SSL"),
        ({"isolation.level": "committed"}, "is none of read_committed"),
        ({"request.timeout.ms": "soon"}, "request.timeout.ms is no number"),
    ],
)
def test_what_cannot_be_used_is_told_without_a_secret(given: dict[str, str], words: str) -> None:
    with pytest.raises(KafkaOptionError, match=words) as told:
        client_options(given)
    assert "password=" not in str(told.value).replace('password="..."', "")


def test_tls_trusts_the_authority_that_is_named_and_no_other(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "ca")
    given = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.certificate),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(authority.sign("analyst").key_store),
    }
    found, unused = client_options(given)
    context = found["ssl_context"]
    assert (context.verify_mode, context.check_hostname, unused) == (ssl.CERT_REQUIRED, True, [])
    assert [certificate["subject"] for certificate in context.get_ca_certs()] == [((("commonName", "test CA"),),)]
    inline = {"security.protocol": "SSL", "ssl.truststore.certificates": authority.certificate.read_text()}
    found, _ = client_options(inline | {"ssl.endpoint.identification.algorithm": ""})
    assert len(found["ssl_context"].get_ca_certs()) == 1
    assert not found["ssl_context"].check_hostname
