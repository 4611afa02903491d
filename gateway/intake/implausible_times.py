"""Says that sensors send times that cannot be right, without a line or an event for each of them."""

from collections import Counter
from collections.abc import Callable

import structlog

from gateway.clock.sensor_dates import Implausible

LOG_INTERVAL_US = 60_000_000
EVENT_INTERVAL_US = 3_600_000_000
EVENT_DEVICES_MAX = 100
"""Devices that are told of in an hour; anybody may make up names where anonymous clients are let in."""

log = structlog.get_logger()


class ImplausibleTimes:
    """Logs once a minute at the most for each reason, and reports each device once an hour at the most."""

    def __init__(self, report: Callable[[str, dict[str, object]], None]) -> None:
        """`report` takes a device and what its event says."""
        self._report = report
        self._log_due_us: dict[Implausible, int] = {}
        self._unlogged: Counter[Implausible] = Counter()
        self._reported: set[str] = set()
        self._reported_until_us = 0

    def met(self, reason: Implausible, device: str, told: str, received: str | None, now_us: int) -> None:
        """A reading's time is too far off; `told` and `received` are RFC 3339, `now_us` is CLOCK_BOOTTIME."""
        self._unlogged[reason] += 1
        if now_us >= self._log_due_us.get(reason, now_us):
            log.warning(
                "a sensor's time cannot be right: its reading has the time of its receipt",
                reason=reason,
                device=device,
                told=told,
                received=received,
                readings=self._unlogged.pop(reason),
            )
            self._log_due_us[reason] = now_us + LOG_INTERVAL_US
        if now_us >= self._reported_until_us:
            self._reported.clear()
            self._reported_until_us = now_us + EVENT_INTERVAL_US
        if device not in self._reported and len(self._reported) < EVENT_DEVICES_MAX:
            self._reported.add(device)
            self._report(device, {"reason": reason, "told": told, "received": received})
