"""Reads and checks the body of a time correction, which a gateway sends once it has learnt its clock.

`docs/kafka-records.md` describes it.
"""

from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import GATEWAY_TYPES, TIME_ERROR_UNKNOWN_US
from spark.decode.codec_declarations import Times
from spark.decode.kafka_records import TEXT_BYTES_MAX
from spark.decode.record_types import KAFKA_SLACK_US

CORRECTION_TYPE = f"{GATEWAY_TYPES}time-correction"
BODY_TYPE = "map<string,variant>"
"""Type of a body: the members of the JSON object."""
RATE_TYPE = "decimal(12,6)"
"""Type of a rate in parts per million. Its last decimal is a microsecond in eleven days."""
RATE_PPM_MAX = 100_000
"""Parts per million of a clock's rate, up or down. Kernels bend their clocks by 500 ppm at the most."""
QUALITIES = ("synced", "bounded")
_WIDE = "decimal(38,0)"

NO_BODY = "the correction is not one JSON object"
_AHEAD = f"more than {KAFKA_SLACK_US // 1_000_000} s after Kafka took it in"
TOLD_AHEAD = f"the correction was told {_AHEAD}"
LEADS_AHEAD = f"the correction leads to a time {_AHEAD}"
LEADS_BACK = "the correction leads to a time before plausible_from"


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the body, with its type and bounds."""

    name: str
    type: str
    """Type of its column."""
    json_type: str
    """Pattern of Spark's name for the type of its JSON value."""
    words: str
    """Description of its values, for a reject's reason."""
    least: int | None = None
    most: int | None = None
    """Largest number, or most bytes of a text."""


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
"""Members of a body. Others are ignored."""


def body_of(text: Column) -> Column:
    """The members of a body from `log`, which `fault` has checked already."""
    return F.try_variant_get(F.try_parse_json(text), "$", BODY_TYPE)


def fault(body: Column) -> Column:
    """The first fault of a body; null if there is none."""
    return F.coalesce(F.when(body.isNull(), NO_BODY), *(_fault_of(body, member) for member in MEMBERS))


def untrue(body: Column, record: Column, times: Times) -> Column:
    """The reason why a body without a fault cannot be true; null if it can. `record` has the record's own columns.

    The gateway looked at its clock at `boottime_us`, sent the correction afterwards, and then Kafka took the record in.
    So neither the look nor the record's event time can be later than Kafka's time. The corrected time cannot be before
    `plausible_from`. The uncorrected time can: an unknown clock may show any year.
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
    """A body's members as columns of their names and types; null if a value is not of the type."""
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
