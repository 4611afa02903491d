"""`sluice-cloud` as a person runs it: a real Kafka, a real process, signals, and the tables it leaves."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewPartitions, NewTopic, RecordsToDelete
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from demo.kafka_broker import Broker
from spark.batch_job import BatchCounts
from spark.cli import FAILED, main
from spark.commands.ingest_command import batch_line
from spark.engine.session import SHORT_LIVED
from spark.ingest_job import BatchReport
from spark.log.log_table import open_log
from spark.log.quarantine_view import open_quarantine
from spark.log.readings_view import open_readings
from spark.log.warehouse_version import folder_of
from spark.windows.windows_table import create_windows
from tests.support import spark_oracle
from tests.support.kafka_admin import administered, create_topic
from tests.support.kafka_records import open_transaction
from tests.support.sizes import WHOLE
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import reading, reading_headers
from tests.support.spark_warehouse import window_figures

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

Line = dict[str, Any]
TOPICS = "device-ingest-.*|gateway-events-ingest"


Command = Callable[..., Result]


@pytest.fixture
def command(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`sluice-cloud` in this process: the tests' session outlives it, and so do their signal handlers."""
    assert spark is not None
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return lambda *arguments: CliRunner().invoke(main, list(map(str, arguments)))


@contextmanager
def ingest(broker: Broker, warehouse: Path, *options: str, topics: str = TOPICS) -> Iterator[subprocess.Popen[str]]:
    """`sluice-cloud ingest --json` for the length of a `with`."""
    command = [sys.executable, "-m", "spark.cli", "ingest", "--bootstrap", broker.bootstrap, "--json", *options]
    command += ["--warehouse", str(warehouse), "--topics", topics]
    environment = os.environ | {"SLUICE_SPARK_JAVA_OPTIONS": SHORT_LIVED}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str]) -> Iterator[Line]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def begin_checkpoint(warehouse: Path) -> None:
    """Leave the files of a job that is killed while it writes the offsets of its first batch."""
    offsets = warehouse / "_checkpoint" / "0" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / ".0.5ebb4032-5bc7-4b30-97ad-9579a98653bb.tmp").write_text("v1\n")


def forget_last_commit(warehouse: Path) -> None:
    """Leave the files of a job that is killed right after its batch."""
    checkpoint = max((warehouse / "_checkpoint").iterdir(), key=lambda folder: int(folder.name))
    newest = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    newest.unlink()
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)


async def send(broker: Broker, topics: set[str], records: list[KafkaRecord]) -> None:
    """Make the topics that are new, and send the records in order."""
    async with administered(broker.bootstrap) as admin:
        # As the gateway makes them: brokers delete by their own clock, not by a sensor's.
        settings = {"message.timestamp.type": "LogAppendTime"}
        await admin.create_topics([NewTopic(name, 2, 1, topic_configs=settings) for name in sorted(topics)])
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all") as producer:
        await send_by(producer, records)


async def send_by(producer: AIOKafkaProducer, records: list[KafkaRecord]) -> None:
    for record in records:
        await producer.send_and_wait(
            record.topic, record.value, key=record.key, partition=record.partition, headers=record.headers
        )


def sent(sequence: int, topic: str, now: datetime, payload: str = '{"t": 21.5, "u": 1e-3}') -> KafkaRecord:
    headers = reading_headers(sequence, time=now + timedelta(seconds=7 * sequence))
    return replace(reading(payload.encode(), headers), topic=topic, partition=sequence % 2, timestamp=now)


def minutes_ago() -> datetime:
    return datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)


@pytest.mark.long(seconds=60)
def test_topics_that_appear_are_taken_up_and_the_job_ends_when_it_is_told(kafka: Broker, tmp_path: Path) -> None:
    """A process of its own, as `make demo` has one, which `make test` runs."""
    now = minutes_ago()
    with ingest(kafka, tmp_path / "warehouse", "--interval-s", "2", topics="device-appear-.*") as process:
        told = lines(process)
        assert next(told) == {"state": "ready", "topics": []}
        for name in ("device-appear-a", "device-appear-b"):
            asyncio.run(send(kafka, {name}, [sent(sequence, name, now) for sequence in range(4)]))
            batches = read_until(told, {name: {"0": 2, "1": 2}})
            assert sum(batch["rows"] for batch in batches) == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


