"""Measures the readings a second that reach Kafka: through the listener, the broker ingress and the peers."""

import os
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench.context import Bench, say
from tests.bench.kafka_watch import KafkaTopic
from tests.bench.load import Done, LoadError, run_load
from tests.bench.peers import FILTER, benthos, mosquitto, subscribed, telegraf
from tests.bench.processes import Measured, NotMeasuredError, gateway, secrets_path, write_gateway
from tests.bench.report import Result

CONNECTIONS = 100
WINDOW = int(os.environ.get("BENCH_WINDOW", "200"))
"""Unacknowledged readings of a connection when it publishes flat out."""

WAYS = {"listener": "", "listener_disk_first": "disk_first = true\ncommit_delay_ms = 0"}
"""By name of a rate: the lines of `[buffer]` that it is measured with."""

Consumer = Callable[[Path, Measured, str, str], AbstractAsyncContextManager[Measured]]
"""Runs a program that reads from a mosquitto into a Kafka topic. Takes a folder, the mosquitto, Kafka's bootstrap and
the topic."""


@dataclass(frozen=True, slots=True)
class FlatOut:
    """Figures of the listener with as many readings as it took."""

    done: Done
    count: int
    """Records in Kafka."""
    elapsed_s: float
    """From the first PUBLISH to the last of them."""
    cpu_us: float
    """The gateway's, for each reading."""
    rss_mb: float

    @property
    def readings_per_s(self) -> float:
        return self.count / self.elapsed_s


async def listener(bench: Bench) -> list[Result]:
    """Listener to Kafka, flat out, from the first PUBLISH to the last record; in turns with the disk first."""
    seconds = float(os.environ.get("BENCH_SECONDS", bench.pick(60, 3)))
    turns = [await _turn(bench, turn, seconds) for turn in range(bench.pick(2, 1))]
    runs = {name: [each[name] for each in turns] for name in WAYS}
    run = min(runs["listener"], key=lambda each: each.readings_per_s)
    rates = {name: statistics.mean(each.readings_per_s for each in of_way) for name, of_way in runs.items()}
    done = run.done
    ratio = rates["listener"] / rates["listener_disk_first"]
    told = f"mean of {len(turns)} turns of {seconds:.0f} s"
    return [
        Result("listener_readings_per_s", rates["listener"], "1/s", ">= 50000", told),
        Result("listener_disk_first_readings_per_s", rates["listener_disk_first"], "1/s", None, told),
        Result("listener_times_disk_first", ratio, "times", ">= 1", "commit_delay_ms = 0 with the disk first"),
        Result(
            "listener_missing_in_kafka",
            sum(each.done.acknowledged - each.count for of_way in runs.values() for each in of_way),
            "readings",
            "= 0",
        ),
        Result("listener_acknowledged_per_s", done.acknowledged / done.seconds, "1/s", None, "the slowest turn"),
        Result("listener_cpu_us_per_reading", run.cpu_us, "µs"),
        Result("listener_rss_mb", run.rss_mb, "MB", None, "the most, flat out"),
    ]


async def _turn(bench: Bench, turn: int, seconds: float) -> dict[str, FlatOut]:
    """Each way once, flat out."""
    seen = {}
    for name, buffer in WAYS.items():
        async with KafkaTopic(bench.kafka.bootstrap, f"{name.replace('_', '-')}-{turn}-thermo") as topic:
            seen[name] = await flat_out(bench, topic, bench.directory / "listener" / f"{name}-{turn}", seconds, buffer)
        _tell(name, seen[name])
    return seen


def _tell(name: str, run: FlatOut) -> None:
    done = run.done
    say(
        f"{name}: {done.acknowledged:,} acknowledged in {done.seconds:.1f} s ({done.acknowledged / done.seconds:,.0f}"
        f"/s), {run.count:,} in Kafka after {run.elapsed_s:.1f} s; gateway {run.cpu_us:.1f} µs of CPU a reading, "
        f"{run.rss_mb:.0f} MB at the most, generator {done.cpu_s / done.acknowledged * 1e6:.2f} µs; by second: "
        f"{done.by_second}"
    )


