"""`seen` and `device_runs`: which numbers of each lane, and of each device's own, stand in `log`."""

from pyspark.sql import Row, SparkSession

from spark.census import Census
from spark.copies import Suspects
from spark.lane_sequences import BatchSpan, Lane, SeenLane, joined, without
from spark.sequence_runs import EDGE_TYPE, Edge, Island, RunKey, merge
from spark.sequence_runs import RUN as RUN_COLUMNS
from spark.state_table import StateTable

LANE_COLUMNS = """
    below bigint, above binary, far array<bigint>,
    spans array<struct<first: bigint, last: bigint, batch_first: bigint, batch_last: bigint>>
"""
ISLANDS_COLUMNS = f"""
    islands array<struct<first: bigint, last: bigint, first_edge: {EDGE_TYPE}, last_edge: {EDGE_TYPE},
        batch_first: bigint, batch_last: bigint>>
"""


def seen_path(tables: str) -> str:
    """Return where the table of lanes lies."""
    return f"{tables}/seen"


def runs_path(tables: str) -> str:
    """Return where the table of devices' own numbers lies."""
    return f"{tables}/device_runs"


class Seen:
    """What tells that a record came before: in the driver's memory, and now and then in two tables."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._lanes: StateTable[Lane, SeenLane] = StateTable(
            spark,
            seen_path(tables),
            key=("buffer", "lane"),
            columns=LANE_COLUMNS,
            decode=_lane_of,
            encode=_lane_row,
        )
        self._runs: StateTable[RunKey, tuple[Island, ...]] = StateTable(
            spark,
            runs_path(tables),
            key=RUN_COLUMNS,
            columns=ISLANDS_COLUMNS,
            decode=_islands_of,
            encode=lambda islands: (list(islands),),
        )

    @property
    def saved(self) -> int:
        """The ordinal of the last batch that both tables hold."""
        return min(self._lanes.saved, self._runs.saved)

    def note(self, census: Census, ordinal: int) -> Suspects:
        """Take up what a batch holds; return what of it came before, or twice in it."""
        lanes: list[tuple[str, str, int, int]] = []
        runs: list[tuple[str, str, str, str, int, int]] = []
        batches: set[tuple[int, int]] = set()
        for lane, numbers in census.lanes.items():
            state = self._lanes.states.setdefault(lane, SeenLane())
            self._lanes.changed(lane)
            for first, last in without(state.add(numbers, ordinal), census.nobodys_copies.get(lane, ())):
                lanes.append((*lane, first, last))
                batches.update(state.batches(first, last))
        for run in census.runs:
            before = self._runs.states.get(run.key, ())
            merged = merge(before, run.islands)
            self._runs.states[run.key] = merged.islands
            self._runs.changed(run.key)
            for first, last in merged.overlaps:
                runs.append((*run.key, first, last))
                batches.update(
                    (island.batch_first, island.batch_last)
                    for island in before
                    if island.first <= last and first <= island.last
                )
        repeated = [(*key, island.first, island.last) for key in census.repeated for island in self._runs.states[key]]
        return Suspects(lanes, runs, joined(batches), repeated)

    def save(self, ordinal: int) -> None:
        """Write what has changed; `ordinal` is of the last batch that was noted."""
        self._lanes.save(ordinal)
        self._runs.save(ordinal)


def _lane_of(row: Row) -> SeenLane:
    spans = [BatchSpan(*span) for span in row.spans]
    return SeenLane(row.below, int.from_bytes(row.above, "little"), spans, set(row.far))


def _lane_row(seen: SeenLane) -> tuple[object, ...]:
    above = bytearray(seen.above.to_bytes((seen.above.bit_length() + 7) // 8, "little"))
    spans = [(span.first, span.last, span.batch_first, span.batch_last) for span in seen.spans]
    return seen.below, above, sorted(seen.far), spans


def _islands_of(row: Row) -> tuple[Island, ...]:
    return tuple(
        Island(
            island.first,
            island.last,
            Edge(*island.first_edge),
            Edge(*island.last_edge),
            island.batch_first,
            island.batch_last,
        )
        for island in row.islands
    )
