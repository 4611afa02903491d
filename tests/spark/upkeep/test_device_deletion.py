"""A device's data is deleted everywhere, and nothing brings it back: not Kafka, not a gateway, not a replay."""

from dataclasses import replace
from datetime import datetime, timedelta
from functools import reduce
from operator import and_
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.batch_job import BatchJob
from spark.cli import FAILED, main
from spark.engine.delta_upkeep import delete_rows
from spark.engine.warehouse_folder import only_writer
from spark.log.amendments import read_amendments
from spark.log.deletions import deletions_path, read_deletions
from spark.log.device_parts import read_device_parts
from spark.log.log_table import BatchId, log_path, open_log, read_log
from spark.log.quarantine_view import open_quarantine
from spark.log.readings_view import open_readings
from spark.log.sequence_runs import RUN_COLUMNS
from spark.log.verdicts import EMPTIED
from spark.log.warehouse_version import folder_of, seen_tables
from spark.upkeep import table_upkeep
from spark.upkeep.device_deletion import delete_device, is_known
from spark.upkeep.replay_job import replay
from spark.upkeep.table_upkeep import delta_tables, maintain, remove_old_versions
from spark.windows.window_changes import changes_path, read_changes
from spark.windows.windows_table import folded, read_parts
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, kafka_frame, reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


def sent(
    device: str, sequence: int, payload: str = '{"t": 21.5}', time: datetime = NOON, offset: int | None = None
) -> KafkaRecord:
    """A reading with the sensor's own number, in a lane of its own for each device."""
    headers = reading_headers(sequence, time=time, lane=f"{int(device):012x}", device_boot="b1")
    headers = [(name, f"device/{device}/thermo".encode() if name == "ce_subject" else value) for name, value in headers]
    taken_in = time + timedelta(seconds=1)
    at = 100 * int(device) + sequence if offset is None else offset
    return replace(reading(payload.encode(), headers, offset=at, key=device.encode()), timestamp=taken_in)


FIRST = [
    *(sent("42", number) for number in (1, 2, 4)),
    sent("42", 5, "not a number"),
    # Nothing but its key says whose it is.
    replace(sent("42", 6), headers=None, key=b"plant/42"),
    *(sent("43", number) for number in (1, 3)),
]


def take(job: BatchJob, number: int, records: list[KafkaRecord]) -> None:
    job.take(kafka_frame(job.spark, records), BatchId("query", number), {"device-thermo": "id-1"})


def seen(spark: SparkSession, warehouse: str) -> dict[str, dict[str, int]]:
    """Number of rows by table, for each device."""
    tables = seen_tables(spark, warehouse)
    frames = {
        "readings": open_readings(spark, warehouse),
        "quarantine": open_quarantine(spark, warehouse),
        "changes": read_changes(spark, warehouse),
        "windows": folded(read_parts(spark, tables)),
        "amendments": read_amendments(spark, tables),
        "parts": folded_parts(spark, tables),
    }
    rows = [frame.select("device", F.lit(name).alias("table")) for name, frame in frames.items()]
    found: dict[str, dict[str, int]] = {}
    for row in reduce(DataFrame.unionByName, rows).groupBy("device", "table").count().collect():
        found.setdefault(row.device, {})[row.table] = row["count"]
    return found


def folded_parts(spark: SparkSession, tables: str) -> DataFrame:
    """Return a row for each run of a device, and for each stream that does not count."""
    return read_device_parts(spark, tables).select(*RUN_COLUMNS).distinct()


def told_on_disk(spark: SparkSession, warehouse: str, tables: list[str] | None = None) -> set[str]:
    """The devices of which a file of a table, current or not, holds more than the place of their records."""
    found = [spark.createDataFrame([], "device string")]
    for path in tables or delta_tables(spark, warehouse):
        if path == deletions_path(warehouse) or not list(Path(path).rglob("*.parquet")):
            continue
        rows = spark.read.option("recursiveFileLookup", "true").option("pathGlobFilter", "*.parquet").parquet(path)
        if "device" in rows.columns:
            emptied = [F.col(name).isNull() for name in EMPTIED if "offset" in rows.columns and name in rows.columns]
            found.append(rows.where(~reduce(and_, emptied)) if emptied else rows)
    rows = reduce(DataFrame.unionByName, (frame.select("device") for frame in found))
    return {row.device for row in rows.distinct().collect()}


