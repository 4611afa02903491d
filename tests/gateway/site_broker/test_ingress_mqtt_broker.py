"""The broker ingress with a real mosquitto: readings and acknowledgements, who may connect, and its words."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.reading import Mark, Reading
from gateway.settings import BrokerTlsSettings
from gateway.site_broker import broker_ingress, commits, reach
from gateway.site_broker.client import BrokerClient
from tests.support.broker_intake import MemoryIntake, broker_telling, delivery, numbered, published, reading_from
from tests.support.buffers import reading_of
from tests.support.gateways import free_port
from tests.support.mosquitto import Mosquitto, mosquitto, self_signed
from tests.support.stream_server import speaking
from tests.support.waiting import patience, until
from tests.test_imports import imported_by


@pytest.fixture
def intake() -> MemoryIntake:
    return MemoryIntake()


@pytest.fixture
async def said() -> AsyncIterator[list[Any]]:
    """Collect the log of the ingress."""
    with structlog.testing.capture_logs() as entries:
        yield entries


# --- taking and acknowledging ------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_what_the_broker_delivers_is_taken_in_order(tmp_path: Path, qos: int, intake: MemoryIntake) -> None:
    with mosquitto(tmp_path / "broker", "allow_anonymous true", "max_queued_messages 0") as broker:
        async with reading_from(intake, broker.port, qos=2) as ingress:
            await ingress.session.subscriptions.answered.wait()
            await published(broker.port, numbered(0, 500), qos=qos)
            await until(lambda: len(intake.stored) == 500)
        assert intake.payloads() == numbered(0, 500)
        assert intake.stored[0] == reading_of("device/42/thermo", b"reading 0", 123_456)
        async with reading_from(intake, broker.port, qos=2) as ingress:
            await ingress.session.subscriptions.answered.wait()
            await asyncio.sleep(0.2)
            assert ingress.session.counts["readings"] == 0, "all were acknowledged"


@pytest.mark.parametrize("qos", [1, 2])
async def test_nothing_is_acknowledged_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qos: int
) -> None:
    """Promise P1: with no commit, the broker keeps it and delivers it again."""
    monkeypatch.setattr(commits, "STOP_S", 0.2)
    with mosquitto(tmp_path / "broker") as broker:
        intake = MemoryIntake()
        async with reading_from(intake, broker.port, qos=qos) as ingress:
            await ingress.session.subscriptions.answered.wait()
            intake.outcome = None
            await published(broker.port, numbered(0, 3), qos=qos)
            await until(lambda: sum(len(readings) for readings, _, _ in intake.waiting) == 3)
        after = MemoryIntake()
        async with reading_from(after, broker.port, qos=qos):
            await until(lambda: len(after.stored) == 3)
        assert after.payloads() == numbered(0, 3)


async def test_what_was_published_while_the_gateway_was_away_comes_later(tmp_path: Path, intake: MemoryIntake) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.session.subscriptions.answered.wait()
        await published(broker.port, numbered(0, 50))
        async with reading_from(intake, broker.port):
            await until(lambda: len(intake.stored) == 50)
    assert intake.payloads() == numbered(0, 50)


async def test_a_refused_reading_comes_again_on_a_new_connection(tmp_path: Path, intake: MemoryIntake) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.session.subscriptions.answered.wait()
            intake.outcome = False
            await published(broker.port, ["21.5"])
            await until(lambda: not ingress.session.subscriptions.answered.is_set())
            intake.outcome = True
            await until(lambda: intake.stored)
            assert ingress.session.counts["connections"] == 2
    assert intake.payloads() == ["21.5"]
    assert not intake.stored[0].datum.doubt, "it is known that it was not stored"


async def test_a_full_buffer_stops_the_reading(tmp_path: Path, intake: MemoryIntake) -> None:
    with mosquitto(tmp_path / "broker", "allow_anonymous true", "max_inflight_messages 5") as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.session.subscriptions.answered.wait()
            intake.cannot_store, intake.outcome = True, None
            await published(broker.port, numbered(0, 40))
            await asyncio.sleep(0.3)
            assert sum(len(readings) for readings, _, _ in intake.waiting) <= 5
            intake.cannot_store, intake.outcome = False, True
            while intake.waiting:
                intake.decide(True)
            await until(lambda: len(intake.stored) == 40)
            assert ingress.session.counts["connections"] == 1
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

    async def listen(reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1_000):
            heard.extend(data)

    intake = MemoryIntake()
    async with speaking(speak) as port, reading_from(intake, port, keep_alive_s=1) as ingress:
        await asyncio.wait_for(ingress.session.subscriptions.answered.wait(), patience(5))
        intake.cannot_store, intake.outcome = True, None
        await until(lambda: heard.count(b"\xc0\x00") >= 4)
        assert ingress.session.counts["connections"] == 1
        assert sum(len(readings) for readings, _, _ in intake.waiting) < 200, "what one or two reads bring"
        assert sent[0] < 20_000_000, "TCP holds the broker back"


async def test_qos_0_that_cannot_be_stored_is_counted(tmp_path: Path, intake: MemoryIntake) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port) as ingress:
            await ingress.session.subscriptions.answered.wait()
            intake.outcome = False
            await published(broker.port, ["one"], qos=0)
            await until(lambda: intake.losses["refused-qos0"] == 1)
            intake.outcome = True
            await until(lambda: ingress.session.counts["connections"] == 2)
            await ingress.session.subscriptions.answered.wait()
            intake.cannot_store = True
            await published(broker.port, ["two"], qos=0)
            await until(lambda: intake.losses["refused-qos0"] == 2)


async def test_a_retained_message_is_no_reading_of_now(tmp_path: Path, intake: MemoryIntake) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        await published(broker.port, ["of yesterday"], "-r")
        async with reading_from(intake, broker.port) as ingress:
            await until(lambda: ingress.session.counts["retained"] == 1)
            await published(broker.port, ["of now"], "-r")
            await until(lambda: intake.stored)
        assert intake.payloads() == ["of now"]
        async with reading_from(intake, broker.port) as ingress:
            await until(lambda: ingress.session.counts["retained"] == 1)
        assert intake.payloads() == ["of now"], "each SUBSCRIBE brings it again, and it is no reading then either"


async def test_a_message_that_is_too_large_does_not_block_the_next(tmp_path: Path, intake: MemoryIntake) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port, packet_bytes_max=2_000) as ingress:
            await ingress.session.subscriptions.answered.wait()
            await published(broker.port, ["x" * 200_000])
            await published(broker.port, ["small"])
            await until(lambda: intake.stored)
            assert intake.payloads() == ["small"]
            assert intake.losses["packet-too-large"] == 1


async def test_topics_that_the_settings_no_longer_name_are_unsubscribed(tmp_path: Path, intake: MemoryIntake) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        async with reading_from(intake, broker.port, topics=("device/#", "old/#")) as ingress:
            await ingress.session.subscriptions.answered.wait()
        async with reading_from(intake, broker.port, topics=("device/#", "new/#")) as ingress:
            await ingress.session.subscriptions.answered.wait()
            await published(broker.port, ["1"], topic="old/1")
            await published(broker.port, ["2"], topic="new/1")
            await until(lambda: intake.stored)
    assert [reading.topic for reading in intake.stored] == ["new/1"]


async def test_a_session_that_was_never_subscribed_is_subscribed(tmp_path: Path, intake: MemoryIntake) -> None:
    """A broker that lost the session, and a gateway that was killed between its next CONNECT and its SUBSCRIBE."""
    with mosquitto(tmp_path / "broker") as broker:
        intake.kept[f"broker/127.0.0.1:{broker.port}/sluice-gw1/topics"] = b'["device/#"]'
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        writer.write(b"\x10\x16\x00\x04MQTT\x04\x00\x00\x3c\x00\x0asluice-gw1")
        assert await reader.readexactly(4) == b"\x20\x02\x00\x00"
        writer.close()
        await writer.wait_closed()
        async with reading_from(intake, broker.port) as ingress:
            await asyncio.wait_for(ingress.session.subscriptions.answered.wait(), patience(5))
            await published(broker.port, ["21.5"])
            await until(lambda: intake.stored)


async def test_what_is_to_be_subscribed_is_on_disk_before(tmp_path: Path, intake: MemoryIntake) -> None:
    """Otherwise a gateway that is killed before SUBACK, and gets other topics, would not know its subscriptions."""
    del tmp_path
    kept: list[bytes | None] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x02\x00\x00")
        assert (await reader.read(1_000))[0] == 0x82
        kept.extend(value for key, value in intake.kept.items() if key.endswith("/topics"))
        await reader.read()

    async with broker_telling(note) as port, reading_from(intake, port):
        await until(lambda: kept)
    assert kept == [b'["device/#"]']


# --- what fails half-way -----------------------------------------------------------------------------------


async def test_what_came_before_a_malformed_packet_is_stored_once(said: list[Any], intake: MemoryIntake) -> None:
    async def short_suback(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x02\x01\x00")
        await reader.read(1_000)
        writer.write(delivery(1, b"one") + b"\x90\x01\x00" + delivery(2, b"two"))
        await reader.read()

    async with broker_telling(short_suback, delivered_again) as port, reading_from(intake, port) as ingress:
        await until(lambda: ingress.session.counts["recognised"])
        await until(lambda: len(intake.stored) == 2)
    assert [(reading.datum.payload, reading.datum.doubt) for reading in intake.stored] == [
        (b"one", False),
        (b"two", True),
    ]
    assert any("not MQTT 3.1.1" in entry["event"] for entry in said)


async def delivered_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x20\x02\x01\x00" + delivery(1, b"one", duplicate=True) + delivery(2, b"two", duplicate=True))
    await reader.read()


async def deliver_two(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x20\x02\x01\x00" + delivery(1, b"one") + delivery(2, b"two"))
    await reader.read()


async def test_what_could_not_be_taken_is_in_no_mark_and_comes_again(said: list[Any]) -> None:
    """A fault of this gateway in the middle of a read: nothing of that read counts as stored."""

    class Faulty(MemoryIntake):
        def lost(self, *_: object, **__: object) -> None:
            raise RuntimeError

    async def too_large_behind(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        large = b"\x00\x01t\x00\x02" + b"x" * 5_000
        writer.write(b"\x20\x02\x01\x00" + delivery(1, b"one") + b"\x32\x8d\x27" + large)
        await reader.read()

    intake = Faulty()
    scripts = (too_large_behind, delivered_again)
    async with broker_telling(*scripts) as port, reading_from(intake, port, packet_bytes_max=2_000) as ingress:
        await until(lambda: len(intake.stored) == 2)
        assert ingress.session.counts["recognised"] == 0
    assert intake.payloads() == ["one", "two"]
    assert any("a fault of this gateway" in entry["event"] for entry in said)


async def test_an_intake_that_raises_costs_one_connection(said: list[Any]) -> None:
    class Faulty(MemoryIntake):
        failures = 0

        def take(self, readings: Sequence[Reading], done: Any, marks: Sequence[Mark] = ()) -> None:
            if readings and self.failures < 2:
                self.failures += 1
                raise RuntimeError
            super().take(readings, done, marks)

    intake = Faulty()
    async with broker_telling(deliver_two, delivered_again) as port, reading_from(intake, port) as ingress:
        await until(lambda: len(intake.stored) == 2)
        assert ingress.session.counts["connections"] == 3
    assert not any(reading.datum.doubt for reading in intake.stored), "it is known that they were not stored"
    assert any("could not be taken in" in entry["event"] for entry in said)


async def test_a_fault_before_the_connection_ends_nothing(said: list[Any]) -> None:
    class Faulty(MemoryIntake):
        failures = 0

        async def marks(self, prefix: str) -> dict[str, bytes]:
            self.failures += 1
            if self.failures < 3:
                raise RuntimeError
            return await super().marks(prefix)

    intake = Faulty()
    async with broker_telling(deliver_two) as port, reading_from(intake, port):
        await until(lambda: len(intake.stored) == 2)
    assert len([entry for entry in said if "reading from the broker failed" in entry["event"]]) == 2


async def test_a_refused_connection_changes_nothing_of_what_is_known(intake: MemoryIntake) -> None:
    """CONNACK 3 while a broker starts: messages that were stored before it are recognised after it."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x02\x00\x03")

    async def deliver_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x02\x01\x00" + delivery(1, b"one") + delivery(2, b"two"))
        await until(lambda: any(readings for readings, _, _ in intake.waiting))
        del reader

    intake.outcome = None
    scripts = (deliver_and_close, refuse, refuse, delivered_again)
    async with broker_telling(*scripts) as port, reading_from(intake, port) as ingress:
        await until(lambda: intake.waiting)
        intake.decide(True)  # the marks before CONNECT
        await until(lambda: any(readings for readings, _, _ in intake.waiting))
        await until(lambda: ingress._said[0].startswith("the connection ended"))
        intake.outcome = True
        while intake.waiting:
            intake.decide(True)
        await until(lambda: ingress.session.counts["recognised"] == 2)
    assert intake.payloads() == ["one", "two"]


