"""Measures how fast a backlog gets to Kafka, its cost, and the delay of live readings meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import quantiles

from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.bench.context import Bench, say
from tests.bench.kafka_watch import PARTITIONS, KafkaTopic
from tests.bench.parts_uplink_site import COUNTED, STREAM, backlog, copy_backlog, live_sensors, write_config
from tests.bench.processes import Measured, NotMeasuredError, gateway
from tests.bench.report import Result
from tests.support.gateways import header

ROWS, ROWS_QUICK = 5_000_000, 300_000
ROWS_BESIDE, ROWS_BESIDE_QUICK = 10_000_000, 300_000
IDLE_S, IDLE_QUICK_S = 15, 3
PROBES_PER_S = 100
PROBE = "probe"
"""The stream of the live readings whose latency is measured: a topic of its own, for a consumer that read the
backlog's too would take the CPU that the gateway needs."""
BASELINE_S, BASELINE_QUICK_S = 30, 5
WARM_UP_S = 2.0
PROBES_MIN = 50


async def drain(bench: Bench) -> list[Result]:
    """5 million readings on disk, nothing else: from the daemon's start to the last record in Kafka."""
    rows = bench.pick(ROWS, ROWS_QUICK)
    idle_mb = await _idle_rss(bench)
    filled = await backlog(bench, rows, STREAM)
    whole = await _drained(bench, filled, rows, STREAM)
    # The same sensors with a sequence of their own: two more headers, and JSON that is looked into when taken in.
    counted_rows = bench.pick(1_000_000, 100_000)
    counted = await _drained(bench, await backlog(bench, counted_rows, COUNTED), counted_rows, COUNTED)
    note = f"{rows:,} readings in {whole.seconds:.1f} s"
    return [
        Result("drain_readings_per_s", rows / whole.seconds, "1/s", ">= 100000", note),
        Result("drain_missing_in_kafka", rows - whole.count, "readings", "= 0"),
        Result("drain_cpu_s_per_million", whole.cpu_s / rows * 1e6, "s", None, "the daemon's"),
        Result("drain_kafka_cpu_s_per_million", whole.kafka_cpu_s / rows * 1e6, "s", None, "the broker's"),
        Result("drain_rss_growth_mb", whole.rss_mb - idle_mb, "MB", "<= 40", f"the most {whole.rss_mb:.0f} MB"),
        Result("drain_rss_mb_idle", idle_mb, "MB"),
        Result("drain_readings_per_s_with_sequence", counted_rows / counted.seconds, "1/s", None, "16 headers, not 14"),
        Result("drain_cpu_s_per_million_with_sequence", counted.cpu_s / counted_rows * 1e6, "s"),
    ]


async def latency(bench: Bench) -> list[Result]:
    """Live readings, from their receipt until a consumer has them, beside a backlog of 10 million and without one."""
    rows = bench.pick(ROWS_BESIDE, ROWS_BESIDE_QUICK)
    filled = await backlog(bench, rows, STREAM)
    before = await _probed(bench, None, 0)
    beside = await _probed(bench, filled, rows)
    after = await _probed(bench, None, 0)
    # Whatever else this machine does only adds to it: the quieter of two must not flatter the ratio.
    alone = min(before, after, key=lambda probes: probes.seen_ms[1])
    p50_alone, p99_alone = alone.seen_ms
    p50, p99 = beside.seen_ms
    note = f"{p99:.0f} ms beside {p99_alone:.0f} ms; the broker took them (LogAppendTime) after "
    note += f"{beside.appended_ms[1]:.0f} beside {alone.appended_ms[1]:.0f} ms"
    return [
        Result("live_p50_ms", p50_alone, "ms", None, f"{len(alone.seen_s):,} readings, {PROBES_PER_S} a second"),
        Result("live_p99_ms", p99_alone, "ms"),
        Result("live_p50_ms_while_draining", p50, "ms", None, f"{len(beside.seen_s):,} readings"),
        Result("live_p99_ms_while_draining", p99, "ms"),
        Result("live_max_ms_while_draining", max(beside.seen_s) * 1e3, "ms"),
        Result("live_p50_ratio_while_draining", p50 / p50_alone, "times"),
        Result("live_p99_ratio_while_draining", p99 / p99_alone, "times", "<= 3", note),
        Result("drain_readings_per_s_beside_live", rows / beside.drained_s, "1/s"),
    ]


# -- a backlog ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Drained:
    count: int
    seconds: float
    """From the start of the daemon's process to the last record in Kafka."""
    cpu_s: float
    kafka_cpu_s: float
    rss_mb: float
    """The most."""


