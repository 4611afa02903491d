"""`make bench-image`: the card to flash: its size, its first start, power cuts by the dozen, going back.

`make test-image` has to have built the image. Everything runs in emulation: seconds are this machine's.

BENCH_ONLY=size,cuts          only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench import parts_image
from tests.bench.processes import NotMeasuredError
from tests.bench.runner import Part, Suite, run

PARTS: dict[str, Part] = {
    "size": parts_image.size,
    "first": parts_image.first,
    "cuts": parts_image.cuts,
    "rollback": parts_image.rollback,
}


@contextmanager
def _no_broker(_: Path) -> Iterator[None]:
    """Nothing: Kafka is away in all of it, so that readings stay where they can be counted."""
    yield


if __name__ == "__main__":
    sys.exit(run(Suite("image", "run-image", PARTS, (NotMeasuredError,), broker=_no_broker)))
