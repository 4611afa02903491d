"""A serial port whose sensor writes lines of text: what finds no room is lost, for nobody can ask for it again."""

from collections.abc import Callable, Sequence
from functools import partial

import serial
import structlog

from gateway.reading import Reading, SerialIntake
from gateway.serial_line import PortLine
from gateway.settings import SerialTextSettings
from gateway.text_link import TextLink, TextReadings, Uncollected, Unreadable

log = structlog.get_logger()


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
        super().__init__(port, intake, now_us)
        self._link = TextLink(self.name, settings, topic)
        self._format = settings.format
        self._heard = False

    @property
    def device(self) -> str:
        """As the settings name it."""
        return self._link.device

    def state(self) -> dict[str, object]:
        """See `PortLine.state`."""
        return {"device": self.device, "acknowledges": False, "format": self._format, "heard": self._heard}

    def report_faults(self) -> None:
        """Log what could not be read since the last report: the quarantine has it, or a loss record counts it."""
        faults = self._faults_since(self._link.faults)
        if faults:
            log.warning(
                "serial lines could not be read: check format and baud in [[serial.text]], then wiring and ground; "
                "`sluice buffer quarantine ls` shows some of them",
                port=self.name,
                device=self.device,
                format=self._format,
                faults=faults,
            )

    def _received(self, data: bytes, now_us: int) -> None:
        for event in self._link.receive(data, now_us):
            match event:
                case TextReadings():
                    self._take(event.readings)
                case Unreadable():
                    self._intake.unreadable(self.device, self.name, event.payload, now_us, event.reason)
                case Uncollected():
                    self._intake.lost(self.device, event.reason, event.count)

    def _take(self, readings: Sequence[Reading]) -> None:
        if not self._heard:
            self._heard = True
            log.info("serial device appeared", port=self.name, device=self.device, format=self._format)
            self._intake.event("device-appeared", self.device, port=self.name, format=self._format, acknowledges=False)
        if self._intake.holding:
            self._settled(len(readings), False)
        else:
            self._intake.take(readings, partial(self._settled, len(readings)))

    def _settled(self, count: int, stored: bool) -> None:  # noqa: FBT001 - the form of Intake's `done`
        if not stored:
            self._intake.lost(self.device, "cannot-wait", count)
