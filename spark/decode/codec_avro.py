"""Reads Avro in the frame of Confluent's serialisers: a zero byte, the schema's number, the record in binary encoding.

The reader is our own, because we need little of Avro, and exact numbers: libraries lose decimals and the width of
floats. Each process asks the registry for a schema once, because a schema's number never gets another meaning.
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from spark.decode.codec_declarations import Metric
from spark.decode.codec_numbers import BYTES_MAX, DEPTH_MAX, Result, UndecodableError, float_decimal, of_object

MAGIC = 0
PREFIX_BYTES = 5
TIMEOUT_S = 5.0
ATTEMPTS = 3
PAUSE_S = 0.5
SCHEMA_BYTES_MAX = 1_000_000
UNKNOWN_S = 30.0
"""Seconds until the registry is asked again for a schema that it did not know."""
UNKNOWN_MAX = 10_000
NO_FRAME = "undecodable: the payload does not begin with a zero byte and the number of a schema"
NO_RECORD = "undecodable: the payload does not fit its Avro schema"
NO_RECORD_SCHEMA = "undecodable: the Avro schema is not one of a record that can be read here"
UNKNOWN_SCHEMA = "undecodable: the schema registry does not know the payload's schema"

Decode = Callable[["_Reader"], object]


class RegistryError(Exception):
    """The registry does not answer as it should, which is no payload's fault. The batch fails, and is tried again."""


class _Reader:
    __slots__ = ("items_left", "payload", "place")

    def __init__(self, payload: bytes, place: int) -> None:
        self.payload = payload
        self.place = place
        self.items_left = BYTES_MAX
        """Items of arrays and maps still allowed in this payload. Some items have no bytes, so its size is no bound."""

    def take(self, count: int) -> bytes:
        taken = self.payload[self.place : self.place + count]
        if count < 0 or len(taken) != count:
            raise UndecodableError(NO_RECORD)
        self.place += count
        return taken

    def long(self) -> int:
        """Read a zigzag number of at most ten bytes."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
        raise UndecodableError(NO_RECORD)


def of_payload(payload: bytes, registry: str, metrics: tuple[Metric, ...]) -> Result:
    """Metrics of a framed record. Raises UndecodableError, or RegistryError if the registry is at fault."""
    if len(payload) > BYTES_MAX:
        raise UndecodableError(f"undecodable: more than {BYTES_MAX} bytes")
    if len(payload) < PREFIX_BYTES or payload[0] != MAGIC:
        raise UndecodableError(NO_FRAME)
    decode = _decoder(registry, int.from_bytes(payload[1:PREFIX_BYTES]))
    reader = _Reader(payload, PREFIX_BYTES)
    try:
        found = decode(reader)
    except (UnicodeDecodeError, RecursionError) as error:
        raise UndecodableError(NO_RECORD) from error
    if reader.place != len(payload):
        raise UndecodableError(NO_RECORD)
    return of_object(found, metrics)  # type: ignore[arg-type]


# -- the registry -------------------------------------------------------------------------------

_decoders: dict[tuple[str, int], Decode] = {}
_unknown: dict[tuple[str, int], float] = {}
_lock = threading.Lock()


def _decoder(registry: str, number: int) -> Decode:
    known = _decoders.get((registry, number))
    if known is not None:
        return known
    with _lock:
        if (registry, number) in _decoders:
            return _decoders[registry, number]
        if _unknown.get((registry, number), 0) > time.monotonic():
            raise UndecodableError(UNKNOWN_SCHEMA)
        text = _schema(registry, number)
        if text is None:
            if len(_unknown) >= UNKNOWN_MAX:
                _unknown.clear()
            _unknown[registry, number] = time.monotonic() + UNKNOWN_S
            raise UndecodableError(UNKNOWN_SCHEMA)
        decode = compile_schema(text)
        _decoders[registry, number] = decode
        return decode


def _schema(registry: str, number: int) -> str | None:
    """The schema's text; None if the registry does not know the number. Raises RegistryError."""
    url = f"{registry.rstrip('/')}/schemas/ids/{number}"
    for attempt in range(ATTEMPTS):
        try:
            return _fetched(url)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            told = f"HTTP {error.code}"
            if error.code < 500 and error.code != 429:
                raise RegistryError(_words(registry, number, told)) from error
        except (OSError, ValueError) as error:
            told = str(getattr(error, "reason", error)) or type(error).__name__
        if attempt + 1 < ATTEMPTS:
            time.sleep(PAUSE_S * (attempt + 1))
    raise RegistryError(_words(registry, number, told))


def _fetched(url: str) -> str:
    # `streams_file` lets only http and https through.
    request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        body = answer.read(SCHEMA_BYTES_MAX + 1)
    if len(body) > SCHEMA_BYTES_MAX:
        raise ValueError(f"its answer is longer than {SCHEMA_BYTES_MAX} bytes")
    answered = json.loads(body)
    if not isinstance(answered, dict) or not isinstance(answered.get("schema"), str):
        raise ValueError("its answer is no schema")  # noqa: TRY004 - one kind of failure for the caller
    if answered.get("schemaType", "AVRO") != "AVRO":
        return ""
    return str(answered["schema"])


