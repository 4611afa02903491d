"""The gateway's side of a sensor that writes lines of text, without I/O: bytes and time in, readings out.

Such a sensor cannot be told that its readings arrived, and does not send them again.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gateway.intake.payload_json import BYTE_ORDER_MARK
from gateway.reading import Datum, Reading
from gateway.serial_lines.binary_frames import BinaryFrames, binary_frames
from gateway.serial_lines.frames import FrameDecoder
from gateway.serial_lines.text_formats import NOISE, LineError, holds_sentences, line_reader, proves_itself
from gateway.serial_lines.topic import topic_of
from gateway.settings import SerialTextSettings

UNREADABLE_INTERVAL_US = 1_000_000
"""Time between two lines that are kept for the quarantine. Noise must not fill it, nor wear out the card."""
UNREADABLE_FIRST = 10
UNREADABLE_LATER_INTERVAL_US = 60_000_000
"""Time between two such lines after UNREADABLE_FIRST. The fault is clear by then, and each line uses the uplink too."""
TOO_LONG = "line-too-long"
BINARY_BYTES_MAX = 256
"""Newest bytes kept until the first reading, to recognise a binary protocol."""

# Devices end their lines with padding, NULs of breaks on the line, or STX and ETX around them.
_AROUND_LINES = bytes((*range(9), 11, 12, *range(14, 27), *range(28, 32), 127))
_BLANK = _AROUND_LINES + b" \t"
# An adapter reads this byte when a line turns around, and when it wakes. No text in UTF-8 has it. Glued to a name or a
# value, it would change them. Sentences are told from any noise.
_IDLE = b"\xff"


@dataclass(frozen=True, slots=True)
class TextReadings:
    """Readings to be stored, in the order of their lines."""

    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line for the quarantine, as it came."""

    payload: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Uncollected:
    """Unreadable lines that are only counted, as they came soon after one that was kept."""

    reason: str
    count: int


TextEvent = TextReadings | Unreadable | Uncollected


