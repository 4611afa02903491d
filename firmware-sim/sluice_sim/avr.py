"""8-bit sensors: build the firmware, provision EEPROM images, and run boards in simavr, one process each."""

import fcntl
import signal
import struct
import subprocess
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

PROJECT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = PROJECT / "build" / "firmware"
FIRMWARE: Final = BUILD / "sensor.elf"
RUNNER: Final = BUILD / "avr-runner"

EEPROM_BYTES: Final = 1024
DEVICE_BYTES_MAX: Final = 32
SAMPLE_INTERVAL_MS_MIN: Final = 10
SAMPLE_INTERVAL_MS_MAX: Final = 86_400_000

# Offset and layout as in firmware/eeprom_layout.h: version, length and text of the device's name, interval.
_CONFIGURATION_OFFSET: Final = 32
_CONFIGURATION: Final = struct.Struct(f"<BB{DEVICE_BYTES_MAX}sI")
_CONFIGURATION_VERSION: Final = 1

_START_SECONDS_MAX: Final = 10.0
_STOP_SECONDS_MAX: Final = 5.0


class SimulationError(Exception):
    """The firmware could not be built or a board not be started; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Board:
    """One simulated board that is switched on. Its files outlive it: the same board starts again from them."""

    device: str
    link: Path
    """Symbolic link to the serial port, to be opened as a USB adapter's would be. Gone when the board is off."""
    eeprom: Path
    ledger: Path
    """JSON lines, one for each boot: what the firmware took, sent, saw acknowledged and dropped."""
    process: subprocess.Popen[bytes]


