"""A text sensor's stream of bytes cut into lines: split anywhere, noisy, endless, joined in the middle."""

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.formats.cutter import Cutter
from gateway.reading import Datum
from gateway.serial_lines.changes import Changes
from gateway.serial_lines.format_link import (
    UNREADABLE_FIRST,
    UNREADABLE_INTERVAL_US,
    FormatEvent,
    FormatLink,
    Readings,
    Uncollected,
    Unreadable,
)
from gateway.serial_lines.frames import Hello, encode_frame
from gateway.serial_lines.text_lines import TextLines
from gateway.settings import SerialTextSettings
from tests.support.nmea import nmea_checksum

LINE_BYTES_MAX = 64


class TextSensor(FormatLink):
    """The link of a sensor that writes lines, fed as its port does."""

    def __init__(self, settings: SerialTextSettings) -> None:
        changes = Changes(settings.on_change, settings.silence_s_max)
        super().__init__("/dev/ttyUSB0", settings.device, "device/attic/text", changes)
        self.lines = TextLines(settings)
        self.cutter = Cutter(self.lines)

    def receive(self, data: bytes, now_us: int) -> list[FormatEvent]:
        self.hear(data)
        return self.take(self.cutter.feed(data), now_us)


def link(line_format: str = "key=value", **rest: object) -> TextSensor:
    settings = SerialTextSettings(
        port="/dev/ttyUSB*",
        device="attic",
        format=line_format,  # type: ignore[arg-type]
        line_bytes_max=LINE_BYTES_MAX,
        **rest,  # type: ignore[arg-type]
    )
    return TextSensor(settings)


def joined(line_format: str = "key=value", **rest: object) -> TextSensor:
    """A link that has seen the end of a line."""
    joined = link(line_format, **rest)
    assert joined.receive(b"\n", 0) == []
    return joined


def payloads(events: Iterable[FormatEvent]) -> list[str]:
    return [each.datum.payload.decode() for event in events if isinstance(event, Readings) for each in event.readings]


def unread(events: Iterable[FormatEvent]) -> Counter[str]:
    """Lines that were no readings, kept or only counted, by reason."""
    counted: Counter[str] = Counter()
    for event in events:
        match event:
            case Unreadable():
                counted[event.reason] += 1
            case Uncollected():
                counted[event.reason] += event.count
    return counted


def sentence(content: bytes) -> bytes:
    return b"$%b*%02X" % (content, nmea_checksum(content))


def test_a_reading_has_its_topic_its_port_and_the_time_of_the_bytes_that_ended_its_line() -> None:
    sensor = joined()
    assert sensor.device == "attic"
    assert sensor.receive(b"t=21.50 h=", 1_000) == []
    (event,) = sensor.receive(b"40\r\nt=", 2_000)
    assert isinstance(event, Readings)
    (reading,) = event.readings
    assert (reading.topic, reading.subject) == ("device/attic/text", "/dev/ttyUSB0")
    assert reading.datum == Datum(received_us=2_000, payload=b'{"t":21.50,"h":40}')


def test_lines_end_in_any_way_and_blank_ones_are_nothing() -> None:
    sensor = joined()
    assert payloads(sensor.receive(b"a=1\nb=2\rc=3\r\n\r\n  \n\0\0d=4\0\r\n\x02e=5\x03\r", 0)) == [
        '{"a":1}',
        '{"b":2}',
        '{"c":3}',
        '{"d":4}',
        '{"e":5}',
    ]
    assert not sensor.faults


def test_the_line_that_was_joined_in_the_middle_is_no_fault() -> None:
    sensor = link()
    assert payloads(sensor.receive(b"emp=21.5\nt=21.6\n", 0)) == ['{"t":21.6}']
    assert not sensor.faults


