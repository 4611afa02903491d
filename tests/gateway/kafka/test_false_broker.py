"""A false broker at a broker's address cannot take this box's memory or time, whatever it answers."""

import asyncio
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cramjam
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.fetch import FetchRequest_v4
from aiokafka.protocol.metadata import MetadataRequest_v0, MetadataRequest_v1
from aiokafka.record.util import calc_crc32c

from gateway.clock.kernel_clock import boottime_us
from gateway.commands.check.end_to_end import _read_back
from gateway.commands.check.kafka import check_kafka
from gateway.intake.check_readings import CheckOpened, CheckPlace
from gateway.kafka import answers
from gateway.kafka import link as kafka_link
from gateway.kafka.answers import (
    ANSWER_BYTES_MAX,
    LISTING_BYTES_MAX,
    UNPACKED_BYTES_MAX,
    TooManyFieldsError,
    UnfitAnswerError,
    UnfitRecordsError,
    check_fields,
    check_records,
    check_size,
)
from gateway.kafka.batch import HEADER, HEADER_BYTES
from gateway.kafka.link import KafkaLink
from gateway.settings import BufferSettings, GatewaySettings, KafkaSaslSettings, KafkaSettings, Settings
from tests.support.kafka_peers import API_VERSIONS, FETCH, METADATA, SASL_AUTHENTICATE, FakeBroker
from tests.support.stream_server import speaking
from tests.support.waiting import patience, until

TWO_GIGABYTES = struct.pack(">i", 2**31 - 1)
GROWTH_BYTES_MAX = 40_000_000
"""Most bytes by which memory may grow. The answers here would take ten times as much, and more."""
CHUNK = bytes(65_536)
SENT_BYTES = 1_600 * len(CHUNK)


@pytest.fixture(autouse=True)
def _without_experience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_link, "_experience", kafka_link._Experience())


@dataclass
class FalseBroker(FakeBroker):
    """A broker that answers rightly until the request that it answers falsely."""

    falsehood: bytes | Callable[[int, tuple[str, int]], bytes] = TWO_GIGABYTES
    """Bytes that it sends as an answer, with more bytes behind them without end. Or a function that makes a whole
    answer from the correlation id and its own address."""
    about: int = METADATA
    after: int = 0
    """Number of such requests that it answers well before."""
    taken_bytes: int = 0
    """Bytes behind the answer that were taken, by the client or by the network in between."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(length := await reader.read(4)) == 4:
            request = await reader.readexactly(int.from_bytes(length))
            kind, _, correlation = struct.unpack_from(">hhi", request)
            self.asked.append(kind)
            if kind == self.about and self.asked.count(kind) > self.after:
                if not isinstance(self.falsehood, bytes):
                    writer.write(self.falsehood(correlation, self.advertised))
                    continue
                writer.write(self.falsehood)
                for _ in range(SENT_BYTES // len(CHUNK)):
                    writer.write(CHUNK)
                    await writer.drain()
                    self.taken_bytes += len(CHUNK)
                return
            answer = struct.pack(">i", correlation) + self._answer(kind, request)
            writer.write(struct.pack(">i", len(answer)) + answer)


@dataclass
class RecordBroker(FakeBroker):
    """A broker with one topic, `events`, whose records are whatever it likes."""

    answers: frozenset[int] = frozenset({API_VERSIONS, METADATA, FETCH})
    records: bytes = b""

    def _answer(self, kind: int, request: bytes) -> bytes:
        if kind == API_VERSIONS:
            return struct.pack(">hi3h3h3h", 0, 3, API_VERSIONS, 0, 0, METADATA, 0, 0, FETCH, 4, 4)
        if kind == METADATA:
            brokers = super()._answer(kind, request)[:-4]
            partition = struct.pack(">hiiiiii", 0, 0, 1, 1, 1, 1, 1)
            return brokers + struct.pack(">ih", 1, 0) + b"\0\x06events" + struct.pack(">i", 1) + partition
        return fetched(self.records)[4:]


def link_to(port: int, **settings: Any) -> KafkaLink:
    return KafkaLink(KafkaSettings((f"127.0.0.1:{port}",), connect_timeout_s=3.0, **settings))


async def bootstrapped(link: KafkaLink) -> None:
    client = AIOKafkaClient(**link.options(), request_timeout_ms=5_000)
    try:
        await client.bootstrap()
    finally:
        await client.close()


async def produced(link: KafkaLink) -> None:
    producer = AIOKafkaProducer(**link.options(), request_timeout_ms=5_000)
    try:
        await producer.start()
    finally:
        await producer.stop()


async def administered(link: KafkaLink) -> None:
    admin = AIOKafkaAdminClient(**link.options(), request_timeout_ms=5_000)
    try:
        await admin.start()
    finally:
        await admin.close()


CLIENTS = (bootstrapped, produced, administered)


async def fault_of(link: KafkaLink, client: Callable[[KafkaLink], Any] = bootstrapped) -> str:
    with link.entered(), pytest.raises(KafkaConnectionError):
        await asyncio.wait_for(client(link), patience(10))
    await until(lambda: not link._sockets)
    assert link.fault is not None
    return link.fault


def peak_bytes() -> int:
    """The most memory that this process had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    return peak_bytes()


