"""Devices that were heard, where they were heard, and how their readings tell their time."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.rows import Entry, Series
from gateway.intake.devices_heard import FAULTY_MAX, STRETCH_US, SUBJECT_MAX, DevicesHeard, Heard
from gateway.intake.payload_identity import TICK_MODULUS
from tests.support.buffers import changed, entry, input_of


def heard_of(*entries: Entry) -> DevicesHeard:
    heard = DevicesHeard()
    heard.record(entries)
    return heard


def test_a_device_is_where_it_was_heard_last() -> None:
    first, last = entry(received_us=5), entry(received_us=9)
    moved = replace(last, series=replace(last.series, subject="device/42/hygro", stream="device/42/hygro"))
    heard = heard_of(first, moved).get("42")
    assert heard is not None
    assert (heard.subject, heard.is_serial, heard.received_us) == ("device/42/hygro", False, 9)
    assert heard_of().get("42") is None


def test_a_serial_sensor_is_on_a_port() -> None:
    series = replace(entry().series, subject="/dev/ttyUSB0", stream="device/42/thermo")
    heard = heard_of(replace(entry(), series=series)).get("42")
    assert heard is not None
    assert (heard.subject, heard.is_serial) == ("/dev/ttyUSB0", True)


def test_readings_are_counted_by_the_sensors_boot() -> None:
    heard = heard_of(
        entry(sequence=1, received_us=1), entry(sequence=2, received_us=2), entry(sequence=1, boot="2-0", received_us=3)
    )
    found = heard.get("42")
    assert found is not None
    assert (found.boot, found.readings, found.since_us, found.received_us) == ("2-0", 1, 3, 3)


def test_what_a_reading_tells_of_its_time() -> None:
    plain = entry(sequence=1)
    told = [
        heard_of(each).get("42")
        for each in (
            plain,
            changed(plain, tick_ms=0),
            changed(plain, tick_ms=7, event_us=3),
            changed(plain, event_us=3),
            changed(plain, device_time_us=3),
        )
    ]
    assert [each.tells for each in told if each is not None] == ["nothing", "tick", "tick", "time", "time"]


def ticked(*samples: tuple[int, int]) -> Heard:
    """Knowledge of a boot after its samples. Each has the microseconds of its receipt, and its tick."""
    first = entry(sequence=1)
    heard = heard_of(*(changed(first, received_us=at_us, tick_ms=tick % TICK_MODULUS) for at_us, tick in samples))
    found = heard.get("42")
    assert found is not None
    return found


@given(
    st.integers(0, TICK_MODULUS - 1),
    st.floats(0.99, 1.01),
    st.lists(st.tuples(st.integers(1_000, 900_000), st.integers(0, 300_000)), min_size=2, max_size=60),
    st.data(),
)
def test_a_tick_of_milliseconds_has_its_pace_and_never_begins_anew(
    start: int, rate: float, steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    """This holds for any start, rate and wrap of the tick, with delays, and with samples that are sent again."""
    taken_ms, samples = 0, []
    for step_ms, delay_us in steps:
        taken_ms += step_ms
        tick = start + int(taken_ms * rate)
        samples.append((taken_ms * 1_000 + delay_us, tick))
        if data.draw(st.booleans()):
            again = data.draw(st.sampled_from(samples))
            samples.append((samples[-1][0], again[1]))
    heard = ticked(*sorted(samples, key=lambda sample: sample[0]))
    assert heard.tick_restarts == 0
    assert bool(heard.paces) >= (taken_ms * 1_000 > 3 * STRETCH_US + 900_000_000)
    # Delays of 0.3 s over a minute.
    assert all(0.984 <= pace <= 1.016 for pace in heard.paces)


def test_one_sample_with_a_lower_tick_tells_nothing_and_many_tell_that_it_began_anew() -> None:
    before = [(second * 1_000_000, 500_000 + second * 1_000) for second in range(100)]
    after = [(second * 1_000_000, (second - 100) * 1_000) for second in range(100, 200)]
    assert ticked(*before, after[0], (101_000_000, 601_000)).tick_restarts == 0
    assert ticked(*before, *after).tick_restarts == 1
    # Sent faster than it was taken, and newest first.
    assert ticked(*before, *((second * 1_000_000, (second - 100) * 4_000) for second in range(100, 200))).back_from
    assert ticked(*before, *((second * 1_000_000, (300 - second) * 1_000) for second in range(100, 200))).back_from


def test_samples_that_come_newest_first_take_nothing_from_the_pace() -> None:
    before = [(second * 1_000_000, 500_000 + second * 1_000) for second in range(100)]
    after = [(second * 1_000_000, 599_000 - (second - 99) * 500) for second in range(100, 200)]
    assert max(ticked(*before, *after).paces) <= 1


def test_a_tick_that_begins_anew_with_each_reading_has_no_pace() -> None:
    woken = [(number * 300_000_000, (1_500, 7_000, 3_000)[number % 3]) for number in range(7)]
    heard = ticked(*woken)
    assert 0.0 in heard.paces
    assert max(heard.paces) < 0.03


def test_the_ticks_of_two_topics_are_not_mixed() -> None:
    first = entry(sequence=1)
    other = replace(first.series, subject="device/42/hygro", stream="device/42/hygro")
    entries = []
    for second in range(300):
        at_us = second * 1_000_000
        entries += [
            changed(first, received_us=at_us, tick_ms=second * 1_000),
            changed(first, series=other, received_us=at_us, tick_ms=2**31 + second * 1_000),
        ]
    heard = heard_of(*entries).get("42")
    assert heard is not None
    assert (heard.tick_restarts, heard.paces) == (0, (1.0, 1.0))


def test_a_first_reading_with_nan_does_not_hide_the_tick_of_those_that_follow() -> None:
    """A payload that is no JSON goes out as bytes, in a series of its own; and series are made anew now and then."""
    first = entry(sequence=1)
    series = replace(first.series, stream="device/42/thermo")
    as_bytes = replace(series, content_type="application/octet-stream")
    followed = [
        changed(first, series=replace(series), received_us=second * 1_000_000, tick_ms=second * 1_000)
        for second in range(1, 200)
    ]
    heard = heard_of(changed(first, series=as_bytes, tick_ms=0), *followed).get("42")
    assert heard is not None
    assert heard.paces == (1.0, 1.0)


def test_a_topic_that_falls_silent_gives_way_to_another() -> None:
    first = entry(sequence=1)
    other = replace(first.series, subject="device/42/hygro", stream="device/42/hygro")
    late_us = range(3_600_000_000, 3_800_000_000, 10_000_000)
    later = [changed(first, series=other, received_us=at_us, tick_ms=at_us // 1_000) for at_us in late_us]
    heard = heard_of(changed(first, received_us=0, tick_ms=5), *later).get("42")
    assert heard is not None
    assert heard.paces == (1.0, 1.0)


def test_a_topic_without_an_identity_is_of_no_other_boot() -> None:
    plain = replace(entry(), series=replace(entry().series, subject="device/42/hello"))
    heard = heard_of(entry(sequence=1), plain, entry(sequence=2)).get("42")
    assert heard is not None
    assert (heard.boot, heard.readings) == ("1-00000001", 3)


def test_what_is_no_reading_is_of_no_device() -> None:
    report = replace(entry(device=""), quarantined=input_of("no-route", b"", "42", "shed/7"))
    assert list(heard_of(report)) == []


def test_memory_is_bounded_by_devices_and_by_their_topics() -> None:
    heard = DevicesHeard(devices_max=3)
    for number in range(10):
        heard.record([entry(device=str(number)), entry(device=str(number))])
    assert list(heard) == ["7", "8", "9"]
    long = "x" * 60_000
    heard.record([replace(entry(), series=Series("t", "42", "42", long, "sluice.reading", "", long))])
    found = heard.get("42")
    assert found is not None
    assert found.subject == "x" * SUBJECT_MAX
    assert not found.is_serial


def test_the_devices_that_are_named_for_their_payloads_are_bounded() -> None:
    heard = DevicesHeard()
    for number in range(FAULTY_MAX + 5):
        heard.told_fault("identity-missing", str(number), lambda: "no `seq`", number)
    told = heard.last_faults(2 * FAULTY_MAX)["identity-missing"]
    assert len(told) == FAULTY_MAX
    assert (told[0].device, told[-1].device) == (str(FAULTY_MAX + 4), "5")


def test_a_cause_is_looked_for_once_a_second_and_outlasts_a_boot() -> None:
    heard = DevicesHeard()
    asked: list[str] = []

    def cause() -> str:
        asked.append("")
        return f"cause {len(asked)}"

    for at_us in (0, 999_999, 1_000_000, 1_500_000):
        heard.told_fault("payload-not-json", "42", cause, at_us)
    heard.record([entry(sequence=1, received_us=1_500_000)])
    (told,) = heard.last_faults(1)["payload-not-json"]
    assert (told.cause, told.readings, told.told_us, told.received_us) == ("cause 2", 4, 1_000_000, 1_500_000)
    found = heard.get("42")
    assert found is not None
    assert found.faults == {"payload-not-json": told}
