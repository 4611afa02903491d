"""The devices in `sluice status`: devices in trouble come first, as many as fit."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer.rows import Series
from gateway.commands.status.device_table import DeviceRow, device_lines, device_rows, heading, rate
from gateway.daemon.device_states import DeviceState, HeardState
from gateway.devices.listing import Clock, Device, Listing
from gateway.intake.devices_heard import DevicesHeard
from tests.support.buffers import entry_of

CLOCK = Clock("", "7-1", "rc", "crystal", (40.0, 60.0), 2_000, 3.0)


def device(name: str, heard_s: float | None = 1.0, *, clock: bool = True, finding: bool = False) -> Device:
    return Device(name, f"device/{name}/thermo", False, heard_s, "7-1", (CLOCK,) if clock else (), None, finding)


def state(name: str, readings: int, seconds: float, missing: int | None = 0, lost: int = 0) -> DeviceState:
    """State of a device that was heard for `seconds`."""
    heard = HeardState("", False, "7-1", "tick", readings, 1, 1 + round(seconds * 1e6), missing=missing)
    return DeviceState(name, heard, (), lost)


def listing(*pairs: tuple[Device, DeviceState]) -> Listing:
    return Listing([each for each, _ in pairs], True, "", tuple(each for _, each in pairs))


def test_who_is_in_trouble_comes_first_then_by_name() -> None:
    found = device_rows(
        listing(
            (device("a"), state("a", 61, 60)),
            (device("b"), state("b", 61, 60, missing=2)),
            (device("c", finding=True), state("c", 61, 60)),
            (device("d"), state("d", 61, 60, missing=None)),
            (device("e", heard_s=61.0), state("e", 61, 60)),
            (device("f"), state("f", 61, 60, lost=3)),
            (device("g", heard_s=61.0), state("g", 11, 200)),
            (device("h", heard_s=101.0), state("h", 11, 200)),
        ),
        {"a": 0, "f": 4, "": 9},
    )
    assert [row.device for row in found] == ["b", "c", "e", "f", "h", "a", "d", "g"]
    by_name = {row.device: row for row in found}
    assert by_name["f"].lost == 7
    assert (by_name["b"].per_s, by_name["b"].missing) == (1.0, 2)
    assert by_name["e"].is_silent
    assert not by_name["g"].is_silent, "it comes every twenty seconds"
    assert heading(found) == (
        "8 devices; 5 to be looked at (first in the table); 1 with a finding (!): sluice devices says which"
    )
    assert heading(found[-1:]) == "1 device"
    assert heading([]) == "none heard yet"


def test_a_device_that_was_hardly_heard_has_no_rate() -> None:
    rows = device_rows(listing((device("a"), state("a", 1, 0)), (device("b"), state("b", 9, 4))), {})
    assert [row.per_s for row in rows] == [None, None]
    (known,) = device_rows(Listing([device("c")], False, ""), {})
    assert (known.per_s, known.missing, known.readings) == (None, None, 0)


def test_the_table_at_eighty_columns() -> None:
    rows = device_rows(
        listing(
            (device("barn-1"), state("barn-1", 601, 60)),
            (device("barn-2", heard_s=3_700.0), state("barn-2", 61, 600, missing=12)),
            (device("scale", clock=False), state("scale", 2, 3_600, missing=None)),
        ),
        {},
    )
    assert list(device_lines(rows, 20, 80)) == [
        "DEVICE          HEARD     RATE  MISSING  DRIFT (ppm)     BOUND  WHERE",
        "barn-2  1 h 1 min AGO  6.0/min       12     +50 ± 11  ± 2.0 ms  device/barn-2/t…",
        "barn-1        1 s ago     10/s        0     +50 ± 11  ± 2.0 ms  device/barn-1/t…",
        "scale         1 s ago    1.0/h        -            -         -  device/scale/th…",
    ]


def test_a_device_that_cannot_log_in_is_marked_and_its_silence_is_no_trouble() -> None:
    revoked = msgspec.structs.replace(device("a", heard_s=3_700.0), no_log_in=True)
    (row,) = rows = device_rows(listing((revoked, state("a", 61, 60, missing=2))), {})
    assert (row.is_silent, row.in_trouble) == (False, False)
    assert list(device_lines(rows, 5, 200))[1].startswith("a (no log-in)  1 h 1 min ago ")
    assert device_rows(listing((revoked, state("a", 61, 60, lost=1))), {})[0].in_trouble


def test_columns_that_nobody_has_anything_in_are_left_out() -> None:
    rows = device_rows(listing((device("a", clock=False), state("a", 2, 10, missing=0))), {})
    assert next(iter(device_lines(rows, 5, 80))).split() == ["DEVICE", "HEARD", "RATE", "WHERE"]


def test_what_does_not_fit_is_counted_with_its_troubles() -> None:
    many = [(device(f"m{number:03}"), state(f"m{number:03}", 61, 60, missing=number < 9)) for number in range(30)]
    lines = list(device_lines(device_rows(listing(*many), {}), 5, 80))
    assert len(lines) == 6
    assert lines[-1] == "and 26 more, 5 of them in trouble: sluice devices"


def test_hostile_names_do_not_act_on_the_terminal() -> None:
    rows = device_rows(listing((device("\x1b[2J"), state("\x1b[2J", 61, 60))), {})
    assert not any("\x1b" in line for line in device_lines(rows, 5, 80))


def test_rates_are_told_by_the_unit_that_fits() -> None:
    assert [rate(each) for each in (None, 0.0, 0.001, 0.05, 1.0, 9.96, 250.4, 12_000.0)] == [
        "-",
        "0/s",
        "3.6/h",
        "3.0/min",
        "1.0/s",
        "10.0/s",
        "250/s",
        "12,000/s",
    ]


ROWS = st.builds(
    DeviceRow,
    st.text(max_size=70),
    st.none() | st.text(max_size=300),
    st.none() | st.floats(0, 1e9),
    st.integers(0, 10**9),
    st.none() | st.floats(0, 1e6),
    st.none() | st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.none(),
    st.none() | st.integers(0, 10**12),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(ROWS, min_size=1, max_size=40), st.integers(1, 30))
def test_no_more_lines_than_there_is_room_for(rows: list[DeviceRow], rows_max: int) -> None:
    lines = list(device_lines(rows, rows_max, 80))
    # The headings, and at the least one device.
    assert len(lines) <= max(rows_max, 2) + 1
    assert all(line.isprintable() for line in lines)


# -- what is missing, by a device's own sequence --------------------------------------------------


def noted(heard: DevicesHeard, sequences: list[int | None], topic: str = "device/42/thermo", boot: str = "7-1") -> None:
    series = Series("t", "42", "42", topic, "sluice.reading", "application/json", topic)
    heard.record([entry_of(series, b"", device_boot=boot, device_sequence=sequence) for sequence in sequences])


def missing(heard: DevicesHeard) -> int | None:
    of = heard.get("42")
    assert of is not None
    return of.missing


def test_numbers_that_were_passed_over_are_missing_until_they_come() -> None:
    heard = DevicesHeard()
    noted(heard, [10, 11, 14])
    assert missing(heard) == 2
    noted(heard, [15, 12])
    assert missing(heard) == 1
    noted(heard, [0, 1], boot="8-1")
    assert missing(heard) == 0, "another boot begins anew"


def test_where_no_sequence_tells_nothing_is_missing() -> None:
    heard = DevicesHeard()
    noted(heard, [None, None])
    assert missing(heard) is None
    several = DevicesHeard()
    noted(several, [1, 2])
    noted(several, [100], topic="device/42/power")
    assert missing(several) is None, "each topic may have a sequence of its own"


@given(st.lists(st.integers(0, 60), min_size=1))
def test_never_more_is_missing_than_is(sequences: list[int]) -> None:
    heard = DevicesHeard()
    noted(heard, [*sequences])
    truly = set(range(sequences[0], max(sequences) + 1)) - set(sequences)
    found = missing(heard)
    assert found is not None
    assert found <= len(truly)
    if len(set(sequences)) == len(sequences) and min(sequences) == sequences[0]:
        assert found == len(truly)
