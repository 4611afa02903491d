"""What becomes of the lines that real instruments and sketches write, and that nothing in them is made up."""

import json
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.serial_lines.text_formats import NUMBER_CHARACTERS_MAX, LineError, json_value, line_reader, nmea_checksum
from gateway.settings import SerialTextSettings


def settings(line_format: str, **rest: object) -> SerialTextSettings:
    return SerialTextSettings(port="/dev/ttyUSB0", device="attic", format=line_format, **rest)  # type: ignore[arg-type]


PAIRS = settings("key=value")
COLONS = settings("key:value")
JSON_LINES = settings("json")
NMEA = settings("nmea")


def read(sensor: SerialTextSettings, line: str | bytes) -> str | None:
    payload = line_reader(sensor)(line if isinstance(line, bytes) else line.encode())
    return None if payload is None else payload.decode()


def why_unreadable(sensor: SerialTextSettings, line: str | bytes) -> str:
    with pytest.raises(LineError) as refusal:
        read(sensor, line)
    return refusal.value.reason


def sentence(content: str, start: str = "$") -> str:
    return f"{start}{content}*{nmea_checksum(content.encode()):02X}"


@pytest.mark.parametrize(
    ("line", "payload"),
    [
        # The CO2 sensor of a greenhouse, and the same with everything a sketch may do about spaces and commas.
        ("co2=412 temp=21.50 rh=40", '{"co2":412,"temp":21.50,"rh":40}'),
        ("co2 = 412, temp = 21.50; rh=40,", '{"co2":412,"temp":21.50,"rh":40}'),
        # A value that is missing, and one that another sensor wrote in words.
        ("rain= temp=5", '{"rain":null,"temp":5}'),
        ('door=open window="half open, tilted" t=5', '{"door":"open","window":"half open, tilted","t":5}'),
        # Balances write signs, zeros and spaces before their digits, and the unit behind them.
        ("weight=+  012.340kg", '{"weight":12.340}'),
        ("net=-.5 g tare=5. g", '{"net":-0.5,"tare":5}'),
        # What stands before the first name, as time and level of a log line do, is left out.
        ("[00:12] sensor: t=21.5", '{"t":21.5}'),
        ("\x1b[0;32mI (312) sensor: t=21.5\x1b[0m", '{"t":21.5}'),
        # Channels by number; a value that holds the separator.
        ("1=5,2=6", '{"1":5,"2":6}'),
        ("Channel 1=5 mV Channel 2=6 mV 3=7 mV", '{"Channel 1":5,"Channel 2":6,"3":7}'),
        ("Heat index (C) = 21", '{"index (C)":21}'),
        ("id=YWJj== t=5", '{"id":"YWJj==","t":5}'),
        # Nobody knows whether this is a decimal comma: it stays what it is. So do three axes.
        ("t=21,5 acc=0.1,0.2,9.8", '{"t":"21,5","acc":"0.1,0.2,9.8"}'),
        ('width=5" height=6" t=3', '{"width":"5\\"","height":"6\\"","t":3}'),
    ],
)
def test_pairs_with_an_equals_sign(line: str, payload: str) -> None:
    assert read(PAIRS, line) == payload


