"""Reads a reading's identity from its payload: the sensor's boot, sequence and tick, in the layout of its route."""

import re
from collections.abc import Callable, Sequence
from struct import Struct as BytesLayout
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.host.terminal_text import counted
from gateway.intake.payload_cbor import decode as decode_cbor
from gateway.intake.payload_json import UNREADABLE, fault, read_mending
from gateway.reading import name_of_boot
from gateway.settings import PayloadIdentity

BOOT_CHARACTERS_MAX = 64
MEMBER_BYTES_MAX = 1_024
"""Bytes of a wrong JSON member that are read. A boot of 64 characters, each of them escaped, has 770."""
SEQUENCE_MAX = 2**63 - 1
TICK_MODULUS = 2**32
TICK_UNREADABLE = -1
LOST_SEQUENCES_MAX = 2**32
"""Sequences that one report of a sensor may say it dropped. Our sequences have 32 bits, and counters must add up."""
BINARY = BytesLayout("<BIIII")
"""Header before a payload of the layout `binary`: version, boot counter, incarnation, sequence, tick."""
BINARY_VERSION = 1
_WHOLE_NUMBER = re.compile(r" *\+?([0-9]{1,64})(?:\.0+)? *", re.ASCII)
_EXACT_FLOAT_MAX = 2**53


class Identity(msgspec.Struct, gc=False):
    """The identity in a payload: the members of the layout `json`."""

    # msgspec checks types and limits of the members at no cost. An identity that breaks them is never made.
    boot: Annotated[str, Meta(min_length=1, max_length=BOOT_CHARACTERS_MAX)]
    seq: Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
    tick: Annotated[int, Meta(ge=0, lt=TICK_MODULUS)] | None = None
    """The sensor's clock at the measurement, in milliseconds (32 bits, wraps); None if there is none, `TICK_UNREADABLE`
    if it is no such number."""
    lost: tuple[int, int] | UnsetType | None = UNSET
    """`[first, last]`: sequences that the sensor dropped since its last report. None if it makes no sense."""

    def dropped(self) -> tuple[int, int] | None:
        """Sequences that the sensor says it dropped, before this sample; None if they make no sense."""
        match self.lost:
            case (first, last) if 0 <= first <= last < self.seq and last - first < LOST_SEQUENCES_MAX:
                return first, last
        return None


class _Members(msgspec.Struct, gc=False):
    """The raw members, of whatever kind; empty if they are missing."""

    boot: msgspec.Raw = msgspec.Raw()
    seq: msgspec.Raw = msgspec.Raw()
    tick: msgspec.Raw = msgspec.Raw()
    lost: msgspec.Raw = msgspec.Raw()


Properties = Sequence[tuple[str, str]]
"""User properties of an MQTT 5 message."""
PROPERTIES = frozenset({"boot", "seq", "tick", "lost"})
"""Names of the user properties of an identity."""
Reader = Callable[[bytes], Identity | None]
"""Returns the identity in a payload, whatever that is; None if there is none. Raises nothing."""


def reader(layout: PayloadIdentity) -> Reader | None:
    """The reader of a layout; None for `none`, and for `properties`, which are beside the payload."""
    return {"json": of_json, "cbor": of_cbor, "binary": of_binary}.get(layout)


_decode_json = msgspec.json.Decoder(Identity).decode
_decode_members = msgspec.json.Decoder(_Members).decode


def of_json(payload: bytes) -> Identity | None:
    """The members `boot`, `seq`, `tick` and `lost` of a JSON object, whatever else is in it or around it."""
    try:
        return _decode_json(payload)
    except UNREADABLE:
        return _of_json_members(payload)


def _of_json_members(payload: bytes) -> Identity | None:
    """The members of an object that is no strict JSON, or whose boot is an integer, or with members of a wrong kind."""
    try:
        found = read_mending(_decode_members, payload)
    except UNREADABLE:
        return None
    tick = _alone(found.tick, TICK_UNREADABLE) if found.tick else None
    lost = _pair(_alone(found.lost, None)) if found.lost else UNSET
    sequence = _alone(found.seq, None)
    if type(sequence) is float and sequence.is_integer() and abs(sequence) < _EXACT_FLOAT_MAX:
        # JSON has one kind of number: 1.0 is 1.
        sequence = int(sequence)
    return _checked(_alone(found.boot, None), sequence, tick, lost)


def _alone(raw: msgspec.Raw, unreadable: object) -> Any:
    """A member by itself; `unreadable` if it is missing or cannot be read."""
    try:
        return msgspec.json.decode(raw) if len(raw) <= MEMBER_BYTES_MAX else unreadable
    except UNREADABLE:
        return unreadable


def _pair(lost: object) -> tuple[int, int] | None:
    match lost:
        case [first, last] if type(first) is type(last) is int:
            return first, last
    return None


