"""The judge of statements: all that is carried out reads."""

import pytest

from spark.desk.statements import NotReadingError, QueryError, bare, expect_reading


@pytest.mark.parametrize(
    "query", ["EXPLAIN SELECT 1", " explain analyze\nSELECT 1", "DESCRIBE x", "WITH x AS (FROM y) FROM x"]
)
def test_what_reads_passes(query: str) -> None:
    expect_reading(query)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO 'x.csv'",
        "EXPLAIN (ANALYZE /* ) SELECT 1 -- */ ) COPY (SELECT 1) TO 'x.csv'",
        "-- EXPLAIN\nEXPLAIN ANALYZE CREATE TABLE t AS\nSELECT 1",
        "WITH x AS (SELECT 1) INSERT INTO y FROM x",
    ],
)
def test_no_comment_hides_what_writes(query: str) -> None:
    with pytest.raises((NotReadingError, QueryError)):
        expect_reading(query)


@pytest.mark.parametrize(
    ("query", "cut"),
    [
        ("SELECT 1;", "SELECT 1"),
        ("SELECT 1; -- one\n-- more\n", "SELECT 1"),
        ("SELECT 1 -- one", "SELECT 1 -- one"),
        ("SELECT '; --'", "SELECT '; --'"),
    ],
)
def test_a_statement_ends_before_its_semicolon(query: str, cut: str) -> None:
    assert bare(query) == cut
