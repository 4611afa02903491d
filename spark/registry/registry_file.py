"""Reads the registry: `registry.toml` for a small site, a folder of CSV files for thousands of devices.

Each mistake is reported with its file, its line and the correction. A registry with a mistake is not used at all.
"""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, date, datetime
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from gateway.record_contract import DEVICE_NAME, DEVICE_PATH, KAFKA_TOPIC, NAME_RULE
from gateway.toml_files.mistakes import ConfigError, line_of, lines_of, show, spell, where
from gateway.toml_files.reader import read_text, read_toml
from gateway.toml_files.schema import closest
from spark.engine.told_error import ToldError
from spark.registry.registry import Calibration, Device, Gateway, Registry

DIGITS_MAX = 6
"""Digits of a scale or an offset, before and behind the point. Products with values are then exact in 38 digits."""
TEXT_CHARS_MAX = 256
"""Characters of a site's or a metric's name."""
MISTAKES_SHOWN_MAX = 50
NAMES_COMPARED_MAX = 2_000
"""Most device names among which a similar name is looked for."""

_KINDS: Mapping[str, type[Device | Calibration | Gateway]] = {
    "devices": Device,
    "calibrations": Calibration,
    "gateways": Gateway,
}
_SETTINGS = {kind: tuple(each.name for each in fields(made)) for kind, made in _KINDS.items()}
_REQUIRED = {
    kind: tuple(each.name for each in fields(made) if each.default is MISSING) for kind, made in _KINDS.items()
}
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:(?P<clock>[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)(?P<zone>[Zz]|[+-]\d\d:\d\d)?)?", re.ASCII
)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)

_SPAN = ("valid_from", "valid_to")
_EARLIEST = datetime.min.replace(tzinfo=UTC)

_NO_FILE = "there is no such file or folder; name a registry.toml, or a folder that holds devices.csv"
_NO_CSV = f"the folder holds none of {', '.join(f'{kind}.csv' for kind in _KINDS)}; write one, or name a registry.toml"
_NOT_UTF8 = "is not UTF-8 text; save it as UTF-8 (in a spreadsheet: CSV UTF-8)"
_TOPIC = "is no stream's name; write the Kafka topic that its readings stand in, or leave it out for every stream"
_WHEN = 'write a day, as in 2026-03-14 for its beginning, or a time with its zone, as in "2026-03-14T08:30:00Z"'
_NO_ZONE = "says no time zone, so it could mean any of 24 hours; write Z behind it for UTC, or +02:00"
_DIGITS = (
    f"write a decimal number with at most {DIGITS_MAX} digits before the point and {DIGITS_MAX} behind it, "
    "such as 1.002"
)
_TOPICS_TOML = 'write Kafka topics, or what their names begin with and a *, as in topics = ["site7.*"]'
_TOPICS_CSV = "write Kafka topics, or what their names begin with and a *, several of them separated by ; as in site7.*"
_LABELS_TOML = 'write names and texts in braces, as in labels = { floor = "2" }'
_LABELS_CSV = "write name=text, several of them separated by ; as in floor=2;line=B"


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """A mistake in a file. Line 0: the mistake concerns no single line."""

    path: Path
    line: int
    message: str


class RegistryError(ToldError):
    """The registry cannot be used; the message has its mistakes, in the order of files and lines."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = sorted(mistakes)
        shown = [f"{where(each.path, each.line)}: {each.message}" for each in self.mistakes[:MISTAKES_SHOWN_MAX]]
        if len(self.mistakes) > len(shown):
            shown.append(f"and {len(self.mistakes) - len(shown)} more mistakes")
        super().__init__("\n".join(shown))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One device, calibration or gateway as it stands in a file."""

    kind: str
    path: Path
    line: int
    values: Mapping[str, object]
    """Texts and, from TOML, other types."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Lines of the values that stand on other lines than the entry."""
    unknown: frozenset[str] = frozenset()
    """Settings that may be meant by a column that was reported as wrong."""

    def mistake(self, message: str, name: str | None = None) -> Mistake:
        line = self.line if name is None else self.lines.get(name, self.line)
        place = (self.kind,) if name is None else (self.kind, name)
        return Mistake(self.path, line, f"{spell(place)}: {message}")

    def seen_from(self, other: "_Entry") -> str:
        """The place of this entry, for a message about `other`."""
        return f"line {self.line}" if self.path == other.path else where(self.path, self.line)


