"""Reports on `gateway-events` which MQTT devices appeared and which died, with their wills."""

import base64
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

import msgspec
from msgspec import Struct

from gateway.mqtt.protocol import Will
from gateway.reading import Intake

REPORT_INTERVAL_S: Final = 60.0
"""Seconds between two reports of one device's end. Ends in between are counted in the next report."""
WILL_BYTES_MAX: Final = 4_096
"""Bytes of a will's payload that a report repeats."""
WILL_TOPIC_MAX: Final = 256
"""Characters of a will's topic that a report repeats."""
TURN_BYTES_MAX: Final = 100_000
"""Bytes of reports between two `flush`es. The buffer has little room for the gateway's own events. When that room is
full, further events are lost."""
PUT_OFF_BYTES_MAX: Final = 4_000_000
"""Bytes of reports that may wait for later `flush`es; wills beyond it are counted as lost."""
END_BYTES_MAX: Final = 700_000
"""Bytes of reports when the listener ends, as there is no later `flush`."""
END_EVENT_BYTES_MAX: Final = 50_000
"""Bytes of one report that names many devices, when the listener ends."""
EVENT_BYTES: Final = 400
"""Bytes that an event is assumed to have beside its details."""


class ReportedWill(Struct, frozen=True, gc=False):
    """The part of a will that a report repeats, and the length of its payload."""

    topic: str
    payload: bytes
    payload_bytes: int


class _Device(Struct):
    connections: int = 0
    reported_s: float = float("-inf")
    """When an end of the device was last reported."""


class _End(Struct):
    """A device's ends without DISCONNECT that are not reported yet: the last one, and counts of the others."""

    died: bool
    cause: str
    peer: str
    will: ReportedWill | None
    due_s: float
    ends: int = 1
    wills_dropped: int = 0
    """Number of wills that a later will replaced in the report."""

    @property
    def bytes(self) -> int:
        """Bytes that it takes in memory."""
        return EVENT_BYTES + (0 if self.will is None else len(self.will.topic) + len(self.will.payload))


def reported(will: Will) -> ReportedWill:
    """Cut a will down to the part that a report repeats, so that no more is kept."""
    return ReportedWill(will.topic[:WILL_TOPIC_MAX], will.payload[:WILL_BYTES_MAX], len(will.payload))


class DeviceEvents:
    """Reports that devices appear and end, each device's ends at most once in REPORT_INTERVAL_S.

    Times are seconds of any steady clock. Clients that name no device have the device None, and count as one device.
    Reports that are too many at once are put off to the next `flush`es.
    """

    def __init__(
        self, intake: Intake, devices_max: int, counts: Counter[str], alive_causes: Collection[str] = ()
    ) -> None:
        """`alive_causes` are causes that say nothing about the device, such as the end of this gateway."""
        self._intake = intake
        self._alive_causes = alive_causes
        self._devices_max = devices_max
        self._counts = counts
        self._present: dict[str, _Device] = {}
        """Devices that are connected."""
        self._away: OrderedDict[str, _Device] = OrderedDict()
        """Devices that were connected. The first that left is forgotten first, and then appears anew."""
        self._nameless = _Device()
        self._unsaid: dict[str, str] = {}
        """Devices whose appearance is put off, and their peers."""
        self._put_off: dict[str | None, _End] = {}
        self._put_off_bytes = 0
        self._turn_bytes = 0

    def appeared(self, device: str, peer: str) -> None:
        """Record a connection; report the device if it is not known. So a reconnect storm reports nothing."""
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
        """Record the end of a connection that `appeared` recorded. If the end must be reported, call `ended` first."""
        known = self._present[device]
        known.connections -= 1
        if not known.connections:
            self._away[device] = self._present.pop(device)

    def ended(self, device: str | None, cause: str, peer: str, will: ReportedWill | None, now_s: float) -> None:
        """Report an end without DISCONNECT: `device-died`, or `device-will` if the cause is in `alive_causes`.

        A will is published on every such end [MQTT-3.1.2-8].
        """
        died = cause not in self._alive_causes
        if will is None and (device is None or not died):
            return
        known = self._nameless if device is None else self._known(device)
        end = _End(died, cause, peer, will, known.reported_s + REPORT_INTERVAL_S)
        self._merge(end, self._take_back(device))
        if end.due_s <= now_s and self._turn_bytes < TURN_BYTES_MAX:
            self._report(device, end, now_s)
        elif self._put_off_bytes + end.bytes <= PUT_OFF_BYTES_MAX:
            self._put_off[device] = end
            self._put_off_bytes += end.bytes
        else:
            self._lose(device, end)

    def _known(self, device: str) -> _Device:
        """What is known of a device; it may have left before its will was due."""
        return self._present.get(device) or self._away.get(device) or _Device()

    def flush(self, now_s: float) -> None:
        """Report what was put off and is due, as much as TURN_BYTES_MAX allows."""
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
        """Report all ends that were put off. Ends beyond TURN_BYTES_MAX share events, in lists."""
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
        """The devices put off, in lists of one kind and cause. A list ends as it reaches END_EVENT_BYTES_MAX."""
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
        known = self._nameless if device is None else self._known(device)
        known.reported_s = now_s
        details = {"source": "mqtt", "cause": end.cause, **_details(end)}
        if device is None:
            details["peer"] = end.peer
        self._turn_bytes += EVENT_BYTES + len(msgspec.json.encode(details))
        self._intake.event(_kind(died=end.died), device, **details)

    def _lose(self, device: str | None, end: _End) -> None:
        self._counts["death-not-reported"] += 1
        # Only a will is a message of the device. Without one, no message is lost.
        wills = end.wills_dropped + (end.will is not None)
        if wills:
            self._intake.lost(device, "will-not-reported", wills)


def _kind(*, died: bool) -> str:
    return "device-died" if died else "device-will"


def _details(end: _End) -> dict[str, object]:
    """An end's details for an event: the will as text or else in base64, and its whole length if it was cut."""
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
