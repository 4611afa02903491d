"""Reads `gateway.toml`: every mistake in it gets its line and what to write instead, before anything starts."""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from gateway.routes import RouteError, RouteTable, compile_route, compile_routes
from gateway.settings import KafkaSettings, ListenerSettings, Settings

_HEADER = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_.\-\s\"']+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\-\"']+)\s*=")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):(\d{1,5})")

_NOBODY = (
    "nobody could connect; give each device a line under [mqtt_listener.users], "
    "or write anonymous = true to let anybody who reaches the port write as any device"
)
_NO_DIGEST = (
    "is not the SHA-256 of a secret; write its 64 lower-case hex digits "
    "(printf %s SECRET | sha256sum), never the secret itself"
)

Place = tuple[str | int, ...]
"""Where a setting stands: ('kafka', 'linger_ms'), ('routes', 0, 'topic')."""


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """One thing that is wrong with the file. Line 0: it is not about one line."""

    line: int
    message: str


class ConfigError(Exception):
    """The file cannot be used; every mistake that was found, in the order of their lines."""

    def __init__(self, path: Path, mistakes: list[Mistake]) -> None:
        self.path = path
        self.mistakes = sorted(mistakes)
        super().__init__("\n".join(f"{path}:{mistake.line}: {mistake.message}" for mistake in self.mistakes))


def load(path: Path) -> Settings:
    """Read and check a configuration. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(path, [Mistake(0, f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(path, [Mistake(0, "is not UTF-8 text")]) from error
    return parse(text, path)


def parse(text: str, path: Path) -> Settings:
    """Check the text of a configuration; `path` is for messages. Raises ConfigError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [_syntax_mistake(error)]) from error
    lines = _lines(text)
    mistakes = [
        Mistake(_line_of(lines, place), f"{_spell(place)}: {message}" if place else message)
        for place, message in _struct_mistakes(Settings, document, ())
    ]
    if mistakes:
        raise ConfigError(path, mistakes)
    settings = msgspec.convert(document, Settings, dec_hook=_decode_path)
    mistakes = [
        Mistake(_line_of(lines, place), f"{_spell(place)}: {message}") for place, message in _meaning_mistakes(settings)
    ]
    if mistakes:
        raise ConfigError(path, mistakes)
    return settings


def route_table(settings: Settings) -> RouteTable:
    """The compiled routes of settings that were checked by `parse`."""
    kafka = settings.kafka
    reserved = frozenset((kafka.events_topic, kafka.quarantine_topic))
    return compile_routes(settings.routes, settings.fallback_topic, reserved)


# -- what types say -----------------------------------------------------------------------------


def _struct_mistakes(struct: type[Struct], table: Mapping[str, object], place: Place) -> Iterator[tuple[Place, str]]:
    hints = get_type_hints(struct, include_extras=True)
    for key in table:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"write {close[0]!r} instead" if close else f"settings here are: {', '.join(hints)}"
            yield (*place, key), f"there is no such setting; {hint}"
    for field in fields(struct):
        if field.name in table:
            yield from _value_mistakes(hints[field.name], table[field.name], (*place, field.name))
        elif field.required:
            noun = "the section" if _struct_of(hints[field.name]) is not None else "the setting"
            yield place, f"{noun} {_spell((*place, field.name))} is missing{_example(place, field.name)}"


def _value_mistakes(hint: object, value: object, place: Place) -> Iterator[tuple[Place, str]]:
    struct = _struct_of(hint)
    if struct is not None and isinstance(value, dict):
        yield from _struct_mistakes(struct, value, place)
        return
    item = _struct_of(get_args(hint)[0]) if get_origin(hint) is tuple else None
    if item is not None and isinstance(value, list) and all(isinstance(element, dict) for element in value):
        for index, element in enumerate(value):
            yield from _struct_mistakes(item, element, (*place, index))
        return
    try:
        msgspec.convert(value, hint, dec_hook=_decode_path)
    except msgspec.ValidationError:
        yield place, f"{_show(value)} will not do; write {_wanted(hint)}"


