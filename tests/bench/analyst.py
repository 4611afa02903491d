"""`make bench-analyst`: how soon an analyst has an answer, without Java and with Spark, and how much of it is read.

BENCH_ONLY=lookups            only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_READINGS=50000000       readings in the large warehouse, of 1,000 devices over a year
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench import parts_analyst
from tests.bench.runner import Part, Suite, run

PARTS: dict[str, Part] = {
    "lookups": parts_analyst.lookups,
    "year": parts_analyst.year,
}


@contextmanager
def no_broker(_: Path) -> Iterator[None]:
    """No part asks Kafka."""
    yield


if __name__ == "__main__":
    sys.exit(run(Suite("analyst", "run-analyst", PARTS, broker=no_broker)))
