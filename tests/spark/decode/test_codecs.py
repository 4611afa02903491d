"""Packed, CBOR, SenML and Avro payloads: the decoders read the values that were written."""

import json
import math
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from decimal import ROUND_HALF_UP, Context, Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import cbor2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spark.decode import codec_avro, codec_cbor
from spark.decode.codec_avro import RegistryError
from spark.decode.codec_binary import SIZES
from spark.decode.codec_declarations import LayoutField, Metric, Stream
from spark.decode.codec_numbers import Result, UndecodableError, float_decimal, quantised
from spark.decode.codec_plain import read_payload
from tests.support import hostile

ANY = Stream("any", "cbor")
CELSIUS = Metric("celsius", ("celsius",), decimals=2, min=Decimal(-40), max=Decimal(125))


def values(result: Result) -> dict[str, Decimal]:
    assert result.reject_reason is None, result
    return {name: value for name, value, _ in result.metrics or ()}


# -- numbers ------------------------------------------------------------------------------------


@given(st.decimals(allow_nan=False, allow_infinity=False) | st.integers(), st.integers(0, 6), st.integers(0, 6))
@example(Decimal("0E+400"), 6, 0)
@example(Decimal("1.0049999996"), 2, 0)
@example(Decimal("-0.0000005"), 6, 0)
@example(Decimal("999999999999.9999995"), 6, 0)
@example(Decimal("999999999999999.5"), 3, 3)
@example(1_795_824_515_000, 3, 3)
def test_numbers_are_rounded_once_half_up(number: Decimal | int, decimals: int, shift: int) -> None:
    exact = Context(prec=10_000, rounding=ROUND_HALF_UP)
    shift = min(shift, decimals)

    value = quantised(number, decimals, shift)

    if abs(Decimal(number)) > 10 ** (13 + shift):
        assert value is None
    else:
        scaled = Decimal(number).scaleb(-shift, exact)
        expected = scaled.quantize(Decimal(1).scaleb(-decimals), context=exact)
        assert value == (expected if abs(expected) < 10**12 else None)
        assert str(value) != "-0"


@given(st.floats(width=32))
@example(21.53)
@example(3.4028234663852886e38)
def test_a_float_is_the_shortest_decimal_that_is_nearest_to_it(value: float) -> None:
    packed = struct.pack("<f", value)

    found = float_decimal(packed, "<f")

    if not math.isfinite(value):
        assert found is None
        return
    assert found is not None
    assert struct.pack("<f", float(found)) == packed
    assert len(found.normalize().as_tuple().digits) <= 9


def test_what_a_sensor_prints_is_what_its_float_says() -> None:
    assert float_decimal(struct.pack(">f", 21.53), ">f") == Decimal("21.53")
    assert float_decimal(struct.pack("<d", 0.1), "<d") == Decimal("0.1")
    assert float_decimal(struct.pack("<e", 0.1), "<e") == Decimal("0.1")
    assert float_decimal(struct.pack("<d", float("nan")), "<d") is None


# -- packed -------------------------------------------------------------------------------------

CLIMATE = Stream(
    "climate",
    "binary",
    layout=(
        LayoutField("celsius", "i16", Decimal("0.01")),
        LayoutField(None, skip=1),
        LayoutField("humidity", "u8", Decimal("0.5")),
        LayoutField("volts", "f32"),
    ),
    metrics=(CELSIUS, Metric("humidity", ("humidity",), decimals=1)),
)


def test_a_packed_payload_is_read_by_its_layout() -> None:
    payload = struct.pack("<hxBf", 2153, 81, 3.31)

    assert read_payload(payload, "binary", CLIMATE).metrics == [
        ("celsius", Decimal("21.53"), None),
        ("humidity", Decimal("40.5"), None),
    ]
    # A field of the layout that is no declared metric is told.
    assert read_payload(payload, "binary", CLIMATE).undeclared == ["volts"]
    assert read_payload(payload[:-1], "binary", CLIMATE).reject_reason == (
        "undecodable: the payload has not the layout's 8 bytes"
    )
    too_hot = struct.pack("<hxBf", 12501, 81, 3.31)
    assert (
        read_payload(too_hot, "binary", CLIMATE).reject_reason
        == "out-of-range: celsius is not between -40 and 125: 125.01"
    )


