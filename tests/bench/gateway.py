"""`make bench-gateway`: how much the gateway takes in, how fast it acknowledges, and what it needs for that.

BENCH_ONLY=listener,latency   only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_SECONDS=20              how long `listener` publishes
BENCH_WINDOW=64               unacknowledged readings of a connection that publishes flat out
BENCH_PROFILE=out.svg         the gateway under py-spy (out.txt: folded stacks)
"""

import asyncio
import fcntl
import logging
import os
import resource
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

import click

from demo.kafka_broker import BrokerError, kafka_broker
from tests.bench import load as generator
from tests.bench import parts_faults, parts_rate, parts_size
from tests.bench.context import Bench, say
from tests.bench.load import LoadError
from tests.bench.processes import NotMeasuredError
from tests.bench.report import BUILD, Report, Result, commit, machine, save, table

PEERS = ("telegraf_disk", "telegraf_memory", "benthos_sqlite_unbatched", "benthos_sqlite")
BUFFERED_PEERS = ("telegraf_disk", "benthos_sqlite")
"""Those whose buffer is a file, each as its documentation recommends for throughput."""
SETTLE_S = 2.0
"""Between two parts: what the one before left to do is not charged to the next."""
PARTS: dict[str, Callable[[Bench], Awaitable[list[Result]]]] = {
    "listener": parts_rate.listener,
    "broker": parts_rate.broker,
    "peers": parts_rate.peers,
    "latency": parts_size.latency,
    "idle": parts_size.idle,
    "sensors": parts_size.sensors,
    "tls": parts_size.tls,
    "disk": parts_size.disk,
    "backlog": parts_size.backlog,
    "kill": parts_faults.kill,
    "fuzz": parts_faults.fuzz,
    "mosquitto": parts_faults.mosquitto_killed,
}


async def measure(parts: list[str], *, quick: bool) -> AsyncIterator[list[Result]]:
    """Run parts one after the other, on a Kafka broker of their own; give the results of each as they come."""
    directory = BUILD / "run"
    shutil.rmtree(directory, ignore_errors=True)
    with kafka_broker(directory / "kafka") as kafka:
        bench = Bench(directory, kafka, quick)
        for name in parts:
            await asyncio.sleep(SETTLE_S)
            began = time.monotonic()
            say(f"{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}")
            try:
                yield await PARTS[name](bench)
            except (NotMeasuredError, LoadError) as reason:
                say(f"{name}: not measured: {reason}")
                yield [Result(name, None, "", None, f"not measured: {reason}")]
            say(f"{name}: took {time.monotonic() - began:.0f} s")
            shutil.rmtree(directory / name, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


async def measure_and_save(parts: list[str], *, quick: bool) -> Report:
    """Run parts, and write the report after each: what goes wrong later costs nothing that was measured before."""
    path = BUILD / ("gateway-quick.json" if quick else "gateway.json")
    measured_commit, before = commit(), list(os.getloadavg())
    results: list[Result] = []
    async for found in measure(parts, quick=quick):
        results += found
        load = {"before": before, "after": list(os.getloadavg())}
        report = save(path, Report(measured_commit, machine(BUILD), load, results + compare(results)))
    return report


def compare(results: list[Result]) -> list[Result]:
    """How many times what each peer does the listener does, where this run measured both."""
    rates = {each.name.removesuffix("_readings_per_s"): each.value for each in results if each.value}
    ours = rates.get("listener")
    if ours is None:
        return []
    ratios = [Result(f"listener_times_{name}", ours / rates[name], "times") for name in PEERS if name in rates]
    buffered = [rates[name] for name in BUFFERED_PEERS if name in rates]
    if buffered:
        ratios.append(Result("listener_times_best_buffered_peer", ours / max(buffered), "times", ">= 15"))
    return ratios


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other bench runs in this checkout: two at once measure each other."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another bench is running in this checkout: waiting until it has ended")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Give 0 where every target that was measured is met, else 1; 2 for a part that does not exist."""
    parts = [part for part in os.environ.get("BENCH_ONLY", "").split(",") if part] or list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        click.echo(f"BENCH_ONLY: there is no part {', '.join(unknown)}; parts are {', '.join(PARTS)}", err=True)
        return 2
    quick = bool(os.environ.get("BENCH_QUICK"))
    generator.build()
    # The connections over TLS are held by this process.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    # A topic just made has no leader for an instant, and aiokafka says so at length.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        with alone():
            report = asyncio.run(measure_and_save(parts, quick=quick))
    except BrokerError as error:
        click.echo(str(error), err=True)
        return 2
    click.echo(table(report))
    return 1 if any(result.met is False for result in report.results) else 0


if __name__ == "__main__":
    sys.exit(main())
