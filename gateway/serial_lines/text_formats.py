"""Turns lines of sensors that write text into JSON objects: pairs, CSV, JSON lines and NMEA 0183.

Pure functions. Digits are kept as they came, and nothing is guessed. If a value can be read in two ways, it stays a
text. If a line can, it makes no reading.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import xor
from typing import Final, NamedTuple, NoReturn

import msgspec

from gateway.intake.payload_json import UNREADABLE, is_json, read_mending
from gateway.settings import SerialTextSettings

LineReader = Callable[[bytes], Iterable[bytes]]
"""Returns the readings of a line without its end, as JSON objects in UTF-8; none if the line is neither a reading nor a
loss. Takes any bytes. Raises LineError, perhaps after some readings of the line."""
NOISE: Final = "noise"
"""Reason of a LineError without a loss: every wanted sentence of the line was read. Other bytes stood around it, or a
sentence of another type was damaged."""
NUMBER_CHARACTERS_MAX = 64
"""Characters of the longest number. A longer one is kept as a text, as readers of JSON refuse it, the cloud's tables
too."""
QUANTITY_CHARACTERS_MAX = 128
"""Characters of the longest value in which a number is looked for. A longer value is a text."""
NAME_WORDS_MAX = 4
"""Words that a name in front of a colon may have."""
SENTENCE_MEMBER: Final = "sentence"
"""The member of an NMEA reading that names its sentence."""

_DELIMITERS: Final = {",": ",", ";": ";", "tab": "\t", "space": " "}
_NUMBER_PATTERN = r"([+-]?) *(?:([0-9]+)(?:[.]([0-9]*))?|[.]([0-9]+))([eE][+-]?[0-9]{1,3})?"
_NUMBER: Final = re.compile(_NUMBER_PATTERN)
_COMMA_NUMBER: Final = re.compile(r"([+-]? *[0-9]*),([0-9]+)")
# Degree signs go by many codes: a character display's (223) and code page 437's (248) are ß and ø in Latin-1.
_UNIT_SIGNS = "%‰°º˚*ßøµμΩ"
_QUANTITY: Final = re.compile(
    rf"{_NUMBER_PATTERN}(?:(\s*)((?:deg(?:rees)?\s+|%\s*)?[^\W\d_{_UNIT_SIGNS}][^\s\d,;|()]*[23]?"
    rf"|[{_UNIT_SIGNS}]\s?[^\s\d,;|()]*[23]?))?[\s,;|/()]*"
)
# Units that may follow a number without a space. No others may: `id=12ab` is not 12. A, C and F may follow only a
# fraction, as `3F` may be hexadecimal.
_GLUED_UNIT: Final = re.compile(
    r"[numckhMG]?(?:V|A|VA|W|Wh|Hz|Ohm|Pa|bar|g|m|s|l|L|J|N)|[CFK]|deg[CF]|RH|psi|in|ft|t|lb|oz|ppm|ppb|lx|lux|lm|dBm?"
    r"|min|h|rpm|m/s|km/h|kn|kt|mph|[um]?g/m3|m3(?:/h)?|[lL]/(?:min|h)|pH|NTU|[um]S/cm"
)
_TEMPERATURE_UNIT: Final = re.compile(rf"(?:[{_UNIT_SIGNS}]|deg(?:rees)?)?\s*([CFK])")
_UNIT_GROUP: Final = 7
"""Group of the unit in `_QUANTITY`: five groups are the number's, and one is the space between."""
_HEXADECIMAL_UNITS: Final = frozenset("ACF")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_TOKENS: Final = {
    separator: re.compile(
        rf'(?P<quoted>(?<![^\s,;|{separator}])"[^"]*")|(?P<separator>{separator})|(?P<gap>[\s,;|]+)'
        rf'|(?P<word>[^\s,;|{separator}"]+|")'
    )
    for separator in "=:"
}
_EDGES: Final = " \t\xa0,;|"
_TAG_BLOCK: Final = re.compile(rb"\\[^\\]*\\(?=[$!])")
_SENTENCE_START: Final = re.compile(rb"[$!](?=[^\s,*$!])")
# One digit is a whole checksum too: some instruments write `*A` for `*0A`. A checksum that was cut off after the first
# of two digits passes only if that digit is a zero.
_SENTENCE_MARKS: Final = re.compile(
    rb"(?P<start>[$!](?=[^\s,*$!]))|[*](?P<checksum>[0-9A-Fa-f]{2}|[0-9A-Fa-f](?![0-9A-Fa-f]))"
)
_TYPE: Final = re.compile(rb"[A-Z][0-9A-Z]{2,9}[,*]")
_ADDRESS: Final = re.compile(rb"[$!]([0-9A-Za-z]+)(?=[,*])")
_BLANK: Final = re.compile(rb"[\x00-\x20\x7f]*")