def test_the_gateways_header_stands_in_front() -> None:
    # The example of docs/payloads.md, with a value of two bytes.
    header = bytes.fromhex("01070000004d3c2b1a7b00000055f80600")
    stream = Stream("t", "binary", layout=(LayoutField("t", "u16"),), endian="big", header=True)

    assert values(read_payload(header + b"\x01\x02", "binary", stream)) == {"t": Decimal(258)}
    assert read_payload(b"\x02" + header[1:] + b"\x01\x02", "binary", stream).reject_reason == (
        "undecodable: the payload's header is not of version 1"
    )


CODES = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "u64": "Q", "i64": "q"}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(CODES)), st.decimals(0, 9, places=3), st.randoms()), min_size=1),
    st.sampled_from(["little", "big"]),
)
def test_packed_integers_are_what_struct_packed(fields: list[tuple[Any, Decimal, Any]], endian: Any) -> None:
    numbers = [
        rng.randrange(-(2 ** (8 * SIZES[kind])) // 2, 2 ** (8 * SIZES[kind]) // 2)
        if kind.startswith("i")
        else rng.randrange(2 ** (8 * SIZES[kind]))
        for kind, _, rng in fields
    ]
    order = "<" if endian == "little" else ">"
    payload = struct.pack(order + "".join(CODES[kind] for kind, _, _ in fields), *numbers)
    layout = tuple(LayoutField(f"f{index}", kind, scale) for index, (kind, scale, _) in enumerate(fields))

    found = read_payload(payload, "binary", Stream("s", "binary", layout=layout, endian=endian))

    products = [number * scale for number, (_, scale, _) in zip(numbers, fields, strict=True)]
    fitting = {f"f{index}": product for index, product in enumerate(products) if abs(product) < 10**12}
    others = sorted(f"f{index}" for index in range(len(products)) if f"f{index}" not in fitting)
    assert found.undeclared == (others[:16] or None)
    if fitting:
        assert values(found) == fitting
    else:
        assert found.reject_reason == "out-of-range: no number of the payload fits decimal(18,6)"


# -- CBOR ---------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.integers(-(2**70), 2**70), st.booleans(), st.none(), st.text(max_size=8), st.binary(max_size=8), st.floats()
)
ITEMS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)


def as_numbers(item: object) -> object:
    """The item with floats as decimals."""
    if isinstance(item, float):
        return Decimal(repr(item)) if math.isfinite(item) else None
    if isinstance(item, list):
        return [as_numbers(each) for each in item]
    return {name: as_numbers(each) for name, each in item.items()} if isinstance(item, dict) else item


@given(ITEMS)
def test_an_item_of_cbor_is_what_was_written(item: object) -> None:
    assert codec_cbor.decode(cbor2.dumps(item)) == as_numbers(item)


@given(ITEMS, st.data())
def test_a_cut_item_is_none(item: object, data: st.DataObject) -> None:
    payload = cbor2.dumps(item)
    cut = data.draw(st.integers(0, len(payload) - 1))

    with pytest.raises(UndecodableError):
        codec_cbor.decode(payload[:cut])
    with pytest.raises(UndecodableError):
        codec_cbor.decode(payload + b"\x00")


@given(st.binary(max_size=64))
def test_no_bytes_make_the_decoders_fail_in_another_way(payload: bytes) -> None:
    for codec in ("cbor", "senml-cbor", "senml-json"):
        read_payload(payload, codec, ANY)
    read_payload(payload, "binary", CLIMATE)