def test_the_first_line_counts_when_it_proves_that_it_is_whole() -> None:
    assert payloads(link("json").receive(b'{"t":1}\n', 0)) == ['{"t":1}']
    assert payloads(link("nmea").receive(sentence(b"WIMTW,17.5") + b"\n", 0)) == ['{"sentence":"WIMTW","1":17.5}']
    for line_format, half in (("json", b'"t":1}\n'), ("nmea", sentence(b"WIMTW,17.5")[4:] + b"\n")):
        sensor = link(line_format)
        assert sensor.receive(half, 0) == []
        assert not sensor.faults


def test_unreadable_lines_are_kept_once_a_second_and_counted_beyond() -> None:
    sensor = joined("key:value")
    banner = b"DHTxx test!\r\nready\r\nT: 21.5\r\n"
    assert sensor.receive(banner, 0) == [
        *[event for event in sensor_events(banner) if isinstance(event, Readings)],
        Unreadable(b"DHTxx test!", "no-pairs"),
        Uncollected("no-pairs", 1),
    ]
    assert sensor.receive(b"T:1 T:2\nready\nready\n", UNREADABLE_INTERVAL_US - 1) == [
        Uncollected("repeated-name", 1),
        Uncollected("no-pairs", 2),
    ]
    assert sensor.receive(b"ready\n", UNREADABLE_INTERVAL_US) == [Unreadable(b"ready", "no-pairs")]
    assert sensor.faults == {"no-pairs": 5, "repeated-name": 1}


def test_a_sensor_that_writes_what_nobody_can_read_fills_neither_the_quarantine_nor_the_uplink() -> None:
    sensor = joined("key:value")
    day_s = 24 * 60 * 60
    kept = 0
    for second in range(0, day_s, 1):
        kept += sum(isinstance(event, Unreadable) for event in sensor.receive(b"ready\n", second * 1_000_000))
    assert sensor.faults == {"no-pairs": day_s}
    assert UNREADABLE_FIRST < kept <= UNREADABLE_FIRST + day_s // 60


def sensor_events(data: bytes) -> list[FormatEvent]:
    return joined("key:value").receive(data, 0)


def test_a_line_of_the_longest_length_is_read_and_a_longer_one_told_before_its_end() -> None:
    sensor = joined()
    longest = b"t=" + b"9" * (LINE_BYTES_MAX - 2)
    assert len(payloads(sensor.receive(longest + b"\n", 0))) == 1
    assert sensor.receive(longest, 0) == []
    assert sensor.receive(b"99", 0) == [Unreadable(longest, "line-too-long")]
    # Further bytes are part of it, up to its end.
    assert sensor.receive(b" t=5" * 1000, 0) == []
    assert payloads(sensor.receive(b" t=5\nt=6\n", 0)) == ['{"t":6}']
    assert sensor.faults == {"line-too-long": 1}


def test_a_flood_without_a_line_s_end_is_one_fault_even_as_the_first_thing_heard() -> None:
    sensor = link()
    events = [event for _ in range(1000) for event in sensor.receive(bytes(range(32, 96)) * 100, 0)]
    assert [type(event) for event in events] == [Unreadable]
    assert sensor.faults == {"line-too-long": 1}


@pytest.mark.parametrize(
    ("line_format", "readings_max"), [("json", 0), ("nmea", 0), ("key=value", 5), ("key:value", 5)]
)
def test_a_megabyte_of_noise_is_next_to_nothing_where_lines_carry_no_checksum(
    line_format: str, readings_max: int
) -> None:
    sensor = joined(line_format)
    events = sensor.receive(random.Random(20_26).randbytes(1_000_000), 0)  # noqa: S311 - a seed, not a secret
    assert len(payloads(events)) <= readings_max
    assert sensor.faults.total() > 1000
    assert sum(isinstance(event, Unreadable) for event in events) == 1


