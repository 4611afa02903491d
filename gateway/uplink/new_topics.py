"""Makes Kafka topics that are missing, beside the rounds: no reading of another topic waits for it."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Never

import structlog
from aiokafka.errors import UnknownTopicOrPartitionError

from gateway.buffer.buffer import Buffer
from gateway.host.logs import FewLines
from gateway.kafka.session import KafkaSession, TopicVerdicts
from gateway.kafka.topics import (
    BEING_MADE,
    BEYOND_ALL,
    TopicVerdict,
    beyond_verdict,
    create_topics,
    read_cluster,
)
from gateway.reading import BufferFileError
from gateway.settings import KafkaSettings
from gateway.uplink.topic_allowance import TopicAllowance

AT_ONCE_MAX: Final = 50
"""Topics that one request asks for: those of a few devices are not held up by the many of one."""
RECOUNT_S: Final = 60.0
"""How often is looked whether topics were deleted, while no more may be made."""
DEVICES_TOLD_MAX: Final = 1_000
"""Devices that are told to be beyond their bound."""
NAME_CHARACTERS_MAX: Final = 256
"""As much of a device's name counts: where a topic stands for it, that may have 65,535."""

log = structlog.get_logger()


class NewTopics:
    """Belongs to the event loop, and outlives sessions: what was made counts in the next ones too."""

    def __init__(
        self, kafka: KafkaSettings, verdicts: TopicVerdicts, lines: FewLines, today: Callable[[], int | None]
    ) -> None:
        """`today` is the day since 1970 (UTC); None while the date is not known."""
        self._kafka = kafka
        self._own = frozenset({kafka.events_topic, kafka.quarantine_topic})
        """This gateway's own, which have no bound: no sensor's reading is for them."""
        self._verdicts = verdicts
        self._lines = lines
        self._today = today
        self.allowance = TopicAllowance(kafka.topics_per_device_day_max, kafka.topics_created_max)
        self.under_way: dict[str, asyncio.Future[None]] = {}
        """Topics that are being made, and what is done once it is known what became of each."""
        self._beyond: Counter[str] = Counter()
        self._told: set[str] = set()
        """Devices of which that was said."""
        self._asked = asyncio.Event()
        self._recounted_s = float("-inf")
        self._is_used_up = False
        self._buffer_id = ""
        """The file that has the marks."""

    @property
    def beyond(self) -> dict[str, int]:
        """By device: readings of this day that were set aside, for a bound keeps their topics from being made."""
        self._look_at_day()
        return dict(self._beyond)

    def asked(self, verdict: TopicVerdict, device: str) -> TopicVerdict:
        """Have a topic made that does not exist, for a reading of a device; the verdict on it until it is made.

        Its readings wait, or go aside where a bound is reached. Verdicts on other topics stay as they are.
        """
        if not self._verdicts.is_made_when_wanted(verdict):
            return verdict
        topic = verdict.topic
        if topic not in self.under_way:
            if topic not in self._own and (reason := self._charge(topic, device)):
                return beyond_verdict(topic, reason, self._kafka)
            self.under_way[topic] = asyncio.get_running_loop().create_future()
            self._asked.set()
        return TopicVerdict(topic, BEING_MADE, "it is being made", waits=True)

    async def settled(self, topic: str) -> None:
        """Wait until it is known what became of a topic that was asked for."""
        if topic in self.under_way:
            await asyncio.shield(self.under_way[topic])

    def set_aside(self, device: str) -> None:
        """A reading of a device goes to the quarantine because of a bound."""
        self._lines.count("readings quarantined for topics beyond a bound", 1)
        device = device[:NAME_CHARACTERS_MAX]
        if device in self._beyond or len(self._beyond) < DEVICES_TOLD_MAX:
            self._beyond[device] += 1

    async def run(self, session: KafkaSession, buffer: Buffer) -> Never:
        """Make what is asked for, for the length of a session. Raises KafkaError, TimeoutError."""
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                if self._is_used_up:
                    await self._recount(session)
                while self.under_way:
                    await self._make(list(self.under_way)[:AT_ONCE_MAX], session, buffer)
        finally:
            self._settle(list(self.under_way))

    async def _make(self, topics: list[str], session: KafkaSession, buffer: Buffer) -> None:
        await self._keep(buffer)
        verdicts = await create_topics(session.admin, topics, self._kafka)
        # Before anybody sends there: rounds would wait until the client knows who leads it.
        await session.write_to({verdict.topic for verdict in verdicts if verdict.usable})
        for verdict in verdicts:
            self._verdicts.learn(verdict)
            if verdict.made:
                self._lines.tell(log.info, "topic created", topic=verdict.topic)
        self._settle(topics)

    async def _keep(self, buffer: Buffer) -> None:
        """Have it on disk what is about to be made: who has the daemon start anew gets no more for it."""
        if buffer.id != self._buffer_id:
            self._buffer_id = buffer.id
            self.allowance.keep_anew()
        marks = self.allowance.marks()
        if not marks:
            return
        try:
            await buffer.transact(lambda file: file.keep_marks(marks))
        except BufferFileError:
            # While Kafka answers, a disk that fails stops nothing: they are kept with the next ones.
            return
        self.allowance.kept(marks)

    async def _recount(self, session: KafkaSession) -> None:
        """See which of the topics are there no longer: somebody made room."""
        self._is_used_up = False
        if time.monotonic() < self._recounted_s + RECOUNT_S:
            return
        self._recounted_s = time.monotonic()
        cluster = await read_cluster(session.admin, self.allowance.topics)
        gone = [name for name, (code, _) in cluster.topics.items() if code == UnknownTopicOrPartitionError.errno]
        self.allowance.forget(gone)

    def _settle(self, topics: Iterable[str]) -> None:
        for topic in topics:
            settled = self.under_way.pop(topic)
            if not settled.done():
                settled.set_result(None)

    def _look_at_day(self) -> None:
        if self.allowance.look_at(self._today()):
            self._beyond.clear()
            self._told.clear()

    def _charge(self, topic: str, device: str) -> str:
        self._look_at_day()
        device = device[:NAME_CHARACTERS_MAX]
        reason = self.allowance.charge(topic, device)
        if reason == BEYOND_ALL:
            self._is_used_up = True
            self._asked.set()
        if reason and device not in self._told and len(self._told) < DEVICES_TOLD_MAX:
            self._told.add(device)
            self._lines.tell(
                log.warning,
                "a device sends for more new topics than this gateway makes: those readings go to the quarantine",
                device=device,
                topic=topic,
                reason=reason,
                hint=beyond_verdict(topic, reason, self._kafka).hint,
            )
        return reason