@pytest.mark.parametrize(
    ("written", "metrics"),
    [
        # docs/payloads.md
        (
            "a46763656c73697573fb403587ae147ae14864626f6f746a372d316132623363346463736571187b647469636b1a0006f855",
            {"celsius": "21.53"},
        ),
        ("a16174fa41ac3d71", {"t": "21.53"}),  # 32 bits
        ("a16174c4822119086900", None),  # something behind it
        ("a16174c48221190869", {"t": "21.53"}),  # a decimal fraction
        ("a16174c249010000000000000000", None),  # a bignum beyond what a table holds
        ("a16174c24101", {"t": "1"}),
        ("bf6174190869ff", {"t": "2153"}),  # of indefinite length
        ("bf7f61746175ff01ff", {"tu": "1"}),  # a name in two chunks
        ("a2617401617402", None),  # a name twice
        ("a26174016175f97e00", {"t": "1"}),  # NaN is no number
        ("a16174f5", None),  # nor is true
        ("a1017401", None),
        ("83010203", None),
        ("ff", None),
        ("a161741c", None),
        ("d9d9f7a1617401", {"t": "1"}),  # the tag that says that this is CBOR
        ("81" * 40 + "01", None),  # too deep
    ],
)
def test_maps_of_cbor(written: str, metrics: dict[str, str] | None) -> None:
    found = read_payload(bytes.fromhex(written), "cbor", ANY)

    if metrics is None:
        assert found.metrics is None
        assert found.reject_reason is not None
    else:
        assert values(found) == {name: Decimal(text) for name, text in metrics.items()}


def test_declared_members_of_cbor_are_found_in_objects() -> None:
    stream = Stream("s", "cbor", metrics=(Metric("inside", ("env", "t"), decimals=1),))

    found = read_payload(cbor2.dumps({"env": {"t": 21.55}, "lux": 3, "seq": 4}), "cbor", stream)

    assert found == Result([("inside", Decimal("21.6"), None)], ["lux"])
    assert read_payload(cbor2.dumps({"env": 3}), "cbor", stream).reject_reason == "undecodable: no declared metric"


# -- SenML --------------------------------------------------------------------------------------


def pack(*records: object) -> Result:
    """A pack, read in both its forms."""
    found = read_payload(json.dumps(records).encode(), "senml-json", ANY)
    labels = {"bver": -1, "bn": -2, "bt": -3, "bu": -4, "bv": -5, "n": 0, "u": 1, "v": 2, "vs": 3, "vb": 4, "t": 6}
    as_cbor = [
        {labels.get(name, name): value for name, value in record.items()} if isinstance(record, dict) else record
        for record in records
    ]
    assert read_payload(cbor2.dumps(as_cbor), "senml-cbor", ANY) == found
    return found


def test_a_pack_of_several_times_says_how_long_ago_each_was() -> None:
    found = pack(
        {"bn": "urn:dev:ow:10e2073a01080063:", "bt": 1795348800.5, "n": "celsius", "u": "Cel", "v": 21.5},
        {"n": "celsius", "t": 10, "v": 21.6},
        {"n": "open", "t": 10, "vb": True},
        {"n": "state", "t": 10, "vs": "fine"},
    )

    assert found.metrics == [
        ("celsius", Decimal("21.6"), None),
        ("celsius", Decimal("21.5"), 10_000_000),
        ("open", Decimal(1), None),
    ]


def test_the_last_part_of_the_base_name_names_what_has_no_name() -> None:
    assert values(pack({"bn": "urn:dev:mac:0024befffe804ff1/celsius", "v": 1})) == {"celsius": Decimal(1)}
    assert values(pack({"bn": "urn:dev:ow:10e2073a01080063:", "v": 1})) == {"10e2073a01080063": Decimal(1)}
    assert pack({"v": 1}).reject_reason == "undecodable: a measurement in the SenML pack has no name"


