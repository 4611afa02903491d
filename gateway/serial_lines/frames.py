"""The frames of a serial line, as docs/frames.md defines them: COBS, CRC-32 and eight frame types."""

import re
import struct
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple, Self

SENSOR_CONTENT_BYTES_MAX = 128
"""The longest content that a sensor sends."""
GATEWAY_CONTENT_BYTES_MAX = 32
"""The longest content that the gateway sends, for which a sensor must have room."""
PAYLOAD_BYTES_MAX = 64
HELLO_VERSION = 1
DELIMITER = b"\0"

_CRC_BYTES = 4
_COBS_RUN_BYTES_MAX = 254
_CRC_RESIDUE = 0x2144_DF1C
"""The CRC-32 of any content with its own CRC-32 behind it."""
_SEARCH_STEPS_MAX = 128
"""COBS runs that are followed to find frames in one damaged piece. Only a piece made to be slow needs more."""

_HELLO = struct.Struct("<BBIIBII")
_DATA = struct.Struct("<BIIIIB")
_ACK = struct.Struct("<BIII")
_PROBE = struct.Struct("<BI")
_REPLY = struct.Struct("<BIIH")
_COMMAND = struct.Struct("<BII")
_COMMAND_REPLY = struct.Struct("<BIIB")

COMMAND_PAYLOAD_BYTES_MAX = GATEWAY_CONTENT_BYTES_MAX - _COMMAND.size
COMMAND_DONE = 0
"""`CommandReply.result` of a command that was carried out. Any other number means that the sensor does not take it."""


class Defect(StrEnum):
    """Why received bytes are not a frame."""

    BAD_COBS = "bad-cobs"
    BAD_CRC = "bad-crc"
    TOO_LONG = "too-long"
    UNKNOWN_TYPE = "unknown-type"
    UNKNOWN_VERSION = "unknown-version"
    BAD_FIELDS = "bad-fields"
    """Too short, too long or out of range for its type, though the CRC holds."""
    BAD_UTF8 = "bad-utf8"
    NOISE = "noise"
    """Bytes beside whole frames. They may have been another frame, which its sensor sends again."""


class FrameError(ValueError):
    """Received bytes that are not a frame; `defect` says why."""

    def __init__(self, defect: Defect) -> None:
        super().__init__(defect.value)
        self.defect = defect