def heard_at(sent_baud: int, heard_baud: int, data: bytes) -> bytes:
    """Bytes (8N1) as a UART reads them at another speed: it samples each bit in its middle."""
    bits = [1] * 20 + [bit for byte in data for bit in (0, *((byte >> place) & 1 for place in range(8)), 1)] + [1] * 20

    def level(time_s: float) -> int:
        position = int(time_s * sent_baud)
        return bits[position] if position < len(bits) else 1

    heard = bytearray()
    bit_s = 1 / heard_baud
    now_s = 0.0
    while now_s * sent_baud < len(bits):
        if level(now_s):
            now_s += bit_s / 16
            continue
        heard.append(sum(level(now_s + (place + 1.5) * bit_s) << place for place in range(8)))
        now_s += 9.5 * bit_s
    return bytes(heard)


@pytest.mark.parametrize("line_format", ["key=value", "key:value", "json", "nmea"])
@pytest.mark.parametrize("heard_baud", [2400, 4800, 19200, 38400, 115_200])
def test_the_wrong_baud_rate_makes_no_readings(line_format: str, heard_baud: int) -> None:
    sent = b"t=21.50 h=40\r\nT: 21.50 H: 40\r\n" + b'{"t":1}\r\n' + sentence(b"WIMTW,17.5") + b"\r\n"
    assert len(payloads(joined(line_format).receive(heard_at(9600, 9600, sent), 0))) == 1
    sensor = joined(line_format)
    events = sensor.receive(heard_at(9600, heard_baud, sent * 30), 0)
    assert payloads(events) == []
    assert sensor.faults


def test_gps_bursts_with_wrong_checksums_lose_what_is_damaged_and_no_more() -> None:
    sensor = joined("nmea", sentences={"RMC": ("time", "valid", "latitude", "", "longitude")})
    good = sentence(b"GPRMC,123519,A,4807.038,N,01131.000,E")
    other = sentence(b"GPGSV,1,1,00")
    damaged = good.replace(b"4807", b"4808")
    events = sensor.receive(b"\r\n".join((good, other, damaged, good[:20], other[:9] + good, good, b"")), 0)
    assert len(payloads(events)) == 3
    assert json.loads(payloads(events)[0]) == {
        "sentence": "GPRMC",
        "time": 123519,
        "valid": "A",
        "latitude": 4807.038,
        "longitude": 1131.0,
    }
    assert unread(events) == {"nmea-checksum": 1, "nmea-without-checksum": 1}


def test_sentences_that_nobody_asked_for_are_no_loss_with_or_without_a_checksum() -> None:
    sensor = joined("nmea", sentences={"RMC": ("time",)})
    sent = [sentence(b"GPRMC,%06d" % second) + b"\r\n$ZZLOC,15,9,314\r\n$GPGSV,1*00\r\n" for second in range(20)]
    events = sensor.receive(b"".join(sent), 0)
    assert len(payloads(events)) == 20
    assert (unread(events), sensor.faults, sensor.noisy) == ({}, {}, 20)


def test_text_before_whole_sentences_counts_once_and_is_no_loss_unless_it_was_wanted() -> None:
    sensor = joined("nmea")
    sent = b"+GPSRD:$GPGGA,000019*72\r\n$GPGGA,0123$GPRMC,000020*65\r\n\xff$GPROT,1*43\r\n"
    events = sensor.receive(sent, 0)
    assert payloads(events) == [
        '{"sentence":"GPGGA","1":19}',
        '{"sentence":"GPRMC","1":20}',
        '{"sentence":"GPROT","1":1}',
    ]
    assert (unread(events), sensor.noisy) == ({"nmea-without-checksum": 1}, 2)


def test_sentences_in_a_line_that_is_too_long_are_read() -> None:
    # Binary messages of a receiver between its sentences need hold no end of a line.
    for noise in (0, 1, 40, 63, 64, 65, 1000):
        sensor = joined("nmea")
        good = sentence(b"GPRMC,000020")
        stream = good + b"\xb5b" * noise + good + b"\x80" * noise + good + b"\r\n" + good + b"\r\n"
        events = [event for byte in stream for event in sensor.receive(bytes((byte,)), 0)]
        assert payloads(events) == ['{"sentence":"GPRMC","1":20}'] * 4
        assert unread(events) == ({"line-too-long": 1} if len(stream) - len(good) - 4 > LINE_BYTES_MAX else {})


