"""`make bench-image`: the card to flash: its size, its first start, power cuts by the dozen, bad updates, bad days.

`make test-image` has to have built the image. Everything runs in emulation, so seconds are this machine's. Kafka is
away, so readings stay where they can be counted. All of it takes hours.

BENCH_ONLY=size,cuts          only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
"""

import asyncio
import sys
from collections.abc import Callable
from functools import wraps

from tests.bench import parts_image, parts_image_updates
from tests.bench.context import Bench
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.bench.runner import Part, Suite, no_broker, run


def _waiting(part: Callable[[Bench], list[Result]]) -> Part:
    """A part that waits by itself, and so runs in a thread."""

    @wraps(part)
    async def run_it(bench: Bench) -> list[Result]:
        return await asyncio.to_thread(part, bench)

    return run_it


PARTS: dict[str, Part] = {
    "size": _waiting(parts_image.size),
    "first": _waiting(parts_image.first),
    "cuts": _waiting(parts_image.cuts),
    "full": _waiting(parts_image.full),
    "rollback": _waiting(parts_image_updates.rollback),
    "bad": _waiting(parts_image_updates.bad),
    "clock": _waiting(parts_image_updates.clock),
}


if __name__ == "__main__":
    sys.exit(run(Suite("image", "run-image", PARTS, (NotMeasuredError,), broker=no_broker)))