@dataclass(frozen=True, slots=True)
class Hello:
    """The sensor's identity, sent after a reset and on request."""

    TYPE: ClassVar[int] = 0x01
    boot: int
    incarnation: int
    reset_cause: int
    """The AVR's MCUSR."""
    oldest: int
    next: int
    device: str
    firmware: str
    streams: tuple[str, ...]

    @property
    def run(self) -> int:
        """Name of this run in DATA and ACK. The boot counter alone begins again in an erased EEPROM."""
        return self.boot ^ self.incarnation

    def to_bytes(self) -> bytes:
        """The content, without CRC. Raises ValueError if a field does not fit."""
        head = _pack(
            _HELLO,
            self.TYPE,
            HELLO_VERSION,
            self.boot,
            self.incarnation,
            self.reset_cause,
            self.oldest,
            self.next,
        )
        return head + b"".join(_pack_text(text) for text in (self.device, self.firmware, ",".join(self.streams)))

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content. Raises FrameError."""
        if len(content) >= 2 and content[1] != HELLO_VERSION:
            raise FrameError(Defect.UNKNOWN_VERSION)
        if len(content) < _HELLO.size:
            raise FrameError(Defect.BAD_FIELDS)
        _, _, boot, incarnation, reset_cause, oldest, following = _HELLO.unpack_from(content)
        device, rest = _split_text(content[_HELLO.size :])
        firmware, rest = _split_text(rest)
        streams, rest = _split_text(rest)
        if rest:
            raise FrameError(Defect.BAD_FIELDS)
        names = tuple(streams.split(",")) if streams else ()
        return cls(boot, incarnation, reset_cause, oldest, following, device, firmware, names)


@dataclass(frozen=True, slots=True)
class Data:
    """One sample. `tick_ms` is the sensor's clock when it was taken."""

    TYPE: ClassVar[int] = 0x02
    run: int
    """See `Hello.run`."""
    sequence: int
    oldest: int
    tick_ms: int
    stream: int
    payload: bytes

    def to_bytes(self) -> bytes:
        """The content, without CRC. Raises ValueError if a field does not fit."""
        if len(self.payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"a payload of {len(self.payload)} bytes; at most {PAYLOAD_BYTES_MAX} fit")
        head = _pack(_DATA, self.TYPE, self.run, self.sequence, self.oldest, self.tick_ms, self.stream)
        return head + self.payload

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content. Raises FrameError."""
        if not _DATA.size <= len(content) <= _DATA.size + PAYLOAD_BYTES_MAX:
            raise FrameError(Defect.BAD_FIELDS)
        _, run, sequence, oldest, tick_ms, stream = _DATA.unpack_from(content)
        return cls(run, sequence, oldest, tick_ms, stream, content[_DATA.size :])


@dataclass(frozen=True, slots=True)
class Ack:
    """Every sequence below `next` is on disk or known to be lost. If bit i is set, `next + 1 + i` is on disk."""

    TYPE: ClassVar[int] = 0x03
    run: int
    """See `Hello.run`."""
    next: int
    bitmap: int

    def to_bytes(self) -> bytes:
        """The content, without CRC. Raises ValueError if a field does not fit."""
        return _pack(_ACK, self.TYPE, self.run, self.next, self.bitmap)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content. Raises FrameError."""
        _, run, following, bitmap = _unpack(_ACK, content)
        return cls(run, following, bitmap)


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks for the sensor's tick; the nonce ties the REPLY to it."""

    TYPE: ClassVar[int] = 0x04
    nonce: int

    def to_bytes(self) -> bytes:
        """The content, without CRC. Raises ValueError if a field does not fit."""
        return _pack(_PROBE, self.TYPE, self.nonce)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content. Raises FrameError."""
        _, nonce = _unpack(_PROBE, content)
        return cls(nonce)


@dataclass(frozen=True, slots=True)
class Reply:
    """The sensor's tick when it answered a PROBE; `tick_us` (0 to 999) is the part below a millisecond."""

    TYPE: ClassVar[int] = 0x05
    nonce: int
    tick_ms: int
    tick_us: int

    def to_bytes(self) -> bytes:
        """The content, without CRC. Raises ValueError if a field does not fit."""
        if self.tick_us > 999:
            raise ValueError(f"tick_us {self.tick_us} is a millisecond or more")
        return _pack(_REPLY, self.TYPE, self.nonce, self.tick_ms, self.tick_us)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content. Raises FrameError."""
        _, nonce, tick_ms, tick_us = _unpack(_REPLY, content)
        if tick_us > 999:
            raise FrameError(Defect.BAD_FIELDS)
        return cls(nonce, tick_ms, tick_us)


@dataclass(frozen=True, slots=True)
class HelloRequest:
    """Asks for a HELLO: the gateway does not know who is speaking."""

    TYPE: ClassVar[int] = 0x06

    def to_bytes(self) -> bytes:
        """The content, without CRC."""
        return bytes((self.TYPE,))

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content. Raises FrameError."""
        if len(content) != 1:
            raise FrameError(Defect.BAD_FIELDS)
        return cls()


@dataclass(frozen=True, slots=True)
class CommandFrame:
    """A command. The sensor carries out a number once, and answers it each time."""

    TYPE: ClassVar[int] = 0x07
    run: int
    """See `Hello.run`."""
    number: int
    payload: bytes

    def to_bytes(self) -> bytes:
        """The content, without CRC. Raises ValueError if a field does not fit."""
        if len(self.payload) > COMMAND_PAYLOAD_BYTES_MAX:
            raise ValueError(f"a command of {len(self.payload)} bytes; at most {COMMAND_PAYLOAD_BYTES_MAX} fit")
        return _pack(_COMMAND, self.TYPE, self.run, self.number) + self.payload

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content. Raises FrameError."""
        if not _COMMAND.size <= len(content) <= GATEWAY_CONTENT_BYTES_MAX:
            raise FrameError(Defect.BAD_FIELDS)
        _, run, number = _COMMAND.unpack_from(content)
        return cls(run, number, content[_COMMAND.size :])


@dataclass(frozen=True, slots=True)
class CommandReply:
    """Answers a command; `result` is `COMMAND_DONE`, or another number if the sensor does not take it."""

    TYPE: ClassVar[int] = 0x08
    run: int
    """See `Hello.run`."""
    number: int
    result: int

    def to_bytes(self) -> bytes:
        """The content, without CRC. Raises ValueError if a field does not fit."""
        return _pack(_COMMAND_REPLY, self.TYPE, self.run, self.number, self.result)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse the content. Raises FrameError."""
        _, run, number, result = _unpack(_COMMAND_REPLY, content)
        return cls(run, number, result)


