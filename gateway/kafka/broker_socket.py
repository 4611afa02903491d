"""A socket to a Kafka broker. It notices within seconds that the path is gone, and counts its bytes on the wire."""

import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from gateway.host.name_lookup import Address

USER_TIMEOUT_MS: Final = 8_000
"""Milliseconds that sent bytes may stay without an answer of the broker's TCP before the connection ends (tcp(7)).

Coming back may take 15 s in all: 8 s to notice, the longest pause between two attempts, and the handshakes. A shorter
time would end connections on a cellular link that only pauses. If an address changes or packets vanish, no RST comes,
and nothing else ends a connection within minutes. Each acknowledgement that gets through restarts the time, so a slow
link is safe.
"""
KEEP_ALIVE_IDLE_S: Final = 10
"""Seconds of silence after which TCP probes. So an idle connection ends within half a minute after the path is gone, as
TCP looks at USER_TIMEOUT_MS each time it probes. The forwarder notices sooner that an answer is missing. A shorter time
would cost a metered link some 3 MB a day for each connection."""
KEEP_ALIVE_INTERVAL_S: Final = 4
"""Seconds between two probes."""
_TCP_INFO_BYTES: Final = 256
_OPTIONS_AT, _BYTES_ACKED_AT, _SEGMENTS_AT, _BYTES_SENT_AT = 5, 120, 136, 200
"""Offsets in `struct tcp_info` (linux/tcp.h). The kernel only ever adds to its end."""
_TIMESTAMPS: Final = 1
"""TCPI_OPT_TIMESTAMPS of `tcpi_options`."""
_IPV4_HEADERS, _IPV6_HEADERS, _TIMESTAMP_OPTION = 40, 60, 12
"""Bytes of IP and TCP headers around the data of a segment."""


class BrokerSocket(socket.socket):
    """A TCP socket with its options set. `closing` is called once, before the socket is closed by anybody.

    asyncio closes a transport's socket long after it was asked to, when everything is written. Counters that are read
    when it is asked miss the end.
    """

    def __init__(self, address: Address, closing: Callable[["BrokerSocket"], None]) -> None:
        family, kind, protocol, _ = address
        super().__init__(family, kind, protocol)
        self._closing: Callable[[BrokerSocket], None] | None = closing
        self.setblocking(False)
        # A batch is complete before it is sent, so nothing is gained by waiting for more.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_S)

    def close(self) -> None:
        """Call `closing`, and close."""
        closing, self._closing = self._closing, None
        if closing is not None:
            closing(self)
        super().close()

    def carried_bytes(self) -> int:
        """Bytes that the peer's TCP has acknowledged, and bytes received. They grow only while there is a path."""
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
        # Before Linux 4.19, the kernel counts acknowledged bytes, and not the bytes sent for them.
        sent = struct.unpack_from("=Q", info, _BYTES_SENT_AT)[0] if len(info) >= _BYTES_SENT_AT + 8 else acknowledged
        headers = _IPV4_HEADERS if self.family == socket.AF_INET else _IPV6_HEADERS
        headers += _TIMESTAMP_OPTION if info[_OPTIONS_AT] & _TIMESTAMPS else 0
        return int(sent + received + headers * (segments_out + segments_in))

    def own_address(self) -> str | None:
        """This box's address, also while the socket is being connected; None if it has none yet."""
        try:
            own: str = self.getsockname()[0]
        except OSError:
            return None
        return None if own in {"0.0.0.0", "::"} else own  # noqa: S104 - what a socket says that has none

    def ends(self) -> tuple[str, tuple[str, int]] | None:
        """This box's address, and the broker's address and port; None if the socket is not connected."""
        try:
            own: tuple[Any, ...] = self.getsockname()
            peer: tuple[Any, ...] = self.getpeername()
        except OSError:
            return None
        return own[0], (peer[0], peer[1])
