"""`sluice-cloud sql` reads, whatever it is asked: Spark would carry out the rest as well."""

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from spark.cli import main
from spark.commands.sql_statements import NotReadingError, read_by
from spark.desk.statements import named_in
from spark.log.log_table import log_path
from spark.log.warehouse_version import folder_of, versions_path
from spark.views.views import OPENERS

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

SPARK_SQL = ("sql", "--engine", "spark")
WRITES = (
    "DELETE FROM {table}",
    "UPDATE {table} SET code_version = 'x'",
    "INSERT INTO {table} SELECT * FROM {table}",
    "INSERT OVERWRITE {table} SELECT * FROM {table}",
    "WITH some AS (SELECT * FROM {table}) INSERT INTO {table} SELECT * FROM some",
    "FROM {table} INSERT INTO {table} SELECT *",
    "FROM {table} INSERT INTO {table} SELECT * INSERT INTO {table} SELECT *",
    "MERGE INTO {table} AS t USING {table} AS s ON t.code_version = s.code_version WHEN MATCHED THEN DELETE",
    "TRUNCATE TABLE {table}",
    "DROP TABLE {table}",
    "ALTER TABLE {table} SET TBLPROPERTIES ('a' = 'b')",
    "CREATE TABLE t AS SELECT 1 AS n",
    "CREATE TABLE t SHALLOW CLONE {table}",
    "CREATE OR REPLACE TEMPORARY VIEW readings AS SELECT 1 AS n",
    "VACUUM {table}",
    "OPTIMIZE {table}",
    "RESTORE TABLE {table} TO VERSION AS OF 0",
    "SET spark.sql.ansi.enabled = false",
    "BEGIN DELETE FROM {table}; END",
    "ADD JAR '/tmp/x.jar'",
    "EXECUTE IMMEDIATE 'DELETE FROM {table}'",
)
READS = (
    "SELECT count(*) FROM readings",
    "WITH some AS (SELECT device FROM log) SELECT * FROM some UNION ALL SELECT device FROM windows",
    "FROM readings SELECT device",
    "VALUES (1), (2)",
    "TABLE log",
    "DESCRIBE windows",
    "SHOW VIEWS",
    "SHOW COLUMNS IN readings",
    "EXPLAIN SELECT * FROM log",
    "DESCRIBE HISTORY {table}",
    "SELECT * FROM {table} VERSION AS OF 0",
)


def test_what_reads_is_carried_out_and_what_writes_is_not(spark: SparkSession, new_warehouse: str) -> None:
    log = log_path(folder_of(new_warehouse, 1))
    tables = [f"delta.`{path}`" for path in (versions_path(new_warehouse), log)]
    # One row of the result is enough.
    for view in ("readings", "log", "windows"):
        spark.range(1).selectExpr("'42' AS device").createOrReplaceTempView(view)

    def stand() -> list[tuple[int, int]]:
        return [(spark.sql(f"DESCRIBE HISTORY {each}").count(), spark.table(each).count()) for each in tables]

    before = stand()
    for statement in WRITES:
        with pytest.raises(NotReadingError, match="nothing was changed"):
            read_by(spark, statement.format(table=tables[0]))
    assert stand() == before
    for statement in READS:
        assert read_by(spark, statement.format(table=tables[0])).collect(), statement


def test_the_command_says_that_nothing_was_changed(spark: SparkSession, new_warehouse: str) -> None:
    assert spark is not None
    refused = CliRunner().invoke(main, [*SPARK_SQL, "--warehouse", new_warehouse, "DELETE FROM versions"])
    assert refused.exit_code == 2
    assert refused.output.startswith("Error: only statements that read are carried out here")
    kept = CliRunner().invoke(main, [*SPARK_SQL, "--warehouse", new_warehouse, "SELECT count(*) AS n FROM versions"])
    assert kept.stdout.split() == ["n", "1"]


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("SELECT 1", []),
        ("select max(n) from Windows w join `readings` r on w.device = r.device", ["windows", "readings"]),
        ("SELECT * FROM window_changes", ["window_changes"]),
        ("SELECT * FROM log\nUNION ALL SELECT * FROM(log)", ["log"]),
        ("SHOW VIEWS", list(OPENERS)),
    ],
)
def test_the_tables_that_a_statement_names_are_those_that_it_may_read(statement: str, named: list[str]) -> None:
    assert named_in(statement, [*OPENERS]) == named
