"""Delta tables as DuckDB reads them: every row of now, and no file that cannot hold an answer."""

from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable, Field, write_deltalake

from spark.desk import delta_source
from spark.desk.delta_source import NoTableError, Source


def append(path: Path, rows: str) -> None:
    """Append rows to a table, as one file."""
    with duckdb.connect() as db:
        write_deltalake(path.as_uri(), db.sql(f"SELECT * FROM (VALUES {rows}) AS t(device, n)"), mode="append")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two files, of one device each."""
    path = tmp_path / "table"
    append(path, "('board-1', 1), ('board-1', 2)")
    append(path, "('wifi-7', 3)")
    return path


def test_a_question_sees_a_table_as_it_is_when_it_first_names_it(table: Path) -> None:
    source = Source()
    asked = [source.table(str(table))]
    append(table, "('wifi-7', 4)")
    asked.append(source.table(str(table)))
    source.renew()
    asked.append(source.table(str(table)))
    assert [len(source.rows(query)) for query in asked] == [3, 3, 4]


def test_rows_made_for_former_questions_are_given_up_but_not_those_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_source, "VALUES_KEPT", 10)
    source = Source()

    def answered() -> list[bool]:
        made.extend(source.values({"n": "BIGINT"}, [(1,), (2,), (3,)]) for _ in range(4))
        counted = source.rows("SELECT table_name FROM duckdb_tables()")
        return [any(query.endswith(name) for (name,) in counted) for query in made]

    made: list[str] = []
    assert answered() == [True] * 4
    source.renew()
    assert answered() == [False] * 2 + [True] * 6


def test_a_column_that_came_later_is_null_in_older_files(table: Path) -> None:
    DeltaTable(table).alter.add_columns(Field("doubt", "string"))  # type: ignore[arg-type]
    source = Source()
    assert source.rows(f"SELECT DISTINCT doubt FROM ({source.table(str(table))})") == [(None,)]
    also = source.table(str(table), {"counter": "VARCHAR"})
    assert source.rows(f"SELECT n, doubt, counter FROM ({also}) WHERE n = 3") == [(3, None, None)]


def test_a_file_that_cannot_hold_an_answer_is_not_opened(table: Path) -> None:
    source = Source()
    (excluded,) = [
        path for path in DeltaTable(table).file_uris() if "wifi-7" in Path(path).read_bytes().decode("latin1")
    ]
    Path(excluded).unlink()
    chosen = source.table(str(table), files="\"min.device\" <= 'board-1' AND \"max.device\" >= 'board-1'")
    assert sorted(source.rows(f"SELECT n FROM ({chosen})")) == [(1,), (2,)]
    none = source.table(str(table), files='"min.n" > 9')
    assert source.rows(f"SELECT n FROM ({none})") == []


def test_without_a_statistic_every_file_is_read(table: Path) -> None:
    source = Source()
    chosen = source.table(str(table), files="\"min.site\" = 'north'")
    assert len(source.rows(f"SELECT n FROM ({chosen})")) == 3
    assert source.statistics(str(table), 'max("max.n")') == 3
    assert source.statistics(str(table), 'max("max.site")') is None


def test_a_table_that_need_not_be_there_has_columns_without_rows(tmp_path: Path) -> None:
    source = Source()
    nothing = source.optional(str(tmp_path / "none"), {"device": "VARCHAR", "at": "TIMESTAMP"})
    relation = source.db.sql(nothing)
    assert (relation.columns, relation.fetchall()) == (["device", "at"], [])


def test_a_table_that_every_warehouse_has_is_told_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(NoTableError, match="none is not there yet: `sluice-cloud ingest` makes it"):
        Source().table(str(tmp_path / "none"), {"device": "VARCHAR"})


@pytest.mark.parametrize("name", ["it's", "*", "what?", "two words", "site=north"])
def test_no_character_of_a_path_means_anything(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "table"
    append(path, "('board-1', 1)")
    append(tmp_path / "other" / "table", "('board-2', 2)")
    source = Source()
    for files in (None, '"min.n" < 9'):
        assert source.rows(f"SELECT device FROM ({source.table(str(path), files=files)})") == [("board-1",)]


def test_what_a_query_spills_is_for_this_user_alone_and_goes_with_the_tables() -> None:
    source = Source()
    ((spill,),) = source.rows("SELECT current_setting('temp_directory')")
    assert Path(spill).stat().st_mode & 0o777 == 0o700
    del source
    assert not Path(spill).exists()
