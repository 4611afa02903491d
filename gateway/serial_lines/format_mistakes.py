"""Finds mistakes in `[[serial.format]]`: settings that are right one by one but wrong together."""

from collections.abc import Iterator
from typing import Final

from gateway.formats.built_in import BAUD, BUILT_IN
from gateway.settings import SerialFormatSettings
from gateway.toml_files.mistakes import Place, show

_BUILT_IN: Final = ", ".join(map(show, BUILT_IN))
EXAMPLES: Final[dict[tuple[str, ...], str]] = {
    ("device",): '; write device = "the name that its readings come under"',
    ("format",): f"; write the name of a format, such as {_BUILT_IN}",
}
"""Advice for a missing setting, by its path in the section."""


def mistakes(line: SerialFormatSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Every mistake in one section, with its place in the file."""
    if line.format not in BUILT_IN:
        yield (*section, "format"), f"{show(line.format)} is no format; write one of {_BUILT_IN}"


def remarks(line: SerialFormatSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Settings that are likely not meant."""
    baud = BAUD.get(line.format)
    if baud is not None and line.baud != baud:
        yield (*section, "baud"), f"is {line.baud}, and sensors of format {show(line.format)} send at {baud}"