@pytest.mark.parametrize(
    ("line", "payload"),
    [
        # Three generations of the DHT library's example.
        ("Humidity: 41.20 %  Temperature: 21.50 *C ", '{"Humidity":41.20,"Temperature":21.50}'),
        (
            "Humidity: 41.20 %\tTemperature: 21.50 *C 70.70 *F\tHeat index: 21.02 *C 69.84 *F",
            '{"Humidity":41.20,"Temperature":21.50,"Heat index":21.02}',
        ),
        (
            "Humidity: 41.20%  Temperature: 21.50°C 70.70°F  Heat index: 21.02°C 69.83°F",
            '{"Humidity":41.20,"Temperature":21.50,"Heat index":21.02}',
        ),
        ("T:21.5 H:40", '{"T":21.5,"H":40}'),
        # Times and addresses hold the separator.
        (
            "Time: 10:32:05 MAC: a4:c1:38:00:11:22 RSSI: -60 dBm",
            '{"Time":"10:32:05","MAC":"a4:c1:38:00:11:22","RSSI":-60}',
        ),
        ("mac:a4:c1:38 t:21.5", '{"mac":"a4:c1:38","t":21.5}'),
        # Names of several words, and where a word is a unit rather than the beginning of a name.
        ("Channel 1: 21.5 Channel 2: 22", '{"Channel 1":21.5,"Channel 2":22}'),
        ("Air pressure: 1013.25 hPa Temp: 21 C", '{"Air pressure":1013.25,"Temp":21}'),
        ("Status: ok, Heat index: 21", '{"Status":"ok","Heat index":21}'),
        ("Temp (air): 21 Temp (soil): 9", '{"Temp (air)":21,"Temp (soil)":9}'),
        ("0: 512 mV 1: 300 mV", '{"0":512,"1":300}'),
        ("28FF641E: 21.5 1: 22", '{"28FF641E":21.5,"1":22}'),
        ("DHT: temp: 21.5", '{"DHT":null,"temp":21.5}'),
        ("time: 12 30 10:32 t: 5", '{"time":"12 30 10:32","t":5}'),
    ],
)
def test_pairs_with_a_colon(line: str, payload: str) -> None:
    assert read(COLONS, line) == payload


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("21.50", "21.50"),
        ("+007", "7"),
        ("-00.50", "-0.50"),
        ("-.5e+03", "-0.5e+03"),
        ("450ppm", "450"),
        ("41 %RH", "41"),
        ("5 % RH", "5"),
        ("21.5 deg C", "21.5"),
        ("9.81 m/s2", "9.81"),
        ("12 µg/m3", "12"),
        ("12µg/m³", "12"),
        ("21.5C (70.7F)", "21.5"),
        ("3 doors", "3"),
        ("9" * NUMBER_CHARACTERS_MAX, "9" * NUMBER_CHARACTERS_MAX),
    ],
)
def test_a_number_keeps_its_digits_and_leaves_its_unit(value: str, number: str) -> None:
    assert json_value(value) == number


@pytest.mark.parametrize(
    "value",
    [
        "12ab",
        "3F",
        "21C",
        "0x1A",
        "1.2.3",
        "192.168.1.4",
        "2026-11-22",
        "10:32",
        "1/2",
        "1_000",
        "٣",
        "nan",
        "inf",
        "-",
        "1e999",
        "9" * (NUMBER_CHARACTERS_MAX + 1),
        "3 doors open",
        "0.1 g 0.2 g",
        "3.3 V 0.5 A",
        "21 C, 22 C",
    ],
)
def test_what_is_no_number_or_could_be_another_one_stays_a_text(value: str) -> None:
    assert json_value(value) == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("degree", [b"\xb0", b"\xba", b"\xdf", b"\xf8", "°".encode(), "º".encode(), b"*", b"deg ", b""])
def test_degree_signs_of_all_codes_are_a_unit(degree: bytes) -> None:
    assert read(COLONS, b"t: 21.5 " + degree + b"C h: 40 %") == '{"t":21.5,"h":40}'


@pytest.mark.parametrize(
    ("sensor", "line", "reason"),
    [
        (COLONS, "DHTxx test!", "no-pairs"),
        (COLONS, "Failed to read from DHT sensor!", "no-pairs"),
        (PAIRS, "=5", "no-pairs"),
        (PAIRS, "t=1 t=2", "repeated-name"),
        (PAIRS, "t=2\x001.5", "not-text"),
        (PAIRS, b"t=\x95\x90", "not-text"),
        # Beyond ASCII and no UTF-8: a name like this is noise.
        (PAIRS, b"\xfe\xfc=\xe9", "not-text"),
        (JSON_LINES, '{"t":21.5', "not-json"),
        (JSON_LINES, '{"t":NaN}', "not-json"),
        (JSON_LINES, '{"t":1} {"t":2}', "not-json"),
        (JSON_LINES, b'{"t":"\xb0C"}', "not-json"),
        (JSON_LINES, "[" * 60_000, "not-json"),
        (JSON_LINES, "[21.5]", "json-not-object"),
        (JSON_LINES, '{"t":1,"t":2}', "repeated-name"),
        (JSON_LINES, '{"a":{"t":1,"t":2}}', "repeated-name"),
        (NMEA, "Booting...", "nmea-start"),
        (NMEA, "$WIMTW,17.5,C", "nmea-without-checksum"),
        (NMEA, "$WIMTW,17.5,C*0", "nmea-checksum"),
        (NMEA, "$WIMTW,17.5,C*0F", "nmea-checksum"),
        (NMEA, "$WIMTW,17.6,C*0E", "nmea-checksum"),
        (NMEA, "$WIMTW,17.5,C*+E", "nmea-checksum"),
    ],
)
def test_what_cannot_be_read_says_why(sensor: SerialTextSettings, line: str | bytes, reason: str) -> None:
    assert why_unreadable(sensor, line) == reason