def of_cbor(payload: bytes) -> Identity | None:
    """The members of a CBOR map, as in `of_json`; their names are texts."""
    try:
        found: Any = decode_cbor(payload)
    except ValueError:
        return None
    if type(found) is not dict:
        return None
    lost = _pair(found["lost"]) if "lost" in found else UNSET
    return _checked(found.get("boot"), found.get("seq"), found.get("tick"), lost)


def of_properties(user: Properties) -> Identity | None:
    """The user properties `boot`, `seq`, `tick` and `lost` of an MQTT 5 message; of one name, the first counts."""
    found = dict(reversed(user))
    tick = found.get("tick")
    # `lost` is written as in JSON. Whole numbers are read as `seq` is.
    lost = _pair(_alone(msgspec.Raw(found["lost"].encode()), None)) if "lost" in found else UNSET
    tick_ms = None if tick is None else whole_number(tick)
    if tick is not None and tick_ms is None:
        tick_ms = TICK_UNREADABLE
    return _checked(found.get("boot"), found.get("seq"), tick_ms, lost)


def of_binary(payload: bytes) -> Identity | None:
    """The identity in the header before the value."""
    if len(payload) < BINARY.size or payload[0] != BINARY_VERSION:
        return None
    _, boot, incarnation, sequence, tick_ms = BINARY.unpack_from(payload)
    return Identity(name_of_boot(boot, incarnation), sequence, tick_ms)


def _checked(boot: object, sequence: object, tick: Any, lost: tuple[int, int] | UnsetType | None) -> Identity | None:
    """The identity, or None if boot or sequence is none. A tick that makes no sense becomes `TICK_UNREADABLE`."""
    boot, sequence = _boot(boot), _sequence(sequence)
    if boot is None or sequence is None:
        return None
    if tick is not None and not (type(tick) is int and 0 <= tick < TICK_MODULUS):
        tick = TICK_UNREADABLE
    return Identity(boot, sequence, tick, lost)


def _boot(value: object) -> str | None:
    if type(value) is int:
        value = str(value)
    return value if type(value) is str and 0 < len(value) <= BOOT_CHARACTERS_MAX else None


def whole_number(text: str) -> int | None:
    """The number that a text is, as sensors write whole numbers; None if it is none."""
    found = _WHOLE_NUMBER.fullmatch(text)
    return None if found is None else int(found[1])


def _sequence(value: object) -> int | None:
    """A sequence; a text that is a whole number counts as that number."""
    if type(value) is str:
        value = whole_number(value)
    return value if type(value) is int and 0 <= value <= SEQUENCE_MAX else None


# -- why there is none ----------------------------------------------------------------------------


def why_none(layout: PayloadIdentity, payload: bytes) -> str:
    """The reason, in words, why a payload of this layout has no identity: "no `seq`"."""
    match layout:
        case "json":
            return _why_no_json(payload)
        case "cbor":
            return _why_no_cbor(payload)
    if len(payload) < BINARY.size:
        return f"{counted(len(payload), 'byte')}, and the header alone has {BINARY.size}"
    return f"the first byte is {payload[0]}, and the header's version is {BINARY_VERSION}"


def why_no_properties(user: Properties) -> str:
    """The reason, in words, why user properties have no identity."""
    return _why_no_members(dict(reversed(user))).replace("no `", "no user property `", 1)


def _why_no_json(payload: bytes) -> str:
    try:
        found = read_mending(_decode_members, payload)
    except msgspec.ValidationError:
        return "no JSON object"
    except UNREADABLE:
        return f"no JSON: {fault(payload)}"
    members = {"boot": found.boot, "seq": found.seq}
    return _why_no_members({name: _alone(raw, ()) for name, raw in members.items() if raw})


def _why_no_cbor(payload: bytes) -> str:
    try:
        found: Any = decode_cbor(payload)
    except ValueError:
        return "no CBOR"
    return _why_no_members(found) if type(found) is dict else "no CBOR map"


def _why_no_members(members: dict[str, object]) -> str:
    missing = [f"no `{name}`" for name in ("boot", "seq") if name not in members]
    if missing:
        return " and ".join(missing)
    boot, sequence = members["boot"], members["seq"]
    if _boot(boot) is None:
        return f"`boot` is {_kind(boot)}, not a text of 1 to {BOOT_CHARACTERS_MAX} characters"
    if type(sequence) is str and not _WHOLE_NUMBER.fullmatch(sequence):
        return "`seq` is a text that is no number"
    return f"`seq` is {_kind(sequence)}, not a whole number from 0 to {SEQUENCE_MAX}"


def _kind(value: object) -> str:
    if type(value) is str:
        return f"a text of {counted(len(value), 'character')}"
    return _KINDS.get(type(value), "of another kind")


_KINDS = {
    type(None): "null",
    tuple: "no JSON value",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
