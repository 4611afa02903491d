"""Event times against the truth: real firmware in simavr, oscillators that are off, and the chips' own cycles as judge.

A board's `.samples` say when each sample was taken, in this machine's CLOCK_BOOTTIME; neither the firmware nor the
gateway has a part in that. All boards run side by side, through one minute at most: each has its fate.
"""

import asyncio
import random
import secrets
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.buffer.rows import Row
from gateway.clock.arrival_buckets import LEAST_DELAY_US
from gateway.clock.kernel_clock import boottime_us
from gateway.clock.oscillators import OSCILLATORS
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.intake.front_door import FrontDoor
from gateway.intake.routes import compile_routes
from gateway.listener.listener import MqttListener
from gateway.serial_lines.serial_ingress import SerialIngress
from gateway.settings import GatewaySettings, KafkaSettings, ListenerSettings, RouteSettings, SerialSettings
from sluice_sim.avr import FIRMWARES, Board, Wiring, build_firmware, inhibit_sampling, start_board, stop_boards
from sluice_sim.provision import Network, provision
from tests.support.board_scene import is_settled
from tests.support.buffers import opened, rows, series_of
from tests.support.clock_world import Judged, share
from tests.support.gateways import free_port
from tests.support.sizes import size
from tests.support.waiting import patience

pytestmark = [pytest.mark.avr, pytest.mark.campaign(seconds=10)]

GATEWAY = GatewaySettings("gw1")
KAFKA = KafkaSettings(("127.0.0.1:9092",))
SERIAL_TOPIC = "serial/{device}/{stream}"
ROUTES = (
    RouteSettings(SERIAL_TOPIC, "device-{stream}"),
    RouteSettings("device/{device}/{stream}", "device-{stream}", identity="json"),
)
PPMS = size((-8000, 8000), (-8000, -2000, 0, 50, 8000))
INTERVAL_MS = 50
RING_SAMPLES = 64
RUNS_S = size(32.0, 68.0)
"""A sensor that is probed seldom then has its second probe of those, after the first few."""
PROBE_INTERVALS_S = {"often": 1.0, "seldom": size(24.0, 60.0), "fates": 2.0}
SETTLE_S_MAX = 60.0
READINGS_MIN = 300
ARRIVALS_LOOKED_AT = 100
"""Readings of a bucket on MQTT: five seconds' worth. Each observation is the quickest of ten seconds or more."""
WRAP_MS = 2**32
WRAPS_AFTER_MS = size(10_000, 30_000)


@dataclass(frozen=True)
class Timed:
    """A reading as it is on disk, and when it was taken in truth."""

    reading: Row
    true_us: int

    @property
    def judged(self) -> Judged:
        """For readings that have a time of their own."""
        assert self.reading.datum.event_us is not None
        return Judged(self.true_us, self.reading.datum.event_us, self.reading.datum.event_error_us)


@dataclass
class Outcome:
    ppm: dict[str, float] = field(default_factory=dict)
    timed: dict[str, list[Timed]] = field(default_factory=lambda: defaultdict(list))
    """Times of readings by board, in the order in which they were stored."""
    drift_ppm: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Drift of each board's last run, as the gateway found it."""
    faults: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Text for `pytest -s`."""
        lines = [f"{'board':>10} {'ppm':>6} {'readings':>8} {'outside':>7}  error ms p50, max   bound ms p50, max"]
        for name, stored in self.timed.items():
            timed = [each for each in stored if each.reading.datum.event_us is not None]
            if not timed:
                lines.append(f"{name:>10} none of {len(stored)} readings has a time of its own")
                continue
            off = sorted(each.judged.off_us / 1000 for each in timed)
            bound = sorted(each.judged.error_us / 1000 for each in timed)
            outside = sum(not each.judged.is_within for each in timed)
            lines.append(
                f"{name:>10} {self.ppm[name]:6.0f} {len(timed):8} {outside:7}"
                f"{share(off, 0.5):11.3f} {off[-1]:8.3f}{share(bound, 0.5):10.3f} {bound[-1]:8.3f}"
            )
        return "\n".join(lines)


# -- what becomes of boards meanwhile ------------------------------------------------------------


async def do(board: Board, command: str) -> None:
    await asyncio.to_thread(board.do, command)


async def is_reset(board: Board) -> None:
    for command in ("reset", "power-cycle 300"):
        await asyncio.sleep(RUNS_S / 3)
        await do(board, command)


async def loses_its_cable(board: Board) -> None:
    """Stop the gateway for as long as a board's ring holds its samples."""
    for command in ("plug same", "plug"):
        await asyncio.sleep(RUNS_S / 4)
        await do(board, "unplug")
        await asyncio.sleep(0.6 * RING_SAMPLES * INTERVAL_MS / 1000)
        await do(board, command)


async def is_stalled(board: Board) -> None:
    """Stop the board's process now and then, as a busy machine would. It makes up for the time."""
    draw = random.Random(1)  # noqa: S311 - repeatable is the point
    ends = time.monotonic() + RUNS_S - 1
    while time.monotonic() < ends:
        await asyncio.sleep(draw.uniform(0.0, 0.7))
        board.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(draw.uniform(0.0, 0.3))
        finally:
            board.process.send_signal(signal.SIGCONT)


