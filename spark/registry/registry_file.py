"""Reads the registry: `registry.toml` for a small site, a folder of CSV files for thousands of devices.

Each mistake is reported with its file, its line and the correction. A registry with a mistake is not used at all.
"""

import csv
import difflib
import io
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from gateway.record_contract import DEVICE_NAME, DEVICE_PATH, KAFKA_TOPIC, NAME_RULE
from gateway.toml_files.mistakes import ConfigError, line_of, lines_of, show, show_value, spell, where
from gateway.toml_files.reader import read_toml
from spark.registry.registry import Calibration, Device, Gateway, Registry

DIGITS_MAX = 6
"""Digits of a scale or an offset, before and behind the point. Products with values are then exact in 38 digits."""
TEXT_CHARS_MAX = 256
"""Characters of a site's or a metric's name."""
MISTAKES_SHOWN_MAX = 50
NAMES_COMPARED_MAX = 2_000
"""Most device names among which a similar name is looked for."""

_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "devices": (("namespace", "device", "site"), ("labels", "valid_from", "valid_to")),
    "calibrations": (("namespace", "device", "metric"), ("stream", "scale", "offset", "valid_from", "valid_to")),
    "gateways": (("namespace", "gateway"), ("site", "retired_from", "topics")),
}
"""Required and optional settings of each kind of entry."""
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:(?P<clock>[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)(?P<zone>[Zz]|[+-]\d\d:\d\d)?)?", re.ASCII
)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)

_EARLIEST = datetime.min.replace(tzinfo=UTC)

_NO_FILE = "there is no such file or folder; name a registry.toml, or a folder that holds devices.csv"
_NO_CSV = (
    f"the folder holds none of {', '.join(f'{kind}.csv' for kind in _KEYS)}; write one of them, or name a registry.toml"
)
_NOT_UTF8 = "is not UTF-8 text; save it as UTF-8 (in a spreadsheet: CSV UTF-8)"
_NAME = f"write {NAME_RULE}"
_DEVICE = f"{_NAME}; or several such with '/' between them, where gateways put others before it (north/42)"
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


class RegistryError(Exception):
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
        files = [(kind, path / f"{kind}.csv") for kind in _KEYS if (path / f"{kind}.csv").exists()]
        if not files:
            raise RegistryError([Mistake(path, 0, _NO_CSV)])
        for kind, file in files:
            _read_csv(kind, file, found)
        return _checked(found)
    if path.suffix == ".csv":
        if path.stem not in _KEYS:
            words = f"must be called {', '.join(f'{kind}.csv' for kind in _KEYS)}, by what it holds; rename it"
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
        # Spreadsheets, and editors on Windows, put a byte order mark first.
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise RegistryError([Mistake(path, 0, _NO_FILE)]) from error
    except UnicodeDecodeError as error:
        raise RegistryError([Mistake(path, 0, _NOT_UTF8)]) from error
    except OSError as error:
        words = f"cannot be read: {error.strerror}; name a file that you may read"
        raise RegistryError([Mistake(path, 0, words)]) from error


def _read_toml(text: str, path: Path) -> _Found:
    try:
        document = read_toml(text, path, Decimal)
    except ConfigError as error:
        raise RegistryError([Mistake(path, each.line, each.message) for each in error.mistakes]) from error
    except (ValueError, RecursionError, ArithmeticError) as error:
        words = "holds a number that is too long to be read, or lists that are nested too deep; shorten it"
        raise RegistryError([Mistake(path, 0, words)]) from error
    lines = lines_of(text)
    found = _Found()
    for kind, tables in document.items():
        line = line_of(lines, (kind,))
        if kind not in _KEYS:
            found.mistakes.append(Mistake(path, line, f"{kind}: there is no such section; {_instead(kind, _KEYS)}"))
            found.partly_read.update(difflib.get_close_matches(kind, _KEYS, n=1))
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
        known = {name for of in _KEYS[kind] for name in of} - unknown
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
    required, optional = _KEYS[kind]
    mistakes = []
    unknown = set()
    for name in dict.fromkeys(columns):
        if name not in (*required, *optional):
            mistakes.append(f"{show(name)} is no column of {kind}; {_instead(name, (*required, *optional))}")
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


