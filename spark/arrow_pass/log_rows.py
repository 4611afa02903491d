"""Turns judged records into rows of `log`. Executors import this module."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spark.arrow_pass.decimal_columns import Numbers
from spark.arrow_pass.plan import BatchNumbers
from spark.arrow_pass.usual_rows import Usual
from spark.decode.codec_declarations import Times
from spark.decode.record_columns import READ_COLUMNS, columns_of
from spark.decode.record_rules import Record
from spark.decode.record_times import DAY_US
from spark.log.record_verdicts import EventDays
from spark.log.verdicts import IMPLAUSIBLE_DAY

_OTHERS = ("topic_id", "pack_span_us", "duplicate", "ingest", "batch", "ordinal", "code_version", "declarations")


def rows_of_records(records: Sequence[Record], times: Times) -> tuple[dict[str, pa.Array], Numbers]:
    """Return the columns of judged records, and the date of each in days since 1970."""
    columns = columns_of(records, READ_COLUMNS)
    columns["pack_span_us"] = pa.array([_span_us(record) for record in records], pa.int64())
    days = EventDays(times)
    of_event = [days.day_of(record.event_us, record.time_error_us, record.kafka_us) for record in records]
    return columns, np.array(of_event, dtype=np.int64)


def rows_of_usual(usual: Usual, times: Times) -> tuple[dict[str, pa.Array], Numbers]:
    """Return the columns of usual readings, and the date of each in days since 1970."""
    error_us = usual.columns["time_error_us"].to_numpy()
    is_plausible = EventDays(times).is_plausible(usual.event_us, error_us, usual.kafka_us)
    columns = usual.columns | {"pack_span_us": pa.nulls(len(usual.rows), pa.int64())}
    return columns, np.where(is_plausible, usual.event_us // DAY_US, IMPLAUSIBLE_DAY)


def log_table(columns: Mapping[str, pa.Array], carried: Mapping[str, pa.Array], numbers: BatchNumbers) -> pa.Table:
    """Return rows of `log` without their partition. None of them is marked as a duplicate yet.

    `carried` has the columns that records bring from elsewhere: `topic_id`, and `ingest` and `batch` where the numbers
    lack them.
    """
    count = len(carried["topic_id"])
    told: dict[str, Any] = {
        "duplicate": False,
        "ordinal": numbers.ordinal,
        "code_version": numbers.code_version,
        "declarations": numbers.declarations,
    }
    if numbers.ingest is not None:
        told |= {"ingest": numbers.ingest, "batch": numbers.batch}
    of_batch = {name: pa.repeat(pa.scalar(value), count) for name, value in told.items()}
    rows = {**columns, **carried, **of_batch}
    return pa.table({name: rows[name] for name in (*READ_COLUMNS, *_OTHERS)})


def _span_us(record: Record) -> int | None:
    """The time from a pack's earliest value to the record's event time; None if all values have one time."""
    return max((ago_us for _, _, ago_us in record.metrics or () if ago_us is not None), default=None)
