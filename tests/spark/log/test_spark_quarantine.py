"""Declarations of streams, and the fate of records that do not keep to them."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.batch_job import BatchJob
from spark.cli import main
from spark.decode.codec_declarations import Streams
from spark.decode.record_frames import typed_records
from spark.decode.record_rules import TOO_LARGE
from spark.decode.streams_file import parse_streams
from spark.log.log_table import BatchId, open_log, with_topic_ids
from spark.log.quarantine_view import open_quarantine
from spark.log.readings_view import open_readings
from spark.log.warehouse_version import current_version
from spark.upkeep.device_deletion import delete_device
from spark.views.windows_view import open_windows
from tests.support import spark_oracle
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, kafka_frame, reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


STRICT = """
[streams.device-thermo]
codec = "json"
[streams.device-thermo.metrics.celsius]
from = "t"
decimals = 1
max = 50
[windows]
sizes = [300, 3600, 86400]
percentiles = [10, 99.9]
[times]
plausible_from = 2026-03-14
ahead_max_s = 60
"""
MENDED = STRICT.replace("max = 50", "max = 500").replace(
    "[windows]", '[streams.device-new]\ncodec = "number"\nconflicts = "keep"\n[windows]'
)


def declared(text: str) -> Streams:
    return parse_streams(text, Path("streams.toml"))


def sent(sequence: int, payload: str, topic: str = "device-thermo", **changes: object) -> KafkaRecord:
    headers = reading_headers(sequence, time=NOON + timedelta(seconds=sequence))
    record = replace(reading(payload.encode(), headers, offset=sequence), topic=topic, timestamp=NOON)
    return replace(record, **changes)  # type: ignore[arg-type]


RECORDS = [
    sent(1, '{"t": 21.44, "lux": 7}'),
    sent(2, '{"t": 451}'),
    sent(3, "21.5"),
    sent(4, "21.5", "device-new"),
    sent(4, "21.6", "device-new", offset=5),
    # Both at the very edge of the range.
    sent(60, '{"t": 1}'),
    sent(61, '{"t": 1}'),
]


def take(job: BatchJob, number: int, records: Iterable[KafkaRecord]) -> None:
    job.take(kafka_frame(job.spark, list(records)), BatchId("query", number), {"device-thermo": "id-1"})


def kinds(spark: SparkSession, warehouse: str) -> dict[tuple[str, int], tuple[str, bool]]:
    rows = open_quarantine(spark, warehouse).collect()
    return {(row.topic, row.offset): (row.kind, row.retried) for row in rows}


def values(spark: SparkSession, warehouse: str) -> list[Row]:
    return open_readings(spark, warehouse).orderBy("event_time", "value").select("stream", "metric", "value").collect()


@pytest.mark.long(seconds=70)
def test_a_reject_that_a_mended_declaration_can_read_becomes_a_reading(spark: SparkSession, tmp_path: Path) -> None:
    warehouse = str(tmp_path)
    strict, mended = declared(STRICT), declared(MENDED)
    take(BatchJob(spark, warehouse, strict), 0, RECORDS)
    assert kinds(spark, warehouse) == {
        ("device-thermo", 2): ("out-of-range", False),
        ("device-thermo", 3): ("undecodable", False),
        ("device-new", 4): ("undeclared-stream", False),
        ("device-new", 5): ("undeclared-stream", False),
        ("device-thermo", 61): ("implausible-time", False),
    }
    assert len(spark_oracle.tables(RECORDS, strict).readings) == len(values(spark, warehouse)) == 2
    (window,) = open_windows(spark, warehouse).collect()
    assert (window.n, window.p10, window.p99_9) == (2, Decimal(1), Decimal("21.4"))
    assert (window.window_end - window.window_start).total_seconds() == 300

    (tmp_path / "streams.toml").write_text(MENDED)
    command = ["quarantine", "retry", "--warehouse", warehouse, "--streams", str(tmp_path / "streams.toml")]
    shown = CliRunner().invoke(main, command)

    assert shown.exit_code == 0, shown.output
    assert shown.output == f"4 rejects read again by declarations {mended.version}: 3 can be read now\n"
    assert kinds(spark, warehouse) == {
        ("device-thermo", 2): ("out-of-range", True),
        ("device-thermo", 3): ("undecodable", False),
        ("device-new", 4): ("undeclared-stream", True),
        ("device-new", 5): ("undeclared-stream", True),
        ("device-thermo", 61): ("implausible-time", False),
    }
    # As if it had been declared so from the beginning.
    expected = spark_oracle.tables(RECORDS, mended)
    rows = open_readings(spark, warehouse).orderBy("device", "stream", "metric", "event_time", "value").collect()
    assert [(row.stream, row.metric, row.value) for row in rows] == [
        (stream, metric, value) for _, _, stream, metric, _, value, *_ in expected.readings
    ]
    assert open_windows(spark, warehouse).agg(F.sum("n")).collect()[0][0] == len(expected.readings) == 5
    # Once more there is nothing more to be read, and a reject stays in `log` as it was.
    shown = CliRunner().invoke(main, ["quarantine", "retry", "--warehouse", warehouse])
    assert shown.output == f"1 reject read again by declarations {mended.version}: 0 can be read now\n"
    log = open_log(spark, warehouse)
    assert log.count() == len(RECORDS) + 3
    assert log.where("reject_reason IS NOT NULL").count() == 4
    assert {row.declarations for row in log.select("declarations").collect()} == {strict.version, mended.version}
    version = current_version(spark, warehouse)
    assert version is not None
    assert (version.number, version.streams) == (1, mended)


@pytest.mark.long(seconds=40)
def test_a_retry_counts_nothing_twice_that_came_again_meanwhile(spark: SparkSession, tmp_path: Path) -> None:
    warehouse = str(tmp_path)
    job = BatchJob(spark, warehouse, declared(STRICT))
    take(job, 0, RECORDS[:2])
    job.save()
    # The declaration is mended, and Kafka brings a copy of the reject before it is retried.
    again = BatchJob(spark, warehouse, declared(MENDED))
    take(again, 1, [replace(RECORDS[1], offset=7)])
    again.save()
    assert len(values(spark, warehouse)) == 2

    shown = CliRunner().invoke(main, ["quarantine", "retry", "--warehouse", warehouse])

    assert shown.exit_code == 0, shown.output
    assert [(row.metric, row.value) for row in values(spark, warehouse)] == [
        ("celsius", Decimal("21.400000")),
        ("celsius", Decimal("451.000000")),
    ]
    listed = CliRunner().invoke(main, ["quarantine", "list", "--warehouse", warehouse])
    assert "out-of-range: celsius" in listed.output


FOREIGN = ("traceparent", b"00-4bf92f3577b34da6-00f067aa0ba902b7-01")


def reject_for_headers(spark: SparkSession, warehouse: str, records: Iterable[KafkaRecord], *faults: str) -> None:
    """Have an earlier program's rejects in `log`: key, value and headers as they came, and nothing made of them."""
    job = BatchJob(spark, warehouse)
    typed = typed_records(kafka_frame(spark, [reading()]))
    of_kafka = {"kafka_timestamp": NOON, "device": "42", "stream": "device-thermo", "key": "42"}
    rows = [
        {
            **dict.fromkeys(typed.columns),
            **of_kafka,
            **{name: getattr(record, name) for name in ("topic", "partition", "offset", "value", "headers")},
            "header_fault": fault,
        }
        for record, fault in zip(records, faults, strict=True)
    ]
    job.take_records(
        with_topic_ids(spark.createDataFrame(rows, typed.schema), {"device-thermo": "id-1"}), BatchId("query", 0)
    )
    job.save()


