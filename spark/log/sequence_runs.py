"""Remembers which of a device's numbers stand in `log`, as islands of contiguous numbers with the times of both ends.

If a sensor counts its readings, readings are missing between two islands of one boot. The times of the islands' ends
say when. They are kept with all that a later time correction needs. A sensor that loses a reading now and then has ever
more islands. Islands that grew last stay in memory; the others are settled, and only their spans of numbers stay. Only
the functions on DataFrames use Spark.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from sys import intern
from typing import NamedTuple

from pyspark.sql import Column, Row
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.log.edges import EDGE_TYPE, Edge
from spark.log.lane_sequences import joined

RUN_COLUMNS = ("namespace", "device", "stream", "device_counter", "device_boot")
"""Columns that name a run of numbers. `device_counter` is empty if a record names no counter."""
ISLANDS_SCHEMA = f"""
    namespace string, device string, stream string, device_counter string, device_boot string,
    first bigint, last bigint, first_edge {EDGE_TYPE}, last_edge {EDGE_TYPE}, batch_first bigint, batch_last bigint
"""
"""Columns of a table of islands."""

RunKey = tuple[str, str, str, str, str]
"""Namespace, device, stream, counter and device boot."""
Numbers = tuple[int, int]
"""First and last number, both inclusive."""
ISLANDS_MAX = 16
"""Islands of a run in memory. If a run has more, half of ISLANDS_MAX stay, and the others are settled."""
SETTLED_MAX = 16
"""Spans of settled islands of a run."""
MISSING_MAX = 2**63 - 1
"""Largest count of missing numbers, which a column holds. Between 64-bit numbers more may be missing."""


class Island(NamedTuple):
    """Contiguous numbers that all stand in `log`. Both ends are inclusive."""

    first: int
    last: int
    first_edge: Edge
    last_edge: Edge
    batch_first: int
    """Ordinals of the first and the last batch with its readings."""
    batch_last: int


class BatchRun(NamedTuple):
    """One batch's islands of a run."""

    key: RunKey
    islands: list[Island]
    """Islands in order. No island touches another."""


class Merged(NamedTuple):
    """A run's islands after a batch."""

    islands: tuple[Island, ...]
    overlaps: list[Numbers]
    """Numbers that came in the batch and before."""


class SettledSpan(NamedTuple):
    """A span of numbers with islands that are no longer in memory, and the batches of their readings."""

    first: int
    last: int
    missing: int
    """Numbers in the span that were in none of these islands."""
    batch_first: int
    batch_last: int


class SeenRun(NamedTuple):
    """The state of a run between batches."""

    islands: tuple[Island, ...] = ()
    settled: tuple[SettledSpan, ...] = ()
    """Spans in order. A number in a span may have been seen: `log` itself has the answer."""

    def batch_last(self) -> int:
        """The last batch with readings of this run."""
        return max([island.batch_last for island in self.islands] + [span.batch_last for span in self.settled])


class Added(NamedTuple):
    """A run after a batch, and the batch's numbers that came before, or may have."""

    run: SeenRun
    again: list[Numbers]
    batches: set[Numbers]
    """Batches in which the numbers `again` may have come, as ranges of ordinals."""


def add(run: SeenRun, new: Sequence[Island]) -> Added:
    """Add a batch's islands to a run. In each, islands are in order and do not touch."""
    merged = merge(run.islands, new)
    batches = {
        (island.batch_first, island.batch_last)
        for first, last in merged.overlaps
        for island in run.islands
        if island.first <= last and first <= island.last
    }
    settled = [
        (max(span.first, came.first), min(span.last, came.last), span)
        for span in run.settled
        for came in new
        if came.first <= span.last and span.first <= came.last
    ]
    return Added(
        run._replace(islands=merged.islands),
        joined(merged.overlaps + [(first, last) for first, last, _ in settled]),
        batches | {(span.batch_first, span.batch_last) for *_, span in settled},
    )


