"""The tables against the oracle: any split into batches, retries and crashes, the same rows."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark import batch_job
from spark.batch_job import BatchCounts, BatchJob
from spark.engine.interpreted_queries import interpreted_if
from spark.ingest.devices_append import DevicesAppend
from spark.ingest.former_devices import FORMER
from spark.ingest_job import QueryIdError, running_query_id
from spark.log.amendments import amendments_path
from spark.log.log_table import CheckpointError, LogAppend, log_path, open_log
from spark.log.quarantine_view import open_quarantine
from spark.log.verdicts import IMPLAUSIBLE_DATE
from spark.views.evidence import open_gaps
from spark.windows.windows_table import TimeSpan, time_spans, windows_path
from tests.spark.decode.test_structured_events import both, row_of
from tests.support import former_devices, spark_oracle
from tests.support.sizes import SEED
from tests.support.spark_oracle import KafkaRecord, WindowRow
from tests.support.spark_records import (
    BUFFER,
    LANE,
    NOON,
    changed,
    correction,
    drawn_batches,
    drawn_records,
    reading,
    reading_headers,
    through,
)
from tests.support.spark_warehouse import Warehouse

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

YEAR_2000 = datetime(2000, 1, 1, tzinfo=UTC)


@pytest.fixture
def warehouse(spark: SparkSession, new_warehouse: str) -> Warehouse:
    return Warehouse(spark, Path(new_warehouse))


def test_a_warehouse_may_be_copied_to_another_place(empty_warehouse: Path) -> None:
    files = [file for file in empty_warehouse.rglob("*") if file.is_file()]
    assert any(file.suffix == ".json" for file in files)
    assert [file for file in files if str(empty_warehouse).encode() in file.read_bytes()] == []


def test_a_reading_that_comes_as_record_and_as_event_counts_once(warehouse: Warehouse) -> None:
    """Events come first, last, and in the same batch; the topic that they are in does not matter."""
    pairs = [both(row_of(b'{"temperature": %d}' % number, number)) for number in range(6)]
    records = [(replace(binary, offset=at), replace(event, offset=at)) for at, (binary, event) in enumerate(pairs)]
    binary, events = [each for each, _ in records], [each for _, each in records]
    warehouse.take(0, [*events[:2], *binary[2:4], *events[3:4]])
    warehouse.take(1, [*binary[:2], *events[2:3], *binary[4:], *events[4:]])
    tables = warehouse.tables()
    assert [(device, stream, value) for _, device, stream, _, _, value, *_ in tables.readings] == [
        ("42", "readings", Decimal(number)) for number in range(6)
    ]
    assert (tables.duplicates, tables.rejected) == (6, set())
    assert {row.n for row in tables.windows.values()} == {6}


HOLED, MAKING_UP = "00000000ab1e", "000000facade"
"""Lanes."""


def of_a_lane_with_others() -> list[KafkaRecord]:
    """A test reading of `sluice check` has a number in its lane, and is in no table. Its type alone tells it apart."""
    types = {1: "sluice.gateway.check"}
    payloads = (b'{"t": 1}', b'{"check": "00ff"}', b'{"t": 3}', b"{", b'{"t": 5}')
    return [
        reading(payload, reading_headers(n, lane=HOLED, event_type=types.get(n, "sluice.reading")), offset=1_000 + n)
        for n, payload in enumerate(payloads)
    ]


def of_names_made_up() -> list[KafkaRecord]:
    """A program that makes up a name for each number would fill the driver with them."""
    payloads = [
        json.dumps({"t": 1, **{f"n{number:03}": 10**13 for number in range(first, first + 16)}})
        for first in range(0, 128, 16)
    ]
    return [
        reading(text.encode(), reading_headers(n, lane=MAKING_UP), offset=2_000 + n) for n, text in enumerate(payloads)
    ]


def of_odd_times() -> list[KafkaRecord]:
    usual = reading_headers()
    headers = {
        "ce_time": [
            *("0001-01-01T00:00:00.000000Z", "0002-01-01T00:00:00.000000Z", "1969-12-31T23:59:59.999999Z"),
            "1970-01-01T00:00:00.000000Z",
            *("2106-02-07T06:28:15.000000Z", "2106-02-07T06:28:16.000000Z", "9999-12-31T23:59:59.999999Z"),
            *("0000-01-01T00:00:00.000000Z", "10000-01-01T00:00:00.000000Z", "2026-02-30T00:00:00.000000Z"),
            *("NaN", "", "yesterday", "1750000000", "-62135596800000001"),
        ],
        "ce_receivedtime": [
            "0001-01-01T00:00:00.000000Z",
            "0002-01-01T00:00:00.000000Z",
            "9999-12-31T23:59:59.999999Z",
            "NaN",
        ],
        "ce_timeerror": ["0", str(2**63 - 1), str(2**63), "-1", "NaN", "1e3", ""],
        "ce_boottime": ["-1", str(-(2**63)), str(2**63 - 1), str(2**63), "NaN", ""],
        "ce_timequality": ["", "device", "guessed"],
    }
    faults = [changed(usual, name, text) for name, texts in headers.items() for text in texts]
    faults += [reading_headers(boot_error_us=error_us) for error_us in (0, 2**63 - 1, 2**63, -1)]
    # Each with an identity of its own, and a correction that would move all of them.
    records = [
        reading(headers=changed(changed(each, "ce_id", f"{BUFFER}-{LANE}-{n}"), "ce_lanesequence", str(n)), offset=n)
        for n, each in enumerate(faults)
    ]
    moving = correction(999, {"supersedes": True, "rate_ppm": 100_000, "error_growth_ppm": 100_000}, offset=999)
    return [*records, moving]


@dataclass(frozen=True, slots=True)
class OneBatch:
    """A warehouse with one batch of records that have nothing to do with one another."""

    warehouse: Warehouse
    records: list[KafkaRecord]
    counts: BatchCounts
    tables: spark_oracle.Tables


@pytest.fixture(scope="module")
def one_batch(spark: SparkSession, empty_warehouse: Path, tmp_path_factory: pytest.TempPathFactory) -> OneBatch:
    """To be looked at only: a batch of many records takes no longer than one of few."""
    records = [*of_a_lane_with_others(), *of_names_made_up(), *of_odd_times()]
    path = shutil.copytree(empty_warehouse, tmp_path_factory.mktemp("one") / "warehouse")
    with interpreted_if(spark, small=True):
        warehouse = Warehouse(spark, path)
        counts = warehouse.take(0, records)
        return OneBatch(warehouse, records, counts, warehouse.tables())


def test_neither_a_reject_nor_a_test_reading_of_the_gateway_leaves_a_hole_in_its_lane(one_batch: OneBatch) -> None:
    names = [each[6] for each in one_batch.tables.readings if HOLED in each[6]]
    assert names == [f"{BUFFER}-{HOLED}-{number}" for number in (0, 2, 4)]
    places = {record.place for record in of_a_lane_with_others()}
    assert one_batch.tables.rejected & places == {of_a_lane_with_others()[3].place}
    lane = one_batch.warehouse.job.state._seen.states[BUFFER, HOLED]
    assert (lane.below, lane.above) == (5, 0)


def test_a_batch_keeps_a_bounded_number_of_names_that_nobody_declared(one_batch: OneBatch) -> None:
    assert one_batch.counts.undeclared == {"device-thermo": {f"n{number:03}" for number in range(101)}}


def test_no_reading_is_lost_because_of_its_time(one_batch: OneBatch) -> None:
    expected = spark_oracle.tables(of_odd_times())
    assert (len(expected.readings), len(expected.rejected)) == (18, 21)
    expected = spark_oracle.tables(one_batch.records)
    assert one_batch.counts.rows == len(one_batch.records)
    found = one_batch.tables
    assert found.rejected == expected.rejected
    assert found.readings == expected.readings
    assert found == expected
    dates = open_log(one_batch.warehouse.spark, one_batch.warehouse.path).select("event_date").distinct()
    assert {row.event_date for row in dates.collect()} == {date.fromisoformat(IMPLAUSIBLE_DATE), NOON.date()}


class CrashError(Exception):
    """The process died here."""


PLACES: dict[str, tuple[object, str]] = {
    "before log": (LogAppend, "commit"),
    "before amendments": (batch_job, "append_amendments"),
    "before corrections": (batch_job, "take_corrections"),
    "before windows": (batch_job.WindowsAppend, "commit"),
    "before changes": (batch_job.WindowsAppend, "tell"),
    "before areas": (batch_job, "replace_area"),
    "before devices": (DevicesAppend, "commit"),
}
"""Places where a batch may die: before each commit."""


def dying(warehouse: Warehouse, number: int, records: list[KafkaRecord], place: str) -> None:
    """Process a batch and die where a step of the job would begin; then start anew, as the process would."""
    target, name = PLACES[place]
    with patch.object(target, name, side_effect=CrashError), suppress(CrashError):
        warehouse.take(number, records)
    warehouse.job = BatchJob(warehouse.spark, warehouse.path)


@pytest.mark.long(seconds=60)
def test_the_tables_do_not_depend_on_batches_order_or_crashes(warehouse: Warehouse) -> None:
    rng = random.Random(SEED)  # noqa: S311
    records = drawn_records(rng, 250)
    batches = drawn_batches(rng, records)
    # A draw may put all into two batches.
    dying_in = rng.sample(range(len(batches)), min(3, len(batches)))
    crashes = dict(zip(dying_in, rng.sample(list(PLACES), len(dying_in)), strict=True))
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


@pytest.mark.long(seconds=15)
def test_a_batch_that_comes_again_with_other_records_is_refused(warehouse: Warehouse) -> None:
    records = readings_at(NOON, NOON, NOON)
    warehouse.take(0, records[:2])
    warehouse.take(1, records[2:])
    # As where the checkpoint was put back from a copy, and Kafka has more by now.
    for number, other in ((0, records), (1, [replace(records[2], offset=records[2].offset + 1)])):
        with pytest.raises(CheckpointError, match=f"batch {number} comes again with other records"):
            warehouse.take(number, other)
    assert warehouse.take(0, records[:2]).rows == 2
    assert warehouse.tables() == spark_oracle.tables(records)


def readings_at(
    *times: datetime, first: int = 1, value: Callable[[int], object] = float, after: timedelta | None = None
) -> list[KafkaRecord]:
    """One reading of device 42 for each time; lane sequences, offsets and values count on from `first`.

    With `after` each came to Kafka so much later than it was taken, else all an hour after noon.
    """
    records = [
        reading(f'{{"t": {value(sequence)}}}'.encode(), reading_headers(sequence, time=time), offset=sequence)
        for sequence, time in enumerate(times, first)
    ]
    if after is None:
        return records
    return [replace(record, timestamp=time + after) for record, time in zip(records, times, strict=True)]


def test_a_late_reading_corrects_its_window(warehouse: Warehouse) -> None:
    soon = timedelta(seconds=5)
    key = ("plant", "42", "device-thermo", "t", NOON)

    first = warehouse.take(
        0, readings_at(NOON + timedelta(seconds=30), NOON + timedelta(seconds=59.999999), after=soon)
    )
    assert (first.late, first.revised) == (0, 0)
    six = [Decimal(n).quantize(Decimal("0.000001")) for n in range(7)]
    assert warehouse.windows() == {key: (WindowRow(2, six[1], six[2], six[3], six[1], six[2]), 0)}

    days_late = readings_at(NOON, first=3, after=timedelta(days=3))
    batch = days_late + readings_at(NOON + timedelta(seconds=90), first=4, after=soon)
    # Ties are broken by lane sequence as a number: as text, "10" comes before "9".
    tied = NOON + timedelta(seconds=120)
    batch += readings_at(tied, tied, first=9, after=soon)[::-1]
    second = warehouse.take(1, batch)
    assert (second.late, second.revised) == (1, 1)
    windows = warehouse.windows()
    assert windows[key] == (WindowRow(3, six[1], six[3], six[6], six[3], six[2]), 1)
    assert windows[(*key[:4], NOON + timedelta(seconds=60))] == (WindowRow(1, *[six[4]] * 5), 0)
    row, _ = windows[(*key[:4], tied)]
    assert (row.first, row.last) == (Decimal(9), Decimal(10))

    # A retry reports the same, and corrects nothing twice.
    retried = warehouse.take(1, batch)
    assert (retried.late, retried.revised) == (1, 1)
    assert warehouse.windows() == windows


def by_spark(warehouse: Warehouse, path: str, ordinal: int) -> list[Row]:
    """A batch's rows in files that Spark wrote. Files of the pass are named in another way."""
    of_batch = warehouse.spark.read.format("delta").load(path).where(F.col("ordinal") == ordinal)
    return of_batch.where(~F.col("_metadata.file_name").endswith(".zstd.parquet")).collect()


