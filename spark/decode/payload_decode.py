"""Decodes payloads to metrics: exact decimals by name, or the reason why a payload cannot be read.

Spark's own expressions read JSON and bare numbers. Python on the executors reads everything else. Most projections here
hold functions of arrays, so that Spark does not compile each projection into one method. Such a method grows beyond
the 8,000 bytes that HotSpot compiles, and then runs a fifth as fast.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import GATEWAY_TYPES, READING_TYPE
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
from spark.decode.codec_plain import (
    CODEC_OF_MEDIA_TYPE,
    NO_VALUE,
    NOT_JSON,
    NOT_NUMBER,
    NOT_UTF8,
    OCTETS,
    PLAIN_NUMBER,
    UNDECLARED_STREAM,
    UNKNOWN_CONTENT,
)
from spark.decode.codec_python import PYTHON_CODECS, asked_of_python, python_decoder
from spark.engine.built_once import recorded

# The text before the colon is the kind of a reject. Rejects are grouped by it.
HEADER = "header: "
CORRECTION = "correction: "
LOSS = "loss: "
EVENT = "event: "
SET_ASIDE = "set-aside: "
"""Kind of records that made their batch fail: see `record_faults`."""
NOT_THEIRS = "not-this-gateways-topic: "
"""Kind of records whose gateway may not speak in their topic: see `topic_owners`."""
UNKNOWN_TYPE = f"unknown-type: ce_type is neither {READING_TYPE} nor {GATEWAY_TYPES}*"

_AROUND = rf"[{AROUND}]"
_JSON, _NUMBER, _UNDECLARED, _UNKNOWN = "json", "number", "undeclared", "unknown"
_CORRECTION, _LOSS = "correction", "loss"
_OF_GATEWAYS = {correction_records.CORRECTION_TYPE: _CORRECTION, loss_bodies.LOSS_TYPE: _LOSS}


@recorded
def decoded(records: DataFrame, streams: Streams = NO_STREAMS) -> DataFrame:
    """Replace `header_fault` by `metrics`, `undeclared` and `reject_reason`.

    `records` are from `kafka_records.typed_records`. Either `metrics` or `reject_reason` is null, and for gateway
    events both are. Of events, time corrections and losses are checked here, because tables derive from them. The
    driver reads the others itself: `BatchJob` checks them, and here they are good.
    `undeclared` names at most 16 numbers at the payload's top that the stream's declaration does not know. If the
    stream declares no metrics, it names those that no table holds. It is null if there are none.
    """
    readers = _readers(streams)
    return _reasoned(_numbered(_parsed(_routed(records, streams, readers)), streams, readers), streams.times)


def _readers(streams: Streams) -> set[str]:
    """Codecs that may be needed. Expressions of the others are left out."""
    codecs: set[str] = {stream.codec for stream in streams.streams}
    if streams.unknown == "accept":
        codecs |= set(CODEC_OF_MEDIA_TYPE.values())
    return codecs


# -- codec and declaration ----------------------------------------------------------------------


def _routed(records: DataFrame, streams: Streams, readers: set[str]) -> DataFrame:
    """Add `format`, which says how a record is read (null if it is not read), and `stream_number`, its declaration."""
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
        # One column for all columns that are only passed on: each projection copies its columns one by one.
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
    # Spark sends each row to Python and back, whatever the condition. With one null that is cheap, but not free.
    asked = F.when(
        F.col("format").isin(*PYTHON_CODECS),
        asked_of_python(F.col("format"), F.col("stream_number"), F.col("value")),
    )
    return routed.select("*", python_decoder(streams)(asked).alias("found"))


def _codec_of_bytes(media_type: Column) -> Column:
    """The codec of bytes that look like JSON. A gateway sends JSON that is not strict as `application/octet-stream`."""
    text = F.when(media_type == OCTETS, F.col("value").cast("string"))
    return F.when(text.rlike(rf"^{_AROUND}*+\{{"), _JSON).when(text.rlike(rf"^{_AROUND}*+\["), "senml-json")


def _stream_number(in_order: list[Stream]) -> Column:
    """The index of a record's declaration in the list; null if there is none."""
    exact = {stream.name: number for number, stream in enumerate(in_order) if not stream.is_pattern}
    patterns = [(stream.regex, number) for number, stream in enumerate(in_order) if stream.is_pattern]
    of_name = F.try_element_at(constant(exact, "map<string,int>"), F.col("stream"))
    return F.coalesce(of_name, *(F.when(F.col("stream").rlike(regex), number) for regex, number in patterns))


# -- numbers of a payload -----------------------------------------------------------------------


def _parsed(routed: DataFrame) -> DataFrame:
    """Add `usual`, the text of a payload that is read the fast way, or else `text`, and `members` of a JSON object."""
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
    """Add `numbers`, `too_many` and `undeclared`; for usual payloads, add `quick` and `quick_bad` instead.

    Each number has its name, its valid range and its value, which is null if no table holds it. If `too_many` is true,
    `numbers` is null.
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


# -- metrics or a reason ------------------------------------------------------------------------


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
    # Spark computes the reason once for both columns.
    return numbered.select(
        "record.*",
        F.when(reason.isNull(), metrics).cast(METRICS_TYPE).alias("metrics"),
        undeclared.alias("undeclared"),
        reason.alias("reject_reason"),
    )


def _fault_of_event(times: Times) -> Column:
    """The first fault of a time correction or a loss record; null if there is none, and for all other records."""
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
