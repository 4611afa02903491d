"""8-bit sensors: build the firmware, and run several boards in simavr with faults on a schedule, one process each."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from sluice_sim.avr_board import (
    BUILD,
    FIRMWARE,
    FIRMWARES,
    PROJECT,
    RUNNER,
    Board,
    RefusedError,
    SimulationError,
    Wiring,
    board_command,
    give_command,
    inhibit_sampling,
    start_board,
    stop_boards,
)
from sluice_sim.avr_faults import Build, Fault, FaultRate, schedule
from sluice_sim.provision import SAMPLE_INTERVAL_MS_MAX, SAMPLE_INTERVAL_MS_MIN, Network, provision

__all__ = [
    "BUILD",
    "FIRMWARE",
    "FIRMWARES",
    "PREFIXES",
    "PROJECT",
    "RUNNER",
    "SAMPLE_INTERVAL_MS_MAX",
    "SAMPLE_INTERVAL_MS_MIN",
    "AvrOptions",
    "Board",
    "Network",
    "SimulationError",
    "Wiring",
    "board_command",
    "build_firmware",
    "give_command",
    "inhibit_sampling",
    "main_avr",
    "provision",
    "start_board",
    "start_boards",
    "stop_boards",
    "summary",
]

PREFIXES: Final[dict[Build, str]] = {"serial": "s", "mqtt": "w"}
"""Default prefixes of the boards' names. They differ, as two builds at one gateway are different devices."""
LOCK: Final = ".sluice-sim.lock"
_LOOK_INTERVAL_S: Final = 0.05
_REACH_SECONDS_MAX: Final = 10.0
"""Seconds until a board without a gateway is reported."""
_ALONE: Final[dict[Build, tuple[str, str]]] = {
    "serial": ("no gateway has opened its port yet", "no gateway opened its port"),
    "mqtt": ("no listener has let it in yet", "no listener let it in"),
}
"""Words for a board without a gateway: meanwhile, and at the end."""


@dataclass(frozen=True, slots=True)
class AvrOptions:
    """Options that several boards share."""

    build: Build = "serial"
    network: Network = field(default_factory=Network)
    """The gateway of boards of the MQTT build, and the way to it."""
    noise: float = 0.0
    ppm: float = 0.0
    auto_reset: bool = False
    clock_start_ms: int | None = None
    faults: FaultRate | None = None
    as_json: bool = False
    """Print JSON lines instead of a table."""


_PLAIN: Final = AvrOptions()


def build_firmware(build: Build = "serial") -> Path:
    """Build one of the firmwares and the runner if they are out of date; return the firmware's ELF file.

    The runner is `RUNNER`. `sensor-BUILD.size` beside it has the use of flash and RAM. Raises SimulationError.
    """
    sources = PROJECT / "firmware-sim"
    if not (sources / "Makefile").exists():
        raise SimulationError(
            f"the firmware's sources are not at {sources}: run sluice-sim from a clone of Sluice"
            " (there `make install`, then .venv/bin/sluice-sim; or `pip install -e .`)"
        )
    BUILD.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Two builds at once would take each other's half-written files for complete ones.
        with BUILD.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = subprocess.run(
                ["make", "--silent", "-C", str(sources), f"BUILD={BUILD}", f"sensor-{build}", RUNNER],
                capture_output=True,
                text=True,
                check=False,
            )
    except FileNotFoundError as error:
        raise SimulationError("make is not installed: apt-get install make") from error
    if made.returncode != 0:
        raise SimulationError(
            "The firmware could not be built. It needs Debian's packages gcc-avr, avr-libc, libsimavr-dev,"
            f" libelf-dev and gcc. The compiler said:\n{made.stderr.strip()}"
        )
    return FIRMWARES[build]


def start_boards(  # noqa: PLR0913 - one for each thing to choose
    directory: Path,
    count: int,
    *,
    interval_ms: int = 1000,
    seed: int = 0,
    prefix: str | None = None,
    options: AvrOptions = _PLAIN,
) -> list[Board]:
    """Build, provision and switch on boards in `directory`. Names are `prefix` (or that of `PREFIXES`) and a number.

    Raises SimulationError, ValueError.
    """
    firmware = build_firmware(options.build)
    modem = options.build == "mqtt"
    wiring = Wiring(modem, options.noise, options.ppm, options.auto_reset)
    directory.mkdir(parents=True, exist_ok=True)
    boards: list[Board] = []
    try:
        for number in range(1, count + 1):
            device = f"{PREFIXES[options.build] if prefix is None else prefix}{number}"
            provision(
                directory / f"{device}.eeprom",
                device,
                interval_ms,
                network=options.network if modem else None,
                clock_start_ms=options.clock_start_ms,
            )
            boards.append(start_board(directory, device, seed + number, firmware, wiring))
    except BaseException:
        stop_boards(boards)
        raise
    return boards


def summary(board: Board) -> dict[str, Any]:
    """Sum up a board's ledger over all its boots: counts of samples, and the stack's use in bytes."""
    lines = board.ledger.read_text(encoding="utf-8").splitlines() if board.ledger.exists() else []
    boots = [json.loads(line) for line in lines]
    return {
        "device": board.device,
        "boots": len(boots),
        "taken": sum(boot["taken"] for boot in boots),
        "sent": sum(boot["sent"] for boot in boots),
        "acknowledged": sum(last - first + 1 for boot in boots for first, last in boot["acknowledged"]),
        "dropped": sum(last - first + 1 for boot in boots for first, last in boot["dropped"]),
        "stack": max((boot["stack"] for boot in boots), default=0),
        "stack_room": max((boot["stack_room"] for boot in boots), default=0),
    }