def test_base_values_are_added() -> None:
    assert values(pack({"bv": 20, "n": "a", "v": 1.5}, {"n": "b", "v": 2}, {"n": "c"})) == {
        "a": Decimal("21.5"),
        "b": Decimal(22),
        "c": Decimal(20),
    }


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([{"n": "a", "v": 1}, {"n": "a", "v": 2}], "two values of one metric and time"),
        ([{"bt": 1.7e9, "n": "a", "v": 1}, {"bt": -5, "n": "a", "v": 2}], "times since 1970 and times relative to now"),
        ([{"n": "a", "v": 1}, {"n": "a", "v": 2, "t": -(2**28) - 1}], "are more than 268435456 s apart"),
        ([{"n": "a", "v": 1, "t": None}], "a time in the SenML pack is no number"),
        ([{"n": "a", "v": 1, "t": "now"}], "a time in the SenML pack is no number"),
        ([{"n": "a", "v": 1, "must_": 1}], "not one SenML pack"),
        ([{"bver": 11, "n": "a", "v": 1}], "not one SenML pack"),
        ([{"n": "a", "vs": "text"}], "the payload has no number"),
        ([], "not one SenML pack"),
        ([3], "not one SenML pack"),
        ([{"n": "a", "v": 1e15}], "no number of the payload fits decimal"),
    ],
)
def test_a_pack_that_cannot_be_read_says_why(records: list[object], reason: str) -> None:
    assert reason in str(pack(*records).reject_reason)


def test_declared_metrics_of_a_pack_have_names_of_their_own() -> None:
    stream = Stream("s", "senml-json", metrics=(Metric("celsius", ("temp",), decimals=1, max=Decimal(50)),))
    body = json.dumps([{"bn": "dev/", "n": "temp", "v": 21.55}, {"n": "lux", "v": 300}]).encode()

    assert read_payload(body, "senml-json", stream) == Result([("celsius", Decimal("21.6"), None)], ["lux"])
    too_hot = body.replace(b"21.55", b"51")
    assert (
        read_payload(too_hot, "senml-json", stream).reject_reason
        == "out-of-range: celsius is above 50 or outside decimal(18,6): 51"
    )


@pytest.mark.parametrize("written", ["1e100000", "-2.5E+9999", "7" * 65, "0." + "0" * 70 + "1"])
def test_a_number_that_is_not_computed_is_told_as_it_was_written(written: str) -> None:
    stream = Stream("s", "senml-json", metrics=(Metric("t", ("t",)),))
    told = f"out-of-range: t is outside decimal(18,6): {written[:40]}"
    for record in (f'{{"n":"t","v":{written}}}', f'{{"n":"t","bv":{written},"v":1}}', f'{{"n":"t","bv":{written}}}'):
        assert read_payload(f"[{record}]".encode(), "senml-json", stream).reject_reason == told


@pytest.mark.parametrize(
    ("exponent", "mantissa", "told"),
    [
        (1_000, -3, "-3E+1000"),
        # It was read as another number, far smaller.
        (-80, 1 << 300, "a number of 301 bits"),
        (-10_000, 1, None),
        (10_000, 0, None),
    ],
)
def test_a_decimal_fraction_that_is_not_computed_is_told(exponent: int, mantissa: int, told: str | None) -> None:
    stream = Stream("s", "cbor", metrics=(Metric("t", ("t",)),))
    body = cbor2.dumps({"t": cbor2.CBORTag(4, [exponent, mantissa])})
    expected = f"out-of-range: t is outside decimal(18,6): {told}" if told else None
    found = read_payload(body, "cbor", stream)
    assert found.reject_reason == expected
    assert found.metrics == (None if told else [("t", Decimal(0), None)])


@pytest.mark.parametrize("word", ["nan", "NaN", "-inf", "Infinity", "-nan(ind)", "1.#QNAN", "ovf"])
def test_what_is_no_number_in_a_pack_costs_its_measurement_alone(word: str) -> None:
    def read(body: str) -> Result:
        return read_payload(body.encode(), "senml-json", ANY)

    good = Result([("b", Decimal(2), None)])
    assert read(f'\ufeff[{{"n":"a","v":{word}}},{{"n":"b","u":"{word}","v":2}}]\0') == good
    assert read(f'[{{"bv":{word},"n":"a","v":1}},{{"bv":0,"n":"b","v":2}}]') == good, "no sum is made up"
    for record in (f'{{"n":"a","v":1,"t":{word}}}', f'{{"bt":{word},"n":"a","v":1}}'):
        assert read(f"[{record}]").reject_reason == "undecodable: a time in the SenML pack is no number"
    assert read(f'[{{"n":"a","v":{word}}}]').reject_reason == "undecodable: the payload has no number"


