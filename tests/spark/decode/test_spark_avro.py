"""Avro from end to end: a real schema registry, Apache's own writer, Kafka, and the tables."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
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
from tests.support.spark_kafka_feed import send
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.usefixtures("interpreted")]

TOPIC = "device-avro-climate"
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


def test_avro_by_a_real_registry_while_its_schema_grows_and_it_stops_answering(
    kafka: Broker,
    spark: SparkSession,
    registry: SchemaRegistry,
    new_warehouse: str,
    tmp_path: Path,
) -> None:
    streams = parse_streams(
        f"""
        avro.registry = "{registry.url}"
        [streams.{TOPIC}]
        codec = "avro"
        metrics.celsius = {{ decimals = 2 }}
        metrics.lux = {{ from = "room.lux" }}
        metrics.litres = {{}}
        """,
        Path("streams.toml"),
    )
    noon = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=10)

    def sent(sequence: int, payload: bytes) -> KafkaRecord:
        headers = reading_headers(sequence, time=noon + timedelta(seconds=sequence), content_type="application/avro")
        record = replace(reading(payload, headers), topic=TOPIC, partition=0, offset=sequence)
        return replace(record, timestamp=noon + timedelta(seconds=sequence))

    def climate(celsius: float, **more: object) -> dict[str, object]:
        # Apache's reader takes bytes in JSON as Latin-1: -1500 thousandths are fa 24.
        room = {"room": {"lux": 300.25}, "other": {"lux": 0.5}}
        rest = {"tags": ["x", "y"], "kind": "b", "more": {"k": 7}, "raw": "\u0001\u0002", "on": True}
        return {"celsius": celsius, "pascal": {"long": 101_325}, "litres": "\u00fa\u0024"} | room | rest | more

    def run() -> None:
        source = KafkaSource(kafka.bootstrap, TOPIC)
        settings = IngestSettings(source, new_warehouse, str(tmp_path / "checkpoint"), streams=streams, once=True)
        run_ingest(spark, settings, threading.Event(), Listener(warn=pytest.fail))

    def values(sequence: int) -> dict[str, Decimal]:
        event_time = F.lit(noon + timedelta(seconds=sequence))
        rows = open_readings(spark, new_warehouse).where(F.col("event_time") == event_time).collect()
        return {row.metric: row.value for row in rows}

    one = registry.register(TOPIC, SCHEMA)
    plain = registry.register("somebody-elses", NO_RECORD)
    unknown = 4_000_000
    asyncio.run(
        send(
            kafka,
            [
                sent(0, framed(spark, one, SCHEMA, climate(21.53))),
                sent(1, framed(spark, unknown, SCHEMA, climate(21.53))),
                sent(2, framed(spark, plain, NO_RECORD, "21.53")),
            ],
        )
    )
    run()

    assert values(0) == {"celsius": Decimal("21.53"), "lux": Decimal("300.25"), "litres": Decimal("-1.5")}
    rejects = open_quarantine(spark, new_warehouse).orderBy("offset").collect()
    assert [(row.offset, row.kind) for row in rejects] == [(1, "undecodable"), (2, "undecodable")]
    assert "does not know the payload's schema" in rejects[0].reason
    assert "not one of a record" in rejects[1].reason

    # A writer that has a new field, of which nothing was ever asked, just as the registry hangs.
    two = registry.register(TOPIC, GROWN)
    assert two != one
    asyncio.run(send(kafka, [sent(3, framed(spark, two, GROWN, climate(22.5, humidity={"long": 45})))]))
    registry.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Exception, match=rf"schema registry {registry.url} does not give schema {two}: .*timed out"):
            run()
    finally:
        registry.process.send_signal(signal.SIGCONT)
    assert open_quarantine(spark, new_warehouse).count() == 2
    assert values(3) == {}

    run()

    assert values(3) == {"celsius": Decimal("22.5"), "lux": Decimal("300.25"), "litres": Decimal("-1.5")}
    assert open_quarantine(spark, new_warehouse).count() == 2
