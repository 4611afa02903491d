"""An expression that is built once gives the results of one that is built each time."""

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.engine.built_once import built_once, recorded
from tests.support.spark_warehouse import expect_rows

pytestmark = pytest.mark.spark

runs: list[int] = []


@recorded
def by_device(rows: DataFrame, least: int) -> DataFrame:
    runs.append(least)
    doubled = rows.where(F.col("n") >= least).withColumns({"twice": F.col("n") * 2, "least": F.lit(least)})
    others = [name for name in doubled.columns if name not in {"n", "device"}]
    totals = doubled.groupBy("device").agg(F.count("*").alias("rows"), *(F.sum(name).alias(name) for name in others))
    return totals.where("rows < 9").withColumn("device", F.upper("device")).withColumnRenamed("device", "name")


def test_a_recorded_function_runs_once_for_each_schema_and_argument(spark: SparkSession) -> None:
    runs.clear()
    some = spark.createDataFrame([("a", 1), ("a", 2), ("b", 3)], "device string, n int")
    others = spark.createDataFrame([("c", 9)], "device string, n int")
    wider = spark.createDataFrame([("a", 1, 100)], "device string, n int, extra int")

    totals = "name string, rows bigint, twice bigint, least bigint"
    expect_rows(by_device(some, 2), spark.createDataFrame([("A", 1, 4, 2), ("B", 1, 6, 2)], totals))
    assert by_device(others, 2).collect() == [("C", 1, 18, 2)]
    assert runs == [2]
    expect_rows(by_device(some, 1), spark.createDataFrame([("A", 2, 6, 2), ("B", 1, 6, 1)], totals))
    assert by_device(wider, 1).collect() == [("A", 1, 100, 2, 1)]
    assert runs == [2, 1, 1]


def test_another_session_of_the_same_spark_uses_what_was_built(spark: SparkSession) -> None:
    # Spark runs each batch of a stream in a session of its own.
    runs.clear()
    found = [
        by_device(each.createDataFrame([("a", 1)], "device string, n int"), 0).collect()
        for each in (spark, spark.newSession())
    ]
    assert found == [[("A", 1, 2, 0)]] * 2
    assert runs == [0]


def test_a_built_expression_is_one_object_until_its_arguments_change() -> None:
    made: list[str] = []

    @built_once
    def build(name: str) -> list[str]:
        made.append(name)
        return [name]

    assert build("a") is build("a")
    assert build("b") == ["b"]
    assert made == ["a", "b"]
