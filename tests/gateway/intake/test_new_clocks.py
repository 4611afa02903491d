"""Readings that wait for their sensor's clock, and how long they wait."""

import pytest

from gateway.buffer.rows import Series
from gateway.clock.arrival_buckets import BUCKET_ARRIVALS_FIRST, BUCKET_US
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.intake.new_clocks import IN_VAIN_MAX, LOOK_US, READINGS_MAX, NewClocks

SECOND_US = 1_000_000
STREAM = "device/42/thermo"


def series(device: str, stream: str = STREAM, topic: str = "device-thermo") -> Series:
    return Series(topic, device, device, stream, "sluice.reading", "application/json", stream)


class Site:
    """A gateway that hears sensors, each with its own clock."""

    def __init__(self, hold_s: float = 60.0) -> None:
        self.now_us = 100 * SECOND_US
        self.clocks = DeviceClocks()
        self.new = NewClocks(hold_s, self.clocks, lambda: self.now_us)
        self.sequence = 0

    def hears(self, boot: str = "1", device: str = "42", stream: str = STREAM) -> tuple[int, int] | None:
        """A reading arrives 20 ms after it was taken."""
        self.sequence += 1
        clock = self.clocks.of(device, boot, "rc", stream)
        found = clock.stamp(self.now_us, (self.now_us - 20_000) // 1_000, self.sequence)
        if found is None:
            self.new.met(series(device, stream), boot, self.now_us)
        return found

    def passes(self, seconds: float) -> bool:
        """Whether anybody's readings may go after that."""
        self.now_us += round(seconds * SECOND_US)
        return self.new.settle()


@pytest.fixture
def site() -> Site:
    return Site()


def test_the_first_readings_of_a_boot_wait_until_its_clock_is_known_and_no_longer(site: Site) -> None:
    assert site.hears() is None
    begun_us = site.now_us
    while not site.passes(1):
        assert site.new.waiting_devices == {("device-thermo", "42")}
        site.hears()
    assert site.hears() is not None
    assert not site.new.waiting
    assert BUCKET_US <= site.now_us - begun_us <= BUCKET_US + 2 * SECOND_US


def test_nobody_waits_for_longer_than_is_said() -> None:
    site = Site(hold_s=30)
    site.hears()
    assert not site.passes(29)
    assert site.passes(1.1)
    site.hears()
    assert not site.new.waiting, "the same boot is waited for once"


def test_a_pace_that_is_too_slow_to_tell_in_time_is_not_waited_for() -> None:
    site = Site(hold_s=60)
    site.hears()
    assert not site.passes(40)
    site.hears()
    assert 40 * (BUCKET_ARRIVALS_FIRST - 1) > 60
    assert site.passes(1), "two readings show when the fourth may come"


def test_with_no_time_to_wait_nothing_does() -> None:
    site = Site(hold_s=0)
    site.hears()
    assert not site.new.waiting


def test_a_sensor_that_is_off_between_its_readings_is_not_waited_for_again_and_again(site: Site) -> None:
    waited = []
    for boot in range(IN_VAIN_MAX + 3):
        site.hears(str(boot))
        waited.append(bool(site.new.waiting))
        site.passes(600)
    assert waited == [True] * IN_VAIN_MAX + [False] * 3
    # One boot that lasts, and it is waited for again.
    for _ in range(15):
        site.hears("lasting")
        site.passes(1)
    assert site.hears("lasting") is not None
    site.hears("next")
    assert site.new.waiting


def test_a_boot_that_follows_is_waited_for_as_long_as_the_first_one_may_wait(site: Site) -> None:
    site.hears("1")
    site.passes(30)
    site.hears("2")
    assert not site.passes(29)
    assert site.passes(1.1), "what the first boot sent stands before what the second one did"


def test_a_sensor_that_restarts_again_and_again_is_not_waited_for_anew_each_time(site: Site) -> None:
    site.hears("1")
    begun_us = site.now_us
    for boot in range(2, 10):
        if site.passes(20):
            break
        site.hears(str(boot))
    assert site.now_us - begun_us <= 80 * SECOND_US
    assert not site.new.waiting


def test_sensors_wait_each_by_itself(site: Site) -> None:
    site.hears(device="42")
    site.passes(30)
    site.hears(device="43")
    site.hears(device="43", stream="device/43/hygro")
    site.new.met(series("43", "device/43/baro", "device-baro"), "1", site.now_us)
    assert site.passes(31)
    assert len(site.new.waiting) == 3
    assert site.new.waiting_devices == {("device-thermo", "43"), ("device-baro", "43")}


def test_two_streams_of_a_device_that_keep_their_order_wait_for_one_another(site: Site) -> None:
    site.hears()
    site.passes(30)
    site.hears(stream="device/42/hygro")
    assert not site.passes(31)
    assert site.new.waiting_devices == {("device-thermo", "42")}
    assert site.passes(30)
    assert not site.new.waiting_devices


def test_beyond_the_bound_no_reading_waits(site: Site) -> None:
    site.hears()
    for _ in range(READINGS_MAX):
        site.new.met(series("43"), "1", site.now_us)
    assert site.passes(LOOK_US / SECOND_US)
    assert not site.new.waiting
    site.new.met(series("44"), "1", site.now_us)
    assert site.new.waiting, "those who come later wait again"