@pytest.mark.long(seconds=30)
def test_of_a_batch_with_copies_only_the_copies_are_written_again(warehouse: Warehouse) -> None:
    soon = timedelta(seconds=5)
    first = readings_at(*[NOON] * 3, first=1, after=soon)
    new = readings_at(*[NOON] * 3, first=4, after=soon)
    # Of the batch before, and of this one.
    copies = [replace(first[1], offset=10), replace(new[0], offset=11)]
    warehouse.take(0, first)
    # A task sees its own records alone: two tasks take one half each.
    counts = warehouse.take(1, [new[0], copies[1], *new[1:], copies[0]])

    tables = warehouse.job.tables
    assert (counts.rows, counts.duplicates) == (5, 2)
    assert sorted((row.offset, row.duplicate) for row in by_spark(warehouse, log_path(tables), 1)) == [
        (10, True),
        (11, True),
    ]
    assert by_spark(warehouse, windows_path(tables), 1) == []
    assert warehouse.tables() == spark_oracle.tables([*first, *new, *copies])

    # A copy whose time is surer counts instead of the first one, which has a window already.
    surer = replace(first[2], headers=changed(first[2].headers or [], "ce_timeerror", "1"), offset=12)
    other = readings_at(NOON, first=7, after=soon)
    counts = warehouse.take(2, [*other, surer])

    assert (counts.rows, counts.duplicates) == (2, 0)
    assert [(row.offset, row.duplicate) for row in by_spark(warehouse, log_path(tables), 2)] == [(12, False)]
    assert warehouse.tables() == spark_oracle.tables([*first, *new, *copies, *other, surer])


