"""Takes one batch of Kafka records into the tables: `log` in one commit, then every table that derives from it.

First one pass over the records makes files of `log`, and of what the batch adds to windows and devices, that nobody
sees yet. Its census of the rows tells the driver what the batch holds. Records that came before are set aside, and
written with their verdicts once these are known. Then `log` is committed, and after it the derived tables. Each of
these records up to which batch it goes. If the job dies in between, the next start finishes the batch from `log` alone.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from spark.arrow_pass.plan import ChangesPlan, WindowRules
from spark.arrow_pass.tasks import BatchPass, MadeFiles, judging, table_folder
from spark.decode.codec_declarations import Streams
from spark.decode.record_frames import READ_SCHEMA, through_rules, typed_records
from spark.decode.record_times import microseconds
from spark.decode.value_types import METRICS_TYPE
from spark.engine.delta_staging import AppendTable
from spark.engine.executor_python import expect_packages
from spark.engine.interpreted_queries import interpreted_if, is_small
from spark.engine.warehouse_folder import folder_exists, note_place, remove_folder, was_copied
from spark.finality.gateway_states import GatewayEvent
from spark.finality.gateway_table import faults_in, with_faults
from spark.finality.gateway_troubles import GatewayNow, gateways_now
from spark.finality.loss_records import losses_schema
from spark.finality.loss_table import append_losses, create_losses, losses_path
from spark.ingest.batch_copies import NONE_FOUND, Copies, ToldApart
from spark.ingest.census import Census, census_of, take_census
from spark.ingest.devices_append import DevicesAppend
from spark.ingest.former_devices import take_over_devices
from spark.ingest.job_state import JobState, KafkaTopics, events_of
from spark.ingest.record_faults import (
    RECORD_FAULTS,
    Culprit,
    as_bytes,
    as_rejects,
    find_culprits,
    is_culprit,
    may_be_a_records,
    reason_of,
)
from spark.ingest.retention import read_horizons
from spark.ingest.warehouse_copy import (
    ANEW,
    NOW_AND_THEN,
    RETOLD,
    STARTS,
    expect_one_moment,
    forget_broken,
    is_all_told,
)
from spark.log.amendments import (
    amend_set_aside,
    amendments_path,
    amendments_schema,
    append_amendments,
    committed_rows,
    create_amendments,
    effective_log,
)
from spark.log.copies import conflicts_kept, with_verdicts
from spark.log.deletions import read_deletions, was_deleted
from spark.log.device_parts import create_device_parts, device_parts_path, device_parts_schema
from spark.log.log_table import (
    ORDINAL,
    BatchId,
    BatchIds,
    Log,
    LogAppend,
    create_log,
    expect_same,
    log_path,
    with_topic_ids,
)
from spark.log.readings_view import is_reading, readings, taken_at
from spark.log.record_verdicts import Verdicts
from spark.log.time_corrections import (
    BatchCorrections,
    Corrections,
    corrections_path,
    corrections_schema,
    create_corrections,
    known_corrections,
    readings_moved,
    retimed,
    take_corrections,
)
from spark.log.warehouse_version import Version, change_version, current_version, folder_of
from spark.registry.registry_table import registered_gateways
from spark.registry.topic_owners import owners_of
from spark.windows.window_changes import (
    CHANGES_PARTITION,
    COPY,
    CORRECTION,
    FIGURES,
    READINGS,
    SKIPPING_COLUMNS,
    append_changes,
    append_made,
    append_replayed,
    changes_path,
    changes_schema,
    create_changes,
    differences,
    is_replay_told,
    of_version,
)
from spark.windows.windows_table import (
    KEY,
    Area,
    area_of,
    create_windows,
    folded,
    near,
    parts,
    read_parts,
    replace_area,
    still_open,
    unwindowed,
    windowed,
    windows_path,
    windows_schema,
)

INTERPRETED_ROWS_MAX = 10_000
"""Rows of a batch up to which its queries are interpreted, not compiled to Java code."""
SMALL_ROWS_MAX = 50_000
"""Rows of a batch up to which a task for each core reads it, not a task for each of Kafka's partitions. Each task takes
time to start, and writes a file to every table, which upkeep must merge again."""
REGISTRY_S = 30.0
"""Seconds between two questions to the registry about who may speak in which topic."""
STATE_S = 30.0
"""Least seconds between two writes of the driver's state to its tables."""
STATE_SHARE = 0.04
"""Share of the time that these writes may take. They only make the next start quicker."""
TRIAL = "_trial"
"""Folder beside the tables where parts of a failed batch are tried."""


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Figures of one batch."""

    rows: int
    duplicates: int
    rejected: int
    late: int
    """Values that reached Kafka more than a minute after the end of their window."""
    revised: int
    """Windows with late values."""
    unwindowed: int
    """Good readings in no window, because their time is implausible or unknown."""
    deleted: int
    """Records of devices whose data was deleted."""
    corrections: int
    """Time corrections that gateways sent about their clocks."""
    seconds: float
    newest_us: Mapping[str, int] = field(default_factory=dict)
    """Kafka's timestamp of the newest record, by topic."""
    undeclared: Mapping[str, set[str]] = field(default_factory=dict)
    """Members of payloads that the declaration does not name, by stream."""


