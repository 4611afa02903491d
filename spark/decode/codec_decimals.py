"""Shared by the codecs in Spark's expressions: types, declarations as literals, numbers as exact decimals."""

import json
from collections.abc import Callable
from decimal import Decimal
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_declarations import DECIMALS_MAX, IDENTITY_MEMBERS, Stream, Streams, decimals_used
from spark.decode.codec_numbers import NUMBER_CHARS_MAX

VALUE_TYPE = "decimal(18,6)"
"""Type of values. They are rounded half up to six decimals or fewer, so that sums are the same in any order."""
METRICS_TYPE = f"array<struct<name:string,value:{VALUE_TYPE},ago_us:bigint>>"
"""Type of a reading's metrics, ordered by name. `ago_us` is the time from when a value was taken to the record's event
time, in microseconds; null if it was taken at that time."""
SPEC_TYPE = (
    "struct<name:string,path:array<string>,decimals:int,shift:int,"
    f"min:{VALUE_TYPE},max:{VALUE_TYPE},out_of_range:string>"
)
"""Type of one metric's declaration."""
MEMBERS_TYPE = "map<string,variant>"
PADDING = "[.]?0+$"
"""Pattern of needless zeros, and a point, at the end of a decimal's text."""


def constant(value: object, of_type: str) -> Column:
    """A value of any size as one literal, which Spark computes once, in the plan."""
    return F.from_json(F.lit(json.dumps(value)), of_type)


def sql_text(text: str) -> str:
    """A text as a literal of SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def of_batch(number: int, column: str) -> Column:
    """A number that differs in each batch. `column` is any column of the rows.

    A plain literal would be part of the code that Spark generates. Each batch would then have code of its own, compiled
    twice and never warm.
    """
    return F.get(constant([number], "array<bigint>"), F.octet_length(column) * 0)


def spec_literals(in_order: list[Stream]) -> Column:
    """Each declaration's metrics; null if it declares none, and so each number is a metric."""
    found = [
        [
            {
                "name": metric.name,
                "path": metric.path,
                "decimals": metric.decimals,
                "shift": metric.shift,
                "min": None if metric.min is None else str(metric.min),
                "max": None if metric.max is None else str(metric.max),
                "out_of_range": metric.out_of_range,
            }
            for metric in stream.metrics
        ]
        or None
        for stream in in_order
    ]
    return constant(found, f"array<array<{SPEC_TYPE}>>")


def known_members(in_order: list[Stream]) -> list[list[str] | None]:
    """Members of the payload that each declaration knows; None if it declares no metrics."""
    return [
        [*IDENTITY_MEMBERS, *(metric.path[0] for metric in stream.metrics)] if stream.metrics else None
        for stream in in_order
    ]


def number_struct(spec: Column, value: Column, told: Column) -> Column:
    """A number with its name, its valid range, the words for a value beyond the range, and its text in the payload."""
    declared = (spec[name].alias(name) for name in ("min", "max", "out_of_range"))
    return F.struct(spec["name"].alias("name"), value.alias("value"), *declared, told.alias("told"))


def plain_text(value: Column) -> Column:
    """A value of VALUE_TYPE as text without zeros at the end."""
    return F.regexp_replace(value.cast("string"), PADDING, "")


def exact_number(text: Column, spec: Column, streams: Streams) -> Column:
    """A number's text as the decimal that its declaration stores; null if it is out of range."""
    return rounded(lambda of_type: exact_of(text, of_type), spec, streams)


def rounded(read: Callable[[str], Column], spec: Column, streams: Streams) -> Column:
    """A number with the scale and decimals of its declaration; null if it is out of range.

    `read` reads it with the decimals of its own declaration. To round twice, first to six decimals, would turn
    1.0049999996 into 1.01. With a scale it is read with fewer decimals and more digits before the point, so that the
    scaling rounds nothing.
    """
    ways = {
        (decimals, shift): read(f"decimal({12 + decimals},{decimals - shift})")
        for decimals, shift in decimals_used(streams.streams)
    }
    usual = ways.pop((DECIMALS_MAX, 0))
    return reduce(
        lambda others, way: F.when(
            (spec["decimals"] == way[0][0]) & (spec["shift"] == way[0][1]), _shifted(way[1], way[0][1])
        ).otherwise(others),
        ways.items(),
        usual,
    )


def _shifted(read: Column, shift: int) -> Column:
    return (read * F.lit(Decimal(1).scaleb(-shift)) if shift else read).cast(VALUE_TYPE)


def exact_of(text: Column, of_type: str) -> Column:
    """A number's text as a decimal of this type; null if it does not fit.

    Long texts, and exponents of more than three digits, are not computed: Spark needs six seconds for one
    `1e-10000000`.
    """
    computable = (F.length(text) <= NUMBER_CHARS_MAX) & ~text.rlike("[eE][+-]?[0-9]{4}")
    is_zero = text.rlike("^[+-]?[0.]+(?:[eE].*)?$")
    return F.when(computable & is_zero, F.lit(0).cast(of_type)).when(computable, text.try_cast(of_type))
