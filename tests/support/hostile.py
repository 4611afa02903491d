"""One hostile set, for every reader of what comes from outside: what a broken or ill-willed sender may put anywhere.

`documents` is for whatever reads JSON, `payloads` for codecs, `texts` for headers, keys and names, `declarations` for
files. `records` puts them into every place of a Kafka record.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import cbor2

from tests.support.spark_oracle import Headers, KafkaRecord
from tests.support.spark_records import BOOTS, NOON, changed, correction, reading, reading_headers, rfc3339

FIRST, LAST = "0002-01-01T00:00:00.000000Z", "9999-12-31T23:59:59.999999Z"
"""The ends of what a table can show."""
DEEP = 1_100
DIGITS = "9" * 500_000
LONG = 100_000
CODEC_BYTES = 65_537
"""One more than codecs in Python look into."""
NESTED = "[" * DEEP + "]" * DEEP
OBJECTS = '{"a":' * DEEP + "1" + "}" * DEEP

JSON_VALUES: Mapping[str, str] = {
    "deep lists": NESTED,
    "deep objects": OBJECTS,
    "half open": "[" * 100_000,
    "500,000 digits": DIGITS,
    "a fraction of 5,000 digits": f"0.{DIGITS[:5_000]}",
    "2^70": str(2**70),
    "-2^70": str(-(2**70)),
    "2^63": str(2**63),
    "2^63 - 1": str(2**63 - 1),
    "-2^63": str(-(2**63)),
    "1e300": "1e300",
    "1e999999999": "1e999999999",
    "1e-999999999": "1e-999999999",
    "less than nothing": "-1",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "null": "null",
    "true": "true",
    "a list": "[1, {}]",
    "an object": '{"a": {"b": "c"}}',
    "an empty text": '""',
    "NUL": '"\\u0000"',
    "half a surrogate": '"\\ud800"',
    "bad UTF-8": '"\udcff\udcfe"',
    "a long text": f'"{"x" * LONG}"',
    "the year 0": '"0000-01-01T00:00:00Z"',
    "the year 1, east": '"0001-01-01T00:00:00+23:59"',
    "the year 9999, west": '"9999-12-31T23:59:59.999999-23:59"',
    "the year 9999": '"9999-12-31T23:59:59.999999Z"',
    "a time without zone": '"2026-03-14T12:00:00"',
}
"""JSON of one value, in the place of a right one. What is no UTF-8 stands there as surrogates."""


def octets(text: str) -> bytes:
    """Text as bytes; surrogates that stand for bytes become these."""
    return text.encode("utf-8", "surrogateescape")


def documents(good: Mapping[str, object]) -> Iterator[tuple[str, bytes]]:
    """Broken documents, and a right one with each of its members, and one that nobody knows, replaced by each value."""
    text = json.dumps(good)
    yield "nothing", b""
    yield "NUL", b"\x00"
    yield "bad UTF-8", b"\xff\xfe"
    yield "not ended", text[:-1].encode()
    yield "two of them", (text + text).encode()
    yield "a list", f"[{text}]".encode()
    yield "deep lists", NESTED.encode()
    yield "half open", b'{"a":' * 100_000
    yield "500,000 digits", DIGITS.encode()
    yield "2 MB", text.encode() + b" " * 2_000_000
    for name in (*good, "unknown"):
        for kind, value in JSON_VALUES.items():
            members = [f"{json.dumps(each)}: {json.dumps(given)}" for each, given in good.items() if each != name]
            yield f"{name}: {kind}", octets("{" + ", ".join([*members, f"{json.dumps(name)}: {value}"]) + "}")
        once = json.dumps(good.get(name))
        again = ", ".join(f"{json.dumps(each)}: {json.dumps(given)}" for each, given in good.items() if each != name)
        yield f"{name} twice", f'{{"{name}": {once}, "{name}": {once}, {again}}}'.replace(", }", "}").encode()


TEXTS: Mapping[str, bytes | None] = {
    "null": None,
    "empty": b"",
    "NUL": b"\x00",
    "bad UTF-8": b"\xff\xfe",
    "half a surrogate": b"\xed\xa0\x80",
    "100 KB": b"x" * LONG,
    "5,000 digits": DIGITS[:5_000].encode(),
    "2^70": str(2**70).encode(),
    "2^63 - 1": str(2**63 - 1).encode(),
    "-2^63": str(-(2**63)).encode(),
    "1e300": b"1e300",
    "NaN": b"NaN",
    "deep": NESTED.encode(),
    "slashes": b"/" * 1_000,
    "the year 0": b"0000-01-01T00:00:00.000000Z",
    "the year 1": b"0001-01-01T00:00:00.000000Z",
    "the year 9999": b"9999-12-31T23:59:59.999999Z",
}
"""In the place of a header, a key, a name."""


def payloads() -> Iterator[tuple[str, str, bytes]]:
    """Payloads that a sensor may send: kind, content type, value."""
    for kind, value in documents({"t": 21.5}):
        yield f"JSON, {kind}", "application/json", value
    for kind, text in JSON_VALUES.items():
        yield f"number, {kind}", "text/plain", octets(text)
        # The members of a record of SenML, each in its turn.
        for label in ("n", "v", "bn", "bt", "bv", "bver", "t", "vb"):
            record = {"n": '"t"', "v": "1"} | {label: text}
            pack = ", ".join(f'"{name}": {given}' for name, given in record.items())
            value = octets(f'[{{"n": "u", "v": 2}}, {{{pack}}}]')[:CODEC_BYTES]
            yield f"SenML, {label}: {kind}", "application/senml+json", value
    for kind, item in cbor_items():
        yield f"CBOR, {kind}", "application/cbor", item
        yield f"SenML in CBOR, {kind}", "application/senml+cbor", item
        # In the place of a value, and of a time.
        for number in (2, 6, -3):
            yield (
                f"SenML in CBOR, {number}: {kind}",
                "application/senml+cbor",
                b"\x81\xa3\x00\x61t\x02\x01" + (cbor2.dumps(number) + item),
            )
        yield f"CBOR, t: {kind}", "application/cbor", b"\xa1\x61t" + item


def cbor_items() -> Iterator[tuple[str, bytes]]:
    """Items of CBOR that lie about their size, nest, or hold what nothing else holds."""
    yield "nothing", b""
    yield "deep lists", b"\x81" * DEEP + b"\x01"
    yield "deep tags", b"\xc1" * DEEP + b"\x01"
    yield "a list of 2^64 - 1", b"\x9b" + b"\xff" * 8
    yield "a text of 2^63", b"\x7b\x80" + b"\x00" * 7
    yield "a map without an end", b"\xbf"
    yield "a bignum of 60,000 bytes", b"\xc2\x59\xea\x60" + b"\xff" * 60_000
    yield "2^70", cbor2.dumps(2**70)
    yield "10^(2^62)", b"\xc4\x82\x1b\x40" + b"\x00" * 7 + b"\x01"
    yield "NaN", cbor2.dumps(float("nan"))
    yield "Infinity", cbor2.dumps(float("inf"))
    yield "1e300", cbor2.dumps(1e300)
    yield "bad UTF-8", b"\x62\xff\xfe"
    yield "a name twice", b"\xa2\x61t\x01\x61t\x02"
    yield "names of all kinds", b"\xa4\xf5\x01\x01\x02\x80\x03\xf6\x04"
    yield "a name that is a list", b"\xa1\x80\x01"
    yield "NUL", b"\x00"
    yield "70,000 bytes", b"\x5a\x00\x01\x11\x70" + b"\x00" * 70_000


def avro_bodies() -> Iterator[tuple[str, bytes]]:
    """Bodies of Avro, behind their frames: lengths and counts that are none."""
    yield "nothing", b""
    yield "2^70", b"\xff" * 10 + b"\x01"
    yield "a length of 2^62", b"\xfe" * 9 + b"\x01"
    yield "less than nothing", b"\x01" * 4
    yield "70,000 bytes", b"\x02" * 70_000
    yield "bad UTF-8", b"\x04\xff\xfe" * 4


HEARTBEAT: Mapping[str, object] = {
    "offsets": {"device-thermo": {"0": 1}},
    "pending": [{"lane": "abc", "rows": 1, "from": None, "to": None}],
    "quarantined": [{"count": 1, "from": "2026-03-14T11:00:00.000000Z", "to": "2026-03-14T11:30:00.000000Z"}],
    "low_watermark": "2026-03-14T11:00:00.000000Z",
    "depth_rows": 1,
    "oldest_age_s": 0.5,
}
SPAN: Mapping[str, object] = {"lane": "abc", "rows": 1, "from": None, "to": None}
SET_ASIDE: Mapping[str, object] = {"device": None, "file": "x", "buffer": "99" * 8, "rows": None}
STATE: Mapping[str, object] = {
    "version": "0.1.0",
    "lane_number": 1,
    "image": "1.1",
    "slot": "a",
    "update": {"from": "1.0", "to": "1.1", "result": "good", "reason": None},
    "fleet": {"serial": 7, "wish": "1" * 16, "result": "went-back", "reason": "no reading came in", "trouble": None},
    "heartbeat_s": 10.0,
    "settings": "0" * 16,
    "clock": {"synced": True, "source": "kernel", "error_us": 500},
    "disk": {"free_bytes": 1, "bytes": 2, "life_used_tenths": None, "written_bytes_per_day": 3, "spared": 4},
    "memory": {"free_bytes": 1, "bytes": 2, "own_bytes": 3},
    "addresses": ["192.0.2.7"],
    "uplink_s": 5,
    "ports": {"/dev/ttyUSB0": "open"},
    "devices": {"known": 2, "heard": 1, "silent": 1, "silent_named": ["42"]},
    "conditions": {"bad": [], "warn": ["device-silent"], "note": []},
}
LOSS: Mapping[str, object] = {
    "device": "42",
    "reason": "sensor-ring-overflow",
    "count": 2,
    "boot": BOOTS[0],
    "first_boottime_us": 1,
    "last_boottime_us": 2,
    "device_boot": "7-1a2b3c4d",
    "first_sequence": 5,
    "last_sequence": 6,
}
CORRECTION: dict[str, Any] = json.loads(correction(1, {}).value or b"")


def heartbeats() -> Iterator[tuple[str, bytes]]:
    """Bodies of heartbeats."""
    yield from documents(HEARTBEAT)
    for kind, span in documents(SPAN):
        others = {name: value for name, value in HEARTBEAT.items() if name != "pending"}
        yield f"pending, {kind}", json.dumps(others)[:-1].encode() + b', "pending": [' + span + b"]}"
    for name in ("topic", "partition", "offset"):
        for kind, value in JSON_VALUES.items():
            quoted = value if value.startswith('"') else f'"{value}"'
            topic, partition = (
                quoted if name == each else good for each, good in (("topic", '"t"'), ("partition", '"0"'))
            )
            offsets = f"{{{topic}: {{{partition}: {value if name == 'offset' else 1}}}}}"
            others = {each: given for each, given in HEARTBEAT.items() if each != "offsets"}
            yield f"{name}, {kind}", octets(json.dumps(others)[:-1] + f', "offsets": {offsets}}}')
    yield "a promise of tomorrow", json.dumps({**HEARTBEAT, "low_watermark": "2026-03-15T12:00:00Z"}).encode()


def corrections() -> Iterator[tuple[str, bytes]]:
    """Bodies of corrections: broken ones, and some that cannot be true."""
    yield from documents(CORRECTION)
    second_us = 1_000_000
    year_us = 365 * 86_400 * second_us
    noon_us = CORRECTION["offset_us"]
    for kind, by_us in (("to 1996", -30 * year_us), ("to 2056", 30 * year_us), ("by two hours", 7_200 * second_us)):
        yield f"moved {kind}", json.dumps(CORRECTION | {"offset_us": noon_us + by_us, "supersedes": True}).encode()
        yield f"moved {kind} by boottime", json.dumps(CORRECTION | {"boottime_us": by_us, "supersedes": True}).encode()


def events() -> Iterator[tuple[str, str, bytes]]:
    """Events that a gateway may send about itself: kind, type, value."""
    for kind, of_kind in (
        ("heartbeat", heartbeats()),
        ("time-correction", corrections()),
        ("loss", documents(LOSS)),
        ("buffer-set-aside", documents(SET_ASIDE)),
        ("state", documents(STATE)),
    ):
        for name, value in of_kind:
            yield f"{kind}, {name}", f"sluice.gateway.{kind}", value


def declarations() -> Iterator[str]:
    """Values of TOML, in the place of a right one."""
    yield from (NESTED, "{a = " * DEEP + "1" + "}" * DEEP, DIGITS, f"0.{DIGITS[:5_000]}", "-1", str(2**70))
    yield from ("nan", "inf", "-inf", "1e999999999", '""', '"\\u0000"', f'"{"x" * LONG}"', "true", "[]", "{}")
    yield from ("0001-01-01", "9999-12-31", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "12:00:00")
    yield from ("'\x7f'", "'''\r'''", '"\\ud800"', "[1, 'a', {}]", "0x" + "f" * 4_000, "1979-05-27T07:32:00")


def records() -> Iterator[tuple[str, KafkaRecord]]:
    """The whole set, in every place of a Kafka record. Each has numbers of its own: none is another's copy."""
    for place, (name, record) in enumerate(_records()):
        headers = record.headers
        if headers is not None and [each for each, _ in headers[:2]] == ["ce_specversion", "ce_id"]:
            sequence = 1_000 + place
            given = dict(headers)
            if given["ce_id"] == dict(reading_headers())["ce_id"] and given["ce_lanesequence"] == b"1":
                headers = changed(changed(headers, "ce_id", f"{RIGHT_ID}{sequence}"), "ce_lanesequence", str(sequence))
            if given.get("ce_devicesequence") == b"1":
                headers = changed(headers, "ce_devicesequence", str(sequence))
        yield name, replace(record, headers=headers, offset=place)


