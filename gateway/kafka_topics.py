"""Whether a Kafka topic may be written to: it must stamp records itself, or retention would delete readings early."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidTopicError,
    PolicyViolationError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)

from gateway.settings import KafkaSettings

CREATION_S_MAX = 10.0
"""How long a created topic may take to be known everywhere."""
UNKNOWN = "topic-unknown"
LASTING = (
    ClusterAuthorizationFailedError,
    InvalidTopicError,
    PolicyViolationError,
    TopicAuthorizationFailedError,
)
"""Answers about a topic that the next attempt would get again. Any other is about the cluster's state just now, and
no reason to send anything to the quarantine."""
TIMESTAMP_TYPE = "message.timestamp.type"
TOPIC_CONFIG = {TIMESTAMP_TYPE: "LogAppendTime"}
"""What a topic is created with. Brokers delete by a record's timestamp and refuse far-future ones: it must be theirs,
for the clock of a gateway, and of its sensors, may be years off."""


@dataclass(frozen=True, slots=True)
class TopicVerdict:
    """Whether a topic can be trusted with readings; `reason` and `hint` are empty where it can."""

    topic: str
    reason: str = ""
    hint: str = ""

    @property
    def usable(self) -> bool:
        return not self.reason


async def inspect_topics(admin: AIOKafkaAdminClient, topics: Iterable[str]) -> list[TopicVerdict]:
    """Judge topics as the broker describes them. Raises KafkaError where it cannot be asked."""
    resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
    if not resources:
        return []
    verdicts = []
    for response in await admin.describe_configs(resources):
        for code, message, _type, topic, entries, *_ in response.resources:
            verdicts.append(_judge(topic, code, message, {entry[0]: entry[1] for entry in entries}))
    return verdicts


async def create_topics(
    admin: AIOKafkaAdminClient, topics: Iterable[str], settings: KafkaSettings
) -> list[TopicVerdict]:
    """Create topics with LogAppendTime; the verdict on each. Raises KafkaError where the broker cannot be asked."""
    brokers = len((await admin.describe_cluster())["brokers"])
    replicas = min(settings.replicas, brokers)
    new = [NewTopic(topic, settings.partitions, replicas, topic_configs=dict(TOPIC_CONFIG)) for topic in topics]
    response = await admin.create_topics(new)
    verdicts = [_creation_verdict(topic, code, rest) for topic, code, *rest in response.topic_errors]
    created = [verdict.topic for verdict in verdicts if verdict.usable]
    refused = [verdict for verdict in verdicts if not verdict.usable]
    return refused + await _inspect_created(admin, created)


async def _inspect_created(admin: AIOKafkaAdminClient, topics: list[str]) -> list[TopicVerdict]:
    """A broker may not know yet what the controller has just made."""
    deadline_s = time.monotonic() + CREATION_S_MAX
    while True:
        verdicts = await inspect_topics(admin, topics)
        if all(verdict.reason != UNKNOWN for verdict in verdicts) or time.monotonic() > deadline_s:
            return verdicts
        await asyncio.sleep(0.05)


def _creation_verdict(topic: str, code: int, rest: list[str | None]) -> TopicVerdict:
    error = for_code(code)
    if code == 0 or error is TopicAlreadyExistsError:
        return TopicVerdict(topic)
    detail = rest[0] if rest and rest[0] else error.__name__
    if error not in LASTING:
        raise error(detail)
    return TopicVerdict(topic, "topic-not-created", f"the broker refused to create it: {detail}")


def _judge(topic: str, code: int, message: str | None, config: Mapping[str, str | None]) -> TopicVerdict:
    if code:
        error = for_code(code)
        if error is UnknownTopicOrPartitionError:
            return TopicVerdict(
                topic, UNKNOWN, f"create it with {TIMESTAMP_TYPE}=LogAppendTime, or set kafka.create_topics = true"
            )
        if error not in LASTING:
            raise error(message or topic)
        return TopicVerdict(topic, "topic-refused", message or error.__name__)
    stamped_by = config.get(TIMESTAMP_TYPE)
    if stamped_by != "LogAppendTime":
        return TopicVerdict(
            topic,
            "topic-not-logappendtime",
            f"its {TIMESTAMP_TYPE} is {stamped_by}: retention would delete what a gateway with a wrong clock sends; "
            f"set {TIMESTAMP_TYPE}=LogAppendTime on it",
        )
    return TopicVerdict(topic)
