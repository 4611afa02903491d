"""A report as one page of HTML that needs nothing but a browser or a printer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Any

from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from spark.desk.plain_rows import PlainRows
from spark.desk.report_figures import Report, several
from spark.desk.report_svg import PATTERNS, Times, bars, curve, duration, durations, lines, words

CURVES_MAX = 40
"""Series that are drawn; the others are in the CSV file only."""
ROWS_MAX = 40
"""Rows of a table on the page; the CSV file has all."""
GATEWAY_CURVES_MAX = 8
CURVE_HEIGHT = 80
WORD_MAX = 24
"""Characters of a word in a table that is never broken."""
SECOND_US = 1_000_000

STYLE = Path(__file__).with_name("report_style.css")


@dataclass(frozen=True, slots=True)
class Cover:
    """What a page tells beside its figures."""

    subject: str
    """Site or device, in words."""
    warehouse: str
    folder: str
    """Name of the folder of the CSV files beside the page."""
    zone: tzinfo
    time: Callable[[int], str]
    """A time in microseconds as a text of that zone."""


def page(report: Report, cover: Cover) -> str:
    """Draw the page."""
    times = Times(report.from_us, report.until_us, cover.zone)
    parts = (_header, _series, _status, _completeness, _missing, _lateness, _clocks, _outages, _files)
    body = "\n".join(part(report, cover, times) for part in parts)
    title = words(f"{cover.subject}: {_span(report, cover)}")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{STYLE.read_text("utf-8")}</style>
</head>
<body>
{PATTERNS}
{body}
</body>
</html>
"""


def _span(report: Report, cover: Cover) -> str:
    return f"{_seconds(cover.time(report.from_us))} to {_seconds(cover.time(report.until_us))}"


def _seconds(time: str) -> str:
    """A time without its fraction of a second."""
    head, dot, rest = time.partition(".")
    return head + rest.lstrip("0123456789") if dot else time


def _header(report: Report, cover: Cover, times: Times) -> str:  # noqa: ARG001 - as all parts
    windows = report.tables["windows"].dicts()
    final = sum(row["status"] != "provisional" for row in windows)
    devices = report.tables["devices"].dicts()
    losses = report.tables["losses"].dicts()
    outages = report.tables["outages"].dicts()
    clocks = report.tables["clocks"].dicts()
    is_final = bool(windows) and final == len(windows)
    verdict = (
        f"All {len(windows):,} windows are final"
        if is_final
        else f"{final:,} of the {len(windows):,} windows are final"
        if windows
        else "No windows: no reading of this span is here"
    )
    least_us = [row["max_error_us"] for row in clocks if row["max_error_us"] is not None]
    figures = {
        "readings": f"{sum(row['readings'] for row in devices):,}",
        "missing numbers": f"{sum(row['missing'] for row in devices):,}",
        "missing and explained": f"{sum(row['explained'] for row in devices):,}",
        "losses that gateways told": f"{len(losses):,}",
        "late values": f"{sum(row['late'] for row in devices):,}",
        "revised windows": f"{sum(row['revised'] for row in windows):,}",
        "silences of streams": f"{sum(row['kind'] == 'silence' for row in outages):,}",
        "times readings waited": f"{sum(row['kind'] != 'silence' for row in outages):,}",
        "largest time error": duration(max(least_us)) if least_us else "-",
    }
    shown = "".join(f"<div><dt>{words(name)}</dt><dd>{words(value)}</dd></div>" for name, value in figures.items())
    made = _seconds(cover.time(report.made_us))
    return f"""<header>
<h1>{words(cover.subject)}</h1>
<p>{words(_span(report, cover))}, in windows of {duration(report.size_s * SECOND_US)}</p>
<p class="quiet">As the tables were at {words(made)}. A window that is not final can still change.</p>
<div class="verdict {"well" if is_final else "warn"}">{"✓" if is_final else "◪"} {words(verdict)}</div>
<dl class="figures">{shown}</dl>
</header>"""


def _key(mark: str) -> str:
    return f'<svg class="key" viewBox="0 0 26 14" aria-hidden="true">{mark}</svg>'


LEGEND = "".join(
    f"<li>{_key(mark)}{text}</li>"
    for mark, text in (
        ('<path class="mean" d="M1 7H25"/>', "mean of a final window"),
        ('<path class="mean open" d="M1 7H25"/>', "mean of a provisional one"),
        ('<rect width="26" height="14" fill="#0a4a8f" fill-opacity=".34"/>', "mean ± deviation"),
        ('<rect width="26" height="14" fill="#0a4a8f" fill-opacity=".13"/>', "from min to max"),
        ('<path class="revised" d="M13 1l4.5 6l-4.5 6l-4.5 -6Z"/>', "revised"),
        ('<rect class="s-complete" width="26" height="10" y="2"/>', "complete"),
        ('<rect class="s-complete_with_loss" width="26" height="10" y="2"/>', "complete_with_loss"),
        ('<rect class="s-provisional" width="26" height="10" y="2"/>', "provisional"),
    )
)


