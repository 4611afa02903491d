"""Opens the port of a `[[serial.format]]`."""

from collections.abc import Callable

from gateway.formats.built_in import BUILT_IN
from gateway.reading import SerialIntake
from gateway.serial_lines.format_line import FormatLine, InProcessLine, open_for_format
from gateway.serial_lines.own_format_line import OwnFormatLine
from gateway.settings import SerialFormatSettings


async def open_line(
    name: str, settings: SerialFormatSettings, topic: str, intake: SerialIntake, now_us: Callable[[], int]
) -> FormatLine:
    """See `gateway.serial_lines.kinds.Open`."""
    port = await open_for_format(name, settings)
    built_in = BUILT_IN.get(settings.format)
    if built_in is None:
        return OwnFormatLine(port, settings, topic, intake, now_us)
    return InProcessLine(port, settings, topic, intake, now_us, built_in())
