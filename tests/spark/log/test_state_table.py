"""States that are written now and then: what a start finds, and how often they are committed."""

from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from spark.engine import delta_folds
from spark.engine.delta_staging import commit_numbers, make_table, snapshot
from spark.log.log_table import ORDINAL
from spark.log.state_table import StateTable

pytestmark = pytest.mark.spark


def open_table(spark: SparkSession, path: Path, most: int | None = None) -> StateTable[tuple[str], int]:
    return StateTable(
        spark,
        str(path),
        key=("name",),
        columns="value bigint",
        decode=lambda row: int(row.value),
        encode=lambda n: (n,),
        most=most,
    )


def test_each_save_is_one_commit_and_the_table_is_folded_now_and_then(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_folds, "FILES_MIN", 3)
    table = open_table(spark, tmp_path / "states")
    begun = snapshot(spark, str(tmp_path / "states")).version()
    rows, commits = [], []
    for ordinal in range(4):
        table.put(("meter",), ordinal)
        table.save(ordinal, {"heartbeats": ordinal})
        rows.append(spark.read.format("delta").load(str(tmp_path / "states")).count())
        commits.append(snapshot(spark, str(tmp_path / "states")).version() - begun)
    assert (rows, commits) == ([1, 2, 1, 2], [1, 2, 4, 5])
    again = open_table(spark, tmp_path / "states")
    assert again.states == {("meter",): 3}
    assert again.saved == 3
    assert commit_numbers(spark, str(tmp_path / "states")) == {ORDINAL: 3, "heartbeats": 3}


def test_only_the_states_put_last_are_in_memory_and_the_others_are_looked_up(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "states"
    table = open_table(spark, path, most=2)
    for ordinal, name in enumerate("abcd"):
        table.recall([(name,), ("b",)])
        table.put_last((name,), ordinal)
        table.save(ordinal)
    assert table.states == {("c",): 2, ("d",): 3}
    table.recall([("a",), ("new",), ("d",)])
    assert table.states == {("c",): 2, ("d",): 3, ("a",): 0}
    table.put_last(("a",), 9)
    table.save(4)
    assert table.states == {("d",): 3, ("a",): 9}

    again = open_table(spark, path, most=2)
    assert again.states == {("d",): 3, ("a",): 9}
    again.recall([("b",)])
    assert again.states[("b",)] == 1


def test_a_table_of_an_earlier_release_is_given_once_the_columns_that_it_lacks(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "states")
    table = open_table(spark, tmp_path / "states")
    table.put(("meter",), 7)
    table.save(0)
    later = cast("StructType", StructType.fromDDL("name string, value bigint, unit string, ordinal bigint"))

    make_table(spark, path, later)

    given = snapshot(spark, path).version()
    (row,) = spark.read.format("delta").load(path).collect()
    assert row.asDict() == {"name": "meter", "value": 7, "ordinal": 0, "unit": None}
    make_table(spark, path, later)
    assert snapshot(spark, path).version() == given