def test_a_batch_that_died_between_log_and_windows_is_finished_by_the_next_start(warehouse: Warehouse) -> None:
    batch = readings_at(NOON, NOON, NOON + timedelta(days=-3))
    dying(warehouse, 0, batch, "before windows")
    assert warehouse.tables() == spark_oracle.tables(batch)

    # Spark does not know that, and has it done again: no copy is mistaken for one of its own first attempt.
    counts = warehouse.take(0, batch)

    assert (counts.rows, counts.duplicates) == (3, 0)
    assert warehouse.tables() == spark_oracle.tables(batch)
    # With other records it would not be the same batch.
    with pytest.raises(CheckpointError, match="batch 0 comes again with other records"):
        warehouse.take(0, batch[:2])
    # A new checkpoint reads everything again and changes nothing.
    again = Warehouse(warehouse.spark, Path(warehouse.path), ingest="second-query")
    assert again.take(0, batch).duplicates == 3
    assert again.tables() == replace(spark_oracle.tables(batch), duplicates=3)


@pytest.mark.long(seconds=20)
def test_a_new_checkpoint_reads_everything_again_and_changes_nothing(warehouse: Warehouse, spark: SparkSession) -> None:
    batch = readings_at(NOON, NOON + timedelta(seconds=61))
    warehouse.take(0, batch[:1])
    dying(warehouse, 1, batch[1:], "before windows")

    again = Warehouse(spark, Path(warehouse.path), ingest="second-query")
    counts = again.take(0, batch)

    assert (counts.rows, counts.duplicates) == (2, 2)
    assert again.readings() == spark_oracle.tables(batch).readings
    # The window that the first query never wrote is there now.
    assert {key: row for key, (row, _) in again.windows().items()} == spark_oracle.tables(batch).windows


