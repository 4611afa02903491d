"""Counts the Kafka topics that this gateway has made, and decides whether it makes another. It does no I/O."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.kafka.topics import BEYOND_ALL, BEYOND_DEVICE
from gateway.reading import Mark

TOPIC_MARKS: Final = "uplink/topic/"
"""Prefix of the key of a mark: a topic that this gateway made. The mark has the day (since 1970) and the device."""


class TopicAllowance:
    """Charges each topic once, before it is made, to the device whose reading is for it.

    A day is UTC's. While the date is unknown, the last known day goes on. So a restart or reboot gives no device a new
    allowance.
    """

    def __init__(self, per_device_day_max: int, created_max: int) -> None:
        self._per_device_day_max = per_device_day_max
        self._created_max = created_max
        self._made: dict[str, tuple[int, str]] = {}
        """By topic: the day and the device."""
        self._day = 0
        self._today: Counter[str] = Counter()
        """By device: the number of topics made for it on this day."""
        self._unsaved: dict[str, Mark] = {}

    def recall(self, marks: Mapping[str, bytes]) -> None:
        """Go on from the marks that were kept."""
        for key, value in marks.items():
            day, _, device = value.decode(errors="replace").partition("/")
            if key.startswith(TOPIC_MARKS) and day.isdecimal():
                self._made[key.removeprefix(TOPIC_MARKS)] = int(day), device
        self._begin(max((day for day, _ in self._made.values()), default=0))

    @property
    def topics(self) -> list[str]:
        """Topics that this gateway made and that still exist, as far as is known."""
        return list(self._made)

    def look_at(self, day: int | None) -> bool:
        """Take note of the day; None if the date is not known. Returns whether it is another day."""
        if day is None or day == self._day:
            return False
        self._begin(day)
        return True

    def charge(self, topic: str, device: str) -> str:
        """Charge a topic to a device. Returns the quarantine's reason if it may not be made, else an empty string."""
        if topic in self._made:
            return ""
        if self._today[device] >= self._per_device_day_max:
            return BEYOND_DEVICE
        if len(self._made) >= self._created_max:
            return BEYOND_ALL
        self._made[topic] = self._day, device
        self._today[device] += 1
        key = TOPIC_MARKS + topic
        self._unsaved[key] = Mark(key, f"{self._day}/{device}".encode())
        return ""

    def forget(self, topics: Iterable[str]) -> None:
        """Forget topics that no longer exist, so that others may be made. Today's count of a device stays."""
        for topic in topics:
            if self._made.pop(topic, None) is not None:
                key = TOPIC_MARKS + topic
                self._unsaved[key] = Mark(key, None)

    def marks(self) -> list[Mark]:
        """Marks that are not on disk yet."""
        return list(self._unsaved.values())

    def kept(self, marks: Iterable[Mark]) -> None:
        """Note that these marks are on disk."""
        for mark in marks:
            if self._unsaved.get(mark.key) == mark:
                del self._unsaved[mark.key]

    def keep_anew(self) -> None:
        """Have all marks kept again, as another file has taken the place of the one that had them."""
        for topic, (day, device) in self._made.items():
            key = TOPIC_MARKS + topic
            self._unsaved[key] = Mark(key, f"{day}/{device}".encode())

    def _begin(self, day: int) -> None:
        self._day = day
        self._today = Counter(device for made_on, device in self._made.values() if made_on == day)
