"""Shared by the codecs in Python: numbers as exact decimals, metrics from objects, and bounds.

Executors import this module, so it uses only the standard library.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Self

from spark.decode.codec_declarations import DECIMALS_MAX, IDENTITY_MEMBERS, METRICS_MAX, Metric, name_order

BYTES_MAX = 65_536
"""Bytes of a payload that is decoded. Each byte may become an object."""
DEPTH_MAX = 32
JSON_DEPTH_MAX = 500
"""Levels of a JSON object. Python's parser calls itself for each."""
JSON_NUMBER_CHARS_MAX = 1_000
"""Characters of a number in a JSON object."""
NUMBER_BITS_MAX = 256
"""Bits of a whole number that is computed. Longer ones, and exponents of more than three digits, are out of range."""
NUMBER_CHARS_MAX = 64
"""Characters of a number in text that is computed. Longer ones are out of range."""
UNDECLARED_MAX = 16
UNDECLARED_CHARS_MAX = 100

AROUND = " \t\r\n\v\f\0\ufeff"
"""Characters allowed around JSON and bare numbers: white space, NULs of C strings, a byte order mark."""
NO_NUMBER_HINT = r"(?i:nan|inf|ovf|1\.#)"
"""Pattern found in every text that has a NO_NUMBER_WORD."""
NO_NUMBER_WORD = r'[-+]?(?i:nan(?:\([^()"]{0,32}\))?|inf(?:inity)?|ovf|1\.#[a-z]{2,5}[0-9]{0,8})(?=[ \t\r\n,\]}])'
"""Pattern of a float that is no number: `nan`, `-inf`, `Infinity`, `-nan(ind)`, `1.#QNAN`, or
Arduino's `ovf`."""

NO_METRIC = "undecodable: the payload has no number"
NO_DECLARED = "undecodable: no declared metric"
TOO_MANY = f"undecodable: the payload has more than {METRICS_MAX} metrics"
RANGE = "out-of-range: "
NONE_FITS = "no number of the payload fits decimal(18,6)"
TOLD_CHARS_MAX = 40
"""Characters of a number in a reject's reason."""

_LIMIT = Decimal(10) ** 12
_LONG_EXPONENT = re.compile(r"[eE][+-]?[0-9]{4}")
# These skip whole strings. A string without an end reaches to the end of the text.
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"?'
_STRING_OR_WORD = re.compile(rf"{_STRING}|({NO_NUMBER_WORD})", re.DOTALL)
_BRACKET = re.compile(rf"{_STRING}|[\[{{]|[\]}}]".encode(), re.DOTALL)
_EXACT = Context(prec=400, rounding=ROUND_HALF_UP)
_STEPS = tuple(Decimal(1).scaleb(-decimals) for decimals in range(DECIMALS_MAX + 1))

Value = tuple[str, Decimal, int | None]
"""Name, value, and microseconds from when it was taken to the record's event time; None if at that time."""


@dataclass(frozen=True, slots=True)
class Result:
    """A payload's metrics, or the reason why it cannot be read."""

    metrics: list[Value] | None
    undeclared: list[str] | None = None
    reject_reason: str | None = None


class Written(Decimal):
    """A number with the text that its sender wrote."""

    __slots__ = ("written",)
    written: str

    def __new__(cls, written: str, value: str | None = None) -> Self:
        number = super().__new__(cls, written if value is None else value)
        number.written = written
        return number


class Uncomputed(Written):
    """A number that is surely out of range, and so is not computed."""

    __slots__ = ()

    def __new__(cls, written: str) -> Self:
        return super().__new__(cls, written, "1e99")


class UndecodableError(Exception):
    """The payload does not fit its codec. The message is the reject's reason, with its kind in front."""


def rejected(reason: str, undeclared: list[str] | None = None) -> Result:
    """The result for a payload that cannot be read."""
    return Result(None, undeclared, reason)


def float_decimal(packed: bytes, layout: str) -> Decimal | None:
    """Return a binary float (`<f`, `>d`, ...) as the shortest decimal that stands for it among floats of its width.

    Languages print this decimal: 21.53 in 32 bits is 21.53, not 21.530000686645508. None for NaN and infinities.
    """
    (value,) = struct.unpack(layout, packed)
    if not math.isfinite(value):
        return None
    if layout[-1] == "d":
        return Decimal(repr(value))
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        try:
            if struct.pack(layout, float(text)) == packed:
                return Decimal(text)
        except OverflowError:
            # Rounded up beyond the largest float of this width.
            continue
    return Decimal(repr(value))


def quantised(number: Decimal | int, decimals: int = DECIMALS_MAX, shift: int = 0) -> Decimal | None:
    """Divide by 10**`shift`, and round half up once to `decimals`; None if no table holds the result.

    `shift` is at most `decimals`.
    """
    if isinstance(number, int):
        if number.bit_length() > NUMBER_BITS_MAX:
            return None
        number = Decimal(number)
    if not number or number.adjusted() - shift < -DECIMALS_MAX - 1:
        return Decimal(0)
    if number.adjusted() - shift > 12:
        return None
    value = number.quantize(_STEPS[decimals - shift], context=_EXACT).scaleb(-shift)
    # Adding 0 turns a negative zero, which no table knows, into zero.
    return None if abs(value) >= _LIMIT else value + 0


def is_deep(text: bytes, levels: int = DEPTH_MAX) -> bool:
    """True if JSON has more than so many levels. Decoders have bounds of their own, but not all alike."""
    if text.count(b"[") + text.count(b"{") <= levels:
        return False
    depth = 0
    for found in _BRACKET.finditer(text):
        first = found[0][0]
        if first in b"[{":
            depth += 1
            if depth > levels:
                return True
        elif first in b"]}":
            depth -= 1
    return False


