"""`make bench-analyst`: how soon an analyst has an answer, without Java and with Spark, and how much of it is read.

BENCH_ONLY=lookups            only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_READINGS=50000000       readings in the large warehouse, of 1,000 devices over a year

The large warehouses stay in `build/bench/analyst-tables` for the next run: several GB. `lookups` needs the tables that
`make demo` leaves.
"""

import sys

from tests.bench import parts_analyst, parts_analyst_answers, parts_analyst_layout, parts_analyst_year
from tests.bench.runner import Part, Suite, no_broker, run

PARTS: dict[str, Part] = {
    "lookups": parts_analyst.lookups,
    "answers": parts_analyst_answers.answers,
    "year": parts_analyst_year.year,
    "day": parts_analyst_year.day,
    "unmerged": parts_analyst_year.unmerged,
    "publish": parts_analyst_year.published,
    "publish_day": parts_analyst_year.published_day,
    "spark": parts_analyst_year.in_spark,
    "layout": parts_analyst_layout.layout,
    "layout_live": parts_analyst_layout.layout_live,
}


if __name__ == "__main__":
    # Only the parts of the layout need Kafka. They start their own: the others are measured without it.
    sys.exit(run(Suite("analyst", "run-analyst", PARTS, broker=no_broker)))
