"""Corrects the times of a few records of each device in Python, by the rules of `time_corrections`.

Spark corrects the times of all readings. The times of islands' ends, heartbeats and losses are corrected here, without
joins. A test compares both.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.log.edges import Edge

# These stand here, not in `time_corrections`: that module needs Delta, which executors may lack. This one runs there.
TOLD_SLACK_US = 60_000_000
"""Microseconds after a correction in which a reading may still have been sent by the uncorrected clock."""
EARLIEST_US = -62_104_060_800_000_000
LATEST_US = 253_402_300_799_999_999
"""The years 2 to 9999, which every reader of a table can show. A correction to a time beyond them does not apply."""
DEVICE_QUALITY = "device"
FOREVER_US = 2**62
"""Microseconds beyond any time. A time without a bound reaches from -FOREVER_US to FOREVER_US."""
UNBOUNDED_US = 10**18
"""Microseconds (30,000 years) from which a bound says nothing. `TIME_ERROR_UNKNOWN_US` is such a bound."""
CLOCK_PPM = 500
"""Parts per million of its distance that a time reckoned from a known one may be wrong. Kernels bend clocks no more."""

GatewayBoot = tuple[str, str, str]
"""Namespace, gateway and boot."""


class Correction(NamedTuple):
    """A time correction for a gateway's boot: a row of `time_corrections.SCHEMA`."""

    namespace: str
    gateway: str
    gateway_boot: str
    version: int
    quality: str
    boottime_us: int
    offset_us: int
    rate_ppm: Decimal
    error_us: int
    error_growth_ppm: Decimal
    supersedes: bool
    told_us: int
    ce_id: str


class Moment(NamedTuple):
    """A time and its bound."""

    us: int
    error_us: int

    def earliest_us(self) -> int:
        return -FOREVER_US if self.error_us >= UNBOUNDED_US else self.us - self.error_us

    def latest_us(self) -> int:
        return FOREVER_US if self.error_us >= UNBOUNDED_US else self.us + self.error_us


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of gateways' boots, as they are known now."""

    corrections: Mapping[GatewayBoot, tuple[Correction, int | None]] = field(default_factory=dict)
    """Each boot's correction that counts, and the time until which wrong times were sent, if any."""
    known: Mapping[GatewayBoot, Edge] = field(default_factory=dict)
    """A heartbeat of each boot with a known time."""

    def of(self, namespace: str, edge: Edge) -> Moment:
        """The corrected time of a record."""
        sent = Moment(edge.event_us, edge.time_error_us)
        told = self.corrections.get((namespace, edge.gateway, edge.gateway_boot))
        if told is None or edge.time_quality == DEVICE_QUALITY:
            return sent
        last, wrong_until_us = told
        distance = edge.boot_time_us - last.boottime_us
        us = edge.boot_time_us + last.offset_us + _millionths(distance, last.rate_ppm)
        if not EARLIEST_US <= us <= LATEST_US:
            return sent
        own_us = edge.time_error_us if edge.boot_time_error_us is None else edge.boot_time_error_us
        growth_us = -_millionths_down(-abs(distance), last.error_growth_ppm)
        error_us = min(last.error_us + growth_us + own_us, TIME_ERROR_UNKNOWN_US)
        is_better = error_us < edge.time_error_us and us <= last.told_us + TOLD_SLACK_US
        was_wrong = wrong_until_us is not None and us <= wrong_until_us + TOLD_SLACK_US
        return Moment(us, error_us) if is_better or was_wrong else sent

    def in_boot(self, boot: GatewayBoot, boottime_us: int, also: Edge) -> Moment:
        """The time of a moment in a boot, reckoned from records of that boot: from `known`, and from `also`."""
        namespace, gateway, name = boot
        there = [edge for edge in (self.known.get(boot), also) if edge is not None and edge.gateway_boot == name]
        ways = [_reckoned(boottime_us, edge) for edge in there if edge.time_error_us < UNBOUNDED_US]
        best = min((way for way in ways if way is not None), key=_worth, default=Moment(0, TIME_ERROR_UNKNOWN_US))
        return self.of(namespace, Edge(*best, "bounded", gateway, name, boottime_us, 0))


def clocks(corrections: Iterable[Correction], known: Mapping[GatewayBoot, Edge]) -> Clocks:
    """Choose each boot's correction that counts, as `time_corrections.current` does."""
    by_boot: dict[GatewayBoot, list[Correction]] = {}
    for correction in corrections:
        by_boot.setdefault(correction[:3], []).append(correction)
    chosen: dict[GatewayBoot, tuple[Correction, int | None]] = {}
    for boot, versions in by_boot.items():
        versions.sort(key=lambda correction: (correction.version, correction.ce_id))
        wrong = [correction.told_us for correction in versions if correction.supersedes]
        chosen[boot] = versions[-1], wrong[-1] if wrong else None
    return Clocks(chosen, known)


def _worth(moment: Moment) -> tuple[int, int]:
    return moment.error_us, moment.us


def _reckoned(boottime_us: int, edge: Edge) -> Moment | None:
    """The time of a moment, reckoned from a record of the same boot with a known time; None if it is out of range."""
    distance = boottime_us - edge.boot_time_us
    us, error_us = edge.event_us + distance, edge.time_error_us - (-abs(distance) * CLOCK_PPM // 1_000_000)
    return Moment(us, error_us) if EARLIEST_US <= us <= LATEST_US and error_us < UNBOUNDED_US else None


def _millionths_down(number: int, ppm: Decimal) -> int:
    return number * int(ppm.scaleb(6)) // 10**12


def _millionths(number: int, ppm: Decimal) -> int:
    """`ppm` millionths of a number, cut towards zero."""
    product = number * int(ppm.scaleb(6))
    return product // 10**12 if product >= 0 else -(-product // 10**12)
