"""The uplink's state, for those who show it. Importing it loads no Kafka client."""

from dataclasses import dataclass, field
from typing import Final

ONE_REPLICA: Final = "one-replica"
SLOW: Final = "slow"
DISK_FIRST_TOLD_MAX: Final = 20


@dataclass(slots=True)
class UplinkState:
    """The uplink's state, as the forwarder reports it."""

    up: bool = False
    error: str | None = None
    """Why the uplink is down, in words; None before the first attempt and while it is up."""
    barred: bool = False
    """Whether the uplink is down although the network is not to blame: Kafka is reached, and one side refuses the
    other; or a certificate, key or password cannot be used."""
    since: float = 0.0
    """When the uplink came up or went down: seconds since 1970 by this box's clock as it is now, right or wrong."""
    waits_for_clock: bool = False
    """Whether readings are held back because a time for them may still be learnt (`gateway.hold_unsynced_s`)."""
    clock_until_us: int | None = None
    """When they are held back no longer (CLOCK_BOOTTIME); None if they are not held back."""
    was_reached: bool = False
    """Whether Kafka was reached since the start. The wait for the clock counts from then on."""
    new_clocks: int = 0
    """Sensors, or streams of a sensor, whose readings wait for the sensor's clock (`gateway.hold_new_clock_s`)."""
    dates_passed: float | None = None
    """The latest time that is known to have passed, in seconds since 1970. Certificates are judged by it while this
    box's clock cannot do so. None if the clock can, and without TLS."""
    quota_used_up: bool = False
    """Whether nothing is sent because `kafka.bytes_per_day_max` is used up."""
    quota_until: float | None = None
    """When the quota begins anew, in seconds since 1970; None if it is not used up, or if the date is unknown."""
    throttled_s: float = 0.0
    """Seconds for which a broker's quota held this gateway back last; 0 if none did so within THROTTLED_S."""
    direct_topics: int = 0
    """Topics whose readings go to Kafka before the disk (`buffer.disk_after_ms`)."""
    disk_first: dict[str, str] = field(default_factory=dict)
    """By topic whose readings go to the disk first: `ONE_REPLICA` or `SLOW`. `DISK_FIRST_TOLD_MAX` topics at most."""
    spared_today: int | None = None
    """Rows that Kafka had before the disk since 00:00 UTC; None while the date is unknown."""
    spared_about: bool = False
    """Whether `spared_today` may be wrong, as some of it was not on disk at a crash, or as the date has changed."""
    sent: int = 0
    """Readings and events that Kafka has taken since the start."""
    live_oldest_us: int | None = None
    """Receipt (CLOCK_BOOTTIME) of the oldest live reading that is being sent and did not wait for its sensor's clock.
    If all may have waited, the oldest one's receipt plus the longest wait. None if no live reading is being sent."""
    parked: dict[str, str] = field(default_factory=dict)
    """By `topic/partition`, or topic: why it takes nothing at present. Its readings wait while others go on."""
    refused_topics: dict[str, str] = field(default_factory=dict)
    """By topic that is not written to: what is wrong with it. There are `REFUSED_TOLD_MAX` at most."""
    beyond_topics: dict[str, int] = field(default_factory=dict)
    """By device: readings quarantined today because this gateway makes no more topics for them."""
    bytes_per_s: int = 0
    """Rate that the link was seen to carry."""
    wire_bytes: int = 0
    """Bytes that the link has carried since the start, both ways."""
