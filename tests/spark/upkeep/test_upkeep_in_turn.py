"""Upkeep of tables beside the batches, in turn on one warehouse. `make test-long` tries each part alone, and harder."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.cli import main
from spark.engine import delta_upkeep
from spark.engine.delta_upkeep import file_count
from spark.engine.warehouse_folder import only_writer
from spark.log.log_table import log_path
from spark.upkeep import table_upkeep
from spark.upkeep.replay_job import replay
from spark.upkeep.table_upkeep import Upkeep
from spark.windows.window_changes import changes_path, read_changes
from spark.windows.windows_table import windows_path
from tests.support import spark_oracle
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, reading, reading_headers
from tests.support.spark_warehouse import Warehouse

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


def sent(device: str, sequence: int) -> KafkaRecord:
    """A reading, in a lane of its own for each device."""
    headers = reading_headers(sequence, time=NOON + timedelta(seconds=sequence), lane=f"{int(device):012x}")
    record = reading(b'{"t": %d}' % sequence, headers, offset=100 * int(device) + sequence, key=device.encode())
    return replace(record, timestamp=NOON + timedelta(seconds=5))


def test_tables_stay_right_when_put_in_order_made_anew_and_rid_of_a_device(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_upkeep, "FILES_MIN", 2)
    monkeypatch.setattr(delta_upkeep, "GROWTH_MIN", 1)
    monkeypatch.setattr(table_upkeep, "LOOK_BATCHES", 1)
    monkeypatch.setattr(table_upkeep, "FILES_NEW_MIN", 2)
    warehouse = Warehouse(spark, Path(new_warehouse))
    records = [sent(device, sequence) for sequence in range(4) for device in ("42", "43")]
    for number, batch in enumerate((records[:3], records[3:])):
        warehouse.take(number, batch)
    expected = spark_oracle.tables(records)

    upkeep = Upkeep(warehouse.job, pytest.fail)
    upkeep.after_batch(round(records[-1].timestamp.timestamp() * 1e6))
    upkeep.wait()
    tables = warehouse.job.tables
    paths = [log_path(tables), windows_path(tables), changes_path(new_warehouse)]
    assert [file_count(spark, path) for path in paths] == [1, 1, 1]
    assert warehouse.tables() == expected

    told = read_changes(spark, new_warehouse).count()
    replay(spark, new_warehouse, None, None, only_writer, lambda _: None)
    warehouse.job = BatchJob(spark, new_warehouse)
    assert warehouse.tables() == expected
    # Nothing is different, so nothing is told.
    assert read_changes(spark, new_warehouse).count() == told

    command = ["devices", "delete", "42", "--namespace", "plant", "--warehouse", new_warehouse, "--yes"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    readings = [row for row in expected.readings if row[:2] != ("plant", "42")]
    windows = {key: row for key, row in expected.windows.items() if key[:2] != ("plant", "42")}
    assert (len(readings), len(windows)) == (4, 1)
    # Kafka is read once more: nothing of it comes back.
    warehouse = Warehouse(spark, Path(new_warehouse), ingest="another-query")
    counts = warehouse.take(0, records)
    assert (counts.deleted, counts.duplicates) == (4, 4)
    found = warehouse.tables()
    assert (found.readings, found.windows) == (readings, windows)
