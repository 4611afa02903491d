"""Reads rejects again by the present declarations. Those that can be read go through the job like new records."""

import uuid
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.batch_job import BatchJob
from spark.decode.record_frames import typed_records
from spark.decode.record_rules import HEADER, NOT_THEIRS, SET_ASIDE, TOO_LARGE
from spark.log.amendments import effective_log
from spark.log.log_table import BatchId
from spark.log.quarantine_view import kind, still_rejected
from spark.log.verdicts import RETRY

KINDS = (
    "undeclared-stream",
    "undecodable",
    "out-of-range",
    "unknown-type",
    "correction",
    HEADER.removesuffix(": "),
    NOT_THEIRS.removesuffix(": "),
)
"""Kinds of rejects that another declaration, registry or program may read after all. A conflict stays a conflict, and
a wrong time stays wrong."""
ROWS_MAX = 200_000
"""Rejects in one batch."""
TEXT_CHARS_MAX = 2**31 - 1
"""Length that takes the whole rest of a text."""
DECIDED_ANEW = ("metrics", "pack_span_us", "undeclared", "duplicate", "reject_reason")
NUMBERING = ("ingest", "batch", "ordinal", "code_version", "declarations", "event_date")


@dataclass(frozen=True, slots=True)
class RetryCounts:
    """The result of a retry."""

    rejects: int
    read: int
    """Rejects that became readings, or other good records."""


def retry(job: BatchJob) -> RetryCounts:
    """Read every reject again that may be readable now. A second call reads only the remaining rejects.

    A record that can be read is appended to `log`, as if Kafka had sent it again. The reject's row stays as it was.
    """
    log = effective_log(job.spark, job.tables)
    pending = still_rejected(log).where(kind().isin(*KINDS))
    by_batch = {row.ordinal: row["count"] for row in pending.groupBy("ordinal").count().collect()}
    query = f"{RETRY}{uuid.uuid4()}"
    read = 0
    for number, (first, last) in enumerate(_spans(by_batch)):
        rows = pending.where(F.col("ordinal").between(first, last))
        readable = job.judged(records_again(rows)).where(F.col("reject_reason").isNull()).persist()
        try:
            if not readable.isEmpty():
                read += job.take_judged(readable, BatchId(query, number)).rows
        finally:
            readable.unpersist()
    job.save()
    return RetryCounts(sum(by_batch.values()), read)


def records_again(rows: DataFrame, *carried: str) -> DataFrame:
    """Turn rows of `log` into rows of `typed_records`, with `topic_id` and the columns `carried`.

    Headers that could not be read are read again, because a newer program may read them. If `log` lacks the headers or
    the whole value, the old fault stays. A record that was set aside as bytes alone keeps its reason too.
    """
    reason = F.col("reject_reason")
    is_whole = F.col("headers").isNotNull() & ~reason.startswith(HEADER + TOO_LARGE)
    # A plain condition, so that the second scan of `log` skips files without such rejects.
    is_unread = reason.startswith(HEADER) & is_whole
    fault = F.when(reason.startswith(HEADER), F.substring(reason, len(HEADER) + 1, TEXT_CHARS_MAX)).when(
        reason.startswith(SET_ASIDE) & F.col("ce_type").isNull(), reason
    )
    read = rows.where(~F.coalesce(is_unread, F.lit(False))).select(
        *_columns_again(rows), *carried, fault.alias("header_fault")
    )
    as_sent = [F.col("key").cast("binary").alias("key"), F.col("kafka_timestamp").alias("timestamp")]
    unread = rows.where(is_unread).select(
        *as_sent, "value", "topic", "partition", "offset", "headers", "topic_id", *carried
    )
    return read.unionByName(typed_records(unread))


def _columns_again(rows: DataFrame) -> list[Column]:
    """The columns of `typed_records` and `topic_id`, taken from `log`, without `header_fault`.

    If the gateway could not speak in the record's topic, the record gets its `ce_id` back.
    """
    lost = F.coalesce(F.col("reject_reason").startswith(NOT_THEIRS), F.lit(False))
    identity = F.when(lost, F.concat_ws("-", "buffer", "lane", "lane_sequence")).otherwise(F.col("ce_id"))
    kept = (name for name in rows.columns if name not in {*DECIDED_ANEW, *NUMBERING})
    return [identity.alias(name) if name == "ce_id" else F.col(name) for name in kept]


def _spans(by_batch: dict[int, int]) -> list[tuple[int, int]]:
    """Spans of batches, first and last, with at most `ROWS_MAX` rejects each unless one batch alone has more."""
    spans: list[tuple[int, int]] = []
    rows = 0
    for ordinal, count in sorted(by_batch.items()):
        if spans and rows + count <= ROWS_MAX:
            spans[-1] = (spans[-1][0], ordinal)
            rows += count
        else:
            spans.append((ordinal, ordinal))
            rows = count
    return spans
