"""The work that waits for the buffer's thread: readings to store, losses to count, functions to run.

The event loop adds work, within bounds, and the thread takes it.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from gateway.buffer.losses import LOSSES_MAX
from gateway.buffer.room import INLINE_BYTES_MAX, ROW_BYTES, row_bytes
from gateway.buffer.rows import PLAIN, Entry, Loss, LossKey, Origin, Span, loss_key, sizes_of
from gateway.reading import BufferFileError, Mark
from gateway.settings import BufferSettings

DELETE_DELAY_S = 1.0
"""Seconds that deletions and loss counters wait for others, as each deletion writes some pages to the card."""
RETRY_S = 1.0
"""Seconds until a failed commit is tried again; it is also tried once Kafka has taken something."""
ENTRY_BYTES = 300
"""Bytes that an entry takes in memory beside its payload, for `buffer.queue_bytes_max`."""
OWN_BYTES_MAX = 1_000_000
"""Bytes of the gateway's own events that may wait in memory, and that have room on disk beyond `bytes_max`."""
SLEEP_S_MAX = 3600.0

Done = Callable[[bool], None]
Call = tuple[Callable[[], object], Future[object]]
"""A function to run, and where its result goes."""
T = TypeVar("T")


@dataclass(slots=True)
class Append:
    entries: Sequence[Entry]
    marks: Sequence[Mark]
    done: Done | None
    bytes: int
    """Bytes that it takes in memory."""
    disk_bytes: int
    origin: Origin = PLAIN
    is_own: bool = False
    """Whether it is one of the gateway's own events."""
    is_unfit: bool = False
    """Whether it cannot get its numbers before its commit."""
    unknown_since_s: float | None = None
    """Since when the file could not be asked what it knows of its sender (monotonic)."""

    @property
    def needs_disk(self) -> bool:
        """Whether the file has to have more of it than Kafka can have: marks, losses, quarantined input."""
        if self.marks or self.is_unfit:
            return True
        return any(entry.lost is not None or entry.quarantined is not None for entry in self.entries)

    @property
    def ordered_by(self) -> frozenset[Hashable]:
        """Its devices, or its broker. Of the appends that share one, none goes before an earlier one."""
        of_broker = (self.origin,) if self.origin.is_broker else ()
        return frozenset((*(entry.series.device for entry in self.entries), *of_broker))

    def is_admissible(self, topics: Container[str]) -> bool:
        """Whether it may get its numbers before its commit: all of it goes to these Kafka topics and needs no disk."""
        return all(entry.series.topic in topics for entry in self.entries) and not self.needs_disk


@dataclass(slots=True)
class Due:
    """The work of one commit."""

    own: list[Append] = field(default_factory=list)
    readings: list[Append] = field(default_factory=list)
    has_all: bool = False
    """Whether all waiting appends are in it: their time has come, and one commit may hold them."""
    is_time_to_delete: bool = False
    is_asked_for: bool = False
    """Whether somebody asked for a commit, whatever it holds."""
    is_front_due: bool = False
    """Whether the front has waited for Kafka long enough."""
    is_quiet_due: bool = False
    """Whether marks and duplicate windows have waited for another commit long enough."""
    confirmed: list[Span] = field(default_factory=list)
    marks: dict[str, Mark] = field(default_factory=dict)
    losses: dict[LossKey, Loss] = field(default_factory=dict)

    def __bool__(self) -> bool:
        has_work = bool(self.own or self.readings or self.confirmed or self.losses)
        return has_work or self.is_asked_for or self.is_front_due or self.is_quiet_due


