"""`sluice-cloud readings`, `windows`, `gaps`, `gateways`, `quarantine` and `sql`: show what the tables hold."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from gateway.host.terminal import say
from gateway.host.terminal_text import counted
from spark.commands.answers import PAGE_SUFFIXES, Form, beside, print_frame, print_relation, replaced
from spark.commands.asked_options import asks
from spark.commands.cli_options import FINDING, streams_option, warehouse_option
from spark.commands.command_session import session
from spark.commands.desk_session import asking, explain_nothing, known_names, latest
from spark.desk.asked import Asked
from spark.desk.look_ups import GAPS, GATEWAYS, LOSSES, QUARANTINE, READINGS, TROUBLE, WINDOWS
from spark.desk.row_text import time_text
from spark.engine.warehouse_folder import only_writer

if TYPE_CHECKING:
    from spark.decode.codec_declarations import Streams
    from spark.desk.tables import Tables


@click.command(short_help="The latest readings by event time.")
@warehouse_option
@asks("device", "site", "stream", "metric", "span")
def readings(warehouse: str, asked: Asked, form: Form) -> None:
    """Show the latest readings by event time, one line for each metric."""
    with asking(warehouse) as tables:

        def rows(limits: Asked) -> str:
            return tables.select("readings", limits)

        narrow = latest(tables, asked, form.limit, f"{tables.version()[0]}/log", "event_time", rows)
        found = tables.source.db.sql(READINGS.ordered(rows(narrow)))
        columns = READINGS.shown(found.columns) if form.is_whole else READINGS.columns
        if not print_relation(
            tables.source.db, found, form, columns, spare=("namespace", "time_quality", "time_error_us")
        ):
            explain_nothing(tables, asked, form, "event_time", rows)


@click.command(short_help="The latest windows, and how final each is.")
@warehouse_option
@click.option(
    "--size",
    "size_s",
    type=click.IntRange(1, 86_400),
    metavar="SECONDS",
    help="Length of the windows. Default: as the table holds them.",
)
@click.option("--full", is_flag=True, help="Show all values, their sum of squares and the last batch, too.")
@asks("device", "site", "stream", "metric", "span")
def windows(warehouse: str, size_s: int | None, full: bool, asked: Asked, form: Form) -> None:  # noqa: FBT001
    """Show the latest windows, and how final each is.

    `status` says whether a window is final, `basis` why that is known, and `why` what the window waits for. --since
    and --until go by the windows' beginnings. A terminal shows only the columns that fit.
    """
    from spark.windows.window_sizes import WindowSizeError  # noqa: PLC0415

    with asking(warehouse) as tables:
        evidence = tables.evidence(asked.device)

        def rows(limits: Asked) -> str:
            return tables.windows_sql(limits, size_s, evidence)

        try:
            narrow = latest(tables, asked, form.limit, f"{tables.version()[0]}/window_parts", "window_start", rows)
            query = rows(narrow)
        except WindowSizeError as error:
            raise click.BadParameter(str(error), param_hint="--size") from error
        found = tables.source.db.sql(WINDOWS.ordered(query))
        # Among them are the percentiles that are declared.
        columns = WINDOWS.shown(found.columns, full=full)
        others = columns[len(WINDOWS.columns) :]
        spare = ("window_end", "sum", "first", "last", "namespace", "late", "stream", "min", "max", "basis")
        if not print_relation(tables.source.db, found, form, columns, spare=others + spare):
            explain_nothing(tables, asked, form, "window_start", rows)
            return
        counts = "count(*), count(*) FILTER (status <> 'provisional'), epoch_us(min(window_start))"
        number, final, from_us = tables.source.rows(f"SELECT {counts} FROM ({query})")[0]
        beside(f"{final:,} of the {number:,} windows from {time_text(from_us, form.zone)} on are final")


@click.command(short_help="What is missing: sequence numbers, and losses without numbers.")
@warehouse_option
@asks("device", "site", "stream", "span")
def gaps(warehouse: str, asked: Asked, form: Form) -> None:
    """Show what is missing of devices, the latest first, and whether a gateway has told why.

    These are missing sequence numbers and, without `first` and `last`, losses of devices that do not count. Without a
    device, nobody can say whose readings they were. With --since and --until, those are shown of which some may have
    been measured then.
    """
    spare = ("device_counter", "namespace", "after_time", "stream", "device_boot")
    with asking(warehouse) as tables:
        found = tables.source.db.sql(GAPS.ordered(tables.missing_sql(asked)))
        if not print_relation(tables.source.db, found, form, GAPS.columns, spare=spare):
            explain_nothing(tables, asked, form, "before_time", tables.missing_sql)


@click.command(short_help="What is gone for good, and why.")
@warehouse_option
@asks("device", "site", "span")
def losses(warehouse: str, asked: Asked, form: Form) -> None:
    """Show readings that are gone for good or in the quarantine, the latest first, with the reasons.

    Readings of devices that do not count them are here too. Without a device, nobody can say whose readings they were.
    With --since and --until, those are shown of which some may have been taken then.
    """
    spare = ("device_boot", "told_time", "namespace", "first_sequence", "last_sequence", "gateway")
    with asking(warehouse) as tables:

        def rows(limits: Asked) -> str:
            return tables.select("losses", limits)

        found = tables.source.db.sql(LOSSES.ordered(rows(asked)))
        if not print_relation(tables.source.db, found, form, LOSSES.columns, spare=spare):
            explain_nothing(tables, asked, form, "to_time", rows)


@click.command(short_help="How far each gateway has delivered.")
@warehouse_option
@click.option("--trouble", is_flag=True, help="Show who needs somebody, worst first. Exit with 1 if any does.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write one page on all gateways to this file, which ends in .html.",
)
@asks("site")
def gateways(warehouse: str, trouble: bool, html: Path | None, asked: Asked, form: Form) -> None:  # noqa: FBT001
    """Show up to when each gateway has delivered and what it still holds, by its last heartbeat that counts.

    With --trouble, show gateways that were not heard for three heartbeats, and what others last told that is not well.
    With --html, write a page that needs nothing else: who needs somebody, a map of sites, and each gateway's last days.
    """
    if html is not None and not trouble:
        _expect_no_rows_asked()
    with asking(warehouse) as tables:
        if html is not None:
            _write_page(tables, asked, form, html)
            if not trouble:
                return
        if trouble:
            _trouble(tables, asked, form)
            return
        found = tables.source.db.sql(GATEWAYS.ordered(tables.select("gateways", asked)))
        # There is hardly ever an unread topic. If there is one, it must be seen.
        has_unread = form.is_whole or bool(found.filter("len(unread_topics) > 0").limit(1).fetchall())
        columns = [name for name in GATEWAYS.columns if has_unread or name != "unread_topics"]
        if form.is_whole:
            columns = [*GATEWAYS.shown(found.columns)]
        spare = ("buffer", "namespace", "site", "waiting", "retired_from_time", "oldest_age_s")
        if not print_relation(tables.source.db, found, form, columns, spare=spare):
            explain_nothing(tables, asked, form, None, lambda limits: tables.select("gateways", limits))


def _expect_no_rows_asked() -> None:
    """Check that no option is given that says which rows to show. Raises click.UsageError."""
    context = click.get_current_context()
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name in {"limit", "as_json", "as_csv", "out"}
        and context.get_parameter_source(option.name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(f"--html writes a page and shows no rows; leave out {' and '.join(given)}")


def _write_page(tables: "Tables", asked: Asked, form: Form, file: Path) -> None:
    from spark.page.gateways import fleet, page, verdict  # noqa: PLC0415 - as `asking` says

    if file.suffix.lower() not in PAGE_SUFFIXES:
        raise click.BadParameter(f"{file} does not end in .html", param_hint="--html")
    with known_names():
        found = fleet(tables, time.time_ns() // 1_000, asked.site)
    with replaced(file) as part:
        part.write_text(page(found, form.zone), encoding="utf-8")
    beside(verdict(found, form.zone))
    beside(f"page written to {file}")


def _trouble(tables: "Tables", asked: Asked, form: Form) -> None:
    from spark.finality.gateway_troubles import COLUMNS, heard_us, is_old, troubles  # noqa: PLC0415

    evidence = tables.evidence()
    found = [each for each in troubles(evidence.states, evidence.registry) if asked.site in {None, each.site}]
    shown = ", ".join("make_timestamp(heard_us) AS heard_time" if name == "heard_us" else name for name in COLUMNS)
    rows = tables.source.db.sql(f"SELECT {shown} FROM ({tables.source.values(COLUMNS, found)})")
    if not found:
        explain_nothing(tables, asked, form, None, lambda _: "")
    print_relation(tables.source.db, rows, form, TROUBLE, spare=("namespace", "site", "heard_time", "means"))
    newest_us = heard_us(evidence.states)
    are_old = is_old(newest_us, time.time_ns() // 1_000)
    if newest_us is None:
        beside("no gateway was heard yet")
    elif are_old:
        beside(f"nothing was heard of any gateway since {time_text(newest_us, form.zone)}: does ingest run?")
    elif not found:
        beside("no gateway needs anybody")
    if found or are_old:
        raise click.exceptions.Exit(FINDING)


@click.command(short_help="Query the tables in SQL.")
@warehouse_option
@click.argument("query", required=False)
@click.option(
    "--engine",
    type=click.Choice(["duckdb", "spark"]),
    default="duckdb",
    show_default=True,
    help="Engine that answers. Spark needs Java and takes longer to start.",
)
@asks()
def sql(warehouse: str, query: str | None, engine: str, asked: Asked, form: Form) -> None:  # noqa: ARG001 - it has no limits
    """Query the tables in SQL: log, readings, windows, gaps and all others in docs/tables.md.

    Only statements that read are run. Without a query, a shell reads them from the terminal, or one is read from
    standard input.
    """
    if query is None and not sys.stdin.isatty():
        query = sys.stdin.read()
    if engine == "spark":
        if query is None:
            raise click.UsageError("the shell is DuckDB's; with --engine spark, give a query")
        _spark_sql(warehouse, query, form)
        return
    with asking(warehouse) as tables:
        import duckdb  # noqa: PLC0415 - as `asking` says

        from spark.desk.statements import QueryError, expect_reading, words_of  # noqa: PLC0415
        from spark.desk.tables import VIEWS  # noqa: PLC0415

        if query is None:
            from spark.commands.sql_shell import Shell  # noqa: PLC0415 - it changes how the terminal is read

            Shell(tables, form).run()
            return
        expect_reading(query)
        try:
            found = tables.sql(query)
            print_relation(tables.source.db, found, form)
        except (duckdb.IOException, duckdb.OutOfMemoryException):
            raise
        except duckdb.Error as error:
            raise QueryError(words_of(error, VIEWS)) from error


def _spark_sql(warehouse: str, query: str, form: Form) -> None:
    if form.out is not None:
        raise click.UsageError("--out is not there with --engine spark; take --csv")
    spark = session("sluice-sql", warehouse)
    from pyspark.errors import PySparkException  # noqa: PLC0415

    from spark.commands.sql_statements import mistake_words, read_by  # noqa: PLC0415
    from spark.desk.statements import QueryError, named_in  # noqa: PLC0415
    from spark.views.views import VIEWS, open_all  # noqa: PLC0415

    open_all(spark, warehouse, named_in(query, VIEWS))
    try:
        print_frame(read_by(spark, query), form)
    except PySparkException as error:
        raise QueryError(mistake_words(error, VIEWS)) from error


@click.group()
def quarantine() -> None:
    """List records that became no readings, or read them again. They stay in `log` in any case."""


@quarantine.command("list", short_help="The latest rejects, with their reasons.")
@warehouse_option
@asks("device", "site", "span")
def list_quarantine(warehouse: str, asked: Asked, form: Form) -> None:
    """Show the latest rejects with their reasons and their places in Kafka.

    --since and --until go by the times when Kafka took them in.
    """
    with asking(warehouse) as tables:

        def rows(limits: Asked) -> str:
            return tables.select("quarantine", limits)

        found = tables.source.db.sql(QUARANTINE.ordered(rows(asked)))
        in_full = tuple(name for name in found.columns if name != "headers")
        shown = in_full if form.is_whole else QUARANTINE.columns
        if not print_relation(tables.source.db, found, form, shown, spare=("retried", "device")):
            explain_nothing(tables, asked, form, "kafka_timestamp", rows)


@quarantine.command("retry", short_help="Read rejects again, after you correct streams.toml.")
@warehouse_option
@streams_option
def retry_command(warehouse: str, streams: "Streams | None") -> None:
    """Read rejects again, after you correct streams.toml or the registry. Those that can be read become readings.

    Stop `ingest` first. The declarations of --streams hold from then on.
    """
    spark = session("sluice-quarantine")
    from spark.batch_job import BatchJob  # noqa: PLC0415
    from spark.log.warehouse_version import open_version  # noqa: PLC0415
    from spark.upkeep.quarantine_retry import retry  # noqa: PLC0415
    from spark.windows.windows_table import WindowLengthError  # noqa: PLC0415

    open_version(spark, warehouse)
    try:
        with only_writer(warehouse):
            job = BatchJob(spark, warehouse, streams)
            counts = retry(job)
    except WindowLengthError as error:
        raise click.BadParameter(str(error), param_hint="--streams") from error
    declared = job.streams.version
    say(f"{counted(counts.rejects, 'reject')} read again by declarations {declared}: {counts.read} can be read now")
