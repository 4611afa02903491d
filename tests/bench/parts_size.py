"""Measures the gateway's size and speed: latency, memory, connections, bytes written, start-up time."""

import asyncio
import os
import socket
import ssl
import statistics
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from demo.kafka_broker import free_ports
from gateway.tls.client import client_context
from tests.bench.context import Bench, say
from tests.bench.kafka_watch import KafkaTopic
from tests.bench.load import LoadError, load, run_load
from tests.bench.processes import (
    Measured,
    NotMeasuredError,
    answers,
    gateway,
    secrets_path,
    spawn_gateway,
    stop,
    write_gateway,
)
from tests.bench.report import Result

CONNECTIONS = 100
SENSORS = 5_000
SENSOR_INTERVAL_S = 60
UNREACHABLE = "127.0.0.1:1"
TLS_STEP = 20
TLS_MB = 256


async def start(bench: Bench) -> list[Result]:
    """CPU that a start takes until its first PUBACK, with an empty buffer; the median of several."""
    seen = []
    for number in range(bench.pick(9, 3)):
        directory = bench.directory / "start" / str(number)
        config = write_gateway(directory, UNREACHABLE, "start-thermo", devices=1)
        sluice = spawn_gateway(config)
        try:
            await answers(sluice)
            await asyncio.to_thread(_puback, sluice.port, "d000", secrets_path(directory).read_text().strip())
            seen.append(sluice.cpu_s)
        finally:
            stop(sluice)
    note = f"of {len(seen)}; the most: {max(seen):.2f}"
    return [Result("start_cpu_s", statistics.median(seen), "s", "<= 0.35", note)]


async def idle(bench: Bench) -> list[Result]:
    """Memory of a daemon that has nothing to do, its Kafka up."""
    async with _measured(bench, bench.directory / "idle", "idle-thermo") as sluice:
        cpu_before = sluice.cpu_s
        seconds = bench.pick(20, 2)
        await asyncio.sleep(seconds)
        share = (sluice.cpu_s - cpu_before) / seconds
        return [
            Result("rss_mb_idle", sluice.rss_mb, "MB", "<= 60", f"after {seconds} s"),
            Result("cpu_share_idle", share, "of a core"),
        ]


async def sensors(bench: Bench) -> list[Result]:
    """5,000 sensors with a reading a minute each; then all of them dial again at once."""
    count, minute = bench.pick(SENSORS, 500), bench.pick(SENSOR_INTERVAL_S, 5)
    directory = bench.directory / "sensors"
    async with _measured(bench, directory, "sensors-thermo", devices=count, connections_max=count) as sluice:
        async with load(
            sluice.port,
            connections=count,
            rate=count / minute,
            seconds=minute + 20,
            storm_after=minute + 5,
            window=4,
            secrets=secrets_path(directory),
        ) as running:
            connected = await running.event("connected")
            cpu_before, began = sluice.cpu_s, time.monotonic()
            resident = []
            while time.monotonic() - began < minute:
                await asyncio.sleep(1)
                resident.append(sluice.rss_mb)
            share = (sluice.cpu_s - cpu_before) / minute
            storm = await running.event("storm")
            done = await running.done()
        peak = sluice.rss_mb_peak
    say(
        f"sensors: {count} connected in {connected['seconds']:.1f} s, {max(resident):.0f} MB, {share:.3f} of a core; "
        f"storm {storm['seconds']:.1f} s, {peak:.0f} MB at the most; {done.acknowledged} of {done.sent} acknowledged"
    )
    return [
        Result("rss_mb_5000_sensors", max(resident), "MB", "<= 120", f"{count} connections, the most in {minute} s"),
        Result("rss_mb_5000_sensors_storm", peak, "MB", None, "the most, the reconnect storm included"),
        Result("cpu_share_5000_sensors", share, "of a core"),
        Result("reconnect_storm_s", storm["seconds"], "s", None, f"{count} connections, until the last CONNACK"),
    ]


