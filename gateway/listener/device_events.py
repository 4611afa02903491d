"""What is said of MQTT devices on `gateway-events`: that they appeared, that they died, and their last wills."""

import base64
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

import msgspec
from msgspec import Struct

from gateway.mqtt.protocol import Will
from gateway.reading import Intake

REPORT_INTERVAL_S: Final = 60.0
"""A device whose connection flaps is reported no oftener; its ends in between are counted in the next report."""
WILL_BYTES_MAX: Final = 4_096
"""Bytes of a will that a report repeats."""
WILL_TOPIC_MAX: Final = 256
"""Characters of its topic."""
TURN_BYTES_MAX: Final = 100_000
"""What reports may weigh between two `flush`es: the buffer has little room for the gateway's own events, and what
comes when that is full is lost."""
PUT_OFF_BYTES_MAX: Final = 4_000_000
"""What may wait for later `flush`es; the wills beyond it are counted as lost."""
END_BYTES_MAX: Final = 700_000
"""What the reports at the end of the listener may weigh, which has no later `flush`."""
END_EVENT_BYTES_MAX: Final = 50_000
"""What one of these weighs; it names many devices."""
EVENT_BYTES: Final = 400
"""What an event weighs beside its details."""


class ReportedWill(Struct, frozen=True, gc=False):
    """As much of a will as a report repeats, and how long it was."""

    topic: str
    payload: bytes
    payload_bytes: int


class _Device(Struct):
    connections: int = 0
    reported_s: float = float("-inf")
    """When its last end was reported."""


class _End(Struct):
    """Ends without DISCONNECT that are still to be reported: the last, and what there is to say of those before."""

    died: bool
    cause: str
    peer: str
    will: ReportedWill | None
    due_s: float
    ends: int = 1
    wills_dropped: int = 0
    """Wills that a later one has replaced in the report."""

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return EVENT_BYTES + (0 if self.will is None else len(self.will.topic) + len(self.will.payload))


def reported(will: Will) -> ReportedWill:
    """Cut a will down to what a report repeats, so that no more of it is kept."""
    return ReportedWill(will.topic[:WILL_TOPIC_MAX], will.payload[:WILL_BYTES_MAX], len(will.payload))


