"""Recognises a QoS 2 PUBLISH that comes again after its PUBREL, so that it is marked; no I/O.

Between PUBREL and PUBCOMP, a client may send nothing but the PUBREL again. Some clients send the PUBLISH again on their
next connection. Nothing tells it from a new message of the same bytes, so it is stored and marked.
"""

from typing import Final

RELEASED_MAX: Final = 64
"""Released exchanges of one session that are remembered. The usual client has fewer under way at once."""
RELEASED_US: Final = 5_000_000
"""Microseconds for which an exchange is remembered at least, while others are released. A PUBCOMP arrives sooner. An
idle session forgets none. Each commit that releases an exchange writes all of them, so keeping few spares the card."""
_ID_BYTES: Final = 2
_DIGEST_BYTES: Final = 4
"""Bytes kept of a digest's eight. A false match marks a reading, but loses none."""
_ENTRY_BYTES: Final = _ID_BYTES + _DIGEST_BYTES
_PACKED_BYTES_MAX: Final = RELEASED_MAX * _ENTRY_BYTES


class Released:
    """The exchanges that were released last, on this connection and on earlier ones.

    They form two generations. The old generation is dropped every RELEASED_US.
    """

    __slots__ = ("_before", "_old", "_since_us", "_young")

    def __init__(self, packed: bytes = b"") -> None:
        """`packed` holds the exchanges that an earlier start kept."""
        self._old = b""
        self._young = packed
        """Identifiers and digests, the latest at the end. A dictionary would take ten times the memory."""
        self._since_us: int | None = None
        """When the young generation began; None if nothing was released since the start."""
        self._before = b""
        """Exchanges of earlier connections whose identifiers have not been used since."""

    @property
    def packed(self) -> bytes:
        """All exchanges, as they are kept on disk."""
        return (self._old + self._young)[-_PACKED_BYTES_MAX:]

    def resume(self) -> None:
        """Begin a connection, on which messages released earlier may come again."""
        self._before = self.packed

    def add(self, packet_id: int, message: bytes, now_us: int) -> None:
        """Record that a message's exchange is released; `message` is the message's digest."""
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
        """Return whether an earlier connection released this message. Ask once for each new message.

        From here on the identifier stands for the new message, so its earlier exchange is forgotten.
        """
        if not self._before:
            return False
        self._before, digest = _without(self._before, packet_id)
        return digest == message[:_DIGEST_BYTES]


def _without(packed: bytes, packet_id: int) -> tuple[bytes, bytes]:
    """Take an identifier's entry out; return the rest and the entry's digest, which is empty if there is no entry."""
    wanted = packet_id.to_bytes(_ID_BYTES, "big")
    at = packed.find(wanted)
    while at % _ENTRY_BYTES and at > 0:
        at = packed.find(wanted, at + 1)
    if at < 0:
        return packed, b""
    return packed[:at] + packed[at + _ENTRY_BYTES :], packed[at + _ID_BYTES : at + _ENTRY_BYTES]
