"""Times several ways of doing the same thing, in turns, so that the machine's other work is shared among them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

Way = Callable[[int], None]
"""Does one round, whose number it is given."""


def interleaved(ways: Mapping[str, Way], rounds: Sequence[int], warm: int) -> dict[str, list[float]]:
    """The seconds of each way in each round but the first `warm` ones. Who is first changes from round to round."""
    timed = Rounds(warm)
    for number in rounds:
        timed.take({name: partial(way, number) for name, way in ways.items()})
    return timed.seconds


class Rounds:
    """Rounds that come by themselves, as a stream's batches do."""

    def __init__(self, warm: int) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._warm = warm
        self._rounds = 0

    def take(self, ways: Mapping[str, Callable[[], object]]) -> None:
        """Do one round in each way."""
        names = list(ways)
        first = self._rounds % len(names)
        for name in names[first:] + names[:first]:
            begun = time.monotonic()
            ways[name]()
            if self._rounds >= self._warm:
                self.seconds.setdefault(name, []).append(time.monotonic() - begun)
        self._rounds += 1


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """The median of the ratios round by round: a round in which the machine was slow was so for both."""
    return median(one / other for one, other in zip(of, to, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile by nearest rank: the least value that this share of all does not exceed."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]
