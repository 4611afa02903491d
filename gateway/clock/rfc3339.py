"""Formats wall times as in RFC 3339."""

from datetime import UTC, datetime
from functools import lru_cache

_EARLIEST_US = int(datetime(1, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
_LATEST_US = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()) * 1_000_000


def rfc3339(wall_us: int) -> bytes:
    """UTC in RFC 3339 with microseconds, from microseconds since 1970; clamped to the years 1 to 9999."""
    if not _EARLIEST_US <= wall_us <= _LATEST_US:
        wall_us = min(max(wall_us, _EARLIEST_US), _LATEST_US)
    return b"%b.%06dZ" % (_whole_seconds(wall_us // 1_000_000), wall_us % 1_000_000)


# Many readings share a second, so the date is formatted once for each second.
@lru_cache(maxsize=1024)
def _whole_seconds(wall_s: int) -> bytes:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S").rjust(19, "0").encode()
