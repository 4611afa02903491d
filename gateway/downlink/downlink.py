"""Takes commands from Kafka into the ledger, has ingresses pass them on, and reports the one end of each.

    Kafka ──▶ take: one commit of commands and offset ──▶ ledger ──▶ offer ──▶ MQTT sessions, serial boards
                                                            ▲                     │ delivered, refused
    gateway-events ◀── one commit of the event and the end ─┴─────────────────────┘

A command is passed on only after its commit. It ends with the first of these: the device acknowledges it, its time is
over, somebody refuses it, or nobody knows its device. If the gateway ends between PUBACK and the commit of the end, the
device gets the command again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import structlog

from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import Entry
from gateway.clock.gateway_clock import BootClock
from gateway.command import By, CommandWay, DeviceCommand, Outcome
from gateway.downlink.command_records import CommandRecord, UnfitRecord, read_command
from gateway.downlink.ledger import LEDGER_MARKS, Coming, Ledger, Read, ending, opening, reading
from gateway.host.logs import FewLines
from gateway.intake.front_door import FrontDoor
from gateway.reading import BufferFileError, Mark
from gateway.record_contract import COMMAND_ENDED
from gateway.settings import CommandSettings, GatewaySettings

LOOK_S: Final = 1.0
"""Seconds between two looks at all open commands."""
UNKNOWN_AFTER_US: Final = 30_000_000
"""Time after which a device that nobody knows is called unknown. After a start, a board needs a while to be heard."""
NOT_LISTED: Final = "not-listed"
"""Reason of a refusal: `commands.devices` does not have the device."""
TOO_MANY: Final = "too-many-commands"
"""Reason of a refusal: `commands.per_device_max` or `commands.bytes_max` commands wait already."""

log = structlog.get_logger()


class Downlink:
    """The commands of one gateway. Belongs to the event loop."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it joins
        self,
        settings: CommandSettings,
        gateway: GatewaySettings,
        front_door: FrontDoor,
        buffer: Buffer,
        clock: Callable[[], BootClock],
        ways: Sequence[CommandWay],
    ) -> None:
        self.topic = settings.topic_of(gateway.id)
        self._settings = settings
        self._namespace = gateway.namespace
        self._front_door = front_door
        self._buffer = buffer
        self._buffer_id = ""
        """The file that has all marks of the ledger."""
        self._clock = clock
        self._ways = ways
        for way in ways:
            way.reports = self
        self._ledger = Ledger(settings)
        self._since_us: dict[str, int] = {}
        """When each open command came, or was recalled, by its id (CLOCK_BOOTTIME)."""
        self._of_earlier_start: set[str] = set()
        """Ids of open commands that an earlier start may have passed on."""
        self._ends: dict[str, tuple[Outcome, Entry]] = {}
        """Ends that are not stored yet, by the command's id."""
        self._soon: dict[str, None] = {}
        """Devices whose commands the next look looks at. For their order it is no set."""
        self._look_at_all_s = 0.0
        self._changed = asyncio.Event()
        self._recalled = asyncio.Event()
        self._taking = asyncio.Lock()
        self._lines = FewLines()
        self.counts: Counter[str] = Counter()
        """Counts since the start: `read` records, their copies that were `repeated`, and ends by outcome."""

    def state(self) -> dict[str, Any]:
        """The state for `sluice status`."""
        return {"topic": self.topic, "waiting": len(self._ledger), "counts": dict(self.counts)}

    async def run(self) -> None:
        """Pass commands on until cancelled."""
        try:
            await self._recall()
            while True:
                self._changed.clear()
                self._look()
                await self._store_ends()
                try:
                    async with asyncio.timeout(self._look_at_all_s - time.monotonic()):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._lines.finish()

    async def _recall(self) -> None:
        while True:
            try:
                self._ledger.load(await self._buffer.run(lambda file: file.marks(LEDGER_MARKS)))
            except BufferFileError as error:
                self._lines.tell(log.warning, "commands of the last start are not known yet", error=str(error))
                await asyncio.sleep(LOOK_S)
                continue
            self._buffer_id = self._buffer.id
            now_us = self._front_door.now_us()
            self._since_us = {command.id: now_us for command in self._ledger}
            self._of_earlier_start = set(self._since_us)
            self._recalled.set()
            return

    # -- from Kafka -----------------------------------------------------------------------------

    async def offset(self, partition: int, cluster: str) -> int | None:
        """The next record to read of a partition; None for the first."""
        await self._recalled.wait()
        async with self._taking:
            return self._ledger.offset(self.topic, partition, cluster)

    async def take(self, partition: int, cluster: str, records: Sequence[CommandRecord]) -> None:
        """Store the commands of records, in the order of a partition. Raises BufferFileError if none is stored."""
        # A session that ends must not leave the disk with what the ledger does not know.
        await asyncio.shield(self._take(partition, cluster, records))

    async def _take(self, partition: int, cluster: str, records: Sequence[CommandRecord]) -> None:
        async with self._taking:
            await self._take_alone(partition, cluster, records)

    async def _take_alone(self, partition: int, cluster: str, records: Sequence[CommandRecord]) -> None:
        coming = Coming()
        ends: list[tuple[Outcome, Entry]] = []
        repeated = 0
        for record in records:
            found = read_command(record, self._namespace)
            if isinstance(found, UnfitRecord):
                at = {"partition": partition, "offset": record.offset}
                ends.append(("refused", self._event(found.id, found.device, "refused", found.reason, **at)))
                continue
            if found.id in self._ledger or found.id in coming.commands:
                repeated += 1
                continue
            end = self._judged(found, coming)
            if end is None:
                coming.add(found)
            else:
                outcome, reason = end
                ends.append((outcome, self._event(found.id, found.device, outcome, reason)))
        read = Read(cluster, records[-1].offset + 1)
        marks = [*map(opening, coming.commands.values()), reading(self.topic, partition, read)]
        await self._store([event for _, event in ends], marks)
        self._ledger.has_read(self.topic, partition, read)
        self.counts["read"] += len(records)
        if repeated:
            self.counts["repeated"] += repeated
        self.counts.update(outcome for outcome, _ in ends)
        now_us = self._front_door.now_us()
        for command in coming.commands.values():
            self._ledger.add(command)
            self._since_us[command.id] = now_us
            self._look_soon(command.device)

    def _judged(self, command: DeviceCommand, coming: Coming) -> tuple[Outcome, str | None] | None:
        """The end of a command that must not even wait; None if it may."""
        if not any(fnmatchcase(command.device, pattern) for pattern in self._settings.devices):
            return "refused", NOT_LISTED
        if self._is_over(command):
            return "expired", None
        if not self._ledger.has_room(command, coming):
            return "refused", TOO_MANY
        return None

    # -- to the devices -------------------------------------------------------------------------

    def _look(self) -> None:
        """Pass on what may be passed on now, and end what has ended by itself."""
        now_s = time.monotonic()
        commands: Iterable[DeviceCommand]
        if now_s >= self._look_at_all_s:
            self._look_at_all_s = now_s + LOOK_S
            commands = self._ledger
        else:
            commands = [command for device in self._soon for command in self._ledger.of_device(device)]
        self._soon.clear()
        for command in commands:
            if command.id in self._ends:
                continue
            if self._is_over(command):
                self._end(command, "expired")
            elif (until_us := self._until_us(command)) is not None:
                self._offer(command, until_us)

    def _look_soon(self, device: str) -> None:
        self._soon[device] = None
        self._changed.set()

    def _offer(self, command: DeviceCommand, until_us: int) -> None:
        is_known = self._front_door.heard.get(command.device) is not None
        for way in self._ways:
            if way.knows(command.device):
                is_known = True
                way.offer(command, until_us)
            if command.id in self._ends:
                return
        if not is_known and self._front_door.now_us() - self._since_us[command.id] >= UNKNOWN_AFTER_US:
            self._end(command, "unknown-device")

    def _is_over(self, command: DeviceCommand) -> bool:
        """Whether a command's time is over for certain."""
        now_us, error_us = self._time()
        return error_us is not None and now_us - error_us >= command.expires_us

    def _until_us(self, command: DeviceCommand) -> int | None:
        """The CLOCK_BOOTTIME at which a command's time may be over; None if it may be over already."""
        now_us, error_us = self._time()
        if error_us is None or now_us + error_us >= command.expires_us:
            return None
        return self._front_door.now_us() + command.expires_us - now_us - error_us

    def _time(self) -> tuple[int, int | None]:
        """Microseconds since 1970, and the bound of their error; None if the clock is not known."""
        clock, now_us = self._clock(), self._front_door.now_us()
        return clock.at(now_us), clock.error_us(now_us)

    # -- what became of them --------------------------------------------------------------------

    def delivered(self, command_id: str, by: By) -> None:
        """See `CommandReports.delivered`."""
        command = self._ledger.get(command_id)
        if command is not None and command_id not in self._ends:
            self._end(command, "delivered", by=by)

    def refused(self, command_id: str, reason: str) -> None:
        """See `CommandReports.refused`."""
        command = self._ledger.get(command_id)
        if command is not None and command_id not in self._ends:
            self._end(command, "refused", reason)

    def ready(self, device: str) -> None:
        """See `CommandReports.ready`."""
        if self._ledger.of_device(device):
            self._look_soon(device)

    def _end(self, command: DeviceCommand, outcome: Outcome, reason: str | None = None, by: By | None = None) -> None:
        was_sent = False
        for way in self._ways:
            was_sent |= way.withdraw(command.id)
        sent = None if not was_sent and command.id in self._of_earlier_start else was_sent
        details = {"by": by} if by is not None else {"sent": sent}
        self._ends[command.id] = outcome, self._event(command.id, command.device, outcome, reason, **details)
        # The device's next command may have waited for this one.
        self._look_soon(command.device)

    def _event(
        self, command_id: str | None, device: str | None, outcome: Outcome, reason: str | None, **details: object
    ) -> Entry:
        body = {"device": device, "id": command_id, "outcome": outcome, "reason": reason, **details}
        return self._front_door.events.event_entry(COMMAND_ENDED, body)

    async def _store_ends(self) -> None:
        """Store the ends that are known. If the disk fails, the next look tries again."""
        ends = dict(self._ends)
        if not ends:
            return
        try:
            await self._store([event for _, event in ends.values()], list(map(ending, ends)))
        except BufferFileError as error:
            self._lines.tell(log.warning, "ends of commands are not stored yet", error=str(error), count=len(ends))
            return
        for command_id, (outcome, _) in ends.items():
            self.counts[outcome] += 1
            self._ledger.forget(command_id)
            self._of_earlier_start.discard(command_id)
            del self._ends[command_id], self._since_us[command_id]

    async def _store(self, events: Sequence[Entry], marks: Sequence[Mark]) -> None:
        """Store events and marks in one commit. Raises BufferFileError."""
        buffer_id = self._buffer.id
        if buffer_id != self._buffer_id:
            # Another file took the place of the one that had the ledger.
            marks = [*self._ledger.marks(), *marks]
        await self._buffer.store_own(events, marks)
        self._buffer_id = buffer_id
