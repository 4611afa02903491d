"""A device's numbers that came before are found in the table, whatever was folded meanwhile."""

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from spark.arrow_pass.parquet_files import file_of
from spark.arrow_pass.tasks import table_folder
from spark.engine import delta_folds
from spark.engine.delta_folds import due_of
from spark.engine.delta_staging import AppendTable
from spark.engine.made_file import MadeFile
from spark.ingest.devices_append import DevicesAppend
from spark.log.copies import NO_SUSPECTS
from spark.log.device_parts import (
    SKIPPING_COLUMNS,
    create_device_parts,
    device_parts_path,
    device_parts_schema,
    islands_in,
    read_device_parts,
)
from spark.upkeep import device_folds
from spark.upkeep.device_folds import fold_devices
from tests.support.device_readings import Reading, made, reading
from tests.support.sizes import SEED, size

DEVICES, NUMBERS = 3, 40
BATCHES = size(4, 20)


def file_with(tables: str, pieces: Sequence[Sequence[Reading]], ordinal: int) -> MadeFile:
    folder = table_folder(device_parts_path(tables), "", SKIPPING_COLUMNS)
    return file_of(folder, pa.concat_tables([made(piece, ordinal).rows for piece in pieces]))


def open_parts(spark: SparkSession, tables: str) -> AppendTable:
    create_device_parts(spark, tables)
    return AppendTable(spark, device_parts_path(tables), device_parts_schema())


@pytest.mark.spark
@pytest.mark.campaign(seconds=90)
@pytest.mark.usefixtures("interpreted")
def test_numbers_that_came_before_or_in_two_rows_are_found(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_folds, "FILES_MIN", 2)
    rng = random.Random(SEED)  # noqa: S311
    tables = str(tmp_path)
    table = open_parts(spark, tables)
    came_in: dict[tuple[str, int], set[int]] = defaultdict(set)
    for ordinal in range(BATCHES):
        pieces = [
            [
                reading(number, device=str(device))
                for device in range(DEVICES)
                # Mostly new numbers, with holes; now and then some of any age.
                for number in {
                    *(n for n in range(3 * ordinal, 3 * ordinal + 5) if rng.random() < 0.6),
                    *rng.sample(range(NUMBERS), rng.choice((0, 0, 3))),
                }
            ]
            for _ in range(rng.randint(1, 3))
        ]
        pieces[0].append(reading(None, device="uncounted"))
        devices = DevicesAppend(table, ordinal)
        files = (pieces[:2], pieces[2:])
        devices.take([file_with(tables, each, ordinal) for each in files if any(each)])

        found = devices.came_again(1)

        of_pieces = [
            {(each["device"], each["device_sequence"]) for each in piece if each["device_sequence"] is not None}
            for piece in pieces
        ]
        twice = {each for piece in of_pieces for each in piece if sum(each in other for other in of_pieces) > 1}
        before = {each for piece in of_pieces for each in piece if each in came_in}
        told = {(device, n) for _, device, *_, first, last in found.runs for n in range(first, last + 1)}
        assert told == twice | before
        for each in before:
            assert all(any(low <= batch <= high for low, high in found.batches) for batch in came_in[each])
        devices.commit()
        DevicesAppend(table, ordinal).commit()
        for each in set().union(*of_pieces):
            came_in[each].add(ordinal)
        if ordinal % 3 == 1:
            fold_devices(spark, tables)
    islands = islands_in(read_device_parts(spark, tables)).collect()
    numbers = {(row.device, n) for row in islands for n in range(row["first"], row["last"] + 1)}
    assert numbers == came_in.keys()


@pytest.mark.spark
@pytest.mark.usefixtures("interpreted")
def test_files_are_folded_and_say_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_folds, "FILES_MIN", 4)
    monkeypatch.setattr(device_folds, "ROWS_MAX", 3)
    tables = str(tmp_path)
    table = open_parts(spark, tables)
    for ordinal in range(4):
        devices = DevicesAppend(table, ordinal)
        readings = [reading(2 * ordinal + n, device=str(device)) for n in range(2) for device in range(3)]
        devices.take([file_with(tables, [[*readings, reading(None, device=f"u{ordinal}")]], ordinal)])
        devices.commit()
    late = DevicesAppend(table, 4)
    late.take([file_with(tables, [[reading(20, device="0")]], 4)])

    fold_devices(spark, tables)
    late.commit()

    rows = read_device_parts(spark, tables).orderBy("device", "batch_last").collect()
    assert [(row.device, row["first"], row["last"], row.batch_first, row.batch_last) for row in rows] == [
        ("0", 0, 7, 0, 3),
        ("0", 20, 20, 4, 4),
        *((str(device), 0, 7, 0, 3) for device in (1, 2)),
        *((f"u{ordinal}", None, None, ordinal, ordinal) for ordinal in range(4)),
    ]
    before = read_device_parts(spark, tables).count()
    fold_devices(spark, tables)
    assert read_device_parts(spark, tables).count() == before, "nothing is due"


@pytest.mark.spark
@pytest.mark.usefixtures("interpreted")
def test_a_batch_without_numbers_asks_for_none(spark: SparkSession, tmp_path: Path) -> None:
    tables = str(tmp_path)
    table = open_parts(spark, tables)
    devices = DevicesAppend(table, 0)
    devices.take([])
    assert devices.came_again(0) is NO_SUSPECTS
    devices.commit()
    assert read_device_parts(spark, tables).count() == 0


def test_a_fold_is_folded_again_once_newer_files_outweigh_it() -> None:
    new = [(10, 1, 5, f"new-{number:02}") for number in range(40)]
    names = [name for *_, name in new]
    assert due_of(new) == (names, 200)
    assert due_of(new[:3]) == ([], 0)
    # The fold of a hundred batches is left alone, and the small one is not.
    small, large = (300, 1, 90, "small"), (5_000, 8, 2_000, "large")
    assert due_of([large, *new, small]) == ([*names, "small"], 290)
    assert due_of([large, (4_000, 8, 900, "growing"), *new]) == (names, 200)
    assert due_of([(390, 8, 2_000, "large"), *new]) == ([*names, "large"], 2_200)
