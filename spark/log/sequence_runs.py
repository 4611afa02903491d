"""Names the runs of a device's own numbers. It needs no Delta, so executors import it.

If a sensor counts its readings, readings are missing between two islands of contiguous numbers of one boot. The times
of the islands' ends say when. They are kept with all that a later time correction needs.
"""

from collections.abc import Sequence
from hashlib import blake2b

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.log.edges import Edge

RUN_COLUMNS = ("namespace", "device", "stream", "device_counter", "device_boot")
"""Columns that name a run of numbers. `device_counter` is empty if a record names no counter."""

RunNumbers = tuple[str, str, str, str, str, int, int]
"""Columns that name a run, and the first and the last of some of its numbers."""


def run_hash(key: Sequence[str]) -> int:
    """Return a number that stands for a run. Two runs with one number cost a search in `log`, and nothing else."""
    return int.from_bytes(blake2b("\0".join(key).encode(), digest_size=8).digest(), signed=True)


def edge() -> Column:
    """The time of a row of `log`, as `EDGE_TYPE`."""
    others = [F.col(name) for name in Edge._fields if name != "event_us"]
    return F.struct(F.unix_micros("event_time").alias("event_us"), *others)