async def tls(bench: Bench) -> list[Result]:
    """Count the TLS connections at which the daemon's memory reaches 256 MB."""
    count_max = bench.pick(SENSORS, 100)
    directory = bench.directory / "tls"
    directory.mkdir(parents=True, exist_ok=True)
    certificate, key = directory / "server.crt", directory / "server.key"
    _make_certificate(certificate, key)
    port, *_ = free_ports(1)
    section = (
        f'\n[mqtt_listener.tls]\ncertificate = "{certificate}"\nkey = "{key}"\n'
        f"port = {port}\nconnections_max = {count_max}\n"
    )
    context = client_context(certificate, None, None)
    writers: list[asyncio.StreamWriter] = []
    async with _measured(bench, directory, "tls-thermo", devices=count_max, extra=section) as sluice:
        secrets = secrets_path(directory).read_text().split()
        before = sluice.rss_mb
        try:
            while len(writers) < count_max:
                step = range(len(writers), min(len(writers) + TLS_STEP, count_max))
                writers += await asyncio.gather(
                    *(_connect_tls(port, context, f"d{number:03d}", secrets[number]) for number in step)
                )
                rss_mb = sluice.rss_mb
                if rss_mb > TLS_MB:
                    break
        finally:
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)
        each_kb = (rss_mb - before) * 1e3 / len(writers)
    if rss_mb > TLS_MB:
        number, note = len(writers) - TLS_STEP, f"{each_kb:.0f} kB each"
    else:
        number, note = len(writers), f"all that were tried: {rss_mb:.0f} MB, {each_kb:.0f} kB each"
    return [Result("tls_connections_in_256mb", number, "connections", None, note)]


async def backlog(bench: Bench) -> list[Result]:
    """10 million readings in the buffer: memory, size, and the start after `kill -9`; 10,000 for comparison."""
    few, many = bench.pick(10_000, 1_000), bench.pick(10_000_000, 50_000)
    small = await _backlog(bench, few)
    large = await _backlog(bench, many)
    note = f"{many:,} rows; with {few:,}: "
    return [
        Result("rss_mb_backlog_10m", large.rss_mb, "MB", None, note + f"{small.rss_mb:.1f} MB"),
        Result("rss_mb_backlog_10k", small.rss_mb, "MB"),
        Result(
            "rss_mb_backlog_10m_draining", large.rss_mb_draining, "MB", None, note + f"{small.rss_mb_draining:.1f} MB"
        ),
        Result("restart_s_backlog_10m", large.restart_s, "s", "<= 2", "kill -9 under load, cold cache, port answers"),
        Result("restart_s_backlog_10m_puback", large.puback_s, "s", None, "until the first PUBACK"),
        Result("rss_backlog_10m_over_10k", large.rss_mb / small.rss_mb, "times", "<= 1.1", "1,000 readings/s taken in"),
        Result("backlog_bytes_per_reading", large.file_bytes / many, "bytes", None, f"{many:,} rows; file and WAL"),
        Result("backlog_fill_readings_per_s", large.fill_rate, "1/s", None, "through the listener, Kafka down"),
        Result("backlog_drain_readings_per_s", large.drain_rate, "1/s", None, "while 1,000 readings/s are taken in"),
    ]


@dataclass(slots=True)
class _Backlog:
    """Figures of one backlog."""

    fill_rate: float = 0.0
    file_bytes: int = 0
    restart_s: float = 0.0
    puback_s: float = 0.0
    rss_mb: float = 0.0
    """The most while readings came in and Kafka was down."""
    rss_mb_draining: float = 0.0
    drain_rate: float = 0.0
    """Records a second that came to Kafka while 1,000 a second came in."""


