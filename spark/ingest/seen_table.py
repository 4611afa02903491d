"""Keeps the table `seen`: the numbers of lanes that `log` has."""

from array import array
from itertools import islice

from pyspark.sql import Row, SparkSession

from spark.ingest.census import Census
from spark.log.copies import Suspects
from spark.log.lane_sequences import Lane, LowNumbers, SeenLane, joined, without
from spark.log.state_table import StateTable

COLUMNS = """
    below bigint, above binary, far array<bigint>,
    spans array<struct<first: bigint, last: bigint, batch_first: bigint, batch_last: bigint>>
"""
LANES_TOLD_MAX = 1_000
"""Lanes whose numbers go to executors, those that grew last. Most have no number above a missing one, and 100 bytes."""
LANES_MAX = 10_000
"""Lanes in the driver's memory, of about 2 kB each: those that grew last. Others are looked up when they grow again."""


def seen_path(tables: str) -> str:
    """Return the table's path."""
    return f"{tables}/seen"


class Seen(StateTable[Lane, SeenLane]):
    """The numbers that came before, in the driver's memory, and saved now and then to the table."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        super().__init__(
            spark,
            seen_path(tables),
            key=("buffer", "lane"),
            columns=COLUMNS,
            decode=_lane_of,
            encode=_lane_row,
            most=LANES_MAX,
        )

    def low(self) -> dict[Lane, LowNumbers]:
        """Numbers of the lanes that grew last."""
        return {lane: self.states[lane].low() for lane in islice(reversed(self.states), LANES_TOLD_MAX)}

    def add_batch(self, census: Census, ordinal: int) -> Suspects:
        """Take up a batch's numbers. Return those that came before, or twice in it, and numbers of runs that did."""
        lanes: list[tuple[str, str, int, int]] = []
        batches: set[tuple[int, int]] = set()
        self.recall(census.lanes)
        for lane, numbers in census.lanes.items():
            state = self.states.get(lane, SeenLane())
            for first, last in without(state.add(numbers, ordinal), census.nobodys_copies.get(lane, ())):
                lanes.append((*lane, first, last))
                batches.update(state.batches(first, last))
            self.put_last(lane, state)
        return Suspects(lanes, census.repeated, joined(batches))


def _lane_of(row: Row) -> SeenLane:
    spans = array("q", [number for span in row.spans for number in span])
    return SeenLane(row.below, int.from_bytes(row.above, "little"), spans, set(row.far))


def _lane_row(seen: SeenLane) -> tuple[object, ...]:
    above = bytearray(seen.above.to_bytes((seen.above.bit_length() + 7) // 8, "little"))
    return seen.below, above, sorted(seen.far), [*zip(*(seen.spans[place::4] for place in range(4)), strict=True)]
