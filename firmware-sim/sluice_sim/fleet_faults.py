"""The faults of each sensor of a fleet, and their times: pure functions of a seed.

Every decision is drawn from the seed, the device and the decision's subject, never from earlier draws. In two runs with
one seed, each sensor has the same traits and boots, suffers the same faults at the same times after the start, and
repeats and reorders the same samples. Only what depends on time differs: which sample is on its way when a fault
strikes, how many are dropped while a sensor is away, pauses before it connects again, ticks.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from hashlib import blake2b
from itertools import accumulate
from math import log
from typing import Any, Final

TICK_MODULUS: Final = 2**32
"""Milliseconds after which a sensor's tick begins again: it has 32 bits, as the firmware's has."""
REORDER_BLOCK: Final = 8
"""Size of the aligned blocks of sequences. Only sequences in one block may overtake each other."""
REBOOT_S: Final = 5.0
HALF_OPEN_S: Final = 120.0
SLOW_READ_S: Final = 60.0
"""Average seconds of these three faults, in the faults' own time."""


class FaultError(ValueError):
    """An impossible rate; the message names it and says what is possible."""


def _rate(usual: float, meaning: str, unit: str = "per hour", most: float = 3600.0) -> Any:
    return field(default=0.0, metadata={"usual": usual, "unit": unit, "most": most, "meaning": meaning})


def _share(usual: float, meaning: str) -> Any:
    return _rate(usual, meaning, "share", 1.0)


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Rates of faults; by default there are none. Rates are per sensor and hour, shares between 0 and 1."""

    drift_ppm: float = _rate(100.0, "the most by which a sensor's clock runs fast or slow", "ppm", 50_000.0)
    qos0: float = _share(0.1, "of sensors that publish with QoS 0")
    qos2: float = _share(0.2, "of sensors that publish with QoS 2")
    clean_sessions: float = _share(0.3, "of sensors that connect with clean session")
    reordering: float = _share(0.2, "of sensors that send what they hold in another order")
    kept_rings: float = _share(0.3, "of sensors whose samples outlive a reboot")
    duplicates: float = _share(0.01, "of samples that are sent again in a PUBLISH of their own")
    reboots: float = _rate(1.0, "power lost for some seconds, without a goodbye")
    drop_outs: float = _rate(0.2, "no radio for drop-out-minutes")
    drop_out_minutes: float = _rate(120.0, "how long a drop-out lasts on average", "minutes", 10_000.0)
    roams: float = _rate(1.0, "to the other of two gateways (needs --roam)")
    half_open: float = _rate(1.0, "the sensor is silent for minutes, then connects anew beside the old connection")
    slow_reads: float = _rate(1.0, "the sensor reads nothing for a minute, and sends what it may without an answer")


NONE: Final = FaultRates()
"""No faults."""
USUAL: Final = FaultRates(**{each.name: each.metadata["usual"] for each in fields(FaultRates)})
"""All faults at once."""


def option_name(field_name: str) -> str:
    """A rate's name on the command line."""
    return field_name.replace("_", "-")


def with_rates(base: FaultRates, given: dict[str, float]) -> FaultRates:
    """Replace rates of `base`, by their names on the command line. Raises FaultError."""
    known = {option_name(each.name): each for each in fields(FaultRates)}
    values = {each.name: getattr(base, each.name) for each in fields(FaultRates)}
    for name, value in given.items():
        if name not in known:
            raise FaultError(f"there is no fault {name!r}; there are {', '.join(known)}")
        most = known[name].metadata["most"]
        if not 0.0 <= value <= most:
            raise FaultError(
                f"{name} is {value:g}; it is a number of the unit {known[name].metadata['unit']!r}, 0 to {most:g}"
            )
        values[known[name].name] = value
    if values["drop_outs"] and "drop-out-minutes" not in given:
        values["drop_out_minutes"] = values["drop_out_minutes"] or USUAL.drop_out_minutes
    if values["qos0"] + values["qos2"] > 1.0:
        raise FaultError("qos0 and qos2 are shares of all sensors: together at most 1")
    return FaultRates(**values)