def _words(registry: str, number: int, told: str) -> str:
    return (
        f"The schema registry {registry} does not give schema {number}: {told}. Payloads in Avro cannot be read "
        "without it; no record was rejected for that, and the batch is done again at the next start. See that the "
        "registry runs and that each executor reaches it, or put its right address into [avro] registry of the "
        "streams file."
    )


# -- Avro's binary encoding ---------------------------------------------------------------------


def compile_schema(text: str) -> Decode:
    """Return a reader of this schema's records. If the schema cannot be used, the reader rejects each payload."""
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict) or schema.get("type") != "record":
            return _unreadable
        return _compiled(schema, {}, "", DEPTH_MAX)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _unreadable


def _unreadable(_: _Reader) -> object:
    raise UndecodableError(NO_RECORD_SCHEMA)


def _compiled(schema: Any, named: dict[str, Decode], namespace: str, depth: int) -> Decode:  # noqa: PLR0911 - one for each kind
    if depth == 0:
        raise ValueError(schema)
    if isinstance(schema, list):
        branches = [_compiled(branch, named, namespace, depth - 1) for branch in schema]
        return lambda reader: branches[_index(reader, len(branches))](reader)
    if isinstance(schema, str):
        return _PRIMITIVES[schema] if schema in _PRIMITIVES else _reference(named, schema, namespace)
    if not isinstance(schema, dict):
        raise TypeError(schema)
    kind = schema["type"]
    if kind in {"record", "error", "enum", "fixed"}:
        return _named(schema, named, namespace, depth)
    if kind == "array":
        item = _compiled(schema["items"], named, namespace, depth - 1)
        return lambda reader: [item(reader) for _ in _blocks(reader)]
    if kind == "map":
        value = _compiled(schema["values"], named, namespace, depth - 1)
        return lambda reader: {_text(reader): value(reader) for _ in _blocks(reader)}
    if kind == "bytes" and schema.get("logicalType") == "decimal":
        scale = _scale(schema)
        return lambda reader: _decimal(_bytes(reader), scale)
    return _compiled(kind, named, namespace, depth - 1)


def _reference(named: Mapping[str, Decode], name: str, namespace: str) -> Decode:
    full = name if "." in name or not namespace else f"{namespace}.{name}"
    if full not in named:
        raise KeyError(name)

    def read(reader: _Reader) -> object:
        # Looked up only now: while a record that contains itself is compiled, its reader does not exist yet.
        return named[full](reader)

    return read


def _named(schema: Mapping[str, Any], named: dict[str, Decode], around: str, depth: int) -> Decode:
    name = schema["name"]
    namespace = name.rpartition(".")[0] if "." in name else schema.get("namespace", around)
    full = name if "." in name or not namespace else f"{namespace}.{name}"
    decode: Decode
    if schema["type"] == "enum":
        count = len(schema["symbols"])
        decode = lambda reader: str(schema["symbols"][_index(reader, count)])  # noqa: E731
    elif schema["type"] == "fixed":
        size = int(schema["size"])
        if schema.get("logicalType") == "decimal":
            scale = _scale(schema)
            decode = lambda reader: _decimal(reader.take(size), scale)  # noqa: E731
        else:
            decode = lambda reader: reader.take(size)  # noqa: E731
    else:
        named[full] = _unreadable
        fields = [
            (str(field["name"]), _compiled(field["type"], named, namespace, depth - 1)) for field in schema["fields"]
        ]
        decode = lambda reader: {name: read(reader) for name, read in fields}  # noqa: E731
    named[full] = decode
    return decode


def _index(reader: _Reader, count: int) -> int:
    index = reader.long()
    if not 0 <= index < count:
        raise UndecodableError(NO_RECORD)
    return index


def _blocks(reader: _Reader) -> Iterator[None]:
    """Yield once for each item of an array or a map."""
    while count := reader.long():
        if count < 0:
            count = -count
            reader.long()  # the block's size in bytes, for readers that skip blocks
        reader.items_left -= count
        if reader.items_left < 0:
            raise UndecodableError(NO_RECORD)
        for _ in range(count):
            yield


def _bytes(reader: _Reader) -> bytes:
    return reader.take(reader.long())


def _text(reader: _Reader) -> str:
    return _bytes(reader).decode()


def _boolean(reader: _Reader) -> bool:
    byte = reader.take(1)[0]
    if byte > 1:
        raise UndecodableError(NO_RECORD)
    return bool(byte)


def _scale(schema: Mapping[str, Any]) -> int:
    scale = int(schema.get("scale", 0))
    if not 0 <= scale <= 999:
        raise ValueError(scale)
    return scale


def _decimal(packed: bytes, scale: int) -> object:
    """A number of the logical type decimal, from its bytes or fixed; without the scale if it has more than 256 bits."""
    unscaled = int.from_bytes(packed, signed=True)
    if unscaled.bit_length() > 256:
        return unscaled
    sign, digits, _ = Decimal(unscaled).as_tuple()
    return Decimal((sign, digits, -scale))


_PRIMITIVES: dict[str, Decode] = {
    "null": lambda _: None,
    "boolean": _boolean,
    "int": _Reader.long,
    "long": _Reader.long,
    "float": lambda reader: float_decimal(reader.take(4), "<f"),
    "double": lambda reader: float_decimal(reader.take(8), "<d"),
    "bytes": _bytes,
    "string": _text,
}
