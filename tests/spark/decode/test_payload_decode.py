"""Payloads as the rule book reads them, declared and not, against Python's own parser and decimals."""

import dataclasses
import json
import random
import re
import struct
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, Row, SparkSession

from spark.decode import codec_avro, codec_plain, correction_records
from spark.decode.record_frames import READ_SCHEMA, through_rules
from spark.decode.record_rules import UNKNOWN_TYPE, Reader
from spark.decode.streams_file import NO_STREAMS, Streams, parse_streams
from tests.spark.decode.test_codecs import SCHEMA, climate, registry
from tests.support import oracle_payloads, spark_oracle
from tests.support.oracle_payloads import Outcome, UnreadableError
from tests.support.read_records import rows_read
from tests.support.sizes import size
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, changed, correction, kafka_frame, reading, reading_headers, rfc3339


def object_of(*members: str) -> str:
    return "{" + ", ".join(members) + "}"


def tiny(count: int) -> list[str]:
    """Members whose values a variant cannot hold exactly."""
    return [f'"m{number}": {number}.5e-4' for number in range(count)]


JSON_TEXTS = [
    '{"t": 21.5, "h": 40}',
    '{"boot": 3, "seq": 17, "tick": 99, "t": 1}',
    '{"timestamp": 1795348810000, "t": 1}',
    '{"t": 1.10, "ok": true, "unit": "12", "none": null, "more": {"x": 1.0}, "list": [1.5, 2]}',
    ' {"t" : -0.0000005 }\n',
    '{"t": 0.0000005, "u": 0.0000004999999999999999999999999}',
    '{"t": 1e-7, "u": 5E-7, "v": -5e-7, "w": 1.5e+3}',
    '{"t": 1.0000004999999999999999999999e0}',
    '{"t": 1.2345675000000000000000000000000000000000001}',
    '{"t": 999999999999.999999}',
    '{"t": 999999999999.9999994}',
    '{"t": 999999999999.9999995}',
    '{"t": -999999999999.9999995, "u": 1}',
    '{"t": 1e11}',
    '{"t": 1e12}',
    '{"t": 1e400}',
    '{"t": 1e-400, "u": 2}',
    '{"t": 1e-9999999999}',
    '{"t": 0e999, "u": 0.0e-5, "v": -0, "w": -0.0}',
    '{"t": 9223372036854775808}',
    '{"t": 123456789012345678901234567890123456789012}',
    '{"t": 100.00, "u": 1200, "v": 1.0}',
    '{"t": 0.' + "0" * 40 + "1}",
    '{"t": ' + "1" * 900 + "}",
    '{"t": ' + "1" * 1500 + "}",
    '{"": 5, "a b": 6, "ä": 7, "q\\"1e5\\\\": 1e-1, "1.5": 2e0}',
    '{"text": "1e5 \\" 2 {", "t": 3e0, "\\u0041": 4e0}',
    '{"text": "' + "x\\n" * 20_000 + '", "t": 1e1}',
    '{"t": 1, "t": 2}',
    '{"a": {"x": 1, "x": 2}, "t": 1}',
    '{"t": NaN}',
    '{"t": Infinity}',
    '{"t": nan, "u": 1}',
    '{"t": [nan, -inf ], "u": {"x": NaN}, "v": 2e0, "w": 1.10}',
    '{"t": "nan", "nan": 1, "inf,": -nan(ind), "q\\"nan}": 1e-7}',
    '{"t": -1.#IND, "u": 1.#QNAN, "v": 1.5, "w": -1.5, "x": ovf, "y": +inf, "z": null, "t2": -11}',
    '{"t": nanx, "u": 1}',
    '{"t": xnan, "u": 1}',
    '{"nan": nan}',
    "{nan: 1}",
    '{"t": 1}nan',
    '{"text": "' + "nan\\n" * 20_000 + '", "t": nan, "u": 1e1}',
    '{"t": [' + "nan," * 20_000 + '1], "u": 2}',
    ' \ufeff{"t": 1}\x00\x00',
    '{"t": 1\x00}',
    "{'t': 1}",
    "{t: 1}",
    '{"t": 01}',
    '{"t": +1}',
    '{"t": .5}',
    '{"t": 1.}',
    '{"t": 1,}',
    '{"t": 1} x',
    '{"t": 1}{"t": 2}',
    '{"t": 1}\x00',
    '{"t": 1},0',
    '{"t": 1},0]',
    '{"t": 1},0,1]',
    '{"t": 1},0]}',
    '{"t": 1},"b":0}',
    '{"t": [1]},0] ',
    '{"t": "]", "u": 1}',
    '[{"t": 1}]',
    "12",
    '"text"',
    "null",
    "true",
    "",
    " ",
    "{}",
    '{"t": "21.5"}',
    '{"seq": 4}',
    '{"t": "\t", "u": 1}',
    '\ufeff{"t": 1}',
    '\u00a0{"t": 1}',
    '{/* no */ "t": 1}',
    '{"\\ud800": 1}',
    '{"t": "\\ud83d\\ude00", "u": 1}',
    '{"a":' * 600 + '{"b": 1}' + "}" * 600,
    '{"a":' * 2000 + '{"b": 1}' + "}" * 2000,
    object_of(*tiny(256), '"seq": 1', '"unit": "C"'),
    object_of(*tiny(257)),
    # Each would take minutes if members were looked up by name: they are either too many, or among too many.
    object_of(*tiny(20_000)),
    object_of(*(f'"x{number}": "1"' for number in range(60_000)), *tiny(256), '"ü": 1e-6', '"seq": 2'),
    object_of(*(f'"x{number}": "1"' for number in range(60_000)), *tiny(254), '"\U0001f321": 1e-6', '"\uffee": 2e-6'),
]
PLAIN_TEXTS = [
    *("21.5", "-3", "+4", " 7\n", ".5", "5.", "1e3", "1E-7", "5e-7", "-5e-7", "0e999", "1e12", "999999999999.9999995"),
    *("\ufeff21.5\r\n", "21.5\x00", "\x00"),
    *("", "-", ".", "1 2", "NaN", "Infinity", "0x10", "1f", "1d", "1_0", "1,5", "\u0661", "1e", "e5", "--1", "on"),
    *("1e-10000000", "1e99999999999", "1e0007", "1" * 64, "0" * 63 + "7", "0" * 64 + "7", "0." + "0" * 30 + "1e31"),
]


