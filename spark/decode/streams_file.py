"""Reads `streams.toml`, an analyst's declarations of streams, and reports each mistake with its line and a correction.

`docs/streams.md` describes the file. `codec_declarations` has the declarations as values.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, field

from gateway.toml_files.mistakes import ConfigError, Place, lines_of, show, spell
from gateway.toml_files.reader import read_text, read_toml
from gateway.toml_files.schema import CONTROL, Schema, closest, converted
from spark.decode.codec_binary import SIZES
from spark.decode.codec_declarations import (
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
from spark.decode.codec_numbers import BYTES_MAX

__all__ = ["NO_STREAMS", "ConfigError", "Metric", "Stream", "Streams", "load_streams", "parse_streams"]

BYTES_OF_FILE_MAX = 4_000_000
STREAMS_MAX = 1_000
SIZES_MAX = 8
PERCENTILES_MAX = 20
NAME_CHARS_MAX = 100
PATH_MAX = 16
AHEAD_MAX_S = 366 * DAY_S
KEPT_DAYS_MIN = 7
"""Least days of retention. A gateway's outage may last so long, and its readings must be kept afterwards."""
KEPT_DAYS_MAX = 36_500

_TOPIC = re.compile(r"[A-Za-z0-9._*-]{1,249}")
_LIMIT = Decimal(10) ** 12
_FLAT = ("senml-json", "senml-cbor", "binary")
"""Codecs whose payloads have no objects. In their names a dot is a plain character."""
_LAYOUT = 'layout = [{ name = "celsius", type = "i16", scale = "0.01" }]'

Text = Annotated[str, Meta(max_length=2_000, description="a text in double quotes, of at most 2000 characters")]
Number = Annotated[int | Decimal, Meta(description="a number, such as 21.5")]
DecimalText = Annotated[
    str, Meta(pattern=r"^-?[0-9]{1,12}(\.[0-9]{1,18})?$", description='a number in quotes, as "0.01"')
]


Scale = Annotated[
    Literal["0.1", "0.01", "0.001", "0.0001", "0.00001", "0.000001"],
    Meta(description='one of "0.1", "0.01" to "0.000001", in double quotes'),
]


class _Metric(Struct, forbid_unknown_fields=True):
    unit: Text = ""
    decimals: Annotated[int, Meta(ge=0, le=DECIMALS_MAX, description="a whole number from 0 to 6")] = DECIMALS_MAX
    scale: Scale | None = None
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
    codec: Codec = "json"
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
    registry: Annotated[str, Meta(description='the registry\'s address, such as "http://registry.example:8081"')] = ""


class _File(Struct, forbid_unknown_fields=True):
    streams: dict[str, _Stream] = {}
    unknown: Unknown = "quarantine"
    windows: _Windows = field(default_factory=_Windows)
    times: _Times = field(default_factory=_Times)
    retention: _Retention = field(default_factory=_Retention)
    avro: _Avro | None = None


class _StreamsFile(Schema):
    """`streams.toml`: the words for sections that have a topic's or a metric's name, and for layouts."""

    control = "nobody can see; remove it"
    # They have defaults above, so that if one is missing the rest is still checked.
    needed: ClassVar = {_Stream: "codec", _Avro: "registry"}

    def instead(self, hint: object, value: object, place: Place) -> str:
        if hint is _Field:
            return '{ name = "...", type = "i16" }'
        # A stream or a metric may be called layout too.
        if hint in {_Stream, _Metric}:
            return f"a section, [{spell(place)}]"
        return f"a list, as {_LAYOUT}" if place[-1] == "layout" else super().instead(hint, value, place)


_SCHEMA = _StreamsFile(_File)


def load_streams(path: str | Path) -> Streams:
    """Read and check a file. Raises ConfigError, whose message has every mistake with its line."""
    path = Path(path)
    no_file = "there is no such file; docs/streams.md has one to begin with"
    return parse_streams(read_text(path, {FileNotFoundError: no_file}, BYTES_OF_FILE_MAX), path)


def parse_streams(text: str, path: Path) -> Streams:
    """Check the text of a file; `path` is for messages. Raises ConfigError."""
    document = read_toml(text, path, Decimal)
    found = list(_SCHEMA.mistakes(document))
    told = _Told(place for place, _ in found)
    file = converted(_right_part(document, (), told.places), _File)
    _SCHEMA.require_none((*found, *_meaning_mistakes(file, told)), lines_of(text), path)
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
            scale=None if declared.scale is None else Decimal(declared.scale),
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


# -- mistakes between settings ------------------------------------------------------------------


