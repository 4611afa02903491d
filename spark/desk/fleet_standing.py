"""Finds how gateways stand to a fleet's file: who has what it wants, who waits, and who went back and why."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.fleet_file import Fleet, Group
from spark.desk.evidence import Evidence
from spark.finality.box_states import BoxState, FleetState
from spark.finality.gateway_troubles import HEARTBEATS_MISSED, UNHEARD, gateways_now

UNKNOWN: Final = "unknown"
"""Standing of a gateway that the file names and the tables do not have."""
UNSEEN: Final = "unseen"
"""Standing of a gateway that has not taken in the file yet."""
NOT_DRAWN: Final = "not-drawn"
"""Standing of a gateway that is not in its group's share."""
SILENT: Final = "silent"
"""Standing of a gateway whose heartbeats do not come."""
TROUBLES: Final = frozenset({"went-back", "going-back", "refused"})
"""Standings that need somebody."""


class Standing(NamedTuple):
    """How one gateway stands to the file."""

    namespace: str
    gateway: str
    group: str
    standing: str
    """A result of `sluice fleet pull`, or one of the words above."""
    version: str | None
    """Version that the gateway last told."""
    wanted: str | None
    """Version that its group wants."""
    reason: str | None
    """Why, in the gateway's words."""

    @property
    def name(self) -> str:
        """The gateway as the file names it."""
        return f"{self.namespace}/{self.gateway}"


COLUMNS: Final = dict.fromkeys(Standing._fields, "VARCHAR")
"""Columns of a table of `Standing`s in DuckDB."""


def standings(fleet: Fleet, evidence: Evidence) -> list[Standing]:
    """Return how each gateway of the file's groups stands, those that need somebody first.

    Gateways that are retired now are left out.
    """
    order = {group.name: number for number, group in enumerate(fleet.groups)}

    def place(each: Standing) -> tuple[bool, int, str, str]:
        return each.standing not in TROUBLES, order[each.group], each.namespace, each.gateway

    return sorted(_each(fleet, evidence), key=place)


def _each(fleet: Fleet, evidence: Evidence) -> Iterator[Standing]:
    heard = set()
    for now in gateways_now(evidence.states, evidence.registry):
        group = fleet.group_of(name := f"{now.namespace}/{now.gateway}")
        heard.add(name)
        if group is None:
            continue
        told = evidence.states.box(now.namespace, now.gateway, now.buffer)
        standing, reason = _standing(fleet, group, name, None if told is None else told.state)
        if standing in {"good", UNSEEN} and any(trouble.code == UNHEARD for trouble in now.troubles):
            standing, reason = SILENT, f"no heartbeat came for {HEARTBEATS_MISSED} intervals; before that, {standing}"
        version = None if told is None else told.state.version
        yield Standing(now.namespace, now.gateway, group.name, standing, version, group.version, reason)
    for group in fleet.groups:
        for name in group.gateways:
            if not set("*?") & set(name) and name not in heard and fleet.group_of(name) is group:
                namespace, _, gateway = name.partition("/")
                yield Standing(namespace, gateway, group.name, UNKNOWN, None, group.version, None)


def _standing(fleet: Fleet, group: Group, name: str, state: BoxState | None) -> tuple[str, str | None]:
    told = FleetState() if state is None or state.fleet is None else state.fleet
    # Who tried it has tried it, also if the share was lowered later.
    if told.wish == group.wish and (told.result in {"good", *TROUBLES} or group.is_drawn(name)):
        # Why it went back stays true when the folder is dead later.
        return told.result or UNSEEN, "; ".join(filter(None, (told.reason, told.trouble))) or None
    if not group.is_drawn(name):
        return NOT_DRAWN, told.trouble
    if state is not None and state.fleet is None:
        return UNSEEN, "it looks at no folder: its settings have no section [fleet]"
    seen = None if told.serial is None else f"it has taken in number {told.serial}, and this is {fleet.serial}"
    return UNSEEN, told.trouble or seen
