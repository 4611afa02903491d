"""Fuzzing of the MQTT parser: seeded, fast, and without a framework, so that a bench can run a million cases.

A case is a stream of valid packets of one version, mutated or not, received whole and in two other splits.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from gateway.mqtt.protocol import Connect, Disconnect, Event, ServerProtocol, Violation
from gateway.mqtt.protocol5 import Version5

PACKET_BYTES_MAX = 512
"""Bytes of the parser's largest packet: few, so that the bound is met often."""
RECEIVE_MAX = 3
"""Receive Maximum of the parser: few messages too."""


@dataclass(slots=True)
class FuzzOutcome:
    """Result of `fuzz`. `failures` describes each case that broke a rule, with the seed that repeats it."""

    cases: int = 0
    packets: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    pending_bytes_max: int = 0
    """The most that a parser held of an unfinished packet."""
    failures: list[str] = field(default_factory=list)


def fuzz(cases: int, seed: int, level: int = 4) -> FuzzOutcome:
    """Run that many cases of a protocol level: 4 is MQTT 3.1.1, and 5 is MQTT 5. The same seed gives the same cases.

    What must hold: the parser never raises; the split never changes the events; a violation is the last event; what
    is held stays below the packet limit and what one `receive` brought.
    """
    randomness = random.Random(seed)  # noqa: S311 - cases, not secrets
    outcome = FuzzOutcome()
    for case in range(cases):
        data = _stream(randomness, *_PACKETS_OF[level])
        outcome.cases += 1
        try:
            _judge(data, randomness, outcome)
        except Exception as error:  # noqa: BLE001 - a parser that raises is what is looked for
            outcome.failures.append(f"case {case} of seed {seed}: {error!r} on {data.hex()}")
    return outcome


def _judge(data: bytes, randomness: random.Random, outcome: FuzzOutcome) -> None:
    whole = _received((data,), outcome)
    if _received(_pieces(data, randomness), outcome) != whole:
        raise AssertionError("a split changed the events")
    if len(data) <= 64 and _received([data[at : at + 1] for at in range(len(data))], outcome) != whole:
        raise AssertionError("one byte at a time changed the events")
    outcome.packets += len(whole)
    if any(isinstance(event, Violation | Disconnect) for event in whole[:-1]):
        raise AssertionError("something comes after the end")
    if whole and isinstance(whole[-1], Violation):
        outcome.violations[whole[-1].reason] += 1
    if whole and not isinstance(whole[0], Connect | Violation):
        raise AssertionError(f"{whole[0]} comes before CONNECT")


def _received(pieces: Sequence[bytes], outcome: FuzzOutcome) -> list[Event]:
    protocol = ServerProtocol(PACKET_BYTES_MAX, partial(Version5, RECEIVE_MAX, PACKET_BYTES_MAX))
    events: list[Event] = []
    for piece in pieces:
        events += protocol.receive(piece)
        held = protocol.pending_bytes
        outcome.pending_bytes_max = max(outcome.pending_bytes_max, held)
        if held >= PACKET_BYTES_MAX:
            raise AssertionError(f"{held} bytes are held")
    return events


