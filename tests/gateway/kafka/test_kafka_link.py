"""The connections of the Kafka client as the gateway makes them: bounded, told in words, counted, ended at once."""

import asyncio
import errno
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiokafka.client
import msgspec
import pytest
import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from demo.kafka_broker import Broker, kafka_broker
from gateway.host.name_lookup import Address, names
from gateway.kafka import link as kafka_link
from gateway.kafka.broker_socket import KEEP_ALIVE_IDLE_S, KEEP_ALIVE_INTERVAL_S, USER_TIMEOUT_MS, BrokerSocket
from gateway.kafka.link import PAUSE_S_MAX, PAUSE_S_MIN, KafkaLink
from gateway.kafka.secret_files import KafkaFileError, KafkaFiles, read_files
from gateway.kafka.topics import read_cluster
from gateway.settings import OAUTHBEARER, KafkaSaslSettings, KafkaSettings, KafkaTlsSettings
from gateway.tls.dates import Dates
from tests.support.certificates import Authority, make_authority
from tests.support.kafka_peers import API_VERSIONS, METADATA, FakeBroker, server_context
from tests.support.stream_server import speaking
from tests.support.waiting import patience, until

METADATA_REQUEST = MetadataRequest([])
VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
BYTES_RETRANSMITTED_AT = 208
"""In `struct tcp_info` (linux/tcp.h)."""


@pytest.fixture(autouse=True)
def without_experience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget how addresses answered in other tests."""
    monkeypatch.setattr(kafka_link, "_experience", kafka_link._Experience())


def link_to(*addresses: str, **settings: Any) -> KafkaLink:
    return KafkaLink(KafkaSettings(addresses, **({"connect_timeout_s": 3.0} | settings)))


@asynccontextmanager
async def client_of(link: KafkaLink) -> AsyncIterator[AIOKafkaClient]:
    """The client inside producer and admin client."""
    with link.entered():
        client = AIOKafkaClient(**link.options(), request_timeout_ms=5_000)
        try:
            yield client
        finally:
            await client.close()
            await until(lambda: not link._sockets)


def answered_from(link: KafkaLink) -> frozenset[str]:
    """This box's own addresses in the live connections that were answered."""
    return frozenset(own for own, _ in link._ends())


def dialled_from(link: KafkaLink) -> frozenset[str]:
    """Addresses of all connections, also of those that are still being made."""
    return frozenset(own for each in link._sockets if (own := each.own_address()) is not None)


async def refused_in_words(link: KafkaLink) -> str:
    """Why a client cannot begin."""
    async with client_of(link) as client:
        with pytest.raises(KafkaConnectionError, match="Unable to bootstrap"):
            await client.bootstrap()
    assert link.fault is not None
    assert [fault.words for fault in link.faults.values()] == [link.fault]
    return link.fault


# -- with a real broker ---------------------------------------------------------------------------


@pytest.mark.kafka
async def test_a_producers_connections_are_the_links(kafka: Broker) -> None:
    link = link_to(kafka.bootstrap)
    with link.entered():
        producer = AIOKafkaProducer(**link.options(), acks="all", enable_idempotence=True)
        await producer.start()
    try:
        # Whatever it does from now on happens in tasks that it began within.
        assert link.peers() == {("127.0.0.1", kafka.port)}
        assert answered_from(link) == {"127.0.0.1"}
        assert link.fault is None
        for its in link._sockets:
            assert its.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for option, value in (
                (socket.TCP_NODELAY, 1),
                (socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS),
                (socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S),
                (socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_S),
            ):
                assert its.getsockopt(socket.IPPROTO_TCP, option) == value
        before = link.wire_bytes()
        # A topic that is not made by asking for it: metadata goes out and comes back.
        await producer.client.fetch_all_metadata()
        assert link.wire_bytes() > before > 1_000
        former = set(link._sockets)
        link.abort()
        await until(lambda: not former & set(link._sockets))
        async with asyncio.timeout(patience(10)):
            await producer.client.fetch_all_metadata()
        assert link.fault is None
    finally:
        await producer.stop()
    await until(lambda: not link._sockets)
    assert not link.peers()
    assert not answered_from(link)
    assert link.wire_bytes() > before, "what closed connections carried counts on"


@pytest.mark.kafka
async def test_the_admin_client_takes_the_options(kafka: Broker) -> None:
    link = link_to(kafka.bootstrap)
    with link.entered():
        admin = AIOKafkaAdminClient(**link.options())
        try:
            await admin.start()
            assert isinstance(await admin.list_topics(), list)
            assert link.peers() == {("127.0.0.1", kafka.port)}
        finally:
            await admin.close()


@pytest.mark.kafka
async def test_a_topic_is_not_made_by_asking_for_it_nor_are_others_told(tmp_path: Path) -> None:
    """A topic may be deleted under a session. Its client then asks again, and a broker makes topics by default."""
    with kafka_broker(tmp_path, auto_create_topics=True) as broker:
        link = link_to(broker.bootstrap)
        async with client_of(link) as client:
            await client.bootstrap()
            admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
            await admin.start()
            try:
                await admin.create_topics([NewTopic("device-thermo", 1, 1)])
                async with asyncio.timeout(patience(20)):
                    # A broker answers before it has taken its own news in.
                    while "device-thermo" not in (await read_cluster(admin)).topics:
                        await asyncio.sleep(0.05)
                await client.force_metadata_update()
                assert not client.cluster.topics(), "which ask for none, and are told of none"
                await client.set_topics(("device-thermo",))
                await until_asked(client, is_there=True)
                await admin.delete_topics(["device-thermo"])
                await until_asked(client, is_there=False)
                for _ in range(10):
                    await client.force_metadata_update()
                    await asyncio.sleep(0.05)
                assert "device-thermo" not in (await read_cluster(admin)).topics
            finally:
                await admin.close()


