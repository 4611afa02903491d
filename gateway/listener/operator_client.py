"""Passes on to devices what an operator publishes."""

from gateway.listener.access import Identity
from gateway.listener.client import Client
from gateway.listener.refusals import ClientRefusedError
from gateway.listener.session import ClientBatch, digest
from gateway.listener.sessions import Opening
from gateway.listener.shared import Shared
from gateway.mqtt.protocol import Connect, Publish


class OperatorClient(Client):
    """A client whose messages, its will included, are commands."""

    __slots__ = ("_will",)

    def __init__(self, shared: Shared, connect: Connect, identity: Identity, opening: Opening, peer: str) -> None:
        super().__init__(shared, connect, identity, opening, peer)
        self._will = connect.will
        # Discarded: a device of this name left it for the session's next connection alone, which is this one.
        shared.unanswered.pick_up(self.key)

    def _publish(self, event: Publish, batch: ClientBatch, received_us: int) -> None:
        """Pass on a command to its devices.

        A command is accepted or refused before its exchange is recorded. If a refused command comes again, it must not
        look known.
        """
        del received_us
        commands, topic = self._shared.commands, event.topic
        message = digest(topic, event.payload) if event.qos == 2 else b""
        if event.qos == 2 and self.session.is_known(event.packet_id, message):
            self._begin(event, message, batch)
            return
        recipients = commands.recipients(topic, event.payload, event.qos)
        if event.qos == 2:
            self._begin(event, message, batch)
            # No reading of the batch belongs to this answer.
            batch.bare.add(len(batch.answers) - 1)
        elif event.qos == 1:
            batch.answer_bare(event.packet_id)
        commands.pass_on(recipients, topic, event.payload, batch)

    def publish_will(self, cause: str, now_s: float) -> ClientBatch | None:
        """Pass on the will as a command; return the batch to store, or None if there is no command."""
        del cause, now_s
        commands, will = self._shared.commands, self._will
        if will is None:
            return None
        batch = ClientBatch()
        try:
            recipients = commands.recipients(will.topic, will.payload, will.qos)
        except ClientRefusedError:
            self._shared.counts["command-not-delivered"] += 1
            return None
        commands.pass_on(recipients, will.topic, will.payload, batch)
        return batch

    def leave_unanswered(self, batch: ClientBatch) -> None:
        """Leave nothing: a command that comes again counts as a new one."""
