"""DuckDB reads files through deltalake: by several threads at once, and only the parts that a query needs."""

from pathlib import Path

import duckdb
import pytest
from deltalake import convert_to_deltalake

from spark.desk.delta_source import Source
from spark.desk.remote_files import RemoteFile

ROWS = 500_000


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A table with one file of several row groups, sorted by device, as one that is not on this machine."""
    rows = f"SELECT range // 1000 AS device, random() AS value, md5(range::VARCHAR) AS text FROM range({ROWS})"
    with duckdb.connect() as db:
        db.execute(f"COPY ({rows}) TO '{tmp_path}/part-0.parquet' (ROW_GROUP_SIZE 32768)")
    convert_to_deltalake(tmp_path.as_uri())
    return tmp_path.as_uri()


def test_threads_do_not_disturb_one_another(url: str) -> None:
    source = Source()
    source.db.execute("SET threads = 4")
    wanted = source.rows(f"SELECT sum(hash(device, value, text)) FROM '{url}/*.parquet'")
    assert source.rows(f"SELECT sum(hash(device, value, text)) FROM ({source.table(url)})") == wanted


def test_only_what_is_needed_is_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    read = RemoteFile.read

    def counted(file: RemoteFile, size: int) -> bytes:
        found = read(file, size)
        fetched.append(len(found))
        return found

    monkeypatch.setattr(RemoteFile, "read", counted)
    source = Source()
    assert source.rows(f"SELECT count(*), max(value) < 1 FROM ({source.table(url)}) WHERE device = 77") == [
        (1000, True)
    ]
    (whole,) = (path.stat().st_size for path in Path(url.removeprefix("file://")).glob("*.parquet"))
    assert sum(fetched) < whole / 20
