"""50 gateways whose broker comes back: how their attempts to reach it spread over time."""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median

from aiokafka import AIOKafkaConsumer, TopicPartition

from demo.kafka_broker import kafka_broker
from tests.bench.context import Bench, say
from tests.bench.parts_uplink_site import STREAM, live_sensors, write_config
from tests.bench.processes import SLUICE, Measured, NotMeasuredError, answers, listener_port, spawn, stop
from tests.bench.report import Result
from tests.support import kafka_admin

GATEWAYS, GATEWAYS_QUICK = 50, 5
AWAY_S, AWAY_QUICK_S = 60, 12
"""Long enough that every gateway has come to its longest pause."""
AFTER_S = 20
START_S_MAX = 180.0
BACK_S_MAX = 60.0
READINGS_PER_S = 1
"""Readings a second of each gateway. A gateway without any would not miss its broker until its next heartbeat."""
EVENTS = "storm-events"
CHUNK_BYTES = 65_536
BAR_MAX = 60


async def storm(bench: Bench) -> list[Result]:
    """50 gateways, one broker that goes and comes back: connections a second, as a histogram."""
    count, away_s = bench.pick(GATEWAYS, GATEWAYS_QUICK), bench.pick(AWAY_S, AWAY_QUICK_S)
    directory = bench.directory / "storm"
    async with AsyncExitStack() as stack:
        door = await stack.enter_async_context(_door())
        kafka = stack.enter_context(kafka_broker(directory / "kafka", gateway_port=door.port))
        assert kafka.gateway_listener_port is not None
        await kafka_admin.create_topic(kafka.bootstrap, EVENTS)
        heard = await stack.enter_async_context(_heard(kafka.bootstrap))
        door.open(kafka.gateway_listener_port)
        processes = stack.enter_context(_gateways(directory, door.port, count))
        for each in processes:
            await answers(each, START_S_MAX)
            await stack.enter_async_context(live_sensors(each.port, STREAM, READINGS_PER_S))
        await _until_all(heard, 0.0, count, START_S_MAX)
        say(f"storm: {count} gateways are up, {sum(each.rss_mb for each in processes):.0f} MB resident in all")
        away = time.time()
        cpu_s = sum(each.cpu_s for each in processes)
        door.shut()
        await asyncio.sleep(away_s)
        cpu_share = (sum(each.cpu_s for each in processes) - cpu_s) / away_s / count
        back = time.time()
        door.open(kafka.gateway_listener_port)
        await _until_all(heard, back, count, BACK_S_MAX)
        await asyncio.sleep(max(0.0, back + AFTER_S - time.time()))
        first_s = sorted(min(at for at in times if at >= back) - back for times in heard.values())
        attempts = list(door.attempts)
    by_second = per_second(attempts, away, back + AFTER_S)
    while_away, after = by_second[: int(away_s)], by_second[int(away_s) :]
    for line in histogram(by_second, int(away_s)):
        say(f"storm: {line}")
    # In the first seconds the pauses are shortest. The lasting rate comes afterwards.
    steady = while_away[len(while_away) // 2 :]
    return [
        Result("storm_all_back_s", first_s[-1], "s", None, f"{count} gateways, away for {away_s} s"),
        Result("storm_median_back_s", median(first_s), "s"),
        Result("storm_connects_per_s_peak", max(after), "1/s", None, f"each second since it is back: {after}"),
        Result("storm_connects_each", sum(after) / count, "connections", None, "for one gateway to be back"),
        Result("storm_attempts_per_s_while_away", sum(steady) / len(steady), "1/s", None, f"peak {max(while_away)}"),
        Result("storm_cpu_share_while_away", cpu_share, "of a core", None, "of one gateway"),
    ]


def per_second(times: Sequence[float], begin: float, end: float) -> list[int]:
    """Count the times in each second from `begin` to `end`."""
    counted = Counter(int(each - begin) for each in times if begin <= each < end)
    return [counted[second] for second in range(int(end - begin))]


def histogram(by_second: Sequence[int], back: int) -> list[str]:
    """A line for each second, with a bar; seconds count from the one in which the broker is back."""
    scale = max(1.0, max(by_second, default=0) / BAR_MAX)
    return [
        f"{second - back:+4d} s {count:4d} {'#' * round(count / scale)}".rstrip()
        for second, count in enumerate(by_second)
    ]


# -- the gateways ---------------------------------------------------------------------------------


@contextmanager
def _gateways(directory: Path, kafka_port: int, count: int) -> Iterator[list[Measured]]:
    """Run `count` daemons for the length of a block."""
    with ExitStack() as stack:
        started = []
        for number in range(count):
            name = f"gw{number:02d}"
            config = write_config(directory / name, f"127.0.0.1:{kafka_port}", "storm", name=name)
            process = spawn([SLUICE, "run", "--config", config], config.parent, listener_port(config), "gateway.log")
            stack.callback(stop, process)
            started.append(process)
        try:
            yield started
        finally:
            # All are asked to end before any is waited for.
            for process in started:
                process.process.terminate()


@asynccontextmanager
async def _heard(bootstrap: str) -> AsyncIterator[dict[str, list[float]]]:
    """Collect the append times (Unix) of each gateway's heartbeats and events, for the length of a block."""
    heard: dict[str, list[float]] = {}
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    consumer.assign([TopicPartition(EVENTS, 0)])

    async def listen() -> None:
        async for record in consumer:
            heard.setdefault(record.key.decode(), []).append(record.timestamp / 1000)

    listening = asyncio.create_task(listen(), name="heartbeats")
    try:
        yield heard
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
        await consumer.stop()


async def _until_all(heard: dict[str, list[float]], since: float, count: int, patience_s: float) -> None:
    """Wait until `count` gateways were heard since a moment."""
    deadline = time.monotonic() + patience_s
    while (there := sum(times[-1] >= since for times in heard.values())) < count:
        if time.monotonic() > deadline:
            raise NotMeasuredError(f"{there} of {count} gateways are heard after {patience_s:.0f} s")
        await asyncio.sleep(0.1)


# -- the door before the broker -------------------------------------------------------------------


class _Door:
    """Takes connections for the broker, and counts them: open, it passes them on; shut, it ends them at once."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.attempts: list[float] = []
        """When each connection came (Unix time)."""
        self._target: int | None = None
        self._passing: dict[asyncio.Task[None], None] = {}

    def open(self, target: int) -> None:
        """Pass on to this port."""
        self._target = target

    def shut(self) -> None:
        """End all that is passed on."""
        self._target = None
        for task in self._passing:
            task.cancel()

    async def take(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            self.attempts.append(time.time())
            if self._target is None:
                client.close()
                continue
            task = asyncio.create_task(_pass(client, self._target), name="connection")
            self._passing[task] = None
            task.add_done_callback(lambda ended: self._passing.pop(ended, None))

    async def close(self) -> None:
        passing = list(self._passing)
        self.shut()
        await asyncio.gather(*passing, return_exceptions=True)
        self._listener.close()


@asynccontextmanager
async def _door() -> AsyncIterator[_Door]:
    door = _Door()
    taking = asyncio.create_task(door.take(), name="door")
    try:
        yield door
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await door.close()


async def _pass(client: socket.socket, port: int) -> None:
    with client, socket.socket() as broker:
        client.setblocking(False)
        broker.setblocking(False)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_connect(broker, ("127.0.0.1", port))
            pumps = {asyncio.create_task(_pump(*ends)) for ends in ((client, broker), (broker, client))}
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK_BYTES):
        await loop.sock_sendall(sink, data)
