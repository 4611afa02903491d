"""Reads the usual kind of JSON exactly and several times as fast, by one pattern and Spark's own reader."""

import re
from collections.abc import Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_decimals import METRICS_TYPE, PADDING, VALUE_TYPE, known_members, sql_text
from spark.decode.codec_declarations import IDENTITY_MEMBERS, Metric, Stream, Streams
from spark.decode.codec_numbers import UNDECLARED_CHARS_MAX, UNDECLARED_MAX

_NAME = "[A-Za-z0-9_.-]+"
_S = r"[ \t\r\n]*"
# With at most eleven digits before the point, the number fits however it is rounded.
_USUAL_NUMBER = r"-?(?:0|[1-9][0-9]{0,10})(?:\.[0-9]{1,20})?"
# The text must have a letter other than e: Spark may take a text without one for a number.
_USUAL_TEXT = r'"(?=[^"\\A-DF-Za-df-z]*[A-DF-Za-df-z])[ !#-\[\]-~]*"'
_USUAL_MEMBER = f'{_S}"{_NAME}"{_S}:{_S}(?:{_USUAL_NUMBER}|{_USUAL_TEXT}|true|false|null){_S}'
USUAL = rf"^\{{{_USUAL_MEMBER}(?:,{_USUAL_MEMBER})*+\}}{_S}$"
"""Pattern of nearly all payloads: a flat object of plain names and plain numbers. If a payload fits, only its names
must still be compared. Other payloads are read by a strict parser, ten times as slowly."""
USUAL_BYTES_MAX = 1_024


def is_usual(value: Column) -> Column:
    """True if any bytes are a usual payload."""
    return (F.length(value) <= USUAL_BYTES_MAX) & value.cast("string").rlike(USUAL)


def read_usual(parsed: DataFrame, streams: Streams) -> DataFrame:
    """Add `quick`, `quick_bad`, `quick_twice` and `quick_undeclared` to usual payloads.

    `quick` has the metrics, and `quick_bad` says what is wrong with the first that is out of range. `quick_twice` is
    true if a name comes twice. It is written as SQL, because each Column costs the driver a millisecond.
    """
    in_order = streams.in_order()
    numbered = [(number, stream) for number, stream in enumerate(in_order) if stream.codec == "json" and stream.metrics]
    width = max((len(stream.metrics) for _, stream in numbered), default=1)
    values = _case((number, _quick_values(stream, width)) for number, stream in numbered)
    bad = _case((number, _quick_bad(stream)) for number, stream in numbered)
    metrics = _case((number, _quick_metrics(stream)) for number, stream in numbered)
    undeclared = _case((number, _quick_undeclared(stream)) for number, stream in numbered)
    every = _numbers_in("usual", IDENTITY_MEMBERS)
    some_twice = "SIZE(ARRAY_DISTINCT(JSON_OBJECT_KEYS(usual))) < SIZE(JSON_OBJECT_KEYS(usual))"
    # Each member has at least one colon. If there are as many colons as known members, all members are known, and each
    # comes once. Lengths are in bytes, because Spark counts characters one by one.
    present = " + ".join(f"CAST(quick_values.{name} IS NOT NULL AS INT)" for name in _places(width))
    colons = "OCTET_LENGTH(usual) - OCTET_LENGTH(REPLACE(usual, ':', ''))"
    # It comes first wherever it is used, so that Spark computes it once. It decides in an IF, not in an AND alone: what
    # comes twice in one side of an AND, Spark computes beforehand, needed or not.
    surprises = f"COALESCE({colons} != {present}, TRUE)"
    return parsed.select("*", F.expr(f"IF(usual IS NULL, NULL, {values})").alias("quick_values")).select(
        *parsed.columns,
        F.expr(f"IF({surprises} AND usual IS NOT NULL, {some_twice}, FALSE)").alias("quick_twice"),
        F.expr(f"IF(usual IS NULL, NULL, COALESCE({metrics}, {every}))").alias("quick"),
        F.expr(f"IF(quick_values IS NULL, NULL, {bad})").alias("quick_bad"),
        F.expr(f"IF({surprises} AND quick_values IS NOT NULL, {undeclared}, NULL)").alias("quick_undeclared"),
    )


def _case(ways: Iterable[tuple[int, str]]) -> str:
    branches = " ".join(f"WHEN {number} THEN {way}" for number, way in ways)
    return f"CASE stream_number {branches} END" if branches else "NULL"


def _places(width: int) -> list[str]:
    """The field names of `_quick_values`."""
    return [*(f"v{number}" for number in range(width)), *(f"i{number}" for number in range(len(IDENTITY_MEMBERS)))]


