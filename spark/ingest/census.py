"""Counts a batch for the driver: records by kind, offsets of partitions, numbers of lanes and of devices."""

from collections import defaultdict
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import READING_TYPE
from spark.decode.correction_records import CORRECTION_TYPE
from spark.decode.loss_bodies import LOSS_TYPE
from spark.decode.record_types import EVENT_TYPES
from spark.engine.built_once import recorded
from spark.log.copies import may_be_copy
from spark.log.deletions import was_deleted
from spark.log.log_table import from_kafka
from spark.log.readings_view import is_reading
from spark.log.sequence_runs import BatchRun, RunKey, batch_runs, run_key, with_inner_edges
from spark.windows.windows_table import unwindowed

LANE = ("buffer", "lane")
SUMS = ("rows", "rejected", "deleted", "corrections", "events", "event_bytes", "losses", "unwindowed")
"""Figures of a `Census` that are sums over its partitions."""
UNDECLARED_NAMES_MAX = 100
"""Undeclared members that are kept of one stream. A program that makes up names would fill any list."""

Numbers = range | list[int]


@dataclass(slots=True)
class Census:
    """The figures of one batch."""

    rows: int = 0
    rejected: int = 0
    deleted: int = 0
    """Records of devices whose data was deleted. They do not count as rejects."""
    corrections: int = 0
    """Time corrections among the records."""
    events: int = 0
    """Gateways' events, with time corrections."""
    event_bytes: int = 0
    """Bytes of the values of all events that the driver reads."""
    losses: int = 0
    """Loss records among the events."""
    topic_ids: dict[str, str] = field(default_factory=dict)
    """Kafka's id of each topic."""
    next_offsets: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Offset after the last that was read, by topic and partition."""
    unwindowed: int = 0
    """Good readings whose time, as sent, is implausible or unknown."""
    newest_us: dict[str, int] = field(default_factory=dict)
    """Kafka's timestamp of the newest record, by topic."""
    undeclared: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """First members of payloads that the declaration does not name, by stream. If there are more than the maximum, one
    more than the maximum."""
    lanes: dict[tuple[str, str], Numbers] = field(default_factory=dict)
    """Numbers of records by buffer and lane, sorted, with repetitions."""
    nobodys_copies: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Numbers of lanes that came with rejects only. They start no search for copies. A search would find a good record
    of the number, but miss its copies by its sensor's own number, which a reject does not tell."""
    runs: list[BatchRun] = field(default_factory=list)
    """Devices' own numbers, as islands."""
    repeated: list[RunKey] = field(default_factory=list)
    """Runs in which a number came more than once."""
    heard: list[tuple[str, str, str, str, int | None]] = field(default_factory=list)
    """Namespace, device, stream and gateway of readings, and the event time of the last reading in a window."""


def take_census(rows: DataFrame, ordinal: int) -> Census:
    """Count a batch. `rows` are its rows of `log`, either before its copies were told apart or after."""
    census = Census()
    runs: list[Row] = []
    # Copies and conflicts are counted as good, because the census is there to find them. So a start that finishes a
    # batch gets the same figures as the batch did.
    reason = F.when(~may_be_copy(), F.col("reject_reason"))
    numbered = rows.withColumns({"duplicate": F.lit(False), "reject_reason": reason})
    counted = _topics(rows).unionByName(_lanes(rows), True).unionByName(_heard(rows), True)
    for row in counted.unionByName(batch_runs(numbered), True).collect():
        if row.device is None:
            _take(census, row)
        elif row.served_by is not None:
            census.heard.append((row.namespace, row.device, row.stream, row.served_by, row.last_us))
        else:
            runs.append(row)
    census.runs = with_inner_edges(numbered, runs, ordinal)
    census.repeated = [run_key(run) for run in runs if run.repeated]
    return census


