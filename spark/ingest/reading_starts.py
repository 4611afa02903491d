"""`reading_starts`: from which offsets `log` was read on, each time that could not be told by Spark's checkpoint.

A checkpoint goes on where it stopped, but only with all topics that are in it, and as many sources. A new checkpoint
begins where Kafka no longer has what is next, where topics are to be read as backlog or not at all from now on, where a
new topic has lost its first records, and where the checkpoint does not stand where the tables end. This table says from
which offsets: its last row is the start that counts, and what Kafka had lost by then stands in it.
"""

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from delta.tables import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import Row

from spark.source.topic_changes import GoingOn, Loss, TopicNow, starting_offsets

LOSS_TYPE = "struct<topic: string, topic_id: string, partition: int, first: bigint, end: bigint>"
SCHEMA = f"""
    number int, at_us bigint, ordinal bigint, sources int, starting string, topic_ids map<string, string>,
    losses array<{LOSS_TYPE}>
"""
"""`ordinal`: of the first batch that was read from there on."""


@dataclass(frozen=True, slots=True)
class ReadingStart:
    """Where a checkpoint begins."""

    number: int
    ordinal: int
    sources: int
    """One, or two where a backlog is read by itself."""
    starting: Mapping[str, Mapping[int, int]] | None
    """The next offset by topic and partition; None: the earliest there are."""
    topic_ids: Mapping[str, str]
    losses: tuple[Loss, ...] = ()
    at_us: int = 0
    """When it began, in microseconds since 1970."""


def starts_path(tables: str) -> str:
    """Return where the table lies."""
    return f"{tables}/reading_starts"


def read_starts(spark: SparkSession, tables: str) -> list[ReadingStart]:
    """All starts, in order."""
    path = starts_path(tables)
    if not DeltaTable.isDeltaTable(spark, path):
        return []
    rows = spark.read.format("delta").load(path).collect()
    return sorted((_start_of(row) for row in rows), key=lambda start: start.number)


def first_start(sources: int) -> ReadingStart:
    """Where a new warehouse begins."""
    return ReadingStart(0, 0, sources, None, {}, at_us=time.time_ns() // 1_000)


def start_after(  # noqa: PLR0913, PLR0917 - what a start is made of
    before: ReadingStart,
    ordinal: int,
    sources: int,
    going_on: GoingOn,
    now: Mapping[str, TopicNow],
    taken: Collection[int] = (),
) -> ReadingStart:
    """The start that follows another, from what there is in Kafka now. `taken` are numbers that have a folder."""
    topic_ids = {topic: found.topic_id for topic, found in now.items()}
    now_us = time.time_ns() // 1_000
    number = max([before.number, *taken]) + 1
    return ReadingStart(number, ordinal, sources, going_on.starting, topic_ids, going_on.losses, now_us)


def append_start(spark: SparkSession, tables: str, start: ReadingStart) -> None:
    """Have a start count from now on."""
    row = (
        *(start.number, start.at_us, start.ordinal, start.sources),
        None if start.starting is None else starting_offsets(start.starting),
        dict(start.topic_ids),
        [(loss.topic, loss.topic_id, loss.partition, loss.first, loss.end) for loss in start.losses],
    )
    frame = spark.createDataFrame([row], SCHEMA)
    frame.coalesce(1).write.format("delta").mode("append").save(starts_path(tables))


def _start_of(row: Row) -> ReadingStart:
    starting = None
    if row.starting is not None:
        told: dict[str, dict[str, int]] = json.loads(row.starting)
        starting = {topic: {int(number): offset for number, offset in each.items()} for topic, each in told.items()}
    losses = tuple(Loss(*loss) for loss in row.losses)
    return ReadingStart(row.number, row.ordinal, row.sources, starting, row.topic_ids, losses, row.at_us)