def _quick_values(stream: Stream, width: int) -> str:
    """The metrics' numbers as v0, v1, ... and the identity's members as i0, i1, ...

    Fields behind the last metric are null. Scales are not applied yet, but the numbers are rounded for them, so that
    scaling rounds nothing.
    """
    # No usual payload has a name with a colon, or an inner object: such fields are null.
    metrics = [
        (
            metric.path[0] if len(metric.path) == 1 else f": v{number}",
            f"DECIMAL({12 + metric.decimals},{metric.decimals - metric.shift})",
        )
        for number, metric in enumerate(stream.metrics)
    ]
    taken = {name for name, _ in metrics}
    rest = [(f": v{number}", VALUE_TYPE) for number in range(len(metrics), width)]
    identity = [(f": {name}" if name in taken else name, "STRING") for name in IDENTITY_MEMBERS]
    schema = ", ".join(f"`{_ticked(name)}` {of_type}" for name, of_type in metrics + rest + identity)
    types = [VALUE_TYPE] * width + ["STRING"] * len(IDENTITY_MEMBERS)
    columns = ", ".join(f"{name}: {of_type}" for name, of_type in zip(_places(width), types, strict=True))
    return f"CAST(FROM_JSON(usual, {sql_text(schema)}) AS STRUCT<{columns}>)"


def _quick_value(number: int, metric: Metric) -> str:
    """A metric's value, with its scale applied."""
    value = f"quick_values.v{number}"
    return value if metric.scale is None else f"CAST({value} * {metric.scale:f}BD AS {VALUE_TYPE})"


def _quick_metrics(stream: Stream) -> str:
    structs = [
        f"NAMED_STRUCT('name', {sql_text(metric.name)}, 'value', {_quick_value(number, metric)}, "
        "'ago_us', CAST(NULL AS BIGINT))"
        for number, metric in enumerate(stream.metrics)
    ]
    there = [f"quick_values.v{number} IS NOT NULL" for number in range(len(structs))]
    some = ", ".join(f"IF({is_there}, {struct}, NULL)" for is_there, struct in zip(there, structs, strict=True))
    return f"IF({' AND '.join(there)}, ARRAY({', '.join(structs)}), ARRAY_COMPACT(ARRAY({some})))"


def _quick_bad(stream: Stream) -> str:
    wrong = [
        f"WHEN {' OR '.join(bounds)} THEN CONCAT({sql_text(metric.out_of_range + ': ')}, "
        f"REGEXP_REPLACE(CAST({_quick_value(number, metric)} AS STRING), {sql_text(PADDING)}, ''))"
        for number, metric in enumerate(stream.metrics)
        if (
            bounds := [
                f"{_quick_value(number, metric)} {sign} CAST('{bound}' AS {VALUE_TYPE})"
                for sign, bound in (("<", metric.min), (">", metric.max))
                if bound is not None
            ]
        )
    ]
    return f"CASE {' '.join(wrong)} END" if wrong else "NULL"


def _quick_undeclared(stream: Stream) -> str:
    (known,) = known_members([stream])
    names = f"SORT_ARRAY(REGEXP_EXTRACT_ALL(usual, {sql_text(_number_but(known or ()))}, 1))"
    cut = f"TRANSFORM(SLICE({names}, 1, {UNDECLARED_MAX}), name -> SUBSTRING(name, 1, {UNDECLARED_CHARS_MAX}))"
    # NULLIF would compute the names twice.
    return f"GET(FILTER(ARRAY({cut}), found -> SIZE(found) > 0), 0)"


def _numbers_in(text: str, but: Iterable[str]) -> str:
    """All numbers of a usual text, with six decimals, sorted by name."""
    pattern = sql_text(_number_but(but))
    values = f"CAST(REGEXP_EXTRACT_ALL({text}, {pattern}, 2) AS ARRAY<{VALUE_TYPE}>)"
    zipped = f"ARRAYS_ZIP(REGEXP_EXTRACT_ALL({text}, {pattern}, 1), {values}, CAST(ARRAY() AS ARRAY<BIGINT>))"
    return f"SORT_ARRAY(CAST({zipped} AS {METRICS_TYPE}))"


def _number_but(names: Iterable[str]) -> str:
    """The pattern of a member of a usual text that is a number and has none of these names."""
    others = "|".join(re.escape(name) for name in names)
    return rf'"(?!(?:{others})")({_NAME})"{_S}:{_S}(-?[0-9][0-9.]*+)'


def _ticked(name: str) -> str:
    return name.replace("`", "``")
