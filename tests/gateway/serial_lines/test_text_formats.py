"""Lines of real instruments and sketches become readings, and nothing in the readings is made up."""

import json
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.intake.payload_identity import why_none
from gateway.serial_lines.text_formats import (
    NOISE,
    NUMBER_CHARACTERS_MAX,
    LineError,
    json_value,
    line_reader,
)
from gateway.settings import SerialTextSettings
from tests.support.nmea import nmea_checksum


def settings(line_format: str, **rest: object) -> SerialTextSettings:
    return SerialTextSettings(port="/dev/ttyUSB0", device="attic", format=line_format, **rest)  # type: ignore[arg-type]


PAIRS = settings("key=value")
COLONS = settings("key:value")
JSON_LINES = settings("json")
NMEA = settings("nmea")


def judged(sensor: SerialTextSettings, line: str | bytes) -> tuple[list[str], str | None]:
    """The readings of a line, and why something in it could not be read."""
    payloads = []
    try:
        for payload in line_reader(sensor)(line if isinstance(line, bytes) else line.encode()):
            payloads.append(payload.decode())  # noqa: PERF401 - it may raise
    except LineError as error:
        return payloads, error.reason
    return payloads, None


def read(sensor: SerialTextSettings, line: str | bytes) -> str | None:
    """The reading of a line that has one at the most, and nothing else."""
    payloads, reason = judged(sensor, line)
    assert reason is None
    assert len(payloads) <= 1
    return payloads[0] if payloads else None


def why_unreadable(sensor: SerialTextSettings, line: str | bytes) -> str:
    payloads, reason = judged(sensor, line)
    assert payloads == []
    assert reason is not None
    return reason


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
        ("2.8E10", "2.8E10"),
        ("28.E1", "28E1"),
        ("28E-1", "28E-1"),
        ("-28E1", "-28E1"),
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
        "28E10",
        "28e1",
        "28E10 C",
        "007E3",
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
        (JSON_LINES, '{"t":nan,"h":-inf}', "not-json"),
        (JSON_LINES, '{"t":nan,"h":null}', "not-json"),
        (JSON_LINES, '{"t":2 1.5,"h":1}', "not-json"),
        (JSON_LINES, '{"t":21.{"t":21.5,"h":40}', "not-json"),
        (JSON_LINES, '{"t":nan,"h":1,"t":2}', "repeated-name"),
        (JSON_LINES, '{"t":1,"h":nan', "not-json"),
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


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("283D", "283"),
        ("1.0M", "1.0"),
        ("21C", "21"),
        ("21C (70F)", "21"),
        ("-0.50 C", "-0.50"),
        ("5W/m2", "5"),
        ("+ 7C", "7"),
        ("1e-3D", "1e-3"),
    ],
)
def test_a_declared_unit_is_left_out_whatever_the_number_looks_like(value: str, number: str) -> None:
    assert json_value(value, units=("C", "D", "F", "M", "W/m2")) == number


@pytest.mark.parametrize("value", ["283DD", "28E10C", "C", "D5", "0x1D", "2C8"])
def test_a_declared_unit_makes_no_number_of_what_is_none(value: str) -> None:
    assert json_value(value, units=("C", "D")) == json.dumps(value)


def test_the_kind_of_a_field_is_declared_in_every_format() -> None:
    station = settings("key=value", units=("C", "D", "H", "M", "P"))
    line = "0R0,Dm=283D,Sm=1.0M,Ta=21C,Ua=40.0P,Pa=999.4H,Rc=0.01M"
    assert read(station, line) == '{"Dm":283,"Sm":1.0,"Ta":21,"Ua":40.0,"Pa":999.4,"Rc":0.01}'
    tags = settings("key=value", texts=("rom", "id"), units=("F",))
    for rom in ("28FF", "28E10", "2800", "0x1A", "5F"):
        assert read(tags, f"rom={rom} t=5F") == f'{{"rom":"{rom}","t":5}}'
    assert read(tags, 'id=007, rom="12" v=007') == '{"id":"007","rom":"12","v":7}'
    # A value that is missing is missing in a text too.
    assert read(tags, "id= v=1") == '{"id":null,"v":1}'
    assert read(settings("key:value", texts=("Channel 2",)), "Channel 1: 07 Channel 2: 07") == (
        '{"Channel 1":7,"Channel 2":"07"}'
    )
    columns = settings("csv", delimiter=";", columns=("id", "t", "u"), texts=("id",), units=("D",))
    assert read(columns, "1,50;20,5D;7D") == '{"id":"1,50","t":20.5,"u":7}'
    named = settings("nmea", sentences={"XDR": ("id", "t")}, texts=("id",), units=("C",))
    assert read(named, sentence("WIXDR,007,21C")) == '{"sentence":"WIXDR","id":"007","t":21}'
    assert read(settings("nmea", texts=("1",)), sentence("WIXDR,007,28E10")) == (
        '{"sentence":"WIXDR","1":"007","2":"28E10"}'
    )


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
    "word", ["nan", "NaN", "-inf", "Infinity", "-nan(ind)", "1.#QNAN", "ovf", "None", "--", "+21.5", "007", "tru", ""]
)
def test_a_word_that_is_no_value_costs_no_json_line(word: str) -> None:
    for line in (f'{{"t":21.5,"h":{word}}}', f'{{"h": {word} ,"x":[0,{{"y":{word}}}],"name":"{word}"}}'):
        assert read(JSON_LINES, line) == line
    assert why_unreadable(JSON_LINES, f'{{"h":{word}}}') == "not-json"


