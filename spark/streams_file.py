"""Reads `streams.toml`, what an analyst declares of the streams: each mistake in it gets its line and what to write.

`docs/streams.md` describes the file. What is declared is in `codec_declarations`.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, field

from gateway.config_words import Place, show
from gateway.toml_mistakes import ConfigError, Mistake, line_of, lines_of, spell, syntax_mistake
from spark.codec_binary import SIZES
from spark.codec_declarations import (
    DAY_S,
    DECIMALS_MAX,
    METRICS_MAX,
    NO_STREAMS,
    Codec,
    Conflicts,
    Endian,
    FieldType,
    LayoutField,
    Metric,
    Retention,
    Stream,
    Streams,
    Times,
    Unknown,
    Windows,
    name_order,
    plain,
)
from spark.codec_numbers import BYTES_MAX

__all__ = ["NO_STREAMS", "ConfigError", "Metric", "Stream", "Streams", "load_streams", "parse_streams"]

BYTES_OF_FILE_MAX = 4_000_000
STREAMS_MAX = 1_000
SIZES_MAX = 8
PERCENTILES_MAX = 20
NAME_CHARS_MAX = 100
PATH_MAX = 16
AHEAD_MAX_S = 366 * DAY_S
KEPT_DAYS_MIN = 7
"""A gateway's outage may be as long: what comes after it is to be kept."""
KEPT_DAYS_MAX = 36_500
MULTIPLES_MAX = 100_000
"""Of a window's base: more parts than that, no window is folded from."""

