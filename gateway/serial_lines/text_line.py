"""A serial port whose sensor writes lines of text. A reading without room is lost, as nobody can ask for it again."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import serial
import structlog

from gateway.host.terminal_text import escaped_bytes, shortened, span
from gateway.reading import Reading, SerialIntake
from gateway.serial_lines.port_line import PortLine
from gateway.serial_lines.ports import open_port
from gateway.serial_lines.text_link import TextLink, TextReadings, Uncollected, Unreadable
from gateway.settings import SerialTextSettings

MUTE_US = 60_000_000
"""Time from a port's opening until it is reported that its sensor has written nothing."""
USB_BAUD = 115_200
"""Least speed that is assumed of a port. To a board that is a USB device itself, `baud` means nothing."""
_SHOWN_MAX = 60
"""Characters that `sluice status` shows of a line that could not be read."""

log = structlog.get_logger()


async def open_line(
    name: str, settings: SerialTextSettings, topic: str, intake: SerialIntake, now_us: Callable[[], int]
) -> "TextLine":
    """See `gateway.serial_lines.kinds.Open`."""
    port = await asyncio.to_thread(
        open_port,
        name,
        settings.baud,
        data_bits=settings.data_bits,
        parity=settings.parity,
        stop_bits=settings.stop_bits,
    )
    return TextLine(port, settings, topic, intake, now_us)


class TextLine(PortLine):
    """The open port of a `[[serial.text]]`; `topic` is `serial.topic`."""

    def __init__(
        self,
        port: serial.Serial,
        settings: SerialTextSettings,
        topic: str,
        intake: SerialIntake,
        now_us: Callable[[], int],
    ) -> None:
        # Ten bits for each byte, and a quarter more.
        super().__init__(port, intake, now_us, max(settings.baud, USB_BAUD) / 10 * 1.25)
        self._link = TextLink(self.name, settings, topic)
        self._format = settings.format

    @property
    def device(self) -> str:
        """The device that the settings name."""
        return self._link.device

    def state(self) -> dict[str, object]:
        """See `PortLine.state`."""
        refused = self._link.last_unreadable
        return super().state() | {
            "acknowledges": False,
            "format": self._format,
            "refused": self._link.faults.total(),
            "noisy": self._link.noisy,
            "refused_last": refused and {"reason": refused.reason, "line": _shown(refused.payload)},
        }

    def trouble(self, now_us: int) -> str | None:
        """See `PortLine.trouble`. Lines that cannot be read are reported one by one."""
        if self._link.sends_frames:
            return (
                "FRAMES OF OURS COME, AND NO TEXT: remove its [[serial.text]], and write the port into serial.ports if "
                "it is not there"
            )
        if self._unused_bytes and (frames := self._link.binary_frames) is not None:
            return (
                f"NO TEXT COMES: each {frames.length} bytes the same ones come again ({frames.pair.hex(' ').upper()}), "
                "as in the frames of a binary protocol, which cannot be read here: have the sensor write text, or put "
                "a board between that does; if it should write text already, check baud"
            )
        if self._link.has_seen_a_line:
            return None
        if self._unused_bytes:
            return (
                f"bytes come without an end of line ({self._unused_words(now_us)}): a binary protocol (which cannot be "
                "read here), a sensor with our frames (put it into serial.ports), or the wrong baud"
            )
        # Nobody knows how often the sensor writes.
        open_us = now_us - self._opened_us
        if open_us < MUTE_US:
            return None
        return f"NOTHING HAS COME for {span(open_us / 1e6)}: check power, wiring and baud"

    def report_faults(self) -> None:
        """Log lines that could not be read since the last report. The quarantine or a loss record has them."""
        faults = self._faults_since(self._link.faults)
        # For a sensor with our frames, `trouble` says what to do.
        if faults and not self._link.sends_frames:
            log.warning(
                "serial lines could not be read: compare format and baud in [[serial.text]] with what the sensor "
                "writes; `sluice buffer quarantine ls` shows some of them, with what to do",
                port=self.name,
                device=self.device,
                format=self._format,
                faults=faults,
            )

    def _received(self, data: bytes, now_us: int) -> None:
        for event in self._link.receive(data, now_us):
            match event:
                case TextReadings():
                    appears = self._used_us is None
                    self._use(now_us)
                    if appears:
                        self._appear()
                    self._take(event.readings)
                case Unreadable():
                    self._intake.unreadable(self.device, self.name, event.payload, now_us, event.reason)
                case Uncollected():
                    self._intake.lost(self.device, event.reason, event.count)

    def _appear(self) -> None:
        log.info("serial device appeared", port=self.name, device=self.device, format=self._format)
        self._intake.event("device-appeared", self.device, port=self.name, format=self._format, acknowledges=False)

    def _take(self, readings: Sequence[Reading]) -> None:
        if self._intake.cannot_store:
            self._settled(len(readings), False)
        else:
            self._intake.take(readings, partial(self._settled, len(readings)))

    def _settled(self, count: int, stored: bool) -> None:  # noqa: FBT001 - the form of Intake's `done`
        if not stored:
            self._intake.lost(self.device, "cannot-wait", count)


def _shown(line: bytes) -> str:
    """A line as `sluice buffer quarantine ls` shows it too."""
    return shortened(escaped_bytes(line), _SHOWN_MAX)
