"""When a reading was taken, as SenML and timestamps say it; whatever a payload holds, it says a time or none."""

import json
import math
from collections.abc import Callable
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.intake.payload_identity import BINARY
from gateway.intake.payload_time import (
    DEVICE_TIME_US_MAX,
    RELATIVE_S_MAX,
    SENML_BYTES_MAX,
    SENML_CBOR,
    SENML_JSON,
    SENML_RECORDS_MAX,
    NothingToldError,
    Told,
    reader,
)
from gateway.settings import PayloadIdentity, TimeSource


def read_as(
    time: TimeSource, content_type: str = "application/json", identity: PayloadIdentity = "none"
) -> Callable[[bytes], Told | None]:
    """The reader of a route whose messages have no user properties."""
    found = reader(time, identity, content_type)
    assert found is not None
    return lambda payload: found(payload, ())


OF_SENML, OF_SENML_CBOR = read_as("senml", SENML_JSON), read_as("senml", SENML_CBOR)
OF_TIMESTAMP, OF_TIMESTAMP_CBOR = read_as("timestamp"), read_as("timestamp", "application/cbor", "cbor")
LABELS = {"bn": -2, "bt": -3, "bu": -4, "bv": -5, "bs": -6, "bver": -1, "n": 0, "u": 1, "v": 2, "vs": 3, "vb": 4}
LABELS |= {"s": 5, "t": 6, "ut": 7, "vd": 8}


def both(pack: list[dict[str, Any]]) -> Told | None:
    """The time of a pack in JSON, which must be that of the same pack in CBOR."""
    found = OF_SENML(json.dumps(pack).encode())
    assert OF_SENML_CBOR(cbor2.dumps([{LABELS[name]: of for name, of in record.items()} for record in pack])) == found
    return found


@pytest.mark.parametrize("word", [b"nan", b"-inf", b"Infinity", b"", b"+5"])
def test_what_is_no_number_costs_no_time_beside_it(word: bytes) -> None:
    told = Told(1_795_348_810_000_000, is_relative=False)
    assert OF_TIMESTAMP(b'\xef\xbb\xbf {"celsius":%b,"timestamp":1795348810000}\0' % word) == told
    pack = b'[{"bt":1795348800,"n":"c","v":%b},{"n":"c","t":10,"v":%b}]\0' % (word, word)
    assert OF_SENML(pack) == told


@pytest.mark.parametrize("word", [b"nan", b"-inf", b"", b"1e999"])
def test_a_time_that_is_no_number_is_not_made_up(word: bytes) -> None:
    with pytest.raises(NothingToldError):
        OF_TIMESTAMP(b'{"timestamp":%b,"celsius":1}' % word)
    with pytest.raises(NothingToldError):
        OF_SENML(b'[{"bt":1795348800,"n":"c","v":1,"t":%b}]' % word)
    with pytest.raises(NothingToldError):
        OF_SENML(b'[{"bt":%b,"n":"c","v":1}]' % word)


def test_the_examples_of_rfc_8428() -> None:
    # Section 5.1.1 and 5.1.2: no time is said.
    assert both([{"n": "urn:dev:ow:10e2073a01080063", "u": "Cel", "v": 23.1}]) is None
    names: dict[str, Any] = {"bn": "urn:dev:ow:10e2073a01080063:", "n": "voltage", "u": "V", "v": 120.1}
    assert both([names, {"n": "current", "u": "A", "v": 1.2}]) is None
    # Section 5.1.2: the newest of a series that ends at its base time.
    base: dict[str, Any] = {"bn": "urn:dev:ow:10e2073a0108006:", "bt": 1.276020076001e09, "bu": "A", "bver": 5}
    series: list[dict[str, Any]] = [{"n": "current", "t": t, "v": 1.2} for t in (-5, -4, -3, -2, -1)]
    pack = [base | {"n": "voltage", "u": "V", "v": 120.1}, *series, {"n": "current", "v": 1.7}]
    assert both(pack) == Told(1_276_020_076_001_000, is_relative=False)
    # Section 5.1.3: one that goes on from its base time.
    base = {"bn": "urn:dev:ow:10e2073a01080063", "bt": 1.320067464e09, "bu": "%RH", "v": 20}
    pack = [base, {"u": "lon", "v": 24.30621}, {"t": 60, "v": 20.3}, {"u": "%EL", "t": 150, "v": 98}]
    assert both(pack) == Told(1_320_067_614_000_000, is_relative=False)
    # Section 4.5.3: a sensor without a clock says how long ago it was.
    assert both([{"n": "a", "t": -10.5, "v": 1}, {"n": "b", "t": -2, "v": 1}]) == Told(-2_000_000, is_relative=True)


