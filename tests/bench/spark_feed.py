"""Fills Kafka topics with a scenario's records as the real gateway encodes them, and keeps account of them.

The encoder and the batches are the gateway's own: a million records take some ten seconds of one core.
"""

import asyncio
import hashlib
import json
import random
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import murmur2

from gateway.buffer.rows import Lane as BufferLane
from gateway.buffer.rows import Row, Series
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.clock.rfc3339 import rfc3339
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.reading import Datum
from gateway.settings import GatewaySettings
from tests.bench.spark_ledger import Ledger
from tests.bench.spark_scenario import DAY_S, Due, Scenario, schedule
from tests.support.kafka_admin import create_topic, delete_topic

NAMESPACE = "bench"
BATCH_BYTES = 256_000
"""Uncompressed; a broker takes 1 MB."""
COMPRESSION = "zstd"
RESENT_RUN = 200
"""Records that a gateway sends again after a restart: those that were under way."""
BOOTED_BEFORE_US = int(30 * DAY_S) * 1_000_000
CLOCK_ERROR_US = 1_000
TICK_ERROR_US = 500

Place = tuple[str, int]
"""Topic and partition."""


class FeedError(RuntimeError):
    """Kafka's records are not those that were fed. The message says how they differ."""


@dataclass(frozen=True, slots=True)
class Sending:
    """One request: records of one partition."""

    at_s: float
    """When the last of them is due, from the scenario's begin."""
    place: Place
    first_offset: int
    batch: EncodedBatch

    def built(self) -> "Sending":
        """Compress it now, so that sending it costs next to nothing, and keep nothing else of it."""
        self.batch._build()
        self.batch.records[:] = [b""] * len(self.batch.records)
        return self


@dataclass(slots=True)
class Lane:
    """Knowledge of a gateway's lane while it is sent."""

    series: list[RecordEncoder]
    """One for each device of the gateway."""
    next_sequence: int = 0
    owed: float = 0.0
    """Records that are to be sent again, some day."""
    latest: deque[tuple[RecordEncoder, int, Row, int]] = field(default_factory=lambda: deque(maxlen=RESENT_RUN))
    """Its last records: encoder, partition, row, event time."""


