"""Has payloads for which Spark has no expressions read in Python on the executors: packed bytes, CBOR, SenML, Avro.

Executors need only Python's standard library and the package `spark`, installed or by `--py-files`.
"""

from collections.abc import Callable
from functools import cache

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.decode.codec_declarations import Stream, Streams
from spark.decode.codec_plain import read_payload

PYTHON_CODECS = frozenset(("senml-json", "senml-cbor", "cbor", "binary", "avro"))
RESULT_TYPE = """
    metrics array<struct<name: string, value: decimal(18,6), ago_us: bigint>>, undeclared array<string>,
    reject_reason string
"""

_ANY = Stream("", "cbor")


def asked_of_python(codec: Column, number: Column, payload: Column) -> Column:
    """Pack codec, place of the declaration in `in_order` (or null) and payload into one argument of `python_decoder`.

    With three arguments, rows without any would take half as long again.
    """
    return F.concat(F.concat_ws(":", codec, F.coalesce(number, F.lit(-1)), F.lit("")).cast("binary"), payload)


def python_decoder(streams: Streams) -> Callable[[Column], Column]:
    """Return a Spark function from `asked_of_python` to RESULT_TYPE. It returns null for null."""
    declarations = streams.to_json()

    def read(asked: bytearray | None) -> tuple[object, ...] | None:
        if asked is None:
            return None
        codec, number, payload = bytes(asked).split(b":", 2)
        return _read(declarations, codec.decode(), int(number), payload)

    return F.udf(read, RESULT_TYPE, useArrow=False)


@cache
def _declared(declarations: str) -> tuple[list[Stream], str]:
    """Parse the declarations once per process: the closure is unpickled for each task, and parsing is slow."""
    streams = Streams.from_json(declarations)
    return streams.in_order(), streams.registry or ""


def _read(declarations: str, codec: str, number: int, payload: bytes) -> tuple[object, ...]:
    in_order, registry = _declared(declarations)
    found = read_payload(payload, codec, _ANY if number < 0 else in_order[number], registry)
    return found.metrics, found.undeclared, found.reject_reason
