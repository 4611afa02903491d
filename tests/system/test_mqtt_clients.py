"""The MQTT listener with real clients: paho and mosquitto's, plain and over TLS."""

import asyncio
import contextlib
import hashlib
import shutil
import socket
import sqlite3
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.client import mqtt_ms_resend_pubrel as RESEND_PUBREL  # noqa: N812 - a constant
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from structlog.testing import capture_logs

from gateway.listener.listener import ListenError, MqttListener
from gateway.listener.tls_connection import TLS_BUFFER_BYTES, TLS_WAITING_BYTES_MAX, handshake_failure
from gateway.settings import TlsSettings
from gateway.tls.client import client_context
from tests.support.certificates import Authority, make_authority, openssl
from tests.support.gateways import daemon, free_port, write_config
from tests.support.mosquitto import mosquitto as site_broker
from tests.support.mqtt_peers import CODEWORD, USERS, RecordingIntake, listening
from tests.support.waiting import patience, until

OPERATORS = {"ops": hashlib.sha256(CODEWORD.encode()).hexdigest()}
COMMANDED: dict[str, Any] = {"anonymous": False, "users": USERS, "operators": OPERATORS}

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

# --- certificates -----------------------------------------------------------------------------------------


@pytest.fixture
def intake() -> RecordingIntake:
    return RecordingIntake()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA, and what it signed: a server's certificate and a client's, named m001."""
    made = make_authority(tmp_path_factory.mktemp("certificates") / "ca")
    made.sign("server")
    made.sign("m001", "")
    return made


def tls_of(authority: Authority, **more: Any) -> TlsSettings:
    return TlsSettings(authority.folder / "server.pem", authority.folder / "server.key", free_port(), **more)


@contextlib.asynccontextmanager
async def listening_with_tls(intake: RecordingIntake, tls: TlsSettings, **settings: Any) -> AsyncIterator[MqttListener]:
    """With TLS alone, as where the plain port is 0."""
    async with listening(intake, 0, tls=tls, **settings) as listener:
        yield listener


# --- paho -------------------------------------------------------------------------------------------------


class PahoClient(Client):
    """paho, without its one defect that costs QoS 2 its meaning.

    When a connection attempt fails, paho 2 sends a PUBLISH again that it has released already, and without
    DUP [MQTT-4.3.3-1]: no server can tell it from a new message.
    """

    def _messages_reconnect_reset_out(self) -> None:
        released = [message for message in self._out_messages.values() if message.state == RESEND_PUBREL]
        super()._messages_reconnect_reset_out()
        for message in released:
            message.state = RESEND_PUBREL


class Paho:
    """A paho client in its own thread, with what it was told."""

    def __init__(
        self, client_id: str, protocol: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv311, *, clean: bool = True
    ) -> None:
        self.client = PahoClient(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=protocol,
            clean_session=None if protocol is MQTTProtocolVersion.MQTTv5 else clean,
        )
        self.connack: list[str] = []
        self.session_present: list[bool] = []
        self.disconnected = threading.Event()
        self.subacks: list[bool] = []
        self.messages: list[tuple[bytes, int]] = []
        self.client.on_connect = self._on_connect
        self.client.on_message = self._on_message
        self.client.on_disconnect = lambda _c, _u, _f, _r, _p: self.disconnected.set()
        self.client.on_subscribe = lambda _c, _u, _m, reasons, _p: self.subacks.extend(
            reason.is_failure for reason in reasons
        )

    def _on_connect(self, _client: Client, _data: Any, flags: Any, reason: Any, _properties: Any) -> None:
        self.session_present.append(flags.session_present)
        self.connack.append(str(reason))

    def _on_message(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        self.messages.append((bytes(message.payload), message.qos))

    async def start(self, port: int, keep_alive_s: int = 60) -> None:
        await asyncio.to_thread(self.client.connect, "127.0.0.1", port, keep_alive_s)
        self.client.loop_start()
        await self.connected(1)

    async def connected(self, times: int) -> None:
        """Wait until it was told the outcome of so many CONNECTs."""
        await until(lambda: len(self.connack) >= times)

    async def stop(self) -> None:
        await asyncio.to_thread(self.client.disconnect)
        await asyncio.to_thread(self.client.loop_stop)


@pytest.mark.parametrize("protocol", [MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5])
@pytest.mark.parametrize("over", ["plain", "tls"])
async def test_paho_publishes_with_every_qos(
    over: str, protocol: MQTTProtocolVersion, authority: Authority, intake: RecordingIntake
) -> None:
    tls = tls_of(authority)
    async with listening(intake, tls=tls, anonymous=False, users=USERS) as listener:
        paho = Paho("m001", protocol)
        paho.client.username_pw_set("m001", CODEWORD)
        if over == "tls":
            paho.client.tls_set(str(authority.certificate))
        await paho.start(tls.port if over == "tls" else listener.port)
        assert paho.connack == ["Success"]
        sent = [paho.client.publish("device/m001/thermo", str(number), qos=number % 3) for number in range(300)]
        await until(lambda: all(message.is_published() for message in sent))
        await until(lambda: len(intake.stored) == 300)
        await paho.stop()
        await until(lambda: not listener.shared.connections)
    # Each QoS in its order; paho lets QoS 0 overtake what waits for its window of 20.
    numbers = [int(reading.datum.payload) for reading in intake.stored]
    for qos in range(3):
        assert [number for number in numbers if number % 3 == qos] == list(range(qos, 300, 3))
    assert {reading.writer for reading in intake.stored} == {"m001"}
    assert listener.counts["disconnected"] == 1


async def test_paho_sends_again_on_its_next_connection_what_was_not_stored(intake: RecordingIntake) -> None:
    intake.outcome = False
    async with listening(intake) as listener:
        paho = Paho("m001")
        paho.client.reconnect_delay_set(1, 1)
        await paho.start(listener.port)
        message = paho.client.publish("device/m001/thermo", "21.5", qos=1)
        await until(lambda: listener.counts["intake-refused"])
        assert not message.is_published()
        intake.outcome = True
        await until(message.is_published)
        await paho.stop()
    assert [reading.datum.payload for reading in intake.stored] == [b"21.5"]


async def test_paho_finishes_its_qos_2_across_a_restart_of_the_gateway_in_the_middle(intake: RecordingIntake) -> None:
    port = free_port()
    paho = Paho("m001", clean=False)
    paho.client.reconnect_delay_set(1, 1)
    try:
        async with listening(intake, port):
            await paho.start(port)
            intake.outcome = None
            message = paho.client.publish("device/m001/thermo", "21.5", qos=2)
            await until(lambda: intake.batches)
            # Stored, and the gateway ends before it can say so.
            intake.batches[0] = (intake.batches[0][0], lambda _: None)
            intake.decide(True)
        intake.outcome = True
        async with listening(intake, port) as listener:
            await until(message.is_published)
            assert paho.session_present == [False, True]
            assert listener.counts["redelivery-recognised"] == 1
            await paho.stop()
    finally:
        await paho.stop()
    assert [reading.datum.payload for reading in intake.stored] == [b"21.5"]


async def test_paho_against_the_daemon_that_is_killed_under_it(tmp_path: Path, port: int) -> None:
    """kill -9, with no Kafka to be reached: everything that was sent stands in the file, with QoS 2 once."""
    config = write_config(tmp_path, f"127.0.0.1:{free_port()}", port, "clients")
    paho = Paho("m001", clean=False)
    paho.client.reconnect_delay_set(1, 1)
    sent = []
    try:
        for cycle in range(4):
            with daemon(config, port) as process:
                if cycle == 0:
                    await paho.start(port)
                await paho.connected(cycle + 1)
                for number in range(150):
                    payload = f"reading {cycle} {number}"
                    sent.append((payload, paho.client.publish("device/m001/thermo", payload, qos=1 + number % 2)))
                if cycle < 3:
                    await until(sent[-100][1].is_published)
                    process.kill()
                else:
                    await until(lambda: all(message.is_published() for _, message in sent))
    finally:
        await paho.stop()
    with contextlib.closing(sqlite3.connect(tmp_path / "buffer.db")) as connection:
        stored = Counter(str(payload, "utf-8") for (payload,) in connection.execute("SELECT payload FROM reading"))
        marks = [key for (key,) in connection.execute("SELECT key FROM mark")]
    assert paho.session_present == [False, True, True, True]
    assert [payload for payload, _ in sent if not stored[payload]] == []
    assert [payload for payload, _ in sent[1::2] if stored[payload] != 1] == []
    left = [key for key in marks if key.startswith("mqtt/") and "/session/" not in key and "/released" not in key]
    assert left == [], "every exchange was finished and forgotten"


async def test_paho_gets_commands_live_and_those_that_came_while_it_was_away(intake: RecordingIntake) -> None:
    async with listening(intake, **COMMANDED) as listener:
        operator, sensor = Paho("console"), Paho("sensor", clean=False)
        operator.client.username_pw_set("ops", CODEWORD)
        sensor.client.username_pw_set("m001", CODEWORD)
        await operator.start(listener.port)
        await sensor.start(listener.port)
        sensor.client.subscribe("command/m001/#", 2)
        await until(lambda: sensor.subacks == [False])
        for number in range(3):
            operator.client.publish("command/m001/set", str(number), qos=number)
        await until(lambda: len(sensor.messages) == 3)
        await sensor.stop()
        await until(lambda: len(listener.shared.connections) == 1)
        late = [operator.client.publish("command/m001/set", f"late {number}", qos=1) for number in range(5)]
        await until(lambda: all(message.is_published() for message in late))
        back = Paho("sensor", clean=False)
        back.client.username_pw_set("m001", CODEWORD)
        await back.start(listener.port)
        await until(lambda: len(back.messages) == 5)
        assert sensor.session_present + back.session_present == [False, True]
        await until(lambda: not [key for key in intake.kept if "/command/" in key])
        await back.stop()
        await operator.stop()
    expected = [(b"0", 0), (b"1", 1), (b"2", 1), *((b"late %d" % number, 1) for number in range(5))]
    assert sensor.messages + back.messages == expected


async def test_paho_keeps_itself_alive_and_may_not_subscribe_to_what_is_not_its_own() -> None:
    async with listening(RecordingIntake()) as listener:
        paho = Paho("m001")
        await paho.start(listener.port, keep_alive_s=1)
        paho.client.subscribe("device/#", 1)
        await until(lambda: paho.subacks)
        await asyncio.sleep(2)
        assert paho.subacks == [True]
        assert not paho.disconnected.is_set()
        await paho.stop()


async def test_pahos_will_is_reported_when_it_vanishes(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        paho = Paho("m001")
        paho.client.will_set("status/m001", "gone", qos=1)
        await paho.start(listener.port)
        paho.client.loop_stop()
        paho_socket = paho.client.socket()
        assert paho_socket is not None
        paho_socket.close()
        await until(lambda: len(intake.events) == 2)
    kind, device, details = intake.events[1]
    assert (kind, device, details["will_topic"], details["will_payload"]) == (
        "device-died",
        "m001",
        "status/m001",
        "gone",
    )


async def test_paho_with_a_wrong_password_is_told_so() -> None:
    async with listening(RecordingIntake(), anonymous=False, users=USERS) as listener:
        paho = Paho("m001")
        paho.client.username_pw_set("m001", "wrong")
        await paho.start(listener.port)
        await paho.stop()
        assert paho.connack[0] == "Bad user name or password"


async def test_paho_is_taken_over() -> None:
    async with listening(RecordingIntake()) as listener:
        older, newer = Paho("m001"), Paho("m001")
        older.client.reconnect_delay_set(60, 60)
        await older.start(listener.port)
        await newer.start(listener.port)
        await until(older.disconnected.is_set)
        assert newer.client.is_connected()
        await older.stop()
        await newer.stop()


async def test_paho_with_mqtt_5_is_told_why_its_connection_ends(intake: RecordingIntake) -> None:
    async with listening(intake) as listener:
        older, newer = Paho("m001", MQTTProtocolVersion.MQTTv5), Paho("m001", MQTTProtocolVersion.MQTTv5)
        told: list[str] = []
        older.client.on_disconnect = lambda _c, _u, _f, reason, _p: told.append(str(reason))
        older.client.reconnect_delay_set(60, 60)
        await older.start(listener.port)
        await newer.start(listener.port)
        await until(lambda: told)
        await older.stop()
        await newer.stop()
    assert told == ["Session taken over"]


async def test_pahos_refused_readings_carry_the_reason(intake: RecordingIntake) -> None:
    intake.outcome, intake.refuses_by_share = False, True
    async with listening(intake) as listener:
        paho = Paho("m001", MQTTProtocolVersion.MQTTv5)
        told: list[str] = []
        paho.client.on_publish = lambda _c, _u, _m, reason, _p: told.append(str(reason))
        await paho.start(listener.port)
        for qos in (1, 2):
            paho.client.publish("device/m001/thermo", "21.5", qos=qos)
        await until(lambda: len(told) == 2)
        intake.outcome = True
        message = paho.client.publish("device/m001/thermo", "21.6", qos=2)
        await until(message.is_published)
        await paho.stop()
        assert listener.counts["above-share"] == 2
    # paho does not look at the reason code of PUBREC, and goes on with PUBREL.
    assert told == ["Quota exceeded", "Packet identifier not found", "Success"]
    assert [reading.datum.payload for reading in intake.stored] == [b"21.6"]


# --- mosquitto's clients ----------------------------------------------------------------------------------

mosquitto = pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed")


async def run(program: str, port: int, *arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(program, "-h", "127.0.0.1", "-p", str(port), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), patience(10))
    return process.returncode, out.decode(), errors.decode()


READING = ("-t", "device/m001/thermo", "-m", "21.5")


@mosquitto
@pytest.mark.parametrize("over", ["plain", "tls"])
@pytest.mark.parametrize("qos", ["0", "1", "2"])
@pytest.mark.parametrize("session", [(), ("-c", "-i", "m001")])
@pytest.mark.parametrize(
    "version", [("-V", "311"), ("-V", "5", "-x", "60"), ("-V", "5", "-D", "PUBLISH", "topic-alias", "1")]
)
async def test_mosquitto_pub_publishes(  # noqa: PLR0913, PLR0917 - each of its options
    qos: str,
    over: str,
    session: tuple[str, ...],
    version: tuple[str, ...],
    authority: Authority,
    intake: RecordingIntake,
) -> None:
    tls = tls_of(authority)
    async with listening(intake, tls=tls) as listener:
        port, ca = (tls.port, ("--cafile", str(authority.certificate))) if over == "tls" else (listener.port, ())
        assert await run("mosquitto_pub", port, *READING, "-q", qos, *version, *session, *ca) == (0, "", "")
        await until(lambda: intake.stored)
    assert [reading.datum.payload for reading in intake.stored] == [b"21.5"]


@mosquitto
async def test_mosquitto_pub_of_another_version_is_told_so() -> None:
    async with listening(RecordingIntake()) as listener:
        code, _, errors = await run("mosquitto_pub", listener.port, *READING, "-q", "1", "-V", "31")
        assert code != 0
        assert "protocol version" in errors.lower()


@mosquitto
@pytest.mark.parametrize("version", ["311", "5"])
@pytest.mark.parametrize("qos", ["0", "1", "2"])
async def test_mosquitto_sub_gets_a_command_and_nothing_of_others(qos: str, version: str) -> None:
    ours = ("-u", "m001", "-P", CODEWORD, "-i", "sensor", "-c", "-V", version)
    async with listening(RecordingIntake(), **COMMANDED) as listener:
        waiting = asyncio.create_task(
            run("mosquitto_sub", listener.port, *ours, "-t", "command/m001/#", "-q", qos, "-C", "1", "-W", "9")
        )
        await until(lambda: listener.shared.kept.subscribed)
        operator = ("-u", "ops", "-P", CODEWORD, "-q", qos, "-V", version)
        command = ("-t", "command/m001/set", "-m", "on")
        assert await run("mosquitto_pub", listener.port, *operator, *command) == (0, "", "")
        assert await waiting == (0, "on\n", "")
        code, _, errors = await run("mosquitto_sub", listener.port, *ours, "-t", "command/#", "-C", "1", "-W", "2")
        assert "denied" in errors or "Not authorized" in errors, code


@mosquitto
@pytest.mark.parametrize("version", ["mqttv311", "mqttv50"])
async def test_a_bridge_of_mosquitto_is_called_that_and_comes_in(
    version: str, tmp_path: Path, intake: RecordingIntake
) -> None:
    with capture_logs() as lines:
        async with listening(intake) as listener:
            bridge = (
                "connection sluice",
                f"address 127.0.0.1:{listener.port}",
                "topic device/m001/thermo out 1",
                "notifications false",
                "restart_timeout 1",
                f"bridge_protocol_version {version}",
            )
            with site_broker(tmp_path / "site", "allow_anonymous true", *bridge) as broker:
                await run("mosquitto_pub", broker.port, *READING, "-q", "1")
                await until(lambda: intake.stored)
            # With MQTT 5, a bridge asks for nothing else first.
            asks_first = int(version == "mqttv311")
            assert listener.counts["mosquitto-bridge-level"] == asks_first
    assert [reading.datum.payload for reading in intake.stored] == [b"21.5"]
    told = [line["why"] for line in lines if line.get("reason") == "mosquitto-bridge-level"]
    assert ["try_private false" in why for why in told] == [True] * asks_first


# --- TLS --------------------------------------------------------------------------------------------------


async def handshake(port: int, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port, ssl=context), patience(5))


def trusting(authority: Authority) -> ssl.SSLContext:
    return client_context(authority.certificate, None, None)


CONNECT = b"\x10\x10\x00\x04MQTT\x04\x02\x00\x3c\x00\x04m001"
ACCEPTED = b"\x20\x02\x00\x00"


@mosquitto
async def test_a_client_certificate_stands_for_user_and_password(authority: Authority) -> None:
    intake = RecordingIntake()
    tls = tls_of(authority, client_ca=authority.certificate)
    own = ("--cert", str(authority.folder / "m001.pem"), "--key", str(authority.folder / "m001.key"))
    arguments = (*READING, "-q", "1", "-V", "311", "--cafile", str(authority.certificate))
    async with listening_with_tls(intake, tls, anonymous=False, users=USERS) as listener:
        assert await run("mosquitto_pub", tls.port, *arguments, *own) == (0, "", "")
        code, _, _ = await run("mosquitto_pub", tls.port, *arguments, "-u", "m001", "-P", CODEWORD)
        assert code != 0
        await until(lambda: listener.counts["tls-handshake-failed"])
    assert [reading.writer for reading in intake.stored] == ["m001"]


async def test_tls_below_1_2_and_no_tls_at_all_get_nowhere(authority: Authority) -> None:
    tls = tls_of(authority)
    async with listening_with_tls(RecordingIntake(), tls, connect_timeout_s=0.3) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", tls.port)
        writer.write(CONNECT)
        assert ACCEPTED not in await asyncio.wait_for(reader.read(), patience(5))
        writer.close()
        silent_reader, silent_writer = await asyncio.open_connection("127.0.0.1", tls.port)
        assert await asyncio.wait_for(silent_reader.read(), patience(5)) == b"", "the handshake has its time-out"
        silent_writer.close()
        await until(lambda: listener.counts["tls-handshake-failed"] == 2)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority.certificate)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await handshake(tls.port, context)
        await until(lambda: listener.counts["tls-handshake-failed"] == 3)


async def test_a_failed_handshake_is_told_with_what_to_do(authority: Authority) -> None:
    ours = trusting(authority)
    strangers = ssl.create_default_context()
    tls = tls_of(authority)

    async def why(attempt: Awaitable[object]) -> str:
        before = listener.counts["tls-handshake-failed"]
        listener.refusals.finish()
        with capture_logs() as logged:
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                await attempt
            await until(lambda: listener.counts["tls-handshake-failed"] > before)
        (line,) = (line for line in logged if line.get("reason") == "tls-handshake-failed")
        return str(line["why"])

    def shake(context: ssl.SSLContext, host: str = "127.0.0.1") -> None:
        with (
            socket.create_connection(("127.0.0.1", tls.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            pass

    async def plainly(sent: bytes = CONNECT) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", tls.port)
        writer.write(sent)
        await asyncio.sleep(0.1)
        writer.close()

    async with listening_with_tls(RecordingIntake(), tls) as listener:
        assert "no TLS came: a client that speaks none belongs to mqtt_listener.port" in await why(plainly())
        assert "speaks HTTP to the port of MQTT over TLS" in await why(plainly(b"GET /mqtt HTTP/1.1\r\n\r\n"))
        assert "does not trust this gateway's certificate" in await why(asyncio.to_thread(shake, strangers))
        elsewhere = asyncio.to_thread(shake, ours, "elsewhere.example")
        assert "name the host that the client connects to in subjectAltName" in await why(elsewhere)
        # asyncio's own client does not say what it thinks of a certificate.
        assert "closed the connection without saying why" in await why(handshake(tls.port, strangers))
    tls = tls_of(authority, client_ca=authority.certificate)
    async with listening_with_tls(RecordingIntake(), tls) as listener:
        shaken = asyncio.to_thread(shake, ours)
        assert "showed no certificate, which mqtt_listener.tls.client_ca demands" in await why(shaken)


def test_an_alert_is_told_in_words_whatever_its_name_begins_with() -> None:
    for reason in ("TLSV1_ALERT_INTERNAL_ERROR", "SSLV3_ALERT_BAD_CERTIFICATE", "SSL/TLS_ALERT_UNKNOWN_CA"):
        error = ssl.SSLError(1, f"[SSL: {reason}] told (_ssl.c:1006)")
        error.reason = reason
        assert handshake_failure(error).startswith("the client does not trust this gateway's certificate")
    other = ssl.SSLError(1, "[SSL: BAD_LENGTH] bad length (_ssl.c:1006)")
    assert handshake_failure(other) == "[SSL: BAD_LENGTH] bad length"


async def test_tls_connections_have_a_bound_of_their_own(authority: Authority) -> None:
    tls = tls_of(authority, connections_max=1)
    async with listening(RecordingIntake(), tls=tls) as listener:
        reader, writer = await handshake(tls.port, trusting(authority))
        writer.write(CONNECT)
        assert await reader.readexactly(4) == ACCEPTED
        with pytest.raises((ConnectionResetError, ssl.SSLEOFError)):
            await handshake(tls.port, trusting(authority))
        assert listener.counts["too-many-tls-connections"] == 1
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await until(lambda: not listener.shared.connections)


async def test_a_large_batch_comes_through_the_small_tls_buffer(authority: Authority) -> None:
    intake = RecordingIntake()
    tls = tls_of(authority)
    async with listening(intake, tls=tls):
        reader, writer = await handshake(tls.port, trusting(authority))
        one = b"\x32\x79\x00\x12device/m001/thermo\x00\x01" + b"x" * 99
        writer.write(CONNECT + one * 5_000)
        answers = await asyncio.wait_for(reader.readexactly(4 + 4 * 5_000), patience(10))
        assert answers == ACCEPTED + b"\x40\x02\x00\x01" * 5_000
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert len(intake.stored) == 5_000


async def test_over_tls_too_a_connection_is_closed_behind_the_answers(authority: Authority) -> None:
    intake = RecordingIntake()
    tls = tls_of(authority)
    async with listening(intake, tls=tls, inflight_messages_max=100) as listener:
        reader, writer = await handshake(tls.port, trusting(authority))
        one = b"\x32\x79\x00\x12device/m001/thermo\x00\x01" + b"x" * 99
        intake.outcome = None
        writer.write(CONNECT + one * 100 + b"\xff\x00" + one * 100)
        await until(lambda: listener.counts["reserved-packet-type"])
        intake.decide_all()
        assert await asyncio.wait_for(reader.read(), patience(5)) == ACCEPTED + b"\x40\x02\x00\x01" * 100
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert len(intake.stored) == 100


async def test_a_certificate_is_read_again_when_it_changed(authority: Authority, tmp_path: Path) -> None:
    def put(name: str) -> None:
        for suffix in ("pem", "key"):
            new = tmp_path / f"new.{suffix}"
            new.write_bytes((authority.folder / f"{name}.{suffix}").read_bytes())
            new.rename(tmp_path / f"server.{suffix}")

    async def presented() -> bytes | None:
        _, writer = await handshake(tls.port, trusting(authority))
        certificate: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return certificate

    put("server")
    authority.sign("renewed")
    tls = TlsSettings(tmp_path / "server.pem", tmp_path / "server.key", free_port())
    with capture_logs() as lines:
        async with listening(RecordingIntake(), tls=tls):
            old = await presented()
            (tmp_path / "server.pem").write_text("half a certificate")
            assert await presented() == old, "what cannot be used changes nothing"
            assert await presented() == old
            (tmp_path / "server.pem").unlink()
            assert await presented() == old
            assert await presented() == old
            put("renewed")
            new = await presented()
            assert new != old
            assert await presented() == new
    # Each change is looked at, and told, once.
    said = [(line["log_level"], str(line.get("why"))) for line in lines if "TLS" in line["event"] and "why" in line]
    assert [level for level, _ in said] == ["error", "error"]
    assert "no PEM certificate" in said[0][1]
    assert "No such file" in said[1][1]
    assert [line["event"] for line in lines].count("TLS certificate read again") == 1


async def test_the_bytes_that_wait_for_a_paused_tls_connection_are_bounded(authority: Authority) -> None:
    intake = RecordingIntake()
    tls = tls_of(authority)
    async with listening(intake, tls=tls, inflight_messages_max=1) as listener:
        reader, writer = await handshake(tls.port, trusting(authority))
        writer.write(CONNECT)
        assert await reader.readexactly(4) == ACCEPTED
        intake.outcome = None
        writer.write((b"\x32\x79\x00\x12device/m001/thermo\x00\x01" + b"x" * 99) * 20_000)
        await until(lambda: listener.shared.paused)
        await asyncio.sleep(0.2)
        (connection,) = listener._tls_connections
        waiting = connection._get_read_buffer_size()  # type: ignore[attr-defined]
        assert 0 < waiting <= TLS_WAITING_BYTES_MAX + TLS_BUFFER_BYTES
        writer.transport.abort()
        intake.outcome = True
        while intake.batches:
            intake.decide(True)
        await until(lambda: not listener.shared.connections)


@mosquitto
async def test_a_certificate_of_a_device_that_was_removed_opens_nothing(authority: Authority) -> None:
    tls = tls_of(authority, client_ca=authority.certificate)
    own = ("--cert", str(authority.folder / "m001.pem"), "--key", str(authority.folder / "m001.key"))
    arguments = (*READING, "-q", "1", "-V", "311", "--cafile", str(authority.certificate), *own)
    others = {"m002": USERS["m002"]}
    async with listening_with_tls(RecordingIntake(), tls, anonymous=False, users=others) as listener:
        code, _, _ = await run("mosquitto_pub", tls.port, *arguments)
        assert code != 0
        assert listener.counts["certificate-of-no-user"] == 1


@pytest.mark.parametrize(
    ("broken", "content", "words"),
    [
        ("certificate", None, r"tls\.certificate: .*server\.pem cannot be read: No such file"),
        ("key", None, r"tls\.key: .*server\.key cannot be read: No such file"),
        ("client_ca", None, r"tls\.client_ca: .*ca\.pem cannot be read: No such file"),
        ("certificate", "rubbish", r"tls\.certificate and mqtt_listener\.tls\.key .* no PEM certificate"),
        ("key", "other", r"key values mismatch"),
        ("client_ca", "rubbish", r"tls\.client_ca: .* holds no PEM certificate"),
    ],
)
async def test_a_file_that_cannot_be_used_is_told_at_the_start(
    broken: str, content: str | None, words: str, authority: Authority, tmp_path: Path
) -> None:
    files = {"certificate": "server.pem", "key": "server.key", "client_ca": "ca.pem"}
    for name in files.values():
        (tmp_path / name).write_bytes((authority.folder / name).read_bytes())
    target = tmp_path / files[broken]
    if content is None:
        target.unlink()
    else:
        target.write_bytes((authority.folder / "m001.key").read_bytes() if content == "other" else content.encode())
    tls = TlsSettings(tmp_path / "server.pem", tmp_path / "server.key", free_port(), tmp_path / "ca.pem")
    with pytest.raises(ListenError, match=words):
        async with listening(RecordingIntake(), tls=tls):
            pass


async def test_an_encrypted_key_does_not_ask_the_terminal(authority: Authority, tmp_path: Path) -> None:
    encrypted = tmp_path / "server.key"
    openssl(
        *("ec", "-in", str(authority.folder / "server.key"), "-out", str(encrypted)),
        *("-aes256", "-passout", "pass:secret"),
    )
    tls = TlsSettings(authority.folder / "server.pem", encrypted, free_port())
    with pytest.raises(ListenError, match="unencrypted private key"):
        async with listening(RecordingIntake(), tls=tls):
            pass
