"""The forwarder's sessions: what ends one, and what must not; against brokers that answer as they are told."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiokafka.errors import UnknownError

from gateway.buffer.buffer import Buffer
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.config.config_file import route_table
from gateway.daemon.housekeeping import LaneTurns
from gateway.intake.front_door import FrontDoor
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.topics import TopicVerdict
from gateway.settings import GatewaySettings, KafkaSettings, Settings
from gateway.tls.dates import Dates
from gateway.uplink.forwarder import Forwarder, _is_as_good
from gateway.uplink.lane_policy import LanePolicy
from gateway.uplink.state import UplinkState
from tests.gateway.uplink.test_forward_rounds import FakeBroker, FakeVerdicts, kafka_settings, reading
from tests.support.buffers import CLOCK, opened, store
from tests.support.kafka_peers import API_VERSIONS
from tests.support.kafka_peers import FakeBroker as SilentBroker
from tests.support.stream_server import speaking
from tests.support.waiting import until

GATEWAY = GatewaySettings("gw1", hold_unsynced_s=1.0)


class Broker(FakeBroker):
    """Answers heartbeats with an error that is no refusal, if it is told to."""

    cluster_id = "c"
    is_deaf_to_heartbeats = False

    async def send(self, topic: str, partition: int, batch: EncodedBatch) -> int:
        if topic == "gateway-events" and self.is_deaf_to_heartbeats:
            raise UnknownError("UNKNOWN_SERVER_ERROR")
        await asyncio.sleep(0.05)  # a batch takes longer than a heartbeat
        return await super().send(topic, partition, batch)


class Verdicts(FakeVerdicts):
    refused: ClassVar[dict[str, TopicVerdict]] = {}

    def begin_session(self) -> None:
        """Nothing is looked at anew here."""


class Link:
    """Connections that are well, until their time is over."""

    fault: str | None = None
    cut_s = float("inf")
    has_token = False
    throttled_s = 0.0
    throttled_at_s = float("-inf")

    def __init__(self, _: KafkaSettings, __: Dates) -> None:
        self.began_s = time.monotonic()

    def clock_changed(self) -> bool:
        return False

    def files_changed(self) -> bool:
        if time.monotonic() - self.began_s > self.cut_s:
            raise UnknownError("the line is dead")
        return False

    def peers(self) -> frozenset[tuple[str, int]]:
        return frozenset({("127.0.0.1", 1)})

    def wire_bytes(self) -> int:
        return 0

    carried_bytes = wire_bytes


async def nothing_to_do() -> None:
    """No lane begins with a session."""


@asynccontextmanager
async def forwarding(
    buffer: Buffer,
    monkeypatch: pytest.MonkeyPatch,
    broker: Broker,
    clock: BootClock = CLOCK,
    on_session: Callable[[], Awaitable[None]] = nothing_to_do,
    **changes: object,
) -> AsyncIterator[list[float]]:
    """A forwarder whose sessions are the broker's; gives when each began."""
    sessions: list[float] = []

    @asynccontextmanager
    async def session(_: str, __: KafkaSettings, link: Link) -> AsyncIterator[Any]:
        sessions.append(time.monotonic())
        broker.link = link
        yield broker

    monkeypatch.setattr("gateway.uplink.forwarder.open_session", session)
    monkeypatch.setattr("gateway.uplink.forwarder.KafkaLink", Link)
    monkeypatch.setattr("gateway.uplink.forwarder.LOOK_S", 0.1)
    kafka = kafka_settings(backoff_s_max=0.2, **changes)
    front_door = FrontDoor(buffer, route_table(Settings(GATEWAY, kafka)), GATEWAY, kafka, lambda: 1)
    forwarder = Forwarder(buffer, front_door, GATEWAY, kafka, lambda: clock, on_session)
    forwarder._memory.verdicts = Verdicts()  # type: ignore[assignment]
    task = asyncio.create_task(forwarder.run())
    try:
        yield sessions
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_heartbeat_that_fails_costs_readings_one_session_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker()
    broker.is_deaf_to_heartbeats = True
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(100)])
        async with forwarding(buffer, monkeypatch, broker) as sessions:
            await until(lambda: buffer.state.rows == 0)
            assert len(sessions) == 2
    assert len({record.id for record in broker.of("device-thermo")}) == 100


