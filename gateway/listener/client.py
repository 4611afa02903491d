"""Acts on the packets of one admitted MQTT client.

Its subclasses in `listener.device_client` and `listener.operator_client` act on PUBLISH and publish the will.
"""

import abc
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Final, NamedTuple

from gateway.command import REFUSED_BY_DEVICE
from gateway.listener.access import Identity
from gateway.listener.device_commands import FILTER_BYTES_MAX, REFUSED_FILTER, SUBSCRIPTIONS_MAX
from gateway.listener.refusals import TOO_MANY_UNFINISHED, WILL_DELAYED, ClientRefusedError
from gateway.listener.session import ClientBatch, SessionKey, TooManyUnfinishedError
from gateway.listener.sessions import Opening
from gateway.listener.shared import Shared
from gateway.mqtt.protocol import (
    PINGRESP,
    PUBCOMP,
    PUBREC,
    Connect,
    Dialect,
    Event,
    PingRequest,
    PubAck,
    Publish,
    PubRel,
    Subscribe,
    Unsubscribe,
)
from gateway.mqtt.protocol5 import REASON_SHIFT
from gateway.mqtt.reason_codes import ReasonCode

REFUSED_IDS_MAX: Final = 64
"""Refused QoS 2 identifiers that are remembered for one connection. The usual client has fewer under way at once."""


class Admitted(NamedTuple):
    """A CONNECT that is admitted, and its answer."""

    connect: Connect
    identity: Identity
    opening: Opening
    peer: str
    dialect: Dialect


