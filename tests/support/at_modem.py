"""An ESP-AT style modem without I/O and clock, apart from the runner's own: so that the two check each other."""

from collections.abc import Callable
from typing import Final, Protocol

GAP_MS: Final = 20
"""In transparent mode such a silence ends what is sent on as one piece; a piece that is `+++` leaves the mode."""
AFTER_ESCAPE_MS: Final = 1000
"""No command is heard so soon after `+++`."""
REDIAL_MS: Final = 1000


class Connection(Protocol):
    """One TCP connection, as dialling gives it."""

    open: bool

    def send(self, data: bytes) -> None:
        """Bytes of the chip."""

    def take(self) -> bytes:
        """Bytes for the chip, since last asked."""

    def close(self) -> None:
        """The modem hangs up."""


class AtModem:
    """The module on the other end of the chip's serial line, in milliseconds of whatever clock."""

    def __init__(self, dial: Callable[[str, int], Connection | None]) -> None:
        self._dial = dial
        self.wifi = True
        self.joined = False
        self.powered = True
        self.connection: Connection | None = None
        self.transparent = False
        self.commands: list[str] = []
        """Commands that it got, without line ends."""
        self.busy_until_ms = 0
        self._echo = True
        self._pass_through = False
        self._target: tuple[str, int] | None = None
        self._line = b""
        self._piece = b""
        self._last_ms = 0
        self._left_at_ms = -AFTER_ESCAPE_MS
        self._redial_at_ms = 0
        self._out = bytearray()

    @property
    def holds_piece(self) -> bool:
        """Whether it waits for more of what is to be sent on."""
        return bool(self._piece)

    def restart(self) -> None:
        """Its own reset: a boot loader's noise, then `ready`; it knows nothing of what it was told."""
        if self.connection is not None:
            self.connection.close()
        self.joined = self.transparent = self._pass_through = False
        self.connection = None
        self._echo = True
        self._line = self._piece = b""
        self._out += b"\xfe\x00 ets Jan\x7f\r\nready\r\n"

    def say(self, words: str) -> None:
        """Say something unasked, as modems do; in transparent mode nothing is said."""
        if not self.transparent:
            self._out += words.encode() + b"\r\n"

    def receive(self, data: bytes, now_ms: int) -> None:
        """Bytes from the chip."""
        if not self.powered:
            return
        if self.transparent:
            self._last_ms = now_ms
            self._piece += data
            return
        if self._echo:
            self._out += data
        if now_ms - self._left_at_ms < AFTER_ESCAPE_MS:
            return
        self._line += data
        while b"\n" in self._line:
            line, _, self._line = self._line.partition(b"\n")
            self._command(line.strip(b"\r").decode(errors="replace"), now_ms)

    def poll(self, now_ms: int) -> bytes:
        """Give what goes to the chip."""
        if not self.powered:
            self._out.clear()
        if self.transparent:
            self._pass(now_ms)
        given = bytes(self._out)
        self._out.clear()
        return given

    def _pass(self, now_ms: int) -> None:
        if self._piece and now_ms - self._last_ms >= GAP_MS:
            piece, self._piece = self._piece, b""
            if piece == b"+++":
                self.transparent = False
                self._left_at_ms = now_ms
                return
            if self.connection is not None and self.connection.open:
                self.connection.send(piece)
        if self.connection is not None:
            self._out += self.connection.take()
        if (self.connection is None or not self.connection.open) and now_ms >= self._redial_at_ms:
            self._redial_at_ms = now_ms + REDIAL_MS
            self._open()

    def _open(self) -> bool:
        assert self._target is not None
        self.connection = self._dial(*self._target) if self.joined and self.wifi else None
        return self.connection is not None

    def _answer(self, *lines: str) -> None:
        for line in lines:
            self._out += b"\r\n" + line.encode() + b"\r\n"

    def _command(self, line: str, now_ms: int) -> None:
        self.commands.append(line)
        if now_ms < self.busy_until_ms:
            self._answer("busy p...")
            return
        name, _, value = line.partition("=")
        match name:
            case "AT" | "AT+CWMODE":
                self._answer("OK")
            case "ATE0":
                self._echo = False
                self._answer("OK")
            case "AT+CIPMODE" if value == "1":
                self._pass_through = True
                self._answer("OK")
            case "AT+RST":
                self._answer("OK")
                self.restart()
            case _:
                self._network_command(name, value)

    def _network_command(self, name: str, value: str) -> None:
        match name:
            case "AT+CWJAP":
                self.joined = self.wifi
                self._answer(*(("WIFI CONNECTED", "WIFI GOT IP", "OK") if self.wifi else ("+CWJAP:3", "FAIL")))
            case "AT+CIPSTART":
                self._start(value)
            case "AT+CIPSEND" if self._pass_through and self.connection is not None and self.connection.open:
                self._answer("OK")
                self._out += b"\r\n>"
                self.transparent = True
                self._piece = b""
            case "AT+CIPCLOSE" if self.connection is not None:
                self.connection.close()
                self.connection = None
                self._answer("CLOSED", "OK")
            case _:
                self._answer("ERROR")

    def _start(self, value: str) -> None:
        kind, host, port = value.split(",")
        assert kind == '"TCP"'
        self._target = (host.strip('"'), int(port))
        if self.connection is not None:
            self._answer("ALREADY CONNECTED", "ERROR")
        elif self._open():
            self._answer("CONNECT", "OK")
        else:
            self._answer("CLOSED", "ERROR")