@given(
    st.lists(
        st.sampled_from([b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b" ", b"\0", b"x", b"nan", b'"a":1']),
        max_size=12,
    )
)
def test_a_json_line_is_read_as_a_payload_is(parts: list[bytes]) -> None:
    line = b'{"v":1,%b}' % b"".join(parts)
    is_object = not why_none("json", line).startswith("no JSON")
    assert (judged(JSON_LINES, line)[1] in {None, "repeated-name"}) == is_object


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


@pytest.mark.parametrize(
    "line",
    ["$ZZLOC,15,9,314", "$GPGSV,1,1,00", "$GPTXT,cost $5!", sentence("GPTXT,\x01"), sentence("GPRMX,000020")],
)
def test_a_sentence_that_nobody_asked_for_is_passed_over(line: str) -> None:
    assert judged(settings("nmea", sentences={"RMC": ("time",)}), line) == ([], None)


@pytest.mark.parametrize(
    "line", ["$GPGSV,1,1,00*00", "$GPGSV,1,1,00*", "!AIVDM,1*0", "$GPRMX,000020*65", "$GPRMX,0*1$A,*"]
)
def test_a_damaged_sentence_that_nobody_asked_for_is_noise_once(line: str) -> None:
    """The fourth is a wanted sentence with a damaged bit in its type."""
    assert judged(settings("nmea", sentences={"RMC": ("time",)}), line) == ([], NOISE)


RMC = '{"sentence":"GPRMC","1":20}'
MTW = '{"sentence":"WIMTW","1":17.5,"2":"C"}'


@pytest.mark.parametrize(
    ("line", "payloads", "reason"),
    [
        # An answer of a modem in front, a sentence that was cut off, a byte of noise; and the same behind.
        ("+GPSRD:$GPGGA,000019*72", ['{"sentence":"GPGGA","1":19}'], NOISE),
        ("$GPGGA,0123$GPRMC,000020*65", [RMC], "nmea-without-checksum"),
        (b"\xff$GPROT,1*43", ['{"sentence":"GPROT","1":1}'], NOISE),
        ("$GPRMC,000020*65OK", [RMC], NOISE),
        ("$GPRMC,000020*65 \t", [RMC], None),
        ("$GPRMC,000020*65$GPGGA,01", [RMC], "nmea-without-checksum"),
        ("$GPRMC,000020*65$GP", [RMC], "nmea-without-checksum"),
        # Two sentences whose end of a line was lost; a damaged one between them; however much is wrong, one count.
        ("$GPGGA,000019*72$GPRMC,000020*65", ['{"sentence":"GPGGA","1":19}', RMC], None),
        ("$GPGGA,000019*72$GPGGA,000018*72$GPRMC,000020*65", ['{"sentence":"GPGGA","1":19}', RMC], "nmea-checksum"),
        ("OK$GPGGA,1$GPGGA,2*00 x $GPRMC,000020*65y$GPGGA", [RMC], "nmea-checksum"),
        # `$` and `!` within a text are no beginnings where the checksum holds from an earlier one.
        (sentence("GPTXT,5$ and more!"), ['{"sentence":"GPTXT","1":"5$ and more!"}'], None),
        (sentence("GPTXT,$ABC,!DEF,x"), ['{"sentence":"GPTXT","1":"$ABC","2":"!DEF","3":"x"}'], None),
        # Tags stand in front of either sentence.
        ("\\s:a*00\\$GPGGA,000019*72\\s:a*00\\$GPRMC,000020*65", ['{"sentence":"GPGGA","1":19}', RMC], None),
        # A checksum of one digit, in any case, at the end of the line or not.
        ("$WIMTW,17.5,C*e", [MTW], None),
        ("$WIMTW,17.5,C*E$GPRMC,000020*65", [MTW, RMC], None),
        ("$WIMTW,17.5,C*F", [], "nmea-checksum"),
        (sentence("GPTXT,\x01"), [], "not-text"),
    ],
)
def test_what_stands_around_a_whole_sentence_never_costs_it(
    line: str | bytes, payloads: list[str], reason: str | None
) -> None:
    assert judged(NMEA, line) == (payloads, reason)


