"""The gateway's side of a sensor that a format reads, without I/O: pieces and time in, readings and losses out.

Such a sensor cannot be told that its readings arrived, and does not send them again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from gateway.formats.cutter import FAILED, TOO_LONG, Cut
from gateway.reading import Datum, Reading
from gateway.serial_lines.binary_frames import BinaryFrames, binary_frames
from gateway.serial_lines.changes import Changes
from gateway.serial_lines.frames import FrameDecoder

UNREADABLE_INTERVAL_US = 1_000_000
"""Time between two pieces that are kept for the quarantine. Noise must not fill it, nor wear out the card."""
UNREADABLE_FIRST = 10
UNREADABLE_LATER_INTERVAL_US = 60_000_000
"""Time between two such pieces after UNREADABLE_FIRST. The fault is clear by then, and each uses the uplink too."""
BINARY_BYTES_MAX = 256
"""Newest bytes kept until the first reading, to recognise a binary protocol."""
NOT_READ: Final = frozenset({TOO_LONG, FAILED})
"""Damage that does not show that this is the right format."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings came."""

    readings: tuple[Reading, ...]
    """Those that are to be stored, in their order. There may be none, if nothing moved."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A damaged piece for the quarantine, as it came."""

    payload: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Uncollected:
    """Damaged pieces that are only counted, as they came soon after one that was kept."""

    reason: str
    count: int


FormatEvent = Readings | Unreadable | Uncollected


class FormatLink:
    """One line from the opening of its port to its closing.

    Until the first reading it holds two frames and `BINARY_BYTES_MAX` bytes. All times are CLOCK_BOOTTIME in
    microseconds. No input raises.
    """

    __slots__ = (
        "_changes",
        "_device",
        "_faults",
        "_frames",
        "_has_seen_a_frame",
        "_has_seen_a_piece",
        "_kept",
        "_newest",
        "_noisy",
        "_port",
        "_topic",
        "_unreadable",
        "_unreadable_due_us",
    )

    def __init__(self, port: str, device: str, topic: str, changes: Changes | None = None) -> None:
        """`topic` is the topic that routes see. `changes` leaves out what has not moved."""
        self._changes = changes
        self._port = port
        self._device = device
        self._topic = topic
        # An installer may put a port here that belongs into serial.ports: a frame's CRC shows it.
        self._frames: FrameDecoder | None = FrameDecoder()
        self._has_seen_a_frame = False
        self._has_seen_a_piece = False
        self._newest: bytes | None = b""
        self._kept = 0
        self._noisy = 0
        self._unreadable_due_us = 0
        self._faults: Counter[str] = Counter()
        self._unreadable: Unreadable | None = None

    @property
    def device(self) -> str:
        """The device that the readings are of."""
        return self._device

    @property
    def sends_frames(self) -> bool:
        """Whether a frame of ours has come, and no reading: the sensor is of another kind."""
        return self._has_seen_a_frame

    @property
    def has_seen_a_piece(self) -> bool:
        """Whether a reading has come, or a piece that should have been one."""
        return self._has_seen_a_piece

    @property
    def last_unreadable(self) -> Unreadable | None:
        """The last piece that could not be read."""
        return self._unreadable

    @property
    def noisy(self) -> int:
        """Pieces since the opening with noise in them."""
        return self._noisy

    @property
    def binary_frames(self) -> BinaryFrames | None:
        """The frames of a binary protocol, if they come and no reading has come; else None."""
        return None if self._newest is None else binary_frames(self._newest)

    @property
    def faults(self) -> Counter[str]:
        """Counts of pieces that could not be read since the opening, by reason. None of them comes again."""
        return self._faults.copy()

    def hear(self, data: bytes) -> None:
        """Look in the next bytes, split anywhere, for signs of another kind of sensor."""
        if self._frames is not None and self._frames.feed(data):
            self._has_seen_a_frame = True
        if self._newest is not None:
            self._newest = (self._newest + data)[-BINARY_BYTES_MAX:]

    def take(self, cuts: Iterable[Cut], now_us: int) -> list[FormatEvent]:
        """Take in the next pieces."""
        heard = False
        readings: list[Reading] = []
        unreadable: list[Unreadable] = []
        uncollected: Counter[str] = Counter()
        for cut in cuts:
            heard |= bool(cut.readings)
            readings += [
                Reading(self._topic, self._port, Datum(received_us=now_us, payload=payload))
                for payload in self._moved(cut.readings, now_us)
            ]
            self._noisy += cut.noise
            if cut.readings or (cut.damage and cut.damage not in NOT_READ):
                self._has_seen_a_piece = True
            if not cut.damage:
                continue
            self._faults[cut.damage] += 1
            self._unreadable = Unreadable(cut.piece, cut.damage)
            if now_us >= self._unreadable_due_us:
                self._kept += 1
                often = self._kept < UNREADABLE_FIRST
                pause_us = UNREADABLE_INTERVAL_US if often else UNREADABLE_LATER_INTERVAL_US
                self._unreadable_due_us = now_us + pause_us
                unreadable.append(self._unreadable)
            else:
                uncollected[cut.damage] += 1
        if heard:
            self._frames, self._has_seen_a_frame, self._newest = None, False, None
        taken: list[FormatEvent] = [Readings(tuple(readings))] if heard else []
        return taken + unreadable + [Uncollected(reason, count) for reason, count in uncollected.items()]

    def lose(self) -> None:
        """Send everything anew after readings were lost, as what was sent last did not arrive."""
        if self._changes is not None:
            self._changes.forget()

    def _moved(self, payloads: Iterable[bytes], now_us: int) -> Iterator[bytes]:
        for payload in payloads:
            moved = payload if self._changes is None else self._changes.moved(payload, now_us)
            if moved is not None:
                yield moved