@pytest.mark.long(seconds=15)
def test_times_that_cannot_be_are_rejects_and_unknown_ones_readings_without_windows(
    warehouse: Warehouse, spark: SparkSession
) -> None:
    tomorrow_at_kafka = NOON + timedelta(hours=1, days=1)
    times = (YEAR_2000, datetime(2, 1, 1, tzinfo=UTC), tomorrow_at_kafka, tomorrow_at_kafka + timedelta(microseconds=1))
    never_synced = reading(headers=reading_headers(10, error_us=2**63 - 1), offset=10)
    batch = [*readings_at(*times), reading(headers=[], offset=9), never_synced]
    # Copies and rejects are counted apart.
    asides = [replace(never_synced, offset=11), replace(never_synced, offset=12, value=b"{")]

    counts = warehouse.take(0, batch + asides)
    assert (counts.unwindowed, counts.duplicates, counts.rejected) == (4, 1, 2)

    dates = open_log(spark, warehouse.path).orderBy("offset").select("event_date").collect()
    implausible = date.fromisoformat(IMPLAUSIBLE_DATE)
    assert [row.event_date for row in dates] == [*[implausible] * 2, date(2026, 3, 15), *[implausible] * 5]
    assert sorted(row[4] for row in warehouse.readings()) == [NOON, tomorrow_at_kafka]
    assert [key[4] for key in warehouse.windows()] == [tomorrow_at_kafka]
    rejects = open_quarantine(spark, warehouse.path).orderBy("offset").select("offset", "kind").collect()
    expected = {1: "implausible-time", 2: "implausible-time", 4: "implausible-time", 9: "header", 12: "undecodable"}
    assert {row.offset: row.kind for row in rejects} == expected


