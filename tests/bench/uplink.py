"""`make bench-uplink`: how fast a backlog gets to Kafka, how soon the uplink is back, and the bytes on the wire.

BENCH_ONLY=drain,wire         only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_SECONDS=60              how long `wire` publishes at live rate
BENCH_TIMES=10                how often `recovery` meets each fault
BENCH_FAULTS=60               how many faults `random` has
BENCH_SEED=7                  of `random`: repeats its schedule
BENCH_PROFILE=out.svg         the last gateway of `drain` or `latency` under py-spy (out.txt: folded stacks)
"""

import sys

from tests.bench import (
    parts_uplink_consumers,
    parts_uplink_drain,
    parts_uplink_http,
    parts_uplink_recovery,
    parts_uplink_scale,
    parts_uplink_storm,
    parts_uplink_wire,
)
from tests.bench.processes import NotMeasuredError
from tests.bench.runner import Part, Suite, run
from tests.support.netns import NetworkUnavailableError

PARTS: dict[str, Part] = {
    "drain": parts_uplink_drain.drain,
    "latency": parts_uplink_drain.latency,
    "wire": parts_uplink_wire.wire,
    "http": parts_uplink_http.http,
    "scale": parts_uplink_scale.scale,
    "consumers": parts_uplink_consumers.consumers,
    "recovery": parts_uplink_recovery.recovery,
    "storm": parts_uplink_storm.storm,
    "random": parts_uplink_recovery.random_faults,
}


if __name__ == "__main__":
    sys.exit(run(Suite("uplink", "run-uplink", PARTS, (NotMeasuredError, NetworkUnavailableError, TimeoutError))))
