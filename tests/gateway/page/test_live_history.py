"""The last hour in memory: values, curves, gaps, and the bound of each."""

import json
from collections.abc import Iterable

import cbor2
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.rows import Entry
from gateway.intake.devices_heard import LATEST_BYTES_MAX, LATEST_MAX, DevicesHeard
from gateway.page.history import (
    DECODE_US,
    POINT_US,
    POINTS,
    SAMPLE_US,
    SAMPLES,
    STREAMS_MAX,
    VALUES_MAX,
    WANTED_US,
    LiveHistory,
    Sample,
    values_of,
)
from tests.support.buffers import changed, entry

QUIET = Sample(0, 0, 2, 0)
LOOK_US = 2_000_000


class Box:
    """Devices, and the history of them, at a time of the test's own."""

    def __init__(self, devices_max: int = 200) -> None:
        self.heard = DevicesHeard()
        self.heard.latest = {}
        self.now_us = 1_000_000_000
        self.history = LiveHistory(devices_max, self.now_us)

    def take(self, *entries: Entry) -> None:
        self.heard.record([changed(each, received_us=self.now_us) for each in entries])

    def look(self, sample: Sample = QUIET, after_us: int = LOOK_US) -> None:
        self.now_us += after_us
        self.history.record(self.heard, sample, self.now_us)


def reading(device: str = "42", payload: str = "21.5", stream: str = "thermo", sequence: int | None = None) -> Entry:
    topic = f"device/{device}/{stream}"
    plain = entry(device=device, sequence=sequence) if sequence is not None else entry(device=device)
    return changed(
        plain, payload=payload.encode(), series=replace(plain.series, subject=topic, stream=topic, device=device)
    )


def test_a_payload_is_shown_by_its_numbers_and_short_texts() -> None:
    payload = (
        b'{"boot": "1-0", "seq": 7, "celsius": 21.5, "door": {"open": true}, "none": null, "state": "ok", "n": []}'
    )
    assert values_of(payload) == (("celsius", 21.5), ("door.open", "yes"), ("state", "ok"))
    assert values_of(b"21") == (("", 21.0),)
    assert values_of(b'[{"bn": "urn:", "n": "t", "v": 0}, {"n": "s", "vs": "on"}]') == (("urn:t", 0.0), ("urn:s", "on"))
    assert values_of(b"\xff\x00") == (("", "2 bytes"),)
    assert values_of(b"") == ()
    assert values_of(b'\xef\xbb\xbf{"t": nan, "h": 40, "x": "nan"}\0') == (("h", 40.0), ("x", "nan"))
    assert values_of(b'{"t": 21.5, "h": 4') == (("", "18 bytes"),)
    assert values_of(b'{"big": 1' + b"0" * 400 + b"}") == ()


def test_cbor_and_what_stands_behind_a_binary_identity_are_shown() -> None:
    """The examples of docs/payloads.md."""
    cbor = bytes.fromhex(
        "a46763656c73697573fb403587ae147ae14864626f6f746a372d316132623363346463736571187b647469636b1a0006f855"
    )
    assert values_of(cbor, "application/cbor") == (("celsius", 21.53),)
    assert values_of(cbor2.dumps([{-2: "urn:", 0: "t", 2: 7}]), "application/senml+cbor") == (("urn:t", 7.0),)
    assert values_of(b"\xff", "application/cbor") == (("", "1 byte"),)
    binary = bytes.fromhex("01070000004d3c2b1a7b00000055f8060032312e3533")
    assert values_of(binary, "application/octet-stream") == (("", 21.53),)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_payload_is_shown_within_bounds(payload: bytes) -> None:
    values = (*values_of(payload), *values_of(payload, "application/cbor"))
    assert len(values) <= 2 * VALUES_MAX
    assert all(len(name) <= 32 and (isinstance(value, float) or len(str(value)) <= 40) for name, value in values)
    json.dumps(values, allow_nan=False)


def test_a_stream_is_decoded_once_in_ten_seconds() -> None:
    box = Box()
    box.take(reading(payload="1"))
    box.look()
    box.take(reading(payload="2"))
    box.look()
    trace = box.history.traces["42"]
    assert list(trace.values.values()) == [(("", 1.0),)]
    box.look(after_us=DECODE_US)
    assert list(trace.values.values()) == [(("", 2.0),)]