@pytest.mark.campaign(seconds=50)
@pytest.mark.usefixtures("interpreted")
def test_from_kafka_to_tables_across_a_restart(
    kafka: Broker, spark: SparkSession, command: Command, new_warehouse: str
) -> None:
    warehouse = Path(new_warehouse)
    now = minutes_ago()
    heartbeat = replace(
        reading(b'{"depth": 3}', reading_headers(99, event_type="sluice.gateway.heartbeat")),
        topic="gateway-events-ingest",
    )
    first = [sent(sequence, "device-ingest-a", now) for sequence in range(20)] + [heartbeat]
    second = [sent(sequence, "device-ingest-b", now) for sequence in range(20, 24)]
    second += [first[4], sent(24, "device-ingest-a", now, "{")]
    second += [sent(sequence, "device-ingest-a", now) for sequence in (2, 25)]
    # Of one partition.
    before, mirrored, behind = (sent(sequence, "device-ingest-c", now) for sequence in (26, 28, 30))
    # Names that contain one that matches: none of them is read.
    others = {"x-device-ingest-a", "x-gateway-events-ingest", "gateway-events-ingest-x"}

    def run() -> list[Line]:
        options = ["--bootstrap", kafka.bootstrap, "--warehouse", warehouse, "--topics", TOPICS, "--json", "--once"]
        ran = command("ingest", *options)
        assert ran.exit_code == 0, ran.output
        return list(map(json.loads, ran.stdout.splitlines()))

    async def run_in_a_transaction() -> list[Line]:
        """The first run, while another producer's transaction is open, which is committed after it."""
        async with open_transaction(kafka.bootstrap) as mirror:
            await send_by(mirror, [mirrored])
            await send(kafka, set(), [behind])
            said = await asyncio.to_thread(run)
            await mirror.commit_transaction()
        return said

    begin_checkpoint(warehouse)
    elsewhere = [sent(50, topic, now) for topic in sorted(others)]
    topics = ["device-ingest-a", "device-ingest-c", "gateway-events-ingest"]
    asyncio.run(send(kafka, {*topics, *others}, [*elsewhere, *first, before]))
    ready, *said = asyncio.run(run_in_a_transaction())
    batch, held = sorted(said, key=lambda line: "transactions" in line)
    assert ready == {"state": "ready", "topics": topics}
    assert set(batch) == {
        *("batch", "rows", "duplicates", "rejected", "late", "revised", "unwindowed", "deleted"),
        *("corrections", "undeclared", "undeclared_more", "lag", "behind_s", "end_offsets", "seconds"),
    }
    assert batch["rows"] == 22
    ends = {"device-ingest-a": {"0": 10, "1": 10}, "device-ingest-c": {"0": 1, "1": 0}}
    assert batch["end_offsets"] == ends | {"gateway-events-ingest": {"0": 1, "1": 0}}
    (transaction,) = held["transactions"]
    assert transaction.pop("since")
    assert transaction == {"topic": "device-ingest-c", "partition": 0, "offset": 1, "records": 2}

    asyncio.run(send(kafka, {"device-ingest-b"}, second))
    # The checkpoint was damaged meanwhile: a new one begins where the tables end.
    rmtree(warehouse / "_checkpoint" / "0" / "offsets")
    ready, *batches = run()
    assert str(warehouse / "_checkpoint" / "0") in ready.pop("new_checkpoint")
    assert ready == {"state": "ready", "topics": sorted([*topics, "device-ingest-b"])}
    # What was behind the transaction is read now that it has ended.
    assert [(b["rows"], b["duplicates"], b["rejected"], b["late"], b["lag"]) for b in batches] == [(10, 2, 1, 14, 0)]

    if WHOLE:
        # A crash before the checkpoint noted the batch: it is done again, changes nothing, and ends well.
        forget_last_commit(warehouse)
        _ready, *batches = run()
        assert [(b["rows"], b["lag"]) for b in batches] in ([(10, None)], [(10, 0)])

    all_sent = [*first, before, *second, mirrored, behind]
    expected = spark_oracle.tables(replace(record, offset=offset) for offset, record in enumerate(all_sent))
    expect_tables(spark, str(warehouse), expected)
    assert open_log(spark, str(warehouse)).count() == len(all_sent)
    expect_shown(command, warehouse, len(expected.readings))