def unsynced(  # noqa: PLR0913 - one argument for each thing that varies
    sequence: int,
    boot_s: float,
    *,
    began: datetime = YEAR_2000,
    error_us: int = 2**63 - 1,
    quality: str = "received",
    boot_error_us: int = 500,
) -> KafkaRecord:
    """A reading that went out before its gateway's clock was known: of a box that believes it is 2000, say."""
    boot_us = round(boot_s * 1e6)
    headers = reading_headers(
        sequence,
        time=began + timedelta(microseconds=boot_us),
        error_us=error_us,
        quality=quality,
        boot_us=boot_us,
        boot_error_us=boot_error_us,
    )
    return reading(f'{{"t": {sequence}}}'.encode(), headers, offset=sequence)


@pytest.mark.long(seconds=35)
def test_a_reading_of_unknown_time_gets_into_its_window_once_the_clock_is_learnt(warehouse: Warehouse) -> None:
    early = [unsynced(1, 10), unsynced(2, 70, quality="bounded"), unsynced(3, 80, boot_error_us=2**63 - 1)]
    assert warehouse.take(0, early).unwindowed == 3
    assert warehouse.windows() == {}

    counts = warehouse.take(1, [correction(100, {"rate_ppm": 20, "error_growth_ppm": 100}, offset=0)])

    assert counts.corrections == 1
    known = [
        ("plant", "42", "device-thermo", "t", NOON + timedelta(seconds=10, microseconds=200), 2_500, "received", 1),
        ("plant", "42", "device-thermo", "t", NOON + timedelta(seconds=70, microseconds=1_400), 8_500, "estimated", 1),
    ]
    unknown = YEAR_2000 + timedelta(seconds=80), 2**63 - 1, "received", None
    found = [(*row[:5], *row[7:]) for row in warehouse.readings()]
    assert sorted(found[1:]) == known
    assert found[0][4:] == unknown
    assert [key[4] for key in sorted(warehouse.windows())] == [NOON, NOON + timedelta(seconds=60)]
    # Late records, and repeated ones, are put right as well.
    assert warehouse.take(2, [unsynced(4, 20), unsynced(1, 10)]).unwindowed == 0
    assert warehouse.windows()["plant", "42", "device-thermo", "t", NOON][0].n == 2
    assert warehouse.tables() == spark_oracle.tables(
        [*early, correction(100, {"rate_ppm": 20, "error_growth_ppm": 100}), unsynced(4, 20), unsynced(1, 10)]
    )


