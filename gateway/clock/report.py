"""What the daemon tells of its own clock: whether it is synced, since when, and how often it was set."""

from msgspec import Struct

from gateway.clock.gateway_clock import BootClock

JITTER_US = 100_000
"""What two looks may differ by without a step: a machine that is busy."""


class ClockView(Struct, frozen=True):
    """The gateway's clock as the daemon sees it. Times are CLOCK_BOOTTIME in microseconds."""

    synced: bool
    error_us: int | None
    """The bound of its error; None where nothing vouches for it."""
    since_us: int
    """When it was synced, or when the gateway was started without its being so; it cannot be lost in between."""
    steps: int = 0
    """How often it was set since the gateway was started, the first sync left out: one of two times was wrong then."""
    stepped_us: int | None = None
    """When it was set last."""
    stepped_by_us: int = 0
    """By how much: forward is positive."""


class ClockReport:
    """Keeps it: `looked` is to be called for each look at the clock."""

    def __init__(self, clock: BootClock, now_us: int) -> None:
        self._view = ClockView(clock.synced, clock.error_us(now_us), now_us)

    def view(self) -> ClockView:
        return self._view

    def looked(self, before: BootClock, now: BootClock, now_us: int) -> None:
        """See what was known before a look, and what is known now."""
        view = self._view
        steps, stepped_us, stepped_by_us = view.steps, view.stepped_us, view.stepped_by_us
        by_us = 0 if before.last is None or now.last is None else now.last.offset_us - before.last.offset_us
        # The first sync is none: nobody had said that it was right before. Nor is a leap second.
        if abs(by_us) > JITTER_US and before.synced is now.synced and len(now.leaps) <= len(before.leaps):
            steps, stepped_us, stepped_by_us = steps + 1, now_us, by_us
        since_us = view.since_us if before.synced is now.synced else now_us
        self._view = ClockView(now.synced, now.error_us(now_us), since_us, steps, stepped_us, stepped_by_us)