def drawn_number(rng: random.Random) -> str:
    """Numbers as sensors and languages print them, and near the bounds of a decimal(18,6)."""
    digits = str(rng.getrandbits(rng.choice([4, 20, 40, 64, 100])))
    match rng.randrange(6):
        case 0:
            text = digits
        case 1:
            text = f"{digits}.{rng.getrandbits(rng.choice([4, 20, 40, 90]))}"
        case 2:
            text = f"{digits[0]}.{digits[1:] or 0}e{rng.randrange(-20, 15)}"
        case 3:
            text = repr(rng.random() * 10.0 ** rng.randrange(-10, 16))
        case 4:
            text = f"{rng.randrange(10**6)}.{rng.randrange(10**6):06d}{rng.choice(['5', '49999', '50000000001', ''])}"
        case _:
            text = f"{digits}E+{rng.randrange(5)}"
    return rng.choice(["", "-"]) + text


def drawn_text(rng: random.Random) -> str:
    names = rng.sample(["t", "u", "seq", "v w", 'q"uote', "\\", "1e5", "ü"], rng.randrange(1, 4))
    members = [f"{json.dumps(name)}: {drawn_number(rng)}" for name in names]
    if rng.random() < 0.3:
        members.insert(0, rng.choice(['"n": {"x": 1e-3}', '"s": "1e-5\\\\"', '"s": "a\\"2e7"', '"l": [1e1, "]"]']))
    text = "{" + rng.choice([",", ", ", " ,\n"]).join(members) + "}"
    if rng.random() < 0.2:
        # One damaged byte.
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice('0"{}],e.x') + text[place + rng.randrange(2) :]
    return text


def found_in(records: list[KafkaRecord], streams: Streams = NO_STREAMS) -> list[Outcome]:
    """The results for the records, in their order."""
    placed = [replace(record, offset=offset) for offset, record in enumerate(records)]
    rows = rows_read(placed, streams)
    assert [row.value for row in rows] == [record.value for record in records]
    return [outcome_of(row) for row in rows]


