"""The broker ingress with a real mosquitto: what is taken and acknowledged, who may connect, what is said."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway import broker_client, ingress_mqtt_broker
from gateway.broker_client import BrokerClient
from gateway.mqtt_packet_reader import Packet
from gateway.reading import Reading
from gateway.settings import BrokerTlsSettings
from tests.broker_intake import MemoryIntake, numbered, published, reading_from, until
from tests.mosquitto import Mosquitto, free_port, mosquitto, self_signed
from tests.test_imports import imported_by


@pytest.fixture
async def said() -> AsyncIterator[list[Any]]:
    """What the ingress logs."""
    with structlog.testing.capture_logs() as entries:
        yield entries


# --- taking and acknowledging ------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_what_the_broker_delivers_is_taken_in_order(tmp_path: Path, qos: int) -> None:
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker", "allow_anonymous true", "max_queued_messages 0") as broker:
        async with reading_from(intake, broker.port, qos=2) as ingress:
            await ingress.subscribed.wait()
            await published(broker.port, numbered(0, 500), qos=qos)
            await until(lambda: len(intake.stored) == 500)
        assert intake.payloads() == numbered(0, 500)
        assert intake.stored[0] == Reading("device/42/thermo", "device/42/thermo", b"reading 0", 123_456)
        async with reading_from(intake, broker.port, qos=2) as ingress:
            await ingress.subscribed.wait()
            await asyncio.sleep(0.2)
            assert ingress.counts["readings"] == 0, "all were acknowledged"


@pytest.mark.parametrize("qos", [1, 2])
async def test_nothing_is_acknowledged_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qos: int
) -> None:
    """Promise P1: with no commit, the broker keeps it and delivers it again."""
    monkeypatch.setattr(ingress_mqtt_broker, "STOP_S", 0.2)
    with mosquitto(tmp_path / "broker") as broker:
        intake = MemoryIntake()
        async with reading_from(intake, broker.port, qos=qos) as ingress:
            await ingress.subscribed.wait()
            intake.outcome = None
            await published(broker.port, numbered(0, 3), qos=qos)
            await until(lambda: sum(len(readings) for readings, _, _ in intake.waiting) == 3)
        after = MemoryIntake()
        async with reading_from(after, broker.port, qos=qos):
            await until(lambda: len(after.stored) == 3)
        assert after.payloads() == numbered(0, 3)


async def test_what_was_published_while_the_gateway_was_away_comes_later(tmp_path: Path) -> None:
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.subscribed.wait()
        await published(broker.port, numbered(0, 50))
        async with reading_from(intake, broker.port):
            await until(lambda: len(intake.stored) == 50)
    assert intake.payloads() == numbered(0, 50)


async def test_a_refused_reading_comes_again_on_a_new_connection(tmp_path: Path) -> None:
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.subscribed.wait()
            intake.outcome = False
            await published(broker.port, ["21.5"])
            await until(lambda: not ingress.subscribed.is_set())
            intake.outcome = True
            await until(lambda: intake.stored)
            assert ingress.counts["connections"] == 2
    assert intake.payloads() == ["21.5"]
    assert not intake.stored[0].redelivered, "it is known that it was not stored"


async def test_a_full_buffer_stops_the_reading(tmp_path: Path) -> None:
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker", "allow_anonymous true", "max_inflight_messages 5") as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.subscribed.wait()
            intake.holding, intake.outcome = True, None
            await published(broker.port, numbered(0, 40))
            await asyncio.sleep(0.3)
            assert sum(len(readings) for readings, _, _ in intake.waiting) <= 5
            intake.holding, intake.outcome = False, True
            while intake.waiting:
                intake.decide(True)
            await until(lambda: len(intake.stored) == 40)
            assert ingress.counts["connections"] == 1
    assert intake.payloads() == numbered(0, 40)


async def test_while_nothing_can_be_stored_the_keep_alive_goes_on_and_memory_does_not_grow() -> None:
    """A broker that sends on and on, and counts the PINGREQs that it gets meanwhile."""
    heard = bytearray()
    sent = [0]
    reading = b"\x32\xfe\x07" + b"\x00\x0adevice/1/t" + b"\x00\x01" + b"x" * 1_008

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        writer.write(b"\x20\x02\x00\x00")
        subscribe = await reader.read(1_000)
        writer.write(b"\x90\x03" + subscribe[2:4] + b"\x01")
        listening = asyncio.create_task(listen(reader))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                while True:
                    writer.write(reading)
                    await writer.drain()
                    sent[0] += len(reading)
        await listening
        writer.close()

    async def listen(reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1_000):
            heard.extend(data)

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    intake = MemoryIntake()
    port = server.sockets[0].getsockname()[1]
    async with server, reading_from(intake, port, keep_alive_s=1) as ingress:
        await asyncio.wait_for(ingress.subscribed.wait(), 5)
        intake.holding, intake.outcome = True, None
        await until(lambda: heard.count(b"\xc0\x00") >= 4)
        assert ingress.counts["connections"] == 1
        assert sum(len(readings) for readings, _, _ in intake.waiting) < 200, "what one or two reads bring"
        assert sent[0] < 20_000_000, "TCP holds the broker back"


async def test_qos_0_that_cannot_be_stored_is_counted(tmp_path: Path) -> None:
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.subscribed.wait()
            intake.outcome = False
            await published(broker.port, ["one"], qos=0)
            await until(lambda: intake.losses["refused-qos0"] == 1)
            intake.outcome = True
            await until(lambda: ingress.counts["connections"] == 2)
            await ingress.subscribed.wait()
            intake.holding = True
            await published(broker.port, ["two"], qos=0)
            await until(lambda: intake.losses["refused-qos0"] == 2)


async def test_a_retained_message_is_no_reading_of_now(tmp_path: Path) -> None:
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker") as broker:
        await published(broker.port, ["of yesterday"], "-r")
        async with reading_from(intake, broker.port) as ingress:
            await until(lambda: ingress.counts["retained"] == 1)
            await published(broker.port, ["of now"], "-r")
            await until(lambda: intake.stored)
        assert intake.payloads() == ["of now"]
        async with reading_from(intake, broker.port) as ingress:
            await ingress.subscribed.wait()
            await asyncio.sleep(0.2)
            assert ingress.counts["retained"] == 0, "a session that is subscribed already is left alone"


async def test_a_message_that_is_too_large_does_not_block_the_next(tmp_path: Path) -> None:
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port, packet_bytes_max=2_000) as ingress:
            await ingress.subscribed.wait()
            await published(broker.port, ["x" * 200_000])
            await published(broker.port, ["small"])
            await until(lambda: intake.stored)
            assert intake.payloads() == ["small"]
            assert intake.losses["packet-too-large"] == 1


async def test_topics_that_the_settings_no_longer_name_are_unsubscribed(tmp_path: Path) -> None:
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port, topics=("device/#", "old/#")) as ingress:
            await ingress.subscribed.wait()
        async with reading_from(intake, broker.port, topics=("device/#", "new/#")) as ingress:
            await ingress.subscribed.wait()
            await published(broker.port, ["1"], topic="old/1")
            await published(broker.port, ["2"], topic="new/1")
            await until(lambda: intake.stored)
    assert [reading.topic for reading in intake.stored] == ["new/1"]


# --- who may connect, and how ------------------------------------------------------------------------------


async def test_there_is_no_hot_loop_against_a_dead_broker(said: list[Any]) -> None:
    intake = MemoryIntake()
    async with reading_from(intake, free_port(), backoff_s_min=0.05, backoff_s_max=10.0) as ingress:
        attempts: list[float] = []
        connect = ingress._connect

        async def counted() -> Any:
            attempts.append(asyncio.get_running_loop().time())
            return await connect()

        ingress._connect = counted  # type: ignore[method-assign]
        await asyncio.sleep(1.5)
    assert 2 <= len(attempts) < 25
    assert len([entry for entry in said if "cannot be reached" in entry["event"]]) == 1, "said once"


def password_list(path: Path) -> None:
    subprocess.run(["mosquitto_passwd", "-b", "-c", path, "gw", "correct horse"], check=True)


async def test_tls_with_user_and_password(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path / "broker")
    certificate, key = self_signed(tmp_path)
    passwords, secret = tmp_path / "passwords", tmp_path / "secret"
    password_list(passwords)
    secret.write_text("correct horse\n")
    secret.chmod(0o400)
    broker.settings = (f"password_file {passwords}", f"certfile {certificate}", f"keyfile {key}")
    broker.start()
    intake = MemoryIntake()
    settings = {"host": "localhost", "tls": BrokerTlsSettings(ca=certificate), "user": "gw", "password_file": secret}
    try:
        async with reading_from(intake, broker.port, **settings) as ingress:
            await asyncio.wait_for(ingress.subscribed.wait(), 10)
            options = ("-h", "localhost", "--cafile", str(certificate), "-u", "gw", "-P", "correct horse")
            # Longer than one TLS record, and than one read.
            payloads = [f"{number} " + "x" * 30_000 for number in range(20)]
            await published(broker.port, payloads, *options)
            await until(lambda: len(intake.stored) == 20)
            assert intake.payloads() == payloads
    finally:
        broker.kill()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"user": "gw", "password": "wrong"}, "mend user and password_file"),
        ({}, "or missing"),
        ({"user": "gw", "password_file": "open"}, "chmod 0400"),
        ({"user": "gw", "password_file": "nowhere"}, "password_file cannot be read"),
        ({"user": "gw", "password": "x", "tls": BrokerTlsSettings()}, "check that port is the broker's port for TLS"),
        (
            {"user": "gw", "password": "x", "tls": BrokerTlsSettings(ca=Path("nowhere"))},
            "the files of TLS cannot be read",
        ),
    ],
)
async def test_why_there_is_no_connection_is_said(
    tmp_path: Path, said: list[Any], settings: dict[str, Any], words: str
) -> None:
    (tmp_path / "open").write_text("secret")
    (tmp_path / "open").chmod(0o644)
    passwords = tmp_path / "passwords"
    password_list(passwords)
    if "password_file" in settings:
        settings = settings | {"password_file": tmp_path / settings["password_file"]}
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker", f"password_file {passwords}") as broker:
        async with reading_from(intake, broker.port, **settings):
            await until(lambda: any(words in entry["event"] for entry in said))
    assert intake.events == ["broker-lost"]


async def test_a_certificate_of_somebody_else_is_not_accepted(tmp_path: Path, said: list[Any]) -> None:
    certificate, key = self_signed(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = self_signed(tmp_path / "other")
    intake = MemoryIntake()
    with mosquitto(tmp_path / "broker", "allow_anonymous true", f"certfile {certificate}", f"keyfile {key}") as broker:
        async with reading_from(intake, broker.port, host="localhost", tls=BrokerTlsSettings(ca=other)):
            await until(lambda: any("its certificate is not accepted" in entry["event"] for entry in said))


async def test_what_is_no_broker_is_said_to_be_none(said: list[Any]) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server, reading_from(MemoryIntake(), server.sockets[0].getsockname()[1]):
        await until(lambda: any("for MQTT" in entry["event"] for entry in said))


async def test_a_refused_subscription_is_said_and_the_others_go_on(said: list[Any]) -> None:
    """mosquitto grants what its access list forbids: this broker answers as those do that say so."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        writer.write(b"\x20\x02\x00\x00")
        subscribe = await reader.read(1_000)
        writer.write(b"\x90\x05" + subscribe[2:4] + b"\x80\x00\x01")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        topics = ("secret/#", "weak/#", "device/#")
        async with reading_from(MemoryIntake(), server.sockets[0].getsockname()[1], topics=topics) as ingress:
            await asyncio.wait_for(ingress.subscribed.wait(), 5)
    told = {entry["topic"]: entry["event"] for entry in said if "topic" in entry}
    assert "refuses a subscription" in told["secret/#"]
    assert "grants QoS 0 only" in told["weak/#"]
    assert "device/#" not in told


