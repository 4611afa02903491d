"""Faults of a simulated board: the commands that its runner obeys, and a schedule of them from a seed. No I/O."""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Build = Literal["serial", "mqtt"]
"""The firmware's two builds: frames on a serial port, or MQTT through a modem."""

FAULTS_PER_MINUTE: Final = 4.0
FIRST_FAULT_S_MIN: Final = 2.0
"""Seconds without faults at first, so that a board can say HELLO."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the runner that a person may give, with `arguments` as in control.c."""

    arguments: str
    meaning: str
    builds: tuple[Build, ...] = ("serial", "mqtt")


COMMANDS: Final = {
    "reset": Command("", "pull the reset pin"),
    "power-cycle": Command("[MS (1 to 3600000)]", "switch off, and on again after MS (50 by default); the modem too"),
    "brown-out": Command("[MS (1 to 3600000)]", "let the supply fail for MS (5 by default)"),
    "brown-out-in-write": Command(
        "[MS (1 to 3600000) [BYTES (0 to 11)]]",
        "power-cycle, with a brown-out while the boot is counted in EEPROM, after BYTES (2 by default)",
    ),
    "unplug": Command("[in-frame]", "pull out the serial adapter; in-frame: in the middle of a frame", ("serial",)),
    "plug": Command("[same]", "plug it in again, under another link; same: under the first link", ("serial",)),
    "noise": Command("SHARE (0 to 1)", "flip one bit in this share of the bytes, each way"),
    "overrun": Command("BYTES (1 to 1000000)", "lose the next BYTES from the chip"),
    "baud": Command("BAUD (300 to 2000000)|auto", "speed of the other end; auto: the speed that it sets"),
    "ppm": Command("PPM (-100000 to 100000)", "make the oscillator too fast by PPM"),
    "auto-reset": Command("on|off", "whether opening the port resets the chip, as an Arduino's DTR does", ("serial",)),
    "inhibit": Command("on|off", "the jumper that stops sampling"),
    "erase-eeprom": Command("[counter]", "erase the EEPROM; counter: erase only the boot counter"),
    "wifi": Command("on|off", "whether the access point is in reach", ("mqtt",)),
    "modem-reset": Command("", "restart the modem alone", ("mqtt",)),
}


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A command, its board and its time in seconds after the start."""

    at_s: float
    device: str
    command: str
    is_end: bool = False
    """Whether it ends the board's fault before it."""


@dataclass(frozen=True, slots=True)
class FaultRate:
    """A schedule: its seed, which may be any text, and the faults of a board in a minute."""

    seed: str
    per_minute: float = FAULTS_PER_MINUTE

    def __str__(self) -> str:
        return f"{self.seed}:{str(self.per_minute).removesuffix('.0')}"


def parse_fault_rate(text: str) -> FaultRate:
    """Read `SEED` or `SEED:PER_MINUTE`. Raises ValueError."""
    seed, colon, rate = text.partition(":")
    try:
        per_minute = float(rate) if colon else FAULTS_PER_MINUTE
    except ValueError:
        per_minute = 0.0
    if not seed or not 0 < per_minute <= 600:
        raise ValueError(
            f"{text!r} is no schedule of faults: write a seed, or SEED:PER_MINUTE with a rate above 0, up to 600"
        )
    return FaultRate(seed, per_minute)


def schedule(
    rate: FaultRate, devices: Sequence[str], build: Build, *, noise: float = 0.0, ppm: float = 0.0
) -> Iterator[Fault]:
    """Yield the faults of all boards in their order, without end. Equal arguments give equal faults.

    A board's faults depend on seed and device alone, not on the other boards. A fault that lasts (`unplug`) ends
    (`plug`) before the board's next one begins. Then `noise` and `ppm` hold again. Faults that no check could notice
    are left out: an MQTT build has no checksum on its UART, so noise would change values without a trace.
    """
    return heapq.merge(*(_faults_of(rate, device, build, noise, ppm) for device in devices))


def _faults_of(rate: FaultRate, device: str, build: Build, noise: float, ppm: float) -> Iterator[Fault]:
    draw = random.Random(f"{rate.seed} {device}")
    kinds = (*_EVERY_BOARD, *(_SERIAL if build == "serial" else _MQTT))
    at_s = FIRST_FAULT_S_MIN
    while True:
        at_s += draw.expovariate(rate.per_minute / 60)
        begin, lasts_s, end = draw.choice(kinds)(draw)
        yield Fault(round(at_s, 3), device, begin)
        if end:
            at_s += lasts_s
            yield Fault(round(at_s, 3), device, end.format(noise=noise, ppm=ppm), is_end=True)


_Kind = Callable[[random.Random], tuple[str, float, str]]
"""Draws the command that begins a fault, its seconds, and the command that ends it ("" if none is needed)."""


def _once(command: str) -> _Kind:
    return lambda _draw: (command, 0.0, "")


def _power(command: str, most_ms: int) -> _Kind:
    return lambda draw: (f"{command} {draw.randint(1, most_ms)}", 0.0, "")


def _brown_out_in_write(draw: random.Random) -> tuple[str, float, str]:
    # A boot changes one byte of the counter, and mostly all four of the CRC.
    return f"brown-out-in-write {draw.randint(1, 100)} {draw.randint(0, 3)}", 0.0, ""


def _oscillator(draw: random.Random) -> tuple[str, float, str]:
    # The error of an RC oscillator.
    return f"ppm {draw.randint(-10_000, 10_000)}", draw.uniform(5, 30), "ppm {ppm:g}"


def _unplug(draw: random.Random) -> tuple[str, float, str]:
    return draw.choice(("unplug", "unplug in-frame")), draw.uniform(0.2, 5), draw.choice(("plug", "plug same"))


def _noise(draw: random.Random) -> tuple[str, float, str]:
    return f"noise {10 ** draw.uniform(-3, -1):.6f}", draw.uniform(2, 10), "noise {noise:g}"


def _baud(draw: random.Random) -> tuple[str, float, str]:
    return f"baud {draw.choice((9600, 19200, 57600, 115200))}", draw.uniform(1, 5), "baud auto"


def _wifi(draw: random.Random) -> tuple[str, float, str]:
    return "wifi off", draw.uniform(1, 15), "wifi on"


_EVERY_BOARD: Final[tuple[_Kind, ...]] = (
    _once("reset"),
    _power("power-cycle", 1000),
    _power("brown-out", 100),
    _brown_out_in_write,
    _oscillator,
    _once("erase-eeprom counter"),
)
_SERIAL: Final[tuple[_Kind, ...]] = (
    _unplug,
    _unplug,
    _noise,
    _noise,
    lambda draw: (f"overrun {draw.randint(1, 300)}", 0.0, ""),
    _baud,
    lambda draw: ("auto-reset on", draw.uniform(1, 20), "auto-reset off"),
)
_MQTT: Final[tuple[_Kind, ...]] = (_wifi, _wifi, _once("modem-reset"))