def outcome_of(row: Row) -> Outcome:
    assert (row.metrics is None) == (row.reject_reason is not None), row
    metrics = None if row.metrics is None else {metric.name: metric.value for metric in row.metrics}
    assert all(metric.ago_us is None for metric in row.metrics or ())
    kind, _, detail = (row.reject_reason or "").partition(": ")
    words, _, value = detail.rpartition(": ")
    if kind == "out-of-range" and words not in {"", "value is outside decimal(18,6)"}:
        assert re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", value), row.reject_reason
        return Outcome(metrics, row.undeclared, f"{kind}: {words}")
    return Outcome(metrics, row.undeclared, kind or None)


def assert_as_expected(found: list[Outcome], records: list[KafkaRecord], streams: Streams) -> None:
    for outcome, record in zip(found, records, strict=True):
        expected = oracle_payloads.outcome(spark_oracle.read_headers(record), streams)
        assert outcome == expected, (record.topic, record.value)
        # In their order too.
        assert list(outcome.metrics or ()) == list(expected.metrics or ()), record.value


PLAIN = reading_headers(content_type="text/plain; charset=us-ascii")


BYTES = reading_headers(content_type="application/octet-stream")


def test_a_member_that_is_no_number_is_null_and_its_neighbours_count() -> None:
    """Payloads with a declaration, and payloads that a gateway does not call JSON."""
    texts = [
        b'{"boot":"b1","seq":2,"t":nan,"u":40}',
        b'{"boot":"b1","seq":2,"u":40,"t":-Infinity}\0',
        b'\xef\xbb\xbf {"boot":"b1","seq":"2","u":40}\r\n\0',
        b'{"u":40.0e0,"name":"nan, \\"inf}","t":-nan(ind)}',
    ]
    humidity = Outcome({"humidity": Decimal(40)})
    assert found_in([reading(text) for text in texts], DECLARED) == [humidity] * len(texts)

    others = [b'{"t":nan}', b'{"t":+1}', b"\x01\x07{", b"\xff{", b'[{"n":"u","v":40},{"n":"t","v":nan}]']
    found = found_in([reading(text, BYTES) for text in (*texts, *others)])
    undecodable = Outcome(None, None, "undecodable")
    whole = Outcome({"u": Decimal(40)})
    assert found == [*[whole] * len(texts), *[undecodable] * (len(others) - 1), whole]


@pytest.mark.campaign(seconds=15)
def test_payloads_are_read_as_pythons_decimals_read_them() -> None:
    rng = random.Random(3)  # noqa: S311 - the same draw every time
    plain = [text.encode() for text in PLAIN_TEXTS] + [drawn_number(rng).encode() for _ in range(size(100, 500))]
    objects = [text.encode() for text in JSON_TEXTS] + [drawn_text(rng).encode() for _ in range(size(200, 1_500))]
    objects += [b"\xff", b'{"t\xc3": 1}', b'{"t\xed\xa0\x80": 1}', '{"t": 1}'.encode("utf-16")]
    records = [reading(value, PLAIN) for value in plain] + [reading(value) for value in objects]

    assert_as_expected(found_in(records), records, NO_STREAMS)