Frame = Hello | Data | Ack | Probe | Reply | HelloRequest | CommandFrame | CommandReply

_TYPES: dict[int, type[Frame]] = {
    kind.TYPE: kind for kind in (Hello, Data, Ack, Probe, Reply, HelloRequest, CommandFrame, CommandReply)
}
_OF_SENSORS = bytes(kind.TYPE for kind in (Hello, Data, Reply, CommandReply))
_BEGINNING = re.compile(b"[^\x01](?=[" + re.escape(_OF_SENSORS) + b"])", re.DOTALL)
"""The beginning of a sensor's frame: a COBS run that holds at least the type, and a type that sensors send."""


def encode_frame(frame: Frame) -> bytes:
    """The frame on the wire: COBS(content and CRC-32), then the zero that ends it. Raises ValueError."""
    content = frame.to_bytes()
    if len(content) > SENSOR_CONTENT_BYTES_MAX:
        raise ValueError(f"a content of {len(content)} bytes; at most {SENSOR_CONTENT_BYTES_MAX} fit a frame")
    return cobs_encode(content + zlib.crc32(content).to_bytes(_CRC_BYTES, "little")) + DELIMITER


def decode_frame(encoded: bytes) -> Frame:
    """Parse the bytes between two zeros. Raises FrameError."""
    try:
        decoded = cobs_decode(encoded)
    except ValueError as error:
        raise FrameError(Defect.BAD_COBS) from error
    content, crc = decoded[:-_CRC_BYTES], decoded[-_CRC_BYTES:]
    if zlib.crc32(content).to_bytes(_CRC_BYTES, "little") != crc:
        raise FrameError(Defect.BAD_CRC)
    if not content:
        # The CRC-32 of nothing is four zeros, so four zeros alone pass the check.
        raise FrameError(Defect.BAD_FIELDS)
    kind = _TYPES.get(content[0])
    if kind is None:
        raise FrameError(Defect.UNKNOWN_TYPE)
    return kind.from_bytes(content)


class FrameDecoder:
    """Cuts a byte stream into frames. Does no I/O, holds at most two frames, and never raises.

    A piece between two zeros that is no frame is counted in `defects`, once, and skipped. The next zero is a new start.
    Whole frames of a sensor in such a piece still count: noise may stand in front of one, or a zero may be damaged.
    """

    __slots__ = ("_encoded_bytes_max", "_partial", "_too_long", "defects")

    def __init__(self, content_bytes_max: int = SENSOR_CONTENT_BYTES_MAX) -> None:
        plain_bytes_max = content_bytes_max + _CRC_BYTES
        self._encoded_bytes_max = plain_bytes_max + plain_bytes_max // _COBS_RUN_BYTES_MAX + 1
        self._partial = bytearray()
        self._too_long = False
        self.defects: Counter[Defect] = Counter()

    def feed(self, received: bytes) -> list[Frame]:
        """Take in the next bytes, split anywhere; return the frames that they complete."""
        frames: list[Frame] = []
        *ended, begun = received.split(DELIMITER)
        for piece in ended:
            frames += self._extend(piece)
            frames += self._end()
        frames += self._extend(begun)
        return frames

    def _extend(self, piece: bytes) -> list[Frame]:
        frames: list[Frame] = []
        rest = piece
        while rest:
            room = 2 * self._encoded_bytes_max - len(self._partial)
            self._partial += rest[:room]
            rest = rest[room:]
            if len(self._partial) > self._encoded_bytes_max and not self._too_long:
                # Counted here rather than at the zero, so that a line that never sends a zero is seen to be wrong.
                self.defects[Defect.TOO_LONG] += 1
                self._too_long = True
            if len(self._partial) == 2 * self._encoded_bytes_max:
                found = _find_frames(bytes(self._partial), self._encoded_bytes_max)
                frames += found.frames
                # A frame may have begun in the second half.
                del self._partial[: max(found.end, self._encoded_bytes_max)]
        return frames

    def _end(self) -> list[Frame]:
        encoded, too_long = bytes(self._partial), self._too_long
        self._partial.clear()
        self._too_long = False
        if not encoded:
            return []
        if too_long:
            return _find_frames(encoded, self._encoded_bytes_max).frames
        try:
            return [decode_frame(encoded)]
        except FrameError as error:
            frames = _find_frames(encoded, self._encoded_bytes_max).frames
            self.defects[Defect.NOISE if frames else error.defect] += 1
            return frames


