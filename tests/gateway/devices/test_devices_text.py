"""The words of `sluice devices`: true figures, and tables that no sensor can break."""

import re

from hypothesis import given
from hypothesis import strategies as st

from gateway.devices.listing import Clock, Device, Listing
from gateway.devices.words import devices_lines, drift_words
from gateway.host.terminal_text import bound

CLOCK = Clock("", "7-1a2b3c4d", "rc", "rc", (7_912.0, 7_988.0), 2_040, 9.0)
DEVICE = Device("attic", "/dev/ttyUSB0", True, 12.0, "7-1a2b3c4d", (CLOCK,), None, finding=False)


def lines(*devices: Device, unheard: str = "") -> list[str]:
    return list(devices_lines(Listing(list(devices), running=True, unheard=unheard)))


def test_a_device_and_its_clock() -> None:
    assert lines(DEVICE) == [
        "DEVICE  WHERE            HEARD  BOOT        DRIFT (ppm)     BOUND  OBSERVED",
        "attic   /dev/ttyUSB0  12 s ago  7-1a2b3c4d  +7,950 ± 39  ± 2.1 ms   9 s ago",
    ]


def test_who_may_log_in_and_was_not_heard_is_named() -> None:
    nobody = list(devices_lines(Listing([], running=True, unheard="", not_heard=("42", "43"))))
    assert nobody == ["no device is known yet", "not heard yet: 42, 43"]
    names = tuple(f"m{number}" for number in range(7))
    shown = list(devices_lines(Listing([DEVICE], running=True, unheard="", not_heard=names)))
    assert shown == [*lines(DEVICE), "not heard yet: m0, m1, m2, m3, m4 and 2 more"]


def test_the_listing_of_a_stopped_gateway_says_that_it_is_not_running() -> None:
    shown = list(devices_lines(Listing([DEVICE], running=False, unheard="")))
    assert shown[:-1] == lines(DEVICE)
    assert "sluice is not running" in shown[-1]


def test_no_device() -> None:
    assert lines() == ["no device is known yet"]
    assert lines(unheard="nobody listens")[0] == "the gateway's memory is not known: nobody listens"


def test_streams_that_count_by_themselves_have_a_row_each() -> None:
    topics = ("device/9/a", "device/9/b")
    clocks = tuple(Clock(topic, "1", "rc", "rc", None, None, None) for topic in topics)
    shown = lines(Device("9", "device/9/b", False, 1.0, "1", clocks, None, finding=False))[1:]
    assert [line.split()[:2] for line in shown] == [["9", topic] for topic in topics]


def test_the_same_is_said_once_and_findings_first() -> None:
    devices = [Device(f"s{number:02}", None, None, None, None, (), "no tick", finding=False) for number in range(12)]
    devices.append(Device("t", None, None, None, None, (), "worse", finding=True))
    shown = lines(*devices)
    assert shown[-3:] == ["t: worse", "s00, s01, s02, s03, s04 and 7 more: no tick", "to be looked at: 1 of 13 devices"]


def test_an_escaped_name_is_told_whole_as_it_was() -> None:
    """This holds for any width of the terminal."""
    original = "a very long name " * 3 + "\x1b[2J"
    renamed = Device("x--a", None, None, None, None, (), "no tick", finding=False, original=original)
    shown = " ".join(line.strip() for line in "\n".join(lines(DEVICE, renamed)).splitlines())
    assert r"x--a: called a very long name a very long name a very long name \x1b[2J" in shown
    assert "called" not in "".join(lines(DEVICE))


def test_nothing_that_a_sensor_says_reaches_the_terminal_as_it_is() -> None:
    hostile = "x\x1b[2J\u202e"
    clock = Clock(hostile, hostile, "rc", "rc", None, None, None)
    shown = lines(
        Device(hostile, hostile, False, 1.0, hostile, (), None, finding=False),
        Device(hostile, hostile, False, 1.0, hostile, (clock,), hostile and "note", finding=False),
    )
    assert all(line.isprintable() for line in shown)


@given(st.floats(-20_000, 20_000), st.floats(0, 20_000))
def test_the_drift_that_is_shown_holds_what_is_possible(least: float, width: float) -> None:
    clock = Clock("", "1", "rc", "rc", (least, least + width), 1_000, 0.0)
    middle, half = (float(part.replace(",", "")) for part in drift_words(clock).split(" ± "))
    assert middle - half <= least + 1e-6
    assert middle + half >= least + width - 1e-6
    assert half <= width / 2 + 2


UNITS_US = {"ms": 1_000, "s": 10**6, "min": 60 * 10**6, "h": 3_600 * 10**6, "d": 86_400 * 10**6}


@given(st.integers(0, 60 * 10**12))
def test_the_bound_that_is_shown_is_not_below_what_it_is(error_us: int) -> None:
    parts = re.findall(r"([\d,.]+) (ms|s|min|h|d)\b", bound(error_us))
    shown_us = sum(float(figure.replace(",", "")) * UNITS_US[unit] for figure, unit in parts)
    assert error_us - 1 <= shown_us <= error_us * 1.1 + 100
