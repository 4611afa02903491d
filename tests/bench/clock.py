"""`make bench-clock`: the errors of readings' times, their bounds, and the cost of both for the gateway.

BENCH_ONLY=accuracy           only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_SECONDS=20              how long each run of `ingest` publishes
BENCH_PROFILE=out.svg         the last gateway under py-spy (out.txt: folded stacks)
"""

import sys
from dataclasses import replace

from tests.bench import load, parts_clock_accuracy, parts_clock_cost
from tests.bench.load import LoadError
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Report, table
from tests.bench.runner import Part, Suite, run

PARTS: dict[str, Part] = {
    "accuracy": parts_clock_accuracy.accuracy,
    "calls": parts_clock_cost.calls,
    "ingest": parts_clock_cost.ingest,
}


def clock_table(report: Report) -> str:
    """The scenarios beside each other, and below them all other results."""
    scenarios, others = parts_clock_accuracy.scenario_table(report.results)
    return "\n".join([*scenarios, table(replace(report, results=others))])


def prepare() -> None:
    """Build the load generator."""
    load.build()


if __name__ == "__main__":
    sys.exit(run(Suite("clock", "run-clock", PARTS, (NotMeasuredError, LoadError), table=clock_table), prepare))
