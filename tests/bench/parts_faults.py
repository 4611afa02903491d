"""Counts the acknowledged readings that survive a kill of the gateway or of the broker before it; and hostile input."""

import asyncio
import multiprocessing
import os
import secrets
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.bench.context import Bench, say
from tests.bench.kafka_watch import KafkaTopic
from tests.bench.load import run_load
from tests.bench.peers import FILTER
from tests.bench.processes import NotMeasuredError, gateway, write_gateway
from tests.bench.report import Result
from tests.support import mqtt_fuzz
from tests.support.kill_loop import KINDS, kill_loop, stalling
from tests.support.mosquitto import Mosquitto

KILL_ROUNDS = 4
"""Readings of each case, which has sensors and topics of its own. So the comparison fits into memory."""

KILL_S = 4.0
"""Seconds under load until a kill, at most. A session with Kafka needs one or two."""
MOSQUITTO_SETTINGS = {
    "default": (),
    "autosave": ("autosave_on_changes true", "autosave_interval 1"),
}
"""Settings by which mosquitto's documentation protects against losing memory. Both have `persistence true`."""
FAILURES_SHOWN = 10
BROKER_READINGS = 1_000
"""Number of readings that mosquitto queues for a client by default."""
BROKER_STALL_S = 8.0
SUBSCRIBE_S_MAX = 20.0


async def kill(bench: Bench) -> list[Result]:
    """Count acknowledged readings that are missing in Kafka, or twice there, after 200 times `kill -9` under load.

    Kafka is slow at every second kill. Each start lasts long enough for some readings to go to Kafka before the disk.
    """
    cycles = bench.pick(50, 2)
    trouble = partial(stalling, bench.kafka)
    acknowledged: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    duplicates: Counter[str] = Counter()
    direct = 0
    for seed in range(1, KILL_ROUNDS + 1):
        directory = bench.directory / "kill" / str(seed)
        directory.mkdir(parents=True)
        outcome = await asyncio.to_thread(kill_loop, cycles, directory, KILL_S, bench.kafka.bootstrap, seed, trouble)
        say(f"kill: seed {seed}: {outcome}")
        acknowledged.update(outcome.acknowledged)
        missing.update(outcome.missing)
        duplicates.update(outcome.duplicates)
        direct += outcome.direct
    seen = ", ".join(f"{kind}: {acknowledged[kind]:,} acknowledged" for kind in KINDS)
    return [
        Result("kill_cycles", KILL_ROUNDS * cycles, "kills", None if bench.quick else ">= 200", seen),
        Result("kill_kafka_first", direct, "kills", None if bench.quick else ">= 50", "Kafka had readings first"),
        Result("kill_missing", missing.total(), "readings", "= 0", "all three kinds of clients"),
        Result("kill_duplicates", duplicates["qos2"], "readings", "= 0", "QoS 2"),
        Result("kill_resent", duplicates["qos1-sequence"], "readings", None, "told by boot and sequence"),
        Result("kill_duplicates_qos1_without_sequence", duplicates["qos1"], "readings", None, "at least once"),
    ]


async def fuzz(bench: Bench) -> list[Result]:
    """1,000,000 streams of mutated MQTT packets into the parser."""
    workers = len(os.sched_getaffinity(0))
    cases = bench.pick(1_000_000, 10_000) // workers
    seeds = [secrets.randbits(32) for _ in range(workers)]
    began = time.monotonic()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        runs = [asyncio.get_running_loop().run_in_executor(pool, mqtt_fuzz.fuzz, cases, seed) for seed in seeds]
        outcomes = await asyncio.gather(*runs)
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    for failure in failures[:FAILURES_SHOWN]:
        say(f"fuzz: {failure}")
    violations = sum(outcome.violations.total() for outcome in outcomes)
    held = max(outcome.pending_bytes_max for outcome in outcomes)
    say(f"fuzz: {violations:,} streams were refused, {held} bytes held at the most, {time.monotonic() - began:.0f} s")
    return [
        Result("fuzz_cases", sum(outcome.cases for outcome in outcomes), "streams", None, f"seeds {seeds}"),
        Result("fuzz_failures", len(failures), "streams", "= 0"),
    ]


async def mosquitto_killed(bench: Bench) -> list[Result]:
    """Count the readings that mosquitto delivers after `kill -9`, of 1,000 that it acknowledged without a gateway."""
    results = []
    for name, settings in MOSQUITTO_SETTINGS.items():
        delivered = await _delivered_after_kill(bench, bench.directory / "mosquitto" / name, name, settings)
        note = "of 1,000 acknowledged; " + (" and ".join(settings) or "persistence alone")
        results.append(Result(f"mosquitto_killed_delivered_{name}", delivered, "readings", None, note))
    return results


async def _delivered_after_kill(bench: Bench, directory: Path, name: str, settings: tuple[str, ...]) -> int:
    directory.mkdir(parents=True)
    broker = Mosquitto(directory / "broker", ("allow_anonymous true", "log_type subscribe", *settings))
    section = f'\n[[mqtt_brokers]]\nhost = "127.0.0.1"\nport = {broker.port}\ntopics = ["{FILTER}"]\n'
    topic_name = f"mosquitto-{name}-thermo"
    config = write_gateway(directory / "gateway", bench.kafka.bootstrap, topic_name, extra=section)
    try:
        broker.start()
        async with gateway(config):
            await _subscribed(broker)
        await run_load(broker.port, connections=10, messages=BROKER_READINGS)
        broker.kill()
        broker.start()
        async with KafkaTopic(bench.kafka.bootstrap, topic_name) as topic, gateway(config):
            delivered, _ = await topic.wait_for(BROKER_READINGS, stall_s=BROKER_STALL_S)
    finally:
        broker.kill()
    say(f"mosquitto_killed: {name}: {delivered} of {BROKER_READINGS} delivered")
    return delivered


async def _subscribed(broker: Mosquitto) -> None:
    """Wait until the gateway's subscription, and so its session, stands."""
    try:
        async with asyncio.timeout(SUBSCRIBE_S_MAX):
            while f" {FILTER}\n" not in broker.log:
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise NotMeasuredError(f"the gateway does not subscribe at mosquitto: {broker.log[-1000:]}") from None
