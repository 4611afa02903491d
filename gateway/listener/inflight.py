"""Counts what waits for a durable copy, of one MQTT connection and of all. Decides when reading must pause."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from gateway.listener.session import ClientBatch
from gateway.reading import READING_BYTES, Intake
from gateway.settings import ListenerSettings

MARK_BYTES: Final = 100
"""Bytes that a mark takes in memory beside its value."""
BESIDE_OTHERS: Final = 8
"""Divisor of one connection's bounds while others send too, as their readings wait for the same copies."""
OTHERS_S: Final = 10.0
"""Seconds for which others count as sending, after one of them sent."""


class InflightTotal:
    """Bytes of all connections that wait for a commit."""

    __slots__ = ("_emptied", "_newest", "_several_until_s", "_turned", "beyond", "bytes", "bytes_max")

    def __init__(self, bytes_max: int, turned: Callable[[], None]) -> None:
        """`turned` is called when `beyond` has changed."""
        self.bytes_max = bytes_max
        self.bytes = 0
        self.beyond = False
        """Whether `bytes` has risen above `bytes_max`, and has not fallen to half of it since."""
        self._turned = turned
        self._newest: Inflight | None = None
        """The connection that added the last batch."""
        self._several_until_s = 0.0
        self._emptied: asyncio.Event | None = None

    def judge(self) -> None:
        """Update `beyond`. Call this when `bytes` rose above `bytes_max`, fell to 0, or fell while `beyond`."""
        beyond = self.bytes > (self.bytes_max // 2 if self.beyond else self.bytes_max)
        if beyond != self.beyond:
            self.beyond = beyond
            self._turned()
        if self._emptied is not None and not self.bytes:
            self._emptied.set()

    def came_from(self, inflight: "Inflight", now_s: float) -> None:
        """Record which connection adds a batch."""
        if self._newest is not inflight:
            if self._newest is not None:
                self._several_until_s = now_s + OTHERS_S
            self._newest = inflight

    def is_of_several(self, now_s: float) -> bool:
        """Whether several connections sent lately."""
        return now_s < self._several_until_s

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Wait until all batches are decided, for at most `timeout_s`."""
        if self.bytes:
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), timeout_s)


class Inflight:
    """Messages and bytes of one connection that wait for a commit."""

    __slots__ = ("_settings", "_total", "bytes", "messages")

    def __init__(self, settings: ListenerSettings, total: InflightTotal) -> None:
        self._settings = settings
        self._total = total
        self.messages = 0
        self.bytes = 0

    def add(self, batch: ClientBatch, wire_bytes: int, now_s: float) -> None:
        """Record a batch given to the intake.

        It weighs the bytes received (`wire_bytes`), the readings made of them, and the marks.
        """
        messages = len(batch.readings)
        weight_bytes = wire_bytes + READING_BYTES * messages
        if batch.marks:
            weight_bytes += sum(MARK_BYTES + len(value or b"") for value in batch.marks.values())
        batch.weight_bytes = weight_bytes
        self.messages += messages
        self.bytes += weight_bytes
        total = self._total
        total.came_from(self, now_s)
        total.bytes += weight_bytes
        if total.bytes > total.bytes_max and not total.beyond:
            total.judge()

    def remove(self, batch: ClientBatch) -> None:
        """Record that a batch is decided."""
        self.messages -= len(batch.readings)
        self.bytes -= batch.weight_bytes
        total = self._total
        total.bytes -= batch.weight_bytes
        if total.beyond or not total.bytes:
            total.judge()

    def too_much(self, intake: Intake, now_s: float) -> bool:
        """Whether so much waits that the peer must not be read from."""
        # While the buffer can store nothing, there are no commits that others wait for.
        part = BESIDE_OTHERS if self._total.is_of_several(now_s) and not intake.cannot_store else 1
        # Beyond the total nobody is read from, as each read may bring much. While the buffer can store nothing, this
        # would last. So a connection with nothing waiting is still read from, and refused when it sends a reading.
        return (
            self.bytes * part > self._settings.inflight_bytes_max
            or self.messages * part > self._settings.inflight_messages_max
            or (self._total.beyond and (self.bytes > 0 or not intake.cannot_store))
        )