def expect_tables(spark: SparkSession, warehouse: str, expected: spark_oracle.Tables) -> None:
    """Make sure that readings and windows are the expected ones, whenever they were measured."""
    found = open_readings(spark, warehouse).select("device", "stream", "metric", "value", "ce_id").collect()
    assert sorted((r.device, r.stream, r.metric, r.value, r.ce_id) for r in found) == sorted(
        (device, stream, metric, value, ce_id) for _, device, stream, metric, _, value, ce_id, *_ in expected.readings
    )
    windows = window_figures(spark, warehouse).agg(F.count("*"), F.sum("sum")).collect()[0]
    assert tuple(windows) == (len(expected.windows), sum(row.sum for row in expected.windows.values()))


def expect_shown(command: Command, warehouse: Path, readings: int) -> None:
    """Check that commands show all readings, and as many windows as they are asked for."""
    shown = command("windows", "--warehouse", warehouse, "--device", "42", "--limit", "3", "--json")
    assert shown.exit_code == 0, shown.output
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(rows) == 3
    assert shown.stderr.startswith("there are more than these 3 rows: --limit N shows N of them\n")
    assert rows[0]["window_start"].endswith("00.000000Z")
    shown = command("readings", "--warehouse", warehouse, "--limit", "100")
    assert len(shown.output.splitlines()) == 1 + readings


