"""Reads rejects once more by what is declared now: those that can be read go through the job like any other record."""

import uuid
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.batch_job import BatchJob
from spark.decode.payload_decode import decoded
from spark.ingest.retention import without_expired
from spark.log.amendments import effective_log
from spark.log.log_table import RETRY, BatchId
from spark.log.quarantine_view import kind, still_rejected

KINDS = ("undeclared-stream", "undecodable", "out-of-range", "unknown-type", "correction")
"""What another declaration, or another version of the program, may read after all. Headers are the gateway's, and a
conflict or a time stays what it is."""
ROWS_MAX = 200_000
"""Rejects in one batch."""
DECIDED_ANEW = ("metrics", "pack_span_us", "undeclared", "duplicate", "reject_reason")
NUMBERING = ("ingest", "batch", "ordinal", "code_version", "declarations", "event_date")


@dataclass(frozen=True, slots=True)
class RetryCounts:
    """What became of rejects."""

    rejects: int
    read: int
    """Those of them that are none any more."""


def retry(job: BatchJob) -> RetryCounts:
    """Read every reject again that may be readable by now. Doing it again reads only what is still a reject.

    It appends to `log` what it can read, as if Kafka had sent it once more; the reject stays there as it was.
    """
    log = effective_log(job.spark, job.tables)
    pending = still_rejected(log).where(kind().isin(*KINDS))
    by_batch = {row.ordinal: row["count"] for row in pending.groupBy("ordinal").count().collect()}
    query = f"{RETRY}{uuid.uuid4()}"
    read = 0
    for number, (first, last) in enumerate(_spans(by_batch)):
        records = typed_again(pending.where(F.col("ordinal").between(first, last)))
        readable = (
            without_expired(decoded(records, job.streams), job.streams).where(F.col("reject_reason").isNull()).persist()
        )
        try:
            if not readable.isEmpty():
                read += job.take_decoded(readable, BatchId(query, number)).rows
        finally:
            readable.unpersist()
    job.save()
    return RetryCounts(sum(by_batch.values()), read)


def typed_again(rows: DataFrame) -> DataFrame:
    """Rows of `log` as `typed_records` yields records, with `topic_id`."""
    kept = [name for name in rows.columns if name not in {*DECIDED_ANEW, *NUMBERING}]
    return rows.select(*kept, F.lit(None).cast("string").alias("header_fault"))


def _spans(by_batch: dict[int, int]) -> list[tuple[int, int]]:
    """Batches of `log`, first and last, that together have no more rejects than a batch may have."""
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
