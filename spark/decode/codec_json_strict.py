"""Reads JSON strictly: one object and nothing else, each name once, all numbers exact.

Spark interprets these expressions for each row, which is slow. So they stand below tests of columns that are null for
usual payloads.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_decimals import (
    MEMBERS_TYPE,
    VALUE_TYPE,
    constant,
    exact_number,
    exact_of,
    known_members,
    number_struct,
    rounded,
    spec_literals,
)
from spark.decode.codec_declarations import IDENTITY_MEMBERS, METRICS_MAX, Streams
from spark.decode.codec_numbers import NO_NUMBER_HINT, NO_NUMBER_WORD, UNDECLARED_CHARS_MAX, UNDECLARED_MAX

# The text up to the next number, with whole strings, and then the number. It is possessive, because a pattern that
# backtracks overflows the stack on long texts.
NUMBER_IN_JSON = r'\G((?:[^"0-9-]|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+)(-?[0-9][-+.0-9eE]*+)'

# The text up to the next NO_NUMBER_WORD, with whole strings, and then the word. `null` and the signs of numbers are no
# such words.
NO_NUMBER_IN_JSON = (
    r'\G((?:[^"nNiIoO1+-]|1(?!\.#)|[-+](?=[0-9])(?!1\.#)|null|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+)' + NO_NUMBER_WORD
)


def mended(text: Column) -> Column:
    """JSON with `null` for floats that are no numbers, as C and Python print them. The other numbers still count."""
    return F.when(text.rlike(NO_NUMBER_HINT), F.regexp_replace(text, NO_NUMBER_IN_JSON, "$1null")).otherwise(text)


def with_members(texts: DataFrame, is_object: Column) -> DataFrame:
    """Add `members` of the JSON object in `text`. Null if `text` is no object, or if `is_object` is not true.

    Spark's parser ignores everything after the first value. So the text is parsed within `[…,0]`, where anything more
    makes another array or none. Only `…,0]…` closes the brackets itself, and then it does not fit in an object.
    """
    in_array = F.try_parse_json(F.concat(F.lit("["), F.col("text"), F.lit(",0]")))
    in_object = F.try_parse_json(F.concat(F.lit('{"a":'), F.col("text"), F.lit(',"b":0}')))
    alone = (
        (F.try_variant_get("wrapped", "$[1]", "int") == 0)
        & F.try_variant_get("wrapped", "$[2]", "variant").isNull()
        & (~F.contains(F.col("text"), F.lit("]")) | in_object.isNotNull())
    )
    members = F.try_variant_get("wrapped", "$[0]", MEMBERS_TYPE)
    return texts.select("*", F.when(is_object & F.col("text").isNotNull(), in_array).alias("wrapped")).select(
        *texts.columns, F.when(F.col("wrapped").isNotNull() & alone, members).alias("members")
    )


def read_strictly(parsed: DataFrame, bare: Column, streams: Streams) -> DataFrame:
    """Add `numbers`, `too_many` and `undeclared`.

    `numbers` are the declared metrics, or all numbers if none are declared, or else `bare`. Everything stands below a
    test of `members`, which is null for usual payloads: for them nothing is computed.
    """
    in_order = streams.in_order()
    is_nested = any(len(metric.path) > 1 for stream in in_order for metric in stream.metrics)
    specs = F.get(spec_literals(in_order), F.col("stream_number"))
    known = F.get(constant(known_members(in_order), "array<array<string>>"), F.col("stream_number"))
    is_json = (F.col("format") == "json") & F.col("members").isNotNull()
    entries = F.map_entries("members")
    declared = F.filter(
        F.transform(specs, lambda spec: _with_value(spec, F.col("members"), is_nested=is_nested)),
        lambda each: _is_numeric(each["value"]),
    )
    unknown = F.filter(entries, lambda member: ~F.array_contains(known, member["key"]) & _is_numeric(member["value"]))
    found = parsed.select(
        "*",
        F.when(is_json & F.col("has_metrics"), declared).alias("declared"),
        F.when(is_json & F.col("has_metrics"), unknown).when(is_json, F.filter(entries, _is_metric)).alias("others"),
    )
    # A variant holds exact decimals of up to 38 digits, but turns 1e-7 into a binary float: read it from the text.
    too_many = F.col("declared").isNull() & (F.size("others") > METRICS_MAX)
    some = F.when(F.col("declared").isNotNull(), F.col("declared")["value"]).otherwise(F.col("others")["value"])
    quoted = F.try_parse_json(F.regexp_replace("text", NUMBER_IN_JSON, '$1"$2"'))
    inexact = F.col("others").isNotNull() & ~too_many & F.exists(some, _is_double)
    with_texts = found.select(
        "*",
        F.coalesce(too_many, F.lit(False)).alias("too_many"),
        F.when(inexact, F.try_variant_get(quoted, "$", MEMBERS_TYPE)).alias("texts"),
    )
    of_declared = F.transform(
        "declared",
        lambda each: number_struct(
            each,
            _value(each["value"], _at(F.col("texts"), each["path"], is_nested=is_nested), each, streams),
            F.try_variant_get(
                F.coalesce(_at(F.col("texts"), each["path"], is_nested=is_nested), each["value"]), "$", "string"
            ),
        ),
    )
    # By position, not by name: Spark would search the map from its beginning for each of thousands of members. Both
    # maps come from variants, which order an object's members by name.
    by_position = F.filter(
        F.zip_with(
            entries,
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
    # If nothing is declared, each number counts that a table holds. The names of the others go into `undeclared`.
    valued = with_texts.select(
        "*",
        F.when(F.col("declared").isNull() & F.col("others").isNotNull() & ~F.col("too_many"), of_others).alias("every"),
    )
    unstored = F.filter("every", lambda number: number["value"].isNull())
    names = F.when(F.col("declared").isNotNull(), F.col("others")["key"]).otherwise(unstored["name"])
    cut = F.transform(F.slice(names, 1, UNDECLARED_MAX), lambda name: F.substring(name, 1, UNDECLARED_CHARS_MAX))
    numbers = (
        F.when(F.col("declared").isNotNull(), of_declared)
        .when(F.col("every").isNotNull(), F.filter("every", lambda number: number["value"].isNotNull()))
        .otherwise(bare)
    )
    return valued.select(
        *(column for column in parsed.columns if column not in {"quick_undeclared", "stream_number"}),
        "too_many",
        F.coalesce("quick_undeclared", F.when(F.size(names) > 0, cut)).alias("undeclared"),
        numbers.alias("numbers"),
    )


def _with_value(spec: Column, members: Column, *, is_nested: bool) -> Column:
    return F.struct(
        *(spec[name].alias(name) for name in ("name", "path", "decimals", "shift", "min", "max", "out_of_range")),
        _at(members, spec["path"], is_nested=is_nested).alias("value"),
    )


def _at(members: Column, path: Column, *, is_nested: bool) -> Column:
    """The value at a path below an object's members; null if there is none."""
    first = F.try_element_at(members, F.get(path, F.lit(0)))
    if not is_nested:
        return first
    inner = F.aggregate(
        F.slice(path, 2, F.size(path)),
        first,
        lambda around, name: F.try_element_at(F.try_variant_get(around, "$", MEMBERS_TYPE), name),
    )
    return F.when(F.size(path) == 1, first).otherwise(inner)


