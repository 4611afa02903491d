"""`make bench-gateway`: the gateway's rate, the time of its acknowledgements, and the resources that it needs.

BENCH_ONLY=listener,latency   only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_SECONDS=20              how long `listener` publishes
BENCH_WINDOW=64               unacknowledged readings of a connection that publishes flat out
BENCH_PROFILE=out.svg         the gateway under py-spy (out.txt: folded stacks)
"""

import resource
import sys

from tests.bench import load, parts_attacks, parts_disk, parts_faults, parts_rate, parts_size
from tests.bench.load import LoadError
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.bench.runner import Part, Suite, run

PEERS = ("telegraf_disk", "telegraf_memory", "benthos_sqlite_unbatched", "benthos_sqlite")
BUFFERED_PEERS = ("telegraf_disk", "benthos_sqlite")
"""Peers whose buffer is a file. Each is set as its documentation recommends for throughput."""
PARTS: dict[str, Part] = {
    "listener": parts_rate.listener,
    "broker": parts_rate.broker,
    "peers": parts_rate.peers,
    "latency": parts_disk.latency,
    "start": parts_size.start,
    "idle": parts_size.idle,
    "sensors": parts_size.sensors,
    "tls": parts_size.tls,
    "disk": parts_disk.disk,
    "idle_disk": parts_disk.idle_disk,
    "backlog": parts_size.backlog,
    "kill": parts_faults.kill,
    "fuzz": parts_faults.fuzz,
    "attacks": parts_attacks.attacks,
    "attack_pairs": parts_attacks.attack_pairs,
    "mosquitto": parts_faults.mosquitto_killed,
}


def compare(results: list[Result]) -> list[Result]:
    """Ratios of the listener's figures to each peer's, if this run measured both."""
    rates = {each.name.removesuffix("_readings_per_s"): each.value for each in results if each.value}
    ours = rates.get("listener")
    if ours is None:
        return []
    ratios = [Result(f"listener_times_{name}", ours / rates[name], "times") for name in PEERS if name in rates]
    buffered = [rates[name] for name in BUFFERED_PEERS if name in rates]
    if buffered:
        ratios.append(Result("listener_times_best_buffered_peer", ours / max(buffered), "times", ">= 15"))
    return ratios


def prepare() -> None:
    """Build the load generator, and let this process hold the connections over TLS."""
    load.build()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


if __name__ == "__main__":
    sys.exit(run(Suite("gateway", "run", PARTS, (NotMeasuredError, LoadError), compare), prepare))
