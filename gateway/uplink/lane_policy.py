"""Decides when a new lane begins. It does no I/O and reads no clock.

A lane holds readings that came in while the uplink was in one state. Readings are backlog if they came in while it was
down, or waited too long on a slow link. The lane that readings go into now is the live one.
"""

from gateway.settings import KafkaSettings


class LanePolicy:
    """Says when a new lane should begin, and why. Call `begun` or `begun_at_session` when it does."""

    def __init__(self, kafka: KafkaSettings, now_s: float) -> None:
        self._kafka = kafka
        self._began_s = now_s
        self._is_up: bool | None = None
        """Whether the uplink was up when the lane began. None while that is not known: after a start, and until
        something is heard of a new session."""
        self._session_lane_s_min = kafka.lane_s_min
        """Least age in seconds at which a lane ends as a session begins. It doubles each time, until the uplink is
        up."""

    def reason(self, now_s: float, *, is_up: bool, live_age_s: float, backlog_lanes: int, has_hole: bool) -> str | None:
        """The reason to begin a new lane now; None to go on with this one.

        `live_age_s` is the age of the oldest live reading that Kafka does not have. `backlog_lanes` is the number of
        earlier lanes that hold readings. `has_hole` says that the lane has skipped numbers. Times are a monotonic
        clock's, in seconds.
        """
        age_s = now_s - self._began_s
        if is_up:
            self._session_lane_s_min = self._kafka.lane_s_min
        is_young = age_s < self._kafka.lane_s_min
        if self._is_up is None and (is_up or not is_young):
            # Kafka was reached soon, so the whole lane is live; or this lane belongs to the outage.
            self._is_up = is_up
        if is_young or backlog_lanes + 1 >= self._kafka.lanes_max:
            return None
        if is_up and not self._is_up:
            return "uplink-up"
        if not is_up and self._is_up:
            return "uplink-down"
        if is_up and live_age_s > self._kafka.live_age_s_max:
            return "uplink-slow"
        return "commit-failed" if has_hole else None

    def reason_at_session(self, now_s: float, *, backlog_lanes: int) -> str | None:
        """The reason to begin a new lane as a session begins, before anything is sent; None to go on with this one.

        Readings of an outage must be in an earlier lane by then. But a session may begin and carry nothing. Then its
        lane belongs to the outage, and the next lane has to wait.
        """
        if self._is_up or now_s - self._began_s < self._session_lane_s_min:
            return None
        return None if backlog_lanes + 1 >= self._kafka.lanes_max else "uplink-up"

    def begun(self, now_s: float, *, is_up: bool) -> None:
        """Note that a new lane has begun."""
        self._began_s = now_s
        self._is_up = is_up

    def begun_at_session(self, now_s: float) -> None:
        """Note that a new lane has begun for a session of which nothing was heard yet."""
        self._began_s = now_s
        self._is_up = None
        self._session_lane_s_min = max(2 * self._session_lane_s_min, 1.0)
