"""Counts a batch for the driver: records by kind, offsets of partitions, and numbers of lanes."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.arrow_pass.plan import COUNTED_COLUMNS, SUMS, UNDECLARED_NAMES_MAX, TableFolder
from spark.arrow_pass.tasks import made_file
from spark.decode.record_types import EVENT_TYPES
from spark.engine.arrow_map import map_in_arrow
from spark.engine.made_file import MadeFile
from spark.log.log_table import LOG_PARTITION
from spark.log.sequence_runs import RunNumbers

Numbers = range | list[int]
Lane = tuple[str, str]
"""Buffer and lane."""


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
    lanes: dict[Lane, Numbers] = field(default_factory=dict)
    """Numbers of records by buffer and lane, sorted, with repetitions."""
    nobodys_copies: dict[Lane, list[int]] = field(default_factory=dict)
    """Numbers of lanes that came with rejects only. They start no search for copies. A search would find a good record
    of the number, but miss its copies by its sensor's own number, which a reject does not tell."""
    counted: int = 0
    """Readings with a number of their device's own."""
    repeated: list[RunNumbers] = field(default_factory=list)
    """Such numbers that came more than once in one piece of the batch."""


def take_census(rows: DataFrame) -> Census:
    """Count a batch. `rows` are its rows of `log`, either before its copies were told apart or after."""
    census, _ = counted_again(rows)
    return census


def counted_again(
    rows: DataFrame, devices: TableFolder | None = None, ordinal: int = 0
) -> tuple[Census, list[MadeFile]]:
    """Count a batch as `take_census` does. With the folder of `device_parts`, also make its files there."""
    # Copies and conflicts are counted as good, because the census is there to find them. So a start that finishes a
    # batch gets the same figures as the batch did.
    # Executors may lack Delta: the function must come from a module that does without.
    from spark.arrow_pass.row_counts import counting  # noqa: PLC0415 - it needs Arrow

    value = F.when(F.col("ce_type").isin(*EVENT_TYPES), F.col("value")).alias("value")
    columns = [value if name == "value" else F.col(name) for name in COUNTED_COLUMNS]
    schema = "counts string, action string, name string, content binary"
    made = map_in_arrow(rows.select(*columns, LOG_PARTITION), counting(devices, ordinal), schema).collect()
    census = census_of(row.counts for row in made if row.counts is not None)
    return census, [made_file(row) for row in made if row.counts is None]


def census_of(counts: Iterable[str]) -> Census:
    """Put the counts of a batch's pieces (`row_counts.Counts`) together."""
    census = Census()
    lanes: dict[Lane, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for piece in counts:
        sums, topics, of_lanes, repeated = json.loads(piece)
        for name, figure in zip(SUMS, sums, strict=True):
            setattr(census, name, getattr(census, name) + figure)
        for topic in topics:
            _take_topic(census, *topic)
        for buffer, lane, copies, rejects in of_lanes:
            of_lane = lanes[buffer, lane]
            of_lane[0].extend(copies)
            of_lane[1].extend(rejects)
        census.repeated += map(tuple, repeated)
    for lane, (copies, rejects) in lanes.items():
        census.lanes[lane] = _numbers(sorted([*copies, *rejects]))
        nobodys = set(rejects).difference(copies)
        if nobodys:
            census.nobodys_copies[lane] = sorted(nobodys)
    return census


def _take_topic(  # noqa: PLR0913, PLR0917 - the figures of a partition
    census: Census,
    topic: str,
    partition: int,
    topic_id: str | None,
    next_offset: int | None,
    newest_us: int,
    undeclared: Sequence[str],
) -> None:
    if next_offset is not None:
        offsets = census.next_offsets[topic]
        offsets[partition] = max(next_offset, offsets.get(partition, next_offset))
        if topic_id is not None:
            census.topic_ids[topic] = topic_id
    census.newest_us[topic] = max(newest_us, census.newest_us.get(topic, newest_us))
    if undeclared:
        names = census.undeclared[topic].union(undeclared)
        census.undeclared[topic] = set(sorted(names)[: UNDECLARED_NAMES_MAX + 1])


def _numbers(ordered: list[int]) -> Numbers:
    """Numbers in order as a range if none is missing and none comes twice. Most lanes then need no list."""
    first, last = ordered[0], ordered[-1]
    is_dense = last - first + 1 == len(ordered) and all(after > before for before, after in pairwise(ordered))
    return range(first, last + 1) if is_dense else ordered
