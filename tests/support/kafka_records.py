"""Plain records in a real Kafka, by partition, and their deletion as retention does it."""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.protocol.admin import CreateAclsRequest

from tests.support.kafka_admin import ALLOW, LITERAL, TOPIC, administered

READ, DESCRIBE = 3, 8


async def produce(bootstrap: str, topic: str, counts: Mapping[int, int], start: int = 0) -> None:
    """Send so many records to each partition: their values are numbers, from `start` in each."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        for partition, count in counts.items():
            for number in range(start, start + count):
                await producer.send(topic, str(number).encode(), key=b"42", partition=partition)


@asynccontextmanager
async def open_transaction(bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    """A producer with a transaction, which stays open until the caller ends it: for as long as a run of a job takes."""
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, transactional_id=secrets.token_hex(8), transaction_timeout_ms=600_000
    ) as producer:
        await producer.begin_transaction()
        yield producer


async def delete_before(bootstrap: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Have Kafka delete the records before an offset of each partition, as its retention would."""
    async with administered(bootstrap) as admin:
        wanted = {TopicPartition(topic, partition): RecordsToDelete(offset) for partition, offset in offsets.items()}
        await admin.delete_records(wanted)


async def allow_reading(bootstrap: str, user: str, topic: str) -> None:
    """Let a user read a topic, which from then on nobody else may who is not let in."""
    async with administered(bootstrap) as admin:
        for operation in (READ, DESCRIBE):
            request = CreateAclsRequest(TOPIC, topic, LITERAL, f"User:{user}", "*", operation, ALLOW)
            for code, message in (await admin._send_request(request)).creation_responses:
                assert code == 0, message