WEATHER = settings("csv", delimiter=";", columns=("", "", "", "t1", "t2", "t3", "h1", "rain"))


@pytest.mark.parametrize(
    ("line", "payload"),
    [
        # A weather station's receiver: decimal commas, sensors that are not there, a delimiter at the end.
        ("$1;1;;20,5;-3,10;;57;0", '{"t1":20.5,"t2":-3.10,"t3":null,"h1":57,"rain":0}'),
        ("$1;1;;,5;0,50 °C;;57;;", '{"t1":0.5,"t2":0.50,"t3":null,"h1":57,"rain":null}'),
        (
            '"$1"; 1; ; "20,5";1,2,3;x;"say ""a;b""";0',
            '{"t1":20.5,"t2":"1,2,3","t3":"x","h1":"say \\"a;b\\"","rain":0}',
        ),
        # What writes thousands with points means neither 1.234 nor 1234 for sure.
        ("$1;1;;1.234,56;1;1;1;1", '{"t1":"1.234,56","t2":1,"t3":1,"h1":1,"rain":1}'),
    ],
)
def test_values_between_semicolons(line: str, payload: str) -> None:
    assert read(WEATHER, line) == payload


def test_values_between_commas_tabs_and_spaces() -> None:
    particles = settings("csv", columns=("pm1", "pm2.5", "pm10"))
    assert read(particles, "3,5,8") == '{"pm1":3,"pm2.5":5,"pm10":8}'
    assert read(particles, '"3,5", 5.0 ,') == '{"pm1":"3,5","pm2.5":5.0,"pm10":null}'
    balance = settings("csv", columns=("state", "", "weight"))
    assert read(balance, "ST,GS,+  0012.340kg") == '{"state":"ST","weight":12.340}'
    tabs = settings("csv", delimiter="tab", columns=("a", "b"))
    assert read(tabs, "\t2,5") == '{"a":null,"b":2.5}'
    spaces = settings("csv", delimiter="space", columns=("a", "b", "c"))
    assert read(spaces, "  1.5   2,5 \t -3 ") == '{"a":1.5,"b":2.5,"c":-3}'
    assert read(spaces, '  1.5   2,5 "x y"') == '{"a":1.5,"b":2.5,"c":"x y"}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [("1;2;3", "column-count"), ("$1;1;;1;1;1;1;1;9", "column-count"), ('$1;1;;"20,5;1;1;1;1', "csv-quote")],
)
def test_a_line_with_other_values_than_columns_is_unreadable(line: str, reason: str) -> None:
    assert why_unreadable(WEATHER, line) == reason


def test_a_table_s_heading_is_no_reading() -> None:
    sensor = settings("csv", columns=("temp", "", "state"))
    assert read(sensor, "Temp,Time,State") is None
    assert read(sensor, "temp,0,open") == '{"temp":"temp","state":"open"}'


def test_json_lines_are_passed_byte_for_byte() -> None:
    line = ' {"t": 21.50, "n": {"a": [1, null]}, "big": 1' + "0" * 5000 + ', "e": "\\u00e9é"} '
    assert read(JSON_LINES, line) == line


@pytest.mark.parametrize(
    ("line", "payload"),
    [
        # Known sentences with the checksums that they were published with.
        (
            "$GPGGA,123519,4807.038,N,01131.000,E,1,08,0.9,545.4,M,46.9,M,,*47",
            (
                '{"sentence":"GPGGA","1":123519,"2":4807.038,"3":"N","4":1131.000,"5":"E","6":1,"7":8,"8":0.9,'
                '"9":545.4,"10":"M","11":46.9,"12":"M","13":null,"14":null}'
            ),
        ),
        (
            "!AIVDM,1,1,,B,177KQJ5000G?tO`K>RA1wUbN0TKH,0*5C",
            '{"sentence":"AIVDM","1":1,"2":1,"3":null,"4":"B","5":"177KQJ5000G?tO`K>RA1wUbN0TKH","6":0}',
        ),
        (
            "\\s:r3669961,c:1120959341*51\\!AIVDM,1,1,,B,177KQJ5000G?tO`K>RA1wUbN0TKH,0*5c ",
            '{"sentence":"AIVDM","1":1,"2":1,"3":null,"4":"B","5":"177KQJ5000G?tO`K>RA1wUbN0TKH","6":0}',
        ),
        # Encoded data that looks like a number with a unit is none.
        (sentence("PABCD,15M,2 C"), '{"sentence":"PABCD","1":"15M","2":"2 C"}'),
    ],
)
def test_nmea_sentences(line: str, payload: str) -> None:
    assert read(NMEA, line) == payload


