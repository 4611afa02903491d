"""A sensor's tick counter: it wraps after 2**32 milliseconds, and begins anew when the sensor restarts."""

TICK_US_MODULUS = 2**32 * 1000
SAMPLE_TICK_US = 1_020
"""Resolution of a sample's tick: a millisecond, as long as it lasts on a slow clock."""
SENT_AGAIN_MAX = 32
"""Samples that a sensor or a broker has under way at once. They come again after a connection breaks."""
ORDER_SLACK_US = 1_000_000
"""Most that the tick of a later sample (by sequence) may be earlier, as two tasks of a sensor may send samples."""
NO_SEQUENCE = -1


class TickCounter:
    """Unwraps the ticks of one boot of one sensor, and sees by their order whether the counter began anew."""

    __slots__ = ("is_doubted", "is_odd", "last_sequence", "last_tick_us", "reference", "wrapped_us")

    def __init__(self) -> None:
        self.last_sequence = NO_SEQUENCE
        """Highest sequence that arrived; `NO_SEQUENCE` if none did since the tick began anew."""
        self.last_tick_us = 0
        """Tick of the sample with `last_sequence`."""
        self.wrapped_us = 0
        """The part of `last_tick_us` that the counter lost by wrapping."""
        self.reference: tuple[int, int] | None = None
        """A tick and its approximate time, by which wrapped ticks are unwrapped."""
        self.is_odd = False
        """Whether the last arrival was not of this counter."""
        self.is_doubted = False
        """Whether the sequence began anew, and no arrival since has shown that the tick did not."""

    def restart(self) -> None:
        """Forget everything: the counter is another one."""
        self.last_sequence, self.reference, self.is_odd, self.is_doubted = NO_SEQUENCE, None, False, False

    def unwrapped(self, wrapped_us: int, now_us: int) -> int:
        """The unwrapped tick of this value that is nearest to the tick expected at `now_us`.

        The first tick becomes the reference of those that follow.
        """
        if self.reference is None:
            self.reference = wrapped_us, now_us
        tick_us, at_us = self.reference
        expected_us = tick_us + (now_us - at_us)
        behind_us = (expected_us - wrapped_us + TICK_US_MODULUS // 2) % TICK_US_MODULUS
        return expected_us - (behind_us - TICK_US_MODULUS // 2)

    def is_in_order(self, sequence: int, tick_us: int) -> bool:
        """Whether this tick may be of this counter: a later sample has a later tick."""
        return sequence <= self.last_sequence or tick_us >= self.last_tick_us - ORDER_SLACK_US or self.last_sequence < 0

    def is_sent_again(self, sequence: int) -> bool:
        """Whether a sequence below the highest was under way a moment ago, so that it is no sign of a restart."""
        return sequence > 1 and sequence >= self.last_sequence - SENT_AGAIN_MAX

    def advance(self, sequence: int, tick_us: int) -> None:
        """Take in the sample with the highest sequence so far."""
        self.last_sequence, self.last_tick_us = sequence, tick_us
        self.wrapped_us = tick_us - tick_us % TICK_US_MODULUS
