"""A serial port whose sensor writes lines of text."""

from collections.abc import Callable

import serial

from gateway.reading import SerialIntake
from gateway.serial_lines.format_line import InProcessLine, open_for_format
from gateway.serial_lines.text_lines import TextLines
from gateway.settings import SerialTextSettings


async def open_line(
    name: str, settings: SerialTextSettings, topic: str, intake: SerialIntake, now_us: Callable[[], int]
) -> "TextLine":
    """See `gateway.serial_lines.kinds.Open`."""
    return TextLine(await open_for_format(name, settings), settings, topic, intake, now_us)


class TextLine(InProcessLine):
    """The open port of a `[[serial.text]]`; `topic` is `serial.topic`."""

    SECTION = "[[serial.text]]"
    UNREAD = (
        "serial lines could not be read: compare format and baud in [[serial.text]] with what the sensor writes; "
        "`sluice buffer quarantine ls` shows some of them, with what to do"
    )
    FRAMES_COME = "FRAMES OF OURS COME, AND NO TEXT"

    def __init__(
        self,
        port: serial.Serial,
        settings: SerialTextSettings,
        topic: str,
        intake: SerialIntake,
        now_us: Callable[[], int],
    ) -> None:
        self._lines = TextLines(settings)
        super().__init__(port, settings, topic, intake, now_us, self._lines)

    def _unread_words(self, now_us: int) -> str | None:
        if (frames := self._link.binary_frames) is not None:
            return (
                f"NO TEXT COMES: each {frames.length} bytes the same ones come again ({frames.pair.hex(' ').upper()}), "
                "as in the frames of a binary protocol: read it with a format (docs/formats.md), or have the sensor "
                "write text; if it should write text already, check baud"
            )
        if self._lines.joined:
            return None
        return (
            f"bytes come without an end of line ({self._unused_words(now_us)}): a binary protocol (which a format can "
            "read, docs/formats.md), a sensor with our frames (put it into serial.ports), or the wrong baud"
        )