_ValueReader = Callable[[str, str], str]
"""Returns a field's value as JSON. Takes the field's name and text."""
_Members = Sequence[tuple[str, str]]
"""Names, and values that are JSON already."""


class LineError(ValueError):
    """A line that cannot be read; `reason` is short, for counters and the quarantine."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Name(NamedTuple):
    """A name in a line, and its place. Its value begins behind the separator."""

    text: str
    start: int
    value_start: int


def line_reader(settings: SerialTextSettings) -> LineReader:
    """The reader of a sensor's lines."""
    value = _value_reader(settings)
    match settings.format:
        case "key=value":
            return lambda line: (_read_pairs(line, "=", value),)
        case "key:value":
            return lambda line: (_read_pairs(line, ":", value),)
        case "csv":
            return _csv_reader(settings.columns, _DELIMITERS[settings.delimiter], value)
        case "json":
            return lambda line: (_read_json(line),)
        case "nmea":
            return _nmea_reader(settings.sentences, value)


def proves_itself(settings: SerialTextSettings) -> bool:
    """Whether a line of this format, if it was cut off in front, can never be read as a whole one."""
    return settings.format in {"json", "nmea"}


def holds_sentences(settings: SerialTextSettings) -> bool:
    """Whether a line of this format holds sentences that prove themselves, whatever stands around them."""
    return settings.format == "nmea"


def json_value(text: str, *, decimal_comma: bool = False, units: Collection[str] = ()) -> str:
    """A value as JSON: null if it is empty, a number with its own digits if it is one, or else a string.

    A unit behind a number is left out. Of one temperature in several units (`21.50 °C 70.70 °F`) the first number
    counts. `decimal_comma`: a comma in a number is its decimal point. `units`: further units, which may stand behind
    any number.
    """
    if not text:
        return "null"
    if len(text) <= QUANTITY_CHARACTERS_MAX:
        plain = _COMMA_NUMBER.sub(r"\1.\2", text, count=1) if decimal_comma else text
        number = _number_with(units, plain) or _quantity(plain, units)
        if number is not None:
            return number
    return _json_string(text)


def characters(line: bytes) -> str:
    """A line's text: UTF-8, or else Latin-1, in which other sensors nearly always write a degree sign."""
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("latin-1")


def _text(line: bytes) -> str:
    """A line without a terminal's colours. Raises LineError if it is no text."""
    text = characters(line)
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    # At the wrong baud rate, lines are full of control characters.
    if _CONTROLS.search(text):
        raise LineError("not-text")
    return text


def _value_reader(settings: SerialTextSettings) -> _ValueReader:
    texts = frozenset(settings.texts)
    # If commas separate values, they cannot stand in a number.
    decimal_comma = settings.format == "csv" and settings.delimiter != ","

    def value(name: str, text: str) -> str:
        if name in texts and text:
            return _json_string(text)
        if settings.format == "nmea":
            return _field(text, settings.units)
        return json_value(text, decimal_comma=decimal_comma, units=settings.units)

    return value


def _read_pairs(line: bytes, separator: str, value: _ValueReader) -> bytes:
    members = _pairs(_text(line), separator, value)
    if not members:
        raise LineError("no-pairs")
    names = {name for name, _ in members}
    if len(names) < len(members):
        raise LineError("repeated-name")
    # Noise is full of Latin-1 letters, and names of sensors have none. Noise must not make up new metrics.
    if not all(name.isascii() for name in names) and not _is_utf8(line):
        raise LineError("not-text")
    return _object(members)


