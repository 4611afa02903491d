"""Payloads made into metrics: exact decimals by name, or the reason why a payload cannot be read."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark import correction_records

METRICS_TYPE = "array<struct<name:string,value:decimal(18,6),ago_us:bigint>>"
VALUE_TYPE = "decimal(18,6)"
"""Values are quantised to six decimals, half up, so that sums are the same in any order."""
IDENTITY_MEMBERS = ("boot", "seq", "tick", "timestamp")
"""Members of a JSON payload that say which reading it is, and when it was taken; no measurements."""
PLAIN_METRIC = "value"
"""The metric of a payload that is a bare number."""
METRICS_MAX = 256
"""Metrics of one reading; a payload with more is rejected before its numbers are computed."""

READING_TYPE = "sluice.reading"
GATEWAY_TYPES = "sluice.gateway."

NUMBER_CHARS_MAX = 64
"""Longer numbers, and exponents of more than three digits, are out of range without being computed: one
`1e-10000000` keeps Spark's decimals busy for six seconds."""
PLAIN_NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
SPACE = " \t\r\n"
# What comes before the next number, strings whole, then the number. Possessive: a pattern that backtracks overflows
# the stack on long texts.
NUMBER_IN_JSON = r'\G((?:[^"0-9-]|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+)(-?[0-9][-+.0-9eE]*+)'

UNKNOWN_TYPE = "ce_type is neither sluice.reading nor sluice.gateway.*"
NO_VALUE = "the record has no value"
NOT_UTF8 = "the payload is not UTF-8"
NOT_JSON = "the payload is not one JSON object"
NO_METRIC = "the payload's JSON object has no numeric member"
TOO_MANY = f"the payload has more than {METRICS_MAX} metrics"
NOT_NUMBER = "the payload is not a bare number"
OUT_OF_RANGE = "a value is outside decimal(18,6)"
UNKNOWN_CONTENT = "no decoder for this content type"


def decoded(records: DataFrame) -> DataFrame:
    """Replace `header_fault` by `metrics` and `reject_reason`; one of the two is null, or both for gateway events.

    `records` as `kafka_records.typed_records` yields them. JSON objects give every numeric top-level member but
    the identity; `text/plain` gives the metric `value`. Of what a gateway says of itself, time corrections alone are
    looked into: a table is computed by them.
    """
    kept = [column for column in records.columns if column != "header_fault"]
    return _reasoned(_with_metrics(_parsed(_texts(records))), kept)


def _texts(records: DataFrame) -> DataFrame:
    """Add what is to be decoded (`text`) and as what (`format`); both null where it is not to be decoded."""
    is_reading = F.col("header_fault").isNull() & (F.col("ce_type") == READING_TYPE)
    is_correction = F.col("header_fault").isNull() & (F.col("ce_type") == correction_records.CORRECTION_TYPE)
    media_type = F.lower(F.trim(F.substring_index("content_type", ";", 1)))
    text = F.try_validate_utf8(F.col("value").cast("string"))
    return records.select(
        "*",
        F.when(is_reading, media_type).alias("format"),
        is_correction.alias("is_correction"),
        F.when((is_reading & (media_type == "application/json")) | is_correction, text).alias("json_text"),
        F.when(is_reading & (media_type == "text/plain"), F.trim(text, F.lit(SPACE))).alias("plain_text"),
        text.isNotNull().alias("is_text"),
    )


def _parsed(texts: DataFrame) -> DataFrame:
    """Add `members` of a reading and `correction`: the JSON object as a map, null where the text is no such object.

    Spark's parser stops at the end of the first value, whatever comes after it. Within `[…,0]` anything that
    follows makes a different array or no array; only `…,0]…` closes the brackets itself, and does not fit in an
    object.
    """
    in_array = F.try_parse_json(F.concat(F.lit("["), F.col("json_text"), F.lit(",0]")))
    in_object = F.try_parse_json(F.concat(F.lit('{"a":'), F.col("json_text"), F.lit(',"b":0}')))
    alone = (
        (F.try_variant_get("wrapped", "$[1]", "int") == 0)
        & F.try_variant_get("wrapped", "$[2]", "variant").isNull()
        & (~F.contains(F.col("json_text"), F.lit("]")) | in_object.isNotNull())
    )
    whole = F.when(alone, F.try_variant_get("wrapped", "$[0]", "map<string,variant>"))
    return texts.select("*", in_array.alias("wrapped")).select(
        *texts.columns,
        F.when(~F.col("is_correction"), whole).alias("members"),
        F.when(F.col("is_correction"), whole).alias("correction"),
    )


