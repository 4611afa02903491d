"""Finds mistakes in `[[serial.text]]`: settings that are right one by one but wrong together."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.serial_lines.text_formats import SENTENCE_MEMBER
from gateway.settings import SerialFormatSettings, SerialTextSettings
from gateway.toml_files.mistakes import Place, show

EXAMPLES: Final[dict[tuple[str, ...], str]] = {
    ("device",): '; write device = "the name that its readings come under"',
    ("format",): '; write format = "key=value", "key:value", "csv", "json" or "nmea", as its lines look',
}
"""Advice for a missing setting, by its path in the section."""
SILENCE_S_MAX: Final = SerialFormatSettings("", "", "").silence_s_max
"""The default of each kind."""
_IDLE: Final = "remove it, or write on_change = { celsius = 0.2 }"
_SENTENCE = re.compile(r"[A-Z][A-Z0-9]{2,9}")
_UNIT = re.compile(r"[^\s\d+.,;|=:\"-][^\s,;|=:\"]{0,15}")
_CSV_EXAMPLE = 'columns = ["celsius", "", "humidity"], where an empty one leaves that value out'


def mistakes(text: SerialTextSettings, section: Place) -> Iterator[tuple[Place, str]]:
    """Every mistake in one section, with its place in the file."""
    if text.format == "csv":
        yield from _column_mistakes(text.columns, (*section, "columns"))
    else:
        if text.columns:
            yield (
                (*section, "columns"),
                f'is for format = "csv", and this is {show(text.format)}; remove one of the two',
            )
        if text.delimiter != ",":
            told = f'is for format = "csv", and this is {show(text.format)}; remove it'
            yield (*section, "delimiter"), told
    if text.format == "nmea":
        for kind, names in text.sentences.items():
            yield from _sentence_mistakes(kind, names, (*section, "sentences", kind))
    elif text.sentences:
        told = f'is for format = "nmea", and this is {show(text.format)}; remove one of the two'
        yield (*section, "sentences"), told
    yield from _value_mistakes(text, section)
    yield from silence_mistakes(text, section)


def silence_mistakes(
    settings: SerialTextSettings | SerialFormatSettings, section: Place
) -> Iterator[tuple[Place, str]]:
    """A longest silence that would do nothing."""
    if settings.silence_s_max != SILENCE_S_MAX and not settings.on_change:
        yield (*section, "silence_s_max"), f"is of members that on_change names, and it names none; {_IDLE}"


def _column_mistakes(columns: Sequence[str], place: Place) -> Iterator[tuple[Place, str]]:
    if not columns:
        yield place[:-1], f'has format = "csv" and no columns, so that its values have no names; write {_CSV_EXAMPLE}'
    elif not any(columns):
        yield place, f"names none of the values, so that nothing would be read; write {_CSV_EXAMPLE}"
    for name in _repeated(columns):
        yield place, f"{show(name)} stands here twice, and a reading has one value of a name; write another"


def _sentence_mistakes(kind: str, names: Sequence[str], place: Place) -> Iterator[tuple[Place, str]]:
    if SENTENCE_MEMBER in names:
        yield place, f"{show(SENTENCE_MEMBER)} is the member that says which sentence it was; write another name"
    if _SENTENCE.fullmatch(kind) is None:
        wanted = "write the type as it stands behind the $: MTW, or WIMTW of one talker alone"
        yield place, f"{show(kind)} is no type of a sentence; {wanted}"
    if names and not any(names):
        yield place, "names none of its fields, so that nothing would be read; name one, or write [] to number them all"
    for name in _repeated(names):
        yield place, f"{show(name)} stands here twice, and a reading has one value of a name; write another"


def _value_mistakes(text: SerialTextSettings, section: Place) -> Iterator[tuple[Place, str]]:
    for setting, words in (("units", text.units), ("texts", text.texts)):
        if words and text.format == "json":
            told = (
                'is for lines whose values are read one by one, and those of format = "json" are forwarded as they are'
            )
            yield (*section, setting), f"{told}; remove it"
            return
        for word in _repeated(words):
            yield (*section, setting), f"{show(word)} stands here twice; remove one of the two"
    for unit in text.units:
        if _UNIT.fullmatch(unit) is None:
            wanted = 'write it as it stands behind the number, without a blank in it: "C", "W/m2"'
            yield (*section, "units"), f"{show(unit)} is no unit; {wanted}"
    names = _field_names(text)
    for setting, named in (("texts", text.texts), ("on_change", text.on_change)):
        for name in named:
            if not name or (names is not None and name not in names):
                told = f"no field of the lines is named {show(name)}"
                yield (*section, setting), f"{told}; write names as they stand in the readings"


def _field_names(text: SerialTextSettings) -> set[str] | None:
    """The names that fields of the lines can have; None if only the lines themselves, or their length, tell."""
    if text.format == "csv":
        return set(text.columns)
    if text.format == "nmea" and text.sentences and all(text.sentences.values()):
        return {name for names in text.sentences.values() for name in names}
    return None


def _repeated(names: Sequence[str]) -> list[str]:
    """Names that occur more than once. An empty name may."""
    return [name for name, count in Counter(names).items() if name and count > 1]
