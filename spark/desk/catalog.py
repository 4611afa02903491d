"""All streams and metrics, as they are declared and as they came, and where both disagree."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from decimal import Decimal

from gateway.host.terminal_text import counted
from spark.decode.codec_declarations import Metric, Stream, Streams
from spark.decode.codec_plain import PayloadReader
from spark.desk.log_views import ALSO, IS_READING
from spark.desk.tables import Tables

COLUMNS = {
    **dict.fromkeys(("stream", "metric", "unit", "range"), "VARCHAR"),
    **dict.fromkeys(("count", "devices"), "BIGINT"),
    **dict.fromkeys(("min", "max"), "DECIMAL(18, 6)"),
    **dict.fromkeys(("first_us", "last_us"), "BIGINT"),
    **dict.fromkeys(("codec", "declared_as", "doc", "says"), "VARCHAR"),
}
NEVER_SEEN = "declared, and never seen: no topic of its name has a record"
NOT_IN_WINDOWS = "declared, and in no window"
NOT_DECLARED = "not declared"


@dataclass(frozen=True, slots=True)
class Seen:
    """All values of a metric that are in windows."""

    count: int
    devices: int
    min: Decimal
    max: Decimal
    first_us: int
    last_us: int


@dataclass(slots=True)
class _Topic:
    """All that came in a topic."""

    metrics: dict[str, Seen] = field(default_factory=dict)
    undeclared: dict[str, int] = field(default_factory=dict)
    """Records with a number that the stream's declaration does not know, by its name."""
    rejects: dict[str, int] = field(default_factory=dict)
    """Rejects that were not retried, by their kind."""


def catalog_sql(tables: Tables, streams: Streams | None = None) -> str:
    """Return a row for each metric of each stream, as SQL. By default, streams are as the warehouse was last written.

    Figures are of the values in windows. `says` is null where declarations and data agree.
    """
    streams = streams or tables.version()[1]
    rows = [tuple(row.get(name) for name in COLUMNS) for row in _rows(_topics(tables), streams)]
    found = tables.source.values(COLUMNS, rows)
    return f"""SELECT stream, metric, unit, range, count, devices, min, max, make_timestamp(first_us) AS first_time,
        make_timestamp(last_us) AS last_time, codec, declared_as, doc, says FROM ({found})"""


def _topics(tables: Tables) -> Mapping[str, _Topic]:
    source, folder = tables.source, tables.version()[0]
    found: dict[str, _Topic] = defaultdict(_Topic)
    parts = source.table(f"{folder}/window_parts")
    figures = f"""SELECT stream, metric, CAST(sum(n) AS BIGINT), count(DISTINCT (namespace, device)),
        min(min), max(max), epoch_us(min(first_at.time)), epoch_us(max(last_at.time)) FROM ({parts}) GROUP BY ALL"""
    for stream, metric, *seen in source.rows(figures):
        found[stream].metrics[metric] = Seen(*seen)
    log = source.table(f"{folder}/log", ALSO)
    names = f"SELECT topic, unnest(undeclared) AS name FROM ({log}) WHERE reject_reason IS NULL AND NOT duplicate"
    for (topic,) in source.rows(f"SELECT DISTINCT topic FROM ({log}) WHERE {IS_READING}"):
        # Its readings may be in no window: their time is not known yet, or their windows are too old.
        found.setdefault(topic, _Topic())
    for topic, name, count in source.rows(f"SELECT topic, name, count(*) FROM ({names}) GROUP BY ALL"):
        found[topic].undeclared[name] = count
    rejects = f"SELECT topic, kind, count(*) FROM ({tables.select('quarantine')}) WHERE NOT retried GROUP BY ALL"
    for topic, kind, count in source.rows(rejects):
        found[topic].rejects[kind] = count
    return found


def _rows(topics: Mapping[str, _Topic], streams: Streams) -> Iterator[dict[str, object]]:
    declarations = PayloadReader(streams)
    of_topics = {topic: declarations.declaration(topic) for topic in topics}
    for topic, stream in sorted(of_topics.items()):
        yield from _of_topic(topic, topics[topic], stream)
    met = {stream.name for stream in of_topics.values() if stream is not None}
    for stream in sorted(streams.streams, key=lambda each: each.name):
        if stream.name not in met:
            yield {"stream": stream.name, **_declared(stream), "says": NEVER_SEEN}


def _of_topic(topic: str, came: _Topic, stream: Stream | None) -> Iterator[dict[str, object]]:
    declared = {metric.name: metric for metric in stream.metrics} if stream else {}
    about = {"stream": topic, **_declared(stream)}
    for name in sorted({*declared, *came.metrics}):
        seen, metric = came.metrics.get(name), declared.get(name)
        told = None if seen else NOT_IN_WINDOWS
        if seen and declared and metric is None:
            told = f"{NOT_DECLARED}: it came before the declaration of today"
        elif seen and metric is not None:
            told = _beyond(seen, metric)
        yield about | (asdict(seen) if seen else {"count": 0}) | _of_metric(metric) | {"metric": name, "says": told}
    for name, count in sorted(came.undeclared.items()):
        why = "its values are in no table" if declared else "none of its values fits a table"
        yield about | {"metric": name, "says": f"{NOT_DECLARED}: in {counted(count, 'record')}, and {why}"}
    if not declared and not came.metrics and not came.undeclared and not came.rejects:
        yield about | {"count": 0, "says": "its readings are in no window"}
    if stream is None and came.metrics:
        yield about | {"says": f"{NOT_DECLARED}: read by its content type"}
    if came.rejects:
        kinds = ", ".join(
            f"{count:,} {kind}" for kind, count in sorted(came.rejects.items(), key=lambda each: -each[1])
        )
        yield about | {"says": f"{counted(sum(came.rejects.values()), 'reject')}: {kinds}"}


def _declared(stream: Stream | None) -> dict[str, object]:
    return {"codec": stream.codec, "declared_as": stream.name, "doc": stream.doc or None} if stream else {}


def _of_metric(metric: Metric | None) -> dict[str, object]:
    if metric is None:
        return {}
    ends = ["" if end is None else f"{end:f}" for end in (metric.min, metric.max)]
    found: dict[str, object] = {"unit": metric.unit or None, "range": " to ".join(ends).strip() if any(ends) else None}
    return found | ({"doc": metric.doc} if metric.doc else {})


def _beyond(seen: Seen, metric: Metric) -> str | None:
    """Words for values beyond the range that is declared: an earlier declaration allowed them."""
    is_low = metric.min is not None and seen.min < metric.min
    is_high = metric.max is not None and seen.max > metric.max
    return "values are beyond the range: they came before the declaration of today" if is_low or is_high else None
