"""Runs the parts of a bench one after the other, and saves their results."""

import asyncio
import fcntl
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from demo.kafka_broker import BrokerError, OwnBroker, kafka_broker
from tests.bench.context import Bench, say
from tests.bench.processes import NotMeasuredError
from tests.bench.report import BUILD, Report, Result, calibration, commit, machine, save, table

SETTLE_S = 2.0
"""Seconds between two parts, so that the rest of one part's work is not charged to the next."""

Part = Callable[[Bench], Awaitable[list[Result]]]


def _nothing(_: list[Result]) -> list[Result]:
    return []


@contextmanager
def no_broker(_: Path) -> Iterator[None]:
    """For parts that need no broker, or start their own."""
    yield


@dataclass(frozen=True, slots=True)
class Suite:
    """A bench: `name` is that of its report in `build/bench`."""

    name: str
    folder: str
    """Folder of its parts in `build/bench`. It is removed when they have ended."""
    parts: Mapping[str, Part]
    unmeasured: tuple[type[Exception], ...] = (NotMeasuredError,)
    """Exceptions that say that a part cannot be measured here. The other parts go on."""
    derived: Callable[[list[Result]], list[Result]] = _nothing
    """Makes results that follow from results of several parts."""
    table: Callable[[Report], str] = table
    """The report for people."""
    broker: Callable[[Path], AbstractContextManager[OwnBroker | None]] = kafka_broker
    """Starts what the parts ask: a Kafka broker, or nothing."""


async def _measure(suite: Suite, parts: list[str], *, quick: bool) -> AsyncIterator[list[Result]]:
    """Run parts one after the other, on a Kafka broker of their own; give the results of each as they come."""
    directory = BUILD / suite.folder
    shutil.rmtree(directory, ignore_errors=True)
    with suite.broker(directory / "kafka") as kafka:
        bench = Bench(directory, quick, kafka)
        for name in parts:
            part = suite.parts[name]
            await asyncio.sleep(SETTLE_S)
            began = time.monotonic()
            say(f"{name}: {(part.__doc__ or '').splitlines()[0]}")
            try:
                yield await part(bench)
            except suite.unmeasured as reason:
                say(f"{name}: not measured: {reason}")
                first, *_ = str(reason).splitlines() or [type(reason).__name__]
                yield [Result(name, None, "", None, f"not measured: {first}")]
            say(f"{name}: took {time.monotonic() - began:.0f} s")
            shutil.rmtree(directory / name, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


async def _measure_and_save(suite: Suite, parts: list[str], *, quick: bool) -> Report:
    """Run parts, and write the report after each, so that a later failure costs no earlier result."""
    path = BUILD / f"{suite.name}{'-quick' if quick else ''}.json"
    measured_commit, before = commit(), list(os.getloadavg())
    calibrated = calibration(BUILD)
    say(f"this machine now: {', '.join(f'{name} {value}' for name, value in calibrated.items())}")
    about = machine(BUILD) | calibrated
    results: list[Result] = []
    async for found in _measure(suite, parts, quick=quick):
        results += found
        load = {"before": before, "after": list(os.getloadavg())}
        report = save(path, Report(measured_commit, about, load, results + suite.derived(results)))
    return report


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other bench runs in this checkout: two at once measure each other."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another bench is running in this checkout: waiting until it has ended")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(suite: Suite, prepare: Callable[[], None] = lambda: None) -> int:
    """Run the parts in BENCH_ONLY, or all, after `prepare`.

    Gives 0 where every target that was measured is met, else 1; 2 for a part that does not exist, or without Kafka.
    """
    parts = [part for part in os.environ.get("BENCH_ONLY", "").split(",") if part] or list(suite.parts)
    unknown = [part for part in parts if part not in suite.parts]
    if unknown:
        click.echo(f"BENCH_ONLY: there is no part {', '.join(unknown)}; parts are {', '.join(suite.parts)}", err=True)
        return 2
    prepare()
    # A topic just made has no leader for an instant, and aiokafka says so at length.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        with _alone():
            report = asyncio.run(_measure_and_save(suite, parts, quick=bool(os.environ.get("BENCH_QUICK"))))
    except BrokerError as error:
        click.echo(str(error), err=True)
        return 2
    click.echo(suite.table(report))
    return 1 if any(result.met is False for result in report.results) else 0
