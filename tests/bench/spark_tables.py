"""`make bench-spark`: the rate at which Kafka's records become tables, compared with simpler ways and their losses.

BENCH_ONLY=append,stock       only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_HISTORY=200             batches of 50,000 records in the older of the two warehouses of `history`
"""

import sys

from tests.bench import (
    parts_spark_freshness,
    parts_spark_growth,
    parts_spark_known,
    parts_spark_rate,
    parts_spark_theodolite,
)
from tests.bench.runner import Part, Suite, run

PARTS: dict[str, Part] = {
    "append": parts_spark_rate.append,
    "stock": parts_spark_rate.stock,
    "history": parts_spark_growth.history,
    "devices": parts_spark_growth.devices,
    "known": parts_spark_known.known,
    "freshness": parts_spark_freshness.freshness,
    "theodolite": parts_spark_theodolite.theodolite,
}


if __name__ == "__main__":
    sys.exit(run(Suite("spark", "run-spark", PARTS)))