async def until_asked(client: AIOKafkaClient, *, is_there: bool) -> None:
    async with asyncio.timeout(patience(20)):
        while ("device-thermo" in client.cluster.topics()) != is_there:
            await client.force_metadata_update()
            await asyncio.sleep(0.05)


@pytest.mark.kafka
async def test_a_broker_without_tls_is_told_as_that(kafka: Broker) -> None:
    assert "most likely it does not speak TLS" in await refused_in_words(
        link_to(kafka.bootstrap, tls=KafkaTlsSettings())
    )


# -- whose connection it is -----------------------------------------------------------------------


async def test_outside_the_client_is_as_it_was_and_two_links_are_apart() -> None:
    async with speaking(FakeBroker()) as one, speaking(FakeBroker()) as other:
        plain = await aiokafka.client.create_conn("127.0.0.1", one)
        assert type(plain) is aiokafka.conn.AIOKafkaConnection
        first, second = link_to(f"127.0.0.1:{one}"), link_to(f"127.0.0.1:{other}")
        with first.entered():
            of_first = await aiokafka.client.create_conn("127.0.0.1", one)
            with second.entered():
                of_second = await aiokafka.client.create_conn("127.0.0.1", other)
            late = await asyncio.create_task(aiokafka.client.create_conn("127.0.0.1", one))
        assert (len(first._sockets), len(second._sockets)) == (2, 1)
        await of_second.send(METADATA_REQUEST)
        assert second.peers() == {("127.0.0.1", other)}
        assert not first.peers()
        for connection in (plain, of_first, of_second, late):
            await connection.close()


def test_the_wrapped_function_is_wrapped_once() -> None:
    assert aiokafka.client.create_conn is kafka_link._create_conn
    assert kafka_link._aiokafkas_own is aiokafka.conn.create_conn


def test_what_is_used_of_the_clients_private_parts_is_there() -> None:
    """If this fails, compare `_Connection` with aiokafka/conn.py again."""
    for name in ("connect", "_do_version_lookup", "_do_sasl_handshake", "_create_reader_task", "_idle_check"):
        assert callable(getattr(aiokafka.conn.AIOKafkaConnection, name))
    for name in ("step", "_step", "create_salted_password"):
        assert callable(getattr(aiokafka.conn.ScramAuthenticator, name))
    assert callable(aiokafka.conn.OAuthAuthenticator.step)
    assert vars(MetadataRequest(["a"])) == {"_topics": ["a"], "_allow_auto_topic_creation": None}
    for name in ("send", "close", "_read", "_handle_frame", "authenticator_scram", "authenticator_oauth"):
        assert name in vars(kafka_link._Connection)
        assert name in vars(aiokafka.conn.AIOKafkaConnection)
    assert aiokafka.__version__.startswith("0.14.")


# -- connecting -----------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that takes no connection and refuses none: its backlog is full, and SYNs are dropped."""
    with socket.create_server(("127.0.0.2", 0), backlog=0) as server:
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server.getsockname()
        for filler in fillers:
            filler.close()


