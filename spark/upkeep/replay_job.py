"""Replay: rebuilds every table of a version from the old `log`, or from Kafka, beside the tables that readers see.

The rebuilt tables are a new version. While it is made, `ingest` may go on writing the old version, and the replay
catches up. Then nobody writes for a moment, and one commit puts the new version in the place of the old one. So readers
see one version or the other, never parts of both. `ingest` goes on with the new version where it stopped. After the
commit, the replay writes the differences to `window_changes`. If it dies before that, the next writer does it.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.batch_job import BatchJob
from spark.engine.delta_staging import AppendTable, commit_numbers
from spark.engine.delta_upkeep import delete_rows
from spark.engine.warehouse_folder import WarehouseInUseError, folder_exists, remove_folder, was_copied
from spark.finality.loss_table import take_over_losses
from spark.ingest.reading_starts import append_start, read_starts
from spark.ingest.retention import expire_log, read_horizons
from spark.ingest.warehouse_copy import forget_broken, is_all_told
from spark.log.deletions import read_deletions
from spark.log.log_table import ORDINAL, BatchId, BatchIds, from_kafka, log_path, read_log, with_topic_ids
from spark.log.warehouse_version import Version, change_version, folder_of, open_version, tables_of
from spark.source.kafka_source import KafkaSource, kafka_range
from spark.source.topic_changes import TopicOffsets
from spark.upkeep.device_deletion import delete_from_version
from spark.upkeep.quarantine_retry import records_again
from spark.windows.window_changes import append_replayed, changes_path, changes_schema
from spark.windows.windows_table import WindowLengthError, folded, read_parts, windows_path

if TYPE_CHECKING:
    from spark.decode.codec_declarations import Streams

ROWS_MAX = 500_000
"""Records that one batch of a replay takes, unless a single batch of the old `log` has more."""
WAIT_S = 1.0
"""Seconds between two attempts to be the only writer."""
Portion = tuple[dict[str, dict[int, int]], dict[str, dict[int, int]]]
"""First offsets, and the offsets after the last, by topic and partition."""


@dataclass(frozen=True, slots=True)
class FromKafka:
    """The records that are read from Kafka again, instead of from `log`."""

    source: KafkaSource
    starting: TopicOffsets
    """First offsets, by topic and partition. Earlier records come from `log`."""
    topic_ids: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """Progress of a replay."""

    version: int
    rows: int
    total: int
    """Records to take, as far as is known now. An upper bound if `is_bound`."""
    rejected: int
    """Rejects among `rows`."""
    seconds: float
    is_bound: bool = False
    """Whether `total` counts Kafka's offsets: some of them may hold no record (a transaction's end)."""
    is_waiting: bool = False
    """Whether everything is rebuilt, and the replay waits for `ingest` to stop."""


def replay(  # noqa: PLR0913, PLR0917 - sources, target and callbacks
    spark: SparkSession,
    warehouse: str,
    streams: "Streams | None",
    kafka: FromKafka | None,
    only_writer: Callable[[str], AbstractContextManager[None]],
    report: Callable[[ReplayProgress], None],
) -> Version:
    """Make a new version of all tables, publish it to readers, and return it. No other replay may run meanwhile.

    `streams` are the declarations to decode by. None means those of the present version: if they change meanwhile, the
    replay begins again. `only_writer` raises WarehouseInUseError while somebody else writes the warehouse, and is tried
    again. Raises WindowLengthError if `log` no longer has the readings of windows whose length would have to change.
    """
    if was_copied(warehouse):
        # If somebody writes the warehouse, it is no copy.
        with suppress(WarehouseInUseError), only_writer(warehouse):
            forget_broken(spark, warehouse)
    before = open_version(spark, warehouse)
    source = f"v{before.number}" if kafka is None else f"v{before.number} and kafka"
    after = replace(before, number=before.number + 1, streams=streams or before.streams, source=source)
    _expect_length(spark, warehouse, before, after)
    # An unfinished replay may have used other declarations, or another program.
    if folder_exists(spark, folder_of(warehouse, after.number)):
        remove_folder(spark, folder_of(warehouse, after.number))
    making = _Replay(spark, warehouse, before, after, report)
    if kafka is None:
        making.catch_up()
    else:
        making.take_from_kafka(kafka)
    while True:
        try:
            with only_writer(warehouse):
                if streams is not None or open_version(spark, warehouse).streams == before.streams:
                    making.catch_up()
                    return making.publish()
            return replay(spark, warehouse, None, kafka, only_writer, report)
        except WarehouseInUseError:
            report(making.progress(is_waiting=True))
            time.sleep(WAIT_S)
            making.catch_up()


class _Replay:
    """A version that is being made."""

    def __init__(
        self,
        spark: SparkSession,
        warehouse: str,
        before: Version,
        after: Version,
        report: Callable[[ReplayProgress], None],
    ) -> None:
        self._spark = spark
        self._warehouse = warehouse
        self._after = after
        self._report = report
        self._old = tables_of(warehouse, before)
        self._deletions = read_deletions(spark, warehouse)
        self._job = BatchJob(spark, warehouse, into=after)
        self._taken = -1
        self._old_starts = read_starts(spark, self._old)
        self._rows = 0
        self._total = 0
        self._rejected = 0
        self._reads_kafka = False
        self._begun_s = time.monotonic()

    def progress(self, *, is_waiting: bool = False) -> ReplayProgress:
        seconds = time.monotonic() - self._begun_s
        return ReplayProgress(
            version=self._after.number,
            rows=self._rows,
            total=self._total,
            rejected=self._rejected,
            seconds=seconds,
            is_bound=self._reads_kafka,
            is_waiting=is_waiting,
        )

    def catch_up(self, where: Column | None = None) -> None:
        """Take the rows of all batches of the old `log` that were not taken yet and that fit `where`."""
        self._old_starts = read_starts(self._spark, self._old)
        numbers = commit_numbers(self._spark, log_path(self._old))
        last = numbers.get(ORDINAL, -1)
        rows = read_log(self._spark, self._old).where(from_kafka())
        rows = rows if where is None else rows.where(where)
        new = rows.where(F.col("ordinal").between(self._taken + 1, last))
        of_batch = new.groupBy("ordinal").agg(F.count("*").alias("rows"), F.min("ingest").alias("ingest")).collect()
        self._expect(sum(row.rows for row in of_batch))
        for first, end in self._spans({row.ordinal: (row.rows, row.ingest) for row in of_batch}, last):
            # In the end the new version notes the old one's batches: so `ingest` goes on where it stopped.
            taken = {name: number for name, number in numbers.items() if name != ORDINAL} if end == last else {}
            self._begin_starts(first)
            records = records_again(rows.where(F.col("ordinal").between(first, end)), "ingest", "batch")
            self._take(records, BatchIds(taken))
            self._taken = end

    def take_from_kafka(self, kafka: FromKafka) -> None:
        """Take records before the first offsets from the old `log`, and later ones from Kafka, as far as `log` goes."""
        self.catch_up(_before(kafka.starting))
        read = _read_to(read_log(self._spark, self._old).where(F.col("ordinal") <= self._taken))
        query = f"replay-{uuid.uuid4()}"
        portions = list(_portions(kafka.starting, read))
        self._reads_kafka = True
        self._expect(sum(_records_between(*portion) for portion in portions))
        for number, (starting, ending) in enumerate(portions):
            records = kafka_range(self._spark, kafka.source, starting, ending)
            self._take(with_topic_ids(records, kafka.topic_ids), BatchId(query, number))

    def publish(self) -> Version:
        """Publish the new version to readers, and write its differences to `window_changes`. Returns the version."""
        self._begin_starts(self._taken + 1)
        self._job.save()
        self._take_over_what_expired()
        self._delete_what_was_deleted()

        def published(now: Version | None) -> Version:
            # Keep the registry that was loaded meanwhile.
            return self._after if now is None else replace(self._after, registry=now.registry)

        after = change_version(self._spark, self._warehouse, published)
        changes = AppendTable(self._spark, changes_path(self._warehouse), changes_schema())
        is_told = is_all_told(self._spark, self._warehouse, self._after.number - 1)
        old = self._old if is_told else None
        append_replayed(changes, old, self._job.tables, after.number, self._job.next_ordinal - 1)
        return after

    def _delete_what_was_deleted(self) -> None:
        """Delete the data of devices that were deleted while this version was made."""
        for device, at_us in read_deletions(self._spark, self._warehouse).items():
            if self._deletions.get(device) != at_us:
                delete_from_version(self._spark, self._job.tables, *device)

    def _take_over_what_expired(self) -> None:
        """Take over losses and windows of expired records from the old tables: `log` no longer has these records."""
        horizons = read_horizons(self._spark, self._warehouse)
        if horizons.log is not None:
            # These records expired while this version was made.
            expire_log(self._spark, self._job.tables, horizons.log, self._after.streams)
            take_over_losses(self._spark, self._old, self._job.tables)
        if horizons.closed_before is not None:
            self._take_over_windows(horizons.closed_before)

    def _take_over_windows(self, closed_before: datetime) -> None:
        is_closed = F.col("window_start") < F.lit(closed_before)
        delete_rows(self._spark, windows_path(self._job.tables), is_closed)
        parts = folded(read_parts(self._spark, self._old).where(is_closed), self._after.streams.windows.sizes[0])
        # The parts belong to no batch of this version.
        parts = parts.withColumn("ordinal", F.lit(-1).cast("bigint"))
        parts.write.format("delta").mode("append").save(windows_path(self._job.tables))

    def _expect(self, records: int) -> None:
        """Report the number of records before the first are taken, which may take a while."""
        if records:
            self._total += records
            self._report(self.progress())

    def _take(self, records: DataFrame, batch: BatchId | BatchIds) -> None:
        counts = self._job.take_records(records, batch)
        self._rows += counts.rows
        self._rejected += counts.rejected
        self._report(self.progress())

    def _spans(self, batches: Mapping[int, tuple[int, str]], last: int) -> Iterator[tuple[int, int]]:
        """Spans of old batches, first and last, that become one batch. A span ends where reading began anew.

        `batches` has the rows and the query of each batch. A span has batches of one query only: two queries may have
        read the same offset, and in one batch nothing would tell the two rows apart.
        """
        borders = {start.ordinal for start in self._old_starts}
        first, rows, query = self._taken + 1, 0, ""
        for ordinal in range(self._taken + 1, last + 1):
            count, ingest = batches.get(ordinal, (0, query))
            if ordinal > first and (rows + count > ROWS_MAX or ordinal in borders or query not in {"", ingest}):
                yield first, ordinal - 1
                first, rows = ordinal, 0
            rows, query = rows + count, ingest
        if first <= last:
            yield first, last

    def _begin_starts(self, ordinal: int) -> None:
        """Copy the old version's starts of reading, up to the one at `ordinal`."""
        for start in self._old_starts[len(self._job.state.starts) :]:
            if start.ordinal <= ordinal:
                moved = replace(start, ordinal=self._job.next_ordinal)
                append_start(self._spark, self._job.tables, moved)
                self._job.state.begin(moved)