class DeviceEvents:
    """Tells of devices, each at most once in REPORT_INTERVAL_S. Times are seconds of any steady clock.

    A device is None where its client did not say which one it is: all of these count as one. What is too much at once
    is put off to the next `flush`es.
    """

    def __init__(
        self, intake: Intake, devices_max: int, counts: Counter[str], alive_causes: Collection[str] = ()
    ) -> None:
        """`alive_causes` are those that say nothing of the device, such as the end of this gateway."""
        self._intake = intake
        self._alive_causes = alive_causes
        self._devices_max = devices_max
        self._counts = counts
        self._present: dict[str, _Device] = {}
        """Devices that are connected."""
        self._away: OrderedDict[str, _Device] = OrderedDict()
        """Those that were; whoever went first is forgotten first, and appears anew."""
        self._nameless = _Device()
        self._unsaid: dict[str, str] = {}
        """Devices whose appearance is put off, and their peers."""
        self._put_off: dict[str | None, _End] = {}
        self._put_off_bytes = 0
        self._turn_bytes = 0

    def appeared(self, device: str, peer: str) -> None:
        """Take note of a connection; report a device's first one. A reconnect storm says nothing new."""
        known = self._present.get(device) or self._away.pop(device, None)
        if known is None:
            if self._away and len(self._present) + len(self._away) >= self._devices_max:
                self._away.popitem(last=False)
            known = _Device()
            if self._turn_bytes < TURN_BYTES_MAX:
                self._say_appeared(device, peer)
            elif len(self._unsaid) < self._devices_max:
                self._unsaid[device] = peer
            else:
                self._counts["device-not-reported"] += 1
        known.connections += 1
        self._present[device] = known

    def left(self, device: str) -> None:
        """Take note of the end of a connection that `appeared` told of, after `ended` where that is to be told."""
        known = self._present[device]
        known.connections -= 1
        if not known.connections:
            self._away[device] = self._present.pop(device)

    def ended(self, device: str | None, cause: str, peer: str, will: ReportedWill | None, now_s: float) -> None:
        """Report an end without DISCONNECT: `device-died`, or `device-will` where the end says nothing of the device.

        A will is published on every such end [MQTT-3.1.2-8].
        """
        died = cause not in self._alive_causes
        if will is None and (device is None or not died):
            return
        known = self._nameless if device is None else self._present[device]
        end = _End(died, cause, peer, will, known.reported_s + REPORT_INTERVAL_S)
        self._merge(end, self._take_back(device))
        if end.due_s <= now_s and self._turn_bytes < TURN_BYTES_MAX:
            self._report(device, end, now_s)
        elif self._put_off_bytes + end.bytes <= PUT_OFF_BYTES_MAX:
            self._put_off[device] = end
            self._put_off_bytes += end.bytes
        else:
            self._lose(device, end)

    def flush(self, now_s: float) -> None:
        """Report what was put off and is due, as much as goes at once."""
        self._turn_bytes = 0
        for name, peer in tuple(self._unsaid.items()):
            if self._turn_bytes >= TURN_BYTES_MAX:
                return
            del self._unsaid[name]
            self._say_appeared(name, peer)
        for device, end in tuple(self._put_off.items()):
            if self._turn_bytes >= TURN_BYTES_MAX:
                return
            if end.due_s <= now_s:
                self._take_back(device)
                self._report(device, end, now_s)

    def finish(self, now_s: float) -> None:
        """Report all that was put off: the listener ends. What is too much for events of their own goes into lists."""
        self._counts["device-not-reported"] += len(self._unsaid)
        self._unsaid.clear()
        for end in self._put_off.values():
            end.due_s = now_s
        self.flush(now_s)
        said = 0
        for (died, cause), devices in self._lists():
            if said >= END_BYTES_MAX:
                for device in devices:
                    self._lose(device, self._put_off[device])
                continue
            ends = [{"device": device, **_details(self._put_off[device])} for device in devices]
            said += sum(len(msgspec.json.encode(end)) for end in ends)
            self._intake.event(_kind(died=died), None, source="mqtt", cause=cause, devices=ends)
        self._put_off.clear()
        self._put_off_bytes = 0

    def _lists(self) -> Iterator[tuple[tuple[bool, str], list[str | None]]]:
        """The devices that are put off, in lists of one kind and cause and of at most END_EVENT_BYTES_MAX."""
        lists: dict[tuple[bool, str], list[str | None]] = {}
        sizes: Counter[tuple[bool, str]] = Counter()
        for device, end in self._put_off.items():
            kind = (end.died, end.cause)
            lists.setdefault(kind, []).append(device)
            sizes[kind] += len(msgspec.json.encode(_details(end))) + len(device or "")
            if sizes[kind] >= END_EVENT_BYTES_MAX:
                yield kind, lists.pop(kind)
                del sizes[kind]
        yield from lists.items()

    def _merge(self, end: _End, earlier: _End | None) -> None:
        if earlier is None:
            return
        end.ends += earlier.ends
        end.died |= earlier.died
        end.wills_dropped = earlier.wills_dropped + (earlier.will is not None and end.will is not None)
        end.will = end.will or earlier.will

    def _take_back(self, device: str | None) -> _End | None:
        end = self._put_off.pop(device, None)
        if end is not None:
            self._put_off_bytes -= end.bytes
        return end

    def _say_appeared(self, device: str, peer: str) -> None:
        self._turn_bytes += EVENT_BYTES
        self._intake.event("device-appeared", device, source="mqtt", peer=peer)

    def _report(self, device: str | None, end: _End, now_s: float) -> None:
        known = self._nameless if device is None else self._present.get(device) or self._away.get(device)
        if known is not None:
            known.reported_s = now_s
        details = {"source": "mqtt", "cause": end.cause, **_details(end)}
        if device is None:
            details["peer"] = end.peer
        self._turn_bytes += EVENT_BYTES + len(msgspec.json.encode(details))
        self._intake.event(_kind(died=end.died), device, **details)

    def _lose(self, device: str | None, end: _End) -> None:
        self._counts["death-not-reported"] += 1
        # Without a will nothing is lost that somebody had said.
        wills = end.wills_dropped + (end.will is not None)
        if wills:
            self._intake.lost(device, "will-not-reported", wills)


def _kind(*, died: bool) -> str:
    return "device-died" if died else "device-will"


def _details(end: _End) -> dict[str, object]:
    """An end as an event tells it; a will as text where it is text, its whole length where it had to be cut."""
    details: dict[str, object] = {}
    if end.ends > 1:
        details["ends"] = end.ends
    if end.wills_dropped:
        details["wills_dropped"] = end.wills_dropped
    will = end.will
    if will is None:
        return details
    details["will_topic"] = will.topic
    try:
        details["will_payload"] = will.payload.decode()
    except UnicodeDecodeError:
        details["will_payload_base64"] = base64.b64encode(will.payload).decode()
    if len(will.payload) < will.payload_bytes:
        details["will_bytes"] = will.payload_bytes
    return details
