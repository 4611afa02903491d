"""Reads what gateways told of their state within the last days, as far as it changed."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import msgspec

from gateway.condition_codes import LEVELS
from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.decode.record_types import STATE_TYPE
from spark.desk.asked import may_hold, text
from spark.desk.delta_source import Source
from spark.desk.log_views import ALSO, CUT_US
from spark.desk.row_text import fetched
from spark.finality.box_states import read_state
from spark.finality.gateway_troubles import UNHEARD, WELL
from spark.log.edge_times import Clocks
from spark.log.edges import Edge

DAY_US = 86_400_000_000
HISTORY_DAYS = 7
SILENT_US = 2 * 3_600_000_000
"""Time without a state, which comes once an hour, after which a gateway told nothing."""
Key = tuple[str, str]
"""Namespace and name of a gateway."""


class Then(NamedTuple):
    """What held of a gateway from a moment on, in microseconds since 1970."""

    from_us: int
    level: str
    """That of the worst condition, WELL, or UNHEARD if it told nothing."""
    version: str | None = None
    conditions: tuple[str, ...] = ()

    @property
    def lasting(self) -> tuple[object, ...]:
        """All but the moment."""
        return self[1:]


def read_history(
    source: Source, tables: str, clocks: Clocks, until_us: int, wanted: Sequence[Key]
) -> dict[Key, list[Then]]:
    """Return the changes of the wanted gateways within HISTORY_DAYS before `until_us`, the oldest first."""
    since_us = until_us - HISTORY_DAYS * DAY_US
    files = f'{may_hold("ce_type", STATE_TYPE)} AND epoch_us("max.kafka_timestamp") >= {since_us - CUT_US}'
    log = source.table(f"{tables}/log", ALSO, files)
    edge = "epoch_us(event_time), time_error_us, time_quality, gateway, gateway_boot, boot_time_us, boot_time_error_us"
    keys = source.values({"namespace": "VARCHAR", "gateway": "VARCHAR"}, wanted)
    states = source.db.sql(
        f"""SELECT namespace, gateway, epoch_us(kafka_timestamp), value, {edge}
        FROM ({log}) SEMI JOIN ({keys}) USING (namespace, gateway)
        WHERE ce_type = {text(STATE_TYPE)} AND reject_reason IS NULL AND NOT duplicate
            AND kafka_timestamp >= make_timestamp({since_us})
        ORDER BY namespace, gateway"""
    )
    # One gateway's states are in memory at a time, and there may be thousands of gateways.
    by_gateway = groupby(fetched(source.db, states), lambda row: (row[0], row[1]))
    return {key: _changes(sorted(_told(rows, clocks)), since_us, until_us) for key, rows in by_gateway}


def _told(rows: Iterable[tuple[Any, ...]], clocks: Clocks) -> Iterator[Then]:
    for namespace, _, kafka_us, value, *columns in rows:
        sent = Edge(*columns)
        try:
            state = read_state(sent, value).state
        except (msgspec.DecodeError, UnicodeDecodeError):
            # The log of an earlier release may hold some as good.
            continue
        at = clocks.of(namespace, sent)
        by_level = {level: getattr(state.conditions, level) for level in LEVELS}
        level = next((level for level in LEVELS if by_level[level]), WELL)
        codes = tuple(code for level in LEVELS for code in by_level[level])
        at_us = at.us if at.error_us < TIME_ERROR_UNKNOWN_US else kafka_us
        yield Then(at_us, level, state.version, codes)


def _changes(told: Iterable[Then], since_us: int, until_us: int) -> list[Then]:
    """Leave out states that changed nothing, and put in when none came."""
    within = [each for each in told if since_us <= each.from_us <= until_us]
    found = within[:1]
    for before, after in pairwise(within):
        if after.from_us - before.from_us > SILENT_US:
            found += [Then(before.from_us + SILENT_US, UNHEARD), after]
        elif after.lasting != before.lasting:
            found.append(after)
    return found
