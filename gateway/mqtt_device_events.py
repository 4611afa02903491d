"""What is said of MQTT devices on `gateway-events`: that they appeared, that they died, and their last wills."""

import base64
from collections import Counter
from typing import Final

from msgspec import Struct

from gateway.mqtt_protocol import Will
from gateway.reading import Intake

REPORT_INTERVAL_S: Final = 60.0
"""A device whose connection flaps is reported no oftener; its ends in between are counted in the next report."""
WILL_BYTES_MAX: Final = 4_096
"""Bytes of a will that a report repeats."""


class _End(Struct):
    """An end without DISCONNECT that is still to be reported."""

    died: bool
    cause: str
    will: Will | None
    ends: int = 1


class DeviceEvents:
    """Tells of devices, each at most once in REPORT_INTERVAL_S. Times are seconds of any steady clock."""

    def __init__(self, intake: Intake, devices_max: int, counts: Counter[str]) -> None:
        self._intake = intake
        self._devices_max = devices_max
        self._counts = counts
        self._reported: dict[str, float] = {}
        """Devices that were reported as appeared, and when their last end was."""
        self._put_off: dict[str, _End] = {}

    def appeared(self, device: str, peer: str) -> None:
        """Report a device's first connection since the start; a reconnect storm says nothing new."""
        if device in self._reported:
            return
        if len(self._reported) >= self._devices_max:
            self._counts["device-not-reported"] += 1
            return
        self._reported[device] = float("-inf")
        self._intake.event("device-appeared", device, source="mqtt", peer=peer)

    def ended(self, device: str, cause: str, will: Will | None, now_s: float, *, died: bool) -> None:
        """Report an end without DISCONNECT: `device-died`, or `device-will` where the end says nothing of the device.

        A will is published on every such end [MQTT-3.1.2-8].
        """
        if not died and will is None:
            return
        last = self._reported.get(device)
        if last is None:
            # Never reported as appeared: there were too many.
            self._counts["death-not-reported"] += 1
            if will is not None:
                self._intake.lost(device, "will-not-reported")
            return
        end = _End(died, cause, will)
        earlier = self._put_off.get(device)
        if earlier is not None:
            end.ends += earlier.ends
            end.died |= earlier.died
            end.will = will or earlier.will
        if now_s - last < REPORT_INTERVAL_S:
            self._put_off[device] = end
        else:
            self._report(device, end, now_s)

    def flush(self, now_s: float) -> None:
        """Report what was put off and is due; with infinity, all of it."""
        for device, end in tuple(self._put_off.items()):
            if now_s - self._reported[device] >= REPORT_INTERVAL_S:
                self._report(device, end, now_s)

    def _report(self, device: str, end: _End, now_s: float) -> None:
        self._put_off.pop(device, None)
        self._reported[device] = now_s
        details: dict[str, object] = {"source": "mqtt", "cause": end.cause}
        if end.ends > 1:
            details["ends"] = end.ends
        if end.will is not None:
            details |= _will(end.will)
        self._intake.event("device-died" if end.died else "device-will", device, **details)


def _will(will: Will) -> dict[str, object]:
    """A will as an event tells it: as text where it is text, its whole length where it had to be cut."""
    payload = will.payload[:WILL_BYTES_MAX]
    details: dict[str, object] = {"will_topic": will.topic}
    try:
        details["will_payload"] = payload.decode()
    except UnicodeDecodeError:
        details["will_payload_base64"] = base64.b64encode(payload).decode()
    if len(payload) < len(will.payload):
        details["will_bytes"] = len(will.payload)
    return details