async def _drained(bench: Bench, filled: Path, rows: int, stream: str) -> _Drained:
    prefix = f"drain-{stream}"
    # Rows name the topic that they were routed to when they were taken in.
    config = write_config(bench.directory / "drain" / stream, bench.kafka.bootstrap, "filled")
    copy_backlog(filled, config)
    kafka = Measured(bench.kafka.process, bench.kafka.port, bench.directory, bench.kafka.log)
    async with KafkaTopic(bench.kafka.bootstrap, f"filled-{stream}") as topic:
        began, kafka_cpu_s = time.time(), kafka.cpu_s
        async with gateway(config) as sluice:
            count, last = await topic.wait_for(rows)
            cpu_s, rss_mb = sluice.cpu_s, sluice.rss_mb_peak
        kafka_cpu_s = kafka.cpu_s - kafka_cpu_s
    seconds = last - began
    say(
        f"{prefix}: {count:,} of {rows:,} in {seconds:.1f} s ({count / seconds:,.0f}/s), "
        f"{cpu_s / rows * 1e6:.2f} s of CPU a million, the broker's {kafka_cpu_s / rows * 1e6:.2f} s, {rss_mb:.0f} MB"
    )
    if not count:
        raise NotMeasuredError("nothing of the backlog came to Kafka")
    return _Drained(count, seconds, cpu_s, kafka_cpu_s, rss_mb)


async def _idle_rss(bench: Bench) -> float:
    """Memory of a daemon whose Kafka is up and that has nothing to send."""
    config = write_config(bench.directory / "drain" / "idle", bench.kafka.bootstrap, "idle")
    async with gateway(config) as sluice:
        await asyncio.sleep(bench.pick(IDLE_S, IDLE_QUICK_S))
        return sluice.rss_mb


# -- live readings --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Probes:
    """Seconds that live readings took."""

    seen_s: list[float] = field(default_factory=list)
    """From the daemon's receipt (ce_receivedtime) until a consumer on this machine had them: a little later than the
    gateway was told that Kafka has them."""
    appended_s: list[float] = field(default_factory=list)
    """Until the broker had put them into its log (LogAppendTime, milliseconds): a little earlier than that."""
    drained_s: float = 0.0

    @property
    def seen_ms(self) -> tuple[float, float]:
        """p50 and p99."""
        return _p50_p99_ms(self.seen_s)

    @property
    def appended_ms(self) -> tuple[float, float]:
        return _p50_p99_ms(self.appended_s)


async def _probed(bench: Bench, filled: Path | None, rows: int) -> _Probes:
    """Publish live readings, as long as a backlog drains or, without one, for a time."""
    name = "alone" if filled is None else "beside"
    config = write_config(bench.directory / "latency" / name, bench.kafka.bootstrap, "filled")
    for old in config.parent.glob("buffer.db*"):
        old.unlink()
    if filled is not None:
        copy_backlog(filled, config)
    probes = _Probes()
    async with (
        KafkaTopic(bench.kafka.bootstrap, f"filled-{STREAM}") as topic,
        KafkaTopic(bench.kafka.bootstrap, f"filled-{PROBE}"),
        gateway(config) as sluice,
    ):
        began = time.time()
        async with (
            live_sensors(sluice.port, PROBE, PROBES_PER_S),
            _consumed(bench.kafka.bootstrap, f"filled-{PROBE}") as arrivals,
        ):
            if filled is None:
                await asyncio.sleep(WARM_UP_S + bench.pick(BASELINE_S, BASELINE_QUICK_S))
                first, last = began + WARM_UP_S, time.time() - 1
            else:
                while not await topic.count():
                    await asyncio.sleep(0.02)
                first = time.time()
                count, last = await topic.wait_for(rows)
                if count != rows:
                    raise NotMeasuredError(f"{count:,} of {rows:,} readings came to Kafka")
                probes.drained_s = last - began
        for received_s, appended_s, seen_s in arrivals:
            if first <= received_s < last:
                probes.seen_s.append(seen_s - received_s)
                probes.appended_s.append(appended_s - received_s)
    if len(probes.seen_s) < PROBES_MIN:
        raise NotMeasuredError(f"only {len(probes.seen_s)} live readings came to Kafka while it was measured")
    p50, p99 = probes.seen_ms
    say(
        f"latency {name}: {len(probes.seen_s):,} readings, p50 {p50:.1f}, p99 {p99:.1f}, "
        f"the most {max(probes.seen_s) * 1e3:.1f} ms; in the broker's log p50 {probes.appended_ms[0]:.1f}, "
        f"p99 {probes.appended_ms[1]:.1f} ms"
    )
    return probes


@asynccontextmanager
async def _consumed(bootstrap: str, topic: str) -> AsyncIterator[list[tuple[float, float, float]]]:
    """A consumer for the length of a block: when each record was received, appended and seen (Unix times)."""
    arrivals: list[tuple[float, float, float]] = []
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()

    async def read() -> None:
        while True:
            found = await consumer.getmany(timeout_ms=1000)
            now_s = time.time()
            for records in found.values():
                for record in records:
                    received = datetime.fromisoformat(header(record, "ce_receivedtime"))
                    arrivals.append((received.timestamp(), record.timestamp / 1000, now_s))

    consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
    reading = asyncio.create_task(read(), name="consume")
    try:
        yield arrivals
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await consumer.stop()


def _p50_p99_ms(seconds: list[float]) -> tuple[float, float]:
    hundredths = quantiles(seconds, n=100, method="inclusive")
    return hundredths[49] * 1e3, hundredths[98] * 1e3
