"""Payloads made into metrics: exact decimals by name, or the reason why a payload cannot be read.

JSON and bare numbers are read by Spark's own expressions, everything else in Python on the executors. The projections
here hold functions of arrays, which keeps Spark from compiling each into one method: such a method grows beyond the
8,000 bytes that HotSpot compiles, and then runs a fifth as fast. What differs from stream to stream is data (`specs`),
not code, for the same reason.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark import correction_records
from spark.codec_declarations import (
    DECIMALS_MAX,
    IDENTITY_MEMBERS,
    METRICS_MAX,
    NO_STREAMS,
    PLAIN_METRIC,
    Stream,
    Streams,
    decimals_used,
)
from spark.codec_numbers import (
    NO_DECLARED,
    NO_METRIC,
    NUMBER_CHARS_MAX,
    OUT_OF_RANGE,
    RANGE,
    TOO_MANY,
    UNDECLARED_CHARS_MAX,
    UNDECLARED_MAX,
)
from spark.codec_python import CODEC_OF_MEDIA_TYPE, PYTHON_CODECS, python_decoder

VALUE_TYPE = "decimal(18,6)"
"""Values are quantised to six decimals or fewer, half up, so that sums are the same in any order."""
METRIC_TYPE = f"struct<name:string,value:{VALUE_TYPE},ago_us:bigint>"
METRICS_TYPE = f"array<{METRIC_TYPE}>"
"""By name. `ago_us`: how long before the record's event time the value was taken; null where it was at that time."""
SPEC_TYPE = f"struct<name:string,path:array<string>,decimals:int,min:{VALUE_TYPE},max:{VALUE_TYPE}>"
"""What the declaration says of one metric."""
MEMBERS_TYPE = "map<string,variant>"

READING_TYPE = "sluice.reading"
GATEWAY_TYPES = "sluice.gateway."

PLAIN_NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
SPACE = " \t\r\n"
_NAME = "[A-Za-z0-9_.-]++"
_S = r"[ \t\r\n]*+"
# Up to eleven digits before the point, so that every such number fits, however it is rounded.
_USUAL_NUMBER = r"-?+(?:0|[1-9][0-9]{0,10}+)(?:\.[0-9]{1,20}+)?+"
# A text that Spark would take for a number has no letter but e, and belongs to the others.
_USUAL_TEXT = r'"(?=[^"\\A-DF-Za-df-z]*+[A-DF-Za-df-z])[ !#-\[\]-~]*+"'
_USUAL_VALUE = f"(?:{_USUAL_NUMBER}|{_USUAL_TEXT}|true|false|null)"
# No name that comes again, in quotes: found from quote to quote, for a search by `.*` would take most of the time.
_ONCE = r'(?!(?:[^"]*+"(?!\1"))*+[^"]*+"\1")'
_USUAL_MEMBER = rf'"({_NAME})"{_ONCE}{_S}:{_S}{_USUAL_VALUE}{_S}'
USUAL = rf'(?s)^\{{{_S}(?:{_USUAL_MEMBER}(?:,{_S}(?=")|(?=\}})))++\}}{_S}$'
"""A payload as nearly all are: short, a flat object of plain names and plain numbers, each name once. What this pattern
finds needs no other check; all else is read by a strict parser, ten times as slowly."""
USUAL_BYTES_MAX = 1_024

# What comes before the next number, strings whole, then the number. Possessive: a pattern that backtracks overflows
# the stack on long texts.
NUMBER_IN_JSON = r'\G((?:[^"0-9-]|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+)(-?[0-9][-+.0-9eE]*+)'

# What stands before the colon is the kind, which rejects are grouped by.
HEADER = "header: "
CORRECTION = "correction: "
UNKNOWN_TYPE = "unknown-type: ce_type is neither sluice.reading nor sluice.gateway.*"
UNDECLARED_STREAM = "undeclared-stream: no stream of this topic's name is declared"
NO_VALUE = "undecodable: the record has no value"
NOT_UTF8 = "undecodable: the payload is not UTF-8"
NOT_JSON = "undecodable: the payload is not one JSON object"
NOT_NUMBER = "undecodable: the payload is not a bare number"
UNKNOWN_CONTENT = "undecodable: no decoder for this content type"

