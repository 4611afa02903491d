"""Keeps the tables `seen`, `device_runs` and `settled_islands`: the numbers of lanes and of devices that `log` has."""

from collections.abc import Mapping
from typing import cast

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import StructType

from spark.engine.delta_staging import AppendTable, make_table, pinned, with_missing_columns
from spark.ingest.census import Census
from spark.log import sequence_runs
from spark.log.copies import Suspects
from spark.log.edges import EDGE_TYPE
from spark.log.lane_sequences import BatchSpan, Lane, SeenLane, joined, without
from spark.log.sequence_runs import (
    ISLANDS_SCHEMA,
    RUN_COLUMNS,
    Island,
    RunKey,
    SeenRun,
    SettledSpan,
    add,
    edge_of,
    islands_as_rows,
    settle,
)
from spark.log.state_table import StateTable, read_states

LANE_COLUMNS = """
    below bigint, above binary, far array<bigint>,
    spans array<struct<first: bigint, last: bigint, batch_first: bigint, batch_last: bigint>>
"""
RUN_STATE_COLUMNS = f"""
    islands array<struct<first: bigint, last: bigint, first_edge: {EDGE_TYPE}, last_edge: {EDGE_TYPE},
        batch_first: bigint, batch_last: bigint>>,
    settled array<struct<first: bigint, last: bigint, missing: bigint, batch_first: bigint, batch_last: bigint>>
"""
SETTLED = "sluice-settled"
"""Application whose commit number in both tables is the batch at which islands were last settled."""
ENDED_SETTLED_MAX = 4
"""Spans of settled islands of a boot that another boot has followed."""


def seen_path(tables: str) -> str:
    """Return the path of the table of lanes."""
    return f"{tables}/seen"


def runs_path(tables: str) -> str:
    """Return the path of the table of devices' own numbers."""
    return f"{tables}/device_runs"


def settled_path(tables: str) -> str:
    """Return the path of the table of islands that are no longer in memory."""
    return f"{tables}/settled_islands"


def read_islands(spark: SparkSession, tables: str) -> DataFrame:
    """Return the last saved islands of all runs, as `sequence_runs.ISLANDS_SCHEMA`.

    Islands may overlap: settled numbers that come again make an island of their own, and a job that was killed as it
    saved settles islands twice.
    """
    # `device_runs` is read first, because islands are in `settled_islands` before they leave it.
    in_memory = read_states(spark, runs_path(tables), RUN_COLUMNS).select(*RUN_COLUMNS, F.inline("islands"))
    path = settled_path(tables)
    if not DeltaTable.isDeltaTable(spark, path):
        return in_memory
    settled = with_missing_columns(pinned(spark, path), _islands_schema())
    return in_memory.unionByName(settled.fillna("", [*RUN_COLUMNS]))