# --- what is overridden of paho ----------------------------------------------------------------------------


async def test_the_private_parts_of_paho_are_as_they_were() -> None:
    """The version is pinned for their sake; these are what `broker_client` relies on."""
    ours, brokers = await connected_pair()
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000, "a black hole is noticed"
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    came: list[Any] = []
    client = BrokerClient(ours, "gw1", 10_000, came.extend)
    accepted: list[bool] = []
    client.accepted = lambda _code, present: accepted.append(present)
    client.open("127.0.0.1", 1883, 30)  # by way of _create_socket
    reader, writer = brokers
    connect = await reader.readexactly(17)
    assert connect[:12] == b"\x10\x0f\x00\x04MQTT\x04\x00\x00\x1e", "CONNECT of 3.1.1, without clean session"
    client.answer(Packet(0x20, b"\x01\x00", 0))  # _in_packet, _packet_handle
    assert accepted == [True]
    client.send(b"\x40\x02\x00\x01\x40\x02\x00\x02", ping=True)  # _packet_queue: one packet of many
    assert await reader.readexactly(10) == b"\x40\x02\x00\x01\x40\x02\x00\x02\xc0\x00"
    writer.write(b"\x30\x05\x00\x01t21\x30\x05\x00\x01t22")
    await until(lambda: len(came) == 2)
    writer.write(b"\x30\xff\xff\xff\xff")
    await asyncio.wait_for(client.ended, 5)  # _loop_rc_handle
    assert client.socket() is None
    writer.close()


def test_a_gateway_without_a_broker_does_not_load_paho() -> None:
    assert "paho" not in imported_by("gateway.pipeline", "gateway.ingress_mqtt_listener")


async def connected_pair() -> tuple[Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    there: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
        asyncio.get_running_loop().create_future()
    )
    server = await asyncio.start_server(lambda *pair: there.set_result(pair), "127.0.0.1", 0)
    ours = await broker_client.connect("127.0.0.1", server.sockets[0].getsockname()[1], None)
    pair = await there
    server.close()
    return ours, pair
