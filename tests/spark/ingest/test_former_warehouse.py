"""A warehouse that a program before `device_parts` wrote goes on without a loss.

`former_warehouse.tar.xz` holds it, as commit 8bc34414 left it. That program took `batches()` with
`sequence_runs.ISLANDS_MAX = 4`, so that most islands were settled. It saved its state after the batches 0, 2 and 3. It
died in batch 5, once `log` was committed.
"""

import tarfile
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.arrow_pass.device_rows import fold
from spark.batch_job import BatchJob
from spark.ingest.former_devices import FORMER
from spark.log.device_parts import read_device_parts
from spark.log.sequence_runs import RUN_COLUMNS
from spark.upkeep.device_deletion import is_known
from spark.views.evidence import open_gaps
from spark.views.windows_view import open_windows
from tests.support import spark_oracle
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, changed, through
from tests.support.spark_warehouse import Warehouse

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

PACKED = Path(__file__).with_name("former_warehouse.tar.xz")
LOST = range(4, 60, 5)


def batches() -> list[list[KafkaRecord]]:
    """Readings of a sensor that loses every fifth, starts anew, and goes on by its first start, and of another one."""
    offsets = count()

    def counted(*numbers: int, gateway: str = "a") -> list[KafkaRecord]:
        return [
            through(gateway, n, n, offset=next(offsets), time=NOON + timedelta(seconds=n))
            for n in numbers
            if n not in LOST
        ]

    def restarted(*numbers: int) -> list[KafkaRecord]:
        return [
            replace(each, headers=changed(each.headers or [], "ce_deviceboot", "8-5e6f7a8b"))
            for each in counted(*numbers, gateway="b")
        ]

    def uncounted(*numbers: int) -> list[KafkaRecord]:
        own = {"ce_deviceboot", "ce_devicesequence"}
        return [
            replace(each, key=b"43", headers=[header for header in each.headers or [] if header[0] not in own])
            for each in counted(*numbers, gateway="c")
        ]

    return [
        [*counted(*range(30)), *uncounted(0, 1, 2)],
        counted(*range(30, 60)),
        counted(*range(60, 70)),
        restarted(0, 1, 2),
        [*counted(72, 73), *uncounted(3)],
        [*counted(74, 76), *uncounted(5)],
    ]


def known(spark: SparkSession, tables: str) -> tuple[list[Row], list[Row]]:
    """All that is known of runs and of streams, without the batches in which it came."""
    rows = fold(read_device_parts(spark, tables).toArrow()).rows.to_pylist()
    runs = [Row(*(row[name] for name in (*RUN_COLUMNS, "run", "islands"))) for row in rows if row["islands"]]
    streams = read_device_parts(spark, tables).groupBy("namespace", "device", "stream")
    gateways = F.array_sort(F.array_distinct(F.flatten(F.collect_list("gateways"))))
    return runs, streams.agg(gateways, F.max("last_us")).orderBy("device").collect()


def status(spark: SparkSession, warehouse: str) -> list[Row]:
    shown = open_windows(spark, warehouse).select("device", "window_start", "n", "status", "basis", "why")
    return shown.orderBy("device", "window_start").collect()


@pytest.mark.long(seconds=60)
def test_a_warehouse_of_a_program_before_device_parts_is_taken_over(
    spark: SparkSession, new_warehouse: str, tmp_path: Path
) -> None:
    with tarfile.open(PACKED) as packed:
        packed.extractall(tmp_path / "former", filter="data")
    path = tmp_path / "former" / "warehouse"
    assert {row.status for row in status(spark, str(path))} == {"provisional"}
    assert not is_known(spark, str(path), "plant", "44")

    former = Warehouse(spark, path, "query")

    assert not {folder.name for folder in Path(former.job.tables).iterdir()} & {*FORMER}
    taken = [record for batch in batches() for record in batch]
    assert former.tables() == spark_oracle.tables(taken)
    # A warehouse of this program that took the same readings knows the same.
    anew = Warehouse(spark, Path(new_warehouse))
    anew.take(0, taken)
    assert known(spark, former.job.tables) == known(spark, anew.job.tables)
    gaps = sorted((gap.first, gap.last) for gap in open_gaps(spark, str(path)).collect())
    assert gaps == [*((n, n) for n in LOST), (70, 71), (75, 75)]
    assert status(spark, str(path)) == status(spark, anew.path)

    # Other gateways bring numbers again that were settled, in memory, and not saved, and two that were missing.
    again = [through("d", n, n, offset=1_000 + n, time=NOON + timedelta(seconds=n)) for n in (8, 60, 9, 76, 75)]
    counts = former.take(6, again)
    assert (counts.duplicates, counts.rejected) == (3, 0)
    assert former.tables() == spark_oracle.tables([*taken, *again])
    former.job.save()
    again_opened = BatchJob(spark, str(path))
    assert known(spark, again_opened.tables) == known(spark, former.job.tables)