DECLARED = parse_streams(
    r"""
    unknown = "accept"

    [streams.device-thermo]
    codec = "json"
    [streams.device-thermo.metrics.t]
    decimals = 2
    min = -40
    max = 125.5
    [streams.device-thermo.metrics.humidity]
    from = "u"
    decimals = 0
    min = 0
    [streams.device-thermo.metrics."it's \"v\""]
    from = ["v w"]
    [streams.device-thermo.metrics."ü"]
    [streams.device-thermo.metrics.T]
    [streams.device-thermo.metrics.tick]
    [streams.device-thermo.metrics.seconds]
    from = "x"
    scale = "0.001"
    decimals = 3
    min = -40.125
    [streams.device-thermo.metrics.millionths]
    from = ["a.b"]
    scale = "0.000001"

    [streams."device-n*"]
    codec = "json"
    [streams."device-n*".metrics.x]
    from = "n.x"
    decimals = 3
    scale = "0.01"
    [streams."device-n*".metrics.deep]
    from = ["n", "o", "1.5"]
    [streams."device-n*".metrics.t]

    [streams."device-*"]
    codec = "json"

    [streams.level]
    codec = "number"
    [streams.level.metrics.metres]
    decimals = 3
    min = 0
    max = 10

    [streams.counter]
    codec = "number"
    [streams.counter.metrics.kilowatt_hours]
    scale = "0.001"
    min = 0
    """,
    Path("streams.toml"),
)
TOPICS = ("device-thermo", "device-thermo", "device-nested", "device-other", "level", "counter", "elsewhere")
NAMES = ("t", "T", "u", "v w", "ü", "n", "seq", "tick", "boot", "x", "a.b", "", 'q"', "\U0001f321", "\uffee")
SPACES = st.sampled_from(["", "", "", " ", "\n", "\r\n\t"])
NUMBERS = st.one_of(
    st.from_regex(r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,8})?", fullmatch=True),
    st.sampled_from(
        [
            "125.504999",
            "125.505",
            "-40.005",
            "-40.0049",
            "0.5",
            "-0.5",
            "-0.4",
            "1.0049999996",
            "1e2",
            "1E-7",
            "-0",
            "00",
            "1795824515000",
            "-40125.49",
            "-40125.5",
        ]
    ),
    st.integers(-(10**13), 10**13).map(str),
    st.integers(-(10**19), 10**19).map(str),
    st.floats(allow_nan=True, allow_infinity=True).map(repr),
    st.from_regex(r"[+-]?[0-9]{0,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,4})?", fullmatch=True),
)
TEXTS = st.one_of(
    st.sampled_from(["7-1a2b3c4d", "21.5", "1e5", "C", "", "a:b", "t", "}", "]", ',"t":1']), st.text(max_size=8)
).map(lambda text: json.dumps(text, ensure_ascii=False))
SCALARS = st.one_of(
    NUMBERS, NUMBERS, NUMBERS, TEXTS, st.sampled_from(["true", "false", "null", "NaN", "[]", "{}", "[1, 2]"])
)


def objects(values: st.SearchStrategy[str], names: tuple[str, ...] = NAMES) -> st.SearchStrategy[str]:
    name = st.sampled_from(names).map(lambda name: json.dumps(name, ensure_ascii=False))
    member = st.tuples(SPACES, name, SPACES, st.just(":"), SPACES, values, SPACES).map("".join)
    text = st.lists(member, max_size=6, unique_by=lambda member: member.split(":")[0].strip()).map(",".join)
    return st.tuples(SPACES, text, SPACES).map(lambda parts: f"{parts[0]}{{{parts[1]}}}{parts[2]}")


def nested(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    inner = objects(st.one_of(values, objects(values, ("1.5", "x"))), ("x", "o", "y"))
    return st.one_of(values, inner)


@st.composite
def payloads(draw: st.DrawFn) -> str:
    """Usual payloads, odd ones, and such that were damaged on their way."""
    text = draw(st.one_of(objects(SCALARS), objects(SCALARS, ("t", "u", "boot")), objects(nested(SCALARS)), NUMBERS))
    if draw(st.integers(0, 4)) == 0:
        place = draw(st.integers(0, len(text)))
        damage = draw(
            st.sampled_from(['"', "{", "}", "]", ",", "0", ":", "e", " ", "\x00", '{"t":1}', ',"t":1', "\\", ""])
        )
        text = text[:place] + damage + text[place + draw(st.integers(0, 1)) :]
    return text


@pytest.mark.campaign(seconds=20)
@settings(max_examples=size(100, 2_000), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(TOPICS), st.booleans(), payloads()), min_size=1, max_size=10))
def test_declared_streams_are_read_as_declared(drawn: list[tuple[str, bool, str]]) -> None:
    records = [
        replace(reading(text.encode("utf-8", "surrogatepass"), PLAIN if is_plain else None), topic=topic)
        for topic, is_plain, text in drawn
    ]

    assert_as_expected(found_in(records, DECLARED), records, DECLARED)


@pytest.mark.long(seconds=9)
def test_each_text_that_is_odd_is_read_as_declared() -> None:
    rng = random.Random(4)  # noqa: S311 - the same draw every time
    texts = JSON_TEXTS + PLAIN_TEXTS + [drawn_text(rng) for _ in range(1000)]
    topics = ("device-thermo", "level", "counter")
    records = [replace(reading(text.encode()), topic=topic) for text in texts for topic in topics]

    assert_as_expected(found_in(records, DECLARED), records, DECLARED)