class _Found(NamedTuple):
    """Frames that were found in a piece that is no frame as a whole."""

    frames: list[Frame]
    end: int
    """End of the last frame; 0 if there is none."""


def _find_frames(encoded: bytes, encoded_bytes_max: int) -> _Found:
    """Whole frames in a piece without zeros, by their types and CRCs, in a bounded number of steps."""
    frames: list[Frame] = []
    end = steps = 0
    for beginning in _BEGINNING.finditer(encoded):
        if (start := beginning.start()) < end:
            continue
        position, crc = start, 0
        stop = min(start + encoded_bytes_max, len(encoded))
        while steps < _SEARCH_STEPS_MAX and (after := position + encoded[position]) <= stop:
            steps += 1
            crc = zlib.crc32(encoded[position + 1 : after], crc)
            if crc == _CRC_RESIDUE:
                with suppress(FrameError):
                    frames.append(decode_frame(encoded[start:after]))
                    end = after
                break
            if after == stop:
                break
            if encoded[position] <= _COBS_RUN_BYTES_MAX:
                crc = zlib.crc32(DELIMITER, crc)
            position = after
    return _Found(frames, end)


def cobs_encode(plain: bytes) -> bytes:
    """Consistent overhead byte stuffing (Cheshire and Baker, 1999): no zero byte in the result."""
    encoded = bytearray()
    last = len(runs := plain.split(b"\0")) - 1
    for index, run in enumerate(runs):
        rest = run
        while len(rest) >= _COBS_RUN_BYTES_MAX:
            encoded.append(_COBS_RUN_BYTES_MAX + 1)
            encoded += rest[:_COBS_RUN_BYTES_MAX]
            rest = rest[_COBS_RUN_BYTES_MAX:]
        # A full run at the very end implies no zero, so nothing needs to follow it.
        if rest or index < last or not run:
            encoded.append(len(rest) + 1)
            encoded += rest
    return bytes(encoded)


def cobs_decode(encoded: bytes) -> bytes:
    """Undo `cobs_encode`. Raises ValueError if a zero byte stands inside, or a run is cut short."""
    if 0 in encoded:
        raise ValueError("a zero byte inside a COBS block")
    plain = bytearray()
    start = 0
    while start < len(encoded):
        code = encoded[start]
        end = start + code
        if end > len(encoded):
            raise ValueError("a COBS run is cut short")
        plain += encoded[start + 1 : end]
        if code <= _COBS_RUN_BYTES_MAX and end < len(encoded):
            plain.append(0)
        start = end
    return bytes(plain)


def _pack(layout: struct.Struct, *fields: int) -> bytes:
    try:
        return layout.pack(*fields)
    except struct.error as error:
        raise ValueError(f"a field does not fit its frame: {error}") from error


def _unpack(layout: struct.Struct, content: bytes) -> tuple[int, ...]:
    if len(content) != layout.size:
        raise FrameError(Defect.BAD_FIELDS)
    return layout.unpack(content)


def _pack_text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > 255:
        raise ValueError(f"a text of {len(encoded)} bytes; its length has to fit one byte")
    return bytes((len(encoded),)) + encoded


def _split_text(content: bytes) -> tuple[str, bytes]:
    if not content or len(content) < 1 + content[0]:
        raise FrameError(Defect.BAD_FIELDS)
    end = 1 + content[0]
    try:
        return content[1:end].decode(), content[end:]
    except UnicodeDecodeError as error:
        raise FrameError(Defect.BAD_UTF8) from error