_JSON, _NUMBER, _UNDECLARED, _UNKNOWN, _CORRECTION = "json", "number", "undeclared", "unknown", "correction"


def decoded(records: DataFrame, streams: Streams = NO_STREAMS) -> DataFrame:
    """Replace `header_fault` by `metrics`, `undeclared` and `reject_reason`.

    `records` as `kafka_records.typed_records` yields them. One of `metrics` and `reject_reason` is null, or both for
    gateway events: of what a gateway says of itself, time corrections alone are looked into, for a table is computed by
    them. `undeclared` names numbers at the payload's top, at most 16, that the stream's declaration does not know; null
    where there are none, and where nothing is declared of the stream's metrics.
    """
    readers = _readers(streams)
    return _reasoned(_numbered(_parsed(_routed(records, streams, readers)), streams, readers))


def _readers(streams: Streams) -> set[str]:
    """Which ways to read a payload there can be at all: the others cost nothing."""
    codecs: set[str] = {stream.codec for stream in streams.streams}
    if streams.unknown == "accept":
        codecs |= set(CODEC_OF_MEDIA_TYPE.values())
    return codecs


# -- which way to read --------------------------------------------------------------------------


def _routed(records: DataFrame, streams: Streams, readers: set[str]) -> DataFrame:
    """Add how a record is to be read (`format`, null for what is not read), and by which declaration."""
    is_sound = F.col("header_fault").isNull()
    is_reading = is_sound & (F.col("ce_type") == READING_TYPE)
    in_order = streams.in_order()
    codecs = _constant([stream.codec for stream in in_order], "array<string>")
    if streams.unknown == "accept":
        media_type = F.lower(F.trim(F.substring_index("content_type", ";", 1)))
        of_type = F.try_element_at(_constant(CODEC_OF_MEDIA_TYPE, "map<string,string>"), media_type)
        undeclared = F.coalesce(of_type, F.lit(_UNKNOWN))
    else:
        undeclared = F.lit(_UNDECLARED)
    routed = records.select(
        # One column for all that is only handed on: each projection copies its columns one by one.
        F.struct(*(column for column in records.columns if column != "header_fault")).alias("record"),
        *("header_fault", "ce_type", "content_type", "value"),
        F.when(is_reading, _stream_number(in_order)).alias("stream_number"),
        is_reading.alias("is_reading"),
        (is_sound & (F.col("ce_type") == correction_records.CORRECTION_TYPE)).alias("is_correction"),
    ).select(
        *("record", "header_fault", "ce_type", "value", "stream_number", "is_reading", "is_correction"),
        F.when(F.col("is_reading"), F.coalesce(F.get(codecs, F.col("stream_number")), undeclared))
        .when(F.col("is_correction"), _CORRECTION)
        .alias("format"),
        F.coalesce(
            F.get(_constant([bool(stream.metrics) for stream in in_order], "array<boolean>"), F.col("stream_number")),
            F.lit(False),
        ).alias("has_metrics"),
    )
    if not readers & PYTHON_CODECS:
        return routed
    by_python = F.col("format").isin(*PYTHON_CODECS)
    # Whatever the condition, each row goes to Python and back: with nulls that is cheap, yet not free.
    found = python_decoder(streams)(
        F.when(by_python, F.col("format")),
        F.when(by_python, F.col("stream_number")),
        F.when(by_python, F.col("value")),
    )
    return routed.select("*", found.alias("found"))


