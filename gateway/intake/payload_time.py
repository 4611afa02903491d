"""Reads a reading's time from its payload: SenML (RFC 8428), or a timestamp in milliseconds.

docs/payloads.md describes both. Whether the time is believed is decided elsewhere: see `clock.sensor_dates`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from gateway.intake.payload_cbor import decode as decode_cbor
from gateway.intake.payload_identity import BINARY, Properties, whole_number
from gateway.intake.payload_json import UNREADABLE, read_mending
from gateway.settings import PayloadIdentity, TimeSource

SENML_JSON = "application/senml+json"
SENML_CBOR = "application/senml+cbor"
SENML_BYTES_MAX = 65_536
"""Bytes of a pack above which it is not read: each byte may become an object."""
SENML_RECORDS_MAX = 1_024
"""Records of a JSON pack above which it is not read: an empty record has three bytes, and costs as much as another."""
NUMBER_BYTES_MAX = 64
"""Bytes of a time in a JSON pack. Longer numbers are damaged, and digits cost the square of their number."""
RELATIVE_S_MAX = 2**28
"""Seconds below which a time is relative to now; others are since 1970 (RFC 8428, section 4.5.3)."""
DEVICE_TIME_US_MAX = 2**63 - 1
"""The largest time that the buffer can hold, in microseconds. A later time makes no sense, and is stored as this."""

_SECONDS_MAX = 10**13
"""Seconds beyond `DEVICE_TIME_US_MAX`. Larger ones are cut to this, so that no sum overflows."""
# RFC 8428, section 6: the labels of CBOR.
_BASE_TIME, _BASE_VALUE, _BASE_SUM, _VALUE, _STRING, _BOOLEAN, _SUM, _TIME, _DATA = -3, -5, -6, 2, 3, 4, 5, 6, 8
_CBOR_VALUES = (_VALUE, _STRING, _BOOLEAN, _DATA, _SUM, _BASE_VALUE, _BASE_SUM)


class Told(NamedTuple):
    """A time that a sensor sent, in microseconds: since 1970 (UTC), or relative to now, below 0 for the past."""

    us: int
    is_relative: bool


class NothingToldError(ValueError):
    """The payload does not carry the time that its route is to find."""


Reader = Callable[[bytes, Properties], Told | None]
"""Returns the time in a payload, or in the user properties beside it; None if it rightly has none. Raises
NothingToldError only."""


class _Record(msgspec.Struct, gc=False):
    """A SenML record's times and values. A record without a value only sets what is common to others."""

    bt: msgspec.Raw = msgspec.Raw()
    t: msgspec.Raw = msgspec.Raw()
    v: msgspec.Raw = msgspec.Raw()
    vs: msgspec.Raw = msgspec.Raw()
    vb: msgspec.Raw = msgspec.Raw()
    vd: msgspec.Raw = msgspec.Raw()
    s: msgspec.Raw = msgspec.Raw()
    bv: msgspec.Raw = msgspec.Raw()
    bs: msgspec.Raw = msgspec.Raw()

    @property
    def has_value(self) -> bool:
        return any((self.v, self.vs, self.vb, self.vd, self.s, self.bv, self.bs))


class _Timestamp(msgspec.Struct, gc=False):
    timestamp: int | float


_senml_json = msgspec.json.Decoder(list[_Record])
_timestamp_json = msgspec.json.Decoder(_Timestamp)


def of_senml_json(payload: bytes, _: Properties = ()) -> Told | None:
    """The time of the newest measurement of a pack. Raises NothingToldError."""
    if len(payload) > SENML_BYTES_MAX or payload.count(b"{") > SENML_RECORDS_MAX:
        raise NothingToldError
    try:
        records = read_mending(_senml_json.decode, payload)
    except UNREADABLE as error:
        raise NothingToldError from error
    return _newest((_json_time(record.bt), _json_time(record.t), record.has_value) for record in records)


