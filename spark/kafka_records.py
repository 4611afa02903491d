"""Kafka records as the gateway sends them (DESIGN section 4), made into typed columns."""

from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

HEADERS = (
    "ce_specversion",
    "ce_id",
    "ce_source",
    "ce_type",
    "ce_subject",
    "ce_time",
    "ce_timeerror",
    "ce_timequality",
    "ce_receivedtime",
    "ce_gatewayboot",
    "ce_boottime",
    "ce_lane",
    "ce_lanesequence",
    "content-type",
)
DEVICE_HEADERS = ("ce_deviceboot", "ce_devicesequence")
"""They follow the others where the sensor sends them."""
DOUBT_HEADER = "ce_doubt"
DOUBTS = ("redelivered", "conflict")
"""The gateway cannot tell whether it has the reading already, or has another of its sequence."""
BOOT_TIME_ERROR_HEADER = "ce_boottimeerror"
"""The last header of a record that was made before the gateway's clock was synced: what a later correction needs."""
SHAPES = tuple(
    HEADERS + device + doubt + boot_time_error
    for device in ((), DEVICE_HEADERS)
    for doubt in ((), (DOUBT_HEADER,))
    for boot_time_error in ((), (BOOT_TIME_ERROR_HEADER,))
)
"""All the headers that a record may have."""

IDENTITY = "^([0-9a-f]{16})-([0-9a-f]{12})-([0-9]{1,19})$"
"""`ce_id`: buffer id, lane, lane sequence."""
SOURCE = "^/([^/]+)/([^/]+)$"
RFC3339 = r"^(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$"
"""Without the year 0, in which Python, that collects the rows, knows no times."""
INTEGER = "^-?[0-9]{1,19}$"


def typed_records(records: DataFrame) -> DataFrame:
    """Give each Kafka record its typed header columns and, where they do not fit, a `header_fault`.

    `records` is what Spark's Kafka source yields with `includeHeaders`. Where there is a fault, the columns that
    could be read are kept and the others are null; nothing is dropped.
    """
    return _judged(_typed(_texts(records)))


def _texts(records: DataFrame) -> DataFrame:
    """The headers as text, by position once their names are the contract's."""
    names = F.col("headers.key")
    in_order = reduce(or_, (names == F.array(*(F.lit(name) for name in shape)) for shape in SHAPES))
    readable = F.forall("headers", lambda header: _utf8(header["value"]).isNotNull())
    fits = F.coalesce(in_order & readable, F.lit(False))
    of_device = F.get(names, F.lit(len(HEADERS))) == DEVICE_HEADERS[0]
    last = F.size("headers") - 1
    ends_with_error = F.get(names, last) == BOOT_TIME_ERROR_HEADER
    doubt = last - F.when(ends_with_error, 1).otherwise(0)
    return records.select(
        "topic",
        "partition",
        "offset",
        F.col("timestamp").alias("kafka_timestamp"),
        _utf8(F.col("key")).alias("key"),
        "value",
        fits.alias("headers_fit"),
        *(_text(F.lit(position), fits).alias(_column(name)) for position, name in enumerate(HEADERS)),
        *(
            _text(F.lit(position), fits & of_device).alias(name)
            for position, name in enumerate(DEVICE_HEADERS, start=len(HEADERS))
        ),
        _text(doubt, fits & (F.get(names, doubt) == DOUBT_HEADER)).alias("doubt"),
        _text(last, fits & ends_with_error).alias("ce_boottimeerror"),
    )


