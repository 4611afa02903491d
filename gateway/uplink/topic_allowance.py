"""How many Kafka topics this gateway has made, for whom and when; whether it makes another. Without I/O."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.kafka.topics import BEYOND_ALL, BEYOND_DEVICE
from gateway.reading import Mark

TOPIC_MARKS: Final = "uplink/topic/"
"""Before a topic that this gateway had made; the mark says on which day (since 1970), and for which device."""


class TopicAllowance:
    """Topics are charged before they are made, each once, to the device whose reading is for it.

    A day is UTC's. While the date is unknown, the last day that was known goes on: a restart, or a reboot, gives no
    device a new allowance.
    """

    def __init__(self, per_device_day_max: int, created_max: int) -> None:
        self._per_device_day_max = per_device_day_max
        self._created_max = created_max
        self._made: dict[str, tuple[int, str]] = {}
        """By topic: the day, and the device."""
        self._day = 0
        self._today: Counter[str] = Counter()
        """Topics that were made for each device on this day."""
        self._unsaved: dict[str, Mark] = {}

    def recall(self, marks: Mapping[str, bytes]) -> None:
        """Go on from what was kept."""
        for key, value in marks.items():
            day, _, device = value.decode(errors="replace").partition("/")
            if key.startswith(TOPIC_MARKS) and day.isdecimal():
                self._made[key.removeprefix(TOPIC_MARKS)] = int(day), device
        self._begin(max((day for day, _ in self._made.values()), default=0))

    @property
    def topics(self) -> list[str]:
        """Those that were made, as far as is known."""
        return list(self._made)

    def look_at(self, day: int | None) -> bool:
        """Take note of the day; whether it is another one. None where the date is not known."""
        if day is None or day == self._day:
            return False
        self._begin(day)
        return True

    def charge(self, topic: str, device: str) -> str:
        """Charge a topic to a device; why it may not be made (a reason of the quarantine), empty where it may."""
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
        """These are there no longer: others may be made in their place. Today's count of a device stays."""
        for topic in topics:
            if self._made.pop(topic, None) is not None:
                key = TOPIC_MARKS + topic
                self._unsaved[key] = Mark(key, None)

    def marks(self) -> list[Mark]:
        """What is not kept on disk yet."""
        return list(self._unsaved.values())

    def kept(self, marks: Iterable[Mark]) -> None:
        """These are on disk."""
        for mark in marks:
            if self._unsaved.get(mark.key) == mark:
                del self._unsaved[mark.key]

    def keep_anew(self) -> None:
        """Another file has taken the place of the one that had the marks."""
        for topic, (day, device) in self._made.items():
            key = TOPIC_MARKS + topic
            self._unsaved[key] = Mark(key, f"{day}/{device}".encode())

    def _begin(self, day: int) -> None:
        self._day = day
        self._today = Counter(device for made_on, device in self._made.values() if made_on == day)
