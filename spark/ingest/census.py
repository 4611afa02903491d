"""What a batch holds, in figures that the driver can keep: how much, up to where, which numbers of which lanes."""

from collections import defaultdict
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.correction_records import CORRECTION_TYPE
from spark.decode.kafka_records import EVENT_TYPES, READING_TYPE
from spark.decode.loss_bodies import LOSS_TYPE
from spark.engine.built_once import recorded
from spark.log.copies import may_be_copy
from spark.log.deletions import was_deleted
from spark.log.log_table import from_kafka
from spark.log.readings_view import is_reading
from spark.log.sequence_runs import BatchRun, RunKey, batch_runs, run_key, with_inner_edges
from spark.windows.windows_table import unwindowed

LANE = ("buffer", "lane")
UNDECLARED_NAMES_MAX = 100
"""Of members of one stream that its declaration does not name. A program that makes names up would fill any list."""

Numbers = range | list[int]


@dataclass(slots=True)
class Census:
    """One batch in figures."""

    rows: int = 0
    rejected: int = 0
    deleted: int = 0
    """Records of devices whose data was deleted; they are no rejects."""
    corrections: int = 0
    """Time corrections among the records."""
    events: int = 0
    """What gateways say of themselves, corrections among it."""
    event_bytes: int = 0
    """Of the values of those that the driver reads, all together."""
    losses: int = 0
    """Losses that gateways told of, among the events."""
    topic_ids: dict[str, str] = field(default_factory=dict)
    """Kafka's own, by topic."""
    next_offsets: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By topic and partition, the offset after the last that was read."""
    unwindowed: int = 0
    """Good readings whose time, as it was sent, is implausible or unknown."""
    newest_us: dict[str, int] = field(default_factory=dict)
    """By topic, Kafka's timestamp of the newest record."""
    undeclared: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By stream, the first members of payloads that its declaration does not name; one above the maximum if there are
    more."""
    lanes: dict[tuple[str, str], Numbers] = field(default_factory=dict)
    """By buffer and lane, the numbers of records, sorted, with repetitions."""
    nobodys_copies: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Those of them of which only rejects came. Nothing is looked for by them: what a reject names may have copies by
    its sensor's own number, which a reject does not tell, and would be taken for the only one."""
    runs: list[BatchRun] = field(default_factory=list)
    """Devices' own numbers, as islands."""
    repeated: list[RunKey] = field(default_factory=list)
    """Those of them of which a number came more than once."""
    heard: list[tuple[str, str, str, str, int | None]] = field(default_factory=list)
    """Namespace, device, stream and gateway of readings, and the event time of the last that belongs to a window."""


def take_census(rows: DataFrame, ordinal: int) -> Census:
    """Count a batch. `rows` are its rows of `log`, of which nothing is said to be a duplicate yet, or all is."""
    census = Census()
    runs: list[Row] = []
    # Copies and conflicts too: that they are some is what is to be found, and a start that finishes a batch must find
    # the same as the batch did.
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
        census.rows += row.rows
        census.rejected += row.rejected
        census.deleted += row.deleted
        census.corrections += row.corrections
        census.events += row.events
        census.event_bytes += row.event_bytes
        census.losses += row.losses
        census.unwindowed += row.unwindowed
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
        # What is read again from `log` itself says nothing of Kafka.
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
    # Conflicts too: whether something is one shows only after this.
    readings = rows.where((F.col("ce_type") == READING_TYPE) & may_be_copy())
    last = F.max(F.when(~unwindowed(), F.col("event_time")))
    served_by = F.col("gateway").alias("served_by")
    return readings.groupBy("namespace", "device", "stream", served_by).agg(F.unix_micros(last).alias("last_us"))


@recorded
def _lanes(rows: DataFrame) -> DataFrame:
    """First and last number, and all of them where there are holes or repetitions: most lists need not travel."""
    number = F.col("lane_sequence")
    first, last, size = F.element_at("sorted", 1), F.element_at("sorted", -1), F.size("sorted")
    dense = (last - first + 1 == size) & (F.size(F.array_distinct("sorted")) == size)
    # Rejects too, though nothing is their copy: each would leave a hole in its lane for ever.
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