async def test_a_connection_that_ends_right_behind_a_commit_has_acknowledged_nothing(
    monkeypatch: pytest.MonkeyPatch, intake: MemoryIntake
) -> None:
    clients: list[BrokerClient] = []
    opens = BrokerClient.open

    def open_and_tell(client: BrokerClient, *where: Any) -> None:
        clients.append(client)
        opens(client, *where)

    monkeypatch.setattr(BrokerClient, "open", open_and_tell)
    intake.outcome = None
    async with broker_telling(deliver_two, delivered_again) as port, reading_from(intake, port) as ingress:
        await until(lambda: intake.waiting)
        intake.decide(True)  # the marks before CONNECT
        await until(lambda: any(readings for readings, _, _ in intake.waiting))
        intake.decide(True)
        clients[0].end("it says nothing any more")
        intake.outcome = True
        while intake.waiting:
            intake.decide(True)
        await until(lambda: ingress.session.counts["recognised"] == 2)
    assert intake.payloads() == ["one", "two"]


async def test_a_large_message_that_comes_again_is_counted_once(intake: MemoryIntake) -> None:
    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> None:
        writer.write(b"\x20\x02\x01\x00" + first + b"\x8d\x27\x00\x01t\x00\x02" + b"x" * 5_000)
        await until(lambda: intake.waiting if first == b"\x32" else ingress.session.counts["recognised"])
        del reader

    intake.outcome = None
    scripts = (lambda r, w: large(r, w, b"\x32"), lambda r, w: large(r, w, b"\x3a"))
    async with broker_telling(*scripts) as port, reading_from(intake, port, packet_bytes_max=2_000) as ingress:
        await until(lambda: intake.waiting)
        intake.decide(True)
        await until(lambda: ingress.session.counts["too-large"] and ingress._said[0].startswith("the connection ended"))
        intake.outcome = True
        while intake.waiting:
            intake.decide(True)
        await until(lambda: ingress.session.counts["recognised"])
    assert intake.losses["packet-too-large"] == 1


