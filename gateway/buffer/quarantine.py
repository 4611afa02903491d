"""The quarantine in the buffer file: input that cannot be forwarded, kept whole and bounded until it is retried.

If it is full, the oldest input of the device that holds most makes room. So one device pushes out only its own input.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

import msgspec
from msgspec.structs import astuple, replace

from gateway.buffer.losses import EVENTS_DROPPED, LOSS_TYPE, count_losses, told_loss
from gateway.buffer.room import SIZE_SQL
from gateway.buffer.rows import OWN_TYPES, QUARANTINE_COLUMNS, Loss, Quarantined, QuarantinedSpan
from gateway.buffer.schema import corruption
from gateway.settings import BufferSettings

OVERFLOW = "quarantine-overflow"
"""Loss reason: quarantined input had to make room."""
DROPPED = "quarantine-dropped"
"""Loss reason: somebody dropped quarantined input."""
TOPIC_FORBIDDEN = "broker-refused: TopicAuthorizationFailedError"
"""Reason of input that Kafka does not let this gateway write. Other reasons about topics begin with `topic-`."""
BYTES_SQL = f"{SIZE_SQL} + 2 * length(CAST(subject AS BLOB))"
"""Bytes that input counts for the bound. A hostile topic may have 65,535 bytes, and is stored twice: as the subject
and, behind the payload, as the topic. Only the subject is read, and counts twice."""
_COLUMNS = ", ".join(QUARANTINE_COLUMNS)
_STALE_MAX = 64
"""Entries of `_Largest` that may be out of date, beside one for each device."""


@dataclass(slots=True)
class _Held:
    """The quarantined input of one device."""

    rows: int = 0
    bytes: int = 0
    after: int = 0
    """A number before all of its input."""


class _Largest:
    """Finds the device that holds most by one measure, without a look at all devices.

    A device gets an entry whenever it grows, so one of its entries is never below its size. An entry decides only if
    the device's own count agrees with it. So entries may be out of date, and cannot drift.
    """

    def __init__(self, held: dict[str, _Held], size: Callable[[_Held], int]) -> None:
        self._held = held
        self._size = size
        self._turns = count()
        self._entries: list[tuple[int, int, str]] = []
        """A heap: size below zero, turn and device. Of two devices with one size, the first to reach it comes first."""
        self._look_at_all()

    def grown(self, device: str) -> None:
        """Note that a device holds more than before."""
        heappush(self._entries, (-self._size(self._held[device]), next(self._turns), device))
        if len(self._entries) > 2 * len(self._held) + _STALE_MAX:
            self._look_at_all()

    def device(self) -> str:
        """The device that holds most. There must be one."""
        while True:
            size, turn, device = self._entries[0]
            held = self._held.get(device)
            if held is None:
                heappop(self._entries)
            elif self._size(held) == -size:
                return device
            else:
                heapreplace(self._entries, (-self._size(held), turn, device))

    def _look_at_all(self) -> None:
        self._entries = [(-self._size(held), next(self._turns), device) for device, held in self._held.items()]
        heapify(self._entries)


class Quarantine:
    """The table and its bounds. Every method needs a transaction of the file."""

    def __init__(
        self,
        settings: BufferSettings,
        connection: sqlite3.Connection,
        boot_id: str,
        tally: Counter[str],
        lost: Callable[[Quarantined], None],
    ) -> None:
        """`tally` counts `quarantine-overflow`. `lost` gets each lost input, in the transaction that counts it."""
        self._tally = tally
        self._lost = lost
        self._settings = settings
        self._connection = connection
        self._boot_id = boot_id
        self.rows = 0
        self.bytes = 0
        self._spans: list[QuarantinedSpan] | None = None
        self.measure()

    def measure(self) -> None:
        """Count the input, after the file was opened or a transaction was rolled back."""
        found = self._connection.execute(
            f"""SELECT max(typeof(payload)), device, count(*), sum({BYTES_SQL}), min(number)
            FROM quarantine GROUP BY device"""
        ).fetchall()
        # No other table with numbers has bytes there.
        if any(kind != "blob" for kind, *_ in found):
            raise corruption("a page of another table stands in the place of the quarantine")
        self._held: dict[str, _Held] = {device: _Held(rows, size, first - 1) for _, device, rows, size, first in found}
        self._by_rows = _Largest(self._held, lambda held: held.rows)
        self._by_bytes = _Largest(self._held, lambda held: held.bytes)
        self.rows = sum(held.rows for held in self._held.values())
        self.bytes = sum(held.bytes for held in self._held.values())
        self._spans = None

    def spans(self) -> list[QuarantinedSpan]:
        """The input by gateway boot; looked up once after each change."""
        if self._spans is None:
            self._spans = [
                QuarantinedSpan(*values)
                for values in self._connection.execute(
                    """SELECT boot_id, count(*), min(coalesce(event_us, received_us)),
                        max(coalesce(event_us, received_us))
                    FROM quarantine GROUP BY boot_id ORDER BY boot_id"""
                )
            ]
        return self._spans

    def of_topics(self, number: int, limit: int) -> list[tuple[int, str | None, str]]:
        """Number, topic and reason of input from `number` on; the topic only if it is the cause.

        Input with another cause counts for `limit` too, as `limit` bounds the reads. There is no index for this: it
        would cost the card a page for each quarantined input.
        """
        # The series stands behind the payload, which may fill many pages. So it is read only if it matters.
        return self._connection.execute(
            """SELECT quarantine.number, series.topic, reason FROM quarantine LEFT JOIN series
            ON series.number = CASE WHEN reason LIKE 'topic-%' OR reason = ? THEN quarantine.series END
            WHERE quarantine.number >= ? ORDER BY quarantine.number LIMIT ?""",
            (TOPIC_FORBIDDEN, number, limit),
        ).fetchall()

    def keep(self, input_: Quarantined) -> None:
        """Store input whole. If it exceeds the bounds, older input makes room (`quarantine-overflow`)."""
        (number,) = self._connection.execute(
            f"INSERT INTO quarantine ({_COLUMNS}) VALUES ({', '.join('?' * len(QUARANTINE_COLUMNS))}) RETURNING number",
            (*astuple(replace(input_, boot_id=input_.boot_id or self._boot_id))[:-1], *astuple(input_.datum)),
        ).fetchone()
        self._spans = None
        self._held.setdefault(input_.device, _Held(after=number - 1))
        self._count(input_.device, 1, input_.datum.size + 2 * len(input_.subject.encode()))
        self._by_rows.grown(input_.device)
        self._by_bytes.grown(input_.device)
        # At most a tenth of the buffer, so that quarantined input does not keep readings out.
        bytes_max = min(self._settings.quarantine_bytes_max, self._settings.bytes_max // 10)
        while self.rows > self._settings.quarantine_rows_max or (self.bytes > bytes_max and self.rows > 1):
            largest = self._by_rows if self.rows > self._settings.quarantine_rows_max else self._by_bytes
            self.lose([self._oldest(largest.device())], OVERFLOW)
            self._tally["quarantine-overflow"] += 1

    def _count(self, device: str, rows: int, size: int) -> None:
        held = self._held[device]
        held.rows += rows
        held.bytes += size
        self.rows += rows
        self.bytes += size
        if not held.rows:
            del self._held[device]

    def _oldest(self, device: str) -> int:
        """The number of a device's oldest input. Numbers before it are searched only once."""
        held = self._held[device]
        (number,) = self._connection.execute(
            "SELECT number FROM quarantine WHERE number > ? AND device = ? ORDER BY number LIMIT 1",
            (held.after, device),
        ).fetchone()
        held.after = number - 1
        return int(number)

    def sequences(self, device_boot: str) -> frozenset[int]:
        """Sequences of one sensor run that are quarantined."""
        found = self._connection.execute(
            "SELECT device_sequence FROM quarantine WHERE device_boot = ? AND device_sequence IS NOT NULL",
            (device_boot,),
        )
        return frozenset(sequence for (sequence,) in found)

    def find(self, numbers: Sequence[int]) -> dict[int, Quarantined]:
        """The input with these numbers, as far as it is there."""
        found = {}
        for number in numbers:
            values = self._connection.execute(
                f"SELECT {_COLUMNS} FROM quarantine WHERE number = ?",
                (number,),
            ).fetchone()
            if values is not None:
                found[number] = Quarantined.of_columns(values)
        return found

    def lose(self, numbers: Sequence[int], reason: str) -> int:
        """Delete input for good, each counted as lost; return how many there were."""
        found = self.find(numbers)
        count_losses(self._connection, [self._loss(input_, reason) for input_ in found.values()])
        for input_ in found.values():
            self._lost(input_)
        return self.drop(list(found))

    def _loss(self, input_: Quarantined, reason: str) -> Loss:
        (type_,) = self._connection.execute(
            "SELECT coalesce((SELECT type FROM series WHERE number = ?), '')", (input_.series,)
        ).fetchone()
        if type_ == LOSS_TYPE:
            # This loss record was not sent: count its losses again.
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                return told_loss(input_.datum.payload)
        datum = input_.datum
        at_us = datum.received_us if datum.event_us is None else datum.event_us
        return Loss(
            input_.device,
            EVENTS_DROPPED if type_.startswith(OWN_TYPES) else reason,
            input_.boot_id or "",
            1,
            at_us,
            at_us,
            datum.device_boot or "",
            datum.device_sequence,
            datum.device_sequence,
        )

    def drop(self, numbers: Sequence[int]) -> int:
        """Delete input; return how many there were."""
        dropped = 0
        self._spans = None
        for number in numbers:
            found = self._connection.execute(
                f"SELECT device, {BYTES_SQL} FROM quarantine WHERE number = ?", (number,)
            ).fetchone()
            if found is not None:
                device, size = found
                self._connection.execute("DELETE FROM quarantine WHERE number = ?", (number,))
                self._count(device, -1, -size)
                dropped += 1
        return dropped
