"""Payloads made into metrics: exact decimals by name, or the reason why a payload cannot be read.

JSON and bare numbers are read by Spark's own expressions, everything else in Python on the executors. Most projections
here hold functions of arrays, which keeps Spark from compiling each into one method: such a method grows beyond the
8,000 bytes that HotSpot compiles, and then runs a fifth as fast.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode import correction_records, loss_bodies
from spark.decode.codec_decimals import (
    METRICS_TYPE,
    SPEC_TYPE,
    constant,
    exact_number,
    number_struct,
    plain_text,
    spec_literals,
)
from spark.decode.codec_declarations import DECIMALS_MAX, NO_STREAMS, PLAIN_METRIC, Metric, Stream, Streams, Times
from spark.decode.codec_json_strict import mended, read_strictly, with_members
from spark.decode.codec_json_usual import is_usual, read_usual
from spark.decode.codec_numbers import AROUND, NO_DECLARED, NO_METRIC, NONE_FITS, RANGE, TOLD_CHARS_MAX, TOO_MANY
from spark.decode.codec_python import CODEC_OF_MEDIA_TYPE, PYTHON_CODECS, asked_of_python, python_decoder
from spark.decode.kafka_records import GATEWAY_TYPES, READING_TYPE
from spark.engine.built_once import recorded

PLAIN_NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
# What stands before the colon is the kind, which rejects are grouped by.
HEADER = "header: "
CORRECTION = "correction: "
LOSS = "loss: "
EVENT = "event: "
SET_ASIDE = "set-aside: "
"""Of records that made their batch fail: see `record_faults`."""
NOT_THEIRS = "not-this-gateways-topic: "
"""Of records whose gateway may not speak in their topic: see `topic_owners`."""
UNKNOWN_TYPE = "unknown-type: ce_type is neither sluice.reading nor sluice.gateway.*"
UNDECLARED_STREAM = "undeclared-stream: no stream of this topic's name is declared"
NO_VALUE = "undecodable: the record has no value"
NOT_UTF8 = "undecodable: the payload is not UTF-8"
NOT_JSON = "undecodable: the payload is not one JSON object"
NOT_NUMBER = "undecodable: the payload is not a bare number"
UNKNOWN_CONTENT = "undecodable: no decoder for this content type"

_AROUND = rf"[{AROUND}]"
_JSON, _NUMBER, _UNDECLARED, _UNKNOWN = "json", "number", "undeclared", "unknown"
_CORRECTION, _LOSS = "correction", "loss"
_OF_GATEWAYS = {correction_records.CORRECTION_TYPE: _CORRECTION, loss_bodies.LOSS_TYPE: _LOSS}


@recorded
def decoded(records: DataFrame, streams: Streams = NO_STREAMS) -> DataFrame:
    """Replace `header_fault` by `metrics`, `undeclared` and `reject_reason`.

    `records` as `kafka_records.typed_records` yields them. One of `metrics` and `reject_reason` is null, or both for
    gateway events. Of these, time corrections and losses are looked into, for tables are computed by them. `BatchJob`
    judges those that the driver reads itself: here they are good.
    `undeclared` names numbers at the payload's top, at most 16, that the stream's declaration does not know, or that no
    table holds where nothing is declared of the stream's metrics; null where there are none.
    """
    readers = _readers(streams)
    return _reasoned(_numbered(_parsed(_routed(records, streams, readers)), streams, readers), streams.times)


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
    codecs = constant([stream.codec for stream in in_order], "array<string>")
    if streams.unknown == "accept":
        media_type = F.lower(F.trim(F.substring_index("content_type", ";", 1)))
        of_type = F.try_element_at(constant(CODEC_OF_MEDIA_TYPE, "map<string,string>"), media_type)
        undeclared = F.coalesce(of_type, _codec_of_bytes(media_type), F.lit(_UNKNOWN))
    else:
        undeclared = F.lit(_UNDECLARED)
    routed = records.select(
        # One column for all that is only handed on: each projection copies its columns one by one.
        F.struct(*(column for column in records.columns if column != "header_fault")).alias("record"),
        *("header_fault", "ce_type", "content_type", "value"),
        F.when(is_reading, _stream_number(in_order)).alias("stream_number"),
        is_reading.alias("is_reading"),
        F.when(is_sound, F.try_element_at(constant(_OF_GATEWAYS, "map<string,string>"), F.col("ce_type"))).alias(
            "told"
        ),
    ).select(
        *("record", "header_fault", "ce_type", "value", "stream_number", "is_reading"),
        F.when(F.col("is_reading"), F.coalesce(F.get(codecs, F.col("stream_number")), undeclared))
        .otherwise(F.col("told"))
        .alias("format"),
        F.coalesce(
            F.get(constant([bool(stream.metrics) for stream in in_order], "array<boolean>"), F.col("stream_number")),
            F.lit(False),
        ).alias("has_metrics"),
    )
    if not readers & PYTHON_CODECS:
        return routed
    # Whatever the condition, each row goes to Python and back: with one null that is cheap, yet not free.
    asked = F.when(
        F.col("format").isin(*PYTHON_CODECS),
        asked_of_python(F.col("format"), F.col("stream_number"), F.col("value")),
    )
    return routed.select("*", python_decoder(streams)(asked).alias("found"))


def _codec_of_bytes(media_type: Column) -> Column:
    """How bytes are read that look like JSON: a gateway does not call JSON what is not strict."""
    text = F.when(media_type == "application/octet-stream", F.col("value").cast("string"))
    return F.when(text.rlike(rf"^{_AROUND}*+\{{"), _JSON).when(text.rlike(rf"^{_AROUND}*+\["), "senml-json")


def _stream_number(in_order: list[Stream]) -> Column:
    """The place of a record's declaration in the list; null where there is none."""
    exact = {stream.name: number for number, stream in enumerate(in_order) if not stream.is_pattern}
    patterns = [(stream.regex, number) for number, stream in enumerate(in_order) if stream.is_pattern]
    of_name = F.try_element_at(constant(exact, "map<string,int>"), F.col("stream"))
    return F.coalesce(of_name, *(F.when(F.col("stream").rlike(regex), number) for regex, number in patterns))


