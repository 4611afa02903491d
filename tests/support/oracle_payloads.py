"""Contents of payloads, read in plain Python. No Spark in here, and none of the project's decoders.

Written from docs/streams.md and docs/payloads.md. Where the decoders differ from it, one of them is wrong.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Protocol, Self

from spark.decode.codec_declarations import Metric, Stream, Streams

SIX_PLACES = Decimal("0.000001")
EXACT = Context(prec=2_000, rounding=ROUND_HALF_UP)
LIMIT = Decimal(10) ** 12
METRICS_MAX = 256
IDENTITY = {"boot", "seq", "tick", "timestamp"}
AROUND = " \t\r\n\v\f\0\ufeff"
NO_NUMBER = re.compile(
    r'("(?:[^"\\]|\\.)*"?)|[-+]?(nan(\([^()"]{0,32}\))?|inf(inity)?|ovf|1\.#[a-z]{2,5}[0-9]{0,8})(?=[ \t\r\n,\]}])',
    re.IGNORECASE | re.DOTALL,
)
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class UnreadableError(Exception):
    """A record that belongs to the rejects; of payloads, the message is the kind of reject."""


class Record(Protocol):
    """The fields of a Kafka record that are needed here."""

    @property
    def topic(self) -> str: ...
    @property
    def value(self) -> bytes | None: ...


class Event(Protocol):
    """The fields that are needed of a record whose headers were read."""

    @property
    def type(self) -> str: ...
    @property
    def content_type(self) -> str: ...
    @property
    def record(self) -> Record: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The right result of `decoded` for a reading's payload."""

    metrics: dict[str, Decimal] | None
    """In the order in which they must come."""
    undeclared: list[str] | None = None
    kind: str | None = None
    """The reason's text before the colon. If a value is out of its declared range, all of the text but the value."""


def read_payload(event: Event) -> dict[str, Decimal]:
    """Return the metrics of a reading of which nothing is declared, or raise UnreadableError."""
    if event.type != "sluice.reading":
        raise UnreadableError
    text = utf8(event.record.value)
    match event.content_type.split(";")[0].strip(" ").lower():
        case "application/json":
            return json_metrics(text)
        case "text/plain":
            return {"value": quantised(text.strip(AROUND))}
        case "application/octet-stream" if text.strip(AROUND).startswith("{"):
            return json_metrics(text)
        case _:
            raise UnreadableError


def outcome(event: Event, streams: Streams) -> Outcome:
    """Tell what becomes of a reading's payload under declarations of JSON and of numbers."""
    stream = declaration(event.record.topic, streams)
    if stream is None and streams.unknown == "quarantine":
        return Outcome(None, kind="undeclared-stream")
    if stream is None or not stream.metrics:
        codec = {"json": "application/json", "number": "text/plain"}[stream.codec] if stream else event.content_type
        return of_type(event, codec)
    try:
        text = utf8(event.record.value)
        members = reading_object(text) if stream.codec == "json" else bare_number(text)
    except UnreadableError:
        return Outcome(None, kind="undecodable")
    undeclared = unknown(members, stream) if stream.codec == "json" else None
    values = dict(declared(members, stream))
    wrong = [metric.out_of_range for metric, value in values.items() if not fits(value, metric)]
    if wrong or not values:
        return Outcome(None, undeclared, f"out-of-range: {wrong[0]}" if wrong else "undecodable")
    return Outcome({metric.name: value for metric, value in values.items() if value is not None}, undeclared)


def fits(value: Decimal | None, metric: Metric) -> bool:
    low, high = metric.min, metric.max
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def bare_number(text: str) -> dict[str, object]:
    text = text.strip(AROUND)
    if not NUMBER.fullmatch(text):
        raise UnreadableError
    return {"value": str.__new__(NumberText, text)}


def of_type(event: Event, content_type: str) -> Outcome:
    """The right result if no metrics are declared."""

    @dataclass
    class Typed:
        type: str
        content_type: str
        record: Record

    typed = Typed(event.type, content_type, event.record)
    try:
        metrics = read_payload(typed)
    except UnreadableError as error:
        return Outcome(None, unstored(typed), str(error) or "undecodable")
    in_order = {name: metrics[name] for name in sorted(metrics, key=lambda name: name.encode("utf-16-be"))}
    return Outcome(in_order, unstored(typed))


