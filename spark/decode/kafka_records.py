"""Turns the gateway's Kafka records (`docs/kafka-records.md`) into typed columns."""

from functools import reduce
from operator import and_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import (
    BOOT_TIME_ERROR_HEADER,
    COUNTER_HEADER,
    DEVICE_HEADERS,
    DOUBT_HEADER,
    DOUBTS,
    HEADER_NAMES,
    HEADERS,
)
from spark.engine.built_once import recorded

SOURCE_SCHEMA = """
    key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int,
    headers array<struct<key: string, value: binary>>
"""
"""Columns of a record from Spark's Kafka source."""
SOURCE_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
_PASSED = ("topic", "partition", "offset", "kafka_timestamp", "key", "value", "is_too_large", "headers", "has_others")
"""Columns that the steps of `typed_records` pass on to one another."""
SHAPES = tuple(
    HEADERS + device + doubt + boot_time_error
    for device in ((), DEVICE_HEADERS, (*DEVICE_HEADERS, COUNTER_HEADER))
    for doubt in ((), (DOUBT_HEADER,))
    for boot_time_error in ((), (BOOT_TIME_ERROR_HEADER,))
)
"""Shapes of a record: all lists of headers that it may have. A shape's number is its index here."""

IDENTITY = r"^[0-9a-f]{16}-[0-9a-f]{12}-[0-9]{1,19}\z"
"""Pattern of `ce_id`: buffer id, lane, lane sequence. (`$` would also allow a line end after it.)"""
BUFFER_CHARS = 16
RFC3339 = r"^(?!000[01])[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z\z"
"""Pattern of times. The years 0 and 1 are left out, because Python cannot hold all of their times."""
INTEGER = r"^-?[0-9]{1,19}\z"
INTEGERS = ("ce_lanesequence", "ce_timeerror", "ce_boottime", "ce_devicesequence", "ce_boottimeerror")

TEXT_BYTES_MAX = 66_000
"""Bytes of a text. The longest is a key: a namespace and an MQTT topic of 65,535 bytes."""
TEXTS = ("ce_type", "subject", "time_quality", "gateway_boot", "content_type", "device_boot", "device_counter")
"""Columns of texts without another bound."""
VALUE_BYTES_MAX = 1_048_576
"""Bytes of a value that is decoded, which takes several times its size in memory. Longer values are rejected."""
KEPT_BYTES = 65_536
"""Bytes kept of a longer value. Compressed, such values are small in Kafka, but to write sixty of 8 MB in one batch
filled the memory."""
TOO_LARGE = f"the value is longer than {VALUE_BYTES_MAX} bytes, of which the first {KEPT_BYTES} are kept"
OTHER_HEADERS_MAX = 32
OTHER_HEADER_BYTES_MAX = 8_192
"""Bytes of a name, and of a value, of another sender's header. W3C's longest header, `baggage`, has so many. Of one
record, OTHER_HEADERS_MAX such headers are kept."""
LANE_SEQUENCE_MAX = 2**53
"""Largest number in a lane. A lane counts from 0, and reaches it after 285 years at a million rows a second. Sums and
products of such numbers fit into the tables' columns."""

# These functions run for every record of every batch, and are written for the usual record. They compare whole arrays
# and texts, and try a pattern only if nothing cheaper tells as much. A function with a lambda, which Spark interprets,
# stands below a test that no usual record passes. Each step is a projection of its own, so that Spark computes shared
# parts of columns once.


@recorded
def typed_records(records: DataFrame) -> DataFrame:
    """Give each Kafka record its typed header columns, and a `header_fault` if its key or headers do not fit.

    `records` come from Spark's Kafka source with `includeHeaders`. Other columns are passed on. A record with a fault
    keeps all its `headers`; columns that could not be read are null. A record without a fault keeps in `headers` only
    headers that the contract does not know (a tracer's, a mirror's), or null if there are none.
    """
    carried = [name for name in records.columns if name not in SOURCE_COLUMNS]
    return _judged(_typed(_texts(_shaped(records, carried), carried), carried))


