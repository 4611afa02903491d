"""Who was heard, where, and what its readings tell of their time."""

from msgspec.structs import replace

from gateway.buffer_rows import Entry, Quarantined, Series
from gateway.devices_heard import SUBJECT_MAX, DevicesHeard
from tests.buffers import entry


def heard_of(*entries: Entry) -> DevicesHeard:
    heard = DevicesHeard()
    heard.note(entries)
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
            replace(plain, tick_ms=0),
            replace(plain, tick_ms=7, event_us=3),
            replace(plain, event_us=3),
            replace(plain, device_time_us=3),
        )
    ]
    assert [each.tells for each in told if each is not None] == ["nothing", "tick", "tick", "time", "time"]


def test_what_is_no_reading_is_of_no_device() -> None:
    report = replace(entry(device=""), quarantined=Quarantined("no-route", b"", "42", "shed/7", 1))
    assert list(heard_of(report)) == []


def test_memory_is_bounded_by_devices_and_by_their_topics() -> None:
    heard = DevicesHeard(devices_max=3)
    for number in range(10):
        heard.note([entry(device=str(number)), entry(device=str(number))])
    assert list(heard) == ["7", "8", "9"]
    long = "x" * 60_000
    heard.note([replace(entry(), series=Series("t", "42", "42", long, "sluice.reading", "", long))])
    found = heard.get("42")
    assert found is not None
    assert found.subject == "x" * SUBJECT_MAX
    assert not found.is_serial
