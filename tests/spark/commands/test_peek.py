"""`sluice-cloud peek` of a real Kafka: what it shows of a topic, and that it leaves nothing there."""

import asyncio
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from click.testing import CliRunner, Result

from demo.kafka_broker import Broker
from spark.cli import FAILED, main
from tests.support.plain_warehouse import PlainWarehouse, row
from tests.support.spark_kafka_feed import send
from tests.support.spark_records import NOON, reading, reading_headers
from tests.support.waiting import patience

pytestmark = pytest.mark.kafka

SLUICE_CLOUD = str(Path(sys.executable).parent / "sluice-cloud")
DECLARED = '[streams."thermo-*"]\ncodec = "json"\nmetrics.celsius = { unit = "°C", max = 100 }\n'


@pytest.fixture(scope="module")
def topic(kafka: Broker) -> str:
    """Five readings of two devices, a minute apart, the last of them too hot."""
    name = f"thermo-{uuid.uuid4().hex[:8]}"
    records = [
        replace(
            reading(
                b'{"celsius": %d.50}' % (5 * number * number * number),
                reading_headers(number, time=NOON + timedelta(minutes=number)),
                offset=number // 2,
                key=b"43" if number == 3 else b"42",
            ),
            topic=name,
            partition=number % 2,
            timestamp=NOON + timedelta(minutes=number, seconds=2),
        )
        for number in range(5)
    ]
    asyncio.run(send(kafka, records))
    return name


@pytest.fixture
def peek(kafka: Broker, topic: str, tmp_path: Path) -> Callable[..., Result]:
    declared = tmp_path / "streams.toml"
    declared.write_text(DECLARED)

    def run(*words: str) -> Result:
        given = ["peek", topic, "--bootstrap", kafka.bootstrap, "--streams", str(declared), *words]
        return CliRunner().invoke(main, given, catch_exceptions=False)

    return run


def minutes(shown: Result) -> list[str]:
    assert shown.exit_code == 0, shown.output
    return [json.loads(line)["event_time"][14:16] for line in shown.stdout.splitlines()]


def test_a_line_has_all_that_one_asks_of_a_record(peek: Callable[..., Result], topic: str) -> None:
    shown = peek("--limit", "2")
    wrong = "out-of-range: celsius is above 100 or outside decimal(18,6)"
    assert shown.stdout.splitlines() == [
        f"2026-03-14T12:03:00Z  43  {wrong}: 135.5  estimated ±1 ms  late 2.0 s  1:1",
        f"2026-03-14T12:04:00Z  42  {wrong}: 320.5  estimated ±1 ms  late 2.0 s  0:2",
    ]
    assert "partition 0: offsets 0 to 2" in shown.stderr
    shown = peek("--offset", "0", "--limit", "1", "--raw", "--partition", "1")
    assert shown.stdout.splitlines() == [
        "2026-03-14T12:01:00Z  42  celsius 5.5 °C  estimated ±1 ms  late 2.0 s  1:0",
        '    {"celsius": 5.50}',
    ]
    assert "there are more than these 1 record: --limit 10" in shown.stderr
    (first, *_) = map(json.loads, peek("--json", "--raw", "--partition", "1").stdout.splitlines())
    assert first["metrics"] == [{"name": "celsius", "value": "5.500000", "unit": "°C", "ago_us": None}]
    assert (first["topic"], first["partition"], first["offset"], first["late_s"]) == (topic, 1, 0, 2.0)
    assert first["value"] == "eyJjZWxzaXVzIjogNS41MH0="


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], ["00", "01", "02", "03", "04"]),
        (["--limit", "2"], ["03", "04"]),
        (["--device", "43"], ["03"]),
        (["--device", "42", "--limit", "2"], ["02", "04"]),
        (["--since", "2026-03-14T12:03"], ["03", "04"]),
        (["--since", "2026-03-14T13:04", "--zone", "Europe/Berlin"], ["04"]),
        (["--since", "2027-01-01"], []),
        (["--partition", "0"], ["00", "02", "04"]),
        (["--offset", "1", "--partition", "0"], ["02", "04"]),
        (["--offset", "99"], []),
    ],
)
def test_it_begins_where_it_is_told(peek: Callable[..., Result], words: list[str], found: list[str]) -> None:
    assert sorted(minutes(peek("--json", *words))) == found