def _expect_length(spark: SparkSession, warehouse: str, before: Version, after: Version) -> None:
    """Check that windows whose readings have expired can be taken over. Raises WindowLengthError."""
    was_s, will_be_s = before.streams.windows.sizes[0], after.streams.windows.sizes[0]
    closed_before = read_horizons(spark, warehouse).closed_before
    if closed_before is not None and will_be_s % was_s:
        raise WindowLengthError(
            f"`log` no longer holds the readings of windows before {closed_before:%Y-%m-%d}, and of these windows of "
            f"{was_s} s none of {will_be_s} s can be made: write a multiple of {was_s} first in windows.sizes"
        )


def topics_in_log(spark: SparkSession, warehouse: str, version: Version) -> dict[str, str]:
    """Ids of the topics that `log` was last read from, by name."""
    log = read_log(spark, tables_of(warehouse, version)).where(from_kafka() & F.col("topic_id").isNotNull())
    last = log.groupBy("topic").agg(F.max_by("topic_id", "ordinal").alias("topic_id"))
    return {row.topic: row.topic_id for row in last.collect()}


def _read_to(log: DataFrame) -> dict[str, dict[int, int]]:
    """The next offset after the given rows of `log`, by topic and partition."""
    read: dict[str, dict[int, int]] = {}
    rows = log.where(from_kafka()).groupBy("topic", "partition").agg((F.max("offset") + 1).alias("next_offset"))
    for row in rows.collect():
        read.setdefault(row.topic, {})[row.partition] = row.next_offset
    return read


