"""Frames of two common dust sensors: Plantower's PMS5003 (also PMS7003 and PMSA003) and Nova's SDS011.

Both send a frame a second unasked, at 9600 baud. A frame begins with fixed bytes, has a fixed length, and holds a sum.
"""

import json
import struct
from abc import ABC, abstractmethod
from typing import ClassVar, Final

from gateway.formats.piece import Piece

CHECKSUM: Final = "frame-checksum"
"""Damage: a frame's sum does not fit."""


class _Frames(ABC):
    """Frames of one length that begin with the same bytes."""

    bytes_max: int
    """Bytes of a frame."""
    _BEGIN: ClassVar[bytes]

    def cut(self, received: bytes) -> Piece | None:
        """See `Format`."""
        start = self._begins(received, 0)
        if start:
            return Piece(start, noise=True)
        frame = received[: self.bytes_max]
        if len(frame) < self.bytes_max:
            return None
        values = self._values(frame)
        if values is not None:
            return Piece(len(frame), (json.dumps(values, separators=(",", ":")).encode(),))
        # If bytes were lost, the next frame begins in this one.
        return Piece(self._begins(frame, 1), damage=CHECKSUM)

    def _begins(self, received: bytes, start: int) -> int:
        """Where a frame begins, or may have just begun; the length of `received` if nowhere."""
        at = received.find(self._BEGIN, start)
        if at >= 0:
            return at
        begun = (n for n in range(len(self._BEGIN) - 1, 0, -1) if received.endswith(self._BEGIN[:n], start))
        return len(received) - next(begun, 0)

    @abstractmethod
    def _values(self, frame: bytes) -> dict[str, object] | None:
        """The values of a frame; None if it is damaged."""


class Sds011(_Frames):
    """SDS011: PM2.5 and PM10 in µg/m³, and the sensor's own number ("Laser Dust Sensor Control Protocol V1.3")."""

    bytes_max = 10
    _BEGIN = b"\xaa\xc0"

    def _values(self, frame: bytes) -> dict[str, object] | None:
        if frame[9] != 0xAB or sum(frame[2:8]) & 0xFF != frame[8]:
            return None
        fine, coarse = struct.unpack_from("<HH", frame, 2)
        return {"pm2_5": fine / 10, "pm10": coarse / 10, "id": frame[6:8].hex().upper()}


class Pms5003(_Frames):
    """PMS5003: mass in µg/m³, and numbers of particles in 0.1 litres of air ("PMS5003 series data manual", appendix I).

    Makers calibrate by the values "CF=1". Those without it are meant for outdoor air.
    """

    bytes_max = 32
    # The length of the rest is a part of the beginning. Thus values seldom look like one.
    _BEGIN = b"\x42\x4d\x00\x1c"
    _MEMBERS: ClassVar = (
        *(f"pm{size}_cf1" for size in ("1_0", "2_5", "10")),
        *(f"pm{size}" for size in ("1_0", "2_5", "10")),
        *(f"above_{size}_um" for size in ("0_3", "0_5", "1_0", "2_5", "5_0", "10")),
    )

    def _values(self, frame: bytes) -> dict[str, object] | None:
        *numbers, version_and_error, told = struct.unpack_from(">14H", frame, 4)
        if sum(frame[:30]) != told:
            return None
        return dict(zip(self._MEMBERS, numbers, strict=True)) | {"error": version_and_error & 0xFF}
