"""A copy of a warehouse that was written meanwhile: it opens, nothing is lost in it, and nothing counts twice."""

import asyncio
import os
import queue
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from demo.kafka_broker import Broker
from spark import batch_job
from spark.batch_job import BatchJob
from spark.cli import FAILED, main
from spark.engine.warehouse_folder import was_copied
from spark.ingest.warehouse_copy import _forget_caches
from spark.ingest_job import BatchReport, IngestSettings, Listener, open_job, run_ingest
from spark.log.log_table import log_path, open_log
from spark.log.warehouse_version import Version, change_version
from spark.source.kafka_source import KafkaSource
from spark.upkeep import replay_job
from spark.upkeep.replay_job import replay
from spark.windows.window_changes import read_changes
from spark.windows.windows_table import Area, area_of, fold_date
from tests.support import spark_oracle
from tests.support.sizes import SEED
from tests.support.spark_kafka_feed import send
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, drawn_records, reading, reading_headers, through
from tests.support.spark_warehouse import Warehouse, at

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900), pytest.mark.usefixtures("interpreted")]

BATCHES = 3
RECORDS = 100
PAUSE_S_MAX = 0.3
"""Between two folders of a copy."""


def drawn() -> tuple[random.Random, list[KafkaRecord]]:
    rng = random.Random(SEED)  # noqa: S311
    return rng, drawn_records(rng, RECORDS)


def mixed(rng: random.Random, moments: list[Path], copy: Path) -> None:
    """Make a copy each of whose folders is of a moment of its own, as `cp` finds them in any order.

    A file that came after its folder's moment may be there in part: it was being written.
    """
    for notes in sorted(moments[-1].rglob("_delta_log")):
        table = notes.parent
        for folder in [table, *sorted(each for each in table.rglob("*") if each.is_dir())]:
            place = folder.relative_to(moments[-1])
            moment = rng.randrange(len(moments))
            _copy_files(moments[moment] / place, copy / place)
            after = moments[min(moment + 1, len(moments) - 1)] / place
            if folder.name != "_delta_log" and rng.random() < 0.5:
                _copy_files(after, copy / place, in_part=True)
    shutil.copy2(moments[-1] / "_place", copy)