@dataclass(slots=True)
class _Found:
    """Entries and mistakes of the files read so far."""

    entries: list[_Entry] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    partly_read: set[str] = field(default_factory=set)
    """Kinds that may have entries which could not be read."""


def load_registry_file(path: Path) -> Registry:
    """Read and check a `registry.toml`, or a folder of CSV files. Raises RegistryError."""
    found = _Found()
    if path.is_dir():
        files = [(kind, path / f"{kind}.csv") for kind in _KINDS if (path / f"{kind}.csv").exists()]
        if not files:
            raise RegistryError([Mistake(path, 0, _NO_CSV)])
        for kind, file in files:
            _read_csv(kind, file, found)
        return _checked(found)
    if path.suffix == ".csv":
        if path.stem not in _KINDS:
            words = f"must be called {', '.join(f'{kind}.csv' for kind in _KINDS)}, by what it holds; rename it"
            raise RegistryError([Mistake(path, 0, words)])
        _read_csv(path.stem, path, found)
        return _checked(found)
    return parse_registry(_text(path), path)


def parse_registry(text: str, path: Path) -> Registry:
    """Check the text of a `registry.toml`; `path` is for messages. Raises RegistryError."""
    return _checked(_read_toml(text, path))


# -- files to entries -------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return read_text(path, {FileNotFoundError: _NO_FILE, UnicodeDecodeError: _NOT_UTF8})
    except ConfigError as error:
        raise _registry_error(error) from error


def _registry_error(error: ConfigError) -> RegistryError:
    return RegistryError(Mistake(error.path, each.line, each.message) for each in error.mistakes)


def _read_toml(text: str, path: Path) -> _Found:
    try:
        document = read_toml(text, path, Decimal)
    except ConfigError as error:
        raise _registry_error(error) from error
    lines = lines_of(text)
    found = _Found()
    for kind, tables in document.items():
        line = line_of(lines, (kind,))
        if kind not in _KINDS:
            found.mistakes.append(Mistake(path, line, f"{kind}: there is no such section; {_instead(kind, _KINDS)}"))
            found.partly_read.add(closest(kind, _KINDS) or kind)
            continue
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            found.mistakes.append(Mistake(path, line, f"{kind}: begin each of them with a line [[{kind}]]"))
            found.partly_read.add(kind)
            continue
        for number, table in enumerate(tables):
            own = {name: line_of(lines, (kind, number, name)) for name in table}
            found.entries.append(_Entry(kind, path, line_of(lines, (kind, number)), table, own))
    return found


def _read_csv(kind: str, path: Path, found: _Found) -> None:
    """Add the entries and mistakes of a file to `found`."""
    try:
        rows = _csv_rows(_text(path), path)
        header_line, header = next(rows, (1, []))
        columns = [name.strip() for name in header]
        if len(columns) == 1 and ";" in columns[0]:
            words = "the columns are separated by ; where a comma must stand; save it with commas"
            found.mistakes.append(Mistake(path, header_line, words))
            found.partly_read.add(kind)
            return
        told, unknown = _column_mistakes(kind, columns)
        found.mistakes += [Mistake(path, header_line, message) for message in told]
        known = set(_SETTINGS[kind]) - unknown
        for line, cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(columns):
                words = f"{len(cells)} columns stand here, and {len(columns)} in the first line; put double quotes "
                words += "around a text with a comma, and leave an unknown value empty"
                found.mistakes.append(Mistake(path, line, words))
                found.partly_read.add(kind)
                continue
            texts = {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}
            values = {name: text for name, text in texts.items() if text and name in known}
            found.entries.append(_Entry(kind, path, line, values, unknown=unknown))
    except RegistryError as error:
        found.mistakes += error.mistakes
        found.partly_read.add(kind)


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row, with the line where it begins."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for cells in reader:
            yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        words = f"is not CSV: {error}; close every double quote, and write a double quote within a text twice"
        raise RegistryError([Mistake(path, line, words)]) from error


def _column_mistakes(kind: str, columns: list[str]) -> tuple[list[str], frozenset[str]]:
    """Mistakes in a file's columns, and the settings that these mistakes leave unknown."""
    required, settings = _REQUIRED[kind], _SETTINGS[kind]
    mistakes = []
    unknown = set()
    for name in dict.fromkeys(columns):
        if name not in settings:
            mistakes.append(f"{show(name)} is no column of {kind}; {_instead(name, settings)}")
            unknown.update(_meant(name, kind, columns))
        elif columns.count(name) > 1:
            mistakes.append(f"the column {show(name)} stands twice; remove one")
            unknown.add(name)
    for name in required:
        if name not in columns and name not in unknown:
            words = f"the first line names the columns, as in {','.join(required)}"
            mistakes.append(f"the column {name} is missing; {words}")
            unknown.add(name)
    return mistakes, frozenset(unknown)


