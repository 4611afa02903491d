"""How far back the rows that still wait may reach in event time, without looking at them."""

import sys
from dataclasses import dataclass

NOTHING_US = sys.maxsize


@dataclass(slots=True)
class EventFloor:
    """A lower bound of the event times of a lane's waiting rows, in two generations.

    Rows below `marker` are the older generation. Once all of these are gone, the newer one takes their place: under
    a steady flow, where something always waits, the floor rises all the same, at most one generation late.
    """

    older_us: int = NOTHING_US
    newer_us: int = NOTHING_US
    marker: int = 0

    @property
    def value_us(self) -> int:
        return min(self.older_us, self.newer_us)

    def add(self, event_us: int) -> None:
        """A row with this event time waits now."""
        self.newer_us = min(self.newer_us, event_us)

    def settle(self, sequence: int, next_sequence: int) -> None:
        """Every row up to and including `sequence` is gone; the next one to come gets `next_sequence`."""
        if sequence >= self.marker - 1:
            self.older_us, self.newer_us = self.newer_us, NOTHING_US
            self.marker = next_sequence
        if sequence >= next_sequence - 1:
            self.older_us = NOTHING_US