def _meant(name: str, kind: str, written: Collection[str]) -> list[str]:
    """The setting that an unknown name probably means, unless that setting is written too."""
    close = difflib.get_close_matches(name, [each for of in _KEYS[kind] for each in of], n=1)
    return [each for each in close if each not in written]


# -- entries to a registry --------------------------------------------------------------------------------------------


def _checked(found: _Found) -> Registry:
    devices: list[Device] = []
    calibrations: list[Calibration] = []
    gateways: list[Gateway] = []
    # Entries whose compared settings are right, whatever else is wrong with them.
    spanned_devices: list[tuple[_Entry, Device]] = []
    named_calibrations: list[tuple[_Entry, Calibration]] = []
    spanned_calibrations: list[tuple[_Entry, Calibration]] = []
    named_gateways: list[tuple[_Entry, Gateway]] = []
    knows_devices = "devices" not in found.partly_read
    mistakes = found.mistakes
    for entry in found.entries:
        reader = _Reader(entry, mistakes, set(entry.unknown))
        reader.check_names()
        match entry.kind:
            case "devices":
                device = reader.device()
                devices.append(device)
                knows_devices = knows_devices and reader.knows("namespace", "device")
                if reader.knows("namespace", "device", "valid_from", "valid_to"):
                    spanned_devices.append((entry, device))
            case "calibrations":
                calibration = reader.calibration()
                calibrations.append(calibration)
                if reader.knows("namespace", "device"):
                    named_calibrations.append((entry, calibration))
                if reader.knows("namespace", "device", "metric", "stream", "valid_from", "valid_to"):
                    spanned_calibrations.append((entry, calibration))
            case _:
                gateway = reader.gateway()
                gateways.append(gateway)
                if reader.knows("namespace", "gateway"):
                    named_gateways.append((entry, gateway))
    mistakes += _double_sites(spanned_devices)
    mistakes += _double_calibrations(spanned_calibrations)
    mistakes += _double_gateways(named_gateways)
    if devices and knows_devices:
        mistakes += _strange_devices(named_calibrations, {(each.namespace, each.device) for each in devices})
    if mistakes:
        raise RegistryError(mistakes)
    return Registry(tuple(devices), tuple(calibrations), tuple(gateways))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the values of one entry. For a wrong value it notes the mistake, and returns a harmless value."""

    entry: _Entry
    mistakes: list[Mistake]
    unknown: set[str]
    """Settings whose meant value is unknown, because the value or the name is wrong."""

    def wrong(self, message: str, name: str | None = None) -> None:
        self.mistakes.append(self.entry.mistake(message, name))
        if name is not None:
            self.unknown.add(name)

    def knows(self, *names: str) -> bool:
        return self.unknown.isdisjoint(names)

    def check_names(self) -> None:
        required, optional = _KEYS[self.entry.kind]
        for name in self.entry.values:
            if name not in (*required, *optional):
                self.wrong(f"there is no such setting; {_instead(name, (*required, *optional))}", name)
                self.unknown.update(_meant(name, self.entry.kind, self.entry.values))
        for name in required:
            if name not in self.entry.values and self.knows(name):
                self.wrong(f"{name} is missing; every one of {self.entry.kind} needs {', '.join(required)}")
                self.unknown.add(name)

    def device(self) -> Device:
        valid_from, valid_to = self.span()
        return Device(
            self.name("namespace"), self.name("device"), self.text("site"), self.labels(), valid_from, valid_to
        )

    def calibration(self) -> Calibration:
        valid_from, valid_to = self.span()
        if not self.entry.values.keys() & {"scale", "offset"} and self.knows("scale", "offset"):
            self.wrong("has neither scale nor offset, so it would change nothing; write one of them, or both")
        return Calibration(
            self.name("namespace"),
            self.name("device"),
            self.text("metric"),
            self.stream(),
            self.number("scale", Decimal(1)),
            self.number("offset", Decimal(0)),
            valid_from,
            valid_to,
        )

    def gateway(self) -> Gateway:
        site = self.text("site") if "site" in self.entry.values else None
        return Gateway(self.name("namespace"), self.name("gateway"), site, self.time("retired_from"), self.topics())

    def text(self, name: str) -> str:
        value = self.entry.values.get(name, "?")
        if isinstance(value, str) and value.strip() and len(value) <= TEXT_CHARS_MAX and value.isprintable():
            return value
        self.wrong(f"{show_value(value)} is no text of 1 to {TEXT_CHARS_MAX} characters on one line; write one", name)
        return "?"

    def name(self, name: str) -> str:
        value = self.entry.values.get(name, "x")
        pattern, rule = (DEVICE_PATH, _DEVICE) if name == "device" else (DEVICE_NAME, _NAME)
        if isinstance(value, str) and pattern.fullmatch(value):
            return value
        hint = " (a number is written in double quotes)" if isinstance(value, int) else ""
        self.wrong(f"{show_value(value)} is no name; {rule}{hint}", name)
        return "x"

    def stream(self) -> str | None:
        value = self.entry.values.get("stream")
        if value is None or (isinstance(value, str) and KAFKA_TOPIC.fullmatch(value)):
            return value
        self.wrong(f"{show_value(value)} {_TOPIC}", "stream")
        return None

    def topics(self) -> tuple[str, ...]:
        value = self.entry.values.get("topics")
        if value is None:
            return ()
        is_csv = self.entry.path.suffix == ".csv"
        names = [part.strip() for part in value.split(";")] if is_csv and isinstance(value, str) else value
        if isinstance(names, list) and names and all(_is_topics(each) for each in names):
            return tuple(sorted(set(names)))
        self.wrong(f"{show_value(value)} cannot be used; {_TOPICS_CSV if is_csv else _TOPICS_TOML}", "topics")
        return ()

    def labels(self) -> tuple[tuple[str, str], ...]:
        value = self.entry.values.get("labels", {})
        hint = _LABELS_TOML
        if isinstance(value, str) and self.entry.path.suffix == ".csv":
            hint = _LABELS_CSV
            pairs = [part.partition("=") for part in value.split(";") if part.strip()]
            if all(name.strip() and equals for name, equals, _ in pairs):
                names = [name.strip() for name, _, _ in pairs]
                if len(set(names)) == len(names):
                    return tuple(sorted((name.strip(), text.strip()) for name, _, text in pairs))
                hint = "a label's name stands twice; remove one of the two"
        elif isinstance(value, dict):
            wrong = [name for name, text in value.items() if not isinstance(text, str)]
            if not wrong:
                return tuple(sorted(value.items()))
            words = f"the label {show(wrong[0])} is {show_value(value[wrong[0]])}, which is no text"
            self.wrong(f"{words}; {_LABELS_TOML}", "labels")
            return ()
        self.wrong(f"{show_value(value)} is no list of labels; {hint}", "labels")
        return ()

    def number(self, name: str, default: Decimal) -> Decimal:
        value = self.entry.values.get(name)
        if value is None:
            return default
        number = _number(value)
        if number is not None:
            return number
        self.wrong(f"{show_value(value)} cannot be used; {_DIGITS}", name)
        return default

    def span(self) -> tuple[datetime | None, datetime | None]:
        valid_from, valid_to = self.time("valid_from"), self.time("valid_to")
        if valid_from is not None and valid_to is not None and valid_from >= valid_to:
            words = f"{_shown(valid_to)} is not after valid_from ({_shown(valid_from)}), so the entry would never hold"
            self.wrong(f"{words}; write when it ends, or leave valid_to out", "valid_to")
        return valid_from, valid_to

    def time(self, name: str) -> datetime | None:
        value = self.entry.values.get(name)
        if value is None:
            return None
        try:
            return _time(value)
        except _WrongTimeError as error:
            self.wrong(f"{show_value(value)} {error}", name)
            return None


_NO_YEAR = "lies outside the years 2 to 9999; leave it out if there is no such limit"


def _is_topics(value: object) -> bool:
    """Whether a value is a topic's name, or a beginning of names with `*`."""
    return isinstance(value, str) and KAFKA_TOPIC.fullmatch(value.removesuffix("*")) is not None


