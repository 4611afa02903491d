"""The checksum of NMEA sentences."""

from functools import reduce
from operator import xor


def nmea_checksum(content: bytes) -> int:
    """Exclusive or of all bytes between `$` or `!` and `*` (NMEA 0183 and IEC 61162-1: the checksum field)."""
    return reduce(xor, content, 0)
