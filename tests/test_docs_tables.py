"""The analysts' page: every query on it runs, and every table is on it."""

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from pathlib import Path
from typing import TypeVar
from zoneinfo import ZoneInfo

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from click.testing import CliRunner
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.buffer.rows import Lane
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.intake.resolved_topics import ResolvedTopic, ResolvedTopics
from gateway.intake.routes import compile_routes
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.settings import GatewaySettings, KafkaSettings, RouteSettings
from spark.batch_job import BatchJob
from spark.cli import main
from spark.desk import tables
from spark.log.log_table import BatchId
from spark.views.views import VIEWS, open_all
from spark.views.windows_view import open_windows
from spark.windows.window_sizes import LATE_S, WINDOW_S
from tests.support.buffers import reading_of, row_of
from tests.support.sizes import size
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import EPOCH, NOON, kafka_frame, reading, reading_headers

T = TypeVar("T")

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

BOOT_CLOCK = BootClock.constant(int(NOON.timestamp() * 1_000_000), 250)
PAGE = (Path(__file__).parent.parent / "docs" / "tables.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
SPARK_SQL = ("sql", "--engine", "spark")
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

    # And each runs as it stands without Spark.
    desk = tables.open(new_warehouse)
    answers = {query: desk.sql(query).fetchall() for query in QUERIES}
    assert {query: len(answers[query]) for query in found} == {query: len(rows) for query, rows in found.items()}
    assert tables.VIEWS == VIEWS

    headings = {
        name for heading in re.findall(r"^## (.*)", PAGE, re.MULTILINE) for name in re.findall("`(.*?)`", heading)
    }
    assert headings == set(VIEWS)
    # Those that ask for what there is find it: of each table the first that finds something.
    by_table = {table_of(query): rows for query, rows in reversed(found.items()) if rows}
    assert by_table["gaps"][0][2:5] == (2, 3, 2)
    assert by_table["quarantine"][0].kind == "undecodable"
    assert by_table["log"][0][2:] == (3, 0, 2)
    assert by_table["versions"][0].declarations == "none"


def test_equal_names_of_two_sites_are_two_devices_and_their_sites_are_found(
    spark: SparkSession, new_warehouse: str
) -> None:
    """Use the records that a gateway makes of a route with `key = "{site}/{device}"`."""
    gateway = GatewaySettings(id="gw-1", namespace="plant")
    route = RouteSettings(
        "{site}/{device}/{kind}", "device-thermo", key="{site}/{device}", names="escape", identity="json"
    )
    topics = ResolvedTopics(compile_routes([route], None, frozenset()), gateway, KafkaSettings(()))
    lane = Lane(1, "0123456789ab", "boot-1", "00ff00ff00ff00ff")
    batch = EncodedBatch("none")
    for offset, topic in enumerate(("north/42/t", "Büro 1/42/t", "north/42/t", "north/aa:bb/t")):
        found = topics.resolve(reading_of(topic, b"", 0))
        assert isinstance(found, ResolvedTopic)
        # One boot and number in all sites; the third is the first, sent twice.
        row = row_of(offset, device_boot="7-1a2b", device_sequence=1, payload=b'{"celsius": 21.5}')
        batch.add(RecordEncoder(gateway, lane, found.series).encode(row, BootTimes(BOOT_CLOCK), offset))
    records = [
        reading(made.value, list(made.headers), offset=offset, key=made.key)
        for offset, made in enumerate(DefaultRecordBatch(bytes(batch._build())))
    ]
    job = BatchJob(spark, new_warehouse)
    job.take(kafka_frame(spark, records), BatchId("query", 0), {})
    job.save()
    open_all(spark, new_warehouse, ("readings", "log"))

    devices = spark.sql("SELECT device, count(*) AS n FROM readings GROUP BY device ORDER BY device").collect()
    assert [tuple(row) for row in devices] == [("north/42", 1), ("north/x--aa-3A-bb", 1), ("x--B-C3BC-ro-20-1/42", 1)]
    (query,) = (query for query in QUERIES if "route_site" in query)
    assert (
        [tuple(row) for row in spark.sql(query).collect()]
        == tables.open(new_warehouse).sql(query).fetchall()
        == [
            ("north/42", "north", 2),
            ("north/x--aa-3A-bb", "north", 1),
            ("x--B-C3BC-ro-20-1/42", "Büro 1", 1),
        ]
    )
    assert not spark.sql("SELECT * FROM log WHERE reject_reason IS NOT NULL").collect()


HOURS = size(72, 1_268)
BEGINS = size(datetime(2025, 10, 24, 20, tzinfo=UTC), datetime(2025, 9, 30, 20, tzinfo=UTC))
SPREAD_MAX = timedelta(days=9)
SIZES = size((3_600,), (60, 3_600, 86_400))
HOURS_OF_DAYS = {"Europe/Berlin": {24, 25}, "Australia/Sydney": {23, 24}, "Asia/Kathmandu": {24}}
"""Hours that the days of this time have there; Kathmandu's begin at a quarter past."""
ZONES = size(("Europe/Berlin",), tuple(HOURS_OF_DAYS))


def hourly_series() -> tuple[dict[datetime, Decimal], dict[datetime, datetime], list[KafkaRecord]]:
    """A sensor's temperatures by their times; when each came first; its records, each twice and up to nine days late.

    Drawn, in the shape of a series from the field: hourly values over a clock change.
    """
    rng = random.Random(31)  # noqa: S311 - the same draw every time
    series = {}
    for hour in range(HOURS):
        daily = 6 * math.sin(math.tau * (hour - 9) / 24)
        value = Decimal(f"{14 - hour / 100 + daily + rng.gauss(0, 1.5):.2f}")
        series[BEGINS + timedelta(hours=hour)] = value
    sent = [(time + rng.random() * SPREAD_MAX, time) for time in series for _ in range(2)]
    came: dict[datetime, datetime] = {}
    records = []
    for offset, (arrived, time) in enumerate(sorted(sent)):
        came.setdefault(time, arrived)
        headers = reading_headers((time - BEGINS) // timedelta(hours=1), time=time, device_boot="7-1a2b")
        record = reading(f'{{"celsius": {series[time]}}}'.encode(), headers, offset=offset, key=b"board-1")
        records.append(replace(record, timestamp=arrived))
    return series, came, records


Figures = tuple[int, Decimal, Decimal, Decimal, Decimal, Decimal, Decimal, Decimal]
"""Number, least, greatest, sum, first, last, median and 95th percentile by nearest rank."""


def figures(values: Sequence[Decimal]) -> Figures:
    """Figures of a window, computed here from its values in the order of time."""
    ranked = sorted(values)
    p50, p95 = (ranked[math.ceil(Fraction(percent * len(values), 100)) - 1] for percent in (50, 95))
    return len(values), ranked[0], ranked[-1], sum(values, Decimal()), values[0], values[-1], p50, p95


def mean(values: Sequence[Decimal], decimals: int) -> Decimal:
    exact = Context(prec=100, rounding=ROUND_HALF_UP)
    return exact.divide(sum(values, Decimal()), Decimal(len(values))).quantize(
        Decimal(1).scaleb(-decimals), context=exact
    )


def grouped(times: Iterable[datetime], key: Callable[[datetime], T]) -> dict[T, list[datetime]]:
    groups: dict[T, list[datetime]] = {}
    for time in times:
        groups.setdefault(key(time), []).append(time)
    return groups


def windows_of(
    series: Mapping[datetime, Decimal], arrived: Mapping[datetime, datetime], size_s: int
) -> dict[datetime, tuple[Decimal | int, ...]]:
    """Figures, mean and late values of each window of a size, by its start.

    Late by the table's own windows, of a minute, whatever the size.
    """
    found: dict[datetime, tuple[Decimal | int, ...]] = {}
    for start, times in grouped(series, lambda time: time - (time - EPOCH) % timedelta(seconds=size_s)).items():
        values = [series[time] for time in times]
        late = sum(arrived[time] > time + timedelta(seconds=WINDOW_S + LATE_S) for time in times)
        found[start] = (*figures(values), mean(values, 6), late)
    return found


def days_of(series: Mapping[datetime, Decimal], zone: str) -> dict[date, list[Decimal]]:
    """Values by the date that a clock shows there."""
    days = grouped(series, lambda time: time.astimezone(ZoneInfo(zone)).date())
    return {day: [series[time] for time in times] for day, times in days.items()}


@pytest.mark.campaign(seconds=40)
def test_a_series_over_a_clock_change_doubled_and_days_late_is_right_in_every_window(
    spark: SparkSession, new_warehouse: str
) -> None:
    """Windows of each size, and local days by the page's query, against plain Python and its time zones."""
    series, arrived, records = hourly_series()
    job = BatchJob(spark, new_warehouse)
    # Where it is cut, dozens of values have come once and come again later.
    cut = len(records) // 3
    for batch, part in enumerate((records[:cut], records[cut:])):
        job.take(kafka_frame(spark, part), BatchId("query", batch), {})
    job.save()

    for size_s in SIZES:
        rows = open_windows(spark, new_warehouse, size_s).withColumn("us", F.unix_micros("window_start")).collect()
        found = {
            EPOCH + timedelta(microseconds=row.us): (
                *(row.n, row["min"], row["max"], row["sum"], row["first"], row["last"], row.p50, row.p95, row["mean"]),
                row.late,
            )
            for row in rows
        }
        wanted = windows_of(series, arrived, size_s)
        assert {start: (found.get(start), each) for start, each in wanted.items() if found.get(start) != each} == {}
        assert found.keys() == wanted.keys()

    (query,) = (query for query in QUERIES if "from_utc_timestamp" in query)
    open_all(spark, new_warehouse, ("windows",))
    for zone in ZONES:
        rows = spark.sql(query.replace("Europe/Berlin", zone)).collect()
        days = days_of(series, zone)
        assert {row.day: (row.n, row["min"], row["max"], row["mean"]) for row in rows} == {
            day: (len(values), min(values), max(values), mean(values, 6)) for day, values in days.items()
        }
        assert {len(values) for values in list(days.values())[1:-1]} == HOURS_OF_DAYS[zone]
        answered = tables.open(new_warehouse).sql(query.replace("Europe/Berlin", zone)).fetchall()
        # DuckDB divides decimals as binary floats.
        assert {row[0]: (*row[2:5], pytest.approx(row[5])) for row in answered} == {
            row.day: (row.n, row["min"], row["max"], float(row["mean"])) for row in rows
        }


@pytest.mark.long(seconds=10)
def test_the_first_query_on_the_page_is_one_for_the_command(spark: SparkSession, new_warehouse: str) -> None:
    assert spark is not None
    shown = CliRunner().invoke(main, ["sql", "--warehouse", new_warehouse, QUERIES[0]])
    assert shown.exit_code == 0, shown.output
    assert "window_start" in shown.output


def test_the_example_in_python_runs_without_spark(new_warehouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    folder = Path(new_warehouse).parent
    monkeypatch.chdir(folder)
    exec(example.replace("build/demo/warehouse", new_warehouse), {})  # noqa: S102 - it is ours
    assert "window_start" in (folder / "hours.csv").read_text()


def test_a_misspelt_column_is_told_in_a_line(spark: SparkSession, new_warehouse: str) -> None:
    assert spark is not None
    wrong = CliRunner().invoke(main, [*SPARK_SQL, "--warehouse", new_warehouse, "SELECT statuss FROM windows"])
    assert wrong.exit_code == 2
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
    wrong = CliRunner().invoke(main, [*SPARK_SQL, "--warehouse", new_warehouse, query])
    assert wrong.exit_code == 2
    assert isinstance(wrong.exception, SystemExit), wrong.exception
    assert wrong.output.startswith(f"Error: {told}")
    if "TABLE" in told:
        assert "There are: log, readings, windows, window_changes," in wrong.output