def test_json_that_is_no_pack_is_refused() -> None:
    half = b'[{"n":"\\ud800","v":1}]'
    for body in (
        b'[{"n":"a","v":+1}]',
        b'[{"n":"a","v":nan1}]',
        b'[{"n":"a","n":"b","v":1}]',
        b'{"n":"a","v":1}',
        b"\xff",
        half,
    ):
        assert read_payload(body, "senml-json", ANY).reject_reason == "undecodable: the payload is not one SenML pack"


# -- Avro ---------------------------------------------------------------------------------------

SCHEMA = {
    "type": "record",
    "name": "Climate",
    "namespace": "example",
    "fields": [
        {"name": "celsius", "type": "float"},
        {"name": "pascal", "type": ["null", "long"]},
        {"name": "litres", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3}},
        {"name": "room", "type": {"type": "record", "name": "Room", "fields": [{"name": "lux", "type": "double"}]}},
        {"name": "other", "type": "Room"},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["a", "b"]}},
        {"name": "more", "type": {"type": "map", "values": "int"}},
        {"name": "raw", "type": {"type": "fixed", "name": "Raw", "size": 2}},
        {"name": "on", "type": "boolean"},
    ],
}


def zigzag(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def climate(number: int, celsius: float = 21.53, pascal: int | None = 101_325) -> bytes:
    """A record of SCHEMA, written by the letter of the specification."""
    branch = zigzag(0) if pascal is None else zigzag(1) + zigzag(pascal)
    return b"".join(
        [
            b"\x00" + number.to_bytes(4),
            struct.pack("<f", celsius) + branch,
            zigzag(2) + (-1500).to_bytes(2, signed=True),
            struct.pack("<d", 300.25) + struct.pack("<d", 0.5),
            zigzag(-2) + zigzag(4) + zigzag(1) + b"x" + zigzag(1) + b"y" + zigzag(0),
            zigzag(1),
            zigzag(1) + zigzag(1) + b"k" + zigzag(7) + zigzag(0),
            b"\x01\x02",
            b"\x01",
        ]
    )


class Registry(BaseHTTPRequestHandler):
    """The answers of a Confluent-compatible registry."""

    schemas: dict[int, str]
    failures: list[int]
    asked: list[int]

    def do_GET(self) -> None:
        number = int(self.path.removeprefix("/schemas/ids/"))
        self.asked.append(number)
        status = self.failures.pop() if self.failures else 200 if number in self.schemas else 404
        body = json.dumps({"schema": self.schemas.get(number)} if status == 200 else {"error_code": 40403}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


@contextmanager
def registry(schemas: dict[int, object], failures: list[int] | None = None) -> Iterator[tuple[str, list[int]]]:
    asked: list[int] = []
    texts = {number: json.dumps(schema) for number, schema in schemas.items()}
    handler = type("Handler", (Registry,), {"schemas": texts, "failures": failures or [], "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_record_is_read_by_the_registrys_schema_which_is_asked_for_once() -> None:
    stream = Stream("s", "avro", metrics=(CELSIUS, Metric("lux", ("room", "lux")), Metric("pascal", ("pascal",))))

    with registry({7: SCHEMA}) as (url, asked):
        every = read_payload(climate(7), "avro", ANY, url)
        declared = read_payload(climate(7, pascal=None), "avro", stream, url)

    assert values(every) == {"celsius": Decimal("21.53"), "litres": Decimal("-1.5"), "pascal": Decimal(101_325)}
    assert values(declared) == {"celsius": Decimal("21.53"), "lux": Decimal("300.25")}
    assert declared.undeclared == ["litres"]
    assert asked == [7]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "does not begin with a zero byte"),
        (b"\x01" + climate(7)[1:], "does not begin with a zero byte"),
        (climate(7)[:-1], "does not fit its Avro schema"),
        (climate(7) + b"\x00", "does not fit its Avro schema"),
        (climate(8), "does not know the payload's schema"),
        (climate(9), "not one of a record"),
        (climate(10), "not one of a record"),
        # A list of itself, as deep as the payload is long.
        (b"\x00\x00\x00\x00\x0b" + b"\x02" * 60_000, "does not fit its Avro schema"),
        # Lists of nothing: few bytes, and many items.
        (b"\x00\x00\x00\x00\x0c" + zigzag(60_000) + (zigzag(60_000) + zigzag(0)) * 10_000, "does not fit its Avro"),
    ],
)
def test_an_avro_payload_that_cannot_be_read_says_why(payload: bytes, reason: str) -> None:
    chain = {"type": "record", "name": "Chain", "fields": [{"name": "next", "type": ["null", "Chain"]}]}
    nothing = {"type": "array", "items": {"type": "array", "items": "null"}}
    lists = {"type": "record", "name": "Lists", "fields": [{"name": "lists", "type": nothing}]}

    with registry({7: SCHEMA, 9: "string", 10: {"type": "record", "name": "x"}, 11: chain, 12: lists}) as (url, _):
        assert reason in str(read_payload(payload, "avro", ANY, url).reject_reason)


def test_a_registry_that_is_down_fails_the_batch_and_rejects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_avro, "PAUSE_S", 0.01)
    with registry({7: SCHEMA}, failures=[503, 503]) as (url, asked):
        # It comes back.
        assert "celsius" in values(read_payload(climate(7), "avro", ANY, url))
        assert asked == [7, 7, 7]
    with pytest.raises(RegistryError, match=r"does not give schema 6: .*refused.*no record was rejected"):
        read_payload(climate(6), "avro", ANY, url)
    with registry({7: SCHEMA}, failures=[401]) as (url, _), pytest.raises(RegistryError, match="HTTP 401"):
        read_payload(climate(7), "avro", ANY, url)