class _WrongTimeError(Exception):
    """The value is no time. The message is the end of a sentence that begins with the value."""


def _time(value: object) -> datetime:
    """The time in UTC. A day means its beginning. Raises _WrongTimeError."""
    if isinstance(value, str):
        match = _TIME.fullmatch(value)
        if match is None:
            raise _WrongTimeError(f"is no time; {_WHEN}")
        try:
            value = datetime.fromisoformat(value.upper())
        except ValueError as error:
            raise _WrongTimeError(f"is a day or an hour that does not exist; {_WHEN}") from error
        if match["clock"] is None:
            value = value.date()
    if not isinstance(value, date):
        raise _WrongTimeError(f"is no time; {_WHEN}")
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if value.tzinfo is None:
        raise _WrongTimeError(_NO_ZONE)
    try:
        time = value.astimezone(UTC)
    except OverflowError as error:
        raise _WrongTimeError(_NO_YEAR) from error
    # PySpark cannot show all times of the year 1.
    if time.year < 2:
        raise _WrongTimeError(_NO_YEAR)
    return time


def _number(value: object) -> Decimal | None:
    """The exact number, as it was written. None if it is no number, or has more digits than `DIGITS_MAX`."""
    if isinstance(value, str):
        if _NUMBER.fullmatch(value) is None:
            return None
        value = Decimal(value)
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    number = Decimal(value)
    if not number.is_finite() or not -(10**DIGITS_MAX) < number < 10**DIGITS_MAX:
        return None
    rounded = number.quantize(Decimal(1).scaleb(-DIGITS_MAX))
    # Decimals know a negative zero; a table's do not.
    return rounded + 0 if rounded == number else None


