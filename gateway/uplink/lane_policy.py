"""When a new lane begins: without I/O, without a clock.

A lane is what the uplink was like while its readings came in. What came in while it was down, or waited for too long on
a link that is slower than they come, is backlog; the lane that readings go into now is the live one.
"""

from gateway.settings import KafkaSettings


class LanePolicy:
    """Says when readings should go into a new lane, and why; `begun` and `begun_at_session` are told when they do."""

    def __init__(self, kafka: KafkaSettings, now_s: float) -> None:
        self._kafka = kafka
        self._began_s = now_s
        self._is_up: bool | None = None
        """Whether the uplink was up when the lane began; None where that is still to be seen: at a start, and where a
        session has begun of which nothing was heard yet."""
        self._session_lane_s_min = kafka.lane_s_min
        """How old a lane must be to end as a session begins: older each time that nothing comes of one."""

    def reason(self, now_s: float, *, is_up: bool, live_age_s: float, backlog_lanes: int) -> str | None:
        """Why a new lane should begin now; None to go on with this one.

        `live_age_s` is how long the oldest live reading that Kafka does not have has waited, and `backlog_lanes` how
        many lanes before this one hold readings. Times are a monotonic clock's, in seconds.
        """
        age_s = now_s - self._began_s
        if is_up:
            self._session_lane_s_min = self._kafka.lane_s_min
        is_young = age_s < self._kafka.lane_s_min
        if self._is_up is None and (is_up or not is_young):
            # It was reached soon, and all that came in since the lane began is live; or this is the outage's lane.
            self._is_up = is_up
        if is_young:
            return None
        if backlog_lanes + 1 >= self._kafka.lanes_max:
            return None
        if is_up and not self._is_up:
            return "uplink-up"
        if not is_up and self._is_up:
            return "uplink-down"
        if is_up and live_age_s > self._kafka.live_age_s_max:
            return "uplink-slow"
        return None

    def reason_at_session(self, now_s: float, *, backlog_lanes: int) -> str | None:
        """The same as a session with Kafka begins, before anything is sent in it.

        What came in during an outage has to be behind by then. That a session has begun does not say that anything
        will come through: one of which nothing comes leaves its lane to the outage, and the next lane has to wait.
        """
        if self._is_up or now_s - self._began_s < self._session_lane_s_min:
            return None
        return None if backlog_lanes + 1 >= self._kafka.lanes_max else "uplink-up"

    def begun(self, now_s: float, *, is_up: bool) -> None:
        """A new lane has begun."""
        self._began_s = now_s
        self._is_up = is_up

    def begun_at_session(self, now_s: float) -> None:
        """A new lane has begun, for a session of which nothing was heard yet."""
        self._began_s = now_s
        self._is_up = None
        self._session_lane_s_min = max(2 * self._session_lane_s_min, 1.0)