def _shaped(records: DataFrame, carried: list[str]) -> DataFrame:
    """Add `texts`, the headers' values, and `shape`, the index in SHAPES of their names; null if they have no shape.

    Headers that the contract does not know are skipped, wherever they stand.
    """
    is_usual = F.col("named") >= 0
    ours = F.filter("headers", _is_ours)
    # All values joined are UTF-8 only if each value is, because an ASCII separator is part of no other character. A
    # byte that is not UTF-8 stands for a missing value.
    together = F.call_function("array_join", F.col("texts"), F.lit(" "), F.lit(b"\xff").cast("string"))
    is_too_large = F.coalesce(F.octet_length("value") > VALUE_BYTES_MAX, F.lit(False))
    usual = records.select(
        *("topic", "partition", "offset"),
        F.col("timestamp").alias("kafka_timestamp"),
        _utf8(F.col("key")).alias("key"),
        F.when(is_too_large, F.substring("value", 1, KEPT_BYTES)).otherwise(F.col("value")).alias("value"),
        is_too_large.alias("is_too_large"),
        "headers",
        *carried,
        _place_in_shapes(F.col("headers.key")).alias("named"),
    )
    found = usual.select(
        *(name for name in usual.columns if name != "named"),
        F.when(is_usual, F.col("named")).otherwise(_place_in_shapes(ours["key"])).alias("named"),
        F.when(is_usual, F.col("headers.value")).otherwise(ours["value"]).cast("array<string>").alias("texts"),
        (~is_usual).alias("has_others"),
    )
    return found.withColumn("shape", F.when(is_usual & F.is_valid_utf8(together), F.col("named").cast("int")))


def _place_in_shapes(names: Column) -> Column:
    """The index in SHAPES of a record's names; -1 if they have no shape."""
    # Arrays are compared, not joined names: a name may hold any separator.
    return F.array_position(F.array(*map(_names, SHAPES)), names) - 1


def _is_ours(header: Column) -> Column:
    return header["key"].isin(*HEADER_NAMES)


def _texts(shaped: DataFrame, carried: list[str]) -> DataFrame:
    """The headers as columns of text, by their positions, if the record has a shape."""
    return shaped.withColumn("texts", F.when(F.col("shape").isNotNull(), F.col("texts"))).select(
        *_PASSED,
        *carried,
        F.col("shape").isNotNull().alias("headers_fit"),
        *(F.get("texts", F.lit(place)).alias(_column(name)) for place, name in enumerate(HEADERS)),
        *(_optional(name).alias(name) for name in (*DEVICE_HEADERS, BOOT_TIME_ERROR_HEADER)),
        _optional(COUNTER_HEADER).alias("device_counter"),
        _optional(DOUBT_HEADER).alias("doubt"),
    )


