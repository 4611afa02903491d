"""Gateways with topics of their own: who writes elsewhere in their name, or here in another's, is not believed."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession

from spark import batch_job
from spark.batch_job import BatchJob
from spark.decode.topic_speakers import FAULT
from spark.engine.warehouse_folder import only_writer
from spark.log.log_table import BatchId
from spark.log.quarantine_view import open_quarantine
from spark.log.readings_view import open_readings
from spark.registry.registry import Gateway, Registry
from spark.registry.registry_table import load_registry
from spark.upkeep.quarantine_retry import retry
from spark.upkeep.replay_job import replay
from spark.views.gateways_view import open_gateways
from tests.support import hostile
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, changed, kafka_frame, reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

REGISTRY = Registry(
    gateways=(
        Gateway("plant", "gw-1", topics=("site7.*", "device-seven")),
        Gateway("plant", "gw-2", topics=("site7.*",)),
        Gateway("plant", "gw-3"),
    )
)


def said(topic: str, gateway: str, sequence: int, offset: int, value: bytes = b'{"t": 1}') -> KafkaRecord:
    """A reading; each gateway's buffer bears its number."""
    headers = reading_headers(sequence, time=NOON + timedelta(seconds=sequence), buffer=gateway[-1] * 16)
    headers = changed(headers, "ce_source", f"/plant/{gateway}")
    return replace(reading(value, headers, offset=offset), topic=topic)


def beat(topic: str, gateway: str, sequence: int, offset: int) -> KafkaRecord:
    record = said(topic, gateway, sequence, offset, json.dumps(hostile.HEARTBEAT).encode())
    return replace(record, headers=changed(record.headers or [], "ce_type", "sluice.gateway.heartbeat"))


def take(job: BatchJob, number: int, *records: KafkaRecord) -> None:
    job.take(kafka_frame(job.spark, list(records)), BatchId("query", number), {})


def rejects(spark: SparkSession, warehouse: str) -> dict[tuple[str, int], tuple[str, bool]]:
    rows = open_quarantine(spark, warehouse).collect()
    return {(row.topic, row.offset): (row.reason, row.retried) for row in rows}


def values(spark: SparkSession, warehouse: str) -> list[tuple[str, str, int]]:
    rows = open_readings(spark, warehouse).collect()
    return sorted((row.gateway, row.stream, int(row.value)) for row in rows)


def test_messages_in_anothers_topic_or_name_are_rejects_and_cost_nobody_a_reading(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "REGISTRY_S", 0.0)
    load_registry(spark, new_warehouse, REGISTRY)
    job = BatchJob(spark, new_warehouse)
    forged = [
        # The ids that the true gateway will use next, and its heartbeat, where anybody may write.
        *(said("device-thermo", "gw-1", sequence, sequence, b'{"t": 666}') for sequence in range(10, 13)),
        beat("gateway-events", "gw-1", 13, 0),
        # A gateway that shares topics, and one that is not registered, where others have theirs.
        said("site7.device-thermo", "gw-3", 1, 100),
        said("site7.device-thermo", "gw-9", 1, 101),
        said("device-seven", "gw-2", 7, 0),
    ]
    take(job, 0, *forged, said("device-thermo", "gw-3", 2, 50), said("device-other", "gw-9", 2, 0))
    true = [said("site7.device-thermo", "gw-1", sequence, sequence) for sequence in range(10, 14)]
    true += [said("site7.device-thermo", "gw-2", 7, 200), said("device-seven", "gw-1", 14, 1)]
    take(job, 1, *true, beat("site7.gateway-events", "gw-2", 8, 0))

    taken = [("gw-1", "device-seven", 1), *[("gw-1", "site7.device-thermo", 1)] * 4, ("gw-2", "site7.device-thermo", 1)]
    taken += [("gw-3", "device-thermo", 1), ("gw-9", "device-other", 1)]
    assert values(spark, new_warehouse) == taken
    assert rejects(spark, new_warehouse) == {(each.topic, each.offset): (FAULT, False) for each in forged}
    job.save()
    assert {row.gateway for row in open_gateways(spark, new_warehouse).collect()} == {"gw-2"}

    # The registry was wrong about one gateway. Its records are read after all, once.
    mended = Registry(gateways=(*REGISTRY.gateways[:2], Gateway("plant", "gw-3", topics=("site7.*", "device-thermo"))))
    load_registry(spark, new_warehouse, mended)
    take(job, 2, said("site7.device-thermo", "gw-3", 3, 102))
    assert retry(job).read == 1
    assert values(spark, new_warehouse) == sorted([*taken, *[("gw-3", "site7.device-thermo", 1)] * 2])
    assert rejects(spark, new_warehouse)["site7.device-thermo", 100] == (FAULT, True)
    assert retry(job).read == 0


@pytest.mark.long(seconds=25)
def test_a_replay_judges_all_records_by_the_registry_as_it_is_then(spark: SparkSession, new_warehouse: str) -> None:
    """Other gateways own the topics then. Believed records become rejects, and rejects are read, heartbeats too."""
    load_registry(spark, new_warehouse, REGISTRY)
    job = BatchJob(spark, new_warehouse)
    topic, events = "site7.device-thermo", "site7.gateway-events"
    records = [
        said(topic, "gw-1", 1, 0),
        said(topic, "gw-2", 2, 1),
        beat(events, "gw-2", 3, 0),
        said(topic, "gw-3", 4, 2),
        beat(events, "gw-3", 5, 1),
        # In the name of the first, with the id of its reading: never a copy of it, nor its reading.
        said("device-thermo", "gw-1", 1, 9, b'{"t": 666}'),
    ]
    take(job, 0, *records)
    job.save()
    assert values(spark, new_warehouse) == [("gw-1", topic, 1), ("gw-2", topic, 1)]
    assert {row.gateway for row in open_gateways(spark, new_warehouse).collect()} == {"gw-2"}
    elsewhere = Gateway("plant", "gw-2", topics=("site8.*",))
    moved = Registry(gateways=(REGISTRY.gateways[0], elsewhere, Gateway("plant", "gw-3", topics=("site7.*",))))
    load_registry(spark, new_warehouse, moved)
    assert values(spark, new_warehouse) == [("gw-1", topic, 1), ("gw-2", topic, 1)], "nothing is judged before"

    replay(spark, new_warehouse, None, None, only_writer, lambda _: None)

    assert values(spark, new_warehouse) == [("gw-1", topic, 1), ("gw-3", topic, 1)]
    assert {row.gateway for row in open_gateways(spark, new_warehouse).collect()} == {"gw-3"}
    expected = {(topic, 1): (FAULT, False), (events, 0): (FAULT, False), ("device-thermo", 9): (FAULT, False)}
    assert rejects(spark, new_warehouse) == expected