def test_the_curve_is_of_the_last_hour() -> None:
    box = Box()
    for number in range(POINTS + 10):
        box.take(reading(payload=str(number)))
        box.look(after_us=POINT_US)
    curve = box.history.traces["42"].curve(box.now_us)
    assert curve == [float(number) for number in range(10, POINTS + 10)]
    assert box.history.traces["42"].curve(box.now_us + 5 * POINT_US)[-6:] == [POINTS + 9.0, *[None] * 5]
    assert box.history.traces["42"].curve(box.now_us + 2 * POINTS * POINT_US) == [None] * POINTS


def test_the_gateways_hour() -> None:
    box = Box()
    box.look(Sample(5, 100, 1, 0))
    for number in range(3):
        box.look(Sample(number, 100, 2, 50 * (number + 1)), SAMPLE_US)
    series = box.history.series()
    assert series["rows"][-4:] == [5, 0, 1, 2]
    assert series["uplink"][-5:] == [0, 1, 2, 2, 2]
    assert series["per_s"][-3:] == [5.0, 5.0, 5.0]
    assert {len(each) for each in series.values()} == {SAMPLES}
    assert box.history.per_s == 5.0


def test_devices_beyond_the_bound_have_no_place_unless_somebody_looks_at_them() -> None:
    box = Box(devices_max=3)
    everybody = [reading(str(number)) for number in range(10)]
    for _ in range(3):
        box.take(*everybody)
        box.look()
    assert set(box.history.traces) == {"0", "1", "2"}
    box.history.want(["7", "2"], box.now_us)
    box.take(*everybody)
    box.look()
    assert "7" in box.history.traces
    assert "2" in box.history.traces
    assert len(box.history.traces) == 3
    assert list(box.history.traces["7"].values.values()) == [(("", 21.5),)]


def test_whoever_is_looked_at_keeps_its_place_for_a_minute() -> None:
    box = Box(devices_max=2)
    both = [reading("0"), reading("1"), reading("2")]
    box.take(*both)
    box.history.want(["0", "1"], box.now_us)
    box.look()
    box.history.want(["0", "1", "2"], box.now_us)
    box.take(*both)
    box.look()
    assert set(box.history.traces) == {"0", "1"}
    box.history.want(["2"], box.now_us)
    box.take(*both)
    box.look(after_us=WANTED_US + 1)
    assert "2" in box.history.traces


def test_of_a_flood_some_are_enough() -> None:
    box, armed = Box(), []
    for number in range(1, 11):
        box.look(Sample(0, 0, 2, number * 2_000))
        armed.append(box.heard.latest is not None)
    assert armed == [False, False, False, False, True] * 2
    box.look(Sample(0, 0, 2, 20_100))
    box.look(Sample(0, 0, 2, 20_100), 8_000_000)
    box.look(Sample(0, 0, 2, 20_200))
    assert box.heard.latest is not None


def names(count: int) -> Iterable[str]:
    return (str(number) for number in range(count))


def test_memory_is_bounded_by_devices_streams_and_bytes() -> None:
    box = Box(devices_max=5)
    for round_ in range(5):
        for device in names(20):
            box.take(*(reading(device, stream=f"s{round_}-{number}") for number in range(10)))
        box.look(after_us=DECODE_US)
    assert len(box.history.traces) == 5
    assert all(len(trace.streams) <= STREAMS_MAX for trace in box.history.traces.values())
    assert all(len(trace.values) <= STREAMS_MAX for trace in box.history.traces.values())
    assert len(box.history._streams) <= 5 * STREAMS_MAX
    box.take(*(reading(device) for device in names(LATEST_MAX + 100)), reading("large", "x" * (LATEST_BYTES_MAX + 1)))
    assert box.heard.latest is not None
    assert len(box.heard.latest) == LATEST_MAX


def test_a_sensors_new_boot_begins_anew() -> None:
    box = Box()
    for sequence in range(4):
        box.take(reading(sequence=sequence))
        box.look(after_us=POINT_US)
    trace = box.history.traces["42"]
    assert trace.per_s(4, box.now_us) is not None
    box.take(changed(reading(sequence=900), device_boot="2-0"))
    box.look(after_us=POINT_US)
    assert trace.per_s(1, box.now_us) is None