def test_an_analyst_sees_what_was_declared_and_what_was_not() -> None:
    texts = [
        b'{"t": 21.504, "u": 40.5, "boot": "7-1a2b3c4d", "seq": 17}',
        b'{"t": 21.504, "lux": 300, "unit": "C"}',
        b'{"t": 300, "u": 40}',
        b'{"celsius": 21.5}',
        b'{"u": null, "t": "21.5"}',
    ]

    usual, new, wrong, renamed, empty = found_in([reading(text) for text in texts], DECLARED)

    assert usual == Outcome({"humidity": Decimal(41), "t": Decimal("21.50")})
    # A new member does not stop the job: it is told, and a replay finds it in `log`.
    assert new == Outcome({"t": Decimal("21.50")}, ["lux"])
    assert wrong == Outcome(None, None, "out-of-range: t is not between -40 and 125.5")
    assert renamed == Outcome(None, ["celsius"], "undecodable")
    assert empty == Outcome(None, None, "undecodable")


def test_a_number_that_no_table_holds_leaves_its_neighbours_alone() -> None:
    texts = [
        b'{"ts":1795824515000,"temp":21}',
        b'{"serial": 28061512345678901234, "temp": 21, "wh": -1e12, "x": 1e300, "z": 1000000000000.5}',
        b'{"temp": 21, "ts": 1795824515000}',
    ]
    new, more, declared = found_in(
        [*map(reading, texts[:2]), replace(reading(texts[2]), topic="device-declared")],
        parse_streams(
            'unknown = "accept"\n[streams.device-declared]\ncodec = "json"\n[streams.device-declared.metrics.temp]\n',
            Path("streams.toml"),
        ),
    )

    assert new == declared == Outcome({"temp": Decimal(21)}, ["ts"])
    assert more == Outcome({"temp": Decimal(21)}, ["serial", "wh", "x", "z"])


def test_a_large_number_is_stored_exactly_where_its_declaration_has_a_scale() -> None:
    scales = """
        [streams.{topic}.metrics.seconds]
        from = "ts"
        scale = "0.001"
        decimals = 3
        [streams.{topic}.metrics.kilowatt_hours]
        from = "wh"
        scale = "0.001"
        max = 1000000
        [streams.{topic}.metrics.serial]
        scale = "0.000001"
        """
    declared = {"device-thermo": "json", "device-cbor": "cbor", "device-pack": "senml-json"}
    sections = [
        f'[streams.{topic}]\ncodec = "{codec}"' + scales.format(topic=topic) for topic, codec in declared.items()
    ]
    streams = parse_streams("\n".join(sections), Path("streams.toml"))
    members = {"ts": 1_795_824_515_000, "wh": 12_345_678, "serial": 123_456_789_012_345_678}
    pack = json.dumps([{"n": name, "v": value} for name, value in members.items()]).encode()
    as_cbor = replace(reading(cbor2.dumps(members)), topic="device-cbor")
    texts = {
        # Read strictly, then fast.
        '{"ts": 1795824515000, "wh": 1.2345678e7, "serial": 123456789012345678}': None,
        '{"wh": 12345678}': None,
        '{"ts": 999999999999999.4}': None,
        '{"ts": 999999999999999.5}': "seconds is outside decimal(18,6): 999999999999999.5",
        '{"wh": 1000000000.6}': "kilowatt_hours is above 1000000 or outside decimal(18,6): 1000000.0006",
        '{"wh": 1000000001}': "kilowatt_hours is above 1000000 or outside decimal(18,6): 1000000.001",
        '{"serial": 1234567890123456789}': "serial is outside decimal(18,6): 1234567890123456789",
    }
    json_records = [reading(text.encode()) for text in texts]
    others = [as_cbor, replace(reading(pack), topic="device-pack")]
    placed = [replace(record, offset=offset) for offset, record in enumerate([*json_records, *others])]

    rows = rows_read(placed, streams)

    found = [{metric.name: metric.value for metric in row.metrics or ()} for row in rows]
    exact = {
        "seconds": Decimal("1795824515.000"),
        "kilowatt_hours": Decimal("12345.678"),
        "serial": Decimal("123456789012.345678"),
    }
    assert found[0] == found[-2] == found[-1] == exact
    assert found[1:3] == [{"kilowatt_hours": Decimal("12345.678")}, {"seconds": Decimal("999999999999.999")}]
    reasons = [row.reject_reason for row in rows[: len(texts)]]
    assert reasons == [words and f"out-of-range: {words}" for words in texts.values()]