async def test_a_pingreq_that_only_qos_0_shows_to_be_due_is_written() -> None:
    heard = bytearray()

    async def told(reader: asyncio.StreamReader, packet: bytes, times: int = 1) -> None:
        while heard.count(packet) < times:
            heard.extend(await reader.read(1_000))

    async def acknowledged_behind_a_pingreq(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x02\x01\x00" + delivery(1, b"one"))
        await told(reader, b"\xc0\x00")
        writer.write(delivery(2, b"two"))
        await told(reader, b"\x40\x02\x00\x02")
        assert heard.count(b"\xc0\x00") == 1, "one PINGREQ at a time"
        writer.write(b"\xd0\x00" + b"\x30\x08\x00\x01tthree")
        await told(reader, b"\xc0\x00", 2)
        is_told.set()
        await reader.read()

    is_told = asyncio.Event()
    # The keep-alive's own PINGREQ comes too late to be it.
    late: dict[str, Any] = {"keep_alive_s": 3_600}
    async with broker_telling(acknowledged_behind_a_pingreq) as port, reading_from(MemoryIntake(), port, **late):
        await until(is_told.is_set)


# --- who may connect, and how ------------------------------------------------------------------------------


async def test_there_is_no_hot_loop_against_a_dead_broker(said: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[float] = []
    open_link = reach.open_link

    async def counted(*arguments: Any) -> Any:
        attempts.append(asyncio.get_running_loop().time())
        return await open_link(*arguments)

    monkeypatch.setattr(broker_ingress, "open_link", counted)
    async with reading_from(MemoryIntake(), free_port(), backoff_s_min=0.05, backoff_s_max=10.0):
        await asyncio.sleep(1.5)
    assert 2 <= len(attempts) < 25
    assert len([entry for entry in said if "cannot be reached" in entry["event"]]) == 1, "said once"


def password_list(path: Path) -> None:
    subprocess.run(["mosquitto_passwd", "-b", "-c", path, "gw", "correct horse"], check=True)


async def test_tls_with_user_and_password(tmp_path: Path, intake: MemoryIntake) -> None:
    broker = Mosquitto(tmp_path / "broker")
    certificate, key = self_signed(tmp_path)
    passwords, secret = tmp_path / "passwords", tmp_path / "secret"
    password_list(passwords)
    secret.write_text("correct horse\n")
    secret.chmod(0o400)
    broker.settings = (f"password_file {passwords}", f"certfile {certificate}", f"keyfile {key}")
    broker.start()
    settings: dict[str, Any] = {
        "host": "localhost",
        "tls": BrokerTlsSettings(ca=certificate),
        "user": "gw",
        "password_file": secret,
    }

    try:
        async with reading_from(intake, broker.port, **settings) as ingress:
            await asyncio.wait_for(ingress.session.subscriptions.answered.wait(), patience(10))
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
        ({"user": "gw", "password_file": "empty"}, "password_file is empty"),
        ({"user": "gw", "password_file": "long"}, "more than 65535 bytes"),
        ({"user": "gw", "password": "x", "tls": BrokerTlsSettings()}, "check that port is the broker's port for TLS"),
        (
            {"user": "gw", "password": "x", "tls": BrokerTlsSettings(ca=Path("nowhere"))},
            "the files of TLS cannot be read",
        ),
    ],
)
async def test_why_there_is_no_connection_is_said(
    tmp_path: Path, said: list[Any], settings: dict[str, Any], words: str, intake: MemoryIntake
) -> None:
    for name, content, mode in (("open", "secret", 0o644), ("empty", "\n", 0o400), ("long", "x" * 70_000, 0o400)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    passwords = tmp_path / "passwords"
    password_list(passwords)
    if "password_file" in settings:
        settings = settings | {"password_file": tmp_path / settings["password_file"]}
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


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "it does not speak this version of MQTT"),
        (2, "set client_id to one that it takes"),
        (3, "it says that it is not available"),
        (4, "mend user and password_file"),
        (5, "mend user and password_file"),
        (77, "return code 77"),
    ],
)
async def test_why_the_broker_refuses_is_said(said: list[Any], code: int, words: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x02\x00" + bytes((code,)))
        await reader.read()

    async with broker_telling(refuse) as port, reading_from(MemoryIntake(), port) as ingress:
        await until(lambda: any(words in entry["event"] for entry in said))
        assert ingress.session.counts["connections"] == 0


async def test_nothing_counts_before_connack(said: list[Any], intake: MemoryIntake) -> None:
    """Section 3.2: the first packet is CONNACK. A delivery before it would be judged by marks that may be void."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A PUBACK, which looks like a CONNACK but for its type.
        writer.write(b"\x40\x02\x00\x00" + delivery(1, b"one") + b"\x20\x02\x00\x00")
        await reader.read()

    async with broker_telling(speak) as port, reading_from(intake, port):
        await until(lambda: any("it sent no CONNACK" in entry["event"] for entry in said))
    assert not intake.stored


async def test_a_name_that_is_looked_up_for_long_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up cannot be ended: in the loop's own executor they would pile up, and Kafka's would have to wait."""
    asked = []
    go_on = threading.Event()

    def getaddrinfo(*_: object, **__: object) -> list[Any]:
        asked.append(threading.current_thread().name)
        go_on.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with reading_from(MemoryIntake(), 1883, host="broker.example", connect_timeout_s=0.02) as ingress:
        await until(lambda: ingress._said[0].startswith("does not answer"))
        await asyncio.sleep(0.5)
        assert len(asked) == 1
        assert asked[0].startswith("mqtt-broker-name")
        go_on.set()


async def test_a_socket_that_cannot_be_wrapped_is_closed() -> None:
    with socket.socket() as link:
        with pytest.raises(ValueError, match="server_hostname"):
            await reach._encrypted(link, ssl.create_default_context(), "")
        assert link.fileno() == -1


async def test_what_is_no_broker_is_said_to_be_none(said: list[Any]) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with speaking(speak) as port, reading_from(MemoryIntake(), port):
        await until(lambda: any("for MQTT" in entry["event"] for entry in said))


async def test_a_refused_subscription_is_said_and_the_others_go_on(said: list[Any]) -> None:
    """mosquitto grants topics that its access list forbids. This broker answers like brokers that refuse them."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        writer.write(b"\x20\x02\x00\x00")
        subscribe = await reader.read(1_000)
        writer.write(b"\x90\x05" + subscribe[2:4] + b"\x80\x00\x01")
        await reader.read()

    topics = ("secret/#", "weak/#", "device/#")
    async with speaking(speak) as port, reading_from(MemoryIntake(), port, topics=topics) as ingress:
        await asyncio.wait_for(ingress.session.subscriptions.answered.wait(), patience(5))
    told = {entry["topic"]: entry["event"] for entry in said if "topic" in entry}
    assert "refuses a subscription" in told["secret/#"]
    assert "grants QoS 0 only" in told["weak/#"]
    assert "device/#" not in told


async def test_a_suback_that_does_not_fit_is_no_answer(said: list[Any]) -> None:
    """A filter without its code would be held to be read, and nothing of it would come."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x02\x00\x00")
        subscribe = await reader.read(1_000)
        writer.write(b"\x90\x03" + subscribe[2:4] + b"\x01")
        await reader.read()

    async with (
        broker_telling(speak) as port,
        reading_from(MemoryIntake(), port, topics=("device/#", "meter/#")) as ingress,
    ):
        await until(lambda: any("another number of filters" in entry["event"] for entry in said))
        assert not ingress.session.subscriptions.answered.is_set()