def _typed(texts: DataFrame) -> DataFrame:
    """The texts in their types; null where a text is not of its type."""
    namespace = _part("ce_source", SOURCE, 1)
    prefix = F.concat(namespace, F.lit("/"))
    device = F.when(
        F.col("key").startswith(prefix), F.substring(F.col("key"), F.length(prefix) + 1, F.length("key"))
    ).otherwise(F.col("key"))
    return texts.select(
        "topic",
        "partition",
        "offset",
        "kafka_timestamp",
        "key",
        "value",
        "headers_fit",
        (F.col("ce_specversion") == "1.0").alias("version_fits"),
        namespace.alias("namespace"),
        _part("ce_source", SOURCE, 2).alias("gateway"),
        device.alias("device"),
        F.col("topic").alias("stream"),
        _part("ce_id", IDENTITY, 1).alias("buffer"),
        F.col("ce_lane").alias("lane"),
        _integer("ce_lanesequence").alias("lane_sequence"),
        "ce_id",
        (
            (_part("ce_id", IDENTITY, 2) == F.col("ce_lane"))
            & (_part("ce_id", IDENTITY, 3) == F.col("ce_lanesequence"))
        ).alias("identity_fits"),
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
        _integer("ce_devicesequence").alias("device_sequence"),
        (F.col("ce_devicesequence").isNotNull() & _integer("ce_devicesequence").isNull()).alias(
            "device_sequence_unreadable"
        ),
        "doubt",
        _integer("ce_boottimeerror").alias("boot_time_error_us"),
        (F.col("ce_boottimeerror").isNotNull() & ~F.coalesce(_integer("ce_boottimeerror") >= 0, F.lit(False))).alias(
            "boot_time_error_unreadable"
        ),
    )


def _judged(typed: DataFrame) -> DataFrame:
    """The first thing that is wrong with a record's key and headers, if anything is."""
    fault = F.coalesce(
        F.when(~F.col("headers_fit"), "the headers are not the contract's, in its order and in UTF-8"),
        _unless(F.col("version_fits"), "ce_specversion is not 1.0"),
        _unless(F.col("key").isNotNull(), "the key is missing or not UTF-8"),
        _unless(F.col("namespace").isNotNull(), "ce_source is not /namespace/gateway"),
        _unless(F.col("identity_fits"), "ce_id is not buffer, lane and lane sequence"),
        _unless(F.col("lane_sequence").isNotNull(), "ce_lanesequence is not a 64-bit integer"),
        _unless(F.col("event_time").isNotNull(), "ce_time is not RFC 3339 in UTC with microseconds"),
        _unless(F.col("received_time").isNotNull(), "ce_receivedtime is not RFC 3339 in UTC with microseconds"),
        _unless(F.col("time_error_us") >= 0, "ce_timeerror is not a count of microseconds"),
        _unless(F.col("boot_time_us").isNotNull(), "ce_boottime is not a count of microseconds"),
        F.when(F.col("device_sequence_unreadable"), "ce_devicesequence is not a 64-bit integer"),
        _unless(F.col("doubt").isNull() | F.col("doubt").isin(*DOUBTS), "ce_doubt is no doubt that the contract knows"),
        F.when(F.col("boot_time_error_unreadable"), "ce_boottimeerror is not a count of microseconds"),
    )
    dropped = {
        *("headers_fit", "version_fits", "identity_fits", "device_sequence_unreadable"),
        *("boot_time_error_unreadable", "ce_id"),
    }
    kept = [column for column in typed.columns if column not in dropped]
    return typed.select("*", fault.alias("header_fault")).select(
        *kept,
        # What cannot be read has no identity: it is nobody's duplicate, and nobody is its.
        F.when(F.col("header_fault").isNull(), F.col("ce_id")).alias("ce_id"),
        "header_fault",
    )


def _text(position: Column, where: Column) -> Column:
    """One header's value as text, null where `where` does not hold."""
    # `get`, not `[]`: a position that is not there is null, not an error.
    return F.when(where, F.get("headers", position)["value"].cast("string"))


def _column(header: str) -> str:
    return header.replace("-", "_")


def _utf8(binary: Column) -> Column:
    """Bytes as text; null where they are no UTF-8."""
    return F.try_validate_utf8(binary.cast("string"))


def _part(column: str, pattern: str, group: int) -> Column:
    return F.when(F.col(column).rlike(pattern), F.regexp_extract(column, pattern, group))


def _integer(column: str) -> Column:
    return F.when(F.col(column).rlike(INTEGER), F.col(column).try_cast("bigint"))


def _time(column: str) -> Column:
    # The pattern first: Spark's own cast also takes dates alone, other zones and times with fewer digits.
    return F.when(F.col(column).rlike(RFC3339), F.col(column).try_cast("timestamp"))


def _unless(condition: Column, fault: str) -> Column:
    return F.when(~F.coalesce(condition, F.lit(False)), fault)
