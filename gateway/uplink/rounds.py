"""Rounds: some rows at a time, encoded into batches by partition, sent, and settled once Kafka has them.

A partition that does not answer in time is parked: its rows are passed over until it does, and the others go on.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

import structlog
from aiokafka.errors import (
    BrokerResponseError,
    CorruptRecordException,
    InvalidTimestampError,
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
    kafka_errors,
)

from gateway.buffer.buffer import Buffer
from gateway.buffer.quarantine import TOPIC_FORBIDDEN
from gateway.buffer.rows import Doubt, Lane, Quarantined, Row, Series, spans_of
from gateway.intake.front_door import FrontDoor
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.session import KafkaSession
from gateway.kafka.topics import TopicVerdict, forbidden_hint
from gateway.reading import BufferFileError
from gateway.settings import GatewaySettings, KafkaSettings
from gateway.uplink.batches import Aside, Batcher, Outgoing
from gateway.uplink.link_rate import Passage
from gateway.uplink.memory import NO_PARTITION, Memory, Partition
from gateway.uplink.redrive import TOPIC_REFUSING
from gateway.uplink.supply import Supply

LINGER_ROWS = 500
"""Fewer rows than this at once are live readings."""
METERED_LINGER_S = 1.0
"""How long live readings wait for company on a metered link: a request for each would be mostly headers."""
LONE_REFUSALS_MAX = 10
"""So many of a topic's records refused one after the other condemn the topic for a while: finding each by halving
would hold up what comes behind."""
PATIENCE_SHARE = 1 / 3
"""What of its time-out a round is waited for while nothing comes through at all; a slow link has all of it, and so has
a broker that has everything and does not answer yet."""
LOOK_SHARE = 1 / 60
"""How often, as a share of the time-out, is looked how far a round has come."""
STRAGGLERS_S_MIN = 2.0
STRAGGLERS_FACTOR = 4
"""Once one has, the others have so many times as long as that took, and this at the least."""
STUCK_FACTOR = 2
"""After so many time-outs the producer is taken for stuck: an idempotent one retries for ever."""
LEADERS_S = 1.0
"""How often the cluster is asked for the leaders of partitions that have none."""
GONE_S = 10.0
"""How often topics with such a partition are looked at: somebody may have deleted one, or made it anew."""
TOPIC_S_MAX = 30.0
"""How long a topic that cannot be created or judged just now is left alone at the most."""
IDLE_S = 1.0
"""How often rounds that have nothing to send look at what else may have changed."""
CLOCK_POLL_S = 0.5
REFUSED_READINGS = "readings quarantined"
REFUSED_EVENTS = "the gateway's own events quarantined"
REFUSED_REPORTS = "reports of what is quarantined cannot be sent, and are dropped: what they report stays on this box"
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class NewSession:
    """Why a session ends and the next begins at once: for one, because some partition needs a new producer."""

    reason: str
    is_refusal: bool = False
    """Whether a broker took a request of a round and refused a record of it."""


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc] # aiokafka has no types
    """INVALID_RECORD of Kafka's protocol, which aiokafka 0.14 takes for an UnknownError, as much that is no refusal."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The broker takes a record of this batch for invalid"


kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)


# What a broker says of a record, or of a topic, rather than of itself.
REFUSALS = (
    CorruptRecordException,
    InvalidRecordError,
    InvalidTimestampError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
)