# -- answers that are too large -------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("about", [API_VERSIONS, METADATA])
async def test_an_answer_of_two_gigabytes_is_not_read(client: Callable[[KafkaLink], Any], about: int) -> None:
    async with speaking(broker := FalseBroker(about=about)) as port:
        before = forget_peak()
        fault = await fault_of(link_to(port), client)
        assert peak_bytes() - before < GROWTH_BYTES_MAX
    largest = "1.0 MB" if about == API_VERSIONS else "16.0 MB"
    assert fault == (
        f"127.0.0.1:{port} announces an answer of 2.1 GB, and no broker's answer has more than {largest} here: the "
        "connection was ended, and nothing more was read. Most likely it is no Kafka broker"
    )
    assert broker.taken_bytes < SENT_BYTES / 2


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n",
            "is no Kafka broker: a web server listens there. Its answer begins with 'HTTP'",
        ),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is no Kafka broker: something else listens there. Its answer begins with 'SSH-'"),
        (b"\xff\xff\xff\xff", "announces an answer of 4.3 GB"),
        (struct.pack(">i", ANSWER_BYTES_MAX + 1), "announces an answer of 1.0 MB"),
        # An alert of TLS (RFC 8446, section 6): a fatal one, of a server that was not spoken to in TLS.
        (b"\x15\x03\x03\x00\x02\x02\x46", "wants TLS, and [kafka.tls] is not set"),
    ],
)
async def test_what_is_no_broker_is_told_as_what_it_is(said: bytes, words: str) -> None:
    async with speaking(FalseBroker(falsehood=said, about=API_VERSIONS)) as port:
        link = link_to(port)
        assert words in await fault_of(link)
    assert link.is_barred
    assert "kafka" in link.faults[f"127.0.0.1:{port}"].hint


async def test_one_that_answers_well_at_first_is_told_too_and_stays_told() -> None:
    async with speaking(broker := FalseBroker(after=2)) as port:
        broker.advertised = ("127.0.0.1", port)
        link = link_to(port)
        faults = []
        with link.entered():
            client = AIOKafkaClient(**link.options(), request_timeout_ms=5_000)
            await client.bootstrap()
            assert await client.ready(1)
            faults.append(link.fault)
            assert not await client.force_metadata_update()
            broker.after = 1_000
            async with asyncio.timeout(patience(10)):
                while not await client.force_metadata_update():
                    await asyncio.sleep(0.05)
            # Its good answers do not make up for that one.
            faults.append(link.fault)
            await client.close()
        await until(lambda: not link._sockets)
    assert faults[0] is None
    assert "announces an answer of 2.1 GB" in str(faults[1])


async def test_sluice_check_tells_it(tmp_path: Path) -> None:
    async with speaking(broker := FalseBroker()) as port:
        kafka = KafkaSettings((f"127.0.0.1:{port}",), connect_timeout_s=3.0, request_timeout_s=5.0)
        settings = Settings(GatewaySettings("gw1"), kafka, BufferSettings(path=tmp_path / "buffer.db"))
        (finding,) = await check_kafka(settings, create=False)
        assert not finding.ok
        assert "is reached, and cannot be used" in finding.words
        assert "announces an answer of 2.1 GB" in finding.words
        # Where only a later answer is false, it is told as well.
        broker.asked.clear()
        broker.after, broker.advertised = 2, ("127.0.0.1", port)
        (finding,) = await check_kafka(settings, create=False)
    assert broker.asked.count(METADATA) == 3
    assert "is reached, and cannot be used" in finding.words
    assert "announces an answer of 2.1 GB" in finding.words


def test_every_client_that_the_gateway_has_is_made_within_a_link() -> None:
    makers = [
        text
        for module in (Path(__file__).parents[3] / "gateway").rglob("*.py")
        if re.search(r"AIOKafka(Producer|AdminClient|Consumer|Client)\(", text := module.read_text())
    ]
    assert len(makers) >= 3
    # A client of a session is made within its link.
    assert all(re.search(r"\.entered\(\)|session\.link\.options\(\)", text) for text in makers), (
        "aiokafka's own connections have no bounds"
    )


# -- answers of much in little ---------------------------------------------------------------------


