"""Makes missing Kafka topics beside the rounds, so that no reading of another topic waits."""

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
"""Topics in one request, so that one device's many topics do not hold up those of others."""
RECOUNT_S: Final = 60.0
"""Seconds between two looks whether topics were deleted, while no more may be made."""
DEVICES_TOLD_MAX: Final = 1_000
"""Devices that are reported to be beyond their bound."""
NAME_CHARACTERS_MAX: Final = 256
"""Characters of a device's name that count. If an MQTT topic stands for the device, it may have 65,535."""

log = structlog.get_logger()


class NewTopics:
    """The new topics of all sessions: topics made in one count in the next too. It belongs to the event loop."""

    def __init__(
        self, kafka: KafkaSettings, verdicts: TopicVerdicts, lines: FewLines, today: Callable[[], int | None]
    ) -> None:
        """`today` gives the day since 1970 (UTC); None while the date is not known."""
        self._kafka = kafka
        self._own = frozenset({kafka.events_topic, kafka.quarantine_topic})
        """The gateway's own topics, which have no bound, as no sensor's reading is for them."""
        self._verdicts = verdicts
        self._lines = lines
        self._today = today
        self.allowance = TopicAllowance(kafka.topics_per_device_day_max, kafka.topics_created_max)
        self.under_way: dict[str, asyncio.Future[None]] = {}
        """Topics that are being made. The future of each is done once it is known whether the topic was made."""
        self._beyond: Counter[str] = Counter()
        self._told: set[str] = set()
        """Devices that were reported to be beyond their bound."""
        self._asked = asyncio.Event()
        self._recounted_s = float("-inf")
        self._is_used_up = False
        self._buffer_id = ""
        """The buffer file that has the marks."""

    @property
    def beyond(self) -> dict[str, int]:
        """By device: readings of this day that were set aside, as a bound keeps their topics from being made."""
        self._look_at_day()
        return dict(self._beyond)

    def asked(self, verdict: TopicVerdict, device: str) -> TopicVerdict:
        """Have a missing topic made for a device's reading. Returns the verdict that holds until it is made.

        The topic's readings wait, or go aside if a bound is reached. Verdicts on other topics are returned unchanged.
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
        """Wait until it is known whether a topic that was asked for was made."""
        if topic in self.under_way:
            await asyncio.shield(self.under_way[topic])

    def set_aside(self, device: str) -> None:
        """Count a device's reading that goes to the quarantine because of a bound."""
        self._lines.count("readings quarantined for topics beyond a bound", 1)
        device = device[:NAME_CHARACTERS_MAX]
        if device in self._beyond or len(self._beyond) < DEVICES_TOLD_MAX:
            self._beyond[device] += 1

    async def run(self, session: KafkaSession, buffer: Buffer) -> Never:
        """Make the topics that are asked for, as long as a session lasts. Raises KafkaError, TimeoutError."""
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
        # Rounds would wait until the client knows a new topic's leaders, so it learns them first.
        await session.write_to({verdict.topic for verdict in verdicts if verdict.usable})
        for verdict in verdicts:
            self._verdicts.learn(verdict)
            if verdict.made:
                self._lines.tell(log.info, "topic created", topic=verdict.topic)
        self._settle(topics)

    async def _keep(self, buffer: Buffer) -> None:
        """Store the charges before topics are made, so that a restart of the daemon gives a device no more topics."""
        if buffer.id != self._buffer_id:
            self._buffer_id = buffer.id
            self.allowance.keep_anew()
        marks = self.allowance.marks()
        if not marks:
            return
        try:
            await buffer.transact(lambda file: file.keep_marks(marks))
        except BufferFileError:
            # While Kafka answers, a failing disk stops nothing. These marks are kept with the next ones.
            return
        self.allowance.kept(marks)

    async def _recount(self, session: KafkaSession) -> None:
        """Stop counting topics that somebody has deleted."""
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