class _Told:
    """Places of mistakes found already. Checks that depend on a wrong setting are left out."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = frozenset(places)
        self._names: dict[Place, set[str]] = defaultdict(set)
        for place in self.places:
            for depth, name in enumerate(place):
                self._names[place[:depth]].add(str(name))

    def concerns(self, name: str, struct: type[Struct], place: Place) -> bool:
        """True if a setting of the section at a place is wrong, or may be meant by a name that is wrong."""
        settings = struct.__struct_encode_fields__
        told = self._names.get(place, ())
        return place in self.places or name in {each if each in settings else closest(each, settings) for each in told}


def _right_part(value: object, place: Place, wrong: frozenset[Place]) -> object:
    """A document without its wrong parts. A wrong element of a list becomes an empty table, so that indexes stay."""
    if isinstance(value, dict):
        return {
            name: _right_part(element, (*place, name), wrong)
            for name, element in value.items()
            if (*place, name) not in wrong
        }
    if isinstance(value, list):
        inner = [(*place, index) for index in range(len(value))]
        return [
            {} if at in wrong else _right_part(element, at, wrong) for at, element in zip(inner, value, strict=True)
        ]
    return value


def _meaning_mistakes(file: _File, told: _Told) -> Iterator[tuple[Place, str]]:
    are_known = not told.concerns("streams", _File, ()) and not told.concerns("unknown", _File, ())
    if not file.streams and file.unknown == "quarantine" and are_known:
        words = 'no stream is declared, so that every reading would go to the quarantine; write [streams."topic"]'
        yield (), f'{words}, or unknown = "accept"'
    if len(file.streams) > STREAMS_MAX:
        yield ("streams",), f"{len(file.streams)} are declared, and {STREAMS_MAX} can be; declare some by a pattern"
    for name, stream in file.streams.items():
        yield from _stream_mistakes(name, stream, ("streams", name), told)
    yield from _size_mistakes(file.windows.sizes)
    yield from _percentile_mistakes(file.windows.percentiles)
    uses_avro = [name for name, stream in file.streams.items() if stream.codec == "avro"]
    if uses_avro and file.avro is None and not told.concerns("avro", _File, ()):
        words = 'is "avro", and nothing says where its schemas are; write [avro] with registry = "http://..."'
        yield ("streams", uses_avro[0], "codec"), words
    if file.avro is not None and ("avro", "registry") not in told.places:
        yield from _registry_mistakes(file.avro.registry)


def _stream_mistakes(name: str, stream: _Stream, place: Place, told: _Told) -> Iterator[tuple[Place, str]]:
    if _TOPIC.fullmatch(name) is None:
        yield place, "is no topic's name; write letters, digits, '.', '_' or '-', and * for any of them"
    if len(stream.metrics) > METRICS_MAX:
        yield (*place, "metrics"), f"{len(stream.metrics)} are declared, and a reading has {METRICS_MAX} at most"
    knows_codec = (*place, "codec") not in told.places
    sources: dict[tuple[str, ...], str] = {}
    for metric, declared in stream.metrics.items():
        inner = (*place, "metrics", metric)
        yield from _metric_mistakes(metric, declared, inner)
        if not declared.source and told.concerns("from", _Metric, inner):
            continue
        # A wrong codec counts as JSON here. Two metrics that share a member in JSON share it in any codec.
        other = sources.setdefault(_path(metric, declared.source, stream.codec), metric)
        if other != metric:
            yield inner, f"is read from what {show(other)} is read from; give one of them another from"
        if knows_codec:
            yield from _scale_mistakes(declared, stream.codec, inner)
            yield from _source_mistakes(metric, declared, stream, inner)
    yield from _layout_mistakes(stream.layout, (*place, "layout"), told)
    if knows_codec:
        yield from _codec_mistakes(stream, place, told)


def _metric_mistakes(name: str, metric: _Metric, place: Place) -> Iterator[tuple[Place, str]]:
    if not 0 < len(name) <= NAME_CHARS_MAX or CONTROL.search(name):
        yield place, f"is no metric's name; write 1 to {NAME_CHARS_MAX} characters"
    bounds: dict[str, Decimal] = {}
    for setting, bound in (("min", metric.min), ("max", metric.max)):
        if bound is None:
            continue
        value = Decimal(bound)
        if not value.is_finite() or not -_LIMIT < value < _LIMIT:
            words = f"{show(bound)} is not between -10^12 and 10^12, where all values are; write one that is"
            yield (*place, setting), words
            continue
        bounds[setting] = value
        if -int(plain(value).as_tuple().exponent) > DECIMALS_MAX:
            words = f"{show(bound)} has more than {DECIMALS_MAX} decimals, which no value has; write fewer"
            yield (*place, setting), words
    if bounds.keys() == {"min", "max"} and bounds["min"] > bounds["max"]:
        words = f"{show(metric.min)} is above max ({show(metric.max)}), so that no value would be right"
        yield (*place, "min"), f"{words}; swap them"


def _scale_mistakes(metric: _Metric, codec: Codec, place: Place) -> Iterator[tuple[Place, str]]:
    if metric.scale is None:
        return
    digits = len(metric.scale) - len("0.")
    if codec == "binary":
        yield (*place, "scale"), 'stands in the field of the layout where codec is "binary"; write it there'
    elif digits > metric.decimals:
        words = f"{show(metric.scale)} makes {digits} decimals of a whole number, and decimals is {metric.decimals}"
        yield (*place, "scale"), f"{words}; write decimals = {digits} or more, so that no digit is lost"


def _source_mistakes(name: str, metric: _Metric, stream: _Stream, place: Place) -> Iterator[tuple[Place, str]]:
    path = _path(name, metric.source, stream.codec)
    if metric.source and (not all(path) or len(path) > PATH_MAX):
        words = 'is no member\'s name; write it as "t", or "env.t" for the member t of the object env'
        yield (*place, "from"), f"{show(metric.source)} {words}"
    if stream.codec in _FLAT and len(path) > 1:
        yield (*place, "from"), f"{stream.codec} has no objects in it; write one name"
    if stream.codec == "number" and metric.source:
        yield (*place, "from"), "a bare number has no members; remove it"
    # A field that lacks its name may be the one that is meant.
    knows_fields = all(each.name is not None or each.skip is not None for each in stream.layout)
    names = {each.name for each in stream.layout if each.name is not None}
    if stream.codec == "binary" and stream.layout and knows_fields and path[0] not in names:
        known = ", ".join(show(name) for name in sorted(names)) or "none"
        yield place, f"no field of the layout is called {show(path[0])}; there are: {known}"


def _codec_mistakes(stream: _Stream, place: Place, told: _Told) -> Iterator[tuple[Place, str]]:
    if stream.codec == "number" and len(stream.metrics) > 1:
        yield (*place, "metrics"), "a bare number is one metric; declare one"
    if stream.codec == "binary":
        if not stream.layout and not told.concerns("layout", _Stream, place):
            yield (*place, "layout"), f"is missing; write {_LAYOUT}"
        return
    not_here = {"layout": stream.layout, "header": stream.header, "endian": stream.endian != "little"}
    for setting in (name for name, is_written in not_here.items() if is_written):
        yield (*place, setting), f'is of codec "binary", and codec is {show(stream.codec)}; remove one'


def _layout_mistakes(layout: tuple[_Field, ...], place: Place, told: _Told) -> Iterator[tuple[Place, str]]:
    names: set[str] = set()
    for index, each in enumerate(layout):
        inner = (*place, index)
        lacks_name = each.name is None and not told.concerns("name", _Field, inner)
        lacks_type = each.type is None and not told.concerns("type", _Field, inner)
        if each.skip is not None:
            if (each.name, each.type, each.scale) != (None, None, None):
                yield inner, "has skip beside name, type or scale; write one field for each"
        elif (lacks_name or lacks_type) and not told.concerns("skip", _Field, inner):
            yield inner, "lacks name or type; write both, or skip = the number of bytes that are no field"
        if each.name in names:
            yield inner, f"{show(each.name)} is the name of two fields; give one another name"
        if each.name is not None:
            names.add(each.name)
    if sum(each.skip or SIZES[each.type or "u8"] for each in layout) > BYTES_MAX:
        yield place, f"is of more than {BYTES_MAX} bytes, which is the longest payload that is read; write fewer fields"


def _size_mistakes(sizes: tuple[int, ...]) -> Iterator[tuple[Place, str]]:
    place: Place = ("windows", "sizes")
    if not 0 < len(sizes) <= SIZES_MAX:
        yield place, f"has {len(sizes)} sizes; write 1 to {SIZES_MAX}, such as [60, 3600, 86400]"
    right = {size for size in sizes if 0 < size <= DAY_S and DAY_S % size == 0}
    for size, times in Counter(sizes).items():
        if size not in right:
            words = f"{size} s do not divide a day, so that a window would lie in two"
            yield place, f"{words}; write 60, 3600 or 86400, say"
        # If the first size is wrong itself, the others cannot be compared with it.
        elif sizes[0] in right and size % sizes[0]:
            words = f"{size} s are no multiple of {sizes[0]} s, the first size, which the others are made of"
            yield place, f"{words}; write multiples of it, or begin with a smaller one"
        if times > 1:
            yield place, f"{size} s stand here {times} times; write them once"


def _percentile_mistakes(percentiles: tuple[int | Decimal, ...]) -> Iterator[tuple[Place, str]]:
    place: Place = ("windows", "percentiles")
    if len(percentiles) > PERCENTILES_MAX:
        yield place, f"has {len(percentiles)} percentiles; write {PERCENTILES_MAX} at most"
    for number in percentiles:
        if not Decimal(number).is_finite() or not 0 <= number <= 100:
            yield place, f"{show(number)} is no percentile; write numbers from 0 to 100"


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