def _stream_number(in_order: list[Stream]) -> Column:
    """The place of a record's declaration in the list; null where there is none."""
    exact = {stream.name: number for number, stream in enumerate(in_order) if not stream.is_pattern}
    patterns = [(stream.regex, number) for number, stream in enumerate(in_order) if stream.is_pattern]
    of_name = F.try_element_at(_constant(exact, "map<string,int>"), F.col("stream"))
    return F.coalesce(of_name, *(F.when(F.col("stream").rlike(regex), number) for regex, number in patterns))


def _specs(in_order: list[Stream]) -> Column:
    """Of each declaration its metrics; null where it declares none, so that each number is one."""
    specs = [
        [
            {
                "name": metric.name,
                "path": metric.path,
                "decimals": metric.decimals,
                "min": None if metric.min is None else str(metric.min),
                "max": None if metric.max is None else str(metric.max),
            }
            for metric in stream.metrics
        ]
        or None
        for stream in in_order
    ]
    return _constant(specs, f"array<array<{SPEC_TYPE}>>")


def _constant(value: object, of_type: str) -> Column:
    """One literal, whatever its size; Spark computes it once, in the plan."""
    return F.from_json(F.lit(json.dumps(value)), of_type)


# -- JSON ---------------------------------------------------------------------------------------


def _parsed(routed: DataFrame) -> DataFrame:
    """Add `usual`, the text of a payload that is read the fast way, else `text`, and `members` of the JSON object.

    `members` is null where the text is no such object. Spark's parser stops at the end of the first value, whatever
    comes after it. Within `[…,0]` anything that follows makes a different array or no array; only `…,0]…` closes the
    brackets itself, and does not fit in an object.
    """
    as_text = F.col("value").cast("string")
    is_usual = (F.col("format") == _JSON) & (F.length("value") <= USUAL_BYTES_MAX) & as_text.rlike(USUAL)
    is_text = F.col("format").isin(_JSON, _NUMBER, _CORRECTION) & F.col("usual").isNull()
    is_object = F.col("format").isin(_JSON, _CORRECTION) & F.col("text").isNotNull()
    in_array = F.try_parse_json(F.concat(F.lit("["), F.col("text"), F.lit(",0]")))
    in_object = F.try_parse_json(F.concat(F.lit('{"a":'), F.col("text"), F.lit(',"b":0}')))
    alone = (
        (F.try_variant_get("wrapped", "$[1]", "int") == 0)
        & F.try_variant_get("wrapped", "$[2]", "variant").isNull()
        & (~F.contains(F.col("text"), F.lit("]")) | in_object.isNotNull())
    )
    return (
        routed.select("*", F.when(is_usual, as_text).alias("usual"))
        .select("*", F.when(is_text, F.trim(F.try_validate_utf8(as_text), F.lit(SPACE))).alias("text"))
        .select("*", F.when(is_object, in_array).alias("wrapped"))
        .select(
            *(column for column in routed.columns if column != "value"),
            "usual",
            "text",
            F.when(F.col("wrapped").isNotNull() & alone, F.try_variant_get("wrapped", "$[0]", MEMBERS_TYPE)).alias(
                "members"
            ),
        )
    )


# -- usual JSON -----------------------------------------------------------------------------------


def _quickly(parsed: DataFrame, streams: Streams) -> DataFrame:
    """Add of what is usual: `quick` metrics, `quick_bad`, the one that is out of its range, and `quick_undeclared`.

    Written as SQL: a Column for each part of each metric takes the driver a millisecond.
    """
    numbered = [
        (number, stream) for number, stream in enumerate(streams.in_order()) if stream.codec == _JSON and stream.metrics
    ]
    width = max((len(stream.metrics) for _, stream in numbered), default=1)
    values = _case((number, _quick_values(stream, width)) for number, stream in numbered)
    bad = _case((number, _quick_bad(stream)) for number, stream in numbered)
    metrics = _case((number, _quick_metrics(stream)) for number, stream in numbered)
    undeclared = _case((number, _quick_undeclared(stream)) for number, stream in numbered)
    every = _numbers_in("usual", IDENTITY_MEMBERS)
    quick = parsed.select(
        "*",
        F.expr(f"IF(usual IS NULL, NULL, {values})").alias("quick_values"),
        F.expr(f"IF(usual IS NULL, NULL, {undeclared})").alias("found_undeclared"),
    )
    return quick.select(
        *parsed.columns,
        F.expr(f"IF(usual IS NULL, NULL, COALESCE({metrics}, {every}))").alias("quick"),
        F.expr(f"IF(quick_values IS NULL, NULL, {bad})").alias("quick_bad"),
        F.expr(f"IF(SIZE(found_undeclared) > 0, SLICE(SORT_ARRAY(found_undeclared), 1, {UNDECLARED_MAX}), NULL)").alias(
            "quick_undeclared"
        ),
    )


