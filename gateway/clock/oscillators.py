"""The oscillators of sensors: how far from true each kind may run, and how its rate may change."""

from typing import Literal, NamedTuple

from gateway.clock.sensor_line import RateLimits

Kind = Literal["rc", "ceramic", "crystal"]


class Oscillator(NamedTuple):
    """Limits of the oscillator that paces a sensor's clock."""

    error_ppm: float
    """Greatest error of its rate."""
    wander_ppm_per_s: float
    """Greatest change of its rate in a second."""
    spread_ppm: float
    """Greatest difference between its rates at any two times."""


OSCILLATORS: dict[Kind, Oscillator] = {
    # 100 ppm a degree: a box that warms by six degrees in ten minutes, and by thirty in a day.
    "rc": Oscillator(10_000, 1.0, 3_000),
    "ceramic": Oscillator(5_000, 0.3, 800),
    "crystal": Oscillator(100, 0.02, 30),
}

KINDS: tuple[Kind, ...] = ("crystal", "ceramic", "rc")
"""From the best to the worst."""

# Gateway time per tick strays a little further from 1 than ticks per gateway time do: 1 / 0.99 is 1.0101. Its rate also
# changes more: by the square of that factor, and by its cube for each microsecond of ticks.
_BEYOND = 1.0102
_GATEWAY = OSCILLATORS["crystal"]
"""Oscillator of the gateway's own clock, which is not true either."""
_GATEWAY_PPM = 110


def rate_error(kind: Kind) -> float:
    """Greatest |rate - 1|, in gateway time per tick."""
    return (OSCILLATORS[kind].error_ppm * _BEYOND + _GATEWAY_PPM) * 1e-6


RATE_ERROR_MAX = rate_error("rc")
"""Greatest |rate - 1| of any clock, also of one that is worse than its setting says."""


def rate_limits(kind: Kind, strain: int) -> RateLimits:
    """Limits of a clock's rate. `strain` multiplies the change of rate that its oscillator should have."""
    oscillator, error = OSCILLATORS[kind], rate_error(kind)
    wander_ppm_per_s = (oscillator.wander_ppm_per_s + _GATEWAY.wander_ppm_per_s) * _BEYOND**3
    spread_ppm = (oscillator.spread_ppm + _GATEWAY.spread_ppm) * _BEYOND**2
    return RateLimits(error, wander_ppm_per_s * strain * 1e-12, min(spread_ppm * strain * 1e-6, 2 * error))
