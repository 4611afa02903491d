"""Finds what is wrong with `[[serial.format]]`."""

from collections.abc import Iterator
from typing import Final

from gateway.formats.built_in import BAUD, BUILT_IN
from gateway.serial_lines.text_mistakes import silence_mistakes
from gateway.settings import SerialFormatSettings
from gateway.toml_files.mistakes import Place, show

_BUILT_IN: Final = ", ".join(map(show, BUILT_IN))
EXAMPLES: Final[dict[tuple[str, ...], str]] = {
    ("device",): '; write device = "the name that its readings come under"',
    ("format",): f"; write the name of a format, such as {_BUILT_IN}",
}
"""Advice for a missing setting, by its path in the section."""
_FOLDER: Final = SerialFormatSettings("", "", "").folder


def mistakes(line: SerialFormatSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Settings that are wrong together."""
    yield from silence_mistakes(line, section)


def remarks(line: SerialFormatSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Settings that are likely not meant."""
    if line.format in BUILT_IN and line.folder != _FOLDER:
        yield (
            (*section, "folder"),
            f"is of formats of your own, and {show(line.format)} comes with the gateway; remove it",
        )
    baud = BAUD.get(line.format)
    if baud is not None and line.baud != baud:
        yield (*section, "baud"), f"is {line.baud}, and sensors of format {show(line.format)} send at {baud}"


def failures(line: SerialFormatSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Why a format of one's own cannot be loaded on this box."""
    if line.format not in BUILT_IN:
        from gateway.serial_lines.format_process import why_not_loaded  # noqa: PLC0415 - only `sluice check` needs it

        why = why_not_loaded(line.format, line.folder)
        if why is not None:
            yield (*section, "format"), f"{show(line.format)} {why}"
