"""Turns what a device publishes into readings, and recognises messages that it sends again."""

from typing import Final

from gateway.listener.client import Admitted, Client
from gateway.listener.device_events import reported
from gateway.listener.redelivery import PacketIdRun, Unanswered
from gateway.listener.session import ClientBatch, digest
from gateway.listener.shared import Shared
from gateway.mqtt.properties import UserProperties
from gateway.mqtt.protocol import Publish
from gateway.mqtt.protocol5 import Publish5
from gateway.reading import Datum, Doubt, Reading

ABOVE_SHARE: Final = "above-share"
"""Loss reason: the device held more than its share of the buffer, and was told so."""


class DeviceClient(Client):
    """A client whose messages are readings: a device, or `sluice check`."""

    __slots__ = ("_ids", "_unanswered", "_will", "writer")

    def __init__(self, shared: Shared, admitted: Admitted) -> None:
        super().__init__(shared, admitted)
        connect, identity = admitted.connect, admitted.identity
        self.writer = identity.user
        """The one device that the client may write as; None if anybody may write as any device."""
        if not identity.is_check:
            self.device = identity.user or connect.client_id or None
        self._will = None if connect.will is None else reported(connect.will)
        self._ids = PacketIdRun()
        self._unanswered: Unanswered | None = None
        """Messages that this connection leaves stored but unanswered."""

    def _publish(self, event: Publish, batch: ClientBatch, received_us: int) -> None:
        """Take a PUBLISH as a reading. A first try with QoS 1 takes the hot path in `Connection` instead."""
        redelivered = False
        if event.qos == 0:
            if self._shared.intake.cannot_store:
                self.lose_qos0(1)
                return
            batch.answers.append(0)
            batch.qos0 += 1
        elif event.qos == 1:
            if event.dup:
                if self._is_stored(event):
                    batch.answer_bare(event.packet_id)
                    return
                redelivered = True
            batch.answers.append(event.packet_id)
        else:
            message = _digest(event)
            if not self._begin(event, message, batch):
                return
            # If this gateway has kept the session, an unknown identifier means that the first try never arrived,
            # unless its exchange was released already.
            comes_again = self.session.released.comes_again(event.packet_id, message)
            redelivered = comes_again or (event.dup and not self.present)
        topic = event.topic
        datum = Datum(received_us=received_us, payload=event.payload, doubt=Doubt.REDELIVERED if redelivered else 0)
        batch.readings.append(Reading(topic, topic, datum, self.writer, _user(event)))

    def _is_stored(self, event: Publish) -> bool:
        """Whether a PUBLISH with QoS 1 and DUP is known to be stored already (`Unanswered`)."""
        preceding = self._preceding
        if not preceding or preceding.get(event.packet_id) != _digest(event):
            return False
        del preceding[event.packet_id]
        self._shared.counts["redelivery-recognised"] += 1
        return True

    def _publish_will(self, cause: str, now_s: float) -> None:
        self._shared.devices.ended(self.device, cause, self.peer, self._will, now_s)

    def _report_end(self, cause: str, now_s: float) -> None:
        self._shared.devices.ended(self.device, cause, self.peer, None, now_s)

    # --- a batch and its outcome --------------------------------------------------------------------------

    def complete(self, batch: ClientBatch) -> None:
        if batch.readings:
            # QoS 0 has no packet identifiers.
            ids = [answer for answer in batch.answers if answer] if batch.qos0 else batch.answers
            if ids:
                batch.counting_from = self._ids.advance(ids[0] & 0xFFFF, ids[-1] & 0xFFFF, len(ids))
        super().complete(batch)

    def not_stored(self, batch: ClientBatch) -> bool:
        self.lose_qos0(batch.qos0)
        return super().not_stored(batch)

    def may_refuse(self, batch: ClientBatch) -> bool:
        """See `Client.may_refuse`: MQTT 5 has a code for a device above its share, and the connection goes on."""
        return self._has_reasons and batch.has_only_readings and self._shared.intake.refuses_by_share

    def lose_refused(self, batch: ClientBatch) -> None:
        count = len(batch.readings) - batch.qos0
        if count:
            self._shared.intake.lost(self.device, ABOVE_SHARE, count)
            self._shared.counts[ABOVE_SHARE] += count

    def lose_qos0(self, count: int) -> None:
        """Count readings with QoS 0 that were refused."""
        if count:
            self._shared.intake.lost(self.device, "refused-qos0", count)
            self._shared.counts["refused-qos0"] += count

    def leave_unanswered(self, batch: ClientBatch) -> None:
        """Remember a stored batch that could not be answered, for the session's next connection."""
        if self._unanswered is None:
            self._unanswered = Unanswered()
        self._unanswered.remember(batch)

    # --- the end ------------------------------------------------------------------------------------------

    def retire(self, *, under_way: bool) -> None:
        super().retire(under_way=under_way)
        if (under_way or self._unanswered) and self._client_id:
            if self._unanswered is None:
                self._unanswered = Unanswered()
            self._shared.unanswered.leave(self.key, self._unanswered)


def _user(event: Publish) -> UserProperties:
    return event.user if isinstance(event, Publish5) else ()


def _digest(event: Publish) -> bytes:
    """The digest of a message. A sensor may send equal payloads whose properties tell them apart."""
    return digest(event.topic, event.payload, _user(event))
