"""Reports of batches, as the ingest job gives them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spark.batch_job import BatchCounts
from spark.finality.gateway_troubles import GatewayNow, Trouble
from spark.ingest_job import BatchReport

NEWEST_US = 1_750_000_000_000_000
NONE = BatchCounts(0, 0, 0, 0, 0, 0, 0, 0, 0.1)


def batch(lags: Mapping[str, int], **counts: Any) -> BatchReport:
    """A batch that leaves so many records in Kafka, by topic."""
    newest = dict.fromkeys(lags, NEWEST_US)
    return BatchReport(1, replace(NONE, newest_us=newest, **counts), lags, 0.5, {topic: {0: 10} for topic in lags})


def gateway(name: str, *codes: str, level: str = "bad", heard_us: int = NEWEST_US, depth_rows: int = 3) -> GatewayNow:
    """A gateway with these codes, all of one level."""
    told = tuple(Trouble("plant", name, "north", level, code, "", "", heard_us) for code in codes)
    return GatewayNow("plant", name, "0011", "north", heard_us, depth_rows, told)