def _typed(texts: DataFrame, carried: list[str]) -> DataFrame:
    """The texts as values of their types; null if a text is not of its type."""
    namespace, gateway = F.col("source_namespace"), F.col("source_gateway")
    # Neither part holds a slash. So they make up the whole source only if it has this form.
    is_source = (F.col("ce_source") == F.concat(F.lit("/"), namespace, F.lit("/"), gateway)) & (
        (namespace != "") & (gateway != "")
    )
    prefix = F.concat(F.col("namespace"), F.lit("/"))
    device = F.when(
        F.col("key").startswith(prefix), F.substring(F.col("key"), F.length(prefix) + 1, F.length("key"))
    ).otherwise(F.col("key"))
    buffer = F.when(F.col("ce_id").rlike(IDENTITY), F.substring("ce_id", 1, BUFFER_CHARS))
    identity = F.concat_ws("-", F.col("buffer"), F.col("ce_lane"), F.col("ce_lanesequence"))
    parted = texts.select(
        "*",
        buffer.alias("buffer"),
        F.substring_index(F.substring_index("ce_source", "/", 2), "/", -1).alias("source_namespace"),
        F.substring_index("ce_source", "/", -1).alias("source_gateway"),
        *(F.col(name).try_cast("bigint").alias(f"{name}_number") for name in INTEGERS),
    ).select(
        "*",
        F.when(is_source, namespace).alias("namespace"),
        F.when(is_source, gateway).alias("gateway"),
    )
    return parted.select(
        *_PASSED,
        "headers_fit",
        *carried,
        (F.col("ce_specversion") == "1.0").alias("version_fits"),
        *("namespace", "gateway"),
        device.alias("device"),
        F.col("topic").alias("stream"),
        "buffer",
        F.col("ce_lane").alias("lane"),
        _integer("ce_lanesequence").alias("lane_sequence"),
        "ce_id",
        (F.col("buffer").isNotNull() & (F.col("ce_id") == identity)).alias("identity_fits"),
        "ce_type",
        F.col("ce_subject").alias("subject"),
        _time("ce_time").alias("event_time"),
        _integer("ce_timeerror").alias("time_error_us"),
        F.col("ce_timequality").alias("time_quality"),
        _time("ce_receivedtime").alias("received_time"),
        F.col("ce_gatewayboot").alias("gateway_boot"),
        _integer("ce_boottime").alias("boot_time_us"),
        "content_type",
        F.col("ce_deviceboot").alias("device_boot"),
        F.col("ce_devicesequence").isNotNull().alias("has_device_sequence"),
        _integer("ce_devicesequence").alias("device_sequence"),
        *("device_counter", "doubt"),
        F.col("ce_boottimeerror").isNotNull().alias("has_boot_time_error"),
        _integer("ce_boottimeerror").alias("boot_time_error_us"),
    )


def _judged(typed: DataFrame) -> DataFrame:
    """Add `header_fault`, the first fault in a record's key and headers; null if there is none."""
    fault = F.when(F.col("is_too_large"), TOO_LARGE).when(~F.col("headers_fit"), _misfit())
    for is_right, words in (
        (F.col("version_fits"), "ce_specversion is not 1.0"),
        (F.col("key").isNotNull(), "the key is missing or not UTF-8"),
        (_are_short(), f"the key or a header is longer than {TEXT_BYTES_MAX} bytes"),
        (F.col("namespace").isNotNull(), "ce_source is not /namespace/gateway"),
        (F.col("identity_fits"), "ce_id is not buffer, lane and lane sequence"),
        (F.col("lane_sequence").isNotNull(), "ce_lanesequence is not a 64-bit integer"),
        (F.col("lane_sequence") <= LANE_SEQUENCE_MAX, f"ce_lanesequence is above {LANE_SEQUENCE_MAX}"),
        (F.col("event_time").isNotNull(), "ce_time is not RFC 3339 in UTC with microseconds"),
        (F.col("received_time").isNotNull(), "ce_receivedtime is not RFC 3339 in UTC with microseconds"),
        (_is_count("time_error_us"), "ce_timeerror is not a count of microseconds"),
        (F.col("boot_time_us").isNotNull(), "ce_boottime is not a count of microseconds"),
        (
            ~F.col("has_device_sequence") | F.col("device_sequence").isNotNull(),
            "ce_devicesequence is not a 64-bit integer",
        ),
        (F.col("device_counter").isNull() | (F.col("device_counter") != ""), "ce_devicecounter is empty"),
        (F.col("doubt").isNull() | F.col("doubt").isin(*DOUBTS), "ce_doubt is no doubt that the contract knows"),
        (
            ~F.col("has_boot_time_error") | _is_count("boot_time_error_us"),
            "ce_boottimeerror is not a count of microseconds",
        ),
    ):
        fault = fault.when(~F.coalesce(is_right, F.lit(False)), words)
    dropped = {
        *("is_too_large", "headers", "has_others", "headers_fit", "version_fits", "identity_fits", "ce_id"),
        *("has_device_sequence", "has_boot_time_error"),
    }
    kept = [column for column in typed.columns if column not in dropped]
    return typed.select("*", fault.alias("header_fault")).select(
        *kept,
        # A record with a fault has no identity, so it is never a duplicate, and has none.
        F.when(F.col("header_fault").isNull(), F.col("ce_id")).alias("ce_id"),
        F.when(F.col("header_fault").isNotNull(), F.col("headers"))
        .when(F.col("has_others"), _others())
        .alias("headers"),
        "header_fault",
    )