def _series(report: Report, cover: Cover, times: Times) -> str:  # noqa: ARG001 - as all parts
    series = several(report.tables["windows"].dicts(), ("namespace", "device", "stream", "metric"))
    drawn = []
    for (namespace, device, stream, metric), rows in [*series.items()][:CURVES_MAX]:
        final = sum(row["status"] != "provisional" for row in rows)
        about = f"{len(rows):,} windows, {final:,} final, {sum(row['n'] for row in rows):,} values"
        title = f"{metric} of {device}"
        drawn.append(
            f'<div class="chart"><h3>{words(title)} '
            f'<span class="quiet">{words(f"{namespace}, stream {stream}: {about}")}</span></h3>'
            f"{curve(rows, report.size_s * SECOND_US, times, title)}</div>"
        )
    rest = len(series) - CURVES_MAX
    note = f"<p class='quiet'>{rest} more series stand in windows.csv.</p>" if rest > 0 else ""
    return f"""<section><h2>Values</h2>
<p class="quiet">The strip below each curve has the status of each window. It is empty where no reading is here. A
window is revised if its figures were changed by late values, a correction, a better copy or a replay.</p>
<ul class="legend">{LEGEND}</ul>
{"".join(drawn) or "<p>No reading of this span is here.</p>"}{note}</section>"""


def _status(report: Report, cover: Cover, times: Times) -> str:  # noqa: ARG001 - as all parts
    return f"""<section><h2>How many windows are final</h2>
{_rows(report.tables["status"], ("status", "basis", "windows", "earliest", "latest", "why"), cover, "status.csv")}
</section>"""


def _completeness(report: Report, cover: Cover, times: Times) -> str:
    outages = several(
        [row for row in report.tables["outages"].dicts() if row["gateway"] is not None], ("namespace", "gateway")
    )
    rows: list[tuple[str, list[tuple[str, int, int]]]] = []
    for row in report.tables["gateways"].dicts():
        complete_us = row["complete_to_time"]
        until_us = report.until_us if complete_us is None or complete_us > report.until_us else complete_us
        if complete_us is None:
            until_us = report.from_us
        parts = [("s-complete", report.from_us, until_us)] if until_us > report.from_us else []
        if until_us < report.until_us:
            parts.append(("s-provisional", max(until_us, report.from_us), report.until_us))
        parts += [
            ("s-waited", each["from_time"], each["to_time"])
            for each in outages.get((row["namespace"], row["gateway"]), [])
        ]
        rows.append((row["gateway"], parts))
    legend = "".join(
        f'<li>{_key(f"""<rect class="{name}" width="26" height="10" y="2"/>""")}{text}</li>'
        for name, text in (
            ("s-complete", "everything of the gateway is here, except what it holds"),
            ("s-provisional", "the gateway has not acknowledged past it"),
            ("s-waited", "readings waited for Kafka"),
        )
    )
    of_gateways = (
        "gateway",
        "site",
        "readings",
        "heartbeat_time",
        "complete_to_time",
        "pending",
        "quarantined",
        "waits",
    )
    of_devices = (
        *("device", "streams", "readings", "missing", "explained", "windows", "complete", "complete_with_loss"),
        *("provisional", "revised", "late"),
    )
    return f"""<section><h2>Completeness by gateway</h2>
<ul class="legend">{legend}</ul>
<div class="chart">{bars(rows, times, "Completeness by gateway") if rows else "<p>No gateway is known.</p>"}</div>
{_rows(report.tables["gateways"], of_gateways, cover, "gateways.csv")}
<h3>By device</h3>
{_rows(report.tables["devices"], of_devices, cover, "devices.csv")}
</section>"""


def _missing(report: Report, cover: Cover, times: Times) -> str:  # noqa: ARG001 - as all parts
    gaps = (
        "device",
        "stream",
        "device_boot",
        "first",
        "last",
        "count",
        "after_time",
        "before_time",
        "explained",
        "reasons",
    )
    losses = ("device", "gateway", "reason", "count", "from_time", "to_time", "first_sequence", "last_sequence")
    return f"""<section><h2>What is missing, and why</h2>
<h3>Gaps: numbers that are missing</h3>
<p class="quiet">If explained is true, the reasons say why. Else the readings may still come.</p>
{_rows(report.tables["gaps"], gaps, cover, "gaps.csv")}
<h3>Losses: what is gone for good</h3>
<p class="quiet">Without a device, nobody can say whose readings they were. A count of 0 means that nobody can count
them. Losses with numbers are among the gaps, too.</p>
{_rows(report.tables["losses"], losses, cover, "losses.csv")}
</section>"""


