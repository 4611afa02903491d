"""The oscillators of sensors: how far from true each kind may run, and how its rate may change."""

from typing import Literal, NamedTuple

from gateway.clock.sensor_line import RateLimits

Kind = Literal["rc", "ceramic", "crystal"]


class Oscillator(NamedTuple):
    """What sets the pace of a sensor's clock, and how badly it may do it."""

    error_ppm: float
    """How far from true it may run."""
    wander_ppm_per_s: float
    """How fast its rate may change."""
    spread_ppm: float
    """How far apart its rates at any two times may lie."""


OSCILLATORS: dict[Kind, Oscillator] = {
    # 100 ppm a degree: a box that warms by six degrees in ten minutes, and by thirty in a day.
    "rc": Oscillator(10_000, 1.0, 3_000),
    "ceramic": Oscillator(5_000, 0.3, 800),
    "crystal": Oscillator(100, 0.02, 30),
}

KINDS: tuple[Kind, ...] = ("crystal", "ceramic", "rc")
"""The best first."""

# Gateway time per tick strays a little further from 1 than ticks per gateway time do: 1 / 0.99 is 1.0101. So its change
# of rate is greater as well: by the square of that, and by the cube for each microsecond of ticks.
_BEYOND = 1.0102
_GATEWAY = OSCILLATORS["crystal"]
"""The gateway's own clock is not true either, and its rate changes too."""
_GATEWAY_PPM = 110


def rate_error(kind: Kind) -> float:
    """|rate - 1| at most, in gateway time per tick."""
    return (OSCILLATORS[kind].error_ppm * _BEYOND + _GATEWAY_PPM) * 1e-6


RATE_ERROR_MAX = rate_error("rc")
"""Of a clock that is worse than was said, too."""


def rate_limits(kind: Kind, strain: int) -> RateLimits:
    """How far from 1 a rate may be, and how it may change; `strain` times as much change as it should have."""
    oscillator, error = OSCILLATORS[kind], rate_error(kind)
    wander_ppm_per_s = (oscillator.wander_ppm_per_s + _GATEWAY.wander_ppm_per_s) * _BEYOND**3
    spread_ppm = (oscillator.spread_ppm + _GATEWAY.spread_ppm) * _BEYOND**2
    return RateLimits(error, wander_ppm_per_s * strain * 1e-12, min(spread_ppm * strain * 1e-6, 2 * error))
