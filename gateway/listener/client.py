"""One MQTT client from its CONNECT to its end: what its packets ask for, and what it leaves behind."""

from gateway.listener.access import Identity
from gateway.listener.device_commands import FILTER_BYTES_MAX, REFUSED_FILTER, SUBSCRIPTIONS_MAX
from gateway.listener.device_events import reported
from gateway.listener.redelivery import PacketIdRun, Unanswered
from gateway.listener.refusals import TOO_MANY_UNFINISHED, RefusedError
from gateway.listener.session import Batch, SessionKey, TooManyUnfinishedError, digest
from gateway.listener.sessions import Opening
from gateway.listener.shared import Shared
from gateway.mqtt.protocol import (
    PINGRESP,
    Connect,
    Event,
    PingRequest,
    PubAck,
    Publish,
    PubRel,
    Subscribe,
    Unsubscribe,
    suback,
    unsuback,
)
from gateway.reading import Reading


class Client:
    """A client that was admitted, and its session."""

    __slots__ = (
        "_client_id",
        "_ids",
        "_preceding",
        "_shared",
        "_unanswered",
        "_will",
        "_will_reported",
        "device",
        "identity",
        "key",
        "operator",
        "peer",
        "present",
        "session",
        "writer",
    )

    def __init__(
        self,
        shared: Shared,
        connect: Connect,
        identity: Identity,
        opening: Opening,
        peer: str,
    ) -> None:
        self._shared = shared
        self.session = opening.session
        self.key: SessionKey = opening.session.key
        self.peer = peer
        self.identity = identity
        self.operator = identity.operator
        self.writer = None if identity.operator else identity.user
        """The device that its readings may be of; None where anybody may write as any device."""
        self.device: str | None = None
        """The device that it is; None where it did not say which one, for an operator, and for `sluice check`."""
        if not (identity.operator or identity.is_check):
            self.device = identity.user or connect.client_id or None
        self.present = opening.session.on_disk and not connect.clean_session
        """Whether CONNACK may say that its session was there before."""
        self._client_id = connect.client_id
        will = connect.will
        self._will = will if identity.operator else None
        """An operator's, which is a command."""
        self._will_reported = None if will is None or identity.operator else reported(will)
        """A device's."""
        self._ids = PacketIdRun()
        self._preceding = shared.unanswered.take(self.key)
        """What the session's preceding connection left stored and unanswered."""
        self._unanswered: Unanswered | None = None
        """What this connection leaves."""

    def take(self, event: Event, batch: Batch, received_us: int) -> None:
        """Act on a packet, adding to `batch` what is to be stored and answered. Raises RefusedError."""
        match event:
            case Publish() if self.operator:
                self._command(event, batch)
            case Publish():
                self._publish(event, batch, received_us)
            case PubRel():
                self.session.release(batch, event.packet_id, received_us)
            case PingRequest():
                batch.at_once.append(PINGRESP)
            case PubAck():
                if not self.session.acknowledged(batch, event.packet_id):
                    self._shared.counts["puback-of-nothing"] += 1
            case Subscribe():
                self._subscribe(event, batch)
            case Unsubscribe():
                for topic_filter in event.filters:
                    batch.subscribed |= self._shared.kept.unsubscribe(self.session, topic_filter)
                # Even where nothing was subscribed to [MQTT-3.10.4-5].
                self._reply(unsuback(event.packet_id), batch)

    # --- what it publishes --------------------------------------------------------------------------------

    def _publish(self, event: Publish, batch: Batch, received_us: int) -> None:
        """Take a reading of a device; its first try with QoS 1 goes a shorter way, in `Connection`."""
        redelivered = False
        if event.qos == 0:
            if self._shared.intake.holding:
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
            message = digest(event.topic, event.payload)
            if not self._begin(event, message, batch):
                return
            # In a session that this gateway did not lose, an unknown identifier means that the first try was lost,
            # unless its exchange was released already.
            comes_again = self.session.released.comes_again(event.packet_id, message)
            redelivered = comes_again or (event.dup and not self.present)
        topic = event.topic
        batch.readings.append(
            Reading(topic, topic, event.payload, received_us, writer=self.writer, redelivered=redelivered)
        )

    def _is_stored(self, event: Publish) -> bool:
        """Whether a PUBLISH with QoS 1 and DUP is known to be stored already (`Unanswered`)."""
        preceding = self._preceding
        if not preceding or preceding.get(event.packet_id) != digest(event.topic, event.payload):
            return False
        del preceding[event.packet_id]
        self._shared.counts["redelivery-recognised"] += 1
        return True

    def _begin(self, event: Publish, message: bytes, batch: Batch) -> bool:
        """Take a PUBLISH with QoS 2 and the digest `message`; tell whether it is one that is not stored yet."""
        session, most = self.session, self._shared.settings.qos2_unfinished_max
        try:
            new = session.begin(batch, event.packet_id, message, most)
        except TooManyUnfinishedError as error:
            raise RefusedError(
                TOO_MANY_UNFINISHED,
                f"{session.unfinished} QoS 2 messages of this session wait for their PUBREL, and "
                f"{session.room.unfinished} in all; what is stored is answered, and the client sends the rest again; "
                "see mqtt_listener.qos2_unfinished_max and mqtt_listener.qos2_unfinished_total_max",
            ) from error
        if not new:
            self._shared.counts["redelivery-recognised"] += 1
        return new

    def _command(self, event: Publish, batch: Batch) -> None:
        """Pass on what an operator says to a device.

        The command is decided before anything of its exchange is recorded: what is refused must not look known when
        it comes again.
        """
        commands, topic = self._shared.commands, event.topic
        message = digest(topic, event.payload) if event.qos == 2 else b""
        if event.qos == 2 and self.session.is_known(event.packet_id, message):
            self._begin(event, message, batch)
            return
        recipients = commands.recipients(topic, event.payload, event.qos)
        if event.qos == 2:
            self._begin(event, message, batch)
            # Its answer is bare: no reading of the batch belongs to it.
            batch.bare.add(len(batch.answers) - 1)
        elif event.qos == 1:
            batch.answer_bare(event.packet_id)
        commands.pass_on(recipients, topic, event.payload, batch)

    # --- what it subscribes to ----------------------------------------------------------------------------

    def _subscribe(self, subscribe: Subscribe, batch: Batch) -> None:
        granted = self._shared.commands.grant(self.session, self.device, subscribe.filters, batch)
        if REFUSED_FILTER in granted:
            self._shared.refusals.refused(
                "subscribe-refused",
                "this is a gateway's front door, not a broker: a device may subscribe to its own command topics only "
                f"(see mqtt_listener.command_topics), to {SUBSCRIPTIONS_MAX} filters of {FILTER_BYTES_MAX} bytes",
                peer=self.peer,
                user=self.key[0],
                client_id=self._client_id,
            )
        self._reply(suback(subscribe.packet_id, granted), batch)

    def _reply(self, packet: bytes, batch: Batch) -> None:
        """Answer after the commit that keeps a changed session: this batch's, or one that is under way."""
        (batch.replies if self.session.kept else batch.at_once).append(packet)

    # --- a batch and its outcome --------------------------------------------------------------------------

    def complete(self, batch: Batch) -> None:
        """Add what is known once all that a read brought is in its batch."""
        if batch.readings:
            # QoS 0 has no identifiers to count.
            ids = [answer for answer in batch.answers if answer] if batch.qos0 else batch.answers
            if ids:
                batch.counting_from = self._ids.advance(ids[0] & 0xFFFF, ids[-1] & 0xFFFF, len(ids))
        if batch.subscribed and self.session.kept:
            mark = self.session.mark()
            batch.marks[mark.key] = mark.value

    def stored(self, batch: Batch) -> None:
        """Take note that a batch is stored."""
        self.session.committed(batch)
        if batch.commands:
            self._shared.commands.send(batch)

    def not_stored(self, batch: Batch) -> bool:
        """Take note that nothing of a batch is stored; tell whether the client will send something of it again.

        It does so with QoS 1 and 2 on its next connection; QoS 0 is gone.
        """
        self.session.undo(batch)
        self.lose_qos0(batch.qos0)
        return len(batch.answers) > batch.qos0 or bool(batch.replies)

    def lose_qos0(self, count: int) -> None:
        """Count readings with QoS 0 that were not taken."""
        if count:
            self._shared.intake.lost(self.device, "refused-qos0", count)
            self._shared.counts["refused-qos0"] += count

    def leave_unanswered(self, batch: Batch) -> None:
        """Leave for the session's next connection what is stored and could not be answered on this one."""
        if self._unanswered is None:
            self._unanswered = Unanswered()
        self._unanswered.remember(batch)

    # --- the end ------------------------------------------------------------------------------------------

    def retire(self, *, under_way: bool) -> None:
        """Leave the session to the next connection; `under_way`: some of this one's batches are not decided yet."""
        shared, session = self._shared, self.session
        shared.leave(self.key)
        session.idle_since_s = shared.now_us() / 1e6
        if not session.kept:
            shared.kept.close(session)
        if (under_way or self._unanswered) and not self.operator and self._client_id:
            if self._unanswered is None:
                self._unanswered = Unanswered()
            shared.unanswered.leave(self.key, self._unanswered)

    def publish_will(self, cause: str, now_s: float) -> Batch | None:
        """Publish the will [MQTT-3.1.2-8]: a device's as an event, an operator's as the command that it is.

        Gives a batch to store where the command has to wait for its device.
        """
        shared, will = self._shared, self._will
        if not self.operator:
            shared.devices.ended(self.device, cause, self.peer, self._will_reported, now_s)
        elif will is not None:
            batch = Batch()
            try:
                recipients = shared.commands.recipients(will.topic, will.payload, will.qos)
            except RefusedError:
                shared.counts["command-not-delivered"] += 1
                return None
            shared.commands.pass_on(recipients, will.topic, will.payload, batch)
            return batch
        return None
