"""`sluice-cloud report`: a page that prints well, and its numbers beside it."""

from datetime import tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spark.commands.answers import PAGE_SUFFIXES, Form, beside, replaced
from spark.commands.asked_options import limited
from spark.commands.cli_options import warehouse_option
from spark.commands.desk_session import asking, explain_nothing
from spark.desk.asked import Asked
from spark.desk.row_text import csv_lines, time_text

if TYPE_CHECKING:
    from spark.desk.report_figures import Report


@click.command(short_help="A page to print on a site or a device, with its numbers beside it.")
@warehouse_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="File of the page, which ends in .html. Its numbers go to a folder beside it.",
)
@click.option(
    "--size",
    "size_s",
    type=click.IntRange(1, 86_400),
    metavar="SECONDS",
    help="Length of the windows. Default: so long that a curve can show them all.",
)
@limited("device", "site", "stream", "metric", "span")
def report(warehouse: str, out: Path, size_s: int | None, asked: Asked, zone: tzinfo) -> None:
    """Write a report on a site or a device: one page of HTML, which needs nothing else.

    It has the values and how final they are, what is missing and why, how complete each gateway is, lateness, clock
    quality and outages. Without a span it is of all times. The folder of its numbers is called as the page with -data
    behind it, and has a CSV file for each table.
    """
    if (asked.device is None) == (asked.site is None):
        raise click.UsageError("give --device or --site: the report is on one of them")
    if out.suffix.lower() not in PAGE_SUFFIXES:
        raise click.BadParameter(f"{out} does not end in .html", param_hint="--out")
    from spark.windows.window_sizes import WindowSizeError  # noqa: PLC0415

    with asking(warehouse) as tables:
        from spark.desk import report_figures  # noqa: PLC0415 - as `asking` says
        from spark.desk.report_page import Cover, page  # noqa: PLC0415

        try:
            found = report_figures.report(tables, asked, size_s)
        except WindowSizeError as error:
            raise click.BadParameter(str(error), param_hint="--size") from error
        if not found.tables["windows"].rows:
            form = Form(zone=zone)
            explain_nothing(tables, asked, form, "window_start", lambda limits: tables.windows_sql(limits, size_s))
    folder = out.with_name(f"{out.stem}-data")
    subject = f"Device {asked.device}" if asked.device is not None else f"Site {asked.site}"
    cover = Cover(subject, warehouse, folder.name, zone, lambda us: time_text(us, zone))
    _write_numbers(found, folder, zone)
    with replaced(out) as part:
        part.write_text(page(found, cover), encoding="utf-8")
    windows = found.tables["windows"].dicts()
    final = sum(row["status"] != "provisional" for row in windows)
    beside(f"{final:,} of the {len(windows):,} windows are final: {out}, and its numbers in {folder}")


def _write_numbers(found: "Report", folder: Path, zone: tzinfo) -> None:
    """Write each table as a CSV file. A folder, not a zip: a spreadsheet and pandas open its files as they are."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be written: {error.strerror or error}") from error
    for name, table in found.tables.items():
        with replaced(folder / f"{name}.csv") as part, part.open("w", encoding="utf-8", newline="") as file:
            file.writelines(csv_lines(table.columns, table.times, table.rows, zone))