def test_nmea_sentences_that_are_named_are_taken_and_others_are_no_loss() -> None:
    sensor = settings(
        "nmea", sentences={"MTW": ("celsius",), "VHW": (), "YXXDR": ("", "x", "", "y", "z"), "PASHR": ("", "roll")}
    )
    assert read(sensor, sentence("WIMTW,17.5,C")) == '{"sentence":"WIMTW","celsius":17.5}'
    assert read(sensor, sentence("YXXDR,A,1.5,D,PTCH")) == '{"sentence":"YXXDR","x":1.5,"y":"PTCH","z":null}'
    assert read(sensor, sentence("VWVHW,,T,10.5")) == '{"sentence":"VWVHW","1":null,"2":"T","3":10.5}'
    assert read(sensor, sentence("WIXDR,A,1.5,D,PTCH")) is None
    assert read(sensor, sentence("PASHR,130533.620,0.311")) == '{"sentence":"PASHR","roll":0.311}'
    # A maker's own sentence is not that of a talker whose last letters are the same.
    assert read(sensor, sentence("PAMTW,17.5")) is None
    assert why_unreadable(sensor, "$GPGSV,1,1,00*00") == "nmea-checksum"


@given(st.integers(0, 40), st.integers(1, 255))
def test_a_sentence_with_a_damaged_byte_is_never_taken(position: int, flip: int) -> None:
    line = bytearray(b"$WIMDA,29.9,I,1.0132,B,17.5,C,,,40.1,,3.9*")
    checksum = b"%02X" % nmea_checksum(bytes(line[1:-1]))
    line[position + 1 if position < len(line) - 2 else 1] ^= flip
    with pytest.raises(LineError):
        line_reader(NMEA)(bytes(line) + checksum)


NAMES = st.text(alphabet="abcdefghijklmnopqrstuvwxyzABCÄéµ_-./0123456789", min_size=1, max_size=12).filter(
    lambda name: name[0].isalpha()
)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9).map(str)
SENSORS = [
    PAIRS,
    COLONS,
    JSON_LINES,
    NMEA,
    WEATHER,
    settings("csv", columns=("a", "b")),
    settings("csv", delimiter="tab", columns=("a", "", "b")),
    settings("csv", delimiter="space", columns=("a", "b")),
    settings("nmea", sentences={"MTW": ("celsius", "unit")}),
]
# Bytes that mean something somewhere, so that random lines are not all refused at once.
LINES = st.binary(max_size=200) | st.lists(
    st.sampled_from([*'ab19.,;:=|"\\$!*{}[] +-eE%\t', "°", "\xa0", "null", "MTW", "\xb0", "deg ", "C"]), max_size=60
).map(lambda parts: "".join(parts).encode())


@given(st.dictionaries(NAMES, DECIMALS, min_size=1, max_size=8), st.sampled_from([" ", ",", "; ", "\t"]))
def test_every_name_and_every_digit_comes_through(members: dict[str, str], between: str) -> None:
    for sensor, separators in ((PAIRS, ("=", " = ")), (COLONS, (":", ": "))):
        for separator in separators:
            line = between.join(f"{name}{separator}{value}" for name, value in members.items())
            payload = read(sensor, line)
            assert payload is not None
            assert json.loads(payload, parse_float=str, parse_int=str) == members


def distinct(members: list[tuple[str, object]]) -> dict[str, object]:
    assert len(dict(members)) == len(members)
    return dict(members)


@given(st.sampled_from(SENSORS), LINES)
def test_any_line_makes_one_json_object_or_says_why_not(sensor: SerialTextSettings, line: bytes) -> None:
    reason: str | None = None
    payload: bytes | None = None
    try:
        payload = line_reader(sensor)(line)
    except LineError as error:
        reason = error.reason
    assert reason is None or re.fullmatch(r"[a-z]+(-[a-z]+)*", reason)
    if payload is not None:
        assert isinstance(json.loads(payload.decode(), object_pairs_hook=distinct), dict)
        # Bounded: escapes and nulls make a line longer, and no more than that.
        assert len(payload) <= 200 + 6 * len(line)


@given(st.from_regex(r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,2})?", fullmatch=True))
def test_a_number_is_the_same_number_as_json(text: str) -> None:
    number = json_value(text)
    # As Python reads JSON, whose grammar is stricter than a sensor's.
    assert isinstance(json.loads(number), int | float)
    assert Decimal(number).compare_total(Decimal(text)) == 0