def _case(ways: Iterable[tuple[int, str]]) -> str:
    branches = " ".join(f"WHEN {number} THEN {way}" for number, way in ways)
    return f"CASE stream_number {branches} END" if branches else "NULL"


def _quick_values(stream: Stream, width: int) -> str:
    """The metrics' values as v0, v1, ...; null behind the last one."""
    own = [
        f"`{_ticked(metric.path[0])}` DECIMAL({12 + metric.decimals},{metric.decimals})" for metric in stream.metrics
    ]
    # Names that nothing usual has.
    rest = [f"`: {number}` DECIMAL(18,6)" for number in range(len(own), width)]
    columns = ", ".join(f"v{number}: {VALUE_TYPE}" for number in range(width))
    return f"CAST(FROM_JSON(usual, {_quoted(', '.join(own + rest))}) AS STRUCT<{columns}>)"


def _quick_metrics(stream: Stream) -> str:
    structs = [
        f"NAMED_STRUCT('name', {_quoted(metric.name)}, 'value', quick_values.v{number}, 'ago_us', CAST(NULL AS BIGINT))"
        for number, metric in enumerate(stream.metrics)
    ]
    there = [f"quick_values.v{number} IS NOT NULL" for number in range(len(structs))]
    some = ", ".join(f"IF({is_there}, {struct}, NULL)" for is_there, struct in zip(there, structs, strict=True))
    return f"IF({' AND '.join(there)}, ARRAY({', '.join(structs)}), ARRAY_COMPACT(ARRAY({some})))"


def _quick_bad(stream: Stream) -> str:
    wrong = [
        f"WHEN {' OR '.join(bounds)} THEN {_quoted(metric.name)}"
        for number, metric in enumerate(stream.metrics)
        if (
            bounds := [
                f"quick_values.v{number} {sign} CAST('{bound}' AS {VALUE_TYPE})"
                for sign, bound in (("<", metric.min), (">", metric.max))
                if bound is not None
            ]
        )
    ]
    return f"CASE {' '.join(wrong)} END" if wrong else "NULL"


def _quick_undeclared(stream: Stream) -> str:
    known = (*IDENTITY_MEMBERS, *(metric.path[0] for metric in stream.metrics))
    return f"REGEXP_EXTRACT_ALL(usual, {_quoted(_number_but(known))}, 1)"


def _numbers_in(text: str, but: Iterable[str]) -> str:
    """All numbers of a usual text, with six decimals, by name."""
    pattern = _quoted(_number_but(but))
    values = f"CAST(REGEXP_EXTRACT_ALL({text}, {pattern}, 2) AS ARRAY<{VALUE_TYPE}>)"
    zipped = f"ARRAYS_ZIP(REGEXP_EXTRACT_ALL({text}, {pattern}, 1), {values}, CAST(ARRAY() AS ARRAY<BIGINT>))"
    return f"SORT_ARRAY(CAST({zipped} AS {METRICS_TYPE}))"


def _number_but(names: Iterable[str]) -> str:
    """A pattern of a member of a usual text that is a number, and has none of these names."""
    others = "|".join(re.escape(name) for name in names)
    return rf'"(?!(?:{others})")({_NAME})"{_S}:{_S}(-?[0-9][0-9.]*+)'