def _copy_files(source: Path, target: Path, *, in_part: bool = False) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir() if source.is_dir() else ():
        if file.is_file() and not (target / file.name).exists():
            shutil.copy2(file, target)
            if in_part:
                os.truncate(target / file.name, file.stat().st_size // 2)


@pytest.mark.long(seconds=200)
def test_a_mix_of_moments_becomes_one_warehouse_again(spark: SparkSession, new_warehouse: str, tmp_path: Path) -> None:
    rng, records = drawn()
    original = Warehouse(spark, Path(new_warehouse))
    assert not was_copied(new_warehouse)
    cuts = sorted(rng.sample(range(1, len(records)), BATCHES - 1))
    moments = []
    for number, (first, end) in enumerate(zip([0, *cuts], [*cuts, len(records)], strict=True)):
        original.take(number, records[first:end])
        if rng.random() < 0.7:
            original.job.save()
        if rng.random() < 0.3:
            fold_date(spark, original.job.tables, NOON.date())
        moments.append(Path(shutil.copytree(new_warehouse, tmp_path / f"moment-{number}")))

    told: list[str] = []
    copy = tmp_path / "copy"
    mixed(rng, moments[rng.randrange(BATCHES - 1) :], copy)
    assert was_copied(str(copy))
    job = open_job(spark, str(copy), None, told.append)
    assert not was_copied(str(copy))
    read = job.state._topics.offsets()
    made = Warehouse(spark, copy, ingest="query-2")
    rest = [each for each in records if each.offset >= read.get(each.topic, {}).get(each.partition, 0)]
    made.take(0, rest)
    made.job.save()
    places = open_log(spark, str(copy)).select("topic", "partition", "offset").collect()
    assert sorted(map(tuple, places)) == sorted((r.topic, r.partition, r.offset) for r in records)
    assert made.tables() == spark_oracle.tables(records)
    assert told_in_changes(spark, copy) == counted(made)
    print(told)  # noqa: T201 - the same

    # A copy of tables at rest is taken as it is: deleted and folded rows stay so.
    at_rest = Path(shutil.copytree(copy, tmp_path / "at-rest"))
    notes = sorted(at_rest.rglob("_delta_log/*"))
    assert was_copied(str(at_rest))
    assert Warehouse(spark, at_rest).tables() == spark_oracle.tables(records)
    assert sorted(at_rest.rglob("_delta_log/*")) == notes


def counted(warehouse: Warehouse) -> dict[object, int]:
    """Number of values in each window."""
    return {key: row.n for key, (row, _) in warehouse.windows().items()}


def told_in_changes(spark: SparkSession, path: Path) -> dict[object, int]:
    """Number of values in each window, by `window_changes`."""
    counts: dict[object, int] = {}
    for row in read_changes(spark, str(path)).withColumn("us", F.unix_micros("window_start")).orderBy("at").collect():
        key = (row.namespace, row.device, row.stream, row.metric, at(row.us))
        counts[key] = counts.get(key, 0) + row.n if row.cause == "readings" else row.n
    return {key: count for key, count in counts.items() if count}


def test_a_version_whose_tables_the_copy_lacks_is_not_seen_in_it(spark: SparkSession, new_warehouse: str) -> None:
    # A replay ended while it was made: `versions` was copied after that, and the folders before.
    change_version(spark, new_warehouse, lambda _: Version(2))
    (Path(new_warehouse) / "_place").unlink()
    assert Path(BatchJob(spark, new_warehouse).tables).name == "v1"


@pytest.mark.long(seconds=35)
def test_a_version_that_was_copied_while_it_was_made_is_not_seen(
    spark: SparkSession, new_warehouse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [reading(headers=reading_headers(number), offset=number) for number in range(3)]
    original = Warehouse(spark, Path(new_warehouse))
    for number, record in enumerate(records):
        original.take(number, [record])
    copy = tmp_path / "copy"

    def copying(spark: SparkSession, warehouse: str, change: Callable[[Version | None], Version]) -> Version:
        shutil.copytree(new_warehouse, copy)
        return change_version(spark, warehouse, change)

    monkeypatch.setattr(replay_job, "change_version", copying)
    replay(spark, new_warehouse, None, None, lambda _: nullcontext(), lambda _: None)
    # Its `log` was copied before the last batch came into it, and `versions` after the replay.
    notes = sorted((copy / "v2" / "log" / "_delta_log").glob("*.json"))
    notes[-1].unlink()
    shutil.rmtree(copy / "versions")
    shutil.copytree(Path(new_warehouse) / "versions", copy / "versions")
    job = BatchJob(spark, str(copy))
    assert Path(job.tables).name == "v1"
    assert Warehouse(spark, copy).tables() == spark_oracle.tables(records)


@pytest.mark.long(seconds=40)
def test_tables_of_several_moments_are_told_and_made_anew(
    spark: SparkSession, new_warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [reading(headers=reading_headers(number), offset=number) for number in range(3)]
    original = Warehouse(spark, Path(new_warehouse))
    for number, record in enumerate(records):
        original.take(number, [record])
    # `log` is older than the other tables.
    notes = Path(log_path(original.job.tables)) / "_delta_log"
    for file in notes.glob(f"*{max(notes.glob('*.json')).stem}*"):
        file.unlink()
    _forget_caches(spark)
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    told = CliRunner().invoke(main, ["maintain", "--warehouse", new_warehouse])
    assert told.exit_code == FAILED
    assert "is of another moment than `log`" in told.output
    assert "`sluice-cloud replay`" in told.output
    made = CliRunner().invoke(main, ["replay", "--warehouse", new_warehouse])
    assert made.exit_code == 0, made.output
    again = Warehouse(spark, Path(new_warehouse))
    assert again.tables() == spark_oracle.tables(records[:2])
    assert told_in_changes(spark, Path(new_warehouse)) == counted(again)


@pytest.mark.long(seconds=35)
@pytest.mark.parametrize("case", ["v1/window_parts, state saved", "v1/window_parts", "window_changes"])
def test_what_is_computed_anew_while_a_table_is_copied_is_not_missed(
    spark: SparkSession, new_warehouse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    table = case.partition(",")[0]
    is_saved = "saved" in case
    # It comes again, better timed, and belongs to the minute before.
    minute = timedelta(minutes=1)
    worse = through("a", 0, 0, offset=0, error_us=90_000_000)
    better = through("a", 1, 0, offset=1, time=NOON - minute)
    other = through("a", 2, 1, offset=2)
    original = Warehouse(spark, Path(new_warehouse))
    original.take(0, [worse])
    copied = tmp_path / "copied-before"

    def copying(touched: DataFrame, window_s: int) -> Area | None:
        shutil.copytree(Path(new_warehouse) / table, copied)
        return area_of(touched, window_s)

    monkeypatch.setattr(batch_job, "area_of", copying)
    original.take(1, [better])
    if is_saved:
        original.job.save()
    else:
        original.take(2, [other])
    copy = Path(shutil.copytree(new_warehouse, tmp_path / "copy"))
    shutil.rmtree(copy / table)
    copied.rename(copy / table)
    told: list[str] = []
    open_job(spark, str(copy), None, told.append)
    assert [words for words in told if table in words and "is of another moment than `log`" in words]
    again = Warehouse(spark, copy)
    assert again.tables() == spark_oracle.tables([worse, better] if is_saved else [worse, better, other])
    assert told_in_changes(spark, copy) == counted(again)


def copy_as_operators_do(folder: Path, target: Path) -> None:
    """`cp` tells of files that vanish before it has them, such as a checkpoint's temporary ones, and goes on."""
    command = ["cp", "-a", str(folder), str(target)]
    ended = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, check=False)
    assert all(line.endswith(": No such file or directory") for line in ended.stderr.splitlines()), ended.stderr


@pytest.mark.kafka
@pytest.mark.long(seconds=264)
def test_a_copy_of_a_running_warehouse_opens_and_loses_nothing(
    kafka: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    rng, drawn_ = drawn()
    records = [replace(record, topic=f"{record.topic}-copied") for record in drawn_]
    pattern = "(device|gateway)-.*-copied"
    asyncio.run(send(kafka, records))
    warehouse = tmp_path / "warehouse"
    settings = IngestSettings(
        KafkaSource(kafka.bootstrap, pattern, batch_records_max=10),
        *(str(warehouse), str(warehouse / "_checkpoint")),
        interval_s=0,
        once=True,
    )
    copies = [tmp_path / f"copy-{number}" for number in range(2)]
    stop, finished = threading.Event(), queue.SimpleQueue[BatchReport | None]()
    # In this process: a Java of its own would have to become warm too, which takes longer than the batches.
    with ThreadPoolExecutor(1) as beside:
        job = beside.submit(run_ingest, spark, settings, stop, Listener(report=finished.put))
        job.add_done_callback(lambda _: finished.put(None))
        try:
            for copy in copies:
                for _ in range(2):
                    assert finished.get(), "all was read before the copies were made"
                (copy / "v1").mkdir(parents=True)
                folders = [each for each in warehouse.iterdir() if each.name != "v1"] + [*(warehouse / "v1").iterdir()]
                # Each of its folders at another time, in any order.
                for folder in rng.sample(folders, len(folders)):
                    copy_as_operators_do(folder, copy / folder.relative_to(warehouse).parent)
                    time.sleep(rng.uniform(0, PAUSE_S_MAX))
            assert not job.done(), "all was read before the copies were made"
        finally:
            stop.set()
        job.result()

    told: list[str] = []
    # One goes on with the checkpoint that was copied, one without.
    shutil.rmtree(copies[0] / "_checkpoint")
    for copy in copies:
        of_copy = replace(
            settings,
            source=KafkaSource(kafka.bootstrap, pattern),
            warehouse=str(copy),
            checkpoint=str(copy / "_checkpoint"),
        )
        run_ingest(spark, of_copy, threading.Event(), Listener(warn=told.append))
        assert Warehouse(spark, copy).tables() == spark_oracle.tables(records)
        assert all(re.search("is of another moment than `log`|have the time of their sender", words) for words in told)