def _take(census: Census, row: Row) -> None:
    if row.rows is not None:
        for name in SUMS:
            setattr(census, name, getattr(census, name) + row[name])
        if row.next_offset is not None:
            census.next_offsets[row.topic][row.partition] = row.next_offset
            if row.topic_id is not None:
                census.topic_ids[row.topic] = row.topic_id
        census.newest_us[row.topic] = max(row.newest_us, census.newest_us.get(row.topic, row.newest_us))
        if row.undeclared:
            names = census.undeclared[row.topic].union(row.undeclared)
            census.undeclared[row.topic] = set(sorted(names)[: UNDECLARED_NAMES_MAX + 1])
    else:
        census.lanes[row.buffer, row.lane] = _numbers(row)
        if row.nobodys_copies:
            census.nobodys_copies[row.buffer, row.lane] = row.nobodys_copies


def _numbers(row: Row) -> Numbers:
    return range(row.first, row.last + 1) if row.numbers is None else list(row.numbers)


@recorded
def _topics(rows: DataFrame) -> DataFrame:
    good = F.col("reject_reason").isNull()
    return rows.groupBy("topic", "partition").agg(
        # Records that were read again from `log` say nothing about Kafka.
        (F.max(F.when(from_kafka(), F.col("offset"))) + 1).alias("next_offset"),
        F.max("topic_id").alias("topic_id"),
        F.count("*").alias("rows"),
        F.count_if(~good & ~was_deleted()).alias("rejected"),
        F.count_if(was_deleted()).alias("deleted"),
        F.count_if(good & (F.col("ce_type") == CORRECTION_TYPE)).alias("corrections"),
        F.count_if(good & (F.col("ce_type") != READING_TYPE)).alias("events"),
        F.coalesce(F.sum(F.when(good & F.col("ce_type").isin(*EVENT_TYPES), F.octet_length("value"))), F.lit(0)).alias(
            "event_bytes"
        ),
        F.count_if(good & (F.col("ce_type") == LOSS_TYPE)).alias("losses"),
        F.count_if(is_reading() & unwindowed()).alias("unwindowed"),
        F.unix_micros(F.max("kafka_timestamp")).alias("newest_us"),
        F.slice(
            F.sort_array(F.array_distinct(F.flatten(F.collect_set("undeclared")))), 1, UNDECLARED_NAMES_MAX + 1
        ).alias("undeclared"),
    )


@recorded
def _heard(rows: DataFrame) -> DataFrame:
    # Conflicts are counted too, because they are found only later.
    readings = rows.where((F.col("ce_type") == READING_TYPE) & may_be_copy())
    last = F.max(F.when(~unwindowed(), F.col("event_time")))
    served_by = F.col("gateway").alias("served_by")
    return readings.groupBy("namespace", "device", "stream", served_by).agg(F.unix_micros(last).alias("last_us"))


@recorded
def _lanes(rows: DataFrame) -> DataFrame:
    """Find each lane's first and last number, and all numbers if some are missing or come twice.

    Most lanes then need no list.
    """
    number = F.col("lane_sequence")
    first, last, size = F.element_at("sorted", 1), F.element_at("sorted", -1), F.size("sorted")
    dense = (last - first + 1 == size) & (F.size(F.array_distinct("sorted")) == size)
    # Rejects are counted too, although they have no copies. Without them their lanes would have holes for ever.
    return (
        rows.where(F.col("ce_id").isNotNull())
        .groupBy(*LANE)
        .agg(
            F.collect_list(F.when(may_be_copy(), number)).alias("good"),
            F.collect_list(F.when(~may_be_copy(), number)).alias("rejects"),
        )
        .withColumn("sorted", F.sort_array(F.concat("good", "rejects")))
        .select(
            *LANE,
            first.alias("first"),
            last.alias("last"),
            F.when(~dense, F.col("sorted")).alias("numbers"),
            F.when(F.size("rejects") > 0, F.array_except("rejects", "good")).alias("nobodys_copies"),
        )
    )
