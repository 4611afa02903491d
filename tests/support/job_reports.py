"""Reports of batches, as the ingest job gives them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spark.batch_job import BatchCounts
from spark.ingest_job import BatchReport

NEWEST_US = 1_750_000_000_000_000
NONE = BatchCounts(0, 0, 0, 0, 0, 0, 0, 0, 0.1)


def batch(lags: Mapping[str, int], **counts: Any) -> BatchReport:
    """A batch that leaves so many records in Kafka, by topic."""
    newest = dict.fromkeys(lags, NEWEST_US)
    return BatchReport(1, replace(NONE, newest_us=newest, **counts), lags, 0.5, {topic: {0: 10} for topic in lags})
