"""Makes batches for Kafka's partitions out of rows, and finds rows that cannot be sent."""

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from msgspec.structs import replace

from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import TICK_VOID, Lane, Row, Series
from gateway.clock.gateway_clock import BootTimes
from gateway.clock.sensor_clock import DeviceClock
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.host.long_work import LongWork
from gateway.kafka.batch import HEADER_BYTES, EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.kafka.session import BATCH_BYTES_MAX, USABLE_S, KafkaSession
from gateway.kafka.structured_record import StructuredEncoder
from gateway.kafka.topics import BEING_MADE, TopicVerdict
from gateway.settings import GatewaySettings, KafkaSettings
from gateway.uplink.echoes import Echo, echo_topics, structured_of
from gateway.uplink.memory import NO_PARTITION, Memory, Partition
from gateway.uplink.redrive import TOO_LARGE_FOR_TOPIC
from gateway.uplink.supply import Supply

LOOK_AGAIN_S = 10.0
"""Before a topic counts as too small for a record, a verdict that is older than these seconds is renewed."""
TOO_LARGE = "record-too-large"
"""The quarantine's reason for a record above `kafka.record_bytes_max`."""
ROUTES_MAX = 15_000
"""Routes that are remembered, one for each series in each lane. A route takes a kilobyte and a half."""
STEP_ROWS = 20
"""Rows that are encoded between two calls of `LongWork.step`."""

Encoder = RecordEncoder | StructuredEncoder
Aside = list[tuple[Row, str]]
"""Rows that cannot be sent, each with the quarantine's reason."""


@dataclass(frozen=True, slots=True)
class _Route:
    """The destination of one series in one lane, and the encoder of its rows."""

    encoder: Encoder
    partition: Partition
    topic_bytes_max: int
    """Bytes of the largest batch that the topic takes."""
    series: Series
    partitions: tuple[Partition, ...]
    """All partitions that must have its rows: `partition` and those of its echoes."""
    echoes: tuple[Echo, ...] = ()
    left_out: str | None = None
    """The topic of its structured events, if that is refused."""


@dataclass(slots=True)
class Outgoing:
    """A round's batches for one partition, in order, each with its rows."""

    partition: Partition
    echo_of: str | None = None
    """The topic of the rows, if these are echoes of theirs."""
    batches: list[tuple[EncodedBatch, list[Row]]] = field(default_factory=list)
    acknowledged: int = 0
    """Number of batches that Kafka has acknowledged."""
    settled: int = 0
    """Number of batches that the buffer was told of."""