def _lateness(report: Report, cover: Cover, times: Times) -> str:  # noqa: ARG001 - as all parts
    by_gateway = several(report.tables["lateness"].dicts(), ("namespace", "gateway"))
    drawn = []
    for (_, gateway), rows in [*by_gateway.items()][:GATEWAY_CURVES_MAX]:
        most = [(row["time"], max(row["max_s"] * SECOND_US, 1_000.0)) for row in rows]
        middle = [(row["time"], max(row["median_s"] * SECOND_US, 1_000.0)) for row in rows]
        values = durations((value for _, value in most + middle), CURVE_HEIGHT)
        title = f"Time from measuring to Kafka through {gateway}"
        svg = lines([("most", most), ("median", middle)], report.size_s * SECOND_US, times, values, title)
        drawn.append(f'<div class="chart"><h3>through {words(gateway)}</h3>{svg}</div>')
    return f"""<section><h2>Lateness: time from measuring to Kafka</h2>
{_legend_of_lines()}
{"".join(drawn) or "<p>No reading of this span is here.</p>"}
{_more(len(by_gateway) - GATEWAY_CURVES_MAX, "lateness.csv")}</section>"""


def _legend_of_lines() -> str:
    keys = (("median", "median"), ("most", "largest"))
    shown = "".join(f"""<li>{_key(f'<path class="{name}" d="M1 7H25"/>')}{text}</li>""" for name, text in keys)
    return f'<ul class="legend">{shown}</ul>'


def _clocks(report: Report, cover: Cover, times: Times) -> str:
    rows = report.tables["clock_times"].dicts()
    most = [(row["time"], max(float(row["max_error_us"]), 1.0)) for row in rows]
    middle = [(row["time"], max(float(row["median_error_us"]), 1.0)) for row in rows]
    values = durations((value for _, value in most + middle), CURVE_HEIGHT)
    svg = lines([("most", most), ("median", middle)], report.size_s * SECOND_US, times, values, "Bounds of times")
    columns = (
        *("device", "stream", "time_quality", "readings", "median_error_us", "max_error_us", "unbounded", "corrected"),
    )
    return f"""<section><h2>Clock quality: bounds of times</h2>
<p class="quiet">The true time of a reading lies within its time_error_us, either way. Readings whose time nothing
bounds are in no window, and not in these curves.</p>
{_legend_of_lines()}
<div class="chart">{svg if rows else "<p>No reading of this span is here.</p>"}</div>
{_rows(report.tables["clocks"], columns, cover, "clocks.csv")}
</section>"""


def _outages(report: Report, cover: Cover, times: Times) -> str:  # noqa: ARG001 - as all parts
    columns = ("kind", "gateway", "device", "stream", "from_time", "to_time", "readings", "status", "why")
    return f"""<section><h2>Outages</h2>
<p class="quiet">Readings waited for Kafka if most of a minute's readings needed more than a minute from their gateway
to Kafka. A stream is silent if no reading of it is here for a minute and for ten of its usual intervals.</p>
{_rows(report.tables["outages"], columns, cover, "outages.csv")}
</section>"""


def _files(report: Report, cover: Cover, times: Times) -> str:  # noqa: ARG001 - as all parts
    listed = "".join(
        f'<tr><td><a href="{words(f"{cover.folder}/{name}.csv")}">{name}.csv</a></td>'
        f'<td class="number">{len(table.rows):,}</td></tr>'
        for name, table in report.tables.items()
    )
    return f"""<section><h2>The numbers</h2>
<p class="quiet">All figures of this page stand in the folder {words(cover.folder)} beside it, with times in the same
zone. The tables are those of {words(cover.warehouse)}.</p>
<table><thead><tr><th>file</th><th class="number">rows</th></tr></thead><tbody>{listed}</tbody></table></section>"""


def _more(count: int, file: str) -> str:
    return f'<p class="quiet">{count:,} more stand in {words(file)}.</p>' if count > 0 else ""


def _rows(table: PlainRows, columns: Sequence[str], cover: Cover, file: str) -> str:
    """The first rows of a table. Columns without any value are left out."""
    rows = table.dicts()
    if not rows:
        return "<p>None.</p>"
    shown = [name for name in columns if any(row[name] not in (None, "", []) for row in rows)]
    kinds = {name: _kind(table, name, rows) for name in shown}
    head = "".join(f"<th{kinds[name]}>{words(name.removesuffix('_us').replace('_', ' '))}</th>" for name in shown)
    body = "".join(
        "<tr>" + "".join(_fitted(kinds[name], _cell(table, name, row[name], cover)) for name in shown) + "</tr>"
        for row in rows[:ROWS_MAX]
    )
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{whole}</div>{_more(len(rows) - ROWS_MAX, file)}'


def _fitted(kind: str, cell: str) -> str:
    """A cell, whose words are broken only if they are long."""
    is_short = not kind and max(map(len, cell.split()), default=0) <= WORD_MAX
    return f'<td class="whole">{cell}</td>' if is_short else f"<td{kind}>{cell}</td>"


def _kind(table: PlainRows, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if name in table.times:
        return ' class="time"'
    value = next((row[name] for row in rows if row[name] is not None), None)
    return ' class="number"' if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _cell(table: PlainRows, name: str, value: object, cover: Cover) -> str:
    if value is None or value == []:
        return "-"
    if name in table.times and isinstance(value, int):
        return words(_seconds(cover.time(value))).replace("T", "T<wbr>")
    if name.endswith("_error_us") and isinstance(value, int):
        return "unbounded" if value >= TIME_ERROR_UNKNOWN_US else words(duration(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return words("; ".join(map(str, value)) if isinstance(value, list) else value)
