"""`make bench-install`: an installation from a bare Debian to the first reading in Kafka, and the service's costs.

BENCH_ONLY=page,questions     only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
"""

import sys

from tests.bench import parts_install
from tests.bench.processes import NotMeasuredError
from tests.bench.runner import Part, Suite, run
from tests.support.box import BoxUnavailableError

PARTS: dict[str, Part] = {
    "package": parts_install.package,
    "box": parts_install.box,
    "page": parts_install.page,
    "questions": parts_install.questions,
}


if __name__ == "__main__":
    sys.exit(run(Suite("install", "run-install", PARTS, (NotMeasuredError, BoxUnavailableError, TimeoutError))))
