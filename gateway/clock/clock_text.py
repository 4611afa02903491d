"""The words of the gateway's own clock, for `sluice status`, `sluice check` and the status page. No I/O."""

from gateway.host.terminal_text import bound, span
from gateway.settings import GatewaySettings


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
