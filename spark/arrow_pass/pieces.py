"""Divides the rows of a task into pieces, so that its memory has a bound. Executors import this module."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

PIECE_ROWS_MAX = 50_000
"""Records that a task holds at a time. Each such piece becomes a file of `log` for each of its dates."""
PIECE_BYTES_MAX = 128 * 1_048_576
"""Bytes of such a piece, as Arrow holds it, beside its last part."""


def pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Put batches together, up to PIECE_ROWS_MAX rows and PIECE_BYTES_MAX. None is empty."""
    piece: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            piece.append(batch)
        rows, size = sum(each.num_rows for each in piece), sum(each.nbytes for each in piece)
        if rows >= PIECE_ROWS_MAX or size >= PIECE_BYTES_MAX:
            yield piece
            piece = []
    if piece:
        yield piece