async def flat_out(
    bench: Bench,
    topic: KafkaTopic,
    directory: Path,
    seconds: float,
    buffer: str = "",
    **options: float | str | Path | bool,
) -> FlatOut:
    """A gateway of its own, and a generator with these options that sends whatever it takes.

    `buffer` are further lines of `[buffer]`.
    """
    config = write_gateway(directory, bench.kafka.bootstrap, topic.name, devices=CONNECTIONS, buffer=buffer)
    async with gateway(config) as sluice:
        cpu_before = sluice.cpu_s
        done = await run_load(
            sluice.port,
            connections=CONNECTIONS,
            window=WINDOW,
            seconds=seconds,
            secrets=secrets_path(directory),
            **options,
        )
        count, last = await topic.wait_for(done.acknowledged)
        cpu_us = (sluice.cpu_s - cpu_before) / done.acknowledged * 1e6
        return FlatOut(done, count, last - done.first_publish, cpu_us, sluice.rss_mb_peak)


async def broker(bench: Bench) -> list[Result]:
    """mosquitto to our broker ingress to Kafka."""
    return [await _behind_mosquitto(bench, "broker", bench.pick(400_000, 20_000), broker_ingress, ">= 15000")]


async def peers(bench: Bench) -> list[Result]:
    """Telegraf and Benthos behind mosquitto, with their buffers."""
    # As many readings as take some 20 s: rates are sustained ones.
    asked: list[tuple[str, int, Consumer]] = [
        ("telegraf_disk", bench.pick(80_000, 4_000), partial(telegraf, strategy="disk")),
        ("telegraf_memory", bench.pick(600_000, 20_000), partial(telegraf, strategy="memory")),
        ("benthos_sqlite_unbatched", bench.pick(60_000, 4_000), partial(benthos, batch=1)),
        ("benthos_sqlite", bench.pick(300_000, 10_000), partial(benthos, batch=100)),
    ]
    return [await _behind_mosquitto(bench, name, messages, consumer) for name, messages, consumer in asked]


@asynccontextmanager
async def broker_ingress(
    directory: Path, mosquitto_before_it: Measured, bootstrap: str, topic: str
) -> AsyncIterator[Measured]:
    """Our gateway, reading from a mosquitto with a persistent session and QoS 1, subscribed."""
    section = f'\n[[mqtt_brokers]]\nhost = "127.0.0.1"\nport = {mosquitto_before_it.port}\ntopics = ["{FILTER}"]\n'
    config = write_gateway(directory / "gateway", bootstrap, topic, extra=section)
    async with gateway(config) as sluice:
        await subscribed(sluice, mosquitto_before_it)
        yield sluice


async def _behind_mosquitto(
    bench: Bench, name: str, messages: int, consumer: Consumer, target: str | None = None
) -> Result:
    """Send readings through mosquitto and a program that reads from it; time them.

    The time runs from the first PUBLISH to the last reading in Kafka. mosquitto takes readings in faster than anybody
    reads them, and holds what the reader cannot take yet.
    """
    directory = bench.directory / name
    topic_name = f"{name.replace('_', '-')}-thermo"
    try:
        async with (
            KafkaTopic(bench.kafka.bootstrap, topic_name) as topic,
            mosquitto(directory) as broker,
            consumer(directory, broker, bench.kafka.bootstrap, topic_name) as measured,
        ):
            cpu_before = measured.cpu_s
            done = await run_load(broker.port, connections=CONNECTIONS, window=WINDOW, messages=messages)
            count, last = await topic.wait_for(messages)
            cpu_us = (measured.cpu_s - cpu_before) / messages * 1e6
            rss_mb = measured.rss_mb_peak
    except (NotMeasuredError, LoadError) as reason:
        return _not_measured(name, target, str(reason))
    if count != messages:
        return _not_measured(name, target, f"{count:,} of {messages:,} readings came to Kafka")
    elapsed = last - done.first_publish
    rate = count / elapsed
    say(
        f"{name}: {count:,} in Kafka after {elapsed:.1f} s ({rate:,.0f}/s); {cpu_us:.1f} µs of CPU a reading, "
        f"{rss_mb:.0f} MB at the most"
    )
    return Result(f"{name}_readings_per_s", rate, "1/s", target, f"{count:,} readings in {elapsed:.1f} s")


def _not_measured(name: str, target: str | None, reason: str) -> Result:
    say(f"{name}: not measured: {reason}")
    return Result(f"{name}_readings_per_s", None, "1/s", target, f"not measured: {reason}")
