"""Finds records in a batch that Kafka refuses, and sets them aside in the quarantine."""

import math
import time
from collections import Counter
from collections.abc import Sequence

import structlog
from aiokafka.errors import (
    BrokerResponseError,
    CorruptRecordException,
    InvalidTimestampError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
    kafka_errors,
)
from msgspec.structs import replace

from gateway.buffer.buffer import Buffer
from gateway.buffer.quarantine import TOPIC_FORBIDDEN
from gateway.buffer.rows import Lane, Quarantined, Row, Series
from gateway.host.long_work import LongWork
from gateway.intake.front_door import FrontDoor
from gateway.kafka.topics import BEYOND_ALL, TopicVerdict, forbidden_hint
from gateway.reading import BufferFileError, Doubt
from gateway.settings import KafkaSettings
from gateway.uplink.batches import Aside, Batcher, Outgoing
from gateway.uplink.memory import Memory
from gateway.uplink.redrive import TOPIC_REFUSING
from gateway.uplink.supply import Supply

LONE_REFUSALS_MAX = 10
"""Number of a topic's records refused one after the other that condemns the topic for a while. To find each of them by
halving would hold up the rows behind them."""
AGAIN_S = 1.0
AGAIN_S_MAX = 10.0
"""Seconds until rows are tried again that could not be moved, as the disk fails: at first, and at most. Each wait is
twice as long as the one before, as everything that waits is read again."""
KNOWN_MAX = 1_000
"""Refused rows that are remembered while the disk fails, so that they are not sent again and again. A topic that
refuses more is left alone for a while."""
MOVED_AT_ONCE = 250
"""Rows that are moved in one commit. Sensors' readings wait for it."""
REFUSED_READINGS = "readings quarantined"
REFUSED_EVENTS = "the gateway's own events quarantined"
REFUSED_REPORTS = "reports of what is quarantined cannot be sent, and are dropped: what they report stays on this box"
NOT_MOVED = "what Kafka refuses cannot be moved into the quarantine, and stays where it is: it is tried again"
log = structlog.get_logger()


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc] # aiokafka has no types
    """INVALID_RECORD of Kafka's protocol. aiokafka 0.14 gives UnknownError for it, as for much that is no refusal."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The broker takes a record of this batch for invalid"


kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)


# Errors that speak of a record or a topic, and not of the broker.
REFUSALS = (
    CorruptRecordException,
    InvalidRecordError,
    InvalidTimestampError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
)


class RefusedRecords:
    """Finds the refused records of one session, and moves them into the quarantine."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of the uplink
        self,
        buffer: Buffer,
        front_door: FrontDoor,
        kafka: KafkaSettings,
        memory: Memory,
        supply: Supply,
        batcher: Batcher,
    ) -> None:
        self._buffer = buffer
        self._front_door = front_door
        self._kafka = kafka
        self._memory = memory
        self._supply = supply
        self._batcher = batcher
        self._again_s = math.inf
        """When rows that could not be moved are tried again (monotonic)."""
        self._wait_s = AGAIN_S
        # Another file has other rows under these numbers.
        memory.refused = {place: why for place, why in memory.refused.items() if place[0] == supply.buffer_id}

    def is_due(self) -> bool:
        """Whether rows should come again that could not be moved. Says so once."""
        is_due = time.monotonic() >= self._again_s
        if is_due:
            self._again_s, self._wait_s = math.inf, min(2 * self._wait_s, AGAIN_S_MAX)
        return is_due

    def known(self, rows: Sequence[Row], aside: Aside) -> Sequence[Row]:
        """The rows that were not refused before. The others are added to `aside`."""
        refused = self._memory.refused
        if not refused:
            return rows
        left = []
        for row in rows:
            reason = refused.get(self._place(row))
            if reason is None:
                left.append(row)
            else:
                aside.append((row, reason))
        return left

    def _place(self, row: Row) -> tuple[str, int, int]:
        return self._supply.buffer_id, row.lane, row.sequence

    async def narrow_down(self, out: Outgoing, rows: Sequence[Row], error: BaseException) -> None:
        """Find the record that a partition refuses: halve the rows that it is sent until the record stands alone.

        `rows` are those of the refused batch of `out`. If they are echoes, the refused one is left out, because the
        row's own topic may take it.
        """
        partition, topic = out.partition, out.partition[0]
        if isinstance(error, TopicAuthorizationFailedError):
            self._memory.condemn(TopicVerdict(topic, TOPIC_FORBIDDEN, forbidden_hint(topic, self._kafka)))
        elif len(rows) > 1 or (
            # The topic may take less than was read of it. The next session reads it again, and names that as the
            # reason.
            isinstance(error, MessageSizeTooLargeError) and not self._memory.is_suspect(partition)
        ):
            self._memory.suspect(partition, len(rows))
        else:
            is_too_much = False
            if out.echo_of is not None:
                self._memory.echoed.leave_out(rows, topic)
            else:
                refused, reason = self._memory.refused, f"broker-refused: {type(error).__name__}"
                if len(refused) < KNOWN_MAX:
                    refused[self._place(rows[0])] = reason
                await self.set_aside([(rows[0], reason)])
                is_too_much = len(refused) >= KNOWN_MAX and self._again_s < math.inf
            if self._memory.count_lone_refusal(partition) >= LONE_REFUSALS_MAX or is_too_much:
                self._memory.condemn(TopicVerdict(topic, TOPIC_REFUSING, named(error)))
        log.debug("refused", topic=topic, error=named(error), rows=len(rows))

    async def set_aside(self, rows: Sequence[tuple[Row, str]]) -> None:
        """Move rows into the quarantine, each with its reason. While the disk fails, they stay where they are."""
        left = sorted(rows, key=lambda aside: (aside[0].lane, aside[0].sequence))
        said: Counter[tuple[str, str, str]] = Counter()
        try:
            while left and self._buffer.state.failing is None:
                try:
                    said += await self._move(left[:MOVED_AT_ONCE])
                except BufferFileError as error:
                    self._memory.lines.tell(log.warning, NOT_MOVED, error=str(error))
                    break
                left = left[MOVED_AT_ONCE:]
                self._wait_s = AGAIN_S
            if left:
                # Others need neither them nor the disk. The last call raises if there is another file now.
                self._supply.pass_over()
                self._again_s = min(self._again_s, time.monotonic() + self._wait_s)
                for row in await self._buffer.give_up(self._supply.buffer_id, [row for row, _ in left]):
                    self._memory.refused.pop(self._place(row), None)
        finally:
            for (what, reason, topic), count in said.items():
                self._memory.lines.tell(log.warning, what, reason=reason, topic=topic, count=count)

    async def _move(self, rows: Sequence[tuple[Row, str]]) -> Counter[tuple[str, str, str]]:
        """Move rows in one commit. Returns the log lines to write, with reason and topic, and the rows of each."""
        reports = []
        said: Counter[tuple[str, str, str]] = Counter()
        work = LongWork()
        for row, reason in rows:
            await work.step()
            series = await self._supply.series(row.series)
            # If a report cannot be sent, it is not reported again: its input is in the quarantine already.
            is_report = series.topic == self._kafka.quarantine_topic
            what = REFUSED_REPORTS if is_report else REFUSED_EVENTS if series.is_of_gateway else REFUSED_READINGS
            if reason.startswith(BEYOND_ALL):
                # A device may make up any number of topics, so these rows are counted by device.
                self._memory.new_topics.set_aside(series.device)
            else:
                said[what, reason, series.topic] += 1
            if not is_report:
                lane = await self._supply.lane(row.lane)
                doubt = row.datum.doubt
                if not doubt and self._memory.may_have(await self._batcher.topics(row.lane, row.series), row):
                    # If the row is taken in again, it gets another id. Without the doubt, nothing would mark the second
                    # copy.
                    doubt = Doubt.REDELIVERED
                reports.append(self._front_door.quarantine.entry(_quarantined(row, series, lane, reason, doubt)))
        await self._buffer.quarantine(self._supply.buffer_id, reports, [row for row, _ in rows])
        for row, _ in rows:
            self._memory.refused.pop(self._place(row), None)
        return said


def named(error: BaseException) -> str:
    """An error in words, or its type if it has none."""
    return str(error) or type(error).__name__


def _quarantined(row: Row, series: Series, lane: Lane, reason: str, doubt: int) -> Quarantined:
    return Quarantined(
        reason=reason,
        device=series.device,
        subject=series.subject,
        series=row.series,
        boot_id=lane.boot_id,
        datum=replace(row.datum, doubt=doubt),
    )
