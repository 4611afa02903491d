"""The front door: routes a reading, takes the sensor's identity from it, and hands it to the buffer."""

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.buffer import Buffer
from gateway.buffer_rows import Entry, Quarantined, Series
from gateway.reading import Reading
from gateway.routes import Destination, Refusal, RouteTable
from gateway.settings import GatewaySettings, KafkaSettings

TOPICS_CACHED_MAX = 20_000
"""Resolved topics that are remembered; a sender of ever new ones makes the cache begin again."""
TOPIC_CACHED_CHARACTERS_MAX = 256
"""Longer topics are resolved each time: a hostile one may have 65,535 characters."""
LOSSES_MAX = 10_000
"""(device, reason) pairs counted apart between two flushes; beyond it they are counted without the device."""
REPORT_BYTES_MAX = 65_536
"""Raw bytes that go to Kafka with a quarantine report; the whole input stays on this box."""
REPORT_SUBJECT_MAX = 256
"""Characters of the topic that a report repeats: a hostile one may have 65,535."""
REPORT_REST_BYTES = 3_000
"""What a report needs beside the raw bytes, headers included."""
READING_TYPE = "sluice.reading"


class _Identity(msgspec.Struct):
    """Members of a JSON payload that tell who took the reading (routes with `identity = "json"`)."""

    boot: str | int
    seq: int


@dataclass(slots=True)
class _Loss:
    count: int
    first_us: int
    last_us: int


class FrontDoor:
    """`Intake` as the pipeline wires it: everything that any ingress takes in passes here."""

    def __init__(
        self,
        buffer: Buffer,
        routes: RouteTable,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        now_us: Callable[[], int],
    ) -> None:
        self._buffer = buffer
        self._routes = routes
        self._gateway = gateway
        self._kafka = kafka
        self._now_us = now_us
        self._resolved: dict[tuple[str, str, str | None], tuple[Destination, Series] | Refusal] = {}
        self._identity = msgspec.json.Decoder(_Identity)
        self._losses: dict[tuple[str | None, str], _Loss] = {}
        # Base64 takes four bytes for three.
        self._report_bytes = min(REPORT_BYTES_MAX, (kafka.record_bytes_max - REPORT_REST_BYTES) * 3 // 4)
        self.counts: Counter[str] = Counter()
        """`readings`, `identity-missing`, and quarantine reasons, since the start."""
        self.quarantined: Counter[str] = Counter()
        """Readings that no route could take, by reason, since the start."""

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None]) -> None:
        """See `Intake.take`."""
        self._buffer.append([self._entry(reading) for reading in readings], done)

    def lost(self, device: str | None, reason: str, count: int = 1) -> None:
        """See `Intake.lost`."""
        if len(self._losses) >= LOSSES_MAX and (device, reason) not in self._losses:
            device = None
        now_us = self._now_us()
        loss = self._losses.setdefault((device, reason), _Loss(0, now_us, now_us))
        loss.count += count
        loss.last_us = now_us

    def event(self, kind: str, device: str | None, **details: object) -> None:
        """See `Intake.event`."""
        event = self.event_entry(kind, {"device": device, **details})
        self._buffer.append(
            [event], lambda stored: None if stored else self.lost(device, "event-refused"), reserve=True
        )

    def flush_losses(self) -> None:
        """Append what was counted as lost since the last flush, as loss records."""
        losses, self._losses = self._losses, {}
        entries = [
            self.event_entry(
                "loss",
                {
                    "device": device,
                    "reason": reason,
                    "count": loss.count,
                    "first_boottime_us": loss.first_us,
                    "last_boottime_us": loss.last_us,
                },
            )
            for (device, reason), loss in losses.items()
        ]
        if entries:
            self._buffer.append(entries, lambda stored: None if stored else self._restore(losses), reserve=True)

    def event_entry(self, kind: str, body: dict[str, object]) -> Entry:
        """An event of this gateway, as a row for `gateway-events`."""
        return Entry(self._own_series(self._kafka.events_topic, kind), msgspec.json.encode(body), self._now_us())

    def quarantine_entry(self, reason: str, device: str, subject: str, received_us: int, payload: bytes) -> Entry:
        """The report on input that cannot be forwarded, for `gateway-quarantine`; it carries the input itself."""
        self.counts[reason] += 1
        subject = subject[:REPORT_SUBJECT_MAX]
        report = {
            "reason": reason,
            "device": device,
            "subject": subject,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "bytes": len(payload),
            "payload_base64": base64.b64encode(payload[: self._report_bytes]).decode(),
        }
        return Entry(
            self._own_series(self._kafka.quarantine_topic, "quarantined", device, subject),
            msgspec.json.encode(report),
            received_us,
            quarantined=Quarantined(reason, payload),
        )

    def key(self, name: str) -> str:
        """The Kafka key of a device, or of this gateway (`gateway.key`)."""
        return name if self._gateway.key == "name" else f"{self._gateway.namespace}/{name}"

    def _entry(self, reading: Reading) -> Entry:
        self.counts["readings"] += 1
        resolved = self._resolve(reading)
        if isinstance(resolved, Refusal):
            self.quarantined[resolved.reason] += 1
            return self.quarantine_entry(
                resolved.reason, reading.writer or "", reading.subject, reading.received_us, reading.payload
            )
        destination, series = resolved
        device_boot, device_sequence = reading.device_boot, reading.device_sequence
        if destination.identity == "json" and device_sequence is None:
            device_boot, device_sequence = self._identity_of(reading.payload)
        return Entry(
            series,
            reading.payload,
            reading.received_us,
            reading.event_us,
            reading.event_error_us,
            device_boot,
            device_sequence,
            reading.tick_ms,
        )

    def _resolve(self, reading: Reading) -> tuple[Destination, Series] | Refusal:
        key = (reading.topic, reading.subject, reading.writer)
        resolved = self._resolved.get(key)
        if resolved is None:
            found = self._routes.resolve(reading.topic, reading.writer)
            if isinstance(found, Destination):
                resolved = (
                    found,
                    Series(
                        found.kafka_topic,
                        self.key(found.device),
                        found.device,
                        reading.subject,
                        READING_TYPE,
                        found.content_type,
                    ),
                )
            else:
                resolved = found
            if len(self._resolved) >= TOPICS_CACHED_MAX:
                self._resolved.clear()
            if len(reading.topic) <= TOPIC_CACHED_CHARACTERS_MAX:
                self._resolved[key] = resolved
        return resolved

    def _identity_of(self, payload: bytes) -> tuple[str | None, int | None]:
        """The sensor's boot and sequence; (None, None) where the payload does not carry them.

        The reading is stored all the same: what it says is for the cloud to judge, only duplicates of it cannot
        be told.
        """
        try:
            identity = self._identity.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.counts["identity-missing"] += 1
            return None, None
        boot = str(identity.boot)
        if not 0 <= identity.seq < 2**63 or not 0 < len(boot) <= 64:
            self.counts["identity-missing"] += 1
            return None, None
        return boot, identity.seq

    def _own_series(self, topic: str, kind: str, device: str = "", subject: str | None = None) -> Series:
        return Series(
            topic,
            self.key(self._gateway.id),
            device,
            kind if subject is None else subject,
            f"sluice.gateway.{kind}",
            "application/json",
        )

    def _restore(self, losses: dict[tuple[str | None, str], _Loss]) -> None:
        """The buffer did not take the loss records: count them on, to be flushed again."""
        for key, loss in losses.items():
            later = self._losses.get(key)
            if later is None:
                self._losses[key] = loss
            else:
                later.count += loss.count
                later.first_us = loss.first_us