def draw(seed: int, *about: object) -> float:
    """Draw a number from 0 (included) to 1 (excluded). A subject always gets the same number."""
    text = "\n".join(map(str, (seed, *about)))
    return (int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 11) / 2**53


@dataclass(frozen=True, slots=True)
class Traits:
    """One sensor's lasting properties."""

    qos: int = 1
    clean_session: bool = False
    reorders: bool = False
    keeps_ring: bool = False
    drift_ppm: float = 0.0
    """Parts per million by which its clock is fast."""
    duplicates: float = 0.0
    """Share of its samples that it sends twice."""
    draw: Callable[..., float] = lambda *about: draw(0, *about)
    """Draws for this sensor."""


def traits_of(seed: int, device: str, rates: FaultRates) -> Traits:
    """Draw the traits of one sensor of a fleet."""

    def draw_own(*about: object) -> float:
        return draw(seed, device, *about)

    quality = draw_own("qos")
    return Traits(
        qos=0 if quality < rates.qos0 else 2 if quality < rates.qos0 + rates.qos2 else 1,
        clean_session=draw_own("clean session") < rates.clean_sessions,
        reorders=draw_own("reorders") < rates.reordering,
        keeps_ring=draw_own("keeps ring") < rates.kept_rings,
        drift_ppm=(2.0 * draw_own("drift") - 1.0) * rates.drift_ppm,
        duplicates=rates.duplicates,
        draw=draw_own,
    )


def boot_of(seed: int, device: str, number: int) -> str:
    """Return the identity of a sensor's boot in the firmware's form. The first boot is number 1."""
    return f"{number}-{int(draw(seed, device, 'boot', number) * 2**32):08x}"


def tick_ms(elapsed_s: float, drift_ppm: float) -> int:
    """Return a sensor's clock `elapsed_s` after its start, in milliseconds modulo 2^32."""
    return int(elapsed_s * 1000.0 * (1.0 + drift_ppm / 1e6)) % TICK_MODULUS


class FaultKind(Enum):
    """A kind of fault. The value is its name in summaries."""

    REBOOT = "reboots"
    DROP_OUT = "drop_outs"
    ROAM = "roams"
    HALF_OPEN = "half_open"
    SLOW_READ = "slow_reads"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one sensor. Times are seconds of the faults' own time, from the start of the fleet."""

    kind: FaultKind
    begins_s: float
    ends_s: float


def faults_of(seed: int, device: str, rates: FaultRates, *, can_roam: bool) -> Iterator[Fault]:
    """Yield one sensor's faults in order, without end if there are any. No two faults overlap.

    Pauses between faults are exponentially distributed, so faults come at random, and as often as the rates say while
    none lasts. Durations are 0.5 to 1.5 times their average.
    """
    durations_s = {
        FaultKind.REBOOT: REBOOT_S,
        FaultKind.DROP_OUT: 60.0 * rates.drop_out_minutes,
        FaultKind.ROAM: 0.0,
        FaultKind.HALF_OPEN: HALF_OPEN_S,
        FaultKind.SLOW_READ: SLOW_READ_S,
    }
    rates_per_h = {kind: float(getattr(rates, kind.value)) for kind in FaultKind}
    if not can_roam:
        rates_per_h[FaultKind.ROAM] = 0.0
    kinds = [kind for kind, rate in rates_per_h.items() if rate]
    up_to = list(accumulate(rates_per_h[kind] for kind in kinds))
    number, now_s = 0, 0.0
    while kinds:
        now_s -= log(1.0 - draw(seed, device, "pause", number)) * 3600.0 / up_to[-1]
        kind = kinds[bisect_right(up_to, draw(seed, device, "kind", number) * up_to[-1])]
        ends_s = now_s + durations_s[kind] * (0.5 + draw(seed, device, "duration", number))
        yield Fault(kind, now_s, ends_s)
        number, now_s = number + 1, ends_s