class Client(abc.ABC):
    """An admitted client and its session."""

    __slots__ = (
        "_client_id",
        "_dialect",
        "_has_reasons",
        "_preceding",
        "_refused_ids",
        "_shared",
        "_will_bytes",
        "_will_delay_s",
        "assigned_id",
        "device",
        "identity",
        "key",
        "peer",
        "present",
        "session",
        "told_expiry_s",
    )

    def __init__(self, shared: Shared, admitted: Admitted) -> None:
        connect, identity, opening, peer, dialect = admitted
        self._shared = shared
        self._dialect = dialect
        self._refused_ids: deque[int] | None = None
        """QoS 2 identifiers of this connection that PUBREC refused. Some clients go on with PUBREL all the same."""
        self.session = opening.session
        self.key: SessionKey = opening.session.key
        self.peer = peer
        self.identity = identity
        self.device: str | None = None
        """The client's device; None for an operator, for `sluice check`, and for a client that names no device."""
        self.present = opening.session.on_disk
        """Session Present in CONNACK (section 3.2.2.2)."""
        self._has_reasons = connect.is_of_5
        """Whether answers have reason codes. Without them, the only refusal is to close [MQTT-3.3.5-2]."""
        self._preceding = shared.unanswered.pick_up(self.key)
        """Messages that the session's preceding connection left stored but unanswered. Only devices have any."""
        self.assigned_id = None if connect.client_id else self.key[1]
        """The identifier that the listener made for the client."""
        self._client_id = self.key[1] if connect.is_of_5 else connect.client_id
        granted = self.session.expiry_s
        self.told_expiry_s = None if granted == connect.session_expiry_s else granted
        """Seconds that the session is kept, if those are not as CONNECT asked."""
        will = connect.will
        self._will_delay_s = 0 if will is None else will.delay_s
        self._will_bytes = 0 if will is None else len(will.topic) + len(will.payload)

    def handle(self, event: Event, batch: ClientBatch, received_us: int) -> None:
        """Act on a packet; add to `batch` what to store and what to answer. Raises ClientRefusedError."""
        match event:
            case Publish():
                self._publish(event, batch, received_us)
            case PubRel():
                self._release(event, batch, received_us)
            case PingRequest():
                batch.at_once.append(PINGRESP)
            case PubAck():
                self._acknowledged(event, batch)
            case Subscribe():
                self._subscribe(event, batch)
            case Unsubscribe():
                self._unsubscribe(event, batch)

    # --- publishing ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _publish(self, event: Publish, batch: ClientBatch, received_us: int) -> None:
        """Take a PUBLISH. Raises ClientRefusedError."""

    def ended(self, cause: str, now_s: float) -> None:
        """Report the end of the connection, and publish the will as soon as its delay has passed."""
        shared, session = self._shared, self.session
        # A session that is not kept ends with its connection, and its will does not wait (MQTT 5, 3.1.2.5).
        delay_s = min(self._will_delay_s, shared.kept.expiry_of(session)) if session.kept else 0
        if not delay_s:
            self._publish_will(cause, now_s)
            return
        self._report_end(cause, now_s)
        successor = shared.sessions.get(self.key)
        if successor is None:
            publish = partial(self._publish_will, WILL_DELAYED, now_s + delay_s)
            shared.wills.put_off(self.key, now_s + delay_s, self._will_bytes, publish)
        elif successor.session is not session:
            self._publish_will(WILL_DELAYED, now_s)

    @abc.abstractmethod
    def _publish_will(self, cause: str, now_s: float) -> None:
        """Publish the will, if there is one, and report the end [MQTT-3.1.2-8]."""

    @abc.abstractmethod
    def _report_end(self, cause: str, now_s: float) -> None:
        """Report the end of a connection whose will comes later."""

    def _begin(self, event: Publish, message: bytes, batch: ClientBatch) -> bool:
        """Take a PUBLISH with QoS 2 and the digest `message`; return whether it must be stored."""
        session, most = self.session, self._shared.settings.qos2_unfinished_max
        if self._refused_ids and event.packet_id in self._refused_ids:
            self._refused_ids.remove(event.packet_id)
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

    def _release(self, pubrel: PubRel, batch: ClientBatch, received_us: int) -> None:
        """Take a PUBREL; one of an exchange that was refused must not look as if its message were stored."""
        packet_id = pubrel.packet_id
        if self._refused_ids and packet_id in self._refused_ids:
            self._refused_ids.remove(packet_id)
            batch.answer_bare(PUBCOMP | packet_id | ReasonCode.PACKET_IDENTIFIER_NOT_FOUND << REASON_SHIFT)
        else:
            self.session.release(batch, packet_id, received_us)

    def remember_refused(self, answers: Iterable[int]) -> None:
        """Remember the identifiers of QoS 2 messages that are refused by reason code."""
        if self._refused_ids is None:
            # An empty one takes 600 bytes, and few clients need it.
            self._refused_ids = deque(maxlen=REFUSED_IDS_MAX)
        self._refused_ids.extend(answer & 0xFFFF for answer in answers if answer & PUBREC)

    # --- subscribing --------------------------------------------------------------------------------------

    def _subscribe(self, subscribe: Subscribe, batch: ClientBatch) -> None:
        granted = self._shared.commands.grant(self.session, self.device, subscribe.filters, batch)
        if max(granted) >= REFUSED_FILTER:
            self._shared.refusals.refused(
                "subscribe-refused",
                "this gateway is no broker: a device may subscribe only to its own command topics (see "
                f"mqtt_listener.command_topics), by at most {SUBSCRIPTIONS_MAX} filters of {FILTER_BYTES_MAX} bytes",
                peer=self.peer,
                user=self.key[0],
                client_id=self._client_id,
            )
        self._reply(self._dialect.suback(subscribe.packet_id, granted), batch)
        if not self.session.kept:
            # No commit follows, so `stored` is not called.
            self._report_subscription()

    def _report_subscription(self) -> None:
        if self.device is not None:
            self._shared.cloud.subscribed(self.device)

    def _unsubscribe(self, unsubscribe: Unsubscribe, batch: ClientBatch) -> None:
        """Remove subscriptions. UNSUBACK is due even if there was no such subscription [MQTT-3.10.4-5]."""
        found = [self._shared.kept.unsubscribe(self.session, topic_filter) for topic_filter in unsubscribe.filters]
        batch.subscribed |= any(found)
        codes = [ReasonCode.SUCCESS if each else ReasonCode.NO_SUBSCRIPTION_EXISTED for each in found]
        self._reply(self._dialect.unsuback(unsubscribe.packet_id, codes), batch)

    def _acknowledged(self, puback: PubAck, batch: ClientBatch) -> None:
        """Take a PUBACK, and send commands that waited for it."""
        counts, session, cloud = self._shared.counts, self.session, self._shared.cloud
        command = session.acknowledged(batch, puback.packet_id)
        is_refused = puback.code >= ReasonCode.UNSPECIFIED_ERROR
        if command is None:
            counts["puback-of-nothing"] += 1
        elif is_refused:
            counts["command-refused"] += 1
        if command is not None and command.id:
            if is_refused:
                cloud.refused(command.id, REFUSED_BY_DEVICE)
            else:
                cloud.acknowledged(command.id)
        if session.waiting:
            self._shared.commands.send_to(session)

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

    def may_refuse(self, batch: ClientBatch) -> bool:  # noqa: ARG002 - for a device
        """Whether a batch that was not stored may be refused by reason code, while the connection goes on."""
        return False

    def lose_refused(self, batch: ClientBatch) -> None:  # noqa: B027 - for a device
        """Count the readings of a batch that is refused by reason code, as they do not come again."""

    @abc.abstractmethod
    def leave_unanswered(self, batch: ClientBatch) -> None:
        """Record that a batch is stored but could not be answered."""

    # --- the end ------------------------------------------------------------------------------------------

    def expire_after(self, expiry_s: int) -> None:
        """Keep the session for so long from the end on, as a DISCONNECT says (section 3.14.2.2.2)."""
        session = self.session
        if session.kept:
            self._shared.kept.expire_after(session, expiry_s)
            mark = session.mark()
            self._shared.store([], lambda _: None, {mark.key: mark.value})

    def retire(self, *, under_way: bool) -> None:  # noqa: ARG002 - for a device
        """Leave the session to its next connection. `under_way`: batches of this connection are still undecided."""
        shared, session = self._shared, self.session
        shared.leave(self.key)
        session.idle_since_s = shared.now_us() / 1e6
        if not session.kept:
            shared.kept.close(session)