RIGHT_ID = (dict(reading_headers())["ce_id"] or b"").decode().removesuffix("1")


def _records() -> Iterator[tuple[str, KafkaRecord]]:
    for name, content_type, value in payloads():
        yield f"value: {name}", reading(value, reading_headers(content_type=content_type))
    for name, event_type, value in events():
        headers = reading_headers(time=NOON + timedelta(minutes=59), quality="synced", event_type=event_type)
        yield name, told(value, headers)
    yield from _with_texts()
    for kind, text in TEXTS.items():
        yield f"key: {kind}", reading(headers=reading_headers(device_boot="7-1a2b3c4d"), key=text)
        name = (text or b"").decode("utf-8", "replace")
        yield f"header name: {kind}", reading(headers=[*reading_headers()[:-1], (name, b"1")])
    yield "no headers", replace(reading(), headers=None)
    yield "no value", reading(None)
    yield "10,000 headers", reading(headers=[("a", b"1")] * 10_000)
    for number in (2**53, 2**53 + 1, 2**63 - 1):
        yield f"lane number {number}", reading(headers=reading_headers(number))
    yield from _ends()
    yield from _packs()


def told(value: bytes, headers: Headers) -> KafkaRecord:
    """An event of a gateway about itself."""
    return replace(reading(value, headers, key=b"gw-1"), topic="gateway-events")


