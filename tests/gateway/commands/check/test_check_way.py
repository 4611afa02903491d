"""`sluice check` on the way to Kafka: names, connections, TLS; with brokers that say next to nothing."""

import asyncio
import socket
from pathlib import Path

import pytest
from msgspec import structs

from gateway.commands.check import kafka_way
from gateway.commands.check.finding import Remark
from gateway.commands.check.kafka_way import Way
from gateway.host.name_lookup import Address, names
from gateway.settings import GatewaySettings, KafkaSaslSettings, KafkaSettings, KafkaTlsSettings, Settings
from tests.support.kafka_peers import FakeBroker
from tests.support.stream_server import speaking

SETTINGS = Settings(GatewaySettings("gw1"), KafkaSettings(("127.0.0.1:1",), connect_timeout_s=2))


async def way(*bootstrap: str, tls: KafkaTlsSettings | None = None, sasl: KafkaSaslSettings | None = None) -> Way:
    kafka = structs.replace(SETTINGS.kafka, bootstrap=bootstrap, tls=tls, sasl=sasl)
    return await kafka_way.check_way(structs.replace(SETTINGS, kafka=kafka))


def told(found: Way) -> list[tuple[str, str, str]]:
    return [(each.link, each.subject, each.result) for each in found.findings]


async def test_a_way_that_leads_to_a_broker() -> None:
    async with speaking(FakeBroker()) as port:
        found = await way(f"127.0.0.1:{port}")
    assert told(found) == [
        ("dns", "name 127.0.0.1", "pass"),
        ("tcp", f"connection to 127.0.0.1:{port}", "pass"),
        ("tls", "TLS", "pass"),
    ]
    assert (found.answering, found.why_not) == ((f"127.0.0.1:{port}",), "")


async def test_a_dead_address_is_a_warning_where_another_leads_on() -> None:
    async with speaking(FakeBroker()) as port:
        found = await way("127.0.0.1:1", f"127.0.0.1:{port}", "kafka.invalid:9092")
    names, connections = ([each for each in found.findings if each.link == link] for link in ("dns", "tcp"))
    # One name with two ports is looked up once.
    assert [each.result for each in names] == ["pass", "warning"]
    assert [each.result for each in connections] == ["warning", "pass"]
    assert connections[0].words.startswith("only other addresses of kafka.bootstrap lead to Kafka; cannot be made: ")
    assert found.answering == (f"127.0.0.1:{port}",)


async def test_each_dead_address_is_reported() -> None:
    found = await way("127.0.0.1:1", "127.0.0.1:2")
    assert [each.subject for each in found.findings if each.result == "fail"] == [
        "connection to 127.0.0.1:1",
        "connection to 127.0.0.1:2",
    ]
    assert not found.answering
    assert found.why_not == "no address of kafka.bootstrap leads to a broker that lets this gateway in, see above"


async def test_a_server_that_is_no_broker_fails_the_kafka_check_alone(tmp_path: Path) -> None:
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1\r\n")

    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(0o400)
    async with speaking(talk) as port:
        found = await way(f"127.0.0.1:{port}", sasl=KafkaSaslSettings("SCRAM-SHA-256", "gw1", password))
    assert [(each.link, each.result) for each in found.findings] == [
        ("dns", "pass"),
        ("tcp", "pass"),
        ("tls", "pass"),
        ("sasl", "skipped"),
        ("kafka", "fail"),
    ]
    assert found.findings[3].words == f"not checked: Kafka at 127.0.0.1:{port} fails, see below"


async def test_a_port_without_tls_fails_at_tls_and_the_log_in_is_not_tried(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(0o400)
    sasl = KafkaSaslSettings("PLAIN", "gw1", password)
    async with speaking(FakeBroker()) as port:
        found = await way(f"127.0.0.1:{port}", tls=KafkaTlsSettings(), sasl=sasl)
    assert [(each.link, each.result) for each in found.findings] == [
        ("dns", "pass"),
        ("tcp", "pass"),
        ("tls", "fail"),
        ("sasl", "skipped"),
    ]
    assert found.findings[-1].words == f"not checked: TLS with 127.0.0.1:{port} fails, see above"


async def test_a_file_that_cannot_be_used_is_told_where_it_is_looked_at(tmp_path: Path) -> None:
    async with speaking(FakeBroker()) as port:
        found = await way(f"127.0.0.1:{port}", tls=KafkaTlsSettings(ca=tmp_path / "ca.pem"))
        (tls,) = [each for each in found.findings if each.link == "tls"]
        assert (tls.result, tls.words) == ("skipped", "not checked: kafka.tls.ca cannot be used, see there")
        found = await way(f"127.0.0.1:{port}", sasl=KafkaSaslSettings("PLAIN", "gw1", tmp_path / "password"))
    (log_in,) = [each for each in found.findings if each.link == "sasl"]
    assert log_in.words == "not checked: kafka.sasl.password_file cannot be used, see there"
    assert not found.answering


async def test_a_name_tells_its_addresses_and_those_that_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async with speaking(FakeBroker()) as port:

        async def addresses(_host: str, _port: int) -> list[Address]:
            await asyncio.sleep(0)
            good = (socket.AF_INET, socket.SOCK_STREAM, 6, ("127.0.0.1", port))
            return [good, (socket.AF_INET, socket.SOCK_STREAM, 6, ("127.0.0.2", 1))]

        monkeypatch.setattr(names, "addresses", addresses)
        found = await way(f"kafka.example:{port}")
    name, connection, *_ = found.findings
    assert name.words.startswith("is 127.0.0.1, 127.0.0.2 (looked up in ")
    assert isinstance(connection, Remark)
    assert connection.words.startswith("made: 127.0.0.1 in ")
    assert "but kafka.example also leads to 127.0.0.2, which takes no connection: " in connection.words


@pytest.mark.parametrize(
    ("bootstrap", "result"),
    [
        ("127.0.0.1:1", "pass"),
        ("localhost:1", "pass"),
        ("[::1]:1", "pass"),
        ("192.0.2.1:9092", "warning"),
        ("kafka.example:9092", "warning"),
    ],
)
def test_a_way_without_tls_is_warned_of_where_it_leaves_the_box(bootstrap: str, result: str) -> None:
    kafka = structs.replace(SETTINGS.kafka, bootstrap=(bootstrap,))
    assert kafka_way._without_tls(kafka).result == result
