"""The identity of a reading in each layout. A damaged payload costs the identity, and nothing else."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from gateway.intake import payload_json
from gateway.intake.payload_identity import BINARY, TICK_MODULUS, TICK_UNREADABLE, Identity, Reader, reader, why_none
from gateway.intake.payload_json import ITEMS_MAX, fault, is_json
from gateway.intake.payload_time import NothingToldError, of_senml_json
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
    # The bytes of docs/payloads.md.
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


NO_NUMBERS = [
    *(b"nan", b"NaN", b"NAN", b"-nan", b"+nan", b"-nan(ind)", b"nan(0x7ff8)", b"1.#QNAN", b"-1.#IND", b"1.#INF"),
    *(b"inf", b"Inf", b"INF", b"-inf", b"+inf", b"Infinity", b"-Infinity", b"infinity", b"ovf"),
    *(b"undefined", b"None", b"+21.5", b".5", b"5.", b"007", b"0x1F", b"--", b"", b" ", b"tru"),
]


@pytest.mark.parametrize("word", NO_NUMBERS)
def test_what_is_no_number_costs_its_member_alone(word: bytes) -> None:
    assert OF_JSON(b'{"boot":"b1","seq":2,"celsius":%b}' % word) == Identity("b1", 2)
    inner = b'[1,%b,{"y":%b}]' % (word.strip() or b"null", word)
    assert OF_JSON(b'{"t":%b, "boot":7,"seq":2 ,"tick":5,"x":%b}' % (word, inner)) == Identity("7", 2, 5)
    assert OF_JSON(b'{"boot":"b1","seq":2,"tick":%b}' % word) == Identity("b1", 2, TICK_UNREADABLE)
    found = OF_JSON(b'{"boot":"b1","seq":2,"lost":%b}' % word)
    assert found == Identity("b1", 2, None, None)
    assert OF_JSON(b'{"boot":%b,"seq":2}' % word) is None
    assert OF_JSON(b'{"boot":"b1","seq":%b}' % word) is None


def test_what_a_text_holds_is_left_as_it_is() -> None:
    boot = 'nan," :inf\\"[{,:}]\u00e4'
    for name in (boot, "nan", "-inf", "x:,}"):
        members = {name: 1, "boot": name, "seq": 2}
        assert OF_JSON(json.dumps(members)[:-1].encode() + b',"t":nan}') == Identity(name, 2)


AROUND = [b"\0", b"\0\0\0", b" ", b"\r\n", b"\x1a", b"\t\0 "]


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b" \xef\xbb\xbf ", *AROUND], ids=repr)
@pytest.mark.parametrize("behind", [b"", *AROUND], ids=repr)
def test_what_stands_around_an_object_costs_no_identity(before: bytes, behind: bytes) -> None:
    assert OF_JSON(before + b'{"boot":"b1","seq":2,"v":1}' + behind) == Identity("b1", 2)


def test_control_characters_and_bytes_that_are_no_utf8_cost_their_member_alone() -> None:
    for text in (b"x\ty", b"x\0y", b"x\n", b"\xe4", b"\xff\xfe"):
        assert OF_JSON(b'{"boot":"b1","name":"%b","seq":2}' % text) == Identity("b1", 2)
    assert OF_JSON(b'{"boot":"\xe4","seq":2}') is None


@pytest.mark.parametrize("text", ["2", "02", " 2", "2 ", "+2", "2.0"])
def test_a_text_that_is_a_whole_number_is_a_sequence(text: str) -> None:
    for boot, name in (("b1", "b1"), (7, "7")):
        members = {"boot": boot, "seq": text, "v": 1}
        assert OF_JSON(json.dumps(members).encode()) == OF_CBOR(cbor2.dumps(members)) == Identity(name, 2)
        assert OF_JSON(json.dumps(members)[:-1].encode() + b',"t":nan}\0') == Identity(name, 2)


@pytest.mark.parametrize("text", ["", " ", "-2", "2.5", "0x2", "2e0", "1 2", "\u0662", "two", str(2**63), "9" * 5_000])
def test_any_other_text_is_none(text: str) -> None:
    members = {"boot": "b1", "seq": text}
    assert OF_JSON(json.dumps(members).encode()) is OF_CBOR(cbor2.dumps(members)) is None


@pytest.mark.parametrize(
    "payload",
    [
        b'{"boot":"b1","seq":2',
        b'{"boot":"b1","seq":1nan2}',
        b'{"boot":"b1","seq":1 2}',
        b'{"boot":"b1","seq":1\x002}',
        b'{"boot":"b1","seq":2}{"seq":3}',
        b'{"boot":"b1","seq":2} x',
        b'x {"boot":"b1","seq":2}',
        b'[{"boot":"b1","seq":2,"t":nan}]',
        b"{'boot':'b1','seq':2}",
        b'{boot:"b1",seq:2}',
        b'"{nan}"',
        b"nan",
    ],
)
def test_nothing_is_guessed_of_what_is_no_object(payload: bytes) -> None:
    assert OF_JSON(payload) is None


WHOLE = b'{"boot":"b1","seq":2,"t":nan,"x":[%b]}'
HOSTILE = [
    *(b"," * 65_536, b"[" * 65_536, b'"' * 65_536, b"nan," * 16_384, b"1," * 32_768, b"[]," * 21_845, b":," * 32_768),
    *(b'{"a":' + b'"' * 65_530, b"x," * 32_768, b"1" * 65_536, b"1" * 65_535 + b"x", b":" * 65_536, b": " * 32_768),
    *(b" " * 65_536, b'"\\' * 32_768, b"nan " * 16_384, b"\\" * 65_536, b"[" * 65_532 + b"nan", b"-" * 65_536),
    *(b":" + b" " * 65_535, (b":" + b" " * 100) * 600, b'{"x":nan,"a":"' + b"\\n" * 32_000, b"\xef\xbb\xbf" * 21_845),
    *(
        WHOLE % (b"[" * 30_000 + b"]" * 30_000),
        WHOLE % (b"nan," * 16_000 + b"1"),
        b"1e" * 32_768,
        b'{"boot":nan' * 5_000,
    ),
]


@pytest.mark.parametrize("payload", HOSTILE, ids=lambda payload: repr(payload[:20]))
def test_at_most_a_few_thousand_items_of_a_hostile_payload_are_looked_at(
    payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []

    class Counted:
        def finditer(self, text: bytes) -> Iterator[re.Match[bytes]]:
            for item in pattern.finditer(text):
                looked_at.append(len(item[0]))
                yield item

    pattern = payload_json._ITEM
    monkeypatch.setattr(payload_json, "_ITEM", Counted())
    assert OF_JSON(payload) is None
    assert len(why_none("json", payload)) < 100
    with suppress(NothingToldError):
        of_senml_json(payload)
    # For all three it is mended once, and once more the first word is looked for that is no value.
    assert len(looked_at) <= 2 * ITEMS_MAX
    assert sum(looked_at) <= 2 * len(payload)


def test_hostile_payloads_are_read_in_a_time_that_grows_with_their_length() -> None:
    """One that took the square of its length would take minutes."""
    began_s = time.process_time()
    for payload in HOSTILE:
        assert OF_JSON(payload) is None
    assert time.process_time() - began_s < 5


def test_a_large_payload_is_mended_up_to_a_bound() -> None:
    assert OF_JSON(WHOLE % (b"nan," + b"1.5," * 15_000 + b"1")) == Identity("b1", 2)
    assert OF_JSON(WHOLE % (b"nan," * 4_000 + b"1")) == Identity("b1", 2)
    assert OF_JSON(WHOLE % (b"1.5," * 4_000 + b"nan")) == Identity("b1", 2)
    assert OF_JSON(WHOLE % (b"1.5," * 5_000 + b"nan")) is None, "not looked into"
    assert OF_JSON(WHOLE % (b"nan," + b"1.5," * 20_000 + b"1")) is None, "not looked into"


def no_json(constant: str) -> None:
    """Python's reader takes NaN and infinities."""
    raise ValueError(constant)


