"""A serial port whose bytes a format reads. A reading without room is lost, as nobody can ask for it again."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar

import serial
import structlog

from gateway.formats.cutter import FAILED, Cut, Cutter
from gateway.formats.piece import Format
from gateway.host.terminal_text import escaped_bytes, shortened, span
from gateway.reading import Reading, SerialIntake
from gateway.serial_lines.changes import Changes
from gateway.serial_lines.format_link import FormatLink, Readings, Uncollected, Unreadable
from gateway.serial_lines.port_line import PortLine
from gateway.serial_lines.ports import open_port
from gateway.serial_lines.topic import topic_of
from gateway.settings import SerialFormatSettings, SerialTextSettings

MUTE_US = 60_000_000
"""Time from a port's opening until it is reported that its sensor has sent nothing."""
USB_BAUD = 115_200
"""Least speed that is assumed of a port. To a board that is a USB device itself, `baud` means nothing."""
_SHOWN_MAX = 60
"""Characters that `sluice status` shows of a piece that could not be read."""

log = structlog.get_logger()


async def open_for_format(name: str, settings: SerialTextSettings | SerialFormatSettings) -> serial.Serial:
    """Open a port as its section says. Raises OSError, ValueError or termios.error."""
    # In a thread: a driver may wait for its adapter, and the other lines should not.
    return await asyncio.to_thread(
        open_port,
        name,
        settings.baud,
        data_bits=settings.data_bits,
        parity=settings.parity,
        stop_bits=settings.stop_bits,
    )


class FormatLine(PortLine):
    """An open port with a format; `topic` is `serial.topic`."""

    SECTION: ClassVar[str] = "[[serial.format]]"
    """Header of its section."""
    UNREAD: ClassVar[str] = (
        "serial input could not be read: compare format, baud and parity in [[serial.format]] with the sensor's; "
        "`sluice buffer quarantine ls` shows some of it, with what to do"
    )
    """Words of the log on pieces that could not be read."""
    FRAMES_COME: ClassVar[str] = "FRAMES OF OURS COME"
    """Words if a sensor with our frames is on the port."""

    def __init__(
        self,
        port: serial.Serial,
        settings: SerialTextSettings | SerialFormatSettings,
        topic: str,
        intake: SerialIntake,
        now_us: Callable[[], int],
    ) -> None:
        # Ten bits for each byte, and a quarter more.
        super().__init__(port, intake, now_us, max(settings.baud, USB_BAUD) / 10 * 1.25)
        stream = settings.stream or settings.format
        changes = Changes(settings.on_change, settings.silence_s_max) if settings.on_change else None
        self._link = FormatLink(self.name, settings.device, topic_of(topic, settings.device, stream), changes)
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
        """See `PortLine.trouble`. Pieces that cannot be read are reported one by one."""
        if self._link.sends_frames:
            return (
                f"{self.FRAMES_COME}: remove its {self.SECTION}, and write the port into serial.ports if it is not "
                "there"
            )
        if self._unused_bytes:
            return self._unread_words(now_us)
        # Nobody knows how often the sensor writes.
        open_us = now_us - self._opened_us
        if self._used_us is not None or open_us < MUTE_US:
            return None
        return f"NOTHING HAS COME for {span(open_us / 1e6)}: check power, wiring and baud"

    def _unread_words(self, now_us: int) -> str | None:
        """Words if bytes come, and nothing that the format knows; None if all may be well."""
        # A telegram may come every ten seconds, and the first is heard from its middle.
        if self._link.has_seen_a_piece or now_us - self._opened_us < MUTE_US:
            return None
        return (
            f"bytes come, but nothing that {self._format} reads ({self._unused_words(now_us)}): another format, the "
            "wrong baud or parity, or a line that has to be inverted"
        )

    def report_faults(self) -> None:
        """Log pieces that could not be read since the last report. The quarantine or a loss record has them."""
        faults = self._faults_since(self._link.faults)
        # A failure of the format was logged when it came.
        faults.pop(FAILED, None)
        # For a sensor with our frames, `trouble` says what to do.
        if faults and not self._link.sends_frames:
            log.warning(
                self.UNREAD,
                port=self.name,
                device=self.device,
                format=self._format,
                faults=faults,
            )

    def _cut(self, cuts: Iterable[Cut], now_us: int) -> None:
        """Hand over the pieces that a format cut."""
        for event in self._link.take(cuts, now_us):
            match event:
                case Readings():
                    appears = self._used_us is None
                    self._use(now_us)
                    if appears:
                        self._appear()
                    if event.readings:
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
            self._link.lose()
            self._intake.lost(self.device, "cannot-wait", count)


class InProcessLine(FormatLine):
    """An open port whose format runs in the gateway's process."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a line lives on
        self,
        port: serial.Serial,
        settings: SerialTextSettings | SerialFormatSettings,
        topic: str,
        intake: SerialIntake,
        now_us: Callable[[], int],
        format_: Format,
    ) -> None:
        super().__init__(port, settings, topic, intake, now_us)
        self._cutter = Cutter(format_)

    def _received(self, data: bytes, now_us: int) -> None:
        self._link.hear(data)
        self._cut(self._cutter.feed(data), now_us)


def _shown(piece: bytes) -> str:
    """A piece as `sluice buffer quarantine ls` shows it too."""
    return shortened(escaped_bytes(piece), _SHOWN_MAX)
