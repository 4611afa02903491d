"""Finds the gateways that need somebody: what is not well there, and what to do. It needs no Spark."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gateway.condition_codes import CODES, LEVELS, ConditionCode
from spark.finality.gateway_rows import GatewayRow
from spark.finality.gateway_states import GatewayStates

HEARTBEATS_MISSED = 3
"""Heartbeats that do not come before a gateway is called unheard."""
HEARTBEAT_S = 10.0
"""Seconds between two heartbeats of a gateway that does not tell them: the default."""
OLD_US = 300_000_000
"""Age of the newest heartbeat of all gateways from which the tables themselves are in doubt."""
UNHEARD = "gateway-unheard"
"""Code of a gateway whose heartbeats do not come."""
WELL = "well"
"""Level of a gateway that needs nobody."""
_UNHEARD = ConditionCode(
    f"No heartbeat came for {HEARTBEATS_MISSED} intervals.", "See to its power, and its way to Kafka."
)
_UNKNOWN = ConditionCode("This program does not know the code.", "Use a sluice-cloud as new as the gateway.")
IN_TROUBLE = LEVELS[:2]
"""Levels that need somebody. A note needs nobody."""
Registry = Mapping[tuple[str, str], tuple[str | None, int | None]]
"""Site and time of retirement of each registered gateway, by namespace and gateway."""


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


class GatewayNow(NamedTuple):
    """A gateway that is not retired, and what is not well with it."""

    namespace: str
    gateway: str
    buffer: str
    """Its present buffer file. It may have former ones."""
    site: str | None
    heard_us: int | None
    """When Kafka had its newest heartbeat, in microseconds since 1970."""
    depth_rows: int | None
    """Rows that waited in its buffer, by its newest heartbeat that counts."""
    troubles: tuple[Trouble, ...]
    """The worst first."""

    @property
    def level(self) -> str:
        """Level of the worst trouble; WELL if there is none."""
        return self.troubles[0].level if self.troubles else WELL


def heard_us(states: GatewayStates) -> int | None:
    """When Kafka had the newest heartbeat of all gateways that the tables have; None if they have none."""
    return max(filter(None, map(states.heard_us, states.gateways)), default=None)


def is_old(newest_us: int | None, now_us: int) -> bool:
    """Tell whether the newest heartbeat of all gateways is so old that ingest may not run, or if there is none."""
    return newest_us is None or now_us - newest_us > OLD_US


def troubles(states: GatewayStates, registry: Registry) -> list[Trouble]:
    """Return what is not well: gateways with the worst first, and of each gateway the worst first."""
    return [trouble for gateway in gateways_now(states, registry) for trouble in gateway.troubles]


def gateways_now(states: GatewayStates, registry: Registry) -> list[GatewayNow]:
    """Return each gateway that is not retired: those that need somebody first, the worst of them first.

    Heartbeats are compared with the newest one of all gateways, because the tables trail behind Kafka.
    """
    newest_us = heard_us(states) or 0
    found = []
    for row in states.present_rows():
        site, retired_us = registry.get((row.namespace, row.gateway), (None, None))
        if retired_us is None or retired_us > newest_us:
            last_us = states.heard_us((row.namespace, row.gateway))
            told = tuple(_of(states, row, site, last_us, newest_us))
            found.append(GatewayNow(row.namespace, row.gateway, row.buffer, site, last_us, row.depth_rows, told))
    return sorted(found, key=_how_bad)


def _how_bad(gateway: GatewayNow) -> tuple[int, bool, int, str, str]:
    """Worst level first, then gateways that are not heard, then by the number of troubles."""
    found = gateway.troubles
    is_heard = not found or found[0].code != UNHEARD
    level = (*LEVELS, WELL).index(gateway.level)
    return level, is_heard, -len(found), gateway.namespace, gateway.gateway


def _of(
    states: GatewayStates, row: GatewayRow, site: str | None, last_us: int | None, newest_us: int
) -> Iterator[Trouble]:
    key = row.namespace, row.gateway
    told = states.box(*key, row.buffer)

    def trouble(level: str, code: str, words: ConditionCode) -> Trouble:
        return Trouble(*key, site, level, code, words.means, words.todo, last_us)

    interval_s = HEARTBEAT_S if told is None or not told.state.heartbeat_s else told.state.heartbeat_s
    if last_us is None or newest_us - last_us > HEARTBEATS_MISSED * interval_s * 1e6:
        yield trouble(LEVELS[0], UNHEARD, _UNHEARD)
    if told is not None:
        for level in IN_TROUBLE:
            for code in getattr(told.state.conditions, level):
                yield trouble(level, code, CODES.get(code, _UNKNOWN))
