"""The pass over one partition: its records are read and judged once, and all files are made. Executors import this."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark.arrow_pass.decimal_columns import Numbers
from spark.arrow_pass.groups import Rows
from spark.arrow_pass.log_rows import log_table, rows_of_records, rows_of_usual
from spark.arrow_pass.parquet_files import file_of, files_of
from spark.arrow_pass.pieces import pieces
from spark.arrow_pass.plan import BatchNumbers, ChangesPlan, TableFolder, WindowRules
from spark.arrow_pass.resends import Resends
from spark.arrow_pass.row_counts import counted
from spark.arrow_pass.usual_parts import UsualParts
from spark.arrow_pass.usual_rows import Usual, UsualReader
from spark.arrow_pass.window_parts import Parts, changes_table, devices_of, parts_table
from spark.decode.record_columns import is_source, records_of
from spark.decode.record_frames import Rule
from spark.decode.record_rules import Record
from spark.engine.made_file import MadeFile
from spark.log.lane_sequences import Lane, LowNumbers
from spark.log.record_verdicts import Verdicts

CREATE_TIME = 0
"""Kafka's number for a time that the sender gave."""
CARRIED = ("topic_id", "ingest", "batch")
"""Columns that records bring from elsewhere."""


@dataclass(slots=True)
class Made:
    """The files of a partition, and its figures."""

    log: list[MadeFile] = field(default_factory=list)
    aside: list[MadeFile] = field(default_factory=list)
    """Rows of `log` whose numbers came before. They are in no part, and wait for a verdict."""
    parts: list[MadeFile] = field(default_factory=list)
    changes: list[MadeFile] = field(default_factory=list)
    device_parts: list[MadeFile] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    """Numbers from `devices_of`, of the devices with parts. If one stands there twice, so may a window."""
    counts: list[str] = field(default_factory=list)
    """The figures of the rows of `log`, as `row_counts` has them."""
    late: int = 0
    """Values that came late."""
    revised: int = 0
    """Parts with such values."""
    set_aside: int = 0
    """Rows in `aside`."""
    of_senders: set[str] = field(default_factory=set)
    """Topics whose records have the time of their sender, not Kafka's."""


@dataclass(frozen=True, slots=True)
class PartitionPass:
    """The pass over the partitions of one batch."""

    log: TableFolder
    parts: TableFolder
    device_parts: TableFolder
    numbers: BatchNumbers
    verdicts: Verdicts
    windows: WindowRules
    changes: ChangesPlan | None = None
    """None if nothing is written to `window_changes`."""
    seen: Mapping[Lane, LowNumbers] = field(default_factory=dict)
    """Numbers that came in earlier batches."""

    def over(self, batches: Iterable[pa.RecordBatch], rules: Sequence[Rule]) -> Made:
        """Read the records of a partition, and make the files.

        Usual readings are read by columns. To all others the rules are applied, one after the other.
        """
        made, others, usual = Made(), Parts(self.windows), UsualParts(self.windows)
        reader, resends = UsualReader(self.verdicts, self.windows.clocks), Resends(self.seen)
        of_devices: list[pa.Table] = []
        for piece in pieces(batches):
            table = pa.Table.from_batches(piece).combine_chunks()
            found: list[Usual] = []
            if is_source(table):
                found = reader.read(table)
                by_sender = table["topic"].filter(pc.equal(table["timestampType"], CREATE_TIME))
                made.of_senders.update(pc.unique(by_sender).to_pylist())
            places, records = _records_beside(table, found, rules)
            rows, days = self._log_rows(table, found, places, records)
            is_aside = resends.among(rows)
            for each in found:
                usual.add(each, ~is_aside[each.rows])
            for place, record in zip(places.tolist(), records, strict=True):
                if not is_aside[place]:
                    others.add(record)
            counts, devices = counted(rows, days, self.numbers.ordinal)
            made.counts.append(counts)
            of_devices.append(devices)
            if is_aside.any():
                made.set_aside += int(is_aside.sum())
                made.aside += files_of(self.log, rows.filter(pa.array(is_aside)), days[is_aside])
                rows, days = rows.filter(pa.array(~is_aside)), days[~is_aside]
            made.log += files_of(self.log, rows, days)
        if any(map(len, of_devices)):
            made.device_parts.append(file_of(self.device_parts, pa.concat_tables(of_devices)))
        self._make_parts(made, others, usual)
        return made

    def _make_parts(self, made: Made, others: Parts, usual: UsualParts) -> None:
        of_parts = [parts_table(others.parts, self.numbers.ordinal)] if others.parts else []
        of_usual = usual.table(self.numbers.ordinal)
        if of_usual is not None:
            of_parts.append(of_usual)
        if of_parts:
            made.devices = [device for rows, _ in of_parts for device in devices_of(rows)]
            together = pa.concat_tables([rows for rows, _ in of_parts])
            late = together["late"].to_numpy()
            made.late, made.revised = int(late.sum()), int(np.count_nonzero(late))
            made.parts += files_of(self.parts, together, np.concatenate([days for _, days in of_parts]))
            if self.changes is not None:
                made.changes += files_of(self.changes.folder, *changes_table(together, self.changes))

    def _log_rows(
        self, table: pa.Table, found: Sequence[Usual], places: Rows, records: Sequence[Record]
    ) -> tuple[pa.Table, Numbers]:
        """The rows of `log` of a piece, in the order of the records. `records` stand at `places`."""
        times = self.verdicts.streams.times
        each = [(usual.rows, *rows_of_usual(usual, times)) for usual in found]
        if records:
            each.append((places, *rows_of_records(records, times)))
        there = [name for name in CARRIED if name in table.schema.names]
        tables = [
            log_table(columns, {name: table[name].take(pa.array(rows)) for name in there}, self.numbers)
            for rows, columns, _ in each
        ]
        days = np.concatenate([of_rows for _, _, of_rows in each])
        if len(tables) == 1:
            return tables[0], days
        order = np.argsort(np.concatenate([rows for rows, _, _ in each]))
        return pa.concat_tables(tables).take(pa.array(order)), days[order]


def _records_beside(table: pa.Table, usual: Sequence[Usual], rules: Sequence[Rule]) -> tuple[Rows, list[Record]]:
    """Read the records that are not usual, and apply the rules to them. Returns their places, too."""
    is_left = np.ones(len(table), dtype=np.bool_)
    for each in usual:
        is_left[each.rows] = False
    places = np.flatnonzero(is_left)
    if not len(places):
        return places, []
    records = list(records_of(table.take(pa.array(places)).combine_chunks().to_batches()[0]))
    for record in records:
        for rule in rules:
            rule(record)
    return places, records