async def loses_its_radio(board: Board) -> None:
    await asyncio.sleep(RUNS_S / 2)
    await do(board, "wifi off")
    await asyncio.sleep(3)
    await do(board, "wifi on")


async def is_let_be(_board: Board) -> None:
    """Nothing is done to it; see WRAPS_AFTER_MS."""


async def is_busy() -> None:
    """The gateway itself is: it reads late, and is late to send."""
    while True:
        await asyncio.sleep(4)
        time.sleep(0.05)  # noqa: ASYNC251 - that is what is wanted


FATES: dict[str, tuple[float, Callable[[Board], Awaitable[None]]]] = {
    "reset": (-8000, is_reset),
    "unplugged": (2000, loses_its_cable),
    "stalled": (8000, is_stalled),
    "wraps": (8000, is_let_be),
}
BY_MQTT: dict[str, tuple[float, Callable[[Board], Awaitable[None]]]] = {
    "mqtt-slow": (-8000, is_let_be),
    "mqtt-fast": (8000, is_let_be),
    "mqtt-out": (50, loses_its_radio),
}
STEADY = [f"{group}{number}" for group in ("often", "seldom") for number in range(len(PPMS))]


# -- the minute ----------------------------------------------------------------------------------


def switch_on(folder: Path, name: str, ppm: float, seed: int, network: Network) -> Board:
    folder.mkdir(exist_ok=True)
    clock_start_ms = WRAP_MS - WRAPS_AFTER_MS if name == "wraps" else None
    provision(folder / f"{name}.eeprom", name, INTERVAL_MS, network=network, clock_start_ms=clock_start_ms)
    modem = name in BY_MQTT
    return start_board(folder, name, seed, FIRMWARES["mqtt" if modem else "serial"], Wiring(modem=modem, ppm=ppm))


@dataclass
class Minute:
    """The boards, and a gateway from its lines and its listener to its disk."""

    folder: Path
    port: int = field(default_factory=free_port)
    boards: dict[str, Board] = field(default_factory=dict)
    clocks: DeviceClocks = field(default_factory=DeviceClocks)
    rows: list[tuple[str, Row]] = field(default_factory=list)
    """Board and row of each reading, in the order in which they were stored."""

    async def run(self) -> None:
        """Serve them until each has had its fate, and all that it measured is stored."""
        reserved = frozenset((KAFKA.events_topic, KAFKA.quarantine_topic))
        routes = compile_routes(ROUTES, None, reserved, SERIAL_TOPIC)
        async with opened(self.folder / "buffer.db") as buffer:
            door = FrontDoor(buffer, routes, GATEWAY, KAFKA, boottime_us, self.clocks)
            async with asyncio.TaskGroup() as tasks:
                ends = [tasks.create_task(part) for part in (*self._parts(door), is_busy())]
                fates = [fate(self.boards[name]) for name, (_, fate) in (FATES | BY_MQTT).items()]
                await asyncio.gather(asyncio.sleep(RUNS_S), *fates)
                inhibit_sampling([*self.boards.values()])
                async with asyncio.timeout(patience(SETTLE_S_MAX)):
                    while not all(is_settled(board) for board in self.boards.values()):
                        await asyncio.sleep(0.5)
                for task in ends:
                    task.cancel()
            for row in await rows(buffer):
                series = await series_of(buffer, row.series)
                if not series.is_of_gateway:
                    self.rows.append((series.device, row))

    def _parts(self, door: FrontDoor) -> Iterator[Coroutine[Any, Any, None]]:
        """The parts that take readings in."""
        yield MqttListener(ListenerSettings(port=self.port, anonymous=True), door, boottime_us).run()
        for group, interval_s in PROBE_INTERVALS_S.items():
            settings = SerialSettings(
                (f"{self.folder / group}/tty-*",),
                topic=SERIAL_TOPIC,
                probe_interval_s=interval_s,
                scan_interval_s=0.1,
            )
            yield SerialIngress(settings, door, boottime_us, lambda: secrets.randbits(32), self.clocks).run()

    def timed(self) -> Iterator[tuple[str, Timed]]:
        """All that was stored, by board, with the truth."""
        true_us = {name: board.taken_us() for name, board in self.boards.items()}
        for name, row in self.rows:
            assert row.datum.device_boot is not None
            assert row.datum.device_sequence is not None
            yield name, Timed(row, true_us[name][row.datum.device_boot, row.datum.device_sequence])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    build_firmware("serial")
    build_firmware("mqtt")
    made, minute = Outcome(), Minute(tmp_path_factory.mktemp("boards"))
    made.ppm |= {name: PPMS[int(name[-1])] for name in STEADY}
    made.ppm |= {name: ppm for name, (ppm, _) in (FATES | BY_MQTT).items()}
    try:
        for seed, (name, ppm) in enumerate(made.ppm.items()):
            group = name[:-1] if name in STEADY else "fates"
            minute.boards[name] = switch_on(minute.folder / group, name, ppm, seed, Network(port=minute.port))
        asyncio.run(minute.run())
    finally:
        stop_boards([*minute.boards.values()])
    for name, timed in minute.timed():
        made.timed[name].append(timed)
    for name in STEADY:
        clock = minute.clocks.find(name, made.timed[name][-1].reading.datum.device_boot or "")
        assert clock is not None
        assert clock.fit.drift_ppm is not None
        made.drift_ppm[name] = clock.fit.drift_ppm
    made.faults = {name: [fault["fault"] for fault in board.faults()] for name, board in minute.boards.items()}
    print(made)  # noqa: T201 - `pytest -s` shows it, and a failure
    return made


