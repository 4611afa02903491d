"""The firmware's portable part compiled for this machine (firmware-sim/host), as Python objects, one for each build."""

import ctypes
import fcntl
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from sluice_sim.avr import BUILD, PROJECT

FIRMWARE_SIM: Final = PROJECT / "firmware-sim"
HOST: Final = BUILD / "host"
VECTORS: Final = FIRMWARE_SIM / "host" / "vectors"
TAKEN, SENT, ACKNOWLEDGED, DROPPED = 2, 3, 4, 5
_LEDGER: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint32, ctypes.c_int32)
_EEPROM_BYTES: Final = 1024
_sinks: Final[dict[str, Any]] = {}
"""Callbacks of each library. They must outlive their maker, because the library goes on calling them."""


@cache
def build(target: str = "host") -> Path:
    """Make the host build; give its folder."""
    BUILD.parent.mkdir(parents=True, exist_ok=True)
    with BUILD.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "--silent", "-C", str(FIRMWARE_SIM), f"BUILD={BUILD}", target], check=True)
    return HOST


@dataclass
class HostBoard:
    """One board in memory. Two of the same build are the same board: the library holds one."""

    library: ctypes.CDLL
    events: list[tuple[int, int]] = field(default_factory=list)
    """Events of the ledger, each with its sequence."""
    values: dict[int, int] = field(default_factory=dict)
    """Hundredths of a degree of each sample taken."""
    boots: list[tuple[int, int]] = field(default_factory=list)
    """Boot and incarnation."""
    now_ms: int = 0

    def __post_init__(self) -> None:
        sink = _LEDGER(self._told)
        ctypes.c_void_p.in_dll(self.library, "host_ledger").value = ctypes.cast(sink, ctypes.c_void_p).value
        _sinks[self.library._name] = sink
        self.write_eeprom(b"\xff" * _EEPROM_BYTES)

    def _told(self, event: int, number: int, value: int) -> None:
        if event == 1:
            self.boots.append((number, value & 0xFFFFFFFF))
            return
        self.events.append((event, number))
        if event == TAKEN:
            self.values[number] = value

    def write_eeprom(self, image: bytes) -> None:
        (ctypes.c_char * _EEPROM_BYTES).in_dll(self.library, "host_eeprom").raw = image

    def start(self, seed: int = 1, now_ms: int | None = None) -> None:
        """Switch on, or reset: the chip forgets all but the EEPROM."""
        self.now_ms = self.now_ms if now_ms is None else now_ms
        self.events.clear()
        self.values.clear()
        self.library.host_start(seed, self.now_ms)

    def take(self, centi_celsius: int) -> None:
        self.library.core_take(self.now_ms & 0xFFFFFFFF, ctypes.c_int16(centi_celsius))

    def turn(self, now_ms: int, received: bytes = b"") -> bytes:
        """One turn of the main loop, what came before it; gives what was sent."""
        self.now_ms = now_ms
        for byte in received:
            self.library.host_receive(byte)
        self.library.host_turn(now_ms & 0xFFFFFFFF)
        buffer = ctypes.create_string_buffer(4096)
        length = self.library.host_sent(buffer, len(buffer))
        return buffer.raw[:length]

    def of(self, kind: int) -> list[int]:
        return [sequence for event, sequence in self.events if event == kind]


def load(build_name: str) -> ctypes.CDLL:
    """The library of a build, `serial` or `mqtt`."""
    library = ctypes.CDLL(str(build() / f"lib{build_name}.so"))
    library.core_due.restype = library.core_acknowledge.restype = ctypes.c_bool
    library.core_oldest.restype = library.core_next.restype = ctypes.c_uint32
    library.core_payload.restype = ctypes.c_uint8
    library.host_sent.restype = ctypes.c_uint16
    library.host_receive.restype = ctypes.c_bool
    if build_name == "serial":
        library.frame_encode.restype = ctypes.c_uint8
        library.frame_receive.restype = ctypes.c_void_p
    return library


def bitmap(following: int, stored: set[int]) -> int:
    """Bitmap of an ACK with `next` at `following`, for the stored sequences behind it."""
    return sum(1 << (n - following - 1) for n in stored if following < n <= following + 32)
