"""What the daemon tells of its own clock: whether it is synced, since when, and how often it was set."""

from msgspec import Struct

from gateway.clock.gateway_clock import BootClock
from gateway.host.terminal_text import bound, span
from gateway.settings import GatewaySettings

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


def known_words(gateway: GatewaySettings, error_us: int | None, since: str = "") -> str:
    """How a clock is known that is: `synced for 1 h, within ± 2.1 ms`."""
    how = "taken as it is" if gateway.clock == "system" else "synced"
    return f"{how}{since}" + ("" if error_us is None else f", within {bound(error_us)}")


def hold_words(gateway: GatewaySettings, until_us: int | None, now_us: int) -> str:
    """For how long readings still wait for one that is not: `for 7 min more at most (gateway.hold_unsynced_s)`."""
    left = f"for {span(gateway.hold_unsynced_s)} at most"
    if until_us is not None:
        left = f"for {span(max(0.0, (until_us - now_us) / 1e6))} more at most"
    return f"{left} (gateway.hold_unsynced_s)"