def _before(starting: TopicOffsets) -> Column:
    """Rows of `log` that are not read from Kafka again."""
    asked = F.lit(False)
    for topic, offsets in starting.items():
        for partition, offset in offsets.items():
            place = (F.col("topic") == topic) & (F.col("partition") == partition)
            asked |= place & (F.col("offset") >= offset)
    return ~asked


def _records_between(starting: TopicOffsets, ending: TopicOffsets) -> int:
    return sum(end - starting[topic][partition] for topic, ends in ending.items() for partition, end in ends.items())


def _portions(starting: TopicOffsets, ending: TopicOffsets) -> Iterator[Portion]:
    """Cut a span of offsets into portions of some `ROWS_MAX` records, each from all partitions."""
    left = {
        (topic, partition): (min(offset, ending[topic][partition]), ending[topic][partition])
        for topic, offsets in starting.items()
        for partition, offset in offsets.items()
        if partition in ending.get(topic, {})
    }
    while total := sum(end - first for first, end in left.values()):
        portion: Portion = ({}, {})
        for (topic, partition), (first, end) in left.items():
            # Rounded up, so that each unfinished partition gives at least one record.
            upto = min(end, first - (-(end - first) * ROWS_MAX // total))
            portion[0].setdefault(topic, {})[partition] = first
            portion[1].setdefault(topic, {})[partition] = upto
            left[topic, partition] = (upto, end)
        yield portion
