"""Turns Arrow's columns into records and records into columns. Executors import this module."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from spark.decode.record_rules import FIELDS, Headers, Record, typed

TIME = pa.timestamp("us", tz="UTC")
VALUE = pa.decimal128(18, 6)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
METRICS = pa.list_(pa.struct([("name", pa.string()), ("value", VALUE), ("ago_us", pa.int64())]))

_OF_OTHER_TYPES: dict[str, pa.DataType] = {
    "partition": pa.int32(),
    "value": pa.binary(),
    "headers": HEADERS,
    "metrics": METRICS,
    "undeclared": pa.list_(pa.string()),
    **dict.fromkeys(FIELDS, TIME),
    **dict.fromkeys(("offset", "lane_sequence", "time_error_us", "boot_time_us", "device_sequence"), pa.int64()),
    "boot_time_error_us": pa.int64(),
}
_COLUMNS = {field: column for column, field in FIELDS.items()}
_OF_VERDICT = ("metrics", "undeclared", "reject_reason")

RECORD_COLUMNS = tuple(
    _COLUMNS.get(name, name) for name in Record.__dataclass_fields__ if name not in {"header_fault", *_OF_VERDICT}
)
"""Columns of a typed record, without `header_fault`."""
TYPED_COLUMNS = (*RECORD_COLUMNS, "header_fault")
READ_COLUMNS = (*RECORD_COLUMNS, *_OF_VERDICT)
"""Columns of a record whose value was read."""


def records_of(batch: pa.RecordBatch) -> Iterator[Record]:
    """Yield the records of a batch from Spark's Kafka source, or of one with the columns of typed or read records."""
    if is_source(batch):
        return map(
            typed,
            batch["topic"].to_pylist(),
            batch["partition"].to_pylist(),
            batch["offset"].to_pylist(),
            _microseconds(batch["timestamp"]),
            batch["key"].to_pylist(),
            batch["value"].to_pylist(),
            _headers(batch["headers"]),
        )
    names = TYPED_COLUMNS if "header_fault" in batch.schema.names else (*RECORD_COLUMNS, None, *_OF_VERDICT)
    columns = [[None] * batch.num_rows if name is None else _values(name, batch[name]) for name in names]
    return map(Record, *columns)


def is_source(rows: pa.RecordBatch | pa.Table) -> bool:
    """True for records of Spark's Kafka source."""
    return "timestamp" in rows.schema.names


def columns_of(records: Sequence[Record], names: Iterable[str]) -> dict[str, pa.Array]:
    """Return columns of records."""
    return {name: _column(name, list(map(attrgetter(FIELDS.get(name, name)), records))) for name in names}


def type_of(column: str) -> pa.DataType:
    """Arrow's type of a record's column."""
    return _OF_OTHER_TYPES.get(column, pa.string())


def _column(name: str, values: list[Any]) -> pa.Array:
    kind = type_of(name)
    if kind == TIME:
        return pa.array(values, pa.int64()).cast(TIME)
    return pa.array(values, kind)


def _values(name: str, column: pa.Array) -> list[Any]:
    if name in FIELDS:
        return _microseconds(column)
    if name == "headers":
        return list(_headers(column))
    if name == "metrics":
        return [None if each is None else [tuple(metric.values()) for metric in each] for each in column.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def _microseconds(times: pa.Array) -> list[int]:
    microseconds: list[int] = times.cast(pa.int64()).to_pylist()
    return microseconds


def _headers(column: pa.Array) -> Iterator[Headers | None]:
    """Yield the headers of each record. Far quicker than Arrow's own way, which makes a dictionary of each header."""
    pairs = list(zip(*(column.values.field(place).to_pylist() for place in (0, 1)), strict=True))
    ends = column.offsets.to_pylist()
    for place, is_there in enumerate(column.is_valid().to_pylist()):
        yield pairs[ends[place] : ends[place + 1]] if is_there else None
