"""The forwarder: buffered rows to Kafka in batches, confirmed only when all in-sync replicas have them."""

import asyncio
import math
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter

import msgspec
import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    CorruptRecordException,
    InvalidTimestampError,
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
)
from aiokafka.partitioner import murmur2

from gateway.buffer import Buffer
from gateway.buffer_rows import START, Lane, Position, Quarantined, Row, Series, spans_of
from gateway.buffer_schema import BufferFileError
from gateway.clock_gateway import WallClock, boottime_us
from gateway.intake import FrontDoor
from gateway.kafka_batch import EncodedBatch
from gateway.kafka_record import RecordEncoder, rfc3339
from gateway.kafka_topics import UNKNOWN, TopicVerdict, create_topics, inspect_topics
from gateway.settings import GatewaySettings, KafkaSettings

BATCH_BYTES_MAX = 1_000_000
"""Just below what a broker takes by default (`message.max.bytes`)."""
VERDICT_S = 60.0
"""A topic that was refused is looked at again after this: somebody may have mended it."""
LONE_REFUSALS_MAX = 10
"""So many of a topic's records refused one after the other condemn the topic for `VERDICT_S`: finding each by halving
would hold up what comes behind."""
BACKOFF_S_MIN = 0.25
CLOSE_TIMEOUT_S = 5.0
CLOCK_POLL_S = 0.5
LINGER_ROWS = 500
"""Fewer rows than this at once are live readings."""
CACHE_MAX = 50_000

# What a broker says of a record, rather than of itself. aiokafka reports codes it does not know, among them
# INVALID_RECORD (87), as UnknownError.
REFUSALS = (
    CorruptRecordException,
    InvalidTimestampError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
)

log = structlog.get_logger()


@dataclass(slots=True)
class UplinkState:
    """What the forwarder says of itself."""

    up: bool = False
    error: str | None = None
    """Why it is down, in words; None before the first attempt and while it is up."""
    waits_for_clock: bool = False
    """Whether readings are held back because a time for them may still be learnt (`gateway.hold_unsynced_s`)."""
    sent: int = 0
    offsets: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By topic and partition: the offset after the last record that was acknowledged to this daemon."""


class _RefusedError(Exception):
    """The broker took the request and refused a record of it."""

    def __init__(self, error: KafkaError) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.reason = f"broker-refused: {type(error).__name__}"
        # A code that aiokafka does not know may also be about the broker: then the next attempt must not be at once.
        self.is_doubtful = isinstance(error, UnknownError)


@dataclass(slots=True)
class _Session:
    """One producer's life, with what was looked up through it."""

    producer: AIOKafkaProducer
    admin: AIOKafkaAdminClient
    buffer_id: str
    routes: dict[tuple[int, int], "_Route"] = field(default_factory=dict)
    """By lane and series: those whose topic may be written to."""
    series: dict[int, Series] = field(default_factory=dict)
    lanes: dict[int, Lane] = field(default_factory=dict)
    judging: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Drain and heartbeat must not both create the same topic."""


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the rows of one series in one lane go, and what encodes them."""

    encoder: RecordEncoder
    partition: tuple[str, int]
    """Topic and number."""