def answering(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """Have every name lead to these addresses."""

    async def found(_host: str, _port: int) -> list[Address]:
        return [
            (socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, 6, (host, port))
            for host, port in addresses
        ]

    monkeypatch.setattr(names, "addresses", found)


async def test_an_address_that_does_not_answer_costs_the_next_one_a_moment(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    """An example is a name with a dead IPv6 address beside an IPv4 address."""
    async with speaking(FakeBroker()) as port:
        answering(monkeypatch, silent, ("127.0.0.1", port))
        link = link_to("kafka.example:9092")
        async with client_of(link) as client:
            await client.bootstrap()
        assert link.fault is None


async def test_an_address_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    answering(monkeypatch, silent)
    words = await refused_in_words(link_to("kafka.example:9092", connect_timeout_s=0.3))
    assert words == "kafka.example:9092 does not answer: nothing comes back"


async def test_of_several_addresses_the_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    for addresses in ([silent, ("127.0.0.1", 1)], [("127.0.0.1", 1), silent]):
        answering(monkeypatch, *addresses)
        words = await refused_in_words(link_to("kafka.example:9092", connect_timeout_s=0.6))
        assert words == "nothing listens at kafka.example:9092"


async def test_vanished_addresses_of_bootstrap_do_not_hold_up_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    in_order(monkeypatch)
    dialled = counted_dials(monkeypatch)
    vanished = [f"{host}:{silent[1]}" for host in ("127.0.0.2", "v1", "v2", "v3", "v4")]
    async with speaking(FakeBroker()) as port:
        # Each of them would take a minute.
        link = link_to(*vanished, f"127.0.0.1:{port}", connect_timeout_s=60)
        addresses = names.addresses

        async def found(host: str, port: int) -> list[Address]:
            return await addresses("127.0.0.2" if host.startswith("v") else host, port)

        monkeypatch.setattr(names, "addresses", found)
        async with asyncio.timeout(patience(30)):
            async with client_of(link) as client:
                await client.bootstrap()
            dialled.clear()
            # The next client begins with the one that answered, and so does the next session.
            for each in (link, link_to(*vanished, f"127.0.0.1:{port}", connect_timeout_s=60)):
                async with client_of(each) as client:
                    await client.bootstrap()
        assert {address[3] for address in dialled} == {("127.0.0.1", port)}
        assert link.fault is None


def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have addresses of bootstrap tried as they are written."""
    monkeypatch.setattr(aiokafka.conn.random, "shuffle", lambda _: None)


def counted_dials(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The addresses that are dialled from now on."""
    dialled: list[Address] = []
    dial = KafkaLink._dial

    async def counted(self: KafkaLink, address: Address, of: kafka_link._Connection) -> BrokerSocket:
        dialled.append(address)
        return await dial(self, address, of)

    monkeypatch.setattr(KafkaLink, "_dial", counted)
    return dialled


@pytest.mark.parametrize("answers", [frozenset(), frozenset({API_VERSIONS})])
async def test_one_of_bootstrap_that_takes_connections_and_says_nothing_does_not_hold_up_another(
    answers: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_order(monkeypatch)
    monkeypatch.setattr(kafka_link, "OPENING_S", 0.1)
    async with speaking(FakeBroker(answers=answers)) as sick, speaking(FakeBroker()) as well:
        link = link_to(f"127.0.0.1:{sick}", f"127.0.0.1:{well}", connect_timeout_s=60)
        async with client_of(link) as client, asyncio.timeout(patience(30)):
            await client.bootstrap()


@pytest.mark.parametrize("answers", [frozenset(), None])
async def test_a_sick_address_of_a_name_does_not_hide_the_next(
    answers: frozenset[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says nothing, or something else; the other answers."""
    monkeypatch.setattr(kafka_link, "OPENING_S", 0.1)

    async def nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    sick = nonsense if answers is None else FakeBroker(answers=answers)
    async with speaking(sick) as first, speaking(FakeBroker()) as second:
        answering(monkeypatch, ("127.0.0.1", first), ("127.0.0.1", second))
        link = link_to("kafka.example:9092", connect_timeout_s=60)
        async with client_of(link) as client, asyncio.timeout(patience(30)):
            await client.bootstrap()
        assert link.fault is None


async def test_addresses_beyond_those_tried_at_a_time_are_tried_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_link, "ADDRESSES_MAX", 2)
    async with speaking(FakeBroker()) as port:
        answering(monkeypatch, ("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", port))
        link = link_to("kafka.example:9092")
        await refused_in_words(link)
        link.abort()  # nothing is left alone
        async with client_of(link) as client:
            await client.bootstrap()


def test_in_what_order_addresses_are_tried() -> None:
    experience = kafka_link._Experience()

    def ordered() -> str:
        return "".join(sorted("abc", key=experience.order))

    assert ordered() == "abc", "nothing is known"
    experience.failed("a")
    assert ordered() == "bca"
    experience.answered("c")
    assert ordered() == "cba"
    experience.failed("b")
    assert ordered() == "cab", "who failed longest ago may be well again"
    # As where the way was gone: all failed, and the one that answered before is the likeliest.
    experience.failed("c")
    experience.failed("a", "b")
    assert ordered() == "cab"
    experience.failed(*range(2 * kafka_link.PAUSES_MAX))
    assert len(experience._failed_s) == kafka_link.PAUSES_MAX


def test_families_take_turns() -> None:
    def address(host: str) -> Address:
        return (socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, 6, (host, 1))

    found = [address(host) for host in ("a:1", "a:2", "a:3", "1.1.1.1", "1.1.1.2")]
    assert [each[3][0] for each in kafka_link._interleaved(found)] == ["a:1", "1.1.1.1", "a:2", "1.1.1.2", "a:3"]


async def test_a_name_that_hangs_is_bounded_like_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_host: str, _port: int) -> list[Address]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(names, "addresses", never)
    words = await refused_in_words(link_to("kafka.example:9092", connect_timeout_s=0.1))
    assert words.startswith("the name kafka.example does not resolve: ")


@pytest.mark.parametrize("answers", [frozenset(), frozenset({API_VERSIONS})])
async def test_a_broker_that_does_not_answer_is_told_as_that(answers: frozenset[int]) -> None:
    async with speaking(broker := FakeBroker(answers=answers)) as port:
        # Opening has the bound of connecting. The steps after it have the bound of requests.
        link = link_to(f"127.0.0.1:{port}", connect_timeout_s=60 if answers else 1.0)
        with link.entered():
            client = AIOKafkaClient(**link.options(), request_timeout_ms=60_000 if not answers else 300)
            with pytest.raises(KafkaConnectionError, match="Unable to bootstrap"):
                await asyncio.wait_for(client.bootstrap(), patience(10))
            await client.close()
    assert link.fault == f"127.0.0.1:{port} takes connections and does not answer Kafka's first request"
    assert broker.asked == [API_VERSIONS, METADATA][: len(answers) + 1]


async def test_what_answers_nonsense_is_no_broker(caplog: pytest.LogCaptureFixture) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.read(1_000)
        writer.write(b"\0\0\0\x06" + request[8:12] + b"\0\0")
        await reader.read()

    async with speaking(speak) as port:
        assert (
            await refused_in_words(link_to(f"127.0.0.1:{port}"))
            == f"what answers at 127.0.0.1:{port} is no Kafka broker"
        )
    caplog.clear()


async def test_an_address_that_a_broker_gives_and_nobody_reaches_is_told() -> None:
    async with speaking(FakeBroker(advertised=("127.0.0.1", 1))) as port:
        link = link_to(f"127.0.0.1:{port}")
        async with client_of(link) as client:
            await client.bootstrap()
            assert not link.faults
            assert not await client.ready(1)
    assert link.fault == "nothing listens at 127.0.0.1:1; a broker gave this address as its own (advertised.listeners)"
    assert "advertised.listeners" in link.faults["127.0.0.1:1"].hint


# -- leaving alone what failed --------------------------------------------------------------------


async def test_an_address_that_failed_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = counted_dials(monkeypatch)
    link = link_to("127.0.0.1:1")
    began_s = time.monotonic()
    with link.entered():
        for _ in range(100):
            with pytest.raises(KafkaConnectionError, match=r"nothing listens at 127\.0\.0\.1:1"):
                await aiokafka.client.create_conn("127.0.0.1", 1)
            await asyncio.sleep(0.01)
    # Pauses of 50 to 100 ms, 100 to 200, 200 to 400, ...: no more of them than fit into the time that it took.
    ends_s = accumulate(min(0.05 * 2**number, PAUSE_S_MAX / 2) for number in range(100))
    assert 2 <= len(dialled) <= 1 + sum(1 for end_s in ends_s if end_s <= time.monotonic() - began_s)
    pause = link._pauses["127.0.0.1", 1]
    assert PAUSE_S_MIN < pause.length_s <= PAUSE_S_MAX


async def test_pauses_double_to_their_bound_and_end_with_an_answer() -> None:
    async with speaking(FakeBroker()) as port:
        link = link_to(f"127.0.0.1:{port}")
        connection = kafka_link._Connection(link, "127.0.0.1", port, {})
        lengths = []
        for _ in range(8):
            link._failed(connection, ConnectionRefusedError(errno.ECONNREFUSED, "x"))
            lengths.append(link._pauses["127.0.0.1", port].length_s)
        assert lengths == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
        link._pauses["127.0.0.1", port].until_s = 0
        async with client_of(link) as client:
            await client.bootstrap()
        assert not link._pauses
        assert link.fault is None


async def test_failures_of_ever_other_addresses_are_not_kept_for_ever() -> None:
    link = link_to("kafka.example:9092")
    for port in range(1, 400):
        link._failed(kafka_link._Connection(link, "kafka.example", port, {}), TimeoutError())
    assert len(link._pauses) == kafka_link.PAUSES_MAX
    assert ("kafka.example", 399) in link._pauses


async def test_an_answer_of_any_broker_ends_the_fault_and_not_what_is_wrong_with_another() -> None:
    async with speaking(FakeBroker()) as port:
        link = link_to(f"127.0.0.1:{port}", "127.0.0.1:1")
        with link.entered():
            connection = await aiokafka.client.create_conn("127.0.0.1", port)
            with pytest.raises(KafkaConnectionError):
                await aiokafka.client.create_conn("127.0.0.1", 1)
        told = [link.fault]
        for _ in range(2):
            await connection.send(METADATA_REQUEST)
            told.append(link.fault)
            assert list(link.faults) == ["127.0.0.1:1"]
            link._failed(kafka_link._Connection(link, "127.0.0.1", 1, {}), TimeoutError())
            told.append(link.fault)
        await connection.close()
    unresolved = "the name 127.0.0.1 does not resolve"
    assert [words and words[: len(unresolved)] for words in told[1:]] == [None, unresolved] * 2
    assert told[0] == "nothing listens at 127.0.0.1:1"


async def test_a_failure_for_which_no_words_are_found_has_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds_none(*_arguments: object, **_options: object) -> None:
        raise AttributeError("isprintable")

    monkeypatch.setattr(kafka_link, "reach_words", finds_none)
    words = await refused_in_words(link_to("127.0.0.1:1"))
    assert words.startswith("127.0.0.1:1 cannot be reached: Connect")


# -- who answers, and who hangs -------------------------------------------------------------------


@pytest.mark.parametrize("answers", [frozenset(), frozenset({API_VERSIONS})])
async def test_a_connection_that_was_not_answered_is_none(answers: frozenset[int]) -> None:
    """An example is a load balancer that takes connections with nothing behind it."""
    async with speaking(broker := FakeBroker(answers=answers)) as port:
        link = link_to(f"127.0.0.1:{port}", connect_timeout_s=60)
        asked = asyncio.create_task(_ask(link, port))
        await until(lambda: len(broker.asked) == len(answers) + 1)
        assert dialled_from(link) == {"127.0.0.1"}
        assert not link.peers()
        assert not answered_from(link)
        # A batch that was sent on an open connection counts before its first answer, because it takes its time.
        assert (link.carried_bytes() > 0) == bool(answers)
        link.abort()
        with pytest.raises(KafkaConnectionError):
            await asyncio.wait_for(asked, patience(5))
        await until(lambda: not link._sockets)
        assert (link.carried_bytes() > 0) == bool(answers)
        assert link.fault is None


async def _ask(link: KafkaLink, port: int, host: str = "127.0.0.1") -> None:
    with link.entered():
        connection = await aiokafka.client.create_conn(host, port)
    await connection.send(METADATA_REQUEST)


async def test_what_came_through_does_not_fall_when_a_connection_closes() -> None:
    async with speaking(FakeBroker()) as port:
        link = link_to(f"127.0.0.1:{port}")
        with link.entered():
            one, other = [await aiokafka.client.create_conn("127.0.0.1", port) for _ in range(2)]
        await one.send(METADATA_REQUEST)
        await other.send(METADATA_REQUEST)
        assert link.peers() == {("127.0.0.1", port)}
        both = link.carried_bytes()
        await one.close()
        await until(lambda: len(link._sockets) == 1)
        assert link.peers()
        await other.close()
        await until(lambda: not link._sockets)
        # A FIN counts as a byte.
        assert both <= link.carried_bytes() <= both + 4


# -- ending at once -------------------------------------------------------------------------------


async def test_abort_ends_what_is_being_connected_and_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    monkeypatch.setattr(kafka_link, "STAGGER_S", 60)
    dialled = counted_dials(monkeypatch)
    answering(monkeypatch, silent, ("127.0.0.1", 1))
    link = link_to("kafka.example:9092", connect_timeout_s=60)
    with link.entered():
        attempt = asyncio.create_task(aiokafka.client.create_conn("kafka.example", 9092))
    await until(lambda: link._sockets)
    link.abort()
    with pytest.raises(KafkaConnectionError, match="given up"):
        await asyncio.wait_for(attempt, patience(5))
    assert [address[3] for address in dialled] == [silent], "the next address is not tried"
    assert not link._sockets
    assert link.fault is None
    assert not link._pauses


async def test_abort_ends_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def never(_host: str, _port: int) -> list[Address]:
        asked.set()
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(names, "addresses", never)
    link = link_to("kafka.example:9092", connect_timeout_s=60)
    async with client_of(link) as client:
        attempt = asyncio.create_task(client.bootstrap())
        await asked.wait()
        link.abort()
        with pytest.raises(KafkaConnectionError):
            await asyncio.wait_for(attempt, patience(5))
    assert link.fault is None


async def test_abort_fails_the_requests_that_wait() -> None:
    async with speaking(FakeBroker(answers=frozenset({API_VERSIONS}))) as port:
        link = link_to(f"127.0.0.1:{port}")
        closed = []
        with link.entered():
            connection = await aiokafka.client.create_conn(
                "127.0.0.1", port, on_close=lambda _, reason: closed.append(reason)
            )
        waiting = asyncio.create_task(connection.send(aiokafka.client.MetadataRequest([])))
        await asyncio.sleep(0.05)
        link.abort()
        with pytest.raises(KafkaConnectionError):
            await asyncio.wait_for(waiting, patience(5))
        assert closed == [CloseReason.CONNECTION_BROKEN]
        assert link.fault is None
        assert not link._sockets


async def test_those_from_an_address_that_is_gone_are_ended_and_no_others(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    link = link_to("kafka.example:9092", connect_timeout_s=60)
    async with speaking(FakeBroker(), host="::1") as port:
        with link.entered():
            opened = await aiokafka.client.create_conn("::1", port)
            answering(monkeypatch, silent)
            opening = asyncio.create_task(aiokafka.client.create_conn("kafka.example", 9092))
        await until(lambda: dialled_from(link) == {"127.0.0.1", "::1"})
        link._failed(kafka_link._Connection(link, "kafka.example", 1, {}), TimeoutError())
        assert not link.abort_stale(lambda _: True)
        assert link._pauses
        assert link.abort_stale(lambda own: own == "::1")
        assert not link._pauses, "what failed was tried from an address that is gone"
        with pytest.raises(KafkaConnectionError, match="given up"):
            await asyncio.wait_for(opening, patience(5))
        await opened.send(METADATA_REQUEST)
        assert answered_from(link) == {"::1"}
        assert link.abort_stale(lambda _: False)
        assert not opened.connected()
        await until(lambda: not link._sockets)
    assert not link.abort_stale(lambda _: False)
    assert link.fault is None


@pytest.mark.parametrize("version", [None, *VERSIONS])
async def test_an_aborted_connection_is_closed_for_the_client_too(
    version: ssl.TLSVersion | None, authority: Authority
) -> None:
    """Else it would log "Unclosed AIOKafkaConnection" where its reader has no turn any more."""
    context = None if version is None else server_context(authority.sign("server", "IP:127.0.0.1"), version)
    async with speaking(FakeBroker(), context) as port:
        link = link_to(f"127.0.0.1:{port}", tls=None if version is None else KafkaTlsSettings(ca=authority.certificate))
        async with client_of(link) as client:
            await client.bootstrap()
            with link.entered():
                connection = await aiokafka.client.create_conn(
                    "127.0.0.1",
                    port,
                    **{each: client.__dict__[f"_{each}"] for each in ("security_protocol", "ssl_context")},
                )
            link.abort()
            assert not connection.connected()
            assert link.fault is None
            link.abort()


async def test_a_connection_that_is_cancelled_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch, silent: tuple[str, int]
) -> None:
    async with speaking(FakeBroker(answers=frozenset())) as port:
        for addresses in ([silent], [("127.0.0.1", port)]):
            answering(monkeypatch, *addresses)
            link = link_to("kafka.example:9092", connect_timeout_s=60)
            with link.entered():
                attempt = asyncio.create_task(aiokafka.client.create_conn("kafka.example", 9092))
            await until(lambda link=link: link._sockets)  # type: ignore[misc]
            await asyncio.sleep(0.05)
            attempt.cancel()
            with pytest.raises(asyncio.CancelledError):
                await attempt
            await until(lambda link=link: not link._sockets)  # type: ignore[misc]
            assert link.wire_bytes() >= 40


# -- what it carried ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_bytes_on_the_wire_are_those_of_both_ways_with_their_headers(host: str) -> None:
    taken = 100_000

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(taken)
        writer.write(b"x" * 1_000)
        await writer.drain()

    async with speaking(speak, host=host) as port:
        link = link_to("kafka.example:9092")
        connection = kafka_link._Connection(link, "kafka.example", 9092, {})
        (address,) = await names.addresses(host, port)
        link_socket = await link._dial(address, connection)
        before = link.wire_bytes()
        assert 0 < before <= 4 * 80, "a handshake"
        reader, writer = await asyncio.open_connection(sock=link_socket)
        with closing(writer):
            writer.write(b"x" * taken)
            assert len(await reader.read()) == 1_000
            live = link.wire_bytes()
            # On a slow machine, TCP sends bytes again that are not acknowledged in time. They count, as they should.
            info = link_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (again,) = struct.unpack_from("=Q", info, BYTES_RETRANSMITTED_AT)
            assert taken + 1_000 < live - again < 1.2 * taken
        await writer.wait_closed()
    await until(lambda: not link._sockets)
    assert live <= link.wire_bytes() <= live + 10 * 80
    assert link.wire_bytes() == link._closed_bytes


async def test_a_socket_whose_descriptor_went_first_is_not_counted_and_says_nothing() -> None:
    """A loop that ends leaves its transports to the garbage collection, which closes descriptors before objects."""
    async with speaking(FakeBroker()) as port:
        link = link_to(f"127.0.0.1:{port}")
        (at,) = await names.addresses("127.0.0.1", port)
        link_socket = await link._dial(at, kafka_link._Connection(link, "127.0.0.1", port, {}, at))
        os.close(link_socket.detach())
        link_socket.close()
        assert not link._sockets


# -- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority") / "ca", "ca")


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_broker_with_a_certificate_of_our_own_authority(
    authority: Authority, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = authority.sign("server", "DNS:localhost")
    async with speaking(FakeBroker(), server_context(pair, version)) as port:
        link = link_to(f"localhost:{port}", tls=KafkaTlsSettings(ca=authority.certificate))
        async with client_of(link) as client:
            await client.bootstrap()
        assert link.fault is None
        assert link.wire_bytes() > 1_000
        # The dot that keeps a resolver from its search list is none of a certificate's.
        answering(monkeypatch, ("127.0.0.1", port))
        link = link_to(f"localhost.:{port}", tls=KafkaTlsSettings(ca=authority.certificate))
        async with client_of(link) as client:
            await client.bootstrap()


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_certificate_of_an_authority_that_is_not_trusted(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    other = make_authority(tmp_path / "other", "other")
    async with speaking(FakeBroker(), server_context(authority.sign("server", "DNS:localhost"), version)) as port:
        address = f"localhost:{port}"
        words = await refused_in_words(link_to(address, tls=KafkaTlsSettings(ca=other.certificate)))
        assert words == f"the certificate of {address} is signed by nobody whom kafka.tls.ca names"
        words = await refused_in_words(link_to(address, tls=KafkaTlsSettings()))
        assert words == f"the certificate of {address} is signed by nobody whom this box trusts"


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_certificate_for_another_name_is_told_with_its_names(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    pair = authority.sign("server", "DNS:kafka.example,DNS:kafka-2.example,IP:10.0.0.5")
    tls = KafkaTlsSettings(ca=authority.certificate)
    async with speaking(FakeBroker(), server_context(pair, version)) as port:
        words = await refused_in_words(link_to(f"localhost:{port}", tls=tls))
        told = "for kafka.example, kafka-2.example, 10.0.0.5, and not for"
        assert words == f"the certificate of localhost:{port} is {told} localhost"
        assert f"{told} 127.0.0.1" in await refused_in_words(link_to(f"127.0.0.1:{port}", tls=tls))


async def test_the_certificate_for_another_name_is_told_of_a_name_that_is_not_ascii(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with speaking(FakeBroker(), server_context(authority.sign("server", "DNS:kafka.example"))) as port:
        answering(monkeypatch, ("127.0.0.1", port))
        words = await refused_in_words(
            link_to("b\u00fccher.example:9093", tls=KafkaTlsSettings(ca=authority.certificate))
        )
    assert words == (
        "the certificate of b\u00fccher.example:9093 is for kafka.example, and not for b\u00fccher.example"
    )


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_certificate_that_is_not_in_date_is_told_with_the_date_and_this_boxs_clock(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    tls = KafkaTlsSettings(ca=authority.certificate)
    for years, words in (
        ((2020, 2021), "has expired on 2021-01-01"),
        ((2040, 2041), "is not valid before 2040-01-01"),
    ):
        valid = [datetime(year, 1, 1, tzinfo=UTC) - datetime.now(UTC) for year in years]
        pair = authority.sign("server", "DNS:localhost", valid=valid)
        async with speaking(FakeBroker(), server_context(pair, version)) as port:
            told = await refused_in_words(link_to(f"localhost:{port}", tls=tls))
        assert (
            told == f"the certificate of localhost:{port} {words}; this box's clock says {datetime.now(UTC):%Y-%m-%d}"
        )


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_broker_that_wants_a_certificate_of_ours(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    pair = authority.sign("server", "DNS:localhost")
    context = server_context(pair, version)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.certificate)
    ours = make_authority(tmp_path / "ours", "ours").sign("server", "DNS:gw1")
    async with speaking(FakeBroker(), context) as port:
        for certificate, words in (
            (None, "seems to want a certificate of this gateway, and none is set"),
            (ours, "not accept this gateway's certificate"),
            (pair, None),
        ):
            tls = KafkaTlsSettings(ca=authority.certificate)
            if certificate is not None:
                tls = msgspec.structs.replace(tls, certificate=certificate[0], key=certificate[1])
            link = link_to(f"localhost:{port}", tls=tls)
            if words is not None:
                assert words in await refused_in_words(link)
                continue
            async with client_of(link) as client:
                await client.bootstrap()
            assert link.fault is None


async def test_a_broker_that_went_silent_does_not_hold_up_the_end_of_a_session(authority: Authority) -> None:
    """asyncio would wait 30 s for its close_notify, and the next session with it."""
    over = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = asyncio.create_task(FakeBroker()(reader, writer))
        await over.wait()
        answers.cancel()

    # A proxy between, which stops to carry anything: as of a broker whose power was cut.
    async with speaking(speak, server_context(authority.sign("server", "DNS:localhost"))) as behind:

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", behind)
            ways = [asyncio.create_task(copied(reader, onward)), asyncio.create_task(copied(onward_reader, writer))]
            await cut.wait()
            for way in ways:
                way.cancel()
            await over.wait()
            onward.close()

        cut = asyncio.Event()
        async with speaking(carry) as port:
            link = link_to(f"localhost:{port}", tls=KafkaTlsSettings(ca=authority.certificate))
            with link.entered():
                options = {"ssl_context": link.options()["ssl_context"], "security_protocol": "SSL"}
                connection = await aiokafka.client.create_conn("localhost", port, **options)
            cut.set()
            await asyncio.sleep(0.05)
            async with asyncio.timeout(patience(10)):
                await connection.close()
            await until(lambda: not link._sockets)
            over.set()


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(10_000):
        writer.write(data)


async def test_a_broker_that_wants_tls_is_told_as_that(authority: Authority) -> None:
    async with speaking(FakeBroker(), server_context(authority.sign("server", "DNS:localhost"))) as port:
        assert "wants TLS, and [kafka.tls] is not set" in await refused_in_words(link_to(f"localhost:{port}"))


def test_older_tls_and_no_verification_cannot_be_had(authority: Authority) -> None:
    context = link_to("kafka.example:9092", tls=KafkaTlsSettings(ca=authority.certificate)).options()["ssl_context"]
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) == 1, "with an authority of its own, no other is trusted"


# -- log-in ---------------------------------------------------------------------------------------


@pytest.fixture
def sasl(tmp_path: Path) -> KafkaSaslSettings:
    path = tmp_path / "password"
    path.write_text("correct horse\n")
    path.chmod(0o400)
    return KafkaSaslSettings(mechanism="SCRAM-SHA-512", user="gw1", password_file=path)


async def test_a_broker_that_wants_a_login_is_told_as_that() -> None:
    async with speaking(FakeBroker(mechanisms=("PLAIN",))) as port:
        assert "most likely it wants a log-in (SASL), and none is set" in await refused_in_words(
            link_to(f"127.0.0.1:{port}")
        )


async def test_a_mechanism_that_is_not_offered_is_told_with_those_that_are(sasl: KafkaSaslSettings) -> None:
    async with speaking(FakeBroker(mechanisms=("PLAIN", "SCRAM-SHA-256"))) as port:
        words = await refused_in_words(link_to(f"127.0.0.1:{port}", sasl=sasl))
    assert words.endswith("does not take SCRAM-SHA-512 for log-in; it takes: PLAIN, SCRAM-SHA-256")


async def test_a_broker_that_offers_null_for_a_login_costs_the_next_one_nothing(sasl: KafkaSaslSettings) -> None:
    async with (
        speaking(FakeBroker(mechanisms=(None,))) as nonsense,
        speaking(other := FakeBroker(mechanisms=("PLAIN",))) as port,
    ):
        link = link_to(f"127.0.0.1:{nonsense}", f"127.0.0.1:{port}", sasl=sasl)
        async with client_of(link) as client:
            with pytest.raises(KafkaConnectionError, match="Unable to bootstrap"):
                await client.bootstrap()
    assert other.asked
    assert link.faults[f"127.0.0.1:{nonsense}"].words.endswith("takes no log-in (SASL), and [kafka.sasl] is set")


async def test_a_wrong_password_is_told_and_never_shown(
    sasl: KafkaSaslSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    broker = FakeBroker(mechanisms=("SCRAM-SHA-512",), takes_mechanism=True)
    async with speaking(broker) as port:
        link = link_to(f"127.0.0.1:{port}", sasl=sasl)
        words = await refused_in_words(link)
    assert words == f"127.0.0.1:{port} refuses the log-in of user gw1: user or password is wrong"
    assert link.options()["sasl_plain_password"] == "correct horse"  # noqa: S105
    assert "horse" not in repr(link) + repr(link._files) + repr(link.faults) + caplog.text


async def test_a_broker_does_not_have_this_box_compute_for_as_long_as_it_likes(sasl: KafkaSaslSettings) -> None:
    asked = kafka_link.SCRAM_ITERATIONS_MAX + 1
    broker = FakeBroker(mechanisms=("SCRAM-SHA-512",), takes_mechanism=True, iterations=asked)
    async with speaking(broker) as port:
        words = await refused_in_words(link_to(f"127.0.0.1:{port}", sasl=sasl))
        assert f"127.0.0.1:{port} asks for more than {asked - 1} iterations of SCRAM" in words
        # As many as brokers ask for are computed, and the log-in goes on: its server knows no password.
        broker.iterations = 4096
        words = await refused_in_words(link_to(f"127.0.0.1:{port}", sasl=sasl))
        assert "answers the log-in with what does not fit it" in words
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("log-in")} == {"log-in_0"}


@pytest.mark.parametrize(
    ("tls", "with_sasl", "protocol"),
    [
        (None, False, "PLAINTEXT"),
        (KafkaTlsSettings(), False, "SSL"),
        (None, True, "SASL_PLAINTEXT"),
        (KafkaTlsSettings(), True, "SASL_SSL"),
    ],
)
def test_the_protocol_follows_the_settings(
    sasl: KafkaSaslSettings,
    tls: KafkaTlsSettings | None,
    with_sasl: bool,  # noqa: FBT001
    protocol: str,
) -> None:
    options = link_to("kafka.example:9092", tls=tls, sasl=sasl if with_sasl else None).options()
    assert options["security_protocol"] == protocol
    assert (options["ssl_context"] is None) == (tls is None)
    assert ("sasl_mechanism" in options) == with_sasl


# -- files ----------------------------------------------------------------------------------------


def test_one_context_serves_until_what_it_was_made_of_changes(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds all authorities of the box, and while Kafka is away a session begins every few seconds."""

    def context(ca: Path | None) -> Any:
        return link_to("kafka.example:9092", tls=KafkaTlsSettings(ca=ca)).options()["ssl_context"]

    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate.read_bytes())
    first = context(ca)
    assert context(ca) is first
    ca.write_bytes(ca.read_bytes() + b"\n")
    assert context(ca) is not first
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    trusted = context(None)
    assert context(None) is trusted
    os.utime(ca, (1, 1))
    assert context(None) is not trusted, "what this box trusts was changed"


def test_files_that_change_are_told_and_half_written_ones_are_not(
    authority: Authority, tmp_path: Path, sasl: KafkaSaslSettings
) -> None:
    certificate, key, ca = (tmp_path / name for name in ("c.pem", "k.pem", "ca.pem"))
    for file, source in zip((certificate, key), authority.sign("server", "DNS:gw1"), strict=True):
        file.write_bytes(source.read_bytes())
    ca.write_bytes(authority.certificate.read_bytes())
    tls = KafkaTlsSettings(ca=ca, certificate=certificate, key=key)

    def link() -> KafkaLink:
        return link_to("kafka.example:9092", tls=tls, sasl=sasl)

    first = link()
    assert not first.files_changed()
    os.utime(ca)
    assert not first.files_changed(), "the same content is no change"
    renewed, renewed_key = authority.sign("server", "DNS:gw1")
    certificate.write_bytes(renewed.read_bytes())
    assert not first.files_changed(), "the certificate is there and its key is not yet: the session goes on"
    key.write_bytes(renewed_key.read_bytes())
    assert first.files_changed()
    second = link()
    assert not second.files_changed()
    sasl.password_file.chmod(0o600)
    sasl.password_file.write_text("battery staple\n")
    assert second.files_changed()
    assert link().options()["sasl_plain_password"] == "battery staple"  # noqa: S105
    sasl.password_file.unlink()
    assert not second.files_changed()


def test_a_new_file_that_cannot_be_used_is_read_once_and_logged_once(
    sasl: KafkaSaslSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_to("kafka.example:9092", sasl=sasl)
    reads = []
    read = read_files

    def counted(kafka: KafkaSettings, judge: Dates | None) -> KafkaFiles:
        reads.append(kafka)
        return read(kafka, judge)

    monkeypatch.setattr(kafka_link, "read_files", counted)
    sasl.password_file.chmod(0o600)
    with structlog.testing.capture_logs() as lines:
        for content, mode in (("", 0o600), ("battery staple\n", 0o644)):
            sasl.password_file.write_text(content)
            sasl.password_file.chmod(mode)
            for _ in range(5):
                assert not link.files_changed()
    assert [line["log_level"] for line in lines] == ["warning", "warning"]
    assert "the former stays in use until then" in lines[0]["event"]
    assert "kafka.sasl.password_file is empty" in lines[0]["reason"]
    assert "chmod 0400" in lines[1]["reason"]
    assert len(reads) == 2
    # The same words in the file, and nobody else may read them now.
    sasl.password_file.chmod(0o400)
    assert link.files_changed()


def test_files_that_cannot_be_used_are_told_by_their_setting(
    authority: Authority, tmp_path: Path, sasl: KafkaSaslSettings
) -> None:
    certificate, key = authority.sign("server", "DNS:gw1")
    nowhere = tmp_path / "nowhere"
    for settings, words in (
        ({"tls": KafkaTlsSettings(ca=nowhere)}, "kafka.tls.ca: .*nowhere does not exist"),
        ({"tls": KafkaTlsSettings(ca=key)}, "kafka.tls.ca: .*holds a private key"),
        ({"tls": KafkaTlsSettings(certificate=nowhere, key=key)}, "kafka.tls.certificate: .*nowhere does not"),
        ({"tls": KafkaTlsSettings(certificate=certificate, key=nowhere)}, "kafka.tls.key: .*nowhere does not"),
        ({"tls": KafkaTlsSettings(certificate=authority.certificate, key=key)}, "kafka.tls.key: .*is not the key of"),
        ({"sasl": msgspec.structs.replace(sasl, password_file=nowhere)}, "kafka.sasl.password_file cannot be read"),
        (
            {"sasl": msgspec.structs.replace(sasl, mechanism=OAUTHBEARER, token_ca=nowhere)},
            "kafka.sasl.token_ca: .*nowhere does not exist",
        ),
    ):
        with pytest.raises(KafkaFileError, match=words) as raised:
            link_to("kafka.example:9092", **settings)
        assert isinstance(raised.value, OSError)
