"""Asks the cluster about the topic of commands: its partitions, and whether this gateway may read them."""

import asyncio
import time
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    LeaderNotAvailableError,
    NodeNotReadyError,
    NoError,
    NotLeaderForPartitionError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.fetch import FetchRequest

from gateway.kafka.topics import CREATION_S_MAX, Partition, allow_command, create_topics, read_cluster
from gateway.settings import KafkaSettings

_BYTES: Final = 1
"""Bytes that an attempt to read asks for. Kafka sends one whole batch all the same, if there is one."""
_READ_COMMITTED: Final = 1
_NOT_YET: Final = (LeaderNotAvailableError, NotLeaderForPartitionError, UnknownTopicOrPartitionError)
"""Answers of brokers that do not know yet what the controller has just made."""


class CommandTopicError(Exception):
    """The topic of commands cannot be read; the message says why and what to do."""


class CommandTopicMissingError(CommandTopicError):
    """There is no such topic, or this gateway may not know of it."""


async def partitions_of(admin: AIOKafkaAdminClient, topic: str, kafka: KafkaSettings, *, create: bool) -> list[int]:
    """The partitions of the topic of commands. `create` makes the topic if it is missing.

    Raises CommandTopicError, KafkaError.
    """
    code, partitions = await _described(admin, topic)
    if code == UnknownTopicOrPartitionError.errno and create:
        (verdict,) = await create_topics(admin, (topic,), kafka)
        if not verdict.usable:
            raise CommandTopicError(verdict.hint or verdict.reason)
        code, partitions = await _described(admin, topic)
    if code == UnknownTopicOrPartitionError.errno:
        raise CommandTopicMissingError(
            f"there is no topic {topic}, or this gateway may not know of it; have it made, with LogAppendTime and "
            f"one partition, and let this gateway read it: {allow_command(topic, kafka, 'Read', 'Describe')}"
        )
    if code == TopicAuthorizationFailedError.errno:
        raise _refused(topic, kafka)
    if code or not partitions:
        raise CommandTopicError(f"{topic} cannot be read just now: {for_code(code).__name__}")
    return [partition.number for partition in partitions]


async def try_to_read(admin: AIOKafkaAdminClient, topic: str, kafka: KafkaSettings) -> None:
    """Read from the beginning of each partition, and throw away what comes. Raises CommandTopicError, KafkaError.

    Describing a topic needs another right than reading it, so nothing less than an attempt tells.
    """
    deadline_s = time.monotonic() + CREATION_S_MAX
    while True:
        try:
            return await _read_once(admin, topic, kafka)
        except _NOT_YET:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(0.05)


async def _read_once(admin: AIOKafkaAdminClient, topic: str, kafka: KafkaSettings) -> None:
    client = admin._client  # noqa: SLF001 - aiokafka is pinned
    _, partitions = await _described(admin, topic)
    for partition in partitions:
        if partition.leader < 0:
            raise LeaderNotAvailableError(f"{topic}/{partition.number}")
        if not await client.ready(partition.leader):
            raise NodeNotReadyError(f"broker {partition.leader}")
        asked = [(topic, [(partition.number, 0, _BYTES)])]
        answer = await client.send(partition.leader, FetchRequest(0, 0, _BYTES, _READ_COMMITTED, asked))
        for _, answers in answer.topics:
            for number, code, *_ in answers:
                if code == TopicAuthorizationFailedError.errno:
                    raise _refused(topic, kafka)
                # Retention may have deleted the first record. Kafka says so only to those who may read.
                if code not in {NoError.errno, OffsetOutOfRangeError.errno}:
                    raise for_code(code)(f"{topic}/{number}")


def _refused(topic: str, kafka: KafkaSettings) -> CommandTopicError:
    return CommandTopicError(f"this gateway may not read {topic}; {allow_command(topic, kafka, 'Read', 'Describe')}")


async def _described(admin: AIOKafkaAdminClient, topic: str) -> tuple[int, tuple[Partition, ...]]:
    """Error code and partitions of a topic. Raises KafkaError."""
    cluster = await read_cluster(admin, (topic,))
    return cluster.topics.get(topic, (UnknownTopicOrPartitionError.errno, ()))
