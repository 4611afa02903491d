"""Kafka's records as DataFrames: the same slices of a feed, or the same stream, for all that is compared."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.bench.spark_feed import Place
from tests.bench.spark_ledger import Counted

Offsets = Mapping[Place, int]


def slices(ends: Offsets, count: int) -> list[tuple[Offsets, Offsets]]:
    """Cut a feed into `count` batches with the same share of each partition, as a stream with a limit takes them."""
    cuts = [{place: end * number // count for place, end in ends.items()} for number in range(count + 1)]
    return list(pairwise(cuts))


def batch(spark: SparkSession, bootstrap: str, begin: Offsets, end: Offsets) -> DataFrame:
    """The records of fixed spans of offsets."""
    return (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", ",".join(sorted({topic for topic, _ in end})))
        .option("startingOffsets", _json(begin))
        .option("endingOffsets", _json(end))
        .option("includeHeaders", "true")
        .load()
    )


def stream(spark: SparkSession, bootstrap: str, topics: Iterable[str], records_max: int) -> DataFrame:
    """All records of topics, at most `records_max` in a batch."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", ",".join(topics))
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("failOnDataLoss", "true")
        .option("maxOffsetsPerTrigger", records_max)
        .load()
    )


class Tables(Protocol):
    """Takes a stream of records, and then has windows of them."""

    def writer(self, records: DataFrame) -> DataStreamWriter: ...

    def windows(self) -> DataFrame: ...


def drain(writer: DataStreamWriter, checkpoint: Path) -> None:
    """Have all that a stream has now taken, batch by batch."""
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def counted(windows: DataFrame) -> Iterator[Counted]:
    """A table of windows as the ledger has them."""
    rows = windows.select(
        "device", "metric", F.unix_micros("window_start"), "n", (F.col("sum") * 100).cast("bigint")
    ).collect()
    return (tuple(row) for row in rows)


def _json(offsets: Offsets) -> str:
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets.items():
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(by_topic)