def test_a_declared_value_out_of_range_is_told() -> None:
    streams = parse_streams(
        """
        [streams.device-thermo]
        codec = "json"
        [streams.device-thermo.metrics]
        t = { decimals = 1, min = -40, max = 125 }
        ts = {}
        low = { min = 0 }
        """,
        Path("streams.toml"),
    )
    texts = {
        # One that is read fast, then one of each other kind.
        '{"t": 130.05}': "t is not between -40 and 125: 130.1",
        '{"low": -100}': "low is below 0 or outside decimal(18,6): -100",
        '{"t": 2e2, "ts": 1}': "t is not between -40 and 125: 200",
        '{"ts": 1795824515000}': "ts is outside decimal(18,6): 1795824515000",
        '{"ts": -1795824515000.25}': "ts is outside decimal(18,6): -1795824515000.25",
        '{"ts": 1.7E+300}': "ts is outside decimal(18,6): 1.7E+300",
        '{"ts": ' + "7" * 60 + "}": "ts is outside decimal(18,6): " + "7" * 40,
    }
    records = [replace(reading(text.encode()), offset=offset) for offset, text in enumerate(texts)]

    rows = rows_read(records, streams)

    assert [row.reject_reason for row in rows] == [f"out-of-range: {words}" for words in texts.values()]


def test_fields_declared_of_an_inner_object_are_not_read_from_the_top() -> None:
    texts = ['{"t": 1, "n": 2}', '{"t": 1, "n": {"x": 2}}', '{"t": 1, "n": {"x": {"o": 2}}}', '{"n": 2}', '{"n.x": 2}']
    records = [replace(reading(text.encode()), topic="device-nested") for text in texts]

    assert_as_expected(found_in(records, DECLARED), records, DECLARED)


def test_a_stream_that_nobody_declared_is_a_reject_unless_such_are_accepted() -> None:
    declared = parse_streams('[streams."device-*"]\ncodec = "json"', Path("streams.toml"))
    records = [reading(), replace(reading(), topic="elsewhere")]

    assert found_in(records, declared) == [
        Outcome({"temperature": Decimal("21.5")}),
        Outcome(None, kind="undeclared-stream"),
    ]
    accepting = dataclasses.replace(declared, unknown="accept")
    assert found_in(records, accepting) == [Outcome({"temperature": Decimal("21.5")})] * 2


REJECTS: list[tuple[KafkaRecord, str]] = [
    (reading(b'{"t": 1'), codec_plain.NOT_JSON),
    (reading(b'{"t": 1e30}'), "out-of-range: no number of the payload fits decimal(18,6)"),
    (
        reading(b"1795824515000", reading_headers(content_type="text/plain")),
        "out-of-range: value is outside decimal(18,6): 1795824515000",
    ),
    (reading(b'{"state": "on"}'), "undecodable: the payload has no number"),
    (reading(object_of(*tiny(257)).encode()), "undecodable: the payload has more than 256 metrics"),
    (reading(b"\xff"), codec_plain.NOT_UTF8),
    (reading(None), codec_plain.NO_VALUE),
    (reading(b"on", reading_headers(content_type="text/plain")), codec_plain.NOT_NUMBER),
    (reading(b"x", reading_headers(content_type="image/png")), codec_plain.UNKNOWN_CONTENT),
    (reading(headers=reading_headers(event_type="com.example")), UNKNOWN_TYPE),
    (reading(key=None), "header: the key is missing or not UTF-8"),
    (reading(key=b"\xc3"), "header: the key is missing or not UTF-8"),
]


