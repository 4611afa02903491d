"""States that are written now and then: what a start finds, and how often they are committed."""

from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from spark.engine.delta_staging import make_table, snapshot
from spark.log import state_table
from spark.log.state_table import StateTable

pytestmark = pytest.mark.spark


def open_table(spark: SparkSession, path: Path) -> StateTable[tuple[str], int]:
    return StateTable(
        spark,
        str(path),
        key=("name",),
        columns="value bigint",
        decode=lambda row: int(row.value),
        encode=lambda n: (n,),
    )


def test_each_save_is_one_commit_and_the_table_is_written_anew_now_and_then(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_table, "REWRITE_FACTOR", 1)
    table = open_table(spark, tmp_path / "states")
    begun = snapshot(spark, str(tmp_path / "states")).version()
    rows = []
    for ordinal in range(3):
        table.put(("meter",), ordinal)
        table.save(ordinal, {"heartbeats": ordinal})
        rows.append(spark.read.format("delta").load(str(tmp_path / "states")).count())
        assert snapshot(spark, str(tmp_path / "states")).version() == begun + ordinal + 1
    assert rows == [1, 2, 1]
    again = open_table(spark, tmp_path / "states")
    assert again.states == {("meter",): ordinal}
    assert (again.saved, again.number("heartbeats")) == (ordinal, ordinal)


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
