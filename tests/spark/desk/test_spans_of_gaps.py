"""Gaps and losses by span and site: all are shown that may have happened then and there."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pytest
from deltalake import write_deltalake

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.desk.asked import Asked, microseconds
from spark.desk.evidence import Device, Evidence, Loss
from spark.desk.tables import Tables
from spark.finality.gateway_states import GatewayStates
from spark.finality.stream_proofs import DeviceIsland, DeviceLoss, Sites
from spark.log.edges import Edge

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)
MINUTE_US = 60_000_000


def edge(minute: int, error_us: int = 0) -> Edge:
    """A reading so many minutes after noon."""
    us = microseconds(NOON + timedelta(minutes=minute))
    return Edge(us, error_us, "estimated", "gw-1", "boot", minute * MINUTE_US, None)


def island(first: int, first_edge: Edge, last_edge: Edge) -> DeviceIsland:
    return DeviceIsland("thermo", "", "7-1a2b", first, first + 1, first_edge, last_edge)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """A warehouse where device 42 was moved from `north` to `south` at 12:10."""
    with duckdb.connect() as db:
        moved = db.sql("""SELECT 'plant' AS namespace, '42' AS device, site, valid_from, valid_to FROM (VALUES
            ('north', NULL, TIMESTAMPTZ '2026-03-14 12:10:00Z'), ('south', TIMESTAMPTZ '2026-03-14 12:10:00Z', NULL)
            ) AS t(site, valid_from, valid_to)""")
        write_deltalake((tmp_path / "devices").as_uri(), moved)
    return Tables(str(tmp_path))


def evidence(after: Edge, before: Edge) -> Evidence:
    """Number 2 of device 42 is missing between two readings, and one reading without a number is lost."""
    runs = {Device("plant", "42"): [island(0, after, after), island(3, before, before)]}
    told = edge(30)
    loss = DeviceLoss(
        *("gw-1", True, "buffer-full", 1, None, None, None, "boot", after.boot_time_us, before.boot_time_us),
        *(told.event_us, 0, "boot", told.boot_time_us),
    )
    return Evidence(GatewayStates({}), Sites(), {}, runs, [Loss("plant", "42", loss)], {}, {})


def span(since: int, until: int) -> Asked:
    """A span in minutes after noon."""
    from_us, to_us = (microseconds(NOON + timedelta(minutes=minute)) for minute in (since, until))
    return Asked(since_us=from_us, until_us=to_us)


@pytest.mark.parametrize(
    ("after", "before", "asked", "is_shown"),
    [
        (edge(1), edge(4), span(2, 3), True),
        (edge(1), edge(4), span(5, 6), False),
        # Its time is known to three minutes only.
        (edge(1), edge(4, 3 * MINUTE_US), span(5, 6), True),
        (edge(1), edge(4, TIME_ERROR_UNKNOWN_US), span(50, 60), True),
        (edge(1, TIME_ERROR_UNKNOWN_US), edge(4), span(-60, -50), True),
        (edge(1), edge(4), Asked(site="south"), False),
        # It was moved meanwhile.
        (edge(1), edge(14), Asked(site="north"), True),
        (edge(1), edge(14), Asked(site="south"), True),
        (edge(1), edge(4, TIME_ERROR_UNKNOWN_US), Asked(site="south"), True),
    ],
)
def test_a_gap_is_shown_where_it_may_have_happened(
    tables: Tables, after: Edge, before: Edge, asked: Asked, *, is_shown: bool
) -> None:
    found = tables.source.db.sql(tables.gaps_sql(evidence(after, before), asked))
    assert found.project("first, last").fetchall() == [(2, 2)] * is_shown
    assert "from_time" not in found.columns


@pytest.mark.parametrize(("last", "sites"), [(4, ["north"]), (14, ["north", "south"])])
def test_a_loss_is_shown_at_each_site_where_it_may_have_happened(tables: Tables, last: int, sites: list[str]) -> None:
    known = evidence(edge(1), edge(last))
    found = [tables.losses_sql(known, Asked(site=site)) for site in ("north", "south")]
    assert [site for site, query in zip(("north", "south"), found, strict=True) if tables.source.rows(query)] == sites
