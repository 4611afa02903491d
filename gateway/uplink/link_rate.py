"""Judges by earlier requests how many bytes one request to Kafka may carry. It does no I/O and reads no clock.

If the link cannot carry a request within its time-out, the request is sent again and again, and never arrives. If a
request is much smaller than the link takes, it wastes a round trip. A link that carries late is narrow; a broker that
answers late says nothing of the link.
"""

from collections import deque

SHARE = 1 / 4
"""Share of its time-out that a request may spend on the link. The rest is for a link that gets worse."""
LATENCY_SHARE_MAX = 1 / 4
"""Largest share of the time-out that counts as latency. So a request that fits is through in half of its time-out,
however wrongly the latency was judged."""
FIRST_BYTES = 64_000
"""Bytes of the first request on a link of which nothing is known."""
BYTES_MIN = 4_000
"""Bytes that a request may always carry. A smaller request would be mostly headers and round trip."""
SMALL_SHARE = 1 / 8
"""A request below this share of the limit tells the latency of the link, and nothing of its rate."""
LATENCY_REQUESTS = 8
"""Number of small requests that show the latency: the fastest of them queued least."""
ANSWERED_SHARE_MAX = 0.9
"""Share of the time-out that an answer may take if requests grow. A broker, or a link behind a proxy, may answer late
because a request is large."""
_SECONDS_MIN = 1e-6


class Passage:
    """Progress of a round's bytes, look by look. Bytes that a broker's TCP has were carried, answered or not."""

    def __init__(self, now_s: float, link_bytes: int) -> None:
        """Begin a round on a link that has carried `link_bytes` before."""
        self._begun_s = self._looked_s = now_s
        self._link_bytes = link_bytes
        self._handed = self._carried = 0
        self.handed_s = now_s
        """When the client was last given more of the round: the time of the look before it was seen."""
        self.moved_s = now_s
        """When the client was last given more of the round, or more was carried."""
        self.sending_s = 0.0
        """Seconds in which bytes of the round were under way, and not yet carried."""

    @property
    def is_carried(self) -> bool:
        """Whether all bytes that the client was given were carried. A broker has to answer, or to be free for more."""
        return self._carried >= self._handed

    @property
    def answered_s(self) -> float:
        """Seconds from when the client was given the first bytes of the round to the last look."""
        return self._looked_s - self._begun_s

    def measure(self, now_s: float, handed: int, link_bytes: int) -> None:
        """Take the bytes of the round that the client was given so far, and all bytes that the link has carried."""
        carried = link_bytes - self._link_bytes
        if not handed:
            # The client sends a broker one request at a time, so this round waits for the answer to another request.
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

    Requests that are under way at once share the link. Each shows its own part of the rate, which is the part that its
    time-out depends on.
    """

    def __init__(self, request_timeout_s: float, bytes_max: int) -> None:
        """Begin with an unknown link. `bytes_max` is what a broker takes, `BYTES_MIN` or more (else ValueError)."""
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
        """Bytes that the next request may carry, from `BYTES_MIN` to `bytes_max`."""
        return int(self._bytes)

    @property
    def bytes_per_s(self) -> int:
        """Rate that the link was seen to carry, without the bounds of a request. At first it is a guess."""
        return int(self._bytes_per_s)

    def bytes_in(self, seconds: float) -> int:
        """Bytes that the link takes in this time, from `BYTES_MIN` to what a request may carry.

        A backlog request of this size keeps no live reading waiting for longer.
        """
        return int(min(self._bytes, max(BYTES_MIN, self._bytes_per_s * seconds)))

    def acknowledged(self, size: int, seconds: float, answered_s: float = 0.0) -> None:
        """Learn from a request of `size` bytes on the wire that was carried within `seconds` and then acknowledged.

        `answered_s` is when the answer came, in seconds since the request began, if that is later. It bounds how fast
        requests grow, and says nothing of the rate.
        """
        seconds = max(seconds, _SECONDS_MIN)
        if size <= max(self._bytes * SMALL_SHARE, BYTES_MIN) or seconds < min(self._latencies_s, default=0.0):
            self._latencies_s.append(seconds)
        latency_s = min(*self._latencies_s, self._latency_s_max) if self._latencies_s else 0.0
        # The latency is known only roughly. At least an eighth of the time counts as the bytes' own.
        sending_s = max(seconds - latency_s, seconds / 8)
        bytes_per_s = size / sending_s
        if size >= self._bytes / 2 or (size > max(self._bytes * SMALL_SHARE, BYTES_MIN) and sending_s > self._target_s):
            # The request used the link fully, or took too long although it was small. A slower link is believed at
            # once, a faster one halfway, as the next request may have worse luck.
            self._bytes_per_s = min(bytes_per_s, (self._bytes_per_s + bytes_per_s) / 2)
        else:
            # The sender had no more to send (application-limited, as BBR calls it). So the link was this fast at least.
            self._bytes_per_s = max(self._bytes_per_s, (self._bytes_per_s + size / seconds) / 2)
        # Nothing is known beyond what the link has carried. At most twice that is tried next, and less if the answer
        # could not come in time.
        growth = min(2.0, ANSWERED_SHARE_MAX * self._timeout_s / max(seconds, answered_s))
        proven = max(self._bytes, growth * min(size, self._bytes))
        if answered_s > 2 * self._timeout_s and size > self._bytes / 2:
            # A single request is answered within a time-out, after at most one other. So this round was several
            # requests.
            proven = self._bytes / 2
        self._bytes = min(max(BYTES_MIN, min(self._bytes_per_s * self._target_s, proven)), self._ceiling)

    def timed_out(self, size: int) -> None:
        """Learn from a request of `size` bytes that was not acknowledged in time.

        Half of its size is tried next. Requests that were under way at once and failed together halve the limit once.
        """
        self._bytes = max(BYTES_MIN, min(self._bytes, size / 2))
        self._bytes_per_s = min(self._bytes_per_s, self._bytes / self._target_s)
