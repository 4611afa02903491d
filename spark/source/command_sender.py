"""Sends a command for a device to its gateway's topic, and waits for the event in which it ends."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiokafka import AIOKafkaProducer, ConsumerRecord
from aiokafka.errors import KafkaError

from gateway.record_contract import (
    COMMAND_ENDED,
    COMMAND_EXPIRES_HEADER,
    COMMAND_ID_HEADER,
    COMMAND_TOPIC_HEADER,
    GATEWAY_TYPES,
)
from spark.source.topic_reader import TopicError, opened

END_S_MAX = 90.0
"""Seconds after its expiry for which a command's end is waited for. The gateway may have to connect first."""
_OF_PRODUCER = frozenset(
    {
        *("security_protocol", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password", "ssl_context"),
        *("client_id", "request_timeout_ms", "metadata_max_age_ms"),
    }
)
"""The client's arguments that a producer knows too."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command to send."""

    id: str
    kafka_topic: str
    key: str
    payload: bytes
    expires: datetime
    topic: str | None

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """The headers of its record, as the gateway reads them."""
        told = {COMMAND_ID_HEADER: self.id, COMMAND_EXPIRES_HEADER: self.expires.isoformat()}
        if self.topic is not None:
            told[COMMAND_TOPIC_HEADER] = self.topic
        return [(name, value.encode()) for name, value in told.items()]


async def send(command: Command, bootstrap: str, options: Mapping[str, Any]) -> None:
    """Send a command; it is with Kafka's replicas on return. Raises TopicError."""
    async with opened(bootstrap, options, command.kafka_topic, None):
        # The topic exists. A producer alone could have it made.
        pass
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        acks="all",
        enable_idempotence=True,
        **{name: value for name, value in options.items() if name in _OF_PRODUCER},
    )
    try:
        await producer.start()
        await producer.send_and_wait(
            command.kafka_topic, command.payload, key=command.key.encode(), headers=command.headers
        )
    except KafkaError as error:
        raise TopicError(
            f"{command.kafka_topic} does not take the command: {str(error) or type(error).__name__}. "
            "May this user write there?"
        ) from error
    finally:
        await producer.stop()


async def send_and_wait(
    command: Command, bootstrap: str, options: Mapping[str, Any], events_topic: str
) -> dict[str, Any] | None:
    """Send a command; return the body of the event in which it ended, None if none came in time. Raises TopicError."""
    async with opened(bootstrap, options, events_topic, None) as events:
        begin = {number: extent.end for number, extent in (await events.extents()).items()}
        await send(command, bootstrap, options)
        left_s = (command.expires - datetime.now(UTC)).total_seconds() + END_S_MAX
        try:
            async with asyncio.timeout(left_s):
                async for record in events.records(begin, None):
                    end = end_of(record)
                    if end is not None and end.get("id") == command.id:
                        return end
        except TimeoutError:
            pass
    return None


def end_of(record: ConsumerRecord) -> dict[str, Any] | None:
    """The body of an event in which a command ended; None if the record is another one."""
    if dict(record.headers).get("ce_type") != f"{GATEWAY_TYPES}{COMMAND_ENDED}".encode():
        return None
    try:
        body = json.loads(record.value or b"")
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
