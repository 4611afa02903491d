"""Reads records of a DataFrame by the rule book, on executors, and gives them back as a DataFrame."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructField, StructType

from spark.decode.record_rules import VALUE_BYTES_MAX, Record
from spark.decode.value_types import METRICS_TYPE
from spark.engine.arrow_map import map_in_arrow

if TYPE_CHECKING:
    import pyarrow as pa

SOURCE_SCHEMA = """
    key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int,
    headers array<struct<key: string, value: binary>>
"""
"""Columns of a record from Spark's Kafka source."""
SOURCE_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
RECORD_SCHEMA = """
    topic string, partition int, offset bigint, kafka_timestamp timestamp,
    key string, value binary, headers array<struct<key: string, value: binary>>,
    namespace string, gateway string, device string, stream string,
    buffer string, lane string, lane_sequence bigint, ce_id string, ce_type string, subject string,
    event_time timestamp, time_error_us bigint, time_quality string, received_time timestamp,
    gateway_boot string, boot_time_us bigint, content_type string,
    device_boot string, device_sequence bigint, device_counter string, doubt string, boot_time_error_us bigint
"""
"""Columns of a typed record, without `header_fault`."""
READ_SCHEMA = f"{RECORD_SCHEMA}, metrics {METRICS_TYPE}, undeclared array<string>, reject_reason string"
"""Columns of a record whose value was read."""

Rule = Callable[[Record], None]
"""A function that completes or changes a record."""


def typed_records(records: DataFrame) -> DataFrame:
    """Give each Kafka record its typed header columns, and a `header_fault` if its key or headers do not fit.

    `records` come from Spark's Kafka source with `includeHeaders`. Other columns are passed on. See
    `record_rules.typed`.
    """
    return through_rules(records, f"{RECORD_SCHEMA}, header_fault string", lambda: ())


def through_rules(records: DataFrame, schema: str, rules: Callable[[], "tuple[Rule, ...]"]) -> DataFrame:
    """Apply rules to records on executors, one after the other. `rules` makes them there, once for each task.

    `records` come from Spark's Kafka source, or are typed records. Other columns are passed on behind those of
    `schema`.
    """
    made = cast("StructType", StructType.fromDDL(schema))
    known = {*SOURCE_COLUMNS, *made.names, "header_fault"}
    others = [field for field in records.schema if field.name not in known]
    names, carried = made.names, [field.name for field in others]

    def apply(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa  # noqa: PLC0415 - executors have it

        from spark.decode.record_columns import columns_of, records_of  # noqa: PLC0415

        each = rules()
        for batch in batches:
            found = list(records_of(batch))
            for record in found:
                for rule in each:
                    rule(record)
            columns = columns_of(found, names) | {name: batch[name] for name in carried}
            yield pa.RecordBatch.from_pydict(columns)

    columns = StructType([*made.fields, *map(_nullable, others)])
    return map_in_arrow(with_bounded_values(records), apply, columns)


def with_bounded_values(records: DataFrame) -> DataFrame:
    """Cut values that are too long to be decoded, so that they do not fill Python's memory. They stay too long."""
    bound = VALUE_BYTES_MAX + 1
    is_long = F.octet_length("value") > bound
    return records.withColumn("value", F.when(is_long, F.substring("value", 1, bound)).otherwise(F.col("value")))


def _nullable(field: StructField) -> StructField:
    return StructField(field.name, field.dataType)
