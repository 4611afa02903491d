"""`devices_heard`: of each stream of a device, which gateways ever brought it, and when its last reading was taken."""

from pyspark.sql import Row, SparkSession

from spark.ingest.census import Census
from spark.log.state_table import StateTable

StreamKey = tuple[str, str, str]
"""Namespace, device, stream."""
Heard = tuple[frozenset[str], int | None]
"""Gateways; the event time of the last reading that belongs to a window, in microseconds since 1970, as it was sent."""


def heard_path(tables: str) -> str:
    """Return where the table lies."""
    return f"{tables}/devices_heard"


class DevicesHeard:
    """In the driver's memory, and now and then in a table."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._table: StateTable[StreamKey, Heard] = StateTable(
            spark,
            heard_path(tables),
            key=("namespace", "device", "stream"),
            columns="gateways array<string>, last_us bigint",
            decode=_heard_of,
            encode=lambda heard: (sorted(heard[0]), heard[1]),
        )

    @property
    def saved(self) -> int:
        return self._table.saved

    def note(self, census: Census) -> None:
        """Take up what a batch holds. Doing it again changes nothing."""
        for namespace, device, stream, gateway, last_us in census.heard:
            key = (namespace, device, stream)
            gateways, before_us = self._table.states.get(key, (frozenset[str](), None))
            later = max((us for us in (before_us, last_us) if us is not None), default=None)
            heard = (gateways | {gateway}, later)
            if heard != self._table.states.get(key):
                self._table.states[key] = heard
                self._table.changed(key)

    def save(self, ordinal: int) -> None:
        self._table.save(ordinal)


def _heard_of(row: Row) -> Heard:
    return frozenset(row.gateways), row.last_us
