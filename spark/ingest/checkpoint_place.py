"""Finds the offsets that Spark's checkpoint reads next, and checks that the tables end there.

Spark writes a batch's end to `offsets/N` before the batch, and `commits/N` after it. A checkpoint may be put back from
a copy, cut short, or of another warehouse. It then does not fit the tables, and records in between would never be read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

from spark.engine.warehouse_folder import files_in, text_of
from spark.log.log_table import CheckpointError
from spark.source.topic_changes import NOTHING_READ, TopicNow, TopicOffsets, TopicRead, offsets_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark.ingest.reading_starts import ReadingStart

FILE_VERSION = "v1"
NO_OFFSET = "-"
"""Line that Spark writes for a source without any offsets yet."""


@dataclass(frozen=True, slots=True)
class Place:
    """The offsets that a checkpoint reads next."""

    begin: TopicOffsets
    """Offsets at which the next batch begins."""
    end: TopicOffsets | None = None
    """Offsets at which the next batch ends, if it was begun before. The tables may have this batch already."""
    takes_new: bool = True
    """True if partitions that the checkpoint does not name are read from their beginning."""

    def is_where_tables_end(self, read: Mapping[str, TopicRead], now: Mapping[str, TopicNow]) -> bool:
        """Tell whether reading on skips no record, and repeats none except those of a batch that is done."""
        ends = self.begin if self.end is None else self.end
        return self._fits(self.begin, read, now) or self._fits(ends, read, now)

    def _fits(self, offsets: TopicOffsets, read: Mapping[str, TopicRead], now: Mapping[str, TopicNow]) -> bool:
        if not offsets.keys() <= now.keys():
            return False
        for topic, found in now.items():
            known = read[topic].next_offsets if topic in read else NOTHING_READ
            for partition, earliest in found.earliest.items():
                stands = offsets.get(topic, NOTHING_READ).get(partition)
                # Spark begins a new partition at 0, and fails if offset 0 is deleted.
                begins = (0 if self.takes_new else None) if stands is None else stands
                if begins != known.get(partition, earliest):
                    return False
        return True


def place_of(spark: "SparkSession", checkpoint: str, start: "ReadingStart", now: Mapping[str, TopicNow]) -> Place:
    """Return the offsets that a checkpoint reads next. `start` has those where it began. Raises CheckpointError."""
    offsets, commits = (
        {int(name) for name in files_in(spark, f"{checkpoint}/{part}") if name.isdigit()}
        for part in ("offsets", "commits")
    )
    earliest = {topic: found.earliest for topic, found in now.items()}
    began = earliest if start.starting is None else start.starting
    if not offsets and not commits:
        return Place(began, takes_new=start.starting is None)
    last = max(offsets, default=-1)
    if max(commits, default=-1) > last:
        raise CheckpointError(f"{checkpoint} does not know what its last batch read")
    at_last = batch_end(spark, checkpoint, last)
    if last in commits:
        return Place(at_last)
    if last == 0:
        return Place(began, at_last)
    return Place(batch_end(spark, checkpoint, last - 1), at_last)


def batch_end(spark: "SparkSession", checkpoint: str, batch: int) -> dict[str, dict[int, int]]:
    """Return a batch's end offsets, of all sources together. Raises CheckpointError if the file is damaged or gone."""
    path = f"{checkpoint}/offsets/{batch}"
    damaged = CheckpointError(f"{path} is damaged or gone")
    try:
        version, _metadata, *sources = text_of(spark, path).splitlines()
        end: dict[str, dict[int, int]] = {}
        for source in sources:
            end |= {} if source == NO_OFFSET else offsets_of(json.loads(source))
    except (Py4JJavaError, ValueError, AttributeError, TypeError) as error:
        raise damaged from error
    if version != FILE_VERSION:
        raise damaged
    return end
