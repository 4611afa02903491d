"""Passes on to devices what an operator publishes."""

from functools import partial

from gateway.listener.client import Admitted, Client
from gateway.listener.refusals import REASON_CODES, ClientRefusedError
from gateway.listener.session import ClientBatch, Command, digest
from gateway.listener.shared import Shared
from gateway.mqtt.protocol import PUBREC, Publish, Will
from gateway.mqtt.protocol5 import REASON_SHIFT, Publish5
from gateway.mqtt.reason_codes import ReasonCode


class OperatorClient(Client):
    """A client whose messages, its will included, are commands."""

    __slots__ = ("_will",)

    def __init__(self, shared: Shared, admitted: Admitted) -> None:
        super().__init__(shared, admitted)
        self._will = admitted.connect.will

    def _publish(self, event: Publish, batch: ClientBatch, received_us: int) -> None:
        """Pass on a command to its devices.

        A command is accepted or refused before its exchange is recorded. If a refused command comes again, it must not
        look known.
        """
        commands = self._shared.commands
        message = digest(event.topic, event.payload) if event.qos == 2 else b""
        if event.qos == 2 and self.session.is_known(event.packet_id, message):
            self._begin(event, message, batch)
            return
        command = _command(event, received_us)
        try:
            recipients = commands.recipients(command, event.qos)
        except ClientRefusedError as refused:
            if not event.qos or not self._has_reasons:
                raise
            self._shared.refusals.refused(
                refused.reason, refused.message, peer=self.peer, user=self.key[0], client_id=self._client_id
            )
            kind = PUBREC if event.qos == 2 else 0
            batch.answer_bare(kind | event.packet_id | REASON_CODES[refused.reason] << REASON_SHIFT)
            self.remember_refused(batch.answers[-1:])
            return
        if event.qos == 2:
            self._begin(event, message, batch)
            # No reading of the batch belongs to this answer.
            batch.bare.add(len(batch.answers) - 1)
        elif event.qos == 1:
            batch.answer_bare(event.packet_id)
        if event.qos and self._has_reasons and not (recipients.queued or recipients.at_once):
            batch.answers[-1] |= ReasonCode.NO_MATCHING_SUBSCRIBERS << REASON_SHIFT
        commands.pass_on(recipients, command, batch)

    def _publish_will(self, cause: str, now_s: float) -> None:
        """Pass on the will as a command."""
        del cause, now_s
        shared, will = self._shared, self._will
        if will is None:
            return
        batch = ClientBatch()
        command = _command(will, shared.now_us())
        try:
            recipients = shared.commands.recipients(command, will.qos)
        except ClientRefusedError:
            shared.counts["command-not-delivered"] += 1
            return
        shared.commands.pass_on(recipients, command, batch)
        if batch.waits:
            shared.store([], partial(self._will_decided, batch), batch.marks)
        else:
            self.stored(batch)

    def _will_decided(self, batch: ClientBatch, stored: bool) -> None:  # noqa: FBT001 - as Intake has it
        if stored:
            self.stored(batch)
        else:
            self.not_stored(batch)

    def _report_end(self, cause: str, now_s: float) -> None:
        """Report nothing: an operator is no device."""

    def leave_unanswered(self, batch: ClientBatch) -> None:
        """Leave nothing: a command that comes again counts as a new one."""


def _command(message: Publish | Will, received_us: int) -> Command:
    """The command that an operator's message or will is."""
    forwarded, expires_us = b"", None
    if isinstance(message, Publish5 | Will):
        forwarded = message.forwarded
        expires_us = None if message.expiry_s is None else received_us + message.expiry_s * 1_000_000
    return Command(0, message.topic, message.payload, forwarded, expires_us)
