"""Reads a command from a Kafka record, as docs/commands-to-devices.md describes it. Nothing in a record raises."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from msgspec import Struct

from gateway.command import DeviceCommand
from gateway.record_contract import (
    COMMAND_BYTES_MAX,
    COMMAND_EXPIRES_HEADER,
    COMMAND_ID,
    COMMAND_ID_HEADER,
    COMMAND_ID_PLACE,
    COMMAND_TOPIC,
    COMMAND_TOPIC_HEADER,
    DEVICE_NAME,
)

NO_ID: Final = "no-id"
NO_DEVICE: Final = "no-device"
"""Reason of a refusal: the key is not `namespace/device`."""
OTHER_NAMESPACE: Final = "other-namespace"
NO_EXPIRY: Final = "no-expiry"
BAD_TOPIC: Final = "bad-topic"
TOO_LARGE: Final = "too-large"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class CommandRecord(Protocol):
    """The part of a Kafka record that a command is read from."""

    @property
    def key(self) -> bytes | None: ...

    @property
    def value(self) -> bytes | None: ...

    @property
    def headers(self) -> Sequence[tuple[str, bytes]]: ...

    @property
    def offset(self) -> int: ...


class UnfitRecord(Struct, frozen=True):
    """A record that is no command for this gateway, and what could be read of it."""

    reason: str
    id: str | None
    device: str | None


def read_command(record: CommandRecord, namespace: str) -> DeviceCommand | UnfitRecord:
    """Read the command for a device of this namespace."""
    told = dict(record.headers)
    command_id = _text(told.get(COMMAND_ID_HEADER))
    if command_id is None or COMMAND_ID.fullmatch(command_id) is None:
        command_id = None
    of_namespace, _, device = (_text(record.key) or "").partition("/")
    if DEVICE_NAME.fullmatch(device) is None:
        return UnfitRecord(NO_DEVICE, command_id, None)
    expires_us = _time_us(_text(told.get(COMMAND_EXPIRES_HEADER)))
    topic = _text(told.get(COMMAND_TOPIC_HEADER, b""))
    payload = record.value or b""
    reason = None
    if of_namespace != namespace:
        reason = OTHER_NAMESPACE
    elif command_id is None:
        reason = NO_ID
    elif expires_us is None:
        reason = NO_EXPIRY
    elif topic is None or COMMAND_TOPIC.fullmatch(topic) is None:
        reason = BAD_TOPIC
    elif len(payload) > COMMAND_BYTES_MAX:
        reason = TOO_LARGE
    if reason is not None or command_id is None or expires_us is None or topic is None:
        return UnfitRecord(reason or NO_ID, command_id, device)
    return DeviceCommand(command_id, device, topic.replace(COMMAND_ID_PLACE, command_id), payload, expires_us)


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _time_us(text: str | None) -> int | None:
    """Microseconds since 1970; None if the text is no time with an offset."""
    try:
        told = datetime.fromisoformat(text or "")
        return None if told.tzinfo is None else (told - _EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        return None
