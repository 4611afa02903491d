"""The transport of an MQTT connection: keep-alive, write stalls and closing."""

import abc
import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from gateway.listener.refusals import KEEP_ALIVE_TIMEOUT
from gateway.listener.tls_connection import peer_name

READ_BYTES_MAX: Final = 4_096
"""Bytes that one read may bring. TLS may bring more: see `Connection`."""
LINGER_S: Final = 1.0
"""Seconds that a refused client gets to read its last answers and close its side."""
WRITE_STALL_S: Final = 60.0
"""Seconds for which a peer may leave written bytes unread, whatever its keep-alive."""
PROBE_AFTER_S: Final = 120
"""Seconds of silence after which TCP asks whether the peer is still there."""


class Link(asyncio.Protocol, abc.ABC):
    """A connection that ends once, for one cause. Its subclass acts on packets, and decides when to read."""

    __slots__ = (
        "_cause",
        "_heard",
        "_is_read_from",
        "_loop",
        "_patience_s",
        "_timer",
        "_transport",
        "_waits_for_peer",
        "_write_timer",
        "peer",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        """`patience_s` is how many seconds the peer may be silent."""
        self._loop = loop
        self._transport: asyncio.Transport
        self.peer = ""
        self._cause: str | None = None
        """Why the connection ends; set once. From then on nothing is taken from the peer."""
        self._patience_s = patience_s
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_read_from = True
        self._waits_for_peer = False

    # --- for the subclass ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def pause_or_resume(self) -> None:
        """Decide anew whether the peer is read from (`_read`)."""

    @abc.abstractmethod
    def _log_refusal(self, reason: str, message: str) -> None:
        """Count and log why the connection ends."""

    @abc.abstractmethod
    def _retire(self) -> None:
        """Act on the connection's end; `_cause` says why it ends."""

    # --- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_server makes
        self._transport = transport
        self.peer = peer_name(transport)
        # The most that a transport reads at once. asyncio's default is 64 times as much, for each transport.
        transport.max_size = READ_BYTES_MAX  # type: ignore[attr-defined]
        # TCP finds peers that vanished and asked for no keep-alive.
        with contextlib.suppress(OSError):
            peer_socket = transport.get_extra_info("socket")
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        self._be_patient(self._patience_s)

    def pause_writing(self) -> None:
        self._waits_for_peer = True
        self._write_timer = self._loop.call_later(WRITE_STALL_S, self._write_stalled)
        self.pause_or_resume()

    def resume_writing(self) -> None:
        self._waits_for_peer = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self.pause_or_resume()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # a reset and a close mean the same
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    # --- silence ------------------------------------------------------------------------------------------

    def _read(self, is_read_from: bool) -> None:  # noqa: FBT001 - what `_is_read_from` becomes
        """Begin to read from the peer again, or stop."""
        self._is_read_from = is_read_from
        if is_read_from:
            self._heard = self._loop.time()
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _be_patient(self, patience_s: float) -> None:
        """Let the peer be silent for `patience_s` from now on; 0 means for ever."""
        self._heard = self._loop.time()
        self._patience_s = patience_s
        self._arm_timer()

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._patience_s:
            self._timer = self._loop.call_at(self._heard + self._patience_s, self._check_silence)

    def _check_silence(self) -> None:
        """End the connection if the peer was silent for too long.

        A connection has one timer, which is set anew when it fires and not with each packet.
        """
        now = self._loop.time()
        if not self._is_read_from:
            self._heard = now  # nobody listened, so its silence does not count
        if now < self._heard + self._patience_s:
            self._arm_timer()
        else:
            self._abort(KEEP_ALIVE_TIMEOUT, "nothing received in 1.5 times the keep-alive")

    def _write_stalled(self) -> None:
        self._abort("write-stall", f"the peer has read nothing for {WRITE_STALL_S:.0f} s")

    # --- the end ------------------------------------------------------------------------------------------

    def refuse(self, reason: str, message: str, answer: bytes = b"") -> None:
        """Count and log the reason, and close after `answer`."""
        if self._cause is None:
            self._log_refusal(reason, message)
            self.end(reason, answer)

    def _abort(self, reason: str, message: str) -> None:
        """Count and log the reason, and close at once."""
        if self._cause is None:
            self._log_refusal(reason, message)
            self._cause = reason
            self._retire()
        self.cut()

    def end(self, cause: str, answer: bytes = b"") -> None:
        """Close, after `answer` if there is one; take nothing more from the peer."""
        if self._cause is not None:
            return
        self._cause = cause
        self._retire()
        if answer:
            self._transport.write(answer)
            self._close_after_reading()
        else:
            self._transport.close()

    def _close_after_reading(self) -> None:
        """Close once the peer has read everything and closed its side, or after LINGER_S.

        Closing with unread bytes resets the connection, which may destroy answers on their way. So this side ends
        first, and reads and drops what the peer still sends.
        """
        self._end_within(LINGER_S, self.cut)
        if self._transport.can_write_eof():
            try:
                self._transport.write_eof()
            except OSError:  # the peer left while it was not read from
                self.cut()
        else:
            self._transport.close()

    def _end_within(self, seconds: float, then: Callable[[], None]) -> None:
        """Read and drop bytes, and call `then` after `seconds`. The peer's silence no longer counts."""
        if not self._is_read_from:
            self._read(True)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, then)

    def cut(self) -> None:
        """Close at once, and drop bytes that were not sent."""
        self._transport.abort()