def _decode_path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise ValueError("not a path")


def _struct_of(hint: object) -> type[Struct] | None:
    candidates = [hint, *get_args(hint)] if get_origin(hint) is not tuple else [hint]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Struct):
            return candidate
    return None


def _wanted(hint: object) -> str:
    """What a setting of this type takes, in words."""
    for argument in getattr(hint, "__metadata__", ()):
        if isinstance(argument, Meta) and argument.description:
            return argument.description
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(_show(argument) for argument in arguments)
    if origin is tuple:
        return 'a list of texts, such as ["...", "..."]' if arguments[0] is str else "[[...]] sections"
    if origin is dict:
        return 'texts by name, such as "42" = "..."'
    if _struct_of(hint) is not None:
        return "a section in [brackets]"
    return "true or false" if hint is bool else "a text in double quotes"


# -- what settings mean together ----------------------------------------------------------------


def _meaning_mistakes(settings: Settings) -> Iterator[tuple[Place, str]]:
    for index, route in enumerate(settings.routes):
        try:
            compile_route(route)
        except RouteError as error:
            yield ("routes", index, "kafka" if str(error).startswith("kafka") else "topic"), str(error)
    yield from _kafka_mistakes(settings.kafka)
    if settings.mqtt_listener is not None:
        yield from _listener_mistakes(settings.mqtt_listener)
    if settings.serial is not None:
        for variable in ("{device}", "{stream}"):
            if settings.serial.topic.count(variable) != 1:
                yield ("serial", "topic"), f"must hold {variable} once, as in 'device/{{device}}/{{stream}}'"


def _kafka_mistakes(kafka: KafkaSettings) -> Iterator[tuple[Place, str]]:
    place = ("kafka", "bootstrap")
    if not kafka.bootstrap:
        yield place, 'is empty; write at least one broker, such as ["kafka.example:9092"]'
    for address in kafka.bootstrap:
        found = _ADDRESS.fullmatch(address)
        if found is None:
            yield place, f"{address!r} is no address; write host:port, such as 'kafka.example:9092'"
        elif not 1 <= int(found[1]) <= 65535:
            yield place, f"{address!r}: {found[1]} is no port; write 1 to 65535"


def _listener_mistakes(listener: ListenerSettings) -> Iterator[tuple[Place, str]]:
    if not listener.anonymous and not listener.users:
        yield ("mqtt_listener",), _NOBODY
    for name, digest in listener.users.items():
        if _SHA256.fullmatch(digest) is None:
            yield ("mqtt_listener", "users", name), _NO_DIGEST


# -- lines and words ----------------------------------------------------------------------------


def _syntax_mistake(error: tomllib.TOMLDecodeError) -> Mistake:
    found = re.search(r"line (\d+)", str(error))
    return Mistake(int(found[1]) if found else 0, f"is not TOML: {error}")


def _lines(text: str) -> dict[Place, int]:
    """The line on which each table and key begins. tomllib keeps no positions: this scan finds plain ones."""
    places: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header = _HEADER.match(line)
        if header is not None:
            table = _split(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                places.setdefault(table, number)
                table = (*table, counts[table])
            places.setdefault(table, number)
            continue
        key = _KEY.match(line)
        if key is not None:
            places.setdefault((*table, *_split(key[1])), number)
    return places


def _split(dotted: str) -> Place:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _line_of(lines: Mapping[Place, int], place: Place) -> int:
    """The line of a setting, or of the nearest thing around it that stands in the file."""
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 0)


def _spell(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _example(place: Place, name: str) -> str:
    examples = {
        ("gateway",): '; write [gateway] with id = "the name of this box"',
        ("kafka",): '; write [kafka] with bootstrap = ["kafka.example:9092"]',
        ("gateway", "id"): '; write id = "the name of this box"',
        ("kafka", "bootstrap"): '; write bootstrap = ["kafka.example:9092"]',
    }
    return examples.get((*(str(part) for part in place), name), "")


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return "a section" if isinstance(value, dict) else repr(value)
