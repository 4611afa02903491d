"""A socket to a Kafka broker: it notices within seconds that the way is gone, and counts what it costs on the wire."""

import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from gateway.host.name_lookup import Address

USER_TIMEOUT_MS: Final = 8_000
"""How long sent bytes may stay without an answer of the broker's TCP before the connection ends (tcp(7)).

Coming back may take 15 s in all: 8 s to notice, the longest pause between two attempts, and the handshakes. Shorter
would end connections on a cellular link that only pauses. Where an address changes or packets vanish nothing else ends
a connection within minutes: no RST comes. An acknowledgement that gets through resets it, so that a slow link is safe.
"""
KEEP_ALIVE_IDLE_S: Final = 10
"""Silence after which TCP probes, so that an idle connection ends within half a minute after the way is gone (where
nothing sent is waited for, TCP looks at USER_TIMEOUT_MS each time it probes). An answer that a request waits for is
missed sooner, by the forwarder. Shorter would cost a metered link some 3 MB a day and connection."""
KEEP_ALIVE_INTERVAL_S: Final = 4
"""Pause between two probes."""
_TCP_INFO_BYTES: Final = 256
_OPTIONS_AT, _BYTES_ACKED_AT, _SEGMENTS_AT, _BYTES_SENT_AT = 5, 120, 136, 200
"""Where `struct tcp_info` (linux/tcp.h) has them; the kernel only ever adds to its end."""
_TIMESTAMPS: Final = 1
"""TCPI_OPT_TIMESTAMPS of `tcpi_options`."""
_IPV4_HEADERS, _IPV6_HEADERS, _TIMESTAMP_OPTION = 40, 60, 12
"""Bytes of IP and TCP around what a segment carries."""


class BrokerSocket(socket.socket):
    """A TCP socket with its options set. `closing` is called once, before it is closed by whomever.

    asyncio closes a transport's socket long after it was asked to, when everything is written: whoever reads the
    counters at that request misses the end.
    """

    def __init__(self, address: Address, closing: Callable[["BrokerSocket"], None]) -> None:
        family, kind, protocol, _ = address
        super().__init__(family, kind, protocol)
        self._closing: Callable[[BrokerSocket], None] | None = closing
        self.setblocking(False)
        # Batches are made whole before they are sent: nothing is gained by waiting for more.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_S)

    def close(self) -> None:
        """Tell, and close."""
        closing, self._closing = self._closing, None
        if closing is not None:
            closing(self)
        super().close()

    def carried_bytes(self) -> int:
        """Bytes that its peer's TCP has acknowledged, and that came from there: they grow only while there is a way."""
        info = self.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _SEGMENTS_AT:
            return 0
        acknowledged, received = struct.unpack_from("=QQ", info, _BYTES_ACKED_AT)
        return int(acknowledged + received)

    def wire_bytes(self) -> int:
        """Bytes on the wire so far, both ways, retransmissions and headers of IP and TCP included (TCP_INFO)."""
        info = self.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _SEGMENTS_AT + 8:
            return 0
        acknowledged, received, segments_out, segments_in = struct.unpack_from("=QQII", info, _BYTES_ACKED_AT)
        # Before Linux 4.19 the kernel counts what was acknowledged, and not what was sent for it.
        sent = struct.unpack_from("=Q", info, _BYTES_SENT_AT)[0] if len(info) >= _BYTES_SENT_AT + 8 else acknowledged
        headers = _IPV4_HEADERS if self.family == socket.AF_INET else _IPV6_HEADERS
        headers += _TIMESTAMP_OPTION if info[_OPTIONS_AT] & _TIMESTAMPS else 0
        return int(sent + received + headers * (segments_out + segments_in))

    def own_address(self) -> str | None:
        """This box's address, also while it is being connected; None where it has none yet."""
        try:
            own: str = self.getsockname()[0]
        except OSError:
            return None
        return None if own in {"0.0.0.0", "::"} else own  # noqa: S104 - what a socket says that has none

    def ends(self) -> tuple[str, tuple[str, int]] | None:
        """This box's address, and the broker's address and port; None where it is not connected."""
        try:
            own: tuple[Any, ...] = self.getsockname()
            peer: tuple[Any, ...] = self.getpeername()
        except OSError:
            return None
        return own[0], (peer[0], peer[1])