def settle(run: SeenRun, islands_max: int, settled_max: int = SETTLED_MAX) -> tuple[SeenRun, list[Island]]:
    """Settle islands if a run has too many. Return the run without them, and the settled islands.

    Islands that grew longest ago are settled. An old island into which a backlog comes is growing, and stays.
    """
    if len(run.islands) <= islands_max:
        return run, []
    by_age = sorted(run.islands, key=lambda island: (island.batch_last, island.first))
    gone = sorted(by_age[: len(by_age) - islands_max // 2])
    kept = sorted(by_age[len(by_age) - islands_max // 2 :])
    spans = [SettledSpan(island.first, island.last, 0, island.batch_first, island.batch_last) for island in gone]
    return SeenRun(tuple(kept), _fewer([*run.settled, *spans], settled_max)), gone


def _fewer(spans: Iterable[SettledSpan], most: int) -> tuple[SettledSpan, ...]:
    """Join spans where that costs least. If a missing number of a span comes, all batches of the span are searched."""
    found = _apart(sorted(spans), 4 * most)
    newest = max(span.batch_last for span in found)

    def cost(span: SettledSpan) -> float:
        # Late numbers mostly come soon, so old spans cost less.
        return span.missing * (span.batch_last - span.batch_first + 1) / (newest - span.batch_last + 1)

    def more(place: int) -> float:
        before, after = found[place - 1], found[place]
        return cost(_spanned(before, after)) - cost(before) - cost(after)

    while len(found) > most:
        place = min(range(1, len(found)), key=more)
        found[place - 1 : place + 1] = [_spanned(found[place - 1], found[place])]
    return tuple(found)


def _apart(spans: list[SettledSpan], most: int) -> list[SettledSpan]:
    """Join spans, which are in order, except across the widest gaps."""
    if len(spans) <= most:
        return spans
    by_hole = sorted(range(1, len(spans)), key=lambda place: spans[place].first - spans[place - 1].last)
    starts = [0, *sorted(by_hole[-most + 1 :]), len(spans)]
    return [reduce(_spanned, spans[start:end]) for start, end in pairwise(starts)]


def _spanned(one: SettledSpan, other: SettledSpan) -> SettledSpan:
    """The span of two spans. `other` begins no sooner than `one`."""
    # Numbers in both. If they do not overlap, it is negative: minus the numbers missing in between.
    both = min(one.last, other.last) - other.first + 1
    return SettledSpan(
        one.first,
        max(one.last, other.last),
        # Where they overlap, each span may have what the other lacks.
        min(max(one.missing + other.missing - both, 0), MISSING_MAX),
        min(one.batch_first, other.batch_first),
        max(one.batch_last, other.batch_last),
    )


def merge(islands: tuple[Island, ...], new: Sequence[Island]) -> Merged:
    """Merge a batch's islands with those of a run. In each, islands are in order and do not touch.

    Islands that touch become one. If an end's number comes twice, the time with the smaller bound counts, as among
    copies of a reading. So the order of batches changes nothing.
    """
    # The usual case: one island behind the last one.
    if len(new) == 1 and islands and new[0].first > islands[-1].last:
        newest, came = islands[-1], new[0]
        if came.first > newest.last + 1:
            return Merged((*islands, came), [])
        grown = Island(
            newest.first,
            came.last,
            newest.first_edge,
            came.last_edge,
            min(came.batch_first, newest.batch_first),
            max(came.batch_last, newest.batch_last),
        )
        return Merged((*islands[:-1], grown), [])
    merged = list(islands)
    overlaps: list[Numbers] = []
    for came in new:
        # From the first island that touches or overlaps it, to the last.
        low = bisect_left(merged, came.first - 1, key=_last)
        high = low
        while high < len(merged) and merged[high].first <= came.last + 1:
            there = merged[high]
            first, last = max(there.first, came.first), min(there.last, came.last)
            if first <= last:
                overlaps.append((first, last))
            high += 1
        merged[low:high] = [_joined([*merged[low:high], came])]
    return Merged(tuple(merged), overlaps)


def _last(island: Island) -> int:
    return island.last


def _joined(islands: list[Island]) -> Island:
    first, last = min(island.first for island in islands), max(island.last for island in islands)
    return Island(
        first,
        last,
        _surest([island.first_edge for island in islands if island.first == first]),
        _surest([island.last_edge for island in islands if island.last == last]),
        min(island.batch_first for island in islands),
        max(island.batch_last for island in islands),
    )


def _surest(edges: list[Edge]) -> Edge:
    return edges[0] if len(edges) == 1 else min(edges, key=_sureness)


def _sureness(edge: Edge) -> tuple[object, ...]:
    # After the bound, any order will do that does not depend on which came first. None cannot be compared.
    return edge.time_error_us, *edge[:1], *edge[2:6], -1 if edge.boot_time_error_us is None else edge.boot_time_error_us


def counter(rows: str = "") -> Column:
    """A row's counter for `RUN_COLUMNS`. `rows` is the alias of `log` with a point behind it."""
    return F.coalesce(F.col(f"{rows}device_counter"), F.lit(""))


def edge() -> Column:
    """The time of a row of `log`, as `EDGE_TYPE`."""
    others = [F.col(name) for name in Edge._fields if name != "event_us"]
    return F.struct(F.unix_micros("event_time").alias("event_us"), *others)


def islands_as_rows(key: RunKey, islands: Iterable[Island]) -> list[tuple[object, ...]]:
    """Return islands of a run as rows of `ISLANDS_SCHEMA`."""
    return [(*key, *island) for island in islands]


def edge_of(row: Row) -> Edge:
    """Return the edge of a row of `EDGE_TYPE`."""
    return interned_edge(*row)


def interned_edge(  # noqa: PLR0913, PLR0917 - the members of an edge
    event_us: int,
    time_error_us: int,
    time_quality: str,
    gateway: str,
    gateway_boot: str,
    boot_time_us: int,
    boot_time_error_us: int | None,
) -> Edge:
    """Return an edge. Names that many edges share are kept once: they would take a third of the memory."""
    names = intern(time_quality), intern(gateway), intern(gateway_boot)
    return Edge(event_us, time_error_us, *names, boot_time_us, boot_time_error_us)


def run_key(namespace: str, device: str, stream: str, device_counter: str, device_boot: str) -> RunKey:
    """Return the key of a run, with names that many runs share kept once."""
    return intern(namespace), intern(device), intern(stream), intern(device_counter), device_boot
