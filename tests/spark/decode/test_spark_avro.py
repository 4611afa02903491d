"""Avro from end to end: a real schema registry, Apache's own writer, Kafka, and the tables."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from demo.kafka_broker import Broker
from spark.decode.streams_file import parse_streams
from spark.ingest_job import IngestSettings, Listener, run_ingest
from spark.log.quarantine_view import open_quarantine
from spark.log.readings_view import open_readings
from spark.source.kafka_source import KafkaSource
from tests.spark.decode.test_codecs import SCHEMA
from tests.support.schema_registry import SchemaRegistry, schema_registry
from tests.support.spark_kafka_feed import expect_senders_times, send
from tests.support.spark_records import reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.usefixtures("interpreted")]

SUBJECT = "climate"
GROWN = SCHEMA | {"fields": [*SCHEMA["fields"], {"name": "humidity", "type": ["null", "long"], "default": None}]}
NO_RECORD = "string"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[SchemaRegistry]:
    with schema_registry(tmp_path) as started:
        yield started


def framed(spark: SparkSession, number: int, schema: object, record: object) -> bytes:
    """A record as Confluent's serialiser frames it, written by Apache's reference implementation (in Spark's jars)."""
    java = spark._jvm
    assert java is not None
    avro = java.org.apache.avro
    parsed = avro.Schema.Parser().parse(json.dumps(schema))
    value = avro.generic.GenericDatumReader(parsed).read(
        None, avro.io.DecoderFactory.get().jsonDecoder(parsed, json.dumps(record))
    )
    out = java.java.io.ByteArrayOutputStream()
    encoder = avro.io.EncoderFactory.get().binaryEncoder(out, None)
    avro.generic.GenericDatumWriter(parsed).write(value, encoder)
    encoder.flush()
    return b"\x00" + number.to_bytes(4) + bytes(out.toByteArray())


NOON = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=10)


def climate(celsius: float, **more: object) -> dict[str, object]:
    # Apache's reader takes bytes in JSON as Latin-1: -1500 thousandths are fa 24.
    room = {"room": {"lux": 300.25}, "other": {"lux": 0.5}}
    rest = {"tags": ["x", "y"], "kind": "b", "more": {"k": 7}, "raw": "\u0001\u0002", "on": True}
    return {"celsius": celsius, "pascal": {"long": 101_325}, "litres": "\u00fa\u0024"} | room | rest | more


FOUND = {"lux": Decimal("300.25"), "litres": Decimal("-1.5")}
"""Metrics of each of the payloads."""


@dataclass(frozen=True)
class Job:
    """`ingest --once` of the topic, with a registry, and the tables it leaves."""

    kafka: Broker
    spark: SparkSession
    registry: SchemaRegistry
    warehouse: str
    topic: str

    def send(self, first: int, *payloads: bytes) -> None:
        """Send payloads, a second apart, with the offsets from `first` on."""
        records = []
        for sequence, payload in enumerate(payloads, first):
            time = NOON + timedelta(seconds=sequence)
            headers = reading_headers(sequence, time=time, content_type="application/avro")
            record = reading(payload, headers, offset=sequence)
            records.append(replace(record, topic=self.topic, timestamp=time))
        asyncio.run(send(self.kafka, records))

    def run(self) -> None:
        streams = parse_streams(
            f"""
            avro.registry = "{self.registry.url}"
            [streams.{self.topic}]
            codec = "avro"
            metrics.celsius = {{ decimals = 2 }}
            metrics.lux = {{ from = "room.lux" }}
            metrics.litres = {{}}
            """,
            Path("streams.toml"),
        )
        source = KafkaSource(self.kafka.bootstrap, self.topic)
        checkpoint = f"{self.warehouse}-checkpoint"
        settings = IngestSettings(source, self.warehouse, checkpoint, streams=streams, once=True)
        run_ingest(self.spark, settings, threading.Event(), Listener(warn=expect_senders_times))

    def values(self, sequence: int) -> dict[str, Decimal]:
        event_time = F.lit(NOON + timedelta(seconds=sequence))
        rows = open_readings(self.spark, self.warehouse).where(F.col("event_time") == event_time).collect()
        return {row.metric: row.value for row in rows}


@pytest.fixture
def job(
    kafka: Broker, spark: SparkSession, registry: SchemaRegistry, new_warehouse: str, request: pytest.FixtureRequest
) -> Job:
    return Job(kafka, spark, registry, new_warehouse, request.node.name)


@pytest.mark.long(seconds=60)
def test_avro_by_a_real_registry_whose_schema_grows(spark: SparkSession, job: Job) -> None:
    one, two = job.registry.register(SUBJECT, SCHEMA), job.registry.register(SUBJECT, GROWN)
    plain = job.registry.register("somebody-elses", NO_RECORD)
    unknown = 4_000_000
    assert two != one
    job.send(
        0,
        framed(spark, one, SCHEMA, climate(21.53)),
        framed(spark, unknown, SCHEMA, climate(21.53)),
        framed(spark, plain, NO_RECORD, "21.53"),
        # A writer with a new field that nobody asked for.
        framed(spark, two, GROWN, climate(22.5, humidity={"long": 45})),
    )
    job.run()

    assert job.values(0) == FOUND | {"celsius": Decimal("21.53")}
    assert job.values(3) == FOUND | {"celsius": Decimal("22.5")}
    rejects = open_quarantine(spark, job.warehouse).orderBy("offset").collect()
    assert [(row.offset, row.kind) for row in rejects] == [(1, "undecodable"), (2, "undecodable")]
    assert "does not know the payload's schema" in rejects[0].reason
    assert "not one of a record" in rejects[1].reason


@pytest.mark.long(seconds=45)
def test_a_real_registry_that_hangs_stops_the_job_and_loses_nothing(spark: SparkSession, job: Job) -> None:
    job.send(0, framed(spark, job.registry.register(SUBJECT, SCHEMA), SCHEMA, climate(21.53)))
    job.run()
    assert job.values(0) == FOUND | {"celsius": Decimal("21.53")}

    # A schema that is new comes just as the registry hangs.
    two = job.registry.register(SUBJECT, GROWN)
    job.send(1, framed(spark, two, GROWN, climate(22.5, humidity={"long": 45})))
    url = job.registry.url
    job.registry.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Exception, match=rf"schema registry {url} does not give schema {two}: .*timed out"):
            job.run()
    finally:
        job.registry.process.send_signal(signal.SIGCONT)
    assert job.values(1) == {}

    job.run()

    assert job.values(1) == FOUND | {"celsius": Decimal("22.5")}
    assert open_quarantine(spark, job.warehouse).count() == 0