class Seen:
    """The numbers that came before, in the driver's memory, and saved now and then to the tables."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._spark = spark
        self._lanes: StateTable[Lane, SeenLane] = StateTable(
            spark,
            seen_path(tables),
            key=("buffer", "lane"),
            columns=LANE_COLUMNS,
            decode=_lane_of,
            encode=_lane_row,
        )
        self._runs: StateTable[RunKey, SeenRun] = StateTable(
            spark,
            runs_path(tables),
            key=RUN_COLUMNS,
            columns=RUN_STATE_COLUMNS,
            decode=_run_of,
            encode=lambda run: (list(run.islands), list(run.settled)),
        )
        self._newest: dict[tuple[str, ...], str] = {}
        """The boot of each counter that began last."""
        self._ended: set[RunKey] = set()
        """Runs of earlier boots, as long as their islands are in memory."""
        for key, _ in sorted(self._runs.states.items(), key=lambda run: run[1].batch_last()):
            self._begin(key)
        self._settled_schema = _islands_schema()
        self._settled_path = settled_path(tables)
        self._settled = self._runs.number(SETTLED)
        make_table(spark, self._settled_path, self._settled_schema)

    @property
    def saved(self) -> int:
        """The ordinal of the last batch that both tables have."""
        return min(self._lanes.saved, self._runs.saved)

    def add_batch(self, census: Census, ordinal: int) -> Suspects:
        """Take up a batch's numbers. Return those that came before, or twice in it."""
        lanes: list[tuple[str, str, int, int]] = []
        runs: list[tuple[str, str, str, str, str, int, int]] = []
        batches: set[tuple[int, int]] = set()
        for lane, numbers in census.lanes.items():
            state = self._lanes.states.setdefault(lane, SeenLane())
            self._lanes.changed_keys.add(lane)
            for first, last in without(state.add(numbers, ordinal), census.nobodys_copies.get(lane, ())):
                lanes.append((*lane, first, last))
                batches.update(state.batches(first, last))
        for run in census.runs:
            if run.key not in self._runs.states:
                self._begin(run.key)
            added = add(self._runs.states.get(run.key, SeenRun()), run.islands)
            self._runs.put(run.key, added.run)
            runs += [(*run.key, first, last) for first, last in added.again]
            batches |= added.batches
        repeated = [
            (*key, island.first, island.last) for key in census.repeated for island in self._runs.states[key].islands
        ]
        return Suspects(lanes, runs, joined(batches), repeated)

    def save(self, ordinal: int, so_far: Mapping[str, int]) -> None:
        """Write the changes up to the batch `ordinal`. `so_far` has how far other tables are, by application."""
        self._lanes.save(ordinal)
        self._settle(ordinal)
        self._runs.save(ordinal, {SETTLED: self._settled, **so_far})

    def _begin(self, run: RunKey) -> None:
        """Record that a sensor has begun to count anew. Little more will come of its boot before."""
        before = self._newest.get(run[:-1])
        self._newest[run[:-1]] = run[-1]
        if before is not None:
            self._ended.add((*run[:-1], before))

    def _settle(self, ordinal: int) -> None:
        """Move islands from memory to their table: some of runs with too many, and all of boots that have ended."""
        # A backlog may bring the older of two boots last. So a boot has ended only if it is silent too.
        silent = {key for key in self._ended if self._runs.states[key].batch_last() <= self._runs.saved}
        settled = {
            key: settle(self._runs.states[key], 0, ENDED_SETTLED_MAX)
            if key in silent
            else settle(self._runs.states[key], sequence_runs.ISLANDS_MAX)
            for key in self._runs.changed_keys | silent
        }
        rows = [row for key, (_, islands) in settled.items() for row in islands_as_rows(key, islands)]
        if rows:
            frame = self._spark.createDataFrame(rows, self._settled_schema).coalesce(1)
            # Written before they leave memory, even if this batch settled islands before: there they may stand twice.
            staged = AppendTable(self._spark, self._settled_path, self._settled_schema).begin()
            staged.write(frame)
            staged.commit({SETTLED: ordinal})
            self._settled = ordinal
        for key, (run, islands) in settled.items():
            if islands:
                self._runs.put(key, run)
        self._ended -= silent


def _islands_schema() -> StructType:
    return cast("StructType", StructType.fromDDL(ISLANDS_SCHEMA))


def _lane_of(row: Row) -> SeenLane:
    spans = [BatchSpan(*span) for span in row.spans]
    return SeenLane(row.below, int.from_bytes(row.above, "little"), spans, set(row.far))


def _lane_row(seen: SeenLane) -> tuple[object, ...]:
    above = bytearray(seen.above.to_bytes((seen.above.bit_length() + 7) // 8, "little"))
    spans = [(span.first, span.last, span.batch_first, span.batch_last) for span in seen.spans]
    return seen.below, above, sorted(seen.far), spans


def _run_of(row: Row) -> SeenRun:
    islands = (
        Island(*island)._replace(first_edge=edge_of(island.first_edge), last_edge=edge_of(island.last_edge))
        for island in row.islands
    )
    # A table of an earlier release has no spans.
    return SeenRun(tuple(islands), tuple(SettledSpan(*span) for span in row.settled or ()))