@pytest.mark.long(seconds=12)
def test_a_batch_that_comes_again_has_the_same_counts(warehouse: Warehouse) -> None:
    batch = [unsynced(1, 10), unsynced(2, 20), correction(100, {}, offset=0)]
    counts = warehouse.take(0, batch)
    assert (counts.unwindowed, counts.late, counts.revised) == (0, 2, 1)
    assert replace(warehouse.take(0, batch), seconds=0) == replace(counts, seconds=0)


@pytest.mark.long(seconds=35)
def test_a_window_that_loses_its_readings_goes_and_a_retry_changes_nothing(warehouse: Warehouse) -> None:
    # A boot without NTP: the gateway knew its time to two hours, and guessed one hour wrong.
    hour_before = NOON - timedelta(hours=1)
    guessed = [
        unsynced(sequence, boot_s, began=hour_before, error_us=7_200_000_000, quality="bounded")
        for sequence, boot_s in ((1, 10), (2, 20))
    ]
    first = [*guessed, *readings_at(NOON + timedelta(seconds=5), first=3)]
    told = correction(100, {}, offset=0)
    warehouse.take(0, first)
    assert {key[4]: row.n for key, (row, _) in warehouse.windows().items()} == {NOON: 1, hour_before: 2}

    warehouse.take(1, [told])
    windows = warehouse.windows()
    assert {key[4]: row.n for key, (row, _) in windows.items()} == {NOON: 3}
    warehouse.take(1, [told])
    assert warehouse.windows() == windows
    assert warehouse.tables() == spark_oracle.tables([*first, told])


@pytest.mark.parametrize("place", ["before corrections", "before areas"])
@pytest.mark.long(seconds=40)
def test_a_correction_that_a_dying_run_read_is_found_by_one_that_begins_anew(
    warehouse: Warehouse, spark: SparkSession, place: str
) -> None:
    early, told = [unsynced(1, 10), unsynced(2, 70)], correction(100, {}, offset=0)
    warehouse.take(0, early)
    dying(warehouse, 1, [told], place)

    again = Warehouse(spark, Path(warehouse.path), ingest="second-query")
    again.take(0, early)
    again.take(1, [told])

    copies = [replace(record, offset=record.offset + 1_000) for record in (*early, told)]
    assert again.tables() == spark_oracle.tables([*early, told, *copies])


@pytest.mark.long(seconds=25)
def test_a_wrong_correction_is_taken_back_and_later_ones_stay(warehouse: Warehouse) -> None:
    wrong_by = timedelta(days=2)
    boot_us = [10_000_000, 20_000_000, 900_000_000]

    def sent(sequence: int, off: timedelta) -> KafkaRecord:
        at_us = boot_us[sequence]
        time = NOON + timedelta(microseconds=at_us) + off
        return reading(headers=reading_headers(sequence, time=time, error_us=100, boot_us=at_us), offset=sequence)

    before = [sent(0, wrong_by), sent(1, wrong_by)]
    after = sent(2, timedelta(0))
    taken_back = correction(100, {"version": 2, "supersedes": True}, told=NOON + timedelta(seconds=60), offset=0)
    better_yet = correction(101, {"version": 3, "error_us": 9}, told=NOON + timedelta(seconds=90), offset=1)
    warehouse.take(0, [*before, after])
    warehouse.take(1, [taken_back])
    warehouse.take(2, [better_yet])

    assert [(row[4], row[7], row[9]) for row in warehouse.readings()] == [
        (NOON + timedelta(seconds=10), 109, 3),
        (NOON + timedelta(seconds=20), 109, 3),
        (NOON + timedelta(seconds=900), 100, None),
    ]
    assert warehouse.tables() == spark_oracle.tables([*before, after, taken_back, better_yet])


