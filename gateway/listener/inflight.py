"""What waits for its commit, weighed: of one MQTT connection and of all, and when that is too much to read on."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from gateway.listener.session import Batch
from gateway.reading import READING_BYTES, Intake
from gateway.settings import ListenerSettings

MARK_BYTES: Final = 100
"""What a mark weighs in memory beside its value."""
BESIDE_OTHERS: Final = 8
"""One connection may have so much less waiting where others send too: their readings wait for the same commits."""
OTHERS_S: Final = 10.0
"""So long after one of them sent."""


class InflightTotal:
    """What waits for its commit, of all connections."""

    __slots__ = ("_emptied", "_newest", "_several_until_s", "_turned", "beyond", "bytes", "bytes_max")

    def __init__(self, bytes_max: int, turned: Callable[[], None]) -> None:
        """`turned` is called when `beyond` has changed."""
        self.bytes_max = bytes_max
        self.bytes = 0
        self.beyond = False
        """Whether it has come to more than `bytes_max`, and half of that is still there."""
        self._turned = turned
        self._newest: Inflight | None = None
        """Whose batch was added last."""
        self._several_until_s = 0.0
        self._emptied: asyncio.Event | None = None

    def judge(self) -> None:
        """To be called when `bytes` rose above `bytes_max`, fell to 0, or fell while it is `beyond`."""
        beyond = self.bytes > (self.bytes_max // 2 if self.beyond else self.bytes_max)
        if beyond != self.beyond:
            self.beyond = beyond
            self._turned()
        if self._emptied is not None and not self.bytes:
            self._emptied.set()

    def came_from(self, inflight: "Inflight", now_s: float) -> None:
        """Take note of whose batch is added."""
        if self._newest is not inflight:
            if self._newest is not None:
                self._several_until_s = now_s + OTHERS_S
            self._newest = inflight

    def is_of_several(self, now_s: float) -> bool:
        """Whether more than one connection sends."""
        return now_s < self._several_until_s

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Wait until all is decided, or for `timeout_s`."""
        if self.bytes:
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), timeout_s)


class Inflight:
    """What waits for its commit, of one connection."""

    __slots__ = ("_settings", "_total", "batches", "bytes", "messages")

    def __init__(self, settings: ListenerSettings, total: InflightTotal) -> None:
        self._settings = settings
        self._total = total
        self.batches = 0
        self.messages = 0
        self.bytes = 0

    def add(self, batch: Batch, wire_bytes: int, now_s: float) -> int:
        """Take note of a batch that is handed to the intake; give what it takes in memory until it is decided.

        That is what came (`wire_bytes`), the readings made of it, and its marks.
        """
        messages = len(batch.readings)
        weight_bytes = wire_bytes + READING_BYTES * messages
        if batch.marks:
            weight_bytes += sum(MARK_BYTES + len(value or b"") for value in batch.marks.values())
        self.batches += 1
        self.messages += messages
        self.bytes += weight_bytes
        total = self._total
        total.came_from(self, now_s)
        total.bytes += weight_bytes
        if total.bytes > total.bytes_max and not total.beyond:
            total.judge()
        return weight_bytes

    def remove(self, batch: Batch, weight_bytes: int) -> None:
        """Take note that it is decided. `weight_bytes` is what `add` gave."""
        self.batches -= 1
        self.messages -= len(batch.readings)
        self.bytes -= weight_bytes
        total = self._total
        total.bytes -= weight_bytes
        if total.beyond or not total.bytes:
            total.judge()

    def too_much(self, intake: Intake, now_s: float) -> bool:
        """Whether nothing more is to be read from its peer."""
        # While the buffer holds there are no commits that others wait for.
        part = BESIDE_OTHERS if self._total.is_of_several(now_s) and not intake.cannot_store else 1
        # Beyond the total nobody is read from: each read may bring much. While the buffer holds that would last, so
        # that whoever has nothing waiting is heard, and told when it sends a reading.
        return (
            self.bytes * part > self._settings.inflight_bytes_max
            or self.messages * part > self._settings.inflight_messages_max
            or (self._total.beyond and (self.bytes > 0 or not intake.cannot_store))
        )