def build_firmware() -> Path:
    """Build firmware and runner where they are out of date; give the firmware's ELF file.

    The runner is `RUNNER`, flash and RAM use stand in `sensor.size` beside it. Raises SimulationError.
    """
    BUILD.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Two builds at once would take each other's half-written files for done.
        with BUILD.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = subprocess.run(
                ["make", "--silent", "-C", str(PROJECT / "firmware-sim"), f"BUILD={BUILD}"],
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
    return FIRMWARE


def provision(eeprom: Path, device: str, sample_interval_ms: int = 1000) -> None:
    """Write the device's name and its sampling interval into an EEPROM image (1024 bytes, made if missing).

    The boot counter in an existing image stays. The image can go to a real board with `avrdude -U eeprom`.
    Raises ValueError where the name (1 to 32 bytes of UTF-8) or the interval (10 ms to a day) does not fit.
    """
    name = device.encode()
    if not 1 <= len(name) <= DEVICE_BYTES_MAX:
        raise ValueError(f"device name {device!r} has {len(name)} bytes; 1 to {DEVICE_BYTES_MAX} fit the EEPROM")
    if not SAMPLE_INTERVAL_MS_MIN <= sample_interval_ms <= SAMPLE_INTERVAL_MS_MAX:
        raise ValueError(
            f"sample_interval_ms is {sample_interval_ms};"
            f" {SAMPLE_INTERVAL_MS_MIN} to {SAMPLE_INTERVAL_MS_MAX} is possible"
        )
    image = bytearray(eeprom.read_bytes()) if eeprom.exists() else bytearray(b"\xff" * EEPROM_BYTES)
    if len(image) != EEPROM_BYTES:
        raise ValueError(f"{eeprom.name} has {len(image)} bytes; an ATmega328P's EEPROM has {EEPROM_BYTES}")
    configuration = _CONFIGURATION.pack(_CONFIGURATION_VERSION, len(name), name, sample_interval_ms)
    configuration += zlib.crc32(configuration).to_bytes(4, "little")
    image[_CONFIGURATION_OFFSET : _CONFIGURATION_OFFSET + len(configuration)] = configuration
    written = eeprom.with_name(eeprom.name + ".new")
    written.write_bytes(image)
    written.replace(eeprom)


def board_command(directory: Path, device: str, seed: int = 0, firmware: Path = FIRMWARE) -> tuple[str, ...]:
    """The command that runs one board: tty-NAME (its port), NAME.eeprom and NAME.ledger in `directory`.

    `seed` chooses the temperatures. The process ends by itself when its parent is gone.
    """
    return (
        str(RUNNER),
        "--with-parent",
        *("--link", str(directory / f"tty-{device}")),
        *("--eeprom", str(directory / f"{device}.eeprom")),
        *("--ledger", str(directory / f"{device}.ledger")),
        *("--seed", str(seed)),
        str(firmware),
    )


def start_board(directory: Path, device: str, seed: int = 0, firmware: Path = FIRMWARE) -> Board:
    """Switch a board on, by `board_command`, and wait for its serial port. Raises SimulationError.

    The firmware has to be built and the EEPROM provisioned; without an image the board starts with an erased one.
    """
    link = directory / f"tty-{device}"
    # A link that a killed runner left behind may by now lead to somebody else's terminal.
    link.unlink(missing_ok=True)
    process = subprocess.Popen(
        board_command(directory, device, seed, firmware),
        stdin=subprocess.DEVNULL,
        # A terminal's Ctrl-C is for us to pass on: the boards go when the gateway has answered.
        start_new_session=True,
    )
    board = Board(device, link, directory / f"{device}.eeprom", directory / f"{device}.ledger", process)
    deadline = time.monotonic() + _START_SECONDS_MAX
    while not link.is_symlink():
        if process.poll() is not None:
            raise SimulationError(
                f"board {device} ended at once (exit code {process.returncode}); its message is above"
            )
        if time.monotonic() > deadline:
            stop_boards([board])
            raise SimulationError(f"board {device} offered no serial port within {_START_SECONDS_MAX:.0f} s")
        time.sleep(0.01)
    return board


def start_boards(
    directory: Path, count: int, *, interval_ms: int = 1000, seed: int = 0, prefix: str = "s"
) -> list[Board]:
    """Build, provision and switch on boards s1, s2, ... in `directory`. Raises SimulationError, ValueError."""
    build_firmware()
    directory.mkdir(parents=True, exist_ok=True)
    boards: list[Board] = []
    try:
        for number in range(1, count + 1):
            device = f"{prefix}{number}"
            provision(directory / f"{device}.eeprom", device, interval_ms)
            boards.append(start_board(directory, device, seed + number))
    except BaseException:
        stop_boards(boards)
        raise
    return boards


def inhibit_sampling(boards: Iterable[Board]) -> None:
    """Set each board's jumper that stops sampling, so that what is outstanding can still be acknowledged."""
    for board in boards:
        board.process.send_signal(signal.SIGUSR1)


def stop_boards(boards: Sequence[Board]) -> None:
    """Switch boards off, without telling their firmware: as pulling the plug. EEPROM and ledger are written."""
    for board in boards:
        board.process.terminate()
    for board in boards:
        try:
            board.process.wait(_STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            board.process.kill()
            board.process.wait()
            board.link.unlink(missing_ok=True)


def main_avr(count: int, directory: Path, interval_ms: int = 1000, seconds: float = 0.0, seed: int = 0) -> int:
    """Run boards until SIGINT or SIGTERM, or for so many seconds (0: without end). Gives the exit code.

    1 means that a board ended before its time. Raises SimulationError, ValueError. For the main thread only.
    """
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    boards: list[Board] = []
    try:
        boards = start_boards(directory, count, interval_ms=interval_ms, seed=seed)
        print((BUILD / "sensor.size").read_text(encoding="utf-8").strip())
        for board in boards:
            print(f"{board.device} on {board.link}")
        deadline = time.monotonic() + seconds
        while not stopping and (seconds == 0 or time.monotonic() < deadline):
            time.sleep(0.1)
            ended = [board.device for board in boards if board.process.poll() is not None]
            if ended:
                print(f"Ended before their time, each with a message above: {', '.join(ended)}.")
                return 1
    finally:
        with suppress(KeyboardInterrupt):
            stop_boards(boards)
        for number, handler in former.items():
            signal.signal(number, handler)
    return 0