# -- entries that contradict one another ------------------------------------------------------------------------------


def _double_sites(devices: Iterable[tuple[_Entry, Device]]) -> Iterator[Mistake]:
    by_device: dict[tuple[str, str], list[tuple[_Entry, Device]]] = defaultdict(list)
    for each in devices:
        by_device[each[1].namespace, each[1].device].append(each)
    for (namespace, name), of_device in by_device.items():
        for (earlier, before), (entry, device) in _overlapping(of_device):
            yield entry.mistake(
                f"{namespace}/{name} is at {show(device.site)} {_spelled(device)} here, and at {show(before.site)} "
                f"{_spelled(before)} on {earlier.seen_from(entry)}; a device is at one site at a time: end the one "
                "where the other begins (valid_to = its valid_from)"
            )


def _double_calibrations(calibrations: Iterable[tuple[_Entry, Calibration]]) -> Iterator[Mistake]:
    by_metric: dict[tuple[str, str, str], list[tuple[_Entry, Calibration]]] = defaultdict(list)
    for each in calibrations:
        by_metric[each[1].namespace, each[1].device, each[1].metric].append(each)
    for (namespace, name, metric), of_metric in by_metric.items():
        for (earlier, before), (entry, calibration) in _overlapping(of_metric):
            yield entry.mistake(
                f"{namespace}/{name}'s {show(metric)} of {_streams(calibration)} is calibrated {_spelled(calibration)} "
                f"here, and of {_streams(before)} {_spelled(before)} on {earlier.seen_from(entry)}; a reading has one "
                "calibration: end the one where the other begins (valid_to = its valid_from)"
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
            close = difflib.get_close_matches(name, names, n=1) if few else []
            instead = f"write {close[0]} if that is meant, or add the device" if close else "add the device"
            yield entry.mistake(f"{name} is not among the devices, so that nothing would be calibrated; {instead}")


_Spanned = TypeVar("_Spanned", Device, Calibration)


def _overlapping(
    entries: Iterable[tuple[_Entry, _Spanned]],
) -> Iterator[tuple[tuple[_Entry, _Spanned], tuple[_Entry, _Spanned]]]:
    """Pairs of an entry and a later one that begins within its span. If both begin at once, in file order.

    Calibrations of two different streams do not overlap. A calibration of every stream overlaps with all.
    """
    open_ones: list[tuple[_Entry, _Spanned]] = []
    for each in sorted(entries, key=lambda each: each[1].valid_from or _EARLIEST):
        begins = each[1].valid_from or _EARLIEST
        open_ones = [other for other in open_ones if other[1].valid_to is None or other[1].valid_to > begins]
        for other in open_ones:
            if _same_streams(other[1], each[1]):
                yield other, each
                break
        open_ones.append(each)


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


def _instead(name: str, known: Iterable[str]) -> str:
    names = tuple(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"write {close[0]} instead" if close else f"there are: {', '.join(names)}"
