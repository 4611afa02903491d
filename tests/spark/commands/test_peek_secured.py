"""`sluice-cloud peek` of a Kafka that wants TLS, a log-in or a client's certificate, and lets it read some topics."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spark.cli import FAILED
from tests.support import kafka_admin
from tests.support.certificates import Authority, make_authority
from tests.support.desk_server import SLUICE_CLOUD
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.kafka_records import produce

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

USER, PASSWORD = "analyst", "correct-horse-4711"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
WRONG = f' username="{USER}" password="wrong-{PASSWORD}";'


@dataclass(frozen=True, slots=True)
class Secured:
    """A broker that one of three ways leads to: SCRAM or PLAIN in TLS, or TLS with a client's certificate."""

    cluster: Cluster
    authority: Authority
    stranger: Authority
    key_store: Path
    """The client's own certificate."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority, stranger = make_authority(folder / "ca"), make_authority(folder / "stranger")
    own = authority.sign("broker").key_store
    mechanisms, users = ("SCRAM-SHA-512", "PLAIN"), ((USER, PASSWORD),)
    listeners = [
        Listener("LOGIN", "SASL_SSL", key_store=own, mechanisms=mechanisms, plain_users=users),
        Listener("MUTUAL", "SSL", key_store=own, client_ca=authority.certificate),
    ]
    with kafka_cluster(folder / "nodes", 1, listeners) as cluster:

        async def fill() -> None:
            await kafka_admin.set_password(cluster.bootstrap, USER, "SCRAM-SHA-512", PASSWORD)
            for topic in ("device-mine", "device-theirs"):
                await kafka_admin.create_topic(cluster.bootstrap, topic)
                await produce(cluster.bootstrap, topic, {0: 3})
            for user in (USER, "CN=analyst"):
                await kafka_admin.allow(cluster.bootstrap, user, "device-mine", "READ", "DESCRIBE")
                await kafka_admin.allow(cluster.bootstrap, user, "device-theirs", "DESCRIBE")

        asyncio.run(fill())
        yield Secured(cluster, authority, stranger, authority.sign("analyst").key_store)


@dataclass(frozen=True, slots=True)
class Peek:
    """A command that has ended."""

    code: int
    records: str
    said: str
    """All output, in one line."""


def settings(secured: Secured, way: str) -> dict[str, str]:
    """Settings as Java's clients take them."""
    trust = {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(secured.authority.certificate)}
    if way == "MUTUAL":
        own = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(secured.key_store)}
        return {"security.protocol": "SSL", **trust, **own}
    login = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": way,
        "sasl.jaas.config": f'{PLAIN if way == "PLAIN" else SCRAM} username="{USER}" password="{PASSWORD}";',
    }
    return login | trust


def peek(secured: Secured, folder: Path, way: str, topic: str = "device-mine", **changes: str) -> Peek:
    """Give the settings as a file. `changes` have `_` for the dots of names; "" takes one away."""
    told = settings(secured, way) | {name.replace("_", "."): value for name, value in changes.items()}
    path = folder / "kafka.properties"
    path.unlink(missing_ok=True)
    path.write_text("".join(f"{name}={value}\n" for name, value in told.items() if value))
    path.chmod(0o400)
    (bootstrap,) = secured.cluster.addresses("MUTUAL" if way == "MUTUAL" else "LOGIN")
    words = ["peek", topic, "--bootstrap", bootstrap, "--kafka-config", str(path), "--json"]
    # Not in this process: connections of a client that was refused are still closing when its event loop ends.
    done = subprocess.run([SLUICE_CLOUD, *words], capture_output=True, text=True, check=False, timeout=60)
    said = " ".join((done.stdout + done.stderr).split())
    assert PASSWORD not in said
    return Peek(done.returncode, done.stdout, said)


@pytest.mark.parametrize("way", ["SCRAM-SHA-512", "PLAIN", "MUTUAL"])
def test_the_settings_of_ingest_open_the_way(secured: Secured, tmp_path: Path, way: str) -> None:
    done = peek(secured, tmp_path, way)
    assert done.code == 0, done.said
    assert [json.loads(line)["offset"] for line in done.records.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("way", "changes", "words"),
    [
        ("SCRAM-SHA-512", {"sasl_jaas_config": SCRAM + WRONG}, "invalid credentials"),
        ("PLAIN", {"sasl_jaas_config": PLAIN + WRONG}, "Authentication failed"),
        ("SCRAM-SHA-512", {"sasl_mechanism": "SCRAM-SHA-256"}, "does not offer this sasl.mechanism"),
        ("SCRAM-SHA-512", {"security_protocol": "SASL_PLAINTEXT"}, "no broker takes this client"),
        ("MUTUAL", {"ssl_keystore_location": "", "ssl_keystore_type": ""}, "no broker takes this client"),
    ],
)
def test_a_refusal_says_why_and_what_to_look_at(
    secured: Secured, tmp_path: Path, way: str, changes: dict[str, str], words: str
) -> None:
    done = peek(secured, tmp_path, way, **changes)
    assert done.code == FAILED, done.said
    assert words in done.said
    assert "Do TLS and SASL (--kafka-config) fit?" in done.said


def test_another_authority_is_not_trusted(secured: Secured, tmp_path: Path) -> None:
    done = peek(secured, tmp_path, "PLAIN", ssl_truststore_location=str(secured.stranger.certificate))
    assert done.code == FAILED
    assert "certificate verify failed" in done.said


@pytest.mark.parametrize("way", ["PLAIN", "MUTUAL"])
def test_a_topic_that_may_not_be_read_says_so(secured: Secured, tmp_path: Path, way: str) -> None:
    done = peek(secured, tmp_path, way, "device-theirs")
    assert done.code == FAILED
    assert "device-theirs cannot be read" in done.said
    # Nobody told this user of that topic.
    assert "Kafka has no topic other" in peek(secured, tmp_path, way, "other").said
