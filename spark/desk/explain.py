"""Explains one window: its readings and their places in Kafka, its history, what is missing, and who is late."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.host.terminal_text import escaped
from gateway.record_contract import READING_TYPE
from spark.desk.asked import Asked, equal, may_hold, text, where, within
from spark.desk.evidence import Device, Evidence
from spark.desk.log_views import CUT_US, still_rejected
from spark.desk.plain_rows import plain_rows
from spark.engine.told_error import ToldError
from spark.finality.gateway_figures import GatewayFigures
from spark.log.verdicts import IMPLAUSIBLE_DATE
from spark.windows.window_sizes import chosen_size

if TYPE_CHECKING:
    from spark.desk.tables import Tables

READINGS_MAX = 1_000
"""Readings of a window that are listed, unless a caller wants more."""
NOT_FIGURES = ("values", "sum_of_squares", "ordinal", "window_date")
"""Columns of `windows` that an explanation leaves out: readings have the values."""
ADDED = "readings"
"""Cause of a row of `window_changes` that has what a batch added. All others have what a window held then."""


class Series(NamedTuple):
    """One metric of one stream of a device."""

    namespace: str
    device: str
    stream: str
    metric: str


class NoWindowError(ToldError):
    """Nothing is known of the series that is asked for, at any time."""


class SeveralSeriesError(ToldError):
    """The question fits several series. The message names them."""

    def __init__(self, message: str, series: Sequence[Series]) -> None:
        super().__init__(message)
        self.series = series


@dataclass(frozen=True, slots=True)
class WindowReading:
    """A value behind the window: columns of `readings`. Times are in microseconds since 1970."""

    event_time: int
    value: Decimal
    time_error_us: int
    time_quality: str
    received_time: int | None
    kafka_timestamp: int
    device_boot: str | None
    device_sequence: int | None
    doubt: str | None
    gateway: str
    topic: str
    partition: int
    offset: int
    ce_id: str
    sent_event_time: int
    correction_version: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """Part of a Kafka partition that holds readings of the window."""

    gateway: str
    topic: str
    partition: int
    first_offset: int
    last_offset: int
    readings: int
    last_kafka_timestamp: int
    """When Kafka took in the last of them."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A row of `window_changes`, and what the window held after it."""

    window_start: int
    at: int
    cause: str
    version: int
    n: int
    min: Decimal | None
    max: Decimal | None
    sum: Decimal | None
    late: int
    n_then: int | None
    """Values in the window after this change; None if older changes are no longer kept."""
    sum_then: Decimal | None


@dataclass(frozen=True, slots=True)
class Missing:
    """Readings that are not here, some of which may belong to the window: a row of `gaps` or `losses`."""

    after_time: int | None
    before_time: int | None
    stream: str | None
    device_boot: str | None
    first: int | None
    last: int | None
    """Numbers; None for a loss without numbers."""
    count: int | None
    """None if nobody can count them."""
    explained: bool
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class Standing:
    """A gateway that ever served the device."""

    gateway: str
    readings: int
    """Values of the window that came through it."""
    waits: list[str]
    """Why it may still bring readings of the window's time; empty if it has brought all."""
    told: GatewayFigures | None
    """Its last heartbeat that counts, as in `gateways`; None if none was read."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known of one window. Times are in microseconds since 1970."""

    series: Series
    from_us: int
    until_us: int
    figures: Mapping[str, Any] | None
    """The row of `windows`, with times in microseconds and without all values. None if there is no window."""
    readings: list[WindowReading]
    """The first readings by event time: at most as many as were asked for."""
    readings_count: int
    """All readings of the window that are still in `log`."""
    unbounded: int
    """Further readings of about that time that are in no window, because nothing bounds their time."""
    rejected: int
    """Records of that time and stream that are in the quarantine."""
    places: list[Place]
    revisions: list[Revision]
    missing: list[Missing]
    gateways: list[Standing]
    nearest_us: tuple[int | None, int | None]
    """Beginnings of the last window before and of the first one after it, if there is no window."""

    @property
    def status(self) -> str | None:
        return None if self.figures is None else self.figures["status"]

    @property
    def basis(self) -> str | None:
        return None if self.figures is None else self.figures["basis"]

    @property
    def why(self) -> str | None:
        return None if self.figures is None else self.figures["why"]