class Feed:
    """A scenario's records, made as they are asked for. The same scenario gives the same bytes."""

    def __init__(self, scenario: Scenario, *, with_ledger: bool = True) -> None:
        self.scenario = scenario
        self.ledger = Ledger(scenario.metrics) if with_ledger else None
        self.event_us: dict[Place, array[int]] = {
            (topic, number): array("q") for topic, count in scenario.partitions_of.items() for number in range(count)
        }
        """The event time of each record, by its offset."""
        self.resent = 0
        self._random = random.Random(scenario.seed)  # noqa: S311 - what sensors measure, no secret
        self._boot_us = scenario.begin_us - BOOTED_BEFORE_US
        self._times = BootTimes(BootClock.constant(self._boot_us, CLOCK_ERROR_US))
        self._names = [f"d{number:06d}" for number in range(scenario.devices)]
        self._partitions = [murmur2(name.encode()) % 2**31 % scenario.partitions for name in self._names]
        # The devices of a site measure far apart. No figure depends on how far.
        self._middles = [
            [self._random.randrange(1_000, 9_000) for _ in scenario.metrics] for _ in range(scenario.devices)
        ]
        counted = round(scenario.devices * scenario.counted_share)
        self._device_boots = [f"7-{self._id(8, number)}" if number < counted else None for number in self._shuffled()]
        self._payload = ("{" + ",".join(f'"{metric}":%d.%02d' for metric in scenario.metrics) + "}").encode()
        self._lanes: dict[tuple[int, int | None], Lane] = {}
        self._batches: dict[Place, EncodedBatch] = {}
        self._acknowledged: dict[int, dict[int, int]] = {}
        """By gateway and partition, the offset behind its last reading."""

    def sendings(self, flush_s: float | None = None) -> Iterator[Sending]:
        """All batches in their order; with `flush_s` none waits for longer than that, as for live readings."""
        flush_at_s = inf if flush_s is None else flush_s
        at_s = 0.0
        for due in schedule(self.scenario):
            while due.at_s >= flush_at_s:
                yield from self._flush(flush_at_s)
                flush_at_s += flush_s or inf
            at_s = due.at_s
            if due.lane is None:
                yield from self._heartbeat(due)
            else:
                yield from self._readings(due, due.lane)
        yield from self._flush(at_s)

    @property
    def ends(self) -> dict[Place, int]:
        """The next offset of each partition, all that was made so far being sent."""
        return {place: len(times) for place, times in self.event_us.items()}

    @property
    def records(self) -> int:
        return sum(self.ends.values())

    # -- what a gateway sends -------------------------------------------------------------------

    def _readings(self, due: Due, number: int) -> Iterator[Sending]:
        """A reading of each of its devices, and now and then the last ones again."""
        scenario, draw = self.scenario, self._random.random
        lane = self._lane(due.gateway, number)
        disorder_us = scenario.disorder_s * 1e6
        received_us = round(scenario.measured_s(due.gateway, due.number) * 1e6) + BOOTED_BEFORE_US
        for device, encoder in zip(scenario.devices_of(due.gateway), lane.series, strict=True):
            values = [middle + int(200 * draw()) for middle in self._middles[device]]
            digits = tuple(part for value in values for part in divmod(value, 100))
            event_us = received_us - int(draw() * disorder_us)
            boot = self._device_boots[device]
            sequence = due.number if boot else None
            row = Row(
                1,
                lane.next_sequence,
                0,
                Datum(
                    received_us=received_us,
                    event_us=event_us,
                    event_error_us=TICK_ERROR_US,
                    device_boot=boot,
                    device_sequence=sequence,
                    payload=self._payload % digits,
                ),
            )
            lane.next_sequence += 1
            event_us += self._boot_us
            if self.ledger is not None:
                self.ledger.add(self._names[device], event_us, values)
            partition = self._partitions[device]
            lane.latest.append((encoder, partition, row, event_us))
            yield from self._add(due, encoder, partition, row, event_us)
        lane.owed += scenario.resent_share * len(lane.series)
        if lane.owed >= RESENT_RUN:
            lane.owed -= RESENT_RUN
            self.resent += len(lane.latest)
            for encoder, partition, row, event_us in lane.latest:
                yield from self._add(due, encoder, partition, row, event_us)

    def _heartbeat(self, due: Due) -> Iterator[Sending]:
        lane = self._lane(due.gateway, None)
        at_us = round(due.at_s * 1e6) + BOOTED_BEFORE_US
        body = json.dumps(self._heartbeat_body(due)).encode()
        row = Row(1, lane.next_sequence, 0, Datum(received_us=at_us, payload=body))
        lane.next_sequence += 1
        yield from self._add(due, lane.series[0], 0, row, at_us + self._boot_us)

    def _heartbeat_body(self, due: Due) -> dict[str, object]:
        """Body of a heartbeat by `docs/kafka-records.md`, without rows and bytes, which no table depends on."""
        scenario = self.scenario
        pending = []
        low_s = due.at_s
        for number, lane in enumerate(scenario.lanes(due.gateway)):
            from_s = lane.pending_from_s(due.at_s)
            if from_s is not None:
                low_s = min(low_s, from_s)
                span = {"from": self._low(from_s), "to": self._wall(min(due.at_s, lane.until_s))}
                pending.append({"lane": self._lane_name(due.gateway, number), "rows": 0, **span})
        offsets = {str(place): offset for place, offset in self._acknowledged.get(due.gateway, {}).items()}
        return {
            "offsets": {scenario.topic: offsets} if offsets else {},
            "pending": pending,
            "quarantined": [],
            "low_watermark": self._low(low_s),
            "depth_rows": 0,
            "oldest_age_s": round(due.at_s - low_s, 3),
            "buffer_bytes": 0,
            "counts": {},
        }

    def _wall(self, at_s: float) -> str:
        return rfc3339(self.scenario.begin_us + round(at_s * 1e6)).decode()

    def _low(self, at_s: float) -> str:
        """Before it lies nothing that is still to come: a reading may be older than its place in the lane."""
        return self._wall(at_s - self.scenario.disorder_s)

    # -- batches --------------------------------------------------------------------------------

    def _add(self, due: Due, encoder: RecordEncoder, partition: int, row: Row, event_us: int) -> Iterator[Sending]:
        place = (encoder.topic, partition)
        batch = self._batches.get(place)
        if batch is None:
            batch = self._batches[place] = EncodedBatch(COMPRESSION)
        batch.add(encoder.encode(row, self._times, len(batch.records)))
        times = self.event_us[place]
        times.append(event_us)
        if due.lane is not None:
            self._acknowledged.setdefault(due.gateway, {})[partition] = len(times)
        if batch.bytes >= BATCH_BYTES:
            del self._batches[place]
            yield Sending(due.at_s, place, len(times) - len(batch.records), batch)

    def _flush(self, at_s: float) -> Iterator[Sending]:
        for place, batch in self._batches.items():
            yield Sending(at_s, place, len(self.event_us[place]) - len(batch.records), batch)
        self._batches.clear()

    # -- who sends ------------------------------------------------------------------------------

    def _lane(self, gateway: int, number: int | None) -> Lane:
        """Opened as its first record is sent; `number` None: the heartbeats'."""
        lane = self._lanes.get((gateway, number))
        if lane is None:
            name = f"gw-{gateway:03d}"
            settings = GatewaySettings(id=name, namespace=NAMESPACE)
            of = BufferLane(
                1, self._lane_name(gateway, number), self._id(32, gateway, "boot"), self._id(16, gateway, "buffer")
            )
            if number is None:
                series = [
                    Series(
                        self.scenario.events_topic,
                        name,
                        "",
                        "heartbeat",
                        "sluice.gateway.heartbeat",
                        "application/json",
                    )
                ]
            else:
                topic, stream = self.scenario.topic, self.scenario.topic.removeprefix("device-")
                series = [
                    Series(topic, each, each, f"device/{each}/{stream}", "sluice.reading", "application/json")
                    for each in (self._names[device] for device in self.scenario.devices_of(gateway))
                ]
            lane = self._lanes[gateway, number] = Lane([RecordEncoder(settings, of, each) for each in series])
            lane.owed = self._random.random() * RESENT_RUN
        return lane

    def _lane_name(self, gateway: int, number: int | None) -> str:
        return self._id(12, gateway, number)

    def _id(self, digits: int, *of: object) -> str:
        """Random to look at, and the same in each run."""
        text = repr((self.scenario.topic, self.scenario.seed, *of))
        return hashlib.sha256(text.encode()).hexdigest()[:digits]

    def _shuffled(self) -> list[int]:
        """The devices' numbers in another order: neither gateway nor partition tells which send a sequence."""
        numbers = list(range(self.scenario.devices))
        self._random.shuffle(numbers)
        return numbers