def _any(name: Column, value: Column, text: Column | None = None) -> Column:
    """A number without a declaration."""
    exact = F.try_variant_get(value, "$", VALUE_TYPE)
    if text is not None:
        exact = F.when(_is_double(value), exact_of(F.try_variant_get(text, "$", "string"), VALUE_TYPE)).otherwise(exact)
    bound = F.lit(None).cast(VALUE_TYPE)
    words = F.lit(None).cast("string")
    nothing = (bound.alias("min"), bound.alias("max"), words.alias("out_of_range"), words.alias("told"))
    return F.struct(name.alias("name"), exact.alias("value"), *nothing)


def _value(value: Column, text: Column, spec: Column, streams: Streams) -> Column:
    """A declared number, read from its text if there is one."""
    return F.when(text.isNotNull(), exact_number(F.try_variant_get(text, "$", "string"), spec, streams)).otherwise(
        rounded(lambda of_type: F.try_variant_get(value, "$", of_type), spec, streams)
    )


def _is_metric(member: Column) -> Column:
    return ~member["key"].isin(*IDENTITY_MEMBERS) & _is_numeric(member["value"])


def _is_numeric(value: Column) -> Column:
    """True for a number. It uses no pattern, because it is computed for each member."""
    return F.coalesce(F.substring(F.schema_of_variant(value), 1, 3).isin("BIG", "DEC", "DOU"), F.lit(False))


def _is_double(value: Column) -> Column:
    return F.schema_of_variant(value) == "DOUBLE"
