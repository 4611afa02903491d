"""A fleet of MQTT sensors in one asyncio process, with a ledger of what the gateway acknowledged to each."""

import asyncio
import contextlib
import json
import math
import os
import random
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sluice_sim.mqtt_sensor import DISCONNECT, PINGREQ, LinkError, MqttSensor

LEDGER_INTERVAL_S: Final = 2.0
REPORT_INTERVAL_S: Final = 1.0
DRAIN_S_MAX: Final = 10.0
"""How long the end waits for outstanding acknowledgements."""
CONNECT_TIMEOUT_S: Final = 5.0
BACKOFF_S_MIN: Final = 0.25
BACKOFF_S_MAX: Final = 5.0
SILENCE_S_MAX: Final = 20.0
"""How long a sensor waits for a PUBACK or PINGRESP before it takes the connection for dead."""
CONNECTS_PER_S: Final = 500.0
"""How fast the fleet starts."""
TICK_S: Final = 0.005
"""How finely samples are spread."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What a fleet is made of. The device names are m001, m002, ..., which are their client identifiers too."""

    host: str
    port: int
    sensors: int
    interval_ms: float
    seconds: float = 0.0
    """How long samples are taken; 0 means until told to stop."""
    ledger: Path | None = None
    seed: int | None = None
    """The same seed gives the same boots, values and pauses; None gives boots that never were before."""
    secret: str | None = None
    """Where given, each sensor's password; its name is the user name."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the fleet looks like at one moment."""

    seconds: float
    sensors: int
    connected: int
    taken: int
    sent: int
    acknowledged: int
    dropped: int
    waiting: int
    """Samples held by the sensors."""
    acknowledged_per_s: float
    reconnects: int
    last_error: str | None
    """Why a sensor was last without a connection."""


