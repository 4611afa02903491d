"""CBOR of sensors: honest payloads are read as cbor2 reads them; hostile ones cost a bounded number of steps."""

import math
import sys
from collections.abc import Callable
from itertools import product
from types import FrameType

import cbor2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.intake.payload_cbor import CBOR_BYTES_MAX, DEPTH_MAX, ITEMS_MAX, LABEL_MAX, decode

CALLS_PER_ITEM = 6
"""Calls of functions that one item costs at the most."""


def calls(act: Callable[[], object]) -> int:
    """Number of functions that it calls, functions in C too."""
    count = 0

    def called(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(called)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def decoded(payload: bytes) -> object:
    """The decoded value. Raises `ValueError` if there is none."""
    try:
        return decode(payload)
    except ValueError:
        return ValueError


# --- honest payloads ------------------------------------------------------------------------------------------

names = st.text(max_size=8) | st.integers(-LABEL_MAX, LABEL_MAX)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.floats(width=16, allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=30) | st.dictionaries(names, inner, max_size=30))


@given(values, st.booleans(), st.booleans())
@example({"celsius": 21.53, "boot": "7-1a2b3c4d", "seq": 123, "tick": 456789}, False, False)
@example([{-3: 1.5e9, 0: "t", 2: 21.5, 6: -5}, {}], False, False)
def test_what_sensors_send_is_read_as_cbor2_reads_it(value: object, canonical: bool, indefinite: bool) -> None:  # noqa: FBT001
    payload = cbor2.dumps(value, canonical=canonical, indefinite_containers=indefinite)
    assert decode(payload) == cbor2.loads(payload) == value
    assert decode(payload + b"\xff") == value, "the first item counts"
    assert decode(cbor2.dumps(cbor2.CBORTag(55799, value))) == value


@given(st.lists(st.text(max_size=30), max_size=5))
def test_a_string_may_come_in_chunks(chunks: list[str]) -> None:
    text = b"\x7f" + b"".join(map(cbor2.dumps, chunks)) + b"\xff"
    assert decode(text) == cbor2.loads(text) == "".join(chunks)
    data = b"\x5f" + b"".join(cbor2.dumps(chunk.encode()) for chunk in chunks) + b"\xff"
    assert decode(data) == cbor2.loads(data) == "".join(chunks).encode()


def test_the_bare_value_of_a_tag_counts() -> None:
    assert decode(cbor2.dumps([cbor2.CBORTag(1, 1_700_000_000), cbor2.CBORTag(4711, ["x"])])) == [1_700_000_000, ["x"]]
    assert decode(cbor2.dumps(2**70)) == (2**70).to_bytes(9)
    assert decode(cbor2.dumps(cbor2.CBORTag(4, [-3, 21_530]))) == 21.53
    for damaged in ([1], "x", [2**70, 1], [-3, "x"], [10**6, 1], None):
        found = decode(cbor2.dumps(cbor2.CBORTag(4, damaged)))
        assert isinstance(found, float)
        assert math.isnan(found)


@pytest.mark.parametrize("payload", [b"\xf7", b"\xe0", b"\xf8\x20", b"\xf9\x7e\x00"], ids=bytes.hex)
def test_what_json_has_no_value_for_is_no_number(payload: bytes) -> None:
    assert [repr(item) for item in decoded_list(b"\x82" + payload + b"\x01")] == ["nan", "1"]


def decoded_list(payload: bytes) -> list[object]:
    found = decode(payload)
    assert isinstance(found, list)
    return found


# --- hostile payloads -----------------------------------------------------------------------------------------

MEMBER = cbor2.dumps("seq") + b"\x07"


@pytest.mark.parametrize(
    "key",
    [
        b"\x80",
        b"\xa0",
        b"\xc1\x80",
        b"\xd9\x01\x02\x81\x01",
        b"\xc2\x41\x07",
        b"\xf4",
        b"\xf6",
        b"\xfb" + bytes(8),
        b"\x41x",
        b"\x5f\xff",
        b"\xc4\x82\x00\x01",
        cbor2.dumps(LABEL_MAX + 1),
        cbor2.dumps(-LABEL_MAX - 1),
    ],
    ids=bytes.hex,
)
def test_only_texts_and_small_integers_are_names(key: bytes) -> None:
    assert decode(b"\xa3" + key + b"\x01" + MEMBER + key + b"\x02") == {"seq": 7}
    assert decode(b"\xbf" + (key + b"\x01") * 500 + MEMBER + b"\xff") == {"seq": 7}


def test_keys_of_equal_hash_never_meet_in_a_map() -> None:
    # -1 and -2 have one hash, so all arrays of them have; and so have all multiples of 2^61 - 1.
    arrays = [tuple(key) for key in product((-1, -2), repeat=8)]
    numbers = [(2**61 - 1) * factor for factor in range(1, 200)]
    assert len({hash(key) for key in arrays}) == len({hash(key) for key in numbers}) == 1
    for keys in (arrays, numbers):
        assert decode(cbor2.dumps(dict.fromkeys(keys, 0) | {"seq": 7})) == {"seq": 7}


