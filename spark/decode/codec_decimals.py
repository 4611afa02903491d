"""What the codecs in Spark's expressions share: types, declarations as literals, numbers as exact decimals."""

import json
from collections.abc import Callable
from decimal import Decimal
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_declarations import DECIMALS_MAX, IDENTITY_MEMBERS, Stream, Streams, decimals_used
from spark.decode.codec_numbers import NUMBER_CHARS_MAX

VALUE_TYPE = "decimal(18,6)"
"""Values are quantised to six decimals or fewer, half up, so that sums are the same in any order."""
METRICS_TYPE = f"array<struct<name:string,value:{VALUE_TYPE},ago_us:bigint>>"
"""By name. `ago_us`: how long before the record's event time the value was taken; null where it was at that time."""
SPEC_TYPE = (
    "struct<name:string,path:array<string>,decimals:int,shift:int,"
    f"min:{VALUE_TYPE},max:{VALUE_TYPE},out_of_range:string>"
)
"""What the declaration says of one metric."""
MEMBERS_TYPE = "map<string,variant>"
PADDING = "[.]?0+$"
"""What a decimal's text ends with and does not need."""


def constant(value: object, of_type: str) -> Column:
    """One literal, whatever its size; Spark computes it once, in the plan."""
    return F.from_json(F.lit(json.dumps(value)), of_type)


def of_batch(number: int, column: str) -> Column:
    """A number that is another one in each batch, beside `column`, whatever is in it.

    A plain literal would stand in the code that Spark generates, so that each batch had other code: compiled anew,
    twice, and never as fast as what is warm.
    """
    return F.get(constant([number], "array<bigint>"), F.octet_length(column) * 0)


def spec_literals(in_order: list[Stream]) -> Column:
    """Of each declaration its metrics; null where it declares none, so that each number is one."""
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
    """Of each declaration the members that it knows; null where it declares no metrics."""
    return [
        [*IDENTITY_MEMBERS, *(metric.path[0] for metric in stream.metrics)] if stream.metrics else None
        for stream in in_order
    ]


def number_struct(spec: Column, value: Column, told: Column) -> Column:
    """A number with its name, its valid range, what is wrong where it is beyond that, and its text as it came."""
    declared = (spec[name].alias(name) for name in ("min", "max", "out_of_range"))
    return F.struct(spec["name"].alias("name"), value.alias("value"), *declared, told.alias("told"))


def plain_text(value: Column) -> Column:
    """A value of VALUE_TYPE as text, without zeros at the end."""
    return F.regexp_replace(value.cast("string"), PADDING, "")


def exact_number(text: Column, spec: Column, streams: Streams) -> Column:
    """The text of a number as its declaration stores it; null where it is out of range."""
    return rounded(lambda of_type: exact_of(text, of_type), spec, streams)


def rounded(read: Callable[[str], Column], spec: Column, streams: Streams) -> Column:
    """A number with the scale and decimals of its declaration; null where it is out of range.

    Each is read in its own type: rounding twice, to six decimals first, would turn 1.0049999996 into 1.01. With a scale
    it is read with so many decimals fewer, and more digits before the point: nothing is left to round afterwards.
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
    """The text of a number as a decimal of this type; null where it does not fit.

    Long ones, and exponents of more than three digits, are not computed: one `1e-10000000` keeps Spark's decimals busy
    for six seconds.
    """
    computable = (F.length(text) <= NUMBER_CHARS_MAX) & ~text.rlike("[eE][+-]?[0-9]{4}")
    is_zero = text.rlike("^[+-]?[0.]+(?:[eE].*)?$")
    return F.when(computable & is_zero, F.lit(0).cast(of_type)).when(computable, text.try_cast(of_type))
