"""The tables against the oracle: any split into batches, retries and crashes, the same rows."""

import os
import random
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark import ingest_job
from spark.ingest_job import BatchCounts, QueryIdError, process_batch, running_query_id
from spark.log_table import IMPLAUSIBLE_DATE, BatchId, create_log, open_log
from spark.readings_view import open_readings
from spark.windows_table import TimeSpan, create_windows, open_windows, time_spans
from tests import spark_oracle
from tests.spark_oracle import KafkaRecord, Reading, WindowKey, WindowRow
from tests.spark_records import (
    BUFFER,
    LANE,
    NOON,
    drawn_batches,
    drawn_records,
    kafka_frame,
    reading,
    reading_headers,
)

pytestmark = pytest.mark.spark

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Warehouse:
    """A warehouse in the making: batches go in, tables come out as the oracle writes them."""

    def __init__(self, spark: SparkSession, path: Path, ingest: str = "first-query") -> None:
        self.spark = spark
        self.path = str(path)
        self.ingest = ingest
        create_log(spark, self.path)
        create_windows(spark, self.path)

    def take(self, number: int, records: list[KafkaRecord]) -> BatchCounts:
        return process_batch(kafka_frame(self.spark, records), BatchId(self.ingest, number), self.path)

    def tables(self) -> spark_oracle.Tables:
        log = open_log(self.spark, self.path)
        rejected = log.where(F.col("reject_reason").isNotNull()).select("topic", "partition", "offset").collect()
        return spark_oracle.Tables(
            self.readings(),
            {key: row for key, (row, _) in self.windows().items()},
            {(row.topic, row.partition, row.offset) for row in rejected},
            log.where("duplicate").count(),
        )

    def readings(self) -> list[Reading]:
        view = open_readings(self.spark, self.path)
        columns = ["namespace", "device", "stream", "metric", "event_us", "value", "ce_id"]
        rows = view.withColumn("event_us", F.unix_micros("event_time")).select(*columns).collect()
        return sorted((r.namespace, r.device, r.stream, r.metric, at(r.event_us), r.value, r.ce_id) for r in rows)

    def windows(self) -> dict[WindowKey, tuple[WindowRow, int]]:
        """Each window with its revision."""
        table = open_windows(self.spark, self.path)
        rows = (
            table.withColumn("start_us", F.unix_micros("window_start"))
            .withColumn("end_us", F.unix_micros("window_end"))
            .drop("window_start", "window_end")
            .collect()
        )
        assert all(row.end_us - row.start_us == 60_000_000 for row in rows)
        found = {
            (row.namespace, row.device, row.stream, row.metric, at(row.start_us)): (
                WindowRow(row.n, row["min"], row["max"], row["sum"], row["first"], row["last"]),
                row.revision,
            )
            for row in rows
        }
        assert len(found) == len(rows), "a window stands twice"
        return found


