"""The registry as plain values: where each device is, how its values are calibrated, which gateways speak where.

Spans of validity are in UTC. They include `valid_from` and exclude `valid_to`. None means an open end.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from decimal import Decimal


@dataclass(frozen=True, slots=True)
class Device:
    """Site and labels of a device for a span of time."""

    namespace: str
    device: str
    site: str
    labels: tuple[tuple[str, str], ...] = ()
    """Names and texts."""
    valid_from: datetime | None = None
    valid_to: datetime | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Correction of a metric for a span of time: value * scale + offset."""

    namespace: str
    device: str
    metric: str
    stream: str | None = None
    """None: every stream of the device."""
    scale: Decimal = Decimal(1)
    offset: Decimal = Decimal(0)
    valid_from: datetime | None = None
    valid_to: datetime | None = None


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway: the topics where it may speak, and the time from which nothing is expected of it."""

    namespace: str
    gateway: str
    site: str | None = None
    retired_from: datetime | None = None
    topics: tuple[str, ...] = ()
    """Kafka topics, or beginnings of topic names with `*`. The gateway may speak only in these, and in these only
    gateways that list them. Empty: it shares the topics that no gateway lists."""


@dataclass(frozen=True, slots=True)
class Registry:
    """All that is registered."""

    devices: tuple[Device, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    gateways: tuple[Gateway, ...] = ()

    @property
    def version(self) -> str:
        """Digest of the registered content, whatever its spelling and order in the file."""
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
