"""Records as executors read them: from Arrow's columns through the rule book into Arrow's columns again. No Java."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import Row

from spark.decode.codec_declarations import NO_STREAMS, Streams
from spark.decode.record_columns import HEADERS, READ_COLUMNS, TIME, TYPED_COLUMNS, columns_of, records_of
from spark.decode.record_rules import Reader, Record
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import EPOCH


def source_batch(records: Iterable[KafkaRecord]) -> pa.RecordBatch:
    """The records as Spark hands over those of its Kafka source."""
    each = list(records)
    times = [(record.timestamp - EPOCH) // timedelta(microseconds=1) for record in each]
    headers = [
        None if record.headers is None else [{"key": name, "value": content} for name, content in record.headers]
        for record in each
    ]
    columns = {
        "key": pa.array([record.key for record in each], pa.binary()),
        "value": pa.array([record.value for record in each], pa.binary()),
        "topic": pa.array([record.topic for record in each], pa.string()),
        "partition": pa.array([record.partition for record in each], pa.int32()),
        "offset": pa.array([record.offset for record in each], pa.int64()),
        "timestamp": pa.array(times, pa.int64()).cast(TIME),
        "timestampType": pa.array([1] * len(each), pa.int32()),
        "headers": pa.array(headers, HEADERS),
    }
    return pa.RecordBatch.from_pydict(columns)


def read(records: Iterable[KafkaRecord], streams: Streams = NO_STREAMS) -> list[Record]:
    """The records, read by the declarations."""
    found = list(records_of(source_batch(records)))
    reader = Reader(streams)
    for record in found:
        reader.read(record)
    return found


def rows_typed(records: Iterable[KafkaRecord]) -> list[Row]:
    """The columns of typed records, as rows."""
    return _rows(list(records_of(source_batch(records))), TYPED_COLUMNS)


def rows_read(records: Iterable[KafkaRecord], streams: Streams = NO_STREAMS) -> list[Row]:
    """The columns of records whose values were read, as rows."""
    return _rows(read(records, streams), READ_COLUMNS)


def _rows(records: Sequence[Record], names: Sequence[str]) -> list[Row]:
    batch = pa.RecordBatch.from_pydict(columns_of(records, names))
    return [Row(**{name: _told(value) for name, value in row.items()}) for row in batch.to_pylist()]


def _told(value: Any) -> Any:
    """A value, with rows in the place of dictionaries."""
    if isinstance(value, list):
        return [Row(**each) if isinstance(each, dict) else each for each in value]
    return value
