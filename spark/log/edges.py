"""The time of a record as it was sent, with all that a later time correction needs. It needs no Spark."""

from typing import NamedTuple

EDGE_TYPE = (
    "struct<event_us: bigint, time_error_us: bigint, time_quality: string, gateway: string, gateway_boot: string, "
    "boot_time_us: bigint, boot_time_error_us: bigint>"
)
"""Type of an `Edge` in a table."""


class Edge(NamedTuple):
    """The time of a record as it was sent: the columns of `log` that hold it, with times in whole microseconds."""

    event_us: int
    time_error_us: int
    time_quality: str
    gateway: str
    gateway_boot: str
    boot_time_us: int
    boot_time_error_us: int | None
