"""Makes rows of `device_parts` from readings, and folds such rows, by columns. Executors import this module.

`spark.log.device_parts` says what a row is.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark.arrow_pass.decimal_columns import Numbers
from spark.arrow_pass.groups import Mask, Rows, begins_of, ends_of, group_numbers, integers_of, mask_of, ranks_of
from spark.log.edges import EDGE_COLUMNS
from spark.log.lane_sequences import joined
from spark.log.sequence_runs import RUN_COLUMNS, RunNumbers, run_hash

_INTEGER, _TEXT = pa.int64(), pa.string()
EDGE = pa.struct([(name, _TEXT if kind == "string" else _INTEGER) for name, kind in EDGE_COLUMNS.items()])
ISLANDS = pa.list_(pa.struct([("first", _INTEGER), ("last", _INTEGER), ("first_edge", EDGE), ("last_edge", EDGE)]))
SCHEMA = pa.schema(
    [
        *((name, _TEXT) for name in RUN_COLUMNS),
        *((name, _INTEGER) for name in ("run", "first", "last")),
        ("islands", ISLANDS),
        ("gateways", pa.list_(_TEXT)),
        *((name, _INTEGER) for name in ("last_us", "batch_first", "batch_last")),
    ]
)
READ_COLUMNS = (*RUN_COLUMNS, "device_sequence", "event_time", *(name for name in EDGE_COLUMNS if name != "event_us"))
"""Columns of `log` that make a row."""
ISLANDS_MAX = 64
"""Islands of a row at the most. A sensor that often loses a reading has several rows, so that none grows for ever."""
_NEVER = -(2**63)


class Folded(NamedTuple):
    """Folded rows, and the numbers that were in more than one island."""

    rows: pa.Table
    repeated: list[RunNumbers]


def device_rows(readings: Mapping[str, pa.Array], is_dated: Mask, ordinal: int) -> Folded:
    """Return a row for each run of some readings, and one for each stream with readings that do not count.

    `readings` are READ_COLUMNS, of readings that may be copies. `is_dated` is true for those in a window.
    """
    count = len(is_dated)
    is_counted = np.ones(count, dtype=np.bool_)
    for name in ("namespace", "device", "device_boot", "device_sequence"):
        is_counted &= mask_of(pc.is_valid(readings[name]))
    counts = pa.array(is_counted)
    event_us = integers_of(readings["event_time"])
    others = [readings[name] for name in EDGE_COLUMNS if name != "event_us"]
    edges = pa.StructArray.from_arrays([pa.array(event_us), *others], fields=list(EDGE)).filter(counts)
    numbers = integers_of(readings["device_sequence"])[is_counted]
    places = pa.array(np.concatenate([[0], np.cumsum(is_counted)]), pa.int32())
    each = pa.array(np.arange(count + 1), pa.int32())
    nothing, ordinals = pa.nulls(count, _INTEGER), pa.array(np.full(count, ordinal))
    rows = {
        **{name: readings[name] for name in ("namespace", "device", "stream")},
        "device_counter": pc.if_else(counts, pc.fill_null(readings["device_counter"], ""), ""),
        "device_boot": pc.if_else(counts, readings["device_boot"], pa.scalar(None, _TEXT)),
        **dict.fromkeys(("run", "first", "last"), nothing),
        "islands": pa.ListArray.from_arrays(places, _islands(numbers, numbers, edges, edges)),
        "gateways": pa.ListArray.from_arrays(each, readings["gateway"]),
        "last_us": pa.array(event_us, mask=~is_dated),
        **dict.fromkeys(("batch_first", "batch_last"), ordinals),
    }
    made, repeated = fold(pa.table(rows, schema=SCHEMA))
    keys = {name: made[name].combine_chunks() for name in RUN_COLUMNS}
    names = _names(keys, np.arange(len(made)))
    hashes = pa.array([None if name[-1] is None else run_hash(name) for name in names], _INTEGER)
    return Folded(made.set_column(made.schema.get_field_index("run"), "run", hashes), repeated)


def folding(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold the rows of a task, which holds all of them at a time."""
    parts = list(batches)
    if parts:
        yield from fold(pa.Table.from_batches(parts)).rows.to_batches()


