"""Rows of `gateways`: each gateway's newest heartbeat that counts."""

from typing import NamedTuple

from spark.log.edges import EDGE_TYPE, Edge

SPAN_TYPE = "struct<lane: string, rows: bigint, from_us: bigint, to_us: bigint>"
SCHEMA = f"""
    namespace string, gateway string, buffer string, heartbeat {EDGE_TYPE}, promises boolean,
    low_watermark_us bigint, pending array<{SPAN_TYPE}>, quarantined array<{SPAN_TYPE}>,
    depth_rows bigint, oldest_age_ms bigint, waiting int, until_us bigint, unread array<string>
"""
"""Columns of a table of `GatewayRow`s."""


class Span(NamedTuple):
    """Event times of rows or inputs that still wait on the gateway. A time of None may be any."""

    lane: str | None
    """None for inputs in the quarantine."""
    rows: int
    from_us: int | None
    to_us: int | None


class GatewayRow(NamedTuple):
    """The newest heartbeat that counts of one buffer file of a gateway."""

    namespace: str
    gateway: str
    buffer: str
    heartbeat: Edge | None = None
    """The heartbeat's time as sent; None if no heartbeat counts yet."""
    promises: bool = False
    """True if the heartbeat has a low watermark. It has none while a clock is unknown or a damaged file is salvaged."""
    low_watermark_us: int | None = None
    pending: tuple[Span, ...] = ()
    quarantined: tuple[Span, ...] = ()
    depth_rows: int | None = None
    oldest_age_ms: int | None = None
    waiting: int = 0
    """Later heartbeats that do not count yet."""
    until_us: int | None = None
    """Time until which a former buffer may have taken readings; None for the present buffer, and for a former one if no
    heartbeat since had a known clock."""
    unread: tuple[str, ...] = ()
    """Kafka topics that the buffer writes to and the job does not read."""
    is_present: bool = True
    """False for a buffer that another one has replaced."""
