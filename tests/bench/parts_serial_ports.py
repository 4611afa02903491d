"""Measures the CPU and memory that 64 serial ports cost, while a sensor on each sends 10 readings a second."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.bench.context import Bench, say
from tests.bench.load import LoadError, LoadRun
from tests.bench.parts_serial_site import serial_site, tell_faults
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.bench.serial_feeder import Fed, boot_name, centi_celsius, device_name
from tests.support.board_audit import Account, Known, Sample

PORTS = 64
RATE = 10
WARM_UP_S = 3.0
"""Ports are opened, devices appear, clocks are fitted: once."""
FIFO_BYTES = 8
"""Bytes that the driver of a UART commonly hands on at once: half of a FIFO of 16."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Results of one run."""

    cpu_share: float
    cpu_us_per_reading: float
    rss_mb: float
    fed: Fed
    account: Account


async def ports(bench: Bench) -> list[Result]:
    """64 ports with 10 readings a second each, in frames and in a FIFO's pieces: CPU of the gateway alone."""
    seconds = float(os.environ.get("BENCH_SECONDS", bench.pick(30, 3)))
    whole = await _measure(bench, "ports", seconds, piece_bytes=0)
    pieces = await _measure(bench, "ports-pieces", seconds, piece_bytes=FIFO_BYTES)
    note = f"{PORTS * RATE} readings/s for {seconds:.0f} s"
    accounts = (whole.account, pieces.account)
    fed = whole.fed
    ack = f"p50, p99, max from a frame's last byte: {fed.ack_p50_ms}, {fed.ack_p99_ms}, {fed.ack_max_ms}"
    return [
        Result("cpu_share_64_ports", whole.cpu_share, "of a core", None, f"a frame a read; {note}"),
        Result("cpu_share_64_ports_pieces", pieces.cpu_share, "of a core", None, f"{FIFO_BYTES} bytes a read; {note}"),
        Result("cpu_us_per_reading_64_ports", whole.cpu_us_per_reading, "µs"),
        Result("cpu_us_per_reading_64_ports_pieces", pieces.cpu_us_per_reading, "µs"),
        Result("rss_mb_64_ports", max(whole.rss_mb, pieces.rss_mb), "MB", None, "the most since the start"),
        Result("ack_p99_ms_64_ports", fed.ack_p99_ms, "ms", None, ack),
        Result("missing_64_ports", sum(len(each.missing + each.unexplained) for each in accounts), "readings", "= 0"),
        Result("wrong_64_ports", sum(len(each.wrong + each.made_up) for each in accounts), "readings", "= 0"),
        Result("twice_64_ports", sum(len(each.twice) for each in accounts), "readings", "= 0"),
    ]


async def _measure(bench: Bench, name: str, seconds: float, piece_bytes: int) -> _Seen:
    async with serial_site(bench, name) as site:
        try:
            async with feeder(site.ports, PORTS, WARM_UP_S + seconds + 1, RATE, piece_bytes) as running:
                await running.event("connected")
                await asyncio.sleep(WARM_UP_S)
                loop = asyncio.get_running_loop()
                began, cpu_before = loop.time(), site.sluice.cpu_s
                await asyncio.sleep(seconds)
                cpu_share = (site.sluice.cpu_s - cpu_before) / (loop.time() - began)
                fed = msgspec.convert(await running.event("done"), Fed)
        except LoadError as error:
            raise NotMeasuredError(f"the feeder ended: {error}") from error
        rss_mb = site.sluice.rss_mb_peak
        account = await site.settle(known_of(fed))
    seen = _Seen(cpu_share, cpu_share / (PORTS * RATE) * 1e6, rss_mb, fed, account)
    say(
        f"{name}: {cpu_share:.3f} of a core, {seen.cpu_us_per_reading:.0f} µs a reading, {rss_mb:.0f} MB; ACK after "
        f"{fed.ack_p50_ms} / {fed.ack_p99_ms} / {fed.ack_max_ms} ms; feeder late {fed.late_ms_max} ms at the most, "
        f"{fed.cpu_s:.1f} s of CPU, {fed.resent} sent again, {fed.unacknowledged} unacknowledged; "
        f"{account.arrived} in Kafka"
    )
    tell_faults(account)
    return seen


def known_of(fed: Fed) -> Known:
    """Samples that the feeder's sensors took. All of them must be in Kafka, acknowledged or not."""
    samples = {
        Sample(device_name(port), boot_name(port), sequence): centi_celsius(port, sequence)
        for port, taken in enumerate(fed.taken)
        for sequence in range(taken)
    }
    return Known(samples, acknowledged=set(samples))


@asynccontextmanager
async def feeder(directory: Path, count: int, seconds: float, rate: float, piece_bytes: int) -> AsyncIterator[LoadRun]:
    """Sensors on ports in a directory (see serial_feeder.py), for the length of a block."""
    options = {"directory": directory, "ports": count, "seconds": seconds, "rate": rate, "piece-bytes": piece_bytes}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.serial_feeder", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield LoadRun(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()