def _with_texts() -> Iterator[tuple[str, KafkaRecord]]:
    """Each text in the place of each header."""
    usual = reading_headers(device_boot="7-1a2b3c4d", doubt="redelivered", boot_error_us=1)
    heartbeat = reading_headers(event_type="sluice.gateway.heartbeat")
    for header, _ in usual:
        yield f"header {header} twice", reading(headers=[*usual, (header, b"1")])
        for kind, text in TEXTS.items():
            given = [(each, text if each == header else value) for each, value in usual]
            yield f"header {header}: {kind}", reading(headers=given)
    for header, _ in heartbeat:
        for kind, text in TEXTS.items():
            given = [(each, text if each == header else value) for each, value in heartbeat]
            yield f"heartbeat, header {header}: {kind}", told(json.dumps(HEARTBEAT).encode(), given)


def _ends() -> Iterator[tuple[str, KafkaRecord]]:
    """Every number that is reckoned with, at the ends of what its column holds."""
    lost = {**LOSS, "boot": "ends", "first_boottime_us": -(2**63), "last_boottime_us": 2**63 - 1}
    lost |= {"first_sequence": -(2**63), "last_sequence": 2**63 - 1, "count": 2**63 - 1}
    for error_us, boot_us, time in product(
        (2**63 - 1, 2**63 - 2, 2**62), (-(2**63), 2**63 - 1), (FIRST, LAST, rfc3339(NOON))
    ):
        ends = f"ends: {error_us}, {boot_us}, {time}"
        numbers = {"error_us": error_us, "boot_us": boot_us, "gateway_boot": "ends"}
        headers = changed(reading_headers(**numbers, boot_error_us=error_us, device_boot=f"9-{ends}"), "ce_time", time)  # type: ignore[arg-type]
        yield ends, reading(headers=changed(headers, "ce_devicesequence", str(boot_us)))
        for kind, body in (("heartbeat", HEARTBEAT), ("loss", lost)):
            of_kind = reading_headers(**numbers, event_type=f"sluice.gateway.{kind}")  # type: ignore[arg-type]
            yield f"{kind}, {ends}", told(json.dumps(body).encode(), changed(of_kind, "ce_time", time))


def _packs() -> Iterator[tuple[str, KafkaRecord]]:
    """Times in packs that lead out of what can be."""
    far_s = 2**63 // 1_000_000 - 10**6
    for kind, seconds in (("back", -far_s), ("on", far_s), ("8 years back", -(2**28) + 1)):
        pack = f'[{{"n": "t", "v": 1}}, {{"n": "t", "v": 2, "t": {seconds}}}]'.encode()
        for time in (FIRST, rfc3339(NOON)):
            headers = reading_headers(content_type="application/senml+json", error_us=2**63 - 1)
            yield f"pack {kind} from {time}", reading(pack, changed(headers, "ce_time", time))