def topics_without_end(correlation: int, _: tuple[str, int]) -> bytes:
    """Metadata, version 0, of as many topics without partitions as its size allows."""
    count = (LISTING_BYTES_MAX - 16) // 15
    topics = b"".join(struct.pack(">hh7si", 0, 7, b"%07d" % number, 0) for number in range(count))
    answer = struct.pack(">iii", correlation, 0, count) + topics
    return struct.pack(">i", len(answer)) + answer


def brokers(correlation: int, at: tuple[str, int]) -> bytes:
    """Metadata, version 0, of 100,000 brokers."""
    host = at[0].encode()
    named = b"".join(struct.pack(f">ih{len(host)}si", node, len(host), host, at[1]) for node in range(100_000))
    answer = struct.pack(">ii", correlation, 100_000) + named + struct.pack(">i", 0)
    return struct.pack(">i", len(answer)) + answer


@pytest.mark.slow
async def test_more_topics_than_memory_holds_are_not_decoded() -> None:
    said = topics_without_end(0, ("", 0))  # made before memory is measured
    broker = FalseBroker(falsehood=lambda correlation, _: said[:4] + struct.pack(">i", correlation) + said[8:])
    async with speaking(broker) as port:
        before = forget_peak()
        fault = await fault_of(link_to(port))
        # The answer is here twice: as it is sent, and as it was read.
        assert peak_bytes() - before < GROWTH_BYTES_MAX + 4 * LISTING_BYTES_MAX
    assert f"127.0.0.1:{port} lists more than 1,000,000 numbers and names in one answer of 16.0 MB" in fault


async def test_records_that_fill_the_memory_once_unpacked_are_not_unpacked(tmp_path: Path) -> None:
    """By `sluice check`, which reads its test reading back."""
    bomb = bytes(cramjam.zstd.compress(bytes(10_000_000))) * 100
    async with speaking(broker := RecordBroker(records=batch_of(4, bomb))) as port:
        broker.advertised = ("127.0.0.1", port)
        kafka = KafkaSettings((f"127.0.0.1:{port}",), connect_timeout_s=3.0, request_timeout_s=2.0)
        settings = Settings(GatewaySettings("gw1", clock="system"), kafka, BufferSettings(path=tmp_path / "buffer.db"))
        before = forget_peak()
        place = CheckPlace("events", 0, 0, "id", 0)
        finding = await _read_back(settings, CheckOpened("user", "secret", "topic", "{}"), place, boottime_us())
        assert peak_bytes() - before < GROWTH_BYTES_MAX
    assert not finding.ok
    assert f"127.0.0.1:{port} gives records that are damaged, or larger than 16.0 MB once unpacked" in finding.words


def fetched(records: bytes) -> bytes:
    """The answer to a fetch, version 4, behind its length."""
    head = struct.pack(">iii8siihqqi", 1, 0, 1, b"\0\x06events", 1, 0, 0, 9, 9, 0)
    return head + struct.pack(">i", len(records)) + records


def batch_of(codec: int, packed: bytes, magic: int = 2) -> bytes:
    batch = bytearray(
        HEADER.pack(0, HEADER_BYTES + len(packed) - 12, -1, magic, 0, codec, 0, 1, 1, -1, -1, 0, 1) + packed
    )
    batch[17:21] = calc_crc32c(memoryview(batch)[21:]).to_bytes(4)
    return bytes(batch)


FETCH_REQUEST = FetchRequest_v4(-1, 0, 0, 0, 0, [])
PACK: list[Callable[[bytes], bytes]] = [bytes, gzip_encode, snappy_encode, lz4_encode, zstd_encode]


