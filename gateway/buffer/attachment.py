"""Keeps the buffer attached to its file, and replaces the file if SQLite finds it corrupt, or if it is too new.

The file is renamed and set aside. A new file is begun at once, so readings are stored all the while. A thread
then takes over the readable rows of the damaged file. A file of a newer version waits until that version runs. The
process may be killed at any moment: the next start goes on.
"""

import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog

from gateway.buffer import schema
from gateway.buffer.file import AHEAD_MARK, BufferFile
from gateway.buffer.room import ROW_BYTES
from gateway.buffer.rows import Lane
from gateway.buffer.salvage import aside as buffer_aside
from gateway.buffer.salvage.progress import SALVAGE_PREFIX, kept_marks
from gateway.buffer.salvage.salvage import (
    Damaged,
    Salvage,
    SalvagedBatch,
    adopt_beside,
    begun_again,
    begun_late,
    damaged_files,
    keep_largest,
)
from gateway.clock.gateway_clock import BootClock
from gateway.reading import BufferFileError, Mark
from gateway.settings import BufferSettings

ANEW_WAIT_S_MIN = 1.0
ANEW_WAIT_S_MAX = 60.0
"""Shortest and longest wait in seconds before a new file replaces one that was damaged soon after another. The wait
doubles each time."""
ANEW_CALM_S = 600.0
"""Seconds without damage after which the next new file is begun at once again."""
REWIND_S = 5.0
"""Seconds between two times that the forwarder is sent back for salvaged rows, while a salvage goes on."""
REMEMBERED_MAX = 100
"""Length of each list of files that wait to be reported: files set aside, and files salvaged."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SetAside:
    """A corrupt file, or one of a newer version, that was renamed and kept. Its readable rows are taken over."""

    name: str
    buffer_id: str
    rows: int | None
    """Rows that it held; None if unknown."""
    lane: Lane | None = None
    """The lane that readings went into; None if unknown."""


class Attachment:
    """The open file. Belongs to the buffer's thread, except `stop_salvages` and `join_salvages`."""

    def __init__(  # noqa: PLR0913 - the file's needs, and three callbacks
        self,
        settings: BufferSettings,
        boot_id: str,
        clock: Callable[[], BootClock],
        counts: Counter[str],
        *,
        resume: Callable[[BootClock], None] | None,
        call: Callable[[Callable[[], bool]], Future[bool]],
        on_attach: Callable[[], None],
        on_rows: Callable[[], None],
    ) -> None:
        """`call` runs a function on the buffer's thread. It raises BufferFileError if the buffer is closed.

        `on_attach` is called after a file was opened, `on_rows` after salvaged rows came in. `resume` is passed to
        `BufferFile`.
        """
        self._settings = settings
        self._boot_id = boot_id
        self._clock = clock
        self._counts = counts
        self._resume = resume
        self._call = call
        self._on_attach = on_attach
        self._on_rows = on_rows
        self.file: BufferFile
        self.is_attached = False
        self.rewinds = 0
        """Grows when rows are stored before rows already read, or when rows that were passed over should be read again.
        Readers must then begin at START again."""
        self.set_aside: deque[SetAside] = deque(maxlen=REMEMBERED_MAX)
        """Files that were replaced since the start. The reporter removes them."""
        self.salvaged: deque[SalvagedBatch] = deque(maxlen=REMEMBERED_MAX)
        """The last batch of each finished salvage. The reporter removes it."""
        self._known: dict[str, SetAside] = {}
        """Files that were set aside, until a new file takes their place."""
        self._salvages: list[Salvage] = []
        self._is_stopping = False
        self._anew_due_s = float("-inf")
        self._anew_wait_s = 0.0
        self._rewind_due_s = 0.0
        self._is_rewind_due = False

    def attach(self) -> None:
        """Open or begin the file, and set a corrupt file aside. Raises BufferFileError."""
        path = self._settings.path
        try:
            unfinished = buffer_aside.interrupted(path)
            if unfinished:
                self._go_on_replacing(unfinished)
            if not self.is_attached:
                try:
                    self.file = BufferFile(
                        self._settings, self._boot_id, self._clock, self._counts, resume=self._resume
                    )
                    try:
                        self._remember()
                    except BaseException:
                        self.file.abandon()
                        raise
                    self._reset()
                except schema.NewerFileError as error:
                    self._replace("buffer is too new: set aside until that version runs, a new one is begun", error)
                except sqlite3.Error as error:
                    if not schema.is_corruption(error):
                        raise
                    self.replace(error)
        except (sqlite3.Error, OSError) as error:
            raise BufferFileError(
                f"buffer.path: {path} cannot be opened for writing ({error}): the directory must exist and be writable "
                "by the user that sluice runs as, with space left"
            ) from error

    def _remember(self) -> None:
        """Restart salvages whose marks are lost, and begin those that this version was waited for."""
        known = kept_marks(self.file.marks(SALVAGE_PREFIX))
        waiting = buffer_aside.waiting(self._settings.path)
        lost = [aside for aside in waiting if aside.name not in known]
        late = [aside for aside in waiting if aside.name in known and known[aside.name].newer]
        late = [aside for aside in late if not schema.is_newer(aside)]
        if not lost and not late:
            return
        if lost:
            log.error("how far a salvage had come is lost: begun again", asides=[aside.name for aside in lost])
        if late:
            log.info("files of this version are taken over", asides=[aside.name for aside in late])
        self.file.close()
        again = [*map(begun_again, lost), *(begun_late(aside, {AHEAD_MARK}) for aside in late)]
        # The salvaged lanes get lower numbers than this start's lane.
        lanes = [lane for damaged in again for lane in damaged.lanes.values()]
        self.file = BufferFile(self._settings, self._boot_id, self._clock, self._counts, lanes)
        with self.file.transaction():
            self._take_over(again, ())

    def _reset(self) -> None:
        """Start work on a newly opened file: stop the salvages into the former file, and begin those into this file."""
        self.is_attached = True
        self._on_attach()
        # They read for lanes of the former file: `_adopt_now` refuses their batches.
        for salvage in self._salvages:
            salvage.stop()
        self._salvages = [salvage for salvage in self._salvages if salvage.is_alive()]
        self._begin_salvages()

    def replace(self, error: Exception) -> None:
        """Set the damaged file aside, and begin a new file that takes over its readable rows. Raises OSError.

        On a dead disk nothing changes: every file looks damaged there, and Kafka needs the numbers of this one.
        """
        self._replace("buffer is corrupt: set aside, a new one takes over what can be read of it", error)

    def _replace(self, words: str, error: Exception) -> None:
        buffer_aside.try_disk(self._settings.path)
        log.error(words, error=str(error))
        self._put_aside()
        self._begin_anew()

    def _put_aside(self) -> None:
        """Rename the damaged file, and close it."""
        path = self._settings.path
        known = self.file if self.is_attached else None
        try:
            name = buffer_aside.final_name(buffer_aside.begin(path))
            if known is not None:
                self._known[name] = SetAside(name, known.id, known.lanes.rows, known.lanes.current)
        finally:
            if known is not None and not path.exists():
                # Close only after the renaming, as closing a database deletes the WAL that stands under its name.
                self.is_attached = False
                known.abandon()
        now_s = time.monotonic()
        if now_s > self._anew_due_s + ANEW_CALM_S:
            self._anew_wait_s = 0.0
        self._anew_due_s = now_s + self._anew_wait_s
        self._anew_wait_s = min(max(ANEW_WAIT_S_MIN, 2 * self._anew_wait_s), ANEW_WAIT_S_MAX)

    def _go_on_replacing(self, asides: Sequence[Path]) -> None:
        """Finish a replacement that was cut off by the end of the daemon or by a disk error."""
        path = self._settings.path
        if path.exists():
            if all(buffer_aside.is_known(path, SALVAGE_PREFIX + buffer_aside.final_name(aside)) for aside in asides):
                for aside in asides:
                    buffer_aside.finish(aside)
                return
            if buffer_aside.is_unused(path):
                buffer_aside.discard(path)
            else:
                # It may hold acknowledged readings that are nowhere else.
                log.error("the buffer cannot be read, or knows nothing of a damaged file beside it: set aside too")
                self._put_aside()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Begin a new file. Before it takes a reading, the names of the files to salvage are on disk in it."""
        wait_s = self._anew_due_s - time.monotonic()
        if wait_s > 0:
            raise BufferFileError(
                f"new files are damaged again and again, so the next is begun in {wait_s:.0f} s: the disk or card that "
                "buffer.path is on is probably failing and should be replaced"
            )
        path = self._settings.path
        asides = buffer_aside.interrupted(path)
        known = [
            self._known.get(name, SetAside(name, "unknown", None)) for name in map(buffer_aside.final_name, asides)
        ]
        files = damaged_files(
            [(aside, of.lane, of.rows) for aside, of in zip(asides, known, strict=True)], buffer_aside.waiting(path)
        )
        kept, given_up = keep_largest(files.values(), self._settings.damaged_files_max)
        try:
            lanes = [lane for damaged in kept for lane in damaged.lanes.values()]
            self.file = BufferFile(self._settings, self._boot_id, self._clock, self._counts, lanes)
            try:
                with self.file.transaction():
                    self._take_over(kept, given_up)
            except BaseException:
                self.file.abandon()
                raise
        except Exception:
            # It holds no readings. The next attempt must not find it in the place of the buffer.
            with suppress(OSError):
                buffer_aside.discard(path)
            raise
        try:
            for aside in asides:
                buffer_aside.finish(aside)
        except BaseException:
            self.file.abandon()
            raise
        for damaged in given_up:
            log.error(
                "a damaged buffer was given up without being salvaged: there are more than buffer.damaged_files_max",
                aside=damaged.aside.name,
            )
            buffer_aside.discard(damaged.aside)
        self._known.clear()
        self.set_aside.extend(known)
        self._reset()

    def _take_over(self, kept: Sequence[Damaged], given_up: Sequence[Damaged]) -> None:
        """Write damaged files' small tables and salvage marks into the new file, and count files given up as lost."""
        file = self.file
        file.connection.execute("SAVEPOINT beside")
        try:
            adopt_beside(file.connection, (*kept, *given_up), file.salvaged)
        except Exception as error:
            if schema.is_of_disk(error):
                raise
            log.exception(
                "what stood beside the readings of a damaged buffer could not be taken over: its clocks are unknown, "
                "its sensors' retransmissions are stored again, and losses that had not been reported are forgotten"
            )
            file.connection.execute("ROLLBACK TO beside")
            bare = [replace(damaged, found=None) for damaged in (*kept, *given_up)]
            adopt_beside(file.connection, bare, file.salvaged)
        file.connection.execute("RELEASE beside")
        # A file that this process had open was cut off by its damage alone: what was in its front goes on.
        file.take_up_cut_off(is_end=not self._known)
        file.boots.adopted()
        for damaged in kept:
            lanes = {number: file.salvaged[lane.name] for number, lane in damaged.lanes.items()}
            progress = msgspec.structs.replace(damaged.progress, lanes=lanes)
            file.keep_marks([Mark(SALVAGE_PREFIX + damaged.aside.name, msgspec.json.encode(progress))])
        for damaged in given_up:
            if not damaged.progress.ended:
                file.count_losses(msgspec.structs.replace(damaged.progress, torn=True).losses(self._boot_id))

    def _begin_salvages(self) -> None:
        """Start salvaging every file that has a mark, also from earlier starts."""
        kept = kept_marks(self.file.marks(SALVAGE_PREFIX))
        marks = {name: progress for name, progress in kept.items() if not progress.newer}
        # The newest first: rows that it took over from an older file come before the rest of the older file.
        work = [(self._settings.path.with_name(name), marks[name]) for name in sorted(marks, reverse=True)]
        if work:
            salvage = Salvage(work, self.file.id, self._adopt, self._end_salvage)
            self._salvages.append(salvage)
            salvage.start()

    def _end_salvage(self, aside: Path) -> None:
        """Rename a finished file, and delete the oldest if there are too many. On the salvage's thread."""
        try:
            buffer_aside.salvaged(aside)
            deleted = buffer_aside.prune(self._settings.path, self._settings.damaged_files_max)
        except OSError as error:
            log.warning("a salvaged file could not be renamed or deleted: delete it by hand", error=str(error))
            return
        with suppress(BufferFileError):  # the next start does it
            self._call(lambda: self._forget(aside)).result()
        if deleted:
            log.info("salvaged files were deleted, as buffer.damaged_files_max says", deleted=deleted)

    def _forget(self, aside: Path) -> bool:
        """Delete the mark of a file whose name says that it is salvaged."""
        with self.file.transaction():
            self.file.keep_marks([Mark(SALVAGE_PREFIX + aside.name, None)])
        return True

    def _adopt(self, batch: SalvagedBatch) -> bool:
        """Take over rows of a damaged file; return False if there is no room now. On the salvage's thread."""
        try:
            return self._call(lambda: self._adopt_now(batch)).result()
        except BufferFileError:
            if self._is_stopping:
                # This salvage began after the others were stopped.
                for salvage in self._salvages:
                    salvage.stop()
            raise

    def _adopt_now(self, batch: SalvagedBatch) -> bool:
        file = self.file
        if batch.into != file.id:
            raise BufferFileError("the file that this was salvaged for has been replaced")
        data = [row.datum for row in batch.rows] + [input_.datum for input_ in batch.quarantined]
        coming = sum(datum.size + ROW_BYTES for datum in data)
        if coming and file.room.is_full(coming):
            # The forwarder must send rows that were taken over before, to make room.
            self._rewind()
            return False
        with file.transaction():
            file.adopt(batch.rows, batch.quarantined, batch.series)
            # The mark stays until the file is renamed. Without a mark the file would be salvaged again.
            progress = msgspec.structs.replace(batch.progress, ended=batch.finished)
            file.keep_marks([Mark(SALVAGE_PREFIX + batch.aside.name, msgspec.json.encode(progress))])
            if batch.finished:
                file.count_losses(batch.progress.losses(self._boot_id))
        self._is_rewind_due = self._is_rewind_due or bool(batch.rows)
        if batch.finished or time.monotonic() >= self._rewind_due_s:
            self._rewind()
        if batch.finished:
            self.salvaged.append(batch)
            say = log.info if batch.missing == 0 else log.error
            missing = "unknown" if batch.missing is None else batch.missing
            say("a damaged buffer was salvaged", aside=batch.aside.name, rows=batch.progress.taken, missing=missing)
        self._on_rows()
        return True

    def _rewind(self) -> None:
        """Send the forwarder back, as salvaged rows may stand before its position."""
        if self._is_rewind_due:
            self._is_rewind_due = False
            self._rewind_due_s = time.monotonic() + REWIND_S
            self.rewinds += 1
            self._on_rows()

    def stop_salvages(self) -> None:
        """Tell the salvages to stop; `join_salvages` waits for their end."""
        self._is_stopping = True
        for salvage in self._salvages:
            salvage.stop()

    def join_salvages(self) -> None:
        for salvage in self._salvages:
            salvage.join()
