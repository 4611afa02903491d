"""Groups rows by columns. Executors import this module."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark.arrow_pass.decimal_columns import Numbers

Rows = np.ndarray[Any, np.dtype[np.int64]]
"""Places of rows in a table, in order."""
Mask = np.ndarray[Any, np.dtype[np.bool_]]

_NUMBERS_MAX = 2**31
"""Most numbers of groups before they are counted anew, so that none needs more than 64 bits."""


def group_numbers(columns: Iterable[pa.Array]) -> Numbers:
    """Return a number for each row. Rows have the same number if they are the same in all columns. Null is null."""
    groups, count = np.zeros(1, dtype=np.int64), 1
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        if count > _NUMBERS_MAX:
            distinct, groups = np.unique(groups, return_inverse=True)
            count = len(distinct)
        size = len(encoded.dictionary)
        groups, count = groups * size + encoded.indices.to_numpy(), count * size
    return groups


def begins_of(groups: Numbers) -> Numbers:
    """Return where each group begins, of rows in the order of their groups."""
    is_first = np.empty(len(groups), dtype=np.bool_)
    is_first[:1] = True
    is_first[1:] = groups[1:] != groups[:-1]
    begins: Numbers = np.flatnonzero(is_first)
    return begins


def ends_of(begins: Numbers, count: int) -> Numbers:
    """Return where each group ends, of `count` rows: the place of its last row."""
    ends: Numbers = np.append(begins[1:], count)[: len(begins)] - 1
    return ends


def ranks_of(texts: pa.Array) -> Numbers:
    """Return the place of each text among all of them, in order."""
    encoded = texts.dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    ranks: Any = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    found: Numbers = ranks[encoded.indices.to_numpy()]
    return found


def mask_of(truths: pa.Array) -> Mask:
    """Return Arrow's truths for numpy. Null is false."""
    mask: Mask = pc.fill_null(truths, fill_value=False).to_numpy(zero_copy_only=False)
    return mask


def integers_of(column: pa.Array) -> Numbers:
    """Return whole numbers or times for numpy. Null is 0."""
    numbers: Numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
    return numbers
