"""How many bytes one request to Kafka may carry, judged by how the ones before it went: without I/O, without a clock.

A request that the link cannot carry within its time-out is sent again and again and never arrives; one that is much
smaller than the link takes wastes a round trip.
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
_SECONDS_MIN = 1e-6


class LinkRate:
    """The rate of a link, and the size of request that follows from it.

    What several requests at once take is shared among them: each shows the rate that one of them had, and that is the
    rate which its own time-out is about.
    """

    def __init__(self, request_timeout_s: float, bytes_max: int) -> None:
        """Begin with an unknown link. `bytes_max` is what a broker takes, and more than `BYTES_MIN`."""
        if request_timeout_s <= 0 or bytes_max < BYTES_MIN:
            raise ValueError(f"a time-out above 0 s and {BYTES_MIN} bytes or more: {request_timeout_s=}, {bytes_max=}")
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

    def acknowledged(self, size: int, seconds: float) -> None:
        """Learn from a request of `size` bytes on the wire that was acknowledged `seconds` after it was begun."""
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
        # What a link carries is known up to what it has carried: at most twice that is tried next.
        proven = max(self._bytes, 2 * min(size, self._bytes))
        self._bytes = min(max(BYTES_MIN, min(self._bytes_per_s * self._target_s, proven)), self._ceiling)

    def timed_out(self, size: int) -> None:
        """Learn from a request of `size` bytes that was not acknowledged in time.

        Half of it is tried next. Several that were under way at once and failed together halve the limit once.
        """
        self._bytes = max(BYTES_MIN, min(self._bytes, size / 2))
        self._bytes_per_s = min(self._bytes_per_s, self._bytes / self._target_s)
