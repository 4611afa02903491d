"""The body of a time correction, which a gateway sends once it has learnt its clock (`docs/kafka-records.md`)."""

from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.decode.codec_declarations import Times
from spark.decode.kafka_records import KAFKA_SLACK_US, TEXT_BYTES_MAX

CORRECTION_TYPE = "sluice.gateway.time-correction"
BODY_TYPE = "map<string,variant>"
"""What the functions here take: the members of the JSON object."""
RATE_TYPE = "decimal(12,6)"
"""Parts per million, rounded half up to six decimals: a microsecond in eleven days."""
RATE_PPM_MAX = 100_000
"""More is no clock: kernels bend theirs by 500 ppm at the most."""
QUALITIES = ("synced", "bounded")
_WIDE = "decimal(38,0)"

NO_BODY = "the correction is not one JSON object"
_AHEAD = f"more than {KAFKA_SLACK_US // 1_000_000} s after Kafka took it in"
TOLD_AHEAD = f"the correction was told {_AHEAD}"
LEADS_AHEAD = f"the correction leads to a time {_AHEAD}"
LEADS_BACK = "the correction leads to a time before plausible_from"


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the body, and what it must be."""

    name: str
    type: str
    """Its column's."""
    json_type: str
    """A pattern for what Spark calls the type of its JSON value."""
    words: str
    """What it is, for a reject's reason."""
    least: int | None = None
    most: int | None = None
    """Of a text, bytes."""


MEMBERS = (
    Member("boot", "string", "^STRING", f"text of at most {TEXT_BYTES_MAX} bytes", most=TEXT_BYTES_MAX),
    Member("version", "bigint", "^BIGINT", "a whole number from 1", least=1),
    Member("quality", "string", "^STRING", " or ".join(QUALITIES)),
    Member("boottime_us", "bigint", "^BIGINT", "a whole number"),
    Member("offset_us", "bigint", "^BIGINT", "a whole number"),
    Member(
        "rate_ppm",
        RATE_TYPE,
        "^(?:BIGINT|DECIMAL|DOUBLE)",
        f"a number from -{RATE_PPM_MAX} to {RATE_PPM_MAX}",
        least=-RATE_PPM_MAX,
        most=RATE_PPM_MAX,
    ),
    Member("error_us", "bigint", "^BIGINT", "a whole number from 0", least=0),
    Member(
        "error_growth_ppm",
        RATE_TYPE,
        "^(?:BIGINT|DECIMAL|DOUBLE)",
        f"a number from 0 to {RATE_PPM_MAX}",
        least=0,
        most=RATE_PPM_MAX,
    ),
    Member("supersedes", "boolean", "^BOOLEAN", "true or false"),
)
"""Others are passed over."""


def body_of(text: Column) -> Column:
    """A body that stands in `log`, where `fault` has judged it, as its members."""
    return F.try_variant_get(F.try_parse_json(text), "$", BODY_TYPE)


def fault(body: Column) -> Column:
    """Say what is wrong with a body; null where nothing is."""
    return F.coalesce(F.when(body.isNull(), NO_BODY), *(_fault_of(body, member) for member in MEMBERS))


def untrue(body: Column, record: Column, times: Times) -> Column:
    """Say why a body without a fault cannot be true; null where it can. `record` holds the record's own columns.

    At `boottime_us` the gateway looked at its clock. It told the correction afterwards, and then Kafka took the record
    in. Nor can any reading be from before `plausible_from`. A clock that was not known may have stood in any year: its
    correction leads to the true time.
    """
    kafka_us = F.unix_micros(record["kafka_timestamp"]).cast(_WIDE) + KAFKA_SLACK_US
    error_us = record["time_error_us"]
    known_us = F.when(error_us < TIME_ERROR_UNKNOWN_US, error_us).otherwise(0).cast(_WIDE)
    told_us = F.unix_micros(record["event_time"]).cast(_WIDE) - known_us
    looked_us, bound_us = (
        _wide(body, "offset_us") + _wide(body, "boottime_us"),
        _wide(body, "error_us"),
    )
    from_us = F.unix_micros(F.lit(times.plausible_from_time)).cast(_WIDE)
    return (
        F.when(told_us > kafka_us, TOLD_AHEAD)
        .when(looked_us - bound_us > kafka_us, LEADS_AHEAD)
        .when(looked_us + bound_us < from_us, LEADS_BACK)
    )


def _wide(body: Column, name: str) -> Column:
    return F.try_variant_get(F.try_element_at(body, F.lit(name)), "$", "bigint").cast(_WIDE)


def members_of(body: Column) -> list[Column]:
    """A body's members as columns of their names and types; null where one is not of its type."""
    return [_value(body, member).alias(member.name) for member in MEMBERS]


def _fault_of(body: Column, member: Member) -> Column:
    value = _value(body, member)
    fits = value.isNotNull()
    if member.type == "string":
        value = F.octet_length(value)
    if member.name == "quality":
        fits &= _value(body, member).isin(*QUALITIES)
    if member.least is not None:
        fits &= value >= member.least
    if member.most is not None:
        fits &= value <= member.most
    words = f"{member.name} of the correction is not {member.words}"
    return F.when(~F.coalesce(fits, F.lit(False)), words)


def _value(body: Column, member: Member) -> Column:
    json = F.try_element_at(body, F.lit(member.name))
    of_its_type = F.schema_of_variant(json).rlike(member.json_type)
    return F.when(of_its_type, F.try_variant_get(json, "$", member.type))
