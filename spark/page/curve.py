"""The curve of one metric of one device, with all that the page marks on it and says below it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from spark.desk.asked import Asked, equal, may_hold, microseconds, text, where, within
from spark.desk.evidence import Evidence, device_parts
from spark.desk.kept_tables import KeptTables
from spark.desk.nothing import why_nothing
from spark.engine.told_error import ToldError
from spark.page.curve_sql import curve_sql
from spark.page.missing import Missing, missing_in
from spark.page.questions import Question, QuestionError, suiting_size
from spark.windows.window_sizes import DAY_S

DAY_US: Final = DAY_S * 1_000_000
POINTS_MAX: Final = 3_000
"""Most windows of a curve: more than a screen has columns."""
MISSING_MAX: Final = 200
"""Spans of missing readings that the page lists."""
HISTORY_BYTES_MAX: Final = 64_000_000
"""Bytes of the history of windows that are searched for revisions."""


class Series(NamedTuple):
    """A metric of a stream of a device."""

    namespace: str
    stream: str
    metric: str


class Point(NamedTuple):
    """One window. Times are in microseconds since 1970."""

    start_us: int
    n: int
    mean: float
    min: float
    max: float
    deviation: float | None
    status: str
    why: str | None
    revised: list[str]
    """Why it came late or changed afterwards: `late readings`, `correction`, `copy`, `replay`."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Windows in order of time. Times are in microseconds since 1970."""

    device: str
    series: list[Series]
    """All that have readings in the span."""
    chosen: Series | None
    """Whose windows these are; None if there is nothing in the span."""
    size_s: int
    since_us: int
    until_us: int
    points: list[Point]
    is_history_searched: bool
    """False if the history is too large to search: then only late readings are told of."""
    missing: list[Missing]
    missing_more: int
    """How many more are not listed."""
    nothing: str
    """Why there is no window; empty if there are some."""
    nearest_us: list[int]
    """Times of the nearest windows outside of a span that has none."""
    sql: dict[str, str]
    """A query for the windows, the readings behind them, and the gaps."""


