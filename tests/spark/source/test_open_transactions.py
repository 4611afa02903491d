"""A transaction that another producer leaves open holds its partition back: it is told, and nothing is lost by it.

That `ingest` tells of it, and reads on once it has ended, is in `test_spark_ingest.py`.
"""

import asyncio
import signal
from unittest.mock import patch

import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker
from spark.cli import FAILED, main
from spark.commands.ingest_command import held_back_lines
from spark.log.log_table import open_log
from spark.source import open_transactions
from spark.source.open_transactions import OpenTransactionError, OpenTransactions, expect_readable
from spark.source.topic_changes import TopicNow, TopicRead
from tests.support import kafka_admin
from tests.support.kafka_records import open_transaction
from tests.support.sizes import WHOLE
from tests.support.spark_records import reading, reading_headers


def now(latest: int, stable: int | None) -> dict[str, TopicNow]:
    return {"device-thermo": TopicNow("AAA", {0: 0}, {0: latest}, {} if stable is None else {0: stable})}


def test_a_transaction_is_told_once_and_only_if_it_stays_open() -> None:
    found = OpenTransactions()
    with patch.object(open_transactions, "time") as clock:
        clock.time.return_value = 1_000_000.0
        for topics in (now(10, None), now(10, 10), now(14, 10)):
            found.see(topics)
            assert found.untold(60) is None
        clock.time.return_value += 59
        # Another one, which began meanwhile.
        found.see(now(20, 14))
        clock.time.return_value += 59
        assert found.untold(60) is None
        clock.time.return_value += 1
        found.see(now(22, 14))
        told = found.untold(60)
        assert told is not None
        assert [(each.partition, each.offset, each.records) for each in told] == [(0, 14, 8)]
        (line,) = held_back_lines(told)
        assert line.startswith(
            "topic device-thermo: 8 records behind a transaction that has been open since 13:47:39 UTC or longer "
            "(partition 0, offset 14), to be read when it ends."
        )
        assert line.endswith("abort --topic device-thermo --partition 0 --start-offset 14` aborts it")
        found.see(now(23, 14))
        assert found.untold(60) is None
        found.see(now(24, 24))
        assert found.untold(60) == []
    assert held_back_lines([]) == ["no open transaction holds records back any more"]


def test_reading_beyond_an_open_transaction_is_reported_for_the_same_topic_alone() -> None:
    expect_readable({"device-thermo": TopicRead("AAA", {0: 10})}, now(14, 10))
    expect_readable({"device-thermo": TopicRead("BBB", {0: 12})}, now(14, 10))
    expect_readable({"device-thermo": TopicRead("AAA", {0: 12})}, now(14, None))
    expect_readable({"device-thermo": TopicRead("AAA", {0: 12})}, now(15, 15))
    with pytest.raises(OpenTransactionError, match="partition 0 of topic device-thermo was read up to offset 12"):
        expect_readable({"device-thermo": TopicRead("AAA", {0: 12})}, now(14, 10))


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.campaign(seconds=25)
@pytest.mark.usefixtures("interpreted")
def test_after_uncommitted_records_committed_ones_are_read_only_once_the_transaction_has_ended(
    kafka: Broker, spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests' session outlives the command, and so do their signal handlers.
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    topic = "device-held-back"

    def once(*options: str) -> Result:
        command = ["ingest", "--once", "--bootstrap", kafka.bootstrap, "--warehouse", new_warehouse]
        return CliRunner().invoke(main, [*command, "--topics", topic, *options])

    def read() -> list[int]:
        return sorted(row.offset for row in open_log(spark, new_warehouse).select("offset").distinct().collect())

    async def run() -> None:
        await kafka_admin.create_topic(kafka.bootstrap, topic)
        async with (
            AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as usual,
            open_transaction(kafka.bootstrap) as mirror,
        ):

            async def send(producer: AIOKafkaProducer, sequence: int) -> None:
                record = reading(headers=reading_headers(sequence))
                await producer.send_and_wait(topic, record.value, key=record.key, partition=0, headers=record.headers)

            await send(usual, 0)
            await send(mirror, 1)
            await send(usual, 2)
            everything = await asyncio.to_thread(once, "--kafka-option", "isolation.level=read_uncommitted")
            assert everything.exit_code == 0, everything.output
            assert "open since" not in everything.output
            assert read() == [0, 1, 2]

            beyond = await asyncio.to_thread(once)
            assert beyond.exit_code == FAILED, beyond.output
            assert f"partition 0 of topic {topic} was read up to offset 3, uncommitted records too." in beyond.output
            await mirror.abort_transaction()
            await send(usual, 3)

    asyncio.run(run())
    if WHOLE:
        ended = once()
        assert ended.exit_code == 0, ended.output
        assert "transaction" not in ended.output
        # The mark of the transaction's end has an offset too, before or behind the last record's.
        assert (read()[:3], len(read())) == ([0, 1, 2], 4)
