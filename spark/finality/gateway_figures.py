"""Figures of the view `gateways`, from a gateway's heartbeat and its clock as it is known now. It needs no Spark."""

from typing import NamedTuple

from spark.finality.gateway_rows import GatewayRow
from spark.log.edge_times import Clocks


class GatewayFigures(NamedTuple):
    """A row of `gateways`. Times are in microseconds since 1970.

    `heartbeat_us` has today's knowledge of the gateway's clock. Up to `complete_to_us` the tables lack only what the
    gateway says that it holds: `pending` rows and `quarantined` inputs. `waiting` counts heartbeats about records that
    were not read yet. `unread_topics`: topics that it writes to and `ingest` leaves out.
    """

    namespace: str
    gateway: str
    site: str | None
    buffer: str
    is_present: bool
    gateway_boot: str | None
    heartbeat_us: int | None
    heartbeat_error_us: int | None
    complete_to_us: int | None
    depth_rows: int | None
    oldest_age_s: float | None
    pending: int | None
    quarantined: int | None
    waiting: int
    retired_from_us: int | None
    unread_topics: list[str]


def figures_of(row: GatewayRow, clocks: Clocks, site: str | None, retired_from_us: int | None) -> GatewayFigures:
    """Return the figures of one buffer file. `site` and `retired_from_us` are the registry's."""
    beat = row.heartbeat
    at = None if beat is None else clocks.of(row.namespace, beat)
    bounded = at is not None and at.earliest_us() > 0
    return GatewayFigures(
        *(row.namespace, row.gateway, site, row.buffer),
        is_present=row.is_present,
        gateway_boot=None if beat is None else beat.gateway_boot,
        heartbeat_us=None if at is None or not bounded else at.us,
        heartbeat_error_us=None if at is None else at.error_us,
        complete_to_us=at.earliest_us() if at is not None and bounded and row.promises else None,
        depth_rows=row.depth_rows,
        oldest_age_s=None if row.oldest_age_ms is None else row.oldest_age_ms / 1_000,
        pending=None if beat is None else sum(span.rows for span in row.pending),
        quarantined=None if beat is None else sum(span.rows for span in row.quarantined),
        waiting=row.waiting,
        retired_from_us=retired_from_us,
        unread_topics=list(row.unread),
    )
