"""Takes readings in again that were quarantined because of their topic, once the topic can be written to."""

from collections import Counter

import structlog
from aiokafka.admin import AIOKafkaAdminClient

from gateway.buffer.buffer import Buffer
from gateway.buffer.quarantine import TOPIC_FORBIDDEN
from gateway.intake.front_door import FrontDoor
from gateway.intake.quarantine_retry import retry_quarantined
from gateway.kafka.topics import NAME_COLLIDES, NOT_CREATED, UNKNOWN, TopicVerdict
from gateway.uplink.memory import Memory

TOPIC_REFUSING = "topic-refuses-records"
"""The quarantine's reason for readings of a topic that refused one record after the other."""
TOO_LARGE_FOR_TOPIC = "topic-max-message-bytes"
"""The quarantine's reason for a record that is larger than its topic takes."""
AT_ONCE_MAX = 500
"""Readings taken in again in one commit."""
TAKEN_MAX = 10_000
"""Readings of one topic and reason taken in again in one look."""
READ_MAX = 500
"""Rows read at once. Commits wait for such a read."""
READS_MAX = 1_000
"""Reads in one look for new rows, and as many for rows that can go."""
REDRIVE_S = 15.0
"""Seconds between two looks at topics that quarantined readings wait for."""
TOPICS_MAX = 100
"""Topics that one look asks about. The next look goes on behind them, as a device may make up thousands of topics."""

_MADE = frozenset({UNKNOWN, NOT_CREATED, NAME_COLLIDES})
"""Reasons for which a topic is made although no new reading comes for it."""

Cause = tuple[str, str]
"""Topic and reason."""

log = structlog.get_logger()


class Redrive:
    """Looks regularly at the quarantine, and at the topics of its readings. There is one for each daemon.

    The quarantine may hold millions of rows, in the order in which they came. Each row is read once to learn its cause.
    When a cause can go, rows are read again from its oldest row on. So readings that stay wrong hold up no others.
    """

    def __init__(self, buffer: Buffer, front_door: FrontDoor, memory: Memory) -> None:
        self._buffer = buffer
        self._front_door = front_door
        self._memory = memory
        self._buffer_id = ""
        self._read = 0
        """Number of the last row whose cause is known."""
        self._next: dict[Cause, int] = {}
        """By cause: the number of its oldest row, or one below it."""
        self._looked_at = ""
        """The last topic of the last look."""

    async def take_in_again(self, admin: AIOKafkaAdminClient) -> None:
        """Take in again the readings that can go now. Raises KafkaError, BufferFileError."""
        await self._read_new()
        if not self._next:
            return
        topics = self._in_turn()
        verdicts = await self._memory.verdicts.of_all(admin, topics, REDRIVE_S)
        wanted = {}
        for cause, number in self._next.items():
            if cause[0] not in verdicts:
                continue
            if self._memory.verdicts.is_made_when_wanted(verdicts[cause[0]]) and cause[1] in _MADE:
                await self._have_made(verdicts[cause[0]], number)
            count = self._may_go(verdicts[cause[0]], cause[1])
            # Somebody else may have taken the row out. Perhaps nothing waits for this topic any more.
            if count or await self._of_topics(number, 1) != [(number, *cause)]:
                wanted[cause] = count
        await self._retry_oldest(wanted)

    def _in_turn(self) -> list[str]:
        topics = sorted({topic for topic, _ in self._next})
        if len(topics) > TOPICS_MAX:
            later = [topic for topic in topics if topic > self._looked_at]
            topics = [*later, *topics[: len(topics) - len(later)]][:TOPICS_MAX]
            self._looked_at = topics[-1]
        return topics

    async def _have_made(self, verdict: TopicVerdict, number: int) -> None:
        """Have a topic made that no new reading may ask for, for the device of the oldest quarantined reading.

        Topics beyond a bound are not made: they would be made the next day, for a device that may be gone by then.
        """
        found = await self._buffer.run(lambda file: file.quarantine.find([number]))
        if number in found:
            self._memory.new_topics.asked(verdict, found[number].device)

    async def _read_new(self) -> None:
        if self._buffer_id != self._buffer.id:
            self._buffer_id, self._read = self._buffer.id, 0
            self._next.clear()
        for _ in range(READS_MAX):
            rows = await self._of_topics(self._read + 1, READ_MAX)
            for number, topic, reason in rows:
                if topic is not None:
                    self._next.setdefault((topic, reason), number)
                self._read = number
            if len(rows) < READ_MAX:
                return

    async def _of_topics(self, number: int, limit: int) -> list[tuple[int, str | None, str]]:
        """See `Quarantine.of_topics`."""
        return await self._buffer.run(lambda file: file.quarantine.of_topics(number, limit))

    def _may_go(self, verdict: TopicVerdict, reason: str) -> int:
        """Readings that may be taken in now. Those that would be refused again stay, as each attempt wears the card."""
        if not verdict.usable:
            return 0
        if reason == TOO_LARGE_FOR_TOPIC:
            is_larger = verdict.batch_bytes_max > self._memory.too_small.get(verdict.topic, 0)
            return TAKEN_MAX if is_larger else 0
        # Only writing tells whether a topic may be written to. So one reading goes, and the others if it was taken.
        is_doubtful = reason in {TOPIC_FORBIDDEN, TOPIC_REFUSING} and verdict.topic not in self._memory.proven
        return 1 if is_doubtful else TAKEN_MAX

    async def _retry_oldest(self, wanted: dict[Cause, int]) -> None:
        """Take in again so many readings of each cause, the oldest first, and find the next row of each cause."""
        found: list[int] = []
        taken: Counter[str] = Counter()
        after: dict[Cause, int] = {}
        number = 0
        for _ in range(READS_MAX):
            if not wanted or number > self._read:
                break
            number = max(number, min(self._next[cause] for cause in wanted))
            rows = await self._of_topics(number, READ_MAX)
            for row, topic, reason in rows:
                if topic is None or (topic, reason) not in wanted:
                    continue
                if wanted[topic, reason]:
                    wanted[topic, reason] -= 1
                    found.append(row)
                    taken[topic] += 1
                else:
                    del wanted[topic, reason]
                    after[topic, reason] = row
            number = rows[-1][0] + 1 if rows else self._read + 1
            while len(found) >= AT_ONCE_MAX:
                await retry_quarantined(self._front_door, self._buffer, found[:AT_ONCE_MAX])
                del found[:AT_ONCE_MAX]
        if found:
            await retry_quarantined(self._front_door, self._buffer, found)
        after |= {cause: max(number, self._next[cause]) for cause in wanted}
        self._next = {cause: row for cause, row in (self._next | after).items() if row <= self._read}
        for topic, count in taken.items():
            self._memory.lines.tell(log.info, "readings of a topic are taken in again", topic=topic, count=count)
