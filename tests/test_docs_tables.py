"""The analysts' page: every query on it runs, and every table is on it."""

import re
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from click.testing import CliRunner
from pyspark.sql import SparkSession

from gateway.buffer.rows import Lane, Row
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.intake.resolved_topics import ResolvedTopic, ResolvedTopics
from gateway.intake.routes import compile_routes
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.reading import Reading
from gateway.settings import GatewaySettings, RouteSettings
from spark.batch_job import BatchJob
from spark.cli import main
from spark.log.log_table import BatchId
from spark.views.views import VIEWS, open_all
from tests.support.sizes import size
from tests.support.spark_records import NOON, kafka_frame, reading, reading_headers

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

BOOT_CLOCK = BootClock.constant(int(NOON.timestamp() * 1_000_000), 250)
PAGE = (Path(__file__).parent.parent / "docs" / "tables.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
ANSWERED = {"gaps", "quarantine", "log", "versions"}
"""The tables of which queries find something here."""


def table_of(query: str) -> str:
    return str(re.findall(r"FROM (\w+)", query)[0])


@pytest.mark.campaign(seconds=45)
def test_every_query_on_the_page_runs_and_every_table_has_one(spark: SparkSession, new_warehouse: str) -> None:
    records = [
        reading(headers=reading_headers(1, device_boot="7-1a2b")),
        reading(headers=reading_headers(4, device_boot="7-1a2b"), offset=1),
        reading(b"{", headers=reading_headers(5), offset=2),
    ]
    job = BatchJob(spark, new_warehouse)
    job.take(kafka_frame(spark, records), BatchId("query", 0), {})
    job.save()
    assert tuple(open_all(spark, new_warehouse)) == VIEWS
    # Spark finds here what is wrong with any.
    frames = {query: spark.sql(query) for query in QUERIES}
    asked = size(ANSWERED, set(VIEWS))
    found = {query: frame.collect() for query, frame in frames.items() if table_of(query) in asked}

    headings = {
        name for heading in re.findall(r"^## (.*)", PAGE, re.MULTILINE) for name in re.findall("`(.*?)`", heading)
    }
    assert headings == set(VIEWS)
    # Those that ask for what there is find it: of each table the first.
    by_table = {table_of(query): rows for query, rows in reversed(found.items())}
    assert by_table["gaps"][0][2:5] == (2, 3, 2)
    assert by_table["quarantine"][0].kind == "undecodable"
    assert by_table["log"][0][2:] == (3, 0, 2)
    assert by_table["versions"][0].declarations == "none"


def test_equal_names_of_two_sites_are_two_devices_and_their_sites_are_found(
    spark: SparkSession, new_warehouse: str
) -> None:
    """By the records that a gateway makes of a route with `key = "{site}/{device}"`."""
    gateway = GatewaySettings(id="gw-1", namespace="plant")
    route = RouteSettings(
        "{site}/{device}/{kind}", "device-thermo", key="{site}/{device}", names="escape", identity="json"
    )
    topics = ResolvedTopics(compile_routes([route], None, frozenset()), gateway)
    lane = Lane(1, "0123456789ab", "boot-1", "00ff00ff00ff00ff")
    batch = EncodedBatch("none")
    for offset, topic in enumerate(("north/42/t", "Büro 1/42/t", "north/42/t", "north/aa:bb/t")):
        found = topics.resolve(Reading(topic, topic, b"", 0))
        assert isinstance(found, ResolvedTopic)
        # One boot and number in all sites; the third is the first, sent twice.
        row = Row(1, offset, 1, 1_000_000, None, 0, None, "7-1a2b", 1, b'{"celsius": 21.5}', 0)
        batch.add(RecordEncoder(gateway, lane, found.series).encode(row, BootTimes(BOOT_CLOCK), offset))
    records = [
        reading(made.value, list(made.headers), offset=offset, key=made.key)
        for offset, made in enumerate(DefaultRecordBatch(bytes(batch._build())))
    ]
    job = BatchJob(spark, new_warehouse)
    job.take(kafka_frame(spark, records), BatchId("query", 0), {})
    job.save()
    open_all(spark, new_warehouse)

    devices = spark.sql("SELECT device, count(*) AS n FROM readings GROUP BY device ORDER BY device").collect()
    assert [tuple(row) for row in devices] == [("north/42", 1), ("north/x--aa-3A-bb", 1), ("x--B-C3BC-ro-20-1/42", 1)]
    (query,) = (query for query in QUERIES if "route_site" in query)
    assert [tuple(row) for row in spark.sql(query).collect()] == [
        ("north/42", "north", 2),
        ("north/x--aa-3A-bb", "north", 1),
        ("x--B-C3BC-ro-20-1/42", "Büro 1", 1),
    ]
    assert not spark.sql("SELECT * FROM log WHERE reject_reason IS NOT NULL").collect()


def test_local_days_are_whole_over_a_clock_change(spark: SparkSession, new_warehouse: str) -> None:
    """Hourly values around both changes of a year: the second half of them late, and all of them twice."""
    (query,) = (query for query in QUERIES if "from_utc_timestamp" in query)
    begins = (datetime(2025, 10, 24, tzinfo=UTC), datetime(2026, 3, 27, tzinfo=UTC))
    times = [begin + timedelta(hours=hour) for begin in begins for hour in range(96)]
    records = [
        replace(
            reading(b'{"celsius": %d}' % number, reading_headers(number, time=time), offset=number, key=b"board-1"),
            timestamp=datetime(2026, 4, 1, tzinfo=UTC),
        )
        for number, time in enumerate(times)
    ]
    job = BatchJob(spark, new_warehouse)
    again = [replace(record, offset=record.offset + len(records)) for record in records]
    for batch, part in enumerate((records[::2] + again[::2], records[1::2] + again[1::2])):
        job.take(kafka_frame(spark, part), BatchId("query", batch), {})
    job.save()
    open_all(spark, new_warehouse)

    found = {row.day: (row.n, row.min, row.max, row["mean"]) for row in spark.sql(query).collect()}

    days: dict[date, list[int]] = {}
    for number, time in enumerate(times):
        days.setdefault(time.astimezone(ZoneInfo("Europe/Berlin")).date(), []).append(number)
    assert found == {
        day: (len(values), min(values), max(values), Decimal(sum(values)) / len(values)) for day, values in days.items()
    }
    assert (found[date(2025, 10, 26)][0], found[date(2026, 3, 29)][0]) == (25, 23)


@pytest.mark.long(seconds=10)
def test_the_first_query_on_the_page_is_one_for_the_command(spark: SparkSession, new_warehouse: str) -> None:
    assert spark is not None
    shown = CliRunner().invoke(main, ["sql", "--warehouse", new_warehouse, QUERIES[0]])
    assert shown.exit_code == 0, shown.output
    assert "window_start" in shown.output


def test_a_misspelt_column_is_told_in_a_line(spark: SparkSession, new_warehouse: str) -> None:
    assert spark is not None
    wrong = CliRunner().invoke(main, ["sql", "--warehouse", new_warehouse, "SELECT statuss FROM windows"])
    assert wrong.exit_code == 1
    # PySpark would log the whole plan besides, and a trace of Java's calls: fifty thousand characters.
    first, hint = wrong.output.splitlines()
    assert first.startswith("Error: [UNRESOLVED_COLUMN.WITH_SUGGESTION]")
    assert "Did you mean one of the following? [`status`" in first
    # Metrics are what is looked for among columns most often.
    assert "WHERE metric = 'celsius'" in hint


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("SELECT * FROM reading", "[TABLE_OR_VIEW_NOT_FOUND] The table or view `reading` cannot be found"),
        ("SELEC 1", "[PARSE_SYNTAX_ERROR] Syntax error at or near 'SELEC'"),
        ("SELECT 1 / count(*) FROM readings", "[DIVIDE_BY_ZERO] Division by zero"),
    ],
)
def test_a_query_that_cannot_be_answered_is_told_why(
    spark: SparkSession, new_warehouse: str, query: str, told: str
) -> None:
    assert spark is not None
    wrong = CliRunner().invoke(main, ["sql", "--warehouse", new_warehouse, query])
    assert wrong.exit_code == 1
    assert isinstance(wrong.exception, SystemExit), wrong.exception
    assert wrong.output.startswith(f"Error: {told}")
    if "TABLE" in told:
        assert "There are: log, readings, windows, window_changes," in wrong.output
