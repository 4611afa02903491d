"""Reads a payload by its declaration in plain Python: on executors, which have no more, and without Spark.

In batches, Spark's own expressions read JSON and bare numbers instead (`payload_decode`), for they are faster there.
"""

import json
import re
from collections.abc import Callable

from spark.decode import codec_avro, codec_binary, codec_cbor, codec_senml
from spark.decode.codec_declarations import PLAIN_METRIC, Metric, Stream, Streams
from spark.decode.codec_numbers import (
    AROUND,
    Result,
    UndecodableError,
    exact_json,
    exact_number,
    judged,
    of_object,
    rejected,
)

CODEC_OF_MEDIA_TYPE = {
    "application/json": "json",
    "text/plain": "number",
    "application/cbor": "cbor",
    "application/senml+json": "senml-json",
    "application/senml+cbor": "senml-cbor",
}
"""Codec of a content type, if no declaration fits the topic."""
OCTETS = "application/octet-stream"
"""Content type of JSON that is not strict, as a gateway sends it."""
PLAIN_NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
NO_MAP = "undecodable: the payload is not one CBOR map"
UNDECLARED_STREAM = "undeclared-stream: no stream of this topic's name is declared"
NO_VALUE = "undecodable: the record has no value"
NOT_UTF8 = "undecodable: the payload is not UTF-8"
NOT_JSON = "undecodable: the payload is not one JSON object"
NOT_NUMBER = "undecodable: the payload is not a bare number"
UNKNOWN_CONTENT = "undecodable: no decoder for this content type"

_ANY = Stream("", "cbor")
_BARE = re.compile(PLAIN_NUMBER.replace("$", r"\Z"))


def read_payload(payload: bytes, codec: str, stream: Stream, registry: str = "") -> Result:
    """Return a payload's metrics, or why it cannot be read. Raises `codec_avro.RegistryError` alone."""
    try:
        return _CODECS[codec](payload, stream, registry)
    except UndecodableError as error:
        return Result(None, reject_reason=str(error))


def read_value(topic: str, content_type: str, value: bytes | None, streams: Streams) -> Result:
    """Return the metrics of a reading in a topic, or why it becomes none. Raises `codec_avro.RegistryError` alone."""
    stream = declaration(topic, streams)
    if stream is None and streams.unknown != "accept":
        return rejected(UNDECLARED_STREAM)
    if value is None:
        return rejected(NO_VALUE)
    codec = _codec_of(content_type, value) if stream is None else stream.codec
    if codec is None:
        return rejected(UNKNOWN_CONTENT)
    return read_payload(value, codec, stream or _ANY, streams.registry or "")


def declaration(topic: str, streams: Streams) -> Stream | None:
    """Return the declaration of a topic; None if there is none."""
    for stream in streams.in_order():
        if re.match(stream.regex, topic) if stream.is_pattern else stream.name == topic:
            return stream
    return None


def _codec_of(content_type: str, value: bytes) -> str | None:
    media_type = content_type.split(";", maxsplit=1)[0].strip(" ").lower()
    if media_type != OCTETS:
        return CODEC_OF_MEDIA_TYPE.get(media_type)
    first = value.decode(errors="replace").lstrip(AROUND)[:1]
    return {"{": "json", "[": "senml-json"}.get(first)


def _text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise UndecodableError(NOT_UTF8) from error


def _of_json(payload: bytes, metrics: tuple[Metric, ...]) -> Result:
    text = _text(payload)
    try:
        found = exact_json(text)
        if "\\u" in text:
            # JSON can write half a surrogate, which is no character: no text holds it.
            json.dumps(found, ensure_ascii=False, default=str).encode()
    except (ValueError, RecursionError) as error:
        raise UndecodableError(NOT_JSON) from error
    if not isinstance(found, dict):
        raise UndecodableError(NOT_JSON)
    return of_object(found, metrics)


def _of_number(payload: bytes, metrics: tuple[Metric, ...]) -> Result:
    text = _text(payload).strip(AROUND)
    if not _BARE.match(text):
        raise UndecodableError(NOT_NUMBER)
    return judged([(metrics[0].name if metrics else PLAIN_METRIC, exact_number(text), None)], metrics)


def _of_cbor(payload: bytes, metrics: tuple[Metric, ...]) -> Result:
    found = codec_cbor.decode(payload)
    if not isinstance(found, dict):
        raise UndecodableError(NO_MAP)
    return of_object(found, metrics)


_CODECS: dict[str, Callable[[bytes, Stream, str], Result]] = {
    "json": lambda payload, stream, _: _of_json(payload, stream.metrics),
    "number": lambda payload, stream, _: _of_number(payload, stream.metrics),
    "binary": lambda payload, stream, _: codec_binary.of_payload(payload, stream),
    "cbor": lambda payload, stream, _: _of_cbor(payload, stream.metrics),
    "senml-json": lambda payload, stream, _: codec_senml.of_json(payload, stream.metrics),
    "senml-cbor": lambda payload, stream, _: codec_senml.of_cbor(payload, stream.metrics),
    "avro": lambda payload, stream, registry: codec_avro.of_payload(payload, registry, stream.metrics),
}
