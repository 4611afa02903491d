"""Reads and checks the body of a time correction, which a gateway sends once it has learnt its clock.

`docs/kafka-records.md` describes it. Executors and the driver read it by these rules.
"""

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal

from gateway.record_contract import GATEWAY_TYPES, TIME_ERROR_UNKNOWN_US
from spark.decode.codec_declarations import Times
from spark.decode.event_bodies import TEXT_BYTES_MAX, Body, text_of, whole_of
from spark.decode.record_times import microseconds
from spark.decode.record_types import KAFKA_SLACK_US

CORRECTION_TYPE = f"{GATEWAY_TYPES}time-correction"
RATE_TYPE = "decimal(12,6)"
"""Type of a rate in parts per million. Its last decimal is a microsecond in eleven days."""
RATE_PPM_MAX = 100_000
"""Parts per million of a clock's rate, up or down. Kernels bend their clocks by 500 ppm at the most."""
QUALITIES = ("synced", "bounded")
_RATE_STEP = Decimal("0.000001")
_RATE_DIGITS = 6
"""Digits of a rate before its point."""
_EXACT = Context(prec=1_100, rounding=ROUND_HALF_UP)

NO_BODY = "the correction is not one JSON object"
_AHEAD = f"more than {KAFKA_SLACK_US // 1_000_000} s after Kafka took it in"
TOLD_AHEAD = f"the correction was told {_AHEAD}"
LEADS_AHEAD = f"the correction leads to a time {_AHEAD}"
LEADS_BACK = "the correction leads to a time before plausible_from"

Value = str | int | Decimal | bool


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the body, with its type and bounds."""

    name: str
    type: str
    """Type of its column."""
    words: str
    """Description of its values, for a reject's reason."""
    least: int | None = None
    most: int | None = None
    """Largest number, or most bytes of a text."""


MEMBERS = (
    Member("boot", "string", f"text of at most {TEXT_BYTES_MAX} bytes", most=TEXT_BYTES_MAX),
    Member("version", "bigint", "a whole number from 1", least=1),
    Member("quality", "string", " or ".join(QUALITIES)),
    Member("boottime_us", "bigint", "a whole number"),
    Member("offset_us", "bigint", "a whole number"),
    Member(
        "rate_ppm",
        RATE_TYPE,
        f"a number from -{RATE_PPM_MAX} to {RATE_PPM_MAX}",
        least=-RATE_PPM_MAX,
        most=RATE_PPM_MAX,
    ),
    Member("error_us", "bigint", "a whole number from 0", least=0),
    Member("error_growth_ppm", RATE_TYPE, f"a number from 0 to {RATE_PPM_MAX}", least=0, most=RATE_PPM_MAX),
    Member("supersedes", "boolean", "true or false"),
)
"""Members of a body. Others are ignored."""


def fault(body: Body | None) -> str | None:
    """The first fault of a body from `event_bodies.body_of`; None if there is none."""
    if body is None:
        return NO_BODY
    for member in MEMBERS:
        if not _fits(member, value_of(body, member)):
            return f"{member.name} of the correction is not {member.words}"
    return None


def untrue(body: Body, event_us: int, time_error_us: int, kafka_us: int, times: Times) -> str | None:
    """The reason why a body without a fault cannot be true; None if it can.

    `event_us` and `time_error_us` are the record's own time, `kafka_us` is when Kafka took it in. The gateway looked at
    its clock at `boottime_us`, sent the correction afterwards, and then Kafka took the record in. So neither the look
    nor the record's event time can be later than Kafka's time. The corrected time cannot be before `plausible_from`.
    The uncorrected time can: an unknown clock may show any year.
    """
    latest_us = kafka_us + KAFKA_SLACK_US
    known_us = time_error_us if time_error_us < TIME_ERROR_UNKNOWN_US else 0
    offset_us, boot_us, error_us = (whole_of(body, name) or 0 for name in ("offset_us", "boottime_us", "error_us"))
    looked_us = offset_us + boot_us
    if event_us - known_us > latest_us:
        return TOLD_AHEAD
    if looked_us - error_us > latest_us:
        return LEADS_AHEAD
    if looked_us + error_us < microseconds(times.plausible_from_time):
        return LEADS_BACK
    return None


def value_of(body: Body, member: Member) -> Value | None:
    """A member's value, as its column holds it; None if it is not of its type."""
    if member.type == "string":
        return text_of(body, member.name)
    if member.type == "bigint":
        return whole_of(body, member.name)
    given = body.get(member.name)
    if member.type == "boolean":
        return given if isinstance(given, bool) else None
    return _rate(given)


def _rate(given: object) -> Decimal | None:
    if type(given) is int:
        given = Decimal(given)
    if not isinstance(given, Decimal) or not given.is_finite() or given.adjusted() >= _RATE_DIGITS:
        return None
    if given.adjusted() < -2 * _RATE_DIGITS:
        return Decimal(0)
    rate = given.quantize(_RATE_STEP, context=_EXACT) + 0
    return rate if rate.adjusted() < _RATE_DIGITS else None


def _fits(member: Member, value: Value | None) -> bool:
    if value is None or (member.name == "quality" and value not in QUALITIES):
        return False
    size = len(value.encode()) if isinstance(value, str) else value
    return (member.least is None or size >= member.least) and (member.most is None or size <= member.most)