def fold(parts: pa.Table) -> Folded:
    """Return one row for each run, or several with ISLANDS_MAX islands each. They are in order of the runs' names.

    Islands that overlap or touch become one. Of an end that came several times, the surest time counts.
    """
    if not len(parts):
        return Folded(SCHEMA.empty_table(), [])
    columns = {name: parts[name].cast(SCHEMA.field(name).type).combine_chunks() for name in SCHEMA.names}
    groups = group_numbers(columns[name] for name in RUN_COLUMNS)
    _, examples, of_row = np.unique(groups, return_index=True, return_inverse=True)
    count = len(examples)
    row_order = np.argsort(of_row, kind="stable")
    begins = begins_of(of_row[row_order])
    last_us = np.maximum.reduceat(integers_of(pc.fill_null(columns["last_us"], _NEVER))[row_order], begins)

    # The islands of all rows, in order of their runs and numbers.
    rows = pc.list_parent_indices(columns["islands"]).to_numpy()
    flat = columns["islands"].flatten()
    order = np.lexsort((integers_of(flat.field("first")), of_row[rows]))
    rows, flat = rows[order], flat.take(pa.array(order))
    firsts, lasts, runs = integers_of(flat.field("first")), integers_of(flat.field("last")), of_row[rows]
    reaches = _reaches(runs, lasts)
    is_first = np.ones(len(runs), dtype=np.bool_)
    is_first[1:] = runs[1:] != runs[:-1]
    overlap, start = np.zeros(len(runs), dtype=np.bool_), is_first.copy()
    overlap[1:] = ~is_first[1:] & (firsts[1:] <= reaches[:-1])
    # One less than the least number would be the greatest.
    start[1:] |= ~overlap[1:] & (firsts[1:] - 1 > reaches[:-1])
    starts = np.flatnonzero(start)
    ends = ends_of(starts, len(runs))
    of_island = np.repeat(np.arange(len(starts)), ends - starts + 1)
    merged = _islands(
        *(firsts[starts], reaches[ends]),
        _surest(of_island, firsts == firsts[starts][of_island], flat.field("first_edge")),
        _surest(of_island, lasts == reaches[ends][of_island], flat.field("last_edge")),
    )

    # A row for each ISLANDS_MAX islands of a run, and one for each run without islands.
    runs_of_islands = runs[starts]
    places = np.arange(len(starts)) - np.searchsorted(runs_of_islands, runs_of_islands)
    cuts = np.flatnonzero(places % ISLANDS_MAX == 0)
    cut_ends = ends_of(cuts, len(starts))
    others = np.setdiff1d(np.arange(count), runs_of_islands)
    of_run = np.concatenate([runs_of_islands[cuts], others])
    is_unnumbered = np.arange(len(of_run)) >= len(cuts)
    nothing = np.zeros(len(others), dtype=np.int64)
    batches = {}
    for name, least in (("batch_first", np.minimum), ("batch_last", np.maximum)):
        of_batch = integers_of(columns[name])
        of_islands = least.reduceat(of_batch[rows], starts[cuts]) if len(cuts) else nothing[:0]
        batches[name] = pa.array(np.concatenate([of_islands, least.reduceat(of_batch[row_order], begins)[others]]))
    keys = {name: columns[name].take(pa.array(examples)) for name in (*RUN_COLUMNS, "run")}
    chosen = pa.array(of_run)
    whole = {
        **{name: column.take(chosen) for name, column in keys.items()},
        "first": pa.array(np.concatenate([firsts[starts][cuts], nothing]), mask=is_unnumbered),
        "last": pa.array(np.concatenate([reaches[ends][cut_ends], nothing]), mask=is_unnumbered),
        "islands": _lists(np.repeat(np.arange(len(cuts)), cut_ends - cuts + 1), len(of_run), merged),
        "gateways": _gateways(of_row, count, columns["gateways"]).take(chosen),
        "last_us": pa.array(last_us[of_run], mask=last_us[of_run] == _NEVER),
        **batches,
    }
    again = np.flatnonzero(overlap)
    upto = np.minimum(lasts[again], reaches[again - 1])
    twice = zip(_names(keys, runs[again]), firsts[again].tolist(), upto.tolist(), strict=True)
    repeated = [
        (*name, first, last)
        for name, of_same in groupby(twice, key=itemgetter(0))
        for first, last in joined((first, last) for _, first, last in of_same)
    ]
    in_order = [(name, "ascending") for name in (*RUN_COLUMNS, "first")]
    return Folded(pa.table(whole, schema=SCHEMA).sort_by(in_order), repeated)


def _names(keys: Mapping[str, pa.Array], places: Rows) -> list[tuple[str, str, str, str, str]]:
    """The names of runs."""
    taken = pa.array(places)
    return [*zip(*(keys[name].take(taken).to_pylist() for name in RUN_COLUMNS), strict=True)]


def _reaches(runs: Numbers, lasts: Numbers) -> Numbers:
    """The greatest last number of each run so far."""
    values, ranks = np.unique(lasts, return_inverse=True)
    size = max(len(values), 1)
    reaches: Numbers = values[np.maximum.accumulate(runs * size + ranks) % size]
    return reaches


def _surest(of_island: Rows, is_end: Mask, edges: pa.StructArray) -> pa.StructArray:
    """The time of each island's end, of all that end there: a surer one first, then by any order that is the same."""
    places = np.flatnonzero(is_end)
    if len(places) and len(places) > of_island[-1] + 1:
        event, error, quality, gateway, boot, boot_time, boot_error = edges.take(pa.array(places)).flatten()
        sureness = [
            *map(integers_of, (error, event)),
            *(ranks_of(pc.fill_null(name, "")) for name in (quality, gateway, boot)),
            *map(integers_of, (boot_time, pc.fill_null(boot_error, -1))),
        ]
        places = places[np.lexsort((*reversed(sureness), of_island[places]))]
    return edges.take(pa.array(places[begins_of(of_island[places])]))


def _islands(firsts: Numbers, lasts: Numbers, first_edges: pa.Array, last_edges: pa.Array) -> pa.StructArray:
    each = [pa.array(firsts), pa.array(lasts), first_edges, last_edges]
    return pa.StructArray.from_arrays(each, fields=list(ISLANDS.value_type))


def _lists(of_group: Rows, count: int, values: pa.Array) -> pa.ListArray:
    """Put values into a list for each of `count` groups. `of_group` has each value's group, in order."""
    ends = np.searchsorted(of_group, np.arange(count + 1)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), values)


def _gateways(of_row: Rows, count: int, lists: pa.ListArray) -> pa.ListArray:
    """The distinct gateways of each of `count` groups of rows, in order."""
    texts, of_text = lists.flatten(), of_row[pc.list_parent_indices(lists).to_numpy()]
    names = pc.unique(texts)
    names = names.take(pc.array_sort_indices(names))
    size = max(len(names), 1)
    pairs = np.unique(of_text * size + pc.index_in(texts, value_set=names).to_numpy())
    groups, each = np.divmod(pairs, size)
    return _lists(groups, count, names.take(pa.array(each)))
