"""The transport's side of an MQTT connection: keep-alive, peers that read nothing, and how it ends."""

import abc
import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from gateway.listener.tls_connection import peer_name

READ_BYTES_MAX: Final = 4_096
"""What one read may bring. TLS may bring more: see `Connection`."""
LINGER_S: Final = 1.0
"""How long a refused client gets to read what was written to it and close its side."""
WRITE_STALL_S: Final = 60.0
"""How long a peer may leave what is written to it unread, whatever its keep-alive."""
PROBE_AFTER_S: Final = 120
"""Silence after which TCP asks whether the peer is still there."""


class Link(asyncio.Protocol, abc.ABC):
    """A connection that ends for one cause. What is said on it, and when it is read from, its subclass knows."""

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
        """`patience_s` is how long the peer may be silent."""
        self._loop = loop
        self._transport: asyncio.Transport
        self.peer = ""
        self._cause: str | None = None
        """Why it ends; set once, and then nothing is taken or written any more."""
        self._patience_s = patience_s
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_read_from = True
        self._waits_for_peer = False

    # --- what its subclass knows --------------------------------------------------------------------------

    @abc.abstractmethod
    def pause_or_resume(self) -> None:
        """Judge anew whether the peer is read from (`_read`)."""

    @abc.abstractmethod
    def _log_refusal(self, reason: str, message: str) -> None:
        """Count and log why it ends."""

    @abc.abstractmethod
    def _retire(self) -> None:
        """It ends: `_cause` says why."""

    # --- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_server makes
        self._transport = transport
        self.peer = peer_name(transport)
        # asyncio's transports read so much at once; its default is 64 times as much, for each of them.
        transport.max_size = READ_BYTES_MAX  # type: ignore[attr-defined]
        # Finds out about peers that vanished and asked for no keep-alive.
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
        """Let the peer be silent for so long from now on; for ever with 0."""
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
        """End the connection of a peer silent for too long.

        One timer a connection, set anew when it fires, not per packet.
        """
        now = self._loop.time()
        if not self._is_read_from:
            self._heard = now  # its silence is our doing and does not count
        if now < self._heard + self._patience_s:
            self._arm_timer()
        else:
            self._abort("keep-alive-timeout", "nothing received in 1.5 times the keep-alive")

    def _write_stalled(self) -> None:
        self._abort("write-stall", f"the peer has read nothing for {WRITE_STALL_S:.0f} s")

    # --- the end ------------------------------------------------------------------------------------------

    def refuse(self, reason: str, message: str, answer: bytes = b"") -> None:
        """Count and log why, and close after `answer`."""
        if self._cause is None:
            self._log_refusal(reason, message)
            self.end(reason, answer)

    def _abort(self, reason: str, message: str) -> None:
        """Count and log why, and close at once."""
        if self._cause is None:
            self._log_refusal(reason, message)
            self._cause = reason
            self._retire()
        self.cut()

    def end(self, cause: str, answer: bytes = b"") -> None:
        """Close, after `answer` where there is one; nothing more is taken from the peer."""
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
        """Close once the peer has closed its side, which tells that it has read all, or after LINGER_S.

        Closing while the peer's bytes are unread resets the connection, which may destroy answers on their way. So our
        side ends first, and what the peer still sends is read and dropped.
        """
        self._end_within(LINGER_S, self.cut)
        if self._transport.can_write_eof():
            try:
                self._transport.write_eof()
            except OSError:  # it has gone while it was not read from
                self.cut()
        else:
            self._transport.close()

    def _end_within(self, seconds: float, then: Callable[[], None]) -> None:
        """Read on, to drop it, and do `then` after a while; nobody asks any more how long the peer is silent."""
        if not self._is_read_from:
            self._read(True)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, then)

    def cut(self) -> None:
        """Close at once, whatever was not sent."""
        self._transport.abort()
