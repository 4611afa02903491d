"""Makes reports on input that cannot be forwarded, for `gateway-quarantine`; they carry the input itself."""

import base64
import hashlib
from collections import Counter
from collections.abc import Callable

import msgspec

from gateway.buffer.rows import Entry, Quarantined
from gateway.intake.own_events import own_series
from gateway.reading import Datum, source
from gateway.settings import GatewaySettings, KafkaSettings

REPORT_BYTES_MAX = 65_536
"""Raw bytes that go to Kafka with a quarantine report; the whole input stays on this box."""
REPORT_SUBJECT_MAX = 256
"""Characters of the topic that a report repeats: a hostile one may have 65,535."""
REPORT_REST_BYTES = 3_000
"""Bytes that a report needs beside the raw bytes, headers included."""


class QuarantineReports:
    """Makes the rows of reports, and counts the reported input by reason."""

    def __init__(
        self, gateway: GatewaySettings, kafka: KafkaSettings, now_us: Callable[[], int], counts: Counter[str]
    ) -> None:
        """`counts` are the counts of the front door, to which each report adds."""
        self._gateway = gateway
        self._topic = kafka.quarantine_topic
        # Base64 takes four bytes for three.
        self._report_bytes = min(REPORT_BYTES_MAX, (kafka.record_bytes_max - REPORT_REST_BYTES) * 3 // 4)
        self._now_us = now_us
        self._counts = counts
        self.by_reason: Counter[str] = Counter()
        """Readings that no route could take, and input that is no reading, since the start."""
        self.last: dict[str, tuple[str, str]] = {}
        """By reason: the device of the last such input, empty if unknown, and its source."""

    def set_aside(self, input_: Quarantined) -> Entry:
        """The report on new input that is no reading, or that no route takes."""
        self.by_reason[input_.reason] += 1
        come_from = source(input_.topic, input_.subject)[:REPORT_SUBJECT_MAX]
        self.last[input_.reason] = input_.device, come_from
        return self.entry(input_)

    def entry(self, input_: Quarantined) -> Entry:
        """The report as a row."""
        self._counts[input_.reason] += 1
        subject = input_.subject[:REPORT_SUBJECT_MAX]
        payload = input_.datum.payload
        report = {
            "reason": input_.reason,
            "device": input_.device,
            "subject": subject,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "bytes": len(payload),
            "payload_base64": base64.b64encode(payload[: self._report_bytes]).decode(),
        }
        return Entry(
            own_series(self._gateway, self._topic, "quarantined", input_.device, subject),
            Datum(received_us=self._now_us(), payload=msgspec.json.encode(report)),
            quarantined=input_,
        )