def curve(tables: KeptTables, asked: Question) -> Curve:
    """Answer a question with a curve. Raises QuestionError, ToldError and WindowSizeError."""
    device = asked.asked.device
    if device is None:
        device = _last_heard(tables, asked.asked.site)
        # A question of its own: in the next one, evidence must be read first.
        tables.renew()
    evidence = tables.evidence(device)
    base_s = tables.window_seconds()
    limits, since_us, until_us = _with_span(tables, replace(asked.asked, device=device), evidence)
    series = _series(tables, limits, asked.size_s or base_s)
    chosen = next((each for each in series if _fits(each, asked)), None)
    if chosen is not None:
        limits = replace(limits, stream=chosen.stream, metric=chosen.metric)
        if not asked.asked.has_span:
            since_us = max(since_us, series[chosen] // (base_s * 1_000_000) * base_s * 1_000_000)
            limits = replace(limits, since_us=since_us)
    size_s = asked.size_s or suiting_size(until_us - since_us, base_s)
    if until_us - since_us > size_s * POINTS_MAX * 1_000_000:
        others = "longer ones" if size_s < DAY_S else "a shorter span"
        raise QuestionError(f"this span has more than {POINTS_MAX} windows of {size_s} s: choose {others}")
    points, is_searched = ([], True) if chosen is None else _points(tables, limits, chosen, size_s, evidence)
    found = None if points else why_nothing(tables, limits, "window_start", tables.parts_sql)
    missing = missing_in(tables, limits, evidence, chosen and chosen.namespace)
    return Curve(
        device=device,
        series=[*series],
        chosen=chosen,
        size_s=size_s,
        since_us=since_us,
        until_us=until_us,
        points=points,
        is_history_searched=is_searched,
        missing=missing[:MISSING_MAX],
        missing_more=max(0, len(missing) - MISSING_MAX),
        nothing="" if found is None else found.words(asked.zone),
        nearest_us=[] if found is None else [us for us in (found.before_us, found.after_us) if us is not None],
        sql=curve_sql(limits, chosen and chosen.namespace, size_s, base_s),
    )


def _fits(series: Series, asked: Question) -> bool:
    wanted = asked.namespace, asked.asked.stream, asked.asked.metric
    return all(each in {None, told} for each, told in zip(wanted, series, strict=True))


def _last_heard(tables: KeptTables, site: str | None) -> str:
    """The device that was heard last, of those of a site if it is named. Raises ToldError if there is none."""
    heard = device_parts(tables.source, tables.version()[0])
    devices = [] if site is None else tables.devices_at(site)
    limits = [] if site is None else [f"device IN ({', '.join(map(text, devices)) or 'NULL'})"]
    rows = tables.source.rows(
        f"""SELECT device FROM ({heard}) {where(limits)}
        GROUP BY device ORDER BY max(last_us) DESC NULLS LAST, device LIMIT 1"""
    )
    if not rows:
        raise ToldError("no device was heard yet" if site is None else f"no device of {site} was heard yet")
    return str(rows[0][0])


def _with_span(tables: KeptTables, asked: Asked, evidence: Evidence) -> tuple[Asked, int, int]:
    """Limit a question to a span: by default up to now, and without both ends to the last day with windows."""
    until_us = asked.until_us
    if until_us is None:
        heard = [last_us for streams in evidence.heard.values() for last_us in streams.values()]
        base_us = tables.window_seconds() * 1_000_000
        last_us = max(heard, default=0) if asked.since_us is None else microseconds(datetime.now(UTC))
        # Up to the end of a window.
        until_us = max(last_us // base_us + 1, (asked.since_us or 0) // base_us + 1) * base_us
    since_us = until_us - DAY_US if asked.since_us is None else asked.since_us
    return replace(asked, since_us=since_us, until_us=until_us), since_us, until_us


def _series(tables: KeptTables, limits: Asked, size_s: int) -> dict[Series, int]:
    """All series of the device that have windows in the span, with the first of these."""
    parts = tables.parts_sql(replace(limits, stream=None, metric=None), size_s)
    query = f"""SELECT namespace, stream, metric, epoch_us(min(window_start)) FROM ({parts})
        {where(within("window_start", limits))} GROUP BY ALL ORDER BY ALL"""
    return {Series(*key): first_us for *key, first_us in tables.source.rows(query)}


def _points(
    tables: KeptTables, limits: Asked, chosen: Series, size_s: int, evidence: Evidence
) -> tuple[list[Point], bool]:
    rows = tables.source.rows(
        f"""SELECT epoch_us(window_start), n, CAST(mean AS DOUBLE), CAST(min AS DOUBLE), CAST(max AS DOUBLE), deviation,
            status, why, late FROM ({tables.windows_sql(limits, size_s, evidence)})
        WHERE namespace = {text(chosen.namespace)} ORDER BY window_start"""
    )
    causes = _causes(tables, limits, chosen, size_s)
    return [
        Point._make([*figures, ["late readings"] * (late > 0) + (causes or {}).get(figures[0], [])])
        for *figures, late in rows
    ], causes is not None


def _causes(tables: KeptTables, limits: Asked, chosen: Series, size_s: int) -> Mapping[int, list[str]] | None:
    """By which causes windows changed as a whole; None if the history is too large to search."""
    path = f"{tables.warehouse}/window_changes"
    files = f"""{may_hold("device", str(limits.device))}
        AND epoch_us("max.window_start") >= {limits.since_us} - 1000
        AND epoch_us("min.window_start") < {limits.until_us}"""
    size = tables.source.statistics(path, f"sum(size_bytes) FILTER (WHERE coalesce({files}, TRUE))")
    if (size or 0) > HISTORY_BYTES_MAX:
        return None
    conditions = [
        *equal(limits, "device", "stream", "metric"),
        *within("window_start", limits),
        f"namespace = {text(chosen.namespace)}",
        "cause <> 'readings'",
    ]
    found = defaultdict(list)
    start = f"epoch_us(window_start) // {size_s * 1_000_000} * {size_s * 1_000_000}"
    changes = tables.source.table(path, files=files)
    query = f"SELECT DISTINCT {start}, cause FROM ({changes}) {where(conditions)} ORDER BY ALL"
    for start_us, cause in tables.source.rows(query):
        found[start_us].append(cause)
    return found