def _pairs(text: str, separator: str, value: _ValueReader) -> _Members:
    """Every name with the value between its separator and the next name. Text before the first name is left out."""
    tokens = list(_TOKENS[separator].finditer(text))
    names: list[_Name] = []
    for index, token in enumerate(tokens):
        if token.lastgroup == "separator" and (name := _name_before(tokens, index, text, names)) is not None:
            names.append(name)
    ends = [*(name.start for name in names[1:]), len(text)]
    return [
        (name.text, value(name.text, _unquoted(text[name.value_start : end].strip(_EDGES))))
        for name, end in zip(names, ends, strict=False)
    ]


def _name_before(tokens: Sequence[re.Match[str]], index: int, text: str, names: Sequence[_Name]) -> _Name | None:
    """The name that the separator at `index` ends; None if the separator is part of a value."""
    separator = tokens[index]
    glued_in_front = index > 0 and tokens[index - 1].lastgroup == "word"
    at = index - 1 if glued_in_front or index == 0 else index - 2
    if at < 0 or tokens[at].lastgroup != "word" or text[tokens[at].end() : separator.start()].strip():
        return None
    # In `time=a=b` and `mac:a4:c1` only the first separator ends a name.
    if at > 0 and tokens[at - 1].lastgroup == "separator":
        return None
    if separator[0] == "=":
        start = tokens[at - 2 if _needs_another(tokens, at) else at].start()
        return _Name(text[start : tokens[at].end()], start, separator.end())
    if glued_in_front and index + 1 < len(tokens) and tokens[index + 1].lastgroup != "gap":
        # In `Time: 10:32:05` and `MAC: a4:c1:38:00:11:22`, a name waits for its value here. Or this is a bare `10:32`.
        waiting = at > 1 and bool(names) and names[-1].value_start == tokens[at - 2].end()
        if waiting or not _has_letter(tokens[at][0]):
            return None
    start = _first_word(tokens, at)
    return _Name(text[start : tokens[at].end()], start, separator.end())


def _first_word(tokens: Sequence[re.Match[str]], last: int) -> int:
    """Start of the name whose last word is `last`. A name like `Heat index` must not be taken for a unit and a name.

    So it counts at the beginning of the line, and behind a comma, semicolon, tab or two spaces. Elsewhere a name is one
    word, or two if the last says nothing alone (`Channel 2`, `Humidity (rel)`).
    """
    first = last
    for _ in range(NAME_WORDS_MAX):
        if first == 0 or (tokens[first - 1].lastgroup == "gap" and (first == 1 or tokens[first - 1][0] != " ")):
            return tokens[first].start()
        if not _is_word_before(tokens, first):
            break
        first -= 2
    return tokens[last - 2 if _needs_another(tokens, last) else last].start()


def _is_word_before(tokens: Sequence[re.Match[str]], at: int) -> bool:
    """Whether a name may go on to the left, over a space."""
    return at > 1 and tokens[at - 1][0] == " " and tokens[at - 2].lastgroup == "word" and tokens[at - 2][0][0].isalpha()


def _needs_another(tokens: Sequence[re.Match[str]], last: int) -> bool:
    word = tokens[last][0]
    return (
        (not _has_letter(word) or word[0] in "([")
        and _is_word_before(tokens, last)
        and _GLUED_UNIT.fullmatch(tokens[last - 2][0]) is None
    )


def _has_letter(word: str) -> bool:
    return any(character.isalpha() for character in word)


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' and '"' not in value[1:-1] else value


def _csv_reader(columns: Sequence[str], delimiter: str, value: _ValueReader) -> LineReader:
    heading = [column.casefold() for column in columns]

    def read(line: bytes) -> Iterator[bytes]:
        values = _csv_values(_text(line), delimiter)
        if len(values) == len(columns) + 1 and not values[-1]:
            # Many sensors end each value with the delimiter, the last one too.
            values.pop()
        if len(values) != len(columns):
            raise LineError("column-count")
        if any(name and name != text.casefold() for name, text in zip(heading, values, strict=True)):
            yield _object([(name, value(name, text)) for name, text in zip(columns, values, strict=True) if name])

    return read