@pytest.mark.long(seconds=20)
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


@pytest.mark.long(seconds=20)
def test_a_number_of_a_device_counts_once_and_another_payload_under_it_is_a_conflict(warehouse: Warehouse) -> None:
    # A device changes over to another gateway: the acknowledgement of number 8 was lost with the first one's link.
    first = [through("a", 0, 7, offset=0), through("a", 1, 8, offset=1)]
    second = [through("b", 0, 8, offset=2), through("b", 1, 9, offset=3), through("b", 2, 9, offset=4)]
    # A damaged copy of a duplicate does not make it count.
    duplicate = through("b", 3, 7, offset=5)
    damaged = replace(duplicate, offset=6, value=b"{")
    # The topic was given a second partition, and the job reads the newer one first. Its other payload is the conflict.
    early, late = timedelta(seconds=1), timedelta(seconds=9)
    newer = [
        through("b", 4, 5, offset=0, partition=1, payload='{"t": 2}', arrived=late),
        through("b", 5, 6, offset=1, partition=1, payload='{"t": 6}', arrived=late),
    ]
    older = through("a", 2, 5, offset=7, arrived=early)
    # Of copies the one with the best known time counts.
    minute = timedelta(minutes=1)
    vague = through("a", 3, 3, offset=8, error_us=90_000_000)
    better = through("a", 3, 3, offset=9, time=NOON - minute)

    counts = warehouse.take(0, [*first, duplicate, *newer, vague])
    assert (counts.duplicates, counts.rejected) == (1, 0)
    counts = warehouse.take(1, [*second, damaged, older, better])
    # Readings of the batch before whose places others have taken are not counted.
    assert (counts.duplicates, counts.rejected) == (2, 1)

    found = warehouse.tables()
    assert found.rejected == {damaged.place, newer[0].place}
    assert sorted(row[5] for row in found.readings) == [*[Decimal(1)] * 5, Decimal(6)]
    assert {key[4]: row.n for key, row in found.windows.items()} == {NOON: 5, NOON - minute: 1}
    assert found == spark_oracle.tables([*first, duplicate, *newer, vague, *second, damaged, older, better])


def of_an_earlier_program(spark: SparkSession, path: str) -> None:
    """Make a table as if an earlier program had made it, which knew no counters."""
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES (delta.appendOnly = false)")
    spark.sql(f"ALTER TABLE delta.`{path}` UNSET TBLPROPERTIES IF EXISTS (delta.dataSkippingStatsColumns)")
    table = spark.read.format("delta").load(path)
    partitions = spark.sql(f"DESCRIBE DETAIL delta.`{path}`").collect()[0].partitionColumns
    old = table.drop("device_counter").write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    old.partitionBy(*partitions).save(path)