def explain(  # noqa: PLR0913 - the limits of a question
    tables: "Tables",
    device: str,
    at_us: int,
    *,
    metric: str | None = None,
    stream: str | None = None,
    namespace: str | None = None,
    size_s: int | None = None,
    readings_max: int = READINGS_MAX,
    evidence: Evidence | None = None,
) -> Explanation:
    """Explain the window of a device that holds the time `at_us`.

    `stream`, `metric` and `namespace` are needed only if the device has several. `evidence` is of the device or of all
    devices, and is read if it is not given. Raises NoWindowError, SeveralSeriesError and WindowSizeError.
    """
    # First, so that the tables of single records hold every record that it names.
    known = tables.evidence(device) if evidence is None else evidence
    table_s = tables.window_seconds()
    size_us = chosen_size(size_s, table_s) * 1_000_000
    from_us = at_us - at_us % size_us
    asked = Asked(device, None, stream, metric, from_us, from_us + size_us)
    windows = f"SELECT * FROM ({tables.windows_sql(asked, size_s, known)}) {where(_in(namespace))}"
    rows = plain_rows(tables.source, windows).dicts()
    if rows:
        series = _only({_series(row): None for row in rows})
        nearest: tuple[int | None, int | None] = (None, None)
    else:
        series, nearest = _elsewhere(tables, asked, namespace)
    asked = replace(asked, stream=series.stream, metric=series.metric)
    figures = {name: value for name, value in rows[0].items() if name not in NOT_FIGURES} if rows else None
    readings, counts, unbounded = _readings(tables, asked, series.namespace, readings_max)
    return Explanation(
        series=series,
        from_us=from_us,
        until_us=from_us + size_us,
        figures=figures,
        readings=readings,
        readings_count=sum(place.readings for place in counts),
        unbounded=unbounded,
        rejected=_rejected(tables, asked, series.namespace),
        places=counts,
        revisions=_revisions(tables, asked, series, figures),
        missing=_missing(tables, known, asked, series.namespace),
        gateways=_standings(known, series, asked, counts),
        nearest_us=nearest,
    )


def _series(row: Mapping[str, Any]) -> Series:
    return Series(*(row[name] for name in Series._fields))


def _only(found: Mapping[Series, object]) -> Series:
    """The only series. Raises SeveralSeriesError."""
    if len(found) == 1:
        (series,) = found
        return series
    several = sorted(found)
    varying = [name for place, name in enumerate(Series._fields) if len({each[place] for each in several}) > 1]
    names = "; ".join(", ".join(f"{name} {escaped(getattr(each, name))}" for name in varying) for each in several)
    raise SeveralSeriesError(
        f"device {escaped(several[0].device)} has several such windows, so say which: {names}", several
    )


def _elsewhere(tables: "Tables", asked: Asked, namespace: str | None) -> tuple[Series, tuple[int | None, int | None]]:
    """The only series that the question fits at any time, with its nearest windows. Raises NoWindowError."""
    anytime = tables.parts_sql(replace(asked, since_us=None, until_us=None))
    rows = tables.source.rows(f"""SELECT {", ".join(Series._fields)},
            epoch_us(max(window_start) FILTER (window_start < make_timestamp({asked.since_us}))),
            epoch_us(min(window_start) FILTER (window_start >= make_timestamp({asked.until_us})))
        FROM ({anytime}) {where(_in(namespace))} GROUP BY ALL""")
    found = {Series(*row[:4]): (row[4], row[5]) for row in rows}
    if not found:
        what = f"window of {escaped(asked.metric)}" if asked.metric else "window"
        raise NoWindowError(f"device {escaped(asked.device or '')} has no {what} at any time")
    series = _only(found)
    return series, found[series]


def _in(namespace: str | None) -> list[str]:
    return [] if namespace is None else [f"namespace = {text(namespace)}"]


def _readings(
    tables: "Tables", asked: Asked, namespace: str, readings_max: int
) -> tuple[list[WindowReading], list[Place], int]:
    """The first readings of a window, where all of them are in Kafka, and how many more have no bounded time."""
    db = tables.source.db
    db.execute(f"""CREATE OR REPLACE TEMP TABLE explained AS
        SELECT *, event_date <> DATE '{IMPLAUSIBLE_DATE}' AS is_in FROM ({tables.readings_sql(asked)})
        {where(_in(namespace))}""")
    columns = ", ".join(
        f'epoch_us("{name}")' if name in TIMES else f'"{name}"' for name in WindowReading.__dataclass_fields__
    )
    rows = tables.source.rows(f"""SELECT {columns} FROM explained WHERE is_in
        ORDER BY event_time, buffer, lane, lane_sequence LIMIT {readings_max}""")
    places = tables.source.rows("""SELECT gateway, topic, partition, min("offset"), max("offset"), count(*),
            epoch_us(max(kafka_timestamp)) FROM explained WHERE is_in GROUP BY ALL ORDER BY ALL""")
    ((unbounded,),) = tables.source.rows("SELECT count(*) FROM explained WHERE NOT is_in")
    db.execute("DROP TABLE explained")
    return [WindowReading(*row) for row in rows], [Place(*row) for row in places], unbounded


