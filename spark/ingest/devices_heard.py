"""Keeps the table `devices_heard`: the gateways that ever brought each device's stream, and its last reading's time."""

from pyspark.sql import SparkSession

from spark.ingest.census import Census
from spark.log.state_table import StateTable

StreamKey = tuple[str, str, str]
"""Namespace, device and stream."""
Heard = tuple[frozenset[str], int | None]
"""Gateways, and the event time as sent of the last reading in a window, in microseconds since 1970."""


def heard_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/devices_heard"


class DevicesHeard(StateTable[StreamKey, Heard]):
    """The devices heard in the driver's memory, saved now and then to the table."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        super().__init__(
            spark,
            heard_path(tables),
            key=("namespace", "device", "stream"),
            columns="gateways array<string>, last_us bigint",
            decode=lambda row: (frozenset(row.gateways), row.last_us),
            encode=lambda heard: (sorted(heard[0]), heard[1]),
        )

    def add_batch(self, census: Census) -> None:
        """Take up a batch's streams. To take them up again changes nothing."""
        for namespace, device, stream, gateway, last_us in census.heard:
            key = (namespace, device, stream)
            gateways, before_us = self.states.get(key, (frozenset[str](), None))
            later = max((us for us in (before_us, last_us) if us is not None), default=None)
            self.put(key, (gateways | {gateway}, later))