def _csv_values(text: str, delimiter: str) -> list[str]:
    try:
        # RFC 4180, with spaces around values.
        (values,) = csv.reader([text], delimiter=delimiter, strict=True, skipinitialspace=delimiter != " ")
    except csv.Error as error:
        raise LineError("csv-quote") from error
    values = [value.strip() for value in values]
    # Spaces align columns: several in a row hold no empty values between them.
    return [value for value in values if value] if delimiter == " " else values


def _read_json(line: bytes) -> bytes:
    """One JSON object, byte for byte. Words that are no values are allowed if another member has a value."""
    try:
        members = read_mending(_members, line)
    except LineError:
        raise
    except UNREADABLE as error:
        raise LineError("not-json") from error
    if not isinstance(members, dict):
        raise LineError("json-not-object")
    if not any(value is not None and value != math.inf for value in members.values()) and not is_json(line):
        # No member has a value.
        raise LineError("not-json")
    return line


def _members(line: bytes) -> object:
    """Strict JSON (RFC 8259). Raises UNREADABLE, and LineError if a name stands twice in an object."""
    # From text, as the library would guess at UTF-16 and UTF-32. Integers are not converted, as they may be long.
    return json.loads(line.decode(), object_pairs_hook=_distinct, parse_int=str, parse_constant=_no_json)


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise LineError("repeated-name")
    return members


