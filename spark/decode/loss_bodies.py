"""Reads the members of a loss record's body, and finds the first fault in it."""

from gateway.record_contract import GATEWAY_TYPES
from spark.decode.event_bodies import TEXT_BYTES_MAX, Body, body_of, text_of, whole_of

LOSS_TYPE = f"{GATEWAY_TYPES}loss"
NUMBERS = ("count", "first_boottime_us", "last_boottime_us", "first_sequence", "last_sequence")
TEXTS = ("device", "reason", "boot", "device_boot")
_NULLABLE = {"device", "device_boot", "first_sequence", "last_sequence"}
NO_READINGS = ("event-refused", "gateway-events-dropped", "will-not-reported")
"""Reasons of losses that are no readings. An unknown reason counts as a reading's: a newer gateway may have more."""
NO_BODY = "the loss record is not one JSON object"


def member_of(body: Body, name: str) -> str | int | None:
    """A member of a loss record; None if it is unknown, or not of its type."""
    return text_of(body, name) if name in TEXTS else whole_of(body, name)


def fault(body: Body | None) -> str | None:
    """The first fault of a body from `event_bodies.body_of`; None if there is none."""
    if body is None:
        return NO_BODY
    for name in (*TEXTS, *NUMBERS):
        member = member_of(body, name)
        # A member that is not known may be null or absent.
        if member is None and not (name in _NULLABLE and body.get(name) is None):
            return f"{name} of the loss record is not {'text' if name in TEXTS else 'a whole number'}"
        if isinstance(member, str) and len(member.encode()) > TEXT_BYTES_MAX:
            return f"{name} of the loss record is longer than {TEXT_BYTES_MAX} bytes"
    count, begin_us, end_us, first, last = (whole_of(body, name) for name in NUMBERS)
    for is_wrong, words in (
        (count is not None and count < 0, "count of the loss record is less than 0"),
        (
            begin_us is not None and end_us is not None and end_us < begin_us,
            "the loss record ends before it begins",
        ),
        (
            (first is None) != (last is None) or (first is not None and last is not None and last < first),
            "the loss record's sequences are no span",
        ),
    ):
        if is_wrong:
            return words
    return None


def loss_of(value: bytes | None) -> dict[str, str | int | None] | None:
    """The members of a loss of readings; None if the record has a fault, or tells of no readings."""
    body = body_of(value)
    if body is None or fault(body) is not None or member_of(body, "reason") in NO_READINGS:
        return None
    return {name: member_of(body, name) for name in (*TEXTS, *NUMBERS)}