def test_it_follows_until_it_is_stopped_and_leaves_no_group(kafka: Broker, topic: str, tmp_path: Path) -> None:
    name = f"{topic}-live"
    record = replace(reading(b'{"celsius": 1}', reading_headers(0)), topic=name)
    asyncio.run(send(kafka, [record]))
    with subprocess.Popen(
        [SLUICE_CLOUD, "peek", name, "--bootstrap", kafka.bootstrap, "--follow"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/nonexistent", "HOME": str(tmp_path)},
    ) as following:
        assert following.stdout is not None
        assert "celsius 1 " in following.stdout.readline()
        asyncio.run(_more(kafka, name))
        assert "celsius 2 " in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        assert following.wait(patience(60)) == 0
    assert name not in asyncio.run(_topics_of_groups(kafka))


async def _more(kafka: Broker, name: str) -> None:
    from aiokafka import AIOKafkaProducer

    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        await producer.send_and_wait(name, b'{"celsius": 2}', key=b"42", headers=reading_headers(1), partition=0)


async def _topics_of_groups(kafka: Broker) -> set[str]:
    """The topics of which a consumer group has offsets. Other tests use groups on this broker meanwhile."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        groups = [name for name, _ in await admin.list_consumer_groups()]
        return {place.topic for name in groups for place in await admin.list_consumer_group_offsets(name)}
    finally:
        await admin.close()


def test_the_tables_say_how_far_they_are_behind(peek: Callable[..., Result], topic: str, tmp_path: Path) -> None:
    warehouse = PlainWarehouse(tmp_path / "warehouse")
    warehouse.take(row(1, 0, topic=topic, offset=0), row(2, 0, topic="other", offset=77))
    said = " ".join(peek("--warehouse", str(warehouse.path)).stderr.split())
    assert "partition 0: offsets 0 to 2; the tables have all before 1, 2 behind" in said
    assert "partition 1: offsets 0 to 1; the tables have none of it" in said
    # A topic of this name, with more records, was deleted.
    warehouse.take(row(3, 0, topic=topic, offset=9))
    said = " ".join(peek("--warehouse", str(warehouse.path)).stderr.split())
    assert "partition 0: offsets 0 to 2; the tables have all to 9: was the topic made anew?" in said


def test_the_latest_are_the_latest_of_all_partitions(kafka: Broker) -> None:
    topic = f"thermo-{uuid.uuid4().hex[:8]}"
    # Kafka's times are the senders'. All of partition 0 are later than those of partition 1.
    times = [NOON.replace(hour=22), NOON.replace(hour=2), NOON.replace(hour=23), NOON.replace(year=1970)]
    records = [
        replace(
            reading(b'{"celsius": 1}', reading_headers(number), offset=number // 2),
            topic=topic,
            partition=number % 2,
            timestamp=time,
        )
        for number, time in enumerate(times)
    ]
    asyncio.run(send(kafka, records))

    def run(*words: str) -> list[tuple[int, int]]:
        given = ["peek", topic, "--bootstrap", kafka.bootstrap, "--json", *words]
        done = CliRunner().invoke(main, given, catch_exceptions=False)
        return [(told["partition"], told["offset"]) for told in map(json.loads, done.stdout.splitlines())]

    assert run("--limit", "2") == [(0, 0), (0, 1)]
    assert run() == [(1, 1), (1, 0), (0, 0), (0, 1)]
    assert len(run("--since", "1960-01-01")) == 4


def test_mistakes_are_told_in_words(kafka: Broker, topic: str, peek: Callable[..., Result], tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(main, ["peek", *words], catch_exceptions=False)
        assert done.exit_code == FAILED, done.output
        return " ".join(done.output.split())

    assert f"Kafka has no topic {topic[:-1]}. Did you mean {topic}" in run(topic[:-1], "--bootstrap", kafka.bootstrap)
    assert "Kafka cannot be reached" in run(topic, "--bootstrap", "localhost:1")
    assert f"{topic} has no partition 9: it has 2" in run(topic, "--bootstrap", kafka.bootstrap, "--partition", "9")
    settings = tmp_path / "kafka.properties"
    settings.write_text("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=GSSAPI\n")
    assert "sasl.mechanism GSSAPI is not known" in run(
        topic, "--bootstrap", kafka.bootstrap, "--kafka-config", str(settings)
    )
    assert peek("--offset", "1", "--last", "2h").exit_code == 2
    said = peek("--device", "nobody").stderr
    assert "no record of nobody among the 5 offsets that were searched" in " ".join(said.split())
    # To ask for a topic has not made it.
    assert "Kafka has no topic" in run(topic[:-1], "--bootstrap", kafka.bootstrap)
