"""Times ways of doing the same thing, in turns: what else the machine does is shared among them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

Way = Callable[[int], None]
"""Does one round, whose number it is given."""


def interleaved(ways: Mapping[str, Way], rounds: Sequence[int], warm: int) -> dict[str, list[float]]:
    """The seconds of each way in each round but the first `warm` ones. Who is first changes from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for place, number in enumerate(rounds):
        names = list(ways)
        first = place % len(names)
        for name in names[first:] + names[:first]:
            begun = time.monotonic()
            ways[name](number)
            if place >= warm:
                seconds[name].append(time.monotonic() - begun)
    return seconds


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """The median of the ratios round by round: a round in which the machine was slow was so for both."""
    return median(one / other for one, other in zip(of, to, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: the least value that this share of all does not exceed."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]
