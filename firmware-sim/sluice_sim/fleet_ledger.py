"""The fleet's ledger: the fate of each sample of each boot of each sensor.

Values are not kept: `value_of` computes them from the fleet's seed and the sample's identity.
"""

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final
from zlib import crc32

from sluice_sim.fleet_faults import draw

NOISE_CENTI: Final = 10
"""Hundredths of a degree by which a sample may lie off its curve."""


def value_of(seed: int, device: str, boot: str, sequence: int) -> float:
    """Return a sample's temperature, in degrees Celsius with two decimals, as in a payload of the fleet.

    It is a slow curve of the device plus noise of the sample. It is computed in whole numbers, so that it is equal
    everywhere. Each line of the ledger has `seed`.
    """
    base, swing, half, phase = _curve(seed, device)
    position = (sequence + phase) % (2 * half)
    at = position % half
    # Two arcs of parabolas, one up and one down, which look like a sine.
    height = 4 * swing * at * (half - at) // (half * half)
    noise = crc32(f"{seed} {device} {boot} {sequence}".encode()) % (2 * NOISE_CENTI + 1) - NOISE_CENTI
    return (base + (height if position < half else -height) + noise) / 100


@lru_cache(maxsize=20_000)
def _curve(seed: int, device: str) -> tuple[int, int, int, int]:
    """Centre and swing in hundredths of a degree; half a period and the phase in samples."""
    half = 150 + int(300 * draw(seed, device, "period"))
    return (
        1600 + int(800 * draw(seed, device, "base")),
        100 + int(400 * draw(seed, device, "swing")),
        half,
        int(2 * half * draw(seed, device, "phase")),
    )


class SequenceRanges:
    """A set of sequence numbers as closed, sorted, disjoint ranges."""

    __slots__ = ("_firsts", "_lasts", "count")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, sequence: int) -> None:
        """Add one number. A number that is there already changes nothing."""
        firsts, lasts = self._firsts, self._lasts
        at = bisect_right(firsts, sequence)
        if at and sequence <= lasts[at - 1]:
            return
        self.count += 1
        joins_before = at > 0 and lasts[at - 1] == sequence - 1
        joins_after = at < len(firsts) and firsts[at] == sequence + 1
        if joins_before and joins_after:
            lasts[at - 1] = lasts.pop(at)
            del firsts[at]
        elif joins_before:
            lasts[at - 1] = sequence
        elif joins_after:
            firsts[at] = sequence
        else:
            firsts.insert(at, sequence)
            lasts.insert(at, sequence)

    def add_range(self, first: int, last: int) -> None:
        """Add the numbers from `first` to `last`, both included."""
        for sequence in range(first, last + 1):
            self.add(sequence)

    def take_first(self) -> tuple[int, int]:
        """Remove and return the first range. Raises IndexError if there is none."""
        first, last = self._firsts.pop(0), self._lasts.pop(0)
        self.count -= last - first + 1
        return first, last

    def pairs(self) -> list[list[int]]:
        """Return the ranges as [first, last], both included."""
        return [[first, last] for first, last in zip(self._firsts, self._lasts, strict=True)]


class BootLedger:
    """The samples of one boot of a sensor.

    With QoS 1 and 2, each sample is in one place at last: acknowledged, dropped, lost to a reboot, or still held.
    """

    __slots__ = (
        "acknowledged",
        "boot",
        "device",
        "dropped",
        "handed_over",
        "qos",
        "report_outstanding",
        "reported",
        "seed",
        "sent",
        "taken",
        "unreported",
        "vanished",
    )

    def __init__(self, device: str, boot: str, qos: int = 1, seed: int = 0) -> None:
        self.device = device
        self.boot = boot
        self.qos = qos
        self.seed = seed
        self.taken = 0
        """Samples taken. Their sequences are 0 to `taken` - 1."""
        self.sent = 0
        """Samples sent at least once."""
        self.acknowledged = SequenceRanges()
        """Acknowledged by PUBACK, or with QoS 2 by PUBREC: the gateway has them."""
        self.handed_over = SequenceRanges()
        """Sent with QoS 0, which nobody acknowledges: their fate is unknown."""
        self.dropped = SequenceRanges()
        """Dropped as the oldest of a full ring."""
        self.vanished = SequenceRanges()
        """Held when the power went. Some may have been sent, and be at the gateway."""
        self.reported = SequenceRanges()
        """Dropped, and reported to the gateway by `lost` of a sample that is acknowledged (QoS 0: sent)."""
        self.unreported = SequenceRanges()
        """Dropped, and not yet part of any payload."""
        self.report_outstanding = False
        """Whether a `lost` is on its way. There is one at a time."""

    def line(self) -> dict[str, object]:
        """Return the boot as one line of the ledger."""
        return {
            "device": self.device,
            "boot": self.boot,
            "seed": self.seed,
            "qos": self.qos,
            "taken": self.taken,
            "sent": self.sent,
            "acknowledged": self.acknowledged.pairs(),
            "handed_over": self.handed_over.pairs(),
            "dropped": self.dropped.pairs(),
            "reported": self.reported.pairs(),
            "vanished": self.vanished.pairs(),
        }


def write_ledger(path: Path, boots: Iterable[BootLedger]) -> None:
    """Write one JSON line for each boot. The file is written beside and renamed, so that readers see it whole.

    Raises OSError.
    """
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        for boot in boots:
            file.write(json.dumps(boot.line(), separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@contextmanager
def samples_file(path: Path | None) -> Iterator[Callable[[str, str, int, float], None]]:
    """Yield a function that notes a sample (device, boot, sequence, monotonic time) as a line of CSV.

    Without a path it notes nothing. Raises OSError if the file cannot be made.
    """
    if path is None:
        yield lambda _device, _boot, _sequence, _now_s: None
        return
    since_1970_us = (time.time_ns() - time.monotonic_ns()) // 1000
    with path.open("w", encoding="utf-8") as file:
        file.write("device,boot,sequence,time_us\n")

        def note(device: str, boot: str, sequence: int, now_s: float) -> None:
            file.write(f"{device},{boot},{sequence},{since_1970_us + round(now_s * 1e6)}\n")

        yield note