_TOPIC = re.compile(r"[A-Za-z0-9._*-]{1,249}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_LIMIT = Decimal(10) ** 12
_FLAT = ("senml-json", "senml-cbor", "binary")
"""Codecs without objects: a dot in a name is a dot."""

Text = Annotated[str, Meta(max_length=2_000, description="a text in double quotes, of at most 2000 characters")]
Number = Annotated[int | Decimal, Meta(description="a number, such as 21.5")]
DecimalText = Annotated[
    str, Meta(pattern=r"^-?[0-9]{1,12}(\.[0-9]{1,18})?$", description='a number in quotes, as "0.01"')
]


class _Metric(Struct, forbid_unknown_fields=True):
    unit: Text = ""
    decimals: Annotated[int, Meta(ge=0, le=DECIMALS_MAX, description="a whole number from 0 to 6")] = DECIMALS_MAX
    min: Number | None = None
    max: Number | None = None
    doc: Text = ""
    source: Annotated[
        str | tuple[str, ...], Meta(description='a member\'s name, as "t", or "env.t" for a member of an object in it')
    ] = field(name="from", default="")


class _Field(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(description="a text in double quotes")] | None = None
    type: Annotated[FieldType, Meta(description=f"one of {', '.join(SIZES)}, in double quotes")] | None = None
    scale: DecimalText | None = None
    skip: Annotated[int, Meta(ge=1, le=BYTES_MAX, description="a number of bytes, from 1")] | None = None


class _Stream(Struct, forbid_unknown_fields=True):
    codec: Codec
    doc: Text = ""
    metrics: dict[str, _Metric] = {}
    layout: tuple[_Field, ...] = ()
    endian: Endian = "little"
    header: Annotated[bool, Meta(description="true or false")] = False
    conflicts: Conflicts = "quarantine"


class _Windows(Struct, forbid_unknown_fields=True):
    sizes: Annotated[tuple[int, ...], Meta(description="a list of whole seconds, such as [60, 3600, 86400]")] = (
        Windows().sizes
    )
    percentiles: Annotated[
        tuple[int | Decimal, ...], Meta(description="a list of numbers from 0 to 100, such as [50, 95, 99]")
    ] = Windows().percentiles


class _Times(Struct, forbid_unknown_fields=True):
    plausible_from: Annotated[date, Meta(description="a date, such as 2020-01-01")] = Times().plausible_from
    ahead_max_s: Annotated[
        int, Meta(ge=0, le=AHEAD_MAX_S, description=f"whole seconds, from 0 to {AHEAD_MAX_S} (a year)")
    ] = Times().ahead_max_s


_Days = Annotated[
    int, Meta(ge=KEPT_DAYS_MIN, le=KEPT_DAYS_MAX, description=f"whole days, from {KEPT_DAYS_MIN} to {KEPT_DAYS_MAX}")
]


class _Retention(Struct, forbid_unknown_fields=True):
    log_days: _Days | None = None
    windows_days: _Days | None = None
    window_changes_days: _Days | None = None


class _Avro(Struct, forbid_unknown_fields=True):
    registry: Annotated[str, Meta(description='the registry\'s address, such as "http://registry.example:8081"')]


class _File(Struct, forbid_unknown_fields=True):
    streams: dict[str, _Stream] = {}
    unknown: Unknown = "quarantine"
    windows: _Windows = field(default_factory=_Windows)
    times: _Times = field(default_factory=_Times)
    retention: _Retention = field(default_factory=_Retention)
    avro: _Avro | None = None


def load_streams(path: str | Path) -> Streams:
    """Read and check a file. Raises ConfigError, whose message has every mistake with its line."""
    path = Path(path)
    try:
        if path.stat().st_size > BYTES_OF_FILE_MAX:
            raise ConfigError(path, [Mistake(0, f"is longer than {BYTES_OF_FILE_MAX} bytes; is it the right file?")])
        # Editors on Windows put a byte order mark first, which is no TOML.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        words = "there is no such file; docs/streams.md has one to begin with"
        raise ConfigError(path, [Mistake(0, words)]) from error
    except OSError as error:
        raise ConfigError(path, [Mistake(0, f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(path, [Mistake(0, "is not UTF-8 text, as TOML must be; save it as UTF-8")]) from error
    return parse_streams(text, path)


def parse_streams(text: str, path: Path) -> Streams:
    """Check the text of a file; `path` is for messages. Raises ConfigError."""
    try:
        document = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [syntax_mistake(error, text)]) from error
    except (ValueError, RecursionError, ArithmeticError) as error:
        words = "holds something that stands too deep, or a number that is too long, to be read"
        raise ConfigError(path, [Mistake(0, words)]) from error
    lines = lines_of(text)

    def told(mistakes: Iterator[tuple[Place, str]]) -> list[Mistake]:
        return [
            Mistake(line_of(lines, place), f"{spell(place)}: {message}" if place else message)
            for place, message in mistakes
        ]

    if found := told(_mistakes(_File, document, ())):
        raise ConfigError(path, found)
    file = msgspec.convert(document, _File, dec_hook=_number)
    if found := told(_meaning_mistakes(file)):
        raise ConfigError(path, found)
    return Streams(
        streams=tuple(_stream(name, stream) for name, stream in sorted(file.streams.items())),
        unknown=file.unknown,
        windows=Windows(
            tuple(file.windows.sizes), tuple(sorted({plain(Decimal(number)) for number in file.windows.percentiles}))
        ),
        times=Times(file.times.plausible_from, file.times.ahead_max_s),
        retention=Retention(*msgspec.structs.astuple(file.retention)),
        registry=None if file.avro is None else file.avro.registry,
    ).with_version()


def _stream(name: str, stream: _Stream) -> Stream:
    metrics = (
        Metric(
            name=metric,
            path=_path(metric, declared.source, stream.codec),
            unit=declared.unit,
            decimals=declared.decimals,
            min=None if declared.min is None else plain(Decimal(declared.min)),
            max=None if declared.max is None else plain(Decimal(declared.max)),
            doc=declared.doc,
        )
        for metric, declared in stream.metrics.items()
    )
    layout = (
        LayoutField(each.name, each.type, None if each.scale is None else plain(Decimal(each.scale)), each.skip or 0)
        for each in stream.layout
    )
    return Stream(
        name=name,
        codec=stream.codec,
        doc=stream.doc,
        metrics=tuple(sorted(metrics, key=lambda metric: name_order(metric.name))),
        layout=tuple(layout),
        endian=stream.endian,
        header=stream.header,
        conflicts=stream.conflicts,
    )


def _path(metric: str, source: str | tuple[str, ...], codec: Codec) -> tuple[str, ...]:
    if not source:
        return (metric,)
    if isinstance(source, tuple):
        return source
    return (source,) if codec in _FLAT else tuple(source.split("."))


# -- what types say -----------------------------------------------------------------------------


def _mistakes(struct: type[Struct], table: Mapping[str, object], place: Place) -> Iterator[tuple[Place, str]]:
    settings = {each.encode_name: each for each in msgspec.structs.fields(struct)}
    hints = get_type_hints(struct, include_extras=True)
    for key in table:
        if key not in settings:
            close = difflib.get_close_matches(key, settings, n=1)
            instead = f"write {close[0]!r} instead" if close else f"settings here are: {', '.join(settings)}"
            yield (*place, key), f"there is no such setting; {instead}"
    for name, each in settings.items():
        if name in table:
            yield from _value_mistakes(hints[each.name], table[name], (*place, name))
        elif each.required:
            yield place, f"the setting {name} is missing; write {name} = {_wanted(hints[each.name])}"


def _value_mistakes(hint: Any, value: object, place: Place) -> Iterator[tuple[Place, str]]:
    inner = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Struct)]
    if isinstance(value, dict):
        if inner and get_args(hint)[:1] != (str,):
            yield from _mistakes(inner[0], value, place)
            return
        if inner:
            for name, element in value.items():
                yield from _section_mistakes(inner[0], element, (*place, name))
            return
    if inner and isinstance(value, list) and place[-1] == "layout":
        for index, element in enumerate(value):
            yield from _section_mistakes(inner[0], element, (*place, index))
        return
    if not _converts(value, hint):
        yield place, f"{_shown(value)} will not do; write {_wanted(hint)}"
        return
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (control := _CONTROL.search(text)):
            yield place, f"holds the character U+{ord(control[0]):04X}, which nobody can see; remove it"


def _section_mistakes(struct: type[Struct], value: object, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, dict):
        yield from _mistakes(struct, value, place)
    else:
        wanted = '{ name = "...", type = "i16" }' if struct is _Field else f"a section, [{spell(place)}]"
        yield place, f"{_shown(value)} will not do; write {wanted}"


def _converts(value: object, hint: Any) -> bool:
    # msgspec would take a text for a decimal.
    texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    if texts and _is_of_decimals(hint):
        return False
    try:
        msgspec.convert(value, hint, dec_hook=_number)
    except msgspec.ValidationError:
        return False
    return True


def _is_of_decimals(hint: Any) -> bool:
    return hint is Decimal or any(_is_of_decimals(inner) for inner in get_args(hint))


def _number(kind: type, value: object) -> object:
    if kind is Decimal and isinstance(value, Decimal):
        return value
    raise ValueError(value)


def _shown(value: object) -> str:
    if isinstance(value, Decimal | date):
        return str(value)
    return show(value) if not isinstance(value, list) else "this list"


def _wanted(hint: Any) -> str:
    for candidate in (hint, *get_args(hint)):
        for argument in getattr(candidate, "__metadata__", ()):
            if isinstance(argument, Meta) and argument.description:
                return argument.description
    choices = [choice for choice in get_args(hint) if isinstance(choice, str)]
    if choices:
        return "one of " + ", ".join(show(choice) for choice in choices)
    return "a section in [brackets]"


# -- what settings mean together ----------------------------------------------------------------


def _meaning_mistakes(file: _File) -> Iterator[tuple[Place, str]]:
    if not file.streams and file.unknown == "quarantine":
        words = 'no stream is declared, so that every reading would go to the quarantine; write [streams."topic"]'
        yield (), f'{words}, or unknown = "accept"'
    if len(file.streams) > STREAMS_MAX:
        yield ("streams",), f"{len(file.streams)} are declared, and {STREAMS_MAX} can be; declare some by a pattern"
    for name, stream in file.streams.items():
        yield from _stream_mistakes(name, stream, ("streams", name))
    yield from _window_mistakes(file.windows)
    uses_avro = [name for name, stream in file.streams.items() if stream.codec == "avro"]
    if uses_avro and file.avro is None:
        words = 'is "avro", and nothing says where its schemas are; write [avro] with registry = "http://..."'
        yield ("streams", uses_avro[0], "codec"), words
    if file.avro is not None:
        yield from _registry_mistakes(file.avro.registry)


def _stream_mistakes(name: str, stream: _Stream, place: Place) -> Iterator[tuple[Place, str]]:
    if _TOPIC.fullmatch(name) is None:
        yield place, "is no topic's name; write letters, digits, '.', '_' or '-', and * for any of them"
    if len(stream.metrics) > METRICS_MAX:
        yield (*place, "metrics"), f"{len(stream.metrics)} are declared, and a reading has {METRICS_MAX} at most"
    sources: dict[tuple[str, ...], str] = {}
    for metric, declared in stream.metrics.items():
        inner = (*place, "metrics", metric)
        path = _path(metric, declared.source, stream.codec)
        yield from _metric_mistakes(metric, declared, path, inner)
        other = sources.setdefault(path, metric)
        if other != metric:
            yield inner, f"is read from what {show(other)} is read from; give one of them another `from`"
        if stream.codec in _FLAT and len(path) > 1:
            yield (*inner, "from"), f"{stream.codec} has no objects in it; write one name"
        if stream.codec == "number" and declared.source:
            yield (*inner, "from"), "a bare number has no members; remove it"
    if stream.codec == "number" and len(stream.metrics) > 1:
        yield (*place, "metrics"), "a bare number is one metric; declare one"
    if stream.codec == "binary":
        yield from _layout_mistakes(stream, place)
        return
    not_here = {"layout": stream.layout, "header": stream.header, "endian": stream.endian != "little"}
    for setting in (name for name, is_written in not_here.items() if is_written):
        yield (*place, setting), f'is of codec "binary", and codec is {show(stream.codec)}; remove one'


def _metric_mistakes(name: str, metric: _Metric, path: tuple[str, ...], place: Place) -> Iterator[tuple[Place, str]]:
    if not 0 < len(name) <= NAME_CHARS_MAX or _CONTROL.search(name):
        yield place, f"is no metric's name; write 1 to {NAME_CHARS_MAX} characters"
    if not path or not all(path) or len(path) > PATH_MAX:
        yield (*place, "from"), 'is no member\'s name; write it as "t", or "env.t" for the member t of the object env'
    bounds = {"min": metric.min, "max": metric.max}
    for setting, bound in bounds.items():
        if bound is None:
            continue
        value = Decimal(bound)
        if not value.is_finite() or abs(value) >= _LIMIT:
            yield (*place, setting), "is not between -10^12 and 10^12, where all values are; write one that is"
        elif -int(plain(value).as_tuple().exponent) > DECIMALS_MAX:
            yield (*place, setting), f"has more than {DECIMALS_MAX} decimals, which no value has; write fewer"
    if metric.min is not None and metric.max is not None and Decimal(metric.min) > Decimal(metric.max):
        yield (*place, "min"), f"{metric.min} is above max ({metric.max}), so that no value would be right; swap them"


def _layout_mistakes(stream: _Stream, place: Place) -> Iterator[tuple[Place, str]]:
    if not stream.layout:
        yield (*place, "layout"), 'is missing; write layout = [{ name = "celsius", type = "i16", scale = "0.01" }]'
        return
    names: set[str] = set()
    for index, each in enumerate(stream.layout):
        inner = (*place, "layout", index)
        if each.skip is not None:
            if (each.name, each.type, each.scale) != (None, None, None):
                yield inner, "has skip beside name, type or scale; write one field for each"
        elif each.name is None or each.type is None:
            yield inner, "lacks name or type; write both, or skip = the number of bytes that are no field"
        elif each.name in names:
            yield inner, f"{show(each.name)} is the name of two fields; give one another name"
        names.add(each.name or "")
    for metric, declared in stream.metrics.items():
        (source, *_) = _path(metric, declared.source, stream.codec)
        if source not in names:
            known = ", ".join(show(name) for name in sorted(names) if name)
            yield (*place, "metrics", metric), f"no field of the layout is called {show(source)}; there are: {known}"
    if sum(each.skip or SIZES[each.type or "u8"] for each in stream.layout) > BYTES_MAX:
        yield (*place, "layout"), f"is of more than {BYTES_MAX} bytes, which is the longest payload that is read"


def _window_mistakes(windows: _Windows) -> Iterator[tuple[Place, str]]:
    place: Place = ("windows", "sizes")
    if not 0 < len(windows.sizes) <= SIZES_MAX:
        yield place, f"has {len(windows.sizes)} sizes; write 1 to {SIZES_MAX}, such as [60, 3600, 86400]"
        return
    base = windows.sizes[0]
    for size in windows.sizes:
        if not 0 < size <= DAY_S or DAY_S % size:
            yield (
                place,
                f"{size} s do not divide a day, so that a window would lie in two; write 60, 3600 or 86400, say",
            )
        elif base > 0 and (size % base or size // base > MULTIPLES_MAX):
            yield place, f"{size} s are not so many times {base} s, the first size, which the others are made of"
    if len(set(windows.sizes)) < len(windows.sizes):
        yield place, "has a size twice; remove one"
    if len(windows.percentiles) > PERCENTILES_MAX:
        yield ("windows", "percentiles"), f"has more than {PERCENTILES_MAX}; write fewer"
    for number in windows.percentiles:
        if not 0 <= number <= 100:
            yield ("windows", "percentiles"), f"{number} is no percentile; write numbers from 0 to 100"


def _registry_mistakes(registry: str) -> Iterator[tuple[Place, str]]:
    place: Place = ("avro", "registry")
    try:
        parts = urlsplit(registry)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        yield place, f'{show(registry)} is no address; write one such as "http://registry.example:8081"'
    elif parts.username is not None or parts.password is not None:
        yield place, "holds a user or a password, and this file is recorded beside the tables; use an address without"