def test_the_cbor_example_of_rfc_8428() -> None:
    # Section 6.
    pack = bytes.fromhex(
        "87a721781b75726e3a6465763a6f773a3130653230373361303130383030363a22fb41d303a15b00106223614120050067766f6c7461"
        "67650161560 2fb405e066666666666a3006763757272656e74062402fb3ff3333333333333a3006763757272656e74062302fb3ff4"
        "cccccccccccda3006763757272656e74062202fb3ff6666666666666a3006763757272656e74062102f93e00a300676375727265"
        "6e74062002fb3ff999999999999aa3006763757272656e74060002fb3ffb333333333333".replace(" ", "")
    )
    assert OF_SENML_CBOR(pack) == Told(1_276_020_076_001_000, is_relative=False)


def test_a_time_may_be_a_decimal_fraction_in_cbor() -> None:
    fraction = cbor2.CBORTag(4, [-3, 1_700_000_000_125])
    assert OF_SENML_CBOR(cbor2.dumps([{-3: fraction, 2: 1}])) == Told(1_700_000_000_125_000, is_relative=False)
    for damaged in ([1], "x", [2**70, 1], [-3, "x"], [10**6, 1], None):
        with pytest.raises(NothingToldError):
            OF_SENML_CBOR(cbor2.dumps([{-3: 1_700_000_000, 6: cbor2.CBORTag(4, damaged), 2: 1}]))


def test_only_measurements_have_a_time_and_a_base_time_holds_until_the_next() -> None:
    assert both([{"bt": 2e9}, {"t": -7, "v": 1}]) == Told(1_999_999_993_000_000, is_relative=False)
    assert both([{"bt": 1.9e9, "vb": True}, {"bt": 1.8e9, "t": 9, "vs": "x"}]) == Told(
        1_900_000_000_000_000, is_relative=False
    )
    assert both([{"bt": 1.8e9, "s": 5}, {"bt": 1.9e9}]) == Told(1_800_000_000_000_000, is_relative=False)
    assert both([{"bt": -30, "vd": "aGk"}, {"t": 10, "v": 1}]) == Told(-20_000_000, is_relative=True)
    assert both([{"t": 0, "v": 1}]) == Told(0, is_relative=True)


@given(st.floats(RELATIVE_S_MAX, 2**32), st.floats(0, 1e6))
def test_an_absolute_time_is_kept_to_the_microsecond(base: float, time: float) -> None:
    told = both([{"bt": base, "t": time, "v": 1}])
    assert told is not None
    assert not told.is_relative
    assert abs(told.us - (base + time) * 1e6) <= 1


@given(st.integers(-(10**15), 10**15))
def test_times_below_two_to_the_28_are_relative(seconds: int) -> None:
    us = min(max(seconds * 1_000_000, -DEVICE_TIME_US_MAX), DEVICE_TIME_US_MAX)
    assert both([{"t": seconds, "v": 1}]) == Told(us, is_relative=seconds < 2**28)


@pytest.mark.parametrize(
    ("value", "us"),
    [
        (0, 0),
        (-1, -1_000),
        (1_700_000_000_123, 1_700_000_000_123_000),
        (1.700000000123e12, 1_700_000_000_123_000),
        (10**30, DEVICE_TIME_US_MAX),
        (-(10**30), -DEVICE_TIME_US_MAX),
        (1e300, DEVICE_TIME_US_MAX),
    ],
)
def test_a_timestamp_is_whole_milliseconds_since_1970(value: float, us: int) -> None:
    assert OF_TIMESTAMP(json.dumps({"timestamp": value, "metrics": []}).encode()) == Told(us, is_relative=False)
    if abs(value) < 2**64:  # what is more, CBOR has no integer for
        assert OF_TIMESTAMP_CBOR(cbor2.dumps({"timestamp": value})) == Told(us, is_relative=False)


