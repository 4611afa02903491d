"""`gateways`: what each gateway last said of itself that counts."""

from typing import NamedTuple

from spark.log.sequence_runs import EDGE_TYPE, Edge

SPAN_TYPE = "struct<lane: string, rows: bigint, from_us: bigint, to_us: bigint>"
SCHEMA = f"""
    namespace string, gateway string, buffer string, heartbeat {EDGE_TYPE}, promises boolean,
    low_watermark_us bigint, pending array<{SPAN_TYPE}>, quarantined array<{SPAN_TYPE}>,
    depth_rows bigint, oldest_age_ms bigint, waiting int, until_us bigint, unread array<string>
"""
"""Of `GatewayRow`s as a table."""


class Span(NamedTuple):
    """Event times of what still waits on the gateway; null: they may be any."""

    lane: str | None
    """Null of what is in the quarantine."""
    rows: int
    from_us: int | None
    to_us: int | None


class GatewayRow(NamedTuple):
    """What one buffer file of a gateway last said that counts."""

    namespace: str
    gateway: str
    buffer: str
    heartbeat: Edge | None = None
    """Its time, as it was sent; None while none counts."""
    promises: bool = False
    """Whether it says what is complete: not while a clock is unknown, or a damaged file is being salvaged."""
    low_watermark_us: int | None = None
    pending: tuple[Span, ...] = ()
    quarantined: tuple[Span, ...] = ()
    depth_rows: int | None = None
    oldest_age_ms: int | None = None
    waiting: int = 0
    """Heartbeats after it that do not count yet."""
    until_us: int | None = None
    """Up to when a former buffer can have taken readings; None of the present one."""
    unread: tuple[str, ...] = ()
    """Kafka topics that it writes to, and that the job leaves out."""