async def _backlog(bench: Bench, rows: int) -> _Backlog:
    seen = _Backlog()
    directory = bench.directory / "backlog" / str(rows)
    topic_name = f"backlog-{rows}-thermo"
    config = write_gateway(directory, UNREACHABLE, topic_name, devices=CONNECTIONS, bytes_max=8_000_000_000)
    secrets = secrets_path(directory)
    async with gateway(config) as sluice:
        done = await run_load(sluice.port, connections=CONNECTIONS, window=200, messages=rows, secrets=secrets)
        seen.fill_rate = done.acknowledged / done.seconds
        seen.file_bytes = sum(path.stat().st_size for path in _buffer_files(directory))
        async with load(
            sluice.port, connections=CONNECTIONS, rate=1_000, seconds=60, boot="c", secrets=secrets
        ) as running:
            await running.event("connected")
            await asyncio.sleep(2)
            sluice.kill()
            with suppress(LoadError):
                await running.done()
    say(f"backlog: {rows:,} rows at {seen.fill_rate:,.0f}/s, {seen.file_bytes / rows:.1f} bytes each")
    _forget_cache(directory)
    began = time.monotonic()
    sluice = spawn_gateway(config)
    try:
        await answers(sluice)
        seen.restart_s = time.monotonic() - began
        await asyncio.to_thread(_puback, sluice.port, "d000", secrets.read_text().split()[0])
        seen.puback_s = time.monotonic() - began
        await run_load(
            sluice.port, connections=CONNECTIONS, rate=1_000, seconds=bench.pick(10, 1), boot="e", secrets=secrets
        )
        seen.rss_mb = sluice.rss_mb_peak
    finally:
        stop(sluice)
    config.write_text(config.read_text().replace(UNREACHABLE, bench.kafka.bootstrap))
    async with KafkaTopic(bench.kafka.bootstrap, topic_name) as topic, gateway(config) as sluice:
        began, before = time.monotonic(), await topic.count()
        await run_load(
            sluice.port, connections=CONNECTIONS, rate=1_000, seconds=bench.pick(10, 2), boot="f", secrets=secrets
        )
        seen.drain_rate = (await topic.count() - before) / (time.monotonic() - began)
        seen.rss_mb_draining = sluice.rss_mb_peak
    say(
        f"backlog: restart {seen.restart_s:.2f} s, PUBACK {seen.puback_s:.2f} s, {seen.rss_mb:.1f} MB waiting, "
        f"{seen.rss_mb_draining:.1f} MB draining at {seen.drain_rate:,.0f}/s"
    )
    return seen


@asynccontextmanager
async def _measured(  # noqa: PLR0913 - what a bench may ask of a gateway, by name
    bench: Bench,
    directory: Path,
    topic: str,
    *,
    devices: int = CONNECTIONS,
    connections_max: int = SENSORS,
    extra: str = "",
) -> AsyncIterator[Measured]:
    """A gateway with an empty buffer and a topic of its own."""
    for old in _buffer_files(directory):
        old.unlink()
    config = write_gateway(
        directory,
        bench.kafka.bootstrap,
        topic,
        devices=devices,
        connections_max=connections_max,
        extra=extra,
    )
    async with KafkaTopic(bench.kafka.bootstrap, topic), gateway(config) as sluice:
        yield sluice


def _buffer_files(directory: Path) -> list[Path]:
    """The buffer with its WAL, but not the socket beside it."""
    return [path for path in directory.glob("buffer.db*") if path.is_file()]


def _forget_cache(directory: Path) -> None:
    """Take the buffer out of the page cache, as after a power cut."""
    for path in _buffer_files(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _puback(port: int, device: str, secret: str) -> None:
    """Connect, publish one reading and wait for its PUBACK, as a sensor does."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(_connect_packet(device, secret) + _publish_packet(device))
        answer = b""
        while len(answer) < 8:
            answer += connection.recv(8 - len(answer)) or b"closed!!"
    if answer != b"\x20\x02\x00\x00\x40\x02\x00\x01":
        raise NotMeasuredError(f"CONNACK and PUBACK were expected, {answer!r} came")


async def _connect_tls(port: int, context: ssl.SSLContext, device: str, secret: str) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    writer.write(_connect_packet(device, secret) + _publish_packet(device))
    answer = await reader.readexactly(8)
    if answer != b"\x20\x02\x00\x00\x40\x02\x00\x01":
        raise NotMeasuredError(f"CONNACK and PUBACK were expected, {answer!r} came")
    return writer


def _connect_packet(device: str, secret: str) -> bytes:
    """CONNECT (section 3.1): clean session, user and password, keep-alive of ten minutes."""
    body = _text("MQTT") + b"\x04\xc2\x02\x58" + _text(device) + _text(device) + _text(secret)
    return bytes((0x10, len(body))) + body


def _publish_packet(device: str) -> bytes:
    """PUBLISH (section 3.3) of QoS 1 with packet id 1."""
    body = _text(f"device/{device}/thermo") + b"\x00\x01" + b'{"boot":"first","seq":1,"c":21.50}'
    return bytes((0x32, len(body))) + body


def _text(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(2, "big") + raw


def _make_certificate(certificate: Path, key: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