def _meant(name: str, kind: str, written: Collection[str]) -> set[str]:
    """The name, and the setting that it probably means, unless that setting is written too."""
    return {name, closest(name, _SETTINGS[kind]) or name} - ({*written} - {name})


# -- entries to a registry --------------------------------------------------------------------------------------------


def _checked(found: _Found) -> Registry:
    made: dict[str, list[tuple[_Entry, Any, set[str]]]] = {kind: [] for kind in _KINDS}
    mistakes = found.mistakes
    for entry in found.entries:
        values, unknown = _values(entry, mistakes)
        made[entry.kind].append((entry, _KINDS[entry.kind](**values), unknown))

    def known(kind: str, *names: str) -> list[tuple[_Entry, Any]]:
        """Entries in which these settings are right, whatever else is wrong with them."""
        return [(entry, one) for entry, one, unknown in made[kind] if unknown.isdisjoint(names)]

    mistakes += _double_sites(known("devices", "namespace", "device", *_SPAN))
    mistakes += _double_calibrations(known("calibrations", "namespace", "device", "metric", "stream", *_SPAN))
    mistakes += _double_gateways(known("gateways", "namespace", "gateway"))
    devices = known("devices", "namespace", "device")
    if devices and len(devices) == len(made["devices"]) and "devices" not in found.partly_read:
        names = {(device.namespace, device.device) for _, device in devices}
        mistakes += _strange_devices(known("calibrations", "namespace", "device"), names)
    if mistakes:
        raise RegistryError(mistakes)
    return Registry(*(tuple(one for _, one, _ in entries) for entries in made.values()))


def _values(entry: _Entry, mistakes: list[Mistake]) -> tuple[dict[str, Any], set[str]]:
    """Read an entry's values, and add its mistakes.

    The set has the settings whose meant value is unknown, because the value or the name is wrong. If they are required,
    they have a harmless value.
    """
    required, settings = _REQUIRED[entry.kind], _SETTINGS[entry.kind]
    readers = _READERS | _CSV_READERS if entry.path.suffix == ".csv" else _READERS
    values: dict[str, Any] = dict.fromkeys(required, "?")
    unknown = set(entry.unknown)
    for name, value in entry.values.items():
        if name not in settings:
            mistakes.append(entry.mistake(f"there is no such setting; {_instead(name, settings)}", name))
            unknown.update(_meant(name, entry.kind, entry.values))
            continue
        try:
            values[name] = readers[name](value)
        except _WrongValueError as error:
            mistakes.append(entry.mistake(str(error), name))
            unknown.add(name)
    for name in required:
        if name not in entry.values and name not in unknown:
            needs = f"every one of {entry.kind} needs {', '.join(required)}"
            mistakes.append(entry.mistake(f"{name} is missing; {needs}"))
            unknown.add(name)
    if entry.kind == "calibrations" and unknown.isdisjoint(("scale", "offset")) and not {"scale", "offset"} & {*values}:
        words = "has neither scale nor offset, so it would change nothing; write one of them, or both"
        mistakes.append(entry.mistake(words))
    valid_from, valid_to = (values.get(name) for name in _SPAN)
    if valid_from is not None and valid_to is not None and valid_from >= valid_to:
        words = f"{_shown(valid_to)} is not after valid_from ({_shown(valid_from)}), so the entry would never hold"
        mistakes.append(entry.mistake(f"{words}; write when it ends, or leave valid_to out", "valid_to"))
        unknown.add("valid_to")
    return values, unknown


# -- values -----------------------------------------------------------------------------------------------------------


class _WrongValueError(Exception):
    """The value cannot be used. The message says why, and what to write."""


def _text_value(value: object) -> str:
    if isinstance(value, str) and value.strip() and len(value) <= TEXT_CHARS_MAX and value.isprintable():
        return value
    raise _WrongValueError(f"{show(value)} is no text of 1 to {TEXT_CHARS_MAX} characters on one line; write one")


def _name(value: object) -> str:
    return _matching(value, DEVICE_NAME, f"write {NAME_RULE}")


