"""Reads questions from the addresses of requests. Parameters have the names of the commands' options."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from difflib import get_close_matches
from typing import Final

from spark.desk.asked import Asked, microseconds, parsed_span, parsed_time, parsed_zone

NAMES: Final = ("device", "site", "stream", "metric")
PARAMETERS: Final = (*NAMES, "namespace", "since", "until", "last", "zone", "size", "limit", "order", "full", "at")
POINTS: Final = 400
"""Most windows of a curve where the question leaves their size open."""
SIZES_S: Final = (
    *(1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1_200, 1_800),
    *(3_600, 7_200, 10_800, 14_400, 21_600, 28_800, 43_200, 86_400),
)
"""Lengths of windows that a person would choose, in seconds."""


class QuestionError(Exception):
    """A question's address says something that cannot be asked. The message says what to write."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an address asks for."""

    asked: Asked
    namespace: str | None = None
    zone: tzinfo = UTC
    size_s: int | None = None
    """Length of windows; None for the table's."""
    is_size_open: bool = False
    """True if windows are to be of a length that suits the span."""
    limit: int | None = None
    oldest_first: bool = False
    full: bool = False
    at_us: int | None = None
    """A time in the window that is to be explained."""


def question(told: Mapping[str, str]) -> Question:
    """Read the parameters of an address. An empty one is left out. Raises QuestionError."""
    given = {name: value for name, value in told.items() if value != ""}
    for name in given:
        if name not in PARAMETERS:
            near = get_close_matches(name, PARAMETERS, 1)
            words = f"did you mean {near[0]}?" if near else f"there are {', '.join(PARAMETERS)}"
            raise QuestionError(f"there is no parameter {name!r}: {words}")
    try:
        zone = parsed_zone(given.get("zone", "UTC"))
        since_us, until_us = _span(given, zone)
        at_us = microseconds(parsed_time(given["at"]), zone) if "at" in given else None
    except ValueError as error:
        raise QuestionError(str(error)) from error
    names = {name: given.get(name) for name in NAMES}
    size = given.get("size")
    return Question(
        asked=Asked(**names, since_us=since_us, until_us=until_us),
        namespace=given.get("namespace"),
        zone=zone,
        size_s=None if size in {None, "auto"} else _number("size", size or "", 86_400, "60 or auto"),
        is_size_open=size == "auto",
        limit=_number("limit", given["limit"], 100_000_000, "1000") if "limit" in given else None,
        oldest_first=_choice(given, "order", ("newest", "oldest")) == "oldest",
        full=_choice(given, "full", ("0", "1")) == "1",
        at_us=at_us,
    )


def suiting_size(span_us: int, base_s: int, points: int = POINTS) -> int:
    """The shortest length of windows in seconds, of at most `points` in a span. It is made from windows of `base_s`."""
    sizes = [size for size in SIZES_S if size >= base_s and size % base_s == 0] or [base_s]
    return next((size for size in sizes if span_us <= size * points * 1_000_000), sizes[-1])


def _span(given: Mapping[str, str], zone: tzinfo) -> tuple[int | None, int | None]:
    if "last" in given:
        if "since" in given or "until" in given:
            raise QuestionError("last says by itself from when; leave out since and until")
        return microseconds(datetime.now(UTC) - parsed_span(given["last"])), None
    since_us, until_us = (
        microseconds(parsed_time(given[name]), zone) if name in given else None for name in ("since", "until")
    )
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise QuestionError("since is not before until")
    return since_us, until_us


def _number(name: str, told: str, most: int, example: str) -> int:
    if told.isascii() and told.isdigit() and len(told) < 10 and 1 <= int(told) <= most:
        return int(told)
    raise QuestionError(f"{name}={told} is no whole number from 1 to {most}; write {name}={example}")


def _choice(given: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    told = given.get(name, choices[0])
    if told not in choices:
        raise QuestionError(f"{name}={told} is not one of {', '.join(choices)}")
    return told
