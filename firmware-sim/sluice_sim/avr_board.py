"""One simulated board: the process that runs it, its files, and the commands that are given to it."""

import csv
import errno
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice_sim.avr_faults import COMMANDS, Build

PROJECT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = PROJECT / "build" / "firmware"
FIRMWARES: Final[dict[Build, Path]] = {"serial": BUILD / "sensor-serial.elf", "mqtt": BUILD / "sensor-mqtt.elf"}
FIRMWARE: Final = FIRMWARES["serial"]
RUNNER: Final = BUILD / "avr-runner"

_START_SECONDS_MAX: Final = 10.0
_STOP_SECONDS_MAX: Final = 5.0
_OBEY_SECONDS_MAX: Final = 5.0
_COMMAND_CHARACTERS_MAX: Final = 255


class SimulationError(Exception):
    """The firmware cannot be built, or a board cannot be started or commanded; the message says what to do."""


class RefusedError(SimulationError):
    """A board refused a command and did nothing; the message has its reason."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """A board's hardware, with its faults from the start."""

    modem: bool = False
    """An ESP-AT module at the chip's UART, as the MQTT build needs it, and no serial port."""
    noise: float = 0.0
    """Share of the bytes with one flipped bit, each way."""
    ppm: float = 0.0
    """Parts in a million by which the oscillator is too fast."""
    auto_reset: bool = False
    """Opening the port resets the chip."""


_PLAIN_WIRING: Final = Wiring()
LET_IN: Final = "let in"
"""The modem's note of a gateway that accepts CONNECT (modem.c)."""
_OPENED: Final = "opened"
"""The serial port's note when somebody opens it (port.c)."""
_FILES: Final = (".eeprom", ".ledger", ".samples", ".control", ".faults")


@dataclass(frozen=True, slots=True)
class Board:
    """One simulated board that is switched on. Its files outlive it: the same board starts again from them."""

    device: str
    link: Path
    """Symbolic link to the serial port, to be opened like a USB adapter's. It is gone while the board is off or
    unplugged. A board with a modem has none."""
    eeprom: Path
    ledger: Path
    """JSON lines, one for each boot: samples that were taken, sent, acknowledged and dropped, and the stack's use."""
    process: subprocess.Popen[bytes]

    @property
    def samples(self) -> Path:
        """CSV of all samples: `boot,sequence,centi_celsius,time_us,boottime_us`, with true times by two clocks."""
        return self.ledger.with_suffix(".samples")

    def taken_us(self) -> dict[tuple[str, int], int]:
        """True time of each sample, by boot and sequence; half a second old while the board runs.

        Times are microseconds of the host's CLOCK_BOOTTIME. They follow from the board's oscillator and its cycles up
        to the first conversion, exact to some microseconds. The firmware and the gateway have no part in them.
        """
        if not self.samples.exists():
            return {}
        lines = self.samples.read_text(encoding="utf-8").splitlines(keepends=True)
        # A line that is just being written is left out.
        rows = csv.DictReader(line for line in lines if line.endswith("\n"))
        return {(row["boot"], int(row["sequence"])): int(row["boottime_us"]) for row in rows}

    def port(self) -> Path | None:
        """Return the link under which the adapter is plugged in now; None while it is unplugged."""
        replugged = self.link.parent.glob(f"{self.link.name}@*")
        return next((link for link in (self.link, *replugged) if link.is_symlink()), None)

    def do(self, command: str) -> None:
        """Give the board a command (`COMMANDS`) and wait until it is carried out. Raises SimulationError."""
        give_command(self.ledger.with_suffix(""), command)

    def faults(self) -> list[dict[str, Any]]:
        """The board's faults so far: `time_us` since 1970, and `fault`."""
        return read_faults(self.ledger.with_suffix(".faults"))

    @property
    def led_is_on(self) -> bool:
        """See `led_is_on`."""
        return led_is_on(self.ledger.with_suffix(".faults"))

    def why_not_let_in(self, since_us: int) -> str | None:
        """Why no gateway has let the modem's board in since `since_us` (microseconds since 1970); None if one has."""
        words = self._link_since(since_us)
        if LET_IN in words:
            return None
        return words[-1] if words else "it has not dialled yet"

    def was_opened(self, since_us: int) -> bool:
        """Whether somebody opened the serial port since `since_us` (microseconds since 1970)."""
        return _OPENED in self._link_since(since_us)

    def _link_since(self, since_us: int) -> list[str]:
        log = _read_log(self.ledger.with_suffix(".faults"))
        return [str(entry["link"]) for entry in log if "link" in entry and entry["time_us"] >= since_us]


def board_command(
    directory: Path, device: str, seed: int = 0, firmware: Path = FIRMWARE, wiring: Wiring = _PLAIN_WIRING
) -> tuple[str, ...]:
    """The command that runs one board. In `directory`, its port is tty-NAME, and its files are NAME with a suffix.

    The files are .eeprom, .ledger, .samples, .faults (done to the board so far) and .control (a pipe for commands).
    `seed` chooses the temperatures, and the bytes that noise hits. The process ends by itself when its parent is gone.
    """
    at_uart = ("--modem",) if wiring.modem else ("--link", str(directory / f"tty-{device}"))
    files = (
        argument
        for suffix in _FILES
        for argument in (f"--{suffix.removeprefix('.')}", str(directory / f"{device}{suffix}"))
    )
    return (
        str(RUNNER),
        "--with-parent",
        *at_uart,
        *files,
        *("--seed", str(seed), "--noise", str(wiring.noise), "--ppm", str(wiring.ppm)),
        *(("--auto-reset",) if wiring.auto_reset and not wiring.modem else ()),
        str(firmware),
    )