@asynccontextmanager
async def topics(bootstrap: str, partitions: Mapping[str, int]) -> AsyncIterator[None]:
    """Topics for the length of a block, LogAppendTime, as the gateway makes them."""
    for topic, count in partitions.items():
        await create_topic(bootstrap, topic, count)
    try:
        yield
    finally:
        for topic in partitions:
            await delete_topic(bootstrap, topic)


async def send(bootstrap: str, sendings: Iterable[Sending], begin_s: float | None = None) -> None:
    """Send batches to topics that nobody else writes to: at once, or each when it is due after `begin_s` (UNIX time).

    Raises FeedError where Kafka gave one another offset than the feed counted.
    """
    waiting: deque[tuple[asyncio.Future[object], Sending]] = deque()
    # Not idempotent: such a batch is built when it is sent, and these may have been built long before.
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=False) as producer:
        for sending in sendings:
            if begin_s is not None:
                await asyncio.sleep(max(0.0, begin_s + sending.at_s - time.time()))
            topic, partition = sending.place
            waiting.append((await producer.send_batch(sending.batch, topic, partition=partition), sending))
            while waiting and waiting[0][0].done():
                await _sent(*waiting.popleft())
        while waiting:
            await _sent(*waiting.popleft())


async def _sent(sending: "asyncio.Future[object]", what: Sending) -> None:
    offset = getattr(await sending, "offset", None)
    if offset != what.first_offset:
        raise FeedError(
            f"Kafka gave a batch of {what.place} the offset {offset}, and {what.first_offset} was expected: "
            "something else writes to this topic, or a batch was sent twice"
        )


async def fill(bootstrap: str, scenario: Scenario, *, with_ledger: bool = True) -> Feed:
    """Send all of a scenario as fast as it goes; its topics must be there, and empty."""
    feed = Feed(scenario, with_ledger=with_ledger)
    await send(bootstrap, feed.sendings())
    return feed
