"""`gateway_states`: what gateways said of themselves, in the driver's memory, and now and then in a table."""

from collections.abc import Callable, Iterable, Mapping

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.gateway_states import EVENT_TYPES, GatewayEvent, GatewayState, GatewayStates
from spark.sequence_runs import Edge, edge
from spark.state_table import StateTable, read_states

PATH = "gateway_states"
KEY = ("namespace", "gateway")


class GatewayTable:
    """All gateways, as the one writer has them."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._table: StateTable[tuple[str, str], GatewayState] = StateTable(
            spark,
            f"{tables}/{PATH}",
            key=KEY,
            columns="state binary",
            decode=_state_of,
            encode=lambda state: (bytearray(msgspec.json.encode(state)),),
        )
        self.states = GatewayStates(self._table.states)

    @property
    def saved(self) -> int:
        return self._table.saved

    def note(
        self, events: Iterable[GatewayEvent], held: Mapping[str, Mapping[int, int]], reads: Callable[[str], bool]
    ) -> None:
        """Take up what a batch brings. Doing it again changes nothing."""
        for key in self.states.take(events, held, reads):
            self._table.changed(key)

    def save(self, ordinal: int) -> None:
        self._table.save(ordinal)


def events_in(log: DataFrame) -> list[GatewayEvent]:
    """Collect what is needed here of a part of `log`."""
    told = log.where(F.col("ce_type").isin(*EVENT_TYPES) & F.col("reject_reason").isNull() & ~F.col("duplicate"))
    rows = told.select(
        *("ce_type", "namespace", "gateway", "buffer"),
        F.struct(F.unix_micros("kafka_timestamp"), "topic", "partition", "offset").alias("order"),
        edge().alias("edge"),
        "value",
    ).collect()
    return [_event_of(row) for row in rows]


def read_gateways(spark: SparkSession, tables: str) -> GatewayStates:
    """Return the states as they were last saved."""
    states = read_states(spark, f"{tables}/{PATH}", KEY)
    return GatewayStates({(row.namespace, row.gateway): _state_of(row) for row in states.collect()})


def _event_of(row: Row) -> GatewayEvent:
    timestamp_us, topic, partition, offset = row.order
    value = None if row.value is None else bytes(row.value)
    place = (timestamp_us, topic, partition, offset)
    return GatewayEvent(row.ce_type, row.namespace, row.gateway, row.buffer, place, Edge(*row.edge), value)


def _state_of(row: Row) -> GatewayState:
    return msgspec.json.decode(bytes(row.state), type=GatewayState)
