"""Makes the gateway's heartbeat on `gateway-events`: how far it has come, and what is still to come from it.

From heartbeats, readers of the streams learn which event times are complete (docs/kafka-records.md).
"""

import secrets
from collections import defaultdict
from collections.abc import Callable

import msgspec

from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import Lane, Row, Series
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.clock.rfc3339 import rfc3339
from gateway.intake.front_door import FrontDoor
from gateway.intake.routes import kafka_key
from gateway.kafka.record import RecordEncoder
from gateway.reading import Datum
from gateway.record_contract import HEARTBEAT_TYPE
from gateway.settings import GatewaySettings, KafkaSettings


class Heartbeat:
    """Makes heartbeats. They are records of their own lane, as a missed heartbeat is never made up for."""

    def __init__(
        self,
        buffer: Buffer,
        front_door: FrontDoor,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        clock: Callable[[], BootClock],
    ) -> None:
        self._buffer = buffer
        self._front_door = front_door
        self._gateway = gateway
        self._clock = clock
        self._lane = secrets.token_hex(6)
        self._sequence = 0
        self.topic = kafka.events_topic
        self._quarantine_topic = kafka.quarantine_topic
        self.key = kafka_key(gateway, gateway.id)

    async def record(self, now_us: int, offsets: dict[tuple[str, int], int], *, is_behind: bool = False) -> bytes:
        """The next heartbeat, encoded as the first record of a batch. Raises BufferFileError.

        `offsets` has, by topic and partition, the offset after the last acknowledged record. It may change until it is
        read. If it `is_behind`, Kafka may have acknowledged more, and no time is called complete.
        """
        clock = self._clock()
        if not clock.known:
            await self._buffer.owe_correction(self._buffer.boot_id)
        body = msgspec.json.encode(await self._body(now_us, clock, offsets, is_behind=is_behind))
        series = Series(self.topic, self.key, "", "heartbeat", HEARTBEAT_TYPE, "application/json")
        lane = Lane(0, self._lane, self._buffer.boot_id, self._buffer.id)
        row = Row(0, self._sequence, 0, Datum(received_us=now_us, payload=body))
        self._sequence += 1
        return RecordEncoder(self._gateway, lane, series).encode(row, BootTimes(clock), 0)

    async def _body(
        self, now_us: int, clock: BootClock, offsets: dict[tuple[str, int], int], *, is_behind: bool = False
    ) -> dict[str, object]:
        outstanding = await self._buffer.outstanding()
        # Offsets are read after the rows that wait, so a row acknowledged in between is in both, and not in neither.
        by_topic: dict[str, dict[str, int]] = defaultdict(dict)
        for (topic, partition), offset in offsets.items():
            by_topic[topic][str(partition)] = offset
        # Rows of a damaged file may have any event time.
        is_told = clock.synced and not outstanding.is_salvaging and not is_behind
        low_us = _earliest_us(clock, now_us) if is_told else None
        oldest_s: float | None = 0.0
        pending = []
        for lane in outstanding.lanes:
            then = await self._buffer.boot_clock(lane.boot_id)
            pending.append({"lane": lane.lane, "rows": lane.rows, **_span(then, lane.event_from_us, lane.event_to_us)})
            if not then.known:
                # A lane without a time may reach back any distance, so there is no watermark.
                low_us = None
            elif low_us is not None:
                low_us = min(low_us, _earliest_us(then, lane.event_from_us))
            age_s = _age_s(lane.received_us, lane.boot_id == self._buffer.boot_id, then, clock, now_us)
            oldest_s = None if oldest_s is None or age_s is None else max(oldest_s, age_s)
        aside = []
        for span in outstanding.quarantined:
            then = await self._buffer.boot_clock(span.boot_id)
            aside.append({"count": span.count, **_span(then, span.event_from_us, span.event_to_us)})
        return {
            "offsets": by_topic,
            "quarantine_topic": self._quarantine_topic,
            "pending": pending,
            "quarantined": aside,
            "low_watermark": None if low_us is None else rfc3339(low_us).decode(),
            "depth_rows": self._buffer.state.rows,
            "oldest_age_s": None if oldest_s is None else round(oldest_s, 3),
            "buffer_bytes": self._buffer.state.bytes_used,
            "counts": {**self._front_door.counts, **self._buffer.counts},
        }


def _span(clock: BootClock, from_us: int, to_us: int) -> dict[str, str | None]:
    """The earliest and the latest event time; both None if the clock is not known."""
    if not clock.known:
        return {"from": None, "to": None}
    latest_us = clock.at(to_us) + (clock.error_us(to_us) or 0)
    return {"from": rfc3339(_earliest_us(clock, from_us)).decode(), "to": rfc3339(latest_us).decode()}


def _earliest_us(clock: BootClock, at_us: int) -> int:
    """The earliest wall time that a moment may have. When its row is sent, its clock may be known better."""
    return clock.at(at_us) - (clock.error_us(at_us) or 0)


def _age_s(received_us: int, is_of_this_boot: bool, then: BootClock, now: BootClock, now_us: int) -> float | None:  # noqa: FBT001
    """Seconds since a row was received; None if no clock tells."""
    if is_of_this_boot:
        return (now_us - received_us) / 1e6
    if not (then.known and now.synced):
        return None
    return max(0.0, (now.at(now_us) - then.at(received_us)) / 1e6)