def mended_json(text: str) -> str:
    """Strip JSON, and put `null` for floats that are no numbers."""
    text = text.strip(AROUND)
    if re.search(NO_NUMBER_HINT, text) is None:
        return text
    return _STRING_OR_WORD.sub(lambda found: "null" if found[1] else found[0], text)


def exact_json(text: str, number: Callable[[str], Decimal] | None = None) -> object:
    """Parse JSON strictly, but for floats that are no numbers: all numbers are exact. Raises ValueError.

    `number` reads them; by default, `exact_number` does.
    """
    return json.loads(
        mended_json(text),
        parse_int=number or exact_number,
        parse_float=number or exact_number,
        parse_constant=refused,
        object_pairs_hook=once,
    )


def written_number(text: str) -> Decimal:
    """Return the number in a text, exact; with its text, if it has an exponent. Raises ValueError."""
    if len(text) > JSON_NUMBER_CHARS_MAX:
        raise ValueError(text)
    number = exact_number(text)
    return Written(text) if "e" in text.lower() and not isinstance(number, Uncomputed) else number


def exact_number(text: str) -> Decimal:
    """Return the number in a text, exact; or an Uncomputed, if it is too long."""
    if len(text) > NUMBER_CHARS_MAX or _LONG_EXPONENT.search(text):
        return Uncomputed(text)
    return Decimal(text)


def refused(constant: str) -> object:
    """Take no NaN and no infinity for JSON."""
    raise ValueError(constant)


def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object's members. Raises ValueError if a name comes twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError(pairs)
    return members


def is_number(value: object) -> bool:
    """True for an int or a Decimal. Truth values are no numbers, although Python's are ints."""
    return isinstance(value, Decimal) or type(value) is int


def of_object(
    found: Mapping[object, object], metrics: tuple[Metric, ...], identity: tuple[str, ...] = IDENTITY_MEMBERS
) -> Result:
    """Metrics of an object: the declared ones, or all numbers at its top if `metrics` is empty."""
    top = {name: value for name, value in found.items() if isinstance(name, str) and is_number(value)}
    if not metrics:
        numbers = [(name, value, None) for name, value in top.items() if name not in identity]
        return judged(numbers)
    known = {*identity, *(metric.path[0] for metric in metrics)}
    values = {metric.name: value for metric in metrics if is_number(value := _at(found, metric.path))}
    undeclared = cut_names(name for name in top if name not in known)
    return judged([(name, value, None) for name, value in values.items()], metrics, undeclared)


def judged(
    numbers: Iterable[tuple[str, object, int | None]],
    metrics: tuple[Metric, ...] = (),
    undeclared: list[str] | None = None,
) -> Result:
    """Round numbers as their metrics say, and check that each is in its range.

    `metrics` is empty, or declares all of the numbers. If no table holds an undeclared number, only its name goes into
    `undeclared`, and the other numbers count.
    """
    ordered = sorted(numbers, key=lambda number: (name_order(number[0]), number[2] or 0))
    if not ordered:
        return rejected(NO_DECLARED if metrics else NO_METRIC, undeclared)
    if len(ordered) > METRICS_MAX:
        return rejected(TOO_MANY, undeclared)
    by_name = {metric.name: metric for metric in metrics}
    values: list[Value] = []
    unstored: list[str] = []
    for name, number, ago_us in ordered:
        metric = by_name.get(name)
        way = (metric.decimals, metric.shift) if metric else ()
        value = quantised(number, *way)  # type: ignore[arg-type]
        if metric is not None and (value is None or not _is_within(value, metric)):
            return rejected(f"{RANGE}{metric.out_of_range}: {_told(number if value is None else value)}", undeclared)
        if value is None:
            unstored.append(name)
        else:
            values.append((name, value, ago_us))
    if unstored:
        undeclared = cut_names(unstored)
    return Result(values, undeclared) if values else rejected(RANGE + NONE_FITS, undeclared)


def _told(number: object) -> str:
    """A number as text for a reject's reason."""
    if isinstance(number, Written):
        return number.written[:TOLD_CHARS_MAX]
    if isinstance(number, int):
        # Python refuses to print a number of more than 4,300 digits.
        bits = number.bit_length()
        return str(number)[:TOLD_CHARS_MAX] if bits <= NUMBER_BITS_MAX else of_bits(bits)
    if isinstance(number, Decimal) and -DECIMALS_MAX <= number.adjusted() < TOLD_CHARS_MAX:
        text = format(number, "f")
        return (text.rstrip("0").rstrip(".") if "." in text else text)[:TOLD_CHARS_MAX]
    return str(number)[:TOLD_CHARS_MAX]


def of_bits(bits: int) -> str:
    """Words for a whole number that is too long to print."""
    return f"a number of {bits} bits"


def cut_names(names: Iterable[str]) -> list[str] | None:
    """Sort names that are not declared, and keep the first UNDECLARED_MAX, cut to UNDECLARED_CHARS_MAX."""
    ordered = sorted(set(names), key=name_order)[:UNDECLARED_MAX]
    return [name[:UNDECLARED_CHARS_MAX] for name in ordered] or None


def _at(found: object, path: tuple[str, ...]) -> object:
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_within(value: Decimal, metric: Metric) -> bool:
    return (metric.min is None or value >= metric.min) and (metric.max is None or value <= metric.max)
