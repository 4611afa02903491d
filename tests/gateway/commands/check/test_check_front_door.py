"""`sluice check` on the MQTT side: connecting as a sensor does, and to the site's broker as the gateway does."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import structs

from gateway.commands.check.finding import Finding
from gateway.commands.check.front_door import Door, DoorError, check_brokers, check_listener, doors, entered
from gateway.commands.check.mqtt_probe import NoAnswerError, connect_packet, conversing
from gateway.listener.listener import MqttListener
from gateway.mqtt.protocol import Connect, ServerProtocol
from gateway.settings import (
    BrokerSettings,
    BrokerTlsSettings,
    BufferSettings,
    GatewaySettings,
    KafkaSettings,
    ListenerSettings,
    Settings,
    TlsSettings,
)
from tests.support.buffers import opened
from tests.support.certificates import make_authority
from tests.support.gateways import answering, free_port
from tests.support.mqtt_peers import RecordingIntake, listening
from tests.support.stream_server import speaking


def settings_of(folder: Path, listener: ListenerSettings | None, *brokers: BrokerSettings) -> Settings:
    return Settings(
        GatewaySettings("gw1", clock="system"),
        KafkaSettings(("127.0.0.1:1",)),
        BufferSettings(folder / "buffer.db"),
        listener,
        brokers,
    )


@asynccontextmanager
async def served(folder: Path, listener: MqttListener) -> AsyncIterator[Settings]:
    """The settings of a gateway that runs, with a listener whose credentials it gives."""

    async def check_open(_arguments: dict[str, object]) -> object:
        await asyncio.sleep(0)
        return listener.shared.checks.open()

    async with opened(folder / "buffer.db"), answering(folder / "buffer.db", {"check-open": check_open}):
        yield settings_of(folder, listener.settings)


async def looked(settings: Settings) -> list[Finding]:
    # In a thread, for this one answers as the daemon.
    return await asyncio.to_thread(lambda: list(check_listener(settings)))


async def test_a_sensor_is_let_in_where_only_devices_with_a_secret_are(tmp_path: Path) -> None:
    users = {"42": "0" * 64}
    async with listening(RecordingIntake(), anonymous=False, users=users) as listener:
        async with served(tmp_path, listener) as settings:
            (found,) = await looked(settings)
            assert found.result == "pass"
            assert found.words.startswith("a sensor is let in: CONNACK after ")
        intake = listener.shared.intake
        assert isinstance(intake, RecordingIntake)
        assert intake.events == [], "it is no device"
        assert not listener.counts["bad-credentials"]


async def test_with_tls_the_certificate_need_not_be_trusted_here(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "ca")
    pair = authority.sign("gateway")
    tls = TlsSettings(pair.certificate, pair.key, free_port())
    async with listening(RecordingIntake(), port=0, tls=tls) as listener, served(tmp_path, listener) as settings:
        (found,) = await looked(settings)
        assert (found.subject, found.result) == (f"connecting to 127.0.0.1:{tls.port}", "pass")
        assert found.words.endswith("ms over TLS")
        wanted = structs.replace(tls, port=free_port(), client_ca=authority.certificate)
    async with listening(RecordingIntake(), port=0, tls=wanted) as listener, served(tmp_path, listener) as settings:
        (found,) = await looked(settings)
    assert found.result == "pass"
    assert "asks the client for a certificate (mqtt_listener.tls.client_ca)" in found.words


async def test_a_listener_that_lets_nobody_in_is_told(tmp_path: Path) -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener, served(tmp_path, listener) as settings:
        intake.cannot_store = True
        (found,) = await looked(settings)
    assert found.result == "fail"
    assert found.words.startswith("refused (CONNACK 3): it lets nobody in just now, because readings cannot be stored")


async def test_another_port_than_the_gateway_listens_on_is_told(tmp_path: Path) -> None:
    async with listening(RecordingIntake()) as listener, served(tmp_path, listener) as settings:
        assert settings.mqtt_listener is not None
        moved = structs.replace(settings.mqtt_listener, port=1)
        (found,) = await looked(structs.replace(settings, mqtt_listener=moved))
    assert found.result == "fail"
    assert "if mqtt_listener.port was changed since, restart the gateway" in found.words


async def test_a_gateway_of_another_version_gives_no_credential(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db"), answering(tmp_path / "buffer.db", {}):
        (found,) = await looked(settings_of(tmp_path, ListenerSettings(port=1, anonymous=True)))
    assert found.result == "warning"
    assert "restart it after an upgrade" in found.words


@pytest.mark.parametrize(
    ("host", "met"),
    [("0.0.0.0", "127.0.0.1:1883"), ("::", "[::1]:1883"), ("192.0.2.1", "192.0.2.1:1883")],  # noqa: S104
)
def test_a_listener_for_all_is_met_on_this_box(host: str, met: str) -> None:
    (door,) = doors(ListenerSettings(host=host))
    assert str(door) == met


async def test_what_is_no_listener_is_told(tmp_path: Path) -> None:
    async with listening(RecordingIntake()) as listener, served(tmp_path, listener):
        credential = listener.shared.checks.open()

        async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        def enter(port: int) -> None:
            with entered(Door("mqtt_listener.port", "127.0.0.1", port, is_tls=False), listener.settings, credential):
                pass

        async with speaking(talk) as port:
            with pytest.raises(DoorError, match=r"its answer is not MQTT 3\.1\.1; is it this gateway's port\?"):
                await asyncio.to_thread(enter, port)


def test_connect_is_as_the_standard_has_it() -> None:
    for name in ("sluice-check-1", "x" * 200):
        protocol = ServerProtocol(65_536)
        (found,) = protocol.receive(connect_packet(name, "$check-1", b"secret"))
        assert found == Connect(name, True, 60, None, "$check-1", b"secret")
    (found,) = ServerProtocol(65_536).receive(connect_packet("c", None, None))
    assert isinstance(found, Connect)
    assert (found.user_name, found.password) == (None, None)


async def test_who_says_nothing_is_not_waited_for_long() -> None:
    async def say_nothing(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    def ask(port: int) -> None:
        with conversing(socket.create_connection(("127.0.0.1", port)), 0.1) as conversation:
            conversation.connect("c", None, None)

    async with speaking(say_nothing) as port:
        with pytest.raises(NoAnswerError, match="it takes the connection and says nothing"):
            await asyncio.to_thread(ask, port)


# -- the site's broker ----------------------------------------------------------------------------


async def broker_told(folder: Path, broker: BrokerSettings) -> Finding:
    (found,) = await asyncio.to_thread(lambda: list(check_brokers(settings_of(folder, None, broker))))
    return found


async def test_a_broker_lets_the_gateway_in_and_its_session_stays(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(0o400)
    users = {"gw1": "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"}
    async with listening(RecordingIntake(), anonymous=False, users=users) as site:
        broker = BrokerSettings("127.0.0.1", ("#",), site.port, user="gw1", password_file=password)
        found = await broker_told(tmp_path, broker)
        assert (found.subject, found.result) == (f"broker 127.0.0.1:{site.port}", "pass")
        assert found.words.startswith("lets this gateway in: CONNACK after ")
        assert not site.shared.kept.kept, "no session is left behind"
        password.chmod(0o600)
        password.write_text("wrong")
        password.chmod(0o400)
        found = await broker_told(tmp_path, broker)
    assert found.result == "fail"
    assert found.words.startswith("refuses the connection: user or password is wrong or missing")


async def test_a_broker_that_cannot_be_reached(tmp_path: Path) -> None:
    found = await broker_told(tmp_path, BrokerSettings("127.0.0.1", ("#",), 1))
    assert found.words.startswith("cannot be reached: nothing listens there")
    found = await broker_told(tmp_path, BrokerSettings("broker.invalid", ("#",)))
    assert found.words.startswith("cannot be reached: its name is not known here")
    missing = BrokerSettings("127.0.0.1", ("#",), 1, user="a", password_file=tmp_path / "none")
    assert (await broker_told(tmp_path, missing)).result == "fail"


async def test_a_brokers_certificate_is_looked_at(tmp_path: Path) -> None:
    authority, stranger = make_authority(tmp_path / "ca"), make_authority(tmp_path / "stranger")
    pair = authority.sign("broker")
    tls = TlsSettings(pair.certificate, pair.key, free_port())
    async with listening(RecordingIntake(), port=0, tls=tls):
        good = BrokerSettings("127.0.0.1", ("#",), tls.port, tls=BrokerTlsSettings(ca=authority.certificate))
        assert (await broker_told(tmp_path, good)).words.endswith("ms over TLS")
        bad = structs.replace(good, tls=BrokerTlsSettings(ca=stranger.certificate))
        assert "its certificate is not accepted" in (await broker_told(tmp_path, bad)).words
        plain = await broker_told(tmp_path, structs.replace(good, tls=None))
    assert plain.result == "fail"
    assert "that [mqtt_brokers.tls] is there only if that port has TLS" in plain.words
