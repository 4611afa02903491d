"""What `streams.toml` declares, as plain values: they go to Spark's executors and are recorded beside the tables.

Imported on executors: nothing but the standard library in here.
"""

import hashlib
import json
import re
from collections.abc import Iterable
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
"""Tables hold six decimals; what declares fewer is rounded to them, half up."""
METRICS_MAX = 256
"""Metrics of one reading, and of one declaration."""
PLAIN_METRIC = "value"
"""The metric of a payload that is a bare number, where no declaration gives it a name."""
IDENTITY_MEMBERS = ("boot", "seq", "tick", "timestamp")
"""Members of a payload that say which reading it is, and when it was taken; no measurements."""
NO_VERSION = "none"
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a stream's payloads."""

    name: str
    path: tuple[str, ...]
    """Where it stands in the payload: the member's name, below the names of the objects around it."""
    unit: str = ""
    decimals: int = DECIMALS_MAX
    min: Decimal | None = None
    max: Decimal | None = None
    """The valid range, both ends included. A reading with a value beyond it is rejected whole."""
    doc: str = ""
    scale: Decimal | None = None
    """A power of ten below 1 that the number is multiplied by before it is rounded; has at most `decimals` decimals."""

    @property
    def shift(self) -> int:
        """How many digits the scale moves behind the point."""
        return 0 if self.scale is None else -int(self.scale.as_tuple().exponent)

    @property
    def out_of_range(self) -> str:
        """What is wrong with a value beyond the valid range, or beyond what a table holds."""
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
    """None: bytes that are passed over."""
    type: FieldType | None = None
    scale: Decimal | None = None
    """What the number in the payload is multiplied by."""
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """How one stream's payloads are read, and what is in them."""

    name: str
    """A topic, or a pattern of topics with `*` for any characters."""
    codec: Codec
    doc: str = ""
    metrics: tuple[Metric, ...] = ()
    """By name. None: every number in the payload is a metric, with six decimals."""
    layout: tuple[LayoutField, ...] = ()
    endian: Endian = "little"
    header: bool = False
    """Whether the gateway's identity header of 17 bytes stands in front."""
    conflicts: Conflicts = "quarantine"

    @property
    def is_pattern(self) -> bool:
        """Whether the name stands for several topics."""
        return "*" in self.name

    @property
    def regex(self) -> str:
        """The name as a regular expression of whole topics, for Python and for Java."""
        # Not `\Z`, by which Python and Java mean different things: no topic has a line break for `$` to pass over.
        return "^" + ".*".join(re.escape(part) for part in self.name.split("*")) + "$"


@dataclass(frozen=True, slots=True)
class Windows:
    """Which windows are kept."""

    sizes: tuple[int, ...] = (60, 3_600, DAY_S)
    """Seconds, the base first; each divides a day and is a multiple of the base."""
    percentiles: tuple[Decimal, ...] = (Decimal(50), Decimal(95), Decimal(99))


@dataclass(frozen=True, slots=True)
class Times:
    """Which event times can be."""

    plausible_from: date = date(2020, 1, 1)
    ahead_max_s: int = DAY_S
    """How much later than Kafka's own timestamp of its record an event may be."""

    @property
    def plausible_from_time(self) -> datetime:
        """The beginning of that day, UTC."""
        return datetime.combine(self.plausible_from, datetime.min.time(), UTC)


@dataclass(frozen=True, slots=True)
class Retention:
    """How many days tables keep what is in them; None: for ever."""

    log_days: int | None = None
    """Since Kafka took a record in."""
    windows_days: int | None = None
    """Since the window's date."""
    window_changes_days: int | None = None
    """Since the change was made."""


USUAL_TIMES = Times()


@dataclass(frozen=True, slots=True)
class Streams:
    """All that a file declares."""

    streams: tuple[Stream, ...] = ()
    """By name."""
    unknown: Unknown = "quarantine"
    windows: Windows = Windows()
    times: Times = Times()
    retention: Retention = Retention()
    registry: str | None = None
    """Address of the registry that Avro's schemas come from."""
    version: str = NO_VERSION
    """A digest of what the file says, not of how it is written."""

    def stream_of(self, topic: str) -> Stream | None:
        """The declaration that a topic falls under: of its very name, else of the pattern with most letters.

        Of patterns with equally many, it is the first in the alphabet.
        """
        return next((stream for stream in self.in_order() if re.match(stream.regex, topic)), None)

    def in_order(self) -> list[Stream]:
        """The declarations as they are tried, the first that fits is taken."""
        return sorted(self.streams, key=lambda stream: (stream.is_pattern, -len(stream.name.replace("*", ""))))

    def to_json(self) -> str:
        """All of it as one line of JSON; the same for what means the same."""
        return json.dumps(asdict(self), default=_text_of, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` gave the text of."""
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
        """The same with its digest."""
        text = replace(self, version="").to_json()
        return replace(self, version=hashlib.sha256(text.encode()).hexdigest()[:12])


NO_STREAMS = Streams(unknown="accept")
"""No file is given: every stream is read by its content type."""


def name_order(name: str) -> bytes:
    """How names are ordered everywhere: as Spark orders the members of a JSON object."""
    return name.encode("utf-16-be", "surrogatepass")


def plain(number: Decimal) -> Decimal:
    """The same number in one way of writing: without an exponent, and without zeros at the end."""
    return Decimal(format(number.normalize(), "f")) + 0


def decimals_used(streams: Iterable[Stream]) -> list[tuple[int, int]]:
    """Which numbers of decimals occur, each with which shifts; six decimals without a shift are always there."""
    declared = {(metric.decimals, metric.shift) for stream in streams for metric in stream.metrics}
    return sorted({(DECIMALS_MAX, 0)} | declared)


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