def test_a_record_that_cannot_be_read_says_why_and_keeps_its_bytes() -> None:
    cases = [*REJECTS, (reading(headers=[]), "header: there is none of the gateway's headers")]
    records = [replace(record, offset=offset) for offset, (record, _) in enumerate(cases)]

    rows = rows_read(records)

    for row, record, (_, reason) in zip(rows, records, cases, strict=True):
        assert row.reject_reason is not None, reason
        assert row.reject_reason.startswith(reason)
        assert row.value == record.value
        assert row.metrics is None
        with pytest.raises(UnreadableError):
            oracle_payloads.read_payload(spark_oracle.read_headers(record))


def test_a_gateways_own_events_are_neither_measurements_nor_rejects() -> None:
    event = reading(b'{"depth": 7}', reading_headers(18, event_type="sluice.gateway.heartbeat"), key=b"gw-1")
    (row,) = rows_read([replace(event, topic="gateway-events")], DECLARED)

    assert (row.metrics, row.undeclared, row.reject_reason) == (None, None, None)


YEAR_US = 365 * 86_400_000_000
WRONG_CORRECTIONS: list[tuple[KafkaRecord, str]] = [
    (replace(correction(1, {}), value=None), correction_records.NO_BODY),
    (replace(correction(1, {}), value=b"\xff"), correction_records.NO_BODY),
    (replace(correction(1, {}), value=b"[1]"), correction_records.NO_BODY),
    (replace(correction(1, {}), value=(correction(1, {}).value or b"") + b"{}"), correction_records.NO_BODY),
    (replace(correction(1, {}), value=b"{}"), "boot of the correction is not text"),
    (correction(1, {"boot": 7}), "boot of the correction"),
    (correction(1, {"version": 0}), "version of the correction is not a whole number from 1"),
    (correction(1, {"version": 1.5}), "version of the correction"),
    (correction(1, {"version": True}), "version of the correction"),
    (correction(1, {"version": 2**63}), "version of the correction"),
    (correction(1, {"quality": "estimated"}), "quality of the correction is not synced or bounded"),
    (correction(1, {"boottime_us": "0"}), "boottime_us of the correction is not a whole number"),
    (correction(1, {"offset_us": None}), "offset_us of the correction"),
    (correction(1, {"offset_us": -(2**63) - 1}), "offset_us of the correction"),
    (correction(1, {"rate_ppm": 100_000.1}), "rate_ppm of the correction is not a number from -100000 to 100000"),
    (correction(1, {"rate_ppm": 1e300}), "rate_ppm of the correction"),
    (replace(correction(1, {}), value=b'{"rate_ppm": NaN}'), correction_records.NO_BODY),
    (correction(1, {"error_us": -1}), "error_us of the correction is not a whole number from 0"),
    (correction(1, {"error_growth_ppm": -0.1}), "error_growth_ppm of the correction"),
    (correction(1, {"supersedes": 1}), "supersedes of the correction is not true or false"),
    (correction(1, {"boot": "x" * 66_001}), "boot of the correction is not text of at most 66000 bytes"),
    # What cannot be true: Kafka took all of them in at one in the afternoon.
    (correction(1, {"boottime_us": 3_660_000_001, "error_us": 0}), correction_records.LEADS_AHEAD),
    (correction(1, {"offset_us": YEAR_US * 90}), correction_records.LEADS_AHEAD),
    (correction(1, {"offset_us": YEAR_US * 20}), correction_records.LEADS_BACK),
    (correction(1, {}, told=NOON + timedelta(days=1)), correction_records.TOLD_AHEAD),
]
RIGHT_CORRECTIONS = [
    correction(1, {}),
    correction(1, {"rate_ppm": -12.3456785, "more": [], "device": None, "version": 2**62}),
    # Their bounds say that they may be right, of a boot that was never synced too.
    correction(1, {"boottime_us": 3_660_000_000, "error_us": 0}),
    correction(1, {"offset_us": YEAR_US * 90, "error_us": YEAR_US * 40}),
    correction(1, {"offset_us": YEAR_US * 20, "error_us": YEAR_US * 40, "quality": "bounded"}),
    # Told by a boot whose clock stands in 2000, and is not known.
    replace(
        correction(1, {}),
        headers=changed(changed(correction(1, {}).headers or [], "ce_time", rfc3339(NOON.replace(2000))),
                        "ce_timeerror", str(2**63 - 1)),
    ),
]  # fmt: skip