# --- what is overridden of paho ----------------------------------------------------------------------------


async def test_the_private_parts_of_paho_are_as_they_were() -> None:
    """The version is pinned for their sake: `site_broker.client` relies on them."""
    ours, brokers = await connected_pair()
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000, "a black hole is noticed"
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    came: list[Any] = []
    client = BrokerClient(ours, "gw1", 10_000, came.extend)
    client.open("127.0.0.1", 1883, 30)  # by way of _create_socket
    reader, writer = brokers
    connect = await reader.readexactly(17)
    assert connect[:12] == b"\x10\x0f\x00\x04MQTT\x04\x00\x00\x1e", "CONNECT of 3.1.1, without clean session"
    client.subscribe([("device/#", 1)])  # although paho never saw a CONNACK
    assert await reader.readexactly(15) == b"\x82\x0d\x00\x01\x00\x08device/#\x01"
    client.send(b"\x40\x02\x00\x01\x40\x02\x00\x02", ping=True)  # _packet_queue: one packet of many
    assert await reader.readexactly(10) == b"\x40\x02\x00\x01\x40\x02\x00\x02\xc0\x00"
    writer.write(b"\x30\x05\x00\x01t21\x30\x05\x00\x01t22")
    await until(lambda: len(came) == 2)
    writer.write(b"\x30\xff\xff\xff\xff")
    assert "more than four bytes" in await asyncio.wait_for(client.ended, patience(5))
    assert client.socket() is None  # _sock_close
    writer.close()


async def test_the_end_of_the_connection_is_noticed_when_writing() -> None:
    ours, (_, writer) = await connected_pair()
    client = BrokerClient(ours, "gw1", 10_000, lambda _: None)
    client.open("127.0.0.1", 1883, 30)
    client.pause_reading()
    writer.transport.abort()
    while not client.ended.done():
        client.send(b"\x40\x02\x00\x01")
        await asyncio.sleep(0.01)
    assert client.socket() is None


def test_a_gateway_without_a_broker_does_not_load_paho() -> None:
    assert "paho" not in imported_by("gateway.pipeline", "gateway.listener.listener")


async def connected_pair() -> tuple[Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    there: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
        asyncio.get_running_loop().create_future()
    )
    server = await asyncio.start_server(lambda *pair: there.set_result(pair), "127.0.0.1", 0)
    with ThreadPoolExecutor(1) as resolver:
        ours = await reach.connect("127.0.0.1", server.sockets[0].getsockname()[1], None, resolver)
    pair = await there
    server.close()
    return ours, pair