class TextLink:
    """One line from the opening of its port to its closing.

    Holds at most `line_bytes_max` bytes. Until the first reading it also holds two frames and `BINARY_BYTES_MAX` bytes.
    All times are CLOCK_BOOTTIME in microseconds. No input raises.
    """

    __slots__ = (
        "_device",
        "_faults",
        "_frames",
        "_has_seen_a_frame",
        "_holds_sentences",
        "_joined",
        "_kept",
        "_line_bytes_max",
        "_newest",
        "_noisy",
        "_partial",
        "_port",
        "_proves_itself",
        "_read_line",
        "_refused",
        "_skipping",
        "_topic",
        "_unreadable_due_us",
    )

    def __init__(self, port: str, settings: SerialTextSettings, topic: str) -> None:
        """`topic` is `serial.topic`: the template with `{device}` and `{stream}`."""
        self._port = port
        self._device = settings.device
        self._topic = topic_of(topic, settings.device, settings.stream)
        self._line_bytes_max = settings.line_bytes_max
        self._read_line = line_reader(settings)
        self._proves_itself = proves_itself(settings)
        self._holds_sentences = holds_sentences(settings)
        # An installer may put a port here that belongs into serial.ports: a frame's CRC shows it.
        self._frames: FrameDecoder | None = FrameDecoder()
        self._has_seen_a_frame = False
        self._newest: bytes | None = b""
        self._partial = bytearray()
        self._joined = False
        self._skipping = False
        self._kept = 0
        self._noisy = 0
        self._unreadable_due_us = 0
        self._faults: Counter[str] = Counter()
        self._refused: Unreadable | None = None

    @property
    def has_seen_a_line(self) -> bool:
        """Whether the end of a line has come."""
        return self._joined

    @property
    def sends_frames(self) -> bool:
        """Whether a frame of ours has come, and no reading: the sensor writes no text."""
        return self._has_seen_a_frame

    @property
    def last_unreadable(self) -> Unreadable | None:
        """The last line that could not be read."""
        return self._refused

    @property
    def noisy(self) -> int:
        """Lines since the opening with noise in them: see `NOISE`."""
        return self._noisy

    @property
    def binary_frames(self) -> BinaryFrames | None:
        """The frames of a binary protocol, if they come and no reading has come; else None."""
        return None if self._newest is None else binary_frames(self._newest)

    @property
    def device(self) -> str:
        """The device that the readings are of."""
        return self._device

    @property
    def faults(self) -> Counter[str]:
        """Counts of lines that could not be read since the opening, by reason. None of them comes again."""
        return self._faults.copy()

    def receive(self, data: bytes, now_us: int) -> list[TextEvent]:
        """Take in the next bytes, split anywhere."""
        readings: list[Reading] = []
        unreadable: list[Unreadable] = []
        if self._frames is not None and self._frames.feed(data):
            self._has_seen_a_frame = True
        if self._newest is not None:
            self._newest = (self._newest + data)[-BINARY_BYTES_MAX:]
        uncollected: Counter[str] = Counter()
        for cut in self._cut(data):
            try:
                for payload in self._payloads(cut):
                    datum = Datum(received_us=now_us, payload=payload)
                    readings.append(Reading(self._topic, self._port, datum))
            except LineError as error:
                # The line was joined in the middle, or was reported when it became too long.
                if cut.untold:
                    continue
                if error.reason == NOISE:
                    self._noisy += 1
                    continue
                self._faults[error.reason] += 1
                self._refused = Unreadable(cut.line, error.reason)
                if now_us >= self._unreadable_due_us:
                    self._kept += 1
                    often = self._kept < UNREADABLE_FIRST
                    pause_us = UNREADABLE_INTERVAL_US if often else UNREADABLE_LATER_INTERVAL_US
                    self._unreadable_due_us = now_us + pause_us
                    unreadable.append(self._refused)
                else:
                    uncollected[error.reason] += 1
        if readings:
            self._frames, self._has_seen_a_frame, self._newest = None, False, None
        taken: list[TextEvent] = [TextReadings(tuple(readings))] if readings else []
        return taken + unreadable + [Uncollected(reason, count) for reason, count in uncollected.items()]

    def _payloads(self, cut: "_Cut") -> Iterator[bytes]:
        # If the port was opened in the middle of a line, the missing front was never ours.
        if self._holds_sentences or not (cut.too_long or (cut.untold and not self._proves_itself)):
            try:
                line = _bare(cut.line)
                yield from self._read_line(line if self._holds_sentences else line.strip(_IDLE))
            except LineError:
                if not cut.too_long:
                    raise
        if cut.too_long:
            raise LineError(TOO_LONG)

    def _cut(self, data: bytes) -> Iterator["_Cut"]:
        """Lines that end in these bytes, without blank ones, and parts of a line that becomes too long in them."""
        *ended, begun = data.replace(b"\r", b"\n").split(b"\n")
        for piece in ended:
            yield from self._extend(piece)
            line = bytes(self._partial)
            untold, self._joined = self._skipping or not self._joined, True
            self._partial.clear()
            self._skipping = False
            if _bare(line).strip(_IDLE).strip():
                yield _Cut(line, untold=untold)
        yield from self._extend(begun)

    def _extend(self, piece: bytes) -> Iterator["_Cut"]:
        if self._skipping and not self._holds_sentences:
            return
        room = self._line_bytes_max - len(self._partial)
        self._partial += piece[:room]
        while len(piece) > room:
            piece = piece[room:]
            # Reported now rather than at the line's end, so that a line that never ends is seen to be wrong.
            line = bytes(self._partial)
            end = self._end_of_part(line)
            yield _Cut(line[:end], untold=self._skipping, too_long=not self._skipping)
            self._skipping = True
            self._partial.clear()
            if not self._holds_sentences:
                return
            # Whole sentences in a line that is too long still count.
            self._partial += line[end:]
            room = self._line_bytes_max - len(self._partial)
            self._partial += piece[:room]

    def _end_of_part(self, line: bytes) -> int:
        """End of a part of a line that is too long: in front of a sentence that may have just begun."""
        begun = max(line.rfind(b"$"), line.rfind(b"!")) if self._holds_sentences else 0
        return begun if begun > 0 else len(line)


class _Cut(NamedTuple):
    """A line that was cut out of the stream, or a part of one."""

    line: bytes
    """The line without its end, or a part of a line that is too long."""
    untold: bool = False
    """Whether it is no fault if it cannot be read: it may have begun before the port was opened, or it is a later part
    of a line that is too long."""
    too_long: bool = False
    """Whether it is the first part of a line that is too long."""


def _bare(line: bytes) -> bytes:
    """A line without the bytes that devices write around it."""
    # A file of lines in UTF-8 may begin with a byte order mark, and each start of a sketch writes one anew.
    return line.strip(_AROUND_LINES).removeprefix(BYTE_ORDER_MARK).strip(_AROUND_LINES)
