"""Holds the declarations of `streams.toml` as plain values.

They go to Spark's executors, and are recorded beside the tables. Executors import this module, so it uses only the
standard library.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal, Self

Codec = Literal["json", "number", "senml-json", "senml-cbor", "cbor", "binary", "avro"]
Endian = Literal["little", "big"]
FieldType = Literal["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64"]
Unknown = Literal["quarantine", "accept"]
Conflicts = Literal["quarantine", "keep"]

DECIMALS_MAX = 6
"""Decimals of a value in a table. A metric may declare fewer; its values are rounded half up."""
METRICS_MAX = 256
"""Metrics of one reading, and of one declaration."""
PLAIN_METRIC = "value"
"""Name of a bare number's metric, if no declaration names it."""
IDENTITY_MEMBERS = ("boot", "seq", "tick", "timestamp")
"""Members of a payload that hold the reading's identity and time. They are no measurements."""
NO_VERSION = "none"
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a stream's payloads."""

    name: str
    path: tuple[str, ...]
    """Names of the objects around the member in the payload, from the outermost, and the member's own name."""
    unit: str = ""
    decimals: int = DECIMALS_MAX
    min: Decimal | None = None
    max: Decimal | None = None
    """The valid range includes both ends. A reading with a value beyond it is rejected whole."""
    doc: str = ""
    scale: Decimal | None = None
    """Power of ten below 1, with at most `decimals` decimals. The number is multiplied by it, and then rounded."""

    @property
    def shift(self) -> int:
        """Digits that the scale moves behind the point."""
        return 0 if self.scale is None else -int(self.scale.as_tuple().exponent)

    @property
    def out_of_range(self) -> str:
        """Words for a value beyond the valid range, or beyond the range of a table."""
        if self.min is not None and self.max is not None:
            return f"{self.name} is not between {self.min} and {self.max}"
        if self.min is not None:
            return f"{self.name} is below {self.min} or outside decimal(18,6)"
        if self.max is not None:
            return f"{self.name} is above {self.max} or outside decimal(18,6)"
        return f"{self.name} is outside decimal(18,6)"


@dataclass(frozen=True, slots=True)
class LayoutField:
    """One field of a packed payload."""

    name: str | None
    """None for bytes that are skipped."""
    type: FieldType | None = None
    scale: Decimal | None = None
    """Factor of the number in the payload."""
    skip: int = 0
    """Bytes to skip, in a field without a name."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The declaration of one stream: its codec and its metrics."""

    name: str
    """A topic, or a pattern of topics with `*` for any characters."""
    codec: Codec
    doc: str = ""
    metrics: tuple[Metric, ...] = ()
    """Metrics in the order of their names. If empty, every number in the payload is a metric with six decimals."""
    layout: tuple[LayoutField, ...] = ()
    endian: Endian = "little"
    header: bool = False
    """True if the identity header of 17 bytes stands in front of each payload."""
    conflicts: Conflicts = "quarantine"

    @property
    def is_pattern(self) -> bool:
        """True if the name stands for several topics."""
        return "*" in self.name

    @property
    def regex(self) -> str:
        """The name as a regular expression of whole topics, for Python and for Java."""
        # `\Z` means different things in Python and Java. `$` is safe, because no topic has a line break.
        return "^" + ".*".join(re.escape(part) for part in self.name.split("*")) + "$"


@dataclass(frozen=True, slots=True)
class Windows:
    """Sizes of the windows, and percentiles in them."""

    sizes: tuple[int, ...] = (60, 3_600, DAY_S)
    """Seconds of each size, the base first. Each size divides a day and is a multiple of the base."""
    percentiles: tuple[Decimal, ...] = (Decimal(50), Decimal(95), Decimal(99))


@dataclass(frozen=True, slots=True)
class Times:
    """The range of plausible event times."""

    plausible_from: date = date(2020, 1, 1)
    ahead_max_s: int = DAY_S
    """Seconds that an event may be later than Kafka's timestamp of its record."""

    @property
    def plausible_from_time(self) -> datetime:
        """The beginning of `plausible_from`, UTC."""
        return datetime.combine(self.plausible_from, datetime.min.time(), UTC)


@dataclass(frozen=True, slots=True)
class Retention:
    """Days that tables keep their rows; None for ever."""

    log_days: int | None = None
    """Days since Kafka took the record in."""
    windows_days: int | None = None
    """Days since the window's date."""
    window_changes_days: int | None = None
    """Days since the change."""


USUAL_TIMES = Times()


@dataclass(frozen=True, slots=True)
class Streams:
    """The declarations of one file."""

    streams: tuple[Stream, ...] = ()
    """Streams in the order of their names."""
    unknown: Unknown = "quarantine"
    windows: Windows = Windows()
    times: Times = Times()
    retention: Retention = Retention()
    registry: str | None = None
    """Address of the registry of Avro's schemas."""
    version: str = NO_VERSION
    """Digest of the declarations, not of the file's text."""

    def in_order(self) -> list[Stream]:
        """The declarations in the order in which they are tried. The first that fits counts.

        Names come first, then patterns, by the number of characters beside `*`. Of equally long ones, the first in the
        alphabet comes first.
        """
        return sorted(self.streams, key=lambda stream: (stream.is_pattern, -len(stream.name.replace("*", ""))))

    def to_json(self) -> str:
        """Return the declarations as one line of JSON. Equal declarations give equal text."""
        return json.dumps(asdict(self), default=_text_of, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the declarations that `to_json` wrote."""
        document = json.loads(text)
        return cls(
            streams=tuple(_stream_from(stream) for stream in document["streams"]),
            unknown=document["unknown"],
            windows=Windows(
                tuple(document["windows"]["sizes"]),
                tuple(Decimal(number) for number in document["windows"]["percentiles"]),
            ),
            times=Times(date.fromisoformat(document["times"]["plausible_from"]), document["times"]["ahead_max_s"]),
            retention=Retention(**document.get("retention", {})),
            registry=document["registry"],
            version=document["version"],
        )

    def with_version(self) -> Self:
        """Return the declarations with their digest as `version`."""
        text = replace(self, version="").to_json()
        return replace(self, version=hashlib.sha256(text.encode()).hexdigest()[:12])


NO_STREAMS = Streams(unknown="accept")
"""Declarations without a file: every stream is read by its content type."""


def name_order(name: str) -> bytes:
    """Sort key of names everywhere, as Spark orders the members of a JSON object."""
    return name.encode("utf-16-be", "surrogatepass")


def plain(number: Decimal) -> Decimal:
    """Return a number in its one plain form: without an exponent, and without zeros at the end."""
    return Decimal(format(number.normalize(), "f")) + 0


def _text_of(value: object) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def _stream_from(document: dict[str, Any]) -> Stream:
    metrics = (
        {**metric, "path": tuple(metric["path"])}
        | {name: _number(metric.get(name)) for name in ("min", "max", "scale")}
        for metric in document["metrics"]
    )
    layout = ({**field, "scale": _number(field["scale"])} for field in document["layout"])
    own = {field.name: document[field.name] for field in fields(Stream)}
    return Stream(
        **own
        | {
            "metrics": tuple(Metric(**metric) for metric in metrics),
            "layout": tuple(LayoutField(**field) for field in layout),
        }
    )


def _number(text: str | None) -> Decimal | None:
    return None if text is None else Decimal(text)
