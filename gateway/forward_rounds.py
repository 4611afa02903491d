"""Rounds: some rows at a time, encoded into batches by partition, sent, and settled once Kafka has them.

A partition that does not answer in time is parked: its rows are passed over until it does, and the others go on.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import structlog
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

from gateway.buffer import Buffer
from gateway.buffer_rows import Lane, Quarantined, Row, Series, spans_of
from gateway.clock_gateway import WallClock
from gateway.forward_memory import Memory
from gateway.forward_supply import Supply
from gateway.intake import FrontDoor
from gateway.kafka_batch import HEADER_BYTES, EncodedBatch
from gateway.kafka_record import RecordEncoder
from gateway.kafka_session import BATCH_BYTES_MAX, USABLE_S, KafkaSession
from gateway.kafka_topics import TopicVerdict
from gateway.redrive import TOO_LARGE_FOR_TOPIC
from gateway.settings import GatewaySettings, KafkaSettings

LINGER_ROWS = 500
"""Fewer rows than this at once are live readings."""
LONE_REFUSALS_MAX = 10
"""So many of a topic's records refused one after the other condemn the topic for a while: finding each by halving
would hold up what comes behind."""
PATIENCE_SHARE = 1 / 3
"""What of its time-out a round is waited for while nothing comes through at all; a slow link has all of it."""
STRAGGLERS_S_MIN = 2.0
STRAGGLERS_FACTOR = 4
"""Once one has, the others have so many times as long as that took, and this at the least."""
STUCK_SHARE = 2
"""After so many time-outs the producer is taken for stuck: an idempotent one retries for ever."""
LEADERS_S = 1.0
"""How often the cluster is asked for the leaders of partitions that have none."""
IDLE_S = 1.0
"""How often rounds that have nothing to send look at what else may have changed."""
CLOCK_POLL_S = 0.5
LOOK_AGAIN_S = 10.0
"""A topic is not taken for too small by a verdict that is older than this."""
TOO_LARGE = "record-too-large"
"""The quarantine's reason for a record above `kafka.record_bytes_max`."""
ROUTES_MAX = 15_000
"""Routes that are remembered: one for each series in each lane, a kilobyte and a half each."""

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

Partition = tuple[str, int]
"""Topic and number."""

log = structlog.get_logger()


