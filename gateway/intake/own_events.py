"""Makes the gateway's own events for `gateway-events`, and reports losses and corrections by them."""

from collections import Counter
from collections.abc import Callable

import msgspec

from gateway.buffer.boots import Correction, correction_body
from gateway.buffer.buffer import Buffer
from gateway.buffer.losses import OWN_LOSSES, loss_body
from gateway.buffer.rows import Entry, Lane, Loss, Series
from gateway.intake.routes import kafka_key
from gateway.reading import Datum
from gateway.record_contract import GATEWAY_TYPES
from gateway.settings import GatewaySettings, KafkaSettings

LOST_TOLD_MAX = 20_000
"""Devices whose reported losses are added up in memory."""


def own_series(gateway: GatewaySettings, topic: str, kind: str, device: str = "", subject: str | None = None) -> Series:
    """The series of records that speak for this gateway. Their subject is the kind, unless another is given."""
    subject = kind if subject is None else subject
    key = kafka_key(gateway, gateway.id)
    return Series(topic, key, device, subject, f"{GATEWAY_TYPES}{kind}", "application/json")


class OwnEvents:
    """Makes the rows of events, and lets the buffer report what it owes."""

    def __init__(
        self, buffer: Buffer, gateway: GatewaySettings, kafka: KafkaSettings, now_us: Callable[[], int]
    ) -> None:
        self._buffer = buffer
        self._gateway = gateway
        self.topic = kafka.events_topic
        self._now_us = now_us
        self.lost_told: Counter[str] = Counter()
        """Readings that are gone for good, by device, as far as reported since the start."""
        self.lost_told_us = 0
        """Time of the last of these losses (CLOCK_BOOTTIME)."""

    def series(self, kind: str) -> Series:
        """The series of events of this kind."""
        return own_series(self._gateway, self.topic, kind)

    def event_entry(self, kind: str, body: dict[str, object]) -> Entry:
        """An event as a row."""
        return Entry(self.series(kind), Datum(received_us=self._now_us(), payload=msgspec.json.encode(body)))

    def lane_entry(self, kind: str, lane: Lane, rows: int, reason: str) -> Entry:
        """A `buffer.lanes.LaneReport`."""
        body: dict[str, object] = {"lane": lane.name, "buffer": lane.buffer_id, "reason": reason}
        if kind == "lane-closed":
            # Rows are numbered from 0 without holes, so their number shows whether the lane is complete.
            body["rows"] = rows
        return self.event_entry(kind, body)

    async def report_corrections(self) -> list[Correction]:
        """Correct times that were told before they were known; return the corrections. Raises BufferFileError."""
        return await self._buffer.report_corrections(
            lambda correction: self.event_entry("time-correction", correction_body(correction))
        )

    async def report_losses(self) -> int:
        """Report counted losses on `gateway-events`; return the number of records. Raises BufferFileError."""
        told: list[Loss] = []

        def entry(loss: Loss) -> Entry:
            told.append(loss)
            return self.event_entry("loss", loss_body(loss))

        count = await self._buffer.report_losses(entry)
        # The file has forgotten these losses. If that had failed, they would all come again.
        for loss in told:
            if loss.reason in OWN_LOSSES:
                continue
            if loss.device in self.lost_told or len(self.lost_told) < LOST_TOLD_MAX:
                self.lost_told[loss.device] += loss.count
            if loss.boot_id == self._buffer.boot_id:
                self.lost_told_us = max(self.lost_told_us, loss.last_us)
        return count
