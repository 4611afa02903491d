"""Commands as the cloud sends them."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from aiokafka import AIOKafkaProducer
from msgspec import Struct

from gateway.record_contract import COMMAND_EXPIRES_HEADER, COMMAND_ID_HEADER, COMMAND_TOPIC_HEADER
from tests.support.kafka_admin import administered
from tests.support.waiting import patience


class Sent(Struct):
    """A command's record, as far as the gateway looks at it."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    offset: int = 0


def command_record(  # noqa: PLR0913 - each is a field of the record
    command_id: str = "c1",
    device: str = "42",
    payload: bytes | None = b"on",
    topic: str | None = None,
    expires: datetime | None = None,
    *,
    namespace: str = "default",
    offset: int = 0,
    without: str = "",
) -> Sent:
    """A command that expires in an hour, by default; `without` names a header to leave out."""
    told = {
        COMMAND_ID_HEADER: command_id.encode(),
        COMMAND_EXPIRES_HEADER: (expires or datetime.now(UTC) + timedelta(hours=1)).isoformat().encode(),
    }
    if topic is not None:
        told[COMMAND_TOPIC_HEADER] = topic.encode()
    headers = [(name, value) for name, value in told.items() if name != without]
    return Sent(f"{namespace}/{device}".encode(), payload, headers, offset)


async def send_commands(bootstrap: str, commands: Mapping[str, list[Sent]]) -> None:
    """Send commands to the topics that are named for them."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        for topic, records in commands.items():
            for record in records:
                await producer.send_and_wait(topic, record.value, key=record.key, headers=record.headers)


async def until_made(bootstrap: str, topic: str) -> None:
    """Wait until a gateway has made its topic."""
    async with asyncio.timeout(patience(60)), administered(bootstrap) as admin:
        while topic not in await admin.list_topics():
            await asyncio.sleep(0.2)
