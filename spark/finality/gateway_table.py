"""Keeps the gateways' states in the driver's memory, and saves them now and then to the table `gateway_states`."""

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.record_rules import EVENT
from spark.decode.record_types import EVENT_TYPES
from spark.finality.gateway_states import GatewayEvent, GatewayState, GatewayStates, fault_of
from spark.log.edges import Edge
from spark.log.sequence_runs import edge
from spark.log.state_table import StateTable, read_states
from spark.source.topic_changes import TopicOffsets

KEY = ("namespace", "gateway")
Place = tuple[str, int, int]
"""Topic, partition and offset of a record."""


def gateways_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/gateway_states"


class GatewayTable(StateTable[tuple[str, str], GatewayState]):
    """The states of all gateways, for the one writer."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        super().__init__(
            spark,
            gateways_path(tables),
            key=KEY,
            columns="state binary",
            decode=_state_of,
            encode=lambda state: (bytearray(msgspec.json.encode(state)),),
        )
        self.gateways = GatewayStates(self.states)

    def add_batch(
        self,
        events: Iterable[GatewayEvent],
        held: TopicOffsets,
        reads: Callable[[str], bool] | None,
        gone: Collection[str],
    ) -> None:
        """Take up a batch's events. To take them up again changes nothing."""
        self.changed_keys |= self.gateways.take(events, held, reads, gone)


def faults_in(events: Iterable[GatewayEvent]) -> dict[Place, str]:
    """Return the reasons of events that are rejects, by their places in Kafka."""
    found = ((event.order[1:], fault_of(event)) for event in events)
    return {place: f"{EVENT}{fault}" for place, fault in found if fault is not None}


def with_faults(rows: DataFrame, faults: Mapping[Place, str]) -> DataFrame:
    """Make rejects of the batch's rows at these places."""
    schema = "at_topic string, at_partition int, at_offset bigint, fault string"
    told = rows.sparkSession.createDataFrame([(*place, fault) for place, fault in faults.items()], schema)
    same = [F.col(name) == F.col(f"at_{name}") for name in ("topic", "partition", "offset")]
    judged = rows.join(F.broadcast(told), same, "left")
    return judged.withColumn("reject_reason", F.coalesce("reject_reason", "fault")).select(*rows.columns)


def events_in(log: DataFrame, longest: int | None) -> list[GatewayEvent]:
    """Collect gateways' events from a part of `log`. Values longer than `longest` bytes are left out."""
    value = F.col("value") if longest is None else F.when(F.octet_length("value") <= longest, F.col("value"))
    told = log.where(F.col("ce_type").isin(*EVENT_TYPES) & F.col("reject_reason").isNull() & ~F.col("duplicate"))
    rows = told.select(
        *("ce_type", "namespace", "gateway", "buffer"),
        F.struct(F.unix_micros("kafka_timestamp"), "topic", "partition", "offset").alias("order"),
        edge().alias("edge"),
        value.alias("value"),
    ).collect()
    return [_event_of(row) for row in rows]


def read_gateways(spark: SparkSession, tables: str) -> GatewayStates:
    """Return the last saved states."""
    states = read_states(spark, gateways_path(tables), KEY)
    return GatewayStates({(row.namespace, row.gateway): _state_of(row) for row in states.collect()})


def _event_of(row: Row) -> GatewayEvent:
    timestamp_us, topic, partition, offset = row.order
    value = None if row.value is None else bytes(row.value)
    place = (timestamp_us, topic, partition, offset)
    return GatewayEvent(row.ce_type, row.namespace, row.gateway, row.buffer, place, Edge(*row.edge), value)


def _state_of(row: Row) -> GatewayState:
    return msgspec.json.decode(bytes(row.state), type=GatewayState)