@pytest.mark.long(seconds=100)
def test_records_that_are_large_once_unpacked_are_rejects(
    kafka: Broker,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Compressed, 8 MB take a kilobyte in Kafka, and 101 MB some twelve: too much for little memory, not for ours."""
    topic = "device-inflated"
    inflated = [b'{"t": %d, "text": "%s"}' % (number, b"x" * 8_000_000) for number in range(60)]
    values = [b'{"t": 21.5}', *inflated, b"\x00" * 101_000_000, b'{"t": 22.5}']

    async def send() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=kafka.bootstrap, acks="all", compression_type="zstd", max_request_size=200_000_000
        )
        async with producer:
            for number, value in enumerate(values):
                await producer.send_and_wait(topic, value, key=b"42", headers=reading_headers(number), partition=0)

    asyncio.run(create_topic(kafka.bootstrap, topic))
    asyncio.run(send())
    with monkeypatch.context() as little:
        little.setenv("SPARK_DRIVER_MEMORY", "900m")
        with ingest(kafka, tmp_path, "--once", topics=topic) as process:
            assert process.wait(300) == 3
    assert "Java's memory did not suffice. Give it more" in capfd.readouterr().err
    with ingest(kafka, tmp_path, "--once", topics=topic) as process:
        assert process.wait(300) == 0

    assert [row.value for row in open_readings(spark, str(tmp_path)).orderBy("offset").collect()] == [21.5, 22.5]
    rejects = open_quarantine(spark, str(tmp_path))
    kept = rejects.groupBy("reason").agg(F.count("*").alias("records"), F.max(F.length("value")).alias("bytes"))
    assert sorted(map(tuple, kept.collect())) == [
        ("header: the value is longer than 1048576 bytes, of which the first 65536 are kept", 61, 65_536)
    ]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.long(seconds=180)
def test_lost_records_stop_the_job_with_words_and_go_on_reads_the_rest(
    kafka: Broker, spark: SparkSession, command: Command, new_warehouse: str
) -> None:
    anew, overtaken, kept = "device-lost-anew", "device-lost-some", "device-lost-none"

    def sent(topic: str, *sequences: int, partition: int = 0) -> list[KafkaRecord]:
        return [
            replace(
                reading(f'{{"t": {sequence}}}'.encode(), reading_headers(sequence, time=datetime.now(UTC))),
                topic=topic,
                partition=partition,
            )
            for sequence in sequences
        ]

    def run(*options: str) -> Result:
        topics = f"{anew}|{overtaken}|{kept}"
        source = ["--bootstrap", kafka.bootstrap, "--topics", topics]
        return command("ingest", *source, "--warehouse", new_warehouse, "--once", *options)

    def values() -> list[int]:
        return sorted(int(row.value) for row in open_readings(spark, new_warehouse).select("value").collect())

    asyncio.run(send(kafka, {anew, overtaken, kept}, sent(anew, 1, 2) + sent(kept, 3) + sent(overtaken, 21, 22)))
    assert run().exit_code == 0
    asyncio.run(delete(kafka, anew))
    # More than the old one had: by offsets alone nobody would notice.
    unread = sent(overtaken, 23, 24, 25)
    asyncio.run(send(kafka, {anew}, sent(anew, 11, 12, 13) + sent(kept, 4) + unread))
    asyncio.run(delete_before(kafka, overtaken, 4))

    stopped = run()
    assert stopped.exit_code == FAILED
    assert f"topic {anew} has been deleted and made anew" in stopped.stderr
    deleted = "Kafka has deleted 2 records from offset 2 to 3 before they were read"
    assert f"partition 0 of topic {overtaken}: {deleted}" in stopped.stderr
    assert "--go-on" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert values() == [1, 2, 3, 21, 22]
    gone_on = run("--go-on")
    assert gone_on.exit_code == 0, gone_on.output
    assert f"lost in Kafka before it was read: topic {anew}: nobody knows how many records" in gone_on.stdout
    assert f"lost in Kafka before it was read: topic {overtaken}: 2 records" in gone_on.stdout
    assert values() == [1, 2, 3, 4, 11, 12, 13, 21, 22, 25]

    # From then on it is unchanged. With more partitions a key moves to another one, and a repeated record counts once.
    asyncio.run(add_partition(kafka, overtaken))
    again = replace(unread[-1], partition=2)
    asyncio.run(send(kafka, set(), [*sent(overtaken, 26, partition=2), again, *sent(overtaken, 27)]))
    as_before = run()
    assert as_before.exit_code == 0, as_before.output
    assert {line.partition(" ")[0] for line in as_before.stdout.splitlines()} == {"reading", "batch"}
    assert values() == [1, 2, 3, 4, 11, 12, 13, 21, 22, 25, 26, 27]


async def delete_before(broker: Broker, topic: str, offset: int) -> None:
    """Have Kafka delete records as a retention would."""
    async with administered(broker.bootstrap) as admin:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=offset)})


async def add_partition(broker: Broker, topic: str) -> None:
    async with administered(broker.bootstrap) as admin:
        await admin.create_partitions({topic: NewPartitions(total_count=3)})


async def delete(broker: Broker, topic: str) -> None:
    async with administered(broker.bootstrap) as admin:
        await admin.delete_topics([topic])
        while topic in await admin.list_topics():
            await asyncio.sleep(0.1)


def read_until(told: Iterator[Line], offsets: dict[str, dict[str, int]]) -> list[Line]:
    """Batches up to the one that ends at these offsets."""
    batches = []
    for line in told:
        batches.append(line)
        if offsets.items() <= line["end_offsets"].items():
            return batches
    raise AssertionError(f"ingest ended before {offsets}: {batches}")


def test_a_warehouse_that_is_none_is_named(spark: SparkSession, tmp_path: Path) -> None:
    assert spark is not None
    shown = CliRunner().invoke(main, ["readings", "--warehouse", str(tmp_path)])
    assert shown.exit_code == FAILED
    assert "holds no tables of Sluice" in shown.output
    assert "sluice-cloud ingest" in shown.output


def test_missing_jars_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SPARK_JARS", str(tmp_path))
    (tmp_path / "versions").mkdir()
    shown = CliRunner().invoke(main, ["maintain", "--warehouse", str(tmp_path)])
    assert shown.exit_code == FAILED
    assert "make jars" in shown.output


def test_a_batch_says_what_became_of_its_records() -> None:
    counts = BatchCounts(
        rows=9, duplicates=1, rejected=2, late=4, revised=3, unwindowed=5, deleted=7, corrections=1, seconds=1.25
    )
    assert batch_line(BatchReport(7, counts, {"device-a": 4, "device-b": 7}, 90.0, {})).split("; ") == [
        "batch 7: 9 records in 1.2 s (7/s), 11 behind, 90 s after Kafka",
        "1 seen before",
        "2 rejected (`sluice-cloud quarantine list` says why)",
        "4 came more than a minute after the end of their windows (3 of them)",
        "5 in no window (their time is unknown or cannot be)",
        "7 of devices whose data was deleted (their content is not kept)",
        "1 put earlier times right",
    ]


def test_one_warehouse_has_windows_of_one_length(spark: SparkSession, command: Command, tmp_path: Path) -> None:
    create_windows(spark, folder_of(str(tmp_path), 1), 30)

    # Something that takes connections is enough: the windows are looked at before Kafka is read.
    with socket.create_server(("127.0.0.1", 0)) as broker:
        bootstrap = f"127.0.0.1:{broker.getsockname()[1]}"
        shown = command("ingest", "--bootstrap", bootstrap, "--warehouse", tmp_path)
    assert shown.exit_code == 2, shown.output
    assert "Go on with windows of 30 s" in shown.output
    assert not (tmp_path / "v1" / "log").exists()
