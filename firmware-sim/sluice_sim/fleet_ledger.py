"""The fleet's ledger: what became of each sample of each boot of each sensor, and which value it had.

Values are not kept. They are computed from the fleet's seed and the sample's identity, by `value_of`.
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
    """Give the temperature of a sample, in degrees Celsius with two decimals, as a payload of the fleet has it.

    A slow curve of the device's own, and noise of the sample's own. It is computed in whole numbers, so that it is the
    same everywhere. `seed` stands in each line of the ledger.
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
    """Centre and swing in hundredths of a degree; half a period and where it begins, in samples."""
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
        """Add one number; one that is there already changes nothing."""
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
        """Remove the first range and give it. Raises IndexError where there is none."""
        first, last = self._firsts.pop(0), self._lasts.pop(0)
        self.count -= last - first + 1
        return first, last

    def pairs(self) -> list[list[int]]:
        """Give the ranges as [first, last], both included."""
        return [[first, last] for first, last in zip(self._firsts, self._lasts, strict=True)]


class BootLedger:
    """What one boot of a sensor knows of its samples. With QoS 1 and 2 each that was taken is in one place at last.

    Acknowledged, dropped, lost to a reboot, or still held.
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
        """Samples taken: their sequences are 0 to `taken` - 1."""
        self.sent = 0
        """Samples sent at least once."""
        self.acknowledged = SequenceRanges()
        """By PUBACK, or with QoS 2 by PUBREC, which says as much: the gateway has it."""
        self.handed_over = SequenceRanges()
        """Sent with QoS 0, which nobody acknowledges: what became of them is not known."""
        self.dropped = SequenceRanges()
        """The ring was full, and they were its oldest."""
        self.vanished = SequenceRanges()
        """Held when the power went. Some may have been sent, and be at the gateway."""
        self.reported = SequenceRanges()
        """Dropped, and told to the gateway by `lost` of a sample that is acknowledged (QoS 0: sent)."""
        self.unreported = SequenceRanges()
        """Dropped, and not yet part of any payload."""
        self.report_outstanding = False
        """Whether a `lost` is on its way: there is one at a time."""

    def line(self) -> dict[str, object]:
        """Give the boot as one line of the ledger says it."""
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
    """Write one JSON line for each boot, to a file beside and renamed, so that a reader sees whole ones.

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
    """Yield what notes a sample as it is taken (device, boot, sequence, monotonic time) as a line of CSV.

    Without a path nothing is noted. Raises OSError where the file cannot be made.
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