def test_what_nobody_asked_for_is_no_loss_beside_a_sentence_either() -> None:
    sensor = settings("nmea", sentences={"RMC": ("t",)})
    rmc = '{"sentence":"GPRMC","t":20}'
    assert judged(sensor, "$GPGGA,0123$GPRMC,000020*65") == ([rmc], None)
    assert judged(sensor, "$GPRMC,000020*65$GPGGA,1*00$GPGSV,1*2") == ([rmc], NOISE)
    assert judged(sensor, "$GPRMC,0$GPGGA,1*00") == ([], "nmea-checksum")
    # Which type it was to be, nobody knows.
    assert judged(sensor, "$GPR$GPRMC,000020*65") == ([rmc], "nmea-without-checksum")


@given(
    st.lists(
        st.sampled_from(["GPGGA,000019", "WIMTW,17.5,C", "PASHR,1,,R"]).map(sentence)
        | st.sampled_from(["OK ", "\x00", "\xff", "$GPGSV,1,", "!", "$", "*5", "$GPGGA,1*00"]),
        max_size=6,
    )
)
def test_every_whole_sentence_of_a_line_is_read(pieces: list[str]) -> None:
    # Behind a star a digit may belong to it: no other piece begins with one.
    payloads, _ = judged(NMEA, "".join(pieces))
    whole = [piece for piece in pieces if re.fullmatch(r"\$.*\*(?!00)..", piece)]
    assert [json.loads(payload)["sentence"] for payload in payloads] == [piece[1:6] for piece in whole]


def test_a_long_line_of_beginnings_and_ends_takes_one_pass() -> None:
    # Each beginning checked by itself would be hundreds of millions of steps.
    for line in (b"$GPRMC" * 10_000, b"$GPRMC,*00" * 6_000, b"$A,*0$!*" * 8_000, b"\\" * 60_000, b"*00" * 20_000):
        assert judged(NMEA, line + b"$GPRMC,000020*65")[0] == [RMC]


@given(st.integers(0, 40), st.integers(1, 255))
def test_a_sentence_with_a_damaged_byte_is_never_taken(position: int, flip: int) -> None:
    line = bytearray(b"$WIMDA,29.9,I,1.0132,B,17.5,C,,,40.1,,3.9*")
    checksum = b"%02X" % nmea_checksum(bytes(line[1:-1]))
    line[position + 1 if position < len(line) - 2 else 1] ^= flip
    payloads, reason = judged(NMEA, bytes(line) + checksum)
    assert payloads == []
    assert reason is not None


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
def test_any_line_makes_json_objects_or_says_why_unreadable(sensor: SerialTextSettings, line: bytes) -> None:
    payloads, reason = judged(sensor, line)
    assert reason is None or re.fullmatch(r"[a-z]+(-[a-z]+)*", reason)
    for payload in payloads:
        assert isinstance(json.loads(payload, object_pairs_hook=distinct), dict)
    # Bounded: escapes and nulls make a line longer, and no more than that.
    assert len("".join(payloads).encode()) <= 200 + 6 * len(line)


@given(
    st.from_regex(r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,2})?", fullmatch=True).filter(
        lambda text: re.fullmatch(r"[0-9]+[eE][0-9]+", text) is None
    )
)
def test_a_number_is_the_same_number_as_json(text: str) -> None:
    number = json_value(text)
    # As Python reads JSON, whose grammar is stricter than a sensor's.
    assert isinstance(json.loads(number), int | float)
    assert Decimal(number).compare_total(Decimal(text)) == 0