def warned(words: str) -> None:
    """Write a warning to stderr."""
    sys.stderr.write(f"warning: {words}\n")


class BatchJob:
    """The one writer of a warehouse's tables, with the state that it keeps in memory."""

    def __init__(
        self,
        spark: SparkSession,
        warehouse: str,
        streams: Streams | None = None,
        *,
        into: Version | None = None,
        warn: Callable[[str], None] = warned,
    ) -> None:
        """Make missing tables, and finish what an earlier run left unfinished.

        Without `streams`, the declarations that last wrote the warehouse hold. With `into`, the tables are those of a
        version that readers do not see yet, and nothing is written to `window_changes`. `warn` gets a message about
        each record that was set aside because it made its batch fail. Raises WindowLengthError, PackagesMissingError,
        and MomentsError or CopyError for a copy that cannot be used as it is.
        """
        expect_packages(spark)
        self.spark = spark
        self._warn = warn
        self.kafka = KafkaTopics()
        self.warehouse = warehouse
        # A version that is being made is no copy.
        if into is None and was_copied(warehouse):
            forget_broken(spark, warehouse)
        # These are some ten small tables.
        with interpreted_if(spark, small=True):
            version = self._open(streams) if into is None else self._made(into)
            self._ask_registry()
        self.rewriting_windows = threading.Lock()
        """Lock for replacing parts of windows, by the job or by upkeep beside it. Appending needs no lock."""
        self._is_seen = into is None
        self._version = version.number
        self.streams = version.streams
        self._window_s = version.streams.windows.sizes[0]
        self._times = version.streams.times
        self._deletions = read_deletions(spark, warehouse)
        self.horizons = read_horizons(spark, warehouse)
        self.tables = folder_of(warehouse, version.number)
        if into is None:
            expect_one_moment(spark, warehouse, version.number)
            note_place(warehouse)
        self._load()
        self._saved_s = time.monotonic()
        self._saving_s = 0.0
        self._of_senders: set[str] = set()
        """Topics that were warned of, because their records have the time of their sender."""
        self._last_rows = 0

    def _load(self) -> None:
        """Read the state from the tables, and finish the last batch if it was left unfinished."""
        spark = self.spark
        # Until the last batch is finished, `save` must not say that it is.
        self._in_batch = True
        self._log = Log(spark, self.tables)
        self._amendments = AppendTable(spark, amendments_path(self.tables), amendments_schema())
        self._told = AppendTable(spark, corrections_path(self.tables), corrections_schema())
        self._parts = AppendTable(spark, windows_path(self.tables), windows_schema())
        self._changes = AppendTable(spark, changes_path(self.warehouse), changes_schema())
        self._losses = AppendTable(spark, losses_path(self.tables), losses_schema())
        self._devices = AppendTable(spark, device_parts_path(self.tables), device_parts_schema())
        last = self._log.last
        with interpreted_if(spark, small=is_small(spark, log_path(self.tables))):
            self._load_state()
            if self._is_seen and self._version > 1:
                self._tell_of_replay(self._version, last)
            # Only a program of an earlier release left more than the last batch out.
            for ordinal in range(self._devices.last(ORDINAL) + 1, last):
                devices = DevicesAppend(self._devices, ordinal)
                devices.write(committed_rows(spark, self.tables, ordinal))
                devices.commit()
            # Both go as far as a batch only after all other tables do.
            if last > min(self.state.saved, self._devices.last(ORDINAL)):
                self._finish_guarded(last)
        self.state.begin_at(last + 1)
        self._in_batch = False

    def _load_state(self) -> None:
        self.state = JobState(self.spark, self._log, self.tables, self.kafka)
        self._corrections = known_corrections(self.spark, self.tables)

    def take(
        self,
        records: DataFrame,
        batch: BatchId,
        topic_ids: Mapping[str, str],
        before_commit: Callable[[], None] = lambda: None,
    ) -> BatchCounts:
        """Take one batch of Spark's Kafka source with `includeHeaders`. To take it a second time changes nothing.

        `before_commit` runs when all was read, for example to check `topic_ids` again. If it raises, `log` does not
        change. Raises CheckpointError if a batch comes again with other records.
        """
        if self._last_rows <= SMALL_ROWS_MAX:
            records = records.coalesce(self.spark.sparkContext.defaultParallelism)
        if time.monotonic() - self._asked_s > REGISTRY_S:
            self._ask_registry()
        return self.take_records(with_topic_ids(records, topic_ids), batch, before_commit)

    def take_records(
        self, records: DataFrame, batch: BatchId | BatchIds, before_commit: Callable[[], None] = lambda: None
    ) -> BatchCounts:
        """Take a batch of records with `topic_id`, from Spark's Kafka source or from `typed_records`.

        If single records make the batch fail, they are set aside: they become rejects in the same commit.
        """
        last = self._log.last
        try:
            return self._taken(records, batch, before_commit)
        except RECORD_FAULTS as error:
            if not may_be_a_records(error):
                raise
            if self._log.last > last:
                # The batch is in `log`, and the derived tables failed.
                self._load()
                if not isinstance(batch, BatchId):
                    raise
                return self._taken(records, batch, before_commit)
            culprits = self._culprits(records, lambda job, part: job._taken(part, BatchId(TRIAL, job.next_ordinal)))  # noqa: SLF001
            if not culprits:
                raise
            typed = records if "header_fault" in records.columns else typed_records(records)
            return self._take_without(culprits, typed, batch, before_commit, error)

    def _take_without(
        self,
        culprits: Sequence[Culprit],
        typed: DataFrame,
        batch: BatchId | BatchIds,
        before_commit: Callable[[], None],
        error: Exception,
    ) -> BatchCounts:
        for aside in (as_rejects, as_bytes):
            self._load()
            with suppress(*RECORD_FAULTS):
                counts = self._taken(aside(typed, culprits), batch, before_commit)
                for culprit in culprits:
                    self._warn(culprit.words())
                return counts
        raise error

    def _culprits(self, records: DataFrame, take: Callable[["BatchJob", DataFrame], object]) -> list[Culprit]:
        """Find the records that make a batch fail, in a trial warehouse. Returns none if no record is at fault."""
        trial: BatchJob | None = None
        path = f"{self.warehouse.rstrip('/')}/{TRIAL}"

        def attempt(which: Column) -> Exception | None:
            nonlocal trial
            if trial is None:
                # A process that was killed may have left the folder.
                remove_folder(self.spark, path)
                trial = BatchJob(self.spark, path, self.streams)
                trial.owners = self.owners
            before = trial.next_ordinal
            try:
                take(trial, records.where(which))
            except RECORD_FAULTS as error:
                if trial.next_ordinal > before:
                    # The batch was committed, and could not be finished.
                    trial = None
                else:
                    trial._load()  # noqa: SLF001
                return error
            return None

        try:
            return find_culprits(records, attempt)
        finally:
            remove_folder(self.spark, path)

    def judged(self, typed: DataFrame) -> DataFrame:
        """Read typed records' values. Registry, declarations, retention and deletions decide on rejects."""
        return through_rules(typed, READ_SCHEMA, judging(self._verdicts()))

    def _verdicts(self) -> Verdicts:
        return Verdicts(self.streams, self.owners, self._deletions)

    def _ask_registry(self) -> None:
        registered = registered_gateways(self.spark, self.warehouse)
        self.owners = owners_of(registered)
        self._registry = {(each.namespace, each.gateway): (each.site, each.retired_us) for each in registered}
        self._asked_s = time.monotonic()

    def take_judged(self, records: DataFrame, batch: BatchId) -> BatchCounts:
        """Take a batch of the rows of `judged`, with `topic_id`."""
        return self._taken(records, batch, are_judged=True)

    def _taken(
        self,
        records: DataFrame,
        batch: BatchId | BatchIds,
        before_commit: Callable[[], None] = lambda: None,
        *,
        are_judged: bool = False,
    ) -> BatchCounts:
        # A batch's size is known only afterwards. Most likely it is that of the last batch.
        self._in_batch = True
        with interpreted_if(records.sparkSession, self.spark, small=self._last_rows <= INTERPRETED_ROWS_MAX):
            counts = self._take(records, batch, before_commit, are_judged=are_judged)
        self._in_batch = False
        self._last_rows = counts.rows
        if time.monotonic() - self._saved_s > max(STATE_S, self._saving_s / STATE_SHARE):
            self.save()
        return counts

    def _take(
        self,
        records: DataFrame,
        batch: BatchId | BatchIds,
        before_commit: Callable[[], None],
        *,
        are_judged: bool,
    ) -> BatchCounts:
        begun = time.monotonic()
        done = self._log.ordinal_of(batch) if isinstance(batch, BatchId) else None
        if done is not None and isinstance(batch, BatchId):
            expect_same(self._log, batch, done, records)
            rows = committed_rows(self.spark, self.tables, done)
            added = self._windows_of(done).parts_of(rows, self._corrections)
            return self._counts(rows, take_census(rows), late_in(added), begun)
        append = LogAppend(self._log, batch)
        windows = self._windows_of(append.ordinal)
        rules = windows.rules(self._corrections)
        seen = self.state.seen()
        over_batch = BatchPass(self.tables, append.ordinal, self._verdicts(), rules, self._changes_plan(), seen)
        made = over_batch.over(records, batch, are_judged=are_judged)
        rows = append.take(made.log, made.aside)
        windows.take(made)
        devices = DevicesAppend(self._devices, append.ordinal)
        devices.take(made.device_parts)
        census = census_of(made.counts)
        events = events_of(rows, census)
        if faults := faults_in(events):
            # This is rare. All rows are written again.
            rows = append.rewrite(with_faults(rows, faults))
            census = take_census(rows)
            events = events_of(rows, census)
        with self._copies(append.parted(), census, events, devices) as copies:
            if copies is not None or made.aside:
                rows = self._tell_apart(rows, copies, append, windows, made.set_aside)
            before_commit()
            append.commit(self._so_far())
            found = NONE_FOUND if copies is None else copies.counts
            self._derive(rows, census, copies, windows)
            devices.commit()
        self._warn_of_times(made.of_senders)
        # If no earlier row was amended and no time was corrected, the census and the verdicts are complete.
        known = None if found.amended or self._corrections.told_us else found
        # The batch's windows were written before its own corrections were known.
        late = late_in(windows.parts_of(rows, self._corrections)) if census.corrections else windows.late()
        return self._counts(rows, census, late, begun, known)

    def _tell_apart(
        self, rows: DataFrame, copies: Copies | None, append: LogAppend, windows: "WindowsAppend", set_aside: int
    ) -> DataFrame:
        """Write a batch's rows with their verdicts, and return them.

        Nearly always, only rows that were set aside get another verdict than they were written with.
        """
        if copies is not None and copies.counts.otherwise == 0 and copies.counts.aside == set_aside:
            # All other files stay as the pass has made them.
            _, aside = append.parted()
            if aside is None:
                return rows
            with interpreted_if(self.spark, small=set_aside <= INTERPRETED_ROWS_MAX):
                rows = append.rewrite_aside(with_verdicts(aside, copies.of_batch()))
                _, aside = append.parted()
                if copies.counts.counting and aside is not None:
                    windows.write_also(aside, self._corrections)
            return rows
        if copies is not None:
            rows = with_verdicts(rows, copies.of_batch())
        with ThreadPoolExecutor(1) as beside:
            writing = beside.submit(windows.write, rows, self._corrections)
            rows = append.rewrite(rows)
            writing.result()
        return rows

    def _warn_of_times(self, topics: set[str]) -> None:
        for topic in sorted(topics - self._of_senders):
            self._warn(
                f"records of {topic} have the time of their sender, not Kafka's, so nobody can tell which came late: "
                "set message.timestamp.type=LogAppendTime on the topic"
            )
        self._of_senders |= topics

    @property
    def next_ordinal(self) -> int:
        """Ordinal of the next batch."""
        return self._log.last + 1

    def gateways(self) -> list[GatewayNow]:
        """Return how each gateway is, those that need somebody first. Not while a batch is taken."""
        return gateways_now(self.state.gateways, self._registry)

    def save(self) -> None:
        """Write the state to its tables, which makes the next start quicker. Do nothing within an unfinished batch."""
        if self._in_batch or self._log.last == self.state.saved:
            return
        begun = time.monotonic()
        self.state.save(self._log.last, self._so_far())
        self._saved_s = time.monotonic()
        self._saving_s = self._saved_s - begun

    def _so_far(self) -> dict[str, int]:
        """How far each rarely written table has come. In a copy, this shows which table is of another moment."""
        tables = {table.path: table for table in (self._amendments, self._told, self._losses, self._parts)}
        numbers = {
            name: tables[kept.path_in(self.tables)].last(kept.application) for name, kept in NOW_AND_THEN.items()
        }
        for name, cause in RETOLD.items():
            numbers[name] = self._changes.last(f"{of_version(self._version)}{cause}")
        start = self.state.start
        return numbers if start is None else numbers | {STARTS: start.number}

    def _finish_guarded(self, ordinal: int) -> None:
        """Finish a batch. If single records make that fail, turn them into rejects."""
        try:
            self._finish(ordinal)
        except RECORD_FAULTS as error:
            if not may_be_a_records(error):
                raise
            rows = committed_rows(self.spark, self.tables, ordinal)
            culprits = self._culprits(
                rows.drop("ingest", "batch", "ordinal"),
                lambda job, part: job.take_judged(part, BatchId(TRIAL, job.next_ordinal)),
            )
            if not culprits:
                raise
            aside = rows.where(is_culprit(culprits)).withColumn("reject_reason", reason_of(culprits))
            amend_set_aside(self.tables, aside.withColumn("metrics", F.lit(None).cast(METRICS_TYPE)))
            self._load_state()
            self._finish(ordinal)
            for culprit in culprits:
                self._warn(culprit.words())

    def _finish(self, ordinal: int) -> None:
        """Derive the tables that a run may have left out when it died."""
        rows = committed_rows(self.spark, self.tables, ordinal)
        windows = self._windows_of(ordinal)
        windows.write(rows, self._corrections)
        devices = DevicesAppend(self._devices, ordinal)
        census = devices.write(rows)
        with self._copies((rows, None), census, events_of(rows, census), devices) as copies:
            self._derive(rows, census, copies, windows)
            devices.commit()

    def _tell_of_replay(self, version: int, last: int) -> None:
        """Tell `window_changes` of a replay that published its version and died before it told."""
        before = folder_of(self.warehouse, version - 1)
        if not is_replay_told(self._changes, version) and folder_exists(self.spark, before):
            is_told = is_all_told(self.spark, self.warehouse, version - 1)
            append_replayed(self._changes, before if is_told else None, self.tables, version, last)

    def _derive(self, rows: DataFrame, census: Census, copies: "Copies | None", windows: "WindowsAppend") -> None:
        """Bring all derived tables up to `log`, but `device_parts`, which comes last.

        Whoever reads a device's numbers must find their readings in the windows.
        """
        spark, ordinal = self.spark, windows.ordinal
        amended = None if copies is None else copies.of_earlier_batches()
        if amended is not None:
            append_amendments(self._amendments, amended, ordinal)
        if census.losses:
            append_losses(self._losses, rows, ordinal)
        windows.commit()
        if self._is_seen:
            windows.tell(self._changes, self._version)
        # Only now: if a later start finishes this batch, it must use the corrections by which the windows were made.
        moved: BatchCorrections | None = None
        if census.corrections:
            moved = take_corrections(self._told, rows, ordinal)
            self._corrections = moved.known
        if amended is not None:
            # Windows where these rows counted before, and windows where they count now.
            as_readings = amended.withColumns({"duplicate": F.lit(False), "reject_reason": F.lit(None).cast("string")})
            self._compute_anew(
                windowed(readings(as_readings, self._corrections.current, self._times), self._window_s), ordinal, COPY
            )
        if moved is not None and moved.brought_boots:
            counting = effective_log(spark, self.tables).where(is_reading())
            if amended is not None:
                # A row that was replaced just now may stand in a window that was made before these corrections.
                counting = counting.unionByName(as_readings.where(is_reading()))
            earlier = readings_moved(counting, moved, self._times)
            self._compute_anew(windowed(metrics_of(earlier), self._window_s), ordinal, CORRECTION)
        is_anew = amended is not None or (moved is not None and moved.brought_boots)
        if is_anew and self._parts.last(ANEW) < ordinal:
            # A commit of its own: Spark's writer has replaced the windows, and cannot record the number.
            self._parts.begin().commit({ANEW: ordinal})

    def _compute_anew(self, touched: DataFrame, ordinal: int, cause: str) -> None:
        """Compute the windows of `touched`, and a few around them, from all of their readings."""
        area = area_of(still_open(touched, self.horizons.closed_before), self._window_s)
        if area is None:
            return
        with self.rewriting_windows:
            self._compute_area(area, ordinal, cause)

    def _compute_area(self, area: Area, ordinal: int, cause: str) -> None:
        from_us = area.spans[0].start_us
        log = effective_log(self.spark, self.tables).where(near(area.spans) | self._corrections.may_move_to(from_us))
        anew = windowed(readings(log, self._corrections.current, self._times), self._window_s)
        fresh = parts(anew.where(area.holds_reading()), ordinal, self._window_s).persist()
        try:
            if self._is_seen:
                before = folded(read_parts(self.spark, self.tables).where(area.holds()))
                append_changes(self._changes, differences(before, fresh), self._version, ordinal, cause)
            replace_area(self.tables, area, fresh)
        finally:
            fresh.unpersist()

    @contextmanager
    def _copies(
        self,
        rows: tuple[DataFrame, DataFrame | None],
        census: Census,
        events: Iterable[GatewayEvent],
        devices: DevicesAppend,
    ) -> "Iterator[Copies | None]":
        """Record the census. If a record came before, or twice in the batch, yield the copies.

        `rows` are from `LogAppend.parted`.
        """
        ordinal = devices.ordinal
        suspects = self.state.add_batch(census, events, ordinal).and_also(devices.came_again(census.counted))
        if not suspects:
            yield None
            return
        earlier = effective_log(self.spark, self.tables, before=ordinal)
        # The conditions have the batch's numbers in them. So Spark would make code of its own for each batch.
        with interpreted_if(self.spark, small=suspects.count() <= INTERPRETED_ROWS_MAX):
            copies = Copies(*rows, earlier, suspects, conflicts_kept(self.streams), ordinal)
        try:
            yield copies
        finally:
            copies.close()

    def _counts(
        self, rows: DataFrame, census: Census, late: "Late", begun: float, found: ToldApart | None = None
    ) -> BatchCounts:
        """Figures of a batch. `found` completes the census. Without it the rows are counted again."""
        if found is not None:
            figures = (found.duplicates, census.rejected + found.conflicts, census.unwindowed - found.unwindowed)
        else:
            row = _first(
                retimed(rows, self._corrections.current, self._times).agg(
                    F.count_if("duplicate").alias("duplicates"),
                    F.count_if(F.col("reject_reason").isNotNull() & ~was_deleted()).alias("rejected"),
                    F.count_if(is_reading() & unwindowed()).alias("unwindowed"),
                )
            )
            figures = (row.duplicates, row.rejected, row.unwindowed)
        return BatchCounts(
            rows=census.rows,
            duplicates=figures[0],
            rejected=figures[1],
            late=late.values,
            revised=late.windows,
            unwindowed=figures[2],
            deleted=census.deleted,
            corrections=census.corrections,
            seconds=time.monotonic() - begun,
            newest_us=dict(census.newest_us),
            undeclared=dict(census.undeclared),
        )

    def _changes_plan(self) -> ChangesPlan | None:
        if not self._is_seen:
            return None
        folder = table_folder(self._changes.path, CHANGES_PARTITION, SKIPPING_COLUMNS)
        return ChangesPlan(folder, (*KEY, *FIGURES, "ordinal"), READINGS, self._version, time.time_ns() // 1_000)

    def _windows_of(self, ordinal: int) -> "WindowsAppend":
        return WindowsAppend(self._parts, ordinal, self.streams, self.horizons.closed_before)

    def _open(self, streams: Streams | None) -> Version:
        """Make missing tables. Returns the version that is written."""
        before = current_version(self.spark, self.warehouse)
        version = before or Version(1)
        if streams is not None:
            version = replace(version, streams=streams)
        self._made(version)
        if version != before:
            # Keep the rest of the row: a registry may have been loaded meanwhile.
            change_version(self.spark, self.warehouse, lambda now: replace(now or version, streams=version.streams))
        return version

    def _made(self, version: Version) -> Version:
        """Make the missing tables of a version. Raises WindowLengthError."""
        tables = folder_of(self.warehouse, version.number)
        # First: if the window length is refused, nothing is made.
        create_windows(self.spark, tables, version.streams.windows.sizes[0])
        create_log(self.spark, tables)
        create_amendments(self.spark, tables)
        create_corrections(self.spark, tables)
        create_changes(self.spark, self.warehouse)
        create_losses(self.spark, tables)
        create_device_parts(self.spark, tables)
        take_over_devices(self.spark, tables)
        return version


class WindowsAppend:
    """One batch's parts of windows, on their way into the table."""

    def __init__(
        self, table: AppendTable, ordinal: int, streams: Streams, closed_before: datetime | None = None
    ) -> None:
        self.ordinal = ordinal
        self._table = table
        self._append = table.begin()
        self._window_s = streams.windows.sizes[0]
        self._times = streams.times
        self._closed_before = closed_before
        self._made: MadeFiles | None = None
        """Files with one row for each window; None if there are others."""
        self._is_split = False
        self._taken = 0

    def rules(self, corrections: Corrections) -> WindowRules:
        """All that a pass needs to make the parts."""
        open_from_us = None if self._closed_before is None else microseconds(self._closed_before)
        return WindowRules(self._window_s, self._times, corrections.clocks, open_from_us)

    def take(self, made: MadeFiles) -> None:
        """Take the parts that a pass made."""
        self._append.take(made.parts)
        self._taken = len(made.parts)
        self._is_split = made.is_split
        self._made = None if made.is_split else made

    def write(self, rows: DataFrame, corrections: Corrections) -> None:
        """Write the parts of a batch's rows of `log`."""
        self._append.write(self.parts_of(rows, corrections))
        self._is_split = False
        self._made = None

    def write_also(self, rows: DataFrame, corrections: Corrections) -> None:
        """Write parts of more rows of `log`, beside those that a pass made."""
        self._append.write(self.parts_of(rows, corrections), beside=self._taken)
        self._is_split = True
        self._made = None

    def parts_of(self, rows: DataFrame, corrections: Corrections) -> DataFrame:
        """The parts of windows that a batch's rows of `log` make."""
        of_windows = windowed(readings(rows, corrections.current, self._times), self._window_s)
        counting = still_open(of_windows, self._closed_before)
        return parts(counting, self.ordinal, self._window_s)

    def rows(self) -> DataFrame:
        """The parts, one row for each window."""
        return folded(self._append.rows()) if self._is_split else self._append.rows()

    def late(self) -> "Late":
        """The late values in the parts."""
        return late_in(self.rows()) if self._made is None else Late(self._made.late, self._made.revised)

    def tell(self, changes: AppendTable, version: int) -> None:
        """Append the parts to `window_changes`, unless an earlier attempt has."""
        if self._made is None:
            append_changes(changes, self.rows().select(*KEY, *FIGURES), version, self.ordinal, READINGS)
        else:
            append_made(changes, self._made.changes, version, self.ordinal)

    def commit(self) -> None:
        """Commit the parts, unless an earlier attempt has committed them."""
        if self._table.last(ORDINAL) < self.ordinal:
            self._append.commit({ORDINAL: self.ordinal})


class Late(NamedTuple):
    """Late values of a batch."""

    values: int
    windows: int
    """Windows with late values."""


def late_in(windows: DataFrame) -> Late:
    """Count the late values in a row for each window."""
    late = F.col("late")
    return Late(*_first(windows.agg(F.coalesce(F.sum(late), F.lit(0)), F.count_if(late > 0))))


def _first(frame: DataFrame) -> Row:
    return frame.collect()[0]


def metrics_of(moved: DataFrame) -> DataFrame:
    """One row for each value of the readings in `moved`, at the value's own time."""
    others = [name for name in moved.columns if name not in {"metrics", "value", "event_time"}]
    each = moved.select(*others, "event_time", F.inline("metrics")).withColumnRenamed("name", "metric")
    return each.withColumn("event_time", taken_at("event_time"))