def _others() -> Column:
    """The first OTHER_HEADERS_MAX headers that the contract does not know, cut to OTHER_HEADER_BYTES_MAX."""
    return F.transform(
        F.slice(F.filter("headers", lambda header: ~_is_ours(header)), 1, OTHER_HEADERS_MAX),
        lambda header: F.struct(
            F.substring(header["key"], 1, OTHER_HEADER_BYTES_MAX).alias("key"),
            F.substring(header["value"], 1, OTHER_HEADER_BYTES_MAX).alias("value"),
        ),
    )


def _misfit() -> Column:
    """Say which of the contract's headers is missing, comes twice, is out of place or is no text."""
    ours = F.filter("headers", _is_ours)
    names = ours["key"]
    is_numbered = F.arrays_overlap(names, _names((*DEVICE_HEADERS, COUNTER_HEADER)))
    needed = F.when(is_numbered, _names(HEADERS + DEVICE_HEADERS)).otherwise(_names(HEADERS))
    missing = F.get(F.array_except(needed, names), F.lit(0))
    doubled = F.get(
        F.filter(_names(HEADER_NAMES), lambda name: F.size(F.filter(names, lambda each: each == name)) > 1), F.lit(0)
    )
    # If no name is missing or comes twice, these are as many as `names`.
    in_order = F.array_intersect(_names(HEADER_NAMES), names)
    pairs = F.zip_with(names, in_order, lambda there, right: F.struct(there.alias("there"), right.alias("right")))
    moved = F.get(F.filter(pairs, lambda pair: pair["there"] != pair["right"]), F.lit(0))
    no_text = F.filter(ours, lambda header: ~F.coalesce(F.is_valid_utf8(header["value"].cast("string")), F.lit(False)))
    return F.coalesce(
        F.when(F.coalesce(F.size(names), F.lit(0)) <= 0, "there is none of the gateway's headers"),
        F.concat(missing, F.lit(" is missing")),
        F.concat(doubled, F.lit(" is there more than once")),
        F.concat(moved["there"], F.lit(" stands where "), moved["right"], F.lit(" belongs")),
        F.concat(F.get(no_text, F.lit(0))["key"], F.lit(" has no value in UTF-8")),
        F.lit("the headers are not the contract's"),
    )


def _names(names: tuple[str, ...]) -> Column:
    return F.array(*map(F.lit, names))


def _is_count(column: str) -> Column:
    return F.col(column).isNotNull() & (F.col(column) >= 0)


def _are_short() -> Column:
    columns = ("key", "namespace", "gateway", *TEXTS)
    return reduce(and_, (F.coalesce(F.octet_length(name), F.lit(0)) <= TEXT_BYTES_MAX for name in columns))


def _optional(name: str) -> Column:
    """A header's text; null if the shape lacks it."""
    # With `get`, a missing index gives null; with `[]`, an error.
    places = (shape.index(name) if name in shape else None for shape in SHAPES)
    return F.get("texts", F.get(F.array(*(F.lit(place).cast("int") for place in places)), F.col("shape")))


def _column(header: str) -> str:
    return header.replace("-", "_")


def _utf8(binary: Column) -> Column:
    """Bytes as text; null if they are not UTF-8."""
    return F.try_validate_utf8(binary.cast("string"))


def _integer(column: str) -> Column:
    """The number that `_typed` has read, if the contract allows its text. It allows no spaces and no `+`."""
    number = F.col(f"{column}_number")
    # Nearly every text equals its printed number. The pattern is for the others, which have leading zeros.
    return F.when((number.cast("string") == F.col(column)) | F.col(column).rlike(INTEGER), number)


def _time(column: str) -> Column:
    # The pattern comes first, because Spark's cast also takes dates alone, other zones and fewer digits.
    return F.when(F.col(column).rlike(RFC3339), F.col(column).try_cast("timestamp"))