class CommitQueue:
    """May be used on any thread. Appends stay until they are admitted or settled; all other work is handed over."""

    def __init__(self, settings: BufferSettings) -> None:
        self._settings = settings
        self._wake = threading.Condition()
        self._for_disk: deque[Append] = deque()
        """Readings that wait for a commit, as they may not be admitted."""
        self._held: Counter[Hashable] = Counter()
        """How many of them each device has, or broker: its later readings wait behind them."""
        self._readings: deque[Append] = deque()
        """Readings behind these, which came since `admissible` was called, or may be admitted."""
        self._own: deque[Append] = deque()
        self._calls: deque[Call] = deque()
        self._queued_bytes = 0
        self._own_bytes = 0
        self._losses: dict[LossKey, Loss] = {}
        self._is_closing = False
        self._is_asked_for = False
        self._has_new = False
        """Whether appends came since `wait` returned."""
        self._looked_s = 0.0
        """When `admissible` was called."""
        self._append_due_s = 0.0
        self._delete_due_s = float("inf")
        self._retry_s = 0.0

    # -- putting in -----------------------------------------------------------------------------

    def append(self, entries: Sequence[Entry], marks: Sequence[Mark], done: Done | None, origin: Origin) -> bool:
        """Queue entries to be stored; return False if too much waits."""
        sizes = sizes_of(entries)
        payload_bytes = sum(sizes)
        size = payload_bytes + ENTRY_BYTES * (len(entries) + len(marks))
        size += sum([len(mark.value) for mark in marks if mark.value is not None])
        disk_bytes = payload_bytes + ROW_BYTES * len(entries)
        if payload_bytes > INLINE_BYTES_MAX and max(sizes) > INLINE_BYTES_MAX:
            disk_bytes = sum([row_bytes(one) for one in sizes])
        with self._wake:
            accepted = not self._is_closing and self._queued_bytes <= self._settings.queue_bytes_max
            if accepted:
                self._readings.append(Append(entries, marks, done, size, disk_bytes, origin))
                self._queued_bytes += size
                self._wake_for_append()
        return accepted

    def append_own(self, entry: Entry, done: Done) -> bool:
        """Queue one of the gateway's own events; return False if too much waits."""
        size = entry.datum.size + ENTRY_BYTES
        with self._wake:
            accepted = not self._is_closing and self._own_bytes + size <= OWN_BYTES_MAX
            if accepted:
                disk_bytes = row_bytes(entry.datum.size)
                self._own.append(Append((entry,), (), done, size, disk_bytes, is_own=True))
                self._own_bytes += size
                self._wake_for_append()
        return accepted

    def _wake_for_append(self) -> None:
        if len(self._for_disk) + len(self._readings) + len(self._own) == 1:
            self._append_due_s = time.monotonic() + self._settings.commit_delay_ms / 1000
        self._has_new = True
        self._wake.notify()

    def count_loss(self, loss: Loss) -> None:
        """Queue a loss to be counted."""
        with self._wake:
            if not self._losses:
                self._delete_soon()
            if len(self._losses) >= LOSSES_MAX and loss_key(loss) not in self._losses:
                loss.device = loss.device_boot = ""
            merge_losses(self._losses, (loss,))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the buffer's thread. Raises BufferFileError if the buffer is closed."""
        future: Future[T] = Future()
        with self._wake:
            if self._is_closing:
                raise _closed()
            self._calls.append((function, future))  # type: ignore[arg-type]
            self._wake.notify()
        return future

    def delete_soon(self) -> None:
        """Have confirmed rows deleted within `DELETE_DELAY_S`."""
        with self._wake:
            self._delete_soon()

    def _delete_soon(self) -> None:
        self._delete_due_s = min(self._delete_due_s, time.monotonic() + DELETE_DELAY_S)
        self._wake.notify()

    def look_again(self) -> None:
        """Have the appends that wait looked at again."""
        with self._wake:
            self._has_new = True
            self._wake.notify()

    def commit_soon(self) -> None:
        """Have a commit made within `DELETE_DELAY_S`, whatever there is to store."""
        with self._wake:
            self._is_asked_for = True
            self._delete_soon()

    def delete_now(self) -> None:
        """Have confirmed rows deleted at once."""
        with self._wake:
            self._delete_due_s = 0.0
            self._wake.notify()

    def retry_after(self, delay_s: float) -> None:
        """Let the next commit wait for `delay_s`."""
        with self._wake:
            self._retry_s = time.monotonic() + delay_s
            self._wake.notify()

    def close(self) -> None:
        """Accept nothing more, and end the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def waiting(self) -> list[Entry]:
        """Entries that are not stored yet."""
        with self._wake:
            return [entry for append in (*self._own, *self._for_disk, *self._readings) for entry in append.entries]

    # -- taking out, on the buffer's thread -----------------------------------------------------

    def wait(
        self, due_s: Callable[[], float], *, cannot_store: bool, admits: Callable[[], bool]
    ) -> tuple[Sequence[Call], bool]:
        """Sleep until there is something to do, or until `due_s`. Functions do not wait for a delayed commit.

        Returns the functions to run, and whether the buffer is being closed. While it `cannot_store`, only retries are
        due. If it `admits`, new appends are looked at without a delay.
        """
        with self._wake:
            while True:
                now_s = time.monotonic()
                queue_due_s = self._retry_s if cannot_store else self._due_s(admits=admits())
                next_s = max(min(due_s(), queue_due_s), self._retry_s)
                if self._calls or self._is_closing or next_s <= now_s or (self._has_new and admits()):
                    break
                self._wake.wait(min(next_s - now_s, SLEEP_S_MAX))
            calls, self._calls, self._has_new = self._calls, deque(), False
            return calls, self._is_closing

    def _due_s(self, *, admits: bool) -> float:
        due_s, again_s = self._delete_due_s, self._looked_s + RETRY_S
        if self._for_disk or (self._readings and not admits):
            due_s = min(due_s, self._append_due_s)
        if self._own:
            # If the file did not tell what it knows of the first one, that may take as long as the disk is broken.
            due_s = min(due_s, self._append_due_s if self._own[0].unknown_since_s is None else again_s)
        # Readings that may be admitted wait for no commit, unless the file did not tell what it knows of the first one.
        return min(due_s, again_s) if self._readings and admits else due_s

    @property
    def has_readings(self) -> bool:
        """Whether readings wait."""
        return bool(self._for_disk or self._readings)

    def must_wait(self, now_s: float) -> bool:
        """Whether it is too early for a retry."""
        with self._wake:
            return now_s < self._retry_s

    def due(
        self, now_s: float, bytes_max: int, *, closing: bool, full: bool, topics: frozenset[str] = frozenset()
    ) -> Due:
        """The work that is due now: the oldest readings, as many as one commit may hold, and losses to count.

        What may be admitted without a commit, as it goes to these `topics` alone, is left out.
        """
        with self._wake:
            due = Due()
            if closing or now_s >= self._append_due_s:
                due.own = [] if _is_admissible(self._own, topics) else list(self._own)
                waiting = [self._for_disk] if topics else [self._for_disk, self._readings]
                due.readings = _first(chain.from_iterable(waiting), bytes_max)
                due.has_all = len(due.readings) == sum(map(len, waiting))
            due.is_time_to_delete = closing or full or now_s >= self._delete_due_s
            if due.is_time_to_delete:
                self._delete_due_s = float("inf")
                due.is_asked_for, self._is_asked_for = self._is_asked_for, False
            if due.readings or self._delete_due_s == float("inf"):
                # Losses go with the readings: the readings that a sensor still had after a loss hide it from a later
                # recall.
                due.losses, self._losses = self._losses, due.losses
            return due

    def settled(self, appends: Iterable[Append]) -> None:
        """Remove appends that are stored or refused: the oldest of their kind."""
        with self._wake:
            for append in appends:
                if append.is_own:
                    self._own.popleft()
                elif self._for_disk:
                    self._for_disk.popleft()
                    self._held.subtract(append.ordered_by)
                    for each in append.ordered_by:
                        if not self._held[each]:
                            del self._held[each]
                else:
                    self._readings.popleft()
                self._release(append)

    def _release(self, append: Append) -> None:
        if append.is_own:
            self._own_bytes -= append.bytes
        else:
            self._queued_bytes -= append.bytes

    # -- appends that need no disk --------------------------------------------------------------

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits in memory that it has to go to the disk at once."""
        return self._queued_bytes > self._settings.queue_bytes_max // 2

    def admissible(self, topics: Container[str]) -> Iterator[Append]:
        """The oldest events of the gateway, and then all readings, that need no disk and go to these topics.

        Readings whose device has earlier ones that need the disk are left out: one device's order is kept. Each append
        has to be `admitted` before the next is asked for.
        """
        self._looked_s = time.monotonic()
        for _ in range(len(self._own) + len(self._readings)):
            with self._wake:
                append = self._first_admissible(topics)
            if append is None:
                return
            yield append

    def _first_admissible(self, topics: Container[str]) -> Append | None:
        if self._own and self._own[0].is_admissible(topics):
            return self._own[0]
        while self._readings:
            append = self._readings[0]
            if self._is_free(append) and append.is_admissible(topics):
                return append
            # No later one is looked at before: if this one stays, a later one of its device must not go to the disk.
            self._leave_to_disk(self._readings.popleft())
        return None

    def _is_free(self, append: Append) -> bool:
        return not self._for_disk or (bool(append.entries) and append.ordered_by.isdisjoint(self._held))

    def _leave_to_disk(self, append: Append) -> None:
        self._for_disk.append(append)
        self._held.update(append.ordered_by)

    def admitted(self, append: Append) -> None:
        """Remove the first of the admissible appends of its kind. Its bytes count until it is `released`."""
        with self._wake:
            (self._own if append.is_own else self._readings).popleft()

    def released(self, appends: Iterable[Append]) -> None:
        """Note that admitted appends are in memory no more."""
        with self._wake:
            for append in appends:
                self._release(append)

    def readmit(self, appends: Sequence[Append]) -> None:
        """Take back admitted appends, in front of all others."""
        with self._wake:
            for append in reversed(appends):
                if append.is_own:
                    self._own.appendleft(append)
                else:
                    self._for_disk.appendleft(append)
                    self._held.update(append.ordered_by)
            self._wake.notify()

    def refuse_first(self, topics: Container[str], *, failing: bool) -> list[Append]:
        """Remove the appends that need the disk, and so keep others from Kafka.

        If the disk is not `failing` but full, marks alone stay, as they need no room.
        """
        refused: list[Append] = []
        with self._wake:
            while self._own and not self._own[0].is_admissible(topics):
                refused.append(self._own.popleft())
            came = [*self._for_disk, *self._readings]
            self._for_disk.clear()
            self._readings.clear()
            self._held.clear()
            for append in came:
                is_admissible = append.is_admissible(topics)
                if not is_admissible and (failing or append.entries):
                    refused.append(append)
                elif is_admissible and self._is_free(append):
                    self._readings.append(append)
                else:
                    self._leave_to_disk(append)
            for append in refused:
                self._release(append)
            # Those behind them need not wait any longer.
            self._has_new |= bool(refused)
        return refused

    def delay_appends(self, now_s: float) -> None:
        """Delay appends that came in during a commit by `commit_delay_ms`, like those before."""
        with self._wake:
            self._append_due_s = now_s + self._settings.commit_delay_ms / 1000

    def take_losses(self) -> dict[LossKey, Loss]:
        """Take all losses that are to be counted."""
        with self._wake:
            losses, self._losses = self._losses, {}
            return losses

    def put_back(self, losses: dict[LossKey, Loss]) -> None:
        """Take back the losses of a transaction that was rolled back, and retry after `RETRY_S`."""
        with self._wake:
            merge_losses(self._losses, losses.values())
            self._delete_due_s = 0.0
            self._retry_s = time.monotonic() + RETRY_S

    def refuse_appends(self) -> list[Done]:
        """Forget all appends; return the functions that are to be told so."""
        with self._wake:
            waiting = (*self._own, *self._for_disk, *self._readings)
            refused = [append.done for append in waiting if append.done is not None]
            self._own.clear()
            self._for_disk.clear()
            self._readings.clear()
            return refused

    def refuse_calls(self) -> None:
        """Fail all functions that were not run."""
        for _, future in self._calls:
            future.set_exception(_closed())


def _first(waiting: Iterable[Append], bytes_max: int) -> list[Append]:
    """The first appends, as many as have about so many bytes; at least one."""
    found: list[Append] = []
    size = 0
    for append in waiting:
        found.append(append)
        size += append.bytes
        if size > bytes_max:
            break
    return found


def _is_admissible(waiting: Sequence[Append], topics: frozenset[str]) -> bool:
    """Whether the oldest append can be admitted. Without topics, even one without entries cannot be."""
    return bool(waiting and topics) and waiting[0].is_admissible(topics)


def _closed() -> BufferFileError:
    return BufferFileError("the buffer is closed")


def merge_losses(losses: dict[LossKey, Loss], more: Iterable[Loss]) -> None:
    """Add losses to those that are counted already."""
    for loss in more:
        known = losses.setdefault(loss_key(loss), loss)
        if known is not loss:
            known.add(loss)