def _quoted(text: str) -> str:
    """A text as SQL has it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _ticked(name: str) -> str:
    return name.replace("`", "``")


# -- numbers ------------------------------------------------------------------------------------


def _numbered(parsed: DataFrame, streams: Streams, readers: set[str]) -> DataFrame:
    """Add `numbers`, each with its name, valid range and value (null where no table holds it).

    And `too_many`, where `numbers` is null, and `undeclared`; of usual payloads `quick` and `quick_bad` instead.
    """
    if _JSON in readers:
        parsed = _of_json(_quickly(parsed, streams), streams)
    else:
        parsed = parsed.select("*", *(F.lit(None).cast(of_type).alias(name) for name, of_type in _OF_JSON.items()))
    spec = F.coalesce(
        F.get(F.get(_specs(streams.in_order()), F.col("stream_number")), F.lit(0)),
        _constant(_ANY_NUMBER, SPEC_TYPE),
    )
    bare = F.when(
        (F.col("format") == _NUMBER) & F.col("text").rlike(PLAIN_NUMBER),
        F.array(_number(spec, _exact(F.col("text"), spec["decimals"], streams))),
    )
    return parsed.select("*", F.coalesce("of_json", bare).alias("numbers"))


_ANY_NUMBER = {"name": PLAIN_METRIC, "path": [], "decimals": DECIMALS_MAX}
_OF_JSON = {
    "quick": METRICS_TYPE,
    "quick_bad": "string",
    "of_json": f"array<struct<name:string,value:{VALUE_TYPE},min:{VALUE_TYPE},max:{VALUE_TYPE}>>",
    "too_many": "boolean",
    "undeclared": "array<string>",
}


def _of_json(parsed: DataFrame, streams: Streams) -> DataFrame:
    """Add what `_numbered` adds, `numbers` as `of_json`: declared metrics, or all numbers where none are declared."""
    in_order = streams.in_order()
    is_nested = any(len(metric.path) > 1 for stream in in_order for metric in stream.metrics)
    known = [
        [*IDENTITY_MEMBERS, *(metric.path[0] for metric in stream.metrics)] if stream.metrics else None
        for stream in in_order
    ]
    is_json = (F.col("format") == _JSON) & F.col("members").isNotNull()
    of_stream = parsed.select(
        "*",
        F.when(is_json, F.get(_specs(in_order), F.col("stream_number"))).alias("specs"),
        F.when(is_json, F.get(_constant(known, "array<array<string>>"), F.col("stream_number"))).alias("known"),
        F.when(is_json, F.map_entries("members")).alias("entries"),
    )
    declared = F.filter(
        F.transform("specs", lambda spec: _with_value(spec, F.col("members"), is_nested=is_nested)),
        lambda each: _is_numeric(each["value"]),
    )
    others = F.when(F.col("specs").isNull(), F.filter("entries", _is_metric)).otherwise(
        F.filter(
            "entries",
            lambda member: ~F.array_contains("known", member["key"]) & _is_numeric(member["value"]),
        )
    )
    found = of_stream.select("*", declared.alias("declared"), others.alias("others"))
    # A variant holds exact decimals of up to 38 digits, but makes 1e-7 a binary fraction: those are read from text.
    too_many = F.col("specs").isNull() & F.coalesce(F.size("others") > METRICS_MAX, F.lit(False))
    some = F.when(F.col("specs").isNotNull(), F.col("declared")["value"]).when(~too_many, F.col("others")["value"])
    quoted = F.try_parse_json(F.regexp_replace("text", NUMBER_IN_JSON, '$1"$2"'))
    with_texts = found.select(
        "*",
        too_many.alias("too_many"),
        F.when(F.exists(some, _is_double), F.try_variant_get(quoted, "$", MEMBERS_TYPE)).alias("texts"),
    )
    of_declared = F.transform(
        "declared",
        lambda each: _number(
            each,
            _value(each["value"], _at(F.col("texts"), each["path"], is_nested=is_nested), each["decimals"], streams),
        ),
    )
    # By position, not by name: a map is searched from its beginning, thousands of members for each of them. Both
    # maps come from variants, which order the members of an object by name.
    by_position = F.filter(
        F.zip_with(
            "entries",
            F.map_values("texts"),
            lambda member, text: F.struct(
                member["key"].alias("key"), member["value"].alias("value"), text.alias("text")
            ),
        ),
        _is_metric,
    )
    of_others = F.when(
        F.col("texts").isNull(), F.transform("others", lambda member: _any(member["key"], member["value"]))
    ).otherwise(F.transform(by_position, lambda member: _any(member["key"], member["value"], member["text"])))
    names = F.transform(
        F.slice("others", 1, UNDECLARED_MAX), lambda member: F.substring(member["key"], 1, UNDECLARED_CHARS_MAX)
    )
    is_undeclared = F.col("specs").isNotNull() & (F.size("others") > 0)
    return with_texts.select(
        *(column for column in parsed.columns if column != "quick_undeclared"),
        F.when(F.col("specs").isNotNull(), of_declared).when(~F.col("too_many"), of_others).alias("of_json"),
        "too_many",
        F.coalesce("quick_undeclared", F.when(is_undeclared, names)).alias("undeclared"),
    )


def _with_value(spec: Column, members: Column, *, is_nested: bool) -> Column:
    return F.struct(
        *(spec[name].alias(name) for name in ("name", "path", "decimals", "min", "max")),
        _at(members, spec["path"], is_nested=is_nested).alias("value"),
    )


def _at(members: Column, path: Column, *, is_nested: bool) -> Column:
    """What stands at a path below an object's members; null where nothing does."""
    first = F.try_element_at(members, F.get(path, F.lit(0)))
    if not is_nested:
        return first
    inner = F.aggregate(
        F.slice(path, 2, F.size(path)),
        first,
        lambda around, name: F.try_element_at(F.try_variant_get(around, "$", MEMBERS_TYPE), name),
    )
    return F.when(F.size(path) == 1, first).otherwise(inner)


