"""Decides which Kafka topics are quick and safe enough that their rows need no disk first."""

import time
from collections.abc import Collection

from gateway.buffer.buffer import Buffer
from gateway.kafka.session import KafkaSession
from gateway.kafka.topics import is_safe
from gateway.reading import BufferFileError
from gateway.settings import KafkaSettings
from gateway.uplink.memory import Memory
from gateway.uplink.state import DISK_FIRST_TOLD_MAX, ONE_REPLICA, SLOW

LOOK_S = 1.0
"""Seconds between two looks at topics of which nothing new is known."""
SAFE_S = 60.0
"""Seconds for which a topic is believed to have two copies of a record. Somebody may set its min.insync.replicas to 1
at any time, and nothing tells a producer."""


class DirectTopics:
    """The topics of one session. A topic counts once a broker has answered for it in good time, in any session."""

    def __init__(
        self, session: KafkaSession, buffer: Buffer, buffer_id: str, kafka: KafkaSettings, memory: Memory
    ) -> None:
        self._session = session
        self._buffer = buffer
        self._buffer_id = buffer_id
        self._kafka = kafka
        self._memory = memory
        self._left_s = buffer.kafka_first_s - kafka.linger_s
        """Seconds that Kafka has to answer, until a reading is written to the disk."""
        self._quick = memory.quick
        self._slow: dict[str, set[str]] = {}
        """Topics whose last answer came too late. The next has to come in half of the time, so that they do not
        come and go. With each: the topics that answered so, itself or topics of its echoes."""
        self._due_s = 0.0
        self._parked: frozenset[str] = frozenset()

    def answered(self, topic: str, answering: str, seconds: float) -> None:
        """Note how long a broker took to answer for readings of a topic: in this topic, or in a topic of echoes."""
        if self._left_s <= 0:
            # However quick Kafka is, the disk comes first.
            return
        was_quick = topic in self._quick
        if seconds > (self._left_s if was_quick else self._left_s / 2):
            self._quick.discard(topic)
            self._slow.setdefault(topic, set()).add(answering)
        elif not was_quick:
            slow = self._slow.get(topic, set())
            slow.discard(answering)
            if not slow:
                self._slow.pop(topic, None)
                self._quick.add(topic)
                self._due_s = 0.0

    async def settle(self, parked: Collection[str]) -> None:
        """Tell the buffer which topics are direct. `parked` ones have a partition that takes nothing now.

        Readings wait for the topics of their echoes too.
        """
        now_s, of_parked = time.monotonic(), frozenset(parked).union(*map(self._kafka.echoed_in, parked))
        if now_s < self._due_s and of_parked == self._parked:
            return
        self._due_s, self._parked = now_s + LOOK_S, of_parked
        direct = set()
        disk_first = dict.fromkeys(sorted(self._slow)[:DISK_FIRST_TOLD_MAX], SLOW)
        topics = self._quick
        if self._buffer.state.failing is not None and self._buffer.kafka_first_s:
            # While the disk fails, a slow topic is better than none.
            topics = self._memory.proven
        asked = sorted(topics - of_parked)
        verdicts = await self._memory.verdicts.of_all(self._session.admin, asked, SAFE_S)
        usable = {topic: verdict for topic, verdict in verdicts.items() if verdict.usable}
        # A session knows the partitions of these alone. If a topic had to be written to first, nothing would ever come
        # while the disk fails: readings of a topic that is not direct are refused then.
        await self._session.write_to(usable)
        for topic, verdict in usable.items():
            if not is_safe(verdict, self._kafka):
                if len(disk_first) < DISK_FIRST_TOLD_MAX:
                    disk_first[topic] = ONE_REPLICA
            elif await self._is_told(topic):
                direct.add(topic)
        self._memory.state.direct_topics, self._memory.state.disk_first = len(direct), disk_first
        if direct != self._buffer.direct_topics:
            try:
                await self._buffer.go_direct(frozenset(direct), self._buffer_id)
            except BufferFileError:
                # The disk fails, and the file could not say after a crash that rows went out without it.
                self._memory.state.direct_topics = 0

    async def _is_told(self, topic: str) -> bool:
        """Whether all partitions are among the offsets on disk, so that a start after a crash asks how far they are."""
        partitions = self._session.partitions(topic)
        marks = self._memory.expect(topic, partitions)
        if marks is None or not partitions:
            return False
        if marks:
            # Also for the next commit: an older mark may wait for it, which forgets the offsets of another cluster.
            self._buffer.keep(marks)
            try:
                await self._buffer.transact(lambda file: file.keep_marks(marks), self._buffer_id)
            except BufferFileError:
                return False
            self._memory.expected(marks)
        return True

    def end(self) -> None:
        """Have everything go to the disk first again, as the session is over."""
        self._memory.state.direct_topics, self._memory.state.disk_first = 0, {}
        self._buffer.end_direct()
