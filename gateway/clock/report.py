"""Reports on the daemon's own clock: whether it is synced, since when, and how often it was stepped."""

from msgspec import Struct

from gateway.clock.gateway_clock import BootClock
from gateway.host.terminal_text import bound, span
from gateway.settings import GatewaySettings

JITTER_US = 100_000
"""Most that the offsets of two looks may differ by without a step, as on a busy machine."""


class ClockView(Struct, frozen=True):
    """The gateway's clock as the daemon sees it. Times are CLOCK_BOOTTIME in microseconds."""

    synced: bool
    error_us: int | None = None
    """Bound of its error; None if nothing vouches for the clock."""
    since_us: int = 0
    """When the clock was first synced, or else the gateway's start; 0 if unknown. A synced clock stays synced until the
    next boot."""
    steps: int = 0
    """Steps since the gateway's start, without the first sync. At each, the time before or after was wrong."""
    stepped_us: int | None = None
    """Time of the last step."""
    stepped_by_us: int = 0
    """Size of the last step; forward is positive."""


class ClockReport:
    """Keeps the `ClockView`. Call `looked` for each look at the clock."""

    def __init__(self, clock: BootClock, now_us: int) -> None:
        self._view = ClockView(clock.synced, clock.error_us(now_us), now_us)

    def view(self) -> ClockView:
        return self._view

    def looked(self, before: BootClock, now: BootClock, now_us: int) -> None:
        """Take in a look: the clock as known before it, and as known now."""
        view = self._view
        steps, stepped_us, stepped_by_us = view.steps, view.stepped_us, view.stepped_by_us
        by_us = 0 if before.last is None or now.last is None else now.last.offset_us - before.last.offset_us
        # The first sync is no step, as nobody had said that the clock was right before. Nor is a leap second.
        if abs(by_us) > JITTER_US and before.synced is now.synced and len(now.leaps) <= len(before.leaps):
            steps, stepped_us, stepped_by_us = steps + 1, now_us, by_us
        since_us = view.since_us if before.synced is now.synced else now_us
        self._view = ClockView(now.synced, now.error_us(now_us), since_us, steps, stepped_us, stepped_by_us)


def known_words(gateway: GatewaySettings, error_us: int | None, since: str = "") -> str:
    """Words for a known clock: `synced for 1 h, within ± 2.1 ms`."""
    how = "taken as it is" if gateway.clock == "system" else "synced"
    return f"{how}{since}" + ("" if error_us is None else f", within {bound(error_us)}")


def hold_words(gateway: GatewaySettings, until_us: int | None, now_us: int) -> str:
    """Words for how long readings still wait for a sync: `for 7 min more at most (gateway.hold_unsynced_s)`."""
    left = f"for {span(gateway.hold_unsynced_s)} at most"
    if until_us is not None:
        left = f"for {span(max(0.0, (until_us - now_us) / 1e6))} more at most"
    return f"{left} (gateway.hold_unsynced_s)"
