"""When a new lane begins: without I/O, without a clock.

A lane is what the uplink was like while its readings came in. What came in while it was down, or waited for too long on
a link that is slower than they come, is backlog; the lane that readings go into now is the live one.
"""

from gateway.settings import KafkaSettings


class LanePolicy:
    """Says when readings should go into a new lane, and why; `begun` is told when they do."""

    def __init__(self, kafka: KafkaSettings, now_s: float) -> None:
        self._kafka = kafka
        self._began_s = now_s
        self._is_up: bool | None = None
        """Whether the uplink was up when the lane began; None for a start's, which is either."""

    def reason(self, now_s: float, *, is_up: bool, live_age_s: float, lanes_behind: int) -> str | None:
        """Why a new lane should begin now; None to go on with this one.

        `live_age_s` is how long the oldest live reading that Kafka does not have has waited, and `lanes_behind` how
        many lanes before this one hold readings. Times are a monotonic clock's, in seconds.
        """
        age_s = now_s - self._began_s
        if age_s < self._kafka.lane_s_min:
            if self._is_up is None and is_up:
                # It was reached at once: all that came in since the start is live.
                self._is_up = True
            return None
        if self._is_up is None and not is_up:
            # Nothing was sent since the start: this is the outage's lane.
            self._is_up = False
        if lanes_behind + 1 >= self._kafka.lanes_max:
            return None
        if is_up and not self._is_up:
            return "uplink-up"
        if not is_up and self._is_up:
            return "uplink-down"
        if is_up and live_age_s > self._kafka.live_age_s_max:
            return "uplink-slow"
        return None

    def begun(self, now_s: float, *, is_up: bool) -> None:
        """A new lane has begun."""
        self._began_s = now_s
        self._is_up = is_up
