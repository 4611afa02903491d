"""How many bytes one request to Kafka may carry, judged by how the ones before it went: without I/O, without a clock.

A request that the link cannot carry within its time-out is sent again and again and never arrives; one that is much
smaller than the link takes wastes a round trip. A link that carries late is narrow; a broker that answers late is not.
"""

from collections import deque

SHARE = 1 / 4
"""What of its time-out a request may spend on the link; the rest is for what the link does worse the next time."""
LATENCY_SHARE_MAX = 1 / 4
"""What of the time-out is taken for latency at most: a request that fits is through in half of its time-out, however
wrongly the latency was judged."""
FIRST_BYTES = 64_000
"""A link of which nothing is known is tried with this."""
BYTES_MIN = 4_000
"""A single small batch may always go: below this a request is headers and round trip."""
SMALL_SHARE = 1 / 8
"""A request below this share of the limit tells how long the way is, and nothing of its width."""
LATENCY_REQUESTS = 8
"""So many small requests show the latency: the least of them had to queue least."""
ANSWERED_SHARE_MAX = 0.9
"""What of its time-out a request may be waited for if it grows: a broker, or a way that a proxy hides, may answer so
late because of its size."""
_SECONDS_MIN = 1e-6


class Passage:
    """How far the bytes of a round have come, look by look: what a broker's TCP has was carried, answered or not."""

    def __init__(self, now_s: float, link_bytes: int) -> None:
        """Begin a round on a link that has carried so many bytes before."""
        self._begun_s = self._looked_s = now_s
        self._link_bytes = link_bytes
        self._handed = self._carried = 0
        self.handed_s = now_s
        """When the client was last given more of it, at the latest look before that was seen."""
        self.moved_s = now_s
        """When that was, or more was carried."""
        self.sending_s = 0.0
        """How long some of it was under way, and not yet carried."""

    @property
    def is_carried(self) -> bool:
        """Whether all was carried that the client was given by now: a broker has to answer, or to be free for more."""
        return self._carried >= self._handed

    @property
    def answered_s(self) -> float:
        """How long the round has taken up to the last look, from when the client was given the first of it."""
        return self._looked_s - self._begun_s

    def measure(self, now_s: float, handed: int, link_bytes: int) -> None:
        """Tell what the client was given of the round by now, and what the link has carried in all."""
        carried = link_bytes - self._link_bytes
        if not handed:
            # The client sends a broker one request at a time: this round waits for another's answer.
            self._begun_s = now_s
        elif self._carried < handed:
            self.sending_s += now_s - self._looked_s
        if handed > self._handed:
            self.handed_s = self._looked_s
            self.moved_s = max(self.moved_s, self.handed_s)
        if carried > self._carried:
            self.moved_s = now_s
        self._handed, self._carried, self._looked_s = handed, carried, now_s


class LinkRate:
    """The rate of a link, and the size of request that follows from it.

    What several requests at once take is shared among them: each shows the rate that one of them had, and that is the
    rate which its own time-out is about.
    """

    def __init__(self, request_timeout_s: float, bytes_max: int) -> None:
        """Begin with an unknown link. `bytes_max` is what a broker takes, and more than `BYTES_MIN`."""
        if request_timeout_s <= 0 or bytes_max < BYTES_MIN:
            raise ValueError(f"a time-out above 0 s and {BYTES_MIN} bytes or more: {request_timeout_s=}, {bytes_max=}")
        self._timeout_s = request_timeout_s
        self._target_s = request_timeout_s * SHARE
        self._latency_s_max = request_timeout_s * LATENCY_SHARE_MAX
        self._ceiling = bytes_max
        self._bytes = float(min(FIRST_BYTES, bytes_max))
        self._bytes_per_s = self._bytes / self._target_s
        self._latencies_s: deque[float] = deque(maxlen=LATENCY_REQUESTS)

    @property
    def request_bytes_max(self) -> int:
        """What the next request may carry: from `BYTES_MIN` to `bytes_max`."""
        return int(self._bytes)

    @property
    def bytes_per_s(self) -> int:
        """What the link was seen to carry, without the bounds of a request; a first guess until it has carried one."""
        return int(self._bytes_per_s)

    def bytes_in(self, seconds: float) -> int:
        """What the link takes in that time, from `BYTES_MIN` to what a request may carry.

        A request of the backlog that is no larger keeps no live reading waiting for longer.
        """
        return int(min(self._bytes, max(BYTES_MIN, self._bytes_per_s * seconds)))

    def acknowledged(self, size: int, seconds: float, answered_s: float = 0.0) -> None:
        """Learn from a request of `size` bytes on the wire that was carried within `seconds` and then acknowledged.

        `answered_s` after it was begun, where that is later: it bounds how fast requests grow, and says nothing of the
        rate.
        """
        seconds = max(seconds, _SECONDS_MIN)
        if size <= max(self._bytes * SMALL_SHARE, BYTES_MIN) or seconds < min(self._latencies_s, default=0.0):
            self._latencies_s.append(seconds)
        latency_s = min(*self._latencies_s, self._latency_s_max) if self._latencies_s else 0.0
        # The way's length is known only roughly: an eighth of what was seen was the bytes' own time at least.
        sending_s = max(seconds - latency_s, seconds / 8)
        bytes_per_s = size / sending_s
        if size >= self._bytes / 2 or (size > max(self._bytes * SMALL_SHARE, BYTES_MIN) and sending_s > self._target_s):
            # As wide as it goes, or too large although it was not: a slower link is believed at once, a faster one
            # halfway, for the next request may have worse luck.
            self._bytes_per_s = min(bytes_per_s, (self._bytes_per_s + bytes_per_s) / 2)
        else:
            # The sender had no more, as in BBR's application-limited samples: it was this fast at least.
            self._bytes_per_s = max(self._bytes_per_s, (self._bytes_per_s + size / seconds) / 2)
        # What a link carries is known up to what it has carried: at most twice that is tried next, and less where that
        # could not be answered in time.
        growth = min(2.0, ANSWERED_SHARE_MAX * self._timeout_s / max(seconds, answered_s))
        proven = max(self._bytes, growth * min(size, self._bytes))
        if answered_s > 2 * self._timeout_s and size > self._bytes / 2:
            # Many answers one after the other: a single one comes within a time-out, and another's before it too.
            proven = self._bytes / 2
        self._bytes = min(max(BYTES_MIN, min(self._bytes_per_s * self._target_s, proven)), self._ceiling)

    def timed_out(self, size: int) -> None:
        """Learn from a request of `size` bytes that was not acknowledged in time.

        Half of it is tried next. Several that were under way at once and failed together halve the limit once.
        """
        self._bytes = max(BYTES_MIN, min(self._bytes, size / 2))
        self._bytes_per_s = min(self._bytes_per_s, self._bytes / self._target_s)
