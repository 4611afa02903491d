"""Drawn records in a real Kafka: each at its offset, with its time."""

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from demo.kafka_broker import Broker
from tests.support.spark_oracle import KafkaRecord


async def send(broker: Broker, records: list[KafkaRecord]) -> None:
    """Make the topics, and have each record stand at its offset with its time."""
    # The records are of long ago: Kafka would delete them at once, and have another time of its own for them.
    settings = {"message.timestamp.type": "CreateTime", "retention.ms": "-1"}
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        topics = {record.topic: 2 for record in records}
        for record in records:
            topics[record.topic] = max(topics[record.topic], record.partition + 1)
        await admin.create_topics([NewTopic(name, count, 1, topic_configs=settings) for name, count in topics.items()])
    finally:
        await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all") as producer:
        for record in records:
            sent = await producer.send_and_wait(
                record.topic,
                record.value,
                key=record.key,
                partition=record.partition,
                headers=record.headers,
                timestamp_ms=round(record.timestamp.timestamp() * 1_000),
            )
            assert sent.offset == record.offset


def expect_no_warning(words: str) -> None:
    """Fail a batch that warns. What is no Exception, as `pytest.fail` raises, would leave Spark waiting for ever."""
    raise AssertionError(words)


def expect_senders_times(words: str) -> None:
    """Fail a batch that warns of anything but of the times that `send` gives its records."""
    assert "have the time of their sender" in words, words
