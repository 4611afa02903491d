"""Who took a reading, as its payload says it: the sensor's boot, sequence and tick, by the layout that its route names.

PAYLOADS.md describes the layouts.
"""

from collections.abc import Callable
from struct import Struct as BytesLayout
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.intake.payload_cbor import decode as decode_cbor
from gateway.reading import name_of_boot
from gateway.settings import PayloadIdentity

BOOT_CHARACTERS_MAX = 64
MEMBER_BYTES_MAX = 1_024
"""Of a JSON member that is not what it should be; a boot of 64 characters, each of them escaped, has 770."""
SEQUENCE_MAX = 2**63 - 1
TICK_MODULUS = 2**32
TICK_UNREADABLE = -1
LOST_SEQUENCES_MAX = 2**32
"""What one report of a sensor may say it dropped: a sequence of ours has 32 bits, and counters must add up."""
BINARY = BytesLayout("<BIIII")
"""Version, boot counter, incarnation, sequence, tick: what stands before a payload of the layout `binary`."""
BINARY_VERSION = 1


class Identity(msgspec.Struct, gc=False):
    """What a payload says of who took it; the members of the layout `json`."""

    # That members are of their kind and in their limits msgspec sees at no cost. What is not is never made.
    boot: Annotated[str, Meta(min_length=1, max_length=BOOT_CHARACTERS_MAX)]
    seq: Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
    tick: Annotated[int, Meta(ge=0, lt=TICK_MODULUS)] | None = None
    """The sensor's clock at the measurement, in milliseconds (32 bits, wraps); None where there is none,
    `TICK_UNREADABLE` where what is there is no such number."""
    lost: tuple[int, int] | UnsetType | None = UNSET
    """`[first, last]`: sequences that the sensor dropped since it last said so. None where it makes no sense."""

    def dropped(self) -> tuple[int, int] | None:
        """What the sensor says it dropped, before the sample that says it; None where that makes no sense."""
        match self.lost:
            case (first, last) if 0 <= first <= last < self.seq and last - first < LOST_SEQUENCES_MAX:
                return first, last
        return None


class _BareIdentity(msgspec.Struct):
    """The same, where the boot is an integer, or something is not of its kind: the reading is not to be the worse."""

    boot: msgspec.Raw
    seq: int
    tick: msgspec.Raw = msgspec.Raw()
    lost: msgspec.Raw = msgspec.Raw()


Reader = Callable[[bytes], Identity | None]
"""Gives the identity that a payload carries; None where it carries none, whatever it is. Raises nothing."""


def reader(layout: PayloadIdentity) -> Reader | None:
    """What reads this layout; None for `none`."""
    return {"none": None, "json": of_json, "cbor": of_cbor, "binary": of_binary}[layout]


_decode_json = msgspec.json.Decoder(Identity).decode
_decode_bare_json = msgspec.json.Decoder(_BareIdentity).decode


def of_json(payload: bytes) -> Identity | None:
    """The members `boot`, `seq`, `tick` and `lost` of a JSON object, whatever else is in it."""
    try:
        return _decode_json(payload)
    except msgspec.ValidationError:
        return _of_json_bare(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _of_json_bare(payload: bytes) -> Identity | None:
    try:
        found = _decode_bare_json(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    tick = _alone(found.tick, TICK_UNREADABLE) if found.tick else None
    lost = _pair(_alone(found.lost, None)) if found.lost else UNSET
    return _checked(_alone(found.boot, None), found.seq, tick, lost)


def _alone(raw: msgspec.Raw, unreadable: object) -> Any:
    """A member that is read by itself; `unreadable` where there is none, or it cannot be read."""
    try:
        return msgspec.json.decode(raw) if len(raw) <= MEMBER_BYTES_MAX else unreadable
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return unreadable


def _pair(lost: object) -> tuple[int, int] | None:
    match lost:
        case [first, last] if type(first) is type(last) is int:
            return first, last
    return None


def of_cbor(payload: bytes) -> Identity | None:
    """The same members of a CBOR map, their names as texts."""
    try:
        found: Any = decode_cbor(payload)
    except ValueError:
        return None
    if type(found) is not dict or type(sequence := found.get("seq")) is not int:
        return None
    lost = _pair(found["lost"]) if "lost" in found else UNSET
    return _checked(found.get("boot"), sequence, found.get("tick"), lost)


def of_binary(payload: bytes) -> Identity | None:
    """What the header says that stands before the value."""
    if len(payload) < BINARY.size or payload[0] != BINARY_VERSION:
        return None
    _, boot, incarnation, sequence, tick_ms = BINARY.unpack_from(payload)
    return Identity(name_of_boot(boot, incarnation), sequence, tick_ms)


def _checked(boot: object, sequence: int, tick: Any, lost: tuple[int, int] | UnsetType | None) -> Identity | None:
    """None where boot and sequence are none; a tick that makes no sense becomes `TICK_UNREADABLE`."""
    if type(boot) is int:
        boot = str(boot)
    if type(boot) is not str or not (0 < len(boot) <= BOOT_CHARACTERS_MAX and 0 <= sequence <= SEQUENCE_MAX):
        return None
    if tick is not None and not (type(tick) is int and 0 <= tick < TICK_MODULUS):
        tick = TICK_UNREADABLE
    return Identity(boot, sequence, tick, lost)