@pytest.mark.parametrize("value", [1.5, "1700000000000", None, True, [1], {}, math.nan, math.inf], ids=repr)
def test_what_is_no_timestamp_says_no_time(value: object) -> None:
    payloads = {OF_TIMESTAMP_CBOR: cbor2.dumps({"timestamp": value})}
    if not isinstance(value, float) or math.isfinite(value):
        payloads[OF_TIMESTAMP] = json.dumps({"timestamp": value}).encode()
    for read, payload in payloads.items():
        with pytest.raises(NothingToldError):
            read(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[]",
        b"[1]",
        b'[{"bt": NaN, "v": 1}]',
        b'[{"t": 1e999, "v": 1}]',
        b'[{"bt": "yesterday", "v": 1}]',
        b'[{"t": true, "v": 1}]',
        b'[{"bt": 1700000000}]',
        b'{"timestamp": 1e999}',
        b'{"timestamp": ' + b"9" * 5_000 + b"}",
        b"[" * 60_000,
        b'[{"t":' * 10_000,
        b'[{"bt":1700000000,"v":1,"n":"' + b"x" * SENML_BYTES_MAX + b'"}]',
        b'[{"bt":1700000000,"v":1}' + b",{}" * SENML_RECORDS_MAX + b"]",
        b'[{"bt":1.%be-300,"v":1}]' % (b"3" * 760),
        b'{"timestamp": [1700000000000' + b",[]" * 20_000 + b"]}",
        b"\xff\xfe",
        b'{"timestamp": 1, "x": "\xff"',
    ],
    ids=lambda payload: payload[:30],
)
def test_what_says_no_time(payload: bytes) -> None:
    for read in (OF_SENML, OF_SENML_CBOR, OF_TIMESTAMP, OF_TIMESTAMP_CBOR):
        with pytest.raises(NothingToldError):
            read(payload)


@pytest.mark.parametrize(
    "bad", [b"1e999", b"1" + b"0" * 5_000, b"[]", b"{}", b'"x"', b"true", b"null", b"[1.%b]" % (b"3" * 760)], ids=bytes
)
def test_a_damaged_time_costs_no_other_record_its_own_in_json(bad: bytes) -> None:
    told = OF_SENML(b'[{"bt":1700000000,"t":%b,"v":1},{"t":5,"v":2}]' % bad)
    assert told == Told(1_700_000_005_000_000, is_relative=False)


def test_a_pack_has_as_many_records_as_are_looked_into() -> None:
    pack = [{"bt": 1_700_000_000, "v": 1}, *({"t": number, "v": 1} for number in range(1, SENML_RECORDS_MAX))]
    assert both(pack[:800]) == Told(1_700_000_799_000_000, is_relative=False)
    assert OF_SENML(json.dumps(pack).encode()) == Told(1_700_001_023_000_000, is_relative=False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300, "x", None, [1], True], ids=repr)
def test_a_damaged_time_costs_no_other_record_its_own(bad: object) -> None:
    pack = [{-3: 1_700_000_000, 6: bad, 2: 1}, {6: 5, 2: 2}]
    told = OF_SENML_CBOR(cbor2.dumps(pack))
    assert told is not None
    # A time beyond all times is a time, which nobody believes.
    assert told.us == (DEVICE_TIME_US_MAX if bad == 1e300 else 1_700_000_005_000_000)


@given(st.binary(max_size=200))
def test_any_bytes_say_a_time_that_can_be_stored_or_none(payload: bytes) -> None:
    for read in (OF_SENML, OF_SENML_CBOR, OF_TIMESTAMP, OF_TIMESTAMP_CBOR):
        try:
            told = read(payload)
        except NothingToldError:
            continue
        assert told is None or abs(told.us) <= DEVICE_TIME_US_MAX


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(-6, 8) | st.text(max_size=3), inner),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.integers(-6, 8), anything, max_size=6), max_size=4))
def test_any_pack_says_a_time_that_can_be_stored_or_none(pack: list[dict[int, object]]) -> None:
    try:
        told = OF_SENML_CBOR(cbor2.dumps(pack))
    except NothingToldError:
        return
    assert told is None or abs(told.us) <= DEVICE_TIME_US_MAX


def test_the_value_stands_behind_the_header_where_the_identity_is_binary() -> None:
    read = read_as("timestamp", "application/octet-stream", "binary")
    header = BINARY.pack(1, 7, 1, 2, 3)
    assert read(header + b'{"timestamp":1700000000000}') == Told(1_700_000_000_000_000, is_relative=False)
    with pytest.raises(NothingToldError):
        read(b"\x01")


def test_what_is_read_elsewhere_has_no_reader() -> None:
    assert reader("auto", "json", "application/json") is None
    assert reader("receipt", "json", "application/json") is None
    with pytest.raises(NothingToldError):
        read_as("tick", identity="json")(b'{"boot":1,"seq":1}')