def test_a_correction_that_makes_no_sense_is_a_reject_with_its_reason() -> None:
    cases = WRONG_CORRECTIONS + [(record, "") for record in RIGHT_CORRECTIONS]
    records = [replace(record, offset=offset) for offset, (record, _) in enumerate(cases)]

    rows = rows_read(records)

    for row, record, (_, reason) in zip(rows, records, cases, strict=True):
        assert (row.reject_reason or "").startswith(f"correction: {reason}" if reason else ""), record.value
        assert bool(row.reject_reason) == bool(reason), (record.value, row.reject_reason)
        assert row.metrics is None


def python_payloads(registry: str) -> tuple[Streams, list[tuple[str, str, bytes]]]:
    """A stream and a payload for each codec that is read in Python; the last ones have nothing but a content type."""
    streams = parse_streams(
        f"""
        unknown = "accept"
        streams.packed = {{ codec = "binary", layout = [{{ name = "t", type = "i16", scale = "0.01" }}] }}
        streams.map = {{ codec = "cbor", metrics.t = {{ decimals = 2, max = 30 }} }}
        streams.pack = {{ codec = "senml-json" }}
        streams.small = {{ codec = "senml-cbor" }}
        streams.record = {{ codec = "avro", metrics.celsius = {{ decimals = 1 }} }}
        avro.registry = "{registry}"
        """,
        Path("streams.toml"),
    )
    senml = [{"bn": "dev/", "bt": 1.7e9, "n": "t", "v": 21.5}, {"n": "t", "t": -60, "v": 21}]
    return streams, [
        ("packed", "application/octet-stream", struct.pack("<h", 2153)),
        ("map", "application/cbor", cbor2.dumps({"t": 21.534, "lux": 3})),
        ("map", "application/cbor", cbor2.dumps({"t": 31})),
        ("pack", "application/senml+json", json.dumps(senml).encode()),
        ("small", "application/senml+cbor", cbor2.dumps([{0: "t", 2: 21.5}])),
        ("record", "application/avro", climate(7)),
        ("record", "application/avro", b"\x00"),
        ("other", "application/cbor", cbor2.dumps({"t": 21.5})),
        ("other", "application/senml+json; charset=utf-8", json.dumps(senml[:1]).encode()),
        ("other", "application/json", b'{"t": 21.5}'),
    ]


def in_spark(spark: SparkSession, records: list[KafkaRecord], streams: Streams) -> DataFrame:
    return through_rules(kafka_frame(spark, records), READ_SCHEMA, lambda: (Reader(streams).read,))


@pytest.mark.spark
@pytest.mark.usefixtures("interpreted")
def test_other_codecs_are_read_beside_json(spark: SparkSession) -> None:
    with registry({7: SCHEMA}) as (url, _):
        streams, payloads = python_payloads(url)
        records = [
            replace(reading(value, reading_headers(content_type=content_type)), topic=topic, offset=offset)
            for offset, (topic, content_type, value) in enumerate(payloads)
        ]
        rows = in_spark(spark, records, streams).orderBy("offset").collect()

    t = Decimal("21.5")
    assert [row.metrics and [tuple(metric) for metric in row.metrics] for row in rows] == [
        [("t", Decimal("21.53"), None)],
        [("t", Decimal("21.53"), None)],
        None,
        [("t", t, None), ("t", Decimal(21), 60_000_000)],
        [("t", t, None)],
        [("celsius", t, None)],
        None,
        [("t", t, None)],
        [("t", t, None)],
        [("t", t, None)],
    ]
    assert [row.undeclared for row in rows if row.undeclared] == [["lux"], ["litres", "pascal"]]
    assert [row.reject_reason for row in rows if row.reject_reason] == [
        "out-of-range: t is above 30 or outside decimal(18,6): 31",
        codec_avro.NO_FRAME,
    ]


@pytest.mark.spark
@pytest.mark.usefixtures("interpreted")
def test_a_registry_that_does_not_answer_fails_the_batch_in_words(spark: SparkSession) -> None:
    with registry({}) as (gone, _):
        streams, _ = python_payloads(gone)
    records = [replace(reading(climate(5)), topic="record")]

    with pytest.raises(PythonException, match=r"registry http://127\.0\.0\.1:.* does not give schema 5: .*refused"):
        in_spark(spark, records, streams).collect()
