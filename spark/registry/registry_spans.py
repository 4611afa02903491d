"""Joins rows with spans of validity: a row gets all its spans as one sorted array, so the join doubles no row."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name


def with_spans(
    rows: DataFrame, entries: DataFrame, keys: Sequence[str], values: Sequence[Column], name: str
) -> DataFrame:
    """Add the column `name`: an array of structs `from_us`, `to_us` and `values`, the entries with the row's keys.

    The array is sorted by `from_us`, an open beginning first. It is null if there are no entries. A registry comes
    from a file, so it is broadcast.
    """
    span = F.struct(F.unix_micros("valid_from").alias("from_us"), F.unix_micros("valid_to").alias("to_us"), *values)
    spans = entries.groupBy(*keys).agg(F.sort_array(F.collect_list(span)).alias(name))
    return rows.join(F.broadcast(spans), list(keys), "left")


def span_at(spans: Column, at_us: Column) -> Column:
    """The span that holds a time. Null if none does. The first if several do, which a checked file rules out."""

    def holds(span: Column) -> Column:
        return (span["from_us"].isNull() | (span["from_us"] <= at_us)) & (
            span["to_us"].isNull() | (at_us < span["to_us"])
        )

    return F.get(F.filter(spans, holds), F.lit(0))


def borders(spans: Column) -> Column:
    """Times at which spans begin or end. An empty array if there are none."""
    begins = F.transform(spans, lambda span: span["from_us"])
    ends = F.transform(spans, lambda span: span["to_us"])
    none = F.array().cast("array<bigint>")
    return F.coalesce(F.array_compact(F.concat(begins, ends)), none)


def last_border(borders: Column, at_us: Column) -> Column:
    """The last border at or before a time. Null if there is none."""
    return F.array_max(F.filter(borders, lambda border: border <= at_us))


def next_border(borders: Column, at_us: Column) -> Column:
    """The first border after a time. Null if there is none."""
    return F.array_min(F.filter(borders, lambda border: border > at_us))
