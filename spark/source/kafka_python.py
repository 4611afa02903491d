"""Kafka's settings, as `ingest` takes them, for the Kafka client in Python."""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark.source.kafka_options import KafkaOptionError

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
PASSED = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "client.id": "client_id",
    "isolation.level": "isolation_level",
}
NUMBERS = {
    "request.timeout.ms": "request_timeout_ms",
    "fetch.max.bytes": "fetch_max_bytes",
    "max.partition.fetch.bytes": "max_partition_fetch_bytes",
    "metadata.max.age.ms": "metadata_max_age_ms",
}
CHOICES = {
    "security.protocol": ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"),
    "isolation.level": ("read_committed", "read_uncommitted"),
}
_OF_JAAS = {
    name: re.compile(rf"\b{name}\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;]+))") for name in ("username", "password")
}


def client_options(options: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the client's arguments, and the names of settings that it has no use for. Raises KafkaOptionError."""
    left = dict(options)
    for name, known in CHOICES.items():
        if left.get(name, known[0]) not in known:
            raise KafkaOptionError(f"{name} is none of {', '.join(known)}")
    found: dict[str, Any] = {"isolation_level": "read_committed"}
    found |= {argument: left.pop(name) for name, argument in PASSED.items() if name in left}
    for name, argument in NUMBERS.items():
        if name in left:
            text = left.pop(name)
            if not text.isdecimal():
                raise KafkaOptionError(f"{name} is no number")
            found[argument] = int(text)
    protocol = found.get("security_protocol", "PLAINTEXT")
    if protocol.startswith("SASL_"):
        found |= _sasl(found.get("sasl_mechanism", "GSSAPI"), left)
    if protocol.endswith("SSL"):
        found["ssl_context"] = _tls(left)
    return found, sorted(left)


def _sasl(mechanism: str, left: dict[str, str]) -> dict[str, str]:
    if mechanism not in MECHANISMS:
        raise KafkaOptionError(
            f"sasl.mechanism {mechanism} is not known to this command: it knows {', '.join(MECHANISMS)}"
        )
    jaas = left.pop("sasl.jaas.config", "")
    told = {name: found for name, pattern in _OF_JAAS.items() if (found := pattern.search(jaas))}
    if len(told) < len(_OF_JAAS):
        # The line is not shown: it may hold the password.
        raise KafkaOptionError('sasl.jaas.config lacks username="..." or password="..."')
    return {
        f"sasl_plain_{name}": found[2] if found[1] is None else re.sub(r"\\(.)", r"\1", found[1])
        for name, found in told.items()
    }


def _tls(left: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        trusted = left.pop("ssl.truststore.certificates", None)
        store = _pem(left, "truststore")
        if trusted is not None or store is not None:
            context = ssl.create_default_context(cafile=store, cadata=trusted)
        own = _pem(left, "keystore")
        password = left.pop("ssl.key.password", None)
        if own is not None:
            context.load_cert_chain(own, password=password)
        if "ssl.keystore.key" in left:
            raise KafkaOptionError(
                "ssl.keystore.key: write the key and its certificates to a file, and name it as ssl.keystore.location"
            )
    except (OSError, ValueError) as error:
        raise KafkaOptionError(f"a certificate or key cannot be read: {error}") from None
    if left.pop("ssl.endpoint.identification.algorithm", "https") == "":
        context.check_hostname = False
    return context


def _pem(left: dict[str, str], store: str) -> str | None:
    """The file of a store of certificates; None if there is none."""
    path = left.pop(f"ssl.{store}.location", None)
    kind = left.pop(f"ssl.{store}.type", "JKS")
    left.pop(f"ssl.{store}.password", None)
    if path is None:
        return None
    if kind.upper() != "PEM":
        raise KafkaOptionError(f"ssl.{store}.location: this command reads PEM alone; set ssl.{store}.type = PEM")
    if not Path(path).is_file():
        raise KafkaOptionError(f"ssl.{store}.location: there is no file {path}")
    return path
