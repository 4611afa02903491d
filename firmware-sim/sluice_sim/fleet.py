"""A fleet of MQTT sensors in one asyncio process, with a ledger of what the gateway acknowledged to each."""

import asyncio
import contextlib
import math
import os
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sluice_sim.fleet_faults import NONE, FaultRates, boot_of, faults_of, traits_of
from sluice_sim.fleet_ledger import BootLedger, samples_file, write_ledger
from sluice_sim.fleet_link import Address, SensorLink
from sluice_sim.mqtt_sensor import MqttSensor

LEDGER_INTERVAL_S: Final = 2.0
LEDGER_SHARE: Final = 20.0
"""Least pause between two writes of the ledger, as a multiple of the time that a write takes. So the ledger takes at
most a twentieth of the time."""
REPORT_INTERVAL_S: Final = 1.0
DRAIN_S_MAX: Final = 10.0
"""Seconds that the end waits for outstanding acknowledgements."""
CONNECTS_PER_S: Final = 500.0
"""Connections a second while the fleet starts."""
TICK_S: Final = 0.005
"""Least seconds between two rounds of samples."""
SPARE_FILES: Final = 64
"""Open files beside the sensors' connections."""


class FleetError(Exception):
    """The fleet cannot run here as it was asked for; the message says what to change."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of a fleet. Its device names are m001, m002, ..., which are the client identifiers too."""

    host: str
    port: int
    sensors: int
    interval_ms: float
    seconds: float = 0.0
    """Seconds in which samples are taken; 0 means until told to stop."""
    ledger: Path | None = None
    seed: int | None = None
    """A run with an equal seed has equal boots, values and faults. None gives boots that never were before."""
    secret: str | None = None
    """Each sensor's password, if given. The user name is the sensor's name."""
    rates: FaultRates = NONE
    time_scale: float = 1.0
    """Seconds of the faults' time that pass in a second. Sampling is not compressed."""
    roam: Address | None = None
    """The other gateway, to which sensors roam."""
    samples: Path | None = None
    """CSV file, which is overwritten: each sample, and the true time at which it was taken."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The fleet at one moment. Counts are of samples unless they say something else."""

    seconds: float
    sensors: int
    connected: int
    taken: int
    """The sum of `acknowledged`, `handed_over`, `dropped`, `vanished` and `waiting`."""
    sent: int
    acknowledged: int
    handed_over: int
    """Sent with QoS 0: not acknowledged, and no longer held."""
    dropped: int
    reported: int
    """Dropped, and reported to the gateway."""
    vanished: int
    """Lost to reboots."""
    waiting: int
    """Samples held by the sensors."""
    sent_per_s: float
    acknowledged_per_s: float
    connections: int
    reconnects: int
    duplicates: int
    """PUBLISH packets that repeated a sample under another packet identifier."""
    seed: int
    last_error: str | None
    """Why a sensor has no connection; None if no reason is known."""
    faults: dict[str, int] = field(default_factory=dict)
    """Counts of faults by kind."""


async def run_fleet(options: FleetOptions, stopping: asyncio.Event, report: Callable[[Progress], None]) -> Progress:
    """Run the fleet until `options.seconds` are over or `stopping` is set; return its last state.

    At the end, no more samples are taken, and the fleet waits for outstanding acknowledgements. The ledger is written
    at the start, every two seconds and at the end, whatever ends the run. Raises FleetError. Raises OSError if the
    ledger cannot be written at the start or the end, or if the samples cannot be written.
    """
    with samples_file(options.samples) as taken:
        return await _run(options, stopping, report, taken)


async def _run(
    options: FleetOptions,
    stopping: asyncio.Event,
    report: Callable[[Progress], None],
    taken: Callable[[str, str, int, float], None],
) -> Progress:
    loop = asyncio.get_running_loop()
    _allow_open_files(options)
    seed = int.from_bytes(os.urandom(6), "big") if options.seed is None else options.seed
    struck: Counter[str] = Counter()
    links = _make_links(options, seed, struck, taken)
    started = loop.time()
    stand = _Stand(links, started, seed, struck)
    _write_ledger(options.ledger, links)
    spread_s = max(options.interval_ms / 1000, options.sensors / CONNECTS_PER_S)
    try:
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(link.keep_connected(spread_s * index / len(links)), name=link.sensor.name)
                for index, link in enumerate(links)
            ]
            background.append(group.create_task(_report(stand, report), name="report"))
            background.append(group.create_task(_keep_ledger(options.ledger, links), name="ledger"))
            for link in links:
                link.expect_faults(started, options.time_scale)
            await _sample(links, options, stopping)
            for link in links:
                link.settle()
            await _drain(links)
            for task in background:
                task.cancel()
            await asyncio.gather(*(link.disconnect() for link in links))
    finally:
        for link in links:
            link.close()
        _write_ledger(options.ledger, links)
    return stand.summary(loop.time())


