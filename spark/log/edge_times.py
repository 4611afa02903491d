"""When something was, as it is known now, for a few records of each device: the rules of `time_corrections` in Python.

Spark puts the times of all readings right; the ends of islands, heartbeats and losses are put right here, so that what
is said of a device needs no joins. A test holds the two against each other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.log.sequence_runs import Edge

# Here and not in `time_corrections`, which needs Delta: this module runs on executors, where it need not be.
TOLD_SLACK_US = 60_000_000
"""A reading that came in so much after a correction may yet have been sent by the clock as it was before."""
EARLIEST_US = -62_104_060_800_000_000
LATEST_US = 253_402_300_799_999_999
"""The years 2 to 9999, all that a table's reader can show: a correction that leads out of them applies to nothing."""
DEVICE_QUALITY = "device"
FOREVER_US = 2**62
"""Beyond any time. What nothing bounds reaches from here below zero to here."""
UNBOUNDED_US = 10**18
"""Bounds from here on, 30,000 years, say nothing; so does `TIME_ERROR_UNKNOWN_US`."""
CLOCK_PPM = 500
"""Kernels bend their clocks by no more: what a known time is worth so far away."""

GatewayBoot = tuple[str, str, str]
"""Namespace, gateway, boot."""


class Correction(NamedTuple):
    """What a gateway told of a boot's clock: a row of `time_corrections.SCHEMA`."""

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
    """What is known of the clocks of gateways' boots."""

    corrections: Mapping[GatewayBoot, tuple[Correction, int | None]] = field(default_factory=dict)
    """The one that counts, and until when what was told was wrong."""
    known: Mapping[GatewayBoot, Edge] = field(default_factory=dict)
    """A heartbeat of each, whose time was known."""

    def of(self, namespace: str, edge: Edge) -> Moment:
        """The time of a record."""
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
        """The time of a moment of a boot, of which nothing was told itself; `also` is a record of the same gateway."""
        namespace, gateway, name = boot
        there = [edge for edge in (self.known.get(boot), also) if edge is not None and edge.gateway_boot == name]
        ways = [_reckoned(boottime_us, edge) for edge in there if edge.time_error_us < UNBOUNDED_US]
        best = min((way for way in ways if way is not None), key=_worth, default=Moment(0, TIME_ERROR_UNKNOWN_US))
        return self.of(namespace, Edge(*best, "bounded", gateway, name, boottime_us, 0))


def clocks(corrections: Iterable[Correction], known: Mapping[GatewayBoot, Edge]) -> Clocks:
    """Choose of each boot's corrections the one that counts, as `time_corrections.current` does."""
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
    """From a record of the same boot whose time is known; None where that leads to no time."""
    distance = boottime_us - edge.boot_time_us
    us, error_us = edge.event_us + distance, edge.time_error_us - (-abs(distance) * CLOCK_PPM // 1_000_000)
    return Moment(us, error_us) if EARLIEST_US <= us <= LATEST_US and error_us < UNBOUNDED_US else None


def _millionths_down(number: int, ppm: Decimal) -> int:
    return number * int(ppm.scaleb(6)) // 10**12


def _millionths(number: int, ppm: Decimal) -> int:
    """So many parts in a million, cut towards zero."""
    product = number * int(ppm.scaleb(6))
    return product // 10**12 if product >= 0 else -(-product // 10**12)