def unstored(event: Event) -> list[str] | None:
    """The numbers of an object of which nothing is declared that no table holds."""
    if event.content_type.split(";")[0].strip(" ").lower() != "application/json":
        return None
    try:
        numbers = numbers_of(utf8(event.record.value))
    except UnreadableError:
        return None
    if len(numbers) > METRICS_MAX:
        return None
    return first_names(name for name, number in numbers.items() if stored(number) is None)


def declaration(topic: str, streams: Streams) -> Stream | None:
    """The very name, else the pattern with most letters, else the first in the alphabet."""
    named = {stream.name: stream for stream in streams.streams}
    if topic in named:
        return named[topic]
    fitting = [
        name
        for name in named
        if "*" in name and re.fullmatch(".*".join(re.escape(part) for part in name.split("*")), topic)
    ]
    return named[min(fitting, key=lambda name: (-len(name.replace("*", "")), name))] if fitting else None


def unknown(members: dict[str, object], stream: Stream) -> list[str] | None:
    known = IDENTITY | {metric.path[0] for metric in stream.metrics}
    return first_names(name for name, value in members.items() if isinstance(value, NumberText) and name not in known)


def first_names(names: Iterable[str]) -> list[str] | None:
    return [name[:100] for name in sorted(names, key=lambda name: name.encode("utf-16-be"))[:16]] or None


def declared(members: dict[str, object], stream: Stream) -> Iterator[tuple[Metric, Decimal | None]]:
    """Each declared metric that is a number, with its value, None where no table holds that."""
    for metric in sorted(stream.metrics, key=lambda metric: metric.name.encode("utf-16-be")):
        found: object = members
        if stream.codec == "number":
            found = members["value"]
        else:
            for name in metric.path:
                found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, NumberText):
            yield metric, stored(found, metric.decimals, metric.scale or Decimal(1))


def stored(number: str, decimals: int = 6, scale: Decimal = Decimal(1)) -> Decimal | None:
    try:
        return quantised(number, decimals, scale)
    except UnreadableError:
        return None


def json_metrics(text: str) -> dict[str, Decimal]:
    """Return the numeric members of a JSON object that tables hold, but for the identity."""
    numbers = numbers_of(text)
    if not 0 < len(numbers) <= METRICS_MAX:
        raise UnreadableError
    values = {name: stored(number) for name, number in numbers.items()}
    found = {name: value for name, value in values.items() if value is not None}
    if not found:
        raise UnreadableError("out-of-range")
    return found


def numbers_of(text: str) -> dict[str, str]:
    """Return the numeric members of a JSON object, but for the identity, as they were written."""
    return {
        name: number
        for name, number in reading_object(text).items()
        if isinstance(number, NumberText) and name not in IDENTITY
    }


def reading_object(text: str) -> dict[str, object]:
    """The object of a reading, in which a float that is no number becomes null."""
    return json_object(NO_NUMBER.sub(lambda found: found[1] or "null", text.strip(AROUND)))


def json_object(text: str) -> dict[str, object]:
    """Return the members of a JSON object that holds no name twice, its numbers as they were written."""
    try:
        members = json.loads(
            text.strip(AROUND),
            parse_int=NumberText,
            parse_float=NumberText,
            parse_constant=refuse,
            object_pairs_hook=without_repetition,
        )
        # Lone surrogates, which \u escapes can make, are no text.
        json.dumps(members, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UnreadableError from error
    if not isinstance(members, dict):
        raise UnreadableError
    return members


class NumberText(str):
    """A JSON number as it was written."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        # The longest number that a JSON parser of this kind takes.
        if len(text) > 1_000:
            raise ValueError(text)
        return super().__new__(cls, text)


def refuse(constant: str) -> None:
    raise ValueError(constant)


def without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError(pairs)
    return members


def quantised(text: str, decimals: int = 6, scale: Decimal = Decimal(1)) -> Decimal:
    """Round a scaled number to so many decimals, half up, or raise UnreadableError if it is none or does not fit."""
    match = NUMBER.fullmatch(text)
    if match is None:
        raise UnreadableError
    if len(text) > 64 or len((match[2] or "").lstrip("eE+-")) > 3:
        raise UnreadableError("out-of-range")
    value = EXACT.multiply(Decimal(text), scale).quantize(Decimal(1).scaleb(-decimals), context=EXACT)
    if abs(value) >= LIMIT:
        raise UnreadableError("out-of-range")
    # Decimals know a negative zero; a table's do not.
    return value + 0


def utf8(text: bytes | None) -> str:
    if text is None:
        raise UnreadableError
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError from error