# -- what stands in it --------------------------------------------------------------------------


def _parsed(routed: DataFrame) -> DataFrame:
    """Add `usual`, the text of a payload that is read the fast way; else `text`, and `members` of a JSON object."""
    as_text = F.col("value").cast("string")
    is_text = F.col("format").isin(_JSON, _NUMBER, *_OF_GATEWAYS.values()) & F.col("usual").isNull()
    stripped = F.trim(F.try_validate_utf8(as_text), F.lit(AROUND))
    texts = routed.select(
        "*", F.when((F.col("format") == _JSON) & is_usual(F.col("value")), as_text).alias("usual")
    ).select(
        *(column for column in routed.columns if column != "value"),
        "usual",
        F.when(is_text, F.when(F.col("format") == _JSON, mended(stripped)).otherwise(stripped)).alias("text"),
    )
    return with_members(texts, F.col("format").isin(_JSON, *_OF_GATEWAYS.values()))


def _numbered(parsed: DataFrame, streams: Streams, readers: set[str]) -> DataFrame:
    """Add `numbers`, each with its name, valid range and value (null where no table holds it).

    And `too_many`, where `numbers` is null, and `undeclared`; of usual payloads `quick` and `quick_bad` instead.
    """
    spec = F.coalesce(
        F.get(F.get(spec_literals(streams.in_order()), F.col("stream_number")), F.lit(0)),
        constant(_ANY_NUMBER, SPEC_TYPE),
    )
    bare = F.when(
        (F.col("format") == _NUMBER) & F.col("text").rlike(PLAIN_NUMBER),
        F.array(number_struct(spec, exact_number(F.col("text"), spec, streams), F.col("text"))),
    )
    if _JSON in readers:
        return read_strictly(read_usual(parsed, streams), bare, streams)
    nothing = (F.lit(None).cast(of_type).alias(name) for name, of_type in _OF_JSON.items())
    return parsed.select("*", *nothing, bare.alias("numbers"))