def test_a_byte_order_mark_at_the_start_of_a_line_is_passed_over() -> None:
    mark = b"\xef\xbb\xbf"
    for name, rest, line in (
        ("key=value", {}, b"t=1"),
        ("key:value", {}, b"t: 1"),
        ("csv", {"columns": ("t",)}, b"1"),
        ("json", {}, b'{"t":1}'),
        ("nmea", {"sentences": {"MTW": ("t",)}}, sentence(b"WIMTW,1")),
    ):
        sensor = joined(name, **rest)
        (expected,) = payloads(sensor.receive(line + b"\n", 0))
        for begin in (mark, mark + b"\0", b"\x02" + mark):
            assert payloads(sensor.receive(begin + line + b"\r\n", 0)) == [expected]
        # A heading behind it is one, and a line of nothing else is blank.
        assert payloads(sensor.receive(mark + b"\r\n", 0)) == []
        assert (sensor.faults, sensor.noisy) == ({}, 0)
    assert joined("csv", columns=("t",)).receive(mark + b"T\n", 0) == []
    # Beside it the degree sign may be of another code all the same.
    assert payloads(joined().receive(mark + b"t=1 \xb0C\n", 0)) == ['{"t":1}']


def test_a_byte_that_an_idle_line_is_read_as_costs_neither_a_name_nor_a_value_its_kind() -> None:
    for name, rest, line in (
        ("key=value", {}, b"t=21.5"),
        ("key:value", {}, b"t: 21.5"),
        ("csv", {"columns": ("t",)}, b"21.5"),
        ("json", {}, b'{"t":21.5}'),
    ):
        sensor = joined(name, **rest)
        for sent in (b"\xff" + line, b"\xff\xff" + line, line + b"\xff"):
            assert payloads(sensor.receive(sent + b"\r\n", 0)) == ['{"t":21.5}']
        assert payloads(sensor.receive(b"\xff\r\n\xff\xff \r\n", 0)) == []
        assert sensor.faults == {}


def test_members_that_did_not_move_are_left_out_and_the_sensor_is_heard_all_the_same() -> None:
    sensor = joined(on_change={"t": 0.5})
    assert payloads(sensor.receive(b"t=20.0 h=40\nt=20.5 h=41\nt=20.6 h=42\n", 0)) == [
        '{"t":20.0,"h":40}',
        '{"t":20.6,"h":42}',
    ]
    assert sensor.receive(b"t=20.6 h=43\n", 1) == [Readings(())]
    assert payloads(sensor.receive(b"t=20.6\n", 900_000_000)) == ['{"t":20.6}']
    sensor.lose()
    assert payloads(sensor.receive(b"t=20.6 h=43\n", 900_000_001)) == ['{"t":20.6,"h":43}']


DUST = [bytes((0xAA, 0xC0, n & 0xFF, 1, n >> 1 & 0xFF, 2, 0xA1, 0x60, (n + 4) & 0xFF, 0xAB)) for n in range(0, 140, 7)]