def _no_json(constant: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python's reader would take."""
    raise ValueError(constant)


def _nmea_reader(sentences: dict[str, tuple[str, ...]], value: _ValueReader) -> LineReader:
    def names_of(address: str) -> Sequence[str] | None:
        """Names for a sentence's fields; None if nobody asked for its type."""
        if not sentences:
            return ()
        # `P` begins a maker's own sentence, which has no talker.
        return sentences.get(address, None if address.startswith("P") else sentences.get(address[2:]))

    def read(line: bytes) -> Iterator[bytes]:
        # Since version 4, a block of tags between backslashes may stand in front: when and where it was received.
        whole, rest = _sentences(_TAG_BLOCK.sub(b"", line))
        faults: list[str] = []
        for content in whole:
            names = names_of(characters(content.partition(b",")[0]))
            if names is None:
                continue
            try:
                address, *fields = _text(content).split(",")
            except LineError as error:
                faults.append(error.reason)
                continue
            names = names or [str(number) for number in range(1, len(fields) + 1)]
            fields += [""] * (len(names) - len(fields))
            members = [(name, value(name, text)) for name, text in zip(names, fields, strict=False) if name]
            yield _object([(SENTENCE_MEMBER, _json_string(address)), *members])
        # The line counts once, however many of its pieces are no sentence.
        for piece in rest:
            _refuse_cut(piece, names_of)
        if faults:
            raise LineError(faults[0])
        _count_noise(whole, rest)

    return read


def _sentences(line: bytes) -> tuple[list[bytes], list[bytes]]:
    """The contents of all sentences whose checksum holds, and the pieces around them, both in the line's order.

    A sentence begins at the last start for which its checksum holds: `$` and `!` may stand in its text, and a sentence
    that was cut off may stand in front of it. Behind the first start, another start needs a type as in the standard, so
    that no damaged number becomes a sentence. One pass is enough for any line.
    """
    xors = list(accumulate(line, xor, initial=0))
    whole: list[bytes] = []
    rest: list[bytes] = []
    starts: dict[int, int] = {}
    position = 0
    for mark in _SENTENCE_MARKS.finditer(line):
        if mark["start"]:
            if not starts or _TYPE.match(line, mark.end()):
                starts[xors[mark.end()]] = mark.start()
            continue
        # The exclusive or of the bytes between two places is that of the two places' values in `xors`.
        start = starts.get(xors[mark.start()] ^ int(mark["checksum"], 16))
        if start is None:
            rest.append(line[position : mark.end()])
        else:
            rest.append(line[position:start])
            whole.append(line[start + 1 : mark.start()])
        position = mark.end()
        starts.clear()
    rest.append(line[position:])
    return whole, [piece for piece in rest if piece]


def _refuse_cut(piece: bytes, names_of: Callable[[str], Sequence[str] | None]) -> None:
    """Raises LineError if a sentence begins in a piece of a line and was asked for, or may have been."""
    position = 0
    while (start := _SENTENCE_START.search(piece, position)) is not None:
        address = _ADDRESS.match(piece, start.start())
        if address is None or names_of(address[1].decode()) is not None:
            if b"*" in piece[start.end() :]:
                raise LineError("nmea-checksum")
            raise LineError("nmea-without-checksum")
        # The text behind the type of an unwanted sentence belongs to that sentence, up to the next type.
        following = _ADDRESS.search(piece, address.end())
        if following is None:
            return
        position = following.start()


def _count_noise(whole: Sequence[bytes], rest: Sequence[bytes]) -> None:
    """Raises LineError if a line holds more than whole sentences and beginnings of unwanted ones."""
    unread = [piece for piece in rest if _ADDRESS.search(piece) is None and _BLANK.fullmatch(piece) is None]
    if unread and len(unread) == len(rest) and not whole:
        raise LineError("nmea-start")
    # A damaged sentence may have been a wanted one whose type was hit.
    if unread or any(b"*" in piece for piece in rest):
        raise LineError(NOISE)


def _field(text: str, units: Collection[str]) -> str:
    """An NMEA field as JSON. Its unit has a field of its own, and encoded fields are full of what looks like units."""
    if not text:
        return "null"
    if len(text) <= NUMBER_CHARACTERS_MAX and (number := _number_with(("", *units), text)) is not None:
        return number
    return _json_string(text)


def _number_with(units: Collection[str], text: str) -> str | None:
    """The number in front of one of these units; None if there is none. An empty unit means a number alone."""
    for unit in units:
        if text.endswith(unit):
            number = _NUMBER.fullmatch(text[: len(text) - len(unit)].rstrip() if unit else text)
            if number is not None:
                return _json_number(number)
    return None


def _quantity(text: str, units: Collection[str]) -> str | None:
    """The number of a text that is one number, with or without a unit, or one temperature in several units."""
    found: list[re.Match[str]] = []
    position = 0
    while position < len(text):
        quantity = _QUANTITY.match(text, position)
        if quantity is None:
            return None
        found.append(quantity)
        position = quantity.end()
    if not _has_own_unit(found[0], units) or (len(found) > 1 and not _is_one_temperature(found)):
        return None
    return _json_number(found[0])


def _is_one_temperature(found: Sequence[re.Match[str]]) -> bool:
    """`21.50 °C 70.70 °F` is one value; `0.1 g 0.2 g` and `3.3 V 0.5 A` are several."""
    units = [_TEMPERATURE_UNIT.fullmatch(quantity[_UNIT_GROUP] or "") for quantity in found]
    return all(units) and len({unit[1] for unit in units if unit is not None}) == len(found)


def _has_own_unit(found: re.Match[str], declared: Collection[str]) -> bool:
    unit = found[_UNIT_GROUP]
    if unit is None or found[_UNIT_GROUP - 1] or unit[0] in _UNIT_SIGNS or unit in declared:
        return True
    return _GLUED_UNIT.fullmatch(unit) is not None and (unit not in _HEXADECIMAL_UNITS or "." in found[0])


def _json_number(found: re.Match[str]) -> str | None:
    """The number as JSON (RFC 8259, section 6), with the digits as they came.

    None if no reader could hold it, and for digits around an E without point or sign: `28E10` is an identity in
    hexadecimal, as `28FF` is, and nobody means 280000000000 by it.
    """
    sign, whole, fraction, bare_fraction, exponent = found.groups()[:5]
    if exponent and exponent[1].isdigit() and not sign and fraction is None and bare_fraction is None:
        return None
    fraction = fraction or bare_fraction
    number = (
        sign.strip("+") + ((whole or "").lstrip("0") or "0") + (f".{fraction}" if fraction else "") + (exponent or "")
    )
    return number if len(number) <= NUMBER_CHARACTERS_MAX and math.isfinite(float(number)) else None


def _json_string(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _object(members: _Members) -> bytes:
    return ("{" + ",".join(f"{_json_string(name)}:{value}" for name, value in members) + "}").encode()


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