@pytest.mark.long(seconds=90)
def test_what_a_device_sent_is_deleted_and_stays_so(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    job = BatchJob(spark, warehouse)
    take(job, 0, FIRST)
    job.save()
    other = {"readings": 2, "windows": 1, "changes": 1, "parts": 1}
    damaged = {"quarantine": 1}
    assert seen(spark, warehouse) == {"42": other | {"readings": 3} | damaged, "43": other, "plant/42": damaged}

    done = delete_device(spark, warehouse, "plant", "42")

    assert done.records == 5
    assert seen(spark, warehouse) == {"43": other}
    # Each place in Kafka is still accounted for.
    assert open_log(spark, warehouse).count() == len(FIRST)

    # Kafka is read once more, and a gateway brings its last readings: from before the deletion, or of an unknown time.
    later = done.at + timedelta(hours=2)
    unbounded = {"ce_timeerror": b"9223372036854775807"}
    unknown = sent("42", 9, time=later)
    backlog = [
        replace(sent("42", 7), timestamp=later),
        replace(unknown, headers=[(name, unbounded.get(name, value)) for name, value in unknown.headers or ()]),
    ]
    job = BatchJob(spark, warehouse)
    counts = job.take(kafka_frame(spark, [*FIRST, *backlog]), BatchId("another", 0), {"device-thermo": "id-1"})
    assert (counts.deleted, counts.rejected, counts.duplicates) == (7, 0, 2)

    # The device goes on, or its name is another's by now.
    take(job, 1, [sent("42", 1_000, time=later), sent("42", 1_001, time=later + timedelta(seconds=1))])
    job.save()
    again = {"readings": 2, "windows": 1, "changes": 1, "parts": 1}
    found = seen(spark, warehouse)
    assert found["42"] == again
    assert found["43"]["readings"] == 2

    replay(spark, warehouse, None, None, only_writer, lambda _: None)
    assert seen(spark, warehouse) == {"42": again, "43": other}

    # Once more: from the tables of all versions, and from the disk.
    delete_device(spark, warehouse, "plant", "42")
    assert seen(spark, warehouse) == {"43": other}
    old = read_log(spark, folder_of(warehouse, 1)).where("device = '42' AND value IS NOT NULL")
    assert old.count() == 0
    assert told_on_disk(spark, warehouse) == {"42", "43", "plant/42"}
    assert remove_old_versions(spark, warehouse) == [1]
    assert maintain(BatchJob(spark, warehouse), NOON.date(), keep_days=0) == []
    assert told_on_disk(spark, warehouse) == {"43"}
    assert seen(spark, warehouse) == {"43": other}


@pytest.mark.long(seconds=35)
def test_the_command_asks_first_and_deletes_for_good(spark: SparkSession, new_warehouse: str) -> None:
    records = [*FIRST[:2], FIRST[-1]]
    take(BatchJob(spark, new_warehouse), 0, records)
    command = ["devices", "delete", "42", "--namespace", "plant", "--warehouse", new_warehouse]

    asked = CliRunner().invoke(main, command, input="n\n")
    assert (asked.exit_code, asked.output.splitlines()[0]) == (
        130,
        "delete 2 records of 42 in namespace plant for good, and refuse all that it measured before now? [y/N]: n",
    )
    assert seen(spark, new_warehouse)["42"]["readings"] == 2

    done = CliRunner().invoke(main, [*command, "--yes"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("deleted: 2 records of 42 in namespace plant; readings from before ")
    assert seen(spark, new_warehouse).keys() == {"43"}

    # Kafka is read once more, and files that nothing needs are removed.
    job = BatchJob(spark, new_warehouse)
    counts = job.take(kafka_frame(spark, records), BatchId("another", 0), {"device-thermo": "id-1"})
    assert (counts.deleted, counts.duplicates) == (2, 1)
    log = [log_path(job.tables)]
    assert told_on_disk(spark, new_warehouse, log) == {"42", "43"}
    # Seconds for each table. The long test of a device's data looks at all of them.
    with patch.object(table_upkeep, "delta_tables", return_value=log):
        assert maintain(job, NOON.date(), keep_days=0) == []
    assert told_on_disk(spark, new_warehouse, log) == {"43"}


@pytest.mark.long(seconds=25)
def test_a_device_that_nobody_heard_of_is_not_refused_by_mistake(spark: SparkSession, new_warehouse: str) -> None:
    BatchJob(spark, new_warehouse)
    command = ["devices", "delete", "4Z", "--namespace", "plant", "--warehouse", new_warehouse, "--yes"]
    mistyped = CliRunner().invoke(main, command)
    assert mistyped.exit_code == FAILED
    assert mistyped.output.startswith("Error: there is nothing of 4Z in namespace plant here: is the name right?")
    assert read_deletions(spark, new_warehouse) == {}

    # If its records have expired, the tables that outlive them are asked too.
    job = BatchJob(spark, new_warehouse)
    take(job, 0, FIRST[:1])
    job.save()
    delete_rows(spark, log_path(job.tables), F.lit(True))
    known = [is_known(spark, new_warehouse, "plant", device) for device in ("42", "4Z")]
    assert known == [True, False]

    # Stated outright, twice: a job that broke off may be finished.
    for options in (["--unheard"], []):
        assert CliRunner().invoke(main, [*command, *options]).exit_code == 0
    assert read_deletions(spark, new_warehouse).keys() == {("plant", "4Z")}


@pytest.mark.long(seconds=20)
def test_a_subscriber_to_changes_is_not_stopped_by_a_deletion(
    spark: SparkSession, new_warehouse: str, tmp_path: Path
) -> None:
    job = BatchJob(spark, new_warehouse)
    told: list[int] = []

    def read_new() -> None:
        changes = spark.readStream.format("delta").option("skipChangeCommits", "true")
        writer = changes.load(changes_path(new_warehouse)).writeStream
        query = writer.foreachBatch(lambda rows, _: told.append(rows.count())).trigger(availableNow=True)
        query.option("checkpointLocation", str(tmp_path / "subscriber")).start().awaitTermination()

    take(job, 0, [sent("42", 1)])
    read_new()
    delete_rows(spark, changes_path(new_warehouse), F.col("device") == "42")
    take(job, 1, [sent("43", 1)])
    read_new()
    assert told == [1, 1]