def _make_links(
    options: FleetOptions, seed: int, struck: Counter[str], taken: Callable[[str, str, int, float], None]
) -> list[SensorLink]:
    gateways: list[Address] = [(options.host, options.port)]
    if options.roam is not None:
        gateways.append(options.roam)
    rng = random.Random(seed)
    links = []
    for number in range(1, options.sensors + 1):
        name = f"m{number:03d}"
        traits = traits_of(seed, name, options.rates)
        sensor = MqttSensor(name, boot_of(seed, name, 1), options.secret, traits, seed)
        faults = faults_of(seed, name, options.rates, can_roam=len(gateways) > 1)
        links.append(SensorLink(sensor, gateways, seed, faults, struck, rng, taken))
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
            while any(link.sensor.waiting or link.sensor.unfinished for link in links):  # noqa: ASYNC110 - once, at the end
                await asyncio.sleep(0.05)


async def _report(stand: "_Stand", report: Callable[[Progress], None]) -> None:
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        report(stand.progress(asyncio.get_running_loop().time()))


async def _keep_ledger(path: Path | None, links: Sequence[SensorLink]) -> None:
    loop = asyncio.get_running_loop()
    took_s = 0.0
    while True:
        await asyncio.sleep(max(LEDGER_INTERVAL_S, LEDGER_SHARE * took_s))
        began_s = loop.time()
        # The sensors go on. If the trouble lasts, the write at the end raises.
        with contextlib.suppress(OSError):
            _write_ledger(path, links)
        took_s = loop.time() - began_s


def _write_ledger(path: Path | None, links: Sequence[SensorLink]) -> None:
    if path is not None:
        write_ledger(path, _boots(links))


def _boots(links: Sequence[SensorLink]) -> Iterator[BootLedger]:
    return (boot for link in links for boot in link.sensor.boots)


class _Stand:
    """Sums up the fleet, and remembers when it last did so."""

    def __init__(self, links: Sequence[SensorLink], started: float, seed: int, struck: Counter[str]) -> None:
        self._links = links
        self._started = started
        self._seed = seed
        self._struck = struck
        self._last = started
        self._last_acknowledged = 0
        self._last_sent = 0

    def summary(self, now: float) -> Progress:
        """Sum up the whole run. The rates are averages."""
        self._last, self._last_acknowledged, self._last_sent = self._started, 0, 0
        return self.progress(now)

    def progress(self, now: float) -> Progress:
        """Sum up the present state. The rates are of the time since the last call."""
        sums: Counter[str] = Counter()
        for boot in _boots(self._links):
            sums["taken"] += boot.taken
            sums["sent"] += boot.sent
            sums["acknowledged"] += boot.acknowledged.count
            sums["handed_over"] += boot.handed_over.count
            sums["dropped"] += boot.dropped.count
            sums["reported"] += boot.reported.count
            sums["vanished"] += boot.vanished.count
        sensors = [link.sensor for link in self._links]
        passed_s = max(now - self._last, 0.001)
        acknowledged_per_s = (sums["acknowledged"] - self._last_acknowledged) / passed_s
        sent_per_s = (sums["sent"] - self._last_sent) / passed_s
        self._last, self._last_acknowledged, self._last_sent = now, sums["acknowledged"], sums["sent"]
        return Progress(
            seconds=round(now - self._started, 1),
            sensors=len(sensors),
            connected=sum(sensor.accepted for sensor in sensors),
            **sums,
            waiting=sum(sensor.waiting for sensor in sensors),
            sent_per_s=round(sent_per_s, 1),
            acknowledged_per_s=round(acknowledged_per_s, 1),
            connections=sum(link.connections for link in self._links),
            reconnects=sum(max(link.connections - 1, 0) for link in self._links),
            duplicates=sum(sensor.duplicates for sensor in sensors),
            seed=self._seed,
            last_error=next(
                (link.last_error for link in self._links if link.last_error and not link.sensor.accepted), None
            ),
            faults=dict(self._struck),
        )


def _allow_open_files(options: FleetOptions) -> None:
    """Raise the soft limit of open files, mostly 1024, as far as this fleet needs and the hard limit allows.

    Raises FleetError if the hard limit does not even allow a connection for each sensor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = options.sensors + SPARE_FILES
    # A sensor that vanishes leaves a connection behind, which stays open for a while.
    wanted = 2 * options.sensors + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < least:
        raise FleetError(
            f"{options.sensors} sensors need {least} open files, and this process may have {hard}: raise the hard "
            f"limit (`ulimit -Hn`), or use --sensors {max(hard - SPARE_FILES, 1)} and several fleets"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