def _json_time(raw: msgspec.Raw) -> object:
    """A time as JSON has it; NaN if it is too long for a number, or beyond all numbers."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw) if len(raw) <= NUMBER_BYTES_MAX else math.nan
    except msgspec.DecodeError:
        return math.nan


def of_senml_cbor(payload: bytes, _: Properties = ()) -> Told | None:
    """The time of the newest measurement of a CBOR pack. Raises NothingToldError."""
    records = _decoded(payload)
    if not isinstance(records, list):
        raise NothingToldError
    return _newest(_times_of_cbor(records))


def _times_of_cbor(records: Iterable[object]) -> Iterator[tuple[object, object, bool]]:
    for record in records:
        if not isinstance(record, dict):
            raise NothingToldError
        yield record.get(_BASE_TIME), record.get(_TIME), any(label in record for label in _CBOR_VALUES)


def _newest(records: Iterable[tuple[object, object, bool]]) -> Told | None:
    """The newest time, from base times, times, and whether there is a value.

    A base time holds until the next one (section 4.1).
    """
    base: object = None
    absolute: list[float] = []
    relative: list[float] = []
    is_said = is_measured = False
    for base_time, time, has_value in records:
        base = base if base_time is None else base_time
        if not has_value:
            continue
        is_measured = True
        is_said = is_said or base is not None or time is not None
        base_s, time_s = _seconds(base), _seconds(time)
        if base_s is None or time_s is None:
            continue
        (absolute if base_s + time_s >= RELATIVE_S_MAX else relative).append(base_s + time_s)
    # A relative time is of about now, and could be newer. But it claims less than a date.
    if absolute:
        return Told(_microseconds(max(absolute)), is_relative=False)
    if relative and is_said:
        return Told(_microseconds(max(relative)), is_relative=True)
    if is_said or not is_measured:
        raise NothingToldError
    return None


def of_timestamp_json(payload: bytes, _: Properties = ()) -> Told:
    """The member `timestamp` of a JSON object: whole milliseconds since 1970, UTC. Raises NothingToldError."""
    try:
        return _of_milliseconds(read_mending(_timestamp_json.decode, payload).timestamp)
    except UNREADABLE as error:
        raise NothingToldError from error


def of_timestamp_cbor(payload: bytes, _: Properties = ()) -> Told:
    """The member `timestamp` of a CBOR map, as in JSON. Raises NothingToldError."""
    found = _decoded(payload)
    return _of_milliseconds(found.get("timestamp") if isinstance(found, dict) else None)


PROPERTIES = frozenset({"timestamp"})
"""Names of the user properties of a time."""


def of_property(_: bytes, user: Properties) -> Told:
    """The user property `timestamp` of an MQTT 5 message: whole milliseconds since 1970. Raises NothingToldError."""
    return _of_milliseconds(whole_number(dict(reversed(user)).get("timestamp", "")))


def of_missing_tick(_: bytes, __: Properties = ()) -> None:
    """Raise NothingToldError, for a payload that lacks the tick that it should carry."""
    raise NothingToldError


def _of_milliseconds(value: object) -> Told:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise NothingToldError
    return Told(_clamped(value * 1_000), is_relative=False)


def _decoded(payload: bytes) -> object:
    try:
        return decode_cbor(payload)
    except ValueError as error:
        raise NothingToldError from error


def _seconds(value: object) -> float | None:
    """A base time or a time; 0 if there is none, None if it is no number."""
    if value is None:
        return 0
    if type(value) not in {int, float} or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return min(max(value, -_SECONDS_MAX), _SECONDS_MAX)  # type: ignore[call-overload,no-any-return]


def _microseconds(seconds: float) -> int:
    return _clamped(seconds * 1_000_000 if isinstance(seconds, int) else round(seconds * 1e6))


def _clamped(us: int) -> int:
    return min(max(us, -DEVICE_TIME_US_MAX), DEVICE_TIME_US_MAX)


def reader(time: TimeSource, identity: PayloadIdentity, content_type: str) -> Reader | None:
    """The reader of times for a route's payloads without a tick; None if no time is to be found in them."""
    if time in {"auto", "receipt"}:
        return None
    if time == "property":
        return of_property
    if time == "tick":
        return of_missing_tick
    found: Reader
    if content_type == SENML_CBOR or identity == "cbor":
        found = of_senml_cbor if time == "senml" else of_timestamp_cbor
    else:
        found = of_senml_json if time == "senml" else of_timestamp_json
    if identity != "binary":
        return found
    return lambda payload, user: found(payload[BINARY.size :], user)
