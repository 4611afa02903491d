"""Makes the Parquet files of a Delta table, with the statistics by which Delta skips files.

Executors import this module. They write files of a local folder themselves. On any other file system the driver writes
them, for there only Hadoop's client has the settings.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark.arrow_pass.decimal_columns import Numbers
from spark.arrow_pass.groups import begins_of
from spark.arrow_pass.plan import TableFolder
from spark.decode.record_times import microseconds
from spark.engine.made_file import MadeFile
from spark.log.record_verdicts import date_text

TEXT_CHARS_MAX = 32
"""Characters of a text in statistics. Delta cuts longer ones too."""
_LAST_CHARACTER = "\U0010ffff"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_US, _LAST_US = (
    microseconds(moment) for moment in (datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC))
)


def files_of(folder: TableFolder, rows: pa.Table, days: Numbers) -> Iterator[MadeFile]:
    """Make a file for each date. `days` has the date of each row, in days since 1970."""
    if (days[1:] < days[:-1]).any():
        order = np.argsort(days, kind="stable")
        rows, days = rows.take(pa.array(order)), days[order]
    begins = begins_of(days).tolist()
    for begin, end in pairwise([*begins, len(days)]):
        day, count = int(days[begin]), end - begin
        # As Delta's own writer does. Readers that know Parquet alone, as DuckDB, find the date in the file.
        date = pa.repeat(pa.scalar(day, pa.int32()), count).cast(pa.date32())
        of_day = rows.slice(begin, count).append_column(folder.partition, date)
        yield file_of(folder, of_day, {folder.partition: date_text(day)})


def file_of(folder: TableFolder, rows: pa.Table, partition: Mapping[str, str] | None = None) -> MadeFile:
    """Make one file. `partition` has the values of the columns by which the table is partitioned."""
    values = dict(partition or {})
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "store_decimal_as_integer": True, "store_schema": False}
    pq.write_table(rows, sink, row_group_size=len(rows), **options)
    content = sink.getvalue()
    name = "/".join([*(f"{column}={value}" for column, value in values.items()), f"part-{uuid.uuid4()}.zstd.parquet"])
    if folder.path is not None:
        path = Path(folder.path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    action = {
        "path": name,
        "partitionValues": values,
        "size": content.size,
        "modificationTime": round(time.time() * 1_000),
        "dataChange": True,
        "stats": json.dumps(statistics_of(rows, folder.statistics), ensure_ascii=False),
    }
    return MadeFile(json.dumps({"add": action}), name, None if folder.path is not None else content.to_pybytes())


def statistics_of(rows: pa.Table, columns: Iterable[str]) -> dict[str, object]:
    """Return the statistics of a file, as Delta's log has them."""
    least: dict[str, object] = {}
    greatest: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for name in columns:
        column = rows[name]
        nulls[name] = column.null_count
        ends = pc.min_max(column)
        first, last = _told(ends["min"], is_last=False), _told(ends["max"], is_last=True)
        if first is not None and last is not None:
            least[name], greatest[name] = first, last
    return {"numRecords": len(rows), "minValues": least, "maxValues": greatest, "nullCount": nulls}


def _told(value: pa.Scalar, *, is_last: bool) -> Any:
    """A bound as Delta's statistics have it; None if it cannot be told."""
    if not value.is_valid:
        return None
    if pa.types.is_timestamp(value.type):
        return _time_told(value.value, is_last=is_last)
    told = value.as_py()
    if isinstance(told, str) and len(told) > TEXT_CHARS_MAX:
        if not is_last:
            return told[:TEXT_CHARS_MAX]
        # No text up to `told` is greater than this, unless `told` itself has the last of all characters there.
        return None if told[TEXT_CHARS_MAX] == _LAST_CHARACTER else told[:TEXT_CHARS_MAX] + _LAST_CHARACTER
    return told


def _time_told(us: int, *, is_last: bool) -> str | None:
    """A time in whole milliseconds. Not each reader could read other years."""
    if not _FIRST_US <= us <= _LAST_US:
        return None
    ms = -(-us // 1_000) if is_last else us // 1_000
    return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
