"""The registry as plain values: where each device is, how its values are calibrated, which gateways speak where.

Spans of validity are half open, in UTC: from `valid_from` on, up to, not including, `valid_to`; None is an open end.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from decimal import Decimal


@dataclass(frozen=True, slots=True)
class Device:
    """Where a device is for a span of time, and what else is to be known of it."""

    namespace: str
    device: str
    site: str
    labels: tuple[tuple[str, str], ...] = ()
    """By name."""
    valid_from: datetime | None = None
    valid_to: datetime | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a value is corrected by for a span of time: value * scale + offset."""

    namespace: str
    device: str
    metric: str
    stream: str | None = None
    """None: whichever stream of the device the metric comes in."""
    scale: Decimal = Decimal(1)
    offset: Decimal = Decimal(0)
    valid_from: datetime | None = None
    valid_to: datetime | None = None


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway, where it may speak, and since when nothing is expected of it any more."""

    namespace: str
    gateway: str
    site: str | None = None
    retired_from: datetime | None = None
    topics: tuple[str, ...] = ()
    """Kafka topics, or what their names begin with and `*`: it may speak in no other, and none without them in these.
    Empty: it shares those that are nobody's."""


@dataclass(frozen=True, slots=True)
class Registry:
    """All that is registered."""

    devices: tuple[Device, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    gateways: tuple[Gateway, ...] = ()

    @property
    def version(self) -> str:
        """A digest of what is registered, not of how or in which order it was written."""
        kinds = {
            name: sorted(json.dumps(asdict(entry), default=_text_of, sort_keys=True) for entry in entries)
            for name, entries in (
                ("devices", self.devices),
                ("calibrations", self.calibrations),
                ("gateways", self.gateways),
            )
        }
        return hashlib.sha256(json.dumps(kinds, sort_keys=True).encode()).hexdigest()[:12]


def _text_of(value: object) -> str:
    if isinstance(value, Decimal):
        # 1.5 and 1.50 are one number.
        return format(value.normalize() + 0, "f")
    assert isinstance(value, datetime)  # noqa: S101 - there is nothing else in the classes above
    return value.isoformat()
