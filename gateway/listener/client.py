"""Acts on the packets of one admitted MQTT client.

Its subclasses in `listener.device_client` and `listener.operator_client` act on PUBLISH and publish the will.
"""

import abc

from gateway.listener.access import Identity
from gateway.listener.device_commands import FILTER_BYTES_MAX, REFUSED_FILTER, SUBSCRIPTIONS_MAX
from gateway.listener.refusals import TOO_MANY_UNFINISHED, ClientRefusedError
from gateway.listener.session import ClientBatch, SessionKey, TooManyUnfinishedError
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


class Client(abc.ABC):
    """An admitted client and its session."""

    __slots__ = ("_client_id", "_shared", "device", "identity", "key", "peer", "present", "session")

    def __init__(self, shared: Shared, connect: Connect, identity: Identity, opening: Opening, peer: str) -> None:
        self._shared = shared
        self.session = opening.session
        self.key: SessionKey = opening.session.key
        self.peer = peer
        self.identity = identity
        self.device: str | None = None
        """The client's device; None for an operator, for `sluice check`, and for a client that names no device."""
        self.present = opening.session.on_disk and not connect.clean_session
        """Session Present in CONNACK (section 3.2.2.2)."""
        self._client_id = connect.client_id

    def handle(self, event: Event, batch: ClientBatch, received_us: int) -> None:
        """Act on a packet; add to `batch` what to store and what to answer. Raises ClientRefusedError."""
        match event:
            case Publish():
                self._publish(event, batch, received_us)
            case PubRel():
                self.session.release(batch, event.packet_id, received_us)
            case PingRequest():
                batch.at_once.append(PINGRESP)
            case PubAck():
                command = self.session.acknowledged(batch, event.packet_id)
                if command is None:
                    self._shared.counts["puback-of-nothing"] += 1
                elif command.id:
                    self._shared.cloud.acknowledged(command.id)
            case Subscribe():
                self._subscribe(event, batch)
            case Unsubscribe():
                for topic_filter in event.filters:
                    batch.subscribed |= self._shared.kept.unsubscribe(self.session, topic_filter)
                # UNSUBACK is due even if there was no such subscription [MQTT-3.10.4-5].
                self._reply(unsuback(event.packet_id), batch)

    # --- publishing ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _publish(self, event: Publish, batch: ClientBatch, received_us: int) -> None:
        """Take a PUBLISH. Raises ClientRefusedError."""

    @abc.abstractmethod
    def publish_will(self, cause: str, now_s: float) -> ClientBatch | None:
        """Publish the will, if there is one [MQTT-3.1.2-8]; return a batch to store, if that needs one."""

    def _begin(self, event: Publish, message: bytes, batch: ClientBatch) -> bool:
        """Take a PUBLISH with QoS 2 and the digest `message`; return whether it must be stored."""
        session, most = self.session, self._shared.settings.qos2_unfinished_max
        try:
            new = session.begin(batch, event.packet_id, message, most)
        except TooManyUnfinishedError as error:
            raise ClientRefusedError(
                TOO_MANY_UNFINISHED,
                f"{session.unfinished} QoS 2 messages of this session wait for PUBREL, and {session.room.unfinished} "
                "of all sessions; stored messages are answered, and the client sends the rest again; "
                "see mqtt_listener.qos2_unfinished_max and mqtt_listener.qos2_unfinished_total_max",
            ) from error
        if not new:
            self._shared.counts["redelivery-recognised"] += 1
        return new

    # --- subscribing --------------------------------------------------------------------------------------

    def _subscribe(self, subscribe: Subscribe, batch: ClientBatch) -> None:
        granted = self._shared.commands.grant(self.session, self.device, subscribe.filters, batch)
        if REFUSED_FILTER in granted:
            self._shared.refusals.refused(
                "subscribe-refused",
                "this gateway is no broker: a device may subscribe only to its own command topics (see "
                f"mqtt_listener.command_topics), by at most {SUBSCRIPTIONS_MAX} filters of {FILTER_BYTES_MAX} bytes",
                peer=self.peer,
                user=self.key[0],
                client_id=self._client_id,
            )
        self._reply(suback(subscribe.packet_id, granted), batch)
        if not self.session.kept:
            # No commit follows, so `stored` is not called.
            self._report_subscription()

    def _report_subscription(self) -> None:
        if self.device is not None:
            self._shared.cloud.subscribed(self.device)

    def _reply(self, packet: bytes, batch: ClientBatch) -> None:
        """Answer after the commit that stores a changed session; at once if the session is not kept."""
        (batch.replies if self.session.kept else batch.at_once).append(packet)

    # --- a batch and its outcome --------------------------------------------------------------------------

    def complete(self, batch: ClientBatch) -> None:
        """Complete a batch once all packets of its read are in it."""
        if batch.subscribed and self.session.kept:
            mark = self.session.mark()
            batch.marks[mark.key] = mark.value

    def stored(self, batch: ClientBatch) -> None:
        """Record that a batch is stored."""
        self.session.committed(batch)
        if batch.commands:
            self._shared.commands.send(batch)
        if batch.subscribed:
            self._report_subscription()

    def not_stored(self, batch: ClientBatch) -> bool:
        """Record that nothing of a batch is stored; return whether the client will send some of it again.

        A client sends QoS 1 and 2 again on its next connection. QoS 0 is gone.
        """
        self.session.undo(batch)
        return len(batch.answers) > batch.qos0 or bool(batch.replies)

    @abc.abstractmethod
    def leave_unanswered(self, batch: ClientBatch) -> None:
        """Record that a batch is stored but could not be answered."""

    # --- the end ------------------------------------------------------------------------------------------

    def retire(self, *, under_way: bool) -> None:  # noqa: ARG002 - for a device
        """Leave the session to its next connection. `under_way`: batches of this connection are still undecided."""
        shared, session = self._shared, self.session
        shared.leave(self.key)
        session.idle_since_s = shared.now_us() / 1e6
        if not session.kept:
            shared.kept.close(session)
