"""The latest time that is known to have passed, whatever this box's clock says."""

from datetime import UTC, datetime

RELEASED_US = int(datetime(2026, 11, 22, tzinfo=UTC).timestamp()) * 1_000_000
"""When this version was released, in microseconds since 1970: nothing that it takes in was measured before."""
