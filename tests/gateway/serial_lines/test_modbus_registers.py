"""Modbus registers: few requests, within the protocol's limits, and numbers exactly as a unit holds them."""

import json
import math
import struct
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.serial_lines.modbus_registers import (
    BITS_MAX,
    FUNCTIONS,
    REGISTERS_MAX,
    Request,
    bounds,
    decode,
    fence,
    halves,
    payload,
    requests,
    width,
)
from gateway.settings import ModbusRegister

WHOLE = {"u16": ">H", "s16": ">h", "u32": ">I", "s32": ">i", "u64": ">Q", "s64": ">q"}
FLOATS = {"f32": ">f", "f64": ">d"}
FORMATS = WHOLE | FLOATS
WORD_ORDERS = ("ABCD", "CDAB", "BADC", "DCBA", "high-first", "low-first")


def register(address: int, name: str = "", **members: Any) -> ModbusRegister:
    return ModbusRegister(name or f"at-{address}", address, **members)


def words(raw: bytes, word_order: str) -> bytes:
    """The registers of a number, as the line carries them."""
    if word_order == "DCBA":
        return raw[::-1]
    pairs = [raw[at : at + 2] for at in range(0, len(raw), 2)]
    if word_order == "BADC":
        return b"".join(pair[::-1] for pair in pairs)
    return b"".join(reversed(pairs) if word_order in {"CDAB", "low-first"} else pairs)


def decoded(value: ModbusRegister, data: bytes) -> str:
    (request,) = requests([value])
    return decode(request, data)[value.name]


def test_an_example_the_sdm120_meter() -> None:
    # Voltage at 0, current at 6, floats of two registers each.
    registers = [register(0, "volts", table="input", type="f32"), register(6, "amps", table="input", type="f32")]
    volts, amps = requests(registers)
    assert (str(volts), volts.function, volts.data_bytes) == ("input 0 to 1", 4, 4)
    assert (str(amps), amps.function, amps.data_bytes) == ("input 6 to 7", 4, 4)
    values = decode(volts, bytes.fromhex("43663333")) | decode(amps, bytes.fromhex("3f800000"))
    assert payload(registers, values) == b'{"volts":230.2,"amps":1}'


def test_an_example_the_xy_md02_sensor() -> None:
    registers = [
        register(1, "celsius", table="input", type="s16", scale=0.1),
        register(2, "humidity", table="input", scale=0.1),
    ]
    (request,) = requests(registers)
    assert (request.address, request.count) == (1, 2)
    values = decode(request, struct.pack(">hH", -57, 480))
    assert payload(registers, values) == b'{"celsius":-5.7,"humidity":48.0}'


def test_neighbours_are_read_together_and_gaps_are_not_read_over() -> None:
    plan = requests([register(4), register(10), register(0, type="u32"), register(2, type="f32"), register(11)])
    assert [str(request) for request in plan] == ["holding 0 to 4", "holding 10 to 11"]


def test_tables_are_read_apart() -> None:
    registers = [
        register(0, table, table=table, type="bit" if table in ("coil", "discrete") else "u16") for table in FUNCTIONS
    ]
    assert [(request.function, request.count) for request in requests(registers)] == [(1, 1), (2, 1), (3, 1), (4, 1)]


def test_two_views_of_one_register_are_one_read() -> None:
    (request,) = requests([register(7, "raw"), register(7, "signed", type="s16"), register(7, "long", type="u32")])
    assert (request.address, request.count) == (7, 2)
    assert decode(request, b"\xff\xff\x00\x01") == {"raw": "65535", "signed": "-1", "long": "4294901761"}


@pytest.mark.parametrize(
    ("value", "count_max"),
    [({}, REGISTERS_MAX), ({"table": "input"}, REGISTERS_MAX), ({"table": "coil", "type": "bit"}, BITS_MAX)],
)
def test_a_request_holds_as_much_as_the_protocol_allows_and_no_more(value: dict[str, str], count_max: int) -> None:
    assert [each.count for each in requests([register(at, **value) for at in range(count_max)])] == [count_max]
    plan = requests([register(at, **value) for at in range(count_max + 1)])
    assert [each.count for each in plan] == [count_max, 1]
    assert plan[0].data_bytes == 250


def test_a_value_of_several_registers_is_never_read_in_two_parts() -> None:
    plan = requests([register(at, type="f64") for at in range(0, 128, 4)])
    assert [each.count for each in plan] == [124, 4]


REGISTERS = st.lists(
    st.builds(
        lambda address, table, kind: ModbusRegister(
            f"{table}-{address}-{kind}", address, table, "bit" if table in ("coil", "discrete") else kind
        ),
        st.integers(0, 600),
        st.sampled_from(sorted(FUNCTIONS)),
        st.sampled_from(sorted(FORMATS)),
    ),
    max_size=80,
)