def is_congested(timed: Sequence[Timed]) -> bool:
    """Whether not even the quickest of readings that came one after the other was as quick as is assumed."""
    delays_us = [each.reading.datum.received_us - each.true_us for each in timed]
    starts = range(0, len(delays_us), ARRIVALS_LOOKED_AT)
    return any(min(delays_us[at : at + ARRIVALS_LOOKED_AT]) >= LEAST_DELAY_US for at in starts)


def test_no_board_had_a_clock_that_stood_still(outcome: Outcome) -> None:
    """For ten seconds, as its process did: nothing could be said of its times then."""
    assert outcome.timed.keys() == outcome.ppm.keys()
    assert not [fault for faults in outcome.faults.values() for fault in faults if "stood still" in fault]
    for timed in outcome.timed.values():
        assert len(timed) >= READINGS_MIN
        assert all(each.true_us <= each.reading.datum.received_us for each in timed), "or the judge itself is wrong"


def test_every_reading_of_a_serial_line_was_taken_within_the_bound_of_its_time(outcome: Outcome) -> None:
    """This holds however busy this machine is."""
    for name in [*STEADY, *FATES]:
        timed = outcome.timed[name]
        # A PROBE goes before the first ACK, and no DATA comes before that: each has a time of its own.
        assert all(each.reading.datum.event_us is not None for each in timed)
        outside = [each for each in timed if not each.judged.is_within]
        assert not outside, f"{name}: {[(each.reading.datum.device_sequence, each.judged) for each in outside[:5]]}"


def test_every_reading_by_mqtt_was_taken_within_its_bound_as_long_as_some_were_quick(outcome: Outcome) -> None:
    for name in BY_MQTT:
        timed = [each for each in outcome.timed[name] if each.reading.datum.event_us is not None]
        assert len(timed) >= ARRIVALS_LOOKED_AT, "it takes some ten seconds to learn"
        outside = [each for each in timed if not each.judged.is_within]
        assert not outside or is_congested(outcome.timed[name]), f"{name}: {[each.judged for each in outside[:5]]}"


def test_times_are_better_than_those_of_receipt_and_bounds_are_of_use(outcome: Outcome) -> None:
    """On any machine: the busier it is, the longer a round trip takes, and the later a reading comes too."""
    for name in STEADY:
        timed = outcome.timed[name]
        bound_us = share(sorted(each.judged.error_us for each in timed), 0.5)
        assert bound_us < 1_000_000, name
        if name.startswith("often"):
            late_us = share(sorted(each.reading.datum.received_us - each.true_us for each in timed), 0.5)
            assert share(sorted(each.judged.off_us for each in timed), 0.5) < late_us, name


def test_the_rate_that_was_found_contains_the_true_one(outcome: Outcome) -> None:
    for name in STEADY:
        least, most = outcome.drift_ppm[name]
        assert least <= outcome.ppm[name] <= most, name
        if name.startswith("often"):
            assert most - least < OSCILLATORS["rc"].error_ppm, "it is known better than by what such oscillators do"


def test_a_tick_that_wraps_leaves_no_trace(outcome: Outcome) -> None:
    timed = outcome.timed["wraps"]
    ticks = [each.reading.datum.tick_ms for each in timed if each.reading.datum.tick_ms is not None]
    assert ticks[0] > WRAP_MS - WRAPS_AFTER_MS - 1 > ticks[-1]
    # A time may come before the one that was stored before it, where a bound has become narrower in between.
    earliest_us = [each.judged.event_us - each.judged.error_us for each in timed]
    latest_us = [each.judged.event_us + each.judged.error_us for each in timed]
    assert all(latest > earliest for earliest, latest in zip(earliest_us, latest_us[1:], strict=False))


def test_each_run_of_a_board_that_is_reset_has_its_clock(outcome: Outcome) -> None:
    timed = outcome.timed["reset"]
    runs = {each.reading.datum.device_boot for each in timed}
    assert len(runs) == 3
    for run in runs:
        of_run = [each for each in timed if each.reading.datum.device_boot == run]
        assert min(each.reading.datum.device_sequence or 0 for each in of_run) == 0, "from the first sample on"


def test_what_a_ring_held_while_the_cable_was_out_has_its_own_time(outcome: Outcome) -> None:
    waited = [each for each in outcome.timed["unplugged"] if each.reading.datum.received_us - each.true_us > 1_000_000]
    assert len(waited) >= 10
    assert max(each.judged.off_us for each in waited) < 500_000, "not that of its receipt"
