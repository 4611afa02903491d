"""Whose readings wait for their sensor's clock, and until when."""

from gateway.clock_device import BUCKET_ARRIVALS_FIRST, BUCKET_US
from gateway.device_clocks import DeviceClocks
from gateway.new_clocks import IN_VAIN_MAX, LOOK_US, READINGS_MAX, NewClocks

SECOND_US = 1_000_000
STREAM = "device/42/thermo"


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
            self.new.met(device, stream, boot, self.now_us)
        return found

    def passes(self, seconds: float) -> bool:
        """Whether anybody's readings may go after that."""
        self.now_us += round(seconds * SECOND_US)
        return self.new.look()


def test_the_first_readings_of_a_boot_wait_until_its_clock_is_known_and_no_longer() -> None:
    site = Site()
    assert site.hears() is None
    begun_us = site.now_us
    while not site.passes(1):
        assert list(site.new.waiting) == [("42", STREAM)]
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


def test_a_sensor_that_is_off_between_its_readings_is_not_waited_for_again_and_again() -> None:
    site = Site()
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


def test_a_boot_that_follows_takes_the_place_of_the_one_that_was_waited_for() -> None:
    site = Site()
    site.hears("1")
    site.passes(5)
    site.hears("2")
    assert not site.passes(56), "of the first boot the time is over, and of the second one it is not"
    assert site.passes(5)


def test_sensors_wait_each_by_itself() -> None:
    site = Site()
    site.hears(device="42")
    site.passes(30)
    site.hears(device="43")
    site.hears(device="43", stream="device/43/hygro")
    assert site.passes(31)
    assert set(site.new.waiting) == {("43", STREAM), ("43", "device/43/hygro")}


def test_of_very_many_readings_none_waits() -> None:
    site = Site()
    site.hears()
    for _ in range(READINGS_MAX):
        site.new.met("43", STREAM, "1", site.now_us)
    assert site.passes(LOOK_US / SECOND_US)
    assert not site.new.waiting
    site.new.met("44", STREAM, "1", site.now_us)
    assert site.new.waiting, "those who come later wait again"
