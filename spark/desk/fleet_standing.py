"""Finds how gateways stand to a fleet's file: who has what it wants, who waits, and who went back and why."""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from gateway.fleet_file import Fleet, Group
from spark.desk.evidence import Evidence
from spark.finality.box_states import BoxState, FleetState

UNKNOWN: Final = "unknown"
"""Standing of a gateway that the file names and the tables do not have."""
UNSEEN: Final = "unseen"
"""Standing of a gateway that has not taken in the file yet."""
NOT_DRAWN: Final = "not-drawn"
"""Standing of a gateway that is not in its group's share."""
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


def standings(fleet: Fleet, evidence: Evidence, now_us: int) -> list[Standing]:
    """Return how each gateway of the file's groups stands, those that need somebody first.

    Gateways that are retired now are left out.
    """
    order = {group.name: number for number, group in enumerate(fleet.groups)}

    def place(each: Standing) -> tuple[bool, int, str, str]:
        return each.standing not in TROUBLES, order[each.group], each.namespace, each.gateway

    return sorted(_each(fleet, evidence, now_us), key=place)


def holding_up(fleet: Fleet, told: Iterable[Standing]) -> dict[str, list[Standing]]:
    """Return by group the gateways of its share that do not have what it wants: they hold up a larger share."""
    groups = {group.name: group for group in fleet.groups}
    found: dict[str, list[Standing]] = {name: [] for name in groups}
    for each in told:
        if each.standing != "good" and groups[each.group].is_drawn(each.name):
            found[each.group].append(each)
    return found


def _each(fleet: Fleet, evidence: Evidence, now_us: int) -> Iterator[Standing]:
    heard = set()
    for row in evidence.states.rows():
        _, retired_us = evidence.registry.get((row.namespace, row.gateway), (None, None))
        group = fleet.group_of(name := f"{row.namespace}/{row.gateway}")
        heard.add(name)
        if group is None or row.until_us is not None or (retired_us is not None and retired_us <= now_us):
            continue
        told = evidence.states.box(row.namespace, row.gateway, row.buffer)
        standing, reason = _standing(fleet, group, name, None if told is None else told.state)
        version = None if told is None else told.state.version
        yield Standing(row.namespace, row.gateway, group.name, standing, version, group.version, reason)
    for group in fleet.groups:
        for name in group.gateways:
            if not set("*?") & set(name) and name not in heard and fleet.group_of(name) is group:
                namespace, _, gateway = name.partition("/")
                yield Standing(namespace, gateway, group.name, UNKNOWN, None, group.version, None)


def _standing(fleet: Fleet, group: Group, name: str, state: BoxState | None) -> tuple[str, str | None]:
    told = FleetState() if state is None or state.fleet is None else state.fleet
    if told.wish == group.wish and (told.result == "good" or group.is_drawn(name)):
        # Why it went back stays true when the folder is dead later.
        return told.result or UNSEEN, "; ".join(filter(None, (told.reason, told.trouble))) or None
    if not group.is_drawn(name):
        return NOT_DRAWN, told.trouble
    if state is not None and state.fleet is None:
        return UNSEEN, "it looks at no folder: its settings have no section [fleet]"
    seen = None if told.serial is None else f"it has taken in number {told.serial}, and this is {fleet.serial}"
    return UNSEEN, told.trouble or seen