def _with_metrics(parsed: DataFrame) -> DataFrame:
    """Add `numbers`: metric names and values, the value null where it is out of range; null if there are `too_many`."""
    numeric = F.filter(F.map_entries("members"), _is_metric)
    # A variant holds exact decimals of up to 38 digits, but makes 1e-7 a binary fraction: those are read from text.
    inexact = ~F.col("too_many") & F.exists("numeric", lambda member: _is_double(member["value"]))
    quoted = F.try_parse_json(F.regexp_replace("json_text", NUMBER_IN_JSON, '$1"$2"'))
    quoted_values = F.map_values(F.try_variant_get(quoted, "$", "map<string,variant>"))
    texts = F.coalesce(F.when(inexact, quoted_values), F.array().cast("array<variant>"))
    # By position, not by name: a map is searched from its beginning, thousands of members for each of them. Both
    # maps come from variants, which order the members of an object by name.
    with_texts = F.filter(
        F.zip_with(
            F.map_entries("members"),
            "texts",
            lambda member, text: F.struct(
                member["key"].alias("key"), member["value"].alias("value"), text.alias("text")
            ),
        ),
        _is_metric,
    )
    from_json = F.transform(
        F.when(~F.col("too_many"), with_texts),
        lambda member: F.struct(
            member["key"].alias("key"),
            F.when(_is_double(member["value"]), _exact(F.try_variant_get(member["text"], "$", "string")))
            .otherwise(F.try_variant_get(member["value"], "$", VALUE_TYPE))
            .alias("value"),
        ),
    )
    from_plain = F.when(
        F.col("plain_text").rlike(PLAIN_NUMBER),
        F.array(F.struct(F.lit(PLAIN_METRIC).alias("key"), _exact(F.col("plain_text")).alias("value"))),
    )
    return (
        parsed.select("*", numeric.alias("numeric"))
        .select("*", (F.size("numeric") > METRICS_MAX).alias("too_many"))
        .select("*", texts.alias("texts"))
        .select(*parsed.columns, "too_many", F.coalesce(from_json, from_plain).alias("numbers"))
    )


def _reasoned(numbered: DataFrame, kept: list[str]) -> DataFrame:
    is_json = F.col("format") == "application/json"
    is_plain = F.col("format") == "text/plain"
    is_gateway = F.col("ce_type").startswith(GATEWAY_TYPES)
    reason = F.coalesce(
        F.col("header_fault"),
        F.when((F.col("ce_type") != READING_TYPE) & ~is_gateway, UNKNOWN_TYPE),
        F.when(~is_gateway & F.col("value").isNull(), NO_VALUE),
        F.when((is_json | is_plain) & ~F.col("is_text"), NOT_UTF8),
        F.when(is_json & F.col("members").isNull(), NOT_JSON),
        F.when(is_json & F.col("too_many"), TOO_MANY),
        F.when(is_plain & F.col("numbers").isNull(), NOT_NUMBER),
        F.when((is_json | is_plain) & (F.size("numbers") == 0), NO_METRIC),
        F.when(F.exists("numbers", lambda number: number["value"].isNull()), OUT_OF_RANGE),
        F.when(~is_gateway & ~is_json & ~is_plain, UNKNOWN_CONTENT),
        F.when(F.col("is_correction"), correction_records.fault(F.col("correction"))),
    )
    return numbered.select("*", reason.alias("reject_reason")).select(
        *kept,
        F.when(
            F.col("reject_reason").isNull(),
            F.transform(
                "numbers",
                lambda n: F.struct(
                    n["key"].alias("name"), n["value"].alias("value"), F.lit(None).cast("bigint").alias("ago_us")
                ),
            ),
        ).alias("metrics"),
        F.lit(None).cast("array<string>").alias("undeclared"),
        "reject_reason",
    )


def _is_metric(member: Column) -> Column:
    is_number = F.schema_of_variant(member["value"]).rlike("^(?:BIGINT|DECIMAL|DOUBLE)")
    return is_number & ~member["key"].isin(*IDENTITY_MEMBERS)


def _is_double(value: Column) -> Column:
    return F.schema_of_variant(value) == "DOUBLE"


def _exact(text: Column) -> Column:
    """The text of a number as a decimal; null where it is out of range."""
    computable = (F.length(text) <= NUMBER_CHARS_MAX) & ~text.rlike("[eE][+-]?[0-9]{4}")
    is_zero = text.rlike("^[+-]?[0.]+(?:[eE].*)?$")
    return F.when(computable & is_zero, F.lit(0).cast(VALUE_TYPE)).when(computable, text.try_cast(VALUE_TYPE))