def start_board(
    directory: Path, device: str, seed: int = 0, firmware: Path = FIRMWARE, wiring: Wiring = _PLAIN_WIRING
) -> Board:
    """Switch a board on, by `board_command`, and wait for its serial port. Raises SimulationError.

    The firmware has to be built and the EEPROM provisioned; without an image the board starts with an erased one.
    """
    link, control = directory / f"tty-{device}", directory / f"{device}.control"
    # A link that a killed runner left behind may lead to somebody else's terminal by now.
    for left_behind in (link, control, *directory.glob(f"{link.name}@*")):
        left_behind.unlink(missing_ok=True)
    process = subprocess.Popen(
        board_command(directory, device, seed, firmware, wiring),
        stdin=subprocess.DEVNULL,
        # A terminal's Ctrl-C must not reach the boards, which are stopped by `stop_boards`.
        start_new_session=True,
    )
    board = Board(device, link, directory / f"{device}.eeprom", directory / f"{device}.ledger", process)
    deadline = time.monotonic() + _START_SECONDS_MAX
    while not control.exists():
        if process.poll() is not None:
            raise SimulationError(
                f"board {device} ended at once (exit code {process.returncode}); its message is above"
            )
        if time.monotonic() > deadline:
            stop_boards([board])
            raise SimulationError(f"board {device} was not ready within {_START_SECONDS_MAX:.0f} s")
        time.sleep(0.01)
    return board


def inhibit_sampling(boards: Iterable[Board]) -> None:
    """Set each board's jumper that stops sampling, so that outstanding samples can still be acknowledged."""
    for board in boards:
        board.process.send_signal(signal.SIGUSR1)


def stop_boards(boards: Sequence[Board]) -> None:
    """Switch boards off without telling their firmware, as by pulling the plug. EEPROM and ledger are written."""
    for board in boards:
        board.process.terminate()
    for board in boards:
        try:
            board.process.wait(_STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            board.process.kill()
            board.process.wait()
            board.link.unlink(missing_ok=True)


def give_command(board: Path, command: str) -> None:
    """Give a running board a command and wait until it is carried out.

    `board` is its folder and its name, `DIR/s1`. Raises SimulationError if there is no such board or no such command,
    and RefusedError if the board refused it.
    """
    words = " ".join(command.split())
    name = words.split(" ")[0]
    if name not in COMMANDS:
        raise SimulationError(f"there is no fault {name!r}; there are: {', '.join(COMMANDS)}")
    if len(words) > _COMMAND_CHARACTERS_MAX or not re.fullmatch(r"[ !#-\[\]-~]+", words):
        raise SimulationError(f"{words!r} is no fault: it is {_usage(name)}")
    if not _control(board).exists():
        raise SimulationError(_no_board(board))
    log = board.with_name(f"{board.name}.faults")
    done_before = len(_read_log(log))
    _write_to_pipe(board, words)
    deadline = time.monotonic() + _OBEY_SECONDS_MAX
    while True:
        for entry in _read_log(log)[done_before:]:
            if entry.get("fault") == words:
                return
            if entry.get("refused") == words:
                raise RefusedError(f"board {board.name} refused {words!r} and did nothing: {entry['why']}")
        if time.monotonic() > deadline:
            raise SimulationError(f"board {board.name} did not do {words!r} within {_OBEY_SECONDS_MAX:.0f} s")
        time.sleep(0.005)


def _usage(name: str) -> str:
    return f"{name} {COMMANDS[name].arguments}".strip()


def _control(board: Path) -> Path:
    # Not by with_name: the path `.` has no name.
    return board.parent / f"{board.name}.control"


def _no_board(board: Path) -> str:
    """Say why no board runs under this name, and which boards there are."""
    if board.is_dir():
        return _boards_in(board, f"{board} is a folder")
    port_of = board.parent / board.name.removeprefix("tty-").partition("@")[0]
    if port_of != board and _control(port_of).exists():
        return f"{board} is a port; its board is {port_of}"
    file_of = board.with_suffix("")
    if board.suffix in _FILES and _control(file_of).exists():
        return f"{board} is a file; its board is {file_of}"
    return _boards_in(board.parent, f"no board runs as {board}: there is no {_control(board)}")


def _boards_in(folder: Path, what: str) -> str:
    names = sorted((control.stem for control in folder.glob("*.control")), key=lambda name: (len(name), name))
    if not names:
        return f"{what}. Start boards there with `sluice-sim avr --dir {folder}`"
    return f"{what}. Name one of the boards there, as {folder / names[0]}: {' '.join(names)}"


def _write_to_pipe(board: Path, command: str) -> None:
    control = _control(board)
    try:
        pipe = os.open(control, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        # A pipe whose reader was killed stays, but cannot be opened.
        why = "the board that made it was killed" if error.errno == errno.ENXIO else error.strerror
        raise SimulationError(f"cannot give a command through {control}: {why}") from None
    try:
        os.write(pipe, f"{command}\n".encode())
    finally:
        os.close(pipe)


def read_faults(path: Path) -> list[dict[str, Any]]:
    """Read the faults of a board from its .faults file; empty if there is no file."""
    return [entry for entry in _read_log(path) if "fault" in entry]


def led_is_on(path: Path) -> bool:
    """Whether the LED of a board is on, by the chip's own port. `path` is its .faults file."""
    states = [entry["led"] for entry in _read_log(path) if "led" in entry]
    return bool(states) and states[-1] == "on"


def _read_log(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # A line that is just being written is left out.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