def test_frames_of_a_binary_protocol_are_told_from_text_and_noise() -> None:
    for frames in (
        DUST,
        # Of 32 bytes, joined in the middle, and with ends of lines in them.
        [b"\x42\x4d\0\x1c" + bytes((0, n, 0, 10 + n % 4)) * 7 for n in range(1, 12)],
        [b"\xff\x86\x02" + bytes((n, 0x47, 0, 0, 0, 255 - n)) for n in range(20)],
    ):
        sensor = link()
        sensor.receive(b"".join(frames)[3:], 0)
        told = sensor.binary_frames
        assert told is not None
        assert told.length == len(frames[0])
        assert all(told.pair in frame + frame for frame in frames)
    assert joined().binary_frames is None
    seed = random.Random(5)  # noqa: S311 - a seed, not a secret
    for stream in (
        b"T: 21.50 \xb0C\r\n" * 20,
        "Температура 21,5\r\n".encode() * 20,
        bytes(200),
        b"\x01\xff" * 100,
        seed.randbytes(400),
        b"".join(encode_frame(Hello(7, n, 2, 0, 0, "thermo-1", "1.0", ("t" * n,))) for n in range(1, 9)),
        heard_at(9600, 4800, b"".join(b"t=%d.%d h=40\r\n" % divmod(n, 10) for n in range(200, 300, 7))),
    ):
        sensor = joined("nmea")
        sensor.receive(stream, 0)
        assert sensor.binary_frames is None
    # A sensor that has written a reading has proved that it writes text.
    sensor = joined()
    sensor.receive(b"t=1\n" + b"".join(DUST), 0)
    assert sensor.binary_frames is None


FORMATS = [
    ("key=value", {}),
    ("key:value", {}),
    ("json", {}),
    ("nmea", {}),
    ("csv", {"columns": ("a", "", "b"), "delimiter": ";"}),
]
STREAMS = st.lists(
    st.binary(max_size=30)
    | st.sampled_from(
        [
            b"\n",
            b"\r",
            b"\r\n",
            b"\0",
            b"t=1 h=2",
            b"t: 1 \xb0C",
            b'{"t":1}',
            b"1;2;3",
            sentence(b"WIMTW,1"),
            b"x" * LINE_BYTES_MAX,
        ]
    ),
    max_size=30,
).map(b"".join)


@given(st.sampled_from(FORMATS), STREAMS, st.lists(st.integers(0, 1000), max_size=20))
def test_any_bytes_in_any_split_give_the_same(
    line_format: tuple[str, dict[str, object]], stream: bytes, cuts: Sequence[int]
) -> None:
    name, rest = line_format
    whole = link(name, **rest)
    expected = whole.receive(stream, 0)
    split = link(name, **rest)
    positions = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    events: list[FormatEvent] = []
    for start, end in pairwise(positions):
        events += split.receive(stream[start:end], 0)
        # Bounded: nothing but the line that has not ended is held.
        assert len(split.cutter._received) <= LINE_BYTES_MAX
    assert payloads(events) == payloads(expected)
    assert unread(events) == unread(expected) == whole.faults == split.faults
    assert [event for event in events if isinstance(event, Unreadable)] == [
        event for event in expected if isinstance(event, Unreadable)
    ]


def test_frames_are_recognised_however_they_are_cut_until_a_reading_has_come() -> None:
    # With ends of lines in it, so that lines are seen too.
    hello = encode_frame(Hello(7, 0x0A0D0A0D, 2, 0, 0, "thermo-1", "sluice-avr 0.1.0", ("thermo",)))
    sensor = link("nmea")
    seen = []
    for byte in hello:
        assert payloads(sensor.receive(bytes((byte,)), 0)) == []
        seen.append(sensor.sends_frames)
    assert seen == [False] * (len(hello) - 1) + [True]
    assert sensor.lines.joined
    sensor.receive(sentence(b"GPGLL,1") + b"\r\n", 0)
    assert payloads(sensor.receive(sentence(b"GPGLL,1") + b"\r\n", 0)) != []
    seen = [sensor.sends_frames]
    # A sensor whose text was read has proved that it writes text.
    sensor.receive(b"\0" + hello, 0)
    assert [*seen, sensor.sends_frames] == [False, False]


def test_a_link_knows_its_last_unreadable_line_and_whether_lines_came() -> None:
    sensor = link()
    sensor.receive(b"\x01\xff" * 1_000, 0)
    assert not sensor.lines.joined
    sensor = link()
    assert sensor.last_unreadable is None
    sensor.receive(b"\nt: 1\nt=2\nready\nt=3\n", 0)
    assert sensor.lines.joined
    assert sensor.last_unreadable == Unreadable(b"ready", "no-pairs")
