"""A serial port whose format is one's own: its bytes go through the format's process."""

import asyncio
from collections.abc import Callable
from typing import Final

import serial
import structlog

from gateway.formats.cutter import FAILED, Cut, FormatError
from gateway.host.terminal_text import size, span
from gateway.reading import SerialIntake
from gateway.serial_lines.format_line import FormatLine
from gateway.serial_lines.format_process import running
from gateway.settings import SerialFormatSettings

WAITING_BYTES_MAX: Final = 65_536
"""Bytes that may wait for the format's answer to those before them."""
FED_BYTES_MAX: Final = 4_096
"""Bytes that the format gets for one answer. Its time and its length are bounded."""
REST_S_MIN: Final = 1.0
REST_S_MAX: Final = 300.0
"""Longest pause before a format that failed is started again. It doubles with each failure."""
WELL_S: Final = 60.0
"""Seconds without a failure after which the pause is short again."""

log = structlog.get_logger()


class OwnFormatLine(FormatLine):
    """The open port of a `[[serial.format]]` with a format of one's own. See docs/decisions/105-own-formats.md."""

    def __init__(
        self,
        port: serial.Serial,
        settings: SerialFormatSettings,
        topic: str,
        intake: SerialIntake,
        now_us: Callable[[], int],
    ) -> None:
        super().__init__(port, settings, topic, intake, now_us)
        self._folder = settings.folder
        self._waiting = b""
        self._waiting_us = 0
        """When the newest of the waiting bytes came."""
        self._cutting = b""
        """Bytes that the format has, and has not cut off yet."""
        self._arrived = asyncio.Event()
        self._failure: str | None = None
        """Words for the format's failure while it rests."""
        self._rest_s = 0.0
        self._missed = False
        """Whether bytes came while the format rested, or while too many waited for it."""
        self._serving = self._loop.create_task(self._serve(), name=f"format {self.name}")
        self._serving.add_done_callback(self._ended)

    def trouble(self, now_us: int) -> str | None:
        """See `PortLine.trouble`."""
        if self._failure is None:
            return super().trouble(now_us)
        return f"THE FORMAT FAILED: {self._format} {self._failure}. It is started again after {span(self._rest_s)}"

    def close(self, reason: str = "") -> None:
        """See `PortLine.close`."""
        self._serving.cancel()
        self._tell_missed()
        super().close(reason)

    def _received(self, data: bytes, now_us: int) -> None:
        self._link.hear(data)
        if self._failure is not None or len(self._waiting) >= WAITING_BYTES_MAX:
            self._missed = True
            return
        self._waiting += data
        self._waiting_us = now_us
        self._arrived.set()

    async def _serve(self) -> None:
        """Run the format, and start it again after each failure, until cancelled."""
        while True:
            begun_s = self._loop.time()
            try:
                await self._run()
            except FormatError as error:
                well = self._loop.time() - begun_s >= WELL_S
                self._rest_s = REST_S_MIN if well or not self._rest_s else min(2 * self._rest_s, REST_S_MAX)
                self._fail(str(error))
                await asyncio.sleep(self._rest_s)
                self._failure = None
                self._tell_missed()

    async def _run(self) -> None:
        """Feed the format's process. Raises FormatError."""
        async with running(self._format, self._folder) as process:
            while True:
                while not self._waiting:
                    self._arrived.clear()
                    await self._arrived.wait()
                if self._missed:
                    raise FormatError(f"is too slow: {size(WAITING_BYTES_MAX)} waited for it")
                fed, received_us = self._waiting[:FED_BYTES_MAX], self._waiting_us
                self._waiting = self._waiting[FED_BYTES_MAX:]
                self._cutting += fed
                self._cut(await process.feed(fed), received_us)
                self._cutting = self._cutting[len(self._cutting) - process.left :]

    def _fail(self, words: str) -> None:
        self._failure = words
        log.warning(
            "a format of one's own failed; its port is read again once it is started again",
            port=self.name,
            device=self.device,
            format=self._format,
            reason=words,
            again_s=self._rest_s,
        )
        if self._used_us is not None:
            self._intake.event("device-died", self.device, source="format", port=self.name, cause=words)
            self._used_us = None
        piece = self._cutting or self._waiting
        self._missed |= bool(self._cutting and self._waiting)
        self._cutting = self._waiting = b""
        if piece:
            self._cut([Cut(damage=FAILED, piece=piece)], self._now_us())

    def _tell_missed(self) -> None:
        if self._missed:
            self._missed = False
            self._intake.lost(self.device, FAILED, 0)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (defect := serving.exception()) is not None:
            # The event loop reports the defect; the port is opened anew.
            self.close("the format's process cannot be served")
            raise defect
