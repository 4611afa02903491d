"""Makes columns of decimals from whole numbers, counted in the last decimal. Executors import this module."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def decimals_of_64_bits(numbers: Numbers, kind: pa.DataType) -> pa.Array:
    """Return numbers as decimals of 128 bits."""
    halves = np.empty((len(numbers), 2), dtype=np.int64)
    halves[:, 0], halves[:, 1] = numbers, np.where(numbers < 0, -1, 0)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(halves.tobytes())])


def decimals_of(numbers: Iterable[int | None], kind: pa.DataType) -> pa.Array:
    """Return numbers as decimals of 128 bits; None, and a number that the type cannot hold, as null."""
    limit = 10**kind.precision
    held = [None if number is None or abs(number) >= limit else number for number in numbers]
    content = b"".join((number or 0).to_bytes(16, "little", signed=True) for number in held)
    is_held = None
    if None in held:
        is_held = pa.array([number is not None for number in held], pa.bool_()).buffers()[1]
    return pa.Array.from_buffers(kind, len(held), [is_held, pa.py_buffer(content)])