@pytest.mark.parametrize("codec", range(5))
def test_records_are_bounded_in_every_form_and_true_ones_are_taken(codec: int) -> None:
    pack = PACK[codec]
    fits = batch_of(codec, pack(bytes(UNPACKED_BYTES_MAX // 2)))
    check_records(fetched(fits + fits + fits[:-1]), FETCH_REQUEST)
    too_large = [fetched(fits + batch_of(codec, pack(bytes(UNPACKED_BYTES_MAX // 2 + 1))))]
    if codec:
        packed = (pack(bytes(3 * UNPACKED_BYTES_MAX)), b"\xff" * 9)
        too_large += [fetched(batch_of(codec, each)) for each in packed]
    for answer in too_large:
        before = forget_peak()
        with pytest.raises(UnfitRecordsError):
            check_records(answer, FETCH_REQUEST)
        assert peak_bytes() - before < GROWTH_BYTES_MAX + 2 * len(answer)


@pytest.mark.parametrize(
    "records",
    [
        batch_of(0, bytes(100), magic=1),
        HEADER.pack(0, -12, -1, 2, 0, 0, 0, 1, 1, -1, -1, 0, 1),
        batch_of(1, gzip_encode(b"one") + gzip_encode(bytes(100))),
        batch_of(2, snappy_encode(b"one") + struct.pack(">i", -4)),
        batch_of(2, snappy_encode(b"one") + bytes(4)),
    ],
)
def test_records_that_aiokafka_would_read_without_end_or_bound_are_refused(records: bytes) -> None:
    with pytest.raises(UnfitRecordsError):
        check_records(fetched(records), FETCH_REQUEST)


async def test_a_hundred_thousand_brokers_are_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them are connected to than there are connections."""
    monkeypatch.setattr(kafka_link, "CONNECTIONS_MAX", 3)
    async with speaking(broker := FalseBroker(falsehood=brokers)) as port:
        broker.advertised = ("127.0.0.1", port)
        link = link_to(port)
        before = forget_peak()
        with link.entered():
            client = AIOKafkaClient(**link.options(), request_timeout_ms=5_000)
            await client.bootstrap()
            assert len(client.cluster.brokers()) == 100_000
            assert peak_bytes() - before < 3 * GROWTH_BYTES_MAX
            assert [await client.ready(node) for node in range(5)] == [True, True, True, False, False]
            await client.close()
        await until(lambda: not link._sockets)
    assert link.fault is not None
    assert "this gateway has 3 connections to brokers, and makes no more" in link.fault


def metadata(topics: int) -> bytes:
    """An answer of Metadata, version 1, as a true cluster gives it."""
    named = b"".join(
        struct.pack(">hh9s?i", 0, 9, b"t%08d" % number, False, 1) + struct.pack(">hiiiiii", 0, 0, 1, 1, 1, 1, 1)
        for number in range(topics)
    )
    return struct.pack(">iiii", 7, 0, 1, topics) + named


def test_a_listing_is_bounded_by_its_parts_and_no_true_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fields(metadata(25_000), MetadataRequest_v1([]))
    monkeypatch.setattr(answers, "ANSWER_BYTES_MAX", 100)
    monkeypatch.setattr(answers, "FIELDS_MAX", 1_000)
    check_fields(metadata(50), MetadataRequest_v1([]))
    with pytest.raises(TooManyFieldsError):
        check_fields(metadata(100), MetadataRequest_v1([]))
    # An array that says it has 2^31 - 1 parts ends where its bytes end.
    with pytest.raises(ValueError, match="unpack"):
        check_fields(struct.pack(">ii", 7, 2**31 - 1) + bytes(200), MetadataRequest_v0([]))


@pytest.mark.parametrize("request_", [None, MetadataRequest_v0([])])
def test_the_largest_answer_that_is_read(request_: Any) -> None:
    limit = ANSWER_BYTES_MAX if request_ is None else LISTING_BYTES_MAX
    check_size(limit, request_)
    with pytest.raises(UnfitAnswerError):
        check_size(limit + 1, request_)


async def test_an_answer_that_trickles_ends_with_its_request() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering = FakeBroker(answers=frozenset({API_VERSIONS}))
        begun = asyncio.ensure_future(answering(reader, writer))
        while METADATA not in answering.asked:
            await asyncio.sleep(0.01)
        writer.write(struct.pack(">i", LISTING_BYTES_MAX))
        while not begun.done():
            writer.write(b"\0")
            await asyncio.sleep(0.02)

    async with speaking(trickle) as port:
        link = link_to(port)
        with link.entered():
            client = AIOKafkaClient(**link.options(), request_timeout_ms=500)
            with pytest.raises(KafkaError):
                await asyncio.wait_for(client.bootstrap(), patience(5))
            await client.close()
        await until(lambda: not link._sockets)
    assert link.fault == f"127.0.0.1:{port} takes connections and does not answer Kafka's first request"


# -- log-in ----------------------------------------------------------------------------------------


@pytest.fixture
def sasl(tmp_path: Path) -> KafkaSaslSettings:
    path = tmp_path / "password"
    path.write_text("correct horse\n")
    path.chmod(0o400)
    return KafkaSaslSettings(mechanism="SCRAM-SHA-256", user="gw1", password_file=path)


@pytest.mark.parametrize("iterations", [-1, 0, 1, 4095])
async def test_no_proof_is_given_by_which_a_password_could_be_guessed(sasl: KafkaSaslSettings, iterations: int) -> None:
    broker = FakeBroker(mechanisms=("SCRAM-SHA-256",), takes_mechanism=True, iterations=iterations)
    async with speaking(broker) as port:
        link = link_to(port, sasl=sasl)
        fault = await fault_of(link)
    assert f"asks for {max(iterations, 0)} iterations of SCRAM" in fault
    assert "fewer than 4096" in fault
    assert "iterations=4096" in link.faults[f"127.0.0.1:{port}"].hint
    assert broker.asked.count(SASL_AUTHENTICATE) == 1, "the first message, which holds nothing of the password"