def _pieces(data: bytes, randomness: random.Random) -> list[bytes]:
    cuts = sorted(randomness.randrange(len(data) + 1) for _ in range(randomness.randrange(1, 6)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _stream(randomness: random.Random, connects: Sequence[bytes], valid: Sequence[bytes]) -> bytes:
    """A few valid packets, of which most streams have some bytes changed, removed, doubled or put in."""
    packets = [randomness.choice(connects)] if randomness.random() < 0.95 else []
    packets += randomness.choices(valid, k=randomness.randrange(6))
    if randomness.random() < 0.1:
        packets.append(randomness.randbytes(randomness.randrange(20)))
    data = bytearray(b"".join(packets))
    for _ in range(randomness.choice((0, 1, 1, 2, 4))):
        if not data:
            break
        at = randomness.randrange(len(data))
        match randomness.randrange(6):
            case 0:
                data[at] ^= 1 << randomness.randrange(8)
            case 1:
                data[at] = randomness.randrange(256)
            case 2:
                del data[at : at + randomness.randrange(1, 5)]
            case 3:
                data[at:at] = randomness.randbytes(randomness.randrange(1, 5))
            case 4:
                end = at + randomness.randrange(1, 40)
                data[at:at] = data[at:end]
            case _:
                data[at] = randomness.choice((0x00, 0x7F, 0x80, 0xFF))
    return bytes(data)


def _packet(first: int, body: bytes) -> bytes:
    length = bytes((len(body),)) if len(body) < 0x80 else bytes((len(body) & 0x7F | 0x80, len(body) >> 7))
    return bytes((first,)) + length + body


def _text(text: str) -> bytes:
    return len(text.encode()).to_bytes(2, "big") + text.encode()


_CONNECTS = [
    _packet(0x10, _text("MQTT") + b"\x04\x02\x00\x3c" + _text("m001")),
    _packet(0x10, _text("MQTT") + b"\x04\x00\x00\x00" + _text("sensor-\u00fc")),
    _packet(
        0x10,
        _text("MQTT") + b"\x04\xee\x00\x3c" + _text("m001") + _text("status") + _text("gone") + _text("u") + _text("p"),
    ),
]
_PACKETS = [
    *(_packet(0x30, _text("device/m001/thermo") + b'{"celsius":21.5}') for _ in range(3)),
    *(_packet(0x32, _text("device/m001/thermo") + bytes((0, n)) + b"21.5") for n in range(1, 6)),
    *(_packet(first, _text("device/m001/hum") + b"\x01\x02" + b"x" * 140) for first in (0x3A, 0x34, 0x3D)),
    _packet(0x32, _text("ger\u00e4t/\U0001f321") + b"\xff\xff"),
    _packet(0x62, b"\x00\x01"),
    _packet(0x40, b"\x00\x01"),
    _packet(0x82, b"\x00\x05" + _text("command/m001/#") + b"\x01" + _text("+/b") + b"\x00"),
    _packet(0xA2, b"\x00\x06" + _text("command/m001/#")),
    _packet(0xC0, b""),
    _packet(0xE0, b""),
    _packet(0x30, _text("big") + b"y" * 600),
]


def _told(*properties: bytes) -> bytes:
    """Properties with their length, which is below 128."""
    body = b"".join(properties)
    return bytes((len(body),)) + body


_USER = b"\x26" + _text("boot") + _text("a1")
_CONNECTS_5 = [
    _packet(0x10, _text("MQTT") + b"\x05\x02\x00\x3c\x00" + _text("m001")),
    _packet(0x10, _text("MQTT") + b"\x05\x00\x00\x3c" + _told(b"\x11\x00\x00\x00\x3c", b"\x21\x00\x05") + _text("")),
    _packet(
        0x10,
        _text("MQTT")
        + b"\x05\xc6\x00\x3c"
        + _told(b"\x27\x00\x00\x01\x00", b"\x22\x00\x05", b"\x17\x01", b"\x19\x00", _USER)
        + _text("m001")
        + _told(b"\x18\x00\x00\x00\x05", b"\x01\x01", b"\x02\x00\x00\x00\x09", b"\x03" + _text("text/plain"), _USER)
        + _text("status")
        + _text("gone")
        + _text("u")
        + _text("p"),
    ),
]
_PACKETS_5 = [
    *(_packet(0x30, _text("device/m001/thermo") + b"\x00" + b'{"celsius":21.5}') for _ in range(3)),
    *(_packet(0x32, _text("device/m001/thermo") + bytes((0, n)) + _told(_USER) + b"21.5") for n in range(1, 3)),
    *(_packet(0x34, _text("device/m001/hum") + bytes((0, n)) + b"\x00" + b"x" * 140) for n in range(3, 5)),
    _packet(0x30, _text("device/m001/thermo") + _told(b"\x23\x00\x01") + b"21.5"),
    *(_packet(0x30, _text("") + _told(b"\x23\x00\x01") + b"21.6") for _ in range(2)),
    _packet(
        0x30, _text("a") + _told(b"\x08" + _text("b"), b"\x09" + _text("c"), b"\x02\x00\x00\x00\x01", _USER, _USER)
    ),
    _packet(0x62, b"\x00\x01"),
    _packet(0x62, b"\x00\x01\x92" + _told(b"\x1f" + _text("why"))),
    _packet(0x40, b"\x00\x01\x97\x00"),
    _packet(0x82, b"\x00\x05" + _told(_USER) + _text("command/m001/#") + b"\x2d" + _text("+/b") + b"\x00"),
    _packet(0xA2, b"\x00\x06\x00" + _text("command/m001/#")),
    _packet(0xC0, b""),
    _packet(0xE0, b"\x04" + _told(b"\x11\x00\x00\x00\x00", b"\x1f" + _text("why"))),
    _packet(0x30, _text("big") + b"\x00" + b"y" * 600),
]
_PACKETS_OF = {4: (_CONNECTS, _PACKETS), 5: (_CONNECTS_5, _PACKETS_5)}