HOSTILE = [
    b"\x81" * 60_000,
    b"\xa1\x01" * 30_000,
    b"\xc1" * 60_000,
    b"\x9f" * 60_000,
    b"\xbf\x01" * 30_000,
    b"\x7f" * 60_000,
    b"\x5f\x7f" * 30_000,
    b"\xd8\x23" * 30_000 + b"\x60",
    b"\x9b\x00\x00\x00\x7f\xff\xff\xff\xff",
    b"\xbb\x00\x00\x00\x7f\xff\xff\xff\xff",
    b"\x5b\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"\x7b\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x9b" + b"\xff" * 8 + b"\x00" * 60_000,
    b"\xc4\x82\x1b\x7f\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xc5\x82\x1b\x00\x00\x00\x7f\xff\xff\xff\xff\x01",
    b"\xd8\x1c\x81\xd8\x1d\x00",
    b"\xd8\x1e\x82\x01\x00",
    b"\xd8\x23\x78\x1e" + b"(a+)+(a+)+(a+)+(a+)+(a+)+(a+)+",
    b"\x9a\x00\x00\xff\xf0" + b"\x80" * 0xFFF0,
    b"\x9a\x00\x00\xff\xf0" + b"\xa0" * 0xFFF0,
    b"\xb9\x40\x00" + b"\x81\x01\x01" * 0x4000,
    b"\xb9\x20\x00" + b"\xc2\x43\x01\x02\x03\x01" * 0x2000,
    b"\xd9\x01\x02\x99\x40\x00" + b"\x81\x01" * 0x4000,
    b"\xa1\x81\x01\x01",
    b"\xa1\xd9\x01\x02\x81\x81\x01\x02",
    b"\xc2\x59\xff\x00" + b"\xff" * 0xFF00,
    b"\x7f" + b"\x60" * 60_000 + b"\xff",
    b"\x5f" + b"\x41x" * 30_000 + b"\xff",
    b"\x9f" + b"\xfb" + bytes(8) * 7_000,
    b"\xa0" * (CBOR_BYTES_MAX + 1),
    b"\xff",
    b"\x1c",
    b"\xfc",
    b"\x7f\x41x\xff",
    b"\x61\xff",
    b"",
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile[:6].hex())
def test_hostile_payloads_cost_a_bounded_number_of_steps(hostile: bytes) -> None:
    for payload in (hostile, b"\xa2" + MEMBER + cbor2.dumps("x") + hostile):
        steps = calls(lambda payload=payload: decoded(payload))  # type: ignore[misc]
        assert steps <= CALLS_PER_ITEM * min(len(payload), ITEMS_MAX) + 20
        if payload is not hostile:
            # It costs no more than the members that stand behind it, and those only where it is no CBOR.
            found = decoded(payload)
            assert found is ValueError or (isinstance(found, dict) and found["seq"] == 7)


heads = st.sampled_from(bytes.fromhex("9f bf 81 a1 60 00 c4 ff 7f 5f f7 c1 40 f9 18"))


@given(st.binary(max_size=400) | st.lists(heads, max_size=60).map(bytes))
def test_any_bytes_cost_no_more_than_their_number(payload: bytes) -> None:
    assert calls(lambda: decoded(payload)) <= CALLS_PER_ITEM * len(payload) + 20


def test_nesting_has_a_largest_depth() -> None:
    assert decoded(b"\x81" * DEPTH_MAX + b"\x00") is not ValueError
    assert decoded(b"\x81" * (DEPTH_MAX + 1) + b"\x00") is ValueError


# --- large payloads -------------------------------------------------------------------------------------------


def test_a_map_that_is_too_large_has_the_members_that_end_before() -> None:
    many = [0] * ITEMS_MAX
    assert decode(cbor2.dumps({"boot": "7", "seq": 1, "wave": many, "more": 1})) == {"boot": "7", "seq": 1}
    assert decode(cbor2.dumps({"boot": "7", "seq": 1, "blob": bytes(CBOR_BYTES_MAX)})) == {"boot": "7", "seq": 1}
    assert decode(cbor2.dumps({"boot": {"within": many}, "seq": 1})) == {}
    for payload in (cbor2.dumps(many), cbor2.dumps([{"boot": "7", "wave": many}]), cbor2.dumps(bytes(CBOR_BYTES_MAX))):
        assert decoded(payload) is ValueError


def test_a_map_that_ends_too_soon_is_none() -> None:
    payload = cbor2.dumps({"boot": "7", "seq": 1, "wave": [0] * 100})
    assert decoded(payload[:-1]) is ValueError


def test_as_much_as_the_bounds_say_is_looked_into() -> None:
    exact = [0] * (ITEMS_MAX - 1)
    assert decode(cbor2.dumps(exact)) == exact
    blob = bytes(CBOR_BYTES_MAX - 5)
    assert decode(cbor2.dumps(blob)) == blob
