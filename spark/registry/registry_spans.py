"""Spans of validity beside readings and windows: all spans of a device as one sorted array, so that no row doubles."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name


def with_spans(
    rows: DataFrame, entries: DataFrame, keys: Sequence[str], values: Sequence[Column], name: str
) -> DataFrame:
    """Add the array `name` of structs `from_us`, `to_us` and `values`: the registry's entries with the row's keys.

    By `from_us`, an open beginning first; null where there is none. A registry comes from a file, so it is broadcast.
    """
    span = F.struct(F.unix_micros("valid_from").alias("from_us"), F.unix_micros("valid_to").alias("to_us"), *values)
    spans = entries.groupBy(*keys).agg(F.sort_array(F.collect_list(span)).alias(name))
    return rows.join(F.broadcast(spans), list(keys), "left")


def span_at(spans: Column, at_us: Column) -> Column:
    """The span that a time lies in; null where it lies in none. Of several, which a file cannot have, the first."""

    def holds(span: Column) -> Column:
        return (span["from_us"].isNull() | (span["from_us"] <= at_us)) & (
            span["to_us"].isNull() | (at_us < span["to_us"])
        )

    return F.get(F.filter(spans, holds), F.lit(0))


def borders(spans: Column) -> Column:
    """The times at which spans begin or end; an empty array where there are none."""
    begins = F.transform(spans, lambda span: span["from_us"])
    ends = F.transform(spans, lambda span: span["to_us"])
    none = F.array().cast("array<bigint>")
    return F.coalesce(F.array_compact(F.concat(begins, ends)), none)


def last_border(borders: Column, at_us: Column) -> Column:
    """The last border at or before a time; null where there is none."""
    return F.array_max(F.filter(borders, lambda border: border <= at_us))


def next_border(borders: Column, at_us: Column) -> Column:
    """The first border after a time; null where there is none."""
    return F.array_min(F.filter(borders, lambda border: border > at_us))