class Batcher:
    """Makes batches for one session."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of the uplink
        self,
        session: KafkaSession,
        buffer: Buffer,
        supply: Supply,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        memory: Memory,
        clocks: DeviceClocks,
    ) -> None:
        """`clocks` are the sensors' clocks. They also date readings that came in before their clock was known."""
        memory.echoed.begin_session(supply.buffer_id)
        memory.last_readings.begin_session(supply.buffer_id)
        self._clocks = clocks
        self._session = session
        self._buffer = buffer
        self._supply = supply
        self._gateway = gateway
        self._kafka = kafka
        self._memory = memory
        self._routes: dict[tuple[int, int], _Route] = {}
        """By lane and series: routes to topics that may be written to, or that wait (`NO_PARTITION`)."""
        self._routes_due_s = time.monotonic() + USABLE_S
        """When topics are looked at again (monotonic)."""
        self._times: dict[str, BootTimes] = {}
        """By boot of this gateway: the times for the latest rows."""

    def follow(self) -> None:
        """Drop the routes if another lane is live or they are old. Rows of a former live lane may change topic."""
        if self._supply.follow() or time.monotonic() >= self._routes_due_s:
            self._routes.clear()
            self._routes_due_s = time.monotonic() + USABLE_S

    def forget(self, topic: str) -> None:
        """Drop the routes to a topic that has changed, so that its rows are routed anew."""
        self._routes = {
            of: route for of, route in self._routes.items() if all(topic != each for each, _ in route.partitions)
        }

    def partitions_of(self, row: Row) -> tuple[Partition, ...]:
        """The partitions that a row goes to; none if the row has no route yet."""
        route = self._routes.get((row.lane, row.series))
        return () if route is None else route.partitions

    async def encode(self, rows: Sequence[Row], outgoing: dict[Partition, Outgoing], aside: Aside) -> None:
        """Add rows to the batches of their partitions, and rows that cannot be sent to `aside`, with the reason.

        Within a batch, a device's rows stand together and in order, as similar rows compress well.
        """
        by_key: dict[Partition, dict[bytes, list[tuple[_Route, list[Row]]]]] = defaultdict(lambda: defaultdict(list))
        runs = [(of, list(run)) for of, run in groupby(rows, attrgetter("lane", "series"))]
        work = LongWork()
        refused = await self._find_routes({of for of, _ in runs}, work)
        for of, run in runs:
            await work.step()
            route = self._routes.get(of)
            if route is None:
                aside += [(row, refused[of]) for row in run]
                continue
            of_key = by_key[route.partition][route.encoder.key]
            if of_key and of_key[-1][0] is route:
                of_key[-1][1].extend(run)
            else:
                of_key.append((route, run))
        await self._find_clocks({self._routes[of].encoder.boot_id for of, _ in runs if of in self._routes})
        for keys in by_key.values():
            for route, of_route in (each for runs in keys.values() for each in runs):
                if route.echoes or route.left_out is not None:
                    await self._encode_echoed(route, of_route, outgoing, aside, work)
                else:
                    await self._encode_way(route, route, of_route, outgoing, aside, work)

    async def _encode_echoed(
        self, route: _Route, rows: list[Row], outgoing: dict[Partition, Outgoing], aside: Aside, work: LongWork
    ) -> None:
        """Encode rows, and their echoes: all rows for structured events, the last one for last readings."""
        echoed, last_readings = self._memory.echoed, self._memory.last_readings
        ways: list[_Route | Echo] = [route, *(echo for echo in route.echoes if not echo.is_latest)]
        lacking = echoed.begin(rows, [way.partition[0] for way in ways])
        if route.left_out is not None:
            echoed.leave_out(rows, route.left_out)
        set_aside: Aside = []
        for way in ways:
            topic = way.partition[0]
            too_large: Aside = []
            some = without_aside(lacking[topic], set_aside)
            await self._encode_way(route, way, some, outgoing, too_large, work)
            echoed.sent(without_aside(some, too_large), topic)
            if way is route:
                # An event goes when its reading goes to its own topic.
                set_aside = too_large
            else:
                echoed.leave_out([row for row, _ in too_large], topic)
        aside += set_aside
        left = without_aside(rows, set_aside)
        for echo in route.echoes:
            topic, key = echo.partition[0], echo.encoder.key
            last = left[-1:] if echo.is_latest and left and echoed.lacks(left[-1], topic) else []
            if last and last_readings.is_last(topic, key, last[0]):
                too_large = []
                await self._encode_way(route, echo, last, outgoing, too_large, work)
                if too_large:
                    echoed.leave_out(last, topic)
                else:
                    echoed.sent(last, topic)
                    last_readings.sent(topic, key, last[0])

    async def _encode_way(  # noqa: PLR0913, PLR0917 - the inner loop
        self,
        route: _Route,
        way: _Route | Echo,
        rows: list[Row],
        outgoing: dict[Partition, Outgoing],
        aside: Aside,
        work: LongWork,
    ) -> None:
        """Encode rows of a route for its own topic, or for a further one."""
        if not rows:
            return
        partition, times = way.partition, self._times[route.encoder.boot_id]
        echo_of = None if way is route else route.series.topic
        out = outgoing.setdefault(partition, Outgoing(partition, echo_of))
        if way is route:
            out.echo_of = None
        rows_max = self._memory.rows_max(partition)
        for begins in range(0, len(rows), STEP_ROWS):
            await work.step()
            self._encode_run(route, way, rows[begins : begins + STEP_ROWS], times, rows_max, out, aside)
        if not out.batches:
            del outgoing[partition]

    async def _find_clocks(self, boot_ids: set[str]) -> None:
        """Look up the clocks of boots. If a clock is unknown, first store that its records are owed a correction."""
        times = {}
        for boot_id in boot_ids:
            clock = await self._buffer.boot_clock(boot_id)
            if not clock.known:
                await self._buffer.owe_correction(boot_id)
            before = self._times.get(boot_id)
            times[boot_id] = before if before is not None and before.clock.says_as(clock) else BootTimes(clock)
        self._times = times

    def _encode_run(  # noqa: PLR0913, PLR0917 - the inner loop
        self,
        route: _Route,
        way: _Route | Echo,
        run: list[Row],
        times: BootTimes,
        rows_max: int,
        out: Outgoing,
        aside: Aside,
    ) -> None:
        encode, topic_bytes_max = way.encoder.encode, way.topic_bytes_max
        record_bytes_max, bytes_max = self._kafka.record_bytes_max, min(BATCH_BYTES_MAX, topic_bytes_max)
        batch, batch_rows = out.batches[-1] if out.batches else self._begin_batch(out)
        records = batch.records
        clock: DeviceClock | None = None
        clock_boot: str | None = None
        estimate: tuple[int, int] | None = None
        estimate_of = TICK_VOID, 0
        for row in run:
            datum = row.datum
            if datum.event_us is None and datum.tick_ms is not None and datum.tick_ms != TICK_VOID:
                if datum.device_boot != clock_boot:
                    clock, clock_boot = self._clock_of(route, datum.device_boot), datum.device_boot
                    estimate_of = TICK_VOID, 0
                if clock is not None:
                    # The row came in before its sensor's clock was known. It gets its time from the clock as known now.
                    if estimate_of != (datum.tick_ms, datum.received_us):
                        estimate_of = datum.tick_ms, datum.received_us
                        estimate = clock.estimate_earlier(*estimate_of)
                    if estimate is not None:
                        datum = replace(datum, event_us=estimate[0], event_error_us=estimate[1])
                        row = replace(row, datum=datum)  # noqa: PLW2901
            record = encode(row, times, len(records))
            size = len(record)
            if size > record_bytes_max or size + HEADER_BYTES > topic_bytes_max:
                # An oversized record would spoil the producer for its partition, so the producer never gets it.
                aside.append((row, TOO_LARGE if size > record_bytes_max else TOO_LARGE_FOR_TOPIC))
                continue
            if records and (batch.bytes + size > bytes_max or len(records) >= rows_max):
                batch, batch_rows = self._begin_batch(out)
                records = batch.records
                record = encode(row, times, 0)
            batch.add(record)
            batch_rows.append(row)
        if not records:
            out.batches.pop()

    def _clock_of(self, route: _Route, device_boot: str | None) -> DeviceClock | None:
        """The sensor's clock in one of its boots; None for rows that another boot of this gateway received."""
        if device_boot is None or route.encoder.boot_id != self._buffer.boot_id:
            return None
        return self._clocks.find_of(route.series.device, device_boot, route.series.stream)

    def _begin_batch(self, out: Outgoing) -> tuple[EncodedBatch, list[Row]]:
        begun: tuple[EncodedBatch, list[Row]] = EncodedBatch(self._kafka.compression), []
        out.batches.append(begun)
        return begun

    async def _find_routes(self, rows_of: set[tuple[int, int]], work: LongWork) -> dict[tuple[int, int], str]:
        """Find routes for lanes and series, asking about all topics at once. Returns the reason for each that has none.

        If one of their topics waits, rows get a route without a partition (`NO_PARTITION`).
        """
        wanted = rows_of - self._routes.keys()
        if not wanted:
            return {}
        if len(self._routes) + len(wanted) > ROUTES_MAX:
            # Drop routes of lanes that were sent, as nobody asks for them again.
            lanes = {lane for lane, _ in rows_of} | {self._supply.live_lane}
            self._routes = {of: route for of, route in self._routes.items() if of[0] in lanes}
            if len(self._routes) + len(wanted) > ROUTES_MAX:
                self._routes = {of: route for of, route in self._routes.items() if of in rows_of}
        topics = {}
        for of in wanted:
            await work.step()
            topics[of] = await self.topics(*of)
        beside = {of: echo_topics(await self._supply.series(of[1]), self._kafka) for of in wanted}
        verdicts = await self._memory.verdicts.of_all(
            self._session.admin,
            sorted({topic for each in (topics, beside) for some in each.values() for topic in some}),
        )
        chosen = {}
        echoed = {}
        for of, possible in topics.items():
            await work.step()
            device = (await self._supply.series(of[1])).device
            chosen[of] = _first_usable([self._memory.new_topics.asked(verdicts[topic], device) for topic in possible])
            asked = [self._memory.new_topics.asked(verdicts[topic], device) for topic in beside[of]]
            echoed[of] = [verdict for verdict in asked if verdict.usable or verdict.waits]
        usable = [*chosen.values(), *(verdict for of_route in echoed.values() for verdict in of_route)]
        await self._session.write_to({verdict.topic for verdict in usable if verdict.usable})
        refused = {}
        for of, verdict in chosen.items():
            await work.step()
            if not verdict.usable and not verdict.waits:
                refused[of] = verdict.reason
                continue
            lane, series = await self._supply.lane(of[0]), await self._supply.series(of[1])
            encoder = self._encoder(lane, series)
            waiting = next((each for each in (verdict, *echoed[of]) if each.waits), None)
            if waiting is not None:
                nowhere = waiting.topic, NO_PARTITION
                self._routes[of] = _Route(encoder, nowhere, sys.maxsize, series, (nowhere,))
                continue
            partition = verdict.topic, await self._session.partition(verdict.topic, encoder.key)
            echoes = tuple([await self._echo(each, lane, series, beside[of]) for each in echoed[of]])
            taken = {each.topic for each in echoed[of]}
            left_out = [topic for topic, is_latest in beside[of].items() if not is_latest and topic not in taken]
            self._routes[of] = _Route(
                encoder,
                partition,
                verdict.batch_bytes_max,
                series,
                (partition, *(echo.partition for echo in echoes)),
                echoes,
                next(iter(left_out), None),
            )
        return refused

    async def _echo(self, verdict: TopicVerdict, lane: Lane, series: Series, latest: Mapping[str, bool]) -> Echo:
        """The echo for a topic. `latest` tells whether a topic gets last readings alone."""
        encoder, topic = StructuredEncoder(self._gateway, lane, series, structured_of(series)), verdict.topic
        partition = topic, await self._session.partition(topic, encoder.key)
        return Echo(encoder, partition, verdict.batch_bytes_max, latest[topic])

    def _encoder(self, lane: Lane, series: Series) -> Encoder:
        if series.structured is not None and series.structured.instead:
            return StructuredEncoder(self._gateway, lane, series, series.structured)
        return RecordEncoder(self._gateway, lane, series)

    async def topics(self, lane_number: int, series_number: int) -> list[str]:
        """The topics that rows may go to, the best first: that of the backlog if it has one, then the series' topic."""
        series = await self._supply.series(series_number)
        backlog = self._kafka.backlog_topic
        if backlog is None or lane_number >= self._supply.live_lane or series.is_of_gateway:
            return [series.topic]
        return [backlog.replace("{topic}", series.topic), series.topic]

    async def look_again(self, aside: Aside, outgoing: dict[Partition, Outgoing]) -> bool:
        """Put off records that were too large for their topic if it takes them by now. Returns whether there are any.

        They go in a later round, together with all that this round has for their partition. So rows keep their order.
        """
        kept: Aside = []
        for row, reason in aside:
            route = self._routes.get((row.lane, row.series)) if reason == TOO_LARGE_FOR_TOPIC else None
            if route is not None:
                now = await self._memory.verdicts.of(self._session.admin, route.partition[0], LOOK_AGAIN_S)
                if now.usable and now.batch_bytes_max > route.topic_bytes_max:
                    outgoing.pop(route.partition, None)
                    continue
                self._memory.too_small[route.partition[0]] = route.topic_bytes_max
            kept.append((row, reason))
        if len(kept) == len(aside):
            return False
        aside[:] = kept
        self._routes.clear()
        self._supply.pass_over()
        return True


def without_aside(rows: list[Row], aside: Aside) -> list[Row]:
    """The rows that are not set aside."""
    if not aside:
        return rows
    places = {(row.lane, row.sequence) for row, _ in aside}
    return [row for row in rows if (row.lane, row.sequence) not in places]


def _first_usable(verdicts: Sequence[TopicVerdict]) -> TopicVerdict:
    """The first verdict that is usable or says "being made"; else the first that waits, else the last."""
    usable = (verdict for verdict in verdicts if verdict.usable or verdict.reason == BEING_MADE)
    return next(usable, None) or next((verdict for verdict in verdicts if verdict.waits), verdicts[-1])
