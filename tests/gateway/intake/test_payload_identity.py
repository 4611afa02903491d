"""Who took a reading, as each layout says it; whatever a payload holds, it costs nothing but its identity."""

import json

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gateway.intake.payload_identity import BINARY, TICK_MODULUS, TICK_UNREADABLE, Identity, Reader, reader
from gateway.settings import PayloadIdentity

MEMBERS = {"celsius": 21.53, "boot": "7-1a2b3c4d", "seq": 123, "tick": 456789}


def read_as(layout: PayloadIdentity) -> Reader:
    found = reader(layout)
    assert found is not None
    return found


OF_JSON, OF_CBOR, OF_BINARY = read_as("json"), read_as("cbor"), read_as("binary")


def test_an_example_of_each_layout() -> None:
    identity = Identity("7-1a2b3c4d", 123, 456789)
    assert OF_JSON(b'{"celsius":21.53,"boot":"7-1a2b3c4d","seq":123,"tick":456789}') == identity
    assert OF_CBOR(cbor2.dumps(MEMBERS)) == identity
    # The bytes of PAYLOADS.md.
    assert OF_BINARY(bytes.fromhex("01 07000000 4d3c2b1a 7b000000 55f80600 32312e3533")) == identity
    assert reader("none") is None


boots = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)


@given(boots | st.integers(0, 2**63), st.integers(0, 2**63 - 1), st.none() | st.integers(0, TICK_MODULUS - 1))
def test_json_and_cbor_say_the_same(boot: str | int, sequence: int, tick_ms: int | None) -> None:
    members = {"boot": boot, "seq": sequence, "lost": [0, 5]} | ({} if tick_ms is None else {"tick": tick_ms})
    expected = Identity(str(boot), sequence, tick_ms, (0, 5))
    assert OF_JSON(json.dumps(members).encode()) == expected
    assert OF_CBOR(cbor2.dumps(members)) == expected
    assert expected.dropped() == ((0, 5) if sequence > 5 else None)


@given(*[st.integers(0, 2**32 - 1)] * 4, st.binary())
def test_the_binary_header_says_the_same_whatever_follows(
    boot: int, incarnation: int, sequence: int, tick_ms: int, value: bytes
) -> None:
    found = OF_BINARY(BINARY.pack(1, boot, incarnation, sequence, tick_ms) + value)
    assert found == Identity(f"{boot}-{incarnation:08x}", sequence, tick_ms)


@pytest.mark.parametrize(
    "tick", [-1, 2**32, 10**30, 1.5, "12", True, [], {}, float("1e300")], ids=lambda tick: repr(tick)[:20]
)
def test_a_tick_that_makes_no_sense_is_told_from_none(tick: object) -> None:
    identity = Identity("7", 1, TICK_UNREADABLE)
    assert OF_JSON(json.dumps({"boot": "7", "seq": 1, "tick": tick}).encode()) == identity
    assert OF_CBOR(cbor2.dumps({"boot": "7", "seq": 1, "tick": tick})) == identity


def test_a_tick_may_be_null_for_none() -> None:
    members = {"boot": "7", "seq": 1, "tick": None}
    assert OF_JSON(json.dumps(members).encode()) == OF_CBOR(cbor2.dumps(members)) == Identity("7", 1, None)


@pytest.mark.parametrize("number", [b"1e999", b"9" * 5_000, b"-1e999"])
def test_a_number_beyond_all_reading_costs_its_member_alone(number: bytes) -> None:
    assert OF_JSON(b'{"boot":"7","seq":9,"tick":%b,"lost":[1,2]}' % number) == Identity("7", 9, TICK_UNREADABLE, (1, 2))
    found = OF_JSON(b'{"boot":"7","seq":9,"tick":5,"lost":%b}' % number)
    assert found == Identity("7", 9, 5, None)
    assert OF_JSON(b'{"boot":"7","seq":9,"celsius":%b}' % number) == Identity("7", 9)
    assert OF_JSON(b'{"boot":%b,"seq":9}' % number) is None


@pytest.mark.parametrize(
    "lost",
    [
        b"null",
        b"[]",
        b"[1]",
        b"[1,2,3]",
        b'["1",2]',
        b"[1.5,2]",
        b"[true,2]",
        b"[2,1]",
        b"[1,9]",
        b"{}",
        b"[%b]" % b",".join([b"1.%be-300" % (b"3" * 760)] * 80),
        b"[%b]" % b",".join([b"9" * 4_299] * 14),
        b"[%b]" % b",".join([b"{}"] * 20_000),
        b"[" * 60_000,
    ],
    ids=lambda lost: str(lost[:20]),
)
def test_what_cannot_have_been_dropped_costs_its_member_alone(lost: bytes) -> None:
    found = OF_JSON(b'{"boot":"7","seq":9,"tick":5,"lost":%b}' % lost)
    if lost == b"[" * 60_000:
        assert found is None, "no JSON"
        return
    assert found is not None
    assert (found.boot, found.seq, found.tick, found.dropped()) == ("7", 9, 5, None)
    assert found.lost is not UNSET
    assert found.lost is None or len(lost) < 10, "nothing is made of what is no pair of numbers"


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"boot": "7"},
        {"seq": 7},
        {"boot": "", "seq": 1},
        {"boot": "x" * 65, "seq": 1},
        {"boot": 7, "seq": -1},
        {"boot": 7, "seq": 2**63},
        {"boot": 7, "seq": True},
        {"boot": True, "seq": 1},
        {"boot": 7, "seq": 1.0},
        {"boot": None, "seq": 1},
        {"boot": 10**70, "seq": 1},
        [7, 1],
        7,
    ],
    ids=repr,
)
def test_what_is_no_identity(members: object) -> None:
    assert OF_CBOR(cbor2.dumps(members)) is None
    # Of 1.0 JSON cannot tell that it is none.
    if members != {"boot": 7, "seq": 1.0}:
        assert OF_JSON(json.dumps(members).encode()) is None


@given(st.binary(max_size=200))
def test_any_bytes_have_an_identity_or_none(payload: bytes) -> None:
    for read in (OF_JSON, OF_CBOR, OF_BINARY):
        found = read(payload)
        assert found is None or (isinstance(found.boot, str) and 0 <= found.seq < 2**63)
        assert found is None or found.lost is UNSET or found.dropped() is None or found.seq > 0


def test_what_is_not_of_this_version_or_too_short_has_no_binary_header() -> None:
    header = BINARY.pack(1, 7, 1, 2, 3)
    assert OF_BINARY(header) is not None
    assert OF_BINARY(header[:-1]) is None
    assert OF_BINARY(b"\x02" + header[1:]) is None
    assert OF_BINARY(b'{"celsius": 21.53}') is None, "no text begins so"


def test_what_is_tagged_in_cbor_costs_no_identity() -> None:
    rest = {"when": cbor2.CBORTag(1, 1_700_000_000), "unknown": cbor2.CBORTag(4711, [1]), "big": 2**70}
    assert OF_CBOR(cbor2.dumps(MEMBERS | rest)) == Identity("7-1a2b3c4d", 123, 456789)


@pytest.mark.parametrize("large", [[0.5] * 30_000, b"x" * 100_000, "ä" * 100_000, {str(n): n for n in range(9_000)}])
def test_a_large_member_costs_no_identity_that_stands_before_it(large: object) -> None:
    assert OF_CBOR(cbor2.dumps(MEMBERS | {"wave": large})) == Identity("7-1a2b3c4d", 123, 456789)
    assert OF_CBOR(cbor2.dumps({"wave": large} | MEMBERS)) is None
