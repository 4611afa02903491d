"""Reads the members of a loss record's body, and finds the first fault in it."""

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import GATEWAY_TYPES
from spark.decode.kafka_records import TEXT_BYTES_MAX

BODY_TYPE = "map<string,variant>"
LOSS_TYPE = f"{GATEWAY_TYPES}loss"
_TEXT, _WHOLE = "^STRING", "^BIGINT"
NUMBERS = ("count", "first_boottime_us", "last_boottime_us", "first_sequence", "last_sequence")
TEXTS = ("device", "reason", "boot", "device_boot")
_NULLABLE = {"device", "device_boot", "first_sequence", "last_sequence"}
NO_BODY = "the loss record is not one JSON object"


def member_of(body: Column, name: str) -> Column:
    json_type, column_type = (_TEXT, "string") if name in TEXTS else (_WHOLE, "bigint")
    value = F.try_element_at(body, F.lit(name))
    return F.when(F.schema_of_variant(value).rlike(json_type), F.try_variant_get(value, "$", column_type))


def fault(body: Column) -> Column:
    """The first fault in the members of a loss record; null if there is none."""
    members = {name: member_of(body, name) for name in (*TEXTS, *NUMBERS)}
    faults = [F.when(body.isNull(), NO_BODY)]
    for name, member in members.items():
        words = f"{name} of the loss record is not {'text' if name in TEXTS else 'a whole number'}"
        given = F.try_element_at(body, F.lit(name))
        # A member that is not known may be null or absent.
        unknown = given.isNull() | F.is_variant_null(given)
        readable = (member.isNotNull() | unknown) if name in _NULLABLE else member.isNotNull()
        faults.append(F.when(~F.coalesce(readable, F.lit(False)), words))
        if name in TEXTS:
            is_long = F.octet_length(member) > TEXT_BYTES_MAX
            faults.append(F.when(is_long, f"{name} of the loss record is longer than {TEXT_BYTES_MAX} bytes"))
    faults.append(F.when(members["count"] < 0, "count of the loss record is less than 0"))
    faults.append(
        F.when(members["last_boottime_us"] < members["first_boottime_us"], "the loss record ends before it begins")
    )
    one_alone = members["first_sequence"].isNull() != members["last_sequence"].isNull()
    backwards = members["last_sequence"] < members["first_sequence"]
    faults.append(F.when(one_alone | backwards, "the loss record's sequences are no span"))
    return F.coalesce(*faults)