@pytest.mark.long(seconds=50)
def test_a_warehouse_of_an_earlier_program_goes_on(warehouse: Warehouse) -> None:
    spark, tables = warehouse.spark, warehouse.job.tables
    # The second comes again, better timed: it is amended.
    first = [through("a", 0, 7, offset=0), through("a", 1, 8, offset=1), through("a", 2, 9, offset=2, error_us=9)]
    warehouse.take(0, first[:2])
    again = [through("b", 0, 8, offset=3, error_us=5), first[2]]
    warehouse.take(1, again)
    warehouse.job.save()
    former_devices.of_an_earlier_program(spark, tables, 1)
    paths = [log_path(tables), amendments_path(tables), *(f"{tables}/{name}" for name in FORMER[:2])]
    for path in paths:
        of_an_earlier_program(spark, path)

    assert warehouse.tables() == spark_oracle.tables([*first, *again[:1]]), "it is read before it is written"
    assert open_gaps(spark, warehouse.path).collect() == []
    warehouse.job = BatchJob(spark, warehouse.path)
    copy = through("b", 1, 7, offset=4)
    named = through("b", 2, 7, offset=5)
    named = replace(named, headers=[*(named.headers or []), ("ce_devicecounter", b"site/42/thermo")])
    counts = warehouse.take(2, [copy, named])
    assert (counts.duplicates, counts.rejected) == (1, 0)
    assert warehouse.tables() == spark_oracle.tables([*first, again[0], copy, named])


@pytest.mark.long(seconds=25)
def test_of_copies_the_one_with_the_best_known_time_counts(warehouse: Warehouse) -> None:
    minute = timedelta(minutes=1)
    vague = [through("a", n, n, offset=n, error_us=90_000_000, payload=f'{{"t": {n}}}') for n in range(3)]
    # Resent by a restarted gateway that has learnt its clock meanwhile: the reading was of the minute before.
    better = through("a", 1, 1, offset=3, time=NOON - minute, payload='{"t": 1}')
    worse = through("a", 2, 2, offset=4, error_us=95_000_000, time=NOON - minute, payload='{"t": 2}')
    warehouse.take(0, vague)
    dying(warehouse, 1, [better, worse], "before amendments")
    warehouse.take(1, [better, worse])

    assert {key[4]: row.n for key, (row, _) in warehouse.windows().items()} == {NOON: 2, NOON - minute: 1}
    assert warehouse.tables() == spark_oracle.tables([*vague, better, worse])


@pytest.mark.long(seconds=50)
def test_the_copy_that_counts_is_found_among_all_copies(warehouse: Warehouse) -> None:
    def of(device: str, record: KafkaRecord) -> KafkaRecord:
        return replace(record, key=device.encode())

    # A copy of number 0 lies in a batch that is searched for another device's, while its own device repeats number 3.
    elsewhere = of("other", through("c", 0, 50, offset=2))
    repeats = [[of("one", through("a", 0, 0, offset=0))]]
    repeats += [[of("one", through("b", 0, 0, offset=1, error_us=2_000)), elsewhere]]
    repeats += [[replace(elsewhere, offset=3), *(of("one", through("b", n, 3, offset=3 + n)) for n in (1, 2))]]
    # A start that finishes a batch with a conflict must find the copy that counts as well.
    vague = of("two", through("a", 1, 0, offset=6, error_us=5_000))
    finished = [[vague, of("two", through("b", 3, 0, offset=7))], [replace(vague, offset=8, value=b'{"t": 2}')]]
    # A gateway that has learnt its clock says so, and sends again the records that it had sent with a guess, an hour
    # off.
    guessed = unsynced(9, 10, began=NOON - timedelta(hours=1), error_us=7_200_000_000, quality="bounded")
    learnt = reading(b'{"t": 9}', reading_headers(9, time=NOON + timedelta(seconds=10), boot_us=10_000_000), offset=10)
    batches = [
        [*repeats[0], *finished[0], guessed],
        [*repeats[1], learnt, correction(100, {}, offset=0)],
        repeats[2],
    ]

    for number, batch in enumerate(batches):
        warehouse.take(number, batch)
    dying(warehouse, len(batches), finished[1], "before windows")

    assert warehouse.tables() == spark_oracle.tables([record for batch in [*batches, finished[1]] for record in batch])


def test_a_batch_of_an_unnamed_query_is_refused(spark: SparkSession) -> None:
    # This thread runs no query: with PYSPARK_PIN_THREAD=false, a batch sees the same.
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