_ANY_NUMBER = {
    "name": PLAIN_METRIC,
    "path": [],
    "decimals": DECIMALS_MAX,
    "shift": 0,
    "out_of_range": Metric(PLAIN_METRIC, ()).out_of_range,
}
_OF_JSON = {
    "quick_twice": "boolean",
    "quick": METRICS_TYPE,
    "quick_bad": "string",
    "too_many": "boolean",
    "undeclared": "array<string>",
}


# -- what came of it ----------------------------------------------------------------------------


def _reasoned(numbered: DataFrame, times: Times) -> DataFrame:
    is_json, is_number = F.col("format") == _JSON, F.col("format") == _NUMBER
    is_strict = is_json & F.col("usual").isNull()
    is_gateway = F.col("ce_type").startswith(GATEWAY_TYPES)
    wrong = F.get(F.filter("numbers", _is_out_of_range), F.lit(0))
    told = F.coalesce(plain_text(wrong["value"]), F.substring(wrong["told"], 1, TOLD_CHARS_MAX))
    bad = F.coalesce("quick_bad", F.concat(wrong["out_of_range"], F.lit(": "), told))
    count = F.coalesce(F.size("quick"), F.size("numbers"))
    by_python = "found" in numbered.columns
    reason = F.coalesce(
        F.when(
            F.col("header_fault").startswith(SET_ASIDE) | F.col("header_fault").startswith(NOT_THEIRS),
            F.col("header_fault"),
        ),
        F.concat(F.lit(HEADER), F.col("header_fault")),
        F.when((F.col("ce_type") != READING_TYPE) & ~is_gateway, UNKNOWN_TYPE),
        F.when(F.col("format") == _UNDECLARED, UNDECLARED_STREAM),
        F.when(F.col("is_reading") & F.col("record.value").isNull(), NO_VALUE),
        F.when(F.col("format") == _UNKNOWN, UNKNOWN_CONTENT),
        *([F.col("found.reject_reason")] if by_python else []),
        F.when((is_strict | is_number) & F.col("text").isNull(), NOT_UTF8),
        F.when(F.col("quick_twice") | (is_strict & F.col("members").isNull()), NOT_JSON),
        F.when(F.col("too_many"), TOO_MANY),
        F.when(is_number & F.col("numbers").isNull(), NOT_NUMBER),
        F.when(
            count == 0,
            F.when(F.col("has_metrics"), NO_DECLARED)
            .when(F.col("undeclared").isNotNull(), RANGE + NONE_FITS)
            .otherwise(NO_METRIC),
        ),
        F.concat(F.lit(RANGE), bad),
        _fault_of_event(times),
    )
    strict = F.transform(
        "numbers",
        lambda number: F.struct(
            number["name"].alias("name"), number["value"].alias("value"), F.lit(None).cast("bigint").alias("ago_us")
        ),
    )
    metrics = F.coalesce("quick", strict, *([F.col("found.metrics")] if by_python else []))
    undeclared = F.coalesce("undeclared", *([F.col("found.undeclared")] if by_python else []))
    # Spark computes the reason once, for both.
    return numbered.select(
        "record.*",
        F.when(reason.isNull(), metrics).cast(METRICS_TYPE).alias("metrics"),
        undeclared.alias("undeclared"),
        reason.alias("reject_reason"),
    )


def _fault_of_event(times: Times) -> Column:
    """Say what is wrong with a time correction or a loss record; null for all other records."""
    members = F.col("members")
    of_correction = F.coalesce(
        correction_records.fault(members), correction_records.untrue(members, F.col("record"), times)
    )
    return F.when(F.col("format") == _CORRECTION, F.concat(F.lit(CORRECTION), of_correction)).when(
        F.col("format") == _LOSS, F.concat(F.lit(LOSS), loss_bodies.fault(members))
    )


def _is_out_of_range(number: Column) -> Column:
    value = number["value"]
    return value.isNull() | F.coalesce((value < number["min"]) | (value > number["max"]), F.lit(False))
