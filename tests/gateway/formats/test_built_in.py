"""The formats that come with the gateway: frames and telegrams, split anywhere, damaged, cut off, behind noise."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.formats.built_in import BUILT_IN
from gateway.formats.cutter import Cut, Cutter
from gateway.formats.dsmr import crc16


def sds011(fine: int, coarse: int, number: bytes = b"\xa1\x60") -> bytes:
    values = fine.to_bytes(2, "little") + coarse.to_bytes(2, "little") + number
    return b"\xaa\xc0" + values + bytes((sum(values) & 0xFF, 0xAB))


def pms5003(numbers: Sequence[int], error: int = 0) -> bytes:
    words = b"\x42\x4d\x00\x1c" + b"".join(number.to_bytes(2, "big") for number in (*numbers, 0x9700 | error))
    return words + sum(words).to_bytes(2, "big")


def telegram(*lines: str) -> bytes:
    text = "\r\n".join(("/XXX5METER", "", *lines, "!")).encode("latin-1")
    return text + b"%04X\r\n" % crc16(text)


WHOLE = telegram(
    "1-3:0.2.8(50)",
    "0-0:1.0.0(101209113020W)",
    "0-0:96.1.1(4B384547303034303436333935353037)",
    "1-0:1.8.1(000123.456*kWh)",
    "1-0:2.8.2(000000.000*kWh)",
    "0-0:96.14.0(0002)",
    "1-0:1.7.0(00.123*kW)",
    "1-0:2.7.0(00.000*kW)",
    "0-0:96.7.21(00004)",
    "1-0:99.97.0(2)(0-0:96.7.19)(101208152415W)(0000000240*s)(101208151004W)(0000000301*s)",
    "1-0:52.32.0(00001)",
    "0-0:96.13.0()",
    "1-0:72.7.0(230.0*V)",
    "1-0:71.7.0(002*A)",
    "1-0:61.7.0(01.193*kW)",
    "0-1:24.1.0(003)",
    "0-1:96.1.0(3232323241424344)",
    "0-1:24.2.1(101209112500W)(12785.123*m3)",
    "9-9:1.2.3(007)",
)
READ: dict[str, Any] = {
    "meter": "XXX5METER",
    "version": "50",
    "time": "101209113020W",
    "id": "4B384547303034303436333935353037",
    "import_1_kWh": 123.456,
    "export_2_kWh": 0.0,
    "tariff": "0002",
    "import_kW": 0.123,
    "export_kW": 0.0,
    "failures": 4,
    "1-0:99.97.0": "(2)(0-0:96.7.19)(101208152415W)(0000000240*s)(101208151004W)(0000000301*s)",
    "l2_sags": 1,
    "message": None,
    "l3_V": 230.0,
    "l3_A": 2,
    "l3_import_kW": 1.193,
    "mbus_1_type": 3,
    "mbus_1_id": "3232323241424344",
    "mbus_1_m3": 12785.123,
    "mbus_1_time": "101209112500W",
    "9-9:1.2.3": "007",
}


def cut(name: str, stream: bytes) -> list[Cut]:
    return Cutter(BUILT_IN[name]()).feed(stream)


def readings(cuts: Sequence[Cut]) -> list[Any]:
    return [json.loads(reading) for each in cuts for reading in each.readings]


def damage(cuts: Sequence[Cut]) -> list[str]:
    return [each.damage for each in cuts if each.damage]


def test_a_telegram_becomes_members_with_units_and_the_digits_that_the_meter_sent() -> None:
    (telegram,) = cut("dsmr", WHOLE)
    (payload,) = telegram.readings
    assert json.loads(payload) == READ
    assert b'"export_2_kWh":0.000,' in payload
    assert b'"l3_V":230.0,"l3_A":2,' in payload


def test_the_crc_of_telegrams_is_that_of_the_standard() -> None:
    assert crc16(b"123456789") == 0xBB3D


def test_a_telegram_without_its_checksum_is_damage_with_words_for_each_kind() -> None:
    assert damage(cut("dsmr", WHOLE.replace(b"123.456", b"123.457"))) == ["telegram-checksum"]
    meter = b"/XXX5METER\r\n\r\n1-3:0.2.8(50)\r\n1-0:1.8.1(000123.456*kWh)\r\n1-0:1.7.0(00.123*kW)\r\n!0000\r\n"
    assert damage(cut("dsmr", meter)) == ["telegram-checksum"]
    assert damage(cut("dsmr", meter.replace(b"0000\r", b"\r"))) == ["telegram-without-checksum"]
    assert damage(cut("dsmr", telegram())) == ["telegram-without-values"]
    assert damage(cut("dsmr", telegram("1-0:1.8.1(1*kWh)", "1-0:1.8.1(2*kWh)"))) == ["telegram-without-values"]
    cuts = cut("dsmr", WHOLE[200:] + WHOLE[:100] + WHOLE)
    assert (damage(cuts), readings(cuts)) == (["telegram-cut-off"], [READ])


def test_frames_of_an_sds011_become_micrograms_and_its_number() -> None:
    assert cut("sds011", sds011(256, 512)) == [Cut((b'{"pm2_5":25.6,"pm10":51.2,"id":"A160"}',))]


def test_frames_of_a_pms5003_become_members() -> None:
    (frame,) = cut("pms5003", pms5003(range(1, 13), error=8))
    (payload,) = frame.readings
    assert payload == (
        b'{"pm1_0_cf1":1,"pm2_5_cf1":2,"pm10_cf1":3,"pm1_0":4,"pm2_5":5,"pm10":6,"above_0_3_um":7,"above_0_5_um":8,'
        b'"above_1_0_um":9,"above_2_5_um":10,"above_5_0_um":11,"above_10_um":12,"error":8}'
    )


FRAMES = {
    "sds011": [sds011(n, 3 * n) for n in range(0, 2000, 97)],
    "pms5003": [pms5003([n * i % 3000 for i in range(12)]) for n in range(20)],
    "dsmr": [telegram(f"1-0:1.8.1({n:010.3f}*kWh)", "1-0:1.7.0(00.123*kW)") for n in range(20)],
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_lost_or_changed_a_byte_costs_itself_alone(name: str) -> None:
    frames = FRAMES[name]
    for at in range(len(frames[7])):
        for replaced in (b"", bytes((frames[7][at] ^ 0x80,))):
            hurt = frames[7][:at] + replaced + frames[7][at + 1 :]
            cuts = cut(name, b"".join((*frames[:7], hurt, *frames[8:])))
            # A telegram has one byte behind its CRC that it may lose.
            whole = [frames[:7] + frames[8:], frames]
            assert readings(cuts) in [readings(cut(name, b"".join(each))) for each in whole], (at, replaced)


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_is_heard_from_its_middle_is_noise(name: str) -> None:
    first, *rest = FRAMES[name]
    cuts = cut(name, first[5:] + b"".join(rest))
    assert damage(cuts) == []
    assert [each.noise for each in cuts] == [True, *[False] * len(rest)]


@pytest.mark.parametrize("name", FRAMES)
def test_a_megabyte_of_noise_makes_no_reading(name: str) -> None:
    noise = random.Random(20_26).randbytes(1_000_000)  # noqa: S311 - a seed, not a secret
    assert readings(cut(name, noise)) == []


@given(
    st.sampled_from([*FRAMES]),
    st.lists(
        st.binary(max_size=40)
        | st.sampled_from([FRAMES[name][3] for name in FRAMES])
        | st.sampled_from([FRAMES[name][3][:-3] for name in FRAMES]),
        max_size=12,
    ).map(b"".join),
    st.lists(st.integers(0, 1000), max_size=20),
)
def test_any_bytes_in_any_split_give_the_same_readings_and_damage(
    name: str, stream: bytes, cuts: Sequence[int]
) -> None:
    split = Cutter(BUILT_IN[name]())
    found: list[Cut] = []
    for start, end in pairwise([0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]):
        found += split.feed(stream[start:end])
    assert [each for each in found if not each.noise] == [each for each in cut(name, stream) if not each.noise]