def at(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


@pytest.fixture
def warehouse(spark: SparkSession, tmp_path: Path) -> Warehouse:
    return Warehouse(spark, tmp_path / "warehouse")


class CrashError(Exception):
    """The process died here."""


def dying(warehouse: Warehouse, number: int, records: list[KafkaRecord], place: str) -> None:
    """Process a batch and die where `place`, a step of the job, would begin."""
    with patch.object(ingest_job, place, side_effect=CrashError), pytest.raises(CrashError):
        warehouse.take(number, records)


def test_the_tables_do_not_depend_on_batches_order_or_crashes(warehouse: Warehouse) -> None:
    # Another site and another week each time; `SLUICE_TEST_SEED=…` brings back the one that failed.
    seed = int(os.environ.get("SLUICE_TEST_SEED") or secrets.randbits(32))
    print(f"SLUICE_TEST_SEED={seed}")  # noqa: T201 - pytest shows it with a failure
    rng = random.Random(seed)  # noqa: S311
    records = drawn_records(rng, 400)
    batches = drawn_batches(rng, records)
    crashes = dict(zip(rng.sample(range(len(batches)), 2), ["append_batch", "merge_batch"], strict=True))
    repeated = rng.randrange(len(batches))

    for number, batch in enumerate(batches):
        if number in crashes:
            dying(warehouse, number, batch, crashes[number])
        counts = warehouse.take(number, batch)
        assert counts.rows == len(batch)
        if number == repeated:
            # The process died before Spark noted the batch as done: it comes again.
            again = warehouse.take(number, rng.sample(batch, len(batch)))
            assert replace(again, seconds=0) == replace(counts, seconds=0)

    assert warehouse.tables() == spark_oracle.tables(records)


def test_a_large_batch_is_compiled_and_comes_out_the_same(warehouse: Warehouse) -> None:
    records = drawn_records(random.Random(5), 60)  # noqa: S311 - the same draw every time
    with patch.object(ingest_job, "INTERPRETED_ROWS_MAX", 0):
        warehouse.take(0, records)
    assert warehouse.tables() == spark_oracle.tables(records)


def readings_at(*times: datetime, first: int = 1, value: Callable[[int], object] = float) -> list[KafkaRecord]:
    """One reading of device 42 for each time; lane sequences, offsets and values count on from `first`."""
    return [
        reading(f'{{"t": {value(sequence)}}}'.encode(), reading_headers(sequence, time=time), offset=sequence)
        for sequence, time in enumerate(times, first)
    ]


def test_a_late_reading_corrects_its_window(warehouse: Warehouse) -> None:
    later = NOON + timedelta(seconds=90)
    key = ("plant", "42", "device-thermo", "t", NOON)

    first = warehouse.take(0, readings_at(NOON + timedelta(seconds=30), NOON + timedelta(seconds=59.999999)))
    assert (first.late, first.revised) == (0, 0)
    six = [Decimal(n).quantize(Decimal("0.000001")) for n in range(7)]
    assert warehouse.windows() == {key: (WindowRow(2, six[1], six[2], six[3], six[1], six[2]), 0)}

    second = warehouse.take(1, readings_at(NOON, later, first=3))
    assert (second.late, second.revised) == (1, 1)
    windows = warehouse.windows()
    assert windows[key] == (WindowRow(3, six[1], six[3], six[6], six[3], six[2]), 1)
    assert windows[(*key[:4], NOON + timedelta(seconds=60))] == (WindowRow(1, *[six[4]] * 5), 0)

    # A retry reports the same, and corrects nothing twice.
    retried = warehouse.take(1, readings_at(NOON, later, first=3))
    assert (retried.late, retried.revised) == (1, 1)
    assert warehouse.windows() == windows


def test_ties_are_broken_by_lane_sequence_as_a_number(warehouse: Warehouse) -> None:
    # As text, "10" comes before "9".
    warehouse.take(0, readings_at(NOON, NOON, first=9)[::-1])

    ((row, _),) = warehouse.windows().values()
    assert (row.first, row.last) == (Decimal(9), Decimal(10))


def test_a_batch_that_died_between_log_and_windows_is_finished_by_its_retry(warehouse: Warehouse) -> None:
    batch = readings_at(NOON, NOON, NOON + timedelta(days=-3))
    dying(warehouse, 0, batch, "merge_batch")
    assert warehouse.windows() == {}

    # The copy within the retried batch is not mistaken for one of its own first attempt.
    counts = warehouse.take(0, batch)

    assert (counts.rows, counts.duplicates, counts.late) == (3, 0, 0)
    assert warehouse.tables() == spark_oracle.tables(batch)


def test_a_new_checkpoint_reads_everything_again_and_changes_nothing(warehouse: Warehouse, spark: SparkSession) -> None:
    batch = readings_at(NOON, NOON + timedelta(seconds=61))
    warehouse.take(0, batch[:1])
    dying(warehouse, 1, batch[1:], "merge_batch")

    again = Warehouse(spark, Path(warehouse.path), ingest="second-query")
    counts = again.take(0, batch)

    assert (counts.rows, counts.duplicates) == (2, 2)
    assert again.readings() == spark_oracle.tables(batch).readings
    # The window that the first query never wrote is there now.
    assert {key: row for key, (row, _) in again.windows().items()} == spark_oracle.tables(batch).windows


def test_times_that_cannot_be_are_readings_but_no_windows(warehouse: Warehouse, spark: SparkSession) -> None:
    year_2000 = datetime(2000, 1, 1, tzinfo=UTC)
    tomorrow_at_kafka = NOON + timedelta(hours=1, days=1)
    times = (year_2000, datetime(1, 1, 1, tzinfo=UTC), tomorrow_at_kafka, tomorrow_at_kafka + timedelta(microseconds=1))
    never_synced = reading(headers=reading_headers(10, error_us=2**63 - 1), offset=10)
    batch = [*readings_at(*times), reading(headers=[], offset=9), never_synced]
    # A copy and a reject are counted as what they are.
    asides = [replace(never_synced, offset=11), replace(never_synced, offset=12, value=b"{")]

    counts = warehouse.take(0, batch + asides)
    assert (counts.unwindowed, counts.duplicates, counts.rejected) == (4, 1, 2)

    dates = open_log(spark, warehouse.path).orderBy("offset").select("event_date").collect()
    implausible = date.fromisoformat(IMPLAUSIBLE_DATE)
    assert [row.event_date for row in dates] == [*[implausible] * 2, date(2026, 3, 15), *[implausible] * 5]
    assert len(warehouse.readings()) == 5
    assert [key[4] for key in warehouse.windows()] == [tomorrow_at_kafka]


def test_identity_is_the_whole_ce_id(warehouse: Warehouse) -> None:
    same_sequence = [
        reading(headers=reading_headers(5, buffer=buffer, lane=lane), offset=offset)
        for offset, (buffer, lane) in enumerate([(BUFFER, LANE), (BUFFER[::-1], LANE), (BUFFER, LANE[::-1])])
    ]
    assert warehouse.take(0, same_sequence).duplicates == 0
    copies = [reading(headers=record.headers, offset=offset) for offset, record in enumerate(same_sequence, 3)]
    # A copy that was damaged hides none that was not, neither in its own batch nor in a later one.
    torn, torn_alone = (reading(b"{", reading_headers(sequence), offset=sequence) for sequence in (6, 7))
    again = [reading(headers=torn.headers, offset=offset) for offset in (8, 9)]
    counts = warehouse.take(1, [*copies, torn, torn_alone, *again])
    assert (counts.duplicates, counts.rejected) == (3 + 1, 2)
    later = [reading(value, torn_alone.headers, offset=offset) for offset, value in ((10, b"{"), (11, b'{"t": 1}'))]
    counts = warehouse.take(2, later)
    assert (counts.duplicates, counts.rejected) == (0, 1)
    assert warehouse.tables() == spark_oracle.tables([*same_sequence, *copies, torn, torn_alone, *again, *later])


def test_a_batch_of_an_unnamed_query_is_refused(spark: SparkSession) -> None:
    # This thread runs no query: what a batch sees with PYSPARK_PIN_THREAD=false.
    with pytest.raises(QueryIdError, match="PYSPARK_PIN_THREAD"):
        running_query_id(spark)


@given(
    minutes=st.lists(st.integers(-10_000, 30_000_000), max_size=60),
    spans_max=st.integers(1, 8),
)
def test_spans_cover_every_window_in_few_pieces(minutes: list[int], spans_max: int) -> None:
    minute_us = 60_000_000
    spans = time_spans((minute * minute_us for minute in minutes), 60, spans_max)

    assert len(spans) <= spans_max
    assert spans == sorted(spans, key=lambda span: span.start_us)
    assert all(before.end_us < after.start_us for before, after in pairwise(spans))
    for minute in minutes:
        window = TimeSpan(minute * minute_us, (minute + 1) * minute_us)
        assert any(span.start_us <= window.start_us and window.end_us <= span.end_us for span in spans)
    if len(set(minutes)) <= spans_max:
        # Where there is room for it, nothing else is covered.
        assert sum(span.end_us - span.start_us for span in spans) == len(set(minutes)) * minute_us