@given(REGISTERS)
def test_every_value_is_in_one_request_and_no_other_address_is_asked_for(registers: list[ModbusRegister]) -> None:
    plan = requests(registers)
    assert sorted(value.name for request in plan for value in request.values) == sorted(each.name for each in registers)
    for request in plan:
        wanted = {value.address + at for value in request.values for at in range(width(value))}
        assert wanted == set(range(request.address, request.address + request.count))
        assert {value.table for value in request.values} == {request.table}
        assert request.count <= (BITS_MAX if request.table in ("coil", "discrete") else REGISTERS_MAX)


@given(REGISTERS)
def test_halving_ends_at_single_values_and_loses_none(registers: list[ModbusRegister]) -> None:
    pending = list(requests(registers))
    single: list[Request] = []
    while pending:
        request = pending.pop()
        parts = halves(request)
        pending += parts
        if not parts:
            single.append(request)
    assert all(len(request.values) == 1 for request in single)
    assert sorted(request.values[0].name for request in single) == sorted(each.name for each in registers)


@given(REGISTERS)
def test_an_answer_to_a_fence_never_fits_the_request_before_it(
    registers: list[ModbusRegister],
) -> None:
    for asked in requests(registers):
        assert fence(asked).function != asked.function
        assert fence(asked).count == 1
        assert "asked beside what is configured" in str(fence(asked)), "nobody looks for it in the settings"
        assert "beside" not in str(asked)


@pytest.mark.parametrize("word_order", WORD_ORDERS)
@pytest.mark.parametrize("kind", WHOLE)
@given(data=st.data())
def test_whole_numbers_are_those_that_struct_packs(kind: str, word_order: str, data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=struct.calcsize(WHOLE[kind]), max_size=struct.calcsize(WHOLE[kind])))
    (number,) = struct.unpack(WHOLE[kind], raw)
    value = register(9, type=kind, word_order=word_order)
    assert decoded(value, words(raw, word_order)) == str(number)


@pytest.mark.parametrize(
    ("kind", "word_order", "sent", "text"),
    [
        ("f32", "ABCD", "3f800000", "1"),
        ("f32", "CDAB", "00003f80", "1"),
        ("f32", "BADC", "803f0000", "1"),
        ("f32", "DCBA", "0000803f", "1"),
        ("u32", "BADC", "02010403", str(0x01020304)),
        ("u64", "CDAB", "0708050603040102", str(0x0102030405060708)),
        ("u64", "BADC", "0201040306050807", str(0x0102030405060708)),
        ("u64", "DCBA", "0807060504030201", str(0x0102030405060708)),
        ("u16", "CDAB", "0102", str(0x0102)),
        ("u16", "BADC", "0201", str(0x0102)),
        ("s16", "DCBA", "c7ff", "-57"),
    ],
)
def test_an_example_of_each_order_of_bytes(kind: str, word_order: str, sent: str, text: str) -> None:
    assert decoded(register(9, type=kind, word_order=word_order), bytes.fromhex(sent)) == text


@pytest.mark.parametrize("word_order", WORD_ORDERS)
@pytest.mark.parametrize("kind", FLOATS)
@given(data=st.data())
def test_floats_are_the_same_float_when_read_back(kind: str, word_order: str, data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=struct.calcsize(FLOATS[kind]), max_size=struct.calcsize(FLOATS[kind])))
    (number,) = struct.unpack(FLOATS[kind], raw)
    value = register(9, type=kind, word_order=word_order)
    text = decoded(value, words(raw, word_order))
    if not math.isfinite(number):
        assert text == "null"
        return
    assert struct.pack(FLOATS[kind], float(json.loads(text))) == raw or number == 0


@given(st.integers(1, 999_999), st.integers(-20, 20))
def test_a_float_of_32_bits_comes_out_as_it_went_in(digits: int, exponent: int) -> None:
    # Six digits survive in 24 bits, so none that a person would write comes out with more.
    number = Decimal(digits).scaleb(exponent)
    text = decoded(register(0, type="f32"), struct.pack(">f", number))
    assert Decimal(text) == number


def test_the_largest_float_and_the_smallest() -> None:
    assert Decimal(decoded(register(0, type="f32"), bytes.fromhex("7f7fffff"))) == Decimal("3.4028235e38")
    assert decoded(register(0, type="f32"), bytes.fromhex("00000001")) == "1E-45"


SCALES = st.decimals(Decimal("0.000001"), Decimal(1_000_000), places=6, allow_nan=False)
OFFSETS = st.decimals(Decimal(-1_000_000), Decimal(1_000_000), places=6, allow_nan=False)