def _number(spec: Column, value: Column) -> Column:
    return F.struct(
        spec["name"].alias("name"), value.alias("value"), spec["min"].alias("min"), spec["max"].alias("max")
    )


def _any(name: Column, value: Column, text: Column | None = None) -> Column:
    """A number of which nothing is declared."""
    exact = F.try_variant_get(value, "$", VALUE_TYPE)
    if text is not None:
        exact = F.when(_is_double(value), _exact_of(F.try_variant_get(text, "$", "string"), VALUE_TYPE)).otherwise(
            exact
        )
    bound = F.lit(None).cast(VALUE_TYPE)
    return F.struct(name.alias("name"), exact.alias("value"), bound.alias("min"), bound.alias("max"))


def _value(value: Column, text: Column, decimals: Column, streams: Streams) -> Column:
    """A declared number, from its text where that was needed."""
    return F.when(text.isNotNull(), _exact(F.try_variant_get(text, "$", "string"), decimals, streams)).otherwise(
        _rounded(lambda of_type: F.try_variant_get(value, "$", of_type), decimals, streams)
    )


def _exact(text: Column, decimals: Column, streams: Streams) -> Column:
    """The text of a number as a decimal; null where it is out of range."""
    return _rounded(lambda of_type: _exact_of(text, of_type), decimals, streams)


def _rounded(read: Callable[[str], Column], decimals: Column, streams: Streams) -> Column:
    """A number with so many decimals; null where it is out of range.

    Each is read in its own type: rounding twice, to six decimals first, would turn 1.0049999996 into 1.01.
    """
    *fewer, most = decimals_used(streams.streams)
    ways = [(count, read(f"decimal({12 + count},{count})").cast(VALUE_TYPE)) for count in fewer]
    found = read(f"decimal({12 + most},{most})")
    return reduce(lambda others, way: F.when(decimals == way[0], way[1]).otherwise(others), ways, found)


