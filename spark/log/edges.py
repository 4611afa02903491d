"""The time of a record as it was sent, with all that a later time correction needs. It needs no Spark."""

from typing import NamedTuple


class Edge(NamedTuple):
    """The time of a record as it was sent: the columns of `log` that hold it, with times in whole microseconds."""

    event_us: int
    time_error_us: int
    time_quality: str
    gateway: str
    gateway_boot: str
    boot_time_us: int
    boot_time_error_us: int | None


EDGE_COLUMNS = {name: "string" if kind is str else "bigint" for name, kind in Edge.__annotations__.items()}
"""Names and Spark's types of an edge's members."""
EDGE_TYPE = f"struct<{', '.join(f'{name}: {kind}' for name, kind in EDGE_COLUMNS.items())}>"
"""Type of an `Edge` in a table."""
