"""Keeps the table `reading_starts`: the offsets at which each new checkpoint of Spark began.

A checkpoint goes on where it stopped, but only with all topics that are in it, and as many sources. There are four
reasons for a new one: Kafka no longer has the next records; topics become backlog, or are no longer read; a new topic
has lost its first records; or the checkpoint does not fit the tables. The last row is the start that counts. It also
has the records that Kafka had lost by then.
"""

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import Row

from spark.source.topic_changes import GoingOn, Loss, TopicNow, TopicOffsets, offsets_of, starting_offsets

LOSS_TYPE = "struct<topic: string, topic_id: string, partition: int, first: bigint, end: bigint>"
SCHEMA = f"""
    number int, at_us bigint, ordinal bigint, sources int, starting string, topic_ids map<string, string>,
    losses array<{LOSS_TYPE}>
"""
"""Columns of the table. `ordinal` is the first batch that was read from this start."""


@dataclass(frozen=True, slots=True)
class ReadingStart:
    """The beginning of a checkpoint."""

    number: int
    ordinal: int
    sources: int
    """One, or two if the backlog is a source of its own."""
    starting: TopicOffsets | None
    """First offsets by topic and partition; None for the earliest."""
    topic_ids: Mapping[str, str]
    losses: tuple[Loss, ...] = ()
    at_us: int = 0
    """Time when it began, in microseconds since 1970."""


def starts_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/reading_starts"


def read_starts(spark: SparkSession, tables: str) -> list[ReadingStart]:
    """Return all starts, in order."""
    path = starts_path(tables)
    if not DeltaTable.isDeltaTable(spark, path):
        return []
    rows = spark.read.format("delta").load(path).collect()
    return sorted((_start_of(row) for row in rows), key=lambda start: start.number)


def first_start(sources: int) -> ReadingStart:
    """Return the start of a new warehouse."""
    return ReadingStart(0, 0, sources, None, {}, at_us=time.time_ns() // 1_000)


def start_after(  # noqa: PLR0913, PLR0917 - the parts of a start
    before: ReadingStart,
    ordinal: int,
    sources: int,
    going_on: GoingOn,
    now: Mapping[str, TopicNow],
    taken: Collection[int] = (),
) -> ReadingStart:
    """Return the start after another, by the present state of Kafka. `taken` are numbers that have a folder already."""
    topic_ids = {topic: found.topic_id for topic, found in now.items()}
    now_us = time.time_ns() // 1_000
    number = max([before.number, *taken]) + 1
    return ReadingStart(number, ordinal, sources, going_on.starting, topic_ids, going_on.losses, now_us)


def append_start(spark: SparkSession, tables: str, start: ReadingStart) -> None:
    """Append a start, which counts from now on."""
    row = (
        *(start.number, start.at_us, start.ordinal, start.sources),
        None if start.starting is None else starting_offsets(start.starting),
        dict(start.topic_ids),
        [(loss.topic, loss.topic_id, loss.partition, loss.first, loss.end) for loss in start.losses],
    )
    frame = spark.createDataFrame([row], SCHEMA)
    frame.coalesce(1).write.format("delta").mode("append").save(starts_path(tables))


def _start_of(row: Row) -> ReadingStart:
    starting = None if row.starting is None else offsets_of(json.loads(row.starting))
    losses = tuple(Loss(*loss) for loss in row.losses)
    return ReadingStart(row.number, row.ordinal, row.sources, starting, row.topic_ids, losses, row.at_us)
