"""The desk's answers are Spark's: of tables in which everything goes wrong, after each thing that is done to them."""

import asyncio
import queue
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from demo.kafka_broker import OwnBroker
from spark.batch_job import BatchJob
from spark.desk import tables, windows_sql
from spark.engine.warehouse_folder import only_writer
from spark.ingest_job import BatchReport, IngestSettings, Listener, run_ingest
from spark.log.log_table import BatchId
from spark.source.kafka_source import KafkaSource
from spark.upkeep.replay_job import replay
from spark.upkeep.table_upkeep import maintain
from tests.support.desk_equality import expect_limits_to_choose, expect_same_answers
from tests.support.sizes import SEED, WHOLE, size
from tests.support.spark_kafka_feed import send
from tests.support.spark_records import EPOCH, NOON, drawn_batches, drawn_records, kafka_frame
from tests.support.ugly_tables import change, counted_records, register_and_lose, streams, taken

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900), pytest.mark.usefixtures("interpreted")]

UGLY = size(250, 1_500)
COUNTED = size(240, 900)
"""Readings of sensors that count, some of which are missing, refused or told to be lost."""
MEANWHILE = size(600, 1_500)
"""Drawn records, and as many of sensors that count, that `ingest` takes while both engines are asked."""
BATCHES = size(20, 30)
ROUNDS = 2
"""Comparisons that meet a commit."""
SIZES_S = size((600,), (60, 600, 86_400))
VIEWS = size(("readings", "window_changes", "gaps", "losses", "gateways", "quarantine"), tables.VIEWS)
OTHER_RULES = {
    "FINDING": {
        "span.to_us >= asked_to": "span.to_us >= asked_from",
        "until_us > asked_from": "until_us > asked_to",
        "from_us < asked_to": "from_us < asked_from",
        "span.run = loss.run AND": "",
        "coalesce(proof.last_us < asked_to, TRUE)": "FALSE",
        "'watermark'": "'sequence'",
    },
    "STATUS": {"complete_with_loss": "complete"},
    "WHY": {"len(found.spans) - 1": "len(found.spans)", "'; '": "', '", "found.spans[1].why,": "found.spans[2].why,"},
}
"""Rules of `windows_sql`, and other ones."""


def expect_each_rule_to_count(warehouse: str) -> None:
    """Fail unless what was drawn shows each other wording of a rule: else both engines might differ in it unnoticed."""
    desk = tables.open(warehouse)
    told = Counter(map(repr, desk.windows().fetchall()))
    for place, changes in OTHER_RULES.items():
        rule = str(getattr(windows_sql, place))
        for words, other in changes.items():
            assert words in rule
            with pytest.MonkeyPatch.context() as changed:
                changed.setattr(windows_sql, place, rule.replace(words, other))
                assert Counter(map(repr, desk.windows().fetchall())) != told, words


@pytest.mark.campaign(seconds=120)
def test_the_desk_answers_what_spark_does_whatever_was_done_to_the_tables(
    spark: SparkSession, new_warehouse: str
) -> None:
    rng = random.Random(SEED)  # noqa: S311
    # Spark takes longer for a batch than for its records.
    job = taken(spark, new_warehouse, rng, UGLY, COUNTED, batches_max=size(2, None))
    if WHOLE:
        expect_same_answers(spark, new_warehouse)
    register_and_lose(job)
    if WHOLE:
        change(job)
    assert expect_same_answers(spark, new_warehouse, SIZES_S, VIEWS) > UGLY
    expect_each_rule_to_count(new_warehouse)
    noon_us = (NOON - EPOCH) // timedelta(microseconds=1)
    spans_us = [(noon_us, noon_us + 90_000_000), (noon_us - 86_400_000_000, noon_us), (noon_us, None), (None, None)]
    devices: list[str | None] = [None, *tables.open(new_warehouse).devices()] if WHOLE else ["board-1"]
    assert expect_limits_to_choose(new_warehouse, devices, spans_us[: size(1, 4)]) > 0


@pytest.mark.long(seconds=240)
def test_the_desk_answers_what_spark_does_after_an_expiry_and_a_replay(spark: SparkSession, new_warehouse: str) -> None:
    rng = random.Random(SEED)  # noqa: S311
    kept = streams(more="[retention]\nlog_days = 30\nwindows_days = 50\n")
    job = BatchJob(spark, new_warehouse, kept)
    for number, batch in enumerate([*drawn_batches(rng, drawn_records(rng, 600)), [*counted_records(rng, 300)]]):
        job.take(kafka_frame(spark, batch), BatchId("query", number), {})
    job.save()
    maintain(job, NOON.date() + timedelta(days=25))
    expect_same_answers(spark, new_warehouse)
    replay(spark, new_warehouse, None, None, only_writer, lambda _: None)
    expect_same_answers(spark, new_warehouse)


@pytest.mark.kafka
@pytest.mark.long(seconds=420)
@pytest.mark.timeout(1_800)
def test_the_desk_answers_what_spark_does_of_the_same_versions_while_ingest_commits(
    spark: SparkSession, own_kafka: OwnBroker, tmp_path: Path
) -> None:
    rng = random.Random(SEED)  # noqa: S311
    # Both topics share one count of offsets, which Kafka gives to one topic alone.
    records = [
        replace(record, topic=record.topic.replace("pack", "count"))
        for batch in [drawn_records(rng, MEANWHILE), counted_records(rng, MEANWHILE)]
        for record in batch
    ]
    rng.shuffle(records)
    asyncio.run(send(own_kafka, sorted(records, key=lambda record: record.offset)))
    warehouse = tmp_path / "warehouse"
    settings = IngestSettings(
        KafkaSource(own_kafka.bootstrap, "(device|gateway)-.*", batch_records_max=len(records) // BATCHES),
        *(str(warehouse), str(warehouse / "_checkpoint")),
        streams=streams(),
        interval_s=0,
        once=True,
    )
    stop, finished = threading.Event(), queue.SimpleQueue[BatchReport | None]()
    with ThreadPoolExecutor(1) as beside:
        job = beside.submit(run_ingest, spark, settings, stop, Listener(report=finished.put))
        job.add_done_callback(lambda _: finished.put(None))
        try:
            assert finished.get(), "there are no tables"
            compared, met = 0, 0
            while met < ROUNDS:
                before = commits(warehouse)
                compared += expect_same_answers(spark, str(warehouse), SIZES_S, VIEWS, tmp_path / f"moment-{compared}")
                met += commits(warehouse) > before
                assert met == ROUNDS or not job.done(), f"all was read, and only {met} comparisons met a commit"
        finally:
            stop.set()
        job.result()
    assert compared > 0


def commits(warehouse: Path) -> int:
    """How many commits there are to `log`, which each batch begins with."""
    return len([*(warehouse / "v1" / "log" / "_delta_log").glob("*.json")])