class RefusedError(Exception):
    """A broker took a request and refused a record of it: the producer is of no more use for that partition."""

    def __init__(self, error: KafkaError) -> None:
        super().__init__(str(error) or type(error).__name__)
        # A code that aiokafka does not know may also be about the broker: then the next attempt must not be at once.
        self.is_doubtful = isinstance(error, UnknownError)


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the rows of one series in one lane go, and what encodes them."""

    encoder: RecordEncoder
    partition: Partition
    topic_bytes_max: int
    """The largest batch that its topic takes."""


@dataclass(slots=True)
class _Outgoing:
    """What a round has for one partition: batches in order, each with its rows."""

    batches: list[tuple[EncodedBatch, list[Row]]] = field(default_factory=list)
    acknowledged: int = 0
    """How many of them Kafka has."""
    settled: int = 0
    """How many of them the buffer was told of."""


@dataclass(slots=True)
class _Parked:
    """A partition that does not answer: what is under way there, None where it has no leader to send anything to."""

    since_s: float
    task: asyncio.Task[None] | None = None
    out: _Outgoing | None = None


class Rounds:
    """Sends what waits, round by round, for the length of one session."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of the uplink
        self,
        session: KafkaSession,
        buffer: Buffer,
        front_door: FrontDoor,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        memory: Memory,
        holds: Callable[[], bool],
        on_answer: Callable[[], None],
    ) -> None:
        """`holds` tells whether a time for this boot's readings may still be learnt; `on_answer` that Kafka answers."""
        self._session = session
        self._buffer = buffer
        self._front_door = front_door
        self._gateway = gateway
        self._kafka = kafka
        self._memory = memory
        self._holds = holds
        self._on_answer = on_answer
        self._supply = Supply(buffer, kafka)
        self._routes: dict[tuple[int, int], _Route] = {}
        """By lane and series: those whose topic may be written to."""
        self._parked: dict[Partition, _Parked] = {}
        self._routes_due_s = time.monotonic() + USABLE_S
        """When topics are looked at again."""
        self._leaders_due_s = 0.0
        self._patience_s = kafka.request_timeout_s * PATIENCE_SHARE

    async def run(self) -> None:
        """Send until cancelled. Raises RefusedError, KafkaError, TimeoutError, BufferFileError."""
        try:
            while True:
                await self._memory.wait_for_allowance(self._session.link)
                self._buffer.committed.clear()
                if self._supply.follow() or time.monotonic() >= self._routes_due_s:
                    # What is left of the lane before is backlog, and may go to another topic.
                    self._routes.clear()
                    self._routes_due_s = time.monotonic() + USABLE_S
                await self._see_to_parked()
                held = self._buffer.boot_id if self._holds() else None
                live, behind = await self._supply.next(
                    self._memory.round_bytes, self._may_go if self._parked else None, held
                )
                self._memory.state.live_oldest_us = live[0].received_us if live else None
                if live or behind:
                    await self._send(live, behind)
                self._on_answer()
                if not live and not behind and not self._supply.has_more:
                    await self._wait_for_rows(CLOCK_POLL_S if held else IDLE_S)
                elif not behind and len(live) < LINGER_ROWS:
                    # Live: what comes in meanwhile shares the next request. A backlog does not wait.
                    await asyncio.sleep(self._kafka.linger_ms / 1000)
        finally:
            await _end(parked.task for parked in self._parked.values() if parked.task is not None)
            self._memory.state.parked = {}
            self._memory.state.live_oldest_us = None

    async def _wait_for_rows(self, seconds: float) -> None:
        """Wait for a commit, for a parked partition that answers, or for the time to look again."""
        waited = [parked.task for parked in self._parked.values() if parked.task is not None]
        committed = asyncio.create_task(self._buffer.committed.wait(), name="committed")
        try:
            await asyncio.wait((committed, *waited), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            committed.cancel()

    # -- a round --------------------------------------------------------------------------------

    async def _send(self, live: Sequence[Row], behind: Sequence[Row]) -> None:
        """Have all of them in Kafka or in the quarantine, but for those of partitions that do not answer."""
        outgoing: dict[Partition, _Outgoing] = {}
        aside: list[tuple[Row, str]] = []
        for rows in (live, behind):
            await self._encode(rows, outgoing, aside)
        is_cut = self._cut(outgoing) | await self._look_again_at_topics(aside)
        errors = await self._deliver(outgoing)
        if aside or errors or is_cut or self._parked:
            for out in outgoing.values():
                self._settle_acknowledged(out)
        else:
            # All of it at once: rows in their order are few spans.
            for rows in (live, behind):
                self._settle(rows)
        if is_cut:
            self._supply.come_again()
        for partition, error in errors.items():
            await self._bear(partition, outgoing[partition], error)
        # Last: what is sent again after an error is set aside once.
        await self._set_aside(aside)

    async def _look_again_at_topics(self, aside: list[tuple[Row, str]]) -> bool:
        """See whether topics that are too small for a record were mended meanwhile: it goes in a later round then."""
        kept: list[tuple[Row, str]] = []
        for row, reason in aside:
            route = self._routes.get((row.lane, row.series)) if reason == TOO_LARGE_FOR_TOPIC else None
            if route is not None:
                now = await self._memory.verdicts.of(self._session.admin, route.partition[0], LOOK_AGAIN_S)
                if now.usable and now.batch_bytes_max > route.topic_bytes_max:
                    continue
            kept.append((row, reason))
        if len(kept) == len(aside):
            return False
        aside[:] = kept
        self._routes.clear()
        self._supply.pass_over()
        return True

    def _cut(self, outgoing: dict[Partition, _Outgoing]) -> bool:
        """Take out of a round what cannot go in it; whether some of that may go in the next."""
        is_cut = False
        for partition, out in list(outgoing.items()):
            if partition in self._parked:
                del outgoing[partition]
                self._supply.pass_over()
            elif not self._session.has_leader(*partition):
                # aiokafka would ask for its leader in a loop.
                del outgoing[partition]
                self._park(partition, _Parked(time.monotonic()))
            elif self._memory.is_suspect(partition) and len(out.batches) > 1:
                # Something in it is refused: it is looked for in small batches, and holds up nobody else.
                del out.batches[1:]
                self._supply.pass_over()
                is_cut = True
        return is_cut

    async def _deliver(self, outgoing: dict[Partition, _Outgoing]) -> dict[Partition, BaseException]:
        """Send, and wait for the answers; give the errors. Partitions that do not answer are parked, if others do."""
        if not outgoing:
            return {}
        started_s = time.monotonic()
        tasks = {
            partition: asyncio.create_task(self._send_partition(partition, out), name=f"send {partition}")
            for partition, out in outgoing.items()
        }
        try:
            pending = await self._wait_for_answers(set(tasks.values()))
        except asyncio.CancelledError:
            await _end(tasks.values())
            raise
        wire = sum(batch.wire_bytes for out in outgoing.values() for batch, _ in out.batches)
        seconds = time.monotonic() - started_s
        if len(pending) == len(tasks):
            await _end(tasks.values())
            self._memory.rate.timed_out(wire)
            raise TimeoutError(f"no answer from Kafka within {seconds:.0f} s")
        errors: dict[Partition, BaseException] = {}
        for partition, task in tasks.items():
            if task in pending:
                self._park(partition, _Parked(started_s, task, outgoing[partition]))
            elif (error := _error_of(task)) is not None:
                errors[partition] = error
        if not pending and not errors:
            raw = sum(batch.bytes for out in outgoing.values() for batch, _ in out.batches)
            self._memory.learn(raw, wire, seconds)
        return errors

    async def _wait_for_answers(self, tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Wait as long as there is hope; give those that have not answered."""
        started_s = time.monotonic()
        link, left_s = self._session.link, self._kafka.request_timeout_s
        done: set[asyncio.Task[None]] = set()
        while not done and left_s > 0:
            carried = link.carried_bytes()
            done, _ = await asyncio.wait(
                tasks, timeout=min(left_s, self._patience_s), return_when=asyncio.FIRST_COMPLETED
            )
            left_s -= self._patience_s
            if not done and link.carried_bytes() <= carried:
                break
        pending = tasks - done
        if done and pending:
            _, pending = await asyncio.wait(
                pending, timeout=max(STRAGGLERS_S_MIN, STRAGGLERS_FACTOR * (time.monotonic() - started_s))
            )
        return pending

    async def _send_partition(self, partition: Partition, out: _Outgoing) -> None:
        """Send one partition's batches in order: each goes out when the one before it is acknowledged."""
        for batch, _ in out.batches:
            offset = await self._session.send(*partition, batch)
            self._memory.acknowledged(partition, offset, len(batch.records))
            out.acknowledged += 1

    async def _encode(
        self, rows: Sequence[Row], outgoing: dict[Partition, _Outgoing], aside: list[tuple[Row, str]]
    ) -> None:
        """Add rows to the batches of their partitions; those that cannot be sent to `aside`, with the reason.

        Within a batch a device's rows stand together, in their order: like compresses like.
        """
        by_key: dict[Partition, dict[bytes, list[tuple[_Route, list[Row]]]]] = defaultdict(lambda: defaultdict(list))
        for (lane, series), run in groupby(rows, attrgetter("lane", "series")):
            route = self._routes.get((lane, series)) or await self._route(lane, series)
            if isinstance(route, TopicVerdict):
                aside += [(row, route.reason) for row in run]
                continue
            runs = by_key[route.partition][route.encoder.key]
            if runs and runs[-1][0] is route:
                runs[-1][1].extend(run)
            else:
                runs.append((route, list(run)))
        clocks: dict[str, WallClock] = {}
        for partition, keys in by_key.items():
            out = outgoing.setdefault(partition, _Outgoing())
            rows_max = self._memory.rows_max(partition)
            for route, of_route in (each for runs in keys.values() for each in runs):
                boot_id = route.encoder.boot_id
                clock = clocks.get(boot_id)
                if clock is None:
                    clock = clocks[boot_id] = await self._buffer.boot_clock(boot_id)
                self._encode_run(route, of_route, clock, rows_max, out, aside)
            if not out.batches:
                del outgoing[partition]

    def _encode_run(  # noqa: PLR0913, PLR0917 - the inner loop
        self,
        route: _Route,
        run: list[Row],
        clock: WallClock,
        rows_max: int,
        out: _Outgoing,
        aside: list[tuple[Row, str]],
    ) -> None:
        encode, topic_bytes_max = route.encoder.encode, route.topic_bytes_max
        record_bytes_max, bytes_max = self._kafka.record_bytes_max, min(BATCH_BYTES_MAX, topic_bytes_max)
        batch, batch_rows = out.batches[-1] if out.batches else self._begin_batch(out)
        records = batch.records
        for row in run:
            record = encode(row, clock, len(records))
            size = len(record)
            if size > record_bytes_max or size + HEADER_BYTES > topic_bytes_max:
                # An oversized record would spoil the producer for its partition: it is never handed over.
                aside.append((row, TOO_LARGE if size > record_bytes_max else TOO_LARGE_FOR_TOPIC))
                continue
            if records and (batch.bytes + size > bytes_max or len(records) >= rows_max):
                batch, batch_rows = self._begin_batch(out)
                records = batch.records
                record = encode(row, clock, 0)
            batch.add(record)
            batch_rows.append(row)
        if not records:
            out.batches.pop()

    def _begin_batch(self, out: _Outgoing) -> tuple[EncodedBatch, list[Row]]:
        begun: tuple[EncodedBatch, list[Row]] = EncodedBatch(self._kafka.compression), []
        out.batches.append(begun)
        return begun

    async def _route(self, lane_number: int, series_number: int) -> _Route | TopicVerdict:
        """Where the rows of a series go; the verdict on its topic where that may not be written to."""
        series = await self._supply.series(series_number)
        topic = series.topic
        if lane_number != self._supply.live_lane and self._kafka.backlog_topic is not None and not series.is_of_gateway:
            topic = self._kafka.backlog_topic.replace("{topic}", topic)
        verdict = await self._memory.verdicts.of(self._session.admin, topic)
        if not verdict.usable:
            return verdict
        encoder = RecordEncoder(self._gateway, await self._supply.lane(lane_number), series)
        partition = topic, await self._session.partition(topic, encoder.key)
        if len(self._routes) >= ROUTES_MAX:
            # Of lanes that were sent: nobody asks for those again.
            lanes = (lane_number, self._supply.live_lane)
            self._routes = {of: route for of, route in self._routes.items() if of[0] in lanes}
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
        route = self._routes[lane_number, series_number] = _Route(encoder, partition, verdict.batch_bytes_max)
        return route

    # -- what became of it ----------------------------------------------------------------------

    def _settle(self, rows: Sequence[Row]) -> None:
        """Kafka or the quarantine has these rows, which are in order: the buffer may delete them."""
        if rows:
            self._buffer.confirm(self._supply.buffer_id, spans_of(rows), self._memory.take_marks())
            self._memory.state.sent += len(rows)

    def _settle_acknowledged(self, out: _Outgoing) -> None:
        rows = [row for _, batch_rows in out.batches[out.settled : out.acknowledged] for row in batch_rows]
        out.settled = out.acknowledged
        self._settle(sorted(rows, key=attrgetter("lane", "sequence")))

    async def _bear(self, partition: Partition, out: _Outgoing, error: BaseException) -> None:
        """Halve what a partition is sent at a time until a refused record stands alone, then set it aside.

        Raises RefusedError, and whatever is no refusal: what the producer believes of the partition is void.
        """
        if not isinstance(error, REFUSALS):
            raise error
        _, rows = out.batches[out.acknowledged]
        topic = partition[0]
        if isinstance(error, TopicAuthorizationFailedError):
            self._memory.verdicts.condemn(TopicVerdict(topic, _reason(error), str(error)))
        elif len(rows) > 1:
            self._memory.suspect(partition, len(rows) // 2)
        else:
            await self._set_aside([(rows[0], _reason(error))])
            self._settle(rows)
            if self._memory.count_lone_refusal(topic) >= LONE_REFUSALS_MAX:
                self._memory.verdicts.condemn(TopicVerdict(topic, _reason(error), str(error)))
        log.info("kafka refused a record: the producer is rebuilt", topic=topic, error=str(error), rows=len(rows))
        raise RefusedError(error)

    async def _set_aside(self, rows: Sequence[tuple[Row, str]]) -> None:
        """Move rows into the quarantine, each with its reason, in one commit."""
        reports = []
        said: Counter[tuple[str, str]] = Counter()
        for row, reason in rows:
            series = await self._supply.series(row.series)
            said[reason, series.topic] += 1
            # A report that cannot be sent is not reported again: what it reports is in the quarantine already.
            if series.topic != self._kafka.quarantine_topic:
                lane = await self._supply.lane(row.lane)
                reports.append(self._front_door.quarantine_entry(_quarantined(row, series, lane, reason)))
        if rows:
            refused = sorted((row for row, _ in rows), key=attrgetter("lane", "sequence"))
            await self._buffer.quarantine(self._supply.buffer_id, reports, refused)
        for (reason, topic), count in said.items():
            log.warning("readings quarantined", reason=reason, topic=topic, count=count)

    # -- partitions that do not answer ----------------------------------------------------------

    def _park(self, partition: Partition, parked: _Parked) -> None:
        self._parked[partition] = parked
        self._supply.pass_over()
        topic, number = partition
        why = "has no leader" if parked.task is None else "does not answer"
        self._memory.state.parked[f"{topic}/{number}"] = why
        log.warning(
            "a partition takes nothing: its readings wait, others go on", topic=topic, partition=number, why=why
        )

    def _may_go(self, row: Row) -> bool:
        route = self._routes.get((row.lane, row.series))
        return route is None or route.partition not in self._parked

    async def _see_to_parked(self) -> None:
        """Let partitions go on that answer again. Raises what became of what was under way there."""
        if not self._parked:
            return
        now_s = time.monotonic()
        if now_s >= self._leaders_due_s and any(parked.task is None for parked in self._parked.values()):
            await self._session.look_for_leaders()
            self._leaders_due_s = time.monotonic() + LEADERS_S
        for partition, parked in list(self._parked.items()):
            task, out = parked.task, parked.out
            if task is None or out is None:
                if not self._session.has_leader(*partition):
                    continue
            elif task.done():
                self._settle_acknowledged(out)
            elif now_s - parked.since_s > STUCK_SHARE * self._kafka.request_timeout_s:
                raise TimeoutError(f"{partition[0]}/{partition[1]} has not answered for {now_s - parked.since_s:.0f} s")
            else:
                continue
            del self._parked[partition]
            del self._memory.state.parked[f"{partition[0]}/{partition[1]}"]
            log.info("a partition answers again", topic=partition[0], partition=partition[1])
            self._supply.come_again()
            if self._parked:
                self._supply.pass_over()
            if task is not None and out is not None and (error := _error_of(task)) is not None:
                await self._bear(partition, out, error)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return TimeoutError("the Kafka client gave up a request") if task.cancelled() else task.exception()


def _reason(error: KafkaError) -> str:
    """The quarantine's reason for what a broker refused."""
    return f"broker-refused: {type(error).__name__}"


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
