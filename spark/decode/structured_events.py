"""Reads a structured event as the binary record that says the same: its attributes are headers, its data the value.

Everything after that is the same for both forms (`record_rules`). Executors import this module.
"""

import re
from base64 import b64decode
from collections.abc import Sequence
from json import JSONDecoder, loads
from typing import NamedTuple

from gateway.record_contract import (
    EVENT_CONTENT_TYPE,
    HEADER_NAMES,
    KAFKA_TOPIC,
    STREAM_ATTRIBUTE,
    USER_ATTRIBUTE,
    USER_PREFIX,
    VARIABLE_PREFIX,
    attribute_of,
)

Headers = Sequence[tuple[str, bytes | None]]

_CONTENT_TYPE = "content-type"
_ATTRIBUTES = {attribute_of(name): name for name in HEADER_NAMES}
_OF_ROUTE = attribute_of(VARIABLE_PREFIX)
"""Prefix of the attributes of a route's variables."""
_BLANKS = re.compile(r"[ \t\r\n]*")
# Members are wanted as they are written. So numbers are not computed.
_value_at = JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode


class StructuredEvent(NamedTuple):
    """A structured event in the form of a binary record."""

    headers: Headers
    """Headers of the contract in their order, and then those that the record has beside its content type."""
    value: bytes | None
    stream: str | None
    """The Kafka topic of the route, if the event says it."""


def event_of(headers: Headers, value: bytes | None) -> StructuredEvent | None:
    """The event of a record; None if the record is no structured event, or cannot be read as one."""
    kinds = [content for name, content in headers if name == _CONTENT_TYPE]
    if value is None or len(kinds) != 1 or not _is_event(kinds[0]):
        return None
    try:
        members = _members(value.decode())
        payload = members["data"].encode() if "data" in members else None
        if "data_base64" in members:
            payload = b64decode(_text(members["data_base64"]), validate=True)
        stream = _text(members[STREAM_ATTRIBUTE]) if STREAM_ATTRIBUTE in members else ""
    except (ValueError, RecursionError):
        return None
    given = [(name, _content(members[attribute])) for attribute, name in _ATTRIBUTES.items() if attribute in members]
    variables = [
        (f"{VARIABLE_PREFIX}{attribute.removeprefix(_OF_ROUTE)}", _content(written))
        for attribute, written in members.items()
        if attribute.startswith(_OF_ROUTE)
    ]
    users = _users(members[USER_ATTRIBUTE]) if USER_ATTRIBUTE in members else []
    others = [header for header in headers if header[0] != _CONTENT_TYPE]
    return StructuredEvent(
        [*given, *variables, *users, *others], payload, stream if KAFKA_TOPIC.fullmatch(stream) else None
    )


def _users(written: str) -> list[tuple[str, bytes | None]]:
    """The headers of user properties; none if the attribute is not as a gateway writes it."""
    try:
        found = loads(_text(written))
        return [(f"{USER_PREFIX}{name}", value.encode()) for name, value in found]
    except (AttributeError, TypeError, ValueError, RecursionError):
        return []


def _is_event(content_type: bytes | None) -> bool:
    """Whether a content type is that of events; parameters may follow, such as `charset`."""
    return content_type is not None and content_type.partition(b";")[0].strip().lower() == EVENT_CONTENT_TYPE.encode()


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each as it is written. Raises ValueError, RecursionError."""
    members: dict[str, str] = {}
    at = _behind(text, "{", 0)
    if text[at : at + 1] == "}":
        return members
    while True:
        _, end = _value_at(text, at)
        name, at = _text(text[at:end]), _behind(text, ":", end)
        _, end = _value_at(text, at)
        members[name] = text[at:end]
        at = _skip(text, end)
        if text[at : at + 1] == "}" and _skip(text, at + 1) == len(text):
            return members
        at = _behind(text, ",", at)


def _behind(text: str, mark: str, at: int) -> int:
    """The place of what follows a mark. Raises ValueError if the mark is not there."""
    at = _skip(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"{mark} is missing")
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return at if blanks is None else blanks.end()


def _text(written: str) -> str:
    """A text as it is meant. Raises ValueError if it is none, or cannot be told in UTF-8."""
    if not written.startswith('"'):
        raise ValueError("it is no text")
    text = str(_value_at(written, 0)[0])
    text.encode()
    return text


def _content(written: str) -> bytes | None:
    """The text of an attribute as a header has it; None if it is no text."""
    try:
        return _text(written).encode()
    except ValueError:
        return None