@given(st.binary(max_size=60))
def test_no_bytes_make_the_avro_decoder_fail_in_another_way(payload: bytes) -> None:
    decode = codec_avro.compile_schema(json.dumps(SCHEMA))
    try:
        decode(codec_avro._Reader(payload, 0))
    except (UndecodableError, UnicodeDecodeError):
        return


# -- what is hostile ----------------------------------------------------------------------------

CODECS = {
    "application/senml+json": "senml-json",
    "application/senml+cbor": "senml-cbor",
    "application/cbor": "cbor",
}


def test_whatever_comes_is_read_or_refused_in_words() -> None:
    """Each value goes to each codec: the content type may contradict the declaration."""
    binary = replace(CLIMATE, codec="binary")
    for name, _, payload in hostile.payloads():
        for codec in CODECS.values():
            expect_told(read_payload(payload, codec, ANY), name)
        expect_told(read_payload(payload, "binary", binary), name)


def test_whatever_comes_is_no_avro_or_refused_in_words() -> None:
    with registry({7: SCHEMA, 8: {"type": "record"}}) as (url, _):
        for frame in (b"", b"\x00", b"\x00\x00\x00\x00\x07", b"\x00\x00\x00\x00\x08", b"\x00\xff\xff\xff\xff"):
            bodies = [*hostile.avro_bodies(), *((name, payload) for name, _, payload in hostile.payloads())]
            for name, body in bodies:
                expect_told(read_payload(frame + body[:70_000], "avro", ANY, url), name)


@pytest.mark.parametrize("schema", [*hostile.JSON_VALUES.values(), hostile.OBJECTS])
def test_a_schema_that_is_none_makes_rejects(schema: str) -> None:
    for text in (schema, f'{{"type": "record", "name": "r", "fields": {schema}}}'):
        fields = f'{{"type": "record", "name": "r", "fields": [{{"name": "a", "type": {schema}}}]}}'
        for decode in (codec_avro.compile_schema(text), codec_avro.compile_schema(fields)):
            with suppress(UndecodableError):
                decode(codec_avro._Reader(b"\x02\x02", 0))


def expect_told(found: Result, name: str) -> None:
    assert (found.metrics is None) == (found.reject_reason is not None), name
    for _, value, ago_us in found.metrics or ():
        assert abs(value) < 10**12, name
        assert 0 <= (ago_us or 0) <= 2**28 * 10**6, name