@pytest.mark.long(seconds=20)
def test_what_was_rejected_of_a_deleted_device_is_not_read_again(spark: SparkSession, new_warehouse: str) -> None:
    records = [reading(b'{"t": 21.5}', [FOREIGN, *reading_headers(1, time=NOON)], offset=1)]
    reject_for_headers(spark, new_warehouse, records, "the headers are not the contract's")
    delete_device(spark, new_warehouse, "plant", "42")

    shown = CliRunner().invoke(main, ["quarantine", "retry", "--warehouse", new_warehouse])

    assert shown.exit_code == 0, shown.output
    assert shown.output == "1 reject read again by declarations none: 0 can be read now\n"
    assert values(spark, new_warehouse) == []


@pytest.mark.long(seconds=40)
def test_a_reading_that_was_rejected_for_a_foreign_header_can_be_read_again(
    spark: SparkSession, new_warehouse: str
) -> None:
    usual = reading_headers(1, time=NOON)
    records = [
        reading(b'{"t": 21.5}', [FOREIGN, *usual], offset=1),
        reading(b'{"t": 22.5}', usual[1:], offset=2),
        reading(b'{"t": 23.5}', [*usual, FOREIGN], offset=3),
    ]
    not_ours = "the headers are not the contract's"
    reject_for_headers(spark, new_warehouse, records, not_ours, not_ours, TOO_LARGE)
    assert values(spark, new_warehouse) == []

    shown = CliRunner().invoke(main, ["quarantine", "retry", "--warehouse", new_warehouse])

    assert shown.exit_code == 0, shown.output
    assert shown.output == "3 rejects read again by declarations none: 1 can be read now\n"
    assert [row.value for row in values(spark, new_warehouse)] == [Decimal("21.5")]
    (kept,) = open_log(spark, new_warehouse).where("reject_reason IS NULL").collect()
    assert [(header.key, bytes(header.value)) for header in kept.headers] == [FOREIGN]

    shown = CliRunner().invoke(main, ["replay", "--warehouse", new_warehouse])

    assert shown.exit_code == 0, shown.output
    assert [row.value for row in values(spark, new_warehouse)] == [Decimal("21.5")]
    rejects = open_quarantine(spark, new_warehouse).orderBy("offset").collect()
    # The present program's reason for a header; and a value that was cut stays as it was.
    assert [row.reason for row in rejects] == ["header: ce_specversion is missing", f"header: {TOO_LARGE}"]