@pytest.mark.parametrize("kind", WHOLE)
@given(data=st.data(), scale=SCALES, offset=OFFSETS)
def test_scale_and_offset_are_exact(kind: str, data: st.DataObject, scale: Decimal, offset: Decimal) -> None:
    raw = data.draw(st.binary(min_size=struct.calcsize(WHOLE[kind]), max_size=struct.calcsize(WHOLE[kind])))
    (number,) = struct.unpack(WHOLE[kind], raw)
    text = decoded(register(0, type=kind, scale=float(scale), offset=float(offset)), raw)
    assert Fraction(Decimal(text)) == number * Fraction(scale) + Fraction(offset)


@pytest.mark.parametrize(
    ("kind", "sent", "null_if"),
    [
        ("u16", "ffff", 65_535),
        ("s16", "8000", 0x8000),
        ("s16", "8000", -32_768),
        ("s16", "7fff", 0x7FFF),
        ("s16", "ffff", 0xFFFF),
        ("u32", "ffffffff", 0xFFFFFFFF),
        ("u32", "80000000", 0x80000000),
        ("s32", "80000000", 0x80000000),
        ("s32", "80000000", -(2**31)),
        ("u64", "ffffffffffffffff", 2**64 - 1),
        ("s64", "8000000000000000", 2**63),
        ("s64", "8000000000000000", -(2**63)),
    ],
)
def test_a_number_that_stands_for_no_value_is_null_whatever_its_scale(kind: str, sent: str, null_if: int) -> None:
    for word_order in WORD_ORDERS:
        value = register(0, type=kind, word_order=word_order, scale=0.1, offset=-40.0, null_if=(7, null_if))
        assert decoded(value, words(bytes.fromhex(sent), word_order)) == "null"
        near = (int(sent, 16) ^ 1).to_bytes(len(sent) // 2)
        assert decoded(value, words(near, word_order)) != "null"
    plain = register(0, type=kind, scale=0.1, offset=-40.0)
    assert decoded(plain, bytes.fromhex(sent)) != "null", "nothing is null unasked"


@pytest.mark.parametrize("kind", WHOLE)
@given(data=st.data())
def test_only_the_numbers_of_null_if_are_null(kind: str, data: st.DataObject) -> None:
    size = struct.calcsize(WHOLE[kind])
    drawn = st.binary(min_size=size, max_size=size)
    none, raw = data.draw(drawn), data.draw(drawn)
    (signed,) = struct.unpack(WHOLE[kind], none)
    for spelled in (signed, int.from_bytes(none)):
        value = register(0, type=kind, null_if=(spelled,))
        least, most = bounds(value) or (1, 0)
        assert least <= spelled <= most
        assert decoded(value, none) == "null"
        assert (decoded(value, raw) == "null") == (raw == none)


@pytest.mark.parametrize(
    ("members", "number", "text"),
    [
        ({"scale": 0.1}, 3, "0.3"),
        ({"scale": 0.1}, 215, "21.5"),
        ({"scale": 0.1}, 210, "21.0"),
        ({"scale": 1.0}, 210, "210"),
        ({"scale": 10.0}, 21, "210"),
        ({"scale": 100.0}, 0, "0"),
        ({"scale": 0.01, "offset": -40.0}, 6_150, "21.50"),
        ({"offset": 0.25}, 1, "1.25"),
        ({"scale": 1e12}, 65_535, "65535000000000000"),
        ({"scale": 1e-9}, 1, "0.000000001"),
    ],
)
def test_a_value_is_written_as_a_person_would(members: dict[str, Any], number: int, text: str) -> None:
    assert decoded(register(0, **members), struct.pack(">H", number)) == text


@given(st.binary(min_size=8, max_size=8), st.floats(1e-300, 1e12), st.floats(-1e300, 1e300))
def test_a_payload_of_any_register_is_short_json(raw: bytes, scale: float, offset: float) -> None:
    text = decoded(register(0, type="f64", scale=scale, offset=offset), raw)
    assert json.loads(text) is None or isinstance(json.loads(text), int | float)
    assert len(text) < 100


@given(st.integers(0, 60_000), st.lists(st.booleans(), min_size=1, max_size=100))
def test_bits_are_counted_from_the_lowest(first: int, bits: list[bool]) -> None:
    registers = [register(first + at, table="coil", type="bit") for at in range(len(bits))]
    (request,) = requests(registers)
    data = bytearray(request.data_bytes)
    for at, bit in enumerate(bits):
        data[at // 8] |= bit << at % 8
    assert json.loads(payload(registers, decode(request, bytes(data)))) == {
        each.name: bit for each, bit in zip(registers, bits, strict=True)
    }


def test_a_payload_keeps_the_settings_order_and_leaves_out_what_is_missing() -> None:
    registers = [register(9, 'the "last"'), register(0, "first"), register(5, "refused")]
    assert payload(registers, {"first": "1", 'the "last"': "null"}) == b'{"the \\"last\\"":null,"first":1}'
