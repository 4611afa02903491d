"""An operator as a client: what it says goes to devices."""

from gateway.listener.access import Identity
from gateway.listener.client import Client
from gateway.listener.refusals import ClientRefusedError
from gateway.listener.session import Batch, digest
from gateway.listener.sessions import Opening
from gateway.listener.shared import Shared
from gateway.mqtt.protocol import Connect, Publish


class OperatorClient(Client):
    """A client whose messages are commands, its will among them."""

    __slots__ = ("_will",)

    def __init__(self, shared: Shared, connect: Connect, identity: Identity, opening: Opening, peer: str) -> None:
        super().__init__(shared, connect, identity, opening, peer)
        self._will = connect.will
        # What a device of this name left counts for the session's next connection alone, which is this one.
        shared.unanswered.pick_up(self.key)

    def _publish(self, event: Publish, batch: Batch, received_us: int) -> None:
        """Pass on what an operator says to a device.

        The command is decided before anything of its exchange is recorded: what is refused must not look known when
        it comes again.
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
            # Its answer is bare: no reading of the batch belongs to it.
            batch.bare.add(len(batch.answers) - 1)
        elif event.qos == 1:
            batch.answer_bare(event.packet_id)
        commands.pass_on(recipients, topic, event.payload, batch)

    def publish_will(self, cause: str, now_s: float) -> Batch | None:
        """Pass it on as the command that it is; where that has to wait for its device, give the batch to store."""
        del cause, now_s
        commands, will = self._shared.commands, self._will
        if will is None:
            return None
        batch = Batch()
        try:
            recipients = commands.recipients(will.topic, will.payload, will.qos)
        except ClientRefusedError:
            self._shared.counts["command-not-delivered"] += 1
            return None
        commands.pass_on(recipients, will.topic, will.payload, batch)
        return batch

    def leave_unanswered(self, batch: Batch) -> None:
        """Nothing is left: a command that comes again is another one."""
