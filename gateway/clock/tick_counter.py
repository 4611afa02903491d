"""A sensor's tick counter: it wraps after 2**32 milliseconds, and begins anew when the sensor restarts."""

TICK_US_MODULUS = 2**32 * 1000
SAMPLE_TICK_US = 1_020
"""What a sample's tick leaves open: it was taken at some point of its millisecond, which is one of a slow clock."""
SENT_AGAIN_MAX = 32
"""Samples that a sensor, or a broker, has under way at once: these come again after a connection has broken."""
ORDER_SLACK_US = 1_000_000
"""Of two samples the later one (by its sequence) may bear an earlier tick by this: two tasks of one sensor."""
NO_SEQUENCE = -1


class TickCounter:
    """Unwraps the ticks of one boot of one sensor, and sees by their order whether the counter began anew."""

    __slots__ = ("is_doubted", "is_odd", "last_sequence", "last_tick_us", "reference", "wrapped_us")

    def __init__(self) -> None:
        self.last_sequence = NO_SEQUENCE
        """Of the samples that came, the highest; `NO_SEQUENCE` where none did, or the tick began anew since."""
        self.last_tick_us = 0
        """The tick of that one."""
        self.wrapped_us = 0
        """How far the counter had wrapped then."""
        self.reference: tuple[int, int] | None = None
        """A tick, and when it was about: what wrapped ticks are told by."""
        self.is_odd = False
        """Whether the last arrival was of no sample of this counter."""
        self.is_doubted = False
        """Whether its sequence began anew, and no arrival since says that its tick did not."""

    def restart(self) -> None:
        """Forget everything: the counter is another one."""
        self.last_sequence, self.reference, self.is_odd, self.is_doubted = NO_SEQUENCE, None, False, False

    def unwrapped(self, wrapped_us: int, now_us: int) -> int:
        """The tick of this value, modulo its wrap, that is nearest to what the clock says at `now_us`.

        The first tick becomes the reference of those that follow.
        """
        if self.reference is None:
            self.reference = wrapped_us, now_us
        tick_us, at_us = self.reference
        expected_us = tick_us + (now_us - at_us)
        behind_us = (expected_us - wrapped_us + TICK_US_MODULUS // 2) % TICK_US_MODULUS
        return expected_us - (behind_us - TICK_US_MODULUS // 2)

    def is_in_order(self, sequence: int, tick_us: int) -> bool:
        """Whether this tick may be of the same counter as those that came: a later sample has a later one."""
        return sequence <= self.last_sequence or tick_us >= self.last_tick_us - ORDER_SLACK_US or self.last_sequence < 0

    def is_sent_again(self, sequence: int) -> bool:
        """Whether a sequence below the highest is one that was under way a moment ago, and is no sign of a restart."""
        return sequence > 1 and sequence >= self.last_sequence - SENT_AGAIN_MAX

    def advance(self, sequence: int, tick_us: int) -> None:
        """See the sample with the highest sequence so far."""
        self.last_sequence, self.last_tick_us = sequence, tick_us
        self.wrapped_us = tick_us - tick_us % TICK_US_MODULUS