def _device(value: object) -> str:
    beside = "or several such with '/' between them, where gateways put others before it (north/42)"
    return _matching(value, DEVICE_PATH, f"write {NAME_RULE}; {beside}")


def _matching(value: object, pattern: re.Pattern[str], rule: str) -> str:
    if isinstance(value, str) and pattern.fullmatch(value):
        return value
    hint = " (a number is written in double quotes)" if isinstance(value, int) else ""
    raise _WrongValueError(f"{show(value)} is no name; {rule}{hint}")


def _stream(value: object) -> str:
    if isinstance(value, str) and KAFKA_TOPIC.fullmatch(value):
        return value
    raise _WrongValueError(f"{show(value)} {_TOPIC}")


def _topics(value: object) -> tuple[str, ...]:
    if isinstance(value, list) and value and all(_is_topics(each) for each in value):
        return tuple(sorted(set(value)))
    raise _WrongValueError(f"{show(value)} cannot be used; {_TOPICS_TOML}")


def _csv_topics(value: object) -> tuple[str, ...]:
    parts = [part.strip() for part in str(value).split(";")]
    if not all(map(_is_topics, parts)):
        raise _WrongValueError(f"{show(value)} cannot be used; {_TOPICS_CSV}")
    return tuple(sorted(set(parts)))