def _exact_of(text: Column, of_type: str) -> Column:
    computable = (F.length(text) <= NUMBER_CHARS_MAX) & ~text.rlike("[eE][+-]?[0-9]{4}")
    is_zero = text.rlike("^[+-]?[0.]+(?:[eE].*)?$")
    return F.when(computable & is_zero, F.lit(0).cast(of_type)).when(computable, text.try_cast(of_type))


def _is_metric(member: Column) -> Column:
    return ~member["key"].isin(*IDENTITY_MEMBERS) & _is_numeric(member["value"])


def _is_numeric(value: Column) -> Column:
    """Not by a pattern: this is asked of each member."""
    return F.coalesce(F.substring(F.schema_of_variant(value), 1, 3).isin("BIG", "DEC", "DOU"), F.lit(False))


def _is_double(value: Column) -> Column:
    return F.schema_of_variant(value) == "DOUBLE"


# -- what came of it ----------------------------------------------------------------------------


def _reasoned(numbered: DataFrame) -> DataFrame:
    is_json, is_number = F.col("format") == _JSON, F.col("format") == _NUMBER
    is_strict = is_json & F.col("usual").isNull()
    is_gateway = F.col("ce_type").startswith(GATEWAY_TYPES)
    bad = F.coalesce("quick_bad", F.get(F.filter("numbers", _is_out_of_range), F.lit(0))["name"])
    count = F.coalesce(F.size("quick"), F.size("numbers"))
    by_python = "found" in numbered.columns
    reason = F.coalesce(
        F.concat(F.lit(HEADER), F.col("header_fault")),
        F.when((F.col("ce_type") != READING_TYPE) & ~is_gateway, UNKNOWN_TYPE),
        F.when(F.col("format") == _UNDECLARED, UNDECLARED_STREAM),
        F.when(F.col("is_reading") & F.col("record.value").isNull(), NO_VALUE),
        F.when(F.col("format") == _UNKNOWN, UNKNOWN_CONTENT),
        *([F.col("found.reject_reason")] if by_python else []),
        F.when((is_strict | is_number) & F.col("text").isNull(), NOT_UTF8),
        F.when(is_strict & F.col("members").isNull(), NOT_JSON),
        F.when(F.col("too_many"), TOO_MANY),
        F.when(is_number & F.col("numbers").isNull(), NOT_NUMBER),
        F.when(count == 0, F.when(F.col("has_metrics"), NO_DECLARED).otherwise(NO_METRIC)),
        F.when(
            bad.isNotNull(), F.when(F.col("has_metrics"), F.concat(F.lit(RANGE), bad)).otherwise(F.lit(OUT_OF_RANGE))
        ),
        F.when(F.col("is_correction"), F.concat(F.lit(CORRECTION), correction_records.fault(F.col("members")))),
    )
    strict = F.transform(
        "numbers",
        lambda number: F.struct(
            number["name"].alias("name"), number["value"].alias("value"), F.lit(None).cast("bigint").alias("ago_us")
        ),
    )
    metrics = F.coalesce("quick", strict, *([F.col("found.metrics")] if by_python else []))
    undeclared = F.coalesce("undeclared", *([F.col("found.undeclared")] if by_python else []))
    return numbered.select("*", reason.alias("reject_reason")).select(
        "record.*",
        F.when(F.col("reject_reason").isNull(), metrics).cast(METRICS_TYPE).alias("metrics"),
        undeclared.alias("undeclared"),
        "reject_reason",
    )


def _is_out_of_range(number: Column) -> Column:
    value = number["value"]
    return value.isNull() | F.coalesce((value < number["min"]) | (value > number["max"]), F.lit(False))