PARTS = [
    *(b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b" ", b"\0", b"x", b"1"),
    b'"boot":"b"',
    b'"seq":1',
    *NO_NUMBERS[:4],
]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map(b"".join))
def test_strict_json_is_told_from_all_else(payload: bytes) -> None:
    try:
        strict = json.loads(payload.decode(), parse_constant=no_json)
    except ValueError:
        assert not is_json(payload)
        assert fault(payload) != "it is JSON"
        return
    assert is_json(payload)
    assert (OF_JSON(payload) is not None) == (type(strict) is dict and strict.keys() >= {"boot", "seq"})


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b'{"celsius":21.5}', "no `boot` and no `seq`"),
        (b'{"boot":"b1","celsius":nan}', "no `seq`"),
        (b'{"boot":"b1","seq":"two"}', "`seq` is a text that is no number"),
        (b'{"boot":"b1","seq":null}', "`seq` is null, not a whole number from 0 to 9223372036854775807"),
        (b'{"boot":"b1","seq":nan}', "`seq` is no JSON value, not a whole number from 0 to 9223372036854775807"),
        (b'{"boot":"","seq":1}', "`boot` is a text of 0 characters, not a text of 1 to 64 characters"),
        (b'{"boot":[1],"seq":1}', "`boot` is a list, not a text of 1 to 64 characters"),
        (b"[1]", "no JSON object"),
        (b"nan", "no JSON object"),
        (b"", "no JSON: it ends too early, after 0 bytes"),
        (b'{"boot":"b1","seq":2', "no JSON: it ends too early, after 20 bytes"),
        (b'{"boot":"b1","seq":2,}', "no JSON: `}` at byte 22"),
        (b'{"boot":"b1","seq":1} x', "no JSON: `x` at byte 23"),
        (b"{'boot':'b1'}", "no JSON: `'boot'` at byte 2"),
        (b'{"boot":"\xe4","seq":2}', "`boot` is no JSON value, not a text of 1 to 64 characters"),
        (b"[" * 60_000, "no JSON object"),
    ],
)
def test_why_there_is_no_identity_in_json(payload: bytes, why: str) -> None:
    assert OF_JSON(payload) is None
    assert why_none("json", payload) == why


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b'{"boot":"b1","seq":2,"celsius":nan}', "`nan` at byte 32"),
        (b'{"boot":"b1","seq":2,"celsius":-Infinity}', "`-Infinity` at byte 32"),
        (b'{"a":01}', "`01` at byte 6"),
        (b'{"a":}', "`}` at byte 6"),
        (b"nan", "`nan` at byte 1"),
        (b"ON", "`ON` at byte 1"),
        (b'{"v":1}\0', "a NUL at byte 8"),
        (b'{"v":"\n"}', "a control character at byte 7"),
        (b'\xef\xbb\xbf{"v":1}', "a byte order mark at byte 1"),
        (b'{"v":"\xe4"}', "no UTF-8 at byte 7"),
        (b"[" * 60_000, "too many levels"),
        (b"x" * 60_000, f"`{'x' * 16}` at byte 1"),
    ],
)
def test_what_is_wrong_with_json(payload: bytes, words: str) -> None:
    assert not is_json(payload)
    assert fault(payload) == words


def test_why_there_is_no_identity_in_other_layouts() -> None:
    assert why_none("cbor", b"\xff") == "no CBOR"
    assert why_none("cbor", cbor2.dumps([1])) == "no CBOR map"
    assert why_none("cbor", cbor2.dumps({"boot": 1})) == "no `seq`"
    assert why_none("cbor", cbor2.dumps({"boot": 1, "seq": "x"})) == "`seq` is a text that is no number"
    assert why_none("binary", b"\1") == "1 byte, and the header alone has 17"
    assert why_none("binary", b"\2" * 17) == "the first byte is 2, and the header's version is 1"


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


def test_bytes_of_another_version_or_too_few_have_no_binary_header() -> None:
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
