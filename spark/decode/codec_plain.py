"""Reads the payload of a reading by the declaration of its topic, in plain Python."""

import json
import re
from collections.abc import Callable

from spark.decode import codec_avro, codec_binary, codec_cbor, codec_senml
from spark.decode.codec_declarations import PLAIN_METRIC, Metric, Stream, Streams
from spark.decode.codec_numbers import (
    AROUND,
    JSON_DEPTH_MAX,
    Result,
    UndecodableError,
    Written,
    exact_json,
    exact_number,
    is_deep,
    judged,
    of_object,
    rejected,
    written_number,
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
_PLAIN = (Metric(PLAIN_METRIC, ()),)
_BARE = re.compile(PLAIN_NUMBER.replace("$", r"\Z"))


def read_payload(payload: bytes, codec: str, stream: Stream, registry: str = "") -> Result:
    """Return a payload's metrics, or why it cannot be read. Raises `codec_avro.RegistryError` alone."""
    try:
        return _CODECS[codec](payload, stream, registry)
    except UndecodableError as error:
        return Result(None, reject_reason=str(error))


class PayloadReader:
    """Reads the values of readings by the declarations of their topics."""

    def __init__(self, streams: Streams) -> None:
        self._in_order = streams.in_order()
        self._accepts = streams.unknown == "accept"
        self._registry = streams.registry or ""
        self._of_topic: dict[str, Stream | None] = {}

    def read(self, topic: str, content_type: str, value: bytes | None) -> Result:
        """Return a reading's metrics, or why it becomes none. Raises `codec_avro.RegistryError` alone."""
        stream = self.declaration(topic)
        if stream is None and not self._accepts:
            return rejected(UNDECLARED_STREAM)
        if value is None:
            return rejected(NO_VALUE)
        codec = self.codec_of(topic, content_type, value)
        if codec is None:
            return rejected(UNKNOWN_CONTENT)
        return read_payload(value, codec, stream or _ANY, self._registry)

    def codec_of(self, topic: str, content_type: str, value: bytes) -> str | None:
        """Return the codec of a value; None if there is none."""
        stream = self.declaration(topic)
        if stream is not None:
            return stream.codec
        return _codec_of(content_type, value) if self._accepts else None

    def declaration(self, topic: str) -> Stream | None:
        """Return the declaration of a topic; None if there is none."""
        if topic not in self._of_topic:
            self._of_topic[topic] = next((stream for stream in self._in_order if _is_of(topic, stream)), None)
        return self._of_topic[topic]


def _is_of(topic: str, stream: Stream) -> bool:
    return re.match(stream.regex, topic) is not None if stream.is_pattern else stream.name == topic


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
    if is_deep(payload, JSON_DEPTH_MAX):
        raise UndecodableError(NOT_JSON)
    try:
        found = exact_json(text, written_number)
        if "\\u" in text:
            # JSON can write half a surrogate, which is no character: no text holds it.
            json.dumps(found, ensure_ascii=False, default=str).encode()
    except ValueError as error:
        raise UndecodableError(NOT_JSON) from error
    if not isinstance(found, dict):
        raise UndecodableError(NOT_JSON)
    return of_object(found, metrics)


def _of_number(payload: bytes, metrics: tuple[Metric, ...]) -> Result:
    text = _text(payload).strip(AROUND)
    if not _BARE.match(text):
        raise UndecodableError(NOT_NUMBER)
    number = exact_number(text)
    read = number if isinstance(number, Written) else Written(text)
    return judged([((metrics or _PLAIN)[0].name, read, None)], metrics or _PLAIN)


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