class SensorLink(asyncio.Protocol):
    """A sensor and its connection: connects, sends, notices that the gateway is gone, connects again."""

    def __init__(self, sensor: MqttSensor, rng: random.Random) -> None:
        self.sensor = sensor
        self.connections = 0
        self.last_error: str | None = None
        self._rng = rng
        self._base = rng.uniform(16.0, 24.0)
        self._swing = rng.uniform(1.0, 5.0)
        self._phase = rng.uniform(0.0, math.tau)
        self._period = rng.uniform(300.0, 900.0)
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False
        self._pinged = False

    def sample(self) -> None:
        """Take a sample: a slow sine of the sensor's own, and noise."""
        angle = math.tau * self.sensor.taken / self._period + self._phase
        self._send(self.sensor.sample(self._base + self._swing * math.sin(angle) + self._rng.gauss(0.0, 0.05)))

    async def keep_connected(self, host: str, port: int, delay_s: float) -> None:
        """Connect after `delay_s`, and again whenever the connection is gone, with jittered back-off."""
        loop = asyncio.get_running_loop()
        backoff_s = BACKOFF_S_MIN
        await asyncio.sleep(delay_s)
        while True:
            closed = self._closed = loop.create_future()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.create_connection(lambda: self, host, port)
            except TimeoutError:
                self.last_error = f"no answer from {host}:{port} within {CONNECT_TIMEOUT_S:.0f} s"
            except OSError as error:
                # asyncio's own text repeats the address; a name that is not known has no errno of the system.
                number = error.errno or 0
                self.last_error = f"{host}:{port}: {os.strerror(number) if number > 0 else error}"
            else:
                before = self.connections
                await closed
                if self.connections > before:
                    backoff_s = BACKOFF_S_MIN
            await asyncio.sleep(self._rng.uniform(0.5, 1.0) * backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def disconnect(self) -> None:
        """End the present connection as the standard wants it, with DISCONNECT."""
        if self._transport is None:
            return
        self._closed = asyncio.get_running_loop().create_future()
        self._send(DISCONNECT)
        self.sensor.disconnected()
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._closed
        self.cut()

    def cut(self) -> None:
        """End the present connection at once, as a power cut would."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection makes
        self._transport = transport
        self._heard = self._pinged = False
        transport.write(self.sensor.connect())
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S_MAX, self._check_silence)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        was_accepted = self.sensor.accepted
        try:
            answer = self.sensor.receive(data)
        except LinkError as error:
            self._give_up(str(error))
            return
        if self.sensor.accepted and not was_accepted:
            self.connections += 1
            self.last_error = None
        self._send(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.sensor.accepted:
            self.last_error = "the gateway closed the connection" if exc is None else str(exc)
        self.sensor.disconnected()
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    def _send(self, packets: bytes) -> None:
        if packets and self._transport is not None and not self._transport.is_closing():
            self._transport.write(packets)

    def _check_silence(self) -> None:
        """Ask a silent gateway for a sign of life; leave one that owes an answer."""
        if not self._heard and (self._pinged or self.sensor.unacknowledged or not self.sensor.accepted):
            self._give_up(f"nothing from the gateway for {SILENCE_S_MAX:.0f} s")
            return
        self._pinged = not self._heard
        if self._pinged:
            self._send(PINGREQ)
        self._heard = False
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S_MAX, self._check_silence)

    def _give_up(self, why: str) -> None:
        self.last_error = why
        self.sensor.disconnected()
        self.cut()


async def run_fleet(options: FleetOptions, stopping: asyncio.Event, report: Callable[[Progress], None]) -> Progress:
    """Run the fleet until `options.seconds` are over or `stopping` is set; give its last state.

    Then no more samples are taken, and outstanding acknowledgements are waited for. The ledger is written
    at the start, every two seconds and at the end, whatever ends it. Raises OSError where it cannot be written
    at the start or the end.
    """
    loop = asyncio.get_running_loop()
    _allow_open_files(options.sensors + 64)
    links = _make_links(options)
    started = loop.time()
    stand = _Stand(links, started)
    _write_ledger(options.ledger, links)
    spread_s = max(options.interval_ms / 1000, options.sensors / CONNECTS_PER_S)
    try:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(
                    link.keep_connected(options.host, options.port, spread_s * index / len(links)),
                    name=link.sensor.name,
                )
                for index, link in enumerate(links)
            ]
            background.append(group.create_task(_report(stand, report), name="report"))
            background.append(group.create_task(_keep_ledger(options.ledger, links), name="ledger"))
            await _sample(links, options, stopping)
            await _drain(links)
            for task in background:
                task.cancel()
            await asyncio.gather(*(link.disconnect() for link in links))
    finally:
        for link in links:
            link.cut()
        _write_ledger(options.ledger, links)
    return stand.progress(loop.time())


def _make_links(options: FleetOptions) -> list[SensorLink]:
    seed = int.from_bytes(os.urandom(8), "big") if options.seed is None else options.seed
    rng = random.Random(seed)
    links = []
    for number in range(1, options.sensors + 1):
        own = random.Random(rng.getrandbits(64))
        boot = f"1-{own.getrandbits(32):08x}"
        links.append(SensorLink(MqttSensor(f"m{number:03d}", boot, options.secret), own))
    return links


async def _sample(links: Sequence[SensorLink], options: FleetOptions, stopping: asyncio.Event) -> None:
    """Let the sensors sample one after another, evenly over the interval, until the time is over."""
    loop = asyncio.get_running_loop()
    step_s = options.interval_ms / 1000 / len(links)
    started = loop.time()
    ends = started + options.seconds if options.seconds else math.inf
    taken = 0
    while not stopping.is_set():
        now = loop.time()
        due = math.ceil((min(now, ends) - started) / step_s)
        for number in range(taken, due):
            links[number % len(links)].sample()
        taken = max(taken, due)
        if now >= ends:
            return
        wait_s = max(min(started + taken * step_s, ends) - now, TICK_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await stopping.wait()


async def _drain(links: Sequence[SensorLink]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S_MAX):
            while any(link.sensor.waiting for link in links):  # noqa: ASYNC110 - once, at the end
                await asyncio.sleep(0.05)


async def _report(stand: "_Stand", report: Callable[[Progress], None]) -> None:
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        report(stand.progress(asyncio.get_running_loop().time()))


async def _keep_ledger(path: Path | None, links: Sequence[SensorLink]) -> None:
    while True:
        await asyncio.sleep(LEDGER_INTERVAL_S)
        # The sensors go on; the write at the end says so if the trouble lasts.
        with contextlib.suppress(OSError):
            _write_ledger(path, links)


def _write_ledger(path: Path | None, links: Sequence[SensorLink]) -> None:
    """Write one JSON line for each sensor, to a file beside and renamed, so that a reader sees whole ones."""
    if path is None:
        return
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        for link in links:
            file.write(json.dumps(link.sensor.ledger(), separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


class _Stand:
    """Sums up the fleet, and remembers when it last did so."""

    def __init__(self, links: Sequence[SensorLink], started: float) -> None:
        self._links = links
        self._started = started
        self._last = started
        self._last_acknowledged = 0

    def progress(self, now: float) -> Progress:
        sensors = [link.sensor for link in self._links]
        acknowledged = sum(sensor.acknowledged.count for sensor in sensors)
        rate = (acknowledged - self._last_acknowledged) / max(now - self._last, 0.001)
        self._last, self._last_acknowledged = now, acknowledged
        return Progress(
            seconds=round(now - self._started, 1),
            sensors=len(sensors),
            connected=sum(sensor.accepted for sensor in sensors),
            taken=sum(sensor.taken for sensor in sensors),
            sent=sum(sensor.sent for sensor in sensors),
            acknowledged=acknowledged,
            dropped=sum(sensor.dropped.count for sensor in sensors),
            waiting=sum(sensor.waiting for sensor in sensors),
            acknowledged_per_s=round(rate, 1),
            reconnects=sum(max(link.connections - 1, 0) for link in self._links),
            last_error=next(
                (link.last_error for link in self._links if link.last_error and not link.sensor.accepted), None
            ),
        )


def _allow_open_files(needed: int) -> None:
    """Raise the soft limit of open files, mostly 1024, as far as this fleet needs and the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