@dataclass(slots=True)
class _Parked:
    """A partition that does not answer: what is under way there, None where it has no leader to send anything to."""

    since_s: float
    task: asyncio.Task[None] | None = None
    out: Outgoing | None = None


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
        self._kafka = kafka
        self._memory = memory
        self._holds = holds
        self._on_answer = on_answer
        self._new_clocks = front_door.new_clocks
        self._checks = front_door.checks
        self._supply = Supply(buffer, kafka, self._under_way, self._new_clocks)
        self._batcher = Batcher(session, buffer, self._supply, gateway, kafka, memory, front_door.clocks)
        self._parked: dict[Partition, _Parked] = {}
        self._leaders: asyncio.Task[None] | None = None
        self._leaders_due_s = 0.0
        self._looked_at_s: dict[str, float] = {}
        """When a topic with a partition without a leader was looked at last."""
        self._gone: set[Partition] = set()
        """Partitions that were parked and are there no longer: their topic was deleted, or made anew."""
        self._linger_s = max(kafka.linger_ms / 1000, METERED_LINGER_S if memory.is_metered else 0.0)
        self._patience_s = kafka.request_timeout_s * PATIENCE_SHARE

    async def run(self) -> NewSession:
        """Send until a new session is to go on. Raises KafkaError, TimeoutError, BufferFileError."""
        try:
            while True:
                await self._memory.wait_for_allowance(self._session.link)
                self._buffer.committed.clear()
                self._batcher.follow()
                if (new_session := await self._see_to_parked()) is not None:
                    return new_session
                self._look_for_new_clocks()
                is_held = self._holds()
                live, behind = await self._supply.next(
                    self._memory.round_bytes, self._may_go if self._parked else None, is_held
                )
                self._tell_live(live)
                if live or behind:
                    if (new_session := await self._send(live, behind)) is not None:
                        return new_session
                elif not self._parked:
                    self._memory.nothing_waits()
                    self._on_answer()
                if not live and not behind and not self._supply.has_more:
                    await self._wait_for_rows(is_held=is_held)
                elif not behind and len(live) < LINGER_ROWS:
                    # Live: what comes in meanwhile shares the next request. A backlog does not wait.
                    self._memory.state.live_oldest_us = None
                    await asyncio.sleep(self._linger_s)
        finally:
            parked = list(self._parked.values())
            await _end([task for task in (self._leaders, *(each.task for each in parked)) if task is not None])
            for partition, each in self._parked.items():
                if each.out is not None:
                    self._let_go(partition, each.out)
            # Last: what was acknowledged is settled before what was under way may be dropped.
            await self._supply.close()
            self._memory.state.live_oldest_us = None

    def _look_for_new_clocks(self) -> None:
        """Let readings go that waited for their sensor's clock, as far as it is known or not waited for any longer."""
        waiting = self._new_clocks.waiting
        if waiting and self._new_clocks.look():
            self._supply.come_again()
            if self._parked:
                self._supply.pass_over()
        self._memory.state.new_clocks = len(waiting)

    def _tell_live(self, live: Sequence[Row]) -> None:
        # With `oldest-first` these may be of another lane, and another boot.
        is_live = bool(live) and live[0].lane == self._supply.live_lane
        if not is_live:
            self._memory.state.live_oldest_us = None
            return
        # What has no time yet may have waited for its sensor's clock: that was not the link's doing.
        timed = next((row for row in live if row.event_us is not None or row.tick_ms is None), None)
        self._memory.state.live_oldest_us = (
            live[0].received_us + self._new_clocks.hold_us if timed is None else timed.received_us
        )

    async def _wait_for_rows(self, *, is_held: bool) -> None:
        """Wait for a commit, for a parked partition that answers, or for the time to look again."""
        if is_held:
            # What is committed meanwhile has to wait as well: each look would read all that does, for nothing.
            await asyncio.sleep(CLOCK_POLL_S)
            return
        waited = [parked.task for parked in self._parked.values() if parked.task is not None]
        committed = asyncio.create_task(self._buffer.committed.wait(), name="committed")
        try:
            await asyncio.wait((committed, *waited), timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            committed.cancel()

    # -- a round --------------------------------------------------------------------------------

    async def _send(self, live: Sequence[Row], behind: Sequence[Row]) -> NewSession | None:
        """Have all of them in Kafka or in the quarantine, but for those of partitions that do not answer.

        Raises what Kafka answers where all partitions fail, and none refuses.
        """
        outgoing: dict[Partition, Outgoing] = {}
        aside: Aside = []
        for rows in (live, behind):
            await self._batcher.encode(rows, outgoing, aside)
        is_cut = self._cut(outgoing) | await self._batcher.look_again(aside, outgoing)
        try:
            errors = await self._deliver(outgoing)
        except BaseException:
            for partition, out in outgoing.items():
                self._let_go(partition, out)
            raise
        if aside or errors or is_cut or self._parked:
            for out in outgoing.values():
                self._settle_acknowledged(out)
        else:
            # All of it at once: rows in their order are few spans.
            for rows in (live, behind):
                self._settle(rows)
        if is_cut:
            self._supply.come_again()
        troubles = [await self._bear(partition, outgoing[partition], error) for partition, error in errors.items()]
        if troubles:
            if len(errors) == len(outgoing) and not any(trouble.is_refusal for trouble in troubles):
                raise next(iter(errors.values()))
            return troubles[0]
        # Last: what is sent again after an error is set aside once.
        await self._set_aside(aside)
        return None

    def _cut(self, outgoing: dict[Partition, Outgoing]) -> bool:
        """Take out of a round what cannot go in it; whether some of that may go in the next."""
        is_cut = False
        now_s = time.monotonic()
        for partition, out in list(outgoing.items()):
            if partition in self._parked:
                del outgoing[partition]
                self._supply.pass_over()
            elif partition[1] == NO_PARTITION:
                del outgoing[partition]
                if now_s >= self._memory.rests_until_s(partition):
                    self._memory.trouble(partition, pauses=True)
                self._park(partition, _Parked(now_s), self._why_waits(partition[0]))
            elif not self._session.has_leader(*partition):
                # aiokafka would ask for its leader in a loop.
                del outgoing[partition]
                self._park(partition, _Parked(now_s), "has no leader")
            elif now_s < self._memory.rests_until_s(partition):
                del outgoing[partition]
                self._park(partition, _Parked(now_s), self._memory.why_parked(partition))
            elif len(out.batches) > 1 and (self._memory.is_suspect(partition) or self._memory.is_troubled(partition)):
                # It is tried with little, so that it holds up nobody else.
                del out.batches[1:]
                self._supply.pass_over()
                is_cut = True
        return is_cut

    async def _deliver(self, outgoing: dict[Partition, Outgoing]) -> dict[Partition, BaseException]:
        """Send, and wait for the answers; give the errors. Partitions that do not answer are parked, if others do."""
        started_s = time.monotonic()
        tasks = {
            partition: asyncio.create_task(self._send_partition(partition, out), name=f"send {partition}")
            for partition, out in outgoing.items()
        }
        for partition in [each for each in tasks if self._memory.is_troubled(each)]:
            # Nobody waits for it.
            self._park(partition, _Parked(started_s, tasks.pop(partition), outgoing[partition]), None)
        if not tasks:
            return {}
        batches = [batch for partition in tasks for batch, _ in outgoing[partition].batches]
        try:
            pending, passage = await self._wait_for_answers(tasks, batches)
        except asyncio.CancelledError:
            await _end(tasks.values())
            raise
        seconds = time.monotonic() - started_s
        leaderless = [each for each in tasks if tasks[each] in pending and not self._session.has_leader(*each)]
        if len(pending) == len(tasks) > len(leaderless):
            await _end(tasks.values())
            self._memory.learn(batches, None)
            for partition in tasks:
                self._memory.trouble(partition, pauses=False)
            raise TimeoutError(f"no answer from Kafka within {seconds:.0f} s")
        for partition in [each for each, task in tasks.items() if task in pending]:
            why = "has no leader" if partition in leaderless else "does not answer"
            self._park(partition, _Parked(started_s, tasks.pop(partition), outgoing[partition]), why)
        errors = {partition: error for partition, task in tasks.items() if (error := _error_of(task)) is not None}
        if not pending and not errors:
            self._memory.learn(batches, passage)
        if len(errors) < len(tasks):
            self._on_answer()
        return errors

    async def _wait_for_answers(
        self, tasks: Mapping[Partition, asyncio.Task[None]], batches: Sequence[EncodedBatch]
    ) -> tuple[set[asyncio.Task[None]], Passage]:
        """Wait as long as there is hope; give those that have not answered, and how the bytes came through."""
        link, timeout_s = self._session.link, self._kafka.request_timeout_s
        started_s = now_s = time.monotonic()
        passage = Passage(now_s, link.carried_bytes())
        pending, until_s = set(tasks.values()), math.inf
        while pending and now_s < until_s:
            _, pending = await asyncio.wait(
                pending,
                timeout=min(timeout_s * LOOK_SHARE, until_s - now_s),
                return_when=asyncio.FIRST_COMPLETED if until_s == math.inf else asyncio.ALL_COMPLETED,
            )
            now_s = time.monotonic()
            passage.look(now_s, sum(batch.wire_bytes or 0 for batch in batches), link.carried_bytes())
            if len(pending) < len(tasks):
                until_s = min(until_s, now_s + max(STRAGGLERS_S_MIN, STRAGGLERS_FACTOR * (now_s - started_s)))
            elif now_s - passage.handed_s >= timeout_s or not any(self._session.has_leader(*each) for each in tasks):
                # They had leaders when they were sent something: others do not wait for what the client tries now.
                break
            elif now_s - passage.moved_s >= self._patience_s and not (passage.is_carried and link.peers()):
                # What was carried is answered if its connection lives: TCP itself ends one whose way is gone.
                break
        return pending, passage

    async def _send_partition(self, partition: Partition, out: Outgoing) -> None:
        """Send one partition's batches in order: each goes out when the one before it is acknowledged."""
        for batch, rows in out.batches:
            offset = await self._session.send(*partition, batch)
            self._memory.acknowledged(partition, offset, len(batch.records))
            self._memory.answered(partition, rows)
            out.acknowledged += 1
            if self._checks.waiting:
                # Which ended well: that a lane cannot be looked up is no trouble of the partition's.
                with suppress(BufferFileError):
                    lanes = [await self._supply.lane(row.lane) for row in rows]
                    self._checks.acknowledged(partition, offset, rows, lanes)

    # -- what became of it ----------------------------------------------------------------------

    def _settle(self, rows: Sequence[Row]) -> None:
        """Kafka or the quarantine has these rows, which are in order: the buffer may delete them."""
        if rows:
            self._buffer.confirm(self._supply.buffer_id, spans_of(rows), self._memory.take_marks())
            self._memory.state.sent += len(rows)

    def _settle_acknowledged(self, out: Outgoing) -> None:
        rows = [row for _, batch_rows in out.batches[out.settled : out.acknowledged] for row in batch_rows]
        out.settled = out.acknowledged
        self._settle(sorted(rows, key=attrgetter("lane", "sequence")))

    def _let_go(self, partition: Partition, out: Outgoing) -> None:
        """Nothing more will be heard of what is under way."""
        self._settle_acknowledged(out)
        if out.acknowledged < len(out.batches):
            self._memory.sent_without_answer(partition, out.batches[out.acknowledged][1])

    async def _bear(self, partition: Partition, out: Outgoing, error: BaseException) -> NewSession:
        """Find what a partition refuses: halve what it is sent at a time until the record stands alone.

        Gives what ends the session: what the producer believes of the partition is void.
        """
        topic = partition[0]
        if not isinstance(error, REFUSALS):
            self._let_go(partition, out)
            self._memory.trouble(partition, pauses=True)
            self._memory.tell_parked(partition, f"answered with {_named(error)}")
            return NewSession(_named(error))
        _, rows = out.batches[out.acknowledged]
        if isinstance(error, TopicAuthorizationFailedError):
            self._memory.condemn(TopicVerdict(topic, TOPIC_FORBIDDEN, forbidden_hint(topic, self._kafka)))
        elif len(rows) > 1 or (
            # Its topic may take less than was read of it: the next session reads that again, and says so of the record.
            isinstance(error, MessageSizeTooLargeError) and not self._memory.is_suspect(partition)
        ):
            self._memory.suspect(partition, len(rows))
        else:
            await self._set_aside([(rows[0], f"broker-refused: {type(error).__name__}")])
            if self._memory.count_lone_refusal(partition) >= LONE_REFUSALS_MAX:
                self._memory.condemn(TopicVerdict(topic, TOPIC_REFUSING, _named(error)))
        log.debug("refused", topic=topic, error=_named(error), rows=len(rows))
        return NewSession(_named(error), is_refusal=True)

    async def _set_aside(self, rows: Sequence[tuple[Row, str]]) -> None:
        """Move rows into the quarantine, each with its reason, in one commit."""
        reports = []
        said: Counter[tuple[str, str, str]] = Counter()
        for row, reason in rows:
            series = await self._supply.series(row.series)
            # A report that cannot be sent is not reported again: what it reports is in the quarantine already.
            is_report = series.topic == self._kafka.quarantine_topic
            what = REFUSED_REPORTS if is_report else REFUSED_EVENTS if series.is_of_gateway else REFUSED_READINGS
            said[what, reason, series.topic] += 1
            if not is_report:
                lane = await self._supply.lane(row.lane)
                doubt = row.doubt
                if not doubt and self._memory.may_have(await self._batcher.topics(row.lane, row.series), row):
                    # Taken in again it gets another id, and would be in Kafka twice with nothing to tell it by.
                    doubt = Doubt.REDELIVERED
                reports.append(self._front_door.quarantine_entry(_quarantined(row, series, lane, reason, doubt)))
        if rows:
            refused = sorted((row for row, _ in rows), key=attrgetter("lane", "sequence"))
            await self._buffer.quarantine(self._supply.buffer_id, reports, refused)
        for (what, reason, topic), count in said.items():
            log.warning(what, reason=reason, topic=topic, count=count)

    # -- partitions that take nothing at present ------------------------------------------------

    def _park(self, partition: Partition, parked: _Parked, why: str | None) -> None:
        """Pass over its rows; `why` is None where that is not known to last."""
        self._parked[partition] = parked
        self._supply.pass_over()
        if why is not None:
            self._memory.tell_parked(partition, why)

    def _may_go(self, row: Row) -> bool:
        return self._batcher.partition_of(row) not in self._parked

    async def _see_to_parked(self) -> NewSession | None:
        """Let partitions go on that may be tried again, unless what was under way there ends the session."""
        now_s = time.monotonic()
        self._look_for_leaders(now_s)
        troubles: list[NewSession] = []
        ready = [partition for partition, parked in self._parked.items() if self._is_ready(partition, parked, now_s)]
        for partition in ready:
            parked = self._parked[partition]
            if parked.task is None or parked.out is None:
                del self._parked[partition]
            elif parked.task.done():
                del self._parked[partition]
                self._settle_acknowledged(parked.out)
                if (error := _error_of(parked.task)) is not None:
                    troubles.append(await self._bear(partition, parked.out, error))
            else:
                # The end of the session ends what is under way.
                troubles.append(self._give_up(partition))
        # One that is there again may lose its leader again.
        self._gone.difference_update(ready)
        if troubles:
            for partition, parked in self._parked.items():
                if parked.task is not None and partition not in ready:
                    self._memory.trouble(partition, pauses=False)
            return troubles[0]
        if ready:
            self._supply.come_again()
            if self._parked:
                self._supply.pass_over()
        return None

    def _is_ready(self, partition: Partition, parked: _Parked, now_s: float) -> bool:
        """Whether it is known what is to become of a parked partition."""
        topic, number = partition
        if partition in self._gone:
            self._batcher.forget(topic)
            return True
        if number == NO_PARTITION:
            if now_s < min(self._memory.rests_until_s(partition), parked.since_s + TOPIC_S_MAX):
                return False
            self._batcher.forget(topic)
            return True
        if parked.task is None:
            return now_s >= self._memory.rests_until_s(partition) and self._session.has_leader(*partition)
        if parked.task.done() or now_s - parked.since_s > STUCK_FACTOR * self._kafka.request_timeout_s:
            return True
        if now_s - parked.since_s > self._patience_s:
            self._memory.tell_parked(partition, self._memory.why_parked(partition))
        return False

    def _give_up(self, partition: Partition) -> NewSession:
        """What is under way to a partition will not be answered; the producer would retry it for ever."""
        topic, number = partition
        if partition in self._gone:
            return NewSession(f"{topic} is another topic now, or none")
        # Perhaps it is the producer's fault, whatever the broker says.
        self._memory.trouble(partition, pauses=True)
        return NewSession(f"{topic}/{number} does not answer")

    def _look_for_leaders(self, now_s: float) -> None:
        """Have the cluster asked, beside the rounds, who leads partitions without a leader."""
        leaderless = [each for each in self._parked if each[1] != NO_PARTITION and not self._session.has_leader(*each)]
        if leaderless and now_s >= self._leaders_due_s and (self._leaders is None or self._leaders.done()):
            self._leaders_due_s = now_s + LEADERS_S
            self._leaders = asyncio.create_task(self._find_leaders(leaderless), name="leaders")

    async def _find_leaders(self, leaderless: Sequence[Partition]) -> None:
        await self._session.look_for_leaders()
        now_s = time.monotonic()
        due = {topic for topic, _ in leaderless if now_s - self._looked_at_s.get(topic, float("-inf")) >= GONE_S}
        if not due:
            return
        # Those that have their leaders again are looked at anew next time.
        topics = {topic for topic, _ in leaderless}
        self._looked_at_s = {topic: at_s for topic, at_s in self._looked_at_s.items() if topic in topics}
        self._looked_at_s |= dict.fromkeys(due, now_s)
        with suppress(KafkaError, TimeoutError):
            verdicts = await self._memory.verdicts.of_all(self._session.admin, sorted(due), GONE_S)
            self._gone |= {
                (topic, number)
                for topic, number in leaderless
                if topic in due and not verdicts[topic].waits
                if not (verdicts[topic].usable and self._session.is_there(topic, number))
            }

    def _under_way(self) -> Iterable[Row]:
        """What was sent to partitions that do not answer."""
        for parked in self._parked.values():
            for _, rows in () if parked.out is None else parked.out.batches[parked.out.settled :]:
                yield from rows

    def _why_waits(self, topic: str) -> str:
        verdict = self._memory.verdicts.refused.get(topic)
        return "is not there yet" if verdict is None else verdict.hint or verdict.reason


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return TimeoutError("the Kafka client gave up a request") if task.cancelled() else task.exception()


def _named(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _quarantined(row: Row, series: Series, lane: Lane, reason: str, doubt: int) -> Quarantined:
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
        doubt=doubt,
        device_time_us=row.device_time_us,
    )