def _rejected(tables: "Tables", asked: Asked, namespace: str) -> int:
    limits = [*_in(namespace), f"ce_type = '{READING_TYPE}'", *equal(asked, "device", "stream")]
    rejects = still_rejected(tables.source, tables.version()[0])
    ((count,),) = tables.source.rows(f"""SELECT count(*) FROM ({rejects})
        {where([*limits, *within("event_time", asked)])}""")
    return int(count)


TIMES = frozenset({"event_time", "received_time", "kafka_timestamp", "sent_event_time"})
"""Columns of `WindowReading` that are times."""


def changes_sql(tables: "Tables", asked: Asked) -> str:
    """Return the rows of `window_changes` of the windows that begin within these limits, as SQL.

    Of a site, these are the rows of all devices that are or were there.
    """
    files = []
    if asked.device is not None:
        files.append(may_hold("device", asked.device))
    if asked.since_us is not None:
        files.append(f'epoch_us("max.window_start") >= {asked.since_us - CUT_US}')
    if asked.until_us is not None:
        files.append(f'epoch_us("min.window_start") < {asked.until_us}')
    table = tables.source.table(f"{tables.warehouse}/window_changes", files=" AND ".join(files) or None)
    rows = [*equal(asked, "device", "stream", "metric"), *within("window_start", asked)]
    if asked.site is not None:
        rows.append(f"device IN ({', '.join(map(text, tables.devices_at(asked.site))) or 'NULL'})")
    return f"SELECT * FROM ({table}) {where(rows)}"


def _revisions(tables: "Tables", asked: Asked, series: Series, figures: Mapping[str, Any] | None) -> list[Revision]:
    """The history of all windows of the table that the window holds."""
    rows = tables.source.rows(f"""SELECT epoch_us(window_start), epoch_us("at"), cause, version, n, min, max, sum, late
        FROM ({changes_sql(tables, asked)}) {where(_in(series.namespace))}
        ORDER BY version, ordinal, cause, window_start""")
    held: dict[int, tuple[int, Decimal]] = {}
    revisions = []
    for start_us, at_us, cause, version, n, least, most, total, late in rows:
        count, value = held.get(start_us, (0, Decimal(0))) if cause == ADDED else (0, Decimal(0))
        held[start_us] = count + n, value + (total or 0)
        then = [sum(each) for each in zip(*held.values(), strict=True)]
        revisions.append(Revision(start_us, at_us, cause, version, n, least, most, total, late, *then))
    now = (0, 0) if figures is None else (figures["n"], figures["sum"])
    if revisions and (revisions[-1].n_then, revisions[-1].sum_then) != now:
        return [replace(each, n_then=None, sum_then=None) for each in revisions]
    return revisions


def _missing(tables: "Tables", evidence: Evidence, asked: Asked, namespace: str) -> list[Missing]:
    columns = ("stream", "device_boot", "first", "last", "count", "explained", "reasons")
    rows = tables.source.rows(f"""SELECT epoch_us(after_time), epoch_us(before_time), {", ".join(columns)}
        FROM ({tables.missing_sql(asked, evidence)}) {where(_in(namespace))}
        ORDER BY after_time NULLS FIRST, before_time, first""")
    return [Missing(*row) for row in rows]


def _standings(evidence: Evidence, series: Series, asked: Asked, places: Sequence[Place]) -> list[Standing]:
    """What each gateway of the device said last, and whether it may still bring readings of the window's time."""
    found = []
    for gateway in sorted(evidence.services.get(Device(series.namespace, series.device), ())):
        readings = sum(place.readings for place in places if place.gateway == gateway)
        waits = evidence.waits(series.namespace, gateway, asked)
        found.append(Standing(gateway, readings, waits, evidence.told(series.namespace, gateway)))
    return found