def main_avr(  # noqa: PLR0913, PLR0917 - one for each thing to choose
    count: int,
    directory: Path,
    interval_ms: int = 1000,
    seconds: float = 0.0,
    seed: int = 0,
    options: AvrOptions = _PLAIN,
    prefix: str | None = None,
) -> int:
    """Run boards until SIGINT or SIGTERM, or for `seconds` (0: without end). Returns the exit code.

    1 means that a board ended before its time, or that no gateway ever let one in or opened its port. Raises
    SimulationError, also if another process runs boards in `directory`, and ValueError. For the main thread only.
    """
    # The printed paths go into gateway.toml, which takes absolute paths only.
    directory = directory.resolve()
    boards: list[Board] = []
    began_us = time.time_ns() // 1000
    with _stop_signals() as stop_asked, _alone_in(directory):
        try:
            boards = start_boards(directory, count, interval_ms=interval_ms, seed=seed, prefix=prefix, options=options)
            _show_start(boards, options)
            ended, done = _run(boards, seconds, options, stop_asked, began_us)
        finally:
            with suppress(KeyboardInterrupt):
                stop_boards(boards)
        _show_end(boards, options, done)
    if ended:
        print(f"Ended before their time, each with a message above: {', '.join(ended)}.")
    alone = _without_gateway(boards, options, began_us)
    for device, why in alone.items():
        print(f"{device}: {_ALONE[options.build][1]}: {why}", file=sys.stderr)
    return 1 if ended or alone else 0


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Keep others from running boards in a folder. Raises SimulationError. The lock ends with the process."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SimulationError(
                f"{directory}: another sluice-sim avr (process {lock.read().strip()}) runs boards here;"
                " stop it, or choose another --dir"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _without_gateway(boards: Sequence[Board], options: AvrOptions, since_us: int) -> dict[str, str]:
    """Boards that no gateway has let in, or whose port none has opened, and why."""
    if options.build == "serial":
        return {
            board.device: f"is {board.link} among serial.ports in gateway.toml, and does sluice run?"
            for board in boards
            if not board.was_opened(since_us)
        }
    reasons = ((board.device, board.why_not_let_in(since_us)) for board in boards)
    return {device: why for device, why in reasons if why is not None}


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list."""
    asked: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _run(
    boards: Sequence[Board], seconds: float, options: AvrOptions, stop_asked: Sequence[int], began_us: int
) -> tuple[list[str], Counter[str]]:
    """Let the boards run, and strike them with the scheduled faults.

    Returns the boards that ended before their time, and how often each kind of fault was begun.
    """
    done: Counter[str] = Counter()
    by_name = {board.device: board for board in boards}
    faults: Iterator[Fault] = iter(())
    if options.faults is not None:
        faults = schedule(options.faults, list(by_name), options.build, noise=options.noise, ppm=options.ppm)
    following = next(faults, None)
    began = time.monotonic()
    looked_outside = False
    while not stop_asked:
        at_s = time.monotonic() - began
        if seconds and at_s >= seconds:
            break
        ended = [board.device for board in boards if board.process.poll() is not None]
        if ended:
            return ended, done
        if following is not None and following.at_s <= at_s:
            try:
                by_name[following.device].do(following.command)
                _show_fault(following, options)
                if not following.is_end:
                    done[following.command.split()[0]] += 1
            except RefusedError as error:
                # Somebody gave the board another fault meanwhile: it is unplugged already, for example.
                print(error, file=sys.stderr)
            following = next(faults, None)
            continue
        if not looked_outside and at_s >= _REACH_SECONDS_MAX:
            looked_outside = True
            for device, why in _without_gateway(boards, options, began_us).items():
                print(f"{device}: {_ALONE[options.build][0]}: {why}", file=sys.stderr)
        time.sleep(_LOOK_INTERVAL_S)
    return [], done


def _show_start(boards: Sequence[Board], options: AvrOptions) -> None:
    size = (BUILD / f"sensor-{options.build}.size").read_text(encoding="utf-8").strip()
    broker = f"{options.network.host}:{options.network.port}"
    where = {board.device: broker if options.build == "mqtt" else str(board.link) for board in boards}
    if options.as_json:
        print(json.dumps({"build": options.build, "size": size, "boards": where}), flush=True)
        return
    print(size)
    for device, place in where.items():
        print(f"{device} {'to' if options.build == 'mqtt' else 'on'} {place}", flush=True)


def _show_fault(fault: Fault, options: AvrOptions) -> None:
    if options.as_json:
        print(json.dumps({"at_s": fault.at_s, "device": fault.device, "fault": fault.command}), flush=True)
    else:
        print(f"{fault.at_s:8.1f} s  {fault.device}  {fault.command}", flush=True)


def _show_end(boards: Sequence[Board], options: AvrOptions, done: Counter[str]) -> None:
    summaries = [summary(board) for board in boards]
    if options.as_json:
        print(json.dumps({"summary": summaries}), flush=True)
        return
    heads = ("board", "boots", "taken", "sent", "acknowledged", "dropped", "stack", "of bytes")
    print("  ".join(f"{head:>12}" for head in heads))
    for one in summaries:
        print("  ".join(f"{value:>12}" for value in one.values()))
    if done and options.faults is not None:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(done.items()))
        print(f"Faults: {faults}. --faults {options.faults} repeats them.")
