"""The QoS 2 exchanges that a session released last, without I/O: a PUBLISH that comes again after its PUBREL is marked.

Between its PUBREL and its PUBCOMP a client may send nothing but the PUBREL again. Some clients send the PUBLISH again
on their next connection. Nothing tells it from a new message of the same bytes, so it is stored, and marked.
"""

from typing import Final

RELEASED_MAX: Final = 64
"""Exchanges of one session that are remembered: more than the usual client has under way at once."""
RELEASED_US: Final = 5_000_000
"""How long an exchange is remembered at least, while others are released: a PUBCOMP is on its way for less than that.
An idle session forgets none. Each commit that releases one writes all of them, so that few spare the card."""
_ID_BYTES: Final = 2
_DIGEST_BYTES: Final = 4
"""Of the eight that a digest has: a mistake marks a reading, and loses none."""
_ENTRY_BYTES: Final = _ID_BYTES + _DIGEST_BYTES
_PACKED_BYTES_MAX: Final = RELEASED_MAX * _ENTRY_BYTES


class Released:
    """The exchanges that were released last, on this connection and on those before it.

    They are in two generations, of which the old one is given up every RELEASED_US.
    """

    __slots__ = ("_before", "_old", "_since_us", "_young")

    def __init__(self, packed: bytes = b"") -> None:
        """`packed` is what an earlier start has kept."""
        self._old = b""
        self._young = packed
        """Identifiers and digests, the last one at the end: a dictionary would take ten times as much."""
        self._since_us: int | None = None
        """When the first of the young ones was released, as far as this start knows."""
        self._before = b""
        """Those of earlier connections whose identifiers have not been used since."""

    @property
    def packed(self) -> bytes:
        """All of them, as they are kept on disk."""
        return (self._old + self._young)[-_PACKED_BYTES_MAX:]

    def resume(self) -> None:
        """Begin a connection: from now on what was released before may come again."""
        self._before = self.packed

    def add(self, packet_id: int, message: bytes, now_us: int) -> None:
        """Take note that the exchange of a message is released; `message` is its digest."""
        if self._since_us is None:
            self._since_us = now_us
        elif now_us >= self._since_us + RELEASED_US:
            is_long_ago = now_us >= self._since_us + 2 * RELEASED_US
            self._old, self._young, self._since_us = b"" if is_long_ago else self._young, b"", now_us
        self._old, _ = _without(self._old, packet_id)
        young, _ = _without(self._young, packet_id)
        entry = packet_id.to_bytes(_ID_BYTES, "big") + message[:_DIGEST_BYTES]
        self._young = (young + entry)[-_PACKED_BYTES_MAX:]

    def comes_again(self, packet_id: int, message: bytes) -> bool:
        """Tell whether a new message is one that an earlier connection released; asked once for each new message.

        Its identifier is in use again from here on, and what it stood for before is over.
        """
        if not self._before:
            return False
        self._before, digest = _without(self._before, packet_id)
        return digest == message[:_DIGEST_BYTES]


def _without(packed: bytes, packet_id: int) -> tuple[bytes, bytes]:
    """Take an identifier's entry out; give the rest, and its digest, empty where there is none."""
    wanted = packet_id.to_bytes(_ID_BYTES, "big")
    at = packed.find(wanted)
    while at % _ENTRY_BYTES and at > 0:
        at = packed.find(wanted, at + 1)
    if at < 0:
        return packed, b""
    return packed[:at] + packed[at + _ENTRY_BYTES :], packed[at + _ID_BYTES : at + _ENTRY_BYTES]
