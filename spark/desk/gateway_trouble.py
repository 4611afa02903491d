"""Finds the gateways that need somebody: what is not well there, and what to do."""

from collections.abc import Iterator
from typing import NamedTuple

from gateway.condition_codes import CODES, LEVELS, ConditionCode
from spark.desk.evidence import Evidence
from spark.finality.gateway_rows import GatewayRow

HEARTBEATS_MISSED = 3
"""Heartbeats that do not come before a gateway is called unheard."""
HEARTBEAT_S = 10.0
"""Seconds between two heartbeats of a gateway that does not tell them: the default."""
OLD_US = 300_000_000
"""Age of the newest heartbeat of all gateways from which the tables themselves are in doubt."""
UNHEARD = "gateway-unheard"
"""Code of a gateway whose heartbeats do not come."""
_UNHEARD = ConditionCode(
    f"No heartbeat came for {HEARTBEATS_MISSED} intervals.", "See to its power, and its way to Kafka."
)
_UNKNOWN = ConditionCode("This program does not know the code.", "Use a sluice-cloud as new as the gateway.")
_IN_TROUBLE = LEVELS[:2]
"""Levels that need somebody. A note needs nobody."""


class Trouble(NamedTuple):
    """One thing that is not well with a gateway. Times are in microseconds since 1970."""

    namespace: str
    gateway: str
    site: str | None
    level: str
    code: str
    means: str
    todo: str
    heard_us: int | None
    """When Kafka had its newest heartbeat."""


COLUMNS = {name: "BIGINT" if name.endswith("_us") else "VARCHAR" for name in Trouble._fields}
"""Columns of a table of `Trouble`s in DuckDB."""


def heard_us(evidence: Evidence) -> int | None:
    """When Kafka had the newest heartbeat of all gateways that the tables have; None if they have none."""
    return max(filter(None, map(evidence.states.heard_us, evidence.states.gateways)), default=None)


def troubles(evidence: Evidence) -> list[Trouble]:
    """Return what is not well: gateways with the worst first, and of each gateway the worst first.

    Heartbeats are compared with the newest one of all gateways, because the tables trail behind Kafka.
    """
    newest_us = heard_us(evidence) or 0
    by_gateway: dict[tuple[str, str], list[Trouble]] = {}
    for row in evidence.states.rows():
        _, retired_us = evidence.registry.get((row.namespace, row.gateway), (None, None))
        if row.until_us is None and (retired_us is None or retired_us > newest_us):
            by_gateway.setdefault((row.namespace, row.gateway), []).extend(_of(evidence, row, newest_us))
    found = [found for found in by_gateway.values() if found]
    return [trouble for of_gateway in sorted(found, key=_how_bad) for trouble in of_gateway]


def _how_bad(found: list[Trouble]) -> tuple[int, bool, int, str, str]:
    """Worst level first, then gateways that are not heard, then by the number of troubles."""
    worst = found[0]
    return LEVELS.index(worst.level), worst.code != UNHEARD, -len(found), worst.namespace, worst.gateway


def _of(evidence: Evidence, row: GatewayRow, newest_us: int) -> Iterator[Trouble]:
    key = row.namespace, row.gateway
    site, _ = evidence.registry.get(key, (None, None))
    last_us = evidence.states.heard_us(key)
    told = evidence.states.box(*key, row.buffer)

    def trouble(level: str, code: str, words: ConditionCode) -> Trouble:
        return Trouble(*key, site, level, code, words.means, words.todo, last_us)

    interval_s = HEARTBEAT_S if told is None or not told.state.heartbeat_s else told.state.heartbeat_s
    if last_us is None or newest_us - last_us > HEARTBEATS_MISSED * interval_s * 1e6:
        yield trouble(LEVELS[0], UNHEARD, _UNHEARD)
    if told is not None:
        for level in _IN_TROUBLE:
            for code in getattr(told.state.conditions, level):
                yield trouble(level, code, CODES.get(code, _UNKNOWN))