async def test_a_clock_that_is_never_learnt_is_waited_for_once_however_often_the_line_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "cut_s", 0.4)
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await store(buffer, [reading("a", b"x")])
        async with forwarding(buffer, monkeypatch, Broker(), BootClock.constant(0, None)) as sessions:
            await until(lambda: buffer.state.rows == 0)
            assert len(sessions) >= 2


async def test_until_when_readings_wait_for_a_clock_is_told(tmp_path: Path) -> None:
    kafka = kafka_settings()
    async with opened(tmp_path / "buffer.db") as buffer:
        door = FrontDoor(buffer, route_table(Settings(GATEWAY, kafka)), GATEWAY, kafka, lambda: 1)
        unsynced = BootClock.constant(0, None)
        forwarder = Forwarder(buffer, door, GATEWAY, kafka, lambda: unsynced, nothing_to_do)
        assert forwarder._waits_for_clock()
        until_us = forwarder.report().clock_until_us
        assert until_us is not None
        assert 0 < until_us - boottime_us() <= GATEWAY.hold_unsynced_s * 1e6
        await asyncio.sleep(GATEWAY.hold_unsynced_s)
        assert not forwarder._waits_for_clock()
        assert forwarder.report().clock_until_us is None


async def test_what_came_in_during_an_outage_is_backlog_when_the_first_session_sends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = kafka_settings(lane_s_min=0.0)
    async with opened(tmp_path / "buffer.db") as buffer:
        door = FrontDoor(buffer, route_table(Settings(GATEWAY, kafka)), GATEWAY, kafka, lambda: 1)
        lanes = LaneTurns(door, buffer, LanePolicy(kafka, time.monotonic()))
        await lanes.compare(UplinkState(up=False))
        assert await store(buffer, [reading("a", b"%d" % n) for n in range(100)])
        broker = Broker()
        async with forwarding(
            buffer, monkeypatch, broker, on_session=lanes.session_begins, backlog_topic="{topic}.backlog"
        ):
            await until(lambda: buffer.state.rows == 0)
    assert broker.of("device-thermo") == []
    assert len(broker.of("device-thermo.backlog")) == 100


@pytest.mark.usefixtures("steady_time")
async def test_an_address_that_changes_while_a_session_is_opened_begins_another_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way back is gone: no answer comes, and nobody waits for its time-out."""
    came: list[float] = []
    broker = SilentBroker(answers=frozenset({API_VERSIONS}))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(time.monotonic())
        await broker(reader, writer)

    async with speaking(serve) as port, opened(tmp_path / "buffer.db") as buffer:
        kafka = KafkaSettings((f"127.0.0.1:{port}",), request_timeout_s=30.0, connect_timeout_s=5.0)
        front_door = FrontDoor(buffer, route_table(Settings(GATEWAY, kafka)), GATEWAY, kafka, lambda: 1)
        forwarder = Forwarder(buffer, front_door, GATEWAY, kafka, lambda: CLOCK, nothing_to_do)
        # As an earlier session left it.
        forwarder._peers, forwarder._own = frozenset({("127.0.0.1", port)}), frozenset({"10.0.0.2"})
        task = asyncio.create_task(forwarder.run())
        try:
            await until(lambda: bool(came))
            await asyncio.sleep(0.2)
            changed_s = time.monotonic()
            monkeypatch.setattr("gateway.uplink.forwarder.source_address", lambda _: "10.0.0.3")
            forwarder.network_changed()
            await until(lambda: len(came) >= 2)
            assert came[1] - changed_s < 5.0, "before the first attempt could have timed out"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def test_a_privacy_address_is_as_good_as_the_next_one_of_its_network() -> None:
    assert _is_as_good("192.0.2.1", "192.0.2.1")
    assert _is_as_good("2001:db8::1", "2001:db8::2")
    assert not _is_as_good("2001:db8::1", "2001:db8:0:1::1")
    assert not _is_as_good("192.0.2.1", "192.0.2.2")
    assert not _is_as_good("192.0.2.1", None)