class Forwarder:
    """Drains the buffer into Kafka, for ever, and comes back by itself whatever the uplink does."""

    def __init__(
        self,
        buffer: Buffer,
        front_door: FrontDoor,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        clock: Callable[[], WallClock],
    ) -> None:
        self._buffer = buffer
        self._front_door = front_door
        self._gateway = gateway
        self._kafka = kafka
        self._clock = clock
        self._hold_from_s = time.monotonic()
        self._verdicts: dict[str, tuple[TopicVerdict, float]] = {}
        self._lone_refusals: Counter[str] = Counter()
        self._heartbeat_from_s = 0.0
        self._rows_max = kafka.batch_rows_max
        self._position = START
        self._position_of = ("", 0)
        """The buffer file, and how often it was rewound, that `_position` belongs to."""
        self._heartbeat_lane = secrets.token_hex(6)
        self._heartbeats = 0
        self.state = UplinkState()

    async def run(self) -> None:
        """Forward until cancelled."""
        backoff_s = BACKOFF_S_MIN
        while True:
            sent = self.state.sent
            try:
                async with self._session() as session:
                    await self._forward(session)
            except _RefusedError as refused:
                log.info("kafka refused a record: the producer is rebuilt", error=str(refused), rows=self._rows_max)
                if not refused.is_doubtful:
                    continue
            except BufferFileError as error:
                log.warning("forwarding waits for the buffer", error=str(error))
            except (KafkaError, OSError, TimeoutError) as error:
                self._note_down(error)
            except Exception as error:
                # A fault of ours or of the client's must not cost the sensors their front door.
                log.exception("forwarding failed, and is begun anew")
                self._note_down(error)
            if self.state.sent > sent:
                backoff_s = BACKOFF_S_MIN
            # Full jitter: gateways whose broker comes back must not knock at once.
            await asyncio.sleep(random.uniform(backoff_s / 2, backoff_s))  # noqa: S311
            backoff_s = min(backoff_s * 2, self._kafka.backoff_s_max)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[_Session]:
        timeout_ms = int(self._kafka.request_timeout_s * 1000)
        producer = AIOKafkaProducer(
            bootstrap_servers=list(self._kafka.bootstrap),
            client_id=self._gateway.id,
            acks="all",
            enable_idempotence=True,
            compression_type=None if self._kafka.compression == "none" else self._kafka.compression,
            max_batch_size=BATCH_BYTES_MAX,
            request_timeout_ms=timeout_ms,
        )
        admin = AIOKafkaAdminClient(
            bootstrap_servers=list(self._kafka.bootstrap), client_id=self._gateway.id, request_timeout_ms=timeout_ms
        )
        try:
            async with asyncio.timeout(self._kafka.request_timeout_s):
                await producer.start()
                await admin.start()
            if not self.state.up:
                # After an outage NTP comes back with the network: what waits for a clock waits from here.
                self._hold_from_s = time.monotonic()
            # Good topics are believed for a session: what may have changed meanwhile is looked at again.
            self._verdicts = {topic: known for topic, known in self._verdicts.items() if not known[0].usable}
            yield _Session(producer, admin, self._buffer.id)
        finally:
            await _close(producer, admin)

    async def _forward(self, session: _Session) -> None:
        heartbeat = asyncio.create_task(self._heartbeat(session), name="heartbeat")
        drain = asyncio.create_task(self._drain(session), name="drain")
        try:
            done, _ = await asyncio.wait((heartbeat, drain), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    # Not by us: ending quietly would end the forwarder for good.
                    raise TimeoutError("the Kafka client gave up a request")
                task.result()
        finally:
            for task in (heartbeat, drain):
                task.cancel()
            await asyncio.gather(heartbeat, drain, return_exceptions=True)

    # -- rows -----------------------------------------------------------------------------------

    async def _drain(self, session: _Session) -> None:
        while True:
            self._buffer.committed.clear()
            of = (session.buffer_id, self._buffer.rewinds)
            if self._position_of != of:
                self._position, self._position_of = START, of
            buffer_id, rows = await self._buffer.read(self._position, self._rows_max)
            if buffer_id != session.buffer_id:
                raise BufferFileError("the buffer file was replaced: starting over with the new one")
            if not rows:
                self._note_up()
                await self._buffer.committed.wait()
                continue
            if await self._clock_is_awaited(session, rows):
                continue
            await self._send_rows(session, rows)
            self._settled(session, rows)
            self._rows_max = min(self._rows_max * 2, self._kafka.batch_rows_max)
            self._note_up()
            if len(rows) < LINGER_ROWS:
                # Live: what comes in meanwhile shares the next request. A backlog does not wait.
                await asyncio.sleep(self._kafka.linger_ms / 1000)

    def _settled(self, session: _Session, rows: Sequence[Row]) -> None:
        """Kafka or the quarantine has these rows: the buffer may delete them."""
        self._position = Position(rows[-1].lane, rows[-1].sequence)
        self._buffer.confirm(session.buffer_id, spans_of(rows))
        self.state.sent += len(rows)

    async def _clock_is_awaited(self, session: _Session, rows: Sequence[Row]) -> bool:
        """Wait a little if a time for these rows may still be learnt (`gateway.hold_unsynced_s`)."""
        lane = await self._lane(session, rows[-1].lane)
        waits = lane.boot_id == self._buffer.boot_id and not self._clock().synced and not self._hold_is_over()
        if waits and not self.state.waits_for_clock:
            log.info(
                "readings wait on disk until the kernel says that the clock is synced: see to NTP, or, where this box "
                'cannot know, set clock = "system" under [gateway]',
                seconds_at_most=round(self._gateway.hold_unsynced_s - (time.monotonic() - self._hold_from_s)),
                setting="gateway.hold_unsynced_s",
            )
        self.state.waits_for_clock = waits
        if waits:
            self._note_up()
            await asyncio.sleep(CLOCK_POLL_S)
        return waits

    async def _send_rows(self, session: _Session, rows: Sequence[Row]) -> None:
        """Have all of them in Kafka or in the quarantine. Raises _RefusedError, KafkaError, TimeoutError."""
        clocks: dict[str, WallClock] = {}
        batches: dict[tuple[str, int], list[EncodedBatch]] = {}
        aside: list[tuple[Row, str]] = []
        compression, record_bytes_max = self._kafka.compression, self._kafka.record_bytes_max
        for (lane, series), run in groupby(rows, attrgetter("lane", "series")):
            route = session.routes.get((lane, series)) or await self._route(session, lane, series)
            if isinstance(route, TopicVerdict):
                aside += [(row, route.reason) for row in run]
                continue
            encoder = route.encoder
            clock = clocks.get(encoder.boot_id)
            if clock is None:
                clock = clocks[encoder.boot_id] = await self._buffer.boot_clock(encoder.boot_id)
            batch_list = batches.get(route.partition)
            if batch_list is None:
                batch_list = batches[route.partition] = [EncodedBatch(compression)]
            batch = batch_list[-1]
            for row in run:
                record = encoder.encode(row, clock, len(batch.records))
                if len(record) > record_bytes_max:
                    # An oversized record would spoil the producer for its partition: it is never handed over.
                    aside.append((row, "record-too-large"))
                    continue
                if batch.bytes + len(record) > BATCH_BYTES_MAX and batch.records:
                    batch = EncodedBatch(compression)
                    batch_list.append(batch)
                    record = encoder.encode(row, clock, 0)
                batch.add(record)
        results = await asyncio.gather(
            *(self._send_partition(session, *partition, batch_list) for partition, batch_list in batches.items()),
            return_exceptions=True,
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        refused = [error for error in errors if isinstance(error, REFUSALS)]
        if refused:
            await self._narrow_down(session, rows, refused[0])
        elif errors:
            raise errors[0]
        # Last: what is sent again after an error is set aside once.
        await self._set_aside(session, aside)

    async def _send_partition(
        self, session: _Session, topic: str, partition: int, batches: Sequence[EncodedBatch]
    ) -> None:
        """Send one partition's batches in order: each goes out when the one before it is acknowledged."""
        for batch in batches:
            if not batch.records:
                continue
            offset = await self._send(session, topic, partition, batch)
            if offset >= 0:
                self.state.offsets[topic][partition] = offset + len(batch.records)
            self._lone_refusals.pop(topic, None)

    async def _send(self, session: _Session, topic: str, partition: int, batch: EncodedBatch) -> int:
        """Send a batch, and give the offset that it got once all replicas have it."""
        # aiokafka's idempotent producer retries for ever: this is what notices that it is stuck.
        async with asyncio.timeout(2 * self._kafka.request_timeout_s):
            metadata = await (await session.producer.send_batch(batch, topic, partition=partition))
        return int(metadata.offset)

    async def _narrow_down(self, session: _Session, rows: Sequence[Row], error: KafkaError) -> None:
        """Halve what is sent at a time until the refused record stands alone, then set it aside."""
        refused = _RefusedError(error)
        if len(rows) == 1:
            await self._set_aside(session, [(rows[0], refused.reason)])
            self._settled(session, rows)
            self._count_lone_refusal((await self._series(session, rows[0].series)).topic, error)
        self._rows_max = max(1, len(rows) // 2)
        # Whatever the producer still believes of this partition's sequence is void: a new one takes over.
        raise refused

    def _count_lone_refusal(self, topic: str, error: KafkaError) -> None:
        """Condemn a topic that refuses everything, rather than find it out for each record."""
        self._lone_refusals[topic] += 1
        lasting = isinstance(error, TopicAuthorizationFailedError)
        if lasting or self._lone_refusals[topic] >= LONE_REFUSALS_MAX:
            del self._lone_refusals[topic]
            reason = f"broker-refused: {type(error).__name__}"
            self._verdicts[topic] = (TopicVerdict(topic, reason, str(error)), time.monotonic() + VERDICT_S)
            log.error("topic is not written to for a while", topic=topic, reason=reason)

    async def _set_aside(self, session: _Session, rows: Sequence[tuple[Row, str]]) -> None:
        """Move rows into the quarantine, each with its reason, in one commit."""
        reports = []
        said: Counter[tuple[str, str]] = Counter()
        for row, reason in rows:
            series = await self._series(session, row.series)
            said[reason, series.topic] += 1
            # A report that cannot be sent is not reported again: what it reports is in the quarantine already.
            if series.topic != self._kafka.quarantine_topic:
                lane = await self._lane(session, row.lane)
                reports.append(self._front_door.quarantine_entry(_quarantined(row, series, lane, reason)))
        if reports:
            await self._buffer.quarantine(session.buffer_id, reports, [row for row, _ in rows])
        for (reason, topic), count in said.items():
            log.warning("readings quarantined", reason=reason, topic=topic, count=count)

    # -- look-ups -------------------------------------------------------------------------------

    async def _series(self, session: _Session, number: int) -> Series:
        series = session.series.get(number)
        if series is None:
            series = session.series[number] = await self._buffer.series(session.buffer_id, number)
        return series

    async def _lane(self, session: _Session, number: int) -> Lane:
        lane = session.lanes.get(number)
        if lane is None:
            lane = session.lanes[number] = await self._buffer.lane_of(session.buffer_id, number)
        return lane

    async def _route(self, session: _Session, lane_number: int, series_number: int) -> _Route | TopicVerdict:
        """Where the rows of a series go; the verdict on its topic where that may not be written to."""
        series = await self._series(session, series_number)
        verdict = await self._verdict(session, series.topic)
        if not verdict.usable:
            return verdict
        encoder = RecordEncoder(self._gateway, await self._lane(session, lane_number), series)
        partition = encoder.topic, await self._partition(session, encoder)
        if len(session.routes) >= CACHE_MAX:
            session.routes.clear()
            session.series.clear()
        route = session.routes[lane_number, series_number] = _Route(encoder, partition)
        return route

    async def _verdict(self, session: _Session, topic: str) -> TopicVerdict:
        known = self._verdicts.get(topic)
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        async with session.judging:
            again = self._verdicts.get(topic)
            return again[0] if again is not None and again is not known else await self._judge(session, topic)

    async def _judge(self, session: _Session, topic: str) -> TopicVerdict:
        (verdict,) = await inspect_topics(session.admin, [topic])
        if verdict.reason == UNKNOWN and self._kafka.create_topics:
            (verdict,) = await create_topics(session.admin, [topic], self._kafka)
            if verdict.usable:
                log.info("topic created", topic=topic)
        if not verdict.usable:
            log.error("topic is not written to", topic=topic, reason=verdict.reason, hint=verdict.hint)
        if len(self._verdicts) >= CACHE_MAX:
            self._verdicts.clear()
        until_s = math.inf if verdict.usable else time.monotonic() + VERDICT_S
        self._verdicts[topic] = (verdict, until_s)
        return verdict

    async def _partition(self, session: _Session, encoder: RecordEncoder) -> int:
        """The partition of a key as every Kafka client computes it."""
        async with asyncio.timeout(self._kafka.request_timeout_s):
            partitions = await session.producer.partitions_for(encoder.topic)
        return int((murmur2(encoder.key) & 0x7FFFFFFF) % len(partitions))

    # -- the gateway's own words ----------------------------------------------------------------

    async def _heartbeat(self, session: _Session) -> None:
        """Say every `heartbeat_interval_s` how far this gateway has come; a missed one is never made up for."""
        key = self._front_door.key(self._gateway.id)
        topic = self._kafka.events_topic
        series = Series(topic, key, "", "heartbeat", "sluice.gateway.heartbeat", "application/json")
        while True:
            clock = self._clock()
            due = time.monotonic() >= self._heartbeat_from_s and (clock.synced or self._hold_is_over())
            if due and (await self._verdict(session, topic)).usable:
                now_us = boottime_us()
                lane = Lane(0, self._heartbeat_lane, self._buffer.boot_id, session.buffer_id)
                body = msgspec.json.encode(await self._heartbeat_body(now_us, clock))
                row = Row(0, self._heartbeats, 0, now_us, None, 0, None, None, None, body, 0)
                self._heartbeats += 1
                encoder = RecordEncoder(self._gateway, lane, series)
                batch = EncodedBatch(self._kafka.compression)
                batch.add(encoder.encode(row, clock, 0))
                try:
                    await self._send(session, topic, await self._partition(session, encoder), batch)
                except REFUSALS as error:
                    # Readings must not wait for it: the producer is rebuilt once, without heartbeats for a while.
                    self._heartbeat_from_s = time.monotonic() + VERDICT_S
                    log.error("heartbeats are refused", topic=topic, error=str(error))  # noqa: TRY400 - no fault of ours
                    raise _RefusedError(error) from error
            await asyncio.sleep(self._kafka.heartbeat_interval_s)

    async def _heartbeat_body(self, now_us: int, clock: WallClock) -> dict[str, object]:
        pending = []
        low_us: int | None = clock.at(now_us) if clock.synced else None
        for lane in await self._buffer.pending():
            lane_clock = await self._buffer.boot_clock(lane.boot_id)
            span: dict[str, object] = {"lane": lane.lane, "from": None, "to": None}
            if lane_clock.synced:
                span["from"] = rfc3339(lane_clock.at(lane.event_from_us)).decode()
                span["to"] = rfc3339(lane_clock.at(lane.event_to_us)).decode()
                if low_us is not None:
                    low_us = min(low_us, lane_clock.at(lane.event_from_us))
            else:
                # A lane without a time may reach back any distance: nothing can be promised past it.
                low_us = None
            pending.append(span)
        return {
            "offsets": self.state.offsets,
            "pending": pending,
            "low_watermark": None if low_us is None else rfc3339(low_us).decode(),
            "depth_rows": self._buffer.state.rows,
            "buffer_bytes": self._buffer.state.bytes_used,
            "counts": {**self._front_door.counts, **self._buffer.counts},
        }

    def _hold_is_over(self) -> bool:
        return time.monotonic() - self._hold_from_s >= self._gateway.hold_unsynced_s

    def _note_up(self) -> None:
        if not self.state.up:
            self.state.up = True
            self.state.error = None
            log.info("uplink is up", bootstrap=",".join(self._kafka.bootstrap), rows_waiting=self._buffer.state.rows)

    def _note_down(self, error: BaseException) -> None:
        words = str(error) or type(error).__name__
        if self.state.up or self.state.error is None:
            self.state.up = False
            log.warning(
                "uplink is down: readings are kept on disk",
                error=words,
                bootstrap=",".join(self._kafka.bootstrap),
                since=datetime.now(UTC).isoformat(timespec="seconds"),
            )
        self.state.error = words


def _quarantined(row: Row, series: Series, lane: Lane, reason: str) -> Quarantined:
    return Quarantined(
        reason,
        row.payload,
        series.device,
        series.subject,
        row.received_us,
        series=row.series,
        event_us=row.event_us,
        event_error_us=row.event_error_us,
        tick_ms=row.tick_ms,
        device_boot=row.device_boot,
        device_sequence=row.device_sequence,
        boot_id=lane.boot_id,
        doubt=row.doubt,
    )


async def _close(producer: AIOKafkaProducer, admin: AIOKafkaAdminClient) -> None:
    """Let go of both without waiting for what cannot be delivered.

    A bare `producer.stop()` flushes first, and an undeliverable batch of an idempotent producer is retried for ever.
    The sender and the client are closed by themselves instead; both are private or half-public in aiokafka 0.14,
    which is why that version is pinned and a test covers this.
    """
    producer._closed = True  # noqa: SLF001
    for close in (producer._sender.close, producer.client.close, admin.close):  # noqa: SLF001
        with suppress(KafkaError, OSError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await close()
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        # aiokafka and the lines above swallow it: without this the daemon would not stop.
        raise asyncio.CancelledError
