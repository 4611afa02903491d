"""Statistics of files hold for every value in them."""

import json
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Field, Schema
from deltalake.schema import PrimitiveType
from hypothesis import given
from hypothesis import strategies as st

from spark.arrow_pass.parquet_files import files_of, statistics_of
from spark.arrow_pass.plan import TableFolder
from spark.decode.record_columns import TIME
from spark.desk.delta_source import Source

TEXTS = st.text(st.sampled_from(["a", "~", "ü", "\U0001f321", "\U0010ffff"]), max_size=40)


@given(st.lists(st.none() | TEXTS, min_size=1), st.lists(st.none() | st.integers(-(2**61), 2**61), min_size=1))
def test_bounds_hold_for_all_values(texts: list[str | None], numbers: list[int | None]) -> None:
    rows = max(len(texts), len(numbers))
    texts += [None] * (rows - len(texts))
    numbers += [None] * (rows - len(numbers))
    table = pa.table({"text": texts, "number": pa.array(numbers, pa.int64())})

    told = statistics_of(table, ("text", "number"))

    least, greatest, nulls = told["minValues"], told["maxValues"], told["nullCount"]
    assert isinstance(least, dict)
    assert isinstance(greatest, dict)
    assert told["numRecords"] == rows
    assert nulls == {"text": texts.count(None), "number": numbers.count(None)}
    if "text" in least:
        assert all(
            least["text"].encode() <= text.encode() <= greatest["text"].encode() for text in texts if text is not None
        )
        assert max(len(least["text"]), len(greatest["text"])) <= 33
    if any(number is not None for number in numbers):
        assert all(least["number"] <= number <= greatest["number"] for number in numbers if number is not None)


def test_times_are_told_in_whole_milliseconds_that_hold() -> None:
    times = pa.array([1_500, -1, 1_000_001], pa.int64()).cast(TIME)
    told = statistics_of(pa.table({"time": times}), ("time",))
    assert told["minValues"] == {"time": "1969-12-31T23:59:59.999Z"}
    assert told["maxValues"] == {"time": "1970-01-01T00:00:01.001Z"}


def test_times_that_not_each_reader_knows_are_left_out() -> None:
    times = pa.array([0, 300_000_000_000_000_000], pa.int64()).cast(TIME)
    told = statistics_of(pa.table({"time": times}), ("time",))
    assert (told["minValues"], told["nullCount"]) == ({}, {"time": 0})


def test_each_date_gets_a_file_that_its_action_describes(tmp_path: Path) -> None:
    rows = pa.table({"n": [1, 2, 3]})
    local = list(files_of(TableFolder(str(tmp_path), "day", ("n",)), rows, np.array([0, 20_000, 0])))
    remote = list(files_of(TableFolder(None, "day", ("n",)), rows, np.array([0, 20_000, 0])))

    for made, content in ((local, False), (remote, True)):
        first, second = made
        assert first.name.startswith("day=1970-01-01/")
        assert second.name.startswith("day=2024-10-04/")
        add = json.loads(first.action)["add"]
        assert (add["path"], add["partitionValues"], add["dataChange"]) == (first.name, {"day": "1970-01-01"}, True)
        assert json.loads(add["stats"])["maxValues"] == {"n": 3}
        source = pa.BufferReader(first.content) if content else tmp_path / first.name
        assert pq.ParquetFile(source).read().to_pydict() == {"n": [1, 3], "day": [date(1970, 1, 1)] * 2}
        assert add["size"] == (len(first.content or b"") if content else (tmp_path / first.name).stat().st_size)


def test_the_desk_finds_the_rows_with_their_dates_and_skips_files(tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    columns = [Field("n", PrimitiveType("long")), Field("at", PrimitiveType("timestamp"))]
    DeltaTable.create(path, Schema([*columns, Field("day", PrimitiveType("date"))]), partition_by=["day"])
    times = pa.array([0, 1_728_000_000_000_000, 1], pa.int64()).cast(TIME)
    rows = pa.table({"n": [1, 2, 3], "at": times})
    made = list(files_of(TableFolder(path, "day", ("n", "at")), rows, np.array([0, 20_000, 0])))
    (tmp_path / "table" / "_delta_log" / f"{1:020}.json").write_text("\n".join(file.action for file in made))

    source = Source()

    days = {1: date(1970, 1, 1), 2: date(2024, 10, 4), 3: date(1970, 1, 1)}
    assert dict(source.rows(f"SELECT n, day FROM ({source.table(path)})")) == days
    later = source.table(path, files=f'epoch_us("max.at") >= {10**15}')
    assert source.rows(f'SELECT n, epoch_us("at") FROM ({later})') == [(2, 1_728_000_000_000_000)]
