"""Boards in simavr that a bench switches on: the real firmware of either build, and each board's own report."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice_sim.avr import (
    FIRMWARES,
    Board,
    Network,
    SimulationError,
    Wiring,
    build_firmware,
    inhibit_sampling,
    provision,
    start_board,
    stop_boards,
)
from sluice_sim.avr_faults import Build
from tests.bench.context import say
from tests.bench.processes import Measured, NotMeasuredError
from tests.support.board_audit import Known, known_of
from tests.support.waiting import patience

SEED = 6
DRAIN_S_MAX = 20.0
LEDGER_INTERVAL_S = 0.5
"""Seconds between two writes of a board's ledger (the runner's SAVE_INTERVAL_US)."""
BUILDS: tuple[Build, ...] = ("serial", "mqtt")


class Run(msgspec.Struct, frozen=True):
    """The runner's ledger of one boot of a board."""

    taken: int
    acknowledged: list[tuple[int, int]]
    """Closed ranges of sequences."""
    dropped: list[tuple[int, int]]
    stack: int
    """Most bytes that the stack took since the runner's start."""
    stack_room: int

    @property
    def held(self) -> int:
        """Samples that are neither acknowledged nor dropped."""
        return self.taken - sum(last - first + 1 for first, last in (*self.acknowledged, *self.dropped))


@dataclass(frozen=True, slots=True)
class Told:
    """A board's ledger at a moment."""

    at_s: float
    """UNIX time when it was written."""
    runs: list[Run]
    """Its boots so far."""

    @property
    def last(self) -> Run:
        """The boot that it is in."""
        return self.runs[-1]

    @property
    def acknowledged(self) -> int:
        """Samples of all boots."""
        return sum(last - first + 1 for run in self.runs for first, last in run.acknowledged)


def read_ledger(board: Board) -> Told:
    """Read the last report of a board. It writes one twice a second if anything has changed."""
    with board.ledger.open("rb") as ledger:
        lines = ledger.read().splitlines()
        at_s = os.fstat(ledger.fileno()).st_mtime_ns / 1e9
    return Told(at_s, [msgspec.json.decode(line, type=Run) for line in lines])


def known_by(board: Board) -> Known:
    """Read a board's knowledge of its samples, which is complete once the board is off."""
    return known_of(board.ledger.read_text(), board.samples.read_text())


def cpu_s(boards: Sequence[Board]) -> float:
    """User and system time of the boards' processes so far."""
    return sum(Measured(board.process, 0, board.ledger.parent, board.ledger).cpu_s for board in boards)


async def built(build: Build) -> Path:
    """A firmware that is up to date, and its runner. Raises NotMeasuredError."""
    try:
        return await asyncio.to_thread(build_firmware, build)
    except SimulationError as error:
        raise NotMeasuredError(str(error)) from error


@contextmanager
def boards(
    directory: Path,
    devices: Sequence[str],
    interval_ms: int,
    noise: float = 0.0,
    network_of: Callable[[str], Network] | None = None,
) -> Iterator[list[Board]]:
    """Boards for the length of a block: of the serial build, or of the one for MQTT, each with its network.

    Raises NotMeasuredError.
    """
    firmware = FIRMWARES["mqtt" if network_of else "serial"]
    wiring = Wiring(modem=network_of is not None, noise=noise)
    started: list[Board] = []
    try:
        for number, device in enumerate(devices):
            network = network_of(device) if network_of else None
            provision(directory / f"{device}.eeprom", device, interval_ms, network=network)
            started.append(start_board(directory, device, SEED + number, firmware, wiring))
        yield started
    except SimulationError as error:
        raise NotMeasuredError(str(error)) from error
    finally:
        stop_boards(started)


async def finish(started: Sequence[Board]) -> None:
    """Stop sampling, and wait until all samples of the boards have come through."""
    inhibit_sampling(started)
    end = time.monotonic() + patience(DRAIN_S_MAX)
    # A board that still samples has written its ledger just now. On a busy machine it hears of the jumper late.
    while left := [told.last.held for told in map(read_ledger, started) if told.last.held or is_fresh(told)]:
        if time.monotonic() > end:
            say(f"still held, or sampled, after {patience(DRAIN_S_MAX):.0f} s: {left} samples")
            return
        await asyncio.sleep(LEDGER_INTERVAL_S)


def is_fresh(told: Told) -> bool:
    """Whether a ledger was written so lately that its board may write it again."""
    return time.time() - told.at_s < patience(2 * LEDGER_INTERVAL_S + 0.2)
