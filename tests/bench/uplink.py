"""`make bench-uplink`: how fast a backlog gets to Kafka, how soon the uplink is back, what it costs on the wire.

BENCH_ONLY=drain,wire         only these parts (their names are in PARTS)
BENCH_QUICK=1                 everything shortened, to see that it runs: the figures mean nothing
BENCH_SECONDS=60              how long `wire` publishes at live rate
BENCH_TIMES=10                how often `recovery` meets each fault
BENCH_FAULTS=60               how many faults `random` has
BENCH_SEED=7                  of `random`: repeats its schedule
BENCH_PROFILE=out.svg         the last gateway of `drain` or `latency` under py-spy (out.txt: folded stacks)
"""

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import click

from demo.kafka_broker import BrokerError, kafka_broker
from tests.bench import parts_uplink_drain, parts_uplink_recovery, parts_uplink_storm, parts_uplink_wire
from tests.bench.context import Bench, say
from tests.bench.gateway import SETTLE_S, alone
from tests.bench.processes import NotMeasuredError
from tests.bench.report import BUILD, Report, Result, commit, machine, save, table
from tests.netns import NetworkUnavailableError

PARTS: dict[str, Callable[[Bench], Awaitable[list[Result]]]] = {
    "drain": parts_uplink_drain.drain,
    "latency": parts_uplink_drain.latency,
    "wire": parts_uplink_wire.wire,
    "recovery": parts_uplink_recovery.recovery,
    "storm": parts_uplink_storm.storm,
    "random": parts_uplink_recovery.random_faults,
}


async def measure(parts: list[str], *, quick: bool) -> AsyncIterator[list[Result]]:
    """Run parts one after the other, on a Kafka broker of their own; give the results of each as they come."""
    directory = BUILD / "run-uplink"
    shutil.rmtree(directory, ignore_errors=True)
    with kafka_broker(directory / "kafka") as kafka:
        bench = Bench(directory, kafka, quick)
        for name in parts:
            await asyncio.sleep(SETTLE_S)
            began = time.monotonic()
            say(f"{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}")
            try:
                yield await PARTS[name](bench)
            except (NotMeasuredError, NetworkUnavailableError, TimeoutError) as reason:
                say(f"{name}: not measured: {reason}")
                first, *_ = str(reason).splitlines() or [type(reason).__name__]
                yield [Result(name, None, "", None, f"not measured: {first}")]
            say(f"{name}: took {time.monotonic() - began:.0f} s")
            shutil.rmtree(directory / name, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


async def measure_and_save(parts: list[str], *, quick: bool) -> Report:
    """Run parts, and write the report after each: what goes wrong later costs nothing that was measured before."""
    path = BUILD / ("uplink-quick.json" if quick else "uplink.json")
    measured_commit, before = commit(), list(os.getloadavg())
    results: list[Result] = []
    async for found in measure(parts, quick=quick):
        results += found
        load = {"before": before, "after": list(os.getloadavg())}
        report = save(path, Report(measured_commit, machine(BUILD), load, results))
    return report


def main() -> int:
    """Give 0 where every target that was measured is met, else 1; 2 for a part that does not exist."""
    parts = [part for part in os.environ.get("BENCH_ONLY", "").split(",") if part] or list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        click.echo(f"BENCH_ONLY: there is no part {', '.join(unknown)}; parts are {', '.join(PARTS)}", err=True)
        return 2
    # A topic just made has no leader for an instant, and aiokafka says so at length.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        with alone():
            report = asyncio.run(measure_and_save(parts, quick=bool(os.environ.get("BENCH_QUICK"))))
    except BrokerError as error:
        click.echo(str(error), err=True)
        return 2
    click.echo(table(report))
    return 1 if any(result.met is False for result in report.results) else 0


if __name__ == "__main__":
    sys.exit(main())