def _labels(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise _WrongValueError(f"{show(value)} is no list of labels; {_LABELS_TOML}")
    for name, text in value.items():
        if not isinstance(text, str):
            raise _WrongValueError(f"the label {show(name)} is {show(text)}, which is no text; {_LABELS_TOML}")
    return tuple(sorted(value.items()))


def _csv_labels(value: object) -> tuple[tuple[str, str], ...]:
    pairs = [part.partition("=") for part in str(value).split(";") if part.strip()]
    labels = {name.strip(): text.strip() for name, _, text in pairs}
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise _WrongValueError(f"{show(value)} is no list of labels; {_LABELS_CSV}")
    if len(labels) < len(pairs):
        words = "a label's name stands twice; remove one of the two"
        raise _WrongValueError(f"{show(value)} is no list of labels; {words}")
    return tuple(sorted(labels.items()))


_NO_YEAR = "lies outside the years 2 to 9999; leave it out if there is no such limit"


def _is_topics(value: object) -> bool:
    """Whether a value is a topic's name, or a beginning of names with `*`."""
    return isinstance(value, str) and KAFKA_TOPIC.fullmatch(value.removesuffix("*")) is not None


def _time(written: object) -> datetime:
    """The time in UTC. A day means its beginning."""
    value, shown = written, show(written)
    if isinstance(value, str):
        match = _TIME.fullmatch(value)
        if match is None:
            raise _WrongValueError(f"{shown} is no time; {_WHEN}")
        try:
            value = datetime.fromisoformat(value.upper())
        except ValueError as error:
            raise _WrongValueError(f"{shown} is a day or an hour that does not exist; {_WHEN}") from error
        if match["clock"] is None:
            value = value.date()
    if not isinstance(value, date):
        raise _WrongValueError(f"{shown} is no time; {_WHEN}")
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if value.tzinfo is None:
        raise _WrongValueError(f"{shown} {_NO_ZONE}")
    try:
        time = value.astimezone(UTC)
    except OverflowError as error:
        raise _WrongValueError(f"{shown} {_NO_YEAR}") from error
    # PySpark cannot show all times of the year 1.
    if time.year < 2:
        raise _WrongValueError(f"{shown} {_NO_YEAR}")
    return time


def _number(value: object) -> Decimal:
    """The exact number, as it was written."""
    written = Decimal(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if isinstance(written, int | Decimal) and not isinstance(written, bool):
        number = Decimal(written)
        if number.is_finite() and -(10**DIGITS_MAX) < number < 10**DIGITS_MAX:
            rounded = number.quantize(Decimal(1).scaleb(-DIGITS_MAX))
            if rounded == number:
                # Decimals know a negative zero; a table's do not.
                return rounded + 0
    raise _WrongValueError(f"{show(value)} cannot be used; {_DIGITS}")


_READERS: dict[str, Callable[[object], Any]] = {
    "namespace": _name,
    "device": _device,
    "gateway": _name,
    "site": _text_value,
    "metric": _text_value,
    "stream": _stream,
    "topics": _topics,
    "labels": _labels,
    "scale": _number,
    "offset": _number,
    "valid_from": _time,
    "valid_to": _time,
    "retired_from": _time,
}
"""Readers of each setting's value. They raise _WrongValueError."""
_CSV_READERS: dict[str, Callable[[object], Any]] = {"topics": _csv_topics, "labels": _csv_labels}


# -- entries that contradict one another ------------------------------------------------------------------------------


def _double_sites(devices: Iterable[tuple[_Entry, Device]]) -> Iterator[Mistake]:
    for (earlier, before), (entry, device) in _overlapping(devices, attrgetter("namespace", "device")):
        yield entry.mistake(
            f"{device.namespace}/{device.device} is at {show(device.site)} {_spelled(device)} here, and at "
            f"{show(before.site)} {_spelled(before)} on {earlier.seen_from(entry)}; a device is at one site at a time: "
            "end the one where the other begins (valid_to = its valid_from)"
        )


def _double_calibrations(calibrations: Iterable[tuple[_Entry, Calibration]]) -> Iterator[Mistake]:
    for (earlier, before), (entry, of) in _overlapping(calibrations, attrgetter("namespace", "device", "metric")):
        yield entry.mistake(
            f"{of.namespace}/{of.device}'s {show(of.metric)} of {_streams(of)} is calibrated {_spelled(of)} here, and "
            f"of {_streams(before)} {_spelled(before)} on {earlier.seen_from(entry)}; a reading has one calibration: "
            "end the one where the other begins (valid_to = its valid_from)"
        )


def _double_gateways(gateways: Iterable[tuple[_Entry, Gateway]]) -> Iterator[Mistake]:
    known: dict[tuple[str, str], _Entry] = {}
    for entry, gateway in gateways:
        first = known.setdefault((gateway.namespace, gateway.gateway), entry)
        if first is not entry:
            yield entry.mistake(
                f"{gateway.namespace}/{gateway.gateway} stands on {first.seen_from(entry)} already; remove one of them"
            )


def _strange_devices(
    calibrations: Iterable[tuple[_Entry, Calibration]], devices: set[tuple[str, str]]
) -> Iterator[Mistake]:
    names = {f"{namespace}/{name}" for namespace, name in devices}
    told = 0
    for entry, calibration in calibrations:
        if (calibration.namespace, calibration.device) not in devices:
            told += 1
            name = f"{calibration.namespace}/{calibration.device}"
            few = told <= MISTAKES_SHOWN_MAX and len(names) <= NAMES_COMPARED_MAX
            close = closest(name, names) if few else None
            instead = "add the device" if close is None else f"write {close} if that is meant, or add the device"
            yield entry.mistake(f"{name} is not among the devices, so that nothing would be calibrated; {instead}")


_Spanned = TypeVar("_Spanned", Device, Calibration)


def _overlapping(
    entries: Iterable[tuple[_Entry, _Spanned]], key: Callable[[_Spanned], tuple[str, ...]]
) -> Iterator[tuple[tuple[_Entry, _Spanned], tuple[_Entry, _Spanned]]]:
    """Pairs of an entry and a later one of its `key` that begins within its span. If both begin at once, in file order.

    Calibrations of two different streams do not overlap. A calibration of every stream overlaps with all.
    """
    open_ones: dict[tuple[str, ...], list[tuple[_Entry, _Spanned]]] = defaultdict(list)
    for each in sorted(entries, key=lambda each: each[1].valid_from or _EARLIEST):
        begins = each[1].valid_from or _EARLIEST
        of_key = open_ones[key(each[1])]
        of_key[:] = [other for other in of_key if other[1].valid_to is None or other[1].valid_to > begins]
        for other in of_key:
            if _same_streams(other[1], each[1]):
                yield other, each
                break
        of_key.append(each)


def _same_streams(one: Device | Calibration, other: Device | Calibration) -> bool:
    if isinstance(one, Device) or isinstance(other, Device):
        return True
    return one.stream is None or other.stream is None or one.stream == other.stream


def _streams(calibration: Calibration) -> str:
    return "every stream" if calibration.stream is None else f"stream {calibration.stream}"


def _spelled(entry: Device | Calibration) -> str:
    begins = "from the beginning" if entry.valid_from is None else f"from {_shown(entry.valid_from)}"
    return f"{begins} on, without an end," if entry.valid_to is None else f"{begins} to {_shown(entry.valid_to)}"


def _shown(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _instead(name: str, known: Collection[str]) -> str:
    close = closest(name, known)
    return f"there are: {', '.join(known)}" if close is None else f"write {close} instead"
